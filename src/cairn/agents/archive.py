"""What turns hold, read back from the token log when it is asked for: nothing of a turn that has finished stays in
memory but its place in the tree. An interrupted one, which may be resumed, keeps what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.agents.aside import aside
from cairn.agents.content import Branch, Content
from cairn.agents.damage import Unreadable
from cairn.agents.index import Kind
from cairn.agents.log import Log
from cairn.agents.records import EndRecord, TurnRecord, decode
from cairn.agents.tree import Turn
from cairn.errors import Unavailable


class Archive:
    """Reads on other threads than the one that writes. No cache: the system has the pages of the files."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def branch(self, turn: Turn) -> Branch:
        """A turn and all before it. Unreadable for the first that cannot be read."""
        return Branch(await self.contents(list(turn.path())[::-1]))

    async def contents(self, turns: Sequence[Turn]) -> list[Content]:
        """What these turns hold. Unreadable for the first that is damaged, or was erased meanwhile."""
        contents = []
        for turn, content in zip(turns, await self.readable(turns), strict=True):
            if content is None or content.lost:
                raise Unreadable(turn, content)
            contents.append(content)
        return contents

    async def readable(self, turns: Sequence[Turn]) -> list[Content | None]:
        """The same as far as it can be read. Unavailable where the disk gives out nothing."""
        found = {turn.key: turn.content for turn in turns}
        away = [turn for turn in turns if turn.content is None]
        if away:
            try:
                found |= await aside(self._read, away)
            except OSError as error:
                raise Unavailable(
                    f"the token log cannot be read: {error.strerror or error}", retry_after=10.0
                ) from error
        return [found[turn.key] for turn in turns]

    def _read(self, turns: Sequence[Turn]) -> dict[int, Content | None]:
        wanted = [(int(Kind.TURN), turn.key) for turn in turns]
        wanted += [(int(Kind.END), turn.key) for turn in turns if turn.number]
        found: dict[int, Content | None] = dict.fromkeys((turn.key for turn in turns), None)
        for (kind, key), record in zip(wanted, self._log.read(wanted), strict=True):
            content = found[key]
            if record is not None and kind == Kind.TURN and (began := decode(record.payload, TurnRecord)) is not None:
                found[key] = Content(began)
            elif kind == Kind.END and content is not None:
                end = decode(record.payload, EndRecord) if record is not None else None
                if end is None:
                    content.lost = True
                else:
                    content.end(end)
        return found
