"""Detection of answers that only repeat the same few tokens, as small models do."""

from __future__ import annotations

MAX_PERIOD = 64
"""Most tokens of a repeated piece."""
MIN_REPEATS = 8
"""Fewest consecutive repetitions of the piece."""
MIN_REPEATED = 256
"""Fewest tokens of all repetitions together: a short piece may well come eight times in a useful answer."""


class RepetitionWatch:
    """Loop detector that reads an answer token by token, so the result does not depend on how tokens are batched."""

    __slots__ = ("_matches", "_tokens", "looped")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._matches: dict[int, int] = {}
        """Period -> number of latest tokens equal to those one period before; periods with none are absent."""
        self.looped = False
        """Whether the answer has looped; never reset."""

    def push(self, token: int) -> None:
        """Add a token, in O(MAX_PERIOD)."""
        back = self._tokens[: -MAX_PERIOD - 1 : -1]
        before = self._matches
        self._matches = {at: before.get(at, 0) + 1 for at, one in enumerate(back, 1) if one == token}
        self._tokens.append(token)
        if len(self._tokens) > 4 * MAX_PERIOD:
            del self._tokens[:-MAX_PERIOD]
        self.looped = self.looped or any(
            count + period >= max(MIN_REPEATED, MIN_REPEATS * period) for period, count in self._matches.items()
        )

    def forget(self) -> None:
        """Start over: the tokens so far are not part of a loop."""
        self._tokens.clear()
        self._matches.clear()
