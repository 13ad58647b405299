"""Copies of what servers share: branches go everywhere or nowhere, and no copy in use is forgotten or out of date."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import Any

import msgspec
import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.agents import shared_agents
from cairn.agents.log.records import AgentRecord, EndRecord, JournalRecord, TurnRecord
from cairn.agents.shared_agents import SharedAgents
from cairn.agents.shared_bodies import Replayed, SharedAgent, SharedEnd, SharedTurn, numbered
from cairn.agents.shared_journals import EntriesAdded, JournalMade, JournalName, SharedEntry, SharedJournals
from cairn.cluster.chain import FORGET_AT_ONCE
from cairn.cluster.guard import Guarded
from cairn.cluster.shared import SharedStore
from cairn.system.posix import SystemClock
from cairn.types.errors import Damaged, NotFound, Unavailable
from tests.agents.house import House, hear
from tests.agents.test_shared_agents import TwoServers, recovered, servers
from tests.cluster.stores import MemoryBlobs, keys

__all__ = ["servers"]
DAY = 86_400.0


def shared_of(house: House) -> SharedAgents:
    shared = house.agents._agents.shared
    assert shared is not None
    return shared


async def numbers(house: House, id: str = "ada") -> list[int]:
    await house.agents.refresh("default", id)
    return [turn.number for turn in await house.agents.turns("default", id)]


async def with_a_branch(servers: TwoServers) -> None:
    """Make an agent at server one whose turn 2 was abandoned 8 days ago for turn 3; server two knows turns 1 and 2."""
    one = servers.one
    await one.agents.create("default", id="ada", messages=[{"role": "system", "content": "Be brief."}])
    await servers.say(one, "first")
    await servers.say(one, "second, abandoned")
    assert await numbers(servers.two) == [1, 2]
    await one.agents.rollback("default", "ada", turn=1)
    await servers.say(one, "third")
    one.clock.ahead = 8 * DAY


# ---------------------------------------------------------------------------------------------------------- branches


async def test_a_branch_that_one_server_removes_is_gone_at_the_others(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await with_a_branch(servers)
    assert await numbers(two) == [1, 2, 3]
    await one.agents.tend()
    assert [turn.number for turn in await one.agents.turns("default", "ada")] == [1, 3]
    with pytest.raises(NotFound, match="no turn 2"):
        await two.agents.refresh("default", "ada")
        await two.agents.rollback("default", "ada", turn=2)
    assert await numbers(two) == [1, 3]
    said = [await servers.say(house, f"turn at {name}") for house, name in ((two, "two"), (one, "one"))]
    assert [text for _, _, text in await servers.turns(one)][2:] == said
    assert await servers.turns(one) == await servers.turns(two)
    assert await one.agents.context("default", "ada") == await two.agents.context("default", "ada")
    await two.agents.tend()
    assert not any(b"second, abandoned" in data for data in two.files.files().values()), "erased from its log, too"


async def test_only_the_server_that_has_the_agent_removes_its_branches(
    servers: TwoServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await with_a_branch(servers)
    servers.two.clock.ahead, servers.one.clock.ahead = 8 * DAY, 0.0
    assert await numbers(servers.two) == [1, 2, 3]
    objects = {*servers.blobs.objects}
    await servers.two.agents.tend()
    assert await numbers(servers.two) == [1, 2, 3] and {*servers.blobs.objects} == objects
    shared = shared_of(servers.two)
    monkeypatch.setattr(shared.beats, "alive", lambda holder: holder == shared.holder)
    await servers.two.agents.tend()
    assert await numbers(servers.two) == await numbers(servers.one) == [1, 3]


async def test_a_branch_that_another_server_has_gone_back_to_stays(servers: TwoServers) -> None:
    await with_a_branch(servers)
    await servers.two.agents.refresh("default", "ada")
    await servers.two.agents.rollback("default", "ada", turn=2)
    await servers.one.agents.tend()
    for house in (servers.one, servers.two):
        assert await numbers(house) == [1, 2, 3] and house.agents.get("default", "ada").head == 2
    assert await servers.say(servers.one, "after second")
    assert await servers.turns(servers.one) == await servers.turns(servers.two)


@pytest.mark.parametrize("clean", [True, False])
async def test_a_removed_branch_stays_removed_after_a_restart(servers: TwoServers, clean: bool) -> None:
    one = servers.one
    await with_a_branch(servers)
    await one.agents.tend()
    savings = one.agents.get("default", "ada").savings
    assert savings.requests == 3
    await one.again(7, clean=clean)
    assert await numbers(one) == [1, 3] and one.agents.get("default", "ada").savings == savings


async def test_a_power_cut_before_the_log_forgets_a_branch_loses_nothing(servers: TwoServers) -> None:
    """The chain has lost a turn that the log still has as acknowledged."""
    one = servers.one
    await with_a_branch(servers)
    agent, savings = one.agents._agents.find("default", "ada"), one.agents.get("default", "ada").savings
    assert len(await shared_of(one).prune(agent, one.agents._pending.now() - 7 * DAY)) == 1
    await one.again(7)
    assert [turn.number for turn in await one.agents.turns("default", "ada")] == [1, 2, 3]
    assert await numbers(one) == [1, 3] and one.agents.get("default", "ada").savings == savings
    assert await servers.say(one, "go on")


@pytest.mark.parametrize("landed", [True, False])
async def test_a_branch_whose_removal_has_an_unknown_outcome_is_at_all_servers_or_at_none(
    servers: TwoServers,
    monkeypatch: pytest.MonkeyPatch,
    landed: bool,
) -> None:
    one = servers.one
    await with_a_branch(servers)
    create = servers.blobs.create

    def fails(name: str, data: bytes) -> bool:
        if name.startswith("agents/"):
            if landed:
                create(name, data)
            raise OSError("no answer")
        return create(name, data)

    with monkeypatch.context() as patch:
        patch.setattr(servers.blobs, "create", fails)
        await one.agents.tend()
    expected = [1, 3] if landed else [1, 2, 3]
    await recovered(one)
    assert await numbers(one) == await numbers(servers.two) == expected
    await one.agents.tend()
    assert await numbers(one) == await numbers(servers.two) == [1, 3]
    assert await servers.say(one, "go on") and await servers.turns(one) == await servers.turns(servers.two)


async def test_a_fork_keeps_a_branch_that_another_server_removes(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await with_a_branch(servers)
    await two.agents.fork("default", "ada", turn=2, new_id="eve")
    context = await two.agents.context("default", "eve")
    await one.agents.tend()
    assert await numbers(two) == [1, 3] and await numbers(two, "eve") == [1, 2]
    await two.again(8)
    assert await numbers(two) == [1, 3] and await numbers(two, "eve") == [1, 2]
    assert await two.agents.context("default", "eve") == context
    assert await servers.say(two, "go on", "eve") and await servers.say(two, "go on")


async def test_a_turn_that_an_older_server_goes_back_to_is_there_again(servers: TwoServers) -> None:
    """One that does not know of removed branches; and a turn that never was is an error, each time."""
    one, two = servers.one, servers.two
    await with_a_branch(servers)
    await one.agents.tend()
    assert await numbers(two) == [1, 3]
    chain, agent = shared_of(one)._follow("default", "ada").chain, one.agents._agents.find("default", "ada")

    async def go_back(number: int) -> None:
        record = msgspec.structs.replace(numbered(agent), head=number)
        await chain.append("changed", msgspec.msgpack.encode(SharedAgent(record)))

    await go_back(2)
    assert await numbers(two) == [1, 2, 3] and two.agents.get("default", "ada").head == 2
    await go_back(99)
    for house in (two, two, one):
        shared_of(house)._follow("default", "ada").known &= house is two
        with pytest.raises(Damaged, match="turn 99, which it does not have"):
            await house.agents.refresh("default", "ada")


def test_a_chain_whose_turns_lack_a_turn_is_damaged() -> None:
    record = AgentRecord(id="ada", tenant="", created=1.0, used=1.0, root=0, base=0, head=0)
    turns = [SharedTurn(TurnRecord(agent=0, number=number, parent=max(0, number - 1))) for number in range(4)]

    def made(*chosen: SharedTurn, **changed: Any) -> Replayed:
        replayed = Replayed()
        replayed.made(SharedAgent(msgspec.structs.replace(record, **changed), chosen))
        return replayed

    sound = made(*turns[:2], head=1)
    sound.began(turns[2])
    sound.ended(SharedEnd(2, EndRecord(state="finished", ids=b"")))
    sound.changed(SharedAgent(record, pruned=(1, 2)))
    assert [*sound.turns] == [0]
    sound.began(turns[1])
    with pytest.raises(Damaged, match="turn 2,"):
        made(*turns[:2]).began(turns[3])
    with pytest.raises(Damaged, match="turn 3,"):
        sound.changed(SharedAgent(msgspec.structs.replace(record, head=3)))
    for chosen, changed in ((turns[1:], {}), (turns[:2], {"head": 2}), (turns[:2], {"base": 2}), (turns[::2], {})):
        with pytest.raises(Damaged, match="which it does not have"):
            made(*chosen, **changed)


async def test_an_interrupted_turn_from_before_the_store_is_shared_with_its_end(
    servers: TwoServers,
) -> None:
    one = servers.one
    shared, one.agents._agents.shared = shared_of(one), None
    await one.agents.create("default", id="ada")
    await (await one.begin("ada", "a question")).close()
    one.agents._agents.shared = shared
    await one.agents.refresh("default", "ada")
    heard = await hear(await one.agents.resume("default", "ada", request=one.service.next_id()))
    assert heard.done is not None
    assert await servers.turns(servers.two) == [(1, "finished", heard.text)]
    await one.again(9)
    assert await servers.turns(one) == [(1, "finished", heard.text)]


# ------------------------------------------------------------------------------------------------------------- in use


async def test_a_turn_outlives_what_others_look_for_and_make(
    servers: TwoServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_agents, "MOST_CHAINS", 5)
    one, shared = servers.one, shared_of(servers.one)
    await one.agents.create("default", id="ada")
    turn = await one.begin("ada", "hello")
    for number in range(20):
        await one.agents.refresh("other", f"x{number}")
        with pytest.raises(NotFound):
            await one.agents.rollback("other", f"y{number}", turn=0)
    assert [*shared._followed] == [("default", "ada")], "ids that nobody has take no room"
    for number in range(10):
        await one.agents.create("other", id=f"x{number}")
    assert len(shared._followed) == 5
    heard = await hear(turn)
    assert heard.error is None and heard.done is not None
    for number in range(10):
        await one.agents.refresh("other", f"x{number}")
    assert ("default", "ada") not in shared._followed, "it is idle now"
    assert await servers.say(one, "go on")


async def test_a_look_up_visits_few_chains_however_many_there_are(
    servers: TwoServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched(OrderedDict[Any, Any]):
        def items(self) -> Any:
            raise AssertionError("all chains were visited")

    monkeypatch.setattr(shared_agents, "MOST_CHAINS", 50)
    shared = shared_of(servers.one)
    shared._followed = Watched()
    looked: list[object] = []
    needs = shared._needs
    monkeypatch.setattr(shared, "_needs", lambda name: looked.append(name) or needs(name))
    held = [shared._follow("default", f"held{number}") for number in range(30)]
    for followed in held:
        await followed.lock.acquire()
    for number in range(200):
        looked.clear()
        shared._follow("default", f"a{number}")
        assert len(looked) <= FORGET_AT_ONCE and len(shared._followed) <= 50 + len(held)
    assert all(("default", f"held{number}") in shared._followed for number in range(30))
    for followed in held:
        followed.lock.release()
    for number in range(200):
        shared._follow("default", f"b{number}")
    assert len(shared._followed) == 50 and not any(name.startswith("held") for _, name in shared._followed)


class Gate:
    """Holds up the next look of a server at an agent's chain."""

    def __init__(self, servers: TwoServers) -> None:
        self.waiting, self.opened = threading.Event(), threading.Event()
        self._blobs, self._read = servers.blobs, servers.blobs.read
        servers.blobs.read = self.read  # type: ignore[method-assign]

    def read(self, name: str) -> bytes | None:
        if name.startswith("agents/") and not self.waiting.is_set():
            self.waiting.set()
            self.opened.wait(4)
        return self._read(name)

    async def reached(self) -> None:
        while not self.waiting.is_set():
            await asyncio.sleep(0.005)


async def test_a_turn_that_begins_while_news_are_read_is_not_built_on_the_old_head(
    servers: TwoServers,
) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    first = await servers.say(one, "first")
    await two.agents.refresh("default", "ada")
    gate = Gate(servers)
    looking = asyncio.create_task(one.agents.refresh("default", "ada"))
    await gate.reached()
    second = await servers.say(two, "second")
    beginning = asyncio.create_task(one.begin("ada", "built on the first"))
    while not one.agents._agents.find("default", "ada").busy:
        await asyncio.sleep(0)
    gate.opened.set()
    await looking
    with pytest.raises(Unavailable):
        await beginning
    third = await servers.say(one, "third")
    for house in (one, two):
        assert [text for _, _, text in await servers.turns(house)] == [first, second, third]
    assert await one.agents.context("default", "ada") == await two.agents.context("default", "ada")


async def test_a_change_that_news_of_others_overtake_is_refused_and_not_lost(
    servers: TwoServers,
) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await two.agents.refresh("default", "ada")
    gate = Gate(servers)
    looking = asyncio.create_task(one.agents.refresh("default", "ada"))
    await gate.reached()
    await two.agents.describe("default", "ada", {"by": "two"})
    changing = asyncio.create_task(one.agents.describe("default", "ada", {"by": "one"}))
    while one.agents.get("default", "ada").metadata != {"by": "one"}:
        await asyncio.sleep(0)
    gate.opened.set()
    await looking
    with pytest.raises(Unavailable):
        await changing
    for house in (one, two):
        await house.agents.refresh("default", "ada")
        assert house.agents.get("default", "ada").metadata == {"by": "two"}


# ---------------------------------------------------------------------------------------------------------- journals


async def test_a_listed_journal_that_cannot_be_read_hides_no_other() -> None:
    class Refusing(MemoryBlobs):
        def read(self, name: str) -> bytes | None:
            if name == bad:
                raise OSError("bad sector")
            return super().read(name)

    blobs = Refusing()
    bad = ""
    one, two = (
        SharedJournals(SharedStore(Guarded(blobs, SystemClock()), keys(number * 1000)), str(number), lambda _: True)
        for number in (1, 2)
    )
    names = [JournalName("team", "default", id) for id in ("red", "blue")]
    for name in names:
        head = JournalRecord(room="team", tenant="default", id=name.id, created=1.0, body=b"")
        await one.made(name, JournalMade(head))
    bad = one._list_name(names[0])
    assert await two.listed("team", "default") == {"blue": 1.0}


class Body(msgspec.Struct):
    """What a team of these tests holds."""

    text: str = ""


async def test_a_team_whose_record_cannot_be_read_keeps_no_other_from_being_listed(servers: TwoServers) -> None:
    one, two = servers.one.agents.journals, servers.two.agents.journals
    ids = [f"team{number}" for number in range(20)]
    for id in ids:
        await one.create("team", "default", id, Body())
    assert one.shared is not None
    bad = one.shared._follow(JournalName("team", "default", ids[0])).chain._name(0)

    def fails(call: str, name: str) -> None:
        if call == "read" and name == bad:
            raise OSError("bad sector")

    servers.blobs.before = fails
    await two.refresh_listed("team", "default", ids)
    assert sorted(journal.id for journal in two.of("team", "default")) == sorted(ids[1:])
    with pytest.raises(Unavailable, match=r"record 0 of team team0 in the shared store cannot be read: .* bad sector"):
        await two.refresh("team", "default", ids[0])


async def test_a_note_of_a_deleted_journal_is_not_in_the_next_of_its_name() -> None:
    blobs = MemoryBlobs()
    one, two = (
        SharedJournals(SharedStore(Guarded(blobs, SystemClock()), keys(number * 1000)), str(number), lambda _: True)
        for number in (1, 2)
    )
    name = JournalName("team", "default", "red")

    def made(created: float) -> JournalMade:
        return JournalMade(JournalRecord(room="team", tenant="default", id="red", created=created, body=b""))

    await one.made(name, made(1.0))
    one.note(name, SharedEntry(3, b"of the first"))
    await one.gone(name)
    await one.made(name, made(2.0))
    await one.add(name, SharedEntry(1, b"of the second"), lambda: made(2.0))
    changes = (await two.news(name, here=False)).changes
    assert changes[-1:] == [EntriesAdded((SharedEntry(1, b"of the second"),))]
