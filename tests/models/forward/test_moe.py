"""Models with experts: what their files may say, how they are held and counted, and the order of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

from cairn.engine.memory import weight_memory
from cairn.kernels.choose import load_kernels
from cairn.kernels.quantized import dequantized
from cairn.kernels.reference import ReferenceKernels, gated
from cairn.models.forward.decoder import Attention, build
from cairn.models.forward.moe import Mixture
from cairn.models.packing import packed_file, packed_matrices
from cairn.models.packing.gguf_writer import write_gguf as write_again
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests.gguf_files import write_gguf
from tests.golden.test_gguf_parity import random_blocks
from tests.tiny_models import BFLOAT16, KERNELS, MODELS, Driver, load, prompt, write_config, write_model

QWEN = MODELS["qwen 3 moe"]
GLM = MODELS["glm 4.5"]
OSS = MODELS["gpt-oss"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (QWEN | {"num_experts": None}, "num_local_experts must be a whole number"),
        (QWEN | {"num_experts_per_tok": 7}, "num_experts_per_tok must be a whole number from 1 to 6"),
        (QWEN | {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of whole numbers"),
        (QWEN | {"use_sliding_window": True}, "use_sliding_window other than False is not supported"),
        (QWEN | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        (GLM | {"n_group": 3}, "8 experts cannot be divided into 3 groups"),
        (GLM | {"topk_group": 5}, "cannot be divided into 4 groups to choose 5 from"),
        (GLM | {"num_experts_per_tok": 5}, "5 chosen experts are more than the chosen groups have"),
        (OSS | {"swiglu_limit": 5.0}, "swiglu_limit other than 7"),
        (OSS | {"rope_scaling": None}, "rope_scaling is missing"),
        (OSS | {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        (MODELS["smollm 3"] | {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must be a list of 4 entries"),
    ],
)
def test_impossible_expert_settings_are_refused_by_name(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_spec(write_config(tmp_path, **fields))


def test_a_missing_expert_and_one_too_many_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **QWEN)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    array = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelFileError, match=r"layers\.1\.mlp\.experts\.4\.up_proj\.weight of shape \[40, 48\] is missing"
    ):
        open_weights(folder, load_spec(folder))
    save_file(tensors | {name: array, name.replace(".4.", ".6."): array}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"experts\.6\.up_proj\.weight' is not part of a Qwen3MoeForCausalLM"):
        open_weights(folder, load_spec(folder))


def test_halves_of_mxfp4_that_do_not_fit_are_named(tmp_path: Path) -> None:
    fields = OSS | {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    folder = write_model(tmp_path, **fields)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj"]
    blocks = np.zeros((6, 64, 2, 16), np.uint8)
    save_file(tensors | {"model.layers.0.mlp.experts.down_proj_blocks": blocks}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"down_proj\.weight\.scales must be U8 of shape \[64, 2\], found nothing"):
        open_weights(folder, load_spec(folder))


def test_layers_that_guess_further_tokens_are_set_aside(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **GLM)
    tensors = load_file(folder / "model.safetensors")
    ahead = {name.replace("layers.2.", "layers.3."): array for name, array in tensors.items() if "layers.2." in name}
    save_file(
        tensors | ahead | {"model.layers.3.eh_proj.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors"
    )
    weights = open_weights(folder, load_spec(folder))
    assert not any("layers.3." in name for name in weights)


@pytest.mark.parametrize("form", ["stored", "bf16", "int8", "int4"])
def test_router_weights_are_never_rounded(form: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype=BFLOAT16, **MODELS["qwen 2 moe, shared expert"] | {"hidden_size": 64})
    source = open_weights(folder, load_spec(folder))
    held = HeldWeights(source, form)
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.shared_expert_gate.weight"):
        assert held.outline(name).dtype == "float32" and held[name].dtype == np.float32
        assert np.array_equal(held[name], source[name].astype(np.float32))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", ["f32", "int4"])
def test_the_memory_of_experts_is_counted_and_a_token_streams_those_it_chooses(
    kernels: str, form: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, **QWEN | {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1})
    spec = load_spec(folder)
    memory = weight_memory(spec, HeldWeights(open_weights(folder, spec), form), kernels)
    made = load_kernels(kernels, 1)
    built = build(made, spec, HeldWeights(open_weights(folder, spec), form))
    (layer,) = built.layers
    assert isinstance(layer.mlp, Mixture)
    experts = sum(matrix.nbytes for matrix in (*layer.mlp.gate_up, *layer.mlp.down))
    assert isinstance(layer.attention, Attention)
    others = layer.attention.qkv.nbytes + layer.attention.out.nbytes + layer.mlp.router.nbytes
    if kernels != "reference":  # whose products are in float32
        assert (memory.streamed, memory.experts) == (others, experts)
        assert memory.read(1) == others + round(experts / 3)  # two of six
        assert others + 0.97 * experts < memory.read(9) < others + experts
        assert memory.held > others + experts
    assert memory.streamed < memory.read(1) < memory.read(2) < memory.streamed + memory.experts
    made.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "Q4_K", "Q6_K"])
def test_each_expert_of_a_gguf_file_is_its_part_of_one_tensor(kind: str, tmp_path: Path) -> None:
    fields = QWEN | {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    folder = write_model(tmp_path / "model", **fields)
    path = write_gguf(folder, tmp_path / "m.gguf", kind=Type[kind], packed=random_blocks)
    weights = open_weights(path, load_spec(path))
    read = {
        entry.name: gguf.quants.dequantize(entry.data, entry.tensor_type) for entry in gguf.GGUFReader(path).tensors
    }
    held = HeldWeights(weights, "stored")
    for part in ("gate", "up", "down"):
        whole = read[f"blk.0.ffn_{part}_exps.weight"].reshape(6, 256, 256)
        for number in (0, 3, 5):
            name = f"model.layers.0.mlp.experts.{number}.{part}_proj.weight"
            np.testing.assert_array_equal(weights[name], whole[number])
            assert held.outline(name).scale
            np.testing.assert_array_equal(dequantized(held[name]), whole[number])


def test_quantizing_a_file_with_experts_leaves_its_routers(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "model", **QWEN | {"hidden_size": 64}), tmp_path / "m.gguf")
    write_again(path, load_spec(path), tmp_path / "small.gguf", "Q8_0", {}, lambda done, total: None)
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    assert kinds["blk.0.ffn_gate_inp.weight"] == Type.F32
    assert kinds["blk.0.ffn_gate_exps.weight"] == Type.Q8_0


def test_a_sum_in_an_order_of_the_batch_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the law itself: experts in the order in which a batch first chose them give other bits in other chunks."""

    def planted(
        self: Any, x: Any, chosen: Any, shares: Any, gate_up: Any, activation: str, down: Any, out: Any
    ) -> None:
        out[:] = 0
        for expert in dict.fromkeys(chosen.ravel().tolist()):
            rows, places = np.nonzero(chosen == expert)
            gates = self._project(x[rows], gate_up[expert])
            out[rows] += shares[rows, places, None] * self._project(gated(gates, activation), down[expert])

    fields = QWEN | {"num_experts_per_tok": 4}
    driver = Driver(load(write_model(tmp_path, **fields), kernels="reference"), monkeypatch)
    tokens = prompt(100)
    chunks = ([100], [1] * 100, [37, 63])
    results = {driver.logits(tokens, cuts, driver.tables(100)).tobytes() for cuts in chunks}
    assert len(results) == 1
    monkeypatch.setattr(ReferenceKernels, "experts", planted)
    assert len({driver.logits(tokens, cuts, driver.tables(100)).tobytes() for cuts in chunks}) > 1


@pytest.mark.skipif(KERNELS == ["reference"], reason="the reference kernels pack nothing")
def test_packed_experts_are_read_back_from_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "KEPT_FROM", 0)
    monkeypatch.setattr(packed_file, "folder", lambda: tmp_path / "packed")
    folder = write_model(tmp_path / "model", **OSS | {"hidden_size": 64, "intermediate_size": 64})
    tokens, results = prompt(50), []
    for keep in (False, True, True):
        engine = load(folder, kernels=KERNELS[0], weights="int4", keep_packed=keep)
        driver = Driver(engine, monkeypatch)
        results.append(driver.logits(tokens, [50], driver.tables(50)).tobytes())
        engine.close()
        if len(results) == 2:  # the third start must not pack
            monkeypatch.setattr(packed_matrices.WritingKernels, "matrix", None)
    assert len(list((tmp_path / "packed").glob("*.packed"))) == 1
    assert results[0] == results[1] == results[2]
