"""Time to serve a model, and size of its worker.  `python benchmarks/footprint.py FILE.gguf [--kv-gb 1]`

`cairn serve FILE.gguf` is started with an empty cache folder, so that it packs the weights and keeps them, and then
`--starts` times again; each time is from the command to the first answer that it is ready. The last server gets prompts
that fill its KV pool twice, with every answer checked, and writes what it stores. Two seconds later the worker's whole
memory, shared libraries and file pages included, is compared with its packed weights and its pool; and so is its peak,
which adds KV on its way to the disk (a bounded queue).

Goals: ready again within 1.5 s for 0.6 billion weights of 4 bits; the worker at most 150 MB larger than both together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from cairn.config.config import Config
from cairn.engine.memory import block_bytes, kv_dtype, pool_blocks, weight_memory
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import BLOCK_TOKENS
from report import footprint_text
from serving import Server, end_when_told, letters, settle
from side_by_side import load, machine, write_json

PROMPT = 1024
REST_SECONDS = 2.0
"""Seconds between the last write and the measurement."""


def expected(path: Path, config: Config) -> tuple[int, int, int]:
    """Return the bytes of the packed weights and of the KV pool, and the tokens that it holds."""
    spec = load_spec(path)
    held = weight_memory(spec, HeldWeights(open_weights(path, spec), form_of(spec, config.weights)), config.kernels)
    blocks = pool_blocks(spec, config, weights=held)
    sizes = block_bytes(spec, kv_dtype(spec, config))
    pool = sum(count * size for count, size in zip(blocks, sizes, strict=True))
    return held.held, pool, max(blocks) * BLOCK_TOKENS


def fill(server: Server, tokens: int) -> None:
    """Compute prompts of this many tokens in all; raise `SystemExit` for anything but an answer of the right length."""
    for number in range(-(-tokens // PROMPT)):
        body = {"model": "model", "prompt": letters(f"fill {number}", PROMPT), "max_tokens": 1, "ignore_eos": True}
        request = urllib.request.Request(
            server.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            usage = json.load(answer)["usage"]
        if answer.status != 200 or (usage["prompt_tokens"], usage["completion_tokens"]) != (PROMPT, 1):
            raise SystemExit(f"prompt {number}: status {answer.status}, {usage}")


def processes(server: Server) -> dict[str, dict[str, int]]:
    """Return the bytes of the front, the worker and the template helper: peak, and now, private and file-backed."""
    results = {}
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (str(pid), *children):
        command = Path(f"/proc/{one}/cmdline").read_bytes()
        name = "front" if one == str(pid) else "worker" if b"cairn.worker.worker" in command else "helper"
        lines = (line.split() for line in Path(f"/proc/{one}/status").read_text().splitlines())
        sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[0].startswith(("VmHWM", "Rss"))}
        results[name] = {"peak": sizes["VmHWM"], "own": sizes["RssAnon"] + sizes["RssShmem"], "files": sizes["RssFile"]}
    return results


def measure(path: Path, args: argparse.Namespace, home: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", "from cairn.cli import main; main()", "serve", str(path), "--log-level", "warning"]
    command += ["--served-name", "model", "--threads", str(args.threads), "--kv-gb", str(args.kv_gb)]
    config = Config(model=str(path), threads=args.threads, kv_gb=args.kv_gb)
    weights, pool, tokens = expected(path, config)
    server = Server("cairn", command, "/health/ready", "model", home)
    results: dict[str, Any] = {"first_start": server.start_seconds, "starts": []}
    try:
        for _ in range(args.starts):
            server.kill()
            server.start()
            results["starts"].append(server.start_seconds)
        fill(server, 2 * tokens)
        settle(server)
        time.sleep(REST_SECONDS)
        results |= {"weights": weights, "pool": pool, "tokens": tokens, "processes": processes(server)}
    finally:
        server.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file of `random_models`")
    parser.add_argument("--kv-gb", type=float, default=1.0)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    end_when_told()
    about = {"machine": machine(args.threads), "file": args.file.stem}
    with tempfile.TemporaryDirectory() as folder:
        results = {**about, **measure(args.file, args, Path(folder))}
    results["load_after"] = load()
    write_json(args.json, results)
    print(footprint_text(results))
    print(f"median of the later starts: {statistics.median(results['starts']):.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
