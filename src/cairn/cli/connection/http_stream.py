"""Answers and events of a server, read from server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx
import msgspec

from cairn.entrypoints.answer import Answer, ToolCall
from cairn.types.errors import GenerationFailed
from cairn.types.outputs import Delta, FinishReason, Usage
from cairn.types.stats import CacheReport, Miss

_REASONS = {reason.value: reason for reason in FinishReason}


class HttpStream:
    """A stream of one answer's pieces, as `cairn.entrypoints.llm.Stream` has it, over server-sent events."""

    def __init__(self, response: httpx.Response, url: str) -> None:
        self._response = response
        self._lines = _lines(response.iter_bytes())
        self._url = url
        self.request = response.headers.get("x-request-id", "")
        """Id of the request, for cancelling it."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._reason: FinishReason | None = None
        self._detail = ""
        self._usage: Usage | None = None
        self._cache: CacheReport | None = None

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        usage = self._usage
        return Answer(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(ToolCall(id, name, arguments) for _, (id, name, arguments) in sorted(self._calls.items())),
            finish_reason=self._reason,
            detail=self._detail,
            usage=usage,
            cache=self._cache,
        )

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        try:
            for line in self._lines:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    self.close()
                    raise StopIteration
                delta = self._take(json.loads(data.decode()))
                if delta is not None:
                    return delta
        except httpx.HTTPError as error:
            raise GenerationFailed(f"the connection to {self._url} was lost: {why(error)}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self.close()
            raise GenerationFailed(f"the server at {self._url} sent an event that cannot be read") from None
        raise GenerationFailed(f"the server at {self._url} ended the answer without a conclusion")

    def close(self) -> None:
        """Close the connection; the server then cancels the request."""
        self._response.close()

    def _take(self, chunk: Mapping[str, Any]) -> Delta | None:
        if chunk.get("error"):
            self.close()
            error = chunk["error"]
            raise GenerationFailed(str(error.get("message", error) if isinstance(error, dict) else error))
        if chunk.get("usage"):
            usage = chunk["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._usage = Usage(
                prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"], cached_tokens=cached
            )
            self._cache = _report(usage.get("cairn"), self._usage)
        for choice in chunk.get("choices") or ():
            self._reason = _REASONS.get(choice.get("finish_reason") or "", self._reason)
            self._detail = str(choice.get("finish_detail") or self._detail)
            delta = choice.get("delta") or {"content": choice.get("text")}
            text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
            if not isinstance(text, str) or not isinstance(reasoning, str):
                raise TypeError
            self._text.append(text)
            self._reasoning.append(reasoning)
            for piece in delta.get("tool_calls") or ():
                self._add_call(piece)
            if text or reasoning:
                return Delta(text=text, reasoning=reasoning)
        return None

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(int(piece["index"]), ["", "", ""])
        function = piece.get("function") or {}
        call[0] = call[0] or piece.get("id") or ""
        call[1] = call[1] or function.get("name") or ""
        call[2] += function.get("arguments") or ""


def read_events(response: httpx.Response, url: str) -> Iterator[dict[str, Any]]:
    """Yield the events of an answer up to `[DONE]`. GenerationFailed for an error, or an end without `[DONE]`."""
    try:
        for line in _lines(response.iter_bytes()):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data.decode())
            if error := event.get("error"):
                raise GenerationFailed(str(error.get("message", error) if isinstance(error, dict) else error))
            yield event
    except httpx.HTTPError as error:
        raise GenerationFailed(f"the connection to {url} was lost: {why(error)}") from None
    except (ValueError, AttributeError, RecursionError):
        raise GenerationFailed(f"the server at {url} sent an event that cannot be read") from None
    raise GenerationFailed(f"the server at {url} ended the answer without a conclusion")


def _report(fields: Mapping[str, Any] | None, usage: Usage) -> CacheReport:
    """Return the source of the prompt's KV; of a server that does not report it, the counts in its usage."""
    if not fields:
        return CacheReport(computed=usage.prompt_tokens - usage.cached_tokens, pool=usage.cached_tokens)
    misses = msgspec.convert(fields.get("miss") or [], list[Miss])
    return CacheReport(
        computed=fields["computed"],
        pool=fields["pool"],
        ram=fields["ram"],
        disk=fields["disk"],
        load=fields["load_seconds"],
        miss=misses[0] if misses else None,
    )


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines that end with a line feed. httpx also splits at U+2028 and the like, which JSON may contain."""
    begun: list[bytes] = []
    for piece in pieces:
        *ended, rest = piece.split(b"\n")
        for line in ended:
            yield b"".join([*begun, line])
            begun.clear()
        begun.append(rest)
    yield b"".join(begun)


def why(error: httpx.HTTPError) -> str:
    """Return the error's text, or its type if it has none."""
    return str(error) or type(error).__name__
