"""Limits enforced before and by the HTTP parser, each at the limit and one beyond."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from cairn.api.http.connection import EARLY_BYTES, FIRST_LOOK, Guard, Phase
from cairn.config.config import Config
from cairn.config.values import Secret
from cairn.types.outputs import Delta
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, answer, request_bytes, site

CHAT = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()


def head(size: int) -> bytes:
    """Return a request head of exactly this many bytes."""
    start = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Pad: "
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


async def send(at: Site, *pieces: bytes, pause: float = 0.0) -> tuple[int, dict[str, str], Any]:
    reader, writer = await at.raw()
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        status, headers, body = await asyncio.wait_for(answer(reader), 10)
        return status, headers, json.loads(body) if body else None
    finally:
        writer.close()


def in_shape(status: int, headers: dict[str, str], body: Any) -> str:
    """Return the error's code; fail unless the error has the API's shape."""
    assert status >= 400 and headers["content-type"] == "application/json" and headers["x-request-id"]
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return str(body["error"]["code"])


@pytest.mark.parametrize("cut", [1 << 20, 1000, 32 * 1024])
async def test_headers_at_the_limit_and_one_byte_more(cut: int) -> None:
    """Known failure 44: 32 KiB of headers in all, sent at once or in pieces."""
    async with site(ScriptedService()) as at:
        for size, wanted in ((32 * 1024, 200), (32 * 1024 + 1, 431)):
            data = head(size)
            pieces = [data[start : start + cut] for start in range(0, len(data), cut)]
            result = await send(at, *pieces, pause=0.002)
            assert result[0] == wanted
        assert in_shape(*result) == "headers_too_large" and "32768" in result[2]["error"]["message"]


async def test_endless_headers_do_not_fill_memory() -> None:
    """Known failure 44: a header that never ends is cut off at the limit instead of being buffered."""
    async with site(ScriptedService()) as at:
        reader, writer = await at.raw()
        writer.write(b"GET / HTTP/1.1\r\nX-Pad: ")
        sent = 0
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(10):
                while True:
                    writer.write(b"x" * 65536)
                    sent += 65536
                    await writer.drain()
                    await asyncio.sleep(0.001)
        assert sent < 300 << 20
        (guards,) = [at.listener.guards()]
        assert not guards
        status = (await reader.read(200)).split()[1] if not reader.exception() else b"431"
        assert status == b"431"


def chunked(body: bytes) -> bytes:
    """Return a chunked request without its last chunk, one byte per chunk."""
    kind, coding = "Content-Type: application/json", "Transfer-Encoding: chunked"
    pieces = b"".join(b"1;x=%s\r\n%c\r\n" % (b"y" * 30, byte) for byte in body)
    return request_bytes("POST", "/v1/chat/completions", b"", kind, coding) + pieces + b"0\r\n"


@pytest.mark.parametrize("line", [b"X-T: " + b"v" * 1000 + b"\r\n", b"v" * 1000], ids=["lines", "one line"])
async def test_endless_trailers_do_not_fill_memory(line: bytes) -> None:
    """Known failure 44: trailers of a chunked body have the limit of headers."""
    async with site(ScriptedService()) as at:
        pieces = [line * 8] * 16
        result = await send(at, chunked(CHAT) + b"X-First: ", *pieces, pause=0.002)
    assert result[0] == 431 and in_shape(*result) == "headers_too_large"
    assert result[2]["error"]["message"].startswith("the trailers")


async def test_trailers_are_ignored() -> None:
    """Trailers are not headers of the request: they are neither validated nor obeyed."""
    service = ScriptedService()
    trailers = b"X-Cairn-Agent: nobody\r\nX-Pad: " + b"x" * (31 << 10) + b"\r\n"
    whole = chunked(CHAT) + trailers + b"\r\n"
    async with site(service) as at:
        for size in (1 << 20, 1000):
            pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
            status, _, said = await send(at, *pieces, pause=0.001)
            assert status == 200 and said["choices"], said


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_at_the_limit_and_one_byte_more(chunked: bool) -> None:
    """Known failure 44: chunked bodies have the same limit."""
    limit = 1 << 20
    async with site(ScriptedService(), Config(max_body_mib=1)) as at:
        for size, wanted in ((limit, 200), (limit + 1, 413)):
            body = CHAT + b" " * (size - len(CHAT))
            if chunked:
                pieces = [body[start : start + 60_000] for start in range(0, len(body), 60_000)]
                framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
                head = request_bytes(
                    "POST", "/v1/chat/completions", b"", "Content-Type: application/json", "Transfer-Encoding: chunked"
                )
                result = await send(at, head + framed)
            else:
                result = await send(at, request_bytes("POST", "/v1/chat/completions", body))
            assert result[0] == wanted
        assert in_shape(*result) == "request_too_large" and str(limit) in result[2]["error"]["message"]


async def test_an_announced_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with site(ScriptedService()) as at:
        size = (16 << 20) + 1
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        assert in_shape(*await send(at, head % size)) == "request_too_large"


@pytest.mark.parametrize(
    "start",
    [
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: loc",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: y\r\n",
    ],
)
async def test_slow_headers_are_cut(start: bytes) -> None:
    """Known failure 44: headers that do not finish in time get a 408, even if bytes keep trickling in."""
    async with site(ScriptedService(), Config(header_timeout=0.3)) as at:
        reader, writer = await at.raw()
        writer.write(start)
        async with asyncio.timeout(5):
            for _ in range(20):
                await asyncio.sleep(0.05)
                writer.write(b"a")
            assert in_shape(*(lambda s, h, b: (s, h, json.loads(b)))(*await answer(reader))) == "request_timeout"
            assert await reader.read() == b""
        writer.close()


async def test_a_silent_connection_is_closed() -> None:
    async with site(ScriptedService(), Config(header_timeout=0.2)) as at:
        reader, _ = await at.raw()
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_an_unused_connection_is_closed() -> None:
    async with site(ScriptedService(), Config(idle_timeout=0.2)) as at:
        reader, writer = await at.raw()
        writer.write(request_bytes("GET", "/health/live"))
        assert (await answer(reader))[0] == 200
        assert await asyncio.wait_for(reader.read(), 5) == b""


@pytest.mark.parametrize("trickle", [False, True])
async def test_slow_bodies_are_cut(trickle: bool) -> None:
    """Known failure 44: no bytes in time, or far too few, get a 408 and the connection closes."""
    async with site(ScriptedService(), Config(body_timeout=0.3, min_body_rate=1024 if trickle else 0)) as at:
        reader, writer = await at.raw()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n")
        writer.write(b"Content-Type: application/json\r\n\r\n{")
        answering = asyncio.create_task(answer(reader))
        async with asyncio.timeout(5):
            while not answering.done():
                await asyncio.sleep(0.05)
                if trickle:
                    writer.write(b" ")
            status, headers, body = await answering
            assert in_shape(status, headers, json.loads(body)) == "request_timeout"
            assert await reader.read() == b""
        writer.close()


async def test_a_reader_that_never_reads_is_cut() -> None:
    """Known failure 43: memory is bounded, and the generation is cancelled when the client is disconnected."""
    big = Delta(text="x" * 20_000)
    service = ScriptedService(lambda request: [*[big, 0.001] * 5_000, done()])
    async with site(service, Config(stream_buffer_kib=64, stream_stall=0.5)) as at:
        reader, writer = await at.raw()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        body = json.loads(CHAT) | {"stream": True}
        writer.write(request_bytes("POST", "/v1/chat/completions", json.dumps(body).encode()))
        most = 0
        async with asyncio.timeout(30):
            while not (service.streams and service.streams[0].closed):
                await asyncio.sleep(0.02)
                for guard in at.listener.guards():
                    most = max(most, guard.output.raw.get_write_buffer_size())
        assert 0 < most <= 1 << 20  # of 100 MB: the send buffer's limit and one write
        assert not at.listener.guards()
        writer.close()


async def test_a_slow_reader_that_reads_gets_everything() -> None:
    """Known failure 43: a slow client that makes progress gets back-pressure, not a disconnect."""
    big = Delta(text="x" * 20_000)
    service = ScriptedService(lambda request: [*[big] * 400, done()])
    async with site(service, Config(stream_buffer_kib=16, stream_stall=0.5)) as at:
        # Beyond twice this the client's reader pauses and leaves bytes in the socket.
        reader, writer = await at.raw(limit=1 << 16)
        body = json.loads(CHAT) | {"stream": True}
        writer.write(request_bytes("POST", "/v1/chat/completions", json.dumps(body).encode(), "Connection: close"))
        data = b""
        while piece := await asyncio.wait_for(reader.read(120_000), 10):
            data += piece
            await asyncio.sleep(0.025)
        writer.close()
    text = data.partition(b"\r\n\r\n")[2]
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and text.count(b"x" * 20_000) == 400


async def test_connections_at_the_limit_and_one_more() -> None:
    async with site(ScriptedService(), Config(max_connections=3)) as at:
        open_ones = [await at.raw() for _ in range(3)]
        await asyncio.sleep(0.05)
        status, headers, body = await send(at)
        assert in_shape(status, headers, body) == "unavailable" and status == 503 and headers["retry-after"]
        reader, writer = open_ones[0]
        writer.write(request_bytes("GET", "/health/live"))
        assert (await answer(reader))[0] == 200
        for _, writer in open_ones:
            writer.close()
        await asyncio.sleep(0.05)
        assert (await send(at, request_bytes("GET", "/health/live")))[0] == 200


GARBAGE = [
    b"\x00\x01\x02\x03\r\n\r\n",
    b"hello\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT http://a/b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
]


@pytest.mark.parametrize("data", GARBAGE)
async def test_garbage_gets_a_typed_answer(data: bytes) -> None:
    async with site(ScriptedService()) as at:
        status, headers, body = await send(at, data)
        assert 400 <= status < 500
        in_shape(status, headers, body)
        assert (await send(at, request_bytes("GET", "/health/live")))[0] == 200


@pytest.mark.parametrize("target", ["example.com:443", "/health/live", "http://localhost/health/live", "*"])
async def test_connect_never_reaches_the_application(
    target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CONNECT asks for a tunnel, and the parser cannot read it as a plain request."""
    async with site(ScriptedService()) as at:
        seen: list[str] = []
        start = Guard._start_asgi_task

        def watched(guard: Guard, cycle: Any, app: Any) -> None:
            seen.append(cycle.scope["method"])
            start(guard, cycle, app)

        monkeypatch.setattr(Guard, "_start_asgi_task", watched)
        reader, writer = await at.raw()
        writer.write(request_bytes("CONNECT", target) + b"what goes through the tunnel")
        status, headers, body = await asyncio.wait_for(answer(reader), 10)
        assert status == 400
        in_shape(status, headers, json.loads(body))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert not seen and not caplog.records


async def test_an_upgrade_is_ignored_and_the_request_is_answered() -> None:
    async with site(ScriptedService()) as at:
        data = request_bytes("POST", "/v1/chat/completions", CHAT, "Connection: Upgrade", "Upgrade: h2c")
        assert (await send(at, data))[0] == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("options", ["close, Upgrade", "Upgrade,close", "upgrade, HTTP2-Settings , Close"])
async def test_other_connection_options_beside_an_upgrade_apply(options: str, version: str) -> None:
    async with site(ScriptedService()) as at:
        reader, writer = await at.raw()
        data = request_bytes("POST", "/v1/chat/completions", CHAT, f"Connection: {options}", "Upgrade: h2c")
        writer.write(data.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@pytest.mark.parametrize("options", ["Upgrade", "keep-alive, Upgrade"])
async def test_an_old_client_that_offers_an_upgrade_is_an_old_client(options: str) -> None:
    async with site(ScriptedService()) as at:
        data = request_bytes("POST", "/v1/chat/completions", CHAT, f"Connection: {options}", "Upgrade: h2c")
        status, headers, _ = await send(at, data.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (status, headers["connection"]) == (200, "close")


async def test_a_request_sent_before_the_answer_is_not_read() -> None:
    async with site(ScriptedService(lambda request: [0.2, Delta(text="a"), done()])) as at:
        reader, writer = await at.raw()
        writer.write(request_bytes("POST", "/v1/chat/completions", CHAT))
        await asyncio.sleep(0.05)
        writer.write(b"GET /health/live HTTP/1.1\r\n" * 100)
        status, headers, _ = await answer(reader)
        assert status == 200 and headers["connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_refusal_before_the_body_arrived_can_be_read() -> None:
    """A client that is still sending its body gets the answer, not a connection reset."""
    async with site(ScriptedService()) as at:
        reader, writer = await at.raw()
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(30):
            writer.write(b"x" * 100_000)
            await writer.drain()
            await asyncio.sleep(0.005)
        status, headers, body = await answer(reader)
        assert in_shape(status, headers, json.loads(body)) == "not_found"
        writer.close()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never holds")


LATER = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def early(path: str, headers: str, size: int) -> bytes:
    """Return the head of a request that is answered before its body of `size` bytes is read."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode()


@pytest.mark.parametrize(("path", "headers", "status"), [
    ("/v1/chat/completions", "", 401),
    ("/v1/nowhere", "Authorization: Bearer k\r\n", 404),
    ("/v1/models", "Authorization: Bearer k\r\n", 405),
])  # fmt: skip
async def test_after_an_early_answer_the_connection_serves_the_next_request(
    path: str, headers: str, status: int
) -> None:
    """Clients send a request's head and its body apart, and reuse a connection that does not say that it closes."""
    async with site(ScriptedService(), Config(api_key=(Secret("k"),))) as at:
        reader, writer = await at.raw()
        for _ in range(2):
            writer.write(early(path, headers, 2))
            await until(lambda: Phase.BODY in [guard.phase for guard in at.listener.guards()])
            writer.write(b"{}")
            found, told, _ = await answer(reader)
            assert found == status and "connection" not in told
        writer.write(LATER)
        assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(("headers", "size"), [
    ("", 2),
    ("", EARLY_BYTES + 1),
    ("Expect: 100-continue\r\n", 2),
], ids=["never sent", "large", "waits for 100"])  # fmt: skip
async def test_an_early_answer_says_that_the_connection_closes(headers: str, size: int) -> None:
    async with site(ScriptedService(), Config(api_key=(Secret("k"),))) as at:
        reader, writer = await at.raw()
        writer.write(early("/v1/chat/completions", headers, size))
        status, told, _ = await answer(reader)
        assert status == 401 and told["connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_a_client_that_leaves_before_an_early_answer_leaves_nothing() -> None:
    async with site(ScriptedService(), Config(api_key=(Secret("k"),))) as at:
        _, writer = await at.raw()
        writer.write(early("/v1/chat/completions", "", 2))
        await until(lambda: Phase.BODY in [guard.phase for guard in at.listener.guards()])
        writer.transport.abort()
        await until(lambda: not at.listener.guards())


async def test_head_and_errors_have_request_ids() -> None:
    async with site(ScriptedService()) as at:
        reader, writer = await at.raw()
        writer.write(request_bytes("HEAD", "/v1/models"))
        text = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in text and b"x-request-id: " in text
        writer.close()


async def old(at: Site, data: bytes) -> tuple[bytes, bytes]:
    """Return head and body of the answer to an HTTP/1.0 client."""
    reader, writer = await at.raw()
    writer.write(data.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head and b"\r\nconnection: close" in head
    return head, body


async def test_stream_over_http_1_0_ends_with_the_connection() -> None:
    """RFC 9112, 6.1: an HTTP/1.0 client does not know chunked coding and would read chunk sizes as content."""
    async with site(ScriptedService(lambda request: [Delta(text="a"), 0.05, Delta(text="b"), done()])) as at:
        body = json.dumps(json.loads(CHAT) | {"stream": True}).encode()
        head, text = await old(at, request_bytes("POST", "/v1/chat/completions", body))
        assert b"transfer-encoding" not in head and text.count(b"data: [DONE]") == 1
        assert all(line.startswith(b"data: ") or not line for line in text.split(b"\n"))
        head, text = await old(at, request_bytes("POST", "/v1/chat/completions", CHAT))
        assert b"content-length: %d" % len(text) in head and json.loads(text)["object"] == "chat.completion"
        head, text = await old(at, request_bytes("HEAD", "/v1/models"))
        assert text == b""


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_closed_only_its_own_side_gets_its_answer(stream: bool, version: str) -> None:
    """As `nc -N` does; the body takes a while to answer."""
    service = ScriptedService(lambda request: [60.0])
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    async with site(service) as at:
        reader, writer = await at.raw()
        writer.write(
            request_bytes("POST", "/v1/chat/completions", body).replace(b"HTTP/1.1", b"HTTP/" + version.encode())
        )
        writer.write_eof()
        while not service.streams:
            await asyncio.sleep(0.001)
        while (guard := at.listener.guards()[0]).cycle.keep_alive is not False:
            await asyncio.sleep(0.001)
        await asyncio.sleep(3 * FIRST_LOOK)  # long enough for several checks of the connection
        assert guard.phase is Phase.ANSWER and not service.streams[0].closed
        service.streams[0].push(Delta(text="still here", tokens=(1,)))
        service.streams[0].push(done())
        text = (await reader.read()).decode()
        assert "still here" in text and " 200 OK" in text
        assert text.startswith("HTTP/1.1 100 Continue") == (version == "1.1" and not stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_closed_the_connection_is_gone_at_once(stream: bool) -> None:
    service = ScriptedService(lambda request: [60.0])
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    async with site(service) as at, asyncio.timeout(10):
        reader, writer = await at.raw()
        writer.write(request_bytes("POST", "/v1/chat/completions", body))
        if stream:
            await reader.readuntil(b"\r\n\r\n")
        while not service.streams:
            await asyncio.sleep(0.001)
        writer.close()
        while not service.streams[0].closed:
            await asyncio.sleep(0.001)


async def test_a_request_cut_in_half_is_reported() -> None:
    async with site(ScriptedService()) as at:
        for sent in (
            b"GET /v1/mod",
            request_bytes("POST", "/v1/completions", b"{}", "Content-Length: 9")[:-1].replace(
                b"Content-Length: 2\r\n", b""
            ),
        ):
            reader, writer = await at.raw()
            writer.write(sent)
            writer.write_eof()
            text = (await reader.read()).decode()
            assert text.startswith("HTTP/1.1 400 ") and "ended before the request was whole" in text
