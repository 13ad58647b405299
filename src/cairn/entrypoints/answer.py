"""Answers that `LLM` and `AsyncLLM` return: whole, or as a stream of pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.text.chat.messages import MessageBuilder, message_of
from cairn.types.errors import CairnError, Cancelled, DeadlineExceeded, GenerationFailed, InvalidRequest
from cairn.types.outputs import Delta, Done, FinishReason, TokenLogprob, Usage
from cairn.types.request import Request
from cairn.types.stats import CacheReport

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from cairn.frontend.service import Service


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call. `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str
    function: TypeAdapter[Any] | None = None
    """Validates the arguments and calls the Python function that was passed as this tool."""

    def run(self) -> Any:
        """Call the function that was passed as this tool with the model's arguments, and return its result.

        An async function returns a coroutine to await. Raises InvalidRequest if the tool was not passed as a function
        or the arguments do not fit its parameters. Exceptions of the function are passed on.
        """
        if self.function is None:
            raise InvalidRequest(
                f"the tool {self.name} was not passed as a function: pass functions as tools, or call it yourself "
                "with json.loads(call.arguments)",
                field="tools",
            )
        from pydantic import ValidationError

        try:
            return self.function.validate_json(self.arguments or "{}")
        except ValidationError as error:
            problems = _problems(error)
            raise InvalidRequest(f"the model called {self.name} with arguments that do not fit: {problems}") from error

    def message(self, result: object) -> dict[str, Any]:
        """Return the message that gives the model this tool's result: text as it is, anything else as JSON."""
        if not isinstance(result, str):
            from pydantic import TypeAdapter

            result = TypeAdapter(Any).dump_json(result).decode()
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": result}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A model's answer. `finish_reason` is None while the answer is incomplete."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    detail: str = ""
    """"repetition" if `finish_reason` is LENGTH because the answer was repeating itself."""
    usage: Usage | None = None
    cache: CacheReport | None = None
    """Where the KV of the prompt came from."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    read: Any = None
    """The value that `parsed` returns, or the GenerationFailed that it raises."""

    def __repr__(self) -> str:
        """Show what was said and how it ended; of thousands of tokens and their probabilities the count alone."""
        ended = None if self.finish_reason is None else str(self.finish_reason)
        more = {name: getattr(self, name) for name in ("reasoning", "tool_calls", "detail", "read", "usage")}
        parts = [f"text={self.text!r}", f"{len(self.tokens)} tokens", f"finish_reason={ended!r}"]
        parts += [f"{name}={value!r}" for name, value in more.items() if value not in (None, "", ())]
        return f"Answer({', '.join(parts)})"

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message to append to the conversation."""
        return message_of(self.text, self.reasoning, [(call.id, call.name, call.arguments) for call in self.tool_calls])

    @property
    def parsed(self) -> Any:
        """The answer as an object of the class in `response_format`; None without a class, or if a tool was called.

        Raises GenerationFailed if the answer was cut off or the class rejects it; `text` still holds what was
        generated.
        """
        if isinstance(self.read, GenerationFailed):
            raise self.read
        return self.read


class AsyncStream:
    """A stream of one answer's pieces. Iterate it to the end, or call `aclose`, which cancels the request.

    `answer` is the answer so far. Iterating raises DeadlineExceeded, Cancelled or GenerationFailed if the generation
    did not end normally.
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
        """Start the request. `done` is called with the whole answer.

        `form` parses the answer into the caller's class. `functions` maps a tool's name to the function that its
        calls run.
        """
        self._events = service.generate(request)
        self._done = done
        self._form = form
        self._functions = functions or {}
        self._parts: list[Delta] = []
        self._end: Done | None = None

    @property
    def answer(self) -> Answer:
        """The answer so far; complete once the iteration has ended."""
        parts, built, form = self._parts, MessageBuilder(), self._form
        for part in parts:
            built.add(part)
        end = self._end
        return Answer(
            text=built.text,
            reasoning=built.reasoning,
            tool_calls=tuple(ToolCall(*call, self._functions.get(call[1])) for call in built.calls),
            tokens=tuple(token for part in parts for token in part.tokens),
            finish_reason=end.reason if end else None,
            detail=end.detail if end else "",
            usage=end.usage if end else None,
            cache=end.cache if end else None,
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
            read=None if form is None or end is None or built.calls else _parse(form, built.text, end.reason),
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

    async def wait(self, on_piece: Callable[[Delta], None] | None = None) -> Answer:
        """Read to the end and return the whole answer; `on_piece` is called with each piece."""
        try:
            async for piece in self:
                if on_piece is not None:
                    on_piece(piece)
        finally:
            await self.aclose()
        return self.answer


def _check_end(reason: FinishReason) -> None:
    """Raise the error that belongs to a finish reason; return for a normal end."""
    ends: dict[FinishReason, CairnError] = {
        FinishReason.CANCELLED: Cancelled("the request was cancelled"),
        FinishReason.DEADLINE: DeadlineExceeded("the request reached its time limit"),
        FinishReason.ERROR: GenerationFailed("the generation failed"),
    }
    if reason in ends:
        raise ends[reason]


def _parse(form: TypeAdapter[Any], text: str, reason: FinishReason) -> Any:
    """Return the answer as an object of the requested class, or the GenerationFailed that says why it is not one."""
    from pydantic import ValidationError

    if reason is FinishReason.LENGTH:
        return GenerationFailed("the answer was cut at the token limit before it was complete: raise max_tokens")
    try:
        return form.validate_json(text)
    except ValidationError as error:
        return GenerationFailed(f"the answer does not fit response_format: {_problems(error)}")


def _problems(error: Any) -> str:
    """Return pydantic's errors in one line, at most three."""
    errors = error.errors(include_url=False, include_context=False)[:3]
    return "; ".join(": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in errors)
