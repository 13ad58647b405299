"""Entries of a team's journal. A round is replayed from these alone after a crash."""

from __future__ import annotations

import msgspec

from cairn.teams.definition import MAX_OPTIONS, MAX_RANKED, Rule, Team, check_options, check_rule, check_text
from cairn.types.errors import InvalidRequest


class _Item(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    round: int
    """The round it belongs to; between rounds the last one."""


class Posted(_Item, frozen=True, kw_only=True, tag="message"):
    """A message to all, or a whisper to some."""

    sender: str
    content: str
    to: tuple[str, ...] = ()
    """Receivers; empty for all."""
    step: int = 0
    """The step that made it; 0 for a message from outside."""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """A question to vote on."""

    question: str
    options: tuple[str, ...]
    rule: Rule = "majority"
    coordinator: str = ""
    voters: tuple[str, ...] = ()
    """Members that vote; empty for all."""


def check_poll(team: Team, ask: Poll) -> None:
    """Raise InvalidRequest for a vote that the team cannot hold."""
    check_text(ask.question, "question")
    check_options(ask.options, "options", MAX_RANKED if ask.rule == "ranked" else MAX_OPTIONS)
    check_rule(team, ask.rule, ask.coordinator, "coordinator")
    for name in ask.voters:
        team.member(name)
    if ask.voters and ask.rule == "coordinator":
        raise InvalidRequest("voters: by the rule coordinator that member alone decides", field="voters")


class RoundBegan(_Item, frozen=True, kw_only=True, tag="round.started"):
    """The beginning of a round."""

    vote: Poll | None = None
    """The vote at its end."""


class VoteCalled(_Item, frozen=True, kw_only=True, tag="vote.started"):
    """The beginning of a vote outside a round."""

    step: int
    vote: Poll


class StepOpened(_Item, frozen=True, kw_only=True, tag="step"):
    """The beginning of a step. `told` fixes what its members see, so that a replay shows them the same."""

    step: int
    told: int
    """Number of the last entry that its members see."""


class ToolCalled(_Item, frozen=True, kw_only=True, tag="tool.call"):
    """A member's call of a tool, or its decision to speak now."""

    step: int
    member: str
    number: int
    """Index among its calls of this step, from 0."""
    tool: str
    """Name of the tool; empty if the member speaks now."""
    arguments: str
    """JSON."""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def id(self) -> str:
        """Id that the tool's result refers to."""
        return f"call-{self.round}-{self.step}-{self.member}-{self.number}"


class ToolAnswered(_Item, frozen=True, kw_only=True, tag="tool.result"):
    """A tool's result, seen only by the member that called it."""

    step: int
    member: str
    number: int
    content: str


class Stated(_Item, frozen=True, kw_only=True, tag="turn"):
    """A member's statement."""

    step: int
    member: str
    turn: int
    """Number of its agent's turn."""
    content: str
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was cached."""
    completion_tokens: int = 0


class Chose(_Item, frozen=True, kw_only=True, tag="choice"):
    """A member's answer to a question of procedure."""

    step: int
    member: str
    about: str
    """`next`, `amend` or `verdict`."""
    choice: str
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Ballot(_Item, frozen=True, kw_only=True, tag="ballot"):
    """A member's vote."""

    step: int
    member: str
    ranking: tuple[str, ...]
    """One option, or all from the best to the worst."""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Voted(_Item, frozen=True, kw_only=True, tag="vote"):
    """The result of a vote."""

    step: int
    question: str
    options: tuple[str, ...]
    rule: Rule
    ballots: dict[str, tuple[str, ...]]
    decision: str | None
    why: str
    counts: tuple[dict[str, float], ...] = ()
    """Votes by option; a ranked vote has one such table for each count."""


class RoundDone(_Item, frozen=True, kw_only=True, tag="round.done"):
    """The end of a round."""

    decision: str | None = None
    """The decision of its last vote or verdict."""


Item = (
    Posted
    | RoundBegan
    | VoteCalled
    | StepOpened
    | ToolCalled
    | ToolAnswered
    | Stated
    | Chose
    | Ballot
    | Voted
    | RoundDone
)
