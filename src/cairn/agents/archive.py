"""Contents of turns, read from the token log on request.

A finished turn keeps only its place in the tree in memory. An interrupted one, which may be resumed, keeps its content.
If the log cannot return a turn, either the agent was deleted meanwhile or the disk has lost it (see
`typed_read_errors`). Damage costs no other turn: those are read, listed and exported, and an agent can continue from
those before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.content import Branch, Content, Descent
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, TurnRecord, decode
from cairn.agents.log.token_log import TokenLog
from cairn.agents.turn_tree import Agent, Turn
from cairn.system.disk_threads import on_disk_thread
from cairn.types.errors import Damaged, NotFound, Unavailable

SOME = 32
"""Contexts that are held at once, and turns handled before the event loop runs other work."""


class Archive:
    """Reader of turns, on other threads than the writer's. It has no cache of its own: the system caches the files."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log

    async def branch(self, turn: Turn) -> Branch:
        """Return a turn and all turns before it. Raise Unreadable for the first that cannot be read."""
        return Branch(await self.contents(list(turn.path())[::-1]))

    async def contexts(self, turns: Iterable[Turn], most: int) -> AsyncGenerator[list[tuple[array[int], Turn]], None]:
        """Yield the contexts of these turns in batches, each cut to `most` ids.

        A context that a later one of these extends is left out, and so is what cannot be read, with all that follows
        it. Each turn is read once, however many branches share it.
        """
        wanted = dict.fromkeys(turns)
        after = _following(wanted)
        todo, path = after.get(None, [])[::-1], list[Turn]()
        descent = Descent(most)
        batch: list[tuple[array[int], Turn]] = []
        while True:
            while path and not (todo and todo[-1].parent is path[-1]):
                turn = path.pop()
                if (ids := descent.up(wanted=turn in wanted)) is not None:
                    batch.append((array("I", ids), turn))  # compact: it may be long
                if len(batch) == SOME:
                    yield batch
                    batch = []
            if batch:
                yield batch
                batch = []
            if not todo:
                return
            run = [todo.pop()]
            while run[-1] in after:
                run.append(after[run[-1]][0])
            for turn, content in zip(run, await self._until_lost(run), strict=False):
                descent.down(content)
                path.append(turn)
                todo += after.get(turn, [])[:0:-1]
                if len(path) % SOME == 0:
                    await asyncio.sleep(0)

    async def _until_lost(self, turns: Sequence[Turn]) -> list[Content]:
        """Return the contents of consecutive turns, up to the first that cannot be read."""
        contents: list[Content] = []
        try:
            readable = await self.readable(turns)
        except Unavailable:  # some of the turns may be readable
            for turn in turns if len(turns) > 1 else ():
                if not (one := await self._until_lost([turn])):
                    break
                contents += one
            return contents
        for content in readable:
            if content is None or content.lost:
                break
            contents.append(content)
        return contents

    async def contents(self, turns: Sequence[Turn]) -> list[Content]:
        """Return the contents of these turns.

        Raise Unreadable for the first that is damaged or was erased meanwhile.
        """
        contents = []
        for turn, content in zip(turns, await self.readable(turns), strict=True):
            if content is None or content.lost:
                raise Unreadable(turn, content)
            contents.append(content)
        return contents

    async def readable(self, turns: Sequence[Turn]) -> list[Content | None]:
        """Return the contents of these turns, as far as they can be read.

        None for a turn without a readable beginning. Raise Unavailable if the disk refuses to read.
        """
        contents = {turn.key: turn.content for turn in turns}
        away = [turn for turn in turns if turn.content is None]
        if away:
            try:
                contents |= await on_disk_thread(self._read, away)
            except OSError as error:
                raise Unavailable(
                    f"the token log cannot be read: {error.strerror or error}", retry_after=10.0
                ) from error
        return [contents[turn.key] for turn in turns]

    def _read(self, turns: Sequence[Turn]) -> dict[int, Content | None]:
        wanted = [(int(RecordKind.TURN), turn.key) for turn in turns]
        wanted += [(int(RecordKind.END), turn.key) for turn in turns if turn.number]
        contents: dict[int, Content | None] = dict.fromkeys((turn.key for turn in turns), None)
        for (kind, key), record in zip(wanted, self._log.read(wanted), strict=True):
            content = contents[key]
            if (
                record is not None
                and kind == RecordKind.TURN
                and (began := decode(record.payload, TurnRecord)) is not None
            ):
                contents[key] = Content(began)
            elif kind == RecordKind.END and content is not None:
                end = decode(record.payload, EndRecord) if record is not None else None
                if end is None:
                    content.lost = True
                else:
                    content.end(end)
        return contents


def _following(turns: Iterable[Turn]) -> dict[Turn | None, list[Turn]]:
    """Return these turns and all before them, grouped by their parent."""
    after: dict[Turn | None, list[Turn]] = {}
    seen = set[Turn]()
    for end in turns:
        for turn in end.path():
            if turn in seen:
                break
            seen.add(turn)
            after.setdefault(turn.parent, []).append(turn)
    return after


class Unreadable(Unavailable):
    """A turn's records are missing from the log or damaged. `typed_read_errors` tells which."""

    def __init__(self, turn: Turn, content: Content | None) -> None:
        """Create the error. `content`: the beginning of the turn, if only its answer is lost."""
        super().__init__(f"turn {turn.number} cannot be read: it is erased, or the token log is damaged there")
        self.turn, self.content = turn, content


@contextlib.contextmanager
def typed_read_errors(registry: AgentRegistry, agent: Agent) -> Iterator[None]:
    """Raise Unreadable as NotFound if the agent was deleted, else as Damaged with what can be done."""
    try:
        yield
    except Unreadable as error:
        if agent not in registry:
            raise NotFound(f"there is no agent {agent.id}", field="id") from None
        turn = error.turn
        if not turn.number:
            raise Damaged(
                f"the beginning of agent {agent.id} cannot be read: the token log is damaged there; delete the agent"
            ) from error
        again = "resume it to have it answered again, " if answerable(registry, agent, error) else ""
        raise Damaged(
            f"turn {turn.number} of agent {agent.id} cannot be read: the token log is damaged there; {again}roll back "
            f"to turn {turn.parent_number}, or delete the agent"
        ) from error


def answerable(registry: AgentRegistry, agent: Agent, error: Unreadable) -> bool:
    """Return whether only the answer at the agent's head is lost, so that it can be computed again.

    Nothing may follow that turn.
    """
    content = error.content
    if error.turn is not agent.head or content is None or content.began.sampling is None:
        return False
    return not registry.followed(agent)
