"""A planned step: its rows, what running it returns, and the interface of what plans one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from cairn.kv.pool.blocks import Copy
from cairn.scheduler.sequence import Matcher, Sequence
from cairn.types.errors import DeviceMemoryError
from cairn.types.outputs import FinishReason, Output
from cairn.types.request import Request
from cairn.types.stats import SchedulerStats
from cairn.types.step import Engine, EngineCall, Ready, Row, RowResult

Uncopied = dict[tuple[int, int], DeviceMemoryError]
"""Blocks, by group and number, that were to be copies and are not, and why."""


def sizes(rows: list[Row], sequences: Iterable[Sequence], *, prompts: bool) -> tuple[int, int]:
    """Return a step's prompt tokens, which are those in rows of more than one token, and its number of one-token rows.

    `prompts`: whether the step has any prompt; if not, every row has one token. Guesses do not count, and neither do
    tokens that are computed again because of them.
    """
    if not prompts:
        return 0, len(rows)
    pairs = zip(rows, sequences, strict=True)
    lengths = [row.end - row.start - row.draft - one.again for row, one in pairs]
    singles = lengths.count(1)
    return sum(lengths) - singles, singles


class Plan(msgspec.Struct, frozen=True):
    """One step: the rows for one engine call, and requests that ended before it. Commit it even if `rows` is empty."""

    rows: list[Row]
    sequences: list[Sequence]
    """The sequences of `rows`, in the same order."""
    ended: list[Output]
    """Outputs of requests that ended without a row: past their deadline, or with nothing left to compute."""
    started: list[int]
    """Ids of requests that run for the first time."""
    copies: list[Copy]
    """Block copies to make before the step, in order."""
    chunked: int
    """Prompt tokens: those in rows of more than one token."""
    singles: int
    """Rows of one token, not counting `extra`."""
    extra: int = 0
    """Guesses in all rows, and tokens that are computed again because of them."""
    encodes: bool = False
    """Whether the rows are whole texts for an encoder."""

    @property
    def prompt_tokens(self) -> int:
        """All tokens of a step that computes a prompt; 0 if it only decodes."""
        return self.chunked + self.singles if self.chunked else 0

    def run(self, engine: Engine) -> list[RowResult] | Exception:
        """Run the step; return the results of `rows` or the engine's exception, either for `Scheduler.commit`."""
        return self.submit(engine).results()

    def submit(self, engine: Engine) -> SubmittedStep:
        """Start the step. An exception of the engine is kept for `SubmittedStep.results`."""
        try:
            if self.copies and self.rows and (lacking := self._copy(engine)):
                return SubmittedStep(self, engine, next(iter(lacking.values())), lacking)
            return SubmittedStep(self, engine, self._start(engine))
        except Exception as error:
            return SubmittedStep(self, engine, error)

    def one_by_one(self, engine: Engine, error: DeviceMemoryError, lacking: Uncopied) -> list[RowResult] | Exception:
        """Run each row alone after a step ran out of memory, so that only rows too large on their own fail.

        Rows that read blocks of `lacking` fail too. All rows fail of models with recurrent states: the failed step may
        have changed states in place.
        """
        if len(self.rows) < 2 or any(group.kind == "state" for group in engine.info.groups):
            return [RowResult(error=str(error))] * len(self.rows)
        results = list[RowResult]()
        for row in self.rows:
            short = next((why for (group, block), why in lacking.items() if block in row.tables[group]), None)
            if short is not None:
                results.append(RowResult(error=str(short)))
                continue
            try:
                results += (engine.embed if self.encodes else engine.prefill)([row]).wait()
            except DeviceMemoryError as own:
                results.append(RowResult(error=str(own)))
            except Exception as other:
                return other
        return results

    def _copy(self, engine: Engine) -> Uncopied:
        """Make the copies, and return those for which there was no memory.

        They are never made again: once a step has run, the blocks to copy from may hold something else.
        """
        lacking: Uncopied = {}
        for group, source, target in self.copies:
            if (known := lacking.get((group, source))) is not None:
                lacking[group, target] = known
                continue
            try:
                engine.copy_blocks(group, [(source, target)]).wait()
                lacking.pop((group, target), None)
            except DeviceMemoryError as error:
                lacking[group, target] = error
        return lacking

    def _start(self, engine: Engine) -> EngineCall[list[RowResult]]:
        if not self.rows:
            return Ready([])
        if self.encodes:
            return engine.embed(self.rows)
        if not self.chunked and not self.extra:
            return engine.decode(self.rows)
        return engine.prefill(self.rows)


class SubmittedStep(msgspec.Struct, frozen=True):
    """A step that the engine computes, or refused."""

    plan: Plan
    engine: Engine
    call: EngineCall[list[RowResult]] | Exception
    lacking: Uncopied = {}
    """Blocks that were to be copied into before the step."""

    def results(self) -> list[RowResult] | Exception:
        """Wait for the step; return the results of its rows or the engine's exception."""
        try:
            if isinstance(self.call, Exception):
                raise self.call
            return self.call.wait()
        except DeviceMemoryError as error:
            return self.plan.one_by_one(self.engine, error, self.lacking)
        except Exception as error:
            return error


class Planner(Protocol):
    """Interface of `Scheduler` and of `TextQueue`, its counterpart for encoders."""

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        ...

    def stats(self) -> SchedulerStats:
        """Return the current statistics."""
        ...

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request; `matcher` follows its grammar, if it has one."""
        ...

    def drop(self, id: int, reason: FinishReason) -> Output | None:
        """End a request in any state; None if it is unknown or has already ended."""
        ...

    def plan(self) -> Plan | None:
        """Return the next step; None if there is nothing to compute now."""
        ...

    def follow(self, plan: Plan) -> Plan | None:
        """Return the step after a plan that runs; None if that one's results are needed first."""
        ...

    def commit(self, plan: Plan, results: list[RowResult] | Exception, seconds: float = 0.0) -> list[Output]:
        """Return the outputs of the first plan not committed, given its results or the engine's exception."""
        ...
