"""The way of chunks into a disk store: written to a temporary file, synced, renamed, the folder synced, indexed.

In this order, a name that an index reads after a crash at any point belongs to a whole file, and what was reported as
kept is there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.kv.disk import chunk_file
from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.chunk_file import Name
from cairn.kv.disk.codec import Codec
from cairn.kv.disk.folder import blocks
from cairn.kv.disk.index import IndexEntry
from cairn.kv.tiers.store import Chunk, spared


@dataclass(slots=True)
class _Written:
    """A chunk whose file was written and is not indexed yet."""

    name: Name
    temporary: Path
    reserved: int
    disk: int
    once: bool
    renamed: bool = False


@dataclass(slots=True)
class _Plan:
    """The work of one call of `keep`, up to the first chunk that cannot be kept."""

    held: list[IndexEntry]
    """Chunks that others extend or rely on meanwhile."""
    work: list[Chunk]
    """Chunks to write."""
    done: set[int]
    """`id` of the chunks that are there."""


class DiskWriter:
    """Writes chunks of one model. Any thread."""

    def __init__(self, state: DiskState, *, identity: bytes, model: str, codec: Codec, once: float = 0.0) -> None:
        """Write for one engine. `once`: seconds by which the last use of a chunk that is `once` is backdated."""
        self._state, self._identity, self._model, self._codec = state, identity, model, codec
        self._once = once
        self._tag = chunk_file.model_tag(identity, codec.name)
        self._landed = threading.Condition(state.mutex)

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """Store chunks; return how many leading ones are durable.

        A chunk whose parent is neither stored nor before it ends the run.
        """
        state = self._state
        plan = self._plan(chunks)
        written: list[_Written] = []
        kept = 0
        try:
            for chunk in plan.work:
                one = self._write(chunk)
                if one is None:
                    break
                written.append(one)
            kept = self._publish(written)
        finally:
            with self._landed:
                for entry in plan.held:
                    state.index.release(entry)
                ids = {self._tag + chunk.key for chunk in plan.work}
                state.writing -= ids
                state.dropped -= ids
                self._landed.notify_all()
        done = plan.done.union(id(chunk) for chunk in plan.work[:kept])
        count = next((at for at, chunk in enumerate(chunks) if id(chunk) not in done), len(chunks))
        left = chunks[count:]
        with state.mutex:
            state.count(refused=len(left) - len(spared(left)))
        return count

    def wait(self, ids: Collection[bytes]) -> None:
        """Wait until none of these is being written."""
        with self._landed:
            self._landed.wait_for(lambda: self._state.writing.isdisjoint(ids))

    def _plan(self, chunks: Sequence[Chunk]) -> _Plan:
        state, plan = self._state, _Plan([], [], set())
        depths: dict[bytes, int] = {b"": -1}
        with state.mutex:
            for chunk in chunks:
                key, parent = self._tag + chunk.key, self._tag + chunk.parent if chunk.parent else b""
                entry, above = state.index.get(key), state.index.get(parent)
                if entry is not None or key in depths or state.index.replaces(key):
                    plan.done.add(id(chunk))
                elif above is not None or parent in depths:
                    depth = above.name.depth if above is not None else depths[parent]
                    taken = state.index.known(key) or key in state.writing
                    if state.failing or taken or chunk.depth <= depth:
                        break
                    plan.work.append(chunk)
                    depths[key] = chunk.depth
                    state.writing.add(key)
                else:
                    break
                for one in (entry, above):
                    if one is not None:
                        state.index.hold(one)
                        plan.held.append(one)
                if entry is not None:
                    state.use(entry)
        return plan

    def _write(self, chunk: Chunk) -> _Written | None:
        """Write a durable file under a temporary name and reserve its bytes until `_publish`.

        Return None if that fails.
        """
        state = self._state
        try:
            name, parts = chunk_file.encode(chunk, model=self._model, identity=self._identity, codec=self._codec)
        except ValueError:
            return None
        path, need = state.folder.path(name), blocks(name.size)
        if state.folder.is_litter(path) or not state.make_room(need, reserve=True):
            return None
        try:
            temporary, disk = state.write(need, lambda: state.folder.write(path.parent, parts))
        except OSError as error:
            with state.mutex:
                state.reserved -= need
            state.fail("write", error)
            return None
        return _Written(name, temporary, need, disk, chunk.once)

    def _publish(self, written: Sequence[_Written]) -> int:
        """Rename the files durably and index them; return how many. The rest is removed."""
        state, kept = self._state, 0
        replaced: list[IndexEntry] = []
        if self._rename(written):
            for one in written:
                if not self._index(one, replaced):
                    break
                kept += 1
        state.clear(replaced)
        for one in written[kept:]:
            state.folder.discard(state.folder.path(one.name) if one.renamed else one.temporary, one.name.size)
            with state.mutex:
                state.reserved -= one.reserved
        if kept:
            state.wrote()
        return kept

    def _rename(self, written: Sequence[_Written]) -> bool:
        """Rename all files and sync their folders; return False if one fails, and then rely on none."""
        folder = self._state.folder
        try:
            for one in written:
                folder.files.replace(one.temporary, folder.path(one.name))
                one.renamed = True
        except OSError as error:
            self._state.fail("write", error)
            return False
        return self._state.sync(folder.path(one.name).parent for one in written)

    def _index(self, one: _Written, replaced: list[IndexEntry]) -> bool:
        """Index a chunk unless it or its parent was dropped meanwhile; return whether it was.

        The tails that it begins with are marked as deleted and appended to `replaced`; the caller removes their files.
        """
        state, name = self._state, one.name
        key, parent = name.tag + name.key, name.tag + name.parent if name.parent else b""
        with state.mutex:
            if key in state.dropped or (parent and state.index.get(parent) is None):
                return False
            state.reserved -= one.reserved
            entry = state.entry(name, one.disk, state.now() - (self._once if one.once else 0.0))
            state.index.add(entry)
            if one.once:
                state.used[entry.id] = entry  # so that the file's own time is backdated too
            state.count(written=name.size)
            tails = [one.id for one in state.index.replaced(entry)]
            for tail in state.index.family(tails):
                state.mark_deleted(tail)
                replaced.append(tail)
        return True
