"""The inputs of a step hold only that step's values, whatever steps were filled or refused before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cairn.engine.step_inputs import FilledStep, InputArrays, StepInputs
from cairn.kernels.storage import HostStorage
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup
from cairn.types.request import MAX_APPLIED
from cairn.types.step import NO_BLOCK, Row
from tests.tiny_models import GREEDY

ROWS, TOKENS, CONTEXT, VOCAB, POOL = 5, 96, 160, 50, 40
WIDTH = CONTEXT // BLOCK_TOKENS
GROUPS = (
    CacheGroup(kind="full", layers=(0,)),
    CacheGroup(kind="window", layers=(1,), window=32),
    CacheGroup(kind="state", layers=(2,), numbers=4),
)


class Copies(HostStorage):
    """A device's storage: each set of mirrors is memory of its own."""

    def mirror(self, array: Any) -> Any:
        return array.copy()


def inputs(sets: int = 1) -> StepInputs:
    """Return the inputs of a model with a full, a window and a state group."""
    arrays = InputArrays(
        tokens=np.full(TOKENS, 9, np.int32),
        positions=np.full(TOKENS, 9, np.int32),
        members=np.full(TOKENS, 9, np.int32),
        rows=np.full((ROWS, 3), 9, np.int32),
        tables=tuple(np.full((ROWS, WIDTH), 9, np.int32) for _ in GROUPS),
        slots=tuple(np.full(TOKENS, 9, np.int32) for _ in GROUPS),
        wanted=np.full(8, 9, np.int32),
        adapters=np.full((ROWS, MAX_APPLIED), 9, np.int32),
        scales=np.full((ROWS, MAX_APPLIED), 9, np.float32),
    )
    return StepInputs(HostStorage() if sets == 1 else Copies(), arrays, GROUPS, [POOL] * 3, CONTEXT, VOCAB, sets=sets)


def row(tables: Sequence[Sequence[int]], start: int, end: int, wanted: int | None = None, first: int = 0) -> Row:
    """Return a row of the tokens first, first + 1, ..."""
    tokens = [(first + place) % VOCAB for place in range(end)]
    return Row(tokens, start, end, tuple(list(table) for table in tables), wanted, end, GREEDY, 0)


def drawn(chance: random.Random) -> list[Row]:
    """Return the rows of one step: all of one token, or of any length."""
    single, rows = chance.random() < 0.5, []
    for _ in range(chance.randint(1, ROWS)):
        start = chance.randrange(CONTEXT - 20)
        end = start + (1 if single else chance.randint(1, 18))
        # From few tables, so that rows of the step before come again, longer and shorter.
        tables = [[chance.choice((0, 20)) + place for place in range(WIDTH)] for _ in GROUPS]
        tables[1][: start // BLOCK_TOKENS] = [NO_BLOCK] * (start // BLOCK_TOKENS)
        wanted = chance.choice((None, start, end - 1))
        rows.append(row(tables, start, end, wanted, chance.randrange(VOCAB)))
    return rows


def check(step: FilledStep, rows: list[Row]) -> None:
    """Compare every number that kernels will read with the rows."""
    mirrors, at, wanted = step.mirrors, 0, list[int]()
    longest = max(-(-one.end // BLOCK_TOKENS) for one in rows)
    for number, one in enumerate(rows):
        assert mirrors.rows[number].tolist() == [at, one.end - one.start, one.start]
        for group, table in enumerate(mirrors.tables):
            known = -(-one.end // BLOCK_TOKENS)
            assert table[number, :known].tolist() == list(one.tables[group][:known])
            assert (table[number, known:] == NO_BLOCK).all()
        for place in range(one.start, one.end):
            got = mirrors.tokens[at], mirrors.positions[at], mirrors.members[at]
            assert got == (one.tokens[place], place, number)
            for group in (0, 1):
                block = one.tables[group][place // BLOCK_TOKENS]
                assert mirrors.slots[group][at] == block * BLOCK_TOKENS + place % BLOCK_TOKENS
            if one.logits_from is not None and place >= one.logits_from:
                wanted.append(at)
            at += 1
    assert (step.tokens, step.blocks, step.wanted) == (at, longest, wanted)


@pytest.mark.parametrize("sets", [1, 2])
def test_a_step_holds_its_own_inputs_after_any_others(sets: int) -> None:
    """Refused steps in between name blocks outside the pool, or none for a token."""
    chance, filled = random.Random(5), inputs(sets)
    for _ in range(400):
        rows = drawn(chance)
        if chance.random() < 0.2:
            bad = drawn(chance)
            bad[-1].tables[0][bad[-1].start // BLOCK_TOKENS] = chance.choice((POOL, NO_BLOCK, -2))
            with pytest.raises(ValueError):
                filled.fill(bad)
        check(filled.fill(rows), rows)


def test_a_table_that_the_caller_extends_or_changes_is_filled_again() -> None:
    """Callers extend one list for as long as a request runs."""
    filled, tables = inputs(), tuple([0, 1] for _ in GROUPS)
    rows = [Row(list(range(40)), 17, 18, tables, 17, 1, GREEDY, 0)]
    check(filled.fill(rows), rows)
    tables[0][1] = 7
    check(filled.fill(rows), rows)
    for table in tables:
        table.append(3)
    longer = [Row(list(range(40)), 32, 33, tables, 32, 1, GREEDY, 0)]
    check(filled.fill(longer), longer)


@pytest.mark.parametrize("block", [POOL, -2, 2**31, -(2**31) - 1])
@pytest.mark.parametrize("place", [0, 1])
def test_a_block_outside_its_pool_is_refused(block: int, place: int) -> None:
    """Also one that no token of the step is written to, since kernels read it."""
    filled, tables = inputs(), [[0, 1], [0, 1], [0, 1]]
    tables[0][place] = block
    with pytest.raises(ValueError, match="outside the 40 of group 0"):
        filled.fill([row(tables, 17, 18)])


def test_a_table_that_ends_before_the_row_does_is_refused() -> None:
    """Also if the row's entry in the step before was long enough."""
    filled, tables = inputs(), [[4], [4], [4]]
    filled.fill([row(tables, 15, 16)])
    with pytest.raises(ValueError, match="a table of all its blocks"):
        filled.fill([row(tables, 16, 17)])


@pytest.mark.parametrize("end", [18, 20])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_token_or_a_state_without_a_block_is_refused(group: int, end: int) -> None:
    filled, tables = inputs(), [[0, 1], [0, 1], [0, 1]]
    tables[group][1] = NO_BLOCK
    with pytest.raises(ValueError, match="no block for its state" if group == 2 else "token without a block"):
        filled.fill([row(tables, 17, end)])
