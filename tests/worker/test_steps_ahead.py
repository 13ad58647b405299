"""The worker's loop over an engine that computes a step while the next one is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kernels.stream import ThreadStream
from cairn.kv.pool.cache import Cache
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.system.posix import SystemClock
from cairn.types.outputs import FinishReason
from cairn.types.request import Request, SamplingParams
from cairn.types.step import EngineCall, Row, RowResult
from cairn.worker import wire
from cairn.worker.worker import WorkerLoop


class Overlapping:
    """The fake engine on a thread of its own, like a device: tables are copied when a step is submitted."""

    def __init__(self) -> None:
        self.inner = FakeEngine(fake_spec(64), blocks=200, block_tokens=4)
        self.info = replace(self.inner.info, overlaps=True)
        self.stream = ThreadStream("test")
        self.waiting = self.most = 0
        """Submitted steps whose results were not read yet: their number, and its maximum."""

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        copies = [msgspec.structs.replace(row, tables=tuple(list(table) for table in row.tables)) for row in rows]
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        call = self.stream.submit(lambda: self.inner.prefill(copies).wait())

        def wait() -> list[RowResult]:
            self.waiting -= 1
            return call.wait()

        asked: Any = SimpleNamespace(done=False, wait=wait)
        return asked  # type: ignore[no-any-return]

    decode = prefill

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        return self.stream.submit(lambda: self.inner.copy_blocks(group, pairs).wait())


class Front:
    """A front that asks for two answers, later for a third, drops one, and leaves."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests, self.asked = requests, 0
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.times = 0

    def receive(self, wait: float | None) -> list[wire.ToWorker]:
        self.times += 1
        if self.times == 1:
            return [wire.Add(request) for request in self.requests[:2]]
        if self.times == 6:
            return [wire.Add(self.requests[2])]
        if self.times == 12:
            return [wire.Drop(self.requests[1].id, FinishReason.CANCELLED)]
        if wait is None:
            raise EOFError
        return []

    def send(self, message: Any) -> None:
        assert not isinstance(message, wire.Refused), message
        if isinstance(message, wire.StepOutputs):
            for id, token in zip(message.ids, message.tokens, strict=True):
                self.tokens.setdefault(id, []).append(token)
            for output in message.outputs:
                self.tokens.setdefault(output.id, []).extend(output.tokens)
                if output.finish is not None:
                    self.ends[output.id] = output.finish


def test_answers_are_right_and_steps_are_submitted_ahead() -> None:
    engine, clock = Overlapping(), SystemClock()
    prompts = (tuple(range(20)), tuple(range(5, 30)), tuple(range(9)))
    requests = [
        Request(id=id, prompt=prompt, sampling=SamplingParams(max_tokens=25, temperature=0.5 * (id - 1), seed=id))
        for id, prompt in enumerate(prompts, 1)
    ]
    front, cache = Front(requests), Cache(engine.info)
    scheduler = Scheduler(cache, Limits(step_tokens=64), clock)
    loaded: Any = SimpleNamespace(
        engine=engine, scheduler=scheduler, cache=cache, tiers=None,
        grammars=SimpleNamespace(pending=False, drop=lambda id: None),
        clock=clock, guesser=None,
    )  # fmt: skip
    channel: Any = front
    pulse: Any = SimpleNamespace(busy=True)
    loop = WorkerLoop(channel, loaded, pulse)
    with pytest.raises(EOFError):
        loop.run()
    engine.stream.close()
    for number in (0, 2):
        request = requests[number]
        assert front.tokens[request.id] == engine.inner.oracle(request.prompt, request.sampling, 25)
        assert front.ends[request.id] is FinishReason.LENGTH
    right = engine.inner.oracle(requests[1].prompt, requests[1].sampling, 25)
    assert front.tokens[2] == right[: len(front.tokens[2])] and 2 <= len(front.tokens[2]) < 25
    assert engine.most == 2, "no step was submitted while another one ran"
    assert scheduler.idle and all(use.held == 0 for use in cache.use())
