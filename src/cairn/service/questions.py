"""What the front asks the worker beside requests: each `Ask` is one question, and its `Answer` may never come."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from cairn.errors import CairnError
from cairn.service import wire
from cairn.service.link import Link


class Questions:
    """Those that no worker has answered yet."""

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[wire.Answer]] = {}
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._asked)

    async def ask(self, link: Link, what: wire.What, **fields: Any) -> wire.Answer:
        """The worker's answer. Raises what `fail` is told if that comes first."""
        number = next(self._numbers)
        answer: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            link.send(wire.Ask(number, what, **fields))
            return await answer
        finally:
            del self._asked[number]

    def take(self, answer: wire.Answer) -> None:
        """Give an answer to whoever asked, if anybody still waits."""
        if (asked := self._asked.get(answer.id)) is not None and not asked.done():
            asked.set_result(answer)

    def fail(self, error: CairnError) -> None:
        """None of them will be answered."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
