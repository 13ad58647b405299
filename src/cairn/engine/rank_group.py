"""The group of ranks, and programs whose products are summed over it.

Parts of a sum are gathered and added in the order of the ranks. A ring that reduces adds in an order that depends on
where a number lies, so a token's bits would depend on its place in the step.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from cairn.engine.shards import ShardedWeights
from cairn.kernels.base import EFFECTS, Kernels, Matrix
from cairn.kernels.program import KernelCall, Program, Size, Slot, slots
from cairn.types.errors import DeviceError

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

    def add_up(self, part: Any) -> None:
        """Replace an array of partial sums by their totals over all ranks, the same bits on each.

        Raises `DeviceError` if another rank is gone.
        """
        own = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        given = own.contiguous()
        parts = [torch.empty_like(given) for _ in range(self.ranks)]
        try:
            distributed.all_gather(parts, given)
        except RuntimeError as error:
            raise DeviceError(f"another rank is gone: {str(error).splitlines()[0]}") from error
        own.copy_(parts[0])
        for one in parts[1:]:
            own += one

    def close(self) -> None:
        """Leave the group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


class SummedProgram:
    """A program in pieces; after each piece but the last, partial sums are added up over the ranks."""

    def __init__(self, kernels: Kernels, group: RankGroup, pieces: Sequence[tuple[Program, Slot | None]]) -> None:
        """Make a program of pieces, each with the buffer of partial sums that it leaves; None for the last."""
        self._kernels, self._group, self._pieces = kernels, group, list(pieces)

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """All pieces' calls in order."""
        return tuple(call for piece, _ in self._pieces for call in piece.calls)

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """Run each piece, and add up its partial sums."""
        for piece, parts in self._pieces:
            piece.replay(sizes)
            if parts is not None:
                self._group.add_up(self._kernels.first(parts.array, sizes[parts.size]))


class ShardKernels:
    """A device's kernels as one rank uses them: products with matrices cut by inputs are summed over the ranks.

    Sums stand between programs and not within kernels, so every kernel set can have ranks, and a layer of experts has
    one sum however many of them its tokens chose.
    """

    def __init__(self, kernels: Kernels, weights: ShardedWeights, group: RankGroup) -> None:
        self._kernels, self._weights, self._group = kernels, weights, group
        self._partial: dict[int, Matrix] = {}
        """Matrices cut by inputs, by their identity."""

    def matrix(self, weights: Sequence[Any], biases: Sequence[Any]) -> Matrix:
        """Pack matrices, and remember those that are cut by inputs."""
        made = self._kernels.matrix(weights, biases)
        if self._weights.take_partial(list(weights)):
            self._partial[id(made)] = made
        return made

    def program(self, calls: Sequence[KernelCall]) -> Program:
        """Record calls as a program that adds up partial sums as soon as they are computed."""
        pieces: list[tuple[list[KernelCall], Slot | None]] = [([], None)]
        for call in calls:
            pieces[-1][0].append(call)
            if self._leaves_parts(call):
                (written,) = EFFECTS[call.kernel].writes
                pieces[-1] = (pieces[-1][0], call.arguments[written])
                pieces.append(([], None))
        if len(pieces) == 1:
            return self._kernels.program(calls)
        kept = _kept([piece for piece, _ in pieces])
        found = [(self._kernels.program([_replaced(call, kept) for call in piece]), end) for piece, end in pieces]
        return SummedProgram(self._kernels, self._group, found)

    def _leaves_parts(self, call: KernelCall) -> bool:
        matrices = [one for given in call.arguments for one in (given if isinstance(given, tuple) else (given,))]
        return any(id(one) in self._partial for one in matrices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def _kept(pieces: Sequence[Sequence[KernelCall]]) -> dict[int, Slot]:
    """Return a slot that outlives its piece for each internal slot of the program that several pieces use."""
    found: dict[int, Slot] = {}
    users: dict[int, set[int]] = {}
    for number, piece in enumerate(pieces):
        for slot in slots(piece):
            users.setdefault(id(slot), set()).add(number)
            if slot.passing and len(users[id(slot)]) > 1:
                found[id(slot)] = replace(slot, passing=False)
    return found


def _replaced(call: KernelCall, by: Mapping[int, Slot]) -> KernelCall:
    return KernelCall(call.kernel, tuple(by.get(id(one), one) for one in call.arguments))
