"""IQ weights and 8-bit KV beside llama.cpp: speed and error.

    .venv/bin/python benchmarks/small_forms.py weights|kv [--types IQ2_XXS,IQ3_S] [--rounds 3] [--llama-python PYTHON]

Both sides compute with the same file of random weights on one thread, in turns. Times are the thread's CPU time. The
model is eight layers of qwen3-0.6b, with a vocabulary of 8,192 tokens.

    weights   in each type. The error is that of the largest 20 log-probabilities after 64 prompts, compared with
              Cairn's own with weights and KV in float32.
    kv        in Q4_0 at a depth of 4,096: KV of 16 bits, and of 8 bits on both sides. The error is that of the same
              numbers after 16 prompts of 512, compared with the same side with KV of 16 bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cairn.models.packing.random_weights import shape_spec
from cairn.types.model_spec import CacheGroup, ModelSpec
from random_models import write_random
from side_by_side import Side, median_ratio
from vs_llama_cpp import Row, Sides, tokens_held

TYPES = "IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,IQ4_XS"
LAYERS, VOCAB, TOP = 8, 8192, 20
FLOATS = {"weights": "f32", "kv_dtype": "f32"}


def small_spec() -> ModelSpec:
    """Return the shape qwen3-0.6b with fewer layers and a small vocabulary."""
    groups = (CacheGroup(kind="full", layers=tuple(range(LAYERS))),)
    return msgspec.structs.replace(shape_spec("qwen3-0.6b"), layers=LAYERS, vocab=VOCAB, groups=groups)


def written(path: Path, spec: ModelSpec, kind: str) -> Path:
    """Return the file, written if missing."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        write_random(partial, spec, kind)
        partial.rename(path)
    return path


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return [[(104_729 * k + 31 * at * at + at) % (vocab - 1) for at in range(length)] for k in range(count)]


def said(side: Side, asked: list[list[int]]) -> list[dict[int, float]]:
    """Return the largest log-probabilities after each prompt, by token."""
    answers = side("answers", prompts=asked, steps=1, top=2 * TOP)["answers"]
    return [{int(token): value for token, value in answer[0]} for answer in answers]


def error(guesses: list[dict[int, float]], exact: list[dict[int, float]]) -> tuple[float, float]:
    """Return the RMS and the largest difference over the exact side's best tokens that both sides name."""
    off = np.array(
        [
            one[token] - value
            for one, other in zip(guesses, exact, strict=True)
            for token, value in sorted(other.items(), key=lambda pair: -pair[1])[:TOP]
            if token in one
        ]
    )
    return float(np.sqrt(np.mean(off**2))), float(np.abs(off).max())


def told(name: str, measured: dict[str, Any]) -> str:
    ours, theirs = (statistics.median(measured[side]) for side in ("cairn", "llama"))
    return f"{name:28} {ours:8.1f} {theirs:8.1f} {median_ratio(measured['cairn'], measured['llama']):6.2f}"


def errors(name: str, ours: tuple[float, float], theirs: tuple[float, float]) -> str:
    return f"{name:28} {ours[0]:8.4f} {theirs[0]:8.4f} (largest {ours[1]:.3f}, {theirs[1]:.3f})"


def weights(kinds: list[str], rounds: int, files: Path, llama: str) -> None:
    """Print speed and error of each type."""
    asked = prompts(64, 24, VOCAB)
    rows = [
        Row("small", "", "decode", 1, 1.0),
        Row("small", "", "decode", 8, 1.0),
        Row("small", "", "prefill", 512, 1.0),
    ]
    for kind in kinds:
        path = written(files / f"small-{kind}.gguf", small_spec(), kind)
        with Side(sys.executable, "cairn_side.py") as exact:
            exact("load", path=str(path), threads=1, tokens=1024, options=FLOATS)
            truth = said(exact, asked)
        with Side(sys.executable, "cairn_side.py") as ours, Side(llama, "llama_side.py") as theirs:
            sides = Sides(ours, theirs)
            ours("load", path=str(path), threads=1, tokens=tokens_held(rows), options={})
            theirs("load", path=str(path), threads=1)
            sides.both("clock", name="cpu")
            print(errors(f"{kind} error", *(error(said(side, asked), truth) for side in (ours, theirs))), flush=True)
            for row in rows:
                print(told(f"{kind} {row.name}", sides.measure(row, rounds, 12)), flush=True)
            sizes = [side("memory")["bytes"] / 1e6 for side in (ours, theirs)]
            print(f"{kind + ' peak MB':28} {sizes[0]:8.0f} {sizes[1]:8.0f}", flush=True)


def kv(rounds: int, files: Path, llama: str) -> None:
    """Print speed and error of 8-bit KV."""
    path = written(files / "small-Q4_0.gguf", small_spec(), "Q4_0")
    asked = prompts(16, 512, VOCAB)
    rows = [
        Row("", "", "decode", 1, 1.0, 4096),
        Row("", "", "prefill", 256, 1.0, 4096),
        Row("", "", "decode", 8, 1.0, 4096),
    ]
    wide: list[list[dict[int, float]]] = []
    for ours_kv, theirs_kv in (("bf16", "f16"), ("q8", "q8_0")):
        with Side(sys.executable, "cairn_side.py") as ours, Side(llama, "llama_side.py") as theirs:
            sides = Sides(ours, theirs)
            ours("load", path=str(path), threads=1, tokens=tokens_held(rows), options={"kv_dtype": ours_kv})
            theirs("load", path=str(path), threads=1, kv=theirs_kv)
            sides.both("clock", name="cpu")
            results = [said(side, asked) for side in (ours, theirs)]
            if wide:
                print(errors(f"{ours_kv} error", *map(error, results, wide)), flush=True)
            wide = wide or results
            for row in rows:
                print(told(f"{ours_kv} {row.name}", sides.measure(row, rounds, 12)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weights", "kv"))
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "cairn-bench")
    parser.add_argument("--llama-python", default=sys.executable)
    args = parser.parse_args()
    args.files.mkdir(parents=True, exist_ok=True)
    print(f"{'':28} {'cairn':>8} {'llama':>8} {'ratio':>6}")
    if args.what == "weights":
        weights(args.types.split(","), args.rounds, args.files, args.llama_python)
    else:
        kv(args.rounds, args.files, args.llama_python)


if __name__ == "__main__":
    main()
