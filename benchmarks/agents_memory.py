"""Memory of agents that work at once.  `python benchmarks/agents_memory.py [MODEL] [--agents 1 5 10] ...`

For each number of agents a fresh `cairn serve MODEL` with default options. Each agent begins with a system prompt of
some 1,000 tokens of its own; then all of them take turns at the same time, as agents on one machine do. Printed: the
memory of the front, the worker and the template helper afterwards, the peak of all together, and the tokens of KV.
Memory is the proportional set size (Pss): pages that processes share are counted once.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from agents import story, turn
from resume import Server

SAMPLE_SECONDS = 0.1
REST_SECONDS = 3.0
"""Seconds between the last answer and the measurement: KV is stored, buffers are freed."""


def memory(server: Server) -> dict[str, int]:
    """Return each process's own bytes plus its share of what is shared (Pss)."""
    results = {"front": _pss(server.process.pid)}
    for task in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in task.read_text().split():
            with contextlib.suppress(OSError):
                worker = "cairn.worker.worker" in Path(f"/proc/{pid}/cmdline").read_text()
                name = "worker" if worker else "helper"
                results[name] = results.get(name, 0) + _pss(int(pid))
    return results


def _pss(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "Pss:")


@contextlib.contextmanager
def watched(server: Server) -> Iterator[list[int]]:
    """Sample the memory of all processes together inside the block."""
    samples, over = [sum(memory(server).values())], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            samples.append(sum(memory(server).values()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def work(server: Server, count: int, args: argparse.Namespace) -> int:
    """Let this many agents take their turns at once; return the tokens of their contexts."""
    rng, tokens, failed = random.Random(count), [0] * count, list[BaseException]()
    for number in range(count):
        server.post("/v1/agents", {"id": f"agent-{number}", "system": story(server, args.tokens, rng)})

    def live(number: int) -> None:
        try:
            for day in range(args.turns):
                now = turn(server, f"agent-{number}", day, args.answer)
                tokens[number] = now.prompt + now.completion
        except BaseException as error:  # a SystemExit would only end its thread
            failed.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(str(failed[0]))
    return sum(tokens)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--turns", type=int, default=8, help="turns of each agent")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of an agent's system prompt")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server outlives the run
    print("| agents | tokens of KV | front | worker | helper | all | most of all meanwhile |")
    print("|---|---|---|---|---|---|---|")
    for count in (0, *args.agents):
        with tempfile.TemporaryDirectory(prefix="cairn-memory-") as name:
            server = Server(args.model, Path(name))
            try:
                with watched(server) as samples:
                    tokens = work(server, count, args)
                time.sleep(REST_SECONDS)
                result = memory(server)
            finally:
                server.kill()
        shown = [result.get(one, 0) for one in ("front", "worker", "helper")]
        cells = " | ".join(f"{size / 1e6:.0f} MB" for size in (*shown, sum(shown), max(samples)))
        print(f"| {count} | {tokens:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
