"""What a model answered, and the pieces of it as they come: what `cairn.entrypoints.llm` gives its callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.text.chat.message_builder import MessageBuilder, message_of
from cairn.types.errors import CairnError, Cancelled, DeadlineExceeded, GenerationFailed
from cairn.types.outputs import Delta, Done, FinishReason, TokenLogprob, Usage
from cairn.types.request import Request
from cairn.types.stats import CacheReport

if TYPE_CHECKING:
    from cairn.frontend.service import Service


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool. `arguments` is the JSON text the model wrote."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answered. `finish_reason` is None while the answer is not complete."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    detail: str = ""
    """"repetition" where `finish_reason` is LENGTH because the answer only repeated itself."""
    usage: Usage | None = None
    cache: CacheReport | None = None
    """Where the KV of the prompt came from."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message to append to the conversation."""
        return message_of(self.text, self.reasoning, [(one.id, one.name, one.arguments) for one in self.tool_calls])


class AsyncStream:
    """The pieces of one answer as they come. Iterate it to the end, or `aclose` it: that cancels the request.

    `answer` is what has come so far. Raises DeadlineExceeded, Cancelled or GenerationFailed where the model did not
    come to an end of its own.
    """

    def __init__(self, service: Service, request: Request, done: Callable[[Answer], None]) -> None:
        self._events = service.generate(request)
        self._done = done
        self._parts: list[Delta] = []
        self._end: Done | None = None

    @property
    def answer(self) -> Answer:
        """What has come so far; complete once the iteration has ended."""
        parts, said = self._parts, MessageBuilder()
        for part in parts:
            said.add(part)
        end = self._end
        return Answer(
            text=said.text,
            reasoning=said.reasoning,
            tool_calls=tuple(ToolCall(*one) for one in said.calls),
            tokens=tuple(token for part in parts for token in part.tokens),
            finish_reason=end.reason if end else None,
            detail=end.detail if end else "",
            usage=end.usage if end else None,
            cache=end.cache if end else None,
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
        )

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        async for event in self._events:
            if isinstance(event, Delta):
                self._parts.append(event)
                return event
            self._end = event
            _check_end(event.reason)
            self._done(self.answer)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def wait(self) -> Answer:
        """Read to the end and return the whole answer."""
        try:
            async for _ in self:
                pass
        finally:
            await self.aclose()
        return self.answer


def _check_end(reason: FinishReason) -> None:
    """An end that is no success is an error, not an answer."""
    ends: dict[FinishReason, CairnError] = {
        FinishReason.CANCELLED: Cancelled("the request was cancelled"),
        FinishReason.DEADLINE: DeadlineExceeded("the request reached its time limit"),
        FinishReason.ERROR: GenerationFailed("the generation failed"),
    }
    if reason in ends:
        raise ends[reason]
