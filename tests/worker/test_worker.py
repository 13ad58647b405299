"""The worker's loop with fakes all around it."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.types.errors import DeviceError, DeviceMemoryError
from cairn.types.stats import KvStats, SchedulerStats, Swept
from cairn.worker import wire, worker
from cairn.worker.worker import BEAT_SECONDS, WorkerLoop


class World:
    """A clock, a channel on which the front asks one thing, and a store whose disk takes three heartbeats for it."""

    def __init__(self) -> None:
        self.at = 100.0
        self.waits: list[float | None] = []
        self.busy: list[bool] = []
        self.sent: list[object] = []
        self.swept: Callable[[Swept | None], None] | None = None
        self.pulse = SimpleNamespace(busy=True)

    def now(self) -> float:
        return self.at

    def receive(self, wait: float | None) -> list[wire.ToWorker]:
        self.waits.append(wait)
        self.busy.append(self.pulse.busy)
        if len(self.waits) == 1:
            return [wire.KVQuery(7, "scrub")]
        if wait is None:
            raise EOFError
        self.at += wait
        if len(self.waits) == 5 and self.swept is not None:
            self.swept(Swept(checked=3))
        return []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def sweep(self, job: object, done: Callable[[Swept | None], None]) -> bool:
        self.swept = done
        return True


def test_heartbeats_continue_while_a_reply_is_pending() -> None:
    """Known failure 16: otherwise a worker that waits for a slow disk looks stalled."""
    world = World()
    figures = SchedulerStats(
        running=0, waiting=0, waiting_tokens=0, groups=(), prefix_queries=0, prefix_hits=0, preemptions=0
    )
    scheduler = SimpleNamespace(plan=lambda: None, idle=True, stats=lambda: figures)
    tiers = SimpleNamespace(
        sweep=world.sweep,
        turn=lambda idle: False,
        news=lambda: None,
        stats=KvStats,
        loading=False,
        write_behind=SimpleNamespace(chunks=0, due=math.inf),
    )
    grammars = SimpleNamespace(pending=False)
    loaded: Any = SimpleNamespace(
        engine=None,
        scheduler=scheduler,
        cache=SimpleNamespace(leading_pool=None, info=SimpleNamespace(block_tokens=16)),
        tiers=tiers,
        grammars=grammars,
        clock=world,
    )
    channel: Any = world
    pulse: Any = world.pulse
    with pytest.raises(EOFError):
        WorkerLoop(channel, loaded, pulse).run()
    assert world.waits == [None, *4 * [BEAT_SECONDS], None]
    assert world.busy == [False, *4 * [True], False]
    kinds = [type(message) for message in world.sent]
    assert kinds == [*4 * [wire.StepOutputs], wire.KVAnswer]


@pytest.mark.parametrize("memory", [False, True])
def test_after_a_failure_of_the_device_nothing_more_is_copied_out_of_it(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be stored as right and be found by the next worker."""
    closed: list[bool] = []
    error = DeviceMemoryError("short") if memory else DeviceError("the device failed")

    def run(loop: WorkerLoop) -> None:
        raise error

    def close(seconds: float, *, intact: bool) -> None:
        closed.append(intact)

    rest = SimpleNamespace(close=lambda: None)
    cache = SimpleNamespace(leading_pool=None, info=SimpleNamespace(block_tokens=16))
    loaded: Any = SimpleNamespace(engine=rest, scheduler=None, cache=cache, tiers=SimpleNamespace(close=close))
    loaded.grammars, loaded.guesser, loaded.clock, loaded.ready = rest, None, None, wire.Beat(cpu=0.0)
    monkeypatch.setattr(WorkerLoop, "run", run)
    monkeypatch.setattr(worker, "load", lambda channel, first: loaded)
    ours, theirs = socket.socketpair()
    with contextlib.closing(wire.Channel(ours)) as front:
        front.send(wire.LoadModel(Config(), ""))
        with pytest.raises(DeviceError):
            worker.serve(theirs)
    assert closed == [memory]
