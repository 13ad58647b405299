"""Inputs of encoders: whole texts and pairs with the special tokens that the model was trained on.

The tokenizer's template gives the tokens before, between and after texts, such as `[CLS] one [SEP] two [SEP]`, and the
token types. The texts are encoded like any user's text: a control token written in one is ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer as Library


class WholeInput(NamedTuple):
    """A text or a pair, ready for the model."""

    tokens: tuple[int, ...]
    second: int = 0
    """Index of the first token of type 1; 0: there are none."""


class Affixes(NamedTuple):
    """The special tokens that a tokenizer's template puts around one text and around a pair."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Tokens before the first text, between the two and after the second."""
    typed: bool
    """Whether the second text's tokens have type 1."""

    def whole(self, text: Sequence[int], limit: int | None = None) -> WholeInput:
        """Return the input of one text, cut to at most `limit` tokens, affixes included."""
        room = len(text) if limit is None else max(0, limit - len(self.before) - len(self.behind))
        return WholeInput((*self.before, *text[:room], *self.behind))

    def both(self, first: Sequence[int], second: Sequence[int], limit: int | None = None) -> WholeInput:
        """Return the input of a pair, cut to at most `limit` tokens, affixes included; the longer text is cut first."""
        before, between, behind = self.pair
        most = len(first) + len(second)
        room = most if limit is None else max(0, limit - len(before) - len(between) - len(behind))
        if most > room:
            shorter = min(len(first), len(second), room // 2)
            first, second = (
                (first[: room - shorter], second[:shorter])
                if len(first) > len(second)
                else (first[:shorter], second[: room - shorter])
            )
        at = len(before) + len(first) + len(between)
        return WholeInput((*before, *first, *between, *second, *behind), at if self.typed else 0)


def affixes(library: Library, before: Sequence[int], end: int | None) -> Affixes:
    """Return the affixes of a tokenizer.

    `before` (BOS by its settings) and `end` (EOS by its settings) are used if its template adds nothing there.
    """
    bare = library.encode("a", add_special_tokens=False).ids
    if not bare:
        return Affixes(tuple(before), (), ((), (), ()), False)
    one = library.encode("a", add_special_tokens=True)
    at = [number for number, part in enumerate(one.sequence_ids) if part == 0]
    begun, behind = tuple(one.ids[: at[0]]), tuple(one.ids[at[-1] + 1 :])
    if end is not None and not behind:
        behind = (end,)
    two = library.encode("a", "a", add_special_tokens=True)
    first = [number for number, part in enumerate(two.sequence_ids) if part == 0]
    second = [number for number, part in enumerate(two.sequence_ids) if part == 1]
    pair = (
        tuple(two.ids[: first[0]]),
        tuple(two.ids[first[-1] + 1 : second[0]]),
        tuple(two.ids[second[-1] + 1 :]),
    )
    return Affixes(begun or tuple(before), behind, pair, two.type_ids[second[0]] == 1)
