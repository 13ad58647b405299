"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API defines them.

Events: docs.anthropic.com/en/docs/build-with-claude/streaming, as anthropic-python's `types.RawMessageStreamEvent`
states them. `input_tokens` are tokens that neither came from the cache nor were written to it; all three together are
the prompt. Whole blocks are written to the cache, never with the last token: an answer is always computed from it, so
`input_tokens` is at least 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from cairn.api.anthropic.schemas import NAMES, MessagesBody, chat_of
from cairn.api.chat.cache_diagnosis import RecentPrompts, message_diagnostics
from cairn.api.chat.exchange import ChoiceStream, rename_fields
from cairn.api.chat.generation import chat_exchange, chat_prompt
from cairn.api.chat.openai_chunks import cache_object, pack, written_of
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import ChatBody
from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall, encode
from cairn.api.http.not_found import anthropic_error
from cairn.api.http.routes import Route
from cairn.api.http.sse import json_event
from cairn.frontend.service import Service
from cairn.text.chat.messages import arguments_of
from cairn.types.errors import CairnError
from cairn.types.outputs import Delta, Done, FinishReason, ToolCallDelta

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class Anthropic:
    """The routes of messages."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._exchanges = state.exchanges
        self._attribution = state.attribution
        self._recent = RecentPrompts()

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/messages", self.messages, MessagesBody, model="chat"),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens, MessagesBody, model="chat"),
        ]

    async def messages(self, call: HTTPCall, service: Service) -> None:
        """Generate the next message of a chat, in Anthropic's form."""
        call.headers.append((b"request-id", call.id.encode()))
        body, chat = await self._read(call, service, answers=True)
        exchange = await chat_exchange(
            call,
            service,
            self._config,
            self._attribution,
            chat,
            lambda choices: MessageAnswer(call, service, choices, body, self._diagnose(call, service, body, choices)),
            NAMES,
            allow_empty=body.max_tokens == 0,
        )
        await self._exchanges.run(call, exchange, stream=bool(body.stream))

    def _diagnose(
        self, call: HTTPCall, service: Service, body: MessagesBody, choices: Sequence[ChoiceStream]
    ) -> dict[str, Any] | None:
        """Return where the prompt leaves that of an earlier message, if the request asks."""
        prompt, parts = choices[0].request.prompt, {"model": service.name} | body.parts
        self._recent.note(call.tenant, "msg_" + call.id, parts, prompt)
        previous = (body.diagnostics or {}).get("previous_message_id")
        if not isinstance(previous, str):
            return None
        return message_diagnostics(self._recent.compare(call.tenant, previous, parts, prompt))

    async def count_tokens(self, call: HTTPCall, service: Service) -> None:
        """Count the tokens of a chat."""
        _, chat = await self._read(call, service, answers=False)
        with rename_fields(NAMES):
            prompt = await chat_prompt(call, service, self._config, chat)
        await call.json({"input_tokens": len(prompt.tokens)})

    async def _read(self, call: HTTPCall, service: Service, *, answers: bool) -> tuple[MessagesBody, ChatBody]:
        body = await read(MessagesBody, call, self._config)
        with rename_fields(NAMES):
            return body, parse(ChatBody, chat_of(body, call, service.chat.mentions, answers=answers), self._config)


class MessageAnswer:
    """Adapter of messages: blocks of thinking, text and calls, one after another."""

    def __init__(
        self,
        call: HTTPCall,
        service: Service,
        choices: Sequence[ChoiceStream],
        body: MessagesBody,
        diagnostics: dict[str, Any] | None,
    ) -> None:
        self._diagnostics = diagnostics
        self._id = call.id
        self._service = service
        self._body = body
        (self._choice,) = choices
        self._started = False
        self._open = ""
        """Type of the block that is open."""
        self._index = -1
        self._thought = ""

    def begin(self) -> bytes:
        """Return nothing: the first event reports what the cache gave, which is known with the first token."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events of one delta."""
        data = self._start()
        if delta.reasoning and self._body.thinks:
            data += self._enter("thinking")
            self._thought += delta.reasoning
            if not self._body.omits:
                data += self._piece("thinking_delta", "thinking", delta.reasoning)
        if delta.text:
            data += self._enter("text") + self._piece("text_delta", "text", delta.text)
        for call in delta.tool_calls:
            data += self._call(call)
        return data

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return the end of the last block, the reason why the message ends, and its usage."""
        stop, sequence = self._stop()
        usage = self._usage(done)
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        return self._start() + self._leave() + _event("message_delta", {"delta": delta, "usage": usage})

    def end(self) -> bytes:
        """Return the event that ends the stream."""
        return _event("message_stop", {})

    def error(self, error: CairnError) -> bytes:
        """Return the event of a failure."""
        return json_event(anthropic_error(error, self._id), "error")

    def heartbeat(self) -> bytes:
        """Return a ping, with the beginning of the message before it: no other event may come first."""
        return self._start() + PING

    def whole(self) -> dict[str, Any]:
        """Return the complete message."""
        said, done = self._choice.said, self._choice.done
        assert done is not None
        content = [block for part in said.parts() for block in self._blocks(part)]
        stop, sequence = self._stop()
        return self._message(content, self._usage(done)) | {"stop_reason": stop, "stop_sequence": sequence}

    def _blocks(self, part: Delta) -> list[dict[str, Any]]:
        """Return the blocks of a part of the answer; none of thinking that was not asked for."""
        if part.tool_calls:
            (call,) = part.tool_calls
            return [{"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call.arguments)}]
        if part.text:
            return [{"type": "text", "text": part.text}]
        if not self._body.thinks:
            return []
        shown = "" if self._body.omits else part.reasoning
        return [{"type": "thinking", "thinking": shown, "signature": self._signature(part.reasoning)}]

    def _start(self) -> bytes:
        """Return the event that begins the message, once."""
        if self._started:
            return b""
        self._started = True
        stream = self._choice.stream
        cache = None if stream is None else stream.cache
        usage = self._counts(0 if cache is None else cache.cached) | {"output_tokens": 0}
        return _event("message_start", {"message": self._message([], usage)})

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "diagnostics": self._diagnostics,
            "usage": usage,
        }

    def _enter(self, kind: str, block: dict[str, Any] | None = None) -> bytes:
        """Open a block, unless one of this type is open that goes on."""
        if self._open == kind and block is None:
            return b""
        data = self._leave()
        self._index += 1
        self._open = kind
        if block is None:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return data + _event("content_block_start", {"index": self._index, "content_block": block})

    def _leave(self) -> bytes:
        """Close the block that is open."""
        if not self._open:
            return b""
        data = b""
        if self._open == "thinking":
            data = self._piece("signature_delta", "signature", self._signature(self._thought))
            self._thought = ""
        self._open = ""
        return data + _event("content_block_stop", {"index": self._index})

    def _piece(self, kind: str, name: str, text: str) -> bytes:
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        return head % (self._index, kind.encode(), name.encode()) + encode(text) + b"}}\n\n"

    def _call(self, call: ToolCallDelta) -> bytes:
        data = b""
        if call.id:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            data = self._enter("tool_use", block)
        if call.arguments:
            data += self._piece("input_json_delta", "partial_json", call.arguments)
        return data

    def _signature(self, thought: str) -> str:
        """Return what a client sends back with a thought: if the thought is not shown, the thought itself."""
        return (
            pack(thought) if self._body.omits else hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()[:32]
        )

    def _stop(self) -> tuple[str, str | None]:
        """Return stop_reason and stop_sequence."""
        choice, done = self._choice, self._choice.done
        assert done is not None
        if done.reason is FinishReason.TOOL_CALLS:
            return "tool_use", None
        if done.reason is FinishReason.LENGTH:
            asked = self._body.max_tokens
            cut = asked is None or choice.request.sampling.max_tokens < asked
            return ("model_context_window_exceeded" if cut else "max_tokens"), None
        if (text := choice.stop_text(self._service.tokenizer.decode)) is not None:
            return "stop_sequence", text
        return "end_turn", None

    def _usage(self, done: Done) -> dict[str, Any]:
        more: dict[str, Any] = {"output_tokens": done.usage.completion_tokens}
        thought = {"thinking_tokens": self._choice.reasoning_tokens}
        more |= {"output_tokens_details": thought, "cairn": cache_object(done.cache)}
        return self._counts(done.usage.cached_tokens) | more

    def _counts(self, cached: int) -> dict[str, Any]:
        prompt = len(self._choice.request.prompt)
        written = written_of(prompt, cached)
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
            "service_tier": "standard",
        }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return json_event({"type": kind} | fields, kind)
