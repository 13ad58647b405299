"""The speed of f16 and q8 KV beside bf16: python benchmarks/kv_types.py [--kernels NAME] [--rounds N]

Only attention is timed, over KV that fits no cache. Nothing else in a step reads KV, so a row of `cairn bench` differs
by less than shown here. The types, and a second pool of bfloat16, take turns on one thread. Times are the thread's CPU
time, so that other work on the machine disturbs little. Printed are the median of the rounds' ratios, their middle
half, and from the second pool the same for the noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from cairn.engine.machine import cpu_name
from cairn.kernels.choose import chosen
from cairn.kernels.kv_codes import row_bytes
from cairn.kernels.native import NativeKernels
from cairn.types.model_spec import BLOCK_TOKENS

TYPES = {"f16": "float16", "q8": "int8", "bf16": "bfloat16"}
LAYERS = 4
SHAPES = {"qwen3-0.6b": (16, 8, 128), "llama-3.2-1b": (32, 8, 64), "SmolLM2-135M": (9, 3, 64)}
"""Query heads, KV heads, head size."""
WORK = (
    ("decode 1", 1, 1, 512),
    ("decode 1", 1, 1, 4096),
    ("decode 8", 8, 1, 2048),
    ("decode 8", 8, 1, 4096),
    ("prefill", 1, 64, 2048),
)
"""Sequences, tokens of each, context before."""


def main() -> None:
    """Print a line per row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    kernels = NativeKernels(chosen(args.kernels), 1)
    print(f"{cpu_name()}, {chosen(args.kernels)} kernels, {args.rounds} rounds\n")
    print("| attention of | at |" + "".join(f" {name} beside bf16 | middle half |" for name in TYPES))
    print("|---|---|" + "---|---|" * len(TYPES), flush=True)
    for shape, sizes in SHAPES.items():
        for name, rows, tokens, depth in WORK:
            calls = [_call(kernels, dtype, sizes, rows, tokens, depth) for dtype in (*TYPES.values(), "bfloat16")]
            *every, plain = zip(*_rounds(calls, args.rounds), strict=True)
            result = " | ".join(_told(one, plain) for one in every)
            print(f"| {shape}, {name} | {depth} | {result} |", flush=True)


def _call(
    kernels: NativeKernels, dtype: str, sizes: tuple[int, int, int], rows: int, tokens: int, depth: int
) -> Callable[[], None]:
    """Return a call that computes attention of one step in every layer."""
    heads, kv_heads, size = sizes
    blocks = -(-(depth + tokens) // BLOCK_TOKENS)
    width = row_bytes(size) if dtype == "int8" else size
    kv = kernels.allocate((rows * blocks, LAYERS, 2, kv_heads, BLOCK_TOKENS, width), dtype)
    random = np.random.default_rng(1)
    numbers = random.normal(0, 1, (*kv.shape[1:5], size))
    if dtype == "int8":
        # Codes as large as those of such numbers, and their scales; in the kernels' layout scales come first.
        page = kv.reshape(*kv.shape[:4], -1)
        page[:] = (
            np.clip(np.rint(numbers * 40), -127, 127)
            .astype(np.int8)
            .repeat(2, axis=-1)
            .reshape(*page.shape[1:4], -1)[..., : page.shape[-1]]
        )
        page[..., : 4 * BLOCK_TOKENS].view(np.float32)[:] = 1 / 40
    else:
        kv[:] = numbers.astype(kv.dtype)
    query = random.normal(0, 1, (rows * tokens, heads, size)).astype(np.float32)
    out = np.empty((rows * tokens, heads * size), np.float32)
    places = np.array([(row * tokens, tokens, depth) for row in range(rows)], np.int32)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)

    def call() -> None:
        for layer in range(LAYERS):
            kernels.attention(query, kv, layer, places, tables, 0, size**-0.5, out)

    return call


def _rounds(calls: Sequence[Callable[[], None]], count: int) -> list[list[float]]:
    """Return seconds of each, a different one first each time, after a warm-up round."""
    results = []
    for number in range(count + 1):
        times = [0.0] * len(calls)
        for place in range(len(calls)):
            which = (place + number) % len(calls)
            start = time.process_time()
            calls[which]()
            times[which] = time.process_time() - start
        results.append(times)
    return results[1:]


def _told(seconds: Sequence[float], beside: Sequence[float]) -> str:
    """Format how much longer the first takes."""
    low, middle, high = statistics.quantiles([one / two for one, two in zip(seconds, beside, strict=True)], n=4)
    return f"{100 * (middle - 1):+.1f} % | {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}"


if __name__ == "__main__":
    main()
