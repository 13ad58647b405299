"""The chain of an agent: only one of several servers writes it, and no acknowledged turn is lost or changed."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cluster import chain as chains
from cairn.cluster.beats import BEAT_SECONDS, LEASE_SECONDS, Beats
from cairn.cluster.chain import AgentChain, ChainRecord, Moved, RecordUnreadable, Running
from cairn.cluster.guard import AHEAD, ObjectFailed
from cairn.types.errors import CairnError, Damaged, Unavailable
from tests.cluster.chain_simulator import (
    Acknowledged,
    Point,
    SimulatedReplica,
    add_entry,
    check_deletions,
    run_or_delete,
    run_turn,
    run_work,
    simulate,
)
from tests.cluster.stores import Awaited, MemoryBlobs, keys
from tests.cluster.test_keys import tampered
from tests.kv.stored import Time


def chain_of(blobs: MemoryBlobs, holder: str, number: int = 1) -> AgentChain:
    return AgentChain(Awaited(blobs), keys(number * 1000), "default", "ada", holder)


async def written(blobs: MemoryBlobs, turns: int = 5) -> AgentChain:
    one = chain_of(blobs, "one")
    await one.append("made", b"the agent")
    for number in range(1, turns + 1):
        await one.append("began", b"question %d" % number, number)
        await one.end(number, b"answer %d" % number)
    return one


async def test_another_server_reads_what_was_written_and_goes_on() -> None:
    blobs = MemoryBlobs()
    await written(blobs)
    two = chain_of(blobs, "two", 2)
    records = await two.news()
    assert [record.kind for record in records] == ["made", *["began", "ended"] * 5]
    assert records[-1].body == b"answer 5" and {record.epoch for record in records} == {1}
    await two.append("began", b"more", 6)
    assert two.tail.epoch == 2 and two.mine


async def test_a_server_that_lost_the_agent_cannot_acknowledge() -> None:
    blobs = MemoryBlobs()
    one, two = await written(blobs), chain_of(blobs, "two", 2)
    await one.append("began", b"question", 6)
    await two.news()
    with pytest.raises(Running):
        await two.hold(lambda holder: True)
    await two.hold(lambda holder: False)
    with pytest.raises(Moved):
        await one.end(6, b"answer")
    await two.append("began", b"another", 6)
    await two.end(6, b"its answer")
    assert [record.kind for record in await one.news()] == ["taken", "began", "ended"]
    with pytest.raises(Moved):
        await one.end(6, b"answer")


async def test_an_append_whose_answer_was_lost_is_known_again() -> None:
    blobs = MemoryBlobs()
    one = await written(blobs)
    lost = [True]

    class Lossy(Awaited):
        async def create(self, name: str, data: bytes) -> bool:
            done = await super().create(name, data)
            if lost:
                lost.clear()
                raise OSError("the answer was lost")
            return done

    one._blobs = Lossy(blobs)
    await one.append("began", b"question", 6)
    assert one.tail.running == 6 and len(blobs.objects) == 12


async def test_no_tampered_record_is_built_on(prove: bool, figure: Callable[[str, str], None]) -> None:
    rng, blobs = random.Random(5), MemoryBlobs()
    await written(blobs)
    sound = dict(blobs.objects)
    names = sorted(sound)
    tries = 60_000 if prove else 1_500
    for _ in range(tries):
        at, other = rng.randrange(len(names)), rng.randrange(len(names))
        blobs.objects = dict(sound)
        match rng.randrange(3):
            case 0:
                blobs.objects[names[at]] = tampered(rng, sound[names[at]], sound[names[other]])
            case 1:  # moved, or swapped
                blobs.objects[names[at]], blobs.objects[names[other]] = sound[names[other]], sound[names[at]]
            case 2:  # cut out: those after it do not follow
                del blobs.objects[names[at]]
        if blobs.objects == sound:
            continue
        reader = chain_of(blobs, "two", 2)
        try:
            records = await reader.news()
        except Damaged:
            continue
        assert [record.number for record in records] == list(range(at)), "what is cut off at the end is not seen"
    figure("tampered records of agents built on", f"0 of {tries:,}")


async def test_a_sound_record_out_of_its_chain_is_refused() -> None:
    """Also one with a valid seal, written by a faulty server of this cluster."""
    for change in (
        {"before": b"x" * 32},
        {"epoch": 7},
        {"number": 4},
        {"holder": "two", "epoch": 2},
    ):
        blobs = MemoryBlobs()
        one = await written(blobs)
        await one.append("began", b"q", 6)
        tail = one.tail
        fields: dict[str, Any] = {"number": tail.number + 1, "epoch": 1, "holder": "one", "before": tail.digest}
        record = ChainRecord(**fields | change, kind="ended", running=0, body=b"")
        name = f"{one._folder}/{tail.number + 1:010d}"
        blobs.objects[name] = keys(9).seal(name, msgspec.msgpack.encode(record))
        with pytest.raises(Damaged, match=f"record {tail.number + 1} "):
            await one.news()
        assert one.tail == tail, "nothing is known that was not before"


async def test_a_store_that_fails_is_reported_and_changes_nothing() -> None:
    blobs = MemoryBlobs()
    one = await written(blobs)
    blobs.dead, before = True, one.tail
    for call in (one.news(), one.append("began", b"", 6), one.forget()):
        with pytest.raises(Unavailable, match="shared store"):
            await call
    assert one.tail == before


async def test_a_long_chain_is_read_with_several_requests_at_once() -> None:
    blobs = MemoryBlobs()
    await written(blobs, turns=100)
    at_once: list[int] = []

    class Watched(Awaited):
        async def read(self, name: str) -> bytes | None:
            at_once.append(1)
            return await super().read(name)

        async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
            found = await super().read_several(names)
            at_once[-len(names) :] = [len(names)]
            return found

    reader = chain_of(blobs, "two", 2)
    reader._blobs = Watched(blobs)
    records = await reader.news()
    assert [record.number for record in records] == list(range(201))
    assert len(at_once) < 201 / 8 and max(at_once) == AHEAD
    at_once.clear()
    assert await reader.news() == [] and at_once == [1, 1], "the next record and the mark of a deletion"


async def test_what_is_read_ahead_counts_only_up_to_the_first_record_that_is_missing() -> None:
    """A writer may be at work meanwhile: a later record is read after it was made, an earlier one before."""
    blobs = MemoryBlobs()
    one = await written(blobs)

    class Late(Awaited):
        async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
            found = list(await super().read_several(names))
            for at, name in enumerate(names):
                if name.endswith("0000000005"):
                    found[at : at + 2] = [None, OSError("what lies beyond does not matter")]
            return found[: len(names)]

    two = chain_of(blobs, "two", 2)
    two._blobs = Late(blobs)
    assert [record.number for record in await two.news()] == list(range(5))
    two._blobs = Awaited(blobs)
    assert [record.number for record in await two.news()] == list(range(5, 11)) and two.tail == one.tail


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("alone", [True, False])
async def test_a_record_that_cannot_be_read_changes_nothing(number: int, alone: bool) -> None:
    """The error names it if the store works otherwise."""
    blobs = MemoryBlobs()
    await written(blobs)

    class Failing(Awaited):
        async def read(self, name: str) -> bytes | None:
            if name.endswith(f"000000000{number}"):
                raise (ObjectFailed if alone else OSError)(errno.EIO, "bad sector")
            return await super().read(name)

    two = chain_of(blobs, "two", 2)
    two._blobs, before = Failing(blobs), two.tail
    said = f"record {number} of agent ada .* bad sector" if alone else "the shared store does not work: bad sector"
    with pytest.raises(RecordUnreadable if alone else Unavailable, match=said):
        await two.news()
    assert two.tail == before


async def test_records_that_were_read_while_the_agent_was_deleted_are_read_again() -> None:
    """Records before the deletion are there or not, or others under their numbers; what follows it counts."""
    blobs = MemoryBlobs()
    one = await written(blobs)
    reader = chain_of(blobs, "two", 2)
    old = dict(blobs.objects)

    class Mixed(Awaited):
        async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
            if one.tail.kind == "ended":
                await one.append("gone")
                await one.forget()
                await one.append("made", b"again")
                return [old[names[-1]] for _ in names]
            return await super().read_several(names)

    reader._blobs = Mixed(blobs)
    assert [record.kind for record in await reader.news()] == ["gone", "made"] and reader.tail == one.tail
    damaged = f"{one._folder}/{one.tail.number:010d}"
    blobs.objects[damaged] = blobs.objects[damaged][:-1] + b"x"
    with pytest.raises(Damaged, match="was changed"):
        await chain_of(blobs, "three", 3).news()


async def test_of_a_deleted_agent_two_objects_are_left_and_a_new_one_may_follow() -> None:
    blobs = MemoryBlobs()
    one = await written(blobs)
    await one.append("gone")
    await one.forget()
    assert len(blobs.objects) == 2
    two = chain_of(blobs, "two", 2)
    assert [record.kind for record in await two.news()] == ["gone"]
    await two.append("made", b"again")
    assert [record.body for record in await one.news()] == [b"again"]


@pytest.mark.parametrize("again", [0, 1, 2])
async def test_a_server_that_has_not_read_the_end_of_a_deleted_agent_cannot_write_to_it(again: int) -> None:
    """The next number that it knows of is free again."""
    blobs = MemoryBlobs()
    one = await written(blobs)
    two = chain_of(blobs, "two", 2)
    await two.news()
    for number in range(1 + again):  # deleted, and made anew and deleted
        await one.append("began", b"question", 6)
        await one.end(6, b"answer")
        await one.append("gone")
        await one.forget()
        if number < again:
            await one.append("made", b"again")
    known = two.tail
    with pytest.raises(Moved):
        await two.hold(lambda holder: True)
    assert two.tail.kind == "gone" and two.tail == one.tail != known
    assert await two.news() == []
    await two.append("made", b"anew")
    three = chain_of(blobs, "three", 3)
    assert [record.kind for record in await three.news()] == ["gone", "made"]


def numbers(blobs: MemoryBlobs) -> list[str]:
    return sorted(name.rsplit("/", 1)[-1].lstrip("0") or "0" for name in blobs.objects)


@pytest.mark.parametrize("again", [False, True])
async def test_nothing_that_follows_a_removed_record_is_acknowledged(again: bool) -> None:
    """Its number is free again. A server that dies in between leaves a record that nobody reads."""
    for known, write in (
        (-1, lambda chain: chain.append("made", b"mine")),
        (1, lambda chain: chain.end(6, b"answer")),
        (1, lambda chain: chain.append("changed", b"more", 6)),
        (1, lambda chain: chain.append("gone")),
    ):
        blobs = MemoryBlobs()
        one, two = chain_of(blobs, "one"), chain_of(blobs, "two", 2)
        if known >= 0:
            await two.append("made", b"agent")
            await two.append("began", b"question", 6)  # it is stopped here
        else:
            await one.append("made", b"agent")
        await one.news()
        await one.hold(lambda holder: False)
        for _ in range(4):
            await one.append("changed")
        await one.append("gone")
        await one.forget()
        if again:
            await one.append("made", b"again")
        left, read = numbers(blobs), await chain_of(blobs, "three", 3).news()
        with pytest.raises(Moved):
            await write(two)
        assert numbers(blobs) == left
        delete = blobs.delete
        blobs.delete = lambda names: None  # type: ignore[method-assign, misc]
        with pytest.raises(Moved):
            await write(two)
        assert len(numbers(blobs)) == len(left) + 1
        assert await chain_of(blobs, "four", 4).news() == read
        assert await two.news() == read and two.tail == one.tail
        blobs.delete = delete  # type: ignore[method-assign]
        await two.append("gone" if again else "made")
        assert [record.number for record in await one.news()] == [two.tail.number]


@pytest.mark.parametrize("at", [2, 10])
async def test_a_deletion_of_what_cannot_be_read_is_one_for_all(at: int) -> None:
    """Also for servers that had read all before the record that was changed, or all of them."""
    blobs = MemoryBlobs()
    one = await written(blobs)
    all_read, before = chain_of(blobs, "two", 2), chain_of(blobs, "three", 3)
    await all_read.news()
    name = one._name(at)
    sound = blobs.objects[name]
    del blobs.objects[name]
    await before.news()
    blobs.objects[name] = sound[:-1] + b"x"
    fresh = chain_of(blobs, "four", 4)
    with pytest.raises(Damaged):
        await fresh.news()
    await fresh.erase()
    assert len(blobs.objects) == 2
    for chain in (all_read, before, chain_of(blobs, "five", 5)):
        with pytest.raises(Moved):
            await chain.hold(lambda holder: True)
        assert chain.tail == fresh.tail and chain.tail.kind == "gone"
    await before.append("made", b"again")
    assert [record.body for record in await fresh.news()] == [b"again"]


async def test_records_that_a_deletion_left_are_removed_by_the_next_reader() -> None:
    blobs = MemoryBlobs()
    one = await written(blobs)
    await one.append("gone")
    delete = blobs.delete

    def fails(names: object) -> None:
        raise OSError("it was killed here")

    blobs.delete = fails  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await one.forget()
    assert [record.kind for record in await chain_of(blobs, "two", 2).news()] == ["gone"]
    blobs.delete = delete  # type: ignore[method-assign]
    assert [record.kind for record in await chain_of(blobs, "three", 3).news()] == ["gone"]
    assert numbers(blobs) == ["11", "gone"]


async def test_a_late_deletion_does_not_hide_a_later_one() -> None:
    blobs = MemoryBlobs()
    one = await written(blobs)
    late, reader = chain_of(blobs, "late", 2), chain_of(blobs, "reader", 3)
    await one.append("gone")
    await late.news()  # it is about to remove the records
    await reader.news()
    await one.forget()
    await one.append("made", b"again")
    await one.append("gone")
    await one.forget()
    await late.forget()
    with pytest.raises(Moved):
        await reader.append("made", b"mine")
    assert [record.kind for record in await chain_of(blobs, "new", 4).news()] == ["gone"]


async def test_a_deleted_agent_that_was_made_anew_is_not_taken_for_deleted() -> None:
    blobs = MemoryBlobs()
    one = await written(blobs)
    await one.append("gone")
    await one.forget()
    await one.append("made", b"again")
    two = chain_of(blobs, "two", 2)
    assert [record.kind for record in await two.news()] == ["gone", "made"]
    await two.append("changed")
    assert [record.kind for record in await one.news()] == ["changed"] and await one.news() == []


async def test_a_replica_is_silent_after_a_lease_in_which_somebody_looked() -> None:
    blobs, clock = MemoryBlobs(), Time()
    one, two = (Beats(Awaited(blobs), keys(number), clock, f"{number:016x}") for number in (1, 2))
    for _ in range(20):
        await one.step()
        await two.step()
        clock.seconds += BEAT_SECONDS
    first = f"{1:016x}"
    assert two.alive(first) and one.alive(first)
    clock.seconds += 1000
    await two.step()
    assert two.alive(first), "it was this one that did not look"
    for _ in range(round(LEASE_SECONDS / BEAT_SECONDS) + 1):
        clock.seconds += BEAT_SECONDS
        await two.step()
    assert not two.alive(first)
    await one.step()
    await two.step()
    assert two.alive(first)


async def test_a_replica_that_was_never_heard_of_has_a_lease_to_be_heard() -> None:
    clock = Time()
    one = Beats(Awaited(MemoryBlobs()), keys(1), clock, f"{1:016x}")
    for _ in range(20):
        await one.step()
        clock.seconds += BEAT_SECONDS
    assert one.alive("unknown")
    for _ in range(round(LEASE_SECONDS / BEAT_SECONDS) + 1):
        await one.step()
        clock.seconds += BEAT_SECONDS
    assert not one.alive("unknown")


# ------------------------------------------------------------------------------------------------------ the simulator


def test_turns_happen_one_after_another_whatever_fails(prove: bool, figure: Callable[[str, str], None]) -> None:
    count = 1000 if prove else 60
    worlds = [simulate(seed) for seed in range(count)]
    turns = sum(turn.answered is not None for world in worlds for turn in world.history)
    broken = sum(world.kills + world.stops + world.cuts for world in worlds)
    assert turns > 5 * count and broken > 3 * count
    figure("histories of shared agents that are linearizable", f"{count} of {count}")
    figure("acknowledged turns in them, kills, stops and cuts", f"{turns:,}, {broken:,}")


def test_entries_of_journals_are_added_one_after_another_whatever_fails(
    prove: bool, figure: Callable[[str, str], None]
) -> None:
    count = 1000 if prove else 60
    worlds = [simulate(seed, run_turn=run_work) for seed in range(count)]
    entries = sum(entry.answered is not None for world in worlds for entry in world.history)
    broken = sum(world.kills + world.stops + world.cuts for world in worlds)
    assert entries > 10 * count and broken > 3 * count
    figure("histories of shared journals that are linearizable", f"{count} of {count}")
    figure("acknowledged entries in them, kills, stops and cuts", f"{entries:,}, {broken:,}")


def test_agents_are_deleted_and_made_anew_one_after_another_whatever_fails(
    prove: bool, figure: Callable[[str, str], None]
) -> None:
    count = 1000 if prove else 60
    worlds = [simulate(seed, checked=check_deletions, run_turn=run_or_delete) for seed in range(count)]
    turns = sum(turn.answered is not None for world in worlds for turn in world.history)
    deletions = sum(len(world.deleted) for world in worlds)
    assert turns > 3 * count and deletions > count
    figure("histories of shared agents with deletions that are linearizable", f"{count} of {count}")
    figure("acknowledged turns, deletions in them", f"{turns:,}, {deletions:,}")


class _Overwrites(AgentChain):
    async def _create(self, name: str, data: bytes) -> bool:
        try:
            await self._blobs.replace(name, data)
        except OSError as error:
            raise chains.unavailable(error) from error
        return True


class _TakesAnyForItsOwn(AgentChain):
    async def _create(self, name: str, data: bytes) -> bool:
        await super()._create(name, data)
        return True


class _EndsWithoutLooking(AgentChain):
    async def end(self, turn: int, body: bytes) -> None:
        await self.news()
        await self.append("ended", body)


class _TakesFreeNumbersForNew(AgentChain):
    async def _is_passed_over(self, number: int) -> bool:
        return False


class _AcknowledgesFirst(AgentChain):
    async def end(self, turn: int, body: bytes) -> None:
        try:
            await super().end(turn, body)
        except CairnError:
            return


class _KeepsItsEpoch(AgentChain):
    async def append(self, kind: chains.Kind, body: bytes = b"", running: int = 0) -> None:
        before = self.tail
        await super().append(kind, body, running)
        if before.holder != self._holder and before.number >= 0:
            self.tail = msgspec.structs.replace(self.tail, epoch=before.epoch)


class _TakesWhatRuns(AgentChain):
    async def hold(self, alive: Callable[[str], bool]) -> None:
        await self.expect_no_news()


class _ForgetsWhatItRead(AgentChain):
    async def news(self) -> list[ChainRecord]:
        records = await super().news()
        return records if self.tail.epoch < 3 else [record for record in records if record.kind != "ended"]


class _BeginsAtTheOldEnd(AgentChain):
    async def append(self, kind: chains.Kind, body: bytes = b"", running: int = 0) -> None:
        try:
            await super().append(kind, body, running)
        except Moved:
            self.tail = msgspec.structs.replace(self.tail, number=self.tail.number + 1, running=running, kind=kind)
            await super().append(kind, body, running)


async def _sees_late(replica: SimulatedReplica, turn: Acknowledged) -> None:
    await run_turn(replica, turn)
    turn.saw = tuple(replica.ended)


async def _acknowledges_what_failed(replica: SimulatedReplica, turn: Acknowledged) -> None:
    try:
        await run_turn(replica, turn)
    except CairnError:
        await Point()
        turn.answered = replica.world.now if turn in replica.world.history else None


async def _works_without_reading(replica: SimulatedReplica, work: Acknowledged) -> None:
    replica.known = True  # although a write failed
    await run_work(replica, work)


async def _tells_before_it_is_there(replica: SimulatedReplica, entry: Acknowledged) -> None:
    entry.answered = replica.world.now
    await add_entry(replica, entry)


async def _goes_on_after_a_failure(replica: SimulatedReplica, entry: Acknowledged) -> None:
    with contextlib.suppress(Unavailable):
        await add_entry(replica, entry)


async def _adds_while_another_works(replica: SimulatedReplica, entry: Acknowledged) -> None:
    try:
        await add_entry(replica, entry)
    except Moved:
        await replica.chain.news()
        await replica.chain.append("changed", entry.value, 1)


def working(add: Callable[[SimulatedReplica, Acknowledged], Any]) -> Callable[[SimulatedReplica, Acknowledged], Any]:
    """Return work whose entries are written in another way."""

    async def work(replica: SimulatedReplica, work: Acknowledged) -> None:
        await run_work(replica, work, add)

    work.__name__ = add.__name__
    return work


RARE = (130, 269)
"""Histories that show `_adds_while_another_works` and `_EndsWithoutLooking`, which few do."""


@pytest.mark.parametrize(
    "bug",
    [
        {"run_turn": _works_without_reading},
        {"run_turn": working(_tells_before_it_is_there)},
        {"run_turn": working(_goes_on_after_a_failure)},
        {"run_turn": working(_adds_while_another_works)},
        {"chains": _Overwrites},
        {"chains": _TakesAnyForItsOwn},
        {"chains": _EndsWithoutLooking},
        {"chains": _AcknowledgesFirst},
        {"chains": _KeepsItsEpoch},
        {"chains": _TakesWhatRuns},
        {"chains": _ForgetsWhatItRead},
        {"chains": _BeginsAtTheOldEnd},
        {"run_turn": _sees_late},
        {"run_turn": _acknowledges_what_failed},
        {"chains": _TakesFreeNumbersForNew, "checked": check_deletions, "run_turn": run_or_delete},
    ],
    ids=lambda bug: next(iter(bug.values())).__name__,
)
def test_a_planted_bug_is_found(bug: dict[str, Any]) -> None:
    for seed in (*range(60), *RARE):
        try:
            simulate(seed, **bug)
        except (AssertionError, Damaged):
            return
    raise AssertionError("no history showed it")
