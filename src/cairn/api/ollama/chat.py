"""Ollama's generating routes and embeddings: a stream is lines of JSON, each a piece of the answer.

Shapes: github.com/ollama/ollama, docs/api.md, as ollama-python's `_types` state them. Durations are nanoseconds.
`prompt_eval_count` is the whole prompt; how much of it came from the cache is in `cairn`, a field of ours.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from cairn.api.chat.exchange import Adapter, ChoiceStream, Exchange, rename_fields
from cairn.api.chat.generation import chat_exchange, check_model, text_exchange
from cairn.api.chat.openai_chunks import cache_object, token_scores
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import ChatBody, Generation
from cairn.api.chat.state import ServerState
from cairn.api.chat.whole_calls import WholeCalls
from cairn.api.http.body import read_plain
from cairn.api.http.call import Headers, HTTPCall, encode
from cairn.api.http.routes import Route
from cairn.api.ollama.schemas import (
    NAMES,
    TEXT_NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    chat_of,
    prompt_chat,
    raw_text,
    warn_of_context,
)
from cairn.api.openai.chat import check_suffix, encode_text
from cairn.api.openai.embeddings import Embeddings, floats, written
from cairn.frontend.embeddings import check_embeds
from cairn.frontend.service import Service
from cairn.text.chat.messages import arguments_of
from cairn.text.chat.replay import parsed_arguments
from cairn.types.errors import CairnError, InvalidRequest
from cairn.types.outputs import Delta, Done, FinishReason, TokenKind, TokenLogprob, ToolCallDelta, logprobs_of

LINES: Headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
LATEST = ":latest"
"""The tag that Ollama's clients append to a name without one."""


class Ollama:
    """The generating routes."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._exchanges = state.exchanges
        self._attribution = state.attribution

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/api/chat", self.chat, OllamaChatBody, model="chat"),
            Route("POST", "/api/generate", self.generate, OllamaGenerateBody, model="chat"),
        ]

    async def chat(self, call: HTTPCall, service: Service) -> None:
        """Generate the next message of a chat, in Ollama's form. Without messages the model is loaded."""
        body = await read(OllamaChatBody, call, self._config, read_plain)
        self._greet(call, service, body)
        if not body.messages:
            await call.json(_loaded(call, service, {"message": {"role": "assistant", "content": ""}}))
            return
        with rename_fields(NAMES):
            chat = chat_of(body, service.chat.mentions, thinks=service.chat.thinks)
            asked = parse(ChatBody, chat, self._config, call)
        await self._run(call, body, await self._chat(call, service, asked, Talk(call, service, body), NAMES))

    async def generate(self, call: HTTPCall, service: Service) -> None:
        """Generate what follows a text, in Ollama's form. Without a prompt the model is loaded."""
        body = await read(OllamaGenerateBody, call, self._config, read_plain)
        self._greet(call, service, body)
        if not body.prompt and not body.suffix:
            await call.json(_loaded(call, service, {"response": ""}))
            return
        if body.raw or body.suffix or not service.chat.template:
            await self._run(call, body, await self._complete(call, service, body))
            return
        with rename_fields(TEXT_NAMES):
            chat = prompt_chat(body, service.chat.mentions, thinks=service.chat.thinks)
            asked = parse(ChatBody, chat, self._config, call)
        before = self._before(body, service)
        exchange = await self._chat(call, service, asked, Text(call, service, body), TEXT_NAMES, before)
        await self._run(call, body, exchange)

    def _greet(self, call: HTTPCall, service: Service, body: OllamaBody) -> None:
        if body.model is not None and is_called(service, body.model):
            body.model = None
        warn_of_context(body.options, service.info.context, call)

    async def _chat(
        self,
        call: HTTPCall,
        service: Service,
        body: ChatBody,
        adapter: LineFormat,
        names: dict[str, str],
        before: Sequence[int] = (),
    ) -> Exchange:
        return await chat_exchange(
            call, service, self._config, self._attribution, body, adapter.of, names, before=before
        )

    async def _complete(self, call: HTTPCall, service: Service, body: OllamaGenerateBody) -> Exchange:
        """Return the exchange of a prompt without a template around it."""
        with rename_fields(TEXT_NAMES):
            given = raw_text(body, service.chat.mentions, thinks=service.chat.thinks)
            asked = parse(Generation, given, self._config, call)
        check_suffix(body.suffix, service)
        tokens = await encode_text(call, service, body.prompt or "", body.suffix or "")
        options = asked.options(
            logprobs=bool(body.logprobs or body.top_logprobs),
            top_logprobs=body.top_logprobs,
        )
        prompts = [[*self._before(body, service), *tokens]]
        adapter = Text(call, service, body)
        return await text_exchange(
            call, service, self._config, self._attribution, asked, prompts, options, adapter.of, TEXT_NAMES
        )

    def _before(self, body: OllamaGenerateBody, service: Service) -> Sequence[int]:
        """Return the tokens of `context`, checked."""
        vocab = service.spec.vocab
        for token in body.context or ():
            if not 0 <= token < vocab:
                raise InvalidRequest(f"context holds {token}; ids go from 0 to {vocab - 1}", field="context")
        return body.context or ()

    async def _run(self, call: HTTPCall, body: OllamaBody, exchange: Exchange) -> None:
        exchange.media = LINES
        await self._exchanges.run(call, exchange, stream=body.streams)


class LineFormat(ABC):
    """The lines of an answer; `piece` returns the fields of one."""

    def __init__(self, call: HTTPCall, service: Service, body: OllamaBody) -> None:
        self._service = service
        self._load = int(call.load_seconds * 1e9)
        self._hides = body.hides
        self._began = time.monotonic_ns()
        self._whole = WholeCalls()
        self._choice: ChoiceStream

    def of(self, choices: Sequence[ChoiceStream]) -> Adapter:
        """Format what `choices` generate."""
        (self._choice,) = choices
        return self

    @abstractmethod
    def piece(self, text: str, thought: str, calls: Sequence[ToolCallDelta] = ()) -> dict[str, Any]:
        """Return the fields of one line."""

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the lines of one delta. A call comes whole, before what follows it."""
        thought = "" if self._hides else delta.reasoning
        before, within = self._whole.push(delta)
        data = self._called(before)
        content = logprobs_of(TokenKind.CONTENT, delta.kinds, delta.logprobs)
        scores = self._logprobs(content, logprobs_of(TokenKind.REASONING, delta.kinds, delta.logprobs))
        if delta.text or thought or scores:
            data += self._line(self.piece(delta.text, thought) | scores | {"done": False})
        return data + self._called(within)

    def _called(self, calls: Sequence[ToolCallDelta]) -> bytes:
        """Return a line of complete calls; empty if there are none."""
        return self._line(self.piece("", "", calls) | {"done": False}) if calls else b""

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return a line of the last call, if there is one, and the last line."""
        return self._called(_uncut(self._whole.finish(), done)) + self._line(self.piece("", "") | self._end(done))

    def end(self) -> bytes:
        """Return nothing: the last line was the end."""
        return b""

    def error(self, error: CairnError) -> bytes:
        """Return the line of a failure."""
        return encode({"error": str(error)}) + b"\n"

    def heartbeat(self) -> bytes:
        """Return a line without news."""
        return self._line(self.piece("", "") | {"done": False})

    def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        said, done = self._choice.said, self._choice.done
        assert done is not None
        calls = [call for part in said.parts() for call in part.tool_calls]
        calls = _uncut(calls, done)
        piece = self.piece(said.text, "" if self._hides else said.reasoning, calls)
        scores = self._logprobs(self._choice.scores(TokenKind.CONTENT), self._choice.scores(TokenKind.REASONING))
        return _head(self._service) | piece | scores | self._end(done)

    def _line(self, more: dict[str, Any]) -> bytes:
        return encode(_head(self._service) | more) + b"\n"

    def _logprobs(self, content: Sequence[TokenLogprob], thought: Sequence[TokenLogprob]) -> dict[str, Any]:
        told = {"logprobs": content, "thinking_logprobs": () if self._hides else thought}
        return {name: token_scores(one, self._service.tokenizer) for name, one in told.items() if one}

    def _end(self, done: Done) -> dict[str, Any]:
        """Return the costs of the answer, a load of the model included."""
        timing = done.timing
        return {
            "done": True,
            "done_reason": "length" if self._choice.reason == "length" else "stop",
            "total_duration": self._load + time.monotonic_ns() - self._began,
            "load_duration": self._load,
            "prompt_eval_count": done.usage.prompt_tokens,
            "prompt_eval_duration": int(timing.prefill * 1e9),
            "eval_count": done.usage.completion_tokens,
            "eval_duration": int(timing.decode * 1e9),
            "cairn": cache_object(done.cache),
        }


class Talk(LineFormat):
    """Adapter of /api/chat: a piece is a message."""

    def piece(self, text: str, thought: str, calls: Sequence[ToolCallDelta] = ()) -> dict[str, Any]:
        """Return a piece of a message."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": call.index, "name": call.name, "arguments": arguments_of(call.arguments)},
                }
                for call in calls
            ]
        return {"message": message}


class Text(LineFormat):
    """Adapter of /api/generate: a piece is a text."""

    def piece(self, text: str, thought: str, calls: Sequence[ToolCallDelta] = ()) -> dict[str, Any]:
        """Return a piece of a text."""
        return {"response": text} | ({"thinking": thought} if thought else {})

    def _end(self, done: Done) -> dict[str, Any]:
        return super()._end(done) | {"context": [*self._choice.request.prompt, *self._choice.tokens]}


def _uncut(calls: list[ToolCallDelta], done: Done) -> list[ToolCallDelta]:
    """Return calls without one that the end has cut: its arguments have to be an object here."""
    cut = done.reason is FinishReason.LENGTH and calls and not isinstance(parsed_arguments(calls[-1].arguments), dict)
    return calls[:-1] if cut else calls


def _head(service: Service) -> dict[str, Any]:
    return {"model": service.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _loaded(call: HTTPCall, service: Service, piece: dict[str, Any]) -> dict[str, Any]:
    load = int(call.load_seconds * 1e9)
    durations = {"total_duration": load, "load_duration": load}
    return _head(service) | piece | {"done": True, "done_reason": "load"} | durations


def is_called(service: Service, name: str) -> bool:
    """Return whether Ollama's clients may call the model by this name: in any case, with or without its tag."""
    wanted = name.casefold()
    return bool({wanted, wanted.removesuffix(LATEST)} & {known.casefold() for known in service.names})


class OllamaEmbeddings:
    """The routes of vectors."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._embeddings = Embeddings(state)

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/api/embed", self.embed, OllamaEmbedBody, model="embed"),
            Route("POST", "/api/embeddings", self.embeddings, OllamaEmbeddingsBody, model="embed"),
        ]

    async def embed(self, call: HTTPCall, service: Service) -> None:
        """Return vectors of one text or several. All have length 1."""
        began = time.monotonic_ns()
        body = parse(OllamaEmbedBody, await read_plain(call, self._config), self._config, call)
        _check(body.model, service)
        load = int(call.load_seconds * 1e9)
        if not body.input:  # it asks for the model to be loaded, which it is
            check_embeds(service)
            costs = {"total_duration": load, "load_duration": load, "prompt_eval_count": 0}
            await call.json({"model": service.name, "embeddings": []} | costs)
            return
        asking = self._embeddings.asking(call, body.truncate is not False, "input")
        made, tokens = await self._embeddings.made(call, service, body.input, asking, body.dimensions, None)
        await call.json(
            {
                "model": service.name,
                "embeddings": await written(made, lambda at, one: floats(one)),
                "total_duration": load + time.monotonic_ns() - began,
                "load_duration": load,
                "prompt_eval_count": tokens,
            }
        )

    async def embeddings(self, call: HTTPCall, service: Service) -> None:
        """Return the vector of a text, with the length that the model gives it."""
        body = parse(OllamaEmbeddingsBody, await read_plain(call, self._config), self._config, call)
        _check(body.model, service)
        if not body.prompt:
            check_embeds(service)
            await call.json({"embedding": []})
            return
        asking = self._embeddings.asking(call, True, "prompt")
        made, _ = await self._embeddings.made(call, service, body.prompt, asking, None, False)
        await call.json({"embedding": floats(made[0])})


def _check(model: str | None, service: Service) -> None:
    check_model(None if model is None or is_called(service, model) else model, service)
