"""Embedding and reranking requests: how much text of one call is tokenized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cairn.frontend.embeddings import MAX_READ, Asking, _encoded_pairs
from cairn.types.errors import InvalidRequest


class Blind:
    """A tokenizer that must not be called."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        assert special, "a text of the caller was read"
        return [1]


@pytest.mark.parametrize(
    ("query", "text", "instruction"),
    [("q" * 500_000, "t", None), ("q", "t" * 500_000, None), ("q", "t", "i" * 500_000)],
)
async def test_what_is_read_again_with_each_text_is_counted_with_each(
    query: str, text: str, instruction: str | None
) -> None:
    service: Any = SimpleNamespace(
        name="m",
        tokenizer=Blind(),
        info=SimpleNamespace(context=8192),
        spec=SimpleNamespace(longest_text=8192, judge=object(), vocab=100, kind="rerank"),
    )
    asking = Asking(truncate=True, field="documents", instruction=instruction)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_READ} characters, the limit of a call"):
        await _encoded_pairs(service, [(query, text)] * 2_048, asking)
