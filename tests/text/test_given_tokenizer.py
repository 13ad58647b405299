"""`--tokenizer`: a tokenizer.json that replaces the model's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from cairn import LLM
from cairn.models.spec.config import load_spec
from cairn.models.spec.tokenizer_files import with_tokenizer
from cairn.text.chat.templates import load_text
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError, ModelFileError
from tests.scripted_model import write_scripted

PIECES = ["Hel", "lo", " wor", "ld", "!"]
BARE = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type")


def json_of(model: Path, file: Path) -> Path:
    """Return a model's tokenizer as a tokenizer.json."""
    Tokenizer.load(model)._full.save(str(file))
    return file


@pytest.fixture
def bare(tmp_path: Path) -> tuple[Path, Path]:
    """Return a GGUF file without a tokenizer, and the tokenizer.json that it needs."""
    file = json_of(write_scripted(tmp_path / "whole.gguf", PIECES), tmp_path / "tokenizer.json")
    model = write_scripted(tmp_path / "bare.gguf", PIECES, without=(*BARE, "tokenizer.ggml.merges"))
    return model, file


def test_a_gguf_file_without_a_tokenizer_answers_with_one_that_is_given(bare: tuple[Path, Path]) -> None:
    model, file = bare
    with pytest.raises(ModelError), LLM(str(model), kv_gb=0.05):
        pass
    for place in (file, file.parent):  # the file, or its folder
        with LLM(str(model), tokenizer=str(place), kv_gb=0.05) as llm:
            said = llm.chat([{"role": "user", "content": "Say it."}], temperature=0)
        assert (said.text, said.finish_reason) == ("Hello world!", "stop")


def test_the_models_own_names_of_special_tokens_hold_and_what_lies_beside_the_file_comes_first(
    bare: tuple[Path, Path],
) -> None:
    model, file = bare
    tokenizer, templates = load_text(model, str(file))
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"} and list(templates) == ["default"]
    file.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert load_text(model, str(file))[0].special_tokens == {"eos_token": "<|endoftext|>"}


def test_it_comes_before_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    from cairn.models.hub.hub import demo_folder

    library = Library.from_file(str(demo_folder() / "tokenizer.json"))
    library.add_special_tokens(["<|another|>"])
    library.save(str(tmp_path / "other.json"))
    tokenizer, templates = load_text(demo_folder(), str(tmp_path / "other.json"))
    assert tokenizer.token_id("<|another|>") is not None and templates
    assert tokenizer.special_tokens == Tokenizer.load(demo_folder()).special_tokens


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    model = write_scripted(tmp_path / "m.gguf", PIECES)
    library = Tokenizer.load(model)._full
    library.add_tokens([f"more{number}" for number in range(4)])
    library.save(str(tmp_path / "other.json"))
    rows = load_spec(model, identify=False).vocab
    with pytest.raises(ModelFileError, match=rf"other\.json: has the token id {rows + 3}, but m has {rows} tokens"):
        LLM(str(model), tokenizer=str(tmp_path / "other.json"), kv_gb=0.05)


def test_an_invalid_tokenizer_is_a_short_error(tmp_path: Path) -> None:
    model = write_scripted(tmp_path / "m.gguf", PIECES)
    with pytest.raises(ModelFileError, match=r"absent\.json: there is no such file; --tokenizer is"):
        LLM(str(model), tokenizer=str(tmp_path / "absent.json"), kv_gb=0.05)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"broken\.json"):
        LLM(str(model), tokenizer=str(tmp_path / "broken.json"), kv_gb=0.05)


def test_a_tokenizer_of_other_ids_changes_the_models_identity(bare: tuple[Path, Path], tmp_path: Path) -> None:
    """Agents' contexts in ids of one tokenizer are never read with another."""
    spec = load_spec(bare[0])
    one = with_tokenizer(spec, str(bare[1]))
    assert with_tokenizer(spec, None) == spec and one.identity != spec.identity
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(bare[1], copy)
    assert with_tokenizer(spec, str(copy)) == one  # its path does not matter
    (copy / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert with_tokenizer(spec, str(copy)).identity not in (spec.identity, one.identity)
