"""Control tokens: the added tokens that mean something to a model, and how text is kept from spelling them."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping

from tokenizers import AddedToken

_SAME_DIGITS = str.maketrans("123456789", "000000000")
"""Thousands of reserved tokens differ in their numbers alone: looked at without those, they are few to search."""


def is_control(token: AddedToken) -> bool:
    """Whether an added token is a control token: a special one, or a bracketed word such as `<think>` or `[INST]`.

    Other added tokens (runs of spaces, common words) are ordinary text. One character cannot be told from text.
    """
    text = token.content
    bracketed = (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))
    return len(text) > 1 and not text.isspace() and (token.special or bracketed)


class Controls:
    """A model's control tokens (text -> id), and for each an alias that nobody can type: it is random a process."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self.aliases = {text: f"\ufdd0{secrets.token_hex(8)}\ufdd1" for text in self.ids}
        heads: dict[str, set[int]] = {}
        for text in self.ids:
            heads.setdefault(text[:2], set()).add(len(text))
        self._sizes = {head: sorted(sizes, reverse=True) for head, sizes in heads.items()}
        pattern = "|".join(re.escape(head) for head in sorted(heads))
        self._heads = re.compile(f"(?={pattern})") if heads else None
        self._prefixes = {text[:size] for text in self.ids for size in range(2, len(text))}
        self._suffixes = {text[-size:] for text in self.ids for size in range(2, len(text))}
        self._pairs = {text[at : at + 2] for text in self.ids for at in range(1, len(text) - 1)}
        self._insides = "\n".join(sorted({text[1:-1].translate(_SAME_DIGITS) for text in self.ids}))
        self._longest = max(map(len, self.ids), default=0)

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of every control token in `text`: the longest at each place, overlapping ones too."""
        if self._heads is None:
            return
        for match in self._heads.finditer(text):
            start = match.start()
            for size in self._sizes[text[start : start + 2]]:
                if text[start : start + size] in self.ids:
                    yield start, start + size
                    break

    def with_aliases(self, text: str) -> str:
        """`text` with each control token, from left to right, replaced by its alias."""
        pieces, end = [], 0
        for start, stop in self.find(text):
            if start >= end:
                pieces += [text[end:start], self.aliases[text[start:stop]]]
                end = stop
        return "".join([*pieces, text[end:]]) if pieces else text

    def break_up(self, text: str, mark: str, *, whole: bool = True) -> str:
        """`text` with `mark` inside whatever is a control token or could become part of one beside other text.

        Ends are covered so that two texts that a template puts side by side, trimmed or not, cannot spell one together;
        and so is a text that stands within a token, for a template that writes both of its ends (`'<' ~ key ~ '>'`),
        unless `whole` is False. A mark stands between two characters of `text`, or behind a text that is only one, and
        is no blank: trimming a text works as before.
        """
        cuts = {start + 1 for start, _ in self.find(text)}
        cuts |= self._at_ends(text)
        core, at = text.strip(), len(text) - len(text.lstrip())
        if len(core) < len(text):
            cuts.update(at + cut for cut in self._at_ends(core))
        if whole and 0 < len(core) <= self._longest - 2 and core.translate(_SAME_DIGITS) in self._insides:
            # As far behind as can be: names that a template sorts then mostly keep their order.
            cuts.add(at + max(len(core) - 1, 1))
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(edges)) if cuts else text

    def _at_ends(self, text: str) -> set[int]:
        """Where to cut `text` so that its ends begin or end no control token."""
        cuts: set[int] = set()
        longest = min(self._longest, len(text))
        if self._heads is not None and self._heads.search(text, len(text) - longest):
            cuts.update(len(text) - size + 1 for size in range(2, longest + 1) if text[-size:] in self._prefixes)
        if text[:2] in self._pairs and any(text[:size] in self._suffixes for size in range(2, longest + 1)):
            cuts.add(1)
        return cuts
