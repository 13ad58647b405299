"""Captured steps: which steps are captured, and that a graph's launches match its sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")
pytest.importorskip("triton", reason="triton is not installed: kernels for GPUs are not tested")

import torch

from cairn.kernels import devices
from cairn.kernels.program import KernelCall, Size, Slot
from cairn.kernels.torch.torch_kernels import TorchKernels
from cairn.kernels.triton import capture, triton_kernels
from cairn.kernels.triton.capture import CapturedProgram
from cairn.types.step import Row
from tests.adapter_files import random_peft
from tests.tiny_models import GREEDY, MODELS, Driver, load, prompt, write_model


class Graphs:
    """A stand-in that captures by counting: a replay runs what would have been captured."""

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


def test_a_step_whose_graph_cannot_be_captured_runs_kernel_by_kernel_from_then_on() -> None:
    kernels = TorchKernels("cpu")
    hidden, tries = kernels.allocate((8, 4), "float32"), []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        tries.append(run)
        raise torch.OutOfMemoryError("no memory for a graph")

    made = CapturedProgram(kernels, [KernelCall("add", (torch.ones(1, 4), Slot("tokens", hidden)))], capture)
    for _ in range(4):
        made.replay(sizes(3, 3))
    assert len(tries) == 1
    np.testing.assert_array_equal(hidden.numpy()[:, 0], [4, 4, 4, 0, 0, 0, 0, 0])


class Baked(Graphs):
    """Graphs as a GPU would launch them: with the host's inputs at the time of capture."""

    def __init__(self, kernels: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self.busy = False

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        then = dict(self._kernels._host)

        def launch() -> None:
            now, self._kernels._host = self._kernels._host, dict(then)
            self.busy = True
            try:
                run()
            finally:
                self._kernels._host, self.busy = now, False

        return super().__call__(launch)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Baked]:
    """Compile all programs as on a GPU, in the interpreter; reading anything back within a graph is an error."""
    graphs: list[Baked] = []

    def make(self: Any, calls: Any) -> CapturedProgram:
        graphs.append(Baked(self))
        return CapturedProgram(self, calls, graphs[-1])

    monkeypatch.setattr(triton_kernels.TritonKernels, "program", make)
    for name in ("tolist", "item", "nonzero"):
        plain = getattr(torch.Tensor, name)

        def reads(self: Any, *given: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            assert "/cairn/" not in caller or not any(graph.busy for graph in graphs), f"{name} in a graph, by {caller}"
            return plain(self, *given, **named)

        monkeypatch.setattr(torch.Tensor, name, reads)
    return graphs


@pytest.mark.parametrize("name", ["qwen 3, head size of its own", "gemma 3"])
def test_whole_models_decode_from_graphs_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: list[Baked], prove: bool
) -> None:
    """Layers and head, with a packed embedding table; and hidden states, which are not captured."""
    if not prove and name == "gemma 3":
        pytest.skip("only with --prove")
    folder = write_model(tmp_path, **MODELS[name] | {"hidden_size": 64, "num_hidden_layers": 2})
    options = {"device": devices.INTERPRETED, "kv_dtype": "f32", "weights": "int8"}
    tokens = prompt(20)
    driver = Driver(load(folder, **options), monkeypatch)
    whole = driver.logits(tokens, [20], driver.tables(20))
    assert not any(one.captured for one in captured), "a prompt was captured"
    result = driver.logits(tokens, [16, 1, 1, 1, 1], driver.tables(20))
    np.testing.assert_array_equal(result, whole)
    body, head = captured[0], captured[1]
    assert (body.captured, body.launched) == (head.captured, head.launched) == (1, 3)
    driver.engine.embed([Row(tokens, 0, 20, driver.tables(20), None, 20, GREEDY, 0, want="hidden")]).wait()
    driver.engine.close()


def test_rows_with_adapters_run_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: list[Baked], prove: bool
) -> None:
    """Their matrices are chosen on the host: a graph would add the adapters of the captured rows."""
    if not prove:
        pytest.skip("only with --prove")
    folder = write_model(tmp_path / "model", **MODELS["llama 2"])
    engine = load(folder, device=devices.INTERPRETED, kv_dtype="f32")
    places = [random_peft(tmp_path / f"adapter {seed}", folder, seed) for seed in (1, 2)]
    digests = [engine.attach(engine.read_adapter(place)).digest for place in places]
    tokens, answers = prompt(6), list[list[int | None]]()
    for digest in (digests[0], digests[1]):
        tables, used = tuple([0] for _ in engine.info.groups), list[int | None]()
        for at in range(6):
            row = Row(tokens, at, at + 1, tables, at, 6, GREEDY, 0, adapters=((digest, 1.0),))
            used.append(engine.decode([row]).wait()[0].token)
        answers.append(used)
    assert answers[0] != answers[1], "the adapters do something else"
    assert not any(one.captured for one in captured if one is not captured[1]), "only the head is captured"
    engine.close()
