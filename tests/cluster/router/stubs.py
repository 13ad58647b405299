"""Stub replicas for tests of the router (tiny HTTP servers with scripted answers), and a client of its application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cairn.api.http.router_access import RouterAccess
from cairn.cluster.router.app import RouterApp
from cairn.cluster.router.replicas import Replicas
from cairn.config.config import Config
from tests.cluster.stores import Draws

Answer = Callable[["Stub", str, dict[bytes, bytes], bytes, asyncio.StreamWriter], Awaitable[None]]


def head(status: int, kind: str, size: int | None) -> bytes:
    length = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{length}\r\nx-request-id: 00aa\r\n\r\n".encode()


def piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def as_json(writer: asyncio.StreamWriter, body: Any, status: int = 200) -> None:
    data = json.dumps(body).encode()
    writer.write(head(status, "application/json", len(data)) + data)
    await writer.drain()


class Stub:
    """One replica. `answer` handles everything but /health/ready and /health/role."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.name, self.answer, self.ready, self.role = name, answer, 200, "both"
        self.asked: list[tuple[str, dict[bytes, bytes], bytes]] = []
        self.hung = False
        """Whether it answers nothing more, as under SIGSTOP: its port and connections stay open."""
        self.drops = 0
        """How many of the next requests are cut off without an answer."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def die(self) -> None:
        """Close the port and cut all connections, as SIGKILL does."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    def close_port(self) -> None:
        """Close the port alone, as a server does that ends once its requests are answered."""
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                path = lines[0].split()[1].decode()
                pairs = (line.partition(b":") for line in lines[1:] if line)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
                if self.hung:
                    await asyncio.Event().wait()
                if self.drops:
                    self.drops -= 1
                    writer.transport.abort()
                    return
                if path == "/health/ready":
                    await as_json(writer, {}, self.ready)
                    continue
                if path == "/health/role":
                    await as_json(writer, {"role": self.role})
                    continue
                self.asked.append((path, headers, body))
                await self.answer(self, path, headers, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # cancelled: the test is over
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def named(stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter) -> None:
    """Answer with the stub's name."""
    await as_json(writer, {"by": stub.name})


@asynccontextmanager
async def routed(*answers: Answer, config: Config | None = None) -> AsyncIterator[tuple[RouterApp, list[Stub]]]:
    """Yield a router with a stub for each answer, all known to be up."""
    stubs = [Stub(f"s{number}", answer) for number, answer in enumerate(answers)]
    replicas = Replicas([await stub.start() for stub in stubs])
    for replica in replicas.all:
        await replicas.check(replica)
    try:
        yield RouterApp(replicas, Draws(), RouterAccess(config or Config())), stubs
    finally:
        await replicas.close()
        for stub in stubs:
            await stub.die()


def text_of(got: Got) -> str:
    """Return the text of a stream of chat completions."""
    lines = [line[6:] for line in got.body.decode().split("\n\n") if line.startswith("data: {")]
    found = [one for one in map(json.loads, lines) if one.get("choices")]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in found)


def event(content: str | None = None, id: str = "a", finish: str | None = None, **delta: object) -> bytes:
    """Return an event of a chat completion."""
    delta = ({"content": content} if content is not None else {}) | delta
    body = {"id": id, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Got:
    """A response of the router, as its client received it."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 0, b"", dict[bytes, bytes]()
        self.pieces: list[bytes] = []

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: RouterApp,
    method: str,
    path: str,
    body: Any = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    on_piece: Callable[[Got], Awaitable[None]] | None = None,
) -> Got:
    """Make one request of the application, as a server would."""
    got, data = Got(), b"" if body is None else json.dumps(body).encode()
    sent, over = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent.is_set():
            sent.set()
            return {"type": "http.request", "body": data, "more_body": False}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            got.status, got.headers = message["status"], dict(message["headers"])
        elif message.get("body"):
            got.body += message["body"]
            got.pieces.append(message["body"])
            if on_piece is not None:
                await on_piece(got)

    path, _, query = path.partition("?")
    host = () if any(name == b"host" for name, _ in headers) else ((b"host", b"localhost:8000"),)
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": [*host, *headers]}
    await app({**scope, "query_string": query.encode(), "client": ("127.0.0.1", 1)}, receive, send)
    over.set()
    return got
