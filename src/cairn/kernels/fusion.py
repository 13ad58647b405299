"""Neighbouring calls of a program as one kernel, where a kernel set has one for them.

A model is written as a list of plain operations. What stands between two of them is mostly read once: a kernel that
does both leaves it out, and needs neither its memory nor the way there and back. The numbers are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cairn.kernels.program import KernelCall, Slot

_WRITES = {"norm": 3, "project": 2, "gate": 2}
"""Kernel -> the argument that it writes and does not read, of those whose results may be left out."""


class _Rule(NamedTuple):
    calls: tuple[str, ...]
    """Kernels that follow each other."""
    chain: tuple[int, ...]
    """Which argument of each call but the first is what the one before it wrote."""
    fused: str
    arguments: Callable[[Sequence[tuple[Any, ...]]], tuple[Any, ...] | None]
    """Those of the fused call, from those of the calls; None where it cannot say what they do."""


def _gated_mlp(found: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    (hidden, norm, eps, _), (_, gate_up, _), (_, activation, _), (_, down, _), (_, to) = found
    return (hidden, norm, eps, gate_up, activation, down) if to is hidden else None


_RULES = (
    _Rule(("norm", "project", "gate", "project", "add"), (0, 0, 0, 0), "gated_mlp", _gated_mlp),
    _Rule(
        ("norm", "project", "gate", "project"),
        (0, 0, 0),
        "gated_project",
        lambda found: (*found[0][:3], found[1][1], found[2][1], found[3][1], found[3][2]),
    ),
    _Rule(("norm", "project"), (0,), "norm_project", lambda found: (*found[0][:3], *found[1][1:])),
    _Rule(("norm", "add"), (0,), "norm_add", lambda found: (*found[0][:3], found[1][1])),
    _Rule(("project", "add"), (0,), "project_add", lambda found: (*found[0][:2], found[1][1])),
)
"""Longer ones first."""


def fuse(calls: Sequence[KernelCall]) -> list[KernelCall]:
    """The calls with every run of them that a rule knows as one."""
    done: list[KernelCall] = []
    at = 0
    while at < len(calls):
        for rule in _RULES:
            fused = _fused(rule, calls, at)
            if fused is not None:
                done.append(fused)
                at += len(rule.calls)
                break
        else:
            done.append(calls[at])
            at += 1
    return done


def _fused(rule: _Rule, calls: Sequence[KernelCall], at: int) -> KernelCall | None:
    """The calls from `at` on as one; None where they are others, or where what they pass on is read elsewhere too."""
    run = calls[at : at + len(rule.calls)]
    if tuple(call.kernel for call in run) != rule.calls:
        return None
    for place, (before, after) in enumerate(pairwise(run)):
        passed = before.arguments[_WRITES[before.kernel]]
        given = [number for number, one in enumerate(after.arguments) if one is passed]
        if not (isinstance(passed, Slot) and passed.passing) or given != [rule.chain[place]]:
            return None
        if _read(passed, [*run[place + 2 :], *calls[at + len(run) :]]):
            return None
    arguments = rule.arguments([call.arguments for call in run])
    return None if arguments is None else KernelCall(rule.fused, arguments)


def _read(slot: Slot, calls: Sequence[KernelCall]) -> bool:
    """Whether one of the calls reads what a slot holds before it."""
    for call in calls:
        places = [number for number, one in enumerate(call.arguments) if one is slot]
        if places:
            return places != [_WRITES.get(call.kernel)]
    return False
