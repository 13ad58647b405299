"""Teams whose members are agents on the fake engine, whose answers depend on every token of a context."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.fake import FakeEngine
from cairn.teams.definition import Member, Team, TeamDocument, Topology
from cairn.teams.entries import Poll, Posted, RoundBegan, Stated, ToolAnswered, ToolCalled
from cairn.teams.teams import MADE, Teams
from cairn.teams.voice import Caller
from cairn.types.errors import Conflict, InvalidRequest, NotFound, Unavailable
from tests.agents.house import House, hear, house, talking_model
from tests.files import Fault

CALLER = Caller(tenant="default")
SAMPLING: dict[str, Any] = {"temperature": 0.8, "max_tokens": 8}
NAMES = ("ada", "bob", "cy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


def some(id: str = "t", kind: Any = "broadcast", names: tuple[str, ...] = NAMES, **more: Any) -> Team:
    sampling = more.pop("sampling", SAMPLING)
    members = tuple(Member(name=name, role=f"The {name}.", sampling=sampling) for name in names)
    more = {"system": "Work together.", "topology": Topology(kind=kind), "seed": 5} | more
    return Team(id=id, members=members, **more)


class Company:
    """Teams on the agents of a server."""

    def __init__(self, at: House) -> None:
        self.at = at
        self.teams = Teams(at.agents)
        self.events: list[dict[str, Any]] = []

    async def rounds(self, id: str = "t", many: int = 1, **more: Any) -> None:
        await self.teams.rounds(CALLER, id, many, self.events.append, **more)

    async def again(self, seed: int = 1, *, clean: bool = False) -> None:
        await self.at.again(seed, clean=clean)
        self.teams = Teams(self.at.agents)

    def said(self, id: str = "t") -> list[tuple[int, str, str]]:
        _, entries = self.teams.entries("default", id)
        results = [entry.value for entry in entries if isinstance(entry.value, Stated)]
        return sorted((result.round, result.member, result.content) for result in results)


@contextlib.asynccontextmanager
async def company(folder: Path, **options: Any) -> AsyncIterator[Company]:
    async with house(folder, **options) as at:
        yield Company(at)


async def test_members_share_the_beginning_and_it_is_computed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    decode = FakeEngine.decode

    def noted(self: FakeEngine, some: Any) -> Any:
        rows.append(len(some))
        time.sleep(0.02 if max(rows) < 8 else 0.0)  # as a step of a real model, during which the others arrive
        return decode(self, some)

    monkeypatch.setattr(FakeEngine, "decode", noted)
    text = "All of us know this. " * 40
    names = tuple(f"m{number}" for number in range(8))
    async with company(folder) as at:
        documents = (TeamDocument(name="facts", text=text),)
        long = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
        await at.teams.create("default", some(names=names, documents=documents, sampling=long))
        await at.rounds()
        shared = await at.teams.shared_tokens("default", "t")
        report = at.teams.get("default", "t").report
        assert shared is not None and shared > len(text)
        whole = shared // 16 * 16  # KV is shared in blocks
        assert report["computed_tokens"] <= report["prompt_tokens"] - 7 * whole
        assert report["computed_tokens"] + report["cached_tokens"] == report["prompt_tokens"]
        assert max(rows) == 8  # all members in one step
        for name in names:
            info = at.at.agents.get("default", f"t.{name}")
            assert (info.origin, info.turns, info.metadata["member"]) == ("t..shared", 1, name)


async def test_a_rounds_events_equal_the_agents_contexts(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some(kind="round_robin"))
        await at.teams.post("default", "t", "psst", ["bob"])
        await at.rounds(many=2)
        results = {
            name: "".join(
                message["content"]
                for turn in await at.at.agents.turns("default", f"t.{name}")
                for message in turn.messages
            )
            for name in NAMES
        }
        assert "psst" in results["bob"] and "psst" not in results["ada"] + results["cy"]
        done = [event for event in at.events if event["type"] == "turn.done"]
        assert [event["member"] for event in done] == ["ada", "bob", "cy", "bob", "cy", "ada"]
        for event in done:
            deltas = [
                one.get("content", "")
                for one in at.events
                if one["type"] == "turn.delta" and (one["round"], one["step"]) == (event["round"], event["step"])
            ]
            assert "".join(deltas) == event["content"]


async def test_votes_are_held_to_their_options_and_leave_no_trace_in_a_context(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        await at.rounds()
        before = [at.at.agents.get("default", f"t.{name}").tokens for name in NAMES]
        ask = Poll(question="Which way?", options=("left", "right", "straight on"), rule="ranked")
        vote = await at.teams.vote(CALLER, "t", ask, at.events.append)
        assert set(vote.ballots) == set(NAMES)
        assert all(sorted(ballot) == ["left", "right", "straight on"] for ballot in vote.ballots.values())
        assert vote.decision in ask.options
        assert [at.at.agents.get("default", f"t.{name}").tokens for name in NAMES] == before
        assert at.teams.get("default", "t").decision == vote.decision


async def interrupted(at: Company, deltas: int) -> None:
    """Play a round that is interrupted after this many deltas."""

    def emit(event: dict[str, Any]) -> None:
        at.events.append(event)
        if sum(one["type"] == "turn.delta" for one in at.events) == deltas:
            assert at.teams.interrupt("default", "t")

    with pytest.raises(asyncio.CancelledError):
        await at.teams.rounds(CALLER, "t", 1, emit)


@pytest.mark.parametrize("kind", ["broadcast", "round_robin"])
async def test_an_interrupted_round_ends_as_an_uninterrupted_one(folder: Path, kind: str) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some(kind=kind))
        await at.rounds(many=2)
        expected = at.said()
    async with company(folder) as at:
        await at.teams.create("default", some(kind=kind))
        await interrupted(at, 3)
        assert at.teams.get("default", "t").state == "interrupted"
        await at.again()  # a power failure
        assert at.teams.get("default", "t").state == "interrupted"
        at.events.clear()
        await at.rounds(many=2)
        assert at.said() == expected
        assert at.events[0]["resumed"] and at.teams.get("default", "t").rounds == 2


async def test_a_team_goes_back_and_is_forked(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        await at.rounds(many=3)
        expected = at.said()
        fork = await at.teams.fork("default", "t", "u", 1)
        assert (fork.rounds, fork.team.origin, fork.team.origin_round) == (1, "t", 1)
        assert at.said("u") == [one for one in expected if one[0] == 1]
        back = await at.teams.rollback("default", "t", 1)
        assert back.rounds == 1 and at.said() == at.said("u")
        await at.rounds(many=2)
        assert at.said() == expected  # the same seeds and the same contexts
        await at.rounds("u", many=2)
        assert at.said("u") == expected
        await at.again(clean=True)
        assert at.said("u") == expected == at.said()


async def test_deleting_a_team_erases_every_byte_of_it(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some(system="a secret beginning"))
        await at.teams.post("default", "t", "a secret message")
        await at.rounds()
        assert any(b"secret" in data for data in at.at.files.files().values())
        await at.teams.delete("default", "t")
        assert not any(b"secret" in data for data in at.at.files.files().values())
        with pytest.raises(NotFound):
            at.teams.get("default", "t")
        assert not at.at.agents.page("default").agents


async def test_a_refused_deletion_leaves_a_team_that_can_be_deleted(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some(system="a secret beginning"))
        await at.rounds()
        agent = at.at.agents._find("default", "t.ada")
        turn = asyncio.create_task(at.at.begin("t.ada", "a secret turn"))
        while not agent.starting:
            await asyncio.sleep(0)
        with pytest.raises(Conflict, match=r"agent t\.ada is starting"):
            await at.teams.delete("default", "t")
        assert [one.id for one in at.at.agents.page("default").agents] == ["t.ada"], "the others are gone"
        await hear(await turn)
        await at.again(clean=True)
        await at.teams.delete("default", "t")
        assert not any(b"secret" in data for data in at.at.files.files().values())
        assert not at.at.agents.page("default").agents and await at.teams.created("default") == {}


async def test_a_deletion_that_the_disk_refuses_is_complete_when_it_is_sent_again(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some(system="a secret beginning"))
        await at.rounds()
        at.at.files.fail(Fault(at.at.files.calls, errno.ENOSPC, sticky=True))
        with pytest.raises(Unavailable):
            await at.teams.delete("default", "t")
        with pytest.raises(Conflict, match="there is a team t already"):
            await at.teams.create("default", some())
        at.at.files.heal()
        await at.teams.delete("default", "t")
        assert not any(b"secret" in data for data in at.at.files.files().values())
        await at.again()
        assert not at.at.agents.page("default").agents and await at.teams.created("default") == {}


async def test_nobody_works_on_a_team_that_is_being_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        began, gate, delete = asyncio.Event(), asyncio.Event(), at.at.agents.delete

        async def slow(tenant: str, id: str) -> None:
            began.set()
            await gate.wait()
            await delete(tenant, id)

        monkeypatch.setattr(at.at.agents, "delete", slow)
        task = asyncio.create_task(at.teams.delete("default", "t"))
        await began.wait()
        for call in (at.rounds(), at.teams.delete("default", "t"), at.teams.rollback("default", "t", 0)):
            with pytest.raises(Conflict, match="being deleted"):
                await call
        gate.set()
        await task
        assert not at.at.agents.page("default").agents


@pytest.mark.parametrize("stamped", [True, False], ids=["of this version", "of an earlier version"])
async def test_a_new_team_does_not_adopt_the_members_of_an_earlier_one(folder: Path, stamped: bool) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some(system="a secret beginning"))
        if not stamped:
            for agent in at.at.agents.page("default").agents:
                kept = {name: value for name, value in agent.metadata.items() if name != MADE}
                await at.at.agents.describe("default", agent.id, kept)
            await at.rounds()  # they are known as members all the same
        journals = at.at.agents.journals
        await journals.remove(journals.find("team", "default", "t"))
        left = [agent.id for agent in at.at.agents.page("default").agents]
        with pytest.raises(Conflict, match="delete it, or give the team another id"):
            await at.teams.create("default", some(system="a new beginning"))
        assert [agent.id for agent in at.at.agents.page("default").agents] == left
        assert await at.teams.created("default") == {}


async def test_a_team_that_cannot_be_made_leaves_its_name_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with company(folder) as at:
        fork = at.at.agents.fork

        async def full(tenant: str, id: str, **more: Any) -> Any:
            at.at.files.fail(Fault(at.at.files.calls, errno.ENOSPC, sticky=True))
            return await fork(tenant, id, **more)

        monkeypatch.setattr(at.at.agents, "fork", full)
        with pytest.raises(Unavailable):
            await at.teams.create("default", some(system="a secret beginning"))
        monkeypatch.undo()
        at.at.files.heal()
        await at.teams.create("default", some())
        await at.at.agents.tend()
        assert not any(b"secret" in data for data in at.at.files.files().values())


async def test_a_rollback_erases_what_followed(folder: Path) -> None:
    """Also in the members' turns, but not in a fork's."""
    async with company(folder) as at:
        await at.teams.create("default", some())
        await at.rounds()
        await at.teams.post("default", "t", "a secret message")
        await at.rounds()
        await at.teams.fork("default", "t", "u", 2)
        await at.teams.rollback("default", "t", 1)
        assert "secret" in repr(await at.at.agents.turns("default", "u.ada"))
        await at.teams.delete("default", "u")
        await at.teams.post("default", "t", "another secret")
        await at.rounds()
        await at.teams.rollback("default", "t", 1)
        assert "another" not in repr(await at.at.agents.turns("default", "t.ada"))
        assert not any(b"another secret" in data for data in at.at.files.files().values())
        await at.rounds()
        assert at.teams.get("default", "t").rounds == 2


async def test_a_rollback_refused_for_a_member_is_complete_when_it_is_sent_again(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        await at.rounds()
        await at.teams.post("default", "t", "a secret message")
        await at.rounds()
        agent = at.at.agents._find("default", "t.ada")
        agent.starting = True
        with pytest.raises(Conflict):
            await at.teams.rollback("default", "t", 1)
        agent.starting = False
        assert "secret" not in repr(await at.at.agents.turns("default", "t.cy")), "the others are back"
        assert (await at.teams.rollback("default", "t", 1)).rounds == 1
        assert not any(b"secret" in data for data in at.at.files.files().values())


async def test_a_call_has_one_result(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        journals = at.at.agents.journals
        journal = journals.find("team", "default", "t")
        await journals.append(journal, RoundBegan(round=1))
        await journals.append(journal, ToolCalled(round=1, step=1, member="ada", number=0, tool="x", arguments="{}"))
        call = "call-1-1-ada-0"
        at.at.files.fail(Fault(at.at.files.calls, errno.ENOSPC, sticky=True))
        with pytest.raises(Unavailable):
            await at.teams.answer_call("default", "t", call, "refused")
        at.at.files.heal()
        first, second = await asyncio.gather(
            at.teams.answer_call("default", "t", call, "first"),
            at.teams.answer_call("default", "t", call, "second"),
            return_exceptions=True,
        )
        assert first is None and isinstance(second, Conflict)
        with pytest.raises(NotFound):
            await at.teams.answer_call("default", "t", call, "third")
        _, entries = at.teams.entries("default", "t")
        assert [entry.value.content for entry in entries if isinstance(entry.value, ToolAnswered)] == ["first"]


async def test_teams_are_a_tenants_own(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        with pytest.raises(NotFound):
            at.teams.get("other", "t")
        assert await at.teams.created("other") == {}
        await at.teams.create("other", some())


async def test_an_agent_of_that_name_is_left_alone(folder: Path) -> None:
    async with company(folder) as at:
        await at.at.agents.create("default", id="t.bob")
        with pytest.raises(Conflict):
            await at.teams.create("default", some())
        assert [agent.id for agent in at.at.agents.page("default").agents] == ["t.bob"]
        assert await at.teams.created("default") == {}


async def test_limits_are_named(folder: Path) -> None:
    async with company(folder) as at:
        with pytest.raises(InvalidRequest, match="1 to 32"):
            await at.teams.create("default", some(names=tuple(f"m{number}" for number in range(33))))
        await at.teams.create("default", some())
        with pytest.raises(InvalidRequest, match="1000 rounds"):
            await at.rounds(many=1001)
        with pytest.raises(InvalidRequest, match="2 to 6"):
            ask = Poll(question="?", options=tuple("abcdefg"), rule="ranked")
            await at.teams.vote(CALLER, "t", ask, at.events.append)


async def test_a_message_that_was_acknowledged_survives_a_crash(folder: Path) -> None:
    async with company(folder) as at:
        await at.teams.create("default", some())
        await at.teams.post("default", "t", "remember this")
        await at.again()
        _, entries = at.teams.entries("default", "t")
        assert [entry.value.content for entry in entries if isinstance(entry.value, Posted)] == ["remember this"]
