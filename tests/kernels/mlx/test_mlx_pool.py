"""In-place writes into the KV pool by MLX: no step copies it, whatever has read it before."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its pools are not tested")

import mlx.core as mx

from cairn.kernels.mlx.cells import Cell
from cairn.kernels.mlx.mlx_kernels import MlxKernels
from cairn.kernels.mlx.program import MlxProgram
from cairn.kernels.program import KernelCall, Slot
from cairn.types.errors import DeviceError, DeviceMemoryError
from cairn.types.model_spec import BLOCK_TOKENS

LAYERS, HEADS, SIZE, TOKENS = 16, 4, 128, 8
BLOCKS = (256 << 20) // (LAYERS * 2 * HEADS * BLOCK_TOKENS * SIZE * 4)
MIB = 1 << 20


class PoolStep:
    """A pool of 256 MiB, and a step that writes each of 16 layers and attends to it."""

    def __init__(self, rows: int = TOKENS) -> None:
        self.kernels = MlxKernels("cpu")
        self.pool = self.kernels.allocate((BLOCKS, LAYERS, 2, HEADS, BLOCK_TOKENS, SIZE), "float32")
        shapes = {"qkv": (TOKENS, 3 * HEADS * SIZE), "query": (TOKENS, HEADS, SIZE), "out": (TOKENS, HEADS * SIZE)}
        self.cells = {name: self.kernels.allocate(shape, "float32") for name, shape in shapes.items()}
        integers = {"slots": (TOKENS,), "rows": (TOKENS, 3), "tables": (TOKENS, 4)}
        self.cells |= {name: self.kernels.allocate(shape, "int32") for name, shape in integers.items()}
        by_row = ("rows", "tables")
        slots = {name: Slot("rows" if name in by_row else "tokens", cell) for name, cell in self.cells.items()}
        calls = []
        for layer in range(LAYERS):
            written = (slots["qkv"], None, None, None, 1e-6, self.pool, layer, slots["slots"], slots["query"])
            calls.append(KernelCall("rope_write", written))
            places = (self.pool, layer, slots["rows"], slots["tables"], 0, 0.1, slots["out"])
            calls.append(KernelCall("attention", (slots["query"], *places)))
        self.program: MlxProgram = self.kernels.program(calls)
        with self.kernels.touching([self.pool], 0):
            self.upload()

    def upload(self) -> None:
        numbers = np.random.default_rng(1).standard_normal(self.cells["qkv"].shape).astype(np.float32)
        starts = np.arange(TOKENS) + 33
        tables = np.arange(4 * TOKENS, dtype=np.int32).reshape(TOKENS, 4)
        slots = tables[:, 2] * BLOCK_TOKENS + starts % BLOCK_TOKENS
        rows = np.stack([np.arange(TOKENS), np.ones(TOKENS), starts], axis=1)
        uploads: list[tuple[Cell, np.ndarray]] = [(self.cells["qkv"], numbers), (self.cells["tables"], tables)]
        uploads += [(self.cells["slots"], slots.astype(np.int32)), (self.cells["rows"], rows.astype(np.int32))]
        self.kernels.upload(uploads)

    def run(self) -> tuple[float, float]:
        """Return the seconds of a step, and its additional peak memory in MiB."""
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        self.program.replay({"tokens": TOKENS, "rows": TOKENS})
        return time.perf_counter() - start, (mx.get_peak_memory() - held) / MIB


@pytest.mark.parametrize("compiled", [False, True])
def test_16_writes_into_a_pool_of_256_mib_copy_nothing(
    compiled: bool, prove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read before the next; one copy of the pool would take 256 MiB, and ten times as long."""
    if compiled and not prove:
        pytest.skip("only with --prove: on a CPU it calls a C++ compiler")
    gc.collect()
    before = mx.get_active_memory()
    step = PoolStep()
    monkeypatch.setattr(step.program, "_compiled", compiled)
    step.run()
    held = mx.get_active_memory()
    results = [step.run() for _ in range(5)]
    assert max(more for _, more in results) < 32, results
    assert mx.get_peak_memory() - before < (256 + 48) * MIB
    copying = []
    with step.kernels.active():
        for _ in range(3):
            start = time.perf_counter()
            mx.eval([array + 1 for array in step.pool.as_pool().arrays])
            copying.append(time.perf_counter() - start)
    assert min(seconds for seconds, _ in results) < min(copying), (results, copying)
    assert abs(mx.get_active_memory() - held) < 8 * MIB


def test_pages_that_were_read_do_not_make_the_next_step_copy() -> None:
    step = PoolStep()
    step.run()
    pages = step.kernels.read_pages(step.pool, [3, 4])
    kept = bytes(pages[0])
    _, more = step.run()
    step.kernels.write_pages(step.pool, [9], pages[:1])
    step.kernels.copy_blocks(step.pool, [(9, 10), (10, 11)])
    assert more < 32 and bytes(pages[0]) == kept
    assert bytes(step.kernels.read_pages(step.pool, [11])[0]) == kept


def test_a_view_of_a_layer_copies_that_layer_alone() -> None:
    """The reason for one array per layer: with one array for all, this would copy everything."""
    step = PoolStep()
    step.run()
    with step.kernels.active():
        view = step.pool.as_pool().layers[0][0][3]
        _, more = step.run()
        assert 0 < more < 32 + 256 / LAYERS
        mx.eval(view)


def test_blocks_are_copied_in_order() -> None:
    kernels = MlxKernels("cpu")
    pool = kernels.allocate((6, 2, 2, 1, BLOCK_TOKENS, 4), "float32")
    numbers = np.random.default_rng(1).standard_normal(pool.shape).astype(np.float32)
    kernels.upload([(pool, numbers)])
    kernels.read_pages(pool, [0])
    pairs = [(0, 1), (1, 2), (3, 0), (2, 4), (5, 2)]
    kernels.copy_blocks(pool, pairs)
    for source, target in pairs:
        numbers[target] = numbers[source]
    np.testing.assert_array_equal(kernels.fetch(pool), numbers)


def failing(monkeypatch: pytest.MonkeyPatch, times: int, text: str) -> None:
    """Let the next evaluations fail as MLX does without memory."""
    left, evaluate = [times], mx.eval

    def eval_(*arrays: object) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError(text)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", eval_)


def test_a_step_without_memory_leaves_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pools cannot be restored, the step raises DeviceError, so that the worker ends."""
    step = PoolStep()
    step.run()
    before = bytes(step.kernels.read_pages(step.pool, [0])[0])
    failing(monkeypatch, 1, "[malloc] Unable to allocate 99 bytes.")
    with pytest.raises(DeviceMemoryError, match="Unable to allocate 99 bytes"):
        step.run()
    step.run()
    assert bytes(step.kernels.read_pages(step.pool, [0])[0]) == before
    failing(monkeypatch, 2, "[malloc] Unable to allocate 99 bytes.")
    with pytest.raises(DeviceError, match="the KV is lost") as caught:
        step.run()
    assert not isinstance(caught.value, DeviceMemoryError)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_cannot_be_built_leaves_the_pools(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tokens may be written in some layers; they are computed again."""
    step = PoolStep()
    step.run()
    page = bytes(step.kernels.read_pages(step.pool, [2])[0])
    rng = np.random.default_rng(2)
    filled = memoryview(rng.standard_normal(len(page) // 4).astype(np.float32)).cast("B")
    step.kernels.write_pages(step.pool, [BLOCKS - 1], [filled])
    monkeypatch.setattr(step.program, "_compiled", compiled)
    mx.disable_compile()
    asked, attend = [], mx.fast.scaled_dot_product_attention

    def failing_attention(*arguments: object, **more: object) -> object:
        asked.append(1)
        if len(asked) == LAYERS // 2:
            raise ValueError("this shape is not built")
        return attend(*arguments, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", failing_attention)
    with pytest.raises(ValueError, match="not built"):
        step.run()
    for _ in range(2):
        result = step.kernels.read_pages(step.pool, [2, BLOCKS - 1])
        assert [bytes(one) for one in result] == [page, bytes(filled)]
        step.run()
    mx.enable_compile()
