"""Norms stored one by one for each head: joined in order, or refused by the layer's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.models.gguf.reader import read_gguf
from cairn.models.packing.gguf_writer import write_gguf as write_again
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelFileError
from tests.gguf_files import write_gguf
from tests.tiny_models import MODELS, write_model

NAME = "stablelm, parallel, norms of heads"
OWN = "model.layers.1.self_attn.q_norm"
STORED = "model.layers.1.self_attn.q_layernorm.norms"

Tensors = dict[str, np.ndarray]


def test_heads_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS[NAME], num_key_value_heads=4)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(dict(sorted(tensors.items(), reverse=True)), path)
    joined = open_weights(folder, load_spec(folder))[f"{OWN}.weight"]
    np.testing.assert_array_equal(joined, np.concatenate([tensors[f"{STORED}.{head}.weight"] for head in range(4)]))


def without(tensors: Tensors) -> None:
    del tensors[f"{STORED}.2.weight"]


def without_any(tensors: Tensors) -> None:
    for head in range(4):
        del tensors[f"{STORED}.{head}.weight"]


def with_more(tensors: Tensors) -> None:
    tensors[f"{STORED}.4.weight"] = tensors[f"{STORED}.3.weight"]


def longer(tensors: Tensors) -> None:
    tensors[f"{STORED}.3.weight"] = np.ones(13, np.float32)


def of_another_type(tensors: Tensors) -> None:
    tensors[f"{STORED}.3.weight"] = tensors[f"{STORED}.3.weight"].astype(np.float16)


def whole_numbers(tensors: Tensors) -> None:
    for head in range(4):
        tensors[f"{STORED}.{head}.weight"] = np.ones(12, np.int32)


def of_a_layer_that_is_not_there(tensors: Tensors) -> None:
    tensors[f"{STORED}.0.weight".replace("layers.1.", "layers.2.")] = np.ones(12, np.float32)


WRONG: dict[Callable[[Tensors], None], str] = {
    without: f"{OWN}.weight needs a vector of one type for each head, numbered from 0",
    without_any: f"the tensor {OWN}.weight of shape .48. is missing",
    with_more: f"{OWN}.weight of all heads has the shape .60.",
    longer: f"{OWN}.weight of all heads has the shape .49.",
    of_another_type: f"{OWN}.weight needs a vector of one type",
    whole_numbers: f"{OWN}.weight of all heads has the shape .48. and the type int32, expected floats",
    of_a_layer_that_is_not_there: "norms.0.weight.* is not part of a StableLmForCausalLM|q_norm.0.weight.* is not part",
}


@pytest.mark.parametrize("change", WRONG)
def test_heads_that_do_not_fit_are_refused_by_name(change: Callable[[Tensors], None], tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS[NAME])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=WRONG[change]):
        open_weights(folder, load_spec(folder))


def test_norms_of_heads_stay_as_they_are_in_a_file_that_is_rounded(tmp_path: Path) -> None:
    """There they are a matrix whose rows blocks would divide: [heads, 32]."""
    folder = write_model(tmp_path / "model", **MODELS[NAME], hidden_size=128)
    path = write_gguf(folder, tmp_path / "m.gguf")
    write_again(path, load_spec(path), tmp_path / "rounded.gguf", "Q4_0", {}, lambda done, total: None)
    rounded = tmp_path / "rounded.gguf"
    kinds = {tensor.name: tensor.kind.name for tensor in read_gguf(rounded).tensors.values()}
    assert kinds["blk.0.attn_q_norm.weight"] == "F32" and kinds["blk.0.attn_q.weight"] == "Q4_0"
    ours, theirs = (open_weights(one, load_spec(one))[f"{OWN}.weight"] for one in (path, rounded))
    np.testing.assert_array_equal(ours, theirs)
