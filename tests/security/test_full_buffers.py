"""Bodies that never end, many of one tenant at once: the front's memory stays bounded, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from tests.api.process import Served, served
from tests.api.sockets import answer, request_bytes

Figure = Callable[[str, str], None]

MIB = 1 << 20
MINE, OTHER = "a" * 16, "b" * 16
CHAT = "/v1/chat/completions"
IMPORT = "/v1/agents/import"
TALK = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()


async def half_sent(server: Served, path: str, kind: str, size: int) -> tuple[asyncio.StreamWriter, int]:
    """Send a request without its last byte; return the status of a refusal, or 0 if the server waits for the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {MINE}\r\nContent-Type: {kind}\r\n"
    writer.write(f"{head}Content-Length: {size + 1}\r\n\r\n".encode())
    status = 0
    piece = bytes(MIB // 2)
    with contextlib.suppress(ConnectionError):  # a refused body is not read to its end
        for start in range(0, size, len(piece)):
            writer.write(piece[: size - start])
            await writer.drain()
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        status, _, _ = await asyncio.wait_for(answer(reader), 1.0)
    return writer, status


async def ask(server: Served, key: str) -> int:
    """Return the status of a short chat."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes("POST", CHAT, TALK, f"Authorization: Bearer {key}"))
    status, _, _ = await asyncio.wait_for(answer(reader), 30)
    writer.close()
    return status


async def test_bodies_that_never_end_take_a_bounded_part_of_the_memory(figure: Figure, prove: bool) -> None:
    """Eight imports of 250 MiB took the front to 2.1 GB, and sixty chats of 15 MiB to 1 GB."""
    chats, chat, imports, size = (60, 15 * MIB, 8, 250 * MIB) if prove else (12, 15 * MIB // 4, 8, 32 * MIB)
    most = 256 if prove else 32
    options: dict[str, Any] = {"api_key": [MINE, OTHER], "max_bodies_mib": most, "body_timeout": 120.0}
    with served(**options) as server:
        assert await ask(server, MINE) == 200
        before, family = server.rss(), server.family()
        sent = await asyncio.gather(
            *(half_sent(server, CHAT, "application/json", chat) for _ in range(chats)),
            *(half_sent(server, IMPORT, "application/octet-stream", size) for _ in range(imports)),
        )
        grown = server.rss() - before
        refused = [status for _, status in sent if status]
        assert set(refused) == {429}, "for this tenant only, and to be retried"
        held = sum(not status for _, status in sent[:chats])
        assert held == most * MIB // 2 // chat and len(refused) == len(sent) - held - 4, "half is one tenant's"
        assert await ask(server, OTHER) == 200, "another tenant is served all the same"
        for writer, _ in sent:
            writer.transport.abort()
        async with asyncio.timeout(30):
            while await ask(server, MINE) != 200:  # until the memory of its disconnected clients is freed
                await asyncio.sleep(0.1)
        assert server.family() == family
    figure(
        f"{chats} half-sent chats of {chat / MIB:.1f} MiB and {imports} imports of {size // MIB} MiB",
        f"{len(refused)} refused, front's memory +{grown // MIB} MiB",
    )
    assert grown < (most // 2 + 96) * MIB
