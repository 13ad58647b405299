"""Random weights have the published sizes of their models."""

from __future__ import annotations

import numpy as np
import pytest

from cairn.kernels.quantized import dequantized
from cairn.models.hub.hub import demo_folder
from cairn.models.packing.random_weights import SHAPES, TYPES, RandomWeights, shape_spec
from cairn.models.quantization.tensor_meta import outlines
from cairn.models.safetensors.weights import expected_tensors, parameters
from cairn.models.spec.config import load_spec

MILLIONS = {"demo": 5.84, "qwen3-0.6b": 596, "llama-3.2-1b": 1236, "gemma3-270m": 268, "gemma3-1b": 1000}
MILLIONS |= {"qwen3-8b": 7568}  # 8,191 with an output matrix of its own
MILLIONS |= {"qwen3.5-0.8b": 752, "qwen3.5-4b": 4206}
MILLIONS["qwen3-30b-a3b-4-layers"] = 2804  # 30,532 for all 48 layers, with an output matrix of its own


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_size_of_their_models(name: str) -> None:
    assert parameters(shape_spec(name)) / 1e6 == pytest.approx(MILLIONS[name], rel=0.01)


def test_the_demo_shape_is_the_demo_model() -> None:
    assert expected_tensors(shape_spec("demo")) == expected_tensors(load_spec(demo_folder(), identify=False))


@pytest.mark.parametrize("kind", TYPES)
def test_random_weights_are_what_their_outline_says_and_the_same_each_time(kind: str) -> None:
    weights = RandomWeights(shape_spec("demo"), kind)
    known = outlines(weights)
    assert list(known) == list(expected_tensors(shape_spec("demo")))
    for name in ("model.embed_tokens.weight", "model.layers.5.mlp.down_proj.weight", "model.norm.weight"):
        array, outline = weights[name], known[name]
        assert outline.shape == array.shape and outline.made == array.nbytes
        if outline.scale:
            assert outline.minimum == ("" if array.minimum is None else str(array.minimum.dtype))
            assert (outline.dtype, outline.scale) == (str(array.codes.dtype), str(array.scale.dtype))
            array, again = dequantized(array), dequantized(weights[name])
            assert array.std() * np.sqrt(array.shape[1]) == pytest.approx(1, rel=0.03)
            assert abs(array.mean()) < 0.01 * array.std()
        else:
            assert outline.dtype == str(array.dtype)
            again = weights[name]
        assert np.array_equal(array, again)
        assert np.isfinite(array.astype(np.float32)).all() and array.std() > 0


def test_files_of_mixed_types_hold_the_output_and_some_matrices_in_more_bits() -> None:
    weights = RandomWeights(shape_spec("qwen3-0.6b"), "q4_k_m")
    more = [name for name in weights if weights.outline(name).bits == 6]
    down = [int(name.split(".")[2]) for name in more if "down_proj" in name]
    assert "model.embed_tokens.weight" in more and sum("v_proj" in name for name in more) == len(down) == 14
    assert down == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert len(more) == 1 + 2 * len(down)
