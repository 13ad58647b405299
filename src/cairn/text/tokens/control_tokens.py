"""Control tokens: added tokens with a meaning for the model, and how users' texts are kept from spelling them."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping

from tokenizers import AddedToken

_SAME_DIGITS = str.maketrans("123456789", "000000000")
"""Maps all digits to 0. Thousands of reserved tokens differ only in their number, so few texts remain to search."""


def is_control(token: AddedToken) -> bool:
    """Return whether an added token is a control token: special, or a bracketed word such as `<think>` or `[INST]`.

    Other added tokens (runs of spaces, common words) and single characters are ordinary text.
    """
    text = token.content
    bracketed = (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))
    return len(text) > 1 and not text.isspace() and (token.special or bracketed)


class Controls:
    """A model's control tokens (text -> id), each with an alias that nobody can type: random in every process."""

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
        """Yield (start, end) of every control token in `text`: the longest at each place, overlapping ones too."""
        if self._heads is None:
            return
        for match in self._heads.finditer(text):
            start = match.start()
            for size in self._sizes[text[start : start + 2]]:
                if text[start : start + size] in self.ids:
                    yield start, start + size
                    break

    def with_aliases(self, text: str) -> str:
        """Replace each control token in `text`, from left to right, by its alias."""
        pieces, end = [], 0
        for start, stop in self.find(text):
            if start >= end:
                pieces += [text[end:start], self.aliases[text[start:stop]]]
                end = stop
        return "".join([*pieces, text[end:]]) if pieces else text

    def break_up(self, text: str, mark: str, *, whole: bool = True) -> str:
        """Insert `mark` into every control token in `text`, and wherever `text` could become part of one.

        The ends are covered, so that two texts that a template joins, trimmed or not, cannot spell a control token
        together. Unless `whole` is False, so is a text that is the inside of one, for templates that write both its
        ends (`'<' ~ key ~ '>'`). A mark goes between two characters, or after a text of one character, and is not white
        space: trimming a text works as before.
        """
        cuts = {start + 1 for start, _ in self.find(text)}
        cuts |= self._at_ends(text)
        core, at = text.strip(), len(text) - len(text.lstrip())
        if len(core) < len(text):
            cuts.update(at + cut for cut in self._at_ends(core))
        if whole and 0 < len(core) <= self._longest - 2 and core.translate(_SAME_DIGITS) in self._insides:
            # As late as possible, so that names that a template sorts mostly keep their order.
            cuts.add(at + max(len(core) - 1, 1))
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(edges)) if cuts else text

    def _at_ends(self, text: str) -> set[int]:
        """Return where to cut `text` so that its ends cannot begin or end a control token."""
        cuts: set[int] = set()
        longest = min(self._longest, len(text))
        if self._heads is not None and self._heads.search(text, len(text) - longest):
            cuts.update(len(text) - size + 1 for size in range(2, longest + 1) if text[-size:] in self._prefixes)
        if text[:2] in self._pairs and any(text[:size] in self._suffixes for size in range(2, longest + 1)):
            cuts.add(1)
        return cuts
