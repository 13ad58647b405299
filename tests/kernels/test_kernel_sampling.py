"""Every native sampler against its definition in numpy: the same tokens, masses and ranks, to the bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cairn.engine.row_results import NOT_FINITE, NOTHING_LEFT, sample
from cairn.kernels import native
from cairn.kernels.native import NativeKernels
from cairn.kernels.sampling import NUMPY, ONE, Line, Sampler, TokenChoice, random_bits
from cairn.types.request import SamplingParams
from cairn.types.step import Row
from tests.laws.sampling import line_of, lines_of_logits, random_mask, random_row
from tests.tiny_models import KERNELS

VARIANTS = [name for name in KERNELS if name != "reference" and name not in native.models()]
"""Variants for tests differ in products alone."""
VOCABS = [1, 2, 15, 16, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 4096, 5003]

if not VARIANTS:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Any:
    made = NativeKernels(request.param, threads=2)
    yield made
    made.close()


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_native_sampler_decides_as_numpy_does(kernels: Any, vocab: int, prove: bool) -> None:
    """Random options over random logits; and each row alone, in another batch and in another place."""
    rng = np.random.default_rng(vocab)
    sampler: Sampler = kernels.sampler(vocab)
    for _ in range(40 if prove else 4):
        count = int(rng.integers(20, 60))
        logits = lines_of_logits(rng, count, vocab)
        lines = [line_of(random_row(rng, vocab), random_mask(rng, vocab)) for _ in range(count - 3)]
        lines += [Line(None, 0), Line(None, 7), Line(None)]
        want = NUMPY.choose(lines, logits)
        got = sampler.choose(lines, logits)
        for one, other, line in zip(got, want, lines, strict=True):
            assert one == other, line
        some = rng.permutation(count)[: count // 3]
        assert sampler.choose([lines[i] for i in some], logits[some]) == [want[i] for i in some]
        assert [sampler.choose([lines[i]], logits[i : i + 1]) for i in some] == [[want[i]] for i in some]


LARGE = 151_936


@functools.cache
def large_lines() -> tuple[Any, list[tuple[list[Line], list[TokenChoice]]]]:
    """Return flat, peaked and tied distributions, and what numpy chooses from them with every filter."""
    vocab = LARGE
    rng = np.random.default_rng(1)
    flat = rng.normal(0, 2, vocab).astype(np.float32)
    peaked = flat.copy()
    peaked[rng.integers(0, vocab, 300)] += 20
    logits = np.stack([flat, peaked, np.zeros(vocab, np.float32), np.round(flat)])
    every = [
        {},
        {"top_k": 40},
        {"top_p": 0.95},
        {"top_p": 0.2},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 9000, "top_p": 0.99},
        {"top_p": 0.97, "min_p": 1e-4},
        {"top_p": 1 - 1e-12},
        {"temperature": 0.6, "top_p": 0.6, "temperature_last": True},
        {"temperature": 1.7, "top_k": 9000, "top_p": 0.99, "min_p": 1e-4, "temperature_last": True},
        {"temperature": 0.6, "min_p": 0.05, "temperature_last": True},
    ]
    options = [SamplingParams(max_tokens=9, seed=seed, **one) for one in every for seed in range(2)]  # type: ignore[arg-type]
    masks = [np.packbits(rng.random(vocab) < part, bitorder="little").tobytes() for part in (0.001, 0.95)]
    held = (None, *masks, None)
    asked = [[Line(Row([1], 0, 1, (), 0, 1, params, 0), 5, mask) for mask in held] for params in options]
    asked += [[Line(line.row, None, mask) for line, mask in zip(one, held[::-1], strict=True)] for one in asked]
    return logits, [(lines, NUMPY.choose(lines, logits)) for lines in asked]


def test_a_large_vocabulary(kernels: Any) -> None:
    """The size at which speed matters."""
    logits, expected = large_lines()
    sampler = kernels.sampler(LARGE)
    for lines, want in expected:
        assert sampler.choose(lines, logits) == want, lines[0]


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_is_the_lowest_of_the_highest(kernels: Any, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = lines_of_logits(rng, 300, vocab)
    before = logits.tobytes()
    sampler = kernels.sampler(vocab)
    assert sampler.greedy(logits) == NUMPY.greedy(logits) == logits.argmax(axis=1).tolist()
    assert logits.tobytes() == before
    assert sampler.greedy(logits[:0]) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_line_with_a_non_finite_number_anywhere_is_detected(kernels: Any, bad: float) -> None:
    vocab = 1033
    sampler = kernels.sampler(vocab)
    for place in [0, 1, 15, 16, 511, 1023, 1024, 1032]:
        logits = lines_of_logits(np.random.default_rng(place), 3, vocab)
        fine = sampler.greedy(logits)
        logits[1, place] = bad
        assert sampler.greedy(logits) == [fine[0], -1, fine[2]]
        lines = [Line(Row([1], 0, 1, (), 0, 1, SamplingParams(max_tokens=9, temperature=0.5), 0), 2)] * 3
        got = sampler.choose(lines, logits)
        assert got[1] == TokenChoice(False) and got == NUMPY.choose(lines, logits)


def test_rows_are_answered_alike_through_the_sampler_of_either_kind(kernels: Any) -> None:
    """Prompt positions, rows that want nothing, failing rows, all tokens banned: the engine gets the same results."""
    vocab = 77
    rng = np.random.default_rng(5)
    rows, lines = [], []
    for number in range(60):
        row = random_row(rng, vocab)
        first = [None, len(row.tokens) - 1, 0][number % 3]
        end = len(row.tokens) if number % 2 or first else max(1, len(row.tokens) - 1)
        rows.append(
            Row(row.tokens, 0, end, (), None if first is None else min(first, end - 1), 1, row.sampling, number)
        )
        lines.append(0 if rows[-1].logits_from is None else end - rows[-1].logits_from)
    banned = SamplingParams(max_tokens=9, stop_token_ids=tuple(range(vocab)), min_tokens=9)
    rows.append(Row([1], 0, 1, (), 0, 1, banned, 0))
    logits = lines_of_logits(rng, sum(lines) + 1, vocab)
    logits[lines[1] // 2, 3] = np.nan
    want = sample(rows, logits)
    assert sample(rows, logits, kernels.sampler(vocab)) == want
    assert want[-1].error == NOTHING_LEFT and any(one.error == NOT_FINITE for one in want)


def seed_of(bits: int, choice: int, position: int) -> int:
    """Return a seed for which `random_bits` gives `bits`, by running splitmix64's finaliser backwards."""
    mask, state = (1 << 64) - 1, bits << 11
    for word in (position, choice, 0):
        state ^= state >> 31 ^ state >> 62
        state = state * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        state ^= state >> 27 ^ state >> 54
        state = state * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        state ^= state >> 30 ^ state >> 60
        state = (state - word - 0x9E3779B97F4A7C15) & mask
    return state


@pytest.mark.parametrize(
    ("bits", "place"), [(0, 0), (1, 0), ((1 << 53) // 3, 0), ((1 << 53) // 3 + 1, 1), ((1 << 53) - 1, 2)]
)
def test_the_ends_of_the_draw(kernels: Any, bits: int, place: int) -> None:
    """A draw of 0 takes the first token with any weight; the largest draw never runs past the end."""
    seed = seed_of(bits, 0, 1)
    assert random_bits(seed, 0, 1) == bits
    logits = np.full((1, 3001), -1000, np.float32)
    logits[0, [20, 30, 2999]] = 0
    sampler = kernels.sampler(3001)
    late = {"temperature": 0.5, "top_p": 0.999, "temperature_last": True}
    for options in ({}, {"top_k": 60}, {"top_p": 0.999}, {"min_p": 1e-6}, {"top_k": 3}, late):
        line = Line(Row([1], 0, 1, (), 0, 1, SamplingParams(max_tokens=9, seed=seed, **options), 0))  # type: ignore[arg-type]
        got = sampler.choose([line], logits)
        assert got == NUMPY.choose([line], logits)
        assert got[0].token == (20, 30, 2999)[place], options


def test_arrays_of_wrong_size_are_refused(kernels: Any) -> None:
    sampler = kernels.sampler(64)
    plain = SamplingParams(max_tokens=9, repetition_penalty=2.0)
    line = Line(Row([64], 0, 1, (), 0, 1, plain, 0))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.choose([line], np.zeros((1, 64), np.float32))
    for shape in [(1, 63), (2, 64)]:
        with pytest.raises(ValueError, match=r"logits are \[lines, vocab\]"):
            sampler.choose([Line(None)], np.zeros(shape, np.float32))
    with pytest.raises(TypeError):
        sampler.greedy(np.zeros((1, 64), np.float64))
    with pytest.raises(ValueError, match="a vocabulary has"):
        kernels.sampler(0)


@functools.cache
def drawn_from_a_nucleus(last: bool) -> tuple[np.ndarray, np.ndarray, list[Line], Any]:
    """Return ids in the order of their logits, the logits, rows, and numpy's choices (cached for all kernels)."""
    vocab = 290
    ids = np.random.default_rng(3).permutation(vocab)
    logits = np.empty((1, vocab), np.float32)
    logits[0, ids] = -0.95 * np.log(np.arange(1, vocab + 1))
    options = {"temperature": 0.6, "top_p": 0.6, "temperature_last": last}
    lines = [
        Line(Row([1], 0, 1, (), 0, 1, SamplingParams(max_tokens=9, seed=seed, logprobs=True, **options), 0), 2)  # type: ignore[arg-type]
        for seed in range(3000)
    ]
    return ids, logits, lines, NUMPY.choose(lines, np.tile(logits, (len(lines), 1)))


@pytest.mark.parametrize(("last", "most"), [(False, 3), (True, 30)])
def test_a_nucleus_before_and_after_the_temperature(kernels: Any, last: bool, most: int) -> None:
    """The figures of docs/sampling.md: what may be drawn at temperature 0.6 and top_p 0.6."""
    ids, logits, lines, want = drawn_from_a_nucleus(last)
    got = kernels.sampler(len(ids)).choose(lines, np.tile(logits, (len(lines), 1)))
    assert got == want
    assert {one.token for one in got} == set(ids[:most].tolist())
    assert {one.mass for one in got} == {NUMPY.choose([Line(None, 2)], logits)[0].mass}, "of the plain distribution"
    first, second = (sum(one.token == ids[at] for one in got) for at in (0, 1))
    assert first / second == pytest.approx(2 ** (0.95 / 0.6), rel=0.15), "the temperature applies in either order"


def test_masses_count_in_units_of_the_peak() -> None:
    (choice,) = NUMPY.choose([Line(None, 2)], np.array([[3, 5, 5]], np.float32))
    assert choice.peak == 5 and choice.top == (1, 2)
    assert choice.mass == pytest.approx(ONE * (2 + np.exp(-2.0)), rel=1e-6)
