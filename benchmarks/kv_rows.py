"""The cost of float16 KV for whole steps, beside bfloat16: python benchmarks/kv_rows.py [--rows N] [--rounds N]

The rows are those of docs/performance.md, over random weights of the same shapes. Engines take turns, a measurement
each, starting with a different one each time: one holds KV in float16, two in bfloat16, whose difference is the noise.
Printed are the medians of the rounds' ratios, and how many rows stay within 2 %, which all must for `auto` to become
f16. KV before the depth is zeros: its values do not change the time. It takes some five minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from cairn.config.config import Config
from cairn.engine.bench import Bench, Workload, open_bench
from cairn.engine.machine import cpu_count, cpu_name
from cairn.kernels.choose import chosen
from cairn.kernels.roofline import Roofline
from cairn.models.packing.random_weights import RandomWeights, shape_spec
from cairn.system.posix import SystemClock
from vs_llama_cpp import ROWS, Row, numbers

DTYPES = ("f16", "bf16", "bf16")
WITHIN = 0.02
"""Largest slowdown of a row at which f16 could be what `auto` means."""


def main() -> None:
    """Print a line per row, and how many are within the limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=f"1-{len(ROWS)}", help="as benchmarks/vs_llama_cpp.py --list numbers them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=cpu_count())
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    config = Config(kernels=args.kernels, threads=args.threads)
    print(f"{cpu_name()}, {chosen(args.kernels)} kernels, {args.threads} threads, {args.rounds} rounds\n")
    print("| file | work | f16 beside bf16 | rounds | bf16 beside bf16 | rounds |")
    print("|---|---|---|---|---|---|", flush=True)
    slower: list[float] = []
    for row, times in measured([ROWS[n - 1] for n in numbers(args.rows)], config, args.rounds, args.steps):
        half, plain, other = zip(*times, strict=True)
        slower.append(statistics.median(beside(half, plain)))
        print(f"| {row.shape} {row.kind} | {row.name} | {told(half, plain)} | {told(other, plain)} |", flush=True)
    print(f"\n{verdict(slower)}")


def measured(rows: Sequence[Row], config: Config, rounds: int, steps: int) -> Iterator[tuple[Row, list[list[float]]]]:
    """Return the seconds of each row and engine in each round."""
    groups = dict.fromkeys((row.shape, row.kind, row.depth) for row in rows)
    for shape, kind, depth in groups:
        some = [row for row in rows if (row.shape, row.kind, row.depth) == (shape, kind, depth)]
        benches = [opened(shape, kind, some, steps, config, dtype) for dtype in DTYPES]
        try:
            for row in some:
                yield row, in_turns([work_of(bench, row) for bench in benches], rounds)
        finally:
            for bench in benches:
                bench.engine.close()


def opened(shape: str, kind: str, rows: Sequence[Row], steps: int, config: Config, dtype: str) -> Bench:
    """Return an engine for rows of one depth, with KV in this type."""
    load = Workload(
        prompt=max((row.size for row in rows if row.work == "prefill"), default=1),
        decode=steps,
        batch=tuple(dict.fromkeys(row.sequences for row in rows)),
        depth=(rows[0].depth,),
    )
    spec = shape_spec(shape)
    held = msgspec.structs.replace(config, kv_dtype=dtype)
    unknown = Roofline(read=1.0, arithmetic=1.0)  # the roofline is not printed
    return open_bench(spec, RandomWeights(spec, kind.lower()), held, load, unknown, SystemClock().now)


def work_of(bench: Bench, row: Row) -> Callable[[], float]:
    """Return a measurement of the row in seconds."""
    if row.work == "prefill":
        return lambda: bench.prefill(row.depth).seconds
    return lambda: bench.decode(row.size, row.depth).seconds


def in_turns(works: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Measure each in every round, a different one first each time, after a warm-up round."""
    results = []
    for number in range(rounds + 1):
        times = [0.0] * len(works)
        for place in range(len(works)):
            which = (place + number) % len(works)
            times[which] = works[which]()
        results.append(times)
    return results[1:]


def beside(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return how much longer the first takes in each round, as a share."""
    return [one / two - 1 for one, two in zip(seconds, others, strict=True)]


def told(seconds: Sequence[float], others: Sequence[float]) -> str:
    """Format the same as two cells of the table."""
    result = beside(seconds, others)
    return f"{statistics.median(result):+.1%} | {min(result):+.1%} to {max(result):+.1%}"


def verdict(slower: Sequence[float]) -> str:
    """Return how many rows are within the limit; `slower` holds the share by which f16 takes longer in each."""
    within = sum(one <= WITHIN for one in slower)
    return f"{within} of {len(slower)} rows are within {WITHIN:.0%}, the slowest takes {max(slower):+.1%}."


if __name__ == "__main__":
    main()
