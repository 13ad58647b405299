"""The choice of which recurrent states of a sequence are kept. Pure: numbers of blocks, no pool.

A state takes as much room as the KV of thousands of tokens, so few are kept. A kept state is a *snapshot*. Most stand
at a *boundary*: the end of a chunk, where stores can keep them. Wanted are

- the last boundary before a prompt's end, where its next turn begins; and if that is within `TAIL` blocks of the
  end, the boundary before it, since the next turn may leave out the tokens that open an answer;
- the end of a prompt's last full block and of each block after it; only the newest is kept, since a sequence seldom
  ends at a boundary. This one is *recent*; stores keep it like a tail (`Store`);
- the branch point: where the cached KV ends, if that is beyond the last snapshot. Two prompts with the same
  beginning leave a snapshot at its end, and the third starts there, without anyone saying where it is;
- boundaries that another sequence waits for (`want`);
- each `SPACING`th block, so that a long prompt that is interrupted, or differs late, is not computed from its start.
  A sequence keeps those whose distance behind the newest is less than `NEAR` times the largest power of two in their
  number: two near it, then ever fewer (`keeps`);
- each boundary after the prompt; only the newest is kept: about where the turn ends.
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
    """Return whether snapshot `number` (from 1) of a long prompt is kept when `newest` is the last one."""
    return newest - number < NEAR * (number & -number)


class Snapshots:
    """The snapshots that one sequence wants and has. A place is given as the number of blocks before it."""

    __slots__ = ("_end", "_marks", "_spaced", "_spacing", "_whole", "passing", "recent")

    def __init__(self, spacing: int = SPACING) -> None:
        """Keep a snapshot every `spacing` blocks, a multiple of a chunk's."""
        self._spacing = spacing
        self.clear()

    def clear(self) -> None:
        """Want nothing."""
        self._end = _NEVER
        """The last boundary before the prompt's end."""
        self._whole = _NEVER
        """Full blocks of the prompt without its last token."""
        self._marks: set[int] = set()
        """Places that are wanted for good."""
        self._spaced: list[int] = []
        """Snapshots at multiples of the spacing that this sequence has taken and keeps."""
        self.passing = 0
        """The newest boundary after the prompt, which the next one replaces; 0 if there is none."""
        self.recent = 0
        """The newest snapshot that is not at a boundary, which the next one replaces; 0 if there is none."""

    def begin(self, whole: int, reach: int) -> None:
        """Mark the snapshots that a prompt wants.

        `whole`: full blocks before its last token; `reach`: leading blocks whose KV is cached.
        """
        self._end, self._whole = whole // BOUNDARY * BOUNDARY, whole
        self._marks |= {end // BOUNDARY * BOUNDARY for end in (whole, max(0, whole - TAIL), min(reach, whole))}

    def want(self, boundary: int) -> None:
        """Keep the snapshot at this boundary: another sequence needs it."""
        self._marks.add(boundary)

    def wanted(self, boundary: int) -> bool:
        """Return whether the state after so many blocks is to be kept."""
        if boundary % BOUNDARY:
            return boundary >= self._whole or boundary in self._marks
        return boundary > self._end or boundary in self._marks or boundary % self._spacing == 0

    def places(self, first: int, stop: int) -> list[int]:
        """Return the blocks in [first, stop) that will hold a state to be kept once they are full."""
        ends = {*range(first // BOUNDARY * BOUNDARY + BOUNDARY, stop + 1, BOUNDARY)}
        ends.update(range(max(first + 1, self._whole), stop + 1))
        return sorted(end - 1 for end in ends if self.wanted(end))

    def settle(self) -> int:
        """Pin the newest post-prompt snapshot; return its boundary, 0 if there is none."""
        boundary, self.passing = self.passing, 0
        return boundary

    def took(self, boundary: int, *, own: bool = True) -> list[int]:
        """Register a snapshot; return the places that may now be dropped.

        `own`: no other sequence had left a snapshot there before.
        """
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
            gone += [place for place in self._spaced if not keeps(place // self._spacing, newest)]
            self._spaced = [place for place in self._spaced if keeps(place // self._spacing, newest)] + [boundary]
        return gone
