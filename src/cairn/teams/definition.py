"""Types of teams - members, documents, topology, voting rule - and their checks and limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from cairn.types.errors import InvalidRequest

TopologyKind = Literal["round_robin", "turn_by_turn", "broadcast", "coordinator", "free", "debate", "parliamentary"]
Rule = Literal["majority", "ranked", "unanimous", "weighted", "coordinator"]

MAX_MEMBERS = 32
MAX_ROUNDS = 1_000
"""Rounds of one team."""
MAX_TURNS = 64
"""Turns of one round in topologies where members decide who speaks."""
MAX_DOCUMENTS = 64
MAX_OPTIONS = 32
MAX_RANKED = 6
"""Options of a ranked vote: a ballot is one of their permutations, 720 for six."""
MAX_TOOLS = 16
"""Tools of one member."""
MAX_CALLS = 4
"""Tool calls of a member in one step, before it speaks."""
MAX_TEXT = 1 << 18
"""Characters of one text: a role, a question, a message."""
STATEMENT_TOKENS = 400
"""Default `max_tokens` of a statement."""
TEAM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
NOBODY = "nobody"
"""Answer of a member that gives the floor to nobody."""
SPEAKS = "none"
"""Answer of a member that calls no tool."""
USER = "user"
"""Default sender of posted messages."""
RESERVED = frozenset({NOBODY, USER, "team", "all", "everybody"})


class MemberTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool of a member; the team's owner runs it."""

    name: str
    description: str = ""
    parameters: str = "{}"
    """The JSON schema of its arguments, as JSON."""


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member: an agent with a role."""

    name: str
    role: str
    weight: float = 1.0
    """Weight of its vote under the rule `weighted`."""
    sampling: dict[str, Any] = {}
    """Fields of `SamplingOptions`."""
    tools: tuple[MemberTool, ...] = ()
    """Tools that it may call before it speaks."""


class TeamDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A text in the shared beginning of all members' contexts."""

    name: str
    text: str


class Topology(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The order of speakers in a round."""

    kind: TopologyKind = "round_robin"
    order: tuple[str, ...] = ()
    """Speakers of `turn_by_turn`, in order; a name may be repeated."""
    coordinator: str = ""
    """The member that gives the floor in `coordinator`."""
    first: str = ""
    """The first speaker in `free`, where each speaker names the next."""
    sides: tuple[str, ...] = ()
    """The two sides of a debate."""
    judge: str = ""
    turns: int = 0
    """Most turns of a round (of each side in a debate); 0: one a member, in a debate 1."""
    choices: tuple[str, ...] = ()
    """Allowed statements, enforced by a grammar; empty for free text."""


class Team(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A team as it was created."""

    id: str
    system: str = ""
    documents: tuple[TeamDocument, ...] = ()
    members: tuple[Member, ...]
    topology: Topology = Topology()
    rule: Rule = "majority"
    coordinator: str = ""
    """The member that decides under the rule `coordinator`."""
    seed: int = 0
    metadata: dict[str, str] = {}
    origin: str = ""
    """Id of the team it was forked from."""
    origin_round: int = 0

    def member(self, name: str) -> Member:
        """Return the member of that name. Raise InvalidRequest if there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise InvalidRequest(f"the team has no member {name[:64]}; {_listed(self.names)}", field="member")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members, in their order."""
        return tuple(member.name for member in self.members)

    def agent(self, name: str) -> str:
        """Return the id of a member's agent."""
        return f"{self.id}.{name}"

    @property
    def shared_agent(self) -> str:
        """Id of the agent that every member is forked from."""
        return f"{self.id}..shared"


def _listed(names: Iterable[str]) -> str:
    return f"there are {', '.join(names)}"


def check_text(text: str, field: str, most: int = MAX_TEXT) -> None:
    """Raise InvalidRequest for a text of more than `most` characters."""
    if len(text) > most:
        raise InvalidRequest(f"{field} has {len(text)} characters; the limit is {most}", field=field)


def check_team(team: Team) -> None:
    """Raise InvalidRequest, naming the field and the limit, if the team is not valid."""
    if not TEAM_ID.fullmatch(team.id):
        raise InvalidRequest(
            "a team's id has 1 to 31 letters, digits, dots, underscores and hyphens and begins with a letter or digit",
            field="id",
        )
    _check_members(team.members)
    if len(team.documents) > MAX_DOCUMENTS:
        raise InvalidRequest(
            f"documents holds {len(team.documents)} documents; the limit is {MAX_DOCUMENTS}", field="documents"
        )
    check_text(team.system, "system")
    for index, document in enumerate(team.documents):
        check_text(document.name, f"documents[{index}].name", 256)
        check_text(document.text, f"documents[{index}].text", 1 << 22)
    check_topology(team, team.topology)
    check_rule(team, team.rule, team.coordinator, "coordinator")


def _check_members(members: Sequence[Member]) -> None:
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise InvalidRequest(
            f"members holds {len(members)} members; a team has 1 to {MAX_MEMBERS}, the limit", field="members"
        )
    seen: set[str] = set()
    for index, member in enumerate(members):
        field = f"members[{index}]"
        if not NAME.fullmatch(member.name) or member.name.lower() in RESERVED:
            raise InvalidRequest(
                f"{field}.name has 1 to 32 letters, digits, underscores and hyphens, begins with a letter, and is none "
                f"of {', '.join(sorted(RESERVED))}",
                field=f"{field}.name",
            )
        if member.name in seen:
            raise InvalidRequest(f"{field}.name: there are two members {member.name}", field=f"{field}.name")
        seen.add(member.name)
        check_text(member.role, f"{field}.role")
        _check_tools(member, field)
        if not 0 < member.weight <= 1e6:
            raise InvalidRequest(
                f"{field}.weight must be above 0 and at most 1,000,000, got {member.weight:g}", field=f"{field}.weight"
            )


def _check_tools(member: Member, field: str) -> None:
    if len(member.tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"{field}.tools holds {len(member.tools)} tools; the limit is {MAX_TOOLS}", field=f"{field}.tools"
        )
    names = [tool.name for tool in member.tools]
    for at, tool in enumerate(member.tools):
        where = f"{field}.tools[{at}].function"
        if names.count(tool.name) > 1 or tool.name == SPEAKS:
            why = "is the answer of a member that calls no tool" if tool.name == SPEAKS else "occurs twice"
            raise InvalidRequest(f"{where}.name: {tool.name} {why}", field=f"{where}.name")
        check_text(tool.description, f"{where}.description", 1 << 12)
        check_text(tool.parameters, f"{where}.parameters", 1 << 14)


_USES: dict[str, tuple[str, ...]] = {
    "round_robin": (),
    "turn_by_turn": ("order",),
    "broadcast": (),
    "coordinator": ("coordinator", "turns"),
    "free": ("first", "turns"),
    "debate": ("sides", "judge", "turns"),
    "parliamentary": (),
}
"""Fields that each kind uses, besides `choices`."""
_NEEDS = {"turn_by_turn": ("order",), "coordinator": ("coordinator",), "debate": ("sides", "judge")}


def check_topology(team: Team, topology: Topology) -> None:
    """Raise InvalidRequest if the topology does not fit the members or sets a field that its kind does not use."""
    uses, names = _USES[topology.kind], frozenset(team.names)
    if max(len(topology.order), len(topology.sides)) > MAX_TURNS or not 0 <= topology.turns <= MAX_TURNS:
        raise InvalidRequest(f"topology: a round has at most {MAX_TURNS} turns, the limit", field="topology.turns")
    for name in ("order", "coordinator", "first", "sides", "judge", "turns"):
        field = f"topology.{name}"
        value = getattr(topology, name)
        if value and name not in uses:
            raise InvalidRequest(f"{field} is not for the topology {topology.kind}", field=field)
        if not value and name in _NEEDS.get(topology.kind, ()):
            raise InvalidRequest(f"{field} is missing: the topology {topology.kind} needs it", field=field)
        for one in value if isinstance(value, tuple) else (value,) if isinstance(value, str) and value else ():
            if one not in names:
                raise InvalidRequest(f"{field} names {one[:64]}, who is no member; {_listed(team.names)}", field=field)
    if topology.kind == "debate":
        _check_debate(topology)
    if topology.kind == "parliamentary" and len(team.members) < 2:
        raise InvalidRequest("topology: a parliament has two members at least", field="topology.kind")
    if topology.choices:
        if topology.kind == "parliamentary":
            raise InvalidRequest("topology.choices is not for the topology parliamentary", field="topology.choices")
        check_options(topology.choices, "topology.choices", MAX_OPTIONS)


def _check_debate(topology: Topology) -> None:
    if len(topology.sides) != 2 or len({*topology.sides, topology.judge}) != 3:
        raise InvalidRequest("topology.sides names two members, and topology.judge a third", field="topology.sides")


def check_rule(team: Team, rule: Rule, coordinator: str, field: str) -> None:
    """Raise InvalidRequest if the rule needs a coordinator and none is named, or the other way round."""
    if rule == "coordinator" and coordinator not in team.names:
        raise InvalidRequest(f"{field} must name the member who decides; {_listed(team.names)}", field=field)
    if rule != "coordinator" and coordinator:
        raise InvalidRequest(f"{field} is for the rule coordinator alone; the rule is {rule}", field=field)


def check_options(options: Sequence[str], field: str, most: int) -> None:
    """Raise InvalidRequest for options that are fewer than 2, more than `most`, equal, empty or too long."""
    if not 2 <= len(options) <= most:
        raise InvalidRequest(f"{field} holds {len(options)} options; it must be 2 to {most}, the limit", field=field)
    twice = [option for option, count in Counter(option.strip() for option in options).items() if count > 1]
    if twice:
        raise InvalidRequest(f"{field} holds {twice[0][:64]!r} twice", field=field)
    for option in options:
        if not option or option != option.strip() or len(option) > 200 or " > " in option or "\n" in option:
            raise InvalidRequest(
                f"{field}: an option has 1 to 200 characters in one line, no blank at either end, and no ' > '",
                field=field,
            )
