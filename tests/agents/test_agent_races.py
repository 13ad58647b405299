"""Calls for one agent that meet: deletions, forks, changes of metadata and turns sent twice at once."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path

import pytest

from cairn.types.errors import CairnError, Conflict, NotFound, Unavailable
from tests.agents.house import House, hear, house
from tests.files import Fault


async def test_a_fork_of_an_agent_that_is_deleted_meanwhile_is_refused(folder: Path) -> None:
    """An expired agent makes room for the fork's id while the source goes."""
    async with house(folder) as at:
        await at.agents.create("default", id="source")
        await at.say("source", "one")
        await at.agents.create("default", id="new", ttl=1.0)
        at.clock.ahead += 5
        fork = asyncio.create_task(at.agents.fork("default", "source", new_id="new"))
        await asyncio.sleep(0)
        await at.agents.delete("default", "source")
        with pytest.raises(NotFound, match="no agent source"):
            await fork
        assert at.agents.page("default").agents == ()


async def test_a_fork_at_a_turn_that_is_collected_meanwhile_is_refused(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="source")
        await at.say("source", "one")
        await at.agents.rollback("default", "source", turn=0)
        await at.agents.create("default", id="new", ttl=1.0)
        at.clock.ahead += 8 * 86_400
        fork = asyncio.create_task(at.agents.fork("default", "source", turn=1, new_id="new"))
        await asyncio.sleep(0)
        await at.agents.tend()
        with pytest.raises(NotFound, match="turn 1 of agent source was deleted"):
            await fork


async def test_turns_that_are_gone_are_listed_as_damaged_and_not_looked_for_for_ever(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        registry = at.agents._agents.registry
        (turn,) = at.agents._find("default", "ada").own
        del registry._turns[turn.key]
        await at.agents._pending.erase([turn.key])
        reads, readable = 0, at.agents._archive.readable

        async def counted(turns: object) -> object:
            nonlocal reads
            reads += 1
            assert reads < 10, "it is read again and again"
            return await readable(turns)  # type: ignore[arg-type]

        at.agents._archive.readable = counted  # type: ignore[method-assign, assignment]
        assert [one.state for one in await at.agents.turns("default", "ada")] == ["damaged"]
        assert reads == 2


async def patch(at: House, title: str) -> str:
    try:
        await at.agents.describe("default", "ada", {"title": title})
    except Unavailable:
        return "refused"
    return "written"


async def test_a_refused_change_of_metadata_undoes_no_other_that_was_written(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", metadata={"title": "0"})
        at.files.fail(Fault(at.files.calls, errno.ENOSPC, sticky=True))
        first = asyncio.create_task(patch(at, "1"))
        await asyncio.sleep(0)
        while not at.agents.writer.trouble:  # the event loop does not hear of the failure before the second begins
            time.sleep(0.001)
        at.files.heal()
        assert await asyncio.gather(first, patch(at, "2")) == ["refused", "written"]
        assert at.agents.get("default", "ada").metadata == {"title": "2"}
        await at.again()
        assert at.agents.get("default", "ada").metadata == {"title": "2"}


async def test_a_change_of_metadata_waits_for_the_one_before_and_builds_on_it_only_if_it_was_written(
    folder: Path,
) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", metadata={"a": "0", "b": "0"})
        gate, sync = asyncio.Event(), at.agents._pending.sync

        async def refuse(*_: object) -> None:
            await gate.wait()
            raise Unavailable("refused")

        at.agents._pending.sync = refuse  # type: ignore[method-assign]
        first = asyncio.create_task(at.agents.describe_by("default", "ada", lambda old: old | {"a": "1"}))
        await asyncio.sleep(0)
        second = asyncio.create_task(at.agents.describe_by("default", "ada", lambda old: old | {"b": "2"}))
        await asyncio.sleep(0)
        at.agents._pending.sync = sync  # type: ignore[method-assign]
        gate.set()
        with pytest.raises(Unavailable):
            await first
        assert (await second).metadata == {"a": "0", "b": "2"}


async def test_a_change_of_metadata_writes_nothing_of_an_agent_that_is_deleted_meanwhile(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        first = asyncio.create_task(at.agents.describe("default", "ada", {"title": "1"}))
        await asyncio.sleep(0)
        second = asyncio.create_task(at.agents.describe("default", "ada", {"title": "2"}))
        await asyncio.sleep(0)
        await at.agents.delete("default", "ada")
        await asyncio.wait({first})
        with pytest.raises(NotFound):
            await second
        await at.again(clean=True)
        assert at.agents.page("default").agents == ()


async def once(at: House, id: str = "ada", text: str = "pay the bill") -> tuple[str, int, str] | int:
    """Send a turn that may go to a fork; return its agent, its number and its answer, or the error's status."""
    try:
        turn = await at.begin(id, text, once="key", fork_on_conflict=True)
    except CairnError as error:
        return error.status
    return turn.agent.id, turn.turn.number, (await hear(turn)).text


async def test_a_turn_sent_twice_at_once_with_one_key_runs_once(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        sent = await asyncio.gather(once(at), once(at))
        assert sent[1] == 409 and isinstance(sent[0], tuple) and sent[0][:2] == ("ada", 1)
        assert await once(at) == sent[0]
        assert len(at.agents.page("default").agents) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_turn_that_went_to_a_fork_is_found_there_by_its_key(folder: Path, restarted: bool) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        busy = await at.begin("ada", "something else")
        sent = await asyncio.gather(once(at), once(at))
        assert sent[1] == 409 and isinstance(sent[0], tuple) and sent[0][0] != "ada"
        if restarted:
            await hear(busy)
            await at.again(clean=True)
        assert await once(at) == sent[0]
        if not restarted:
            await hear(busy)
        assert await once(at) == sent[0]
        assert len(at.agents.page("default").agents) == 2


async def test_a_turn_is_refused_if_its_agent_is_deleted_while_its_key_is_looked_up(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one", once="key")
        agent = at.agents._find("default", "ada")
        task = asyncio.create_task(at.begin("ada", "one", once="key"))
        await asyncio.sleep(0)
        await at.agents.delete("default", "ada")
        with pytest.raises((NotFound, Conflict)):
            await task
        assert agent.running is None and not agent.own[1:]
        await at.again(clean=True)
        assert at.agents.page("default").agents == ()
