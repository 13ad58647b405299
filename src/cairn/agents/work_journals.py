"""Journals in the token log: records of what several agents or requests work on together, step by step.

A journal has a head, which describes it and is rewritten when that changes, and entries, which are only added. An entry
is durable before anybody learns of it. An entry that nobody has learned of yet may wait in memory (`note`): it is
written with the next entry, and lost if the server ends before. The room that made a journal defines what heads and
entries hold; they are bytes here until that room reads them.

Servers that share a store share their journals (`shared_journals.py`): a change is in the journal's chain before
it is in the log, and `refresh` applies what other servers wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right, insort
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EntryRecord, JournalRecord, check, decode
from cairn.agents.log.segment import Record
from cairn.agents.log.writer_thread import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.shared_journals import (
    AT_ONCE,
    EntriesAdded,
    JournalChange,
    JournalMade,
    JournalName,
    SharedEntry,
    SharedJournals,
)
from cairn.cluster.chain import Moved, RecordUnreadable
from cairn.system.interfaces import Rng
from cairn.types.errors import Conflict, Damaged, NotFound, Overloaded, Unavailable

log = logging.getLogger(__name__)

MAX_JOURNALS = 1_000
"""Journals of one room and tenant."""
MAX_JOURNAL_BYTES = 64 << 20
"""Bytes of a journal, beyond which nobody may post to it."""
MAX_TENANT_BYTES = 256 << 20
"""Bytes of all journals of a tenant, beyond which none is made: all of them are in memory."""


class JournalEntry(NamedTuple):
    """An entry of a journal."""

    number: int
    """Its position: later entries have higher numbers."""
    key: int
    value: Any


class Journal:
    """A head and its entries, by number."""

    def __init__(self, key: int, record: JournalRecord) -> None:
        self.key, self.record = key, record
        self.entries: list[JournalEntry] = []
        self.pending: set[int] = set()
        """Numbers of entries that are being written."""
        self.gone = False
        """Whether it was removed, so that nothing more is written to it."""
        self.at_work = False
        """Whether this server works on it."""
        self.notes: dict[int, Record] = {}
        """Records of notes that no later entry has made durable, by number."""
        self.bytes = len(record.body)
        """Bytes of its head's body and of its entries' records."""
        self._sizes: dict[int, int] = {}
        """Bytes of the entries' records by number."""
        self._next = 1
        self._undecoded = False

    @property
    def id(self) -> str:
        """Name by which clients know it."""
        return self.record.id

    @property
    def tenant(self) -> str:
        """Tenant that it belongs to."""
        return self.record.tenant

    @property
    def name(self) -> JournalName:
        """What names it on all servers."""
        return JournalName(self.record.room, self.record.tenant, self.record.id)

    def shared(self) -> JournalMade:
        """Return all of it in the form that is shared. Raise NotFound if it was removed."""
        if self.gone:
            raise NotFound(f"there is no {self.record.room} {self.id}", field="id")
        return JournalMade(self.record, tuple(SharedEntry(one.number, _encoded(one.value)) for one in self.entries))

    def drop(self, numbers: Iterable[int]) -> list[int]:
        """Remove entries by their numbers; return their keys."""
        gone = set(numbers)
        for number in gone:
            self.notes.pop(number, None)
        keys = [entry.key for entry in self.entries if entry.number in gone]
        self.bytes -= sum(self._sizes.pop(number, 0) for number in gone)
        self.entries = [entry for entry in self.entries if entry.number not in gone]
        return keys

    def read(self, kind: Any) -> list[JournalEntry]:
        """Return the entries with their values decoded as `kind`; those that cannot be decoded are left out."""
        if self._undecoded:
            self._undecoded = False
            self.entries = [found for one in self.entries if (found := _decoded(one, kind)) is not None]
        return self.entries

    @property
    def complete_to(self) -> int:
        """Number up to which the entries are complete: no lower one will be added."""
        last = self.entries[-1].number if self.entries else 0
        return min(last, min(self.pending) - 1) if self.pending else last

    def take(self) -> int:
        """Return the number of the next entry."""
        self._next += 1
        return self._next - 1

    def add(self, entry: JournalEntry, size: int) -> None:
        """Insert an entry, whose record takes `size` bytes, at its position."""
        insort(self.entries, entry, key=lambda one: one.number)
        self.bytes += size - self._sizes.get(entry.number, 0)
        self._sizes[entry.number] = size
        self._next = max(self._next, entry.number + 1)
        self._undecoded |= isinstance(entry.value, bytes)


def _decoded(entry: JournalEntry, kind: Any) -> JournalEntry | None:
    if not isinstance(entry.value, bytes):
        return entry
    try:
        return entry._replace(value=msgspec.msgpack.decode(entry.value, type=kind))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _encoded(value: Any) -> bytes:
    return value if isinstance(value, bytes) else msgspec.msgpack.encode(value)


def _read_again(journal: Journal) -> Moved:
    return Moved(f"{journal.record.room} {journal.id} was read again; send the request again", retry_after=1.0)


class Journals:
    """All journals of one log."""

    def __init__(self, writer: Writer, pending: PendingWrites, rng: Rng, recovered: Sequence[Record]) -> None:
        self._writer, self._pending, self._rng = writer, pending, rng
        self.shared: SharedJournals | None = None
        """The chains of journals in the shared store, if there is one."""
        self._journals: dict[tuple[str, str, str], Journal] = {}
        """Journals by (room, tenant, id)."""
        self._load(recovered)

    def _load(self, recovered: Sequence[Record]) -> None:
        keyed: dict[int, Journal] = {}
        for record in recovered:
            if record.kind == RecordKind.JOURNAL and (head := decode(record.payload, JournalRecord)) is not None:
                keyed[record.key] = Journal(record.key, head)
        strays = []
        for record in recovered:
            if record.kind != RecordKind.ENTRY:
                continue
            entry = decode(record.payload, EntryRecord)
            journal = None if entry is None else keyed.get(entry.journal)
            if entry is None or journal is None:
                strays.append(record.key)
            else:
                journal.add(JournalEntry(entry.number, record.key, entry.body), record.size)
        for journal in keyed.values():
            self._journals[journal.record.room, journal.tenant, journal.id] = journal
        if strays and self._writer.loss:  # their head may be what was damaged
            log.warning("%d entries belong to no team or run that can be read; they are kept", len(strays))
        else:
            self._pending.erase_later(strays)

    def now(self) -> float:
        """Return the seconds since 1970, by the clock that dates the log's records."""
        return self._pending.now()

    def seed(self) -> int:
        """Return an unpredictable 64-bit number."""
        return self._rng.bits64()

    def find(self, room: str, tenant: str, id: str) -> Journal:
        """Return one journal. Raise NotFound if it does not exist or belongs to another tenant."""
        journal = self._journals.get((room, tenant, id))
        if journal is None:
            raise NotFound(f"there is no {room} {id[:64]}", field="id")
        return journal

    def model_of(self, room: str, tenant: str, id: str) -> str | None:
        """Return the name of the model that a journal was made with; None without one or without the journal."""
        journal = self._journals.get((room, tenant, id))
        return None if journal is None else journal.record.model or None

    def of(self, room: str, tenant: str) -> list[Journal]:
        """Return a tenant's journals of a room, most recently created first."""
        journals = [
            journal for (where, whose, _), journal in self._journals.items() if (where, whose) == (room, tenant)
        ]
        return sorted(journals, key=lambda journal: (-journal.record.created, journal.id))

    async def created(self, room: str, tenant: str) -> dict[str, float]:
        """Return when a tenant's journals on all servers that share the store were made, by id, the newest first.

        Those of this server alone, if the store does not answer.
        """
        found = {journal.id: journal.record.created for journal in self.of(room, tenant)}
        if self.shared is not None:
            with contextlib.suppress(Unavailable):
                found = await self.shared.listed(room, tenant) | found
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))

    async def refresh_listed(self, room: str, tenant: str, ids: Sequence[str]) -> None:
        """Update the server's own copies of listed journals, as far as the shared store answers."""
        with contextlib.suppress(Unavailable):
            for at in range(0, len(ids) if self.shared is not None else 0, AT_ONCE):
                some = (self.refresh(room, tenant, id) for id in ids[at : at + AT_ONCE])
                for failed in await asyncio.gather(*some, return_exceptions=True):
                    if isinstance(failed, BaseException) and not isinstance(failed, Damaged | RecordUnreadable):
                        raise failed

    def keys_of(self, tenant: str) -> set[int]:
        """Return the keys of all records of a tenant's journals."""
        journals = [journal for (_, whose, _), journal in self._journals.items() if whose == tenant]
        return {key for journal in journals for key in (journal.key, *(entry.key for entry in journal.entries))}

    async def create(
        self,
        room: str,
        tenant: str,
        id: str | None,
        body: msgspec.Struct,
        entries: Sequence[JournalEntry] = (),
        *,
        model: str = "",
    ) -> Journal:
        """Create a journal, with entries that keep their numbers.

        `model`: name of the model that it is made with. Raise Conflict if the id is taken, Overloaded if there are too
        many.
        """
        if len(self.of(room, tenant)) >= MAX_JOURNALS:
            raise Overloaded(f"there are {MAX_JOURNALS} {room}s, the limit; delete some", retry_after=60.0)
        encoded = msgspec.msgpack.encode(body)
        if self._bytes_of(tenant) + len(encoded) > MAX_TENANT_BYTES:
            raise Overloaded(
                f"your teams and runs take more than {MAX_TENANT_BYTES >> 20} MiB, the limit; delete some of them",
                retry_after=60.0,
            )
        id = f"{room}-{self._rng.bits64():016x}" if id is None else id
        if (room, tenant, id) in self._journals:
            await self.refresh(room, tenant, id)
        if (room, tenant, id) in self._journals:
            raise Conflict(f"there is a {room} {id} already", field="id")
        check(msgspec.to_builtins(body), room)
        head = JournalRecord(
            room=room,
            tenant=tenant,
            id=id,
            created=self.now(),
            model=model,
            body=encoded,
        )
        record = self._writer.record(RecordKind.JOURNAL, head)
        journal = Journal(record.key, head)
        self._journals[room, tenant, id] = journal
        copies = [(entry, self._record(journal, entry.number, entry.value)) for entry in entries]
        for entry, copy in copies:
            journal.add(entry._replace(key=copy.key), copy.size)
        try:
            if self.shared is not None:
                await self.shared.made(journal.name, journal.shared())
            await self._pending.sync(*(copy for _, copy in copies), record)
        except BaseException:
            self._doubt(journal)
            if self._journals.get((room, tenant, id)) is journal:
                del self._journals[room, tenant, id]
            self._pending.erase_later([record.key, *(copy.key for _, copy in copies)])
            raise
        return journal

    @contextlib.asynccontextmanager
    async def working(self, journal: Journal) -> AsyncIterator[None]:
        """Keep other servers from writing to the journal while entered.

        Raise Running while another server works on it, Moved if one has written meanwhile, Unavailable if the shared
        store does not answer.
        """
        journal.at_work = True
        try:
            if self.shared is None:
                yield
                return
            await self.shared.begin(journal.name, journal.shared)
            try:
                if self._journals.get(journal.name) is not journal:
                    raise _read_again(journal)
                yield
            finally:  # also while it is being removed: that may fail
                await self.shared.end(journal.name)
        finally:
            journal.at_work = False

    def at_work_elsewhere(self, journal: Journal) -> bool:
        """Return whether another server works on the journal, as far as this one knows."""
        return self.shared is not None and self.shared.at_work_elsewhere(journal.name)

    def check_free(self, journal: Journal) -> None:
        """Raise Running while another server works on the journal, as far as this one knows."""
        if self.shared is not None:
            self.shared.check_free(journal.name)

    def check_room(self, journal: Journal) -> None:
        """Raise Conflict if the journal, or all of its tenant's, take so much that nothing may be posted to it."""
        own = f"{journal.record.room} {journal.id} takes", "roll it back or delete it"
        all_of_them = "your teams and runs take", "delete some of them"
        for size, limit, (what, advice) in (
            (journal.bytes, MAX_JOURNAL_BYTES, own),
            (self._bytes_of(journal.tenant), MAX_TENANT_BYTES, all_of_them),
        ):
            if size > limit:
                raise Conflict(f"{what} more than {limit >> 20} MiB, the limit; {advice}", field="id")

    def _bytes_of(self, tenant: str) -> int:
        return sum(journal.bytes for (_, whose, _), journal in self._journals.items() if whose == tenant)

    async def append(self, journal: Journal, value: msgspec.Struct) -> JournalEntry:
        """Append an entry; it is durable, and in the journal, on return. Raise NotFound if the journal was removed."""
        self._check_there(journal)
        number = journal.take()
        record = self._record(journal, number, value)
        journal.pending.add(number)
        notes: dict[int, Record] = {}
        try:
            if self.shared is not None:
                await self.shared.add(journal.name, SharedEntry(number, _encoded(value)), journal.shared)
            notes = {one: journal.notes.pop(one) for one in sorted(journal.notes) if one < number}
            await self._pending.sync(*notes.values(), record)
        except BaseException:
            journal.notes |= notes  # a later entry takes them along
            self._doubt(journal)
            self._pending.erase_later([record.key])
            raise
        finally:
            journal.pending.discard(number)
        entry = JournalEntry(number, record.key, value)
        journal.add(entry, record.size)
        return entry

    def note(self, journal: Journal, value: msgspec.Struct) -> JournalEntry:
        """Add an entry that is written together with the next one. It is lost if the server ends before."""
        self._check_there(journal)
        number = journal.take()
        record = self._record(journal, number, value)
        journal.notes[number] = record
        if self.shared is not None:
            self.shared.note(journal.name, SharedEntry(number, _encoded(value)))
        entry = JournalEntry(number, record.key, value)
        journal.add(entry, record.size)
        return entry

    def _doubt(self, journal: Journal) -> None:
        if self.shared is not None:
            self.shared.doubt(journal.name)

    def _check_there(self, journal: Journal) -> None:
        if journal.gone and journal.name in self._journals:
            raise _read_again(journal)
        if journal.gone:
            raise NotFound(f"there is no {journal.record.room} {journal.id}", field="id")

    def _record(self, journal: Journal, number: int, value: Any) -> Record:
        return self._writer.record(
            RecordKind.ENTRY, EntryRecord(journal=journal.key, number=number, body=_encoded(value))
        )

    async def cut(self, journal: Journal, after: int) -> None:
        """Erase all entries of higher numbers.

        Raise Unavailable if the disk refuses: they are gone all the same, and their bytes go as soon as it works.
        """
        at = bisect_right(journal.entries, after, key=lambda one: one.number)
        await self.drop(journal, journal.entries[at:])

    async def drop(self, journal: Journal, gone: Sequence[JournalEntry]) -> None:
        """Erase these entries. Raise Unavailable as `cut` does, or if the shared store refuses; then they stay."""
        if not gone:
            return
        numbers = [entry.number for entry in gone]
        if self.shared is not None:
            await self.shared.remove_entries(journal.name, numbers, journal.shared)
        await self._pending.erase(sorted(journal.drop(numbers)))

    async def remove(self, journal: Journal) -> None:
        """Erase a journal with its entries, and with them whatever else waits for erasure.

        Raise Unavailable as `cut` does, or if the shared store refuses.
        """
        journal.gone = True
        if self.shared is not None:
            try:
                await self.shared.gone(journal.name)
            except BaseException:
                journal.gone = False
                raise
        await self._pending.erase([*self._pending.to_erase(), *self._forget(journal)])

    def _forget(self, journal: Journal) -> list[int]:
        """Remove a journal from memory; return the keys of its records."""
        journal.gone = True
        if self._journals.get(journal.name) is journal:
            del self._journals[journal.name]
        keys = [journal.key, *(entry.key for entry in journal.entries)]
        journal.entries, journal.bytes = [], 0
        return keys

    # ----------------------------------------------------------------------------------------------- of other servers

    async def refresh(self, room: str, tenant: str, id: str) -> None:
        """Update the server's own copy of a journal from the shared store, if there is one.

        Raise Unavailable if the store does not answer, Damaged if the chain cannot be used.
        """
        name = JournalName(room, tenant, id)
        here = self._journals.get(name)
        if self.shared is None or (here is not None and here.at_work):
            return
        news = await self.shared.news(name, here=here is not None)
        here = self._journals.get(name)
        if not (news.changes or news.whole):
            return
        if here is not None and here.at_work:  # it began while the news were read, and must not go on without them
            self.shared.doubt(name)
            return
        try:
            if news.whole:
                await self._replace(name, news.changes)
            elif here is not None:
                self._pending.erase_later(here.drop([*here.notes]))
                await self._pending.sync(*self._apply(here, news.changes))
        except BaseException:
            self.shared.doubt(name)
            raise

    def _apply(self, journal: Journal, changes: Iterable[JournalChange]) -> list[Record]:
        """Apply changes to a journal in memory; return the records to write."""
        written: dict[int, Record] = {}
        for change in changes:
            if isinstance(change, EntriesAdded | JournalMade):
                for one in change.entries:
                    record = written[one.number] = self._record(journal, one.number, one.body)
                    journal.add(JournalEntry(one.number, record.key, one.body), record.size)
            elif change is not None:
                self._pending.erase_later(journal.drop(change.numbers))
                for number in change.numbers:
                    written.pop(number, None)
        return [*written.values()]

    async def _replace(self, name: JournalName, changes: Sequence[JournalChange]) -> None:
        """Make the server's own copy as the whole chain says, unless it is so already."""
        begins = [at for at, change in enumerate(changes) if change is None or isinstance(change, JournalMade)]
        last = changes[begins[-1]] if begins else None
        here = self._journals.get(name)
        if not changes:
            return  # it was never shared
        if not isinstance(last, JournalMade):
            if here is not None:
                self._pending.erase_later(self._forget(here))
            return
        head = msgspec.structs.replace(last.head, room=name.room, tenant=name.tenant, id=name.id)
        record = self._writer.record(RecordKind.JOURNAL, head)
        made = Journal(record.key, head)
        written = self._apply(made, changes[begins[-1] :])
        if here is not None and here.record.created == head.created:
            there = made.shared().entries
            own = [one for one in here.shared().entries if one.number not in here.notes]
            if tuple(own) == there and not here.notes:
                return
            self._check_kept(name, own, changes[begins[-1] :])
        if here is not None:
            self._pending.erase_later(self._forget(here))
        self._journals[name] = made
        await self._pending.sync(*written, record)

    @staticmethod
    def _check_kept(name: JournalName, own: Sequence[SharedEntry], changes: Sequence[JournalChange]) -> None:
        """Raise Damaged if the chain never had an entry of the server's own copy, which was acknowledged here."""
        known = {
            entry.number
            for change in changes
            if isinstance(change, EntriesAdded | JournalMade)
            for entry in change.entries
        }
        lost = next((entry.number for entry in own if entry.number not in known), None)
        if lost is not None:
            raise Damaged(
                f"the shared store has lost entry {lost} of {name.room} {name.id}, which this server acknowledged; "
                "delete it, or start this server without the store to read it"
            )
