#!/usr/bin/env python3
"""A report of a GPU in at most ten minutes: whether results are right, how fast it is, and how near its limits.

Needs Cairn, torch and Triton, and no model: weights are random. Prints a Markdown table and writes JSON. Without a GPU,
`--device torch-cpu --quick` tries the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.config.config import Config
from cairn.engine.bench import Figure, Workload, open_bench
from cairn.kernels import devices
from cairn.kernels.roofline import Roofline
from cairn.kernels.self_test import worst
from cairn.models.packing.random_weights import RandomWeights, shape_spec
from cairn.types.errors import CairnError

SHAPES = {"qwen3-0.6b": ("bf16", "q8_0", "q4_0"), "qwen3-8b": ("bf16", "q8_0", "q4_0")}
BATCHES, DEPTHS, PROMPT, STEPS = (1, 8, 64, 256), (0, 8192), 8192, 32
SECONDS = 600.0
"""Limit in seconds of the whole report; parts left out are named."""


class Report:
    """Everything measured, and the time that is left."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self._end = device, time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.facts: dict[str, Any] = {}

    @property
    def over(self) -> bool:
        """Return whether the time is used up."""
        return time.monotonic() > self._end

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part; its error is kept in the report and ends nothing else."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield
        except (CairnError, RuntimeError, MemoryError) as error:
            self.left_out.append(f"{name}: {str(error).splitlines()[0][:200]}")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best(device: torch.device, run: Any, rounds: int = 10) -> float:
    """Return the least seconds of a call, after two warm-up calls."""
    times = []
    for number in range(rounds + 2):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if number > 1:
            times.append(time.perf_counter() - began)
    return min(times)


def limits(device: torch.device, *, quick: bool) -> Roofline:
    """Measure bytes read per second, and operations of a product of bfloat16 matrices."""
    numbers = torch.ones((64 << 20 if quick else 2 << 30) // 4, device=device)
    read = numbers.numel() * 4 / best(device, numbers.sum)
    size = 512 if quick else 8192
    a = torch.ones((size, size), dtype=torch.bfloat16, device=device)
    operations = 2 * size**3 / best(device, lambda: a @ a)
    return Roofline(read, operations, operations)


def law(kernels: Any) -> list[str]:
    """Return the kernels whose numbers for a token change with its batch, out of products, norms and attention."""
    rng = np.random.default_rng(3)
    broken = []
    hidden, rows = 512, 37
    x = kernels.tensor(rng.standard_normal((rows, hidden), np.float32))
    weight = kernels.tensor(np.ones(hidden, np.float32))
    matrix = kernels.matrix([rng.standard_normal((768, hidden), np.float32)], [None])

    def alone_and_together(name: str, width: int, call: Any) -> None:
        whole = kernels.allocate((rows, width), "float32")
        call(x, whole)
        for row in (0, 5, rows - 1):
            one = kernels.allocate((1, width), "float32")
            call(x[row : row + 1], one)
            if not torch.equal(one[0], whole[row]):
                broken.append(name)
                return

    alone_and_together("norm", hidden, lambda given, out: kernels.norm(given, weight, 1e-6, out))
    alone_and_together("project", 768, lambda given, out: kernels.project(given, matrix, out))
    return broken


def measure(report: Report, shape: str, kind: str, roofline: Roofline, asked: argparse.Namespace) -> None:
    """Measure prefill and decode of one shape with one type of weights."""
    config = Config(model=shape, device=report.device, kv_dtype="bf16")
    batches, depths = (BATCHES, DEPTHS) if not asked.quick else ((1, 4), (0,))
    prompt, steps = (PROMPT, STEPS) if not asked.quick else (64, 4)
    spec = shape_spec(shape)
    weights = RandomWeights(spec, kind)
    for depth in depths:
        for batch in batches:
            name = f"{shape} {kind}: decode of {batch} at depth {depth}"
            if report.over:
                report.left_out.append(f"{name}: no time left")
                continue
            with report.part(name):
                load = Workload(prompt=16, decode=steps, batch=(batch,), depth=(depth,))
                bench = open_bench(spec, weights, config, load, roofline, time.monotonic)
                try:
                    add(report, shape, kind, bench.decode(batch, depth))
                finally:
                    bench.engine.close()
    with report.part(f"{shape} {kind}: prefill of {prompt}"):
        load = Workload(prompt=prompt, decode=1, batch=(1,), depth=(0,))
        bench = open_bench(spec, weights, config, load, roofline, time.monotonic)
        try:
            add(report, shape, kind, bench.prefill(0))
        finally:
            bench.engine.close()


def add(report: Report, shape: str, kind: str, figure: Figure) -> None:
    """Record one figure."""
    report.rows.append(
        {
            "shape": shape,
            "weights": kind,
            "work": figure.work,
            "batch": figure.batch,
            "depth": figure.depth,
            "tokens_per_second": round(figure.tokens_per_second, 1),
            "read": round(figure.read_fraction, 3),
            "arithmetic": round(figure.arithmetic_fraction, 3),
        }
    )


def table(report: Report) -> str:
    """Return the report in Markdown."""
    lines = [f"- {name}: {value}" for name, value in report.facts.items()]
    lines += [
        "",
        "| shape | weights | work | batch | depth | tokens/s | of reading | of arithmetic |",
        "|---" * 8 + "|",
    ]
    for row in report.rows:
        lines.append("| " + " | ".join(str(value) for value in row.values()) + " |")
    return "\n".join([*lines, "", *(f"left out: {one}" for one in report.left_out)])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="rocm:0" if torch.version.hip else "cuda:0", help="default: the first GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most time to take; default: 600")
    parser.add_argument("--quick", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    said = devices.report(args.device)
    if said.trouble:
        print(f"{args.device} cannot be measured: {said.trouble}", file=sys.stderr)
        return 1
    report = Report(args.device, args.seconds)
    report.facts["device"] = said.sentence
    kernels = devices.load(args.device, "auto", 0)
    place = kernels.device
    kernel, off = worst(kernels)
    report.facts["self-test"] = f"{kernel} is farthest off, by {off:.2g} of what is allowed"
    report.facts["numbers that change with the batch"] = ", ".join(law(kernels)) or "none of those tried"
    kernels.close()
    roofline = limits(place, quick=args.quick)
    report.facts["reads"] = f"{roofline.read / 1e9:.0f} GB/s"
    report.facts["multiplies bf16"] = f"{roofline.arithmetic / 1e12:.1f} TFLOP/s"
    report.facts["vllm beside it"] = (
        "installed: run its bench too" if importlib.util.find_spec("vllm") else "not installed"
    )
    for shape, kinds in ({"demo": ("bf16", "q8_0")} if args.quick else SHAPES).items():
        for kind in kinds:
            measure(report, shape, kind, roofline, args)
    print(table(report))
    if args.json:
        args.json.write_text(
            json.dumps({"facts": report.facts, "rows": report.rows, "left_out": report.left_out}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
