"""Cairn beside llama.cpp, both computing the same GGUF file.  `python benchmarks/vs_llama_cpp.py [--quick] [--rows N]`

Random weights of a real shape are written once (`--files`), in BF16; llama.cpp's own quantiser makes the other formats
of that file. Each side is a process of its own that loads the file with the same number of threads. In each round, a
row is measured first by one side, then by the other; the table has each side's median and the median of the rounds'
ratios.

    prefill   a prompt of this many tokens in steps of at most 512, and the greedy choice of the token after it
    decode    steps of this many sequences at once, each sequence's token the greedy choice of the step before: Cairn
              runs rows through the engine with its sampling, as the worker calls it; llama.cpp runs `llama_decode` and
              picks the largest logit. The time of a step is the median of `--steps`.
    depth     the tokens of context before that, computed (not only allocated) on both sides

Before any speed is measured, both answer the same prompts; the largest difference of the twenty best log-probabilities
of a step is reported, and where the best token leads by more than that, both must have chosen it: the speed of wrong
answers would be worth nothing. Memory is each process's peak, including KV of the largest row.

llama.cpp comes with the extra `bench` and should be built for this machine, which takes minutes:
`CMAKE_ARGS=-DGGML_NATIVE=ON pip install -e '.[bench]' --no-binary llama-cpp-python`. `--llama-python` names another
interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from family_models import SHAPES
from side_by_side import Side, load, machine, median_ratio, model_file, write_json

ROOM = 512
"""Tokens of context that a row may add: the longest prompt."""
MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `goal` is Cairn's speed divided by llama.cpp's."""

    shape: str
    kind: str
    work: str
    size: int
    """Tokens of the prompt, or sequences decoded together."""
    goal: float
    depth: int = 0

    @property
    def sequences(self) -> int:
        return self.size if self.work == "decode" else 1

    @property
    def name(self) -> str:
        what = f"prefill {self.size}" if self.work == "prefill" else f"decode {self.size}"
        return what + (f" at {self.depth:,}" if self.depth else "")


def rows_of(shape: str, kind: str, prefill: float, *decode: float) -> list[Row]:
    """Return the usual rows of a file: prefill 512, decode of 1, 8, 16 and perhaps 32 sequences."""
    return [
        Row(shape, kind, "prefill", 512, prefill),
        *(Row(shape, kind, "decode", size, goal) for size, goal in zip((1, 8, 16, 32), decode, strict=False)),
    ]


QWEN, LLAMA = "qwen3-0.6b", "llama-3.2-1b"
ROWS = [
    *rows_of(QWEN, "Q4_0", 3.1, 1.4, 3.0, 3.0, 3.0),
    Row(QWEN, "Q4_0", "decode", 1, 2.0, depth=4096),
    Row(QWEN, "Q4_0", "prefill", 256, 3.5, depth=4096),
    Row(QWEN, "Q4_0", "decode", 8, 3.3, depth=1024),
    *rows_of(QWEN, "Q8_0", 5.0, 1.35, 3.8, 4.0, 4.3),
    *rows_of(QWEN, "Q4_K_M", 3.0, 1.3, 3.0, 2.8),
    *rows_of(QWEN, "BF16", 1.9, 1.0, 1.9, 2.1),
    *rows_of(LLAMA, "Q4_0", 2.7, 1.3, 2.8, 2.5),
    *(row for name, shape in SHAPES.items() for row in rows_of(name, shape.kind, 1.0, 1.0, 1.0)),
]


@dataclass(frozen=True, slots=True)
class Sides:
    """Both processes with one file loaded."""

    cairn: Side
    llama: Side

    def both(self, work: str, **arguments: Any) -> None:
        for side in (self.cairn, self.llama):
            side(work, **arguments)

    def measure(self, row: Row, rounds: int, steps: int) -> dict[str, Any]:
        """Return tokens per second in every round."""
        self.both("begin", batch=row.sequences, depth=row.depth, room=ROOM if row.sequences == 1 else MOST_STEPS)
        asked: dict[str, Any] = {"tokens": row.size} if row.work == "prefill" else {"steps": steps}
        short = asked if row.work == "prefill" else {"steps": 4}
        self.both(row.work, **short)
        results: dict[str, list[float]] = {"cairn": [], "llama": []}
        for _ in range(rounds):
            for name, side in (("cairn", self.cairn), ("llama", self.llama)):
                done = side(row.work, **asked)
                results[name].append(done["tokens"] / statistics.median(done["seconds"]))
        return {**asdict(row), "name": row.name, **results, "ratio": median_ratio(results["cairn"], results["llama"])}

    def check(self, vocab: int, prompts: int = 4, steps: int = 4) -> dict[str, Any]:
        """Compare the answers of both sides, as far as rounding allows; raise `SystemExit` if they differ."""
        asked = [[(104_729 * k + 31 * at * at + at) % (vocab - 1) for at in range(24)] for k in range(prompts)]
        ours, theirs = (
            side("answers", prompts=asked, steps=steps, top=20)["answers"] for side in (self.cairn, self.llama)
        )
        compared, largest, leads = 0, 0.0, []
        for mine, peer in zip(ours, theirs, strict=True):
            for one, other in zip(mine, peer, strict=True):
                known = dict(map(tuple, other))
                largest = max([largest, *(abs(value - known[token]) for token, value in one if token in known)])
                leads.append((other[0][1] - other[1][1], one[0][0] == other[0][0]))
                compared += 1
                if one[0][0] != other[0][0]:
                    break  # From here on the texts differ.
        clear = [same for lead, same in leads if lead > largest]
        if not all(clear):
            raise SystemExit(f"{clear.count(False)} greedy tokens differ although they lead by more than {largest}")
        same = sum(same for _, same in leads)
        return {"steps": compared, "largest": largest, "clear": len(clear), "same": same}


def tokens_held(rows: list[Row]) -> int:
    """Return the tokens that the pool must hold for the largest row."""
    return max(row.sequences * (row.depth + ROOM // min(row.sequences, 8) + 16) for row in rows)


def measure_file(rows: list[Row], args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rows of one file."""
    shape, kind = rows[0].shape, rows[0].kind
    path = model_file(args.files, shape, kind, args.llama_python)
    print(f"{path.name}: load {load():.1f}", file=sys.stderr)
    with Side(sys.executable, "cairn_side.py") as cairn, Side(args.llama_python, "llama_side.py") as llama:
        sides = Sides(cairn, llama)
        ready = {
            "cairn": cairn("load", path=str(path), threads=args.threads, tokens=tokens_held(rows), options=args.option),
            "llama": llama("load", path=str(path), threads=args.threads),
        }
        sides.both("clock", name=args.clock)
        checked = sides.check(ready["cairn"]["vocab"])
        print(f"  answers: {checked}", file=sys.stderr)
        results = []
        for row in rows:
            began = time.monotonic()
            results.append(sides.measure(row, args.rounds, args.steps))
            print(f"  {row.name}: {results[-1]['ratio']:.2f}x ({time.monotonic() - began:.0f} s)", file=sys.stderr)
        peaks = {"cairn": cairn("memory")["bytes"], "llama": llama("memory")["bytes"]}
        version = llama.hello
    seconds = {name: value["seconds"] for name, value in ready.items()}
    about = {"shape": shape, "kind": kind, "bytes": path.stat().st_size, "peak": peaks, "load_seconds": seconds}
    return {"rows": results, "file": {**about, "check": checked, "load": load()}, "llama.cpp": version}


def show(files: list[dict[str, Any]]) -> None:
    table = Table("file", "work", "Cairn tok/s", "llama.cpp tok/s", "ratio", "goal")
    for row in files:
        speeds = (f"{statistics.median(row[name]):,.1f}" for name in ("cairn", "llama"))
        table.add_row(f"{row['shape']} {row['kind']}", row["name"], *speeds, f"{row['ratio']:.2f}", f"{row['goal']}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def options(text: str) -> dict[str, Any]:
    """Parse `name=value` of a Cairn option, the value as JSON or a word."""
    name, _, value = text.partition("=")
    try:
        return {name: json.loads(value)}
    except ValueError:
        return {name: value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="numbers of rows as --list shows them, such as 1,2,5-8; default: all")
    parser.add_argument("--list", action="store_true", help="show the rows and end")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32, help=f"of a decode row, at most {MOST_STEPS}")
    parser.add_argument("--quick", action="store_true", help="one round of 12 steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of a busy machine, with a thread"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "cairn-bench", metavar="FOLDER")
    parser.add_argument("--option", type=options, action="append", default=[], metavar="NAME=VALUE", help="for Cairn")
    parser.add_argument("--llama-python", default=sys.executable, metavar="FILE")
    args = parser.parse_args()
    args.option = {name: value for one in args.option for name, value in one.items()}
    if not 4 <= args.steps <= MOST_STEPS:
        parser.error(f"--steps must be from 4 to {MOST_STEPS}")
    if args.quick:
        args.rounds, args.steps = 1, 12
    if args.list:
        print("\n".join(f"{n:2} {row.shape} {row.kind} {row.name}" for n, row in enumerate(ROWS, 1)))
        return
    wanted = [ROWS[n - 1] for n in numbers(args.rows or f"1-{len(ROWS)}")]
    about = {"machine": machine(args.threads), "rounds": args.rounds, "steps": args.steps, "options": args.option}
    about["clock"] = args.clock
    print(f"load before: {about['machine']['load']:.1f}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    for shape, kind in dict.fromkeys((row.shape, row.kind) for row in wanted):
        done = measure_file([row for row in wanted if (row.shape, row.kind) == (shape, kind)], args)
        rows += done["rows"]
        files.append(done["file"])
        about["llama.cpp"] = done["llama.cpp"]
        write_json(args.json, {**about, "files": files, "rows": rows})
    show(rows)


def numbers(text: str) -> list[int]:
    """Parse 1,2,5-8 as numbers of rows."""
    results: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        results += range(int(first), int(last or first) + 1)
    if not all(1 <= n <= len(ROWS) for n in results):
        raise SystemExit(f"--rows must name rows from 1 to {len(ROWS)}, found {text}")
    return results


if __name__ == "__main__":
    main()
