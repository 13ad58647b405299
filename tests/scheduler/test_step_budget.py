"""The share of a step that prompts get, by tokens and by time: pure arithmetic, no cache and no engine."""

from __future__ import annotations

import math

import pytest

from cairn.scheduler.step_budget import PrefillPace, StepBudget


def split(budget: StepBudget, prompts: tuple[int, ...], most: int = 1 << 20) -> list[int]:
    """Return each prompt's share of a step with blocks for at most so many tokens."""
    counts = []
    for missing in prompts:
        if budget.kept and not budget.short(missing):
            counts.append(0)
            continue
        share = budget.offer(missing)
        count = min(share.tokens, most)
        if count:
            budget.take(share, count)
        counts.append(count)
    return counts


@pytest.mark.parametrize(
    ("tokens", "time", "prompts", "counts"),
    [
        (512, math.inf, (100, 100, 100), [100, 28, 0]),
        (512, math.inf, (20, 30, 40, 50), [20, 30, 40, 38]),
        (512, math.inf, (256, 20), [256, 0]),
        (512, math.inf, (257, 20), [128, 20]),
        (512, math.inf, (600, 200, 200), [128, 200, 0]),
        (512, math.inf, (600, 600, 60), [128, 0, 60]),
        (480, math.inf, (600, 50), [128, 50]),
        (64, math.inf, (600, 50), [32, 0]),
        (512, 40.0, (600, 100), [20, 20]),
        (512, 40.0, (100, 100), [40, 0]),
        (512, 0.5, (100,), [0]),
        (0, math.inf, (5,), [0]),
        (512, math.inf, (), []),
    ],
)
def test_a_step_is_split_among_prompts(tokens: int, time: float, prompts: tuple[int, ...], counts: list[int]) -> None:
    assert split(StepBudget(tokens, time), prompts) == counts


def test_a_prompt_without_blocks_leaves_its_share_to_the_next() -> None:
    budget = StepBudget(512)
    assert split(budget, (100, 100), 60) == [60, 60]
    assert budget.taken == 120 and budget.left == 392


def test_the_long_prompt_gets_what_the_short_ones_leave() -> None:
    budget = StepBudget(512)
    assert split(budget, (600, 20)) == [128, 20]
    budget.use_rest()
    assert budget.left == 0  # it has more than they
    budget = StepBudget(512)
    assert split(budget, (600, 200), 100) == [100, 100]
    budget.use_rest()
    assert budget.offer(500).tokens == 28


@pytest.mark.parametrize("tokens", [1, 7, 64, 200, 512, 2048])
@pytest.mark.parametrize("time", [1.0, 30.0, 300.0, math.inf])
def test_a_step_never_takes_more_than_it_has(tokens: int, time: float) -> None:
    for first in (1, 63, 128, 129, 300, 5000):
        for rest in ((), (1,), (40, 40), (700, 3), (129, 129, 129)):
            budget = StepBudget(tokens, time)
            counts = split(budget, (first, *rest))
            assert sum(counts) == budget.taken <= min(tokens, time)
            assert all(0 <= count <= missing for count, missing in zip(counts, (first, *rest), strict=True))
            budget.use_rest()
            assert 0 <= budget.left <= min(tokens, time) - sum(counts)


def steps(
    pace: PrefillPace, alone: float, each: float, count: int, rows: int = 1, most: int = 512
) -> list[tuple[int, float]]:
    """Return (prompt tokens, seconds) of steps on a machine of this speed that take all they may."""
    done = []
    for _ in range(count):
        tokens = int(min(most, pace.tokens(rows)))
        seconds = alone + each * tokens
        pace.record(rows, tokens, seconds)
        done.append((tokens, seconds))
    return done


def test_without_decoding_rows_there_is_no_limit() -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(0, 500, 60.0)
    assert pace.tokens(0) == math.inf
    assert pace.tokens(1) == 16


def test_a_machine_that_takes_no_time_has_no_limit() -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(0, 10, 0.0)
    assert pace.tokens(7) == math.inf


def test_an_unmeasured_size_begins_with_the_least() -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(3, 0, 0.01)
    assert pace.tokens(3) == 16


@pytest.mark.parametrize("alone", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("each", [0.0001, 0.001, 0.004])
def test_steps_come_near_their_limit_and_stay_within_it(alone: float, each: float) -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(0, 16, alone + 16 * each)  # the stream's own prompt
    pace.record(1, 0, alone)
    done = steps(pace, alone, each, 40)
    assert all(seconds <= 0.25 for _, seconds in done)
    assert done[-1][0] >= min(512, 0.5 * (0.15 - alone) / each)


def test_a_machine_that_becomes_slow_is_believed_after_one_step_and_one_that_becomes_fast_soon() -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(1, 0, 0.01)
    steps(pace, 0.01, 0.001, 20)
    slow = steps(pace, 0.1, 0.01, 5)
    assert slow[0][1] > 1  # nobody could know
    assert all(seconds <= 0.27 for _, seconds in slow[1:])
    fast = steps(pace, 0.01, 0.001, 20)
    assert all(seconds <= 0.25 for _, seconds in fast)
    assert fast[-1][0] > 100


def test_the_depth_of_a_prompt_makes_steps_smaller() -> None:
    pace, depth, sizes = PrefillPace(0.25, 16), 0, []
    pace.record(1, 0, 0.01)
    while depth < 8000:
        tokens = int(pace.tokens(1))
        seconds = 0.01 + tokens * (0.0005 + depth * 5e-7)
        assert seconds < 0.25
        pace.record(1, tokens, seconds)
        depth += tokens
        sizes.append(tokens)
    assert max(sizes) > 1.5 * sizes[-1]


def test_prompts_get_a_third_of_the_time_if_streams_alone_take_all() -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(60, 0, 2.0)
    done = steps(pace, 2.0, 0.01, 20, rows=60)
    assert done[-1][0] == pytest.approx(100, abs=3)


def test_one_row_of_many_that_were_measured_takes_less_time() -> None:
    pace = PrefillPace(0.25, 16)
    pace.record(40, 0, 0.1)
    pace.record(40, 50, 0.15)
    assert pace.tokens(40) == 50
    assert pace.tokens(1) == 147


def test_guesses_take_time_as_prompt_tokens_do_and_decoding_keeps_its_own() -> None:
    pace = PrefillPace(1.0, 4)
    pace.record(2, 0, 0.1)
    pace.record(2, 50, 0.1 + 50 * 0.01)
    assert pace.tokens(2) - pace.tokens(2, 7) == 7
    assert pace.tokens(2, 10_000) == 4, "a prompt always advances"
    pace.record(2, 40, 0.1 + 50 * 0.01, extra=10)
    assert pace.token_seconds == pytest.approx(0.01)
    pace.record(2, 0, 0.1 + 7 * 0.01, extra=7)
    assert pace.tokens(2) == pytest.approx((0.6 - 0.1) // 0.01, abs=1), "what guesses took is not the rows' own"
