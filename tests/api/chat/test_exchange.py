"""The loop of an exchange: what must have happened before a client is told that its answer has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from cairn.api.chat.exchange import Batches, ChoiceStream, Exchange
from cairn.types.outputs import Delta, Done, FinishReason, Usage
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport

ENDED = Done(reason=FinishReason.STOP, usage=Usage(prompt_tokens=1, completion_tokens=1), cache=CacheReport())


class Plain:
    """Stand in for a dialect: events are plain words."""

    def begin(self) -> bytes:
        return b"begin "

    def delta(self, index: int, delta: Delta, /) -> bytes:
        return delta.text.encode()

    def finish(self, index: int, done: Done, reason: str, /) -> bytes:
        return b" finish"

    def end(self) -> bytes:
        return b" end"

    def whole(self) -> str:
        return "whole"


class Slow:
    """Stand in for the attribution of answers to agents, on a slow disk."""

    def __init__(self) -> None:
        self.asked, self.stored = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        yield

    async def written(self) -> None:
        self.asked.set()
        await self.stored.wait()


async def test_an_answer_is_stored_before_its_end_is_sent() -> None:
    """A client may send the answer back at once.

    If a killed server no longer knew its token ids, the prompt would be another one.
    """
    request = Request(id=1, prompt=(1,), sampling=SamplingParams(max_tokens=1))
    for stream in (True, False):
        disk: Any = Slow()
        adapter: Any = Plain()
        kept: list[ChoiceStream] = []

        async def source(_: float | None) -> Batches:
            yield []
            yield [(0, Delta(text="hi", tokens=(5,)))]
            yield [(0, ENDED)]

        exchange = Exchange([ChoiceStream(request)], adapter, source, lambda: None, kept.append, disk)
        said: list[bytes] = []

        async def read(exchange: Exchange = exchange, stream: bool = stream, said: list[bytes] = said) -> None:
            said += [data async for data in exchange.chunks(stream=stream)]

        reading = asyncio.create_task(read())
        await asyncio.wait_for(disk.asked.wait(), 10)
        assert kept, "it is stored first"
        await asyncio.sleep(0)
        assert not reading.done()
        disk.stored.set()
        await reading
        assert b"".join(said) == (b"begin hi finish end" if stream else b"")
