"""Input that is crafted to be costly: it is refused or served soon, and other clients do not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.process import Served, served
from tests.api.sockets import answer, request_bytes
from tests.security.hostile_inputs import (
    HostileInput,
    addresses,
    calls,
    conversations,
    encoded,
    houses,
    options,
    workflows,
)
from tests.security.test_malformed import canary, check_error

Figure = Callable[[str, str], None]
MIB = 1 << 20
SILENCE = 2.0
"""Seconds for which the server may not answer others, on a busy machine.

Each input that blocked it did so for longer, most of them for minutes.
"""
MEMORY = 384 * MIB
"""Limit in bytes of what all inputs of one kind may add to the front's memory, including the bodies and their parts."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(context=2048) as process:
        yield process


async def look(port: int, gaps: list[float], over: asyncio.Event) -> None:
    """Ask every 20 ms whether the server is alive, and record how long each answer takes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not over.is_set():
        began = time.monotonic()
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await answer(reader)
        gaps.append(time.monotonic() - began)
        await asyncio.sleep(0.02)
    writer.close()


async def tried(server: Served, name: str, one: HostileInput) -> float:
    """Send one input; return the longest silence while it was answered."""
    data = request_bytes(one.method, one.path, encoded(one))
    gaps: list[float] = []
    over = asyncio.Event()
    looking = asyncio.create_task(look(server.port, gaps, over))
    await asyncio.sleep(0.03)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    status, _, said = await asyncio.wait_for(answer(reader), 120)
    over.set()
    await looking
    writer.close()
    assert status in one.statuses, (name, status, said[:300])
    if status >= 400 and one.path.startswith("/v1/") and "/messages" not in one.path:
        check_error(status, said, name)
    assert status < 400 or len(said) < 1500, (name, said[:300])
    return max(gaps)


def peak(server: Served) -> int:
    """Return the front's peak memory in bytes."""
    return int(Path(f"/proc/{server.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def working(server: Served) -> set[int]:
    """Return the front and its worker without the helpers, which start when needed and may be replaced."""
    helpers = (b"cairn.text.render", b"cairn.text.grammar", b"cairn.rag.extract_process")
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.family()}
    return {pid for pid, command in commands.items() if not any(name in command for name in helpers)}


@pytest.mark.parametrize("kind", [workflows, conversations, options, calls, houses, addresses])
async def test_hostile_input_delays_nobody(
    server: Served, figure: Figure, kind: Callable[[], dict[str, HostileInput]]
) -> None:
    truth, workers, before = canary(server), working(server), peak(server)
    inputs = kind()
    silences: dict[str, float] = {}
    for name, one in inputs.items():
        silence = await tried(server, name, one)
        if silence > SILENCE:  # the machine may have been busy with something else
            silence = min(silence, await tried(server, name, one))
        silences[name] = silence
    worst = max(silences, key=lambda name: silences[name])
    more = peak(server) - before
    figure(
        f"costly input: {kind.__name__}",
        f"{len(inputs)} answered as they should be; longest silence for others {silences[worst] * 1000:.0f} ms "
        f"({worst}); front's peak memory +{more >> 20} MiB",
    )
    assert silences[worst] < SILENCE, worst
    assert more < MEMORY
    assert working(server) == workers
    assert canary(server) == truth
