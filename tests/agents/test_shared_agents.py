"""Agents shared by several servers go on at any of them with all changes, and never after an unknown outcome."""

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
from cairn.cluster.chain import Moved
from cairn.cluster.guard import Guarded
from cairn.cluster.shared import SharedStore
from cairn.frontend.service import Service
from cairn.types.errors import Conflict, Damaged, InvalidRequest, NotFound, Unavailable
from tests.agents.house import SALTS, House, hear
from tests.cluster.stores import MemoryBlobs, keys
from tests.files import CrashFiles
from tests.service.tiny import config


class TwoServers:
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
        turns = await house.agents.turns("default", id)
        return [(turn.number, turn.state, (turn.answer or {}).get("content") or "") for turn in turns]


@pytest.fixture
async def servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoServers]:
    blobs = MemoryBlobs()
    numbers = iter(range(1, 100))

    def open_shared(config: object, clock: object, files: object, rng: object) -> SharedStore:
        from cairn.system.posix import SystemClock

        return SharedStore(Guarded(blobs, SystemClock(), deadline=5.0), keys(next(numbers) * 1_000_000))

    monkeypatch.setattr(agents_module, "open_shared", open_shared)
    monkeypatch.setattr(beats, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(beats, "LEASE_SECONDS", 0.3)
    async with contextlib.AsyncExitStack() as stack:
        houses = []
        for number in (1, 2):
            chosen = config(folder)
            service = await Service.start(chosen, in_process=True)
            stack.push_async_callback(service.close)
            house = House(service, CrashFiles(), chosen, SALTS)
            house.files.rng = random.Random(number)
            await house.open()
            houses.append(house)
        yield TwoServers(blobs, *houses)
        for house in houses:
            await house.agents.close()


async def test_an_agent_says_the_same_wherever_it_goes_on(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="bob", messages=[{"role": "system", "content": "Be brief."}])
    alone = [await servers.say(servers.one, f"question {number}", "bob") for number in range(5)]
    await servers.one.agents.create("default", id="ada", messages=[{"role": "system", "content": "Be brief."}])
    moving = [await servers.say((servers.one, servers.two)[number % 2], f"question {number}") for number in range(5)]
    assert moving == alone
    for house in (servers.one, servers.two):
        assert [text for _, _, text in await servers.turns(house)] == alone
        assert await house.agents.context("default", "ada") == await servers.one.agents.context("default", "bob")


async def test_forks_rollbacks_pins_and_metadata_go_along(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada", metadata={"title": "old"})
    for number in range(3):
        await servers.say(one, f"question {number}")
    await servers.two.agents.refresh("default", "ada")
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
    assert await servers.say(two, "and now?", "eve") == await servers.say(one, "and now?")
    await two.agents.delete("default", "ada")
    await one.agents.refresh("default", "ada")
    with pytest.raises(NotFound):
        one.agents.get("default", "ada")
    assert len(await servers.turns(one, "eve")) == 2, "the fork has its own copy"


async def test_an_id_is_taken_on_all_servers_and_free_again_after_a_deletion(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    with pytest.raises(Conflict, match="already"):
        await servers.two.agents.create("default", id="ada")
    await servers.two.agents.create("other", id="ada")
    await servers.two.agents.refresh("default", "ada")
    await servers.two.agents.delete("default", "ada")
    await servers.one.agents.refresh("default", "ada")
    await servers.one.agents.create("default", id="ada", metadata={"n": "2"})
    await servers.two.agents.refresh("default", "ada")
    assert servers.two.agents.get("default", "ada").metadata == {"n": "2"}


async def test_turns_of_a_live_server_are_not_taken_over(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    turn = await servers.one.begin("ada", "a question")
    await servers.two.agents.refresh("default", "ada")
    with pytest.raises((Conflict, Unavailable), match="running on another server"):
        await servers.two.agents.resume("default", "ada", request=1)
    with pytest.raises(Conflict):
        await servers.two.begin("ada", "another")
    heard = await hear(turn)
    assert heard.error is None and heard.done is not None
    assert await servers.say(servers.two, "another")


async def test_a_server_that_was_taken_for_dead_cannot_acknowledge(
    servers: TwoServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await servers.one.agents.create("default", id="ada")
    turn = await servers.one.begin("ada", "a question")
    shared = servers.two.agents._agents.shared
    assert shared is not None
    monkeypatch.setattr(shared.beats, "alive", lambda holder: holder == shared.holder)
    await servers.two.agents.refresh("default", "ada")
    taken = await hear(await servers.two.agents.resume("default", "ada", request=servers.two.service.next_id()))
    assert taken.error is None and taken.done is not None
    late = await hear(turn)
    assert isinstance(late.error, Unavailable) and late.done is None, "no last event"
    assert taken.text.startswith(late.text), "what it had said was the same"
    assert await servers.turns(servers.one) == await servers.turns(servers.two) == [(1, "finished", taken.text)]
    assert await servers.say(servers.one, "go on")


async def test_without_the_store_no_turn_is_acknowledged_and_with_it_again(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    first = await servers.say(servers.one, "one")
    servers.blobs.dead = True
    with pytest.raises(Unavailable, match="shared store"):
        await servers.say(servers.one, "two")
    servers.blobs.dead = False
    await recovered(servers.one)
    turn = await servers.one.begin("ada", "three")
    servers.blobs.dead = True
    heard = await hear(turn)
    assert isinstance(heard.error, Unavailable) and heard.done is None
    servers.blobs.dead = False
    await recovered(servers.one)
    for _ in range(200):  # its end is written as soon as the store takes it
        await servers.two.agents.refresh("default", "ada")
        if servers.blobs and (await servers.turns(servers.two))[-1][1] == "interrupted":
            break
        await asyncio.sleep(0.05)
    await servers.two.agents.refresh("default", "ada")
    again = await hear(await servers.two.agents.resume("default", "ada", request=servers.two.service.next_id()))
    assert again.error is None and again.text.startswith(heard.text)
    assert [text for _, _, text in await servers.turns(servers.one)] == [first, again.text]


async def recovered(house: House) -> None:
    """Wait until the circuit breaker has tried the store again."""
    for _ in range(400):
        with contextlib.suppress(Unavailable):
            await house.agents.refresh("default", "ada")
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the store was not tried again")


async def test_a_restart_reads_what_other_servers_wrote_meanwhile(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    said = [await servers.say(servers.one, "one")]
    await servers.one.again(3)
    said.append(await servers.say(servers.two, "two"))
    said.append(await servers.say(servers.one, "three"))
    assert [text for _, _, text in await servers.turns(servers.one)] == said
    await servers.one.again(4)
    assert [text for _, _, text in await servers.turns(servers.one)] == said


async def test_the_writer_of_an_acknowledged_turn_notices_that_the_store_lost_it(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    for number in range(3):
        await servers.say(servers.one, f"question {number}")
    records = sorted(name for name in servers.blobs.objects if name.startswith("agents/"))
    for name in records[-2:]:
        del servers.blobs.objects[name]
    await servers.one.again(5)
    with pytest.raises(Damaged, match="lost turn 3"):
        await servers.one.agents.refresh("default", "ada")
    assert len(await servers.one.agents.turns("default", "ada")) == 3, "its own copy stays"


async def test_a_changed_record_is_refused_by_its_reader(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    await servers.say(servers.one, "one")
    name = max(name for name in servers.blobs.objects if name.startswith("agents/"))
    servers.blobs.objects[name] = servers.blobs.objects[name][:-1] + b"x"
    with pytest.raises(Damaged, match="was changed"):
        await servers.two.agents.refresh("default", "ada")


async def test_a_turn_with_the_same_key_is_answered_once_more(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    first = await servers.say(servers.one, "one", once="key-1")
    assert await servers.say(servers.two, "one", once="key-1") == first
    assert await servers.say(servers.one, "one", once="key-1") == first
    assert len(await servers.turns(servers.two)) == 1
    with pytest.raises(InvalidRequest, match="other messages"):
        await servers.say(servers.two, "something else", once="key-1")
    await servers.say(servers.two, "one", once="key-2")
    assert len(await servers.turns(servers.one)) == 2


async def test_an_agent_that_was_there_before_the_store_is_shared_with_its_next_turn(servers: TwoServers) -> None:
    shared, servers.one.agents._agents.shared = servers.one.agents._agents.shared, None
    await servers.one.agents.create("default", id="ada")
    first = (await servers.one.say("ada", "one")).text
    servers.one.agents._agents.shared = shared
    second = await servers.say(servers.one, "two")
    assert [text for _, _, text in await servers.turns(servers.two)] == [first, second]


async def test_no_turn_follows_a_turn_whose_end_was_refused(
    servers: TwoServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not wait for the end of the answer, and the store fails just then."""
    await servers.one.agents.create("default", id="ada")
    first = await servers.say(servers.one, "one")
    shared = servers.one.agents._agents.shared
    assert shared is not None
    turn = await servers.one.begin("ada", "two")
    chain = shared._follow("default", "ada").chain
    began, slow = asyncio.Event(), asyncio.Event()

    async def refuses(turn: int, body: bytes) -> None:
        began.set()
        await slow.wait()
        raise Unavailable("the store failed")

    monkeypatch.setattr(chain, "end", refuses)
    ending = asyncio.create_task(hear(turn))
    await began.wait()
    following = asyncio.create_task(servers.one.begin("ada", "three"))
    await asyncio.sleep(0.1)
    slow.set()
    heard = await ending
    assert isinstance(heard.error, Unavailable)
    with pytest.raises((Unavailable, Conflict)):
        await following
    for _ in range(200):
        turns = await servers.turns(servers.two)
        if turns[-1][1] == "interrupted" and len(turns) == 2:
            break
        await asyncio.sleep(0.05)
    assert [(number, state) for number, state, _ in turns] == [(1, "finished"), (2, "interrupted")]
    async with asyncio.timeout(10):
        while True:
            try:
                await servers.two.agents.rollback("default", "ada", turn=1)
                break
            except Moved:  # the first server is still writing; the message says to send the request again
                await asyncio.sleep(0.05)
    assert await servers.say(servers.one, "two, again") and (await servers.turns(servers.one))[0][2] == first
