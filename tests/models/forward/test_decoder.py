"""Recorded forward passes of decoders replay as the direct run computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.kernels.program import Interpreted, Slot
from cairn.models.forward import buffers as step
from cairn.models.forward import decoder
from cairn.models.forward.recorder import Recorder
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import BLOCK_TOKENS
from tests.tiny_models import KERNELS, MODELS, load, write_model

SIZES = [(256, 32), (1, 1), (13, 5), (255, 31), (8, 8), (90, 1)]


@pytest.mark.sweep("kind")
@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_replay_equals_the_direct_run(name: str, kind: str, tmp_path: Path) -> None:
    """For any number of tokens and logits rows; also after larger steps left their numbers in the buffers."""
    folder = write_model(tmp_path, **MODELS[name])
    spec, engine = load_spec(folder), load(folder, kv_gb=0.005, kernels=kind)
    kernels, buffers, kv = engine._kernels, engine._buffers, engine._kv
    built = decoder.build(kernels, spec.served(engine.info.context), open_weights(folder, spec))
    rng = np.random.default_rng(3)

    def run(direct: bool, sizes: Any) -> list[np.ndarray]:
        for pool in kv:
            pool[:] = 0
        if direct:
            views = step.cut(kernels, buffers, sizes)
            decoder.body(kernels, built, kv, views)
            decoder.head(kernels, built, views)
        else:
            engine._body.replay(sizes)
            engine._head.replay(sizes)
        kept = [buffers.hidden[: sizes["tokens"]], buffers.logits[: sizes["logits"]], *kv]
        return [np.ascontiguousarray(array).view(np.uint8) for array in kept]

    for tokens, wanted in SIZES:
        buffers.tokens[:tokens] = rng.integers(0, spec.vocab, tokens)
        buffers.positions[:tokens] = np.arange(tokens)
        # Two rows: the first third of the tokens and the rest, each from position 0.
        cut = max(1, tokens // 3)
        rows = [(0, cut, 0), (cut, tokens - cut, 0)][: 1 if tokens == 1 else 2]
        buffers.rows[: len(rows)] = rows
        for row, (first, count, _) in enumerate(rows):
            buffers.positions[first : first + count] = np.arange(count)
            for table, slots in zip(buffers.tables, buffers.slots, strict=True):
                table[row] = np.arange(table.shape[1]) + 20 * row
                slots[first : first + count] = np.arange(count) + 320 * row
        buffers.wanted[:wanted] = rng.integers(0, tokens, wanted)
        blocks = max(-(-count // BLOCK_TOKENS) for _, count, _ in rows)
        sizes = {"tokens": tokens, "rows": len(rows), "logits": wanted, "blocks": blocks}
        with np.errstate(all="ignore"):
            direct = [bits.copy() for bits in run(True, sizes)]
            assert all(map(np.array_equal, direct, run(False, sizes))), sizes


def test_a_recording_names_each_buffer_once_and_computes_nothing(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path))
    calls = engine._body.calls
    assert [call.kernel for call in calls[:2]] == ["embed", "rope_angles"]
    assert [call.kernel for call in calls[2:7]] == [
        "norm_project",
        "rope_write",
        "attention",
        "project_add",
        "gated_mlp",
    ]
    assert len(calls) == 2 + 2 * 5 and [call.kernel for call in engine._head.calls] == ["logits"]
    slots = [argument for call in calls for argument in call.arguments if isinstance(argument, Slot)]
    assert len({id(slot) for slot in slots}) == len({id(slot.array) for slot in slots})


def test_a_program_cuts_its_buffers_and_passes_constants_on() -> None:
    seen: list[tuple[Any, ...]] = []

    class Kernels:
        def first(self, array: list[int], count: int) -> list[int]:
            return array[:count]

        def kernel(self, *arguments: Any) -> None:
            seen.append(arguments)

    recorder: Any = Recorder()
    tokens, wanted = Slot("tokens", [1, 2, 3, 4]), Slot("logits", [5, 6])
    recorder.kernel(tokens, 7, wanted)
    recorder.kernel(None, tokens)
    assert seen == []
    kernels: Any = Kernels()
    program = Interpreted(kernels, recorder.calls)
    program.replay({"tokens": 3, "logits": 1})
    program.replay({"tokens": 1, "logits": 2})
    assert seen == [([1, 2, 3], 7, [5]), (None, [1, 2, 3]), ([1], 7, [5, 6]), (None, [1])]
