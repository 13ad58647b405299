"""Decoders that make vectors, and matrices behind the pooled state, against transformers in float32."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from cairn import LLM
from cairn.config.config import Config
from cairn.engine.encoder import EncoderEngine
from cairn.engine.load_engine import load_engine
from cairn.frontend.embeddings import INSTRUCTION
from cairn.models.spec.config import load_spec
from cairn.types.errors import ContextTooLong, InvalidRequest, ModelError
from cairn.types.model_spec import JudgeSpec
from cairn.types.step import Row
from tests.encoders import load_encoder, text_row, write_encoder, write_modules, write_reranker
from tests.tiny_models import GREEDY, KERNELS, MODELS, load, prompt, write_model

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
    """Write a model like EmbeddingGemma: a bare text model with bidirectional attention."""
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
    results = engine.embed([text_row(text) for text in texts]).wait()
    for text, one in zip(texts, results, strict=True):
        with torch.no_grad():
            want = torch.nn.Sequential(*after)(pooled(model(torch.tensor([text])).last_hidden_state[0], pooling))
        np.testing.assert_allclose(np.frombuffer(one.hidden, np.float32), want.numpy(), rtol=0, atol=CLOSE)
        assert want.std() > 0.01, "numbers that hardly differ would hide mistakes"
    alone = [engine.embed([text_row(text)]).wait()[0].hidden for text in texts]
    assert alone == [one.hidden for one in results]
    engine.close()


@pytest.mark.sweep("kernels")
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


@pytest.fixture
def judge(tmp_path: Path) -> tuple[Path, Any, Any]:
    """Return a tiny Qwen3-Reranker: its folder, transformers' model, and the library's tokenizer."""
    folder = tmp_path / "My-Qwen3-Reranker"
    write_reranker(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def said_yes(judge: tuple[Path, Any, Any], query: str, document: str, instruction: str = INSTRUCTION) -> float:
    """Return the logit of "yes" minus that of "no" after the makers' prompt."""
    _, model, tokenizer = judge
    rule = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    parts = (
        f'<|im_start|>system\n{rule} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return float(logits[tokenizer.token_to_id("yes")] - logits[tokenizer.token_to_id("no")])


def test_a_decoder_reranks_by_yes_and_no(judge: tuple[Path, Any, Any]) -> None:
    documents = ["Paris is the capital of France.", "Cats sleep.", "long " * 40]
    with LLM(str(judge[0]), threads=1) as llm:
        raw = llm.score("Where is Paris?", documents, raw_scores=True)
        np.testing.assert_allclose(raw, [said_yes(judge, "Where is Paris?", one) for one in documents], atol=2e-4)
        assert max(raw) - min(raw) > 0.05, "scores that hardly differ would hide mistakes"
        scores = llm.score("Where is Paris?", documents)
        np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(raw))), atol=1e-6)
        other = llm.score("Where is Paris?", documents, raw_scores=True, instruction="Find cats")
        np.testing.assert_allclose(other[1], said_yes(judge, "Where is Paris?", "Cats sleep.", "Find cats"), atol=2e-4)
        assert other != raw
        typed = llm.score("Where is Paris?", ["<|im_end|>"], raw_scores=True)[0]
        assert abs(typed - said_yes(judge, "Where is Paris?", "<|im_end|>")) > 1e-3, "a document ends no turn"
        with pytest.raises(ContextTooLong):
            llm.score("Where?", ["x y " * 900])
        assert len(llm.score("Where?", ["x y " * 900], truncate=True)) == 1
        with pytest.raises(InvalidRequest, match="judges pairs of texts and makes no embeddings"):
            llm.embed("x")


def test_a_decoder_embeds_through_a_dense_module(judge: tuple[Path, Any, Any]) -> None:
    folder, model, tokenizer = judge
    after = dense(48, 20)
    write_modules(folder, "mean", after)
    texts = ["Paris is in France.", "cats", "long " * 100]
    with LLM(str(folder), threads=1) as llm:
        vectors = llm.embed(texts)
        assert vectors.shape == (3, 20) and llm.embed("cats", dimensions=7).shape == (7,)
        with pytest.raises(InvalidRequest, match="dimensions must be from 1 to 20"):
            llm.embed("cats", dimensions=21)
    for text, got in zip(texts, vectors, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            want = after[0](model.model(torch.tensor([ids])).last_hidden_state[0].mean(0)).numpy()
        np.testing.assert_allclose(got, want / np.linalg.norm(want), rtol=0, atol=1e-5)


def test_a_reranking_decoder_is_recognised(judge: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, _, tokenizer = judge
    plain = folder.rename(tmp_path / "plain")
    assert load_spec(plain).kind == "chat"
    asked, engine = load_engine(Config(kind="rerank", threads=1), plain)
    engine.close()
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    assert (asked.kind, asked.judge) == ("rerank", JudgeSpec(yes=yes, no=no))
    modules = [("", "Transformer"), ("1_LogitScore", "LogitScore")]
    (plain / "modules.json").write_text(json.dumps([{"path": path, "type": f"x.{kind}"} for path, kind in modules]))
    (plain / "1_LogitScore").mkdir()
    score_config = plain / "1_LogitScore" / "config.json"
    score_config.write_text(json.dumps({"true_token_id": 7, "false_token_id": 9}))
    assert load_spec(plain).judge == JudgeSpec(yes=7, no=9)
    score_config.write_text(json.dumps({"true_token_id": 7, "false_token_id": None}))
    with pytest.raises(ModelError, match="a score without false_token_id is not supported"):
        load_spec(plain)
    llama = write_model(tmp_path / "llama", "LlamaForCausalLM")
    with pytest.raises(ModelError, match="kind is rerank, but llama is no model that can judge"):
        load_engine(Config(kind="rerank"), llama)
