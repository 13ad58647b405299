"""What the scheduler has decided about the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cairn.kv.pool.blocks import Copy
from cairn.scheduler.sequence import Matcher, Sequence
from cairn.types.errors import DeviceMemoryError
from cairn.types.outputs import FinishReason, Output
from cairn.types.request import Request
from cairn.types.stats import SchedulerStats
from cairn.types.step import Engine, Row, RowResult

ENOUGH_TOKENS = 128
"""Prompt tokens of a step from which an engine is not much faster with more."""
_AIM = 0.6
_WEIGHT = 0.3
_SHARE = 0.5
"""Where running streams alone take a step's time, prompts get so much more of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler, named as in `Config`; the engine's own limits apply too."""

    max_running: int = 64
    step_tokens: int = 512
    step_seconds: float = math.inf
    least_tokens: int = 4
    """Tokens of prompts that a step may have however long they take."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """How many turns tenants have against others that wait; 1 where nothing is said."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Of tenants, 0 where nothing is said: those of a lower number come before others, see `fairness.Classes`."""


class Share(NamedTuple):
    """What a step has for a prompt, as far as there are blocks for it."""

    tokens: int
    missing: int
    """All of the prompt's that are not in the step yet."""
    long: bool
    """Whether it is the long prompt beside which half of the step is kept."""


class StepBudget:
    """Prompt tokens that the step being planned still takes: what it has for a prompt, it says (`offer`), and what the
    prompt had blocks for, it hears (`take`).

    Everybody in a step gets a token at its end. So once a prompt is whole in it, no other is taken beyond
    `ENOUGH_TOKENS`: that would hold the first one up and gain nothing. Nor does a prompt that needs several steps get
    more of one than that, or than the others of the step together: somebody may come during it. Half of the step is
    then kept for prompts that are whole in it, which are counted for themselves.

    On a slow machine a step has time for less than that. Who is long and who is short is the same there, and so is each
    one's half; what is short may take several steps.
    """

    __slots__ = ("_base", "_long", "_most", "_tokens", "_whole", "kept", "left", "taken")

    def __init__(self, tokens: int, time: float = math.inf) -> None:
        """`time`: tokens for which there is time."""
        self._tokens = tokens
        self.left = self._most = int(min(tokens, time))
        self.kept = 0
        """Tokens that are kept for short prompts; 0 where there is no long one."""
        self.taken = self._base = self._long = 0
        self._whole = False

    def short(self, missing: int) -> bool:
        """Whether a prompt of which so many tokens are missing may have a part of what is kept."""
        return missing <= (self.left if self._most == self._tokens else self.kept)

    def offer(self, missing: int) -> Share:
        """What there is for a prompt of which so many tokens are missing. The first that takes several steps is the
        long one: from then on half of the step is kept."""
        long = not self.kept and missing > min(self._tokens, max(self._tokens // 2, ENOUGH_TOKENS))
        if long:
            self._keep_half()
        return Share(min(self.left, missing), missing, long)

    def take(self, share: Share, count: int) -> None:
        """So many tokens of a share are in the step."""
        self.taken += count
        self.left -= count
        if count == share.missing:
            self._whole = True
            self.left = min(self.left, max(0, self._base + ENOUGH_TOKENS - self.taken))
        if share.long:
            self._use_kept(count)

    def _keep_half(self) -> None:
        """What is left is for a long prompt, and half of the step is kept."""
        self.kept = self._tokens // 2
        self.left = min(self.left, self._most - self._most // 2, ENOUGH_TOKENS)

    def _use_kept(self, long: int) -> None:
        """The long prompt has `long` tokens of the step; what is left is what was kept."""
        self._long = long
        self.left = min(self.kept, self._most - self.taken)
        if self._whole:
            self.left = min(self.left, max(0, self._base + ENOUGH_TOKENS - self.taken))
        else:
            self._base = self.taken

    def use_rest(self) -> None:
        """What is left is what the long prompt may still have: as much as the others have, if that is more."""
        most = max(min(self._tokens, ENOUGH_TOKENS), self.taken - self._long)
        self.left = max(0, min(self._most - self.taken, most - self._long))


class PrefillPace:
    """How much of a prompt a step has time for beside streams that run, from how long the last steps took.

    A step is taken to last as long as its rows of one token take alone, and so many seconds for each token of prompts.
    Both are measured all the time, on the machine as it is now and as deep in a prompt as it has got. What is dearer
    than before counts at once; what is cheaper counts bit by bit, so that a step is at most `1 / (1 - _WEIGHT)` times
    as long as was foreseen because of it. A step aims at `_AIM` of its limit, and so stays within it.
    """

    __slots__ = ("_aim", "_alone", "_each", "_least", "_rows")

    def __init__(self, seconds: float, least: int) -> None:
        """`seconds` may be infinite: then everything fits."""
        self._aim = _AIM * seconds
        self._least = least
        self._alone = 0.0
        """Seconds of a step of `_rows` rows of one token, and nothing else."""
        self._rows = 0
        self._each = math.inf
        """Seconds of a token of a prompt."""

    @property
    def token_seconds(self) -> float:
        """Seconds of a token of a prompt, 0 before any was measured."""
        return 0.0 if self._each == math.inf else self._each

    def took(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows of one token, and so many tokens of prompts, took so long."""
        if not tokens:
            same = rows == self._rows
            self._alone += (seconds - self._alone) * (_WEIGHT if same else 1.0)
            self._rows = rows
            return
        alone = self._rows_alone(rows)
        if seconds < alone:  # the machine has become faster since they were alone, for prompts as for them
            known = tokens * self._each if self._each < math.inf else 0.0
            faster = seconds / (alone + known)
            self._alone *= faster
            alone *= faster
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


def sizes(rows: list[Row], *, prompts: bool) -> tuple[int, int]:
    """Tokens in rows of more than one, and how many rows have one; without `prompts` all have."""
    lengths = [row.end - row.start for row in rows] if prompts else []
    singles = lengths.count(1)
    return (sum(lengths) - singles, singles) if prompts else (0, len(rows))


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows for one engine call, and what ended before it. `rows` may be empty; commit it all the same."""

    rows: list[Row]
    sequences: list[Sequence]
    """The sequences whose rows these are, in the order of `rows`."""
    ended: list[Output]
    """Requests that ended without a row: past their deadline, or with nothing left to compute."""
    started: list[int]
    """Ids of requests that run for the first time."""
    copies: list[Copy]
    """Blocks to copy first, in this order."""
    chunked: int
    """Tokens of rows of more than one: of prompts."""
    singles: int
    """Rows of one token."""
    encodes: bool = False
    """Whether the rows are whole texts for an encoder."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the step that were known before it, where it computes a prompt; 0 where it only samples."""
        return self.chunked + self.singles if self.chunked else 0

    def run(self, engine: Engine) -> list[RowResult] | Exception:
        """The engine's results for `rows`, or what it raised; both go to `Scheduler.commit`."""
        try:
            return self._run(engine)
        except DeviceMemoryError as error:
            return self._one_by_one(engine, error)
        except Exception as error:
            return error

    def _one_by_one(self, engine: Engine, error: DeviceMemoryError) -> list[RowResult] | Exception:
        """Compute each row alone after a step that had no memory: one that has none alone ends alone.

        Not where rows change a state in place: what a step that failed left of it is unknown.
        """
        if len(self.rows) < 2 or any(group.kind == "state" for group in engine.info.groups):
            return error
        results = list[RowResult]()
        for row in self.rows:
            try:
                results += (engine.embed if self.encodes else engine.prefill)([row]).wait()
            except DeviceMemoryError as own:
                results.append(RowResult(error=str(own)))
            except Exception as other:
                return other
        return results

    def _run(self, engine: Engine) -> list[RowResult]:
        if not self.rows:
            return []
        for group, source, target in self.copies:
            engine.copy_blocks(group, [(source, target)]).wait()
        if self.encodes:
            return engine.embed(self.rows).wait()
        if not self.chunked:
            return engine.decode(self.rows).wait()
        return engine.prefill(self.rows).wait()


class Planner(Protocol):
    """What decides what a worker computes next: `Scheduler`, or `TextQueue` for an encoder."""

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        ...

    def stats(self) -> SchedulerStats:
        """What it holds now."""
        ...

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request; `matcher` follows its grammar, where it has one."""
        ...

    def drop(self, id: int, reason: FinishReason) -> Output | None:
        """End a request in any state; None if there is no such request (any more)."""
        ...

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do, or nothing but to wait."""
        ...

    def commit(self, plan: Plan, results: list[RowResult] | Exception, seconds: float = 0.0) -> list[Output]:
        """Take what the engine made of the last plan."""
        ...
