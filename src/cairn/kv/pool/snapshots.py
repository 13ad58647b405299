"""Which of the recurrent states that a context passes through are kept. Pure: numbers of blocks, no pool.

A state takes as much room as the KV of thousands of tokens, so few are kept. One that is, is a *snapshot*. Each stands
at a *boundary*: the end of a chunk, which is where stores can keep it. Wanted are

- the last boundary before a prompt's end, where its next turn begins; and where that is within `TAIL` blocks of the
  end, the one before it, since the next turn may leave out what opens an answer;
- the end of the last block of a prompt that is full, and of each after it, of which only the newest is kept: where a
  context ends is seldom a boundary. This one is *recent*; stores keep it as a tail does (`Store`);
- the branch point: where the KV that is cached ends, if that is beyond the last snapshot. Two prompts with the same
  beginning leave a snapshot at its end, and the third begins there, without anyone saying where it is;
- what another context that waits for the same beginning asks for (`want`);
- each `SPACING`th block, so that a long prompt that is interrupted, or differs late, is not computed from its start.
  Of these a context keeps those whose distance behind it is less than `NEAR` times the largest power of two in their
  number: two near it, then ever fewer (`keeps`);
- each boundary after the prompt, of which only the newest is kept: where the turn ends, more or less.
"""

from __future__ import annotations

from cairn.types.model_spec import CHUNK_BLOCKS

BOUNDARY = CHUNK_BLOCKS
"""Blocks from one boundary to the next."""
SPACING = 256
"""Blocks from one snapshot of a long prompt to the next: 4,096 tokens."""
NEAR = 2
TAIL = 1
_NEVER = 1 << 62


def keeps(number: int, newest: int) -> bool:
    """Whether snapshot `number` of a long prompt, from 1 on, is kept when the newest is this one."""
    return newest - number < NEAR * (number & -number)


class Snapshots:
    """What one context wants and has taken. A place is known by the number of blocks before it."""

    __slots__ = ("_end", "_marks", "_spaced", "_spacing", "_whole", "passing", "recent")

    def __init__(self, spacing: int = SPACING) -> None:
        """`spacing`: blocks, whole chunks."""
        self._spacing = spacing
        self.clear()

    def clear(self) -> None:
        """Want nothing."""
        self._end = _NEVER
        """The last boundary before the prompt's end."""
        self._whole = _NEVER
        """Full blocks of the prompt, but for its last token."""
        self._marks: set[int] = set()
        """Wanted for good."""
        self._spaced: list[int] = []
        """Snapshots of a long prompt that this context has taken, and keeps."""
        self.passing = 0
        """The newest boundary after the prompt, which the next takes the place of; 0: there is none."""
        self.recent = 0
        """The newest that is no boundary, likewise."""

    def begin(self, whole: int, reach: int) -> None:
        """A prompt of which `whole` blocks lie before its last token, and the KV of the first `reach` is cached."""
        self._end, self._whole = whole // BOUNDARY * BOUNDARY, whole
        self._marks |= {end // BOUNDARY * BOUNDARY for end in (whole, max(0, whole - TAIL), min(reach, whole))}

    def want(self, boundary: int) -> None:
        """Somebody else needs this one."""
        self._marks.add(boundary)

    def wanted(self, boundary: int) -> bool:
        """Whether the state after so many blocks is to be kept."""
        if boundary % BOUNDARY:
            return boundary >= self._whole or boundary in self._marks
        return boundary > self._end or boundary in self._marks or boundary % self._spacing == 0

    def places(self, first: int, stop: int) -> list[int]:
        """Which of the blocks from `first` on up to `stop` hold, once they are full, a state that is to be kept."""
        ends = {*range(first // BOUNDARY * BOUNDARY + BOUNDARY, stop + 1, BOUNDARY)}
        ends.update(range(max(first + 1, self._whole), stop + 1))
        return sorted(end - 1 for end in ends if self.wanted(end))

    def settle(self) -> int:
        """Nothing takes the place of the newest after the prompt any more: its boundary, 0 where there is none."""
        boundary, self.passing = self.passing, 0
        return boundary

    def took(self, boundary: int, *, own: bool = True) -> list[int]:
        """A wanted snapshot is there; which are kept no longer. `own`: nobody else had left it there before."""
        gone, self.recent = [self.recent] if self.recent else [], 0
        if boundary % BOUNDARY:
            self.recent = boundary if own else 0
            return gone
        spaced = boundary % self._spacing == 0
        if boundary > self._end:
            gone += [self.passing] if self.passing else []
            self.passing = 0 if spaced or not own else boundary
        if spaced and own and boundary not in self._marks:
            newest = boundary // self._spacing
            gone += [one for one in self._spaced if not keeps(one // self._spacing, newest)]
            self._spaced = [one for one in self._spaced if keeps(one // self._spacing, newest)] + [boundary]
        return gone
