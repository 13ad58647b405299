"""Sampling on a torch device: greedy lines on the device, all others from a copy on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.kernels.vocabulary import GREEDY_BELOW, NUMPY, Line, TokenChoice

Tensor = Any
Floats = NDArray[np.float32]


class TorchSampler:
    """`kernels.vocabulary.Sampler` over tensors.

    The highest logit is found on the device. Lines with a random draw, penalties, bias, a mask or log-probabilities are
    copied to the host and sampled by the reference sampler.
    """

    def greedy(self, logits: Tensor) -> list[int]:
        """`Sampler.greedy`."""
        finite = logits.amin(dim=1).isfinite() & logits.amax(dim=1).isfinite()
        # argmax returns the first of equal ones.
        tokens: list[int] = torch.where(finite, logits.argmax(dim=1), -1).tolist()
        return tokens

    def choose(self, lines: Sequence[Line], logits: Tensor) -> list[TokenChoice]:
        """`Sampler.choose`."""
        best = self.greedy(logits)
        choices = [
            TokenChoice(token >= 0, token if line.row and token >= 0 else None)
            for line, token in zip(lines, best, strict=True)
        ]
        wanted = [number for number, line in enumerate(lines) if choices[number].finite and not _plain(line)]
        if wanted:
            copied = logits[torch.tensor(wanted, device=logits.device)].cpu().numpy()
            for number, choice in zip(wanted, NUMPY.choose([lines[one] for one in wanted], copied), strict=True):
                choices[number] = choice
        return choices

    def line(self, logits: Tensor, number: int) -> Floats:
        """`Sampler.line`."""
        copied: Floats = logits[number].to("cpu", copy=True).numpy()
        return copied


def _plain(line: Line) -> bool:
    """Tell whether a line only needs its highest logit."""
    if line.top is not None:
        return False
    if line.row is None:
        return True
    params = line.row.sampling
    changed = params.logit_bias or params.needs_history or params.min_tokens or line.mask or params.extras is not None
    return params.temperature < GREEDY_BELOW and not changed
