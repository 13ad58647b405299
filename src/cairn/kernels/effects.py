"""Declarations of which arguments a kernel writes, at its signature.

Transformations of a program (fusion, replay over values instead of buffers, graph capture) need to know which arguments
a kernel overwrites and which it only reads. `@effect` on a method of `kernels.base.Kernels` declares it;
`tests/kernels/test_effects.py` checks the declarations against the reference kernels.
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
    """Indexes of the arguments that a kernel changes. All others are only read."""

    writes: tuple[int, ...]
    """Overwritten in all of the step's entries without being read (unless passed as an input as well)."""
    updates: tuple[int, ...]
    """Changed in place, or in some entries only, so that the previous contents matter."""

    @property
    def changes(self) -> tuple[int, ...]:
        """Writes and updates, in the order of the arguments."""
        return tuple(sorted((*self.writes, *self.updates)))


def effect(*, writes: str = "", updates: str = "") -> Callable[[F], F]:
    """Declare which arguments a kernel writes and which it updates, as names separated by spaces."""

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
