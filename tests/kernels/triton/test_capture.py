"""Captured steps: which are captured, and that a graph's launch is what its sizes need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")
pytest.importorskip("triton", reason="triton is not installed: kernels for GPUs are not tested")

import torch

from cairn.kernels.program import KernelCall, Size, Slot
from cairn.kernels.torch.torch_kernels import TorchKernels
from cairn.kernels.triton import capture
from cairn.kernels.triton.capture import CapturedProgram


class Graphs:
    """Captures nothing but counts: a replay runs what would have been captured."""

    def __init__(self) -> None:
        self.captured = self.launched = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def launch() -> None:
            self.launched += 1
            run()

        return launch


def program(*more: KernelCall, tables: Any = None) -> tuple[CapturedProgram, Graphs, Any]:
    kernels, graphs = TorchKernels("cpu"), Graphs()
    hidden = kernels.allocate((8, 4), "float32")
    calls = [KernelCall("add", (torch.ones(1, 4), Slot("tokens", hidden))), *more]
    return CapturedProgram(kernels, calls, graphs), graphs, hidden


def sizes(tokens: int, rows: int, blocks: int = 1) -> Mapping[Size, int]:
    return {"tokens": tokens, "rows": rows, "logits": rows, "blocks": blocks}


def test_a_decode_step_is_captured_when_its_sizes_come_again() -> None:
    made, graphs, hidden = program()
    for _ in range(4):
        made.replay(sizes(3, 3))
    assert (graphs.captured, graphs.launched) == (1, 3)
    np.testing.assert_array_equal(hidden.numpy()[:, 0], [4, 4, 4, 0, 0, 0, 0, 0])
    made.replay(sizes(4, 4))
    assert graphs.captured == 1
    np.testing.assert_array_equal(hidden.numpy()[:, 0], [5, 5, 5, 1, 0, 0, 0, 0])


def test_prompts_and_kernels_that_ask_the_host_are_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made, graphs, _ = program()
    for _ in range(3):
        made.replay(sizes(3, 1))
    monkeypatch.setattr(capture, "ASKS_THE_HOST", frozenset({"add"}))
    other, others, _ = program()
    for _ in range(3):
        other.replay(sizes(3, 3))
    assert graphs.captured == others.captured == 0


def test_a_longer_context_of_the_same_power_of_two_uses_the_same_graph() -> None:
    kernels, graphs = TorchKernels("cpu"), Graphs()
    table = kernels.allocate((8, 40), "float32")
    seen: list[int] = []
    call = KernelCall("scale_by", (Slot("rows", table, second="blocks"), torch.ones(1)))
    made = CapturedProgram(kernels, [call], graphs)
    kernels.scale_by = lambda array, _: seen.append(array.shape[1])  # type: ignore[method-assign]
    for blocks in (5, 6, 7, 8, 33, 40):
        made.replay(sizes(2, 2, blocks))
    assert seen == [8, 8, 8, 8, 40, 40] and graphs.captured == 2


def test_the_graph_used_least_recently_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_GRAPHS", 2)
    made, graphs, _ = program()
    for count in (1, 1, 2, 2, 1, 3, 3, 1, 2):
        made.replay(sizes(count, count))
    assert graphs.captured == 4, "the graph of two rows was captured again"
