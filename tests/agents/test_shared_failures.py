"""Shared agents and journals where clocks are set, versions differ, and changes, ends and deletions overlap."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.agents.shared_agents import SharedAgents
from cairn.api.chat.attribution import AgentAttribution
from cairn.api.http.call import HTTPCall
from cairn.cluster.chain import AgentChain, Kind, Moved
from cairn.frontend.request_options import SamplingOptions
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity
from cairn.types.errors import CairnError, Conflict, Damaged, NotFound, Overloaded, Unavailable
from cairn.types.outputs import Done, FinishReason, Usage
from cairn.types.stats import CacheReport
from tests.agents.house import FOLDER, House, hear
from tests.agents.test_shared_agents import TwoServers, recovered, servers
from tests.files import Fault

__all__ = ["servers"]

DAY = 86_400.0


def shared_by(house: House) -> SharedAgents:
    shared = house.agents._agents.shared
    assert shared is not None
    return shared


def heal(servers: TwoServers) -> None:
    """Let the store work again, and be tried at once."""
    servers.blobs.dead = False
    for house in (servers.one, servers.two):
        shared_by(house)._store.blobs._breaker.worked()


class Body(msgspec.Struct):
    text: str = ""


# ------------------------------------------------------------------------------------------------------------ clocks


async def test_an_agent_is_the_same_after_the_clock_was_set(servers: TwoServers) -> None:
    one, clock = servers.one, servers.one.clock
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    for step in (60, -3600):
        real = clock.time_ns
        clock.time_ns = lambda real=real, step=step: real() + step * 10**9  # type: ignore[method-assign, misc]
        await one.agents.tend()
        servers.blobs.dead = True
        with contextlib.suppress(Unavailable):
            await one.agents.describe("default", "ada", {"a": "b"})
        heal(servers)
        await servers.say(one, f"after {step}")
    assert await servers.turns(servers.two) == await servers.turns(one)


async def test_an_agent_is_the_same_after_a_restart_with_a_clock_behind_the_writers(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    two.agents._pending._epoch += 120.0
    await two.agents.create("default", id="ada")
    first = await servers.say(two, "first")
    assert await servers.turns(one) == [(1, "finished", first)]
    await one.again(clean=True)
    await servers.say(one, "second")
    assert await servers.turns(two) == await servers.turns(one)


async def test_an_agent_with_a_time_to_live_stays_while_another_server_uses_it(servers: TwoServers) -> None:
    """Also where that server's clock is far behind."""
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada", ttl=3600.0)
    await two.agents.refresh("default", "ada")
    two.clock.ahead = 2 * 3600.0
    await servers.say(one, "first")
    with pytest.raises(Conflict, match="already"):
        await two.agents.create("default", id="ada")
    await two.agents.tend()
    assert two.agents.get("default", "ada").turns == 1, "it was used an hour ago at most"
    assert len(await servers.turns(one)) == 1
    await two.again(clean=True)
    await two.agents.tend()
    assert two.agents.get("default", "ada").turns == 1, "the disk knows that, too"
    two.clock.ahead += 2 * 3600.0
    await two.agents.tend()
    await one.agents.refresh("default", "ada")
    with pytest.raises(NotFound):
        one.agents.get("default", "ada")


async def test_an_agent_of_a_server_with_another_clock_is_not_expired_when_it_is_first_read(
    servers: TwoServers,
) -> None:
    one, two = servers.one, servers.two
    two.agents._pending._epoch += DAY
    await one.agents.create("default", id="ada", ttl=3600.0)
    await servers.say(one, "first")
    assert len(await servers.turns(two)) == 1
    await two.agents.tend()
    await servers.say(two, "second")
    assert len(await servers.turns(one)) == 2


# ------------------------------------------------------------------------------------------------- records of others


@contextlib.contextmanager
def newer_version(chain: AgentChain, kind: Kind, **fields: object) -> Any:
    """Write records of a kind as a newer version of Cairn does, whose fields have other types."""
    append = chain.append

    async def newer(name: Kind, body: bytes = b"", running: int = 0) -> None:
        if name == kind:
            body = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), **fields})
        await append(name, body, running)

    chain.append = newer  # type: ignore[method-assign]
    try:
        yield
    finally:
        chain.append = append  # type: ignore[method-assign]


async def outcome(work: Awaitable[object]) -> str:
    try:
        await work
    except CairnError as error:
        return type(error).__name__
    return "ok"


async def test_no_turn_follows_a_turn_that_cannot_be_decoded(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    await two.agents.refresh("default", "ada")
    with newer_version(shared_by(one)._follow("default", "ada").chain, "began", own="newer"):
        await servers.say(one, "second")
    with pytest.raises(Damaged, match=r"record 3 of agent ada .* cannot be decoded"):
        await two.agents.refresh("default", "ada")
    assert [await outcome(two.agents.refresh("default", "ada")) for _ in range(3)] == ["Damaged"] * 3
    for change in (
        lambda: two.begin("ada", "third"),
        lambda: two.agents.describe("default", "ada", {"a": "b"}),
        lambda: two.agents.rollback("default", "ada", turn=0),
        lambda: two.agents.pin("default", "ada", True),
    ):
        assert await outcome(change()) == "Damaged"
    assert [turn.number for turn in await two.agents.turns("default", "ada")] == [1], "its own copy stays readable"
    await servers.say(one, "third")
    assert [number for number, *_ in await servers.turns(one)] == [1, 2, 3]


async def test_no_entry_follows_an_entry_that_cannot_be_decoded(servers: TwoServers) -> None:
    one, two = servers.one.agents.journals, servers.two.agents.journals
    journal = await one.create("team", "default", "t", Body("head"))
    await one.append(journal, Body("first"))
    await two.refresh("team", "default", "t")
    assert one.shared is not None
    with newer_version(one.shared._follow(journal.name).chain, "changed", type="added-2"):
        await one.append(journal, Body("second"))
    with pytest.raises(Damaged, match=r"record 2 of team t .* cannot be decoded"):
        await two.refresh("team", "default", "t")
    assert [await outcome(two.refresh("team", "default", "t")) for _ in range(3)] == ["Damaged"] * 3
    mine = two.find("team", "default", "t")
    assert [entry.number for entry in mine.entries] == [1]
    with pytest.raises(Unavailable):
        await two.append(mine, Body("third"))
    assert (await one.append(journal, Body("third"))).number == 3


async def test_what_the_disk_refused_of_others_is_written_later(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    await two.agents.refresh("default", "ada")
    await servers.say(one, "second")
    await one.agents.create("default", id="bob")
    await servers.say(one, "first", "bob")
    two.files.fail(Fault(two.files.calls, errno.ENOSPC, sticky=True))
    for id in ("ada", "bob"):
        with pytest.raises(Unavailable):
            await two.agents.refresh("default", id)
    two.files.heal()
    for id in ("ada", "bob"):
        await two.agents.refresh("default", id)
    await two.agents.tend()
    servers.blobs.dead = True
    await two.again(3)
    assert [turn.number for turn in await two.agents.turns("default", "ada")] == [1, 2]
    assert [turn.number for turn in await two.agents.turns("default", "bob")] == [1]
    heal(servers)


# ------------------------------------------------------------------------------------- changes while a turn runs


@pytest.mark.parametrize("change", ["describe", "pin"])
async def test_a_change_as_a_turn_ends_costs_nothing(servers: TwoServers, change: str) -> None:
    """Its look at the store is under way when the turn ends."""
    agents = servers.one.agents
    await agents.create("default", id="ada")
    turn = await servers.one.begin("ada", "hello")
    looks, ended = threading.Event(), threading.Event()
    shared_by(servers.one)._store.blobs._deadline = 60.0

    def before(call: str, name: str) -> None:
        if call == "read" and name.startswith("agents/") and not looks.is_set():
            looks.set()
            ended.wait(60)

    servers.blobs.before = before
    changing = asyncio.create_task(
        agents.describe("default", "ada", {"n": "1"}) if change == "describe" else agents.pin("default", "ada", True)
    )
    while not looks.is_set():
        await asyncio.sleep(0.005)
    hearing = asyncio.create_task(hear(turn))
    while turn.agent.running is not None:
        await asyncio.sleep(0.005)
    ended.set()
    await changing
    heard = await hearing
    assert heard.error is None and heard.done is not None
    assert await servers.turns(servers.two) == [(1, "finished", heard.text)]
    info = servers.two.agents.get("default", "ada")
    assert (info.metadata, info.pinned) == (({"n": "1"}, False) if change == "describe" else ({}, True))
    await servers.say(servers.two, "go on")


async def test_a_change_of_unknown_outcome_costs_the_running_turn_nothing(servers: TwoServers) -> None:
    agents, blobs = servers.one.agents, servers.blobs
    await agents.create("default", id="ada")
    turn = await servers.one.begin("ada", "hello")
    real = blobs.create

    def landed(name: str, data: bytes) -> bool:
        real(name, data)
        raise OSError("timed out, but it is there")

    blobs.create = landed  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await agents.describe("default", "ada", {"n": "1"})
    blobs.create = real  # type: ignore[method-assign]
    heal(servers)
    heard = await hear(turn)
    assert heard.error is None and heard.done is not None
    assert await servers.turns(servers.two) == [(1, "finished", heard.text)]


async def test_a_server_that_lost_its_turn_changes_nothing_before_it_has_read_the_rest(servers: TwoServers) -> None:
    """It was stopped, and still has the turn that others took over, finished and went on from."""
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    turn = await one.begin("ada", "first")
    shared_by(two).beats.alive = lambda holder: False  # type: ignore[method-assign]
    await two.agents.refresh("default", "ada")
    assert (await hear(await two.agents.resume("default", "ada", request=two.service.next_id()))).error is None
    await servers.say(two, "second")
    for number in range(3):
        with contextlib.suppress(Unavailable, Conflict):
            await one.agents.describe("default", "ada", {"n": str(number)})
    assert isinstance((await hear(turn)).error, Unavailable)
    await two.agents.refresh("default", "ada")
    assert two.agents.get("default", "ada").head == 2, "no acknowledged turn is abandoned"
    await servers.say(one, "third")
    assert [number for number, *_ in await servers.turns(two)] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------- unknown outcomes


async def until_free(servers: TwoServers, house: House) -> None:
    """Wait until an agent's chain says that nothing runs."""
    for _ in range(600):
        heal(servers)
        await house.agents.refresh("default", "ada")
        if not shared_by(house)._follow("default", "ada").chain.tail.running:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the chain says that a turn runs, although none does")


@contextlib.contextmanager
def failing_after_landing(servers: TwoServers) -> Any:
    """Let the next record of an agent land without an answer, and the store be away from then on."""
    real = servers.blobs.create

    def landed(name: str, data: bytes) -> bool:
        made = real(name, data)
        if name.startswith("agents/"):
            servers.blobs.dead = True
            raise OSError("timed out, but it is there")
        return made

    servers.blobs.create = landed  # type: ignore[method-assign]
    try:
        yield
    finally:
        servers.blobs.create = real  # type: ignore[method-assign]


async def test_a_turn_of_unknown_beginning_is_ended_though_the_agent_was_read_again(servers: TwoServers) -> None:
    await servers.one.agents.create("default", id="ada")
    await servers.say(servers.one, "first")
    with failing_after_landing(servers), pytest.raises(Unavailable):
        await servers.one.begin("ada", "second")
    await asyncio.sleep(0.3)  # the first attempt to end it has failed
    heal(servers)
    await servers.one.agents.refresh("default", "ada")
    await until_free(servers, servers.two)
    await servers.two.agents.rollback("default", "ada", turn=1)
    await servers.say(servers.two, "third")


async def interrupted(servers: TwoServers) -> str:
    """Make an agent whose turn was interrupted after some tokens; return their text."""
    await servers.one.agents.create("default", id="ada")
    long = SamplingOptions(temperature=0, max_tokens=1900, ignore_eos=True)
    heard = await hear(await servers.one.begin("ada", "hello", options=long), stop_after=3)
    await until_free(servers, servers.two)
    return heard.text


async def test_a_resumption_of_unknown_outcome_is_ended_with_the_answer_so_far(servers: TwoServers) -> None:
    said = await interrupted(servers)
    with failing_after_landing(servers), pytest.raises(Unavailable):
        await servers.one.agents.resume("default", "ada", request=servers.one.service.next_id())
    heal(servers)
    await until_free(servers, servers.two)
    (turn,) = await servers.two.agents.turns("default", "ada")
    assert turn.state == "interrupted" and turn.completion_tokens >= 3, "nothing is computed twice"
    heard = await hear(await servers.two.agents.resume("default", "ada", request=servers.two.service.next_id()))
    assert heard.error is None and heard.text.startswith(said)


async def test_a_resumption_that_the_engine_refuses_does_not_keep_other_servers_waiting(
    servers: TwoServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await interrupted(servers)

    def full(*args: object, **more: object) -> None:
        raise Overloaded("there is no room")

    with monkeypatch.context() as patched:
        patched.setattr(servers.one.service, "generate", full)
        with pytest.raises(Overloaded):
            await servers.one.agents.resume("default", "ada", request=servers.one.service.next_id())
    await until_free(servers, servers.two)
    heard = await hear(await servers.two.agents.resume("default", "ada", request=servers.two.service.next_id()))
    assert heard.error is None and heard.done is not None


async def test_nothing_is_resumed_from_a_copy_that_may_be_out_of_date(servers: TwoServers) -> None:
    await interrupted(servers)
    await servers.one.agents.refresh("default", "ada")
    followed = shared_by(servers.one)._follow("default", "ada")
    followed.known = False
    with pytest.raises(Unavailable, match="read again"):
        await shared_by(servers.one).resumed(servers.one.agents._find("default", "ada"))


async def test_the_end_of_a_turn_is_written_though_reading_the_agent_had_failed(servers: TwoServers) -> None:
    """What was read last of the chain stays known: it says where the turn began."""
    await servers.one.agents.create("default", id="ada")
    turn = await servers.one.begin("ada", "hello")
    servers.blobs.dead = True
    with pytest.raises(Unavailable):
        await servers.one.agents.describe("default", "ada", {"n": "1"})
    with pytest.raises(Unavailable):
        await servers.one.agents.refresh("default", "ada")
    assert isinstance((await hear(turn)).error, Unavailable)
    heal(servers)
    await until_free(servers, servers.two)


# --------------------------------------------------------------------------------------------------------- deletions


async def test_a_turn_of_an_agent_that_another_server_deleted_is_not_acknowledged(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    turn = await one.begin("ada", "hello")  # one is stopped here
    shared_by(two).beats.alive = lambda holder: False  # type: ignore[method-assign]
    await two.agents.refresh("default", "ada")
    for number in range(3):
        await two.agents.describe("default", "ada", {"n": str(number)})
    await two.agents.delete("default", "ada")
    heard = await hear(turn)  # and goes on
    assert isinstance(heard.error, Unavailable) and heard.done is None
    for house in (one, two):
        await house.agents.refresh("default", "ada")
        with pytest.raises(NotFound):
            house.agents.get("default", "ada")
    assert len([name for name in servers.blobs.objects if name.startswith("agents/")]) == 2
    for house, other in ((one, two), (two, one)):
        await house.agents.create("default", id="ada")
        said = await servers.say(other, "a new one")
        assert await servers.turns(house) == [(1, "finished", said)]
        await house.agents.delete("default", "ada")


async def test_an_entry_of_a_journal_that_another_server_deleted_is_not_acknowledged(servers: TwoServers) -> None:
    one, two = servers.one.agents.journals, servers.two.agents.journals
    journal = await one.create("team", "default", "t", Body("head"))
    assert two.shared is not None
    async with one.working(journal):
        await one.append(journal, Body("first"))  # one is stopped here
        two.shared._alive = lambda holder: False
        await two.refresh("team", "default", "t")
        other = two.find("team", "default", "t")
        async with two.working(other):
            for number in range(3):
                await two.append(other, Body(f"{number}"))
        await two.remove(other)
        with pytest.raises(Unavailable):  # and goes on
            await one.append(journal, Body("second"))
    for journals in (one, two):
        await journals.refresh("team", "default", "t")
        with pytest.raises(NotFound):
            journals.find("team", "default", "t")
    made = await one.create("team", "default", "t", Body("anew"))
    assert (await one.append(made, Body("first"))).number == 1


async def test_a_deletion_that_failed_in_the_middle_is_completed_by_the_next_reader(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    journal = await one.agents.journals.create("team", "default", "t", Body("head"))
    await one.agents.journals.append(journal, Body("first"))
    for house in (one, two):
        await house.agents.refresh("default", "ada")
        await house.agents.journals.refresh("team", "default", "t")
    kept = f"{replays_of(one)}/x"
    servers.blobs.objects[kept] = b"tokens"

    def before(call: str, name: str) -> None:
        if call == "create" and name.endswith("/gone"):
            raise OSError("the store failed")

    servers.blobs.before = before
    with pytest.raises(Unavailable):
        await one.agents.delete("default", "ada")
    with pytest.raises(Unavailable):
        await one.agents.journals.remove(journal)
    servers.blobs.before = lambda call, name: None
    heal(servers)
    for house in (one, two):
        await house.agents.refresh("default", "ada")
        await house.agents.journals.refresh("team", "default", "t")
        with pytest.raises(NotFound):
            house.agents.get("default", "ada")
        with pytest.raises(NotFound):
            house.agents.journals.find("team", "default", "t")
    left = [name for name in servers.blobs.objects if not name.startswith("beats/")]
    assert sorted(name.split("/")[0] for name in left) == ["agents", "agents", "teams", "teams"]
    assert await one.agents.journals.created("team", "default") == {}


def replays_of(house: House) -> str:
    replays = shared_by(house).replays
    assert replays is not None
    return replays._folder("default", "ada")


async def test_tokens_of_chats_go_with_an_agent_that_cannot_be_read(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    await two.agents.refresh("default", "ada")
    servers.blobs.objects[f"{replays_of(one)}/x"] = b"tokens"
    await servers.say(two, "second")
    name = max(name for name in servers.blobs.objects if name.startswith("agents/"))
    servers.blobs.objects[name] = servers.blobs.objects[name][:-1] + b"x"
    await one.agents.delete("default", "ada")
    assert not any(name.startswith("replays/") for name in servers.blobs.objects)
    for house in (two, one):
        await house.agents.refresh("default", "ada")
        with pytest.raises(NotFound):
            house.agents.get("default", "ada")
    await two.agents.create("default", id="ada")
    said = await servers.say(one, "a new one")
    assert await servers.turns(two) == [(1, "finished", said)]


async def test_tokens_of_chats_go_from_other_servers_disks_too(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await two.agents.refresh("default", "ada")
    agent, secret = two.agents._find("default", "ada"), array("I", [7_654_321] * 50)
    sampled = Sampled(b"before", AnswerIdentity("seen", ""), secret, 0)
    two.agents.chats.remember(
        "default",
        agent,
        [1, 2, 3],
        Done(reason=FinishReason.STOP, usage=Usage(prompt_tokens=3, completion_tokens=50), cache=CacheReport()),
        sampled,
        b"model",
    )
    await two.agents.chats.written()
    assert kept_by(two, secret)
    await one.agents.delete("default", "ada")
    await two.agents.refresh("default", "ada")
    await two.agents.tend()
    assert not kept_by(two, secret)


def kept_by(house: House, ids: array[int]) -> bool:
    return any(ids.tobytes() in data for data in house.files.files(FOLDER).values())


async def test_work_whose_journal_could_not_be_removed_is_ended(servers: TwoServers) -> None:
    one, two = servers.one.agents.journals, servers.two.agents.journals
    journal = await one.create("team", "default", "t", Body("head"))
    assert two.shared is not None
    async with one.working(journal):
        dead, working = threading.Event(), threading.Event()

        def before(call: str, name: str) -> None:
            if call in ("create", "read", "list") and name.startswith("teams/"):
                dead.set()
                working.wait(60)
                raise OSError("the store failed")

        servers.blobs.before = before
        removing = asyncio.create_task(one.remove(journal))
        while not dead.is_set():
            await asyncio.sleep(0.005)
        asyncio.get_running_loop().call_later(0.2, working.set)
    with pytest.raises(Unavailable):
        await removing
    servers.blobs.before = lambda call, name: None
    heal(servers)
    for _ in range(600):
        await two.refresh("team", "default", "t")
        if not two.shared._follow(journal.name).chain.tail.running:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the chain says that a server works on the journal, although none does")


async def test_two_deletions_at_once_are_one(servers: TwoServers) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    done = await asyncio.gather(*(one.agents.delete("default", "ada") for _ in range(2)), return_exceptions=True)
    assert None in done and all(isinstance(one, NotFound) for one in done if one is not None), done
    await one.agents.create("default", id="bob")
    await two.agents.refresh("default", "bob")
    await two.agents.delete("default", "bob")
    both = one.agents.refresh("default", "bob"), one.agents.delete("default", "bob")
    done = await asyncio.gather(*both, return_exceptions=True)
    assert all(one is None or isinstance(one, NotFound) for one in done), done


async def test_an_agent_with_an_unreadable_record_can_be_deleted(
    servers: TwoServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = servers.one
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    await one.again(7)
    bad = min(name for name in servers.blobs.objects if name.startswith("agents/") and name.endswith("0000000001"))
    read = servers.blobs.read

    def broken(name: str) -> bytes:
        if name == bad:
            raise OSError(errno.EIO, "bad sector")
        return read(name)

    monkeypatch.setattr(servers.blobs, "read", broken)
    await one.agents.delete("default", "ada")
    with pytest.raises(NotFound):
        one.agents.get("default", "ada")


async def test_a_note_that_was_rolled_back_is_not_in_the_chain(servers: TwoServers) -> None:
    one, two = servers.one.agents.journals, servers.two.agents.journals
    journal = await one.create("team", "default", "t", Body("head"))
    first = await one.append(journal, Body("first"))
    one.note(journal, Body("a note"))
    await one.cut(journal, first.number)
    await one.append(journal, Body("after"))
    await two.refresh("team", "default", "t")
    there = two.find("team", "default", "t").read(Body)
    assert [entry.value.text for entry in there] == ["first", "after"]


@pytest.mark.parametrize("what", ["describe", "pin"])
async def test_a_change_to_an_agent_that_is_read_again_meanwhile_is_to_be_sent_again(
    servers: TwoServers, what: str
) -> None:
    one, two = servers.one, servers.two
    await one.agents.create("default", id="ada")
    await servers.say(one, "first")
    agent = one.agents._find("default", "ada")
    async with one.agents._agents._change(agent):
        changing = asyncio.create_task(
            one.agents.describe("default", "ada", {"by": "one"})
            if what == "describe"
            else one.agents.pin("default", "ada", True)
        )
        await asyncio.sleep(0.05)
        await two.agents.refresh("default", "ada")
        await two.agents.describe("default", "ada", {"by": "two"})
        shared_by(one)._follow("default", "ada").known = False
        await one.agents.refresh("default", "ada")
    with pytest.raises(Moved, match="send the request again"):
        await changing
    assert one.agents.get("default", "ada").metadata == {"by": "two"}


# ------------------------------------------------------------------------------------------------------ without a copy


@pytest.mark.parametrize("away", [True, False], ids=["the store is away", "a record was changed"])
async def test_what_this_server_has_no_copy_of_is_no_404_while_it_cannot_be_read(
    servers: TwoServers, away: bool
) -> None:
    one, two = servers.one.agents, servers.two.agents
    await one.create("default", id="ada")
    await servers.say(servers.one, "first")
    await one.journals.create("team", "default", "t", Body("head"))
    attributions = []
    for agents in (one, two):
        attributions.append(AgentAttribution())
        attributions[-1].agents = agents

    async def call(number: int, method: str, route: str, id: str, then: Callable[[], object]) -> object:
        made = SimpleNamespace(route=route, tenant="default", path_part=lambda prefix: id, scope={"method": method})
        await attributions[number].refresh(cast(HTTPCall, made))
        return then()

    for name in [name for name in servers.blobs.objects if name.startswith(("agents/", "teams/"))]:
        servers.blobs.objects[name] = servers.blobs.objects[name] if away else b"changed"
    servers.blobs.dead = away
    for method in ("GET", "DELETE"):
        for route, id, found in (
            ("/v1/agents/{id}", "ada", lambda agents: agents.get("default", "ada")),
            ("/v1/agents/{id}/turns", "ada", lambda agents: agents.get("default", "ada")),
            ("/v1/teams/{id}", "t", lambda agents: agents.journals.find("team", "default", "t")),
        ):
            with pytest.raises(Unavailable if away else Damaged):
                await call(1, method, route, id, lambda found=found: found(two))  # type: ignore[misc]
    if away:
        assert await call(0, "GET", "/v1/agents/{id}", "ada", lambda: one.get("default", "ada").turns) == 1
    heal(servers)
    await recovered(servers.two) if away else None
    with pytest.raises(NotFound):
        await call(1, "GET", "/v1/agents/{id}", "nobody", lambda: two.get("default", "nobody"))
