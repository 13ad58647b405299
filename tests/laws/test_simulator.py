from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.laws import simulator, streams


def test_every_schedule_keeps_the_laws(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 2, 6, 7, 8, 9, 11, 12, 13, 14, 15, 17, 32, 33, 34, 36, 38."""
    total = simulator.run_many(0, 20_000 if prove else 600)
    figure(
        "scheduler simulator",
        f"{total['schedules']:,} schedules clean ({total['steps']:,} steps, {total['finished']:,} requests, "
        f"{total['preemptions']:,} preemptions, {total['beside']:,} overtaken beside a long prompt, "
        f"{total['slowed']:,} steps short of time, {total['forced']:,} tokens forced, "
        f"{total['loaded']:,} tokens loaded)",
    )
    share = 2 if prove else 1
    # A simulator that never gets into trouble proves nothing.
    assert total["preemptions"] > 50 * share
    assert total["beside"] > 10 * share
    assert total["slowed"] > 50 * share
    assert total["forced"] > 150 * share
    assert total["hits"] > 5_000 * share
    assert total["within"] > 300 * share
    assert total["loaded"] > 1_000 * share
    assert total["finished"] > 4 * total["schedules"]


def test_every_stream_is_the_one_right_answer(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 2, 19, 22."""
    count = 100_000 if prove else 5_000
    tokens = streams.run_many(0, count)
    figure("stream simulator", f"{count:,} streams right ({tokens:,} tokens)")
    assert tokens > 8 * count


@pytest.mark.parametrize("seed", simulator.AGAIN)
def test_a_schedule_that_once_broke_a_law_keeps_it(seed: int) -> None:
    simulator.run(seed)


def test_a_schedule_is_the_same_again() -> None:
    first, second = simulator.run(12), simulator.run(12)
    assert (first.steps, first.finished, first.clock.time) == (second.steps, second.finished, second.clock.time)


def test_a_broken_law_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.FakeEngine, "oracle", lambda *_: [0, 0, 0])
    with pytest.raises(simulator.Broken, match=r"seed \d+, step \d+"):
        simulator.run_many(0, 20)
