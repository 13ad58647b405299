"""The order of speakers in a round: each topology is a function over a `Floor`.

A topology depends on the team and the floor's answers alone. After a crash it runs again from the beginning, and the
floor returns the answers that were given before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from cairn.teams.definition import NOBODY, Rule, Team, TopologyKind

YES, NO, ABSTAIN = "yes", "no", "abstain"
UNDECIDED = "undecided"
SPEAK = "Say what you have to say, as {name}."
CHOOSE = "Answer as {name}, with nothing but one of: {choices}."


class Floor(Protocol):
    """The steps that a round is made of. Each call is one step; the members of one call run in parallel."""

    team: Team
    number: int
    """Number of the round."""

    async def say(self, member: str, instruction: str, choices: Sequence[str] = ()) -> str:
        """Let one member speak; return its statement."""
        ...

    async def say_all(self, members: Sequence[str], instruction: str, choices: Sequence[str] = ()) -> Mapping[str, str]:
        """Let members speak in parallel, none hearing the others; return the statements by name."""
        ...

    async def choose(self, members: Sequence[str], about: str, question: str, options: Sequence[str]) -> Sequence[str]:
        """Ask members a question of procedure in parallel; return their answers. No other member sees them."""
        ...

    async def vote(
        self, question: str, options: Sequence[str], *, rule: Rule = "majority", coordinator: str = ""
    ) -> str | None:
        """Hold a vote of all members, or of the one that the rule names; return the decision."""
        ...


async def _round_robin(floor: Floor) -> str | None:
    """Let everybody speak once; each round begins with the next member."""
    names = floor.team.names
    first = (floor.number - 1) % len(names)
    for name in (*names[first:], *names[:first]):
        await _speak(floor, name)
    return None


async def _turn_by_turn(floor: Floor) -> str | None:
    """Let members speak in the given order."""
    for name in floor.team.topology.order:
        await _speak(floor, name)
    return None


async def _broadcast(floor: Floor) -> str | None:
    """Let all members speak in parallel."""
    choices = floor.team.topology.choices
    await floor.say_all(floor.team.names, CHOOSE if choices else SPEAK, choices)
    return None


async def _coordinator(floor: Floor) -> str | None:
    """Let the coordinator name each next speaker, itself included, until it names nobody."""
    topology, names = floor.team.topology, floor.team.names
    question = f"Who is to speak next? Answer {NOBODY} if this round has said enough."
    for _ in range(topology.turns or len(names)):
        (named,) = await floor.choose([topology.coordinator], "next", question, (*names, NOBODY))
        if named == NOBODY:
            break
        await _speak(floor, named)
    return None


async def _free(floor: Floor) -> str | None:
    """Let each speaker name the next."""
    topology, names = floor.team.topology, floor.team.names
    name = topology.first or names[0]
    for turn in range(topology.turns or len(names)):
        if turn:
            others = (*(other for other in names if other != name), NOBODY)
            question = f"Who is to speak next? Answer {NOBODY} if this round has said enough."
            (name,) = await floor.choose([name], "next", question, others)
            if name == NOBODY:
                break
        await _speak(floor, name)
    return None


async def _debate(floor: Floor) -> str | None:
    """Let two sides speak in turn, then the judge, who decides which is ahead."""
    topology = floor.team.topology
    for _ in range(topology.turns or 1):
        for side in topology.sides:
            await _speak(floor, side)
    await floor.say(topology.judge, "Say, as {name}, what you make of both sides.")
    question = f"Which side has the better of it? Answer {UNDECIDED} if neither has."
    (verdict,) = await floor.choose([topology.judge], "verdict", question, (*topology.sides, UNDECIDED))
    return None if verdict == UNDECIDED else verdict


async def _parliamentary(floor: Floor) -> str | None:
    """Run a motion, its amendments and a vote. A different member moves in each round."""
    team = floor.team
    mover = team.names[(floor.number - 1) % len(team.names)]
    await floor.say(mover, "Make a motion, as {name}: say what is to be decided, and why.")
    others = [name for name in team.names if name != mover]
    answers = await floor.choose(others, "amend", f"Do you move to amend the motion of {mover}?", (YES, NO))
    adopted = 0
    for name, answer in zip(others, answers, strict=True):
        if answer == YES:
            await floor.say(name, "Move your amendment, as {name}: say what is to be changed.")
            adopted += await floor.vote(f"Is the amendment of {name} adopted?", (YES, NO)) == YES
    if adopted:
        await floor.say(mover, "Say the motion again, as {name}, with the amendments that were adopted.")
    question = f"Is the motion of {mover} carried?"
    rule: Rule = "majority" if team.rule == "ranked" else team.rule  # yes, no and abstain cannot be ranked
    return await floor.vote(question, (YES, NO, ABSTAIN), rule=rule, coordinator=team.coordinator)


async def _speak(floor: Floor, name: str) -> None:
    choices = floor.team.topology.choices
    await floor.say(name, CHOOSE if choices else SPEAK, choices)


TOPOLOGIES: Mapping[TopologyKind, Callable[[Floor], Awaitable[str | None]]] = {
    "round_robin": _round_robin,
    "turn_by_turn": _turn_by_turn,
    "broadcast": _broadcast,
    "coordinator": _coordinator,
    "free": _free,
    "debate": _debate,
    "parliamentary": _parliamentary,
}
"""The topologies by kind; each runs a round and returns its decision."""
