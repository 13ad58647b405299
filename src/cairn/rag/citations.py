"""Citations in an answer: `[2]` names the second source. One that names none is taken out, and counted."""

from __future__ import annotations

import re

_WHOLE = re.compile(r"\[\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*\]")
_BEGUN = re.compile(r"\[[\s\d,]{0,40}\Z")
_REACH = 41
"""Characters of what may become a citation."""


class CitationFilter:
    """Takes an answer piece by piece, and gives it back without citations of nothing."""

    def __init__(self, sources: int) -> None:
        self._sources = sources
        self._held = ""
        self.cited: set[int] = set()
        """Numbers of the sources that are cited, from 1."""
        self.removed = 0
        """How many numbers named no source."""

    def push(self, text: str) -> str:
        """What can be told now: a bracket that may become a citation waits."""
        text = self._held + text
        begun = _BEGUN.search(text, max(0, len(text) - _REACH))
        at = len(text) if begun is None else len(text[: begun.start()].rstrip())
        self._held = text[at:]
        return self._checked(text[:at])

    def finish(self) -> str:
        """What was waiting."""
        held, self._held = self._held, ""
        return self._checked(held)

    def _checked(self, text: str) -> str:
        return _WHOLE.sub(self._check, text)

    def _check(self, match: re.Match[str]) -> str:
        numbers = [int(one) for one in match[1].split(",")]
        good = [one for one in numbers if 1 <= one <= self._sources]
        self.cited.update(good)
        self.removed += len(numbers) - len(good)
        return "".join(f"[{one}]" for one in good)
