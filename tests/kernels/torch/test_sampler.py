"""Sampling on a torch device: the same bits as the reference, and no whole rows of logits on the host."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: sampling on devices is not tested")

import torch

from cairn.kernels import extras as extras_of
from cairn.kernels.extras import cuts_top
from cairn.kernels.sampling import NUMPY, Line
from cairn.kernels.sampling import weigh as weigh_on_host
from cairn.kernels.torch import sampler as sampler_of
from cairn.kernels.torch.sampler import TorchSampler, weigh
from cairn.types.request import SamplingExtras, SamplingParams
from cairn.types.step import Row
from tests.laws.sampling import line_of, lines_of_logits, random_extras, random_mask, random_row


def test_a_line_gets_what_the_reference_gives(prove: bool) -> None:
    sampler = TorchSampler()
    for seed in range(5_000 if prove else 300):
        rng = np.random.default_rng(seed)
        vocab = int(rng.choice([1, 2, 5, 17, 64, 200, 1000]))
        logits = lines_of_logits(rng, 8, vocab)
        if seed % 7 == 0:
            logits[2, 0], logits[3, -1] = np.nan, np.inf
        lines = [line_of(random_row(rng, vocab), random_mask(rng, vocab)) for _ in logits]
        lines[:2] = [Line(None), Line(None, 3, asked=(0,))]
        lines[4] = lines[4]._replace(place=max(1, lines[4].length - 3))
        on_device = torch.from_numpy(logits.copy())
        expected, chosen = NUMPY.choose(lines, logits.copy()), sampler.choose(lines, on_device)
        for line, one, other in zip(lines, expected, chosen, strict=True):
            assert one == other, f"seed {seed}, {line.row and line.row.sampling}"
        assert np.array_equal(on_device.numpy(), logits, equal_nan=True), "the logits were changed"


def with_extras(row: Row, extras: SamplingExtras) -> Row:
    params = {name: getattr(row.sampling, name) for name in row.sampling.__struct_fields__} | {"extras": extras}
    parts = [getattr(row, name) for name in row.__struct_fields__[:6]]
    return Row(*parts, SamplingParams(**params), 0, mu=4.0)


def test_a_line_with_extras_gets_what_the_reference_gives(prove: bool) -> None:
    """Extras that the device supports and ones that it does not, among rows without any."""
    sampler, taken, cut = TorchSampler(), 0, 0
    for seed in range(3_000 if prove else 300):
        rng = np.random.default_rng(seed)
        vocab = int(rng.choice([2, 5, 17, 97, 1000]))
        logits, lines = lines_of_logits(rng, 6, vocab), []
        for row in (random_row(rng, vocab) for _ in logits):
            extras = random_extras(rng, vocab)
            if rng.random() < 0.7:  # extras for the host are rare
                extras = msgspec.structs.replace(extras, typical_p=1.0, top_n_sigma=0.0, dynatemp_range=0.0, mirostat=0)
            if extras.any and rng.random() < 0.8:
                row = with_extras(row, extras)
                taken += sampler.takes(extras)
                cut += sampler.takes(extras) and cuts_top(Line(row), extras)
            lines.append(line_of(row, random_mask(rng, vocab)))
        on_device = torch.from_numpy(logits.copy())
        expected, chosen = extras_of.choose(NUMPY, lines, logits.copy()), extras_of.choose(sampler, lines, on_device)
        for line, one, other in zip(lines, expected, chosen, strict=True):
            assert one == other, f"seed {seed}, {line.row and line.row.sampling}"
        assert np.array_equal(on_device.numpy(), logits), "the logits were changed"
    assert taken > 300 and cut > 50


def test_the_least_weight_above_a_threshold_is_the_first_that_float64_says() -> None:
    rng = np.random.default_rng(5)
    for _ in range(500):
        total, threshold = int(rng.integers(1, 1 << 60)), float(rng.choice([0.0, 0.1, 0.5, rng.random() / 2]))
        least = sampler_of._least(total, threshold)
        assert float(least) / float(total) >= threshold
        assert least == 0 or float(least - 1) / float(total) < threshold


def test_a_weight_has_the_same_bits_without_float64() -> None:
    rng = np.random.default_rng(1)
    scaled = np.concatenate([-rng.exponential(9, 200_000), [0.0, -0.0, -44.0, -43.9999, -1e30, -np.inf]])
    scaled = scaled.astype(np.float32)
    assert np.array_equal(weigh(torch.from_numpy(scaled)).numpy(), weigh_on_host(scaled))


def test_no_line_of_logits_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the sampler needs is copied: flags, tokens, sums, and the logits of named tokens."""
    vocab, read = 5000, list[int]()
    for name in ("tolist", "cpu", "numpy", "item"):
        plain = getattr(torch.Tensor, name)

        def counting(self: Any, *given: Any, plain: Any = plain, **named: Any) -> Any:
            read.append(self.numel())
            return plain(self, *given, **named)

        monkeypatch.setattr(torch.Tensor, name, counting)
    tokens = list(range(40))
    params = SamplingParams(
        max_tokens=9, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=True,
        top_logprobs=5, logit_bias=((3, 1.0),),
    )  # fmt: skip
    extras = SamplingExtras(
        dry_multiplier=0.8, xtc_probability=1.0, xtc_threshold=0.05, allowed_token_ids=tuple(range(0, vocab, 2)),
        bad_words=((7,), (38, 39, 8)),
    )  # fmt: skip
    row = Row(tokens, 0, 40, (), 39, 10, params, 0)
    logits = torch.from_numpy(lines_of_logits(np.random.default_rng(2), 6, vocab))
    read.clear()
    lines = [line_of(row)] * 3 + [line_of(with_extras(row, extras))] * 3
    choices = extras_of.choose(TorchSampler(), lines, logits)
    assert all(choice.token is not None for choice in choices)
    assert max(read) <= 6 * 41, "more than the named tokens"
