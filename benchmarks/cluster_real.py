"""Three real servers compared with the simulation: tokens computed with routing by name and with round robin.

    python benchmarks/cluster_simulation.py --real [--sessions N]

Each is run with and without the shared store. The servers are those of `cairn cluster up demo`, with the bundled model.
All lengths are divided by `SCALE`, since its context is short. Turns come one after another; an agent's are far enough
apart for its KV to be in the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from tests.api.process import free_port

from cluster_simulation import ANSWER, QUESTION, Fleet, Load, Rule, Simulation
from router import Caller

SCALE, CONTEXT, TURNS = 90, 1900, 43
SESSIONS = 12
GAP = 0.12
"""Seconds between two turns; each agent has every `SESSIONS`th on average."""
LAG = 0.4
"""Seconds until KV is in the store (`--shared-lag`)."""
WAYS = {"round-robin": "turns", "names": "names"}


def scripted(rng: random.Random, sessions: int) -> list[tuple[int, int, int]]:
    """Return turns in the order of arrival: session, new tokens, tokens of the answer."""
    left = []
    for session in range(sessions):
        length = 0
        for _ in range(max(1, round(rng.lognormvariate(0, 0.5) * TURNS))):
            new, answer = (max(1, round(rng.expovariate(SCALE / size))) for size in (QUESTION, ANSWER))
            if (length := length + new + answer) > CONTEXT:
                break
            left.append((rng.random(), session, new, answer))
    return [(session, new, answer) for _, session, new, answer in sorted(left)]


async def served(turns: list[tuple[int, int, int]], port: int, way: str) -> tuple[int, int]:
    """Return prompt tokens, and those that the servers computed."""
    caller, rng = Caller(port), random.Random(way)
    history: dict[int, list[int]] = {}
    asked = computed = 0
    for session, new, answer in turns:
        began = time.monotonic()
        context = history.setdefault(session, [])
        context += [rng.randrange(300, 2000) for _ in range(new)]
        body = {"prompt": context, "max_tokens": answer, "ignore_eos": True, "temperature": 0}
        body["prompt_cache_key"] = f"{way}-{session}"
        data, _, _ = await caller.post("/v1/completions", body)
        parsed = json.loads(data)
        asked += parsed["usage"]["prompt_tokens"]
        computed += parsed["usage"]["cairn"]["computed"]
        # These are not the answer's tokens: they count as new, too
        context += [rng.randrange(300, 2000) for _ in range(answer)]
        await asyncio.sleep(max(0.0, GAP - (time.monotonic() - began)))
    return asked, computed


async def up(port: int, count: int) -> None:
    """Wait until a router has this many servers."""
    caller = Caller(port)
    for _ in range(600):
        try:
            data = await get(caller, "/router/replicas")
            if sum(item["up"] for item in json.loads(data)["data"]) >= count:
                return
        except (OSError, AssertionError):
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the servers did not become ready")


async def get(caller: Caller, path: str) -> bytes:
    """Return the answer to a GET."""
    from cairn.cluster.router.upstream import request_bytes

    connection = await caller.pool.take()
    await connection.send(request_bytes("GET", path.encode(), caller.host, (), b""))
    parts = []
    while piece := await connection.read():
        parts.append(piece)
    caller.pool.give(connection)
    return b"".join(parts)


def run(turns: list[tuple[int, int, int]], way: str, *, store: bool) -> tuple[int, int]:
    """Start three servers and a router, and return what `served` does."""
    port = free_port()
    options = [
        "--routing",
        way,
        "--shared-lag",
        str(LAG),
        "--kv-load",
        "always" if store else "never",
        "--kv-gb",
        "0.5",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cairn", "cluster", "up", "demo", "--replicas", "3", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--folder", folder, *options, "--log-level", "error"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            asyncio.run(up(port, 3))
            return asyncio.run(served(turns, port, way))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def foretold(way: str, *, store: bool, sessions: int) -> float:
    """Return the share of prompt tokens that the simulation computes, for a thousand such agents."""
    fleet = Fleet(
        replicas=3, regions=1, prefill=5_000, decode=2_000, stream=500, token_bytes=1, load=1e9, latency=0,
        pool=1e12, lag=LAG, lifetime=1e12,
    )  # fmt: skip
    load = Load(
        agents=600, seconds=2_000.0, question=(QUESTION + ANSWER) / SCALE, answer=0, think=GAP * sessions,
        context=CONTEXT, slot=0.1,
    )  # fmt: skip
    result = Simulation(fleet, load, Rule(way, WAYS[way], store), seed=7).run()
    return result.computed / result.prompt


def compare(sessions: int = SESSIONS) -> list[str]:
    """Return the table of predicted and measured figures."""
    turns = scripted(random.Random(5), sessions)
    lines = [
        f"| {len(turns)} turns, 3 servers | in turn | by names | ratio | foretold | off |",
        "|---|---|---|---|---|---|",
    ]
    for store in (False, True):
        shares, counts = {}, {}
        for way in WAYS:
            asked, computed = run(turns, way, store=store)
            shares[way], counts[way] = computed / asked, computed
        seen = shares["round-robin"] / shares["names"]
        predicted = foretold("round-robin", store=store, sessions=sessions) / foretold(
            "names", store=store, sessions=sessions
        )
        lines.append(
            f"| {'shared store' if store else 'no store'} | {counts['round-robin']:,} | {counts['names']:,} | "
            f"{seen:.2f} | {predicted:.2f} | {abs(predicted / seen - 1):.0%} |"
        )
    return lines
