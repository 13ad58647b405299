"""Tiny random models as GGUF, quantised by llama.cpp, and llama.cpp's logits: `python -m tools.make_gguf_fixtures`.

Run from the project's folder with the extra `bench` installed (`--llama-python` names another interpreter that has
llama_cpp). Every dimension is a multiple of 256, the block of the K formats. For each model and format it writes
`NAME-FORMAT.gguf` and `NAME-FORMAT.npy`: float32 [prompts, vocabulary], the logits after each of `prompts()`. In
Q4_K_M, half of the value and down projections and the tied table are Q6_K: llama.cpp's usual mixture.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.random_models import write_random
from benchmarks.side_by_side import Side

from cairn.types.model_spec import CacheGroup, ModelSpec

FOLDER = Path(__file__).parent.parent / "tests" / "models" / "gguf_fixtures"
KINDS = ("Q8_0", "Q4_0", "Q4_K_M")
LENGTHS = (*range(1, 18), 31, 32, 33, 48, 64, 65, 100)


def specs() -> list[ModelSpec]:
    sizes = {"layers": 2, "hidden": 256, "heads": 4, "head_dim": 64, "ffn": 256, "vocab": 512, "context": 512}
    groups = (CacheGroup(kind="full", layers=(0, 1)),)
    common = {**sizes, "groups": groups, "norm_eps": 1e-6}
    qwen = {"kv_heads": 2, "qk_norm": True, "tied": True, "rope_theta": 1e6, "architecture": "Qwen3ForCausalLM"}
    llama = {"kv_heads": 1, "qk_norm": False, "tied": False, "rope_theta": 5e5, "architecture": "LlamaForCausalLM"}
    return [ModelSpec(name="qwen3", **common, **qwen), ModelSpec(name="llama", **common, **llama)]  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    """Return token ids of prompts of `LENGTHS`."""
    return [[(131 * at * at + 57 * at + 71 * length) % 511 for at in range(length)] for length in LENGTHS]


def write_fixtures(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for spec in specs():
            source = Path(scratch) / f"{spec.name}.gguf"
            write_random(source, spec)
            for kind in KINDS:
                target = folder / f"{spec.name}-{kind}.gguf"
                with Side(python, "llama_side.py") as side:
                    side("quantize", source=str(source), target=str(target), kind=kind)
                    side("load", path=str(target), threads=1)
                    side("scores", prompts=prompts(), into=str(target.with_suffix(".npy")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-python", default=sys.executable, metavar="FILE")
    write_fixtures(FOLDER, parser.parse_args().llama_python)


if __name__ == "__main__":
    main()
