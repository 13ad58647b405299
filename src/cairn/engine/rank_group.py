"""The group of ranks, and matrices whose products are summed over it.

Parts of a sum are gathered and added in the order of the ranks. A ring that reduces adds in an order that depends on
where a number lies, so a token's bits would depend on its place in the step.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from cairn.engine.shards import ShardedWeights
from cairn.kernels.base import Kernels, Matrix
from cairn.types.errors import DeviceError

Tensor = Any

SECONDS = 300.0
"""Longest wait for another rank: a rank that loads, or one that hangs."""


class RankGroup:
    """This process's place among the ranks."""

    def __init__(self, rank: int, ranks: int, meeting: Path, device: str) -> None:
        """Meet the other ranks through a file that does not exist yet. Raises `DeviceError` if they do not come."""
        self.rank, self.ranks = rank, ranks
        backend = "nccl" if device.startswith(("cuda", "rocm")) else "gloo"
        try:
            distributed.init_process_group(
                backend,
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=ranks,
                timeout=datetime.timedelta(seconds=SECONDS),
            )
        except (RuntimeError, ValueError) as error:
            raise DeviceError(f"rank {rank} of {ranks} found no other ranks: {str(error).splitlines()[0]}") from error

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, the same bits on each."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        distributed.all_gather(parts, part)
        found = parts[0]
        for one in parts[1:]:
            found = found + one
        return found

    def close(self) -> None:
        """Leave the group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


class SummedMatrix:
    """A rank's part of a matrix cut by inputs; products are summed over the ranks."""

    def __init__(self, own: Any, group: RankGroup) -> None:
        self._own, self._group = own, group
        self.inner: int = own.inner

    def product(self, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the whole matrix's product; write it to `out`, or add it, if there is one."""
        whole = self._group.total(self._own.product(x))
        if out is None:
            return whole
        return out.add_(whole) if add else out.copy_(whole)


class ShardPacker:
    """The kernels as `decoder.build` needs them, for one rank's weights."""

    def __init__(self, kernels: Kernels, weights: ShardedWeights, group: RankGroup) -> None:
        self._kernels, self._weights, self._group = kernels, weights, group

    def matrix(self, weights: Sequence[Any], biases: Sequence[Any]) -> Matrix:
        """Pack matrices; those cut by inputs sum their products over the ranks."""
        made = self._kernels.matrix(weights, biases)
        return SummedMatrix(made, self._group) if self._weights.take_partial(list(weights)) else made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)
