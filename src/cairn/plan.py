"""What the scheduler has decided about the next step."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.engine.base import Engine, Row, RowResult
from cairn.kv.blocks import Copy
from cairn.sequence import Sequence
from cairn.types import Output

ENOUGH_TOKENS = 128
"""Prompt tokens of a step from which an engine is not much faster with more."""


@dataclass(slots=True)
class Room:
    """Prompt tokens that the step being planned still takes.

    All prompts of a step get their first token at its end. So once one is whole, no other is taken beyond
    `ENOUGH_TOKENS`: that would hold up the first one's answer, and the next token of all that run, and gain nothing.
    """

    left: int
    kept: int = 0
    """Kept back from a long prompt for short ones behind it."""
    _enough: int = ENOUGH_TOKENS

    def keep_half(self) -> None:
        """Keep half of it back."""
        self.kept = self.left // 2
        self.left -= self.kept

    def use_kept(self) -> None:
        """The long prompt has its part; what comes now is counted for itself."""
        self.left += self.kept
        self._enough = ENOUGH_TOKENS

    def take(self, count: int, *, whole: bool) -> None:
        """`count` tokens of a prompt are in the step; `whole`: its last ones too."""
        self.left -= count
        self._enough -= count
        if whole:
            self.left = min(self.left, max(0, self._enough))


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
    copies: list[Copy]
    """Blocks to copy first, in this order."""

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
            for group, source, target in self.copies:
                engine.write_blocks(group, [target], engine.read_blocks(group, [source]).wait()).wait()
            if all(row.end - row.start == 1 for row in self.rows):
                return engine.decode(self.rows).wait()
            return engine.prefill(self.rows).wait()
        except Exception as error:
            return error
