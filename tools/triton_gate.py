#!/usr/bin/env python3
"""Compilation of every Triton kernel for GPUs that are not here, with registers, spills and seconds.

The kernels are called once in shapes of real models; each launch is recorded instead of run, and then compiled for each
target. With --check, exit with 1 if a kernel that must not spill spills, or if a product uses no matrix unit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from cairn.kernels.base import Quantized
from cairn.kernels.triton.triton_kernels import TritonKernels
from cairn.types.model_spec import BLOCK_TOKENS

TARGETS: dict[str, tuple[str, Any, int]] = {
    "sm_75": ("cuda", 75, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
    "gfx1151": ("hip", "gfx1151", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
MATRIX_UNITS = re.compile(r"mma\.sync|wgmma|tcgen05\.mma|v_mfma|v_wmma")
MAY_SPILL = {("latents", ""), ("prefill 64", "sm_120")}
"""Cases whose spills are reported and not refused, on all targets or on one: latents are 576 numbers wide."""

OPTIONS = ("num_warps", "num_stages")
Launch = tuple[str, str, str, dict[str, str], dict[str, Any], dict[str, int]]
"""Case, module, kernel, types of the arguments, constants, and options of the compiler."""


def recorded() -> list[Launch]:
    """Return the distinct launches of all cases."""
    results: dict[str, Launch] = {}
    case = ""

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = dict(zip(self.arg_names, arguments, strict=False)) | named
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for parameter in self.params:
            value = given[parameter.name]
            if parameter.is_constexpr:
                types[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[parameter.name] = TYPES[value.dtype]
            else:
                types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        options = {name: named[name] for name in OPTIONS if name in named}
        launch = case, self.fn.__module__, self.fn.__name__, types, constants, options
        results.setdefault(json.dumps(launch[1:]), launch)

    JITFunction.run = record
    for name, call in cases():
        case = name
        call()
    return list(results.values())


def cases() -> Iterator[tuple[str, Any]]:
    """Yield names and calls of kernels in shapes of real models."""
    k = TritonKernels("cpu")
    rng = np.random.default_rng(1)
    hidden, heads, kv_heads, size = 1024, 8, 2, 128
    x, out = torch.zeros(1, hidden), torch.zeros(1, hidden)
    weight = torch.ones(hidden)
    yield "norm", lambda: k.norm(x, weight, 1e-6, out)
    yield "norm and add", lambda: k.norm_add(x, weight, 1e-6, out)
    yield "gated MLP", lambda: k.gate(torch.zeros(1, 2 * hidden), "silu", out)
    for name in ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        matrix = k.matrix([np.zeros((hidden, hidden), np.float32)], [None])
        matrix = type(matrix)((matrix.parts[0].to(dtype),), (None,), hidden)
        yield f"product {name}", lambda matrix=matrix: k.project_add(x, matrix, out)
    codes = rng.integers(0, 15, (64, hidden))
    scale = np.ones((64, hidden // 32), np.float16)
    packed = {
        "int8": Quantized(8, codes.astype(np.int8), scale),
        "int4": Quantized(4, codes.astype(np.uint8), scale),
        "Q4_K": _super(4, codes, 32),
        "Q6_K": _super(6, codes, 16),
    }
    for name, part in packed.items():
        matrix = k.matrix([part], [None])
        yield f"product {name}", lambda matrix=matrix: k.project(x, matrix, torch.zeros(1, 64))
    yield from _attention(k, heads, kv_heads, size)
    yield from _states(k)


def _super(bits: Any, codes: Any, group: int) -> Quantized:
    rows, inner = codes.shape
    kind = np.int8 if bits == 6 else np.uint8
    scale, block = np.ones((rows, inner // group), kind), np.ones((rows, inner // 256), np.float16)
    minima = (None, block, None) if bits == 6 else (scale, block, block)
    return Quantized(bits, codes.astype(np.uint8), scale, *minima)


def _attention(k: TritonKernels, heads: int, kv_heads: int, size: int) -> Iterator[tuple[str, Any]]:
    rows, table = torch.tensor([[0, 1, 700]], dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    many = torch.tensor([[0, 64, 700]], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        for width in (64, size, 256):
            kv = torch.zeros(4, 1, 2, kv_heads, BLOCK_TOKENS, width, dtype=dtype)
            query = torch.zeros(1, heads, width)
            out = torch.zeros(1, heads * width)

            def decode(query: Any = query, kv: Any = kv, out: Any = out) -> None:
                k.attention(query, kv, 0, rows, table, 0, 0.1, out)

            def prefill(kv: Any = kv, width: int = width) -> None:
                query, out = torch.zeros(64, heads, width), torch.zeros(64, heads * width)
                k.attention(query, kv, 0, many, table, 1024, 0.1, out, 50.0, False, torch.zeros(heads))

            yield f"decode {width}", decode
            yield f"prefill {width}", prefill
    kv = torch.zeros(4, 1, 2, kv_heads, BLOCK_TOKENS, size, dtype=torch.bfloat16)
    qkv, angles = torch.zeros(1, (heads + 2 * kv_heads) * size), torch.zeros(1, 2, size // 2)
    norm, slots = torch.ones(size), torch.zeros(1, dtype=torch.int32)
    yield "rope", lambda: k.rope_write(qkv, angles, norm, norm, 1e-6, kv, 0, slots, torch.zeros(1, heads, size))
    latents = torch.zeros(4, 1, 1, 1, BLOCK_TOKENS, 576, dtype=torch.bfloat16)
    given = torch.zeros(1, 16, 576)
    yield "latents", lambda: k.latent_attention(given, latents, 0, rows, table, 0.1, torch.zeros(1, 16, 512))


def _states(k: TritonKernels) -> Iterator[tuple[str, Any]]:
    rows, table = torch.tensor([[0, 1, 0]], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    heads, key_heads, size = 8, 4, 128
    width = 2 * key_heads * size + heads * size
    states = torch.zeros(2, 1, 3 * width + heads * size * size)
    x, gates, vector = torch.zeros(1, width), torch.zeros(1, 2 * heads), torch.zeros(heads)
    yield (
        "convolution",
        lambda: k.convolve(
            x, 0, torch.ones(4 * width), None, True, False, states, 0, rows, table, torch.zeros(1, width)
        ),
    )
    yield (
        "gated delta",
        lambda: k.delta(
            x, gates, 0, vector, vector, key_heads, False, states, 0, rows, table, torch.zeros(1, heads * size)
        ),
    )
    yield (
        "Mamba 2",
        lambda: k.mamba2(
            x,
            gates,
            0,
            vector,
            vector,
            vector,
            0.0,
            1.0,
            key_heads,
            states,
            0,
            rows,
            table,
            torch.zeros(1, heads * size),
        ),
    )


def compiled(launch: Launch, target: str) -> dict[str, Any]:
    """Compile a launch for a target and return the compiler's figures."""
    case, module, kernel, types, constants, options = launch
    fn = getattr(__import__(module, fromlist=[kernel]), kernel)
    places = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    began = time.monotonic()
    source = ASTSource(fn=fn, signature=types, constexprs=places)
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    results: dict[str, Any] = {"case": case, "kernel": kernel, "target": target, "shared": made.metadata.shared}
    results["seconds"] = round(time.monotonic() - began, 2)
    text = made.asm["ptx"] if "ptx" in made.asm else made.asm["amdgcn"]
    results["matrix"] = bool(MATRIX_UNITS.search(text))
    if "ptx" in made.asm:
        results |= _cubin(made.asm["cubin"])
    else:
        counts = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text)}
        results |= {"registers": counts["vgpr_count"], "spills": counts["vgpr_spill_count"]}
    return results


def _cubin(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of spills of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout))
    return {"registers": int(usage["REG"]), "spills": int(usage["LOCAL"]) + int(usage["STACK"])}


def trouble(compiled_kernel: dict[str, Any]) -> str:
    """Return what is wrong with a compiled kernel, or an empty text."""
    if (
        compiled_kernel["spills"]
        and not MAY_SPILL & {(compiled_kernel["case"], ""), (compiled_kernel["case"], compiled_kernel["target"])}
        and "float32" not in compiled_kernel["case"]
        and "256" not in compiled_kernel["case"]
    ):
        return f"{compiled_kernel['case']} spills {compiled_kernel['spills']} on {compiled_kernel['target']}"
    multiplies = (
        compiled_kernel["kernel"] in ("_dense", "_packed", "_attend") and "float32" not in compiled_kernel["case"]
    )
    # Triton 3.9 uses none on Turing.
    if multiplies and not compiled_kernel["matrix"] and compiled_kernel["target"] != "sm_75":
        return f"{compiled_kernel['case']} uses no matrix unit on {compiled_kernel['target']}"
    return ""


def main() -> int:
    """Compile, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated names; default: all")
    parser.add_argument("--cases", default="", help="only cases whose name begins with this")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kernel spills or lacks matrix units")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    launches = [one for one in recorded() if one[0].startswith(args.cases)]
    work = [(launch, target) for launch in launches for target in args.targets.split(",")]
    results = []
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) // 2), initializer=_quiet) as pool:
        for number, one in enumerate(pool.map(compiled, *zip(*work, strict=True)), 1):
            results.append(one)
            print(f"\r{number} of {len(work)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    wrong = [said for result in results if (said := trouble(result))]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong and args.check else 0


def _quiet() -> None:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="cairn-triton-")


def table(kernels: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a row per kernel and case, a column per target with registers and spills."""
    targets = list(dict.fromkeys(one["target"] for one in kernels))
    lines = [f"| case | kernel | {' | '.join(targets)} | seconds |", "|---" * (len(targets) + 3) + "|"]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in kernels:
        rows.setdefault((one["case"], one["kernel"]), []).append(one)
    for (case, kernel), group in rows.items():
        cells = []
        for target in targets:
            of = [one for one in group if one["target"] == target]
            cells.append(
                "/".join(f"{one['registers']}" + (f" ({one['spills']} spilled)" if one["spills"] else "") for one in of)
            )
        seconds = max(one["seconds"] for one in group)
        lines.append(f"| {case} | {kernel.strip('_')} | {' | '.join(cells)} | {seconds} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
