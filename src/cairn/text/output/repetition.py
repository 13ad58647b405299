"""Whether an answer only repeats itself: the same few tokens again and again, as small models come to do."""

from __future__ import annotations

MAX_PERIOD = 64
"""Tokens of the longest piece whose repetition is looked for."""
MIN_REPEATS = 8
"""Times that the piece must have come in a row."""
MIN_REPEATED = 256
"""Tokens that the repetitions must have together: a short piece may well come eight times in an honest answer."""


class RepetitionWatch:
    """Looks at an answer token by token, so that what it finds does not depend on how the tokens come."""

    __slots__ = ("_matches", "_tokens", "looped")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._matches: dict[int, int] = {}
        """Period -> how many of the last tokens were equal to those so far back; periods without any are left out."""
        self.looped = False
        """Whether the answer is in a loop. It stays so."""

    def push(self, token: int) -> None:
        """Look at one more token, in O(64)."""
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
        """Begin anew: what came so far is no part of a loop."""
        self._tokens.clear()
        self._matches.clear()
