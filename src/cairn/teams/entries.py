"""What a team's journal holds. From these entries alone a round goes on after a crash."""

from __future__ import annotations

import msgspec

from cairn.teams.definition import MAX_OPTIONS, MAX_RANKED, Rule, Team, check_options, check_rule, check_text
from cairn.types.errors import InvalidRequest


class _Item(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    round: int
    """The round that it belongs to; between rounds the last one."""


class Posted(_Item, frozen=True, kw_only=True, tag="message"):
    """A message to all, or a whisper to some."""

    sender: str
    content: str
    to: tuple[str, ...] = ()
    """Nobody named: all."""
    step: int = 0
    """The step of the round that made it; 0 for one that came from outside."""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """A question that members vote on."""

    question: str
    options: tuple[str, ...]
    rule: Rule = "majority"
    coordinator: str = ""
    voters: tuple[str, ...] = ()
    """Nobody named: all."""


def check_poll(team: Team, ask: Poll) -> None:
    """Raise InvalidRequest for a vote that a team cannot hold."""
    check_text(ask.question, "question")
    check_options(ask.options, "options", MAX_RANKED if ask.rule == "ranked" else MAX_OPTIONS)
    check_rule(team, ask.rule, ask.coordinator, "coordinator")
    for name in ask.voters:
        team.member(name)
    if ask.voters and ask.rule == "coordinator":
        raise InvalidRequest("voters: by the rule coordinator that member alone decides", field="voters")


class RoundBegan(_Item, frozen=True, kw_only=True, tag="round.started"):
    """A round begins."""

    vote: Poll | None = None
    """The vote that ends it."""


class VoteCalled(_Item, frozen=True, kw_only=True, tag="vote.started"):
    """A vote beside the rounds begins."""

    step: int
    vote: Poll


class StepOpened(_Item, frozen=True, kw_only=True, tag="step"):
    """A step begins: what its members were told, so that they are told the same when it is done again."""

    step: int
    told: int
    """The number of the last entry that it takes notice of."""


class ToolCalled(_Item, frozen=True, kw_only=True, tag="tool.call"):
    """A member has called a tool of its own before it spoke, or has decided to speak."""

    step: int
    member: str
    number: int
    """Of its calls in this step, from 0."""
    tool: str
    """Empty: it speaks now."""
    arguments: str
    """JSON."""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def id(self) -> str:
        """By what its result is given back."""
        return f"call-{self.round}-{self.step}-{self.member}-{self.number}"


class ToolAnswered(_Item, frozen=True, kw_only=True, tag="tool.result"):
    """What a tool has returned; the member that called it is told, and nobody else."""

    step: int
    member: str
    number: int
    content: str


class Stated(_Item, frozen=True, kw_only=True, tag="turn"):
    """A member has spoken."""

    step: int
    member: str
    turn: int
    """The number of its agent's turn."""
    content: str
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was there."""
    completion_tokens: int = 0


class Chose(_Item, frozen=True, kw_only=True, tag="choice"):
    """A member has answered a question of procedure with one of the answers it was given."""

    step: int
    member: str
    about: str
    """`next`, `amend` or `verdict`."""
    choice: str
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Ballot(_Item, frozen=True, kw_only=True, tag="ballot"):
    """A member has voted."""

    step: int
    member: str
    ranking: tuple[str, ...]
    """One option, or all of them from the best to the worst."""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Voted(_Item, frozen=True, kw_only=True, tag="vote"):
    """A vote is counted."""

    step: int
    question: str
    options: tuple[str, ...]
    rule: Rule
    ballots: dict[str, tuple[str, ...]]
    decision: str | None
    why: str
    counts: tuple[dict[str, float], ...] = ()
    """Votes by option; of a ranked vote one a count."""


class RoundDone(_Item, frozen=True, kw_only=True, tag="round.done"):
    """A round is over."""

    decision: str | None = None
    """What its last vote or verdict decided."""


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
