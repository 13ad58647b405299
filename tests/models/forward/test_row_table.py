"""Tables of which each step reads few rows stay in their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from cairn.engine.memory import weight_memory
from cairn.models.families.uneven_spec import INPUTS
from cairn.models.forward.row_table import open_table
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelFileError
from tests.gguf_files import write_gguf
from tests.tiny_models import BFLOAT16, MODELS, load, write_model

E = MODELS["gemma 4 e"] | {"hidden_size_per_layer_input": 32}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_rows_are_those_of_the_file(dtype: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, **E, dtype=dtype)
    table = open_table(folder, load_spec(folder))
    assert table is not None
    want = load_file(folder / "model.safetensors")[INPUTS].astype(np.float32)
    ids, out = [3, 0, 169, 3, 5], np.empty((5, 6 * 32), np.float32)
    table.read(ids, out)
    assert (out == want[ids]).all()
    table.read([170, 1 << 20, 2, 2, 2], out)  # an id beyond the table reads the first row
    assert (out == want[[0, 0, 2, 2, 2]]).all()
    table.close()
    table.close()


def test_rows_of_a_packed_table_are_unpacked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **E)
    path = write_gguf(
        folder, tmp_path / "m.gguf", kind=lambda name, array: Type.Q8_0 if "per_layer_tok" in name else Type.F32
    )
    table, out = open_table(path, load_spec(path)), np.empty((3, 6 * 32), np.float32)
    assert table is not None
    table.read([7, 169, 7], out)
    stored = load_file(folder / "model.safetensors")[INPUTS]
    assert (out == dequantize(quantize(stored, Type.Q8_0), Type.Q8_0)[[7, 169, 7]]).all()
    table.close()


def test_the_table_counts_in_no_memory(tmp_path: Path) -> None:
    """A hundred times as many rows take no more memory."""
    sizes = []
    for rows in (170, 17_000):
        folder = write_model(tmp_path / str(rows), **E | {"vocab_size_per_layer_input": rows})
        spec = load_spec(folder)
        sizes.append(weight_memory(spec, HeldWeights(open_weights(folder, spec), "stored"), "reference").held)
    assert sizes[0] == sizes[1]


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **E)
    table, out = open_table(folder, load_spec(folder)), np.empty((1, 6 * 32), np.float32)
    assert table is not None
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(table.place.begin + 10)
    with pytest.raises(ModelFileError, match="became shorter"):
        table.read([5], out)
    table.close()


def test_a_table_of_another_type_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **E)
    spec, tensors = load_spec(folder), load_file(folder / "model.safetensors")
    save_file(tensors | {INPUTS: tensors[INPUTS].astype(np.int32)}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="is stored as int32; supported are F32"):
        open_table(folder, spec)


def test_a_model_without_has_none_and_an_engine_closes_its_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain")
    assert open_table(folder, load_spec(folder)) is None
    engine = load(write_model(tmp_path / "e", **E))
    assert engine._rows is not None
    engine.close()
    assert engine._rows._file == -1
