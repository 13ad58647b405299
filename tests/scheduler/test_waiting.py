"""The time that clients wait for their first token, on the real scheduler and a machine with given step times.

The costs are those of SmolLM2 (135M, Q4_1) on two quiet cores; `slow` times as much stands for a busy machine. Clients
ask again as soon as they have their answer, as in `benchmarks/percentiles.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kv.pool.cache import Cache
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.types.request import Request, SamplingParams
from cairn.types.step import RowResult

STEP, ROW, TOKEN = 0.004, 0.00075, 0.0004
"""Seconds of a step, of each decoding row, and of each prompt token."""
LIMIT, ANSWER, VOCAB = 0.25, 48, 60_000


@dataclass
class Clock:
    at: float = 0.0

    def now(self) -> float:
        return self.at


@dataclass
class Waits:
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def served(clients: int, slow: float, seconds: float) -> Waits:
    """Serve so many clients for so many seconds of the simulated machine's time."""
    chance, clock, measured = random.Random(clients), Clock(), Waits()
    cache = Cache(FakeEngine(fake_spec(vocab=VOCAB, context=8192), blocks=6000).info)
    scheduler = Scheduler(cache, Limits(step_seconds=LIMIT), clock)
    began, last, owner = dict[int, float](), dict[int, float](), dict[int, int]()

    def ask(client: int) -> None:
        id = len(began)
        prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.choice((75, 75, 150, 380))))
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0)
        scheduler.add(Request(id=id, prompt=prompt, share=str(client), sampling=sampling))
        began[id], owner[id] = clock.at, client

    for client in range(clients):
        ask(client)
    while clock.at < seconds:
        plan = scheduler.plan()
        assert plan is not None
        sizes = [row.end - row.start for row in plan.rows]
        took = slow * (STEP + ROW * sizes.count(1) + TOKEN * sum(size for size in sizes if size > 1))
        clock.at += took
        results = [RowResult(token=7 if row.samples else None) for row in plan.rows]
        for output in scheduler.commit(plan, results, took):
            if output.tokens:
                waits = measured.between if output.id in last else measured.first
                waits.append(clock.at - last.get(output.id, began[output.id]))
                last[output.id] = clock.at
                measured.tokens += len(output.tokens)
            if output.finish is not None:
                ask(owner[output.id])
    measured.seconds = clock.at
    return measured


@pytest.mark.parametrize(("clients", "most"), [(1, 0.2), (8, 0.5), (32, 2.0)])
def test_nineteen_of_twenty_first_tokens_come_soon(clients: int, most: float) -> None:
    waits = served(clients, 1.0, 30.0)
    assert np.percentile(waits.first, 95) < most
    assert max(waits.between) < LIMIT


def test_on_a_slow_machine_streams_keep_their_limit_and_prompts_get_what_it_leaves() -> None:
    """All clients together bound the sum of both: an answer takes as long as its turn among so many."""
    waits = served(32, 4.0, 120.0)
    assert max(waits.between) < LIMIT
    turn = 32 * ANSWER / (waits.tokens / waits.seconds)
    assert np.median(waits.first) + (ANSWER - 1) * np.median(waits.between) == pytest.approx(turn, rel=0.15)
    assert np.median(waits.first) < 0.55 * turn
