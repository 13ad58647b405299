"""Encoders in GGUF files give the vectors of their safetensors, and tokenize as their tokenizer.json does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from cairn.models.spec.config import load_spec
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError, ModelFileError
from tests.encoders import ENCODERS, load_encoder, text_row, write_encoder, write_tokenizer
from tests.gguf_files import write_encoder_gguf
from tests.tiny_models import KERNELS, prompt

LENGTHS = (1, 16, 17, 70, 130)
NAMES = ["bert", "bert, odd sizes", "modern bert", "modern bert, two of three", "nomic bert"]
TEXTS = ("hello there", "Hello, WORLD.", "naïve [SEP] x", "a", "日本 b", "x" * 120, "  spaced   out ", "q9", ". [ .")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_those_of_safetensors(name: str, pooling: str, kernels: str, tmp_path: Path) -> None:
    family, fields = ENCODERS[name]
    folder = tmp_path / "folder"
    write_encoder(folder, family, pooling=pooling, **fields)
    path = write_encoder_gguf(folder, tmp_path / "model.gguf", pooling)
    rows = [text_row(prompt(length, 120, seed=length)) for length in LENGTHS]
    results = []
    for place in (folder, path):
        spec = load_spec(place)
        assert (spec.kind, spec.embedding.pooling) == ("embed", pooling)
        engine = load_encoder(place, kernels=kernels)
        results.append([one.hidden for one in engine.embed(rows).wait()])
        engine.close()
    assert results[0] == results[1] and all(results[0])


def test_packed_matrices_are_near(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_encoder(folder, "Bert", hidden_size=64, intermediate_size=96)
    path = write_encoder_gguf(folder, tmp_path / "model.gguf", kind=Type.Q8_0)
    row = text_row(prompt(40, 120))
    plain, packed = (
        np.frombuffer(load_encoder(place, weights="stored").embed([row]).wait()[0].hidden, np.float32)
        for place in (folder, path)
    )
    assert 0 < np.linalg.norm(plain - packed) < 0.03 * np.linalg.norm(plain)


def test_texts_and_pairs_become_the_same_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_encoder(folder, "Bert")
    write_tokenizer(folder)
    path = write_encoder_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = Tokenizer.load(path), Tokenizer.load(folder)
    assert ours.affixes == theirs.affixes and ours.affixes.typed
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.affixes.whole(ids) == theirs.affixes.whole(ids)
        assert ours.affixes.both(ids, ids[:1]) == theirs.affixes.both(ids, ids[:1])
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("family", "extra", "said"),
    [
        ("Bert", {"pooling_type": 4}, "an encoder that judges pairs is served from safetensors"),
        ("Bert", {"pooling_type": 9}, r"pooling_type 9 is not supported; supported are 1 \(mean\)"),
        ("Bert", {"attention__causal": True}, "attention.causal is true"),
        ("Bert", {"expert_count": 4}, "bert.expert_count is set, which is not supported"),
        ("Bert", {"context_length": 301}, "context_length must be at most the rows of position_embd"),
        ("Bert", {"attention__head_count": 5}, "attention.head_count must be such that"),
        ("ModernBert", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("NomicBert", {"rope__scaling__type": "yarn"}, "rope scaling is not supported for an encoder"),
        ("NomicBert", {"attention__head_count_kv": 1}, "attention.head_count_kv other than 4"),
    ],
)
def test_invalid_input_is_named_in_the_error(family: str, extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_encoder(tmp_path / "folder", family)
    path = write_encoder_gguf(tmp_path / "folder", tmp_path / "model.gguf", **extra)
    with pytest.raises((ModelError, ModelFileError), match=said):
        load_spec(path)
