"""Decoders that make vectors, and matrices behind the pooled state, against transformers in float32."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.encoders import load_encoder, text_row, write_encoder, write_modules
from tests.tiny_models import GREEDY, KERNELS, MODELS, load, prompt, write_model

from cairn.engine.base import Row
from cairn.engine.encoder import EncoderEngine
from cairn.models.spec import load_spec

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 100, 130)
CLOSE = 3e-5
GEMMA: dict[str, Any] = {
    **{"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "head_dim": 20},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 12, "sliding_window": 33},
    **{"max_position_embeddings": 300, "use_bidirectional_attention": True, "pad_token_id": 0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}


def dense(*sizes: int, bias: bool = False, tanh: bool = False) -> list[torch.nn.Sequential]:
    torch.manual_seed(3)
    linear = [torch.nn.Linear(one, other, bias=bias) for one, other in pairwise(sizes)]
    return [torch.nn.Sequential(one, *[torch.nn.Tanh()] * tanh) for one in linear]


def write_gemma(folder: Path, **fields: Any) -> Any:
    """As EmbeddingGemma is: a bare text model whose tokens see both sides."""
    torch.manual_seed(5)
    config = transformers.Gemma3TextConfig(**GEMMA | fields)
    config._attn_implementation = "eager"
    model = transformers.Gemma3TextModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn(tensor.shape) * (0.3 if tensor.ndim == 1 or "embed" in name else 0.17))
    model.save_pretrained(folder)
    return model


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]


def check(engine: Any, model: Any, pooling: str, after: list[Any], vocab: int) -> None:
    assert engine.info.generates is False
    texts = [prompt(length, vocab, seed=length) for length in LENGTHS]
    found = engine.embed([text_row(text) for text in texts]).wait()
    for text, one in zip(texts, found, strict=True):
        with torch.no_grad():
            want = torch.nn.Sequential(*after)(pooled(model(torch.tensor([text])).last_hidden_state[0], pooling))
        np.testing.assert_allclose(np.frombuffer(one.hidden, np.float32), want.numpy(), rtol=0, atol=CLOSE)
        assert want.std() > 0.01, "numbers that hardly differ would hide mistakes"
    alone = [engine.embed([text_row(text)]).wait()[0].hidden for text in texts]
    assert alone == [one.hidden for one in found]
    engine.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ["qwen 3 with window layers", "llama with biases, tied", "gemma 3"])
def test_pooled_states_of_decoders(name: str, pooling: str, kernels: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS[name] | {"tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.eval()
    after = dense(48, 20, bias=True, tanh=True) if pooling == "mean" else []
    write_modules(folder, pooling, after)
    check(load_encoder(folder, kernels=kernels), model, pooling, after, 160)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("window", [33, 16, 600])
def test_a_decoder_that_sees_both_sides(window: int, kernels: str, tmp_path: Path) -> None:
    model = write_gemma(tmp_path, sliding_window=window)
    after = dense(48, 96, 48)
    write_modules(tmp_path, "mean", after)
    spec = load_spec(tmp_path)
    assert (spec.kind, spec.both, spec.whole, spec.width) == ("embed", True, True, 48)
    check(load_encoder(tmp_path, kernels=kernels), model, "mean", after, 160)


def test_a_decoder_that_sees_both_sides_pools_the_last_token(tmp_path: Path) -> None:
    model = write_gemma(tmp_path)
    write_modules(tmp_path, "last")
    check(load_encoder(tmp_path), model, "last", [], 160)


@pytest.mark.parametrize("kernels", KERNELS)
def test_matrices_behind_an_encoder(kernels: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "Bert")
    after = [*dense(48, 24, bias=True, tanh=True), *dense(24, 30)]
    write_modules(tmp_path, "cls", after)
    assert load_spec(tmp_path).width == 30
    check(load_encoder(tmp_path, kernels=kernels), model, "cls", after, 120)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("projected", [False, True])
def test_the_last_token_of_a_decoder_as_qwen3_embedding_has_it(projected: bool, kernels: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.Qwen3Config(
        vocab_size=160, num_key_value_heads=2, head_dim=16, max_position_embeddings=300, **sizes
    )
    model = transformers.Qwen3Model(config).eval()
    model.save_pretrained(tmp_path)
    after = dense(48, 20) if projected else []
    write_modules(tmp_path, "last", after)
    spec = load_spec(tmp_path)
    assert (spec.kind, spec.whole, spec.width) == ("embed", False, 20 if projected else 48)
    engine = load(tmp_path, kernels=kernels)
    assert not isinstance(engine, EncoderEngine)
    for length in (1, 20, 70):
        text = prompt(length, 160, seed=length)
        row = Row(text, 0, length, ([0, 1, 2, 3, 4],), length - 1, length, GREEDY, 0, want="hidden")
        with torch.no_grad():
            want = torch.nn.Sequential(*after)(model(torch.tensor([text])).last_hidden_state[0, -1]).numpy()
        got = np.frombuffer(engine.embed([row]).wait()[0].hidden, np.float32)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
        assert want.std() > 0.01
    engine.close()
