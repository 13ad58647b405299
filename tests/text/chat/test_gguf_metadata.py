"""A folder's tokenizer as GGUF metadata: reading it back gives the same tokenizer, or writing is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from cairn.models.hub.hub import demo_folder
from cairn.text.chat.gguf_metadata import check_same, texts_of
from cairn.text.chat.templates import load_templates
from cairn.text.tokens.gguf import SPLITS
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError, ModelFileError
from tests import gguf_files
from tests.text import text_models
from tests.text.test_gguf_text import published, rescored, strings

VOCAB = 1000


def wrote(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.put(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizers_come_back(pre: str, tmp_path: Path) -> None:
    config = {"add_bos_token": False, **text_models.QWEN_CONFIG}
    folder = text_models.write_model(tmp_path / "m", published(pre), config, text_models.QWEN_TEMPLATE)
    result = texts_of(folder, VOCAB, (5,))
    path = wrote(tmp_path / "m.gguf", result)
    check_same(folder, path)
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(path)
    assert all(ours.encode(text) == theirs.encode(text) for text in strings(100))
    assert ours.special_tokens == theirs.special_tokens and ours.special_ids == theirs.special_ids
    assert load_templates(path) == {"default": text_models.QWEN_TEMPLATE}
    assert result["tokenizer.ggml.eos_token_id"] == ours.eos_id and result["tokenizer.ggml.eot_token_id"] == 5


def test_sentencepiece_comes_back_with_its_bos(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "m", text_models.sentencepiece(), text_models.LLAMA2_CONFIG)
    rescored(folder)
    ours = Tokenizer.load(folder)
    path = wrote(tmp_path / "m.gguf", texts_of(folder, ours.vocab_size, ()))
    check_same(folder, path)
    theirs = Tokenizer.load(path)
    assert theirs.encode_prompt("a")[0] == ours.bos_id
    assert all(ours.encode(text) == theirs.encode(text) for text in strings(100))


def test_a_tokenizer_that_gguf_has_no_name_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="how this tokenizer splits text has no name in GGUF"):
        texts_of(demo_folder(), 2048, (2,))
    folder = text_models.write_model(tmp_path / "m", published("qwen2"), text_models.QWEN_CONFIG)
    with pytest.raises(ModelFileError, match=r"has the token id \d+, but the embedding has 100 rows"):
        texts_of(folder, 100, ())
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data | {"normalizer": None}))
    with pytest.raises(ModelError, match="how this tokenizer splits text has no name in GGUF"):
        texts_of(folder, VOCAB, ())


def test_end_tokens_without_a_key_become_a_list(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "m", published("qwen2"), text_models.QWEN_CONFIG)
    eos = Tokenizer.load(folder).eos_id
    assert texts_of(folder, VOCAB, (1, 2, 3))["tokenizer.ggml.eos_token_ids"] == [eos, 1, 2, 3]
    assert "tokenizer.ggml.eos_token_ids" not in texts_of(folder, VOCAB, (1, 2))


def test_a_tokenizer_that_does_not_come_back_is_detected(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "m", published("qwen2"), text_models.QWEN_CONFIG, "{{ messages }}")
    result = texts_of(folder, VOCAB, ())
    for number, change in enumerate(({"ggml.pre": "gpt-2"}, {"ggml.merges": result["tokenizer.ggml.merges"][:50]})):
        bent = wrote(tmp_path / f"{number}.gguf", result | {f"tokenizer.{key}": value for key, value in change.items()})
        with pytest.raises(ModelError, match="its tokenizer cannot be written as GGUF"):
            check_same(folder, bent)
    bent = wrote(tmp_path / "t.gguf", result | {"tokenizer.chat_template": "x"})
    with pytest.raises(ModelError, match="its chat templates cannot be written as GGUF"):
        check_same(folder, bent)
