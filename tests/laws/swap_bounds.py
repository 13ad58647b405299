"""How long a swap of a server's only model takes, on the real engine, and what happens to requests sent meanwhile.

Used by the tests of swaps and by the soak. The bounds: while idle, the new model's load time and a second; with running
streams, the grace period besides.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cairn.models.hub.hub import locate
from tests.api.process import Served
from tests.laws.soak_figures import Row

SPARE_SECONDS = 1.0
"""Seconds that a swap may take beside the new model's load and the grace period."""
STREAMS, ASKED = 12, 10
"""Streams that run, and requests that are sent during a swap."""
LONG = {"messages": [{"role": "user", "content": "Tell me all."}], "max_tokens": 1900, "ignore_eos": True}
TELLING = {"messages": [{"role": "user", "content": "Write about the sea and the wind."}], "temperature": 0}
SHORT = {"messages": [{"role": "user", "content": "What is a cairn?"}], "max_tokens": 4, "temperature": 0}


def other_demo(place: Path) -> Path:
    """Write the bundled model with another last norm, so that it answers `TELLING` differently; return its place."""
    shutil.copytree(locate("demo"), place)
    file = place / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8 : 8 + header])["model.norm.weight"]["data_offsets"]
    halves = np.frombuffer(data, np.uint16, (last - first) // 2, 8 + header + first)  # upper half of float32: bfloat16
    noise = np.random.default_rng(1).uniform(0.7, 1.4, halves.size)
    halves[:] = ((halves.astype(np.uint32) << 16).view(np.float32) * noise).astype(np.float32).view(np.uint32) >> 16
    file.write_bytes(data)
    return place


def one_model(folder: Path, **options: Any) -> Served:
    """Start a server with only the bundled model, on the real engine and slow kernels: streams must outlast a swap."""
    small = {"model": "demo", "engine": "cpu", "kernels": "portable", "kv_dir": str(folder / "kv"), "kv_gb": 0.05}
    return Served(**{**small, "context": 2048, "log_level": "warning", **options})


class Swaps:
    """Swaps of one server's only model, between the bundled one and another form of it."""

    def __init__(self, server: Served, other: Path) -> None:
        self.server, self.places = server, [str(other), "demo"]
        self.http = httpx.Client(base_url=server.url, timeout=180, trust_env=False)
        self.told: list[str] = []
        """Error messages of streams that a swap ended."""
        self.answers: list[httpx.Response] = []
        """Answers to the requests sent during a swap."""

    def swap(self, to: str | None = None, **body: Any) -> tuple[float, httpx.Response]:
        """Swap to a place, or to the other model; return the seconds until the answer, and the answer."""
        if to is None:
            to = self.places[0]
            self.places.reverse()
        began = time.monotonic()
        answer = self.http.post("/v1/admin/models/swap", json={"model": "demo", "to": to, **body})
        return time.monotonic() - began, answer

    def excess(self, **body: Any) -> float:
        """Swap to the other model; return the seconds beyond its load and the grace period."""
        seconds, answer = self.swap(**body)
        assert answer.status_code == 200, answer.text
        return seconds - float(answer.json()["load_seconds"]) - float(body.get("grace", 0.0))

    @contextlib.contextmanager
    def streams(self, count: int = STREAMS) -> Iterator[None]:
        """Run so many streams inside the block, longer than a swap takes; ended ones are not restarted."""
        begun, over = threading.Barrier(count + 1), threading.Event()

        def follow() -> None:
            with (
                httpx.Client(base_url=self.server.url, timeout=180, trust_env=False) as http,
                http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as answer,
            ):
                last = ""
                for seen, line in enumerate(answer.iter_lines()):
                    last = line or last
                    if seen == 4:
                        begun.wait(60)
                    if '"error"' in line:
                        self.told.append(json.loads(line.removeprefix("data: "))["error"]["message"])
                    if over.is_set():
                        return
                if last != "data: [DONE]" and '"error"' not in last:
                    self.told.append(f"cut off after {last[:80]}")

        threads = [threading.Thread(target=follow, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(60)

    @contextlib.contextmanager
    def asking(self, **headers: str) -> Iterator[None]:
        """Send requests inside the block while the model is swapped; their answers are in `answers` afterwards."""

        def ask() -> None:
            with httpx.Client(base_url=self.server.url, timeout=180, trust_env=False) as http:
                for _ in range(600):
                    if http.get("/health/ready").status_code == 503:  # from here on the old model takes no requests
                        break
                    time.sleep(0.02)
                self.answers.append(http.post("/v1/chat/completions", json=SHORT, headers=headers))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(ASKED)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for thread in threads:
                thread.join(120)


def swap_rows(folder: Path, times: int) -> list[Row]:
    """Swap so many times while idle and as often under streams; a row beyond the bounds has a fault."""
    folder.mkdir()
    server, other = one_model(folder), other_demo(folder / "other")
    swaps = Swaps(server, other)
    try:
        server.wait_ready(180)
        idle = [swaps.excess() for _ in range(times)]
        busy = []
        for _ in range(times):
            with swaps.streams(), swaps.asking():
                busy.append(swaps.excess(grace=2))
        refused = [answer.status_code for answer in swaps.answers if answer.status_code != 200]
    finally:
        swaps.http.close()
        server.end()
    return [
        _row("only model, idle", idle),
        _row("only model, under streams and beyond the grace", busy),
        Row(
            "only model, requests sent during a swap",
            f"{len(swaps.answers) - len(refused)} of {len(swaps.answers)} answered",
            f"refused: {refused}" if refused or len(swaps.answers) != times * ASKED else "",
        ),
    ]


def _row(name: str, excess: list[float]) -> Row:
    value = f"load + {statistics.median(excess):.2f} s, at most {max(excess):.2f} s ({len(excess)} swaps)"
    fault = f"more than {SPARE_SECONDS:g} s beside the load" if max(excess) > SPARE_SECONDS else ""
    return Row(f"swap of the {name}", value, fault)
