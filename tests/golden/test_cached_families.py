"""Families with pages of a shape of their own, through the whole server: cached answers equal cold ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn import LLM
from cairn.text.tokens.tokenizer import Tokenizer
from tests.text.text_models import KINDS, QWEN_CONFIG, QWEN_TEMPLATE
from tests.text.text_models import write_model as write_text
from tests.tiny_models import MODELS, write_model

TEXT = "The quick brown fox jumps over the lazy dog. " * 30


def written(tmp_path: Path, name: str) -> Path:
    """Write a tiny model of the family, with a tokenizer."""
    folder = write_text(tmp_path / "tiny", KINDS["byte-level"](), {**QWEN_CONFIG}, QWEN_TEMPLATE)
    vocab = Tokenizer.load(folder).vocab_size
    write_model(folder, **MODELS[name] | {"vocab_size": vocab, "vocab_size_per_layer_input": vocab})
    return folder


@pytest.mark.parametrize("name", ["deepseek 3", "gemma 4 e", "gpt neox"])
def test_an_answer_from_the_pool_and_from_the_disk_is_the_cold_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = written(tmp_path, name)
    options = {"engine": "cpu", "threads": 1, "kv_gb": 0.05, "kv_dir": str(tmp_path / "kv")}
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
    with LLM(str(folder), config=None, **options) as llm:
        cold, warm = llm.generate(TEXT, **asked), llm.generate(TEXT, **asked)
        beside = llm.generate([TEXT[:100], TEXT, TEXT + "And more."], **asked)
    assert cold.usage.cached_tokens == 0 and warm.usage.cached_tokens >= 256
    assert warm.text == cold.text == beside[1].text
    with LLM(str(folder), config=None, **options) as llm:
        again = llm.generate(TEXT, **asked)
    assert again.text == cold.text and again.cache.disk >= 256


@pytest.mark.parametrize("name", ["llama 2", "qwen 3 with window layers", "gemma 4 e"])
def test_common_prefixes_are_reused_to_the_token(name: str, tmp_path: Path) -> None:
    """Also within a block: of a repeated prompt all but the last token, which has to give the next one."""
    options = {"engine": "cpu", "threads": 1, "kv_gb": 0.05, "kv_disk": False}
    texts = ["Nine tokens.", "Nine tokens are", "Nine tokenisers", TEXT[:170], TEXT[:170] + "more", TEXT[:165] + "less"]
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
    folder = written(tmp_path, name)
    cold = {}
    for text in texts:
        with LLM(str(folder), config=None, **options) as llm:
            cold[text] = llm.generate(text, **asked)
            assert cold[text].usage.cached_tokens == 0
    with LLM(str(folder), config=None, **options) as llm:
        tokenizer, known = Tokenizer.load(folder), list[list[int]]()
        for text in [*texts, *texts]:
            answer, ids = llm.generate(text, **asked), tokenizer.encode_prompt(text)
            same = max((common(ids, other) for other in known), default=0)
            assert answer.text == cold[text].text
            assert min(same, len(ids) - 1) == answer.usage.cached_tokens, (text, same)
            known.append([*ids, *answer.tokens])


def common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
