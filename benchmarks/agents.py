"""The cost of many agents: only their new messages.  `python benchmarks/agents.py [--agents 100] [--turns 20] ...`

A real `cairn serve demo` whose pool holds ten contexts, and agents of about 1,000 tokens each that take turns one after
the other, so that nearly every context has left the pool when it is needed again. After each round the stored KV is
flushed. In every turn except an agent's first, everything must come from pool or disk except the last incomplete chunk
and the new message; a turn that computes more, or that fails, ends the run.

Printed: tokens computed and loaded, bytes on disk, p50 and p99 of the time to the first token and of the whole turn as
the client sees them, and the memory of the front and of the worker half-way and at the end. Memory may grow by less
than 2 % over the second half. A round begins at least 8 seconds after the last, so that half a run is longer than the
minute for which the events of an answer are kept (`--reconnect-grace`).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from cairn.config.config import Config
from cairn.engine.memory import block_bytes, kv_dtype
from cairn.models.hub.hub import demo_folder
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import BLOCK_TOKENS
from resume import Server

CHUNK = 64
HELD = 10
"""Contexts that fit the pool."""
MOST_GROWTH = 0.02
GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
WORDS = ("hens", "gate", "yard", "apple", "river", "stone", "lamp", "bread", "letter", "horse", "mill", "garden")


class Turn(NamedTuple):
    """One answer, in seconds and tokens."""

    first: float
    total: float
    prompt: int
    completion: int
    computed: int
    disk: int


def story(server: Server, tokens: int, rng: random.Random) -> str:
    """Return a system prompt of about this many tokens."""
    text, count = "The house book.\n", 0
    while count < tokens - 30:
        text += "".join(f"Day {rng.randrange(999)}: {rng.choice(WORDS)} and {rng.choice(WORDS)}.\n" for _ in range(8))
        count = int(server.post("/tokenize", {"prompt": text})["count"])
    return text


def turn(server: Server, id: str, number: int, answer: int) -> Turn:
    """Send a message to an agent; return the figures of its answer."""
    message = {"role": "user", "content": f"And what of day {number}?"}
    began, first, usage = time.perf_counter(), 0.0, None
    for chunk in server.stream(f"/v1/agents/{id}/turns", {"messages": [message], "max_tokens": answer, **GREEDY}):
        if not first and any(choice["delta"].get("content") for choice in chunk["choices"]):
            first = time.perf_counter() - began
        usage = chunk.get("usage") or usage
    if usage is None:
        raise SystemExit(f"{id}: an answer without usage")
    total, report = time.perf_counter() - began, usage["cairn"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], report["computed"], report["disk"])
    return Turn(first or total, total, *counts)


def check(id: str, number: int, now: Turn, before: Turn) -> None:
    """Fail unless only the last incomplete chunk and the new message were computed.

    The last token of an answer was never an input, so its KV is part of what is new.
    """
    held = before.prompt + before.completion - 1
    if now.prompt - now.computed < held // CHUNK * CHUNK:
        raise SystemExit(
            f"{id}, turn {number}: {now.computed} of {now.prompt} tokens were computed; {held} were there before"
        )


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def processes(server: Server) -> dict[str, int]:
    """Return the pids of the front and the worker."""
    results = {"front": server.process.pid}
    for child in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in child.read_text().split():
            if "cairn.worker.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                results["worker"] = int(pid)
    return results


def run(server: Server, args: argparse.Namespace) -> bool:
    """Run all rounds; return whether memory stayed within its limit."""
    rng = random.Random(1)
    ids = [f"agent-{number}" for number in range(args.agents)]
    for id in ids:
        server.post("/v1/agents", {"id": id, "system": story(server, args.tokens, rng)})
    last: dict[str, Turn] = {}
    turns: list[Turn] = []
    memory: list[dict[str, int]] = []
    pids = processes(server)
    for number in range(1, args.turns + 1):
        began = time.monotonic()
        for id in ids:
            now = turn(server, id, number, args.answer)
            if id in last:
                check(id, number, now, last[id])
                turns.append(now)
            last[id] = now
        disk = server.flush()
        memory.append({name: resident(pid) for name, pid in pids.items()})
        held = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in memory[-1].items())
        seconds = statistics.median(one.total for one in turns[-args.agents :] or last.values())
        print(f"round {number:>3}: {seconds * 1000:.0f} ms a turn, {held}", file=sys.stderr, flush=True)
        time.sleep(max(0.0, began + args.round_seconds - time.monotonic()))
    report(turns, disk)
    return judge(memory)


def report(turns: list[Turn], disk: dict[str, Any]) -> None:
    """Print the table."""
    prompt, computed = sum(one.prompt for one in turns), sum(one.computed for one in turns)
    print(f"turns after the first: {len(turns):,}, of {turns[0].prompt:,} to {turns[-1].prompt:,} tokens")
    print(f"computed: {computed / len(turns):.0f} tokens a turn, {computed / prompt:.1%} of the prompts")
    print(
        f"from the disk: {sum(one.disk for one in turns) / prompt:.1%}; most computed: {max(t.computed for t in turns)}"
    )
    print(f"on the disk: {disk['bytes'] / 1e6:.1f} MB in {disk['chunks']:,} chunks; read {disk['read'] / 1e9:.2f} GB")
    for name, values in (("first token", [t.first for t in turns]), ("turn", [t.total for t in turns])):
        cuts = statistics.quantiles(values, n=100)
        print(f"{name}: p50 {cuts[49] * 1000:.0f} ms, p99 {cuts[98] * 1000:.0f} ms")


def judge(memory: list[dict[str, int]]) -> bool:
    """Print the growth of memory over the second half; return whether it is within the limit."""
    good, half = True, len(memory) // 2
    for name in memory[0]:
        middle, end = memory[half - 1][name], memory[-1][name]
        growth = end / middle - 1
        good &= growth < MOST_GROWTH
        print(f"memory of the {name}: {middle / 1e6:.1f} MB half-way, {end / 1e6:.1f} MB at the end, {growth:+.2%}")
    return good


def main() -> None:
    """Run the benchmark; exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of an agent's system prompt")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--round-seconds", type=float, default=8.0, help="a round begins no sooner after the last")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server outlives the run
    with tempfile.TemporaryDirectory(prefix="cairn-agents-") as name:
        folder = Path(name)
        last = args.tokens + args.turns * (args.answer + 24)
        spec = load_spec(demo_folder())
        pool = HELD * last // BLOCK_TOKENS * sum(block_bytes(spec, kv_dtype(spec, Config())))
        options = ["--kv-dir", str(folder / "kv"), "--agents-dir", str(folder / "agents"), "--kv-load", "always"]
        server = Server("demo", folder, *options, "--kv-gb", f"{pool / 1e9:.4f}")
        try:
            good = run(server, args)
        finally:
            server.kill()
    if not good:
        raise SystemExit(f"memory grew by more than {MOST_GROWTH:.0%} over the second half")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
