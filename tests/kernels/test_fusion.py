"""Neighbouring calls are fused if nothing else reads what they pass on.

tests/models/forward/test_decoder.py tests that the numbers stay the same, by replaying fused programs against plain
calls.
"""

from __future__ import annotations

from cairn.kernels.fusion import fuse
from cairn.kernels.program import KernelCall, Slot

HIDDEN, X = Slot("tokens", 0), Slot("tokens", 1)
NORMED, GATES, GATED, PROJECTED = (Slot("tokens", number, True) for number in range(2, 6))
MLP = [
    KernelCall("norm", (HIDDEN, "w", 1e-6, NORMED)),
    KernelCall("project", (NORMED, "up", GATES)),
    KernelCall("gate", (GATES, "silu", GATED)),
    KernelCall("project", (GATED, "down", PROJECTED)),
]


def names(calls: list[KernelCall]) -> list[str]:
    return [call.kernel for call in fuse(calls)]


def test_the_longest_run_becomes_one_call() -> None:
    (call,) = fuse([*MLP, KernelCall("add", (PROJECTED, HIDDEN))])
    assert call == KernelCall("gated_mlp", (HIDDEN, "w", 1e-6, "up", "silu", "down"))
    post = [*MLP, KernelCall("norm", (PROJECTED, "v", 1e-6, NORMED)), KernelCall("add", (NORMED, HIDDEN))]
    assert fuse(post) == [
        KernelCall("gated_project", (HIDDEN, "w", 1e-6, "up", "silu", "down", PROJECTED)),
        KernelCall("norm_add", (PROJECTED, "v", 1e-6, HIDDEN)),
    ]


def test_a_buffer_that_is_read_again_is_not_fused_away() -> None:
    plain = [KernelCall("norm", (HIDDEN, "w", 1e-6, NORMED)), KernelCall("project", (NORMED, "m", X))]
    assert names(plain) == ["norm_project"]
    again = KernelCall("project", (NORMED, "n", X))
    assert names([*plain, again]) == ["norm", "project", "project"]
    assert names([*plain, KernelCall("norm", (X, "w", 1e-6, NORMED)), again]) == ["norm_project", "norm_project"]


def test_a_buffer_visible_outside_the_program_is_not_fused_away() -> None:
    kept = Slot("tokens", 9)
    assert names([KernelCall("norm", (HIDDEN, "w", 1e-6, kept)), KernelCall("project", (kept, "m", X))]) == [
        "norm",
        "project",
    ]


def test_a_sum_into_another_array_than_was_normed_is_no_gated_mlp() -> None:
    assert names([*MLP, KernelCall("add", (PROJECTED, X))]) == ["gated_project", "add"]
