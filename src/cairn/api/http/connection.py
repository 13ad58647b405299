"""Bounds between a socket and the HTTP parser: no client can hold a connection or memory for ever.

`Guard` is uvicorn's httptools protocol with bounds: bytes of headers and body (chunked bodies too), time for headers,
time between pieces of a body and its rate, time for a client to read, number of connections. Refusals are answers in
the API's error shape. The listener's sweep over all connections replaces timers for each of them.

A connection is in one phase at a time:

    NEW -> HEAD -> BODY -> ANSWER -> IDLE -> HEAD ...        any of them -> LINGER (only flushing) -> CLOSED

A request that arrives before the previous answer has ended is not read (no pipelining: RFC 9112, 9.3.2 lets a server
close instead); the connection closes after that answer.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cairn.api.http.call import AUTHORITY, BEFORE_ANSWER, too_large, too_slow
from cairn.api.http.sse import HEARTBEAT
from cairn.api.http.transport import WRITE_BUFFER, OutputTransport, refusal
from cairn.config.config import Config
from cairn.rag.definition import MAX_BYTES
from cairn.system.interfaces import Rng
from cairn.types.errors import CairnError, HeadersTooLarge, InvalidRequest, Unavailable

EARLY_BYTES = 1 << 16
"""Largest announced body whose end is awaited before an answer that did not need it."""
EARLY_SECONDS = 1.0
"""How long it is awaited, so that the connection can serve the client's next request."""
LINGER_SECONDS = 2.0
"""How long a refused client is still listened to, so that it can read the refusal before the reset."""


class Phase(enum.Enum):
    """The place of a connection in its exchange."""

    NEW = "new"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    IDLE = "idle"
    LINGER = "linger"
    CLOSED = "closed"


class Verdict(enum.Enum):
    """Ways to end a connection without an answer."""

    CLOSE = "close"
    ABORT = "abort"


class Times:
    """The times of one connection, in seconds of the event loop's clock."""

    def __init__(self, config: Config, now: float) -> None:
        self._config = config
        self.since = now
        """When the phase began."""
        self.heard = now
        """When bytes came last."""
        self._sent = 0
        self._stuck: float | None = None
        """The time since which the client has read nothing of what is written."""

    def look(self, now: float, sent: int, unsent: int) -> None:
        """Record how many bytes were sent and how many wait to be sent."""
        if unsent == 0:
            self._stuck = None
        elif self._stuck is None or sent != self._sent:
            self._stuck = now
        self._sent = sent

    def verdict(self, now: float, phase: Phase, body_bytes: int, *, reading: bool) -> Verdict | CairnError | None:
        """Return what is due now: an error to refuse with, a `Verdict`, or None.

        `reading`: whether the server is reading the body, so that a slow one is the client's fault.
        """
        config = self._config
        if self._stuck is not None and now - self._stuck > config.stream_stall:
            return Verdict.ABORT
        elapsed = now - self.since
        match phase:
            case Phase.NEW if elapsed > config.header_timeout:
                return Verdict.CLOSE
            case Phase.HEAD if elapsed > config.header_timeout:
                return too_slow("headers", config.header_timeout)
            case Phase.BODY if reading:
                if now - self.heard > config.body_timeout:
                    return too_slow("next piece of the body", config.body_timeout)
                if elapsed > config.body_timeout and body_bytes < config.min_body_rate * elapsed:
                    return too_slow(f"body, at {config.min_body_rate} bytes a second or more,", elapsed)
            case Phase.IDLE if elapsed > config.idle_timeout:
                return Verdict.CLOSE
            case Phase.LINGER if elapsed > LINGER_SECONDS and self._stuck is None:
                return Verdict.ABORT
        return None


CONNECTIONS_RETRY = 1.0
FORM = b"multipart/form-data"
UPLOAD_BYTES = MAX_BYTES + (1 << 20)
"""Bytes of the largest document in a form."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK, LAST_LOOK = 0.01, 1.0
"""Seconds between looks at a connection that the client has closed or half closed: ever twice as long."""
ABSOLUTE = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)
"""How a target of the absolute form begins, and the host that it names (RFC 9112, 3.2.2)."""
OFFERS = (b"upgrade", b"http2-settings")
"""Headers that offer to switch protocols, and how Connection names them."""


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """The objects that the connections of one listener share."""

    config: Config
    rng: Rng
    loop: asyncio.AbstractEventLoop
    uvicorn: uvicorn.Config
    state: ServerState
    upload: Callable[[str], str]
    """Returns whether a path takes a `file` as the body, or in a `form`; otherwise an empty string."""


class Guard(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, context: ConnectionContext) -> None:
        super().__init__(context.uvicorn, context.state, {}, context.loop)
        self.access_log = False
        self._context = context
        self._config = context.config
        self._max_head = context.config.max_header_kib << 10
        self._max_body = 0
        self.phase = Phase.NEW
        self._times = Times(context.config, self.loop.time())
        self._head_bytes = 0
        self._body_bytes = 0
        self._announced = 0
        """Bytes of the body by its Content-Length; 0 without one."""
        self._whole: asyncio.Future[None] | None = None
        """Done once the body has arrived or never will, if an answer waits for that."""
        self._moved = False
        self._deaf = False

    # ------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, or refuse it if too many are open."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self.output = OutputTransport(transport, self.end)
        super().connection_made(self.output)  # type: ignore[arg-type]
        if len(self.connections) > self._config.max_connections:
            self.refuse(
                Unavailable(
                    f"{self._config.max_connections} connections are open, the limit", retry_after=CONNECTIONS_RETRY
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        self.phase = Phase.CLOSED
        self._wake_early()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client, within the bound on headers."""
        if self._deaf:
            return
        self._times.heard = self.loop.time()
        if self.phase is Phase.NEW or self.phase is Phase.IDLE:
            self._to_head()
        began = self.phase
        self._moved = False
        self._feed(data)
        if self._deaf or self.phase is not began:
            return
        # In a body, bytes that carry no content are chunk headers or trailers.
        if began is Phase.HEAD or (began is Phase.BODY and not self._moved):
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head:
                self._refuse_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's input: it closed the connection, or only its side (`nc -N`) and still reads.

        Both look the same until something is written: the kernel of a client that is gone then says so. A complete
        request is therefore answered, and what is sent first carries no meaning: 100 Continue, or a comment in a
        stream.
        """
        if self.phase is Phase.HEAD or self.phase is Phase.BODY:
            self.refuse(InvalidRequest("the connection ended before the request was whole"))
        if self.phase is not Phase.ANSWER or self.output.reset:
            return False
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            if self.cycle.scope["http_version"] != "1.0":  # which knows no interim answers
                self.output.write(CONTINUE)
        elif self.output.events and self.cycle.chunked_encoding:
            self.output.write(b"%x\r\n%b\r\n" % (len(HEARTBEAT), HEARTBEAT))
        self._watch_for_reset(FIRST_LOOK)
        return True

    def _watch_for_reset(self, pause: float) -> None:
        """Look now and then whether the client is gone: while nothing is read, the event loop does not report it."""

        def look() -> None:
            if self.phase is not Phase.ANSWER:
                return
            if self.output.reset:
                self.output.raw.abort()
            else:
                self._watch_for_reset(min(2 * pause, LAST_LOOK))

        self.loop.call_later(pause, look)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._deaf:
                self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._garbage()

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer to switch protocols.

        Some clients (Java's) make the offer with every request, and the parser then drops the body. A server may ignore
        the offer (RFC 9110, 7.8).
        """
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(option for option in value.split(b",") if option.strip().lower() not in OFFERS)
            if name not in OFFERS:
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.phase = Phase.HEAD
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _garbage(self) -> None:
        if self.phase is Phase.ANSWER:
            self._hear_no_more()
        elif not self._deaf:
            self.refuse(InvalidRequest("this is not a valid HTTP request"))

    def _hear_no_more(self) -> None:
        """Read nothing further; the connection closes after the answer that is under way."""
        self._deaf = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.end()

    def _to_head(self) -> None:
        self.phase = Phase.HEAD
        self._times.since = self._times.heard
        self._head_bytes = 0

    # --------------------------------------------------------------------------------------- the parser's events

    def on_message_begin(self) -> None:
        """Handle the beginning of a request line."""
        if self._deaf:
            return
        if self.phase is Phase.BODY or self.phase is Phase.ANSWER:
            self._hear_no_more()
            return
        if self.phase is not Phase.HEAD:
            self._to_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request target."""
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header line. Trailers, which follow a chunked body, are ignored."""
        if not self._deaf and self.phase is Phase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the size of the headers and of the announced body, then start the application."""
        if self._deaf:
            return
        if self.parser.get_method() == b"CONNECT":  # a tunnel, for proxies; to the parser it is always an upgrade
            self._garbage()
            return
        # Exactly the bytes of the request line, the headers and the empty line, written with one space each.
        size = len(self.parser.get_method()) + len(self.url) + 14
        if not self._take_target():
            self.refuse(InvalidRequest("the request line must name a path, or a URL of http or https"))
            return
        announced = 0
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"content-length" and value.isdigit():
                announced = int(value) if len(value) < 19 else 1 << 62
        if size > self._max_head:
            self._refuse_head()
            return
        config = self._config
        self._max_body = config.max_body_mib << 20
        upload = self._context.upload(self.url.partition(b"?")[0].decode("latin-1"))
        if upload == "file":
            self._max_body = config.max_import_mib << 20
        elif upload == "form" and (b"content-type", FORM) in {(name, value[:19]) for name, value in self.headers}:
            self._max_body = max(self._max_body, min(config.max_import_mib << 20, UPLOAD_BYTES))
        if announced > self._max_body:
            self.refuse(too_large(self._max_body))
            return
        if self.parser.should_upgrade():
            return
        self._announced = announced
        self.scope[BEFORE_ANSWER] = self._before_answer  # type: ignore[literal-required]
        super().on_headers_complete()
        self.phase = Phase.BODY
        self._times.since = self._times.heard
        self._head_bytes = self._body_bytes = 0

    async def _before_answer(self) -> None:
        """Prepare for an answer that begins before the body has arrived, such as a 401.

        After a small body that is on its way the connection serves further requests. Otherwise it closes, which the
        answer has to announce: a client that did not know would send its next request into a closed connection.
        """
        if self.phase is not Phase.BODY:
            return
        if self._announced <= EARLY_BYTES and self._announced and not self.cycle.waiting_for_100_continue:
            self._whole = self.loop.create_future()
            await asyncio.wait({self._whole}, timeout=EARLY_SECONDS)
            self._whole = None
        if self.phase is Phase.BODY:
            self.cycle.keep_alive = False

    def _wake_early(self) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def _take_target(self) -> bool:
        """Return whether the target is a path or a URL.

        Of a URL the path is kept, and its host is checked like Host.
        """
        if self.url.startswith(b"/"):
            return True
        if (found := ABSOLUTE.match(self.url)) is None:
            return False
        self.scope[AUTHORITY] = found[1]  # type: ignore[literal-required]
        rest = self.url[found.end() :]
        self.url = rest if rest.startswith(b"/") else b"/" + rest
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_chunk_header(self) -> None:
        """Note that a chunk begins."""
        self._moved = True
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; refuse the request if it is too large."""
        if self._deaf:
            return
        self._moved = True
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body:
            self.refuse(too_large(self._max_body))
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        if self._deaf or self.phase is Phase.HEAD:
            return
        if self.phase is Phase.BODY:
            self.phase = Phase.ANSWER
            self._wake_early()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Make the connection ready for its next request, or end it."""
        self.server_state.total_requests += 1
        self.output.flush()
        if self.phase in (Phase.LINGER, Phase.CLOSED):
            return
        if self.phase is Phase.BODY or self._deaf:
            self.end()
            return
        self.flow.resume_reading()
        if not self.output.raw.is_closing():
            self.phase = Phase.IDLE
            self._times.since = self.loop.time()

    # --------------------------------------------------------------------------------------------------- endings

    def refuse(self, error: CairnError) -> None:
        """Answer instead of the application, then close."""
        if self.phase in (Phase.LINGER, Phase.CLOSED):
            return
        if self.phase is Phase.BODY or self.phase is Phase.ANSWER:
            if self.cycle.response_started:
                self.output.raw.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        url: bytes = getattr(self, "url", b"")  # absent before the first request line
        path = url.partition(b"?")[0].decode("latin-1")
        self.output.write(refusal(error, path, f"{self._context.rng.bits64():016x}"))
        self.output.flush()
        self._linger()

    def _refuse_head(self) -> None:
        limit = self._max_head
        what = "the trailers" if self.phase is Phase.BODY else "the request line and headers"
        self.refuse(HeadersTooLarge(f"{what} are larger than {limit} bytes, the limit"))

    def end(self) -> None:
        """Close after what was written is sent."""
        if self.phase in (Phase.LINGER, Phase.CLOSED):
            return
        self.output.flush()
        if self.phase is Phase.BODY or self.phase is Phase.HEAD or self._deaf:
            self._linger()
        else:
            self.output.raw.close()

    def _linger(self) -> None:
        """Announce the end, then discard input for a moment before closing.

        Closing a socket with unread input resets it, and the client might never see the answer.
        """
        self._deaf = True
        self.phase = Phase.LINGER
        self._wake_early()
        self._times.since = self.loop.time()
        raw = self.output.raw
        if raw.is_closing():
            return
        self.flow.resume_reading()
        try:
            raw.write_eof()
        except (OSError, RuntimeError):
            raw.close()

    def shutdown(self) -> None:
        """Close if nothing is under way."""
        if self.phase in (Phase.NEW, Phase.IDLE, Phase.HEAD):
            self.output.raw.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """Close now, whatever is under way."""
        self.output.raw.abort()

    @property
    def busy(self) -> bool:
        """Whether an answer is under way or not yet sent."""
        return self.phase in (Phase.BODY, Phase.ANSWER) or self.output.raw.get_write_buffer_size() > 0

    def sweep(self, now: float) -> None:
        """Enforce the time limits. Called several times within the shortest of them."""
        unsent = self.output.raw.get_write_buffer_size()
        self._times.look(now, self.output.written - unsent, unsent)
        match self._times.verdict(now, self.phase, self._body_bytes, reading=not self.flow.read_paused):
            case Verdict.CLOSE:
                self.output.raw.close()
            case Verdict.ABORT:
                self.output.raw.abort()
            case CairnError() as error:
                self.refuse(error)


def _unchunked(cycle: RequestResponseCycle, app: Any) -> Any:
    """Wrap the application for a client that speaks HTTP/1.0, which knows no chunks (RFC 9112, 6.1).

    An answer of unknown length ends with its connection, which uvicorn closes after each answer to such a client.
    """

    async def run(scope: Any, receive: Any, send: Any) -> None:
        endless = False

        async def unchunked(message: Any) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if endless:
                    cycle.chunked_encoding = False
            elif endless:  # uvicorn checks the announced length: announce each piece
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, unchunked)

    return run
