"""Untrusted tokenizer files: limits on what they do to a text, and readable errors for broken ones."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from cairn.text.tokens import tokenizer, tokenizer_checks
from cairn.text.tokens.gguf import SPLITS
from cairn.text.tokens.tokenizer import Tokenizer, _ids
from cairn.text.tokens.tokenizer_checks import CPU_SECONDS, MAX_GROWTH, MAX_STEPS, MEMORY, fault, growth
from cairn.types.errors import InvalidRequest, ModelFileError
from tests.text import text_models


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def charsmap(*texts: bytes) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + bytes(4) + b"\0".join(texts) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def many(kind: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: [*parts]}


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (None, 1),
        (replace({"String": " "}, "▁"), 3),
        (replace({"String": "``"}, '"'), 1),
        (replace({"Regex": "x*"}, "yy"), 3),
        (many("normalizers", {"type": "NFKC"}, replace({"String": " "}, "▁")), 33),
        (many("normalizers", *[replace({"String": "a"}, "a" * 1000)] * 6), 1e18),
        (many("pretokenizers", split("x"), {"type": "ByteLevel"}), 2),
        (charsmap(b"a", b"x" * 40), 40),
    ],
)
def test_growth_is_estimated_from_the_file(step: Any, most: float) -> None:
    assert growth(step) == most


def spoilt(folder: Path, **parts: Any) -> Path:
    """Return a model's tokenizer with some parts replaced."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(text_models.byte_level()) | parts))
    return folder


def test_growth_beyond_the_limit_is_refused_before_it_runs(tmp_path: Path) -> None:
    bomb = many("normalizers", *[replace({"String": "a"}, "a" * 1000)] * 6)
    with pytest.raises(ModelFileError, match=rf"2e\+18 times as long; the limit is {MAX_GROWTH:g}"):
        Tokenizer.load(spoilt(tmp_path / "m", normalizer=bomb))
    with pytest.raises(ModelFileError, match="characters before every text"):
        Tokenizer.load(spoilt(tmp_path / "m", normalizer={"type": "Prepend", "prepend": "x" * 5000}))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x|xx)+y", r"(\w+\s?)*$", r"(\w|\d)+z"])
def test_a_pattern_that_backtracks_for_ever_is_refused_by_name(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ModelFileError, match=r"its pattern .* takes too long or fails") as refused:
        Tokenizer.load(spoilt(tmp_path / "m", pre_tokenizer=split(pattern)))
    assert repr(pattern) in str(refused.value)


def test_a_table_that_fails_on_text_is_refused() -> None:
    """The file loads, but its entry for a letter points past the end of a table, and the library panics."""
    wrong = fault(charsmap(b"a"), None)
    assert wrong is not None and "fails on a text made to try it" in wrong


def test_the_process_that_tries_a_tokenizer_has_limits() -> None:
    """The process that tries the first text reports its own limits."""
    program = (
        "import resource; from cairn.text.tokens import tokenizer_checks as checks; "
        "checks.probes = lambda _: [print(*(resource.getrlimit(kind)[0] for kind in "
        "(resource.RLIMIT_CPU, resource.RLIMIT_AS)))] and (); checks.main()"
    )
    parts = json.dumps([charsmap(), None])
    run = subprocess.run(
        [sys.executable, "-c", program], input=parts, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"{CPU_SECONDS} {MEMORY}" in run.stdout.splitlines()


@pytest.mark.parametrize(
    "name", ["llama-bpe", "qwen2", "smollm", "tekken", "gpt-4o", "qwen35", "seed-coder", "deepseek-v3"]
)
def test_patterns_of_models_in_circulation_pass(name: str) -> None:
    assert fault({"type": "NFC"}, many("pretokenizers", *SPLITS[name])) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}},
        {"pre_tokenizer": split("(")},
        {"normalizer": {"type": "None of ours"}},
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(spoilt(tmp_path / "m", **parts))


def test_a_panic_of_the_library_is_the_requests_own_error() -> None:
    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(InvalidRequest, match="tokenizer fails on this text"):
        _ids(made, "a" * 24 + "!")


def test_counts_that_no_model_has_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, merges in both notations, pieces, and everything else in the file; at the limit they load."""
    monkeypatch.setattr(tokenizer, "_COMMAS", 2)
    monkeypatch.setattr(tokenizer, "MAX_LISTED", 8)
    bpe: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"] * 8}
    Tokenizer.load(spoilt(tmp_path / "m", model=bpe))
    Tokenizer.load(spoilt(tmp_path / "m", model=bpe | {"merges": [["a", "b"]] * 8}))
    monkeypatch.setattr(tokenizer, "_library", lambda *_: pytest.fail("it was built"))
    for model, counted in (
        (bpe | {"merges": ["a b"] * 12}, "12 merges"),
        (bpe | {"merges": [["a", "b"]] * 12}, "12 merges"),
        (bpe | {"vocab": {str(i): i for i in range(12)}}, "12 tokens"),
        ({"type": "Unigram", "vocab": [["a", 0]] * 12}, "12 tokens"),
    ):
        with pytest.raises(ModelFileError, match=f"holds some {counted}; the limit is 8"):
            Tokenizer.load(spoilt(tmp_path / "m", model=model))
    monkeypatch.setattr(tokenizer, "MAX_JSON_VALUES", 100)
    with pytest.raises(ModelFileError, match="more than 100 values beside its tokens and merges"):
        Tokenizer.load(spoilt(tmp_path / "m", model=bpe, other=[0] * 100))


def test_steps_and_added_tokens_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = many("normalizers", *[replace({"String": "a"}, "b")] * (MAX_STEPS + 1))
    with pytest.raises(ModelFileError, match=f"steps; the limit is {MAX_STEPS}"):
        Tokenizer.load(spoilt(tmp_path / "m", normalizer=steps))
    monkeypatch.setattr(tokenizer_checks, "MAX_ADDED", 2)
    with pytest.raises(ModelFileError, match="10 added tokens; the limit is 2"):
        Tokenizer.load(spoilt(tmp_path / "m"))
