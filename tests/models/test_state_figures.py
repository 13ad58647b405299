"""Models with layers that keep a state, from GGUF, against llama.cpp's log-probabilities of the same files.

`tools/make_state_figures.py` made the figures; the files are made again here, from the same seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gguf_files import write_gguf
from tests.recurrent_models import RECURRENT
from tests.tiny_models import KERNELS, Driver, load, prompt, write_model

FOLDER = Path(__file__).parent / "state_figures"
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
    "nemotron h moe": {"ssm_state_size": 16, "n_group": 1, "topk_group": 1},
}
MODELS = {name: RECURRENT[name] | _WIDE | sizes for name, sizes in _SIZES.items()}
"""Sizes that llama.cpp takes: keys as wide as values, and without what its files do not say."""


def prompts() -> list[list[int]]:
    return [prompt(length, VOCAB, seed=length) for length in LENGTHS]


@pytest.mark.parametrize("kernels", [KERNELS[0], "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_llama_cpps(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = np.load(FOLDER / f"{name.replace(' ', '-')}.npy", allow_pickle=False)
    engine = load(write_gguf(write_model(tmp_path / "model", **MODELS[name]), tmp_path / "m.gguf"), kernels=kernels)
    driver = Driver(engine, monkeypatch)
    for tokens, figures in zip(prompts(), want, strict=True):
        length = len(tokens)
        logits = driver.logits(tokens, [length // 2, length - length // 2], driver.tables(length))[-1].astype(
            np.float64
        )
        logits -= logits.max()
        found = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(found, figures, rtol=0, atol=CLOSE)
        assert found.std() > 0.5, "figures that hardly differ would hide mistakes"
    engine.close()
