"""What is told where the log does not give back what a turn holds: the agent was deleted meanwhile, or a disk lost it.

Damage stays where it is: the other turns are read, listed and exported, and an agent goes on from those before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cairn.agents.content import Content
from cairn.agents.roster import Roster
from cairn.agents.tree import Agent, Turn
from cairn.errors import Damaged, NotFound, Unavailable


class Unreadable(Unavailable):
    """A turn's records are not in the log as they were written. Whoever knows the agent says which of both it is."""

    def __init__(self, turn: Turn, content: Content | None) -> None:
        """`content`: what came in with the turn, where only its answer cannot be read."""
        super().__init__(f"turn {turn.number} cannot be read: the token log is damaged there, or it is erased")
        self.turn, self.content = turn, content


@contextlib.contextmanager
def told(roster: Roster, agent: Agent) -> Iterator[None]:
    """Let what cannot be read of an agent be NotFound where it was deleted, and else Damaged, with what can be done."""
    try:
        yield
    except Unreadable as error:
        if agent not in roster:
            raise NotFound(f"there is no agent {agent.id}", field="id") from None
        turn = error.turn
        if not turn.number:
            raise Damaged(
                f"the beginning of agent {agent.id} cannot be read: the token log is damaged there; delete the agent"
            ) from error
        again = "resume it to have it answered again, " if answerable(roster, agent, error) else ""
        raise Damaged(
            f"turn {turn.number} of agent {agent.id} cannot be read: the token log is damaged there; {again}roll back "
            f"to turn {turn.before}, or delete the agent"
        ) from error


def answerable(roster: Roster, agent: Agent, error: Unreadable) -> bool:
    """Whether only the answer at the agent's head is lost, which nothing follows and which can be computed again."""
    content = error.content
    if error.turn is not agent.head or content is None or content.began.sampling is None:
        return False
    return not roster.followed(agent)
