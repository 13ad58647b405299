"""How much a step may take: the limits of a scheduler, and the budgets of tokens and time of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ENOUGH_TOKENS = 128
"""Prompt tokens in a step beyond which an engine is hardly any faster for each token."""
_AIM = 0.6
"""Part of the time limit that a step is planned for."""
_WEIGHT = 0.3
"""Weight of a new measurement in the moving averages."""
_SHARE = 0.5
"""Time for prompts, as a part of decode time, if decoding alone already uses up the step's limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler, named as in `Config`; the engine's own limits apply too."""

    max_running: int = 64
    step_tokens: int = 512
    step_seconds: float = math.inf
    least_tokens: int = 4
    """Prompt tokens that a step may always have, however slow the machine is."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> weight in the round robin; 1 if not named."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Tenant -> class, 0 if not named; lower classes are served first, see `fairness.Classes`."""


class Share(NamedTuple):
    """Tokens of the step's budget that are offered to a prompt."""

    tokens: int
    missing: int
    """Tokens of the prompt that are not in the step yet."""
    long: bool
    """Whether this is the long prompt for which half of the step is reserved for short ones."""


class StepBudget:
    """Prompt tokens that the step being planned can still take.

    `offer` says how many a prompt may have; `take` records how many it got (blocks may limit it).

    All sequences of a step get their token at its end. So once a prompt fits whole into the step, no other is added
    beyond `ENOUGH_TOKENS`: that would delay the first one and gain nothing. A long prompt, one that needs several
    steps, gets at most `ENOUGH_TOKENS` of a step, or as many as all others together, because a request may arrive
    during the step. Half of the step is then reserved for short prompts, which fit whole into it.

    On a slow machine there is time for fewer tokens. The limit between long and short stays the same, and so do the
    halves; a short prompt may then take several steps.
    """

    __slots__ = ("_base", "_long", "_most", "_tokens", "_whole", "kept", "left", "taken")

    def __init__(self, tokens: int, time: float = math.inf) -> None:
        """Make the budget of a step. `tokens`: its limit; `time`: tokens for which there is time."""
        self._tokens = tokens
        self.left = self._most = int(min(tokens, time))
        self.kept = 0
        """Tokens reserved for short prompts; 0 without a long prompt."""
        self.taken = self._base = self._long = 0
        self._whole = False

    def short(self, missing: int) -> bool:
        """Tell whether a prompt with so many missing tokens may use the reserved half."""
        return missing <= (self.left if self._most == self._tokens else self.kept)

    def offer(self, missing: int) -> Share:
        """Offer a share of the budget to a prompt with so many missing tokens.

        The first prompt that needs several steps is the long one: from then on half of the step is reserved.
        """
        long = not self.kept and missing > min(self._tokens, max(self._tokens // 2, ENOUGH_TOKENS))
        if long:
            self._keep_half()
        return Share(min(self.left, missing), missing, long)

    def take(self, share: Share, count: int) -> None:
        """Record that `count` tokens of a share are in the step."""
        self.taken += count
        self.left -= count
        if count == share.missing:
            self._whole = True
            self.left = min(self.left, max(0, self._base + ENOUGH_TOKENS - self.taken))
        if share.long:
            self._use_kept(count)

    def _keep_half(self) -> None:
        """Reserve half of the step for short prompts, and leave the rest to the long one."""
        self.kept = self._tokens // 2
        self.left = min(self.left, self._most - self._most // 2, ENOUGH_TOKENS)

    def _use_kept(self, long: int) -> None:
        """Open the reserved half to short prompts; the long prompt has taken `long` tokens."""
        self._long = long
        self.left = min(self.kept, self._most - self.taken)
        if self._whole:
            self.left = min(self.left, max(0, self._base + ENOUGH_TOKENS - self.taken))
        else:
            self._base = self.taken

    def use_rest(self) -> None:
        """Give the rest of the step to the long prompt, up to as many tokens as all others have together."""
        most = max(min(self._tokens, ENOUGH_TOKENS), self.taken - self._long)
        self.left = max(0, min(self._most - self.taken, most - self._long))


class PrefillPace:
    """Estimates how many prompt tokens a step has time for while other sequences decode, from the last steps' times.

    The model of a step's time: that of its decode rows alone, plus a constant for each prompt token. Both are measured
    continuously. A slower measurement counts at once, a faster one is averaged in, so that an estimate is too low by a
    factor of at most `1 / (1 - _WEIGHT)`. A step is planned for `_AIM` of its limit, and so stays within it.
    """

    __slots__ = ("_aim", "_alone", "_each", "_least", "_rows")

    def __init__(self, seconds: float, least: int) -> None:
        """Make an estimate for steps of at most `seconds` (may be infinite) and at least `least` prompt tokens."""
        self._aim = _AIM * seconds
        self._least = least
        self._alone = 0.0
        """Seconds of a step of `_rows` decode rows and nothing else."""
        self._rows = 0
        self._each = math.inf
        """Seconds for each prompt token."""

    @property
    def token_seconds(self) -> float:
        """Seconds for each prompt token; 0 before the first measurement."""
        return 0.0 if self._each == math.inf else self._each

    def record(self, rows: int, tokens: int, seconds: float, extra: int = 0) -> None:
        """Record how long a step of `rows` decode rows and `tokens` prompt tokens took.

        `extra`: guesses in the rows; each is taken to cost as much as a prompt token.
        """
        if extra:
            tokens, seconds = self._without(extra, tokens, seconds)
        if not tokens:
            same = rows == self._rows
            self._alone += (seconds - self._alone) * (_WEIGHT if same else 1.0)
            self._rows = rows
            return
        alone = self._rows_alone(rows)
        if seconds < alone:  # the machine has become faster since, for decoding and prompts alike
            known = tokens * self._each if self._each < math.inf else 0.0
            faster = seconds / (alone + known)
            self._alone *= faster
            alone *= faster
        each = (seconds - alone) / tokens
        self._each = each if each > self._each or self._each == math.inf else self._each + _WEIGHT * (each - self._each)

    def _without(self, extra: int, tokens: int, seconds: float) -> tuple[int, float]:
        """Return the (tokens, seconds) that `record` counts for a step that also checked `extra` guesses.

        In a step with prompts, guesses count as prompt tokens. In one without, their estimated time is subtracted, but
        no more than half of the step's.
        """
        if tokens:
            return tokens + extra, seconds
        return 0, max(seconds / 2, seconds - extra * self.token_seconds)

    def tokens(self, rows: int, extra: int = 0) -> float:
        """Return how many prompt tokens a step has time for beside `rows` decode rows; infinity if `rows` is 0.

        `extra`: guesses in the rows, which take as much time as prompt tokens. The result is never less than `least`,
        so that prompts advance however slow the machine is.
        """
        if not rows or not self._each:
            return math.inf
        alone = self._rows_alone(rows)
        return max(self._least, max(self._aim - alone, _SHARE * alone) // self._each - extra)

    def _rows_alone(self, rows: int) -> float:
        """Return the least seconds that so many decode rows take.

        More rows than measured count as long as those; fewer take proportionally less.
        """
        return self._alone * min(1.0, rows / self._rows) if self._rows else 0.0
