"""A recorded forward pass: kernel calls over buffers, of which each step uses the first entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Size = Literal["tokens", "rows", "logits", "blocks"]
"""Unit of a buffer's axis: M tokens, B rows or R logits rows of a step, or the blocks of its longest table."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A buffer of a program, cut to the step's size along its first axis at replay."""

    size: Size
    array: Any
    passing: bool = False
    """Whether only the program reads it."""
    second: Size | None = None
    """Size of the second axis at replay; None: whole. Kernels are faster if it is cut to the step's longest context."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel call of a program. Arguments that are `Slot`s are cut at replay; all others are constants."""

    kernel: str
    arguments: tuple[Any, ...]


class Program(Protocol):
    """A recorded list of calls, made by `Kernels.program`. A replay equals the direct calls, bit for bit."""

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """The calls in order."""
        ...

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """Run the calls over the first entries of the buffers, as many as `sizes` says."""
        ...


def slots(calls: Sequence[KernelCall]) -> tuple[Slot, ...]:
    """Return the distinct slots of the calls."""
    return tuple({id(one): one for call in calls for one in call.arguments if isinstance(one, Slot)}.values())


class Interpreted:
    """A `Program` that calls the kernels one by one."""

    def __init__(self, kernels: Any, calls: Sequence[KernelCall]) -> None:
        self._kernels = kernels
        self.calls = tuple(calls)
        self._slots = slots(calls)

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """Call each kernel over views of the buffers."""
        views = {id(slot): self._cut(slot, sizes) for slot in self._slots}
        for call in self.calls:
            arguments = [views.get(id(one), one) for one in call.arguments]
            getattr(self._kernels, call.kernel)(*arguments)

    def _cut(self, slot: Slot, sizes: Mapping[Size, int]) -> Any:
        if slot.second is None:
            return self._kernels.first(slot.array, sizes[slot.size])
        return self._kernels.first(slot.array, sizes[slot.size], sizes[slot.second])
