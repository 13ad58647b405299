"""Embedders and rerankers in GGUF files, against the same model in safetensors or in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn import LLM
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import JudgeSpec
from cairn.types.step import Row
from tests.encoders import load_encoder, text_row, write_modules
from tests.gguf_files import write_gguf
from tests.golden.test_embedders import dense, judge, said_yes, write_gemma
from tests.tiny_models import GREEDY, load, prompt, write_model

__all__ = ["judge"]


def test_the_last_token_as_qwen3_embedding_has_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "folder", "Qwen3ForCausalLM", tie_word_embeddings=True)
    path = write_gguf(folder, tmp_path / "model.gguf", extra={"qwen3.pooling_type": 3})
    spec = load_spec(path)
    assert (spec.kind, spec.embedding.pooling, spec.whole) == ("embed", "last", False)
    row = Row(prompt(30), 0, 30, ([0, 1],), 29, 30, GREEDY, 0, want="hidden")
    vectors = [load(one).embed([row]).wait()[0].hidden for one in (folder, path)]
    assert vectors[0] == vectors[1] != b""


def test_the_mean_of_a_decoder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "folder", "Qwen3ForCausalLM", tie_word_embeddings=True)
    path = write_gguf(folder, tmp_path / "model.gguf", extra={"qwen3.pooling_type": 1})
    write_modules(folder, "mean")
    rows = [text_row(prompt(length, 160, seed=length)) for length in (1, 17, 70)]
    vectors = [[one.hidden for one in load_encoder(place).embed(rows).wait()] for place in (folder, path)]
    assert vectors[0] == vectors[1]
    with pytest.raises(ModelError, match="pooling_type 7 is not supported"):
        load_spec(write_gguf(folder, tmp_path / "other.gguf", extra={"qwen3.pooling_type": 7}))


@pytest.mark.parametrize("projected", [False, True])
def test_embedding_gemma(projected: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_gemma(folder, query_pre_attn_scalar=20)
    after = dense(48, 96, 48) if projected else []
    write_modules(folder, "mean", after)
    config = json.loads((folder / "config.json").read_text())
    bare = tmp_path / "bare"  # as the tests' writer reads it
    bare.mkdir()
    ropes = config.pop("rope_parameters")
    flat = {"rope_theta": ropes["full_attention"]["rope_theta"], "sliding_window_pattern": 3}
    flat["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    named = {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": False}
    (bare / "config.json").write_text(json.dumps(config | flat | named))
    tensors = {f"model.{name}": one for name, one in load_file(folder / "model.safetensors").items()}
    save_file(tensors, bare / "model.safetensors")
    more = {f"dense_{n}.weight": one[0].weight.detach().numpy() for n, one in enumerate(after, 2)}
    sizes = {"gemma-embedding.dense_2_feat_out": 96, "gemma-embedding.dense_3_feat_in": 96} if projected else {}
    extra = {"gemma-embedding.attention.causal": False, "gemma-embedding.pooling_type": 1, **sizes}
    path = write_gguf(bare, tmp_path / "model.gguf", arch="gemma-embedding", more=more, extra=extra)
    assert [load_spec(one).groups for one in (folder, path)][1] == load_spec(folder).groups
    rows = [text_row(prompt(length, 160, seed=length)) for length in (1, 17, 40, 100)]
    for one, other in zip(*(load_encoder(place).embed(rows).wait() for place in (folder, path)), strict=True):
        numbers = [np.frombuffer(vector.hidden, np.float32) for vector in (one, other)]
        np.testing.assert_allclose(numbers[0], numbers[1], rtol=0, atol=1e-5)
    if projected:
        more["dense_3.weight"] = more["dense_3.weight"][:, :-1].copy()
        broken = write_gguf(bare, tmp_path / "broken.gguf", arch="gemma-embedding", more=more, extra=extra)
        with pytest.raises(ModelFileError, match=r"dense_3.weight must be \[out, 96\]"):
            load_spec(broken)


def test_qwen3_reranker(judge: tuple[Path, object, object], tmp_path: Path) -> None:
    folder, _, tokenizer = judge
    output = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rows = {"cls.output.weight": output[[tokenizer.token_to_id(word) for word in ("yes", "no")]]}
    extra = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    path = write_gguf(folder, tmp_path / "some.gguf", pre="qwen2", more=rows, extra=extra)
    assert (load_spec(path).kind, load_spec(path).judge) == ("rerank", JudgeSpec(yes=0, no=1, apart=True))
    named = write_gguf(folder, tmp_path / "Qwen3-Reranker-F32.gguf", pre="qwen2")
    for one in (path, named):
        with LLM(str(one), threads=1) as llm:
            (got,) = llm.score("Where is Paris?", ["Paris is in France."], raw_scores=True)
        assert abs(got - said_yes(judge, "Where is Paris?", "Paris is in France.")) < 2e-4
    with pytest.raises(ModelError, match="pooling_type is ranking, for which cls"):
        load_spec(write_gguf(folder, tmp_path / "other.gguf", pre="qwen2", extra=extra))
