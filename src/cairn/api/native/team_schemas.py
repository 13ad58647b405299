"""Addresses and bodies of the teams' routes."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from cairn.api.chat.message_schemas import Tool as ToolBody
from cairn.api.http.body import Body, Count, Number, Several, Stop
from cairn.api.http.call import shown
from cairn.api.native.agent_schemas import check_metadata
from cairn.teams.definition import USER, Member, MemberTool, Rule, Team, TeamDocument, Topology, TopologyKind
from cairn.teams.entries import Poll
from cairn.text.grammar.grammar import Structure
from cairn.types.errors import InvalidRequest

PATH = "/v1/teams"
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "reasoning_budget",
)


class MemberBody(Body):
    """A member of a team."""

    within: ClassVar[dict[str, type[Body]]] = {"tools": ToolBody}

    name: str
    role: str = ""
    weight: Number = None
    max_tokens: Count = None
    temperature: Number = None
    top_p: Number = None
    top_k: Count = None
    min_p: Number = None
    repetition_penalty: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    stop: Stop | None = None
    seed: Count = None
    reasoning_budget: Count = None
    tools: Several[ToolBody] | None = None
    """Tools it may call before it speaks; the team's owner sends back their results."""

    def member(self) -> Member:
        """Return the member of the team's definition."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        weight = 1.0 if self.weight is None else float(self.weight)
        return Member(name=self.name, role=self.role, weight=weight, sampling=given, tools=self._tools())

    def _tools(self) -> tuple[MemberTool, ...]:
        return tuple(
            MemberTool(
                name=one.function.name,
                description=one.function.description or "",
                parameters=json.dumps({"type": "object"} | (one.function.parameters or {}), ensure_ascii=False),
            )
            for one in self.tools or ()
        )


class TeamDocumentBody(Body):
    """A text that all members know."""

    name: str
    text: str


class TopologyBody(Body):
    """The order of speakers in a round."""

    kind: TopologyKind = "round_robin"
    order: Several[str] | None = None
    coordinator: str | None = None
    first: str | None = None
    sides: Several[str] | None = None
    judge: str | None = None
    turns: Count = None
    choices: Several[str] | None = None

    def topology(self) -> Topology:
        """Return the topology of the team's definition."""
        return Topology(
            kind=self.kind,
            order=tuple(self.order or ()),
            coordinator=self.coordinator or "",
            first=self.first or "",
            sides=tuple(self.sides or ()),
            judge=self.judge or "",
            turns=self.turns or 0,
            choices=tuple(self.choices or ()),
        )


class TeamBody(Body):
    """POST /v1/teams."""

    within: ClassVar[dict[str, type[Body]]] = {
        "members": MemberBody,
        "documents": TeamDocumentBody,
        "topology": TopologyBody,
    }

    id: str | None = None
    model: str | None = None
    system: str | None = None
    documents: Several[TeamDocumentBody] | None = None
    members: Several[MemberBody]
    topology: TopologyBody | None = None
    rule: Rule | None = None
    coordinator: str | None = None
    seed: Count = None
    metadata: dict[str, str] | None = None

    def team(self) -> Team:
        """Return the team. One without an id or a seed gets them when it is made."""
        check_metadata(self.metadata)
        if self.seed is not None and not 0 <= self.seed < 1 << 53:
            raise InvalidRequest("seed must be 0 to 9007199254740991", field="seed")
        return Team(
            id="" if self.id is None else self.id,
            system=self.system or "",
            documents=tuple(TeamDocument(name=one.name, text=one.text) for one in self.documents or ()),
            members=tuple(member.member() for member in self.members),
            topology=(self.topology or TopologyBody()).topology(),
            rule=self.rule or "majority",
            coordinator=self.coordinator or "",
            seed=self.seed or 0,
            metadata=self.metadata or {},
        )

    def texts(self) -> list[str]:
        """Return all texts that go into the prompts of members."""
        found = [self.system or "", *(one.text for one in self.documents or ())]
        return [*found, *(member.role for member in self.members)]

    def schemas(self) -> list[Structure]:
        """Return the schemas that the arguments of members' tools must match."""
        return [
            Structure(kind="json", text=tool.parameters, field=f"members[{at}].tools[{number}].function.parameters")
            for at, member in enumerate(self.members)
            for number, tool in enumerate(member.member().tools)
        ]


class AskBody(Body):
    """A vote: within a round, or POST /v1/teams/{id}/votes."""

    question: str
    options: Several[str]
    rule: Rule | None = None
    coordinator: str | None = None
    voters: Several[str] | None = None

    def ask(self, team: Team) -> Poll:
        """Return the vote; the team's defaults fill in what the body leaves out."""
        rule = self.rule or team.rule
        coordinator = self.coordinator or (team.coordinator if rule == "coordinator" else "")
        return Poll(
            question=self.question,
            options=tuple(self.options),
            rule=rule,
            coordinator=coordinator,
            voters=tuple(dict.fromkeys(self.voters or ())),
        )


class VoteBody(AskBody):
    """POST /v1/teams/{id}/votes."""

    model: str | None = None
    stream: bool | None = None


class RoundsBody(Body):
    """POST /v1/teams/{id}/rounds."""

    within: ClassVar[dict[str, type[Body]]] = {"vote": AskBody}

    model: str | None = None
    """Another than the team was made with."""
    rounds: Count = None
    content: str | None = None
    """A message to all before the first of them."""
    vote: AskBody | None = None
    """A vote at the end of each round."""
    stop_at: str | None = None
    """No more rounds once one has decided this."""
    stream: bool | None = None


class PostBody(Body):
    """POST /v1/teams/{id}/messages."""

    synonyms: ClassVar[dict[str, str]] = {"from": "sender"}

    content: str
    to: Several[str] | None = None
    """The members that a whisper is for; empty: all."""
    sender: str = USER
    """The member that speaks, or `user`."""


class ToolResultBody(Body):
    """The result of one call."""

    call_id: str
    content: str


class ToolResultsBody(Body):
    """POST /v1/teams/{id}/tool_results."""

    within: ClassVar[dict[str, type[Body]]] = {"results": ToolResultBody}

    results: Several[ToolResultBody]


class TeamForkBody(Body):
    """POST /v1/teams/{id}/fork."""

    id: str | None = None
    round: Count = None


class TeamRollbackBody(Body):
    """POST /v1/teams/{id}/rollback."""

    round: int


def one_of(values: dict[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return a parameter of the URL that has one of a few values, by default the first."""
    value = values.get(name, allowed[0])
    if value not in allowed:
        raise InvalidRequest(f"{name} must be {' or '.join(allowed)}, got {shown(value)}", field=name)
    return value


def without_texts(team: Team) -> dict[str, Any]:
    """Return a team as clients see it: documents by name."""
    return {
        "id": team.id,
        "system": team.system,
        "documents": [{"name": one.name, "characters": len(one.text)} for one in team.documents],
        "members": [
            {
                "name": one.name,
                "role": one.role,
                "weight": one.weight,
                "agent": team.agent(one.name),
                "tools": [tool.name for tool in one.tools],
                **one.sampling,
            }
            for one in team.members
        ],
        "topology": {
            "kind": team.topology.kind,
            **{
                name: value
                for name in ("order", "coordinator", "first", "sides", "judge", "turns", "choices")
                if (value := getattr(team.topology, name))
            },
        },
        "rule": team.rule,
        "coordinator": team.coordinator or None,
        "seed": team.seed,
        "metadata": team.metadata,
        "origin": team.origin or None,
        "origin_round": team.origin_round if team.origin else None,
    }
