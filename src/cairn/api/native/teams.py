"""The routes of teams, under /v1/teams.

POST /v1/teams                      GET  /v1/teams?limit=&after=
GET  /v1/teams/{id}                 DELETE /v1/teams/{id}
POST /v1/teams/{id}/rounds          POST /v1/teams/{id}/messages    POST /v1/teams/{id}/votes
POST /v1/teams/{id}/tool_results
POST /v1/teams/{id}/interrupt       POST /v1/teams/{id}/fork        POST /v1/teams/{id}/rollback
GET  /v1/teams/{id}/transcript?format=&member=
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from cairn.agents.agents import Agents
from cairn.api.chat.generation import check_length, check_model, check_sampling
from cairn.api.chat.paging import LISTED, MOST_LISTED, page_by_id, parameters
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_json, read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.api.native.team_schemas import (
    PATH,
    PostBody,
    RoundsBody,
    TeamBody,
    TeamForkBody,
    TeamRollbackBody,
    ToolResultsBody,
    VoteBody,
    one_of,
    without_texts,
)
from cairn.api.native.work_events import Emit, answer
from cairn.frontend.service import Service
from cairn.teams.definition import check_team
from cairn.teams.entries import Voted
from cairn.teams.prompts import listed, markdown
from cairn.teams.teams import Teams, TeamState
from cairn.teams.voice import Caller
from cairn.types.errors import InvalidRequest
from cairn.types.request import OutputFormat


class TeamRoutes:
    """The routes of teams."""

    def __init__(self, state: ServerState) -> None:
        self._config, self._logs, self._attribution = state.config, state.logs, state.attribution
        self._opened: tuple[Agents, Teams] | None = None

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/teams", self.create, TeamBody, model="chat", keeps=True, status=201),
            Route("GET", "/v1/teams", self.list, query=("limit", "after")),
            Route("GET", "/v1/teams/{id}", self.show),
            Route("DELETE", "/v1/teams/{id}", self.delete),
            Route("POST", "/v1/teams/{id}/rounds", self.rounds, RoundsBody, model="team", keeps=True),
            Route("POST", "/v1/teams/{id}/messages", self.post, PostBody, keeps=True, status=201),
            Route("POST", "/v1/teams/{id}/votes", self.vote, VoteBody, model="team", keeps=True),
            Route("POST", "/v1/teams/{id}/tool_results", self.tool_results, ToolResultsBody, keeps=True),
            Route("POST", "/v1/teams/{id}/interrupt", self.interrupt, NoBody),
            Route("GET", "/v1/teams/{id}/transcript", self.transcript, query=("format", "member")),
            Route("POST", "/v1/teams/{id}/fork", self.fork, TeamForkBody, keeps=True, status=201),
            Route("POST", "/v1/teams/{id}/rollback", self.rollback, TeamRollbackBody),
        ]

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Create a team, whose members are forks of one beginning."""
        teams = self._teams()
        body = parse(TeamBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        team = body.team()
        check_team(msgspec.structs.replace(team, id=team.id or "team"))  # before anything is compiled of it
        for at, member in enumerate(team.members):
            check_sampling(service, member.sampling, f"members[{at}]")
        await check_length(call, service, body.texts(), "documents")
        for schema in body.schemas():
            await service.chat.grammar(schema, OutputFormat(), share=call.share)
        made = await teams.create(call.tenant, team, service.name)
        await call.json(team_object(made), 201)

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List the teams, most recently created first."""
        asked = parameters(call, ("limit", "after"))
        limit = asked.get("limit", str(LISTED))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
            raise InvalidRequest(f"limit must be 1 to {MOST_LISTED}", field="limit")
        teams = self._teams()

        def show(id: str) -> dict[str, Any]:
            return team_object(teams.get(call.tenant, id))

        created, refresh = await teams.created(call.tenant), partial(teams.refresh, call.tenant)
        await call.json(await page_by_id(created, int(limit), asked.get("after"), show, refresh))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a team. `report.shared_tokens`: how many leading tokens all members' contexts share."""
        teams, id = self._teams(), call.path_part(PATH)
        found = team_object(teams.get(call.tenant, id))
        found["report"]["shared_tokens"] = await teams.shared_tokens(call.tenant, id)
        await call.json(found)

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a team with its members' agents. Answered when all their text is gone from the disk."""
        id = call.path_part(PATH)
        await self._teams().delete(call.tenant, id)
        await call.json({"id": id, "object": "team.deleted", "deleted": True})

    async def rounds(self, call: HTTPCall, service: Service) -> None:
        """Run one round, or several."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(RoundsBody, await read_nothing(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        state = teams.get(call.tenant, id)
        vote = None if body.vote is None else body.vote.ask(state.team)
        if vote is not None:
            teams.check_vote(call.tenant, id, vote)
        many = 1 if body.rounds is None else body.rounds
        teams.check_idle(call.tenant, id)
        teams.check_rounds(call.tenant, id, many)
        if body.content is not None:
            await teams.post(call.tenant, id, body.content)
        caller = Caller(call.tenant, call.share, service)

        async def work(emit: Emit) -> None:
            await teams.rounds(caller, id, many, emit, vote=vote, stop_at=body.stop_at or "")

        await answer(
            call,
            self._logs,
            self._config,
            work,
            stream=bool(body.stream),
            whole=lambda: self._done(call, state.rounds),
        )

    def _done(self, call: HTTPCall, before: int) -> dict[str, Any]:
        """Return the team after its rounds, and their entries."""
        teams, id = self._teams(), call.path_part(PATH)
        team, entries = teams.entries(call.tenant, id)
        said = [one for one in listed(team, entries) if one["round"] > before]
        return team_object(teams.get(call.tenant, id)) | {"entries": said}

    async def post(self, call: HTTPCall, service: Service) -> None:
        """Send a message to all members, or with `to` to some."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(PostBody, await read_json(call, self._config), self._config, call)
        await check_length(call, service, [body.content], "content")
        entry = await teams.post(call.tenant, id, body.content, body.to or (), body.sender)
        await call.json({"object": "team.message", **listed(teams.get(call.tenant, id).team, [entry])[0]}, 201)

    async def tool_results(self, call: HTTPCall, service: Service) -> None:
        """Store what members' tools returned. The next rounds use it."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(ToolResultsBody, await read_json(call, self._config), self._config, call)
        await check_length(call, service, [one.content for one in body.results], "results")
        for one in body.results:
            await teams.answer_call(call.tenant, id, one.call_id, one.content)
        state = teams.get(call.tenant, id)
        await call.json({"id": id, "object": "team.tool_results", "state": state.state, "calls": state.calls})

    async def vote(self, call: HTTPCall, service: Service) -> None:
        """Hold a vote beside the rounds."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(VoteBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        service.check_generates()
        ask = body.ask(teams.get(call.tenant, id).team)
        teams.check_vote(call.tenant, id, ask)
        caller = Caller(call.tenant, call.share, service)
        voted: list[Voted] = []

        async def work(emit: Emit) -> None:
            voted.append(await teams.vote(caller, id, ask, emit))

        await answer(
            call,
            self._logs,
            self._config,
            work,
            stream=bool(body.stream),
            whole=lambda: {"object": "team.vote", **(msgspec.to_builtins(voted[0]) if voted else {})},
        )

    async def interrupt(self, call: HTTPCall, service: Service) -> None:
        """Interrupt what runs. It continues with the next rounds."""
        teams, id = self._teams(), call.path_part(PATH)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        await call.json({"id": id, "object": "team.interrupted", "interrupted": teams.interrupt(call.tenant, id)})

    async def transcript(self, call: HTTPCall, service: Service) -> None:
        """Return the transcript. `format` is json or markdown; `member` selects what that member heard."""
        teams, id = self._teams(), call.path_part(PATH)
        asked = parameters(call, ("format", "member"))
        form = one_of(asked, "format", ("json", "markdown"))
        member = asked.get("member", "")
        team, entries = teams.entries(call.tenant, id, member)
        if form == "markdown":
            headers = [(b"content-type", b"text/markdown; charset=utf-8")]
            await call.respond(200, markdown(team, entries, member).encode("utf-8", "replace"), headers)
            return
        await call.json({"object": "team.transcript", **without_texts(team), "entries": listed(team, entries, member)})

    async def fork(self, call: HTTPCall, service: Service) -> None:
        """Create a team that shares the history up to a round."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(TeamForkBody, await read_nothing(call, self._config), self._config, call)
        await call.json(team_object(await teams.fork(call.tenant, id, body.id, body.round)), 201)

    async def rollback(self, call: HTTPCall, service: Service) -> None:
        """Go back to the end of a round, 0 for the beginning."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(TeamRollbackBody, await read_json(call, self._config), self._config, call)
        await call.json(team_object(await teams.rollback(call.tenant, id, body.round)))

    def _teams(self) -> Teams:
        """Return the teams of the agents that are open now."""
        agents = self._attribution.open()
        if self._opened is None or self._opened[0] is not agents:
            self._opened = agents, Teams(agents)
        return self._opened[1]


def team_object(state: TeamState) -> dict[str, Any]:
    """Return a team as clients see it."""
    return {
        "object": "team",
        "model": state.model,
        **without_texts(state.team),
        "created": state.created,
        "rounds": state.rounds,
        "state": state.state,
        "decision": state.decision,
        "calls": state.calls,
        "report": dict(state.report),
    }
