"""The teams of a server. A team is a journal of the token log; its members are agents.

A round cut off by a crash, a disconnect, an interrupt or an error is resumed by the next `rounds` request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from cairn.agents.agents import Agents
from cairn.agents.log.records import check
from cairn.agents.work_journals import Journal, JournalEntry
from cairn.system.concurrency import together
from cairn.teams import prompts
from cairn.teams.definition import (
    MAX_ROUNDS,
    USER,
    Team,
    check_team,
    check_text,
)
from cairn.teams.entries import Item, Poll, Posted, RoundBegan, RoundDone, ToolAnswered, ToolCalled, Voted, check_poll
from cairn.teams.team_round import Emit, TeamRound, last_turn
from cairn.teams.tool_calls import ToolsWaitError, open_calls
from cairn.teams.voice import AgentVoice, Caller, Voice
from cairn.types.errors import CairnError, Conflict, Damaged, InvalidRequest, NotFound, Unavailable

ROOM = "team"
KIND = "team.member"
"""`object` in the metadata of an agent that is a member."""


class TeamState(msgspec.Struct, frozen=True, kw_only=True):
    """A team as clients see it."""

    team: Team
    created: float
    model: str
    """Name of the model it was created with."""
    rounds: int
    """Number of finished rounds."""
    state: str
    """`running`, `waiting` (for tool results), `interrupted` (a round was cut off) or `idle`."""
    decision: str | None
    """The last decision."""
    calls: list[dict[str, Any]]
    """Tool calls that wait for results."""
    report: dict[str, Any]
    """Prompt tokens in all, and how many of them were computed and cached."""


class Teams:
    """The teams of all tenants. Runs on the event loop; methods that name a team raise NotFound if there is none."""

    def __init__(self, agents: Agents, voice: Voice | None = None) -> None:
        self._agents, self._journals = agents, agents.journals
        self._voice = voice or AgentVoice(agents)
        self._running: dict[int, asyncio.Task[Any]] = {}
        """Running tasks by journal key."""

    # ------------------------------------------------------------------------------------------------------ to look

    def get(self, tenant: str, id: str) -> TeamState:
        """Return the current state of a team."""
        return self._state(self._find(tenant, id))

    async def created(self, tenant: str) -> dict[str, float]:
        """Return when a tenant's teams were made, by id, the newest first."""
        return await self._journals.created(ROOM, tenant)

    async def refresh(self, tenant: str, ids: Sequence[str]) -> None:
        """Update these teams from the shared store, if there is one, as far as it answers."""
        await self._journals.refresh_listed(ROOM, tenant, ids)

    def entries(self, tenant: str, id: str, member: str = "") -> tuple[Team, Sequence[JournalEntry]]:
        """Return a team and its journal's entries. Raise InvalidRequest if it has no such `member`."""
        journal = self._find(tenant, id)
        team = _team(journal)
        if member:
            team.member(member)
        return team, journal.read(Item)

    async def shared_tokens(self, tenant: str, id: str) -> int | None:
        """Return the length in tokens of the common prefix of all members that have spoken; None for fewer than two."""
        journal = self._find(tenant, id)
        team, contexts = _team(journal), list[tuple[int, ...]]()
        with contextlib.suppress(Unavailable, Damaged):  # this server's own copy will do
            await self._refresh_agents(tenant, team)
        for name in team.names:
            if last_turn(journal.read(Item), name):
                contexts.append(await self._agents.context(tenant, team.agent(name)))
        if len(contexts) < 2:
            return None
        least = min(contexts)
        most = max(contexts)
        return next((at for at, pair in enumerate(zip(least, most, strict=False)) if pair[0] != pair[1]), len(least))

    def _state(self, journal: Journal) -> TeamState:
        entries = journal.read(Item)
        values = [entry.value for entry in entries]
        asked = [one for one in values if hasattr(one, "prompt_tokens")]
        prompt, cached = sum(one.prompt_tokens for one in asked), sum(one.cached_tokens for one in asked)
        decided = [one.decision for one in values if isinstance(one, Voted | RoundDone) and one.decision is not None]
        calls = open_calls(entries)
        cut = "waiting" if calls else "interrupted" if _cut_off(entries) else "idle"
        state = "running" if journal.key in self._running or self._journals.at_work_elsewhere(journal) else cut
        return TeamState(
            team=_team(journal),
            created=journal.record.created,
            model=journal.record.model,
            rounds=_rounds(entries),
            state=state,
            decision=decided[-1] if decided else None,
            calls=[call_object(one) for one in calls],
            report={"prompt_tokens": prompt, "computed_tokens": prompt - cached, "cached_tokens": cached},
        )

    def _find(self, tenant: str, id: str) -> Journal:
        return self._journals.find(ROOM, tenant, id)

    def _idle(self, tenant: str, id: str) -> Journal:
        journal = self._find(tenant, id)
        self._journals.check_free(journal)
        if journal.key in self._running:
            raise Conflict(f"team {id} is at work; wait for its round, or interrupt it")
        return journal

    # ---------------------------------------------------------------------------------------------------- to change

    async def create(self, tenant: str, team: Team, model: str = "") -> TeamState:
        """Create a team and its agents. `model` answers unless a call names another.

        Raise Conflict if its id, or the id of an agent it needs, is taken.
        """
        if not team.id:
            team = msgspec.structs.replace(team, id=f"team-{self._journals.seed():016x}")
        if not team.seed:
            team = msgspec.structs.replace(team, seed=self._journals.seed() >> 11)  # 53 bits, what JSON numbers hold
        check_team(team)
        check(team.metadata, "metadata")
        journal = await self._journals.create(ROOM, tenant, team.id, team, model=model)
        try:
            async with self._at_work(journal):
                await self._make_agents(tenant, team, model)
        except BaseException:
            await self._drop(tenant, journal)
            raise
        return self._state(journal)

    async def _make_agents(self, tenant: str, team: Team, model: str = "") -> None:
        """Create the team's missing agents: the shared beginning, and a fork of it for each member."""
        await self._refresh_agents(tenant, team)
        if not self._there(tenant, team.shared_agent, team):
            metadata = {"object": "team.beginning", "team": team.id}
            messages = prompts.beginning(team)
            await self._agents.create(tenant, id=team.shared_agent, messages=messages, metadata=metadata, model=model)
        missing = [name for name in team.names if not self._there(tenant, team.agent(name), team)]
        made = await asyncio.gather(
            *(
                self._agents.fork(
                    tenant,
                    team.shared_agent,
                    new_id=team.agent(name),
                    metadata={"object": KIND, "team": team.id, "member": name},
                )
                for name in missing
            ),
            return_exceptions=True,
        )
        for one in made:
            if isinstance(one, BaseException):
                raise one

    async def _refresh_agents(self, tenant: str, team: Team) -> None:
        """Update the team's agents from the shared store, if there is one. Raise as `Agents.refresh` does."""
        ids = (team.shared_agent, *map(team.agent, team.names))
        await together([self._agents.refresh(tenant, id) for id in ids])

    def _there(self, tenant: str, agent: str, team: Team) -> bool:
        """Return whether an agent of the team exists. Raise Conflict if another agent has its id."""
        try:
            owner = self._agents.get(tenant, agent).metadata.get("team")
        except NotFound:
            return False
        if owner != team.id:
            raise Conflict(f"there is an agent {agent} already, which is no member of team {team.id}", field="id")
        return True

    async def post(
        self, tenant: str, id: str, content: str, to: Sequence[str] = (), sender: str = USER
    ) -> JournalEntry:
        """Post a message to all, or whisper to `to`. The next speakers see it, also in a running round."""
        journal = self._find(tenant, id)
        team = _team(journal)
        check_text(content, "content")
        check(content, "content")
        for name in to:
            team.member(name)
        if sender != USER:
            team.member(sender)
        self._journals.check_room(journal)
        posted = Posted(round=_rounds(journal.read(Item)), sender=sender, content=content, to=tuple(dict.fromkeys(to)))
        return await self._journals.append(journal, posted)

    async def answer_call(self, tenant: str, id: str, call: str, content: str) -> None:
        """Record a tool's result. Raise NotFound if no such call waits."""
        journal = self._find(tenant, id)
        check_text(content, "content")
        check(content, "content")
        for one in open_calls(journal.read(Item)):
            if one.id == call:
                result = ToolAnswered(
                    round=one.round, step=one.step, member=one.member, number=one.number, content=content
                )
                await self._journals.append(journal, result)
                return
        raise NotFound(f"team {id} waits for no result of a call {call[:100]}", field="call_id")

    def check_vote(self, tenant: str, id: str, ask: Poll) -> None:
        """Raise InvalidRequest for a vote that the team cannot hold."""
        check_poll(_team(self._find(tenant, id)), ask)

    async def vote(self, caller: Caller, id: str, ask: Poll, emit: Emit) -> Voted:
        """Hold a vote outside a round. Raise Conflict while a round runs or waits to be resumed."""
        self.check_vote(caller.tenant, id, ask)
        journal = self._idle(caller.tenant, id)
        if _cut_off(journal.read(Item)):
            raise Conflict(f"a round of team {id} was cut off; let it go on, or roll back, before the team votes")
        async with self._at_work(journal):
            await self._make_agents(caller.tenant, _team(journal), journal.record.model)
            return await self._round(journal, caller, _rounds(journal.read(Item)), emit).hold_beside(ask)

    async def rounds(
        self, caller: Caller, id: str, many: int, emit: Emit, *, vote: Poll | None = None, stop_at: str = ""
    ) -> None:
        """Run `many` rounds, a cut-off one first; stop once a round has decided `stop_at`."""
        journal = self._idle(caller.tenant, id)
        self.check_rounds(caller.tenant, id, many)
        async with self._at_work(journal):
            await self._make_agents(caller.tenant, _team(journal), journal.record.model)
            for _ in range(many):
                number = 1 + _rounds(journal.read(Item))
                try:
                    decision = await self._round(journal, caller, number, emit).run(vote)
                except ToolsWaitError:
                    calls = [call_object(one) for one in open_calls(journal.read(Item))]
                    emit({"type": "round.waiting", "round": number, "calls": calls})
                    break
                if stop_at and decision == stop_at:
                    break

    def check_idle(self, tenant: str, id: str) -> None:
        """Raise Conflict while the team is at work."""
        self._idle(tenant, id)

    def check_rounds(self, tenant: str, id: str, many: int) -> None:
        """Raise InvalidRequest unless the team has `many` rounds left."""
        room = MAX_ROUNDS - _rounds(self._find(tenant, id).read(Item))
        if not 1 <= many <= room:
            raise InvalidRequest(
                f"rounds must be 1 to {room}: a team has {MAX_ROUNDS} rounds at most, the limit", field="rounds"
            )

    def _round(self, journal: Journal, caller: Caller, number: int, emit: Emit) -> TeamRound:
        return TeamRound(_team(journal), self._journals, journal, self._voice, caller, number, emit)

    def interrupt(self, tenant: str, id: str) -> bool:
        """Cancel what the team does now; return whether it was at work. Raise Running if it is on another server."""
        journal = self._find(tenant, id)
        self._journals.check_free(journal)
        task = self._running.get(journal.key)
        if task is not None:
            task.cancel()
        return task is not None

    async def rollback(self, tenant: str, id: str, to: int) -> TeamState:
        """Erase everything after round `to` (0: the beginning) and roll the members' agents back."""
        journal = self._idle(tenant, id)
        async with self._at_work(journal):
            await self._journals.cut(journal, _end(journal.read(Item), to))
            team = _team(journal)
            await self._refresh_agents(tenant, team)
            for name in team.names:
                with contextlib.suppress(CairnError):  # if this fails, the member's next turn does it
                    turn = last_turn(journal.read(Item), name)
                    await self._agents.rollback(tenant, team.agent(name), turn=turn)
        return self._state(journal)

    async def fork(self, tenant: str, id: str, new_id: str | None, at: int | None) -> TeamState:
        """Create a team that shares this one's history up to round `at`; members' contexts are shared, not copied."""
        journal = self._idle(tenant, id)
        entries, old = journal.read(Item), _team(journal)
        at = _rounds(entries) if at is None else at
        last = _end(entries, at)
        kept = [entry for entry in entries if entry.number <= last]
        new_id = f"team-{self._journals.seed():016x}" if new_id is None else new_id
        team = msgspec.structs.replace(old, id=new_id, origin=old.id, origin_round=at)
        check_team(team)
        async with self._at_work(journal):
            await self._refresh_agents(tenant, old)
            made = await self._journals.create(ROOM, tenant, team.id, team, kept, model=journal.record.model)
            try:
                pairs = [(name, old.agent(name), last_turn(kept, name)) for name in old.names]
                for name, source, turn in [("", old.shared_agent, 0), *pairs]:
                    target = team.agent(name) if name else team.shared_agent
                    metadata = {"object": KIND, "team": team.id, "member": name}
                    await self._agents.fork(tenant, source, turn=turn, new_id=target, metadata=metadata)
            except BaseException:
                await self._drop(tenant, made)
                raise
        return self._state(made)

    async def delete(self, tenant: str, id: str) -> None:
        """Cancel what runs and erase the team with its agents."""
        journal = self._find(tenant, id)
        task = self._running.get(journal.key)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
        await self._drop(tenant, journal)

    async def _drop(self, tenant: str, journal: Journal) -> None:
        team = _team(journal)
        agents = [*(team.agent(name) for name in team.names), team.shared_agent]
        with contextlib.suppress(Unavailable, Damaged):
            await self._refresh_agents(tenant, team)
        ours = [agent for agent in agents if self._ours(tenant, agent, team)]
        await self._journals.remove(journal)
        for agent in ours:
            with contextlib.suppress(NotFound):
                await self._agents.delete(tenant, agent)

    def _ours(self, tenant: str, agent: str, team: Team) -> bool:
        """Return whether the agent belongs to the team: a client may own one of that id."""
        try:
            return self._agents.get(tenant, agent).metadata.get("team") == team.id
        except NotFound:
            return False

    @contextlib.asynccontextmanager
    async def _at_work(self, journal: Journal) -> AsyncIterator[None]:
        """Mark the team as at work while entered; `interrupt` cancels the task that entered."""
        task = asyncio.current_task()
        assert task is not None
        if journal.key in self._running:
            raise Conflict(f"team {journal.id} is at work; wait for its round, or interrupt it")
        self._running[journal.key] = task
        try:
            async with self._journals.working(journal):
                yield
        finally:
            del self._running[journal.key]


def call_object(call: ToolCalled) -> dict[str, Any]:
    """Return a waiting call as clients see it."""
    return {"call_id": call.id, "member": call.member, "tool": call.tool, "arguments": call.arguments}


def _team(journal: Journal) -> Team:
    return msgspec.msgpack.decode(journal.record.body, type=Team)


def _rounds(entries: Sequence[JournalEntry]) -> int:
    """Return the number of finished rounds."""
    return sum(isinstance(entry.value, RoundDone) for entry in entries)


def _cut_off(entries: Sequence[JournalEntry]) -> bool:
    """Return whether a round began and did not finish."""
    return sum(isinstance(entry.value, RoundBegan) for entry in entries) > _rounds(entries)


def _end(entries: Sequence[JournalEntry], round: int) -> int:
    """Return the number of the entry that ends a round, 0 for round 0. Raise NotFound for an unfinished round."""
    if round == 0:
        return 0
    for entry in entries:
        if isinstance(entry.value, RoundDone) and entry.value.round == round:
            return entry.number
    raise NotFound(f"the team has finished no round {round}", field="round")
