"""The teams of a server. A team is a journal of the token log; its members are agents.

A round cut off by a crash, a disconnect, an interrupt or an error is resumed by the next `rounds` request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
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
MADE = "team_created"
"""Field of the same metadata: when the agent's team was created, as text."""


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
        self._deleting: set[int] = set()
        """Keys of journals whose teams are being deleted."""
        self._answering: set[tuple[int, str]] = set()
        """Tool calls whose results are being written: the journal's key and the call's id."""

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
        self._check_idle(journal)
        return journal

    def _check_idle(self, journal: Journal) -> None:
        if journal.key in self._deleting:
            raise Conflict(f"team {journal.id} is being deleted")
        if journal.key in self._running:
            raise Conflict(f"team {journal.id} is at work; wait for its round, or interrupt it")

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
                await self._make_agents(journal)
        except BaseException:
            await self._undo(journal)
            raise
        return self._state(journal)

    async def _make_agents(self, journal: Journal) -> None:
        """Create the team's missing agents: the shared beginning, and a fork of it for each member."""
        tenant, team = journal.tenant, _team(journal)
        await self._refresh_agents(tenant, team)
        if not self._there(team.shared_agent, journal):
            await self._agents.create(
                tenant,
                id=team.shared_agent,
                messages=prompts.beginning(team),
                metadata=_owned(journal, "team.beginning"),
                model=journal.record.model,
            )
        missing = [name for name in team.names if not self._there(team.agent(name), journal)]
        made = await asyncio.gather(
            *(
                self._agents.fork(
                    tenant,
                    team.shared_agent,
                    new_id=team.agent(name),
                    metadata=_owned(journal, KIND, name),
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
        await together([self._agents.refresh(tenant, id) for id in _agent_ids(team)])

    def _there(self, agent: str, journal: Journal) -> bool:
        """Return whether an agent of the team exists. Raise Conflict if another agent has its id."""
        ours = self._ours(agent, journal)
        if ours is False:
            raise Conflict(
                f"there is an agent {agent} already, which is no member of this team {journal.id}; delete it, or give "
                "the team another id",
                field="id",
            )
        return ours is True

    def _ours(self, agent: str, journal: Journal) -> bool | None:
        """Return whether the agent of that id belongs to the team; None if there is none.

        A client may have made one of that id, and so may an earlier team that had the same name.
        """
        try:
            info = self._agents.get(journal.tenant, agent)
        except NotFound:
            return None
        if info.metadata.get("team") != journal.id:
            return False
        made = info.metadata.get(MADE)
        # Agents of earlier versions do not say so, but a team is always older than its agents.
        return info.created >= journal.record.created if made is None else made == _made(journal)

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
        """Record a tool's result. Raise NotFound if no such call waits, Conflict while another result is written."""
        journal = self._find(tenant, id)
        check_text(content, "content")
        check(content, "content")
        one = next((one for one in open_calls(journal.read(Item)) if one.id == call), None)
        if one is None:
            raise NotFound(f"team {id} waits for no result of a call {call[:100]}", field="call_id")
        taken = journal.key, call
        if taken in self._answering:
            raise Conflict(f"another result of the call {call} is being recorded", field="call_id")
        self._answering.add(taken)
        try:
            await self._journals.append(
                journal,
                ToolAnswered(round=one.round, step=one.step, member=one.member, number=one.number, content=content),
            )
        finally:
            self._answering.discard(taken)

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
            await self._make_agents(journal)
            return await self._round(journal, caller, _rounds(journal.read(Item)), emit).hold_beside(ask)

    async def rounds(
        self, caller: Caller, id: str, many: int, emit: Emit, *, vote: Poll | None = None, stop_at: str = ""
    ) -> None:
        """Run `many` rounds, a cut-off one first; stop once a round has decided `stop_at`."""
        journal = self._idle(caller.tenant, id)
        self.check_rounds(caller.tenant, id, many)
        async with self._at_work(journal):
            await self._make_agents(journal)
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
        """Erase everything after round `to` (0: the beginning) and roll the members' agents back.

        Raise Conflict while a turn of a member runs, Unavailable if the disk or the shared store refuses. Then the team
        is back, but turns of members may still be there; sent once more, the rollback erases them.
        """
        journal = self._idle(tenant, id)
        async with self._at_work(journal):
            await self._journals.cut(journal, _end(journal.read(Item), to))
            team = _team(journal)
            await self._refresh_agents(tenant, team)
            refusals: list[CairnError] = []
            for name in team.names:
                turn = last_turn(journal.read(Item), name)
                try:
                    await self._agents.rollback(tenant, team.agent(name), turn=turn, erase=True)
                except NotFound:  # the member has lost that turn, and says so when it speaks
                    pass
                except CairnError as error:
                    refusals.append(error)
            if refusals:
                raise refusals[0]
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
                    metadata = _owned(made, KIND, name)
                    await self._agents.fork(tenant, source, turn=turn, new_id=target, metadata=metadata)
            except BaseException:
                await self._undo(made)
                raise
        return self._state(made)

    async def delete(self, tenant: str, id: str) -> None:
        """Cancel what runs and erase the team with its agents.

        Raise Conflict while a turn of a member starts, Unavailable if the disk or the shared store refuses. Then the
        team stays until it is deleted once more, although some of its agents may be gone.
        """
        journal = self._find(tenant, id)
        task = self._running.get(journal.key)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
        with self._being_deleted(journal):
            if refusals := await self._delete_agents(journal):
                raise refusals[0]
            # Only now: nothing else names the agents, so without it they could not be deleted any more.
            with contextlib.suppress(NotFound):  # another server has deleted it meanwhile
                await self._journals.remove(self._find(tenant, id))

    async def _undo(self, journal: Journal) -> None:
        """Erase a team that could not be created. Its journal stays only if an agent of it could not be deleted."""
        with self._being_deleted(journal):
            await self._delete_agents(journal)
            if not any(self._ours(agent, journal) for agent in _agent_ids(_team(journal))):
                with contextlib.suppress(Unavailable):  # it is gone all the same
                    await self._journals.remove(journal)

    @contextlib.contextmanager
    def _being_deleted(self, journal: Journal) -> Iterator[None]:
        """Let nobody else work on the team or delete it while entered."""
        if journal.key in self._deleting:
            raise Conflict(f"team {journal.id} is being deleted")
        self._deleting.add(journal.key)
        try:
            yield
        finally:
            self._deleting.discard(journal.key)

    async def _delete_agents(self, journal: Journal) -> list[CairnError]:
        """Delete the team's agents as far as possible; return why some could not be."""
        tenant, team = journal.tenant, _team(journal)
        with contextlib.suppress(Unavailable, Damaged):
            await self._refresh_agents(tenant, team)
        refusals: list[CairnError] = []
        for agent in _agent_ids(team):
            if not self._ours(agent, journal):
                continue
            try:
                await self._agents.delete(tenant, agent)
            except NotFound:
                pass
            except CairnError as error:
                refusals.append(error)
        return refusals

    @contextlib.asynccontextmanager
    async def _at_work(self, journal: Journal) -> AsyncIterator[None]:
        """Mark the team as at work while entered; `interrupt` cancels the task that entered."""
        task = asyncio.current_task()
        assert task is not None
        self._check_idle(journal)
        self._running[journal.key] = task
        try:
            async with self._journals.working(journal):
                yield
        finally:
            del self._running[journal.key]


def call_object(call: ToolCalled) -> dict[str, Any]:
    """Return a waiting call as clients see it."""
    return {"call_id": call.id, "member": call.member, "tool": call.tool, "arguments": call.arguments}


def _agent_ids(team: Team) -> tuple[str, ...]:
    """Return the ids of the team's agents; the shared beginning comes last."""
    return (*map(team.agent, team.names), team.shared_agent)


def _made(journal: Journal) -> str:
    """Return what tells a team from earlier ones of its name: when it was created."""
    return repr(journal.record.created)


def _owned(journal: Journal, kind: str, member: str = "") -> dict[str, str]:
    """Return the metadata of an agent of the team."""
    return {"object": kind, "team": journal.id, MADE: _made(journal)} | ({"member": member} if member else {})


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
