"""Stop strings: text ends before the first one that is complete, and no part of it is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Cuts a stream of text at the stop string that is completed first; of several, at the one that began first.

    Text that could still become a stop string is held back, so what is shown does not depend on how the stream was
    cut into pieces. At most one stop string's length is held and searched again for a piece. Control tokens may be
    part of a stop string: their text is looked at, and never shown.
    """

    __slots__ = ("_held", "_hidden", "_stops", "hit")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """Where in the text held back control tokens are."""
        self.hit = False
        """Whether a stop string was found; everything after it is dropped."""

    def push(self, text: str, *, hidden: bool = False) -> str:
        """What may be shown now. `hidden`: the text is that of a control token, which is not shown."""
        if self.hit:
            return ""
        if hidden:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        if self._held:
            text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        self.hit = bool(found)
        keep = min(found)[1] if found else self._start_of_partial(text)
        self._held = "" if found else text[keep:]
        return self._shown(text, keep)

    def release(self) -> str:
        """Text held back; it is shown after all because nothing follows, or because stops do not count here."""
        held, self._held = self._held, ""
        return self._shown(held, len(held))

    def _shown(self, text: str, end: int) -> str:
        """The part of `text` before `end` that is shown; the rest is what is held."""
        if not self._hidden:
            return text[:end]
        pieces, at = [], 0
        for start, stop in self._hidden:
            pieces.append(text[at : min(start, end)])
            at = min(stop, end)
        self._hidden = [(max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end]
        return "".join([*pieces, text[at:end]])

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
