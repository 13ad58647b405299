"""Answers of OpenAI's Responses API: items of reasoning, text and calls, and 23 types of events about them.

Events: platform.openai.com/docs/api-reference/responses-streaming, as openai-python's `ResponseStreamEvent` states
them. Each is one server-sent event with a `sequence_number` from 0, so event n is number n + 1 of an event log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from cairn.api.chat.cache_diagnosis import Divergence, response_diagnostics
from cairn.api.chat.exchange import ChoiceStream
from cairn.api.chat.free_text_tools import free_text
from cairn.api.chat.openai_chunks import TokenBytes, cache_object, pack, token_scores, written_of
from cairn.api.chat.timings import AnswerTimes, cache_of
from cairn.api.http.sse import json_event
from cairn.api.openai.file_search import CitedText, Searched
from cairn.api.openai.responses_items import MARKS, Called, call_item
from cairn.api.openai.responses_schemas import ResponseBody
from cairn.text.chat.messages import MessageBuilder
from cairn.types.errors import CairnError, ContextTooLong
from cairn.types.outputs import Delta, Done, FinishReason, TokenKind, TokenLogprob, ToolCallDelta, Usage, logprobs_of
from cairn.types.stats import CacheReport

CODES = {"overloaded": "rate_limit_exceeded", "unavailable": "server_is_overloaded"}
"""OpenAI's codes for those of ours that differ."""


def head_of(body: ResponseBody, id: str, model: str, *, stored: bool) -> dict[str, Any]:
    """Return the fields of a response object that repeat its request, in the state of one that just began."""
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "conversation": None if body.conversation is None else _conversation(body.conversation),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}} | (body.text or {}),
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _conversation(given: Any) -> Any:
    return given if isinstance(given, dict) else {"id": given}


@dataclass(slots=True)
class _ItemInProgress:
    """The item that is being generated."""

    kind: str
    id: str
    name: str = ""
    call_id: str = ""
    text: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    cites: CitedText | None = None
    """Checks the citations of a message, if there is something to cite."""
    annotations: list[dict[str, Any]] = field(default_factory=list)


class ResponseAnswer:
    """The adapter of responses."""

    def __init__(
        self,
        head: dict[str, Any],
        called: Mapping[str, Called],
        vocabulary: TokenBytes,
        *,
        encrypted: bool = False,
        logprobs: bool = False,
        searched: Searched | None = None,
        progress: bool = False,
    ) -> None:
        """Format a response whose request fields are in `head`.

        `encrypted`, `logprobs`: items have these too. `searched` is the search that the answer is made from.
        `progress`: events report prompt progress.
        """
        self._head = head
        self._called = called
        self._vocabulary = vocabulary
        self._summary = head["reasoning"].get("summary") is not None
        self._encrypted = encrypted
        self._logprobs = logprobs
        self._choice: ChoiceStream | None = None
        self._progress, self._pace = progress, AnswerTimes((), timings=False, progress=False)
        self._compared = False
        self._divergence: Divergence | None = None
        self._sequence = 0
        self._open: _ItemInProgress | None = None
        self._output: list[dict[str, Any]] = []
        self._searched: Searched | None = None
        self._first = 0
        """Number of items before the model's own."""
        if searched is not None:
            self.show(searched)

    def show(self, searched: Searched) -> None:
        """Begin the answer with a search, and cite what it found."""
        self._searched, self._output = searched, [searched.item]
        self._first = len(self._output)

    def of(
        self, choices: Sequence[ChoiceStream], cache: Callable[[ChoiceStream], CacheReport | None] = cache_of
    ) -> Self:
        """Format what `choices` generate; `cache` returns where the KV of a prompt came from."""
        (self._choice,) = choices
        self._pace = AnswerTimes(choices, timings=False, progress=self._progress, cache=cache)
        return self

    def compare(self, divergence: Divergence | None) -> None:
        """Add where the prompt leaves that of another response."""
        self._compared, self._divergence = True, divergence

    def begin(self) -> bytes:
        """Return the events of a response that was created and is in progress."""
        data = self._event("response.created", response=self._head)
        if self._head["status"] == "queued":
            data += self._event("response.queued", response=self._head)
            self._head = {**self._head, "status": "in_progress"}
        return data + self.heartbeat() + self._search_events()

    def _search_events(self) -> bytes:
        """Return all events of the search at once: it is over when the answer begins."""
        if self._searched is None:
            return b""
        item = self._searched.item
        at = {"output_index": 0, "item_id": item["id"]}
        begun = item | {"status": "in_progress", "results": None}
        data = self._event("response.output_item.added", output_index=0, item=begun)
        for state in ("in_progress", "searching", "completed"):
            data += self._event(f"response.file_search_call.{state}", **at)
        return data + self._event("response.output_item.done", output_index=0, item=item)

    def heartbeat(self) -> bytes:
        """Return one more `in_progress` event: clients measure silence by events, and all know this one."""
        return self._event("response.in_progress", response=self._head)

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events of one delta, with prompt progress before the first."""
        data = b""
        for told in self._pace.heard(index, delta) if self._progress else ():
            data += self._event("response.in_progress", response=self._head, **told)
        if delta.reasoning:
            data += self._enter("reasoning") + self._reasoning(delta.reasoning)
        if delta.text:
            data += self._enter("message") + self._text(
                delta.text, logprobs_of(TokenKind.CONTENT, delta.kinds, delta.logprobs)
            )
        for call in delta.tool_calls:
            data += self._call(call)
        return data

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Return the events that end the last item."""
        return self._leave(cut=_is_cut(done, self._choice))

    def end(self) -> bytes:
        """Return the event with the complete response."""
        found = self.whole()
        return self._event(f"response.{found['status']}", response=found)

    def error(self, error: CairnError) -> bytes:
        """Return the events of a failure."""
        return self._leave(cut=True) + self._event("response.failed", response=failed(self._head, error, self._output))

    def whole(self) -> dict[str, Any]:
        """Return the complete response."""
        choice = self._choice
        assert choice is not None and choice.done is not None
        done = choice.done
        cut = _is_cut(done, choice)
        output = self.items(choice.said, choice.scores(TokenKind.CONTENT), cut=cut)
        found = completed(self._head, output, done.usage, choice.reasoning_tokens, cut=cut)
        found["usage"]["cairn"] = cache_object(done.cache)
        if self._compared:
            prompt, cached = done.usage.prompt_tokens, done.usage.cached_tokens
            found["prompt_cache_diagnostics"] = response_diagnostics(self._divergence, prompt, cached)
        return found | {"temperature": choice.request.sampling.temperature, "top_p": choice.request.sampling.top_p}

    def items(self, said: MessageBuilder, logprobs: Sequence[TokenLogprob] = (), *, cut: bool) -> list[dict[str, Any]]:
        """Return the answer as items: those that were streamed, or all at once. `cut`: the last is incomplete."""
        if len(self._output) == self._first and self._open is None and said:
            scores = tuple(logprobs)
            for part in said.parts():
                if part.text:
                    part, scores = msgspec.structs.replace(part, logprobs=scores), ()
                self.delta(0, part)
        self._leave(cut=cut)
        return self._output

    # --------------------------------------------------------------------------------------------------------- within

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return json_event(value, kind)

    def _at(self, item: _ItemInProgress) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._output)}

    def _enter(self, kind: str, name: str = "", call_id: str = "") -> bytes:
        """Begin an item, unless one of this kind is open that goes on."""
        if self._open is not None and self._open.kind == kind and not call_id:
            return b""
        data = self._leave()
        number = str(self._head["id"]).removeprefix("resp_")
        item = self._open = _ItemInProgress(kind, f"{MARKS[kind]}_{number}_{len(self._output)}", name, call_id)
        shown = self._shown(item, "in_progress")
        data += self._event("response.output_item.added", output_index=len(self._output), item=shown)
        if kind == "message":
            if self._searched is not None:
                item.cites = CitedText(self._searched.sources)
            data += self._event("response.content_part.added", **self._at(item), content_index=0, part=_part("", []))
        elif kind == "reasoning" and self._summary:
            part = {"type": "summary_text", "text": ""}
            data += self._event("response.reasoning_summary_part.added", **self._at(item), summary_index=0, part=part)
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            data += self._event("response.content_part.added", **self._at(item), content_index=0, part=part)
        return data

    def _reasoning(self, text: str) -> bytes:
        item = self._open
        assert item is not None
        item.text.append(text)
        if self._summary:
            return self._event("response.reasoning_summary_text.delta", **self._at(item), summary_index=0, delta=text)
        return self._event("response.reasoning_text.delta", **self._at(item), content_index=0, delta=text)

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        item = self._open
        assert item is not None
        scores = token_scores(logprobs, self._vocabulary) if self._logprobs else []
        item.logprobs += scores
        if item.cites is None:
            return self._told(item, text, scores)
        told, cited = item.cites.push(text)
        return self._told(item, told, scores, cited) if told or scores else b""

    def _told(
        self, item: _ItemInProgress, text: str, scores: Sequence[Any] = (), cited: Sequence[dict[str, Any]] = ()
    ) -> bytes:
        """Return the events of a piece of a message and of what it cites."""
        item.text.append(text)
        at = self._at(item)
        data = self._event("response.output_text.delta", **at, content_index=0, delta=text, logprobs=scores)
        for one in cited:
            more = {"content_index": 0, "annotation_index": len(item.annotations), "annotation": one}
            data += self._event("response.output_text.annotation.added", **at, **more)
            item.annotations.append(one)
        return data

    def _call(self, call: ToolCallDelta) -> bytes:
        data = b""
        if call.id:
            tool = self._called.get(call.name, Called(call.name))
            kind = "custom_tool_call" if tool.custom else f"{tool.kind or 'function'}_call"
            data += self._enter(kind, call.name, call.id)
        item = self._open
        assert item is not None
        item.text.append(call.arguments)
        if item.kind == "function_call" and call.arguments:
            data += self._event("response.function_call_arguments.delta", **self._at(item), delta=call.arguments)
        return data

    def _leave(self, *, cut: bool = False) -> bytes:
        """End the open item; `cut` marks it incomplete."""
        item, self._open = self._open, None
        if item is None:
            return b""
        data = b""
        if item.cites is not None:
            told, cited = item.cites.finish()
            data += self._told(item, told, (), cited) if told else b""
        at, text = self._at(item), "".join(item.text)
        if item.kind == "message":
            scores = item.logprobs
            data += self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=scores)
            data += self._event(
                "response.content_part.done", **at, content_index=0, part=_part(text, scores, item.annotations)
            )
        elif item.kind == "reasoning" and self._summary:
            data += self._event("response.reasoning_summary_text.done", **at, summary_index=0, text=text)
            part = {"type": "summary_text", "text": text}
            data += self._event("response.reasoning_summary_part.done", **at, summary_index=0, part=part)
        elif item.kind == "reasoning":
            data += self._event("response.reasoning_text.done", **at, content_index=0, text=text)
            part = {"type": "reasoning_text", "text": text}
            data += self._event("response.content_part.done", **at, content_index=0, part=part)
        elif item.kind == "custom_tool_call":
            given = free_text(text)
            data += self._event("response.custom_tool_call_input.delta", **at, delta=given)
            data += self._event("response.custom_tool_call_input.done", **at, input=given)
        elif item.kind == "function_call":
            name = item.name
            data += self._event("response.function_call_arguments.done", **at, arguments=text, name=name)
        shown = self._shown(item, "incomplete" if cut else "completed")
        data += self._event("response.output_item.done", output_index=len(self._output), item=shown)
        self._output.append(shown)
        return data

    def _shown(self, item: _ItemInProgress, status: str) -> dict[str, Any]:
        """Return an item as far as it is generated."""
        text = "".join(item.text)
        head: dict[str, Any] = {"id": item.id, "status": status}
        if item.kind == "message":
            content = [_part(text, item.logprobs, item.annotations)] if status != "in_progress" else []
            return head | {"type": "message", "role": "assistant", "content": content}
        if item.kind == "reasoning":
            return head | self._reasoned(text if status != "in_progress" else None)
        found = head | call_item(item.call_id, item.name, text, self._called)
        return found | {"input": ""} if status == "in_progress" and "input" in found else found

    def _reasoned(self, text: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "reasoning", "summary": []}
        if not self._summary:
            found["content"] = [] if text is None else [{"type": "reasoning_text", "text": text}]
        elif text is not None:
            found["summary"] = [{"type": "summary_text", "text": text}]
        if self._encrypted:
            found["encrypted_content"] = None if text is None else pack(text)
        return found


def _is_cut(done: Done, choice: ChoiceStream | None) -> bool:
    """Return whether an answer ended at its token limit; an answer of no tokens is not cut."""
    return done.reason is FinishReason.LENGTH and choice is not None and choice.request.sampling.max_tokens > 0


def _part(text: str, logprobs: list[Any], annotations: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "annotations": list(annotations), "logprobs": logprobs, "text": text}


def completed(
    head: Mapping[str, Any],
    output: list[dict[str, Any]],
    usage: Usage,
    reasoning_tokens: int,
    *,
    cut: bool,
    at: float | None = None,
) -> dict[str, Any]:
    """Return a response that has ended.

    `cut`: it reached its token limit. `at` is when it ended; None: now.
    """
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    written = written_of(prompt, cached)
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time() if at is None else at),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": reasoning_tokens,
                "accepted_prediction_tokens": usage.accepted_prediction_tokens,
                "rejected_prediction_tokens": usage.rejected_prediction_tokens,
            },
            "total_tokens": prompt + usage.completion_tokens,
        },
    }


def failed(head: Mapping[str, Any], error: CairnError, output: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a failed response with the code that clients know.

    Of an overloaded server it says when to try again.
    """
    text = str(error)
    if isinstance(error, ContextTooLong):
        return failed_with(head, "context_length_exceeded", text, output)
    if error.retry_after is not None and (error.status < 500 or error.code in CODES):
        text = f"{text}; try again in {max(error.retry_after, 1.0):.0f} s"
    return failed_with(head, code_of(error.code, error.status), text, output)


def code_of(code: str, status: int) -> str:
    """Return the error code that clients know."""
    return CODES.get(code, "server_error" if status >= 500 else code)


def failed_with(head: Mapping[str, Any], code: str, text: str, output: Sequence[Any]) -> dict[str, Any]:
    """Return a failed response with this code and text."""
    return {**head, "status": "failed", "error": {"code": code, "message": text}, "output": list(output)}
