"""The split of a step's tokens among prompts: pure arithmetic, no cache and no engine."""

from __future__ import annotations

import math

import pytest

from cairn.scheduler.plan import StepBudget


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
