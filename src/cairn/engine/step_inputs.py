"""The inputs of a step: filled and checked in numpy on the host, and uploaded to the kernels' arrays in one transfer.

In host memory a mirror is its array, so a step is filled where kernels read it. For a device there are two sets of
mirrors: the next step is filled while the one before it waits or runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Kernels
from cairn.kernels.program import Size
from cairn.models.forward.row_table import RowTable
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup
from cairn.types.step import NO_BLOCK, Row, check_guesses

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class InputArrays:
    """The kernels' arrays that a step's inputs go to; see `models.forward.buffers.Buffers`."""

    tokens: Any
    positions: Any
    members: Any
    rows: Any
    tables: tuple[Any, ...]
    """Of each group."""
    slots: tuple[Any, ...]
    """Of each group."""
    wanted: Any
    table_rows: Any = None
    """float32 [M, width]: the rows of a `RowTable` that the step's tokens have, where the model has one."""


class Mirrors:
    """One set of numpy arrays to fill."""

    def __init__(self, kernels: Kernels, arrays: InputArrays) -> None:
        self.tokens: Ints = kernels.mirror(arrays.tokens)
        self.positions: Ints = kernels.mirror(arrays.positions)
        self.members: Ints = kernels.mirror(arrays.members)
        self.rows: Ints = kernels.mirror(arrays.rows)
        self.tables: list[Ints] = [kernels.mirror(one) for one in arrays.tables]
        self.slots: list[Ints] = [kernels.mirror(one) for one in arrays.slots]
        self.wanted: Ints = kernels.mirror(arrays.wanted)
        self.table_rows = None if arrays.table_rows is None else kernels.mirror(arrays.table_rows)
        self._filled = [[one.shape[1]] * len(one) for one in self.tables]
        """How many entries of each line of each table hold blocks; the rest is `NO_BLOCK`."""

    def fill_table(self, group: int, number: int, blocks: Sequence[int]) -> None:
        """Put a row's blocks into its line of a group's table; nothing of the step before is left in it."""
        line, count = self.tables[group][number], len(blocks)
        line[:count] = blocks
        line[count : self._filled[group][number]] = NO_BLOCK
        self._filled[group][number] = count


class FilledStep(NamedTuple):
    """One step's inputs, in the mirrors."""

    mirrors: Mirrors
    rows: Sequence[Row]
    firsts: list[int]
    """Each row's first token in the step."""
    tokens: int
    blocks: int
    """Blocks of the longest table."""
    wanted: list[int]
    """Tokens of the step whose logits are wanted, in the order of rows and positions."""
    pending: list[tuple[int, int]]
    """Rows whose token a row of the step before samples, and the numbers of those rows."""

    @property
    def sizes(self) -> dict[Size, int]:
        """The step's sizes, but for logits."""
        return {"tokens": self.tokens, "rows": len(self.rows), "blocks": self.blocks}


class StepInputs:
    """Fills a step's inputs, refuses broken rows before anything is computed, and uploads what it filled."""

    def __init__(
        self,
        kernels: Kernels,
        arrays: InputArrays,
        groups: Sequence[CacheGroup],
        blocks: Sequence[int],
        context: int,
        vocab: int,
        *,
        sets: int = 1,
        table: RowTable | None = None,
    ) -> None:
        """`blocks` in the pool of each group. `sets`: how many steps may be filled and not computed yet, and one."""
        self._kernels, self._arrays = kernels, arrays
        self._groups, self._blocks, self._context, self._vocab = tuple(groups), tuple(blocks), context, vocab
        self._sets = [Mirrors(kernels, arrays) for _ in range(sets)]
        self._here = self._sets[0].tokens is arrays.tokens
        self._max_rows, self._max_tokens = len(self._sets[0].rows), len(self._sets[0].tokens)
        self._table = table
        self._numbers: Ints = np.arange(self._max_rows, dtype=np.int32)

    def fill(self, rows: Sequence[Row]) -> FilledStep:
        """Fill the next set of mirrors. Raises `ValueError` for rows that break the contract of `Row`."""
        self._check(rows)
        mirrors = self._sets[0]
        self._sets.append(self._sets.pop(0))
        tokens, positions, firsts = list[int](), list[int](), list[int]()
        wanted, pending = list[int](), list[tuple[int, int]]()
        for number, row in enumerate(rows):
            start, end, at = row.start, row.end, len(tokens)
            firsts.append(at)
            if row.pending is None:
                tokens += row.tokens[start:end]
            else:
                tokens.append(0)
                pending.append((number, row.pending))
            positions += range(start, end)
            if row.logits_from is not None and row.want == "token":
                wanted += range(at + row.logits_from - start, at + end - start)
        count, counts = len(tokens), [row.end - row.start for row in rows]
        if not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise ValueError(f"a row has a token outside the vocabulary of {self._vocab}")
        mirrors.tokens[:count] = tokens
        mirrors.positions[:count] = positions
        mirrors.rows[: len(rows)] = [*zip(firsts, counts, [row.start for row in rows], strict=True)]
        numbers = self._numbers[: len(rows)]
        mirrors.members[:count] = numbers if count == len(rows) else np.repeat(numbers, counts)
        blocks = max(-(-row.end // BLOCK_TOKENS) for row in rows)
        self._fill_tables(mirrors, rows, count, blocks)
        return FilledStep(mirrors, rows, firsts, count, blocks, wanted, pending)

    def upload(self, step: FilledStep, known: Sequence[int | None]) -> list[int]:
        """Upload a filled step, with the first of its wanted places.

        `known`: the tokens that the rows of the step before sampled. Returns the numbers of pending rows whose token
        is not among them; they are computed with another one.
        """
        mirrors, missing = step.mirrors, list[int]()
        for number, source in step.pending:
            token = known[source] if source < len(known) else None
            if token is None:
                missing.append(number)
            mirrors.tokens[step.firsts[number]] = 0 if token is None else token
        count, rows = step.tokens, len(step.rows)
        if self._table is not None and mirrors.table_rows is not None:
            self._table.read(mirrors.tokens[:count], mirrors.table_rows[:count])
        if not self._here:
            arrays = self._arrays
            pairs = [
                (arrays.tokens, mirrors.tokens[:count]),
                (arrays.positions, mirrors.positions[:count]),
                (arrays.members, mirrors.members[:count]),
                (arrays.rows, mirrors.rows[:rows]),
                *((array, one[:count]) for array, one in zip(arrays.slots, mirrors.slots, strict=True)),
                *((array, one[:rows, : step.blocks]) for array, one in zip(arrays.tables, mirrors.tables, strict=True)),
            ]
            if mirrors.table_rows is not None:
                pairs.append((arrays.table_rows, mirrors.table_rows[:count]))
            self._kernels.upload([*pairs, *self._wanted(step, 0)])
        else:
            self._wanted(step, 0)
        return missing

    def want(self, step: FilledStep, first: int) -> None:
        """Upload the wanted places from number `first` on, as many as the head takes at once."""
        pairs = self._wanted(step, first)
        if not self._here:
            self._kernels.upload(pairs)

    def _wanted(self, step: FilledStep, first: int) -> list[tuple[Any, NDArray[Any]]]:
        places = step.wanted[first : first + len(step.mirrors.wanted)]
        step.mirrors.wanted[: len(places)] = places
        return [(self._arrays.wanted, step.mirrors.wanted[: len(places)])]

    def _fill_tables(self, mirrors: Mirrors, rows: Sequence[Row], count: int, blocks: int) -> None:
        """Fill the tables, and the slots that tokens are written to, of each group. What kernels will follow is
        checked here: a block outside its pool would be another's memory."""
        members = mirrors.members[:count]
        positions = mirrors.positions[:count]
        places = positions // BLOCK_TOKENS
        offsets = positions - places * BLOCK_TOKENS
        for group, (table, slots) in enumerate(zip(mirrors.tables, mirrors.slots, strict=True)):
            for number, row in enumerate(rows):
                mirrors.fill_table(group, number, row.tables[group][: -(-row.end // BLOCK_TOKENS)])
            used = table[: len(rows), :blocks]
            # Unsigned, what is below NO_BLOCK is larger than any block.
            if (used - NO_BLOCK).view(np.uint32).max() > self._blocks[group]:
                raise ValueError(f"a row names a block outside the {self._blocks[group]} of group {group}")
            if self._groups[group].kind == "state":
                _check_states(rows, table)
                continue
            found = table[members, places]
            if found.min() < 0:
                raise ValueError("a row has a token without a block")
            slots[:count] = found * BLOCK_TOKENS + offsets

    def _check(self, rows: Sequence[Row]) -> None:
        """Refuse broken rows, which are a bug above the waist, before anything is written."""
        tokens = sum(row.end - row.start for row in rows)
        if len(rows) > self._max_rows or tokens > self._max_tokens:
            raise ValueError(
                f"{len(rows)} rows with {tokens} tokens are more than the {self._max_rows} rows and "
                f"{self._max_tokens} tokens of one step"
            )
        states = any(group.kind == "state" for group in self._groups)
        for row in rows:
            known = len(row.tokens) if row.pending is None else max(len(row.tokens), row.start + 1)
            if not 0 <= row.start < row.end <= min(self._context, known):
                raise ValueError(f"a row cannot compute [{row.start}, {row.end}) of {known} tokens")
            if row.logits_from is not None and not row.start <= row.logits_from < row.end:
                raise ValueError(f"a row wants logits from {row.logits_from} on, outside of [{row.start}, {row.end})")
            if len(row.tables) != len(self._groups) or min(map(len, row.tables)) * BLOCK_TOKENS < row.end:
                raise ValueError("a row needs a table of all its blocks in each group")
            if row.draft or row.pending is not None:
                check_guesses(row, states=states)


def _check_states(rows: Sequence[Row], table: Ints) -> None:
    """A row begins with a state and leaves one; others of its table may be missing."""
    for line, row in zip(table, rows, strict=False):
        if line[(row.end - 1) // BLOCK_TOKENS] < 0 or (row.start and line[(row.start - 1) // BLOCK_TOKENS] < 0):
            raise ValueError("a row has no block for its state")
