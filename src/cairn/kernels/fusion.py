"""Fusion of neighbouring calls of a program into one kernel, if a kernel set has one for them.

A model is written as a list of plain operations. A result between two of them is mostly read once: a fused kernel keeps
it in registers or the cache and saves memory traffic. The numbers are the same, bit for bit. Each kernel set has rules
of its own; `kernels.base.EFFECTS` tells which arguments a kernel overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cairn.kernels.base import EFFECTS
from cairn.kernels.program import KernelCall, Slot


class FusionRule(NamedTuple):
    """A sequence of calls that a kernel set can run as one."""

    calls: tuple[str, ...]
    """Names of consecutive kernels."""
    chain: tuple[int, ...]
    """For each call but the first, the index of the argument that the call before it wrote."""
    fused: str
    arguments: Callable[[Sequence[tuple[Any, ...]]], tuple[Any, ...] | None]
    """Makes the fused call's arguments from those of the calls; None if the fused call would differ."""


def _gated_mlp(found: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    (hidden, norm, eps, _), (_, gate_up, _), (_, activation, _), (_, down, _), (_, to) = found
    return (hidden, norm, eps, gate_up, activation, down) if to is hidden else None


CPU_RULES = (
    FusionRule(("norm", "project", "gate", "project", "add"), (0, 0, 0, 0), "gated_mlp", _gated_mlp),
    FusionRule(
        ("norm", "project", "gate", "project"),
        (0, 0, 0),
        "gated_project",
        lambda found: (*found[0][:3], found[1][1], found[2][1], found[3][1], found[3][2]),
    ),
    FusionRule(("norm", "project"), (0,), "norm_project", lambda found: (*found[0][:3], *found[1][1:])),
    FusionRule(("norm", "add"), (0,), "norm_add", lambda found: (*found[0][:3], found[1][1])),
    FusionRule(("project", "add"), (0,), "project_add", lambda found: (*found[0][:2], found[1][1])),
)
"""Fusions of the CPU kernels; longer sequences first."""


def fuse(calls: Sequence[KernelCall], rules: Sequence[FusionRule] = CPU_RULES) -> list[KernelCall]:
    """Replace each sequence of calls that a rule matches by one call. The first matching rule counts."""
    done: list[KernelCall] = []
    at = 0
    while at < len(calls):
        for rule in rules:
            fused = _fused(rule, calls, at)
            if fused is not None:
                done.append(fused)
                at += len(rule.calls)
                break
        else:
            done.append(calls[at])
            at += 1
    return done


def _fused(rule: FusionRule, calls: Sequence[KernelCall], at: int) -> KernelCall | None:
    """Fuse the calls from `at` on; None if the rule does not match or a result in between is read elsewhere, too."""
    run = calls[at : at + len(rule.calls)]
    if tuple(call.kernel for call in run) != rule.calls:
        return None
    for place, (before, after) in enumerate(pairwise(run)):
        (written,) = EFFECTS[before.kernel].writes
        passed = before.arguments[written]
        given = [number for number, one in enumerate(after.arguments) if one is passed]
        if not (isinstance(passed, Slot) and passed.passing) or given != [rule.chain[place]]:
            return None
        if _read(passed, [*run[place + 2 :], *calls[at + len(run) :]]):
            return None
    arguments = rule.arguments([call.arguments for call in run])
    return None if arguments is None else KernelCall(rule.fused, arguments)


def _read(slot: Slot, calls: Sequence[KernelCall]) -> bool:
    """Tell whether one of the calls reads a slot before any of them overwrites it."""
    for call in calls:
        places = [number for number, one in enumerate(call.arguments) if one is slot]
        if places:
            return len(places) > 1 or places[0] not in EFFECTS[call.kernel].writes
    return False
