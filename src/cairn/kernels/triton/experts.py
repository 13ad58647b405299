"""Experts: (token, expert) pairs sorted by expert on the device, and products of their tiles in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cairn.kernels.torch.weights import TorchMatrix
from cairn.kernels.triton.rowwise import gate

Tensor = Any


def run(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Sequence[TorchMatrix],
    activation: str,
    down: Sequence[TorchMatrix],
    out: Tensor,
) -> None:
    """Run `Kernels.experts`: each expert multiplies its rows, and a token's results are added in ascending order."""
    count, most = chosen.shape
    if not count:
        return
    flat = chosen.reshape(-1).long()
    order = torch.sort(flat, stable=True).indices
    sizes = torch.bincount(flat, minlength=len(down)).tolist()
    made = torch.empty((count * most, out.shape[1]), device=x.device)
    first = 0
    for expert, size in enumerate(sizes):
        if size:
            places = order[first : first + size]
            gates = gate_up[expert].product(x[places // most])
            inner = down[expert].inner
            up = gates[:, inner:] if gates.shape[1] == 2 * inner else None
            passed = gate(gates, up, activation, torch.empty((size, inner), device=x.device))
            made[places] = down[expert].product(passed)
            first += size
    made = made.reshape(count, most, -1)
    out.copy_(shares[:, :1] * made[:, 0])
    for place in range(1, most):
        out += shares[:, place, None] * made[:, place]
