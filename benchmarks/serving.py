"""Cairn's server beside llama.cpp's two, over HTTP.  `python benchmarks/serving.py --llama-server FILE [--quick]`

`cairn serve FILE.gguf`, `llama-server` and `python -m llama_cpp.server` serve the same file (random weights, see
`random_models`) with the same threads to the same client, a process of its own. Servers that are compared run at the
same time, but only one of them is asked at a time, in turns. Prompts are letters, each of them one token, no two alike;
answers are greedy and streamed. Every answer must have status 200, end by its length with as many tokens as were asked
for in its usage block, and the prompt's tokens there; anything else ends the run. llama_cpp.server sends no usage and
knows no `ignore_eos`, so of its answers the events are counted.

    load       so many connections ask again and again: 128 tokens in, 64 out. tok/s of all together, and the time to
               the first token. llama-server has 8 slots as in its figures elsewhere, and is asked once more with 16
               where there are 16 connections. llama_cpp.server answers one request at a time
               (told not to cut one off when the next comes).
    prefix     2,000 tokens and then 16 others: new; again on the same connection; on another one; and on another one
               while the first is still being answered, as with two agents that share a long instruction
    context    4,000 tokens: new; again; then by a server that was killed and started again. Cairn stored them by itself
               (one call waits until all is written); of llama-server it is the time of computing them again, and
               beside it its manual way: save the slot, start, restore the slot, ask.
    beside     4,000 new tokens, and half a second later, on another connection, 128 new ones with 16 out: how long
               both take
    start      from the command to the first answer to /health
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from report import http_text
from side_by_side import load, machine, model_file, write_json

PROMPT, ANSWER, CONNECTIONS = 128, 64, (1, 4, 16)
PREFIX, CONTEXT, TAIL = 2000, 4000, 16
BESIDE_ANSWER, BESIDE_SECONDS = 16, 0.5
"""Tokens of a short prompt's answer beside a long one, and how many seconds later it is sent."""
EVENTS_ONLY = "library"
"""Model name of the server that knows neither `ignore_eos` nor a usage block in streams."""


# ------------------------------------------------------------------------------------------------------- client


@dataclass(slots=True)
class Answer:
    """One streamed answer; seconds count from its request."""

    text: str
    events: int
    """Chunks with text."""
    first: float
    """Seconds to the first text, or to the end of an answer without any."""
    seconds: float
    usage: dict[str, Any] | None
    reason: str | None


@asynccontextmanager
async def connection(base: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an open keep-alive connection.

    What a client loads for its first request takes some 50 ms, which must not count as the server's time. Nothing is
    encrypted, so no certificates are loaded.
    """
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(limits=limits, timeout=3600, trust_env=False, verify=False) as http:
        (await http.get(base + "/v1/models")).raise_for_status()
        yield http


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """Return the answer to a streamed completion or chat; raise `SystemExit` for anything but a success.

    Between two answers a server may close a connection (llama-server does, now and then). As real clients do, the
    request is then sent again on a new one, and its time starts anew.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        return await _ask(http, url, body)
    except httpx.RemoteProtocolError as error:
        if "without sending a response" not in str(error):
            raise
    return await _ask(http, url, body)


async def _ask(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    began, first, pieces, usage, reason = time.perf_counter(), 0.0, list[str](), None, None
    async with http.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url}: {answer.status_code} {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"{url}: {chunk['error']}")
            for choice in chunk.get("choices", ()):
                if text := choice.get("text") or choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter() - began
                    pieces.append(text)
                reason = choice.get("finish_reason") or reason
            usage = chunk.get("usage") or usage
    seconds = time.perf_counter() - began
    return Answer("".join(pieces), len(pieces), first or seconds, seconds, usage, reason)


@dataclass(slots=True)
class Client:
    """A client of the server at `base`."""

    base: str
    model: str

    async def ask(self, http: httpx.AsyncClient, prompt: str, tokens: int, **more: int) -> dict[str, float]:
        """Return seconds to the first token and to the end, and the tokens; raise `SystemExit` for an incomplete
        answer.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        body |= {} if self.model == EVENTS_ONLY else {"ignore_eos": True}
        answer = await ask(http, self.base + "/v1/completions", body)
        usage, times = answer.usage, {"first": answer.first, "seconds": answer.seconds}
        if self.model == EVENTS_ONLY:
            # An end token may come early, and some tokens are only a part of a character.
            return {**times, "tokens": tokens if answer.events > 0.8 * tokens else answer.events}
        counted = usage["completion_tokens"] if usage else 0
        if not usage or counted != tokens or answer.reason != "length" or usage["prompt_tokens"] != len(prompt):
            raise SystemExit(f"{self.base}: {counted} tokens in {answer.events} events, {tokens} wanted; usage {usage}")
        return {**times, "tokens": counted}

    async def load(self, connections: int, requests: int, seed: int) -> dict[str, Any]:
        """Send `requests` requests over this many connections."""
        prompts = iter([letters(f"{seed}/{number}", PROMPT) for number in range(requests)])
        done: list[dict[str, float]] = []

        async def worker(http: httpx.AsyncClient) -> None:
            for prompt in prompts:
                done.append(await self.ask(http, prompt, ANSWER))

        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(connection(self.base)) for _ in range(connections)]
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*map(worker, opened))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        first = sorted(one["first"] for one in done)
        return {
            "tok_s": sum(one["tokens"] for one in done) / seconds,
            "ttft_p50": statistics.median(first),
            "ttft_p99": first[min(len(first) - 1, int(len(first) * 0.99))],
            "requests": len(done),
            "client_cpu": cpu / seconds,
        }

    async def prefix(self, seed: int) -> dict[str, float]:
        """Return the seconds to the first token behind a shared prefix."""
        shared = letters(f"prefix {seed}", PREFIX)
        asked = (shared + letters(f"tail {seed} {number}", TAIL) for number in range(6))
        async with connection(self.base) as one, connection(self.base) as other:
            results = {"new": (await self.ask(one, next(asked), 8))["first"]}
            results["same connection"] = (await self.ask(one, next(asked), 8))["first"]
            results["another connection"] = (await self.ask(other, next(asked), 8))["first"]
            running = asyncio.create_task(self.ask(one, next(asked), ANSWER))
            await asyncio.sleep(max(0.05, 2 * results["same connection"]))
            if running.done():
                raise SystemExit("the first answer was over before the second was asked for")
            results["beside the first"] = (await self.ask(other, next(asked), 8))["first"]
            await running
        return results

    async def beside(self, seed: int) -> dict[str, float]:
        """Return the seconds of a short prompt beside a long one: to its first token and end, and to the long one's
        first.
        """
        async with connection(self.base) as one, connection(self.base) as other:
            long = asyncio.create_task(self.ask(one, letters(f"long {seed}", CONTEXT), 8))
            await asyncio.sleep(BESIDE_SECONDS)
            if long.done():
                raise SystemExit("the long prompt was read before the short one was asked")
            short = await self.ask(other, letters(f"short {seed}", PROMPT), BESIDE_ANSWER)
            return {"short": short["first"], "whole": short["seconds"], "long": (await long)["first"]}

    async def context(self, seed: int, **more: int) -> dict[str, float]:
        """Return the seconds to the first token behind a long context."""
        async with connection(self.base) as http:
            return {"first": (await self.ask(http, letters(f"context {seed}", CONTEXT), 8, **more))["first"]}


def letters(seed: str, count: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=count))


# ------------------------------------------------------------------------------------------------------ servers


class Server:
    """One server process; `options` follow its command."""

    def __init__(self, name: str, command: list[str], ready: str, model: str, home: Path) -> None:
        self.name, self.command, self.path, self.model, self.home = name, command, ready, model, home
        self.start()

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        home = {"XDG_DATA_HOME": str(self.home), "XDG_CACHE_HOME": str(self.home)}
        began = time.perf_counter()
        with (self.home / "output").open("a") as output:
            self.process = subprocess.Popen(
                [*self.command, "--host", "127.0.0.1", "--port", str(port)],
                env=os.environ | home,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            while not self.ready():
                if time.perf_counter() - began > 180 or self.process.poll() is not None:
                    raise SystemExit(f"{self.name} did not become ready: {(self.home / 'output').read_text()[-2000:]}")
                time.sleep(0.01)
        except BaseException:
            self.kill()  # nothing else would end it
            raise
        self.start_seconds = time.perf_counter() - began

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.base + self.path, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server and its children with -9."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ask(self, what: str, **arguments: int) -> dict[str, Any]:
        """Run the client process."""
        command = [sys.executable, __file__, "--client", json.dumps({"base": self.base, "model": self.model})]
        done = subprocess.run(
            [*command, json.dumps({"what": what, **arguments})], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: the client ended with exit code {done.returncode}")
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed

    def post(self, path: str, body: dict[str, Any]) -> float:
        """Return the seconds of one call."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers, method="POST")
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()
        return time.perf_counter() - began

    def peak(self) -> int:
        """Return the peak bytes of all its processes together."""
        pids = [self.process.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += [int(part) for part in (task / "children").read_text().split()]
        lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def cairn_command(path: Path, threads: int, options: Sequence[str] = ()) -> list[str]:
    """Return the command that serves a file with Cairn as it is installed here."""
    program = [sys.executable, "-c", "from cairn.cli import main; main()", "serve", str(path)]
    return [*program, "--threads", str(threads), "--log-level", "warning", "--served-name", "model", *options]


def llama_command(program: str, path: Path, threads: int) -> list[str]:
    """Return the command that serves a file with llama.cpp's server."""
    return [program, "-m", str(path), "-t", str(threads), "--no-webui"]


def end_when_told() -> None:
    """Make SIGTERM end the run like an error, with its servers, which are in sessions of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))


# -------------------------------------------------------------------------------------------------------- cases


def measure(cairn: Server, slots: Server, many: Server, library: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, in turns."""
    results: dict[str, Any] = {"load": [], "prefix": [], "beside": [], "context": []}
    for connections in CONNECTIONS:
        servers = [cairn, slots, *([many] if connections > 8 else [])]
        for number in range(args.rounds):
            # It answers one request at a time: more rounds would show nothing new, and take long.
            for server in (*servers, library) if number == 0 else servers:
                done = server.ask("load", connections=connections, requests=2 * connections + 2, seed=number)
                results["load"].append({"server": server.name, "connections": connections, **done})
                print(f"  {server.name}, {connections} at once: {done['tok_s']:.1f} tok/s", file=sys.stderr)
    for number in range(args.rounds):
        for server in (cairn, slots):
            results["prefix"].append({"server": server.name, **server.ask("prefix", seed=number)})
            print(f"  {results['prefix'][-1]}", file=sys.stderr)
            settle(server)
    for number in range(args.rounds):
        for server in (cairn, slots):
            results["beside"].append({"server": server.name, **server.ask("beside", seed=number)})
            print(f"  {results['beside'][-1]}", file=sys.stderr)
            settle(server)
    for number in range(min(args.rounds, 2)):
        for server in (cairn, slots):
            results["context"].append({"server": server.name, **context(server, number)})
            print(f"  {results['context'][-1]}", file=sys.stderr)
    return results


def settle(server: Server) -> None:
    """Let Cairn finish writing before another server is measured."""
    if server.name == "cairn":
        server.post("/v1/cache/flush", {})


def context(server: Server, seed: int) -> dict[str, float]:
    """Return the seconds of a new context, and of the same one after the server was killed."""
    slot = {} if server.name == "cairn" else {"id_slot": 0}

    def first() -> float:
        return float(server.ask("context", seed=seed, **slot)["first"])

    results = {"new": first(), "again": first()}
    settle(server)
    if server.name != "cairn":
        results["saving"] = server.post("/slots/0?action=save", {"filename": f"slot{seed}"})
    server.kill()
    server.start()
    results["after restart"] = first()
    settle(server)
    results["ready again"] = server.start_seconds
    if server.name != "cairn":
        server.kill()
        server.start()
        results["restoring"] = server.post("/slots/0?action=restore", {"filename": f"slot{seed}"})
        results["after restoring"] = first()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", metavar="FILE", required=True, help="llama.cpp's server")
    parser.add_argument("--llama-python", default=sys.executable, metavar="FILE", help="interpreter with llama_cpp")
    parser.add_argument("--type", default="Q4_0", choices=("Q4_0", "Q8_0", "Q4_K_M", "BF16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="a further flag of `cairn serve`")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "cairn-bench", metavar="FOLDER")
    args = parser.parse_args()
    end_when_told()
    args.rounds = 1 if args.quick else args.rounds
    path = model_file(args.files, "qwen3-0.6b", args.type, args.llama_python)
    about = {"machine": machine(args.threads), "rounds": args.rounds, "type": args.type, "options": args.serve}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:

        def started(name: str, command: list[str], ready: str, model: str = "model") -> Server:
            home = Path(folder) / str(len(os.listdir(folder)))
            home.mkdir()
            server = Server(name, command, ready, model, home)
            running.callback(server.kill)
            return server

        threads = str(args.threads)
        ours = cairn_command(path, args.threads, args.serve)
        peer = [*llama_command(args.llama_server, path, args.threads), "--slot-save-path", folder]
        library = [args.llama_python, "-m", "llama_cpp.server", "--model", str(path), "--model_alias", EVENTS_ONLY]
        library += [
            "--n_threads",
            threads,
            "--n_threads_batch",
            threads,
            "--n_ctx",
            "4352",
            "--interrupt_requests",
            "false",
        ]
        servers = [
            started("cairn", ours, "/health/ready"),
            started("llama-server, 8 slots", [*peer, "-np", "8", "-c", str(8 * 4352)], "/health"),
            started("llama-server, 16 slots", [*peer, "-np", "16", "-c", str(16 * 512)], "/health"),
            started("llama_cpp.server", library, "/v1/models", EVENTS_ONLY),
        ]
        starts = {server.name: server.start_seconds for server in servers}
        result = measure(*servers, args)
        peaks = {server.name: server.peak() for server in servers}
    result = {**about, "start_seconds": starts, "peak": peaks, "load_after": load(), **result}
    write_json(args.json, result)
    print(http_text(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client, asked = (json.loads(text) for text in sys.argv[2:4])
        print(json.dumps(asyncio.run(getattr(Client(**client), asked.pop("what"))(**asked))))
    else:
        main()
