"""The routes of teams, under /v1/teams.

POST /v1/teams                      GET  /v1/teams?limit=&after=
GET  /v1/teams/{id}                 DELETE /v1/teams/{id}
POST /v1/teams/{id}/rounds          POST /v1/teams/{id}/messages    POST /v1/teams/{id}/votes
POST /v1/teams/{id}/tool_results
POST /v1/teams/{id}/interrupt       POST /v1/teams/{id}/fork        POST /v1/teams/{id}/rollback
GET  /v1/teams/{id}/transcript?format=&member=
"""

from __future__ import annotations

from typing import Any

import msgspec

from cairn.agents.agents import Agents
from cairn.api.chat.generation import check_length, check_model, check_sampling
from cairn.api.chat.paging import LISTED, MOST_LISTED, page_by_id, parameters
from cairn.api.chat.parse import parse
from cairn.api.http.body import read_json, read_nothing
from cairn.api.http.call import HTTPCall
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
from cairn.api.routes import Route
from cairn.api.state import ServerState
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
            Route(
                "POST", "/v1/teams", self.create, TeamBody, summary="A new team.", model="chat", keeps=True, status=201
            ),
            Route(
                "GET",
                "/v1/teams",
                self.list,
                query=("limit", "after"),
                summary="The teams, most recently created first.",
            ),
            Route("GET", "/v1/teams/{id}", self.show, summary="One team, where it stands, and its report."),
            Route(
                "DELETE",
                "/v1/teams/{id}",
                self.delete,
                summary="Delete a team, with its members' agents and all their text.",
            ),
            Route(
                "POST",
                "/v1/teams/{id}/rounds",
                self.rounds,
                RoundsBody,
                summary="A round, or several.",
                model="team",
                keeps=True,
            ),
            Route(
                "POST",
                "/v1/teams/{id}/messages",
                self.post,
                PostBody,
                summary="A message to all members, or with `to` a whisper.",
                keeps=True,
                status=201,
            ),
            Route(
                "POST",
                "/v1/teams/{id}/votes",
                self.vote,
                VoteBody,
                summary="A vote beside the rounds.",
                model="team",
                keeps=True,
            ),
            Route(
                "POST",
                "/v1/teams/{id}/tool_results",
                self.tool_results,
                ToolResultsBody,
                summary="What members' tools returned.",
                keeps=True,
            ),
            Route("POST", "/v1/teams/{id}/interrupt", self.interrupt, NoBody, summary="Cut off what runs."),
            Route(
                "GET",
                "/v1/teams/{id}/transcript",
                self.transcript,
                query=("format", "member"),
                summary="What was said.",
            ),
            Route(
                "POST",
                "/v1/teams/{id}/fork",
                self.fork,
                TeamForkBody,
                summary="A new team that shares the history up to a round.",
                keeps=True,
                status=201,
            ),
            Route(
                "POST", "/v1/teams/{id}/rollback", self.rollback, TeamRollbackBody, summary="Go back behind a round."
            ),
        ]

    async def create(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/teams: a new team, whose members are forks of one beginning."""
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
        """GET /v1/teams, most recently created first."""
        asked = parameters(call, ("limit", "after"))
        limit = asked.get("limit", str(LISTED))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
            raise InvalidRequest(f"limit must be 1 to {MOST_LISTED}", field="limit")
        teams = self._teams()

        def show(id: str) -> dict[str, Any]:
            return team_object(teams.get(call.tenant, id))

        await call.json(await page_by_id(teams.ids(call.tenant), int(limit), asked.get("after"), show))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/teams/{id}. `report.shared_tokens`: how many leading tokens all members' contexts share."""
        teams, id = self._teams(), call.path_part(PATH)
        found = team_object(teams.get(call.tenant, id))
        found["report"]["shared_tokens"] = await teams.shared_tokens(call.tenant, id)
        await call.json(found)

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """DELETE /v1/teams/{id}: answered when its text is gone from the disk, that of its members' agents too."""
        id = call.path_part(PATH)
        await self._teams().delete(call.tenant, id)
        await call.json({"id": id, "object": "team.deleted", "deleted": True})

    async def rounds(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/teams/{id}/rounds: {"rounds", "content", "vote", "stop_at", "stream"}, all optional."""
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
        """The team after its rounds, and what was said in them."""
        teams, id = self._teams(), call.path_part(PATH)
        team, entries = teams.entries(call.tenant, id)
        said = [one for one in listed(team, entries) if one["round"] > before]
        return team_object(teams.get(call.tenant, id)) | {"entries": said}

    async def post(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/teams/{id}/messages: {"content", "to", "sender"}; with `to` a whisper."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(PostBody, await read_json(call, self._config), self._config, call)
        await check_length(call, service, [body.content], "content")
        entry = await teams.post(call.tenant, id, body.content, body.to or (), body.sender)
        await call.json({"object": "team.message", **listed(teams.get(call.tenant, id).team, [entry])[0]}, 201)

    async def tool_results(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/teams/{id}/tool_results: {"results": [{"call_id", "content"}]}; the next rounds go on with them."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(ToolResultsBody, await read_json(call, self._config), self._config, call)
        await check_length(call, service, [one.content for one in body.results], "results")
        for one in body.results:
            await teams.answer_call(call.tenant, id, one.call_id, one.content)
        state = teams.get(call.tenant, id)
        await call.json({"id": id, "object": "team.tool_results", "state": state.state, "calls": state.calls})

    async def vote(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/teams/{id}/votes: {"question", "options", "rule", "coordinator", "voters", "stream"}."""
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
        """POST /v1/teams/{id}/interrupt: what runs is cut off, and goes on with the next rounds."""
        teams, id = self._teams(), call.path_part(PATH)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        await call.json({"id": id, "object": "team.interrupted", "interrupted": teams.interrupt(call.tenant, id)})

    async def transcript(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/teams/{id}/transcript: `format` json or markdown; `member`: what that member was told."""
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
        """POST /v1/teams/{id}/fork: {"id", "round"}, both optional."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(TeamForkBody, await read_nothing(call, self._config), self._config, call)
        await call.json(team_object(await teams.fork(call.tenant, id, body.id, body.round)), 201)

    async def rollback(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/teams/{id}/rollback: {"round"}, 0 for the beginning."""
        teams, id = self._teams(), call.path_part(PATH)
        body = parse(TeamRollbackBody, await read_json(call, self._config), self._config, call)
        await call.json(team_object(await teams.rollback(call.tenant, id, body.round)))

    def _teams(self) -> Teams:
        """The teams of the agents that are open now."""
        agents = self._attribution.open()
        if self._opened is None or self._opened[0] is not agents:
            self._opened = agents, Teams(agents)
        return self._opened[1]


def team_object(state: TeamState) -> dict[str, Any]:
    """A team on the wire."""
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
