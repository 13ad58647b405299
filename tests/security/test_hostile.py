"""Hostile clients beside well-behaved ones: the former are disconnected, the latter get what they always get."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from tests.api.process import Served, served
from tests.api.sockets import events, request_bytes

Figure = Callable[[str, str], None]

GOOD = {"model": "demo", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
FLOOD = {
    "model": "demo",
    "prompt": "x",
    "max_tokens": 1900,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 5,
}


class Good:
    """Well-behaved streams that repeat until told to stop."""

    def __init__(self, server: Served, count: int) -> None:
        self.server = server
        self.gaps: list[float] = []
        self.answers: dict[str, set[str]] = {}
        self.running = True
        self.tasks = [asyncio.create_task(self._go(number)) for number in range(count)]

    async def _go(self, number: int) -> None:
        prompt = f"good stream {number}"
        body = json.dumps(GOOD | {"prompt": prompt}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        while self.running:
            writer.write(request_bytes("POST", "/v1/completions", body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head[:20], head
            data, last = b"", time.monotonic()
            while size := int(await reader.readline(), 16):
                data += await reader.readexactly(size + 2)
                data = data[:-2]
                now = time.monotonic()
                self.gaps.append(now - last)
                last = now
            await reader.readexactly(2)
            chunks = events(data)
            assert chunks[-1] == "[DONE]"
            text = "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])
            self.answers.setdefault(prompt, set()).add(text)
            await asyncio.sleep(0.05)
        writer.close()

    async def end(self) -> float:
        """Stop; fail unless every answer was whole and always the same.

        Return the 99th percentile of the gaps in seconds.
        """
        self.running = False
        await asyncio.gather(*self.tasks)
        assert len(self.answers) == len(self.tasks)
        assert all(len(texts) == 1 for texts in self.answers.values())
        self.gaps.sort()
        return self.gaps[int(len(self.gaps) * 0.99)]


async def slow_header(port: int) -> float:
    """Send a header piece by piece; return the seconds until the connection was closed."""
    return await trickle(port, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n")


async def slow_body(port: int) -> float:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return await trickle(port, head + b"Content-Length: 100000\r\n\r\n", b" ")


async def trickle(port: int, start: bytes, more: bytes) -> float:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    try:
        writer.write(start)
        while time.monotonic() - began < 60:
            try:
                piece = await asyncio.wait_for(reader.read(4096), 0.5)
            except TimeoutError:
                writer.write(more)
                continue
            said += piece
            if not piece:
                break
    except ConnectionError:
        pass
    finally:
        writer.close()
    assert b" 408 " in said[:20], said
    return time.monotonic() - began


async def never_reading(port: int, hold: asyncio.Event) -> bytes:
    """Ask for a flood of output and read nothing until `hold` is set; return what was left to read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request_bytes("POST", "/v1/completions", json.dumps(FLOOD).encode()))
        await hold.wait()
        said = b""
        try:
            while piece := await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 10):
                said += piece
        except (ConnectionError, TimeoutError):
            pass  # closed by the server, as `open_files` shows; a kernel may drop unsent data silently
        return said
    finally:
        sock.close()


async def resetting(port: int, rng: random.Random) -> None:
    """Send a part or the whole of a request and reset the connection."""
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    data = request_bytes("POST", "/v1/completions", json.dumps(FLOOD | {"max_tokens": 500}).encode())
    try:
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, data[: rng.choice((len(data), rng.randrange(1, len(data))))])
        await asyncio.sleep(rng.random() * 0.3)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        sock.close()


async def test_hostile_clients_are_cut_and_good_streams_go_on(figure: Figure, prove: bool) -> None:
    """Known failures 42, 43, 44: slow headers, slow bodies, readers that never read, and resets, all at once."""
    scale, rounds = (1, 3) if prove else (10, 1)
    seconds = 10.0 if prove else 1.5
    options: dict[str, Any] = {"header_timeout": seconds, "body_timeout": seconds, "stream_stall": 3 * seconds}
    options["idle_timeout"] = seconds
    with served(max_queue=4000, max_running=512, step_tokens=4096, **options) as server:
        await asyncio.sleep(0)
        family, before, files = server.family(), server.rss(), open_files(server)
        calm = Good(server, 100 // scale)
        await asyncio.sleep(seconds / 2)
        usual = await calm.end()
        for _ in range(rounds):
            good = Good(server, 100 // scale)
            hold = asyncio.Event()
            readers = [asyncio.create_task(never_reading(server.port, hold)) for _ in range(200 // scale)]
            resets = [asyncio.create_task(resetting(server.port, random.Random(n))) for n in range(100 // scale)]
            cuts = await asyncio.gather(
                *(slow_header(server.port) for _ in range(500 // scale)),
                *(slow_body(server.port) for _ in range(200 // scale)),
            )
            await asyncio.gather(*resets)
            async with asyncio.timeout(12 * seconds):
                while open_files(server) > files + 1 + 100 // scale:  # the log has opened its file meanwhile
                    await asyncio.sleep(0.1)
            gap = await good.end()
            grown = server.rss() - before
            await idle(server)  # nor does any request of the flood still run
            hold.set()
            cut = sum(b"data: [DONE]" not in said for said in await asyncio.gather(*readers))
            assert cut > len(readers) // 2  # the others' answers fitted the kernel's buffers
            assert server.family() == family
            figure(
                f"hostile clients ({len(cuts)} slow, {len(readers)} never reading, {len(resets)} resets)",
                f"all cut, the slow after at most {max(cuts):.1f} s; {100 // scale} good streams whole, gap p99 "
                f"{gap * 1000:.1f} ms beside {usual * 1000:.1f} ms alone; memory +{grown / (1 << 20):.0f} MiB",
            )
            assert grown < 256 << 20


def open_files(server: Served) -> int:
    """Return the number of the front's file descriptors: its connections, and a few that stay."""
    return len(os.listdir(f"/proc/{server.pid}/fd"))


async def idle(server: Served) -> None:
    """Wait until no request runs or waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(90):
        while True:
            writer.write(request_bytes("GET", "/metrics"))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            text = (await reader.readexactly(size)).decode()
            busy = [
                line.rpartition(" ")[2]
                for line in text.splitlines()
                if line.startswith(("cairn:num_requests_running", "cairn:num_requests_waiting"))
            ]
            if len(busy) == 2 and not any(map(float, busy)):
                break
            await asyncio.sleep(0.1)
    writer.close()
