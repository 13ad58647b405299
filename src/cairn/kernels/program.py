"""A recorded forward pass: kernel calls over buffers whose first axis is cut to the step's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Size = Literal["tokens", "rows", "logits", "blocks"]
"""What an axis of a buffer counts: M tokens, B rows or R logits rows of a step, or the blocks of its longest table."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A buffer in a program: its first axis is cut to the step's size at replay."""

    size: Size
    array: Any
    passing: bool = False
    """Whether nothing outside the program reads it."""
    second: Size | None = None
    """What its second axis is cut to, where kernels profit from that: else a step would pay for the whole context."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call of a program; arguments that are `Slot`s are cut at replay, all others are constants."""

    kernel: str
    arguments: tuple[Any, ...]


class Program(Protocol):
    """A recorded list of calls, as `Kernels.program` makes it. Replaying equals the direct run, bit for bit."""

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """The calls in order."""
        ...

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """Run the calls over the buffers' first `sizes` entries."""
        ...


def slots(calls: Sequence[KernelCall]) -> tuple[Slot, ...]:
    """Return every slot of the calls, once."""
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
