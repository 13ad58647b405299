"""A draft head (MTP) over the fake engine that knows the tokens behind each state, and so detects every mix-up.

Each of its slots holds all tokens of the model's context up to its own. The state before a token must be that of the
tokens in the slot before; a state of another position, a stale slot or a block of another sequence breaks a law. It
predicts what the fake engine would pick greedily.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cairn.engine.fake import FakeEngine, Words, _Truth
from cairn.types.request import SamplingParams
from cairn.types.step import EngineCall, Ready, Row, RowResult
from tests.laws.storage_world import law

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
Prefix = tuple[int, ...]


class WatchedEngine(FakeEngine):
    """The fake engine, which records the tokens behind each of its states."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.prefixes: dict[bytes, Prefix] = {}

    def _states(self, wanted: Sequence[tuple[Row, int]]) -> Words:
        states = super()._states(wanted)
        for (row, place), word in zip(wanted, states.tolist(), strict=True):
            if row.states_from is not None:
                self.prefixes[word.to_bytes(8, "little")] = tuple(row.tokens[: place + 1])
        return states


class FakeHead:
    """An `Engine` whose rows take the states before their tokens."""

    def __init__(self, model: WatchedEngine, blocks: int, max_tokens: int) -> None:
        self.model, self.size = model, 4
        self.info = dataclasses.replace(
            model.info, blocks=(blocks,), block_tokens=self.size, max_tokens=max_tokens, groups=model.info.groups[:1]
        )
        self.slots: dict[int, Prefix] = {}

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        return Ready([self.step(row) for row in rows])

    def step(self, row: Row) -> RowResult:
        (table,), count = row.tables, row.end - row.start
        law(0 <= row.start < row.end <= len(row.tokens), "the head reads what is not there")
        law(count <= self.info.max_tokens and row.end <= self.info.context, "the head reads too much")
        law(len(row.before) == 8 * count, "states are missing before the tokens of the head")
        context: Prefix = ()
        for place in range(row.start, row.end):
            state = row.before[8 * (place - row.start) :][:8]
            law(state in self.model.prefixes, "a state that no place has")
            prefix = self.model.prefixes[state]
            law(place == 0 or self.slots[self.slot(table, place - 1)] == prefix, "the state is not of the place before")
            context = (*prefix, row.tokens[place])
            self.slots[self.slot(table, place)] = context
        if row.logits_from is None:
            return RowResult()
        law(row.states_from == row.end - 1 == row.logits_from, "the head is asked for other positions than its last")
        state = _Truth(self.model).state(context).to_bytes(8, "little")
        self.model.prefixes[state] = context
        return RowResult(self.model.oracle(context, GREEDY, 1)[0], states=state)

    def slot(self, table: Sequence[int], place: int) -> int:
        block = table[place // self.size]
        law(0 <= block < self.info.blocks[0], "a block that the head does not have")
        return block * self.size + place % self.size
