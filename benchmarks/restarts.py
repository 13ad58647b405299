"""The first token of a known context after kill -9 and after SIGTERM, in turns.  `python benchmarks/restarts.py [MODEL]
[--lengths N ...] [--repeats N]`

A real `cairn serve MODEL` (default: SmolLM2 of the extra `models`), one client, prompts of token ids. In each round,
for each way to end a server:

    cold        a new prompt
    (end)       kill -9 two seconds after the answer, or once it is idle, or SIGTERM at once; then a new server, which
                first gets a short prompt
    resumed     the same prompt, followed by its answer and one new token
    pool        the first prompt again

Answers must be the same as before. Printed are the medians: seconds to the first token, their share of the cold time,
tokens that were computed again, seconds from the decision to load until all was in the pool, seconds of the steps, and
the time until the new server was ready. The machine's load is printed with each round.
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
from typing import Any

from percentiles import usual_model
from resume import Server

ANSWER = 40
WAYS = {"kill -9": 2.0, "kill -9, idle": 33.0, "SIGTERM": 0.0}
"""How a server ends, and how many seconds after an answer."""


class Home:
    """Servers that start and die over one folder of stored KV."""

    def __init__(self, model: str, home: Path, options: list[str]) -> None:
        self._model, self._home = model, home
        self._options = ("--kv-dir", str(home / "kv"), *options)
        self.ready = list[float]()
        self.start()

    def start(self) -> None:
        began = time.perf_counter()
        self.server = Server(self._model, self._home, *self._options, cache=self._home / "cache")
        self.ready.append(time.perf_counter() - began)

    def end(self, way: str) -> None:
        time.sleep(WAYS[way])
        if way == "SIGTERM":
            os.kill(self.server.process.pid, signal.SIGTERM)
            self.server.process.wait(60)
        else:
            self.server.kill()

    def ask(self, prompt: list[int], count: int) -> tuple[float, list[int], dict[str, Any]]:
        """Return seconds to the first token, the answer's tokens, and the cache report with the seconds of steps."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "stream": True, "return_tokens": True}
        tokens, began, first, report = list[int](), time.perf_counter(), 0.0, None
        for chunk in self.server.stream("/completion", body):
            first = first or time.perf_counter() - began
            tokens += chunk["tokens"]
            if "cairn" in chunk:
                report = chunk["cairn"] | {"steps": chunk["timings"]["prompt_ms"] / 1000}
        if report is None or not tokens:
            raise SystemExit("an answer without tokens or a cache report")
        return first, tokens, report


def rounds(home: Home, length: int, repeats: int, vocab: int) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each round, by how the server ended."""
    rng = random.Random(length)
    results: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for number in range(repeats):
        for way in tuple(WAYS) if number % 2 else reversed(WAYS):
            prompt = [rng.randrange(5, vocab) for _ in range(length)]
            cold, answer, report = home.ask(prompt, ANSWER)
            if report["pool"] + report["disk"] > 64:
                raise SystemExit(f"a new prompt was known: {report}")
            home.end(way)
            home.start()
            home.ask([7] * 8, 2)
            again, _, report = home.ask([*prompt, *answer, 5], 2)
            same, told, _ = home.ask(prompt, ANSWER)
            if told != answer:
                raise SystemExit(f"{way}: another answer than the first")
            row = {"cold": cold, "resumed": again, "computed": report["computed"] - 1, "load": report["load_seconds"]}
            row |= {"steps": report["steps"], "part": again / cold, "pool": same, "ready": home.ready[-1]}
            for name, value in row.items():
                results[way].setdefault(name, []).append(value)
            said = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
            print(f"  {length:>6} {way:8} {said}  load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=usual_model())
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 4500, 8000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=40_000)
    parser.add_argument("--option", action="append", default=[], help="a further option of `cairn serve`")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server outlives the run
    print("| tokens | ended by | cold | resumed | of cold | computed again | loading | steps | from the pool | ready |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for length in args.lengths:
        with tempfile.TemporaryDirectory() as temporary:
            home = Home(args.model, Path(temporary), args.option)
            try:
                result = rounds(home, length, args.repeats, args.vocab)
            finally:
                home.server.kill()
        for way, row in result.items():
            middle = {name: statistics.median(values) for name, values in row.items()}
            figures = [f"{middle[name]:.3f}" for name in ("load", "steps", "pool")]
            print(
                f"| {length:,} | {way} | {middle['cold']:.2f} | {middle['resumed']:.3f} | {middle['part']:.1%} | "
                f"{middle['computed']:.0f} | {' | '.join(figures)} | {middle['ready']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
