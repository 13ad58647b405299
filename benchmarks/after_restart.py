"""The first token of a known context after a restart, beside llama.cpp, which computes it again.  `python
benchmarks/after_restart.py [--shapes S ...] [--lengths N ...] [--llama-python FILE]`

For each shape of `family_models` and each prompt length in token ids:

    cold        Cairn over HTTP, a new prompt; then a flush, and the server is killed (-9)
    restarted   the same prompt on a new server: KV and states come from disk
    llama.cpp   the same number of tokens computed in its own process, without a server: after a restart its server has
                nothing, unless a slot was saved and is restored, both by hand

So Cairn's figure is what a client waits for, and llama.cpp's is less than that. Each round kills and starts Cairn anew,
and computes once in llama.cpp. A restarted server must give the cold answers, and must load from disk all of the prompt
except one block, or except what follows the last snapshot of a state. `--llama-most N` computes at most N tokens in
llama.cpp; for a longer prompt the time is scaled up linearly, which is less than it would take, since attention grows.
`--busy` counts half of llama.cpp's CPU seconds with one thread: what two threads would take at best on an idle
machine. Cairn's figures stay wall time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from family_models import SHAPES
from resume import Server
from side_by_side import Side, machine, model_file, write_json

ROOM = 64
"""Positions beyond the prompt."""
LAST = 640
"""Prompt tokens that may be computed again: those behind the last snapshot or chunk."""


class Restarts:
    """Cairn's side: servers that start and die over one folder of stored KV."""

    def __init__(self, path: Path, files: Path, home: Path, longest: int) -> None:
        self.path, self.home, self.cache = path, home, files / "cache"
        self.options = ("--kv-dir", str(home / "kv"), "--kv-load", "always", "--context", str(longest + ROOM))
        self.started: list[float] = []
        self.start()

    def start(self) -> None:
        began = time.perf_counter()
        self.server = Server(str(self.path), self.home, *self.options, cache=self.cache)
        self.started.append(time.perf_counter() - began)
        with urllib.request.urlopen(self.server.url + "/v1/models", timeout=60) as answer:
            self.model: str = json.load(answer)["data"][0]["id"]
        self.server.first_token(self.model, [7] * 8)

    def ask(self, prompt: list[int]) -> tuple[float, list[Any], int]:
        """Return seconds to the first token, the answer, and the number of tokens loaded from disk."""
        seconds, answer, report = self.server.first_token(self.model, prompt)
        return seconds, answer, report["disk"]


def measure(shape: str, lengths: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all lengths of one file."""
    path = model_file(args.files, shape, SHAPES[shape].kind, args.llama_python)
    results = []
    with tempfile.TemporaryDirectory(dir=args.files) as home, Side(args.llama_python, "llama_side.py") as llama:
        vocab = llama("load", path=str(path), threads=1 if args.busy else args.threads)["vocab"]
        llama("clock", name="cpu" if args.busy else "wall")
        ours = Restarts(path, args.files, Path(home), max(lengths))
        try:
            for length in lengths:
                rng = random.Random(length)
                prompt = [rng.randrange(5, vocab - 1) for _ in range(length)]
                row: dict[str, Any] = {"shape": shape, "kind": SHAPES[shape].kind, "tokens": length}
                cold, answer, _ = ours.ask(prompt)
                row |= {"cold": cold, "restarted": [], "llama": [], "disk": []}
                row["stored"] = ours.server.flush()["bytes"]
                computed = min(length, args.llama_most)
                llama("begin", batch=1, depth=0, room=computed + ROOM)
                for _ in range(args.rounds):
                    ours.server.kill()
                    ours.start()
                    seconds, again, disk = ours.ask(prompt)
                    if again != answer or disk < length - LAST:
                        raise SystemExit(f"{shape}, {length} tokens: another answer, or only {disk} of the disk")
                    row["restarted"].append(seconds)
                    row["disk"].append(disk)
                    (taken,) = llama("prefill", tokens=computed)["seconds"]
                    row["llama"].append(taken * length / computed / (2 if args.busy else 1))
                row["llama_computed"], row["ready"] = computed, statistics.median(ours.started[1:])
                ratios = [b / a for a, b in zip(row["restarted"], row["llama"], strict=True)]
                row["ratio"] = statistics.median(ratios)
                print(json.dumps(row), file=sys.stderr, flush=True)
                results.append(row)
        finally:
            ours.server.kill()
    return results


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-most", type=int, default=1 << 20, metavar="N")
    parser.add_argument("--busy", action="store_true", help="for a busy machine: CPU seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "cairn-bench", metavar="FOLDER")
    parser.add_argument("--llama-python", default=sys.executable, metavar="FILE")
    args = parser.parse_args()
    about = {"machine": machine(args.threads), "rounds": args.rounds}
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        rows += measure(shape, args.lengths, args)
        write_json(args.json, {**about, "rows": rows})
    print(f"{'shape':16}{'tokens':>8}{'cold':>10}{'restarted':>11}{'llama.cpp':>11}{'ratio':>8}")
    for row in rows:
        ours, theirs = (statistics.median(row[name]) for name in ("restarted", "llama"))
        print(f"{row['shape']:16}{row['tokens']:8}{row['cold']:10.2f}{ours:11.2f}{theirs:11.2f}{row['ratio']:8.1f}")


if __name__ == "__main__":
    main()
