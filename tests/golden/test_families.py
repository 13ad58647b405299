"""Every family against transformers in float32: prefill and decode logits within 1e-4, greedy tokens equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from cairn.engine.step_inputs import FilledStep, StepInputs
from cairn.kernels import paged, reference
from cairn.kernels.choose import load_kernels
from cairn.kernels.reference import ReferenceKernels
from cairn.models.forward import decoder
from cairn.models.spec.config import load_spec
from tests.tiny_models import BFLOAT16, KERNELS, MODELS, Driver, load, prompt, write_config, write_model

CLOSE = 1e-4
STEPS = 64


def answers(folder: Path, tokens: list[int]) -> np.ndarray:
    """Return transformers' logits [len(tokens), V] for a whole sequence, in float64.

    In float32 its own rounding is up to 8e-5 of them, nearly all that is allowed.
    """
    torch.set_num_threads(1)
    # by its own name: the automatic choice does not know all of them
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, named).from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",  # the others are of float32
        output_loading_info=True,
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].numpy()


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, length: int = 90, kernels: str = "reference") -> None:
    """Prefill in chunks, then decode greedily; every logits row and token must be transformers'."""
    engine = load(folder, kernels=kernels)
    driver = Driver(engine, monkeypatch)
    start = prompt(length, engine.info.vocab)
    tables = driver.tables(length)
    chunks = [53] * (length // 53) + [length % 53]
    prefill = driver.logits(start, chunks, tables)
    driver.seen.clear()
    generated = driver.greedy(start, STEPS)
    decode = np.concatenate([logits for _, logits in driver.seen])
    engine.close()
    want = answers(folder, start + generated)
    np.testing.assert_allclose(prefill, want[:length], rtol=0, atol=CLOSE)
    np.testing.assert_allclose(decode, want[length - 1 : -1], rtol=0, atol=CLOSE)
    assert generated == want[length - 1 : -1].argmax(axis=-1).tolist()
    # guards the test itself: logits that hardly differ would hide mistakes
    assert want.std(axis=-1).min() > 0.3


@pytest.mark.sweep("kernels")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill runs in chunks, which once ignored sliding windows (known failure 36)."""
    check(write_model(tmp_path, **MODELS[name]), monkeypatch, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_long_contexts_with_scaled_rope(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(write_model(tmp_path, **MODELS["llama 3 rope"]), monkeypatch, length=420, kernels=kernels)


@pytest.mark.parametrize("kernels", [KERNELS[0], "reference"])
def test_short_contexts_are_turned_by_the_short_factors(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The served context decides, not the text's length: this model was first trained for 32 tokens."""
    folder = write_model(tmp_path, **MODELS["phi 4 mini"])
    tokens, identities = prompt(32), set()
    want = answers(folder, tokens)
    for context, close in ((32, True), (33, False)):
        engine = load(folder, kernels=kernels, context=context)
        driver = Driver(engine, monkeypatch)
        got = driver.logits(tokens, [32], driver.tables(32))
        assert (float(np.abs(got - want).max()) < CLOSE) == close
        identities.add(engine.info.identity)
        engine.close()
    assert len(identities) == 2  # neither finds the other's KV


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_half_precision_weights(dtype: Any, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(write_model(tmp_path, dtype=dtype), monkeypatch, kernels=kernels)


def half_bytes(array: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random MXFP4 blocks and scales in the shape [E, out, in] of `array`, and their values."""
    rng = np.random.default_rng(seed)
    experts, out, inner = array.shape
    codes = rng.integers(0, 16, array.shape, dtype=np.uint8)
    scales = rng.integers(123, 126, (experts, out, inner // 32), dtype=np.uint8)
    half = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)
    table = np.concatenate([half, -half])
    numbers = table[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=2)
    pairs = codes.reshape(experts, out, inner // 32, 16, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales, numbers.astype(np.float32)


def test_experts_in_mxfp4_are_those_of_plain_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss as published, against the same numbers written out for transformers: packing loses nothing."""
    fields = MODELS["gpt-oss"] | {"hidden_size": 64, "intermediate_size": 64}
    plain = write_model(tmp_path / "plain", **fields)
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for seed, name in enumerate(one for one in tensors if one.endswith((".gate_up_proj", ".experts.down_proj"))):
        blocks, scales, numbers = half_bytes(tensors[name].swapaxes(1, 2), seed)
        tensors[name] = np.ascontiguousarray(numbers.swapaxes(1, 2))
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    check(plain, monkeypatch)
    folder = write_config(tmp_path / "packed", **fields, quantization_config={"quant_method": "mxfp4"})
    save_file(packed, folder / "model.safetensors")
    tokens, results = prompt(60, 160), []
    for model in (plain, folder):
        engine = load(model, weights="f32", kernels="reference")
        driver = Driver(engine, monkeypatch)
        results.append(driver.logits(tokens, [60], driver.tables(60)))
        engine.close()
    assert results[0].tobytes() == results[1].tobytes()
    engine = load(folder, weights="stored")
    driver = Driver(engine, monkeypatch)
    close = driver.logits(tokens, [60], driver.tables(60))
    engine.close()
    assert np.abs(close - results[0]).max() < 0.3 * results[0].std()  # activations are rounded to 8 bits


ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama 4": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, scaled by mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 24.0,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("name", ROPES)
def test_rope_of_real_sizes_equals_that_of_transformers(name: str, which: str, tmp_path: Path) -> None:
    """Cosines and sines over a long context, with the constants that published models use."""
    shape = {"head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": ROPES[name]}
    spec = load_spec(write_config(tmp_path, "LlamaForCausalLM", **shape))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    positions = np.array([0, 1, 2, 17, 500, 8191, 8192, 40000, 131071], np.int32)
    angles = np.empty((len(positions), 2, 64), np.float32)
    kernels = load_kernels(which, 1)
    kernels.rope_angles(kernels.rope(128, spec.rope_theta, spec.rope_scaling), positions, angles)
    kernels.close()
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.from_numpy(positions.astype(np.int64))[None])
    # A frequency that differs in its last bit rotates by up to 131071 * 2**-24 radians more or less.
    allowed = 1e-6 + positions[:, None] * 2.0**-23
    for number, want in enumerate((cos, sin)):
        assert (np.abs(angles[:, number] - want[0, :, :64].numpy()) <= allowed).all()


def late_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shift positions by one from the 41st token on. (Shifting all would not matter: rotary positions are relative.)"""
    real = ReferenceKernels.rope_angles

    def planted(self: Any, rope: Any, positions: Any, angles: Any) -> None:
        real(self, rope, positions + (positions > 40).astype(np.int32), angles)

    monkeypatch.setattr(ReferenceKernels, "rope_angles", planted)


def shifted_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention read block i - 1 where it should read block i."""
    real = ReferenceKernels.attention

    def planted(self: Any, query: Any, kv: Any, layer: int, rows: Any, tables: Any, *rest: Any) -> None:
        real(self, query, kv, layer, rows, np.concatenate([tables[:, :1], tables[:, :-1]], axis=1), *rest)

    monkeypatch.setattr(ReferenceKernels, "attention", planted)


def loose_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every position also see the one after it."""
    real = paged._seen

    def planted(piece: Any, fan: int, padded: int, window: int, both: bool) -> Any:
        seen = real(piece, fan, padded, window, both)
        flat = seen.transpose(0, 1, 3, 2, 4).reshape(*seen.shape[:2], padded, -1)
        flat[..., 1:] |= flat[..., :-1].copy()
        return flat.reshape(*seen.shape[:2], padded, piece.spans, -1).transpose(0, 1, 3, 2, 4)

    monkeypatch.setattr(paged, "_seen", planted)


def loose_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the window one position too long."""
    real = paged._seen
    monkeypatch.setattr(
        paged, "_seen", lambda piece, fan, padded, window, both: real(piece, fan, padded, window + 1, both)
    )


@pytest.mark.parametrize("plant", [late_positions, shifted_table, loose_mask, loose_window])
def test_an_off_by_one_is_caught(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, **MODELS["mistral"])
    check(folder, monkeypatch)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(folder, monkeypatch)


def without_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the mean in layer norms."""

    def planted(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return reference.rms_norm(x, weight, eps) + (0 if bias is None else bias)

    monkeypatch.setattr(reference, "layer_norm", planted)


def without_last_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the last norm's bias."""
    real = ReferenceKernels.layer_logits
    monkeypatch.setattr(
        ReferenceKernels, "layer_logits", lambda own, x, at, norm, bias, *rest: real(own, x, at, norm, None, *rest)
    )


def one_norm_for_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ReferenceKernels.layer_norm_heads

    def planted(own: Any, x: Any, first: int, heads: int, size: int, weight: Any, *rest: Any) -> None:
        real(own, x, first, heads, size, weight[:size], *rest)

    monkeypatch.setattr(ReferenceKernels, "layer_norm_heads", planted)


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the MLP read the hidden state after attention was added to it."""

    def planted(k: Any, model: Any, layer: Any, kv: Any, b: Any) -> None:
        decoder._mix(k, model, layer, layer.attention, kv, b)
        decoder._transform(k, model, layer, layer.mlp, b)

    monkeypatch.setattr(decoder, "_run_parallel", planted)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("phi 2", without_mean),
        ("starcoder 2", without_last_bias),
        ("stablelm, parallel, norms of heads", one_norm_for_all_heads),
        ("gpt neox", one_after_the_other),
    ],
)
def test_a_mistake_of_layer_norms_is_caught(
    name: str, plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, **MODELS[name])
    check(folder, monkeypatch)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(folder, monkeypatch)


def test_a_wrong_slot_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is written one slot too far within its block."""
    folder = write_model(tmp_path)
    real = StepInputs.fill

    def planted(self: StepInputs, rows: Any) -> FilledStep:
        step = real(self, rows)
        for slots in step.mirrors.slots:
            slots[:] = slots // 16 * 16 + (slots + 1) % 16
        return step

    monkeypatch.setattr(StepInputs, "fill", planted)
    with pytest.raises(AssertionError):
        check(folder, monkeypatch)


@pytest.mark.parametrize("name", ["gemma 3", "gemma 4 e"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_larger_model_is_that_model(
    prefix: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; the vision part is left out, and the engine says so."""
    plain = write_model(tmp_path / "plain", **MODELS[name])
    config = json.loads((plain / "config.json").read_text())
    nested = tmp_path / "nested"
    nested.mkdir()
    architecture = MODELS[name]["architecture"].replace("CausalLM", "ConditionalGeneration")
    outer = {"architectures": [architecture], "text_config": config, "vision_config": {}}
    (nested / "config.json").write_text(json.dumps(outer))
    tensors = {
        prefix + name.removeprefix("model."): array for name, array in load_file(plain / "model.safetensors").items()
    }
    save_file(tensors | {"vision_tower.x.weight": np.ones((2, 2), np.float32)}, nested / "model.safetensors")
    results = []
    for folder in (plain, nested):
        engine = load(folder)
        driver = Driver(engine, monkeypatch)
        results.append(driver.logits(prompt(60), [60], driver.tables(60)))
        assert ("without images" in engine.info.note) == (folder == nested)
        engine.close()
    np.testing.assert_array_equal(*results)
