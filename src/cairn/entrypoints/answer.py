"""What a model answered, and the pieces of it as they come: what `cairn.entrypoints.llm` gives its callers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.text.chat.message_builder import MessageBuilder, message_of
from cairn.types.errors import CairnError, Cancelled, DeadlineExceeded, GenerationFailed, InvalidRequest
from cairn.types.outputs import Delta, Done, FinishReason, TokenLogprob, Usage
from cairn.types.request import Request
from cairn.types.stats import CacheReport

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from cairn.frontend.service import Service


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool. `arguments` is the JSON text the model wrote."""

    id: str
    name: str
    arguments: str
    function: TypeAdapter[Any] | None = None
    """Calls the function that was given as this tool."""

    def run(self) -> Any:
        """Call the function that was given as this tool, with the model's arguments; return what it returns.

        Of an async function that is a coroutine, to be awaited. Raises InvalidRequest where the tool was not given as
        a function, and where the arguments do not fit its parameters; what the function raises is passed on.
        """
        if self.function is None:
            raise InvalidRequest(
                f"the tool {self.name} is no function of this call: give functions as tools, or call it yourself with "
                "json.loads(call.arguments)",
                field="tools",
            )
        from pydantic import ValidationError

        try:
            return self.function.validate_json(self.arguments or "{}")
        except ValidationError as error:
            said = _problems(error)
            raise InvalidRequest(f"the model called {self.name} with arguments that do not fit: {said}") from error

    def message(self, result: object) -> dict[str, Any]:
        """Return the message that tells the model a result: text as it is, all else as JSON."""
        if not isinstance(result, str):
            from pydantic import TypeAdapter

            result = TypeAdapter(Any).dump_json(result).decode()
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": result}


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
    read: Any = None
    """What `parsed` returns, or the error it raises."""

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message to append to the conversation."""
        return message_of(self.text, self.reasoning, [(one.id, one.name, one.arguments) for one in self.tool_calls])

    @property
    def parsed(self) -> Any:
        """The answer as the class that was given as `response_format`; None where none was, or a tool was called.

        Raises GenerationFailed where the answer ended before it was complete, or the class refuses it: `text` has what
        came.
        """
        if isinstance(self.read, GenerationFailed):
            raise self.read
        return self.read


class AsyncStream:
    """The pieces of one answer as they come. Iterate it to the end, or `aclose` it: that cancels the request.

    `answer` is what has come so far. Raises DeadlineExceeded, Cancelled or GenerationFailed where the model did not
    come to an end of its own.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        done: Callable[[Answer], None],
        *,
        form: TypeAdapter[Any] | None = None,
        functions: Mapping[str, TypeAdapter[Any]] | None = None,
    ) -> None:
        """`done` is told the whole answer; `form` reads it back, `functions` are what its calls run."""
        self._events = service.generate(request)
        self._done = done
        self._form = form
        self._functions = functions or {}
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
            tool_calls=tuple(ToolCall(*one, self._functions.get(one[1])) for one in said.calls),
            tokens=tuple(token for part in parts for token in part.tokens),
            finish_reason=end.reason if end else None,
            detail=end.detail if end else "",
            usage=end.usage if end else None,
            cache=end.cache if end else None,
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
            read=None if self._form is None or end is None or said.calls else _read(self._form, said.text, end.reason),
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

    async def wait(self, came: Callable[[Delta], None] | None = None) -> Answer:
        """Read to the end and return the whole answer; `came` is told each piece."""
        try:
            async for piece in self:
                if came is not None:
                    came(piece)
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


def _read(form: TypeAdapter[Any], text: str, reason: FinishReason) -> Any:
    """Return the answer as the class that was asked for, or the error that says why it is none."""
    from pydantic import ValidationError

    if reason is FinishReason.LENGTH:
        return GenerationFailed("the answer was cut at its limit of tokens before it was complete: raise max_tokens")
    try:
        return form.validate_json(text)
    except ValidationError as error:
        return GenerationFailed(f"the answer is not what response_format asks for: {_problems(error)}")


def _problems(error: Any) -> str:
    """Say in a line what pydantic found wrong, three things at most."""
    found = error.errors(include_url=False, include_context=False)
    said = [": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in found[:3]]
    return "; ".join(said)
