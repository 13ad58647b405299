"""What the scheduler has decided about the next step."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.engine.base import Engine, Row, RowResult
from cairn.sequence import Sequence
from cairn.types import Output


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows for one engine call, and what ended before it. `rows` may be empty; commit it all the same."""

    rows: list[Row]
    sequences: list[Sequence]
    """Whose row it is, in the order of `rows`."""
    ended: list[Output]
    """Requests that ended without a row: past their deadline, or with nothing left to compute."""
    started: list[int]
    """Ids of requests that run for the first time."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the step that were known before it, where it computes a prompt; 0 where it only samples."""
        lengths = [row.end - row.start for row in self.rows]
        return sum(lengths) if max(lengths, default=0) > 1 else 0

    def run(self, engine: Engine) -> list[RowResult] | Exception:
        """The engine's results for `rows`, or what it raised; both go to `Scheduler.commit`."""
        try:
            if not self.rows:
                return []
            if all(row.end - row.start == 1 for row in self.rows):
                return engine.decode(self.rows).wait()
            return engine.prefill(self.rows).wait()
        except Exception as error:
            return error
