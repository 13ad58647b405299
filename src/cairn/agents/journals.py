"""Journals in the token log: records of what several agents or requests work on together, step by step.

A journal has a head, which describes it and is rewritten when that changes, and entries, which are only added. An entry
is durable before anybody learns of it. An entry that nobody has learned of yet may be appended without waiting
(`note`); it is durable once any later one is, because the log is written in order. The room that made a journal defines
what heads and entries hold; they are bytes here until that room reads them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EntryRecord, JournalRecord, check, decode
from cairn.agents.log.segment import Record
from cairn.agents.log.writer import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.system.interfaces import Rng
from cairn.types.errors import Conflict, NotFound, Overloaded

MAX_JOURNALS = 1_000
"""Journals of one room and tenant."""


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
        self._next = 1
        self._read = False

    @property
    def id(self) -> str:
        """Name by which clients know it."""
        return self.record.id

    @property
    def tenant(self) -> str:
        """Tenant that it belongs to."""
        return self.record.tenant

    def read(self, kind: Any) -> list[JournalEntry]:
        """Return the entries with their values decoded as `kind`; those that cannot be decoded are left out."""
        if not self._read:
            self._read = True
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

    def add(self, entry: JournalEntry) -> None:
        """Insert an entry at its position."""
        insort(self.entries, entry, key=lambda one: one.number)
        self._next = max(self._next, entry.number + 1)


def _decoded(entry: JournalEntry, kind: Any) -> JournalEntry | None:
    if not isinstance(entry.value, bytes):
        return entry
    try:
        return entry._replace(value=msgspec.msgpack.decode(entry.value, type=kind))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


class Journals:
    """All journals of one log."""

    def __init__(self, writer: Writer, pending: PendingWrites, rng: Rng, recovered: Sequence[Record]) -> None:
        self._writer, self._pending, self._rng = writer, pending, rng
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
                journal.add(JournalEntry(entry.number, record.key, entry.body))
        for journal in keyed.values():
            self._journals[journal.record.room, journal.tenant, journal.id] = journal
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
        id = f"{room}-{self._rng.bits64():016x}" if id is None else id
        if (room, tenant, id) in self._journals:
            raise Conflict(f"there is a {room} {id} already", field="id")
        check(msgspec.to_builtins(body), room)
        head = JournalRecord(
            room=room,
            tenant=tenant,
            id=id,
            created=self.now(),
            model=model,
            body=msgspec.msgpack.encode(body),
        )
        record = self._writer.record(RecordKind.JOURNAL, head)
        journal = Journal(record.key, head)
        self._journals[room, tenant, id] = journal
        copies = [(entry, self._record(journal, entry.number, entry.value)) for entry in entries]
        for entry, copy in copies:
            journal.add(entry._replace(key=copy.key))
        try:
            await self._pending.sync(*(copy for _, copy in copies), record)
        except BaseException:
            del self._journals[room, tenant, id]
            self._pending.erase_later([record.key, *(copy.key for _, copy in copies)])
            raise
        return journal

    async def update(self, journal: Journal, body: msgspec.Struct) -> None:
        """Replace the body of a journal's head. On Unavailable nothing has changed."""
        check(msgspec.to_builtins(body), journal.record.room)
        before = journal.record
        journal.record = msgspec.structs.replace(before, body=msgspec.msgpack.encode(body))
        try:
            await self._pending.sync(self._writer.record(RecordKind.JOURNAL, journal.record, journal.key))
        except BaseException:
            journal.record = before
            raise

    async def append(self, journal: Journal, value: msgspec.Struct) -> JournalEntry:
        """Append an entry; it is durable, and in the journal, on return. Raise NotFound if the journal was removed."""
        self._check_there(journal)
        number = journal.take()
        record = self._record(journal, number, value)
        journal.pending.add(number)
        try:
            await self._pending.sync(record)
        except BaseException:
            self._pending.erase_later([record.key])
            raise
        finally:
            journal.pending.discard(number)
        entry = JournalEntry(number, record.key, value)
        journal.add(entry)
        return entry

    def note(self, journal: Journal, value: msgspec.Struct) -> JournalEntry:
        """Append an entry that a crash may lose, unless a later one is durable."""
        self._check_there(journal)
        number = journal.take()
        record = self._record(journal, number, value)
        self._writer.append(record)
        entry = JournalEntry(number, record.key, value)
        journal.add(entry)
        return entry

    def _check_there(self, journal: Journal) -> None:
        if journal.gone:
            raise NotFound(f"there is no {journal.record.room} {journal.id}", field="id")

    def _record(self, journal: Journal, number: int, value: msgspec.Struct) -> Record:
        body = msgspec.msgpack.encode(value)
        return self._writer.record(RecordKind.ENTRY, EntryRecord(journal=journal.key, number=number, body=body))

    async def cut(self, journal: Journal, after: int) -> None:
        """Erase all entries of higher numbers.

        Raise Unavailable if the disk refuses: they are gone all the same, and their bytes go as soon as it works.
        """
        at = bisect_right(journal.entries, after, key=lambda one: one.number)
        gone, journal.entries = journal.entries[at:], journal.entries[:at]
        if gone:
            await self._pending.erase([entry.key for entry in gone])

    async def drop(self, journal: Journal, gone: Sequence[JournalEntry]) -> None:
        """Erase these entries. Raise Unavailable as `cut` does."""
        keys = {entry.key for entry in gone}
        journal.entries = [entry for entry in journal.entries if entry.key not in keys]
        if keys:
            await self._pending.erase(sorted(keys))

    async def remove(self, journal: Journal) -> None:
        """Erase a journal with its entries. Raise Unavailable as `cut` does."""
        journal.gone = True
        self._journals.pop((journal.record.room, journal.tenant, journal.id), None)
        keys = [journal.key, *(entry.key for entry in journal.entries)]
        journal.entries = []
        await self._pending.erase(keys)
