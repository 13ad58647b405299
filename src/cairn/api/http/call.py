"""One HTTP exchange as the endpoints see it, and the shape of every answer.

Error bodies are OpenAI's: {"error": {"message", "type", "param", "code"}}
(https://platform.openai.com/docs/guides/error-codes, checked against openai-python's `_exceptions.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

import msgspec

from cairn.system.interfaces import UPLOADED
from cairn.text.render.fair_semaphore import LongTexts
from cairn.types.errors import (
    CairnError,
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    TooLarge,
    Unavailable,
)

RETRY = 2.0
"""Seconds after which a client may ask again: bodies are read and answered faster than that, mostly."""
WRITE_BYTES = 1 << 20
"""A spooled body goes to its file in pieces of about this size, so that a slow disk does not hold up the event loop."""


class BodyBudget:
    """The bytes in hand. `total` bounds all of them, `share` those of one tenant."""

    def __init__(self, total: int, share: int) -> None:
        self._total, self.share = total, share
        self.long = LongTexts()
        """Threads that parse large bodies."""
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes in hand now."""
        return self._held.total()

    def take(self, tenant: str, size: int) -> None:
        """Count `size` bytes more. Raises Overloaded beyond the tenant's share, Unavailable beyond the total."""
        if self._held[tenant] + size > self.share:
            raise Overloaded(
                f"your requests hold {self._held[tenant]} bytes of bodies at once; the limit for one tenant is "
                f"{self.share} (max_bodies_mib)",
                retry_after=RETRY,
            )
        if self.held + size > self._total:
            raise Unavailable(
                f"the server holds as many bytes of request bodies as it may, {self._total} (max_bodies_mib)",
                retry_after=RETRY,
            )
        self._held[tenant] += size

    def give(self, tenant: str, size: int) -> None:
        """Count `size` bytes less."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]


async def spool(pieces: AsyncIterator[bytes], folder: Path) -> BinaryIO:
    """Write a body to an unnamed file on the disk of `folder` and return it. The caller closes it.

    Raises what `pieces` raises, and Unavailable if the disk refuses.
    """
    try:
        # The system's own folder of temporary files may lie in memory: it is only for a server that keeps nothing.
        place = folder if folder.is_dir() else None
        file = tempfile.TemporaryFile(dir=place, prefix=UPLOADED)  # noqa: SIM115
        try:
            waiting = bytearray()
            async for piece in pieces:
                waiting += piece
                if len(waiting) >= WRITE_BYTES:
                    await asyncio.to_thread(file.write, waiting)
                    waiting = bytearray()
            file.write(waiting)
            file.seek(0)
        except BaseException:
            with contextlib.suppress(OSError):  # close tries once more to write the rest
                file.close()
            raise
    except OSError as error:
        raise Unavailable(f"the body cannot be kept in {folder}: {error.strerror or error}") from error
    return file


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

WARNING = b"x-cairn-warning"
JSON = (b"content-type", b"application/json")
NOSNIFF = (b"x-content-type-options", b"nosniff")
SAFE: Headers = [
    NOSNIFF,
    (
        b"content-security-policy",
        b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]
"""Headers of every answer that brings none of its own: whatever text a client stored, no browser runs it."""
AUTHORITY = "cairn.authority"
"""Key in the scope of a call whose request line names a host, with that host as written."""
BEFORE_ANSWER = "cairn.before_answer"
"""Key in the scope of a call whose connection has to know that an answer begins: a function to await before it."""
_NAME = re.compile(rb"[!-.0-~]{1,128}")
"""Names that a client may give a request: visible characters without a slash, since the name stands in a path."""
_encode = msgspec.json.Encoder().encode
_BREAKS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\u2028\u2029\u0085")
"""Line breaks that JSON permits inside strings, and their escapes."""
USED_UP = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
NO_THREAD = "can't start new thread"
USED_RETRY = 5.0
"""Seconds after which a client may try again if the machine had no memory, threads or files left."""


def encode(value: Any) -> bytes:
    """Return a value as JSON that every reader takes for one line.

    Python's `splitlines`, and readers built on it, break lines at three more characters than those that JSON escapes;
    these are escaped too.
    """
    data = _encode(value)
    if not data.isascii():
        for char, escaped in _BREAKS:
            data = data.replace(char, escaped)
    return data


class Disconnected(Exception):
    """Raised when the client is gone and nobody is left to answer."""


def error_body(error: CairnError) -> dict[str, Any]:
    """Return the error in OpenAI's shape.

    For a prompt that is too long it also has the prompt's tokens and the context length, as llama.cpp reports them.
    """
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 499: "cancelled"}
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = kinds.get(error.status, fallback)
    body: dict[str, Any] = {"message": str(error), "type": kind, "param": error.field, "code": error.code}
    if isinstance(error, ContextTooLong) and error.prompt_tokens is not None:
        body |= {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context}
    return {"error": body}


def retry_after(error: CairnError) -> Headers:
    """Return the Retry-After header in whole seconds, rounded up; no header if the error has no such time."""
    if error.retry_after is None:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))]


MAX_WARNINGS = 16
GZIP = (b"gzip", b"x-gzip")
"""Names of the only compression of bodies that is read."""
_UNPACKED_AT_ONCE = 1 << 12
"""Most bytes that are unpacked on the event loop. Their unpacked size is bounded by the limit of bodies."""


def shown(text: str) -> str:
    """Return at most 100 printable characters of a client's text, for a message."""
    return _printable(text[:100])


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _nobody(origin: str) -> bool:
    return False


def _nothing() -> None:
    return None


class HTTPCall:
    """One request and its answer: a thin layer over ASGI that puts the request id on every response.

    `id` is 16 hexadecimal digits, unique for ever. The access layer sets `admits`, `tenant`, `salt`, `share` and
    `payer`.
    `name` is what the client calls the request in X-Request-ID, if that is of a form that can be used: other values
    mean nothing.
    """

    __slots__ = (
        "_budget",
        "_held",
        "_limit",
        "_peeked",
        "_receive",
        "_send",
        "admits",
        "arrived",
        "ended",
        "headers",
        "id",
        "identity",
        "load_seconds",
        "model",
        "name",
        "number",
        "on_body",
        "on_prompt",
        "path",
        "payer",
        "route",
        "salt",
        "scope",
        "settled",
        "share",
        "started",
        "status",
        "tenant",
        "tokens",
        "warnings",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, number: int, budget: BodyBudget, limit: int = 1 << 24
    ) -> None:
        """Wrap an ASGI call. A compressed body may unpack to at most `limit` bytes."""
        self.scope = scope
        self.path: str = scope["path"]
        self.route = "*"
        """The path of its route with the names of variable parts; `*` if it has no route."""
        self.number = number
        self.id = f"{number:016x}"
        self.headers: Headers = []
        """Sent with every answer beside the endpoint's own (CORS)."""
        self.warnings: list[str] = []
        """Warnings to the sender of a request that is answered all the same, sent in a header and in bodies."""
        self.admits: Callable[[str], bool] = _nobody
        """Whether pages of an origin may call, as the access layer has it."""
        self.tenant = "default"
        self.salt = b""
        self.share = ""
        """The tenant, or without keys the client, whose share of the server it takes."""
        self.payer = ""
        """The tenant, or without keys the client's address, whose limits it counts against."""
        self.arrived: Callable[[int], Awaitable[None]] | None = None
        """Counts the bytes of each piece of the body, and raises if they are too many."""
        self.on_body: Callable[[HTTPCall, bytes], None] | None = None
        """Called with the whole body once it is read."""
        self.on_prompt: Callable[[Any, Any], None] | None = None
        """Called with the service and the first request that the call's prompt is asked with."""
        self.settled: Callable[[], None] = _nothing
        """Ends the counting of what arrived: the route counts itself how much it keeps."""
        self.identity = b""
        self.model = ""
        """Identity and name of the model that answers, once it was chosen."""
        self.load_seconds = 0.0
        """How long it waited for that model to be loaded."""
        self.started = False
        self.status = 0
        """The status of the answer, once it has begun."""
        self.tokens: tuple[int, int] | None = None
        """Tokens of prompt and answer, if something was generated."""
        self.ended = ""
        """The reason why the answer ended early although its status is a success."""
        given = self.header(b"x-request-id")
        self.name = given.decode() if given is not None and _NAME.fullmatch(given) else None
        self._receive = receive
        self._send = send
        self._budget, self._limit = budget, limit
        self._held = 0
        self._peeked: bytes | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the value of a request header, the first if it came twice; None if it is absent."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    def path_part(self, prefix: str, number: int = 0) -> str:
        """Return segment `number` of the path below `prefix`, which ends without a slash."""
        return self.path.removeprefix(prefix + "/").split("/")[number]

    async def body(self) -> bytes:
        """Return the whole request body, whose size the guard bounds.

        A body compressed with gzip is unpacked. It counts as held until `release`. Raises Disconnected if the client
        left, Overloaded or Unavailable if too many bytes are held already, TooLarge or InvalidRequest for one that
        unpacks to too much or not at all.
        """
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        parts: list[bytes] = []
        async for part in self.pieces():
            self._budget.take(self.payer, len(part))
            self._held += len(part)
            parts.append(part)
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if self.coding in GZIP:
            body = await self._unpacked(body)
        if self.on_body is not None:
            self.on_body(self, body)
        return body

    @property
    def long(self) -> LongTexts:
        """The threads that parse large bodies."""
        return self._budget.long

    @property
    def coding(self) -> bytes:
        """The compression of the body, as the request names it."""
        return (self.header(b"content-encoding") or b"identity").strip().lower()

    async def _unpacked(self, body: bytes) -> bytes:
        if len(body) <= _UNPACKED_AT_ONCE:
            found = _unpack(body, self._limit)
        else:
            found = await asyncio.to_thread(_unpack, body, self._limit)
        self._budget.take(self.payer, len(found))
        self._held += len(found)
        return found

    async def peek(self) -> bytes:
        """Return the body and keep it for the next call of `body`. Raises what `body` raises."""
        self._peeked = await self.body()
        return self._peeked

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, at most about 64 KiB at a time. Raises Disconnected if the client left."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            piece = message.get("body", b"")
            if self.arrived is not None:
                await self.arrived(len(piece))
            yield piece
            more = message.get("more_body", False)

    def release(self) -> None:
        """Give back the budget that the body takes."""
        self._budget.give(self.payer, self._held)
        self._held = 0

    async def gone(self) -> None:
        """Return once the client has closed the connection. Call only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    @property
    def can_warn(self) -> bool:
        """Whether one more warning is sent."""
        return len(self.warnings) < MAX_WARNINGS

    def warn(self, sentence: str) -> None:
        """Send a warning with the answer, the first 16 of many.

        It goes into a header too, where a control character would cost the whole answer.
        """
        told = _printable(sentence)
        if self.can_warn and told not in self.warnings:  # each choice may say the same
            self.warnings.append(told)

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a complete answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, value: Any, status: int = 200) -> None:
        """Send a complete JSON answer."""
        if self.warnings and isinstance(value, dict):
            value = value | {"warnings": self.warnings}
        await self.respond(status, encode(value), [JSON])

    async def fail(self, error: CairnError, headers: Headers, body: dict[str, Any]) -> None:
        """Send an error; `body` has the shape that the path's clients read."""
        await self.respond(error.status, encode(body), [JSON, *headers, *retry_after(error)])

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers of an answer whose body follows by `write`."""
        if (prepare := self.scope.get(BEFORE_ANSWER)) is not None:
            await prepare()
        self.started = True
        self.status = status
        id = self.id.encode()
        told = [(WARNING, sentence.encode("ascii", "replace")) for sentence in self.warnings]
        own = {name for name, _ in headers}
        safe = [one for one in SAFE if one[0] not in own]
        headers = [
            *headers,
            *safe,
            *self.headers,
            *told,
            (b"x-request-id", id if self.name is None else self.name.encode()),
        ]
        if self.name is not None:
            headers.append((b"x-cairn-request-id", id))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def begin(self, headers: Headers) -> None:
        """Send status 200 and the headers at once, before there is a body."""
        await self.start(200, headers)
        await self.write(b"")

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a piece of the body; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _unpack(body: bytes, limit: int) -> bytes:
    """Return the body without its gzip compression, at most `limit` bytes: a small body may unpack to a large one."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid gzip: {error}", field="Content-Encoding") from None
    if len(found) > limit:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest("the body is not one whole gzip stream", field="Content-Encoding")
    return found


def too_large(limit: int) -> TooLarge:
    """Return the error for a body over `limit` bytes."""
    return TooLarge(f"the request body is larger than {limit} bytes, the limit")


def too_slow(what: str, seconds: float) -> RequestTimeout:
    """Return the error for headers or a body that did not arrive in time."""
    return RequestTimeout(f"the {what} did not arrive within {seconds:g} seconds, the limit")


def internal(id: str) -> CairnError:
    """Return the error for an unforeseen exception: it tells the client only which request to look for in the log."""
    return CairnError(f"an internal error; the server's log names request {id}")


def unforeseen(error: Exception, id: str) -> CairnError:
    """Return the error for an exception that no code expected.

    If the machine ran out of memory, threads or files, that passes: the error is Unavailable then.
    """
    used_up = isinstance(error, OSError) and error.errno in USED_UP
    if used_up or isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_THREAD in str(error)):
        return Unavailable(
            f"the machine has nothing left to serve request {id} with; try again", retry_after=USED_RETRY
        )
    return internal(id)


class Watch:
    """A context that cancels the current task as soon as the client disconnects.

    `left` is True then, and the cancellation ends here. Call `stop` before the last piece of the answer.
    """

    __slots__ = ("_call", "_main", "_task", "left")

    def __init__(self, call: HTTPCall) -> None:
        self._call = call
        self.left = False

    async def __aenter__(self) -> Watch:
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        self._task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        await self._call.gone()
        self.left = True
        self._main.cancel()

    def stop(self) -> None:
        """Stop watching."""
        if not self.left:
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.stop()
        if not self.left:
            return False
        if self._main.cancelling() and self._main.uncancel() > 0:
            return False
        return kind is not None and issubclass(kind, asyncio.CancelledError)


def query(call: HTTPCall) -> list[tuple[str, str]]:
    """Return the parameters in the URL, at most 16."""
    text = call.scope.get("query_string", b"").decode("latin-1")
    try:
        return parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=16)
    except ValueError:
        raise InvalidRequest("the URL's parameters cannot be read") from None
