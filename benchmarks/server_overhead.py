"""The cost of serving when computing costs (almost) nothing.  `python benchmarks/server_overhead.py [--profile]`

A real `cairn serve demo --engine fake` process over real HTTP, and a client in its own process: raw sockets,
keep-alive, as little work as possible. Every answer must have status 200; tokens are those of the usage block, checked
against the stream's events; anything else ends the run. CPU seconds of the front, the worker and the client come from
/proc, so the client's share is known. `--profile` adds where the front's and the worker's CPU time goes (sampled every
2 ms of CPU time, by module), in a run of its own.

Goals: >= 1,500 requests/s and >= 15,000 tok/s at concurrency 4 with 10 tokens; with 256 streams >= 15,000 tok/s with
one event per token, and >= 30,000 where a lagging stream's tokens are merged; plan + commit <= 100 us at 32 rows.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import collections
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

import uvloop

CLOCK = os.sysconf("SC_CLK_TCK")
OPTIONS = {"max_running": 256, "max_queue": 4096, "kv_gb": 0.5, "log_level": "warning", "engine": "fake"}


# ------------------------------------------------------------------------------------------------------- client


class Connection(asyncio.Protocol):
    """A keep-alive connection that sends one request after another."""

    def __init__(self, bench: Client) -> None:
        self.bench = bench
        self.data = bytearray()
        self.started = self.first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        request = self.bench.next_request()
        if request is None:
            self.transport.close()
            return
        self.data.clear()
        self.first = 0.0
        self.started = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.first and self.bench.mark in data:
            self.first = time.perf_counter()
        if self.data.endswith(self.bench.end) or not self.data.startswith(b"HTTP/1.1 200 "):
            self.bench.answered(self)
            self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        self.bench.closed(error)


class Client:
    """Send `requests` requests over `streams` connections, and print one JSON object."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.left = args.requests
        self.open = args.streams
        self.tokens = self.events = self.answers = 0
        self.first: list[float] = []
        self.total: list[float] = []
        self.over: asyncio.Future[None] | None = None
        chat = args.route == "chat"
        self.mark = b'"content":"' if chat else b'"text":"'
        self.end = b"data: [DONE]\n\n\r\n0\r\n\r\n"
        self.number = 0

    def next_request(self) -> bytes | None:
        if not self.left:
            return None
        self.left -= 1
        self.number += 1
        body: dict[str, Any] = {
            "model": self.args.model,
            "max_tokens": self.args.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.args.route == "chat":
            body["messages"] = [{"role": "user", "content": f"Question {self.number}: what is Cairn?"}]
        else:
            body["prompt"] = f"Question {self.number}: what is Cairn?"
        data = json.dumps(body).encode()
        path = "/v1/chat/completions" if self.args.route == "chat" else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.args.port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def answered(self, connection: Connection) -> None:
        now, data = time.perf_counter(), bytes(connection.data)
        if not data.startswith(b"HTTP/1.1 200 "):
            return self.fail(f"not a success: {data[:500]!r}")
        at = data.rindex(b'"completion_tokens":') + 20
        tokens = int(data[at : data.index(b",", at)])
        events = data.count(b"data: {") - 2 - (self.args.route == "chat")  # the role, the end and the usage
        if tokens != self.args.tokens or not 0 < events <= tokens:
            return self.fail(f"{tokens} tokens in {events} events, {self.args.tokens} wanted: {data[-600:]!r}")
        self.tokens += tokens
        self.events += events
        self.answers += 1
        self.first.append(connection.first - connection.started)
        self.total.append(now - connection.started)

    def fail(self, why: str) -> None:
        """End the run: a figure that includes failures is no figure."""
        assert self.over is not None
        if not self.over.done():
            self.over.set_exception(SystemExit(why))

    def closed(self, error: Exception | None) -> None:
        self.open -= 1
        assert self.over is not None
        if self.open == 0 and not self.over.done():
            self.over.set_result(None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.over = loop.create_future()
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(self.args.streams):
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", self.args.port)
        await self.over
        seconds = time.perf_counter() - started
        if self.answers != self.args.requests:
            raise SystemExit(f"only {self.answers} of {self.args.requests} requests were answered")
        first = sorted(self.first)
        result = {
            "seconds": seconds,
            "requests": self.answers,
            "tokens": self.tokens,
            "events": self.events,
            "first_p50": statistics.median(first),
            "first_p99": first[int(len(first) * 0.99)],
            "cpu": time.process_time() - cpu,
        }
        print(json.dumps(result))


# ------------------------------------------------------------------------------------------------------- server


def sample(into: str) -> None:
    """Count every 2 ms of this process's CPU time which package's Python code runs, or called what runs."""
    result: collections.Counter[str] = collections.Counter()

    def tick(number: int, frame: Any) -> None:
        result[where(frame.f_code.co_filename) + " " + frame.f_code.co_name] += 1

    signal.signal(signal.SIGPROF, tick)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)

    def end() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        Path(into).write_text(json.dumps(result))

    atexit.register(end)


def where(file: str) -> str:
    """Return a short name for a source file: Cairn's by module, others by package."""
    for mark in ("site-packages/", "src/", "python3.11/"):
        if mark in file:
            parts = file.split(mark)[-1].removesuffix(".py").split("/")
            return ".".join(parts[:3]) if parts[0] == "cairn" else parts[0]
    return Path(file).stem


def launch(args: argparse.Namespace) -> None:
    """Start a server process whose worker is this script's `worker` role: paced, sampled, or both."""
    from cairn.api.server import serve
    from cairn.config.config import Config
    from cairn.frontend import launch as workers

    workers.WORKER = (
        sys.executable,
        __file__,
        "worker",
        f"--pace={args.pace}",
        f"--profile={args.profile or ''}",
        "--fd",
    )
    if args.profile:
        sample(args.profile + ".front")
    serve(Config(**OPTIONS, port=args.port))  # type: ignore[arg-type]


def worker(args: argparse.Namespace) -> None:
    """Run a worker whose steps take at least `pace` seconds."""
    from cairn.engine.fake import FakeEngine
    from cairn.worker import worker

    prefill, last = FakeEngine.prefill, [time.monotonic()]

    def paced(self: FakeEngine, rows: Any) -> Any:
        last[0] = max(last[0] + args.pace, time.monotonic())
        time.sleep(max(0.0, last[0] - time.monotonic()))
        return prefill(self, rows)

    if args.pace:
        FakeEngine.prefill = paced  # type: ignore[method-assign]
    if args.profile:
        sample(args.profile + ".worker")
    sys.argv = [sys.argv[0], str(args.fd)]
    worker.main()


class Server:
    """A server process and the CPU time of its parts."""

    def __init__(self, pace: float = 0.0, profile: str | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if pace or profile:
            command = [sys.executable, __file__, "launch", f"--port={self.port}", f"--pace={pace}"]
            command += [f"--profile={profile}"] if profile else []
        else:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
            command = [str(Path(sys.executable).with_name("cairn")), "serve", "demo", f"--port={self.port}", *flags]
        self.home = tempfile.TemporaryDirectory(prefix="cairn-overhead-")
        home = {"XDG_DATA_HOME": self.home.name, "XDG_CACHE_HOME": self.home.name}
        quiet = subprocess.DEVNULL if pace or not profile else None
        self.process = subprocess.Popen(command, env=os.environ | home, stderr=quiet)
        self.base = f"http://127.0.0.1:{self.port}"
        try:
            self.wait()
        except BaseException:
            self.process.kill()  # nothing else would end it
            raise

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.base + "/health/ready", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the server did not become ready")

    def model(self) -> str:
        with urllib.request.urlopen(self.base + "/v1/models") as answer:
            return str(json.load(answer)["data"][0]["id"])

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds so far of the front, the worker and the template helper."""
        pids = {"front": self.process.pid}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            pids["worker" if b"worker" in line else "helper"] = int(pid)
        used = {}
        for name, pid in pids.items():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[name] = (int(fields[11]) + int(fields[12])) / CLOCK
        return used

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(30) != 0:
            raise SystemExit(f"the server ended with exit code {self.process.returncode}")
        self.home.cleanup()


def ask(server: Server, route: str, streams: int, requests: int, tokens: int) -> dict[str, Any]:
    """Run the client process and return its figures, and those of the server's processes."""
    command = [sys.executable, __file__, "client", f"--port={server.port}", f"--model={server.model()}"]
    command += [f"--route={route}", f"--streams={streams}", f"--requests={requests}", f"--tokens={tokens}"]
    before = server.cpu()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {name: used - before.get(name, 0.0) for name, used in server.cpu().items()}


# ------------------------------------------------------------------------------------------------------ the table

HEAD = "| case | requests/s | tok/s | events a token | TTFT p50 / p99 ms | CPU: front, worker, helper, client |"


def line(name: str, r: dict[str, Any]) -> str:
    """Return one row; CPU is a share of one core."""
    seconds = r["seconds"]
    shares = ", ".join(f"{r.get(part, 0.0) / seconds:.0%}" for part in ("front", "worker", "helper", "cpu"))
    return (
        f"| {name} | {r['requests'] / seconds:,.0f} | {r['tokens'] / seconds:,.0f} | {r['events'] / r['tokens']:.2f} "
        f"| {r['first_p50'] * 1000:.2f} / {r['first_p99'] * 1000:.2f} | {shares} |"
    )


Case = tuple[str, float, str, int, int, int]


def measure(rounds: int, scale: float, into: Path | None) -> None:
    """Run the cases `rounds` times each; print the median round by tok/s, and write all `into` a file."""
    cases: list[Case] = [
        ("completions, 4 at once, 10 tokens", 0.0, "text", 4, 4000, 10),
        ("chat, 4 at once, 10 tokens", 0.0, "chat", 4, 3000, 10),
        ("256 streams of 128 tokens, engine unpaced: merged", 0.0, "text", 256, 768, 128),
        ("256 streams of 128 tokens, a step every 16 ms", 0.016, "text", 256, 768, 128),
        ("256 streams of 128 tokens, a step every 12 ms", 0.012, "text", 256, 768, 128),
    ]
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores; load before: {load:.1f}\n\n{HEAD}\n|---|---|---|---|---|---|")
    servers: dict[float, Server] = {}
    try:
        medians = _measure(cases, servers, rounds, scale)
    finally:
        for server in servers.values():
            server.close()
    results = {"load": load, "rounds": rounds, "cases": medians, "scheduler": scheduler()}
    if into is not None:
        into.write_text(json.dumps(results, indent=1) + "\n")


def _measure(cases: list[Case], servers: dict[float, Server], rounds: int, scale: float) -> list[dict[str, Any]]:
    medians = []
    for name, pace, route, streams, requests, tokens in cases:
        server = servers.setdefault(pace, Server(pace)) if pace not in servers else servers[pace]
        ask(server, route, streams, max(streams, 100), tokens)
        results = [ask(server, route, streams, max(streams, int(requests * scale)), tokens) for _ in range(rounds)]
        results.sort(key=lambda r: r["tokens"] / r["seconds"])
        medians.append({"name": name, **results[len(results) // 2]})
        print(line(name, medians[-1]), flush=True)
    return medians


def scheduler() -> float:
    """Return the seconds of plan + commit at 32 decoding rows."""
    from cairn.engine.fake import FakeEngine, fake_spec
    from cairn.kv.pool.cache import Cache
    from cairn.scheduler.scheduler import Scheduler
    from cairn.scheduler.step_budget import Limits
    from cairn.system.posix import SystemClock
    from cairn.types.request import Request, SamplingParams

    engine = FakeEngine(fake_spec(context=4096), blocks=4096)
    steps = Scheduler(Cache(engine.info), Limits(max_running=32), SystemClock())
    for number in range(32):
        prompt = tuple((number * 7 + k) % 256 for k in range(100))
        steps.add(Request(id=number, prompt=prompt, sampling=SamplingParams(max_tokens=600, temperature=0.0)))
    taken = []
    while (started := time.perf_counter()) and (plan := steps.plan()) is not None:
        planned = time.perf_counter()
        results = plan.run(engine)
        ran = time.perf_counter()
        steps.commit(plan, results)
        if len(plan.rows) == 32 and all(row.end - row.start == 1 for row in plan.rows):
            taken.append(planned - started + time.perf_counter() - ran)
    print(f"\nscheduler, plan + commit at 32 decoding rows: median {statistics.median(taken) * 1e6:.0f} us")
    return statistics.median(taken)


def profile() -> None:
    """Print where the CPU time of the front and of the worker goes."""
    cases = (
        ("completions, 4 at once, 10 tokens", "text", 4, 4000, 10),
        ("chat, 4 at once, 10 tokens", "chat", 4, 3000, 10),
        ("completions, 256 streams of 128 tokens", "text", 256, 1024, 128),
    )
    for name, route, streams, requests, tokens in cases:
        with tempfile.TemporaryDirectory() as folder:
            server = Server(profile=folder + "/found")
            result = ask(server, route, streams, requests, tokens)
            server.close()
            for part in ("front", "worker"):
                parsed = json.loads(Path(f"{folder}/found.{part}").read_text())
                total, packages = sum(parsed.values()), collections.Counter[str]()
                for key, count in parsed.items():
                    packages[key.split()[0]] += count
                each = result[part] / result["tokens"] * 1e6
                print(f"\n{part}, {name}: {each:.0f} us of CPU time a token")
                print("  by module:   " + shares(packages, total))
                print("  by function: " + shares(collections.Counter(parsed), total))


def shares(counts: collections.Counter[str], total: int) -> str:
    return ", ".join(f"{key} {count / total:.0%}" for key, count in counts.most_common(16) if count / total >= 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", nargs="?", default="measure", choices=["measure", "client", "launch", "worker"])
    for name, kind in {"port": int, "streams": int, "requests": int, "tokens": int, "fd": int, "pace": float}.items():
        parser.add_argument(f"--{name}", type=kind, default=0)
    for name in ("model", "route"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--profile", nargs="?", const="yes", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests a case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, for benchmarks/report.py")
    args = parser.parse_args()
    if args.role == "client":
        uvloop.run(Client(args).run())
    elif args.role == "launch":
        launch(args)
    elif args.role == "worker":
        worker(args)
    elif args.profile:
        profile()
    else:
        measure(args.rounds, args.scale, args.json)


if __name__ == "__main__":
    main()
