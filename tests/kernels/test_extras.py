"""Extra samplers: what each keeps, by hand, and that kernel set and batch do not matter."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from cairn.engine.row_results import sample
from cairn.kernels.extras import choose, repeats
from cairn.kernels.native import NativeKernels
from cairn.kernels.sampling import NUMPY, Line
from cairn.types.request import SamplingExtras, SamplingParams
from cairn.types.step import Row
from tests.laws.sampling import line_of, lines_of_logits, random_extras, random_row
from tests.tiny_models import KERNELS


def row(extras: SamplingExtras, tokens: Any = (0,), prompt: int = 1, seed: int = 1, **more: Any) -> Row:
    params = SamplingParams(max_tokens=9, seed=seed, extras=extras, **more)
    return Row(list(tokens), 0, len(tokens), (), len(tokens) - 1, prompt, params, 0)


def drawn(extras: SamplingExtras, chances: Any, draws: int = 300, **more: Any) -> set[int]:
    """Return all tokens that come out of many draws from these chances."""
    logits = np.log(np.array([chances], np.float32) + np.float32(1e-30))
    rows = [row(extras, seed=seed, **more) for seed in range(draws)]
    return {choice.token for one in rows for choice in choose(NUMPY, [Line(one)], logits) if choice.token is not None}


CHANCES = [0.5, 0.2, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    ("extras", "kept"),
    [
        (SamplingExtras(allowed_token_ids=(1, 4, 99)), {1, 4}),
        (SamplingExtras(bad_words=((0,),)), {1, 2, 3, 4}),
        (SamplingExtras(xtc_probability=1.0, xtc_threshold=0.14), {2, 3, 4}),
        (SamplingExtras(xtc_probability=1.0, xtc_threshold=0.3), {0, 1, 2, 3, 4}),
        (SamplingExtras(xtc_probability=1.0, xtc_threshold=0.6), {0, 1, 2, 3, 4}),
        (SamplingExtras(xtc_probability=1e-9, xtc_threshold=0.1), {0, 1, 2, 3, 4}),
        # entropy 1.33: surprises .69 1.61 1.90 2.30 3.00, so the nearest are 1, 2, 0
        (SamplingExtras(typical_p=0.19), {1}),
        (SamplingExtras(typical_p=0.34), {1, 2}),
        (SamplingExtras(typical_p=0.8), {0, 1, 2}),
        (SamplingExtras(top_n_sigma=0.01), {0}),
        (SamplingExtras(top_n_sigma=100.0), {0, 1, 2, 3, 4}),
        (SamplingExtras(dynatemp_range=0.5), {0, 1, 2, 3, 4}),
    ],
)
def test_each_extra_sampler_keeps_the_expected_tokens(extras: SamplingExtras, kept: set[int]) -> None:
    assert drawn(extras, CHANCES) == kept
    assert drawn(extras, CHANCES, temperature_last=True) == kept


def test_n_sigma_is_of_the_logits() -> None:
    logits = np.array([[0.0, -1.0, -2.0, -3.0]], np.float32)  # a standard deviation of 1.118
    for count, kept in ((0.8, {0}), (0.9, {0, 1}), (1.8, {0, 1, 2}), (2.7, {0, 1, 2, 3})):
        rows = [row(SamplingExtras(top_n_sigma=count), seed=seed) for seed in range(200)]
        assert {choose(NUMPY, [Line(one)], logits)[0].token for one in rows} == kept


def test_the_usual_cuts_apply_beside_them() -> None:
    on = SamplingExtras(top_n_sigma=100.0)
    assert drawn(on, CHANCES, top_k=2) == {0, 1}
    assert drawn(on, CHANCES, top_p=0.6) == {0, 1}
    assert drawn(on, CHANCES, min_p=0.29) == {0, 1, 2}
    assert drawn(on, CHANCES, temperature=0.0) == {0}
    assert drawn(on, CHANCES, logit_bias=((0, -100.0),)) == {1, 2, 3, 4}


def test_extras_without_effect_leave_the_tokens_the_same() -> None:
    """The usual samplers must mean the same on the path that extras take, and there a cut ranks the tokens."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        logits = lines_of_logits(rng, 1, 64)
        one = random_row(rng, 64)
        params = one.sampling
        if not np.isfinite(logits).all() or params.temperature > 100 or abs(logits).max() > 1e6:
            continue
        usual = SamplingParams(
            max_tokens=9, temperature=params.temperature, top_k=7, top_p=params.top_p, min_p=params.min_p, seed=3
        )
        plain = Row(one.tokens, 0, one.end, (), one.end - 1, one.prompt_len, usual, 0)
        extra = SamplingParams(
            **{name: getattr(usual, name) for name in usual.__struct_fields__ if name != "extras"},
            extras=SamplingExtras(bad_words=((63, 63, 63, 63, 63),)),
        )
        other = Row(one.tokens, 0, one.end, (), one.end - 1, one.prompt_len, extra, 0)
        assert choose(NUMPY, [Line(plain)], logits) == choose(NUMPY, [Line(other)], logits)


def test_dry_takes_more_the_longer_a_repetition_is() -> None:
    on = SamplingExtras(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    assert repeats([1, 2, 3, 9, 1, 2], on) == {3: 1.0}
    assert repeats([7, 1, 2, 3, 9, 7, 1, 2], on) == {3: 2.0}
    assert repeats([1, 2, 3, 1, 2, 4, 5, 1, 2], on) == {3: 1.0, 4: 1.0}
    assert repeats([2, 3, 9, 2], on) == {}, "shorter than what is allowed"
    assert repeats([1, 2, 3, 4], on) == {} and repeats([], on) == {} and repeats([1], on) == {}
    assert repeats([1, 1, 1, 1, 1], on) == {1: 4.0}, "of several repetitions the longest"


def test_dry_looks_back_to_its_range_or_a_breaker() -> None:
    on = {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 2}
    text = [7, 1, 2, 3, 9, 7, 1, 2]
    assert repeats(text, SamplingExtras(**on, dry_breakers=(7,))) == {3: 1.0}
    assert repeats(text, SamplingExtras(**on, dry_breakers=(2,))) == {}
    assert repeats(text, SamplingExtras(**on, dry_breakers=(3,))) == {}, "a breaker itself is never held off"
    assert repeats(text, SamplingExtras(**on, dry_penalty_last_n=7)) == {3: 1.0}
    assert repeats(text, SamplingExtras(**on, dry_penalty_last_n=5)) == {}
    assert repeats([1, 2] * 500 + [1], SamplingExtras(**on))[2] <= 1e30


def test_a_word_of_several_tokens_is_held_off_at_its_last() -> None:
    word = SamplingExtras(bad_words=((1, 2),))
    assert drawn(word, CHANCES, tokens=[1, 3, 1], prompt=1) == {0, 1, 3, 4}
    assert drawn(word, CHANCES, tokens=[1, 3, 0], prompt=1) == {0, 1, 2, 3, 4}
    assert drawn(word, CHANCES, tokens=[1], prompt=1) == {0, 1, 2, 3, 4}, "what the prompt ends with is no part of it"


def test_no_token_is_drawn_if_none_is_left() -> None:
    logits = np.zeros((1, 3), np.float32)
    everything = SamplingExtras(allowed_token_ids=(5,))
    assert choose(NUMPY, [Line(row(everything))], logits)[0].token is None
    (result,) = sample([row(everything)], logits)
    assert "no token" in result.error


def test_a_temperature_within_its_range_is_higher_where_the_model_is_unsure() -> None:
    """When sure, it is near temperature - range, so the second token is rare; when unsure, near temperature + range."""
    on = SamplingExtras(dynatemp_range=0.9)
    sure = np.array([[0.0, -3.0, *[-30.0] * 30]], np.float32)
    rows = [row(on, seed=seed) for seed in range(400)]
    second = sum(choose(NUMPY, [Line(one)], sure)[0].token == 1 for one in rows) / 400
    plain = math.exp(-3) / (1 + math.exp(-3))
    assert second < plain / 2


def test_mirostat_keeps_tokens_up_to_its_surprise_and_learns_from_the_one_drawn() -> None:
    logits = np.log(np.array([[0.125, 0.5, 0.25, 0.125]], np.float32))
    for mu, kept in ((0.3, {1: 1.0}), (1.01, {1: 1.0}), (2.01, {1: 2 / 3, 2: 1 / 3}), (9.0, {0: 0.125, 1: 0.5})):
        seen = set()
        for seed in range(200):
            one = msgspec.structs.replace(row(SamplingExtras(mirostat=2, mirostat_tau=3.0), seed=seed), mu=mu)
            (choice,) = choose(NUMPY, [Line(one)], logits)
            assert choice.token is not None and choice.mu is not None
            seen.add(choice.token)
            if choice.token in kept:
                assert choice.mu == pytest.approx(mu - 0.1 * (-math.log2(kept[choice.token]) - 3.0), abs=1e-4)
        assert seen == (set(kept) if mu < 9 else {0, 1, 2, 3})


def test_mirostat_1_keeps_as_many_as_zipfs_law_says() -> None:
    ranks, vocab = np.arange(1, 1001), 1000
    for exponent, mu in ((1.5, 5.0), (1.1, 4.0), (0.7, 6.0), (2.5, 3.0)):
        logits = -exponent * np.log(ranks).astype(np.float32)[None]
        beyond = exponent - 1
        count = int((beyond * 2**mu / (1 - vocab**-beyond)) ** (1 / exponent))
        extras = SamplingExtras(mirostat=1)
        rows = [msgspec.structs.replace(row(extras, seed=seed), mu=mu) for seed in range(1500)]
        tokens = {choose(NUMPY, [Line(one)], logits)[0].token for one in rows}
        assert max(one for one in tokens if one is not None) in range(max(0, count - 3), count + 1), count


@pytest.mark.parametrize("form", [1, 2])
def test_mirostat_has_the_mean_surprise_that_was_asked_for(form: int) -> None:
    """For any distribution, and without a number that could break it."""
    rng = np.random.default_rng(5)
    for tau in (2.0, 4.0):
        extras = SamplingExtras(mirostat=form, mirostat_tau=tau, mirostat_eta=0.2)
        mu, surprises = 2 * tau, []
        for seed in range(500):
            logits = np.sort(rng.normal(size=(1, 400)).astype(np.float32) * 2)[:, ::-1]
            one = msgspec.structs.replace(row(extras, seed=seed), mu=mu)
            (choice,) = choose(NUMPY, [Line(one)], np.ascontiguousarray(logits))
            assert choice.mu is not None
            surprises.append(tau - (choice.mu - mu) / 0.2)
            mu = choice.mu
        assert np.mean(surprises[100:]) == pytest.approx(tau, abs=0.4)
    for chances in ([1.0], [0.5, 0.5], [1.0, 0.0, 0.0], [0.25] * 4):
        for mu in (-1e9, 0.0, 1e9):
            logits = np.log(np.array([chances], np.float32) + np.float32(1e-30))
            one = msgspec.structs.replace(row(SamplingExtras(mirostat=form)), mu=mu)
            (choice,) = choose(NUMPY, [Line(one)], logits)
            assert choice.token is not None and choice.mu is not None and math.isfinite(choice.mu)


@pytest.mark.parametrize("variant", [name for name in KERNELS if name != "reference"])
def test_all_kernels_give_the_same_tokens_alone_and_in_company(variant: str) -> None:
    """For rows with extras, without, and under masks, in one step."""
    rng = np.random.default_rng(11)
    kernels = NativeKernels(variant, threads=2)
    sampler = kernels.sampler(97)
    for _ in range(150):
        logits = lines_of_logits(rng, 6, 97)
        lines = []
        for one in (random_row(rng, 97) for _ in logits):
            if rng.random() < 0.5:
                params = {name: getattr(one.sampling, name) for name in one.sampling.__struct_fields__}
                params["extras"] = extras if (extras := random_extras(rng, 97)).any else None
                params["seed"] &= (1 << 64) - 1
                parts = [getattr(one, name) for name in one.__struct_fields__[:6]]
                one = Row(*parts, SamplingParams(**params), 0, mu=float(rng.uniform(0, 9)))
            mask = rng.integers(0, 256, 16, np.uint8).tobytes() if rng.random() < 0.5 else None
            lines.append(line_of(one)._replace(mask=mask))
        together = choose(NUMPY, lines, logits)
        for number, line in enumerate(lines):
            assert choose(NUMPY, [line], logits[number : number + 1]) == [together[number]]
            token = together[number].token
            assert line.mask is None or token is None or line.mask[token >> 3] >> (token & 7) & 1
        assert choose(sampler, lines, logits) == together
    kernels.close()
