"""How far the loading of a model is, for people."""

from __future__ import annotations

import logging
from typing import TextIO

from cairn.system.interfaces import Clock

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""A shorter load says nothing."""
LINE_SECONDS = 5.0
"""Between two lines of a log."""
_DRAW_SECONDS = 0.2
_CLEAR = "\r\x1b[K"
_WIDTH = 30


class Shown:
    """A `digests.Watch` for people: on a terminal a line that changes, elsewhere lines in the log.

    No cursor is hidden and no thread draws: a worker may be killed at any moment.
    """

    def __init__(self, model: str, out: TextIO, clock: Clock) -> None:
        self._model, self._out, self._clock = model, out, clock
        self._terminal = out.isatty()
        self._began = clock.now()
        self._next = self._began + (QUIET_SECONDS if self._terminal else LINE_SECONDS)
        self._drawn = False

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Say it, if that is due."""
        now = self._clock.now()
        if now < self._next or not log.isEnabledFor(logging.INFO):
            return
        share = min(1.0, done / max(1, total))
        seconds = now - self._began
        if self._terminal:
            self._next = now + _DRAW_SECONDS
            bar = "━" * round(share * _WIDTH)
            self._write(f"{_CLEAR}Loading: {doing} {bar:<{_WIDTH}} {share:4.0%} {seconds:4.0f} s")
            self._drawn = True
        else:
            self._next = now + LINE_SECONDS
            log.info("loading %s for %.0f s: %s, %.0f %%", self._model, seconds, doing, 100 * share)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._drawn:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, UnicodeError):
            self._next = float("inf")  # nobody reads it, or not in this encoding
