"""The sampler in numpy: filters, penalties, bans, draws and log-probabilities, alone and in any batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cairn.engine import row_results as sampling
from cairn.engine.row_results import sample
from cairn.kernels import sampling as kernel_sampling
from cairn.kernels.sampling import ONE, random_bits, weigh
from cairn.types.request import SamplingParams
from cairn.types.step import Row, RowResult
from tests.laws import sampling as laws

VOCAB = 64


def row(
    tokens: list[int] | None = None,
    *,
    prompt_len: int = 1,
    logits_from: int | None = -1,
    end: int | None = None,
    choice: int = 0,
    **params: object,
) -> Row:
    """Return a row of `tokens` that samples its next one, by default."""
    tokens = tokens or [1]
    end = len(tokens) if end is None else end
    params = {"max_tokens": 16, "temperature": 0.0, **params}
    return Row(
        tokens=tokens,
        start=0,
        end=end,
        tables=(),
        logits_from=end - 1 if logits_from == -1 else logits_from,
        prompt_len=prompt_len,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        choice=choice,
    )


def random_logits(count: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (count, vocab)).astype(np.float32)


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def draws(logits: NDArray[np.float32], count: int = 8_000, **params: object) -> Counter[int]:
    """Return the tokens drawn from one row of logits with seeds 0, 1, ..."""
    counts: Counter[int] = Counter()
    batch = 500
    for start in range(0, count, batch):
        rows = [row(seed=seed, **{"temperature": 1.0, **params}) for seed in range(start, start + batch)]
        counts.update(result.token for result in sample(rows, np.tile(logits, (batch, 1))) if result.token is not None)
    assert counts.total() == count
    return counts


def assert_distributed(counts: Counter[int], expected: NDArray[np.float64]) -> None:
    """Compare by chi-square, with rare tokens pooled; the seeds are fixed, so it passes always or never."""
    assert all(expected[token] > 0 for token in counts)
    count = counts.total()
    common = [i for i in range(len(expected)) if expected[i] * count >= 10]
    observed = [counts[i] for i in common]
    wanted = [expected[i] * count for i in common]
    observed.append(count - sum(observed))
    wanted.append(max(count - sum(wanted), 1e-9))
    if wanted[-1] < 1:
        assert observed[-1] <= 5
        observed, wanted = observed[:-1], wanted[:-1]
    chi = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = max(len(wanted) - 1, 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


# -- greedy -----------------------------------------------------------------------------------------


def test_temperature_zero_is_greedy_and_divides_by_nothing() -> None:
    """Known failure 10."""
    logits = random_logits(3)
    results = sample([row(), row(), row()], logits)
    assert [result.token for result in results] == logits.argmax(axis=1).tolist()
    # A bias forces the slow path, which must agree.
    results = sample([row(logit_bias=((0, 0.0),))] * 3, logits)
    assert [result.token for result in results] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("params", [{}, {"logit_bias": ((0, 0.0),)}, {"temperature": 1.0, "top_k": 1}])
def test_ties_go_to_the_lowest_id(params: dict[str, object]) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [9, 4, 30]] = 5
    assert sample([row(**params)], logits)[0].token == 4


def test_rows_without_logits_and_prompt_chunks_between_them() -> None:
    logits = random_logits(2)
    rows = [row(logits_from=None), row(), row(logits_from=None, end=1), row()]
    results = sample(rows, logits)
    assert [result.token for result in results] == [None, logits[0].argmax(), None, logits[1].argmax()]
    assert sample([row(logits_from=None)], np.zeros((0, VOCAB), np.float32)) == [RowResult()]


def test_wrong_number_of_logits_is_a_bug() -> None:
    with pytest.raises(ValueError, match="rows want 2 positions"):
        sample([row(), row()], random_logits(3))


def test_logits_are_not_changed() -> None:
    logits = random_logits(3)
    before = logits.copy()
    sample(
        [row([1, 2], repetition_penalty=2.0), row(temperature=1.0), row(temperature=0.5, top_p=0.5, min_tokens=3)],
        logits,
    )
    assert np.array_equal(logits, before)


# -- filters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 64, 1000, 4097])
def test_plain_sampling_follows_the_distribution(vocab: int) -> None:
    logits = random_logits(1, vocab, seed=vocab)[0]
    assert_distributed(draws(logits), probabilities(logits))


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_temperature(temperature: float) -> None:
    """Known failure 10."""
    logits = random_logits(1)[0]
    assert_distributed(draws(logits, temperature=temperature), probabilities(logits / np.float32(temperature)))


def kept(logits: NDArray[np.float32], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.float64]:
    """Return the distribution after the filters, computed the slow and obvious way."""
    p = probabilities(logits)
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(p[order])
    chosen, mass = [], 0.0
    for i in order:
        if top_p < 1 and mass >= top_p * total:
            break
        chosen.append(i)
        mass += p[i]
    chosen = [i for i in chosen if p[i] >= min_p * p.max()]
    result = np.zeros_like(p)
    result[chosen] = p[chosen] / p[chosen].sum()
    return result


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9, "min_p": 0.05}])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_temperature_after_the_cuts(temperature: float, filters: dict[str, float]) -> None:
    logits = random_logits(1)[0]
    cut = np.where(kept(logits, **filters) > 0, logits, -np.inf)  # type: ignore[arg-type]
    counts = draws(logits, 4_000, temperature=temperature, temperature_last=True, **filters)
    assert_distributed(counts, probabilities(cut / np.float32(temperature)))


@pytest.mark.parametrize("vocab", [64, 5000])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 10_000, "top_p": 0.5},
    ],
)
def test_filters(filters: dict[str, float], vocab: int) -> None:
    """Known failure 10."""
    logits = random_logits(1, vocab, seed=5)[0]
    expected = kept(logits, **filters)  # type: ignore[arg-type]
    assert_distributed(draws(logits, 3_000, **filters), expected)


def test_top_k_larger_than_few_is_exact() -> None:
    logits = random_logits(1, 3000, seed=8)[0]
    allowed = set(np.argsort(-logits, kind="stable")[:500].tolist())
    assert set(draws(logits, 1_000, top_k=500, temperature=50.0)) <= allowed


def test_top_p_keeps_one_token_at_least() -> None:
    logits = random_logits(1)[0]
    assert set(draws(logits, 500, top_p=1e-9)) == {int(logits.argmax())}


def test_equal_logits_are_cut_by_id() -> None:
    assert set(draws(np.zeros(VOCAB, np.float32), 2_000, top_k=3)) == {0, 1, 2}
    assert set(draws(np.zeros(VOCAB, np.float32), 2_000, top_p=0.05)) == {0, 1, 2, 3}


# -- bias, penalties, banned tokens -----------------------------------------------------------------


def test_logit_bias_forces_and_forbids() -> None:
    """Known failure 10."""
    logits = random_logits(2)
    best = int(logits[1].argmax())
    results = sample([row(logit_bias=((7, 100.0),)), row(logit_bias=((best, -100.0),))], logits)
    assert results[0].token == 7
    assert results[1].token == int(np.argsort(-logits[1])[1])


def test_repetition_penalty_counts_prompt_and_output_both_signs() -> None:
    """Known failure 10."""
    logits = np.full((1, VOCAB), -9, np.float32)
    logits[0, [3, 4, 5]] = [4.0, 3.9, 3.0]
    assert sample([row([3, 4], prompt_len=1, repetition_penalty=2.0)], logits)[0].token == 5
    negative = np.full((1, VOCAB), -3, np.float32)
    negative[0, 6] = -2
    assert sample([row([6], repetition_penalty=2.0)], negative)[0].token == 0


def test_presence_and_frequency_count_the_output_only() -> None:
    """Known failure 10."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 4, 5]] = [5.0, 4.0, 3.5]
    prompt = [3, 3, 3, 4]
    assert sample([row(prompt, prompt_len=4, presence_penalty=2.0, frequency_penalty=2.0)], logits)[0].token == 3
    output = [*prompt, 3]
    assert sample([row(output, prompt_len=4, presence_penalty=1.2)], logits)[0].token == 4
    assert sample([row([*output, 4, 4], prompt_len=4, frequency_penalty=1.2)], logits)[0].token == 3
    assert sample([row([*output, 4, 4, 3], prompt_len=4, frequency_penalty=1.2)], logits)[0].token == 5


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [2, 9]] = [8.0, 5.0]
    params = {"stop_token_ids": (2, VOCAB + 5), "min_tokens": 2}
    assert sample([row([1], **params)], logits)[0].token == 9
    assert sample([row([1, 9], **params)], logits)[0].token == 9
    assert sample([row([1, 9, 9], **params)], logits)[0].token == 2
    banned = sample(
        [row([1], **{**params, "temperature": 1.0, "seed": seed}) for seed in range(200)], logits.repeat(200, 0)
    )
    assert 2 not in {result.token for result in banned}


def test_a_row_with_nothing_left_fails_alone() -> None:
    logits = random_logits(2, 2)
    results = sample([row([1], stop_token_ids=(0, 1), min_tokens=1), row()], logits)
    assert results[0] == RowResult(error=sampling.NOTHING_LEFT)
    assert results[1].token is not None


# -- the same answer alone and in any batch ---------------------------------------------------------


def mixed_rows(count: int) -> list[Row]:
    """Return rows with every kind of option."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"temperature": 1.0, "logit_bias": ((5, 3.0), (9, -3.0))},
        {"logprobs": True, "top_logprobs": 4},
        {"temperature": 1.0, "seed": 99, "logprobs": True},
        {"temperature": 0.9, "stop_token_ids": (3,), "min_tokens": 9},
    ]
    return [
        row(
            [(7 * i + k) % VOCAB for k in range(4 + i % 5)],
            prompt_len=3,
            choice=i % 3,
            **{"seed": i, **kinds[i % len(kinds)]},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab", [64, 333, 2048])
def test_same_tokens_alone_and_in_any_batch_bit_for_bit(vocab: int) -> None:
    """Known failures 10, 14."""
    count = 70
    rows = mixed_rows(count)
    logits = random_logits(count, vocab)
    alone = [sample([one], logits[i : i + 1])[0] for i, one in enumerate(rows)]
    assert sample(rows, logits) == alone
    rng = np.random.default_rng(1)
    for size in (2, 3, 7, 16, 33, 64):
        chosen = rng.permutation(count)[:size]
        assert sample([rows[i] for i in chosen], logits[chosen]) == [alone[i] for i in chosen]


def test_seed_choice_and_position_each_matter() -> None:
    """Known failure 14."""
    logits = np.zeros((1, 2048), np.float32)
    base = {"temperature": 1.0, "seed": 1}
    seen = {
        sample([row([1], **base)], logits)[0].token,
        sample([row([1], **{**base, "seed": 2})], logits)[0].token,
        sample([row([1], choice=1, **base)], logits)[0].token,
        sample([row([1, 1], **base)], logits)[0].token,
    }
    assert len(seen) == 4
    assert sample([row([1], **base)], logits) == sample([row([1], **base)], logits)


def test_a_continued_generation_draws_as_if_it_had_never_stopped() -> None:
    logits = random_logits(1)
    whole = sample([row([1, 2, 3, 4], prompt_len=1, temperature=1.0, seed=3)], logits)
    again = sample([row([1, 2, 3, 4], prompt_len=4, temperature=1.0, seed=3)], logits)
    assert whole == again


def test_the_random_bits_are_pinned_and_even() -> None:
    """The draw is a contract: stored generations are continued with it."""
    assert random_bits(0, 0, 0) == 0.13870941014555427 * 2**53
    assert random_bits(1, 2, 3) == 0.4175580595044027 * 2**53
    assert random_bits(-5, 0, 10**6) == 0.49493743245516786 * 2**53
    numbers = [
        random_bits(seed, choice, position) / 2**53
        for seed in range(20)
        for choice in range(5)
        for position in range(100)
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - 500).max() < 5 * math.sqrt(500)
    pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(pairs) < 0.05


@pytest.mark.parametrize("bits", [0, 1 << 52, (1 << 53) - 1])
def test_a_draw_never_lands_on_a_token_of_weight_zero(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sampling, "random_bits", lambda *_: bits)
    logits = np.full((1, VOCAB), -1000, np.float32)
    logits[0, [20, 30, 41]] = 0
    for params in ({}, {"top_k": 60}, {"top_p": 0.999}, {"min_p": 1e-6}):
        result = sample([row(**{"temperature": 1.0, **params})], logits)[0]
        assert result.token in (20, 30, 41)


def test_weights_are_exponentials_in_whole_parts() -> None:
    x = np.concatenate([np.linspace(-45, 0, 200_001), [-np.inf, -1e38, -0.0, -1e-30]]).astype(np.float32)
    weights = weigh(x)
    exact = np.exp(x.astype(np.float64)) * ONE
    assert (abs(weights - exact) <= 2e-7 * exact * (1 - x.clip(-45) / 2) + 0.5).all()
    assert weights[200_000] == weights[-2] == weights[-1] == ONE
    assert not weights[x < -29].any()


def test_the_law_of_sampling(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Random options over random logits, against a slow sampler and against each row alone (known failures 10, 14)."""
    count = 20_000 if prove else 500
    for seed in range(count):
        laws.run(seed)
    figure("sampled lines held to the law", f"{6 * count:,}")


# -- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.5}, {"logprobs": True}])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float, params: dict[str, object]) -> None:
    logits = random_logits(3)
    rows = [row(**params) for _ in range(3)]
    fine = sample(rows, logits)
    logits[1, 5] = bad
    results = sample(rows, logits)
    assert results[1] == RowResult(error=sampling.NOT_FINITE)
    assert [results[0], results[2]] == [fine[0], fine[2]]


def test_bad_prompt_logits_fail_the_row() -> None:
    logits = random_logits(4)
    logits[1, 0] = math.nan
    rows = [row([1, 2, 3], logits_from=0, prompt_logprobs=True), row()]
    results = sample(rows, logits)
    assert results[0] == RowResult(error=sampling.NOT_FINITE)
    assert results[1].token == int(logits[3].argmax())


# -- logprobs ---------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Known failure 10."""
    logits = random_logits(1)
    params = {"temperature": 0.2, "top_k": 2, "logit_bias": ((7, 50.0),), "repetition_penalty": 1.5}
    result = sample([row([1, 2], logprobs=True, top_logprobs=3, **params)], logits)[0]
    reference = np.log(probabilities(logits[0]))
    assert result.token == 7
    assert result.logprob is not None
    assert result.logprob.token == 7
    assert result.logprob.logprob == pytest.approx(reference[7], abs=1e-5)
    best = np.argsort(-logits[0], kind="stable")[:3]
    assert [token for token, _ in result.logprob.top] == best.tolist()
    assert [value for _, value in result.logprob.top] == pytest.approx(reference[best].tolist(), abs=1e-5)
    assert sample([row(logprobs=True, top_logprobs=VOCAB + 5)], logits)[0].logprob.top[-1][1] <= 0  # type: ignore[union-attr]
    assert sample([row(logprobs=False)], logits)[0].logprob is None


def test_prompt_logprobs_cover_the_positions_before_the_last() -> None:
    tokens = [3, 9, 27, 17]
    logits = random_logits(4)
    reference = np.log(np.stack([probabilities(row) for row in logits]))
    whole = sample([row(tokens, logits_from=0, prompt_len=4, prompt_logprobs=True, top_logprobs=1)], logits)[0]
    assert [score.token for score in whole.prompt_logprobs] == [9, 27, 17]
    assert [score.logprob for score in whole.prompt_logprobs] == pytest.approx(
        [reference[p, tokens[p + 1]] for p in range(3)], abs=1e-5
    )
    assert whole.token == int(logits[3].argmax())
    assert whole.logprob is None
    chunks = [
        sample([row(tokens, logits_from=0, end=2, prompt_len=4, prompt_logprobs=True, top_logprobs=1)], logits[:2])[0],
        sample([row(tokens, logits_from=2, end=4, prompt_len=4, prompt_logprobs=True, top_logprobs=1)], logits[2:])[0],
    ]
    assert chunks[0].token is None
    assert chunks[0].prompt_logprobs + chunks[1].prompt_logprobs == whole.prompt_logprobs
    assert chunks[1].token == whole.token


def test_the_sampled_token_and_the_prompt_are_scored_by_their_own_positions() -> None:
    logits = random_logits(2)
    params = {"prompt_logprobs": True, "logprobs": True}
    result = sample([row([3, 9], logits_from=0, prompt_len=2, **params)], logits)[0]
    reference = np.log(np.stack([probabilities(row) for row in logits]))
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(reference[1, result.token], abs=1e-5)
    assert result.prompt_logprobs[0].logprob == pytest.approx(reference[0, 9], abs=1e-5)
