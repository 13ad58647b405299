"""Schemas and grammars that would occupy a whole worker: they are refused or bounded, and others hardly notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from tests.api.process import Served, served
from tests.api.sockets import answer, request_bytes
from tests.security.test_malformed import check_error

Figure = Callable[[str, str], None]
MIB = 1 << 20
QUIET = 4.0
"""Limit of a neighbour's plain requests: this many times their time alone, plus a quarter of a second."""


def bombs(number: int) -> Iterator[dict[str, Any]]:
    """Yield fields of requests, no two alike, since compiled grammars are cached."""
    text = {"type": "string"}
    names = [f"property_{number}_{n}" for n in range(4_000)]
    for schema in (
        {"type": "object", "properties": {name: text for name in names}, "additionalProperties": False},
        {"type": "object", "properties": {name: text for name in names[:400]}, "additionalProperties": False},
        {"type": "object", "properties": {name: text for name in names[:2000]}, "required": names[:2000]},
        {"type": "array", "items": {"type": "integer", "multipleOf": 99_991 - 2 * number}},
        {"type": "array", "items": {"type": "integer", "multipleOf": 999_983 - 2 * number}},
        {"anyOf": [{"type": "integer", "multipleOf": 99_991 - 2 * n - 100 * number} for n in range(10)]},
        {"allOf": [{"type": "string", "pattern": f"a{{{n},{n + 900 + number}}}b"} for n in range(60)]},
    ):
        yield {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    yield {"guided_regex": rf"\p{{L}}{{1,{1000 + number}}}\p{{N}}{{1,1000}}(\p{{L}}|\p{{N}}){{1,2000}}"}
    yield {"guided_grammar": "start: s\ns: " + " | ".join("s " * n for n in range(2, 40)) + f' | "a" | "{number}"\n'}
    yield {"guided_grammar": f'start: %json {{"multipleOf": {10**6 + number}}}\n'}


def memory(pid: int) -> int:
    """Return a process's peak memory in bytes."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
    return 0


async def ask(server: Served, key: str, body: dict[str, Any]) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = json.dumps({"model": "demo", "max_tokens": 16, "temperature": 1, "seed": 1, **body}).encode()
    writer.write(request_bytes("POST", "/v1/chat/completions", data, f"Authorization: Bearer {key}"))
    status, _, said = await asyncio.wait_for(answer(reader), 120)
    writer.close()
    return status, said


async def neighbour(server: Served, held: bool, until: asyncio.Event) -> list[float]:
    """Return the seconds that each request of a quiet client took: plain ones, or each with a new small grammar."""
    took: list[float] = []
    while not until.is_set():
        more = {"guided_choice": ["yes", "no", str(len(took))]} if held else {}
        began = time.monotonic()
        status, said = await ask(server, "quiet", {"messages": [{"role": "user", "content": f"{len(took)}"}], **more})
        took.append(time.monotonic() - began)
        assert status == 200, said
        await asyncio.sleep(0.02)
    return took


async def beside(server: Served, work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return the 95th percentile of a neighbour's plain requests, and of those with grammars, while `work` runs."""
    over = asyncio.Event()
    clients = [asyncio.ensure_future(neighbour(server, held, over)) for held in (False, True)]
    await work()
    over.set()
    plain, held = await asyncio.gather(*clients)
    return late(plain), late(held)


def late(took: list[float]) -> float:
    return sorted(took)[int(0.95 * len(took))]


async def test_costly_grammars_hardly_delay_other_tenants(figure: Figure, prove: bool) -> None:
    """Plain requests are not delayed.

    A request with a grammar waits for at most one of each other tenant, of at most 2 s.
    """
    with served(api_key=["hostile", "quiet"], max_running=32) as server:
        before, held_before = await beside(server, lambda: asyncio.sleep(2.0))
        family = server.family()
        held = {pid: memory(pid) for pid in family}
        seen = dict[int, int]()

        async def hostile(number: int) -> None:
            for body in bombs(number):
                status, said = await ask(server, "hostile", {"messages": [{"role": "user", "content": "x"}], **body})
                seen[status] = seen.get(status, 0) + 1
                if status != 200:
                    check_error(status, said, body)

        clients = range(4 if prove else 1)
        after, held_after = await beside(server, lambda: asyncio.gather(*map(hostile, clients)))
        grown = max(memory(pid) - held.get(pid, 0) for pid in family if pid in server.family())
        assert server.family() >= family, "no process had to be replaced"
    figure(
        "grammars that would take the worker",
        f"{seen.get(400, 0)} refused, {seen.get(200, 0)} answered, {seen.get(429, 0)} told to wait; a neighbour's p95 "
        f"{after:.2f} s beside {before:.2f} s alone, with a grammar {held_after:.2f} beside {held_before:.2f} s; "
        f"memory of the largest process +{grown // MIB} MiB",
    )
    assert set(seen) <= {200, 400, 429} and seen[200] and seen[400]
    assert after < QUIET * before + 0.25
    assert grown < 320 * MIB
