"""The router's cost and savings: CPU per request and per streamed chunk, time to the first token, throughput.

    python benchmarks/router.py [--requests N] [--agents N]

The engine is fake, so hardly anything but serving is measured. CPU is the router process's own, user and system time as
the kernel counts it. The last table has the tokens computed when turns of agents go to the server that has their KV,
and with round robin, simulated and measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.api.process import Served, free_port  # noqa: E402

from cairn.cluster.router.upstream import UpstreamPool, request_bytes  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
BLOCK = 16
TURNS, ANSWER, QUESTION = 43, 444, 3300
"""Median turns of a session, tokens of an answer, and new tokens of a turn, from published traces of coding agents."""
SCALE = 90
"""Divisor of all lengths: the bundled model's context is short."""
CONTEXT = 1900


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Caller:
    """A client that costs little CPU itself."""

    def __init__(self, port: int) -> None:
        self.pool = UpstreamPool("127.0.0.1", port)
        self.host = f"127.0.0.1:{port}"

    async def post(self, path: str, body: Any) -> tuple[bytes, float, int]:
        """Return the answer, seconds until its first piece, and its pieces."""
        began = time.perf_counter()
        headers = [(b"content-type", b"application/json")]
        data = request_bytes("POST", path.encode(), self.host, headers, json.dumps(body).encode())
        connection = await self.pool.take()
        await connection.send(data)
        parts, first = [], 0.0
        while piece := await connection.read():
            first = first or time.perf_counter() - began
            parts.append(piece)
        assert connection.status < 300, (connection.status, parts)
        self.pool.give(connection)
        whole = b"".join(parts)
        return whole, first, whole.count(b"\n\n")


def chat(tokens: int, *, stream: bool, number: int = 0) -> dict[str, Any]:
    """Return a body of a short chat."""
    messages = [{"role": "user", "content": f"Hello {number}"}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


async def many(caller: Caller, count: int, beside: int, body: Any) -> tuple[float, list[float], int]:
    """Make requests, some concurrently; return seconds, times to the first piece, and events."""
    left, firsts, events = iter(range(count)), list[float](), 0

    async def one() -> None:
        nonlocal events
        for number in left:
            _, first, seen = await caller.post("/v1/chat/completions", body(number))
            firsts.append(first)
            events += seen

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(beside)))
    return time.perf_counter() - began, firsts, events


async def costs(count: int) -> None:
    """Print what the router costs."""
    server = Served(max_running=256)
    server.wait_ready()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "cairn",
        "route",
        "--port",
        str(port),
        "--replica",
        server.url,
        "--log-level=error",
    ]
    router = subprocess.Popen(command)
    try:
        routed, bare = Caller(port), Caller(server.port)
        await until_ready(routed)
        whole = lambda number: chat(1, stream=False, number=number)  # noqa: E731
        streamed = lambda number: chat(200, stream=True, number=number)  # noqa: E731
        await many(routed, count // 10, 4, whole)
        before = cpu_of(router.pid)
        await many(routed, count, 4, whole)
        request = (cpu_of(router.pid) - before) / count
        before = cpu_of(router.pid)
        _, _, events = await many(routed, count // 10, 4, streamed)
        chunk = (cpu_of(router.pid) - before - request * (count // 10)) / max(1, events)
        await many(bare, count // 5, 4, streamed)  # so that both ways find the same KV
        pairs = [[(await many(one, count // 5, 4, streamed))[1] for one in (bare, routed)] for _ in range(3)]
        added = statistics.median(statistics.median(b) - statistics.median(a) for a, b in pairs)
        await many(bare, count, 100, whole)
        rates = [[count / (await many(one, count, 100, whole))[0] for one in (bare, routed)] for _ in range(3)]
        share = statistics.median(b / a for a, b in rates)
        print("| the router | |\n|---|---|")
        print(f"| CPU a request | {1e3 * request:.2f} ms |")
        print(f"| CPU a streamed event | {1e6 * chunk:.0f} us |")
        print(f"| first token at 4 connections, p50 | + {1e3 * added:.2f} ms |")
        print(f"| requests a second at 100 connections | {share:.0%} of a bare server's |")
    finally:
        router.kill()
        router.wait()
        server.end()


async def until_ready(caller: Caller) -> None:
    """Wait until a router has a server."""
    for _ in range(200):
        try:
            await caller.post("/v1/chat/completions", chat(1, stream=False))
            return
        except (OSError, AssertionError):
            await asyncio.sleep(0.1)
    raise SystemExit("the router did not become ready")


# ------------------------------------------------------------------------------------------- what going by names saves


def sessions(rng: random.Random, count: int) -> list[list[tuple[int, int]]]:
    """Return the turns of sessions: new tokens and tokens of the answer, scaled down."""
    results = []
    for _ in range(count):
        turns, length = list[tuple[int, int]](), 0
        for _ in range(max(1, round(rng.lognormvariate(0, 0.5) * TURNS))):
            new, answer = (max(4, round(rng.expovariate(SCALE / size))) for size in (QUESTION, ANSWER))
            if (length := length + new + answer) > CONTEXT:
                break
            turns.append((new, answer))
        results.append(turns)
    return results


def arrivals(rng: random.Random, all_turns: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return (session, turn) in the order of arrival: each session's turns in order, sessions mixed."""
    left = [session for session, turns in enumerate(all_turns) for _ in turns]
    rng.shuffle(left)
    at = [0] * len(all_turns)
    order = []
    for session in left:
        order.append((session, at[session]))
        at[session] += 1
    return order


def simulated(
    order: list[tuple[int, int]], turns: list[list[tuple[int, int]]], servers: int, pool: int, how: str
) -> int:
    """Return the number of prompt tokens computed, with an LRU cache of contexts on each server."""
    kept: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(servers)]
    context, computed = [0] * len(turns), 0
    for number, (session, turn) in enumerate(order):
        new, answer = turns[session][turn]
        server = session % servers if how == "names" else number % servers
        had = kept[server].pop(session, 0) // BLOCK * BLOCK
        prompt = context[session] + new
        computed += prompt - min(had, prompt)
        context[session] = prompt + answer
        kept[server][session] = context[session]
        while sum(kept[server].values()) > pool:
            kept[server].popitem(last=False)
    return computed


async def run(order: list[tuple[int, int]], turns: list[list[tuple[int, int]]], ports: list[int], how: str) -> int:
    """Return the prompt tokens that servers computed: through the router, or with round robin."""
    callers = [Caller(port) for port in ports]
    history: list[list[int]] = [[] for _ in turns]
    rng, computed = random.Random(how), 0  # other tokens for each way, so that they share no KV
    for number, (session, turn) in enumerate(order):
        new, answer = turns[session][turn]
        history[session] += [rng.randrange(300, 2000) for _ in range(new)]
        body = {"prompt": history[session], "max_tokens": answer, "ignore_eos": True, "temperature": 0}
        body["prompt_cache_key"] = f"{how}-{session}"
        caller = callers[0] if how == "names" else callers[number % len(callers)]
        data, _, _ = await caller.post("/v1/completions", body)
        usage = json.loads(data)["usage"]
        computed += usage["cairn"]["computed"]
        history[session] += [rng.randrange(300, 2000) for _ in range(answer)]
    return computed


async def savings(count: int) -> None:
    """Print the tokens computed with routing by name and with round robin, simulated and measured."""
    rng = random.Random(5)
    turns = sessions(rng, count)
    order = arrivals(rng, turns)
    servers = [Served(kv_gb=0.5, kv_disk=False) for _ in range(3)]
    router = None
    try:
        for server in servers:
            server.wait_ready()
        port = free_port()
        replicas = [word for server in servers for word in ("--replica", server.url)]
        router = subprocess.Popen([sys.executable, "-m", "cairn", "route", "--port", str(port), *replicas])
        await until_ready(Caller(port))
        await asyncio.sleep(2.5)
        real = {"round": await run(order, turns, [server.port for server in servers], "round")}
        real["names"] = await run(order, turns, [port], "names")
    finally:
        if router is not None:
            router.kill()
            router.wait()
        for server in servers:
            server.end()
    pool = 1 << 40
    foretold = {how: simulated(order, turns, 3, pool, how) for how in ("round", "names")}
    print(f"\n| computed prompt tokens, {count} sessions, {len(order)} turns, 3 servers | in turn | by names | |")
    print("|---|---|---|---|")
    for name, tokens in (("simulated", foretold), ("run", real)):
        print(f"| {name} | {tokens['round']:,} | {tokens['names']:,} | {tokens['round'] / tokens['names']:.1f} times |")


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--agents", type=int, default=30)
    chosen = parser.parse_args()
    asyncio.run(costs(chosen.requests))
    asyncio.run(savings(chosen.agents))


if __name__ == "__main__":
    main()
