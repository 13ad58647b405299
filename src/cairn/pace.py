"""How much of a prompt fits into a step beside streams that run, from how long the last steps took.

A step is taken to last as long as its rows of one token take alone, and so many seconds for each token of prompts.
Both are measured all the time, on the machine as it is now and as deep in a prompt as it has got. What is dearer than
before counts at once; what is cheaper counts bit by bit, so that a step is at most `1 / (1 - _WEIGHT)` times as long as
was foreseen because of it. A step aims at `_AIM` of its limit, and so stays within it.
"""

from __future__ import annotations

import math

_AIM = 0.6
_WEIGHT = 0.3
_SHARE = 0.5
"""Where running streams alone take a step's time, prompts get so much more of it."""


class Pace:
    """Measured speed, and the tokens that it allows. `seconds` may be infinite: then everything fits."""

    __slots__ = ("_aim", "_alone", "_each", "_least", "_rows")

    def __init__(self, seconds: float, least: int) -> None:
        self._aim = _AIM * seconds
        self._least = least
        self._alone = 0.0
        """Seconds of a step of `_rows` rows of one token, and nothing else."""
        self._rows = 0
        self._each = math.inf
        """Seconds of a token of a prompt."""

    def took(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows of one token, and so many tokens of prompts, took so long."""
        if not tokens:
            same = rows == self._rows
            self._alone += (seconds - self._alone) * (_WEIGHT if same else 1.0)
            self._rows = rows
            return
        alone = self._rows_alone(rows)
        if seconds < alone:  # they have become faster since they were alone
            self._alone *= seconds / alone
            alone = seconds
        each = (seconds - alone) / tokens
        self._each = each if each > self._each or self._each == math.inf else self._each + _WEIGHT * (each - self._each)

    def tokens(self, rows: int) -> float:
        """Tokens of prompts for which a step has time beside so many rows of one token; without any, there is no limit.

        Never less than `least`, so that prompts are read however slow the machine is.
        """
        if not rows or not self._each:
            return math.inf
        alone = self._rows_alone(rows)
        return max(self._least, max(self._aim - alone, _SHARE * alone) // self._each)

    def _rows_alone(self, rows: int) -> float:
        """What rows of one token take at least: more than were measured as long as those, fewer in proportion less."""
        return self._alone * min(1.0, rows / self._rows) if self._rows else 0.0
