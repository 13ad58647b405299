"""Whole texts, and pairs of them, as a model that reads all at once was trained on them.

The tokenizer's own template says what stands before, between and behind texts, such as `[CLS] one [SEP] two [SEP]`,
and which tokens are of the second kind. The texts between are encoded as any user's text is: a control token that is
written in one is ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer as Library


class WholeInput(NamedTuple):
    """A text, or a pair, ready to be computed."""

    tokens: tuple[int, ...]
    second: int = 0
    """Where tokens of the second kind begin; 0: there are none."""


class Affixes(NamedTuple):
    """What a tokenizer's template puts around one text and around two."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Before the first, between the two and behind the second."""
    typed: bool
    """Whether the second text's tokens are of another kind."""

    def whole(self, text: Sequence[int], limit: int | None = None) -> WholeInput:
        """One text of which at most `limit` tokens are left, affixes included."""
        room = len(text) if limit is None else max(0, limit - len(self.before) - len(self.behind))
        return WholeInput((*self.before, *text[:room], *self.behind))

    def both(self, first: Sequence[int], second: Sequence[int], limit: int | None = None) -> WholeInput:
        """Two texts of which at most `limit` tokens are left: the longer one loses them."""
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
    """Those of a tokenizer. `before`: what begins a text by its settings; `end`: what ends one, where they want that
    and the template does not do it."""
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
