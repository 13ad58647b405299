"""Journals that several servers share. A journal's chain in the shared store is authoritative; each server has a copy.

    made       the head and all entries
    began      a server works on it: a round of a team, a run of a workflow; until the end no other may write
    changed    entries that were added or removed, several in one record where they come at once
    ended      the work is over
    taken      the work of a server that is silent was interrupted by another one
    gone       deleted

The journals of a tenant are listed by one small object each, which has the id and the time of the journal's making.

An entry is in the chain before anybody learns of it. A server that lost the journal meanwhile cannot add one. After a
failed write nobody knows whether it is in the chain; the next `news` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from cairn.agents.log.records import JournalRecord
from cairn.cluster.chain import MOST_CHAINS, AgentChain, ChainRecord, Kind, Moved, Running, forget_oldest, unavailable
from cairn.cluster.guard import put, readable
from cairn.cluster.shared import SharedStore
from cairn.system.concurrency import CountedLock
from cairn.types.errors import Conflict, Damaged, Unavailable, trace

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Pause between attempts to write the end of work that nobody waits for."""
END_SECONDS = 2.0
"""How long the end of work is waited for. It is written later if the store does not take it by then."""
AT_ONCE = 8
"""Objects that are read at once."""
MOST_LISTED = 100_000
"""Listed journals that are kept in memory."""
AT_WORK = 1
"""What a chain says to be running while a server works on the journal."""


class SharedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a journal."""

    number: int
    body: bytes


class JournalMade(msgspec.Struct, frozen=True, tag="made"):
    """A whole journal."""

    head: JournalRecord
    entries: tuple[SharedEntry, ...] = ()


class EntriesAdded(msgspec.Struct, frozen=True, tag="added"):
    """Entries that were added."""

    entries: tuple[SharedEntry, ...]


class EntriesRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Numbers of entries that were removed."""

    numbers: tuple[int, ...]


JournalChange = JournalMade | EntriesAdded | EntriesRemoved | None
"""What a record changes; None: the journal is deleted."""


class ListedJournal(msgspec.Struct, frozen=True, array_like=True):
    """A journal in its tenant's list."""

    id: str
    created: float


class JournalName(NamedTuple):
    """What names a journal."""

    room: str
    tenant: str
    id: str


class JournalNews(NamedTuple):
    """What others wrote to a journal."""

    whole: bool
    """Whether `changes` are all of the chain, so that the copy is to be made anew."""
    changes: Sequence[JournalChange]


Whole = Callable[[], JournalMade]
"""Returns the server's own copy, for a journal that was made before the store was shared."""


class _FollowedJournal:
    """A journal's chain that this server follows."""

    __slots__ = ("chain", "flushing", "known", "lock", "waiting")

    def __init__(self, chain: AgentChain) -> None:
        self.chain, self.lock = chain, CountedLock()
        self.known = False
        """Whether the server's own copy agrees with the chain up to `chain.tail`."""
        self.waiting: list[tuple[SharedEntry, asyncio.Future[None] | None]] = []
        """Entries to write, and who waits for them; nobody for a note, which goes with the next entry."""
        self.flushing: asyncio.Task[None] | None = None

    @property
    def needed(self) -> bool:
        """Whether it must not be forgotten: something is being read or written, or this server works on the journal."""
        at_work = self.chain.mine and self.chain.tail.running
        return bool(self.lock.users or self.waiting or at_work)

    def refuse_waiting(self) -> None:
        """Refuse the entries that wait: they have numbers from before the news. Notes are in the next whole copy."""
        waiting, self.waiting = self.waiting, []
        for _, written in waiting:
            if written is not None and not written.done():
                written.set_exception(self.chain.moved())


class SharedJournals:
    """The chains of a server's journals. Runs on the event loop."""

    def __init__(self, store: SharedStore, holder: str, alive: Callable[[str], bool]) -> None:
        """Write as `holder`; `alive` returns whether another holder may still be at work. No chain is read yet."""
        self._store, self._holder, self._alive = store, holder, alive
        self._followed: OrderedDict[JournalName, _FollowedJournal] = OrderedDict()
        self._listed: OrderedDict[str, ListedJournal] = OrderedDict()
        """Listed journals by the names of their objects."""
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait briefly for pending ends of work to be written, then stop."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=2 * RETRY_SECONDS)
        tasks = {*self._ending, *(one.flushing for one in self._followed.values() if one.flushing is not None)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _chain(self, name: JournalName) -> AgentChain:
        blobs, keys = self._store.blobs.soon, self._store.keys
        return AgentChain(blobs, keys, name.tenant, name.id, self._holder, room=name.room)

    def _follow(self, name: JournalName) -> _FollowedJournal:
        found = self._followed.get(name)
        if found is None:
            found = self._followed[name] = _FollowedJournal(self._chain(name))
        self._followed.move_to_end(name)
        forget_oldest(self._followed, name, MOST_CHAINS, lambda one: self._followed[one].needed)
        return found

    # ------------------------------------------------------------------------------------------------------- reading

    def at_work_elsewhere(self, name: JournalName) -> bool:
        """Return whether another server works on a journal, as far as this one has read and heard."""
        followed = self._followed.get(name)
        if followed is None:
            return False
        tail = followed.chain.tail
        return bool(tail.running) and not followed.chain.mine and self._alive(tail.holder)

    def check_free(self, name: JournalName) -> None:
        """Raise Running if `at_work_elsewhere`."""
        if (followed := self._followed.get(name)) is not None:
            followed.chain.check_free(self._alive)

    async def news(self, name: JournalName, *, here: bool) -> JournalNews:
        """Return what the chain has beyond the server's own copy, which has it from then on. `here`: there is a copy.

        Raise Unavailable if the store does not answer, Damaged if the chain cannot be used.
        """
        followed = self._follow(name)
        try:
            async with followed.lock:
                return await self._news(followed, name, here=here)
        finally:
            # Whoever asks for journals that do not exist takes no room from those that do.
            unknown = followed.chain.tail.kind == "gone" and not here
            if unknown and not followed.needed and self._followed.get(name) is followed:
                del self._followed[name]

    async def _news(self, followed: _FollowedJournal, name: JournalName, *, here: bool) -> JournalNews:
        if followed.known and not here and followed.chain.tail.kind != "gone":
            followed.known = False  # it was removed here alone
        if followed.known:
            records = await followed.chain.news()
            if records:
                followed.refuse_waiting()
                followed.known = False  # until they are decoded: nothing may follow what the copy lacks
            if not any(record.kind in ("made", "gone") for record in records):
                changes = _changes(name, records)
                followed.known = True
                return JournalNews(False, changes)
        followed.known, chain = False, self._chain(name)
        records = await chain.news()
        followed.chain = chain  # not before: the end of work needs to know where the work began
        if len(records) > 1 and chain.tail.kind == "gone":
            await self._forget(chain, name)  # whoever deleted the journal did not get that far
        changes = _changes(name, records)
        followed.known = True
        if records:
            followed.refuse_waiting()
        else:  # the whole copy, which goes there first, has the notes
            followed.waiting = [one for one in followed.waiting if one[1] is not None]
        return JournalNews(True, changes)

    def doubt(self, name: JournalName) -> None:
        """Note that the server's own copy may lack what the chain has: all of it is read again."""
        self._follow(name).known = False

    async def listed(self, room: str, tenant: str) -> dict[str, float]:
        """Return when each of a tenant's journals was made, by id. Raise Unavailable if the store does not answer."""
        blobs, keys = self._store.blobs.soon, self._store.keys
        try:
            names = await blobs.list(self._list_folder(room, tenant))
            new = [name for name in names if name not in self._listed]
            for at in range(0, len(new), AT_ONCE):
                some = new[at : at + AT_ONCE]
                for name, read in zip(some, await blobs.read_several(some), strict=True):
                    data = readable(read)
                    content = None if data is None else keys.open(name, data)
                    with contextlib.suppress(msgspec.DecodeError):  # also one that was changed, or cannot be read
                        self._listed[name] = msgspec.msgpack.decode(content or b"", type=ListedJournal)
        except OSError as error:
            raise unavailable(error) from error
        while len(self._listed) > MOST_LISTED:
            self._listed.popitem(last=False)
        return {one.id: one.created for name in names if (one := self._listed.get(name)) is not None}

    def _list_folder(self, room: str, tenant: str) -> str:
        return f"{room}-ids/{self._store.keys.name(b'ids', room.encode(), tenant.encode())}"

    def _list_name(self, name: JournalName) -> str:
        return f"{self._list_folder(name.room, name.tenant)}/{self._store.keys.name(b'id', name.id.encode())}"

    async def _list(self, name: JournalName, head: JournalRecord) -> None:
        """Put a journal that is about to be made into its tenant's list. Raise Unavailable as `listed` does."""
        blobs, at = self._store.blobs.soon, self._list_name(name)
        data = self._store.keys.seal(at, msgspec.msgpack.encode(ListedJournal(name.id, head.created)))
        try:
            await put(blobs, at, data)
        except OSError as error:
            raise unavailable(error) from error

    # ------------------------------------------------------------------------------------------------------- writing
    # These raise Unavailable if the store does not answer, Moved if another server has written, Running while one
    # works on the journal. The caller then undoes its change; the next `news` tells whether it is in the chain.

    async def made(self, name: JournalName, made: JournalMade) -> None:
        """Write a new journal. Raise Conflict if the id is taken."""
        followed = self._follow(name)
        async with followed.lock:
            await followed.chain.news()
            if followed.chain.tail.kind != "gone":
                followed.known = False
                raise Conflict(f"there is a {name.room} {name.id} already", field="id")
            await self._list(name, made.head)
            await self._append(followed, "made", made)
            followed.known = True

    async def add(self, name: JournalName, entry: SharedEntry, whole: Whole) -> None:
        """Write an entry, together with notes and with others that come meanwhile."""
        followed = self._follow(name)
        written = asyncio.get_running_loop().create_future()
        followed.waiting.append((entry, written))
        if followed.flushing is None:
            followed.flushing = asyncio.create_task(self._flush(followed, name, whole))
        try:
            await written
        except asyncio.CancelledError:
            followed.known = False  # it may be there
            raise

    def note(self, name: JournalName, entry: SharedEntry) -> None:
        """Write an entry together with the next one."""
        self._follow(name).waiting.append((entry, None))

    async def _flush(self, followed: _FollowedJournal, name: JournalName, whole: Whole) -> None:
        """Write what waits, as one record each time, until nobody waits."""
        try:
            while any(written is not None for _, written in followed.waiting):
                async with followed.lock:
                    batch, followed.waiting = followed.waiting, []
                    failed: BaseException | None = None
                    try:
                        added = EntriesAdded(tuple(entry for entry, _ in batch))
                        await self._change(followed, name, added, whole)
                    except BaseException as error:
                        failed = error
                for _, written in batch:
                    if written is None or written.done():
                        continue
                    if failed is None:
                        written.set_result(None)
                    else:
                        written.set_exception(failed if isinstance(failed, Exception) else _closing())
                if failed is not None and not isinstance(failed, Exception):
                    raise failed
        finally:
            followed.flushing = None

    async def remove_entries(self, name: JournalName, numbers: Sequence[int], whole: Whole) -> None:
        """Write that entries are removed."""
        followed = self._follow(name)
        async with followed.lock:
            await self._change(followed, name, EntriesRemoved(tuple(numbers)), whole)
            gone = frozenset(numbers)  # notes that wait must not follow their removal
            followed.waiting = [one for one in followed.waiting if one[1] is not None or one[0].number not in gone]

    async def begin(self, name: JournalName, whole: Whole) -> None:
        """Begin to work on a journal; until the end no other server may write. Takes over from one that is silent."""
        followed = self._follow(name)
        async with followed.lock:
            await self._hold(followed, name, whole)
            at = followed.chain.tail.number + 1
            try:
                await self._append(followed, "began", None, AT_WORK)
            except Moved:
                raise
            except BaseException:  # it may be there
                self._settle(name, at)
                raise

    async def end(self, name: JournalName) -> None:
        """Write the end of the work; later, if the store does not take it now."""
        task = self._settle(name, self._follow(name).chain.tail.since)
        await asyncio.wait({task}, timeout=END_SECONDS)

    async def gone(self, name: JournalName) -> None:
        """Record that a journal is deleted, and remove its other records."""
        followed = self._follow(name)
        async with followed.lock:
            try:
                await followed.chain.delete()
                await self._forget(followed.chain, name)
            except BaseException:
                followed.known = False
                raise
            followed.refuse_waiting()  # its notes are not those of the next journal of this name

    async def _forget(self, chain: AgentChain, name: JournalName) -> None:
        """Remove from the store what a deleted journal has left there. Raise Unavailable as `listed` does."""
        at = self._list_name(name)
        self._listed.pop(at, None)
        try:
            await self._store.blobs.soon.delete([at])
        except OSError as error:
            raise unavailable(error) from error
        await chain.forget()

    async def _change(
        self, followed: _FollowedJournal, name: JournalName, change: EntriesAdded | EntriesRemoved, whole: Whole
    ) -> None:
        tail = followed.chain.tail
        if not (followed.known and followed.chain.mine and tail.running):
            await self._hold(followed, name, whole)
        await self._append(followed, "changed", change, followed.chain.tail.running)

    async def _hold(self, followed: _FollowedJournal, name: JournalName, whole: Whole) -> None:
        """Acquire the right to write to the chain; see `AgentChain.hold`."""
        if not followed.known:
            raise Moved(f"{name.room} {name.id} is being read again; send the request again", retry_after=1.0)
        try:
            if followed.chain.tail.kind == "gone":
                await followed.chain.expect_no_news()
                made = whole()
                await self._list(name, made.head)
                await followed.chain.append("made", msgspec.msgpack.encode(made))
            await followed.chain.hold(self._alive)
        except BaseException as error:
            followed.known = isinstance(error, Running)
            raise

    async def _append(self, followed: _FollowedJournal, kind: Kind, change: JournalChange, running: int = 0) -> None:
        body = b"" if change is None else msgspec.msgpack.encode(change)
        try:
            await followed.chain.append(kind, body, running)
        except BaseException:
            followed.known = False
            raise

    def _settle(self, name: JournalName, since: int) -> asyncio.Task[None]:
        """End the work that record `since` of the chain began, if the chain says that it goes on, in a task."""

        async def write() -> None:
            while since >= 0:
                followed = self._follow(name)
                try:
                    async with followed.lock:
                        before = followed.chain.tail
                        await followed.chain.settle(since, b"")
                        # What `settle` read of others is not in the server's own copy.
                        followed.known &= followed.chain.mine and followed.chain.tail.number - before.number <= 1
                        return
                except Moved:
                    self.doubt(name)
                    return
                except Unavailable:
                    self.doubt(name)
                    await asyncio.sleep(RETRY_SECONDS)
                except Exception as error:
                    self.doubt(name)
                    log.error("the end of work on a journal could not be shared: %s", trace(error))
                    return

        task = asyncio.create_task(write())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


def _closing() -> Unavailable:
    return Unavailable("the server is shutting down", retry_after=5.0)


def _changes(name: JournalName, records: Sequence[ChainRecord]) -> list[JournalChange]:
    """Return what records change. Raise Damaged for one that cannot be decoded."""
    found: list[JournalChange] = []
    for record in records:
        if record.kind == "gone":
            found.append(None)
        elif record.kind in ("made", "changed"):
            try:
                found.append(msgspec.msgpack.decode(record.body, type=JournalMade | EntriesAdded | EntriesRemoved))
            except (msgspec.DecodeError, ValueError) as error:
                raise Damaged(
                    f"record {record.number} of {name.room} {name.id} in the shared store cannot be decoded: {error}; "
                    "if another version of Cairn wrote it, use it there, or update this server"
                ) from None
    return found
