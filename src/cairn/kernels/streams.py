"""Streams of a hidden state that is kept several times over (Gemma 3n), and what its MLP lets through, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def mix(x: Floats, parts: Floats, out: Floats) -> None:
    """`kernels.base.Kernels.mix_streams`."""
    count = x.shape[1]
    out[:] = x
    for stream in range(count):
        for other in range(count):
            out[:, stream] += parts[:, stream * count + other, None] * x[:, other]


def match_magnitude(like: Floats, x: Floats) -> None:
    """`kernels.base.Kernels.match_magnitude`."""
    wanted, found = (np.square(one).sum(axis=-1, keepdims=True) / np.float32(x.shape[1]) for one in (like, x))
    x *= np.sqrt(wanted)
    x /= np.sqrt(np.maximum(found, np.float32(1e-5)))


def sparsify(gates: Floats, factor: float) -> None:
    """`kernels.base.Kernels.sparsify`."""
    width = gates.shape[1] // 2
    own = np.ascontiguousarray(gates[:, :width])
    mean = own.sum(axis=-1, keepdims=True) / np.float32(width)
    spread = np.square(own - mean).sum(axis=-1, keepdims=True) / np.float32(width)
    gates[:, :width] = np.maximum(own - (mean + np.sqrt(spread) * np.float32(factor)), np.float32(0))
