"""What each kernel does to its arguments, declared once, at its signature.

Whoever changes the order or the number of a program's calls has to know which arguments a kernel overwrites and which
it only reads: fusion, a replay over values in the place of buffers, the capture of a graph. `@effect` on a method of
`kernels.base.Kernels` says so; `tests/kernels/test_effects.py` holds the declarations against what the reference
kernels do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_DECLARED = "__kernel_effect__"


@dataclass(frozen=True, slots=True)
class Effect:
    """The arguments that a kernel changes, by their places in a call. All others are only read."""

    writes: tuple[int, ...]
    """Overwritten in all entries of the step; what they held before is not read (but one may be an input as well)."""
    updates: tuple[int, ...]
    """Changed in place, or in some entries alone: what they held before counts."""

    @property
    def changes(self) -> tuple[int, ...]:
        """Both, in the order of the arguments."""
        return tuple(sorted((*self.writes, *self.updates)))


def effect(*, writes: str = "", updates: str = "") -> Callable[[F], F]:
    """Declare which arguments a kernel writes and which it updates; names are separated by spaces."""

    def declare(kernel: F) -> F:
        names = _parameters(kernel)
        places = (tuple(names.index(name) for name in group.split()) for group in (writes, updates))
        setattr(kernel, _DECLARED, Effect(*places))
        return kernel

    return declare


def effects_of(kernels: type) -> Mapping[str, Effect]:
    """Return the declared effects of a class's methods, by kernel name."""
    found = ((name, getattr(method, _DECLARED, None)) for name, method in vars(kernels).items())
    return {name: declared for name, declared in found if declared is not None}


def parameters_of(kernels: type) -> Mapping[str, list[str]]:
    """Return the names of each declared kernel's arguments, in order."""
    return {name: _parameters(getattr(kernels, name)) for name in effects_of(kernels)}


def _parameters(kernel: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(kernel).parameters if name != "self"]
