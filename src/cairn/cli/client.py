"""A running server as the command line sees it: the same calls that `LLM` has, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx
import msgspec

from cairn.answer import Answer, ToolCall
from cairn.errors import CairnError, ConfigError, GenerationFailed, Unavailable
from cairn.resolve import Resolved
from cairn.types import CacheReport, Delta, FinishReason, Miss, Usage

_TIMEOUT = httpx.Timeout(10, read=600)
_REASONS = {reason.value: reason for reason in FinishReason}


def connect(resolved: Resolved, url: str | None = None) -> Client:
    """The server at `url` (host:port is enough), or at the configured host and port.

    A MODEL on the command line names the model to ask; otherwise it is the one that the server has.
    """
    config = resolved.config
    if url is None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else host
        url = f"{host}:{config.port}"
    key = config.api_key[0].reveal() if config.api_key else ""
    model = config.model if resolved.source("model") == "MODEL" else ""
    return Client(url, key, config.admin_key.reveal() if config.admin_key else key, model)


class Client:
    """One server. Raises what the server said as a CairnError, and Unavailable if nobody answers."""

    def __init__(self, url: str, key: str = "", admin_key: str = "", model: str = "") -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not the address of a server; it should look like http://127.0.0.1:8000")
        self._key = key
        self._model = model
        self._admin_key = admin_key
        # Proxies are for the internet; a server of one's own is addressed directly.
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, *, admin: bool = False) -> httpx.Response:
        """GET; a 503 of /health/ready is an answer, not an error."""
        response = self._send("GET", path, None, self._admin_key if admin else self._key)
        with closing(response):
            response.read()
        if not response.is_success and not (path == "/health/ready" and response.status_code == 503):
            raise _error(response)
        return response

    def post(self, path: str, body: Mapping[str, Any], *, admin: bool = False) -> Any:
        """POST JSON, get JSON."""
        with closing(self._send("POST", path, body, self._admin_key if admin else self._key)) as response:
            response.read()
            if not response.is_success:
                raise _error(response)
            return response.json()

    def delete(self, path: str) -> None:
        """DELETE."""
        with closing(self._send("DELETE", path, None, self._key)) as response:
            response.read()
            if not response.is_success:
                raise _error(response)

    def download(self, path: str, target: Path) -> None:
        """GET into a new file, which is removed again if it did not come whole. CairnError if it cannot be written."""
        with closing(self._send("GET", path, None, self._key)) as response:
            if not response.is_success:
                response.read()
                raise _error(response)
            try:
                file = target.open("xb")
            except FileExistsError:
                raise CairnError(f"{target} exists already; give another name") from None
            except OSError as error:
                raise CairnError(f"{target} cannot be written: {error.strerror or error}") from error
            whole = False
            try:
                with file:
                    for piece in response.iter_bytes():
                        file.write(piece)
                whole = True
            except OSError as error:
                raise CairnError(f"{target} cannot be written: {error.strerror or error}") from error
            except httpx.HTTPError as error:
                raise Unavailable(f"the connection to {self.url} was lost: {error or type(error).__name__}") from None
            finally:
                if not whole:
                    target.unlink(missing_ok=True)

    def upload(self, path: str, source: Path) -> Any:
        """POST a file, get JSON. CairnError if it cannot be read."""
        try:
            with source.open("rb") as file, closing(self._send("POST", path, None, self._key, file)) as response:
                response.read()
                if not response.is_success:
                    raise _error(response)
                return response.json()
        except OSError as error:
            raise CairnError(f"{source} cannot be read: {error.strerror or error}") from error

    def turn(self, agent: str, message: Mapping[str, Any], **sampling: Any) -> HttpStream:
        """The answer of an agent to a new message, as it comes."""
        return self._stream(f"/v1/agents/{quote(agent, safe='')}/turns", {"messages": [message]}, sampling)

    def resume(self, agent: str) -> HttpStream:
        """The whole answer of an agent's interrupted turn, as it comes."""
        return self._open(f"/v1/agents/{quote(agent, safe='')}/resume", {"stream": True})

    def model(self) -> str:
        """The name of the model to ask."""
        if self._model:
            return self._model
        models = self.get("/v1/models").json()["data"]
        if not models:
            raise Unavailable(f"the server at {self.url} has no model")
        self._model = str(models[0]["id"])
        return self._model

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> HttpStream:
        """The answer to a conversation, as it comes."""
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, sampling)

    def generate(self, prompt: str, **sampling: Any) -> HttpStream:
        """The continuation of a text, as it comes; without `max_tokens` as long as the context allows."""
        if sampling.get("max_tokens") is None:
            size = self.post("/tokenize", {"model": self.model(), "prompt": prompt})
            sampling["max_tokens"] = max(1, size["max_model_len"] - size["count"])
        return self._stream("/v1/completions", {"prompt": prompt}, sampling)

    def _stream(self, path: str, body: dict[str, Any], sampling: Mapping[str, Any]) -> HttpStream:
        body |= {"model": self.model(), "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in sampling.items() if value is not None}
        return self._open(path, body)

    def _open(self, path: str, body: dict[str, Any]) -> HttpStream:
        response = self._send("POST", path, body, self._key)
        if not response.is_success:
            with closing(response):
                response.read()
                raise _error(response)
        return HttpStream(response, self.url)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, key: str, file: BinaryIO | None = None
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if file is not None:
            headers["content-type"] = "application/octet-stream"
        request = self._http.build_request(method, self.url + path, json=body, content=file, headers=headers)
        try:
            return self._http.send(request, stream=True)
        except httpx.ConnectError:
            raise Unavailable(f"no server answers at {self.url}; start one with: cairn serve") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"the server at {self.url} did not answer: {error or type(error).__name__}") from None


class HttpStream:
    """The pieces of one answer over server-sent events; the twin of `cairn.llm.Stream`."""

    def __init__(self, response: httpx.Response, url: str) -> None:
        self._response = response
        self._lines = response.iter_lines()
        self._url = url
        self.request = response.headers.get("x-request-id", "")
        """Id of the request, by which it is cancelled."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._cache: CacheReport | None = None

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        usage = self._usage
        return Answer(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(ToolCall(*self._calls[index]) for index in sorted(self._calls)),
            finish_reason=self._reason,
            usage=usage,
            cache=self._cache,
        )

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        try:
            for line in self._lines:
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    self.close()
                    raise StopIteration
                delta = self._take(json.loads(data))
                if delta is not None:
                    return delta
        except httpx.HTTPError as error:
            raise GenerationFailed(f"the connection to {self._url} was lost: {error or type(error).__name__}") from None
        raise GenerationFailed(f"the server at {self._url} ended the answer without a conclusion")

    def close(self) -> None:
        """Close the connection; the server then cancels the request."""
        self._response.close()

    def _take(self, chunk: Mapping[str, Any]) -> Delta | None:
        if "error" in chunk:
            self.close()
            raise GenerationFailed(str(chunk["error"].get("message", chunk["error"])))
        if chunk.get("usage"):
            given = chunk["usage"]
            cached = (given.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._usage = Usage(
                prompt_tokens=given["prompt_tokens"], completion_tokens=given["completion_tokens"], cached_tokens=cached
            )
            self._cache = _report(given.get("cairn"), self._usage)
        for choice in chunk.get("choices") or ():
            self._reason = _REASONS.get(choice.get("finish_reason") or "", self._reason)
            delta = choice.get("delta") or {"content": choice.get("text")}
            text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
            self._text.append(text)
            self._reasoning.append(reasoning)
            for piece in delta.get("tool_calls") or ():
                self._add_call(piece)
            if text or reasoning:
                return Delta(text=text, reasoning=reasoning)
        return None

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(piece["index"], ["", "", ""])
        function = piece.get("function") or {}
        call[0] = call[0] or piece.get("id") or ""
        call[1] = call[1] or function.get("name") or ""
        call[2] += function.get("arguments") or ""


def _report(given: Mapping[str, Any] | None, usage: Usage) -> CacheReport:
    """Where the prompt's KV came from; of a server that does not say, the counts of its usage."""
    if not given:
        return CacheReport(computed=usage.prompt_tokens - usage.cached_tokens, pool=usage.cached_tokens)
    miss = given.get("miss")
    return CacheReport(
        computed=given["computed"],
        pool=given["pool"],
        ram=given["ram"],
        disk=given["disk"],
        load=given["load_seconds"],
        miss=msgspec.convert(miss, Miss) if miss else None,
    )


def _error(response: httpx.Response) -> CairnError:
    """The server's own sentence, or its status."""
    field = None
    try:
        error = response.json()["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"the server answered {response.status_code} {response.reason_phrase}"
    if response.status_code == 401:
        message += "; give the key with CAIRN_API_KEY or --api-key @FILE"
    return CairnError(message, field=field)
