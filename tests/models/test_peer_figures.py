"""A model of each architecture, from GGUF, against llama.cpp's log-probabilities of the same file.

`tools/make_peer_figures.py` made the figures; the files are made again here, from the same seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.kernels import reference
from tests.gguf_files import write_gguf
from tests.recurrent_models import RECURRENT
from tests.tiny_models import KERNELS, Driver, load, prompt, write_model
from tests.tiny_models import MODELS as TINY

FOLDER = Path(__file__).parent / "peer_figures"
VOCAB = 507
CLOSE = 2e-4
LENGTHS = (5, 33, 90)

_WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCAB}
_DELTA: dict[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32}
_HEADS: dict[str, Any] = {"linear_num_value_heads": 4, "full_attention_interval": 4, "mlp_only_layers": []}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen 3.5": _DELTA,
    "qwen 3.5 moe": _DELTA | _HEADS,
    "qwen 3 next": _DELTA | _HEADS,
    "lfm 2": {"block_ff_dim": 100},
    "lfm 2 moe": {"routed_scaling_factor": 1.0},
    "granite 4 hybrid": {"intermediate_size": 24, "mamba_d_state": 16},
    "nemotron h": {"mamba_head_dim": 16, "ssm_state_size": 16},
    "mamba 2": {"num_heads": 8, "state_size": 16, "use_bias": False, "time_step_limit": [0.0, float("inf")]},
    "nemotron h moe": {"ssm_state_size": 16, "n_group": 1, "topk_group": 1},
}
_USUAL: dict[str, Any] = {"rope_theta": 5e5}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": None}
_OTHERS: dict[str, dict[str, Any]] = {
    "qwen 3 moe": {},
    "qwen 2 moe, shared expert": {},
    "mixtral": _USUAL,
    "olmoe": {"num_key_value_heads": 4},
    # whose yarn llama.cpp cuts to whole dimensions, unlike the model's own config
    "gpt-oss": _FOUR | _USUAL | {"rope_scaling": {"rope_type": "default"}},
    "granite": {},
    "smollm 3": _USUAL | {"no_rope_layer_interval": 4},
    "olmo 2": {},
    "olmo 3": _FOUR | _USUAL,
    "seed-oss": {},
    "exaone 4 without a window": {},  # which llama.cpp takes for models of 64 layers alone
    "glm 4": {},
    "hunyuan": {},
    "phi 4": {},
    "phi 4 mini": {},
    "ministral 3": {},
    "glm 4.5": {},
    "deepseek 2 lite": {},
    "deepseek 3": {"attention_bias": False},
    "glm 4.7 flash": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "mistral 4": {},
    "llama 4": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
    "apertus": {},
    "starcoder 2": {"tie_word_embeddings": False},
    "phi 2": {"num_key_value_heads": 4, "intermediate_size": 192},
    "stablelm": {},
    "stablelm, parallel, norms of heads": {"partial_rotary_factor": 0.5},
    "gpt neox": {},
    "gpt neox, one after the other": {"attention_bias": True, "rotary_emb_base": 10_000, "tie_word_embeddings": False},
    "command-r": {"use_qk_norm": False} | _USUAL,
    "command-r 7b": {"sliding_window_pattern": 4},
    "gemma 2": {"query_pre_attn_scalar": 16},
    "gemma 3": {"query_pre_attn_scalar": 20},
    "gemma 4": {},
    "gemma 4 e": {"vocab_size_per_layer_input": VOCAB},
    "gemma 4 moe": {},
    # Constants that only llama.cpp knows: sizes of inputs and streams, layers that share keys, sparse gates.
    "gemma 3n": {
        **{"num_hidden_layers": 22, "num_kv_shared_layers": 2, "layer_types": None, "intermediate_size": 512},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 64},
        **{"altup_num_inputs": 4, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12},
        "final_logit_softcapping": 30.0,
    },
}
MODELS = {name: RECURRENT[name] | _WIDE | sizes for name, sizes in _SIZES.items()}
MODELS |= {name: TINY[name] | {"vocab_size": VOCAB} | sizes for name, sizes in _OTHERS.items()}
"""Sizes that llama.cpp accepts: keys as wide as values, and nothing its files cannot say."""


def figures_of(name: str) -> Path:
    """Return the file of a model's figures."""
    return FOLDER / f"{name.replace(',', '').replace(' ', '-')}.npy"


def prompts() -> list[list[int]]:
    return [prompt(length, VOCAB, seed=length) for length in LENGTHS]


_LOOSE = {"gemma 4 e": 5e-3, "gemma 4 moe": 5e-3, "gemma 3n": 0.1}
"""Bounds where a number that llama.cpp rounds to 16 bits sometimes falls on the other side.

Many layers follow there. A mistake would be more than 1.
"""
REFERENCE = tuple(name for name in MODELS if name.startswith(("gemma", "starcoder", "phi 2", "gpt neox")))
"""Models compared only on the reference kernels, which can be made to round as llama.cpp does."""


def as_llama_cpp_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute GELU from a table of 16 bits, and deviations of a sample in place of those of all."""
    real, sparse = reference.ACTIVATIONS["gelu_tanh"], reference.ReferenceKernels.sparsify

    def rounded(x: np.ndarray) -> np.ndarray:
        low = real(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
        gelu: np.ndarray = np.where(x <= -10, np.float32(0), np.where(x >= 10, x, low))
        return gelu

    def sampled(kernels: reference.ReferenceKernels, gates: np.ndarray, factor: float) -> None:
        width = gates.shape[1] // 2
        sparse(kernels, gates, factor * (width / (width - 1)) ** 0.5)

    for name in ("gelu_tanh", "gelu"):  # which are one in llama.cpp
        monkeypatch.setitem(reference.ACTIVATIONS, name, rounded)
    monkeypatch.setattr(reference.ReferenceKernels, "sparsify", sampled)


@pytest.mark.parametrize("kernels", [KERNELS[0], "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_llama_cpps(
    name: str, kernels: str, prove: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (kernels == "reference") != (name in REFERENCE) and not (prove and name not in REFERENCE):
        pytest.skip("the reference of these is compared by `make prove`, and of models with GELU it alone")
    if name in REFERENCE:
        as_llama_cpp_rounds(monkeypatch)
    want = np.load(figures_of(name), allow_pickle=False)
    engine = load(write_gguf(write_model(tmp_path / "model", **MODELS[name]), tmp_path / "m.gguf"), kernels=kernels)
    driver = Driver(engine, monkeypatch)
    for tokens, figures in zip(prompts(), want, strict=True):
        length = len(tokens)
        logits = driver.logits(tokens, [length // 2, length - length // 2], driver.tables(length))[-1].astype(
            np.float64
        )
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(logprobs, figures, rtol=0, atol=_LOOSE.get(name, CLOSE))
        assert logprobs.std() > 0.5, "figures that hardly differ would hide mistakes"
    engine.close()
