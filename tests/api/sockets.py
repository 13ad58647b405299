"""A real socket for an application in this process, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from cairn.api.app import App, build_app
from cairn.api.http.listener import Listener
from cairn.api.server import bind
from cairn.config.config import Config


@dataclass
class Site:
    """A listening application."""

    app: App
    listener: Listener
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **more: Any) -> httpx.AsyncClient:
        # Nothing is encrypted, and loading all certificate authorities for each client took most of these tests' time.
        return httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False, verify=False, **more)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(timeout=20, trust_env=False, verify=False)
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, http_client=http)

    async def raw(self, limit: int = 1 << 24) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        self.writers.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def site(service: Any, config: Config | None = None) -> AsyncIterator[Site]:
    config = config or Config()
    app = build_app(service, config)
    with bind("127.0.0.1", 0) as sock:
        listener = Listener(app, config, app.router.upload)
        await listener.start(sock)
        at = Site(app, listener, sock.getsockname()[1])
        try:
            yield at
        finally:
            await listener.close(0)
            for writer in at.writers:
                writer.close()


def request_bytes(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def post(at: Site, path: str, body: Any) -> httpx.Response:
    async with at.http() as http:
        return await http.post(path, json=body)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read one answer with a Content-Length; return its status, headers and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, body


def events(body: bytes | str) -> list[Any]:
    """Return the parsed data of a stream's events in order; `[DONE]` stays a string."""
    text = body.decode() if isinstance(body, bytes) else body
    results = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        results.append(data if data == "[DONE]" else json.loads(data))
    return results
