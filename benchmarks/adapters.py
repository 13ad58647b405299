"""What adapters cost a step: python benchmarks/adapters.py [--shape NAME] [--kind KIND] [--rank N] [--rounds N]

One engine with random weights, and random adapters on all linear layers. Cases take turns, so that a busy machine slows
all of them alike: eight decoding rows without an adapter, with a shared one and with one each, and a prompt of 512
tokens without and with an adapter. Printed are the medians, and the CPU time of the eight rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cairn.config.config import Config
from cairn.engine.bench import Workload, open_bench
from cairn.engine.machine import cpu_count, cpu_name
from cairn.kernels.choose import chosen
from cairn.kernels.roofline import Roofline
from cairn.models.adapters.adapter import AdapterParts
from cairn.models.packing.random_weights import SHAPES, RandomWeights, shape_spec
from cairn.models.safetensors.weights import expected_tensors
from cairn.system.posix import SystemClock
from cairn.types.model_spec import BLOCK_TOKENS, ModelSpec
from cairn.types.request import Adapters, SamplingParams
from cairn.types.step import Row

ROWS, PROMPT, DEPTH = 8, 512, 256
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--kind", default="bf16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=cpu_count())
    args = parser.parse_args()
    spec, config = shape_spec(args.shape), Config(threads=args.threads)
    load = Workload(prompt=PROMPT, decode=2, batch=(ROWS,), depth=(DEPTH,))
    unknown = Roofline(read=1.0, arithmetic=1.0)
    engine = open_bench(spec, RandomWeights(spec, args.kind), config, load, unknown, SystemClock().now).engine
    facts = [engine.attach(random_adapter(spec, args.rank, seed)) for seed in range(ROWS)]
    one: list[Adapters] = [((facts[0].digest, 1.0),)] * ROWS
    each: list[Adapters] = [((fact.digest, 1.0),) for fact in facts]
    count = -(-(DEPTH + 1) // BLOCK_TOKENS)
    greedy = SamplingParams(max_tokens=1, temperature=0)

    def decode(uses: list[Adapters]) -> Callable[[], object]:
        rows = [
            Row(
                [5] * DEPTH,
                DEPTH - 1,
                DEPTH,
                (range(n * count, (n + 1) * count),),
                DEPTH - 1,
                1,
                greedy,
                0,
                adapters=use,
            )
            for n, use in enumerate(uses)
        ]
        return lambda: engine.decode(rows).wait()

    def prefill(use: Adapters) -> Callable[[], object]:
        tables = (range(-(-PROMPT // BLOCK_TOKENS)),)
        row = Row([5] * PROMPT, 0, PROMPT, tables, PROMPT - 1, PROMPT, greedy, 0, adapters=use)
        return lambda: engine.prefill([row]).wait()

    works = {
        "8 rows, none": decode([()] * ROWS),
        "8 rows, one adapter": decode(one),
        "8 rows, 8 adapters": decode(each),
        "8 rows, one of them adapted": decode([each[0], *[()] * (ROWS - 1)]),
        "prompt, none": prefill(()),
        "prompt, one adapter": prefill(one[0]),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for round in range(args.rounds + 1):
        for name, work in works.items():
            began, used = time.perf_counter(), time.process_time()
            work()
            if round:
                times[name].append((time.perf_counter() - began, time.process_time() - used))
    print(f"{cpu_name()}, {chosen('auto')} kernels, {args.threads} threads, {args.shape} {args.kind}, ", end="")
    print(f"rank {args.rank}, {facts[0].memory / 1e6:.1f} MB an adapter")
    for name, spans in times.items():
        wall, used = (statistics.median(span[place] for span in spans) for place in (0, 1))
        print(f"{name:30} {1000 * wall:8.1f} ms {1000 * used:8.1f} ms of processors")
    engine.close()


def random_adapter(spec: ModelSpec, rank: int, seed: int) -> object:
    """Return an adapter of all linear layers."""
    rng, parts = np.random.default_rng(seed), AdapterParts(Path(f"random {seed}"), spec)
    for name, shape in expected_tensors(spec).items():
        module = name.removesuffix(".weight")
        if name.startswith("model.layers.") and module.endswith(LINEAR):
            down = rng.standard_normal((rank, shape[1]), dtype=np.float32) / np.float32(np.sqrt(shape[1]))
            parts.add(module, module, down, 0.01 * rng.standard_normal((shape[0], rank), dtype=np.float32))
    return parts.adapter()


if __name__ == "__main__":
    main()
