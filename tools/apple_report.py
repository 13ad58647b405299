"""A report of MLX on this machine, as JSON and a table: on an Apple GPU, or on any CPU to try the tool.

    python tools/apple_report.py [--small] [--json FILE] [--model MODEL]

Needs the extra mlx. Nothing is sent anywhere. `--small` takes half a minute on two cores; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cairn.config.config import Config
from cairn.engine.load_engine import load_engine
from cairn.kernels import devices
from cairn.kernels.base import Kernels, Quantized
from cairn.kernels.program import KernelCall
from cairn.kernels.self_test import worst
from cairn.models.hub.hub import locate
from cairn.types.errors import CairnError
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.request import SamplingParams
from cairn.types.step import Row

MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0)


class Sizes:
    """How much is computed."""

    def __init__(self, small: bool) -> None:
        self.width = 512 if small else 4096
        self.rows = (1, 8, 64) if small else (1, 8, 512)
        self.pool = (32 if small else 256) * MIB
        self.layers = 16
        self.context = (256,) if small else (1024, 8192, 32768)
        self.prompt, self.decode = (64, 8) if small else (512, 64)
        self.rounds = 3 if small else 9


def median(work: Callable[[], None], rounds: int) -> float:
    """Return the median seconds of this many runs, after a warm-up."""
    work()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def given(k: Any, numbers: np.ndarray) -> Any:
    array = k.allocate(numbers.shape, str(numbers.dtype))
    k.upload([(array, numbers)])
    return array


def machine(mx: Any) -> dict[str, Any]:
    """Return the machine and its software."""
    metal = bool(mx.metal.is_available())
    info = {name: value for name, value in mx.device_info().items() if isinstance(value, int | float | str)}
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "metal": metal,
        "device": info,
        "report": devices.report("mlx").sentence,
    }


def products(k: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the speed of products of each kind of weights with few and many rows."""
    rng = np.random.default_rng(1)
    n = sizes.width
    codes = rng.integers(0, 16, (n, n), dtype=np.uint8)
    scales = (0.01 * (1 + rng.random((n, n // 32)))).astype(np.float16)
    wide = rng.integers(-127, 128, (n, n), dtype=np.int8)
    floats = rng.standard_normal((n, n)).astype(np.float32) / np.sqrt(np.float32(n))
    kinds = {
        "float32": floats,
        "float16": floats.astype(np.float16),
        "4 bits, groups of 32": Quantized(4, codes, scales, -8 * scales),
        "8 bits, groups of 32": Quantized(8, wide, scales),
    }
    results = []
    for name, weights in kinds.items():
        matrix = k.matrix([weights], [None])
        for rows in sizes.rows:
            x = given(k, rng.standard_normal((rows, n)).astype(np.float32))
            out = k.allocate((rows, n), "float32")
            program = k.program([KernelCall("project", (x, matrix, out))])
            seconds = median(lambda program=program: program.replay({}), sizes.rounds)  # type: ignore[misc]
            held = sum(array.nbytes for array in matrix.arrays)
            results.append(
                {
                    "weights": name,
                    "rows": rows,
                    "ms": 1e3 * seconds,
                    "gb_per_second": held / seconds / 1e9,
                    "tflops": 2 * rows * n * n / seconds / 1e12,
                }
            )
    return results


def paged(k: Any, mx: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Write a token of KV to each of 16 layers and attend to it; fail if the pool was copied."""
    heads, size, layers = 4, 128, sizes.layers
    block = layers * 2 * heads * BLOCK_TOKENS * size * 2
    results = []
    for context in sizes.context:
        width = context // BLOCK_TOKENS
        blocks = max(width, sizes.pool // block)
        pool = k.allocate((blocks, layers, 2, heads, BLOCK_TOKENS, size), "bfloat16")
        rng = np.random.default_rng(1)
        qkv = given(k, rng.standard_normal((1, 6 * heads * size)).astype(np.float32))
        query, out = k.allocate((1, 4 * heads, size), "float32"), k.allocate((1, 4 * heads * size), "float32")
        slot = given(k, np.array([context - 1], np.int32))
        rows = given(k, np.array([[0, 1, context - 1]], np.int32))
        table = given(k, np.arange(width, dtype=np.int32)[None])
        calls = []
        for layer in range(layers):
            calls.append(KernelCall("rope_write", (qkv, None, None, None, 1e-6, pool, layer, slot, query)))
            places = (pool, layer, rows, table, 0, size**-0.5, out)
            calls.append(KernelCall("attention", (query, *places)))
        program = k.program(calls)
        with k.touching([pool], 0):
            program.replay({})
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        seconds = median(lambda program=program: program.replay({}), sizes.rounds)  # type: ignore[misc]
        results.append(
            {
                "context": context,
                "pool_mib": blocks * block / MIB,
                "ms": 1e3 * seconds,
                "gb_per_second": width * block / seconds / 1e9,
                "peak_mib": (mx.get_peak_memory() - held) / MIB,
            }
        )
    return results


def bits(k: Any, sizes: Sizes) -> dict[str, bool]:
    """Return whether a row's product has the same bits alone and among others."""
    rng = np.random.default_rng(2)
    n = sizes.width
    weights = rng.standard_normal((n, n)).astype(np.float32)
    packed = Quantized(8, rng.integers(-127, 128, (n, n), dtype=np.int8), np.full((n, n // 32), 2.0**-9, np.float32))
    x = rng.standard_normal((33, n)).astype(np.float32)
    results = {}
    for name, one in (("float32", weights), ("8 bits", packed)):
        matrix = k.matrix([one], [None])

        def product(rows: np.ndarray, matrix: Any = matrix) -> np.ndarray:
            out = k.allocate((len(rows), n), "float32")
            k.project(given(k, rows), matrix, out)
            return np.array(k.fetch(out))

        whole = product(x)
        results[name] = all(np.array_equal(product(x[at : at + 1])[0], whole[at]) for at in range(0, 33, 8))
    return results


def steps(folder: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    """Return tokens per second of a model's prompt and of its answers, one and eight at a time."""
    config = Config(device=device, kv_gb=0.3, step_tokens=512, context=2048)
    spec, engine = load_engine(config, folder)
    try:
        width = (sizes.prompt + sizes.decode) // BLOCK_TOKENS + 1
        tokens = [3 + 7 * at % (spec.vocab - 9) for at in range(sizes.prompt + sizes.decode + 1)]
        groups = engine.info.groups

        def tables(number: int) -> tuple[list[int], ...]:
            return tuple(
                [2 * number + at % 2 for at in range(width)]
                if group.kind == "state"
                else list(range(number * width, (number + 1) * width))
                for group in groups
            )

        def prompt(number: int) -> None:
            row = Row(tokens, 0, sizes.prompt, tables(number), sizes.prompt - 1, sizes.prompt, GREEDY, 0)
            engine.prefill([row]).wait()

        results: dict[str, Any] = {"prompt_tokens_per_second": sizes.prompt / median(lambda: prompt(0), 3)}
        for batch in (1, 8):
            for number in range(batch):
                prompt(number)
            start = time.perf_counter()
            for at in range(sizes.prompt, sizes.prompt + sizes.decode):
                rows = [Row(tokens, at, at + 1, tables(number), at, sizes.prompt, GREEDY, 0) for number in range(batch)]
                engine.decode(rows).wait()
            results[f"tokens_per_second_of_{batch}"] = batch * sizes.decode / (time.perf_counter() - start)
        return results
    finally:
        engine.close()


def measured(small: bool, model: str) -> dict[str, Any]:
    """Return everything; a part that fails is reported with its error."""
    import mlx.core as mx

    from cairn.kernels.mlx import device

    sizes, report = Sizes(small), {"small": small, "machine": machine(mx)}
    kernels = device.load(device.chosen("mlx"))
    whole: Kernels = kernels
    kernel, share = worst(whole)
    report["self_test"] = {"largest_difference_in": kernel, "share_of_the_tolerance": share}
    parts: dict[str, Callable[[], Any]] = {
        "products": lambda: products(kernels, sizes),
        "paged": lambda: paged(kernels, mx, sizes),
        "same_bits_alone_and_in_a_batch": lambda: bits(kernels, sizes),
    }
    for name in ("mlx", "cpu"):
        parts[f"{model} on {name}"] = lambda name=name: steps(locate(model), name, sizes)  # type: ignore[misc]
    for name, work in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            report[name] = work()
        except (CairnError, RuntimeError, ValueError) as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    kernels.close()
    return report


def table(report: dict[str, Any]) -> str:
    """Return the figures as lines for people."""
    lines = [report["machine"]["report"], report["machine"]["system"], ""]
    for name, value in report.items():
        if name in ("machine", "small"):
            continue
        lines.append(name)
        for one in value if isinstance(value, list) else [value]:
            cells = (
                f"{key} {number:.4g}" if isinstance(number, float) else f"{key} {number}" for key, number in one.items()
            )
            lines.append("    " + ", ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, to try the tool")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--model", default="demo", help="a model that is installed")
    args = parser.parse_args()
    if trouble := devices.report("mlx").trouble:
        sys.exit(f"mlx cannot be used: {trouble}")
    result = measured(args.small, args.model)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
