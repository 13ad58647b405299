"""Where a step's tokens are: which blocks each row reads, what each token sees, and which states rows begin with.

Rows and tables are known on the host before a step is built, so that it reads no more of a pool than it needs. A step
of one token in each row is one run of all rows; otherwise each row is a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.recurrent import kept
from cairn.types.model_spec import BLOCK_TOKENS

Array = Any
Ints = NDArray[np.int32]

_SCORES = 1 << 22
"""Most scores of a head that are computed at once."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the tokens of a run see."""

    first: int
    """The run's first token in the step."""
    rows: int
    """Rows of the run, one behind the other, with equally many tokens."""
    blocks: Array
    """int32 [rows, n]: the blocks that hold what they see; 0 where a block is missing."""
    seen: tuple[tuple[int, int, Array], ...]
    """Slices of the tokens of a row: first, end, and bool [rows, 1, tokens, 16 n]."""
    known: Array
    """bool [rows, 16 n]: positions that any of the tokens sees. What other positions hold may be anything."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Rows with equally many tokens, and the states that they begin with and leave."""

    first: int
    rows: int
    tokens: int
    """Of each row."""
    before: Array
    """int32 [rows]: the block of the state that a row begins with."""
    fresh: Array
    """bool [rows]: whether a row begins without a state."""
    ends: tuple[tuple[int, Array], ...]
    """(tokens of a row, blocks [rows]): after how many tokens states are kept, and where."""


class Places:
    """A step's rows [B, 3] and the table [B, W] of one group."""

    def __init__(self, rows: Ints, tables: Ints, bucket: int = 1) -> None:
        """`bucket`: round the number of blocks that a step of single tokens reads up to a multiple."""
        self._rows, self._tables, self._bucket = rows, tables, bucket
        self.single = bool((rows[:, 1] == 1).all() and (rows[:, 0] == np.arange(len(rows))).all())
        self._sights: dict[tuple[int, bool], list[Sight]] = {}
        self._states: list[StateRun] | None = None

    def sights(self, window: int, both: bool) -> list[Sight]:
        """Return what each run of tokens sees; see `Kernels.attention`."""
        key = window, both
        if key not in self._sights:
            found = [self._of_single(window, both)] if self.single else list(self._of_rows(window, both))
            self._sights[key] = found
        return self._sights[key]

    def states(self) -> list[StateRun]:
        """Return the runs of a state group."""
        if self._states is None:
            self._states = [self._single_states()] if self.single else list(self._row_states())
        return self._states

    @property
    def arrays(self) -> list[Array]:
        """The arrays of what was asked of a step of single tokens so far."""
        found = [array for (one,) in self._sights.values() for array in (one.blocks, one.known)]
        for run in self._states or ():
            found += [run.before, run.fresh, *(blocks for _, blocks in run.ends)]
        return found

    def with_arrays(self, given: Iterator[Array]) -> Places:
        """Return the same places with other arrays, those that a compiled graph gets."""
        other = Places(self._rows, self._tables, self._bucket)
        for key, (one,) in self._sights.items():
            blocks, known = next(given), next(given)
            other._sights[key] = [replace(one, blocks=blocks, known=known, seen=((0, 1, known[:, None, None]),))]
        if self._states is not None:
            other._states = [
                replace(
                    run, before=next(given), fresh=next(given), ends=tuple((end, next(given)) for end, _ in run.ends)
                )
                for run in self._states
            ]
        return other

    def _of_rows(self, window: int, both: bool) -> Iterator[Sight]:
        for (first, count, start), table in zip(self._rows.tolist(), self._tables, strict=False):
            end = start + count
            low = _lowest(start, window, both) // BLOCK_TOKENS
            ids = table[low : -(-end // BLOCK_TOKENS)]
            other = np.arange(low * BLOCK_TOKENS, low * BLOCK_TOKENS + len(ids) * BLOCK_TOKENS)[None]
            held = np.repeat(ids >= 0, BLOCK_TOKENS)[None] & (other < end)
            step, parts, known = max(1, _SCORES // other.size), [], np.zeros(other.size, bool)
            for at in range(0, count, step):
                own = np.arange(start + at, start + min(count, at + step))[:, None]
                seen = sees(own, other, window, both) & held
                known |= seen.any(axis=0)
                parts.append((at, at + len(own), mx.array(seen[None, None])))
            yield Sight(first, 1, mx.array(np.maximum(ids, 0)[None]), tuple(parts), mx.array(known[None]))

    def _of_single(self, window: int, both: bool) -> Sight:
        own = self._rows[:, 2]
        lows = np.array([_lowest(start, window, both) // BLOCK_TOKENS for start in own.tolist()])
        width = int((own // BLOCK_TOKENS - lows).max()) + 1
        width = -(-width // self._bucket) * self._bucket
        places = lows[:, None] + np.arange(width)
        inside = places < self._tables.shape[1]
        ids = np.where(inside, np.take_along_axis(self._tables, np.where(inside, places, 0), axis=1), -1)
        other = (places[:, :, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(len(own), -1)
        seen = sees(own[:, None], other, window, both) & np.repeat(ids >= 0, BLOCK_TOKENS, axis=1)
        seen &= other <= own[:, None]
        marked = mx.array(seen)
        blocks = mx.array(np.maximum(ids, 0).astype(np.int32))
        return Sight(0, len(own), blocks, ((0, 1, marked[:, None, None]),), marked)

    def _row_states(self) -> Iterator[StateRun]:
        for (first, count, start), table in zip(self._rows.tolist(), self._tables, strict=False):
            before = int(table[(start - 1) // BLOCK_TOKENS]) if start else 0
            ends = tuple((end - start, mx.array([block])) for end, block in kept(table, start, count))
            yield StateRun(first, 1, count, mx.array([before]), mx.array([start == 0]), ends)

    def _single_states(self) -> StateRun:
        starts, lines = self._rows[:, 2], np.arange(len(self._rows))
        before = np.where(starts > 0, self._tables[lines, np.maximum(starts - 1, 0) // BLOCK_TOKENS], 0)
        after = self._tables[lines, starts // BLOCK_TOKENS]
        return StateRun(0, len(lines), 1, mx.array(before), mx.array(starts == 0), ((1, mx.array(after)),))


def sees(own: Any, other: Any, window: int, both: bool) -> NDArray[np.bool_]:
    """Return whether positions `own` see positions `other`, broadcast."""
    if both:
        return np.asarray(abs(other - own) < window) if window > 0 else np.ones_like(own + other, bool)
    seen = other <= own
    if window > 0:
        seen &= other > own - window
    elif window < 0:
        seen &= other >= own - own % -window
    return np.asarray(seen)


def _lowest(start: int, window: int, both: bool) -> int:
    """Return the lowest position that a row's first token sees."""
    if not window:
        return 0
    if window < 0:
        return start - start % -window
    return max(0, start - window + 1)
