"""The inputs of a step: filled and checked in numpy on the host, and uploaded to the kernels' arrays in one transfer.

In host memory a mirror is its array, so a step is filled where kernels read it. For a device there are two sets of
mirrors: the next step is filled while the one before it waits or runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack_into
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Kernels
from cairn.kernels.program import Size
from cairn.models.forward.row_table import RowTable
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup
from cairn.types.request import MAX_APPLIED
from cairn.types.step import NO_BLOCK, Row, check_guesses

Ints = NDArray[np.int32]
NO_ADAPTER = -1
"""Number in the place of a row's adapter if there is none."""


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
    adapters: Any
    scales: Any
    table_rows: Any = None
    """float32 [M, width]: the rows of a `RowTable` that the step's tokens have, where the model has one."""
    before: Any = None
    """float32 [M, H]: the hidden state before each token, for an MTP head."""


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
        self.adapters: Ints = kernels.mirror(arrays.adapters)
        self.scales = kernels.mirror(arrays.scales)
        self.table_rows = None if arrays.table_rows is None else kernels.mirror(arrays.table_rows)
        self.before = None if arrays.before is None else kernels.mirror(arrays.before)
        self.lines: list[list[Sequence[int]]] = [[()] * len(one) for one in self.tables]
        """The blocks that each line of each table holds; the rest of a line is `NO_BLOCK`."""
        for table in self.tables:
            table.fill(NO_BLOCK)

    def fill_table(self, group: int, number: int, blocks: Sequence[int]) -> None:
        """Put a row's blocks into its line of a group's table; nothing of the step before is left in it."""
        line, count = self.tables[group][number], len(blocks)
        line[:count] = blocks
        line[count : max(count, len(self.lines[group][number]))] = NO_BLOCK
        self.lines[group][number] = blocks


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
    """Pairs of row numbers: a row whose token is pending, and the row of the step before that samples it."""
    hidden: list[int]
    """Numbers of the rows that want hidden states."""
    adapted: bool
    """Whether a row has adapters."""
    strange: list[int]
    """Numbers of the rows with an adapter that is not attached."""

    @property
    def sizes(self) -> dict[Size, int]:
        """The step's sizes, without that of logits."""
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
        """Prepare the mirrors. `blocks`: size of each group's pool. `sets`: one more than the steps that may wait."""
        self._kernels, self._arrays = kernels, arrays
        self._groups, self._blocks, self._context, self._vocab = tuple(groups), tuple(blocks), context, vocab
        self._sets = [Mirrors(kernels, arrays) for _ in range(sets)]
        self._here = self._sets[0].tokens is arrays.tokens
        self._max_rows, self._max_tokens = len(self._sets[0].rows), len(self._sets[0].tokens)
        self._table = table
        self.attached: dict[bytes, int] = {}
        """Number of each attached adapter, by its digest."""
        self._numbers: Ints = np.arange(max(self._max_rows, self._max_tokens), dtype=np.int32)

    def fill(self, rows: Sequence[Row]) -> FilledStep:
        """Fill the next set of mirrors. Raises `ValueError` for rows that break the contract of `Row`."""
        self._check(rows)
        mirrors = self._sets[0]
        self._sets.append(self._sets.pop(0))
        tokens, spans, firsts = list[int](), list[int](), list[int]()
        wanted, pending, hidden = list[int](), list[tuple[int, int]](), list[int]()
        at = longest = 0
        for number, row in enumerate(rows):
            start, end, asked = row.start, row.end, row.logits_from
            firsts.append(at)
            spans += (at, end - start, start)
            if row.pending is None:
                tokens += row.tokens[start:end]
            else:
                tokens.append(0)
                pending.append((number, row.pending))
            if asked is not None:
                if row.want == "hidden":
                    hidden.append(number)
                else:
                    wanted += range(at + asked - start, at + end - start)
            at += end - start
            if end > longest:
                longest = end
        if not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise ValueError(f"a row has a token outside the vocabulary of {self._vocab}")
        _put(mirrors.tokens, tokens)
        _put(mirrors.rows, spans)
        self._fill_tables(mirrors, rows)
        if at == len(rows):
            self._fill_single(mirrors, spans[2::3])
        else:
            self._fill_runs(mirrors, len(rows), at)
        if mirrors.before is not None:
            _fill_before(mirrors.before, rows)
        blocks = (longest + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        adapted = any(row.adapters for row in rows)
        strange = self._fill_adapters(mirrors, rows) if adapted else []
        return FilledStep(mirrors, rows, firsts, at, blocks, wanted, pending, hidden, adapted, strange)

    def upload(self, step: FilledStep, known: Sequence[int | None]) -> list[int]:
        """Upload a filled step, with the first of its wanted places.

        `known`: the tokens that the rows of the step before sampled. Returns the numbers of pending rows whose token
        is not among them; they are computed with another one.
        """
        mirrors, missing, count = step.mirrors, list[int](), step.tokens
        for number, source in step.pending:
            token = known[source] if source < len(known) else None
            if token is None:
                missing.append(number)
            mirrors.tokens[step.firsts[number]] = 0 if token is None else token
        if self._table is not None and mirrors.table_rows is not None:
            self._table.read(mirrors.tokens[:count], mirrors.table_rows[:count])
        wanted = self._fill_wanted(step, 0)
        if not self._here:
            arrays, rows = self._arrays, len(step.rows)
            pairs = [
                (arrays.tokens, mirrors.tokens[:count]),
                (arrays.positions, mirrors.positions[:count]),
                (arrays.members, mirrors.members[:count]),
                (arrays.rows, mirrors.rows[:rows]),
                *((array, one[:count]) for array, one in zip(arrays.slots, mirrors.slots, strict=True)),
                *((array, one[:rows, : step.blocks]) for array, one in zip(arrays.tables, mirrors.tables, strict=True)),
                (arrays.wanted, mirrors.wanted[:wanted]),
            ]
            if step.adapted:
                pairs += [(arrays.adapters, mirrors.adapters[:rows]), (arrays.scales, mirrors.scales[:rows])]
            if mirrors.table_rows is not None:
                pairs.append((arrays.table_rows, mirrors.table_rows[:count]))
            if mirrors.before is not None:
                pairs.append((arrays.before, mirrors.before[:count]))
            self._kernels.upload(pairs)
        return missing

    def want(self, step: FilledStep, first: int) -> None:
        """Upload the wanted places from number `first` on, as many as the head takes at once."""
        count = self._fill_wanted(step, first)
        if not self._here:
            self._kernels.upload([(self._arrays.wanted, step.mirrors.wanted[:count])])

    def _fill_wanted(self, step: FilledStep, first: int) -> int:
        """Fill the wanted places from number `first` on, as many as the head takes at once, and return how many."""
        mirror = step.mirrors.wanted
        places = step.wanted[first : first + len(mirror)]
        _put(mirror, places)
        return len(places)

    def _fill_tables(self, mirrors: Mirrors, rows: Sequence[Row]) -> None:
        """Fill each group's table, except lines that hold their row's blocks already: most steps change none.

        Kernels trust the tables, and a block outside its pool would be other memory, so every block id is checked.
        """
        for group, (lines, pool) in enumerate(zip(mirrors.lines, self._blocks, strict=True)):
            for number, row in enumerate(rows):
                count = (row.end + BLOCK_TOKENS - 1) // BLOCK_TOKENS
                blocks = row.tables[group][:count]
                if len(blocks) < count:
                    raise ValueError("a row needs a table of all its blocks in each group")
                if blocks == lines[number]:
                    continue
                if min(blocks) < NO_BLOCK or max(blocks) >= pool:
                    raise ValueError(f"a row names a block outside the {pool} of group {group}")
                mirrors.fill_table(group, number, blocks)
            if self._groups[group].kind == "state":
                _check_states(rows, lines)

    def _fill_single(self, mirrors: Mirrors, starts: Sequence[int]) -> None:
        """Fill positions, members and slots of a step of one token a row. Few numbers: numpy would take longer."""
        count = len(starts)
        _put(mirrors.positions, starts)
        mirrors.members[:count] = self._numbers[:count]
        for group, lines in enumerate(mirrors.lines):
            if self._groups[group].kind == "state":
                continue
            slots = [
                blocks[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
                for start, blocks in zip(starts, lines, strict=False)
            ]
            if min(slots) < 0:
                raise ValueError("a row has a token without a block")
            _put(mirrors.slots[group], slots)

    def _fill_runs(self, mirrors: Mirrors, rows: int, count: int) -> None:
        """Fill positions, members and slots of a step of `count` tokens in so many rows, whose spans are filled."""
        spans, members, positions = mirrors.rows[:rows], mirrors.members[:count], mirrors.positions[:count]
        counts = spans[:, 1]
        members[:] = np.repeat(self._numbers[:rows], counts)
        np.add(self._numbers[:count], np.repeat(spans[:, 2] - spans[:, 0], counts), out=positions)
        places = positions // BLOCK_TOKENS
        offsets = positions - places * BLOCK_TOKENS
        for group, (table, slots) in enumerate(zip(mirrors.tables, mirrors.slots, strict=True)):
            if self._groups[group].kind == "state":
                continue
            found = table[members, places]
            if found.min() < 0:
                raise ValueError("a row has a token without a block")
            slots[:count] = found * BLOCK_TOKENS + offsets

    def _fill_adapters(self, mirrors: Mirrors, rows: Sequence[Row]) -> list[int]:
        """Fill the rows' adapters; return the numbers of the rows with one that is not attached."""
        strange = list[int]()
        mirrors.adapters[: len(rows)] = NO_ADAPTER
        for number, row in enumerate(rows):
            for place, (digest, scale) in enumerate(row.adapters):
                slot = self.attached.get(digest, NO_ADAPTER)
                if slot == NO_ADAPTER:
                    strange.append(number)
                mirrors.adapters[number, place] = slot
                mirrors.scales[number, place] = scale
        return strange

    def _check(self, rows: Sequence[Row]) -> None:
        """Refuse broken rows, which are a bug above the waist, before anything is written."""
        tokens, groups = 0, len(self._groups)
        for row in rows:
            start, end, asked = row.start, row.end, row.logits_from
            tokens += end - start
            known = len(row.tokens) if row.pending is None else max(len(row.tokens), start + 1)
            if not 0 <= start < end <= known or end > self._context:
                raise ValueError(f"a row cannot compute [{start}, {end}) of {min(known, self._context)} tokens")
            if asked is not None and not start <= asked < end:
                raise ValueError(f"a row wants logits from {asked} on, outside of [{start}, {end})")
            if len(row.tables) != groups:
                raise ValueError("a row needs a table of all its blocks in each group")
            if len(row.adapters) > MAX_APPLIED:
                raise ValueError(f"a row has {len(row.adapters)} adapters; the limit is {MAX_APPLIED}")
            if row.draft or row.pending is not None:
                check_guesses(row)
            if row.states_from is not None and not start <= row.states_from < end:
                raise ValueError(f"a row wants states from {row.states_from} on, outside of [{start}, {end})")
        if len(rows) > self._max_rows or tokens > self._max_tokens:
            raise ValueError(
                f"{len(rows)} rows with {tokens} tokens are more than the {self._max_rows} rows and "
                f"{self._max_tokens} tokens of one step"
            )


def _put(mirror: Ints, numbers: Sequence[int]) -> None:
    """Write numbers to the beginning of a mirror: numpy would take twice as long."""
    pack_into(f"{len(numbers)}i", mirror.data, 0, *numbers)


def _fill_before(mirror: NDArray[np.float32], rows: Sequence[Row]) -> None:
    """Fill the states before the rows' tokens; raise `ValueError` where a row has fewer or more than tokens."""
    at, width = 0, mirror.shape[1]
    for row in rows:
        states = np.frombuffer(row.before, np.float32)
        count = row.end - row.start
        if len(states) != count * width:
            raise ValueError(
                f"a row of {count} tokens has {len(states)} numbers of states before them, not {width} each"
            )
        mirror[at : at + count] = states.reshape(count, width)
        at += count


def _check_states(rows: Sequence[Row], lines: Sequence[Sequence[int]]) -> None:
    """Raise `ValueError` unless each row begins with a state and leaves one; others of its table may be missing."""
    for row, blocks in zip(rows, lines, strict=False):
        if blocks[(row.end - 1) // BLOCK_TOKENS] < 0 or (row.start and blocks[(row.start - 1) // BLOCK_TOKENS] < 0):
            raise ValueError("a row has no block for its state")
