"""The other engines whose chunks are in the same folder: whose they are, and what is still to be dropped of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cairn.kv import chunk_file
from cairn.kv.chunk_file import Damaged
from cairn.kv.disk_state import DiskState

Keys = Callable[[bytes], Sequence[bytes]]
"""The keys of what is to be dropped, from an engine's identity."""


class Others:
    """What a store knows of the chunks that are not its own engine's."""

    def __init__(self, state: DiskState, tag: bytes, identity: bytes) -> None:
        """`tag` and `identity`: of the store's own engine."""
        self._state, self._tag, self._identity = state, tag, identity
        self._identities: dict[bytes, bytes] = {}
        """By tag, as far as they were needed."""
        self._owed: dict[frozenset[bytes], Keys] = {}
        """Orders that the disk did not let be carried out, by what they say of this engine."""

    def learn(self) -> bool:
        """Read from chunks whose they are; False where one stays that nothing is known of.

        A disk that fails is asked once, not for each chunk; the next time another chunk is asked first.
        """
        state = self._state
        with state.mutex:
            entries = state.shelf.others({self._tag, *self._identities})
        for entry in sorted(entries, key=lambda one: one.faults):
            if not entry.live or state.failing or entry.name.tag in self._identities:
                continue
            try:
                if (data := state.read(entry)) is not None:
                    self._identities[entry.name.tag] = chunk_file.verify(data, entry.name)[0].identity
            except Damaged:
                state.condemn(entry)
        with state.mutex:
            return all(one.name.tag in self._identities or not state.shelf.known(one.id) for one in entries)

    def ids(self, keys: Keys) -> set[bytes]:
        """Tag and key of each chunk that `keys` says of the engines that are known."""
        return {tag + key for tag, identity in self._identities.items() for key in keys(identity)}

    def note(self, keys: Keys, *, done: bool) -> None:
        """Keep an order until it is done."""
        if done and not self._owed:
            return
        mine = frozenset(keys(self._identity))
        with self._state.mutex:
            if done:
                self._owed.pop(mine, None)
            elif mine:
                self._owed[mine] = keys

    def owe(self, keys: Sequence[bytes]) -> bool:
        """Whether an order that says any of these keys of this engine is still to be carried out."""
        with self._state.mutex:
            return any(not mine.isdisjoint(keys) for mine in self._owed)

    def owed(self) -> list[Keys]:
        """The orders that are still to be carried out."""
        with self._state.mutex:
            return list(self._owed.values())
