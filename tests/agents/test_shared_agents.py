"""Agents that several servers share go on at any of them, with all that was changed, and nothing that is not known."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.agents import agents as agents_module
from cairn.cluster import beats
from cairn.cluster.guard import Guarded
from cairn.cluster.shared import SharedStore
from cairn.frontend.service import Service
from cairn.types.errors import Conflict, Damaged, InvalidRequest, NotFound, Unavailable
from tests.agents.house import SALTS, House, hear
from tests.cluster.stores import MemoryBlobs, keys
from tests.files import CrashFiles
from tests.service.tiny import config


class Rooms:
    """Two servers that share a store."""

    def __init__(self, blobs: MemoryBlobs, one: House, two: House) -> None:
        self.blobs, self.one, self.two = blobs, one, two

    async def say(self, house: House, text: str, id: str = "ada", **more: object) -> str:
        """Run a turn as a request to that server does."""
        await house.agents.refresh("default", id)
        heard = await house.say(id, text, **more)
        assert heard.error is None, heard.error
        return heard.text

    async def turns(self, house: House, id: str = "ada") -> list[tuple[int, str, str]]:
        await house.agents.refresh("default", id)
        found = await house.agents.turns("default", id)
        return [(turn.number, turn.state, (turn.answer or {}).get("content") or "") for turn in found]


@pytest.fixture
async def rooms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rooms]:
    blobs = MemoryBlobs()
    numbers = iter(range(1, 100))

    def open_shared(config: object, clock: object, files: object, rng: object) -> SharedStore:
        from cairn.system.posix import SystemClock

        return SharedStore(Guarded(blobs, SystemClock(), deadline=5.0), keys(next(numbers) * 1_000_000))

    monkeypatch.setattr(agents_module, "open_shared", open_shared)
    monkeypatch.setattr(beats, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(beats, "LEASE_SECONDS", 0.3)
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in (1, 2):
            chosen = config(folder)
            service = await Service.start(chosen, in_process=True)
            stack.push_async_callback(service.close)
            house = House(service, CrashFiles(), chosen, SALTS)
            house.files.rng = random.Random(number)
            await house.open()
            found.append(house)
        yield Rooms(blobs, *found)
        for house in found:
            await house.agents.close()


async def test_an_agent_says_the_same_wherever_it_goes_on(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="bob", messages=[{"role": "system", "content": "Be brief."}])
    alone = [await rooms.say(rooms.one, f"question {number}", "bob") for number in range(5)]
    await rooms.one.agents.create("default", id="ada", messages=[{"role": "system", "content": "Be brief."}])
    moving = [await rooms.say((rooms.one, rooms.two)[number % 2], f"question {number}") for number in range(5)]
    assert moving == alone
    for house in (rooms.one, rooms.two):
        assert [text for _, _, text in await rooms.turns(house)] == alone
        assert await house.agents.context("default", "ada") == await rooms.one.agents.context("default", "bob")


async def test_forks_rollbacks_pins_and_metadata_go_along(rooms: Rooms) -> None:
    one, two = rooms.one, rooms.two
    await one.agents.create("default", id="ada", metadata={"title": "old"})
    for number in range(3):
        await rooms.say(one, f"question {number}")
    await rooms.two.agents.refresh("default", "ada")
    await two.agents.rollback("default", "ada", turn=1)
    await two.agents.describe("default", "ada", {"title": "new"})
    await two.agents.pin("default", "ada", True)
    await one.agents.refresh("default", "ada")
    info = one.agents.get("default", "ada")
    assert (info.head, info.metadata, info.pinned) == (1, {"title": "new"}, True)
    await one.agents.fork("default", "ada", new_id="eve")
    await two.agents.refresh("default", "eve")
    fork = two.agents.get("default", "eve")
    assert (fork.head, fork.origin, fork.origin_turn, fork.pinned) == (1, "ada", 1, False)
    assert await rooms.say(two, "and now?", "eve") == await rooms.say(one, "and now?")
    await two.agents.delete("default", "ada")
    await one.agents.refresh("default", "ada")
    with pytest.raises(NotFound):
        one.agents.get("default", "ada")
    assert len(await rooms.turns(one, "eve")) == 2, "the fork has its own copy"


async def test_an_id_is_taken_on_all_servers_and_free_again_after_a_deletion(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    with pytest.raises(Conflict, match="already"):
        await rooms.two.agents.create("default", id="ada")
    await rooms.two.agents.create("other", id="ada")
    await rooms.two.agents.refresh("default", "ada")
    await rooms.two.agents.delete("default", "ada")
    await rooms.one.agents.refresh("default", "ada")
    await rooms.one.agents.create("default", id="ada", metadata={"n": "2"})
    await rooms.two.agents.refresh("default", "ada")
    assert rooms.two.agents.get("default", "ada").metadata == {"n": "2"}


async def test_what_runs_on_a_server_that_is_alive_is_not_taken_over(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    turn = await rooms.one.begin("ada", "a question")
    await rooms.two.agents.refresh("default", "ada")
    with pytest.raises((Conflict, Unavailable), match="running on another server"):
        await rooms.two.agents.resume("default", "ada", request=1)
    with pytest.raises(Conflict):
        await rooms.two.begin("ada", "another")
    heard = await hear(turn)
    assert heard.error is None and heard.done is not None
    assert await rooms.say(rooms.two, "another")


async def test_a_server_that_was_taken_for_dead_cannot_acknowledge(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rooms.one.agents.create("default", id="ada")
    turn = await rooms.one.begin("ada", "a question")
    shared = rooms.two.agents._agents.shared
    assert shared is not None
    monkeypatch.setattr(shared.beats, "alive", lambda holder: holder == shared.holder)
    await rooms.two.agents.refresh("default", "ada")
    taken = await hear(await rooms.two.agents.resume("default", "ada", request=rooms.two.service.next_id()))
    assert taken.error is None and taken.done is not None
    late = await hear(turn)
    assert isinstance(late.error, Unavailable) and late.done is None, "no last event"
    assert taken.text.startswith(late.text), "what it had said was the same"
    assert await rooms.turns(rooms.one) == await rooms.turns(rooms.two) == [(1, "finished", taken.text)]
    assert await rooms.say(rooms.one, "go on")


async def test_without_the_store_no_turn_is_acknowledged_and_with_it_again(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    first = await rooms.say(rooms.one, "one")
    rooms.blobs.dead = True
    with pytest.raises(Unavailable, match="shared store"):
        await rooms.say(rooms.one, "two")
    rooms.blobs.dead = False
    await recovered(rooms.one)
    turn = await rooms.one.begin("ada", "three")
    rooms.blobs.dead = True
    heard = await hear(turn)
    assert isinstance(heard.error, Unavailable) and heard.done is None
    rooms.blobs.dead = False
    await recovered(rooms.one)
    for _ in range(200):  # its end is written as soon as the store takes it
        await rooms.two.agents.refresh("default", "ada")
        if rooms.blobs and (await rooms.turns(rooms.two))[-1][1] == "interrupted":
            break
        await asyncio.sleep(0.05)
    await rooms.two.agents.refresh("default", "ada")
    again = await hear(await rooms.two.agents.resume("default", "ada", request=rooms.two.service.next_id()))
    assert again.error is None and again.text.startswith(heard.text)
    assert [text for _, _, text in await rooms.turns(rooms.one)] == [first, again.text]


async def recovered(house: House) -> None:
    """Wait until the breaker has tried the store again."""
    for _ in range(400):
        with contextlib.suppress(Unavailable):
            await house.agents.refresh("default", "ada")
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the store was not tried again")


async def test_a_restart_reads_what_other_servers_wrote_meanwhile(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    said = [await rooms.say(rooms.one, "one")]
    await rooms.one.again(3)
    said.append(await rooms.say(rooms.two, "two"))
    said.append(await rooms.say(rooms.one, "three"))
    assert [text for _, _, text in await rooms.turns(rooms.one)] == said
    await rooms.one.again(4)
    assert [text for _, _, text in await rooms.turns(rooms.one)] == said


async def test_a_store_that_lost_an_acknowledged_turn_is_noticed_by_who_wrote_it(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    for number in range(3):
        await rooms.say(rooms.one, f"question {number}")
    records = sorted(name for name in rooms.blobs.objects if name.startswith("agents/"))
    for name in records[-2:]:
        del rooms.blobs.objects[name]
    await rooms.one.again(5)
    with pytest.raises(Damaged, match="lost turn 3"):
        await rooms.one.agents.refresh("default", "ada")
    assert len(await rooms.one.agents.turns("default", "ada")) == 3, "its own copy stays"


async def test_a_changed_record_is_refused_by_who_reads_it(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    await rooms.say(rooms.one, "one")
    name = max(name for name in rooms.blobs.objects if name.startswith("agents/"))
    rooms.blobs.objects[name] = rooms.blobs.objects[name][:-1] + b"x"
    with pytest.raises(Damaged, match="was changed"):
        await rooms.two.agents.refresh("default", "ada")


async def test_a_turn_with_the_same_key_is_answered_once_more(rooms: Rooms) -> None:
    await rooms.one.agents.create("default", id="ada")
    first = await rooms.say(rooms.one, "one", once="key-1")
    assert await rooms.say(rooms.two, "one", once="key-1") == first
    assert await rooms.say(rooms.one, "one", once="key-1") == first
    assert len(await rooms.turns(rooms.two)) == 1
    with pytest.raises(InvalidRequest, match="other messages"):
        await rooms.say(rooms.two, "something else", once="key-1")
    await rooms.say(rooms.two, "one", once="key-2")
    assert len(await rooms.turns(rooms.one)) == 2


async def test_an_agent_that_was_there_before_the_store_is_shared_with_its_next_turn(rooms: Rooms) -> None:
    shared, rooms.one.agents._agents.shared = rooms.one.agents._agents.shared, None
    await rooms.one.agents.create("default", id="ada")
    first = (await rooms.one.say("ada", "one")).text
    rooms.one.agents._agents.shared = shared
    second = await rooms.say(rooms.one, "two")
    assert [text for _, _, text in await rooms.turns(rooms.two)] == [first, second]


async def test_no_turn_follows_a_turn_whose_end_was_refused(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not wait for the end of the answer, and a store that fails just then."""
    await rooms.one.agents.create("default", id="ada")
    first = await rooms.say(rooms.one, "one")
    shared = rooms.one.agents._agents.shared
    assert shared is not None
    turn = await rooms.one.begin("ada", "two")
    chain = shared._follow("default", "ada").chain
    began, slow = asyncio.Event(), asyncio.Event()

    async def refuses(turn: int, body: bytes) -> None:
        began.set()
        await slow.wait()
        raise Unavailable("the store failed")

    monkeypatch.setattr(chain, "end", refuses)
    ending = asyncio.create_task(hear(turn))
    await began.wait()
    following = asyncio.create_task(rooms.one.begin("ada", "three"))
    await asyncio.sleep(0.1)
    slow.set()
    heard = await ending
    assert isinstance(heard.error, Unavailable)
    with pytest.raises((Unavailable, Conflict)):
        await following
    for _ in range(200):
        found = await rooms.turns(rooms.two)
        if found[-1][1] == "interrupted" and len(found) == 2:
            break
        await asyncio.sleep(0.05)
    assert [(number, state) for number, state, _ in found] == [(1, "finished"), (2, "interrupted")]
    await rooms.two.agents.rollback("default", "ada", turn=1)
    assert await rooms.say(rooms.one, "two, again") and (await rooms.turns(rooms.one))[0][2] == first
