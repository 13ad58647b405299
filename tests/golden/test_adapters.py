"""Adapters as PEFT writes and computes them: prefill and decode logits within the families' tolerance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.golden.test_families import CLOSE  # noqa: E402
from tests.tiny_models import KERNELS, MODELS, Driver, load, prompt, write_model  # noqa: E402

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("llama with biases, tied", {"target_modules": DENSE}),
    "rank-stabilised": ("qwen 3, head size of its own", {"target_modules": DENSE, "use_rslora": True}),
    "patterns": (
        "gemma 3",
        {
            "target_modules": DENSE,
            "rank_pattern": {"layers.0.self_attn.q_proj": 3, "down_proj": 7},
            "alpha_pattern": {"self_attn.v_proj": 20, "^model.layers.1.mlp.up_proj": 1},
        },
    ),
    "fused projections": (
        "phi 3 with a window",
        {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]},
    ),
    "attention beside experts": ("qwen 3 moe", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "recurrent layers": (
        "qwen 3 next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj"]},
    ),
    "two-layer MLPs": ("starcoder 2", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"]}),
    "attention and MLP in parallel": ("phi 2", {"target_modules": ["q_proj", "v_proj", "dense", "fc1", "fc2"]}),
    "a matrix for each head's query, key and value": (
        "gpt neox",
        {"target_modules": ["query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
    "normed heads": ("stablelm, parallel, norms of heads", {"target_modules": DENSE}),
    "rotary pairs that are neighbours": ("command-r", {"target_modules": DENSE}),
    "latent attention": ("deepseek 3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
}


def tuned(base: Path, place: Path, options: dict[str, Any], seed: int = 0) -> Any:
    """Make a random adapter of a base with PEFT, save it, and return PEFT's model in float64."""
    torch.manual_seed(seed)
    named = json.loads((base / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, named).from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    made = peft.get_peft_model(model, peft.LoraConfig(r=5, lora_alpha=9, init_lora_weights=False, **options))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:  # rounded, so that the files hold the numbers used here
                weight.copy_((weight if "lora_A" in name else 0.2 * torch.randn_like(weight)).float().double())
    made.save_pretrained(place)
    path = place / "adapter_model.safetensors"
    save_file({name: one.astype(np.float32) for name, one in load_file(path).items()}, path)
    return made.eval()


@pytest.mark.parametrize("kernels", [KERNELS[0], "reference"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # a warning of transformers, in PEFT
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_peft(case: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = CASES[case]
    torch.set_num_threads(1)
    base = write_model(tmp_path / "base", **MODELS[name])
    theirs = tuned(base, tmp_path / "adapter", options)
    engine = load(base, kernels=kernels)
    driver = Driver(engine, monkeypatch)
    adapters = ((engine.attach(engine.read_adapter(tmp_path / "adapter")).digest, 1.0),)
    tokens = prompt(60, engine.info.vocab)
    tables = driver.tables(60)
    for start, end in ((0, 41), (41, 58), (58, 59), (59, 60)):
        row = driver.row(tokens, start, end, tables, start)
        driver.step([msgspec.structs.replace(row, adapters=adapters)])
    ours = np.concatenate([logits for _, logits in driver.seen])
    engine.close()
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0].numpy()
        with theirs.disable_adapter():
            bare = theirs(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(ours, want, rtol=0, atol=CLOSE)
    assert np.abs(want - bare).max() > 100 * CLOSE, "guards the test itself"
