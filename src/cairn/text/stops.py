"""Stop strings: text ends before the first one that is complete, and no part of it is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Cuts a stream of text at the stop string that is completed first; of several, at the one that began first.

    Text that could still become a stop string is held back, so what is shown does not depend on how the stream was
    cut into pieces. At most one stop string's length is held and searched again for a piece.
    """

    __slots__ = ("_held", "_stops", "hit")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False
        """Whether a stop string was found; everything after it is dropped."""

    def push(self, text: str) -> str:
        """What may be shown now."""
        if self.hit:
            return ""
        if self._held:
            text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.hit = True
            self._held = ""
            return text[: min(found)[1]]
        keep = self._start_of_partial(text)
        self._held = text[keep:]
        return text[:keep]

    def release(self) -> str:
        """Text held back; it is shown after all because nothing follows, or because stops do not count here."""
        held, self._held = self._held, ""
        return held

    def _start_of_partial(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string; len(text) if there is none."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0), first)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, first)
            if start >= 0:
                first = start
        return first
