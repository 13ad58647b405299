"""The width of drafts: by the engine's costs and the hit rate, within bounds of memory and of others' delay."""

from __future__ import annotations

import random

import pytest

from cairn.scheduler.drafts.drafter import Drafter, DraftPolicy
from cairn.scheduler.drafts.policy import FEWEST_TOKENS, MeasuredPolicy
from cairn.scheduler.drafts.step_cost import MOST_TOKENS, StepCost
from cairn.scheduler.drafts.suffix import LEAST_TOKENS, TOKEN_BYTES, SuffixDrafter
from cairn.types.request import Request, SamplingExtras, SamplingParams

TEXT = random.Random(1).choices(range(5000), k=400)


def request(max_tokens: int = 200, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, extras=fields.pop("extras", None))  # type: ignore[arg-type]
    return Request(id=1, prompt=tuple(TEXT), sampling=sampling, **fields)  # type: ignore[arg-type]


def repeating(policy: MeasuredPolicy) -> Drafter:
    """Return the drafter of a sequence that is repeating a text."""
    drafter = policy.open(request(), TEXT)
    assert drafter is not None
    drafter.extend(TEXT[:100])
    return drafter


def measured(policy: DraftPolicy, cost: dict[int, float], rows: int = 1) -> None:
    """Let the policy see steps of these sizes in turn."""
    for _ in range(60):
        for tokens, seconds in cost.items():
            policy.step_took(rows, tokens, seconds)


def test_a_text_that_repeats_is_drafted_widely_where_tokens_are_cheap() -> None:
    policy = MeasuredPolicy()
    measured(policy, {tokens: 0.01 * (1 + 0.05 * tokens) for tokens in range(1, 9)})
    assert policy.width(repeating(policy), 1) == 7


def test_a_text_that_repeats_is_drafted_narrowly_where_tokens_are_expensive() -> None:
    policy = MeasuredPolicy()
    measured(policy, {1: 0.010, 2: 0.012, 3: 0.016, 4: 0.034, 5: 0.046, 8: 0.1})
    assert 1 <= policy.width(repeating(policy), 1) <= 3


def test_nothing_is_drafted_where_each_token_costs_a_step() -> None:
    policy = MeasuredPolicy()
    measured(policy, {tokens: 0.01 * tokens for tokens in range(1, 9)})
    assert policy.width(repeating(policy), 1) == 0


def test_a_batch_that_fills_the_product_has_no_drafts() -> None:
    """Up to eight tokens are nearly free; beyond, each costs its part. Eight sequences leave no room."""
    policy = MeasuredPolicy()
    cost = {tokens: 0.01 * (1.0 + 0.02 * min(tokens, 8) + 0.13 * max(0, tokens - 8)) for tokens in range(1, 17)}
    measured(policy, cost)
    drafter = repeating(policy)
    assert policy.width(drafter, 1) == 7
    policy.step_took(1, 8, cost[8])
    assert policy.width(drafter, 8) == 0
    assert policy.width(drafter, MOST_TOKENS + 1) == 0, "nothing is known of such steps"


def test_drafts_of_one_step_count_for_those_after_it() -> None:
    """When the first sequence has taken a step's room, the others get less."""
    policy = MeasuredPolicy()
    cost = {tokens: 0.01 * (1.0 + 0.01 * min(tokens, 9) + 0.3 * max(0, tokens - 9)) for tokens in range(1, 20)}
    measured(policy, cost, rows=2)
    drafters = [repeating(policy) for _ in range(2)]
    widths = [policy.width(drafter, 2) for drafter in drafters]
    assert widths[0] == 7 and widths[1] < 3
    policy.record(drafters[0], 7, 7)
    assert policy.width(drafters[1], 2) == 7, "a new step begins"


def test_states_that_are_computed_again_make_drafts_dearer() -> None:
    """Tokens accepted before a wrong guess are computed twice, which a doubtful draft does not win back."""

    class Known(StepCost):
        def of(self, tokens: int) -> float:
            return 1 + 0.19 * (tokens - 1)

    widths = []
    for states in (False, True):
        policy = MeasuredPolicy(states=states)
        policy._cost = Known()
        drafter = repeating(policy)
        assert isinstance(drafter, SuffixDrafter)
        drafter._hits, drafter._repeats = [0.5] * 6, 1.0
        widths.append(policy.width(drafter, 1))
    assert widths == [2, 1]


def test_others_of_a_step_are_not_held_up() -> None:
    """However well drafts pay, they lengthen a shared step by half at most."""
    policy = MeasuredPolicy()
    cost = {tokens: 0.01 * (1 + 0.2 * (tokens - 1)) for tokens in range(1, 12)}
    measured(policy, cost)
    drafter = repeating(policy)
    assert policy.width(drafter, 1) == 7
    policy.step_took(1, 8, cost[8])
    width = policy.width(drafter, 2)
    assert width > 0 and cost[2 + width] <= 1.5 * cost[2] * 1.05


def test_a_text_without_repetition_gets_no_drafts() -> None:
    policy = MeasuredPolicy()
    chance = random.Random(2)
    drafter = policy.open(request(), [chance.randrange(60) for _ in range(500)])
    assert drafter is not None
    widths = []
    for _ in range(500):
        drafter.extend([chance.randrange(60)])
        widths.append(policy.width(drafter, 1))
        policy.step_took(1, 1 + widths[-1], 0.01)
    assert sum(width > 0 for width in widths) <= 0.02 * len(widths)


def test_a_fixed_width_is_asked_for_wherever_it_is() -> None:
    policy = MeasuredPolicy(fixed=5)
    measured(policy, {tokens: 0.01 * tokens for tokens in range(1, 9)})
    assert policy.width(repeating(policy), 1) == 5


def test_requests_that_never_speculate() -> None:
    policy = MeasuredPolicy()
    assert policy.open(request(FEWEST_TOKENS - 1), TEXT) is None
    assert policy.open(request(extras=SamplingExtras(mirostat=2)), TEXT) is None
    assert policy.open(request(want="hidden"), TEXT) is None
    assert policy.open(request(), TEXT) is not None


def test_all_indexes_together_stay_within_their_memory() -> None:
    """Later ones get smaller indexes, then none; an ended sequence gives its memory back."""
    policy = MeasuredPolicy(index_bytes=6 * LEAST_TOKENS * TOKEN_BYTES)
    long = [*range(3 * LEAST_TOKENS)]
    first = policy.open(request(), long)
    second = policy.open(request(), long)
    third = policy.open(request(), long)
    assert first is not None and second is not None and third is None
    assert first.bytes > second.bytes
    assert policy.bytes <= 6 * LEAST_TOKENS * TOKEN_BYTES
    for token in range(20_000):
        second.extend([token])
    assert second.bytes <= 2 * LEAST_TOKENS * TOKEN_BYTES
    policy.close(first)
    policy.close(second)
    assert policy.bytes == 0 and policy.open(request(), long) is not None


def test_a_policy_offers_only_tokens_of_the_sequence_itself() -> None:
    """Of two tenants with the same beginning, one's continuation is never offered to the other."""
    policy = MeasuredPolicy(fixed=7)
    secret = [*range(2000, 2200)]
    owner = policy.open(request(salt=b"one"), [*secret, *secret[:20]])
    other = policy.open(request(salt=b"two"), [5, *secret[:20], 6, *secret[:20]])
    assert owner is not None and other is not None
    owner.extend(secret[20:60])
    assert list(owner.propose(3)) == secret[60:63]
    assert set(other.propose(7)) <= {5, 6, *secret[:20]}


@pytest.mark.parametrize("speed", [0.001, 0.1])
def test_costs_settle_at_what_was_measured(speed: float) -> None:
    cost = StepCost()
    for step in range(600):
        tokens = (1, 4, 8)[step % 3]
        cost.record(tokens, speed * {1: 1.0, 4: 1.2, 8: 1.9}[tokens])
    assert cost.of(4) / cost.of(1) == pytest.approx(1.2, rel=0.05)
    assert cost.of(8) / cost.of(1) == pytest.approx(1.9, rel=0.05)
    assert cost.of(4) < cost.of(6) < cost.of(8), "sizes between are between"
    assert cost.of(12) > cost.of(8)


def test_a_size_is_known_soon_after_it_is_first_measured() -> None:
    """Within a few steps; until then drafts would be too wide or too narrow."""
    cost = StepCost()
    for _ in range(100):
        cost.record(1, 0.01)
    for _ in range(4):
        cost.record(8, 0.037)
    assert cost.of(8) / cost.of(1) == pytest.approx(3.7, rel=0.15)


def test_a_slower_machine_leaves_the_curve_alone() -> None:
    cost = StepCost()
    for step in range(600):
        cost.record((1, 8)[step % 2], (0.01, 0.02)[step % 2])
    for _ in range(300):
        cost.record(1, 0.03)  # another program takes two thirds
    assert cost.of(8) / cost.of(1) == pytest.approx(2.0, rel=0.2)


def test_one_stall_changes_little_and_nonsense_nothing() -> None:
    cost = StepCost()
    for step in range(600):
        cost.record((1, 8)[step % 2], (0.01, 0.02)[step % 2])
    before = cost.of(8) / cost.of(1)
    cost.record(8, 60.0)
    for tokens, seconds in ((0, 1.0), (MOST_TOKENS + 1, 1.0), (8, 0.0), (8, -1.0)):
        cost.record(tokens, seconds)
    assert cost.of(8) / cost.of(1) == pytest.approx(before, rel=0.1)
