"""Conversations without a name whose beginnings are shared: tokens computed by names and by KV, simulated and run.

    python benchmarks/shared_beginnings.py [--teams N] [--servers N] [--simulate]

A team of agents has one long system text and tools. Each sub-agent has a task and some turns; where it cannot decide,
it tries a turn several times (best of), and the conversation goes on from one of them. No request names a session.
By names a conversation goes where the hash of its beginning (system text and first question) says, so a team is spread
over all servers, and each computes its system text. `--simulate` has a thousand teams on a hundred servers instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.api.process import free_port  # noqa: E402

from cluster_real import up  # noqa: E402
from router import Caller  # noqa: E402

BLOCK = 16
WAYS = ("round-robin", "names", "kv")
AGENTS, TURNS, TRIES = 8, 3, 3
"""Sub-agents of a team, turns of one, and tries of its last turn."""
SYSTEM, TASK, ANSWER = 700, 40, 16
"""Tokens of a team's system text, of what a turn brings, and of an answer."""
LETTERS = 2.2
"""Letters of this text that make a token of the bundled model."""
WORDS = ("stone", "cairn", "path", "ridge", "north", "valley", "river", "storm", "lamp", "door", "wall", "field")


class Turn(NamedTuple):
    """One request: whose it is, and the tokens of each message."""

    team: int
    agent: int
    turn: int
    attempt: int


def script(rng: random.Random, teams: int) -> list[Turn]:
    """Return turns in the order of arrival: each agent's in order, teams and agents mixed."""
    left = [(team, agent) for team in range(teams) for agent in range(AGENTS) for _ in range(TURNS + TRIES - 1)]
    rng.shuffle(left)
    seen: dict[tuple[int, int], int] = {}
    found = []
    for who in left:
        number = seen[who] = seen.get(who, -1) + 1
        found.append(Turn(*who, min(number, TURNS - 1), max(0, number - TURNS + 1)))
    return found


def words(seed: str, tokens: int) -> str:
    """Return a text of about so many tokens, the same for each seed."""
    rng, text = random.Random(seed), ""
    while len(text) < tokens * LETTERS:
        text += rng.choice(WORDS) + " "
    return text


def messages(turn: Turn) -> list[dict[str, str]]:
    """Return the messages of a request. Answers are invented, so that they count as new everywhere."""
    found = [{"role": "system", "content": words(f"team {turn.team}", SYSTEM)}]
    for number in range(turn.turn + 1):
        found.append({"role": "user", "content": words(f"{turn.team} {turn.agent} {number}", TASK)})
        if number < turn.turn:
            found.append({"role": "assistant", "content": words(f"answer {turn.team} {turn.agent} {number}", ANSWER)})
    return found


def simulated(turns: list[Turn], servers: int, way: str, pool: int = 1 << 40) -> float:
    """Return the prompt tokens that are computed. A server keeps beginnings, the least recently used go first."""
    kept: list[OrderedDict[tuple[int, ...], int]] = [OrderedDict() for _ in range(servers)]
    computed = 0
    for number, turn in enumerate(turns):
        path = beginnings(turn)
        held = [max((size for key, size in path if key in one), default=0) for one in kept]
        by_hash = random.Random(f"{turn.team} {turn.agent}").randrange(servers)
        if way == "round-robin":
            chosen = number % servers
        elif way == "names" or not max(held):
            chosen = by_hash
        else:
            chosen = max(range(servers), key=lambda one: (held[one], one == by_hash))
        size = path[-1][1]
        computed += size - min(held[chosen] // BLOCK * BLOCK, size - 1)
        before = 0
        for key, end in path:
            kept[chosen][key] = end
            kept[chosen].move_to_end(key)
            before = end
        while sum(kept[chosen].values()) > pool and before:
            kept[chosen].popitem(last=False)
    return computed


def beginnings(turn: Turn) -> list[tuple[tuple[int, ...], int]]:
    """Return the beginnings of a prompt, each with its tokens: the system text, and up to each turn."""
    found: list[tuple[tuple[int, ...], int]] = [((turn.team,), SYSTEM)]
    for number in range(turn.turn + 1):
        size = SYSTEM + (number + 1) * TASK + number * ANSWER
        found.append(((turn.team, turn.agent, number), size))
    return found


async def served(turns: list[Turn], port: int, beside: int) -> tuple[int, int]:
    """Return prompt tokens, and those that the servers computed, with so many requests beside each other."""
    caller, asked, computed = Caller(port), 0, 0
    waiting = iter(turns)
    last: dict[tuple[int, int], asyncio.Future[None]] = {}

    async def ask() -> None:
        nonlocal asked, computed
        for turn in waiting:
            before = last.get(turn[:2])
            mine = last[turn[:2]] = asyncio.get_running_loop().create_future()
            if before is not None:
                await before
            body: dict[str, Any] = {"messages": messages(turn), "max_tokens": ANSWER, "temperature": 0}
            data, _, _ = await caller.post("/v1/chat/completions", body | {"ignore_eos": True})
            usage = json.loads(data)["usage"]
            asked += usage["prompt_tokens"]
            computed += usage["cairn"]["computed"]
            mine.set_result(None)

    await asyncio.gather(*(ask() for _ in range(beside)))
    return asked, computed


def run(turns: list[Turn], servers: int, way: str, beside: int) -> tuple[int, int]:
    """Start servers and a router, and return what `served` does."""
    port = free_port()
    options = ["--routing", way, "--kv-load", "never", "--kv-gb", "0.5", "--log-level", "error"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cairn", "cluster", "up", "demo", "--replicas", str(servers)]
        process = subprocess.Popen(
            [*command, "--port", str(port), "--folder", folder, *options],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            asyncio.run(up(port, servers))
            return asyncio.run(served(turns, port, beside))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teams", type=int, default=4)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--beside", type=int, default=1, help="requests beside each other")
    parser.add_argument("--simulate", action="store_true")
    given = parser.parse_args()
    if given.simulate:
        turns = script(random.Random(5), 1000)
        for way in WAYS:
            print(f"| {way} | {simulated(turns, 100, way) / len(turns):,.0f} |")
        return
    turns = script(random.Random(5), given.teams)
    told = {way: simulated(turns, given.servers, way) for way in WAYS}
    real = {way: run(turns, given.servers, way, given.beside)[1] for way in WAYS}
    print(f"| {len(turns)} requests, {given.servers} servers | {' | '.join(WAYS)} | names : kv |")
    print("|---|---|---|---|---|")
    for title, found in (("simulated", told), ("run", real)):
        figures = " | ".join(f"{found[way]:,.0f}" for way in WAYS)
        print(f"| {title} | {figures} | {found['names'] / found['kv']:.2f} |")


if __name__ == "__main__":
    main()
