"""Small requests that would cost much: they are answered soon, and other streams go on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.api.process import served
from tests.api.sockets import answer, request_bytes
from tests.security.test_hostile import Good

Figure = Callable[[str, str], None]
MIB = 1 << 20


def bombs() -> dict[str, tuple[str, bytes]]:
    """Return route and body of each bomb by name; each is refused."""
    rng = random.Random(1)
    text = "".join(rng.choice("abcdefgh ,.\u00e9") for _ in range(6 * MIB))

    def chat(*contents: str) -> bytes:
        return json.dumps(
            {"model": "demo", "messages": [{"role": "user", "content": text} for text in contents]}
        ).encode()

    def offering(description: str) -> bytes:
        tool = {"type": "function", "function": {"name": "f", "description": description, "parameters": {}}}
        return json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}).encode()

    def calling(arguments: str) -> bytes:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": arguments})}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return json.dumps({"model": "demo", "messages": [*messages, {"role": "user", "content": "y"}]}).encode()

    def complete(prompt: Any) -> bytes:
        return json.dumps({"model": "demo", "prompt": prompt}, ensure_ascii=False).encode()

    return {
        "depth of lists": ("/v1/completions", b"[" * (15 * MIB)),
        "depth of objects": ("/v1/completions", b'{"a":' * (3 * MIB)),
        "tiny values": ("/v1/completions", b'{"a":[' + b"{}," * (5 * MIB) + b"1]}"),
        "quotes": ("/v1/completions", b'"' * (14 * MIB) + b"," * MIB),
        "an open text": ("/v1/completions", b'{"a": ' + b" " * (12 * MIB) + b'"' + b"," * (3 * MIB)),
        "digits": ("/v1/completions", b'{"temperature":' + b"9" * (15 * MIB) + b"}"),
        "exponent": ("/v1/completions", b'{"temperature":1e' + b"9" * (15 * MIB) + b"}"),
        "keys": ("/v1/completions", ("{" + ",".join(f'"k{i}":1' for i in range(260_000)) + "}").encode()),
        "token ids": ("/v1/completions", complete([5] * 260_000)),
        "long prompt": ("/v1/completions", complete(text)),
        "one word": ("/v1/completions", complete("a" * (15 * MIB))),
        "wide characters": ("/v1/completions", complete("a" * (12 * MIB) + "\N{GRINNING FACE}")),
        "long chat": ("/v1/chat/completions", chat(text)),
        "many messages": ("/v1/chat/completions", chat(*["a b c d e f g h"] * 4096)),
        "control tokens": ("/v1/chat/completions", chat("<|im_end|>" * 200_000)),
        "long tool": ("/v1/chat/completions", offering(text)),
        "long call": ("/v1/chat/completions", calling(text)),
        "long text to tokenize": ("/tokenize", json.dumps({"prompt": text}).encode()),
    }


async def test_bombs_are_refused_and_do_not_disturb_other_streams(figure: Figure) -> None:
    """Other streams go on, whole and exact, and the memory for one body of 16 MiB is bounded."""
    slowest: dict[str, float] = {}
    with served() as server:
        before = server.rss()
        good = Good(server, 2)
        for name, (path, body) in bombs().items():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            began = time.monotonic()
            writer.write(request_bytes("POST", path, body))
            status, _, said = await asyncio.wait_for(answer(reader), 60)
            slowest[name] = time.monotonic() - began
            writer.close()
            assert status == 400 and json.loads(said)["error"]["message"], (name, status, said[:200])
        gap = await good.end()
        worst = max(good.gaps)
        status = Path(f"/proc/{server.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    name = max(slowest, key=lambda name: slowest[name])
    figure(
        "bombs in bodies",
        f"{len(slowest)} refused, the slowest ({name}) after {slowest[name]:.2f} s; gap of the streams beside them p99 "
        f"{gap * 1000:.0f} ms, worst {worst * 1000:.0f} ms; peak memory +{(peak - before) >> 20} MiB",
    )
    assert peak - before < 256 * MIB
