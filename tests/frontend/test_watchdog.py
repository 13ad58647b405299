"""The watchdog of the worker: it finds what makes no progress, and nothing else."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.frontend import launch
from cairn.frontend.service import Service
from cairn.frontend.worker_connection import Patience, Watchdog
from cairn.kv.pool.cache import Cache
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.types.errors import GenerationFailed
from cairn.types.request import Request, SamplingParams
from cairn.types.step import Row, RowResult
from cairn.worker import wire
from cairn.worker.worker import BEAT_SECONDS, WorkerLoop
from tests.api.sockets import site
from tests.laws.simulator import VirtualClock
from tests.service.tiny import collect, config, request, until

FAULTY = Path(__file__).parents[1] / "service" / "faulty_worker.py"
KILLER = 13


class Load:
    """Ten minutes of an overloaded server on a virtual clock.

    The worker's real loop and scheduler run over an engine whose steps take between nothing and minutes.
    """

    SECONDS = 600.0
    MANY = 40

    def __init__(self, seed: int, patience: Patience) -> None:
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self.began = self.clock.time
        self.watchdog, self.patience = Watchdog(self.clock), patience
        self.cpu, self.beat_at = 0.0, self.clock.time
        self.number = self.alive = self.ended = 0
        self.longest = 0.0
        self.alarms: list[str] = []
        load = self

        class Engine(FakeEngine):
            def prefill(self, rows: Sequence[Row]) -> list[RowResult]:
                load.compute(rows)
                return super().prefill(rows)

        self.engine = Engine(fake_spec(24, 400, (0,)), blocks=120, block_tokens=16)
        cache = Cache(self.engine.info)
        self.scheduler = Scheduler(cache, Limits(max_running=16), self.clock)
        loaded: Any = SimpleNamespace(
            engine=self.engine,
            scheduler=self.scheduler,
            cache=cache,
            tiers=None,
            grammars=SimpleNamespace(pending=False),
            clock=self.clock,
        )
        self.loop = WorkerLoop(self, loaded, SimpleNamespace(busy=True))  # type: ignore[arg-type]

    def look(self) -> None:
        self.alarms += [
            why for why in (self.watchdog.overdue(self.patience), self.watchdog.stalled(self.patience)) if why
        ]

    def tick(self, seconds: float, share: float) -> None:
        """Advance the clock, with heartbeats, while the process gets this share of a CPU."""
        end = self.clock.time + seconds
        while self.clock.time < end:
            moved = min(end - self.clock.time, 0.25)
            self.clock.time += moved
            self.cpu += moved * share
            if self.clock.time - self.beat_at >= BEAT_SECONDS:
                # Other processes have the CPU
                self.beat_at = self.clock.time + self.chance.choice((0.0, 0.0, 0.0, 2.0))
                self.watchdog.heard()
                self.watchdog.beat(self.cpu)
            self.look()

    def compute(self, rows: Sequence[Row]) -> None:
        seconds = self.chance.choice((0.001, 0.005, 0.02, 0.1, 1.0)) * self.chance.uniform(0.5, 2)
        if self.chance.random() < 0.004:
            seconds = self.chance.uniform(20, 90)  # a very long prompt on a very slow machine
        self.longest = max(self.longest, seconds)
        self.tick(seconds, self.chance.choice((1.0, 0.5, 0.05)))

    def receive(self, wait: float | None) -> list[wire.ToWorker]:
        if self.clock.time - self.began > self.SECONDS:
            raise EOFError
        if wait:
            self.tick(wait, 0.01)
        results: list[wire.ToWorker] = []
        while self.alive < self.MANY:
            self.number += 1
            self.alive += 1
            size = self.chance.choice((3, 20, 120, 300))
            prompt = tuple(self.chance.randrange(1, 23) for _ in range(size))
            sampling = SamplingParams(max_tokens=self.chance.randrange(1, 40), temperature=0.0)
            results.append(wire.Add(Request(id=self.number, prompt=prompt, sampling=sampling)))
        return results

    def send(self, message: object) -> None:
        assert isinstance(message, wire.StepOutputs)
        ended = sum(output.finish is not None for output in message.outputs)
        self.alive -= ended
        self.ended += ended
        self.watchdog.heard()
        self.watchdog.stepped(message.stats)
        self.look()

    def run(self) -> None:
        with pytest.raises(EOFError):
            self.loop.run()


@pytest.mark.parametrize("seed", range(2))
def test_ten_minutes_of_full_load_raise_no_alarm(seed: int) -> None:
    load = Load(seed, Patience())
    load.run()
    assert load.alarms == [] and load.longest > 20 and load.ended > 50


def test_a_scheduler_that_forgets_a_waiting_request_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same load; after five minutes the scheduler returns no more work."""
    load = Load(0, Patience())
    plan = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self: plan(self) if load.clock.time - load.began < 300 else None)
    load.run()
    assert "brought none of 40 requests further for 15 s" in load.alarms[0] and load.alarms[0].startswith("the worker")
    assert any(alarm == "steps brought none of 40 requests further for 120 s" for alarm in load.alarms)


def test_every_kind_of_stall_is_reported() -> None:
    clock, patience = VirtualClock(), Patience(silence=6, notice=15, stall=120, step=1800)

    def fresh() -> Watchdog:
        watchdog = Watchdog(clock)
        watchdog.heard()
        watchdog.stepped(wire.Stats(running=2, progress=1))
        return watchdog

    def beating(watchdog: Watchdog, seconds: int, share: float, step: wire.Stats | None = None) -> None:
        for _ in range(seconds):
            clock.time += 1
            watchdog.heard()
            watchdog.beat(cpu=share * clock.time)
            if step is not None:
                watchdog.stepped(step)

    silent = fresh()
    clock.time += 7
    assert silent.overdue(patience) == "no sign of life for 6 s"
    silent.rest()
    assert not silent.overdue(patience)

    still = fresh()
    beating(still, 14, 0.0001)
    assert not still.stalled(patience)
    beating(still, 2, 0.0001)
    assert still.stalled(patience) == "a step of the worker has stood still for 16 s" and not still.overdue(patience)
    beating(still, 105, 0.0001)
    assert still.overdue(patience) == "a step stood still for 120 s" and still.seconds == 121

    computing = fresh()
    beating(computing, 1799, 0.5)
    assert not computing.stalled(patience) and not computing.overdue(patience)
    beating(computing, 2, 0.5)
    assert computing.overdue(patience) == "a step took more than 1800 s"

    fruitless = fresh()
    beating(fruitless, 16, 0.5, wire.Stats(running=2, progress=1))
    assert "brought none of 2 requests further for 16 s" in fruitless.stalled(patience)
    beating(fruitless, 1, 0.5, wire.Stats(running=2, progress=2))
    assert not fruitless.stalled(patience)
    beating(fruitless, 500, 0.5, wire.Stats(running=0, progress=2))  # its work is for no request: KV, a grammar
    assert not fruitless.stalled(patience) and not fruitless.overdue(patience)


async def test_a_wedged_worker_is_reported_and_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop turns, heartbeats arrive, it uses some CPU, and no request makes progress."""
    monkeypatch.setattr(launch, "WORKER", (sys.executable, str(FAULTY), "wedges"))
    patience = Patience(silence=30, notice=0.6, stall=2.2, backoff=(0.0,))
    service = await Service.start(config(folder), patience=patience)
    try:
        async with site(service) as at, at.http() as http:
            assert (await http.get("/health")).json()["status"] == "ok"
            stuck = service.generate(request(service, (KILLER, 1, 2), 5))
            await until(lambda: service.stalled)
            health = await http.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "stalled"
            (reason,) = health.json()["reasons"]
            assert "brought none of 1 requests further" in reason
            assert (await http.get("/health/ready")).status_code == 503
            still = [line for line in (await http.get("/metrics")).text.splitlines() if "worker_still_seconds{" in line]
            assert float(still[0].split()[-1]) > 0.5
            with pytest.raises(GenerationFailed, match="each time"):
                await collect(stuck)
            assert (await collect(service.generate(request(service, "good", 20)))).done is not None
            await until(lambda: not service.unready())
            assert (await http.get("/health")).json()["status"] == "ok"
            assert service.stats().worker_restarts >= 2
    finally:
        await service.close()
