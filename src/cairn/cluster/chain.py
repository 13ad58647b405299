"""The chain of one agent in a shared store: numbered records that nobody can write twice, and the lease in them.

    agents/NAME/0000000000, agents/NAME/0000000001, ...
    agents/NAME/gone            the number of the record that deleted it, once those before are removed
    agents/NAME/gone-0000000007 the same for a later agent of that name; the highest number counts

Journals of teams and workflow runs have chains of the same form, below `teams/` and `runs/`.

A record is created under the next number, which fails if somebody else has it. So the chain has one order, and of two
writers one learns that it is not the writer any more: nothing that it still does can be acknowledged. Each record
names its writer (the *holder* of the agent), the epoch, which grows by one with every new holder, and the digest of the
record before it. What is sealed under another name, changed, cut out or put out of order is refused.

The number alone is the name. If the epoch were a part of it, a holder that lost the agent could still create records
of its own epoch beside those of the next.

When an agent is deleted, all records before the last are removed. A replica that had not read them all finds nothing
under its next number, and can create a record there: `gone` tells it afterwards, and tells all readers to pass that
record over.

No clock is needed for that. Whether a holder is alive (`beats.py`) only decides how soon another one may interrupt it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from cairn.cluster.guard import AHEAD, AsyncBlobs, ObjectFailed
from cairn.cluster.keys import ClusterKeys
from cairn.types.errors import Conflict, Damaged, Unavailable

K = TypeVar("K")
V = TypeVar("V")
Kind = Literal["made", "began", "ended", "changed", "taken", "gone"]
FIRST: frozenset[Kind] = frozenset({"made", "gone"})
"""Kinds that need nothing before them: what came before may be removed."""
MOST_CHAINS = 10_000
"""Most chains of a kind whose position is kept in memory, beside those in use; any other is read from its beginning."""
FORGET_AT_ONCE = 2
"""Chains that are looked at, to forget them, with each new one. Those in use are passed over."""
TRIES = 2
"""Tries of an append whose outcome is unknown. It is the same object each time."""


def forget_oldest(followed: OrderedDict[K, V], spared: K, most: int, needed: Callable[[K], bool]) -> None:
    """Forget chains that were used least recently while there are more than `most`, except `spared` and needed ones."""
    for _ in range(FORGET_AT_ONCE):
        oldest = next(iter(followed))
        if len(followed) <= most or oldest == spared:
            return
        if needed(oldest):
            followed.move_to_end(oldest)
        else:
            del followed[oldest]


class ChainRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a chain."""

    number: int
    epoch: int
    holder: str
    kind: Kind
    before: bytes
    """SHA-256 of the record before it; empty for none."""
    running: int
    """Number of the turn that runs after this record; 0 for none."""
    body: bytes


class Tail(msgspec.Struct, frozen=True):
    """The end of a chain, as far as it is known."""

    number: int = -1
    epoch: int = 0
    holder: str = ""
    digest: bytes = b""
    running: int = 0
    since: int = -1
    """Number of the record with which that turn began here."""
    kind: Kind = "gone"


class Moved(Unavailable):
    """Another replica has written to the chain meanwhile. The caller may try again."""


class RecordUnreadable(Unavailable):
    """The store works, but one record of the chain cannot be read."""


class Running(Unavailable):
    """A turn of the agent runs on another server."""

    status = Conflict.status
    code = "turn_running"


class AgentChain:
    """One chain. Its owner allows one call at a time."""

    def __init__(
        self, blobs: AsyncBlobs, keys: ClusterKeys, tenant: str, id: str, holder: str, *, room: str = "agent"
    ) -> None:
        """Name a chain. `holder`: the name of this replica, new with each start. `room`: `agent`, `team` or `run`."""
        self._blobs, self._keys, self._holder = blobs, keys, holder
        self._subject = f"{room} {id}"
        self._folder = f"{room}s/{keys.name(room.encode(), tenant.encode(), id.encode())}"
        self._gone = f"{self._folder}/gone"
        self.tail = Tail()

    @property
    def mine(self) -> bool:
        """Whether this replica wrote the last known record."""
        return self.tail.holder == self._holder

    async def news(self) -> list[ChainRecord]:
        """Return the records beyond the known end, in order, and know them from now on.

        If the next were removed, they begin with the record of the deletion. Raise Damaged for a record that fails a
        check, Unavailable if the store does not answer or a record cannot be read. Then nothing is known that was not
        before.
        """
        tail, found = self.tail, list[ChainRecord]()
        first = tail.number + 1
        try:
            if not first:
                first = await self._first()
            data = await self._record(first)
            if data is None and await self._is_removed(tail.number + 1):
                tail, first = Tail(), await self._first()
                data = await self._record(first)
            ahead, read = 1, deque[bytes | OSError | None]((data,))
            while (data := read.popleft()) is not None:
                record, tail = self._follows(data, first + len(found), tail)
                found.append(record)
                if not read:  # more at once each time: few are new at most looks, and many at the first
                    ahead, at = min(2 * ahead, AHEAD), first + len(found)
                    read.extend(await self._blobs.read_several([*map(self._name, range(at, at + ahead))]))
            removed = bool(found) and await self._is_removed(tail.number + 1)
        except Damaged:
            removed = await self._is_passed_over(self.tail.number if self.tail.number >= 0 else first)
            if not removed:
                raise
        except OSError as error:
            raise unavailable(error) from error
        if removed:  # meanwhile, or before, and what was read was written under a number that was free again
            return await self._all()
        self.tail = tail
        return found

    def _follows(self, data: bytes | OSError, number: int, tail: Tail) -> tuple[ChainRecord, Tail]:
        """Return what `_check` does. Raise RecordUnreadable, or OSError if the store fails."""
        if isinstance(data, ObjectFailed):
            raise RecordUnreadable(
                f"record {number} of {self._subject} in the shared store cannot be read: {data.strerror}",
                retry_after=5.0,
            )
        if isinstance(data, OSError):
            raise data
        return self._check(data, number, tail)

    async def _record(self, number: int) -> bytes | OSError | None:
        """Return a record; None if there is none, its error if it alone cannot be read. Raise OSError."""
        try:
            return await self._blobs.read(self._name(number))
        except ObjectFailed as error:
            return error

    async def _all(self) -> list[ChainRecord]:
        """Return all records that count, and know them from now on. Raise as `news` does."""
        before, self.tail = self.tail, Tail()
        try:
            return await self.news()
        except BaseException:
            self.tail = before
            raise

    async def _is_removed(self, number: int) -> bool:
        """Return whether record `number` was there, and is removed because the agent is deleted. Raise OSError."""
        return number > 0 and await self._deletion() >= number

    async def _deletion(self) -> int:
        """Return the number of the newest record that deleted the agent; -1 if there is none. Raise OSError."""
        data = await self._blobs.read(self._gone)
        if data is None:
            return -1
        for name in reversed([one for one in await self._blobs.list(self._folder) if one.startswith(self._gone)]):
            data = await self._blobs.read(name)
            content = None if data is None else self._keys.open(name, data)
            if content is not None:
                return int.from_bytes(content, "big")
        return -1

    async def _first(self) -> int:
        """Return the number of the first record that counts; 0 if there is none. Raise OSError."""
        names = await self._blobs.list(self._folder)
        first = await self._deletion() if self._gone in names else 0
        numbers = sorted(_numbers(names))
        if numbers and numbers[0] < first:  # whoever deleted the agent did not get that far
            with contextlib.suppress(OSError):
                await self._blobs.delete([self._name(number) for number in numbers if number < first])
        return min((number for number in numbers if number >= first), default=0)

    def _check(self, data: bytes, number: int, tail: Tail) -> tuple[ChainRecord, Tail]:
        """Return a record that follows `tail`, and the new tail."""
        name = self._name(number)
        content = self._keys.open(name, data)
        if content is None:
            raise self._damaged(number, "was changed, or sealed under an unknown key")
        try:
            record = msgspec.msgpack.decode(content, type=ChainRecord)
        except (msgspec.DecodeError, ValueError):
            raise self._damaged(number, "cannot be read") from None
        follows = record.before == tail.digest and record.epoch == tail.epoch + (record.holder != tail.holder)
        starts = tail.number < 0 and record.kind in FIRST
        taken = not tail.running or record.holder == tail.holder or record.kind in ("taken", "gone")
        if record.number != number or not (starts or (follows and taken)):
            raise self._damaged(number, "does not follow the one before it")
        return record, _after(record, content, tail)

    async def append(self, kind: Kind, body: bytes = b"", running: int = 0) -> None:
        """Write the next record. On return it is acknowledged and durable.

        Raise Moved if another replica wrote one there or has deleted the agent, Unavailable if the store does not
        answer; then the record may be there or not, which the next `news` tells.
        """
        tail = self.tail
        record = ChainRecord(
            number=tail.number + 1,
            epoch=tail.epoch + (not self.mine),
            holder=self._holder,
            kind=kind,
            before=tail.digest,
            running=running,
            body=body,
        )
        content = msgspec.msgpack.encode(record)
        name = self._name(record.number)
        if not await self._create(name, self._keys.seal(name, content)):
            raise self.moved()
        await self._check_counts(record.number)
        self.tail = _after(record, content, tail)

    async def _check_counts(self, number: int) -> None:
        """Raise Moved if this replica created a record whose number was free again: the agent is deleted.

        `forget` writes `gone` before it removes anything, so a look after the creation finds it.
        """
        if await self._is_passed_over(number):
            with contextlib.suppress(OSError):  # nobody reads it
                await self._blobs.delete([self._name(number)])
            raise self.moved()

    async def _is_passed_over(self, number: int) -> bool:
        """Return whether readers pass record `number` over: a later one deleted the agent. Raise as `append` does."""
        try:
            return number < await self._deletion()
        except OSError as error:
            raise unavailable(error) from error

    async def hold(self, alive: Callable[[str], bool]) -> None:
        """Make sure that this replica may write: it knows all of the chain, and no other one runs a turn.

        A turn of a replica that is not `alive` is interrupted: the record that says so is the next, so that replica can
        end nothing any more. Raise Running for one that is, Moved if there are news.
        """
        await self.expect_no_news()
        if self.tail.running and not self.mine:
            self.check_free(alive)
            await self.append("taken")

    async def expect_no_news(self) -> None:
        """Raise Moved if others wrote since the chain was read: what the caller wants to write is out of date."""
        if await self.news():
            raise self.moved()

    def check_free(self, alive: Callable[[str], bool]) -> None:
        """Raise Running while another replica that is `alive` runs a turn of the agent."""
        tail = self.tail
        if tail.running and not self.mine and alive(tail.holder):
            raise Running(f"{self._subject} is running on another server", retry_after=1.0)

    async def end(self, turn: int, body: bytes) -> None:
        """Write the end of a turn of this replica. When it returns, the turn is acknowledged.

        Raise Moved if another replica has interrupted it, Unavailable as `append` does.
        """
        if not self.mine or self.tail.running != turn:
            raise self.moved()
        await self.append("ended", body)

    async def settle(self, since: int, body: bytes) -> None:
        """End the turn of this replica that record `since` began with `body`, if the chain says that it still runs.

        For a turn whose beginning or end was written with an unknown outcome: while it is said to run, and this replica
        is alive, no other one may go on with the agent. Raise as `append` does.
        """
        await self.news()
        if self.mine and self.tail.running and self.tail.since == since:
            await self.append("ended", body)

    def moved(self) -> Moved:
        """Return the error of a change that is out of date."""
        return Moved(f"another server has gone on with {self._subject}; send the request again", retry_after=1.0)

    async def _create(self, name: str, data: bytes) -> bool:
        for left in reversed(range(TRIES)):
            try:
                return await self._blobs.create(name, data)
            except OSError as error:
                if not left:
                    raise unavailable(error) from error
        raise AssertionError("unreachable")

    async def forget(self) -> None:
        """Remove all records before the last one, which deleted the agent. Raise Unavailable as `append` does."""
        try:
            last = self.tail.number
            if await self._deletion() < last:
                # Never replaced: a replica that is late would hide the deletion of a later agent of this name.
                for name in (self._gone, f"{self._gone}-{last:010d}"):
                    if await self._blobs.create(name, self._keys.seal(name, last.to_bytes(8, "big"))):
                        break
            names = await self._blobs.list(self._folder)
            before = [name for name in names if name < self._name(last)]
            late = [name for name in names if f"{self._gone}-" <= name < f"{self._gone}-{last:010d}"]
            await self._blobs.delete(before + late)
        except OSError as error:
            raise unavailable(error) from error

    async def delete(self) -> None:
        """Record that the agent is deleted, whatever its records say. Raise as `append` does."""
        try:
            await self.news()
        except (Damaged, RecordUnreadable):  # then nothing can follow it, and nobody can use it
            return await self.erase()
        if self.tail.kind != "gone":
            await self.append("gone")

    async def erase(self) -> None:
        """Delete an agent whose records cannot be used, and remove them. Raise as `append` does.

        The deletion follows no record. There is none under the number before it: a replica that has read the last of
        the others finds nothing there, and then the deletion.
        """
        try:
            last = max((await self._deletion(), *_numbers(await self._blobs.list(self._folder))))
        except OSError as error:
            raise unavailable(error) from error
        before, self.tail = self.tail, Tail(number=last + 1)
        try:
            await self.append("gone")
        except BaseException:
            self.tail = before
            raise
        await self.forget()

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:010d}"

    def _damaged(self, number: int, what: str) -> Damaged:
        return Damaged(f"record {number} of {self._subject} in the shared store {what}; nothing is built on it")


def _numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of the records among these objects."""
    ends = (name.rsplit("/", 1)[-1] for name in names)
    return [int(end) for end in ends if len(end) == 10 and end.isdigit()]


def _after(record: ChainRecord, content: bytes, before: Tail) -> Tail:
    digest = hashlib.sha256(content).digest()
    begins = record.running and record.kind in ("began", "taken")
    since = record.number if begins else before.since if record.running else -1
    return Tail(record.number, record.epoch, record.holder, digest, record.running, since, record.kind)


def unavailable(error: OSError) -> Unavailable:
    """Return the error of a store that does not answer, or of one object in it."""
    what = "an object in the shared store" if isinstance(error, ObjectFailed) else "the shared store does not work"
    return Unavailable(f"{what}: {error.strerror or error}", retry_after=5.0)
