"""The scripted model of other tests says exactly its script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from tests.scripted_model import write_scripted

PIECES = ["Hel", "lo", " wor", "ld", "!", "\n", *("ha", " ") * 3, b"h\xc3", b"\xa9", "."]


def answer(path: Path, prompt: str = "Say it.", kernels: str = "auto", **options: Any) -> tuple[str, str | None]:
    with LLM(str(path), kv_gb=0.05, kernels=kernels) as llm:
        said = llm.chat([{"role": "user", "content": prompt}], temperature=0, **options)
        return said.text, said.finish_reason


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_scripted_model_says_its_pieces_and_ends(tmp_path: Path, kernels: str) -> None:
    path = write_scripted(tmp_path / "m.gguf", PIECES)
    for prompt in ("Say it.", "Hello world!\nha ha", "a" * 300):
        assert answer(path, prompt, kernels) == ("Hello world!\nha ha ha hé.", "stop")


def test_a_script_without_an_end_begins_again(tmp_path: Path) -> None:
    path = write_scripted(tmp_path / "m.gguf", ["one", " two", " "], end=None)
    assert answer(path, max_tokens=7) == ("one two one two one", "length")


def test_a_script_that_no_context_of_seven_tokens_tells_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 tokens before place 9"):
        write_scripted(tmp_path / "m.gguf", ["a"] * 9 + ["b"])
