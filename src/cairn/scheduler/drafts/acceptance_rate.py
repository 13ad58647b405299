"""How often the guesses of a model came true in one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_RIGHT_AT_FIRST: Final = 0.6
"""Part of the guesses that count as right before any was checked."""
WEIGHT: Final = 1 / 12
_FORGET: Final = 1 / 200
"""How far the part of right guesses returns to its first value with each token for which nothing was guessed."""


class Acceptance:
    """A moving average of the part of the guesses that were right."""

    def __init__(self, general: Acceptance | None = None) -> None:
        """Start an average for one sequence at `general`, that of all sequences, which is updated with it."""
        self._general = general
        self._right = self._first
        """The average so far. While nothing is guessed, it drifts back to its first value."""

    @property
    def _first(self) -> float:
        return _RIGHT_AT_FIRST if self._general is None else self._general._right

    def chances(self, width: int) -> list[float]:
        """Return for each of the next guesses the chance that it and all before it are right."""
        return [self._right**count for count in range(1, width + 1)]

    def compare(self, guesses: Sequence[int], tokens: Sequence[int]) -> int:
        """Compare guesses with the tokens sampled in their places; return how many leading ones were right."""
        if self._general is not None:
            self._general.compare(guesses, tokens)
        right = 0
        for guess, token in zip(guesses, tokens, strict=False):
            self._right += ((guess == token) - self._right) * WEIGHT
            if guess != token:
                break
            right += 1
        if not guesses:
            self._right += (self._first - self._right) * min(1.0, _FORGET * len(tokens))
        return right
