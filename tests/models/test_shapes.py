from __future__ import annotations

import numpy as np
import pytest

from cairn.models.hub import demo_folder
from cairn.models.shapes import SHAPES, TYPES, RandomWeights, shape_spec
from cairn.models.spec import load_spec
from cairn.models.weights import expected_tensors, outlines, parameters

MILLIONS = {"demo": 4.68, "qwen3-0.6b": 596, "llama-3.2-1b": 1236}


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
        array = weights[name]
        assert (known[name].shape, known[name].dtype) == (array.shape, str(array.dtype))
        assert known[name].made == array.nbytes
        assert np.array_equal(array, weights[name])
        assert np.isfinite(array.astype(np.float32)).all() and array.std() > 0
