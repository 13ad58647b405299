"""Cairn's servers under Ray Serve: Ray places them on machines, starts dead ones again and changes their number.

Each replica of the deployment is an unchanged `cairn serve` on a port of its own. It tells the router of itself, and
clients talk to the router: no byte of a request goes through Ray. Before Ray ends a replica, the router drains it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from cairn.types.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "cairn"
START_SECONDS = 600.0
"""Longest time that a server may take to load its model."""
STOP_SECONDS = 60.0
LOOK_SECONDS = 2.0
_WATCHED = """
import signal, subprocess, sys, threading

server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
threading.Thread(target=lambda: (sys.stdin.buffer.read(), server.send_signal(signal.SIGTERM)), daemon=True).start()
sys.exit(server.wait())
"""
"""Runs a server until its own standard input ends, as it does when Ray's process is killed."""


class RayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every server is started with."""

    router: str
    """The router's address."""
    options: tuple[str, ...]
    """Of `cairn serve`: the model first. The shared store must be the same for all."""
    host: str = ""
    """Address that servers listen on; empty: that of their machine."""
    folder: str = ""
    """Folder below which each server has its own; empty: that of temporary files."""
    admin_key: str = ""
    """The router's."""
    cpus: float = 1.0
    gpus: float = 0.0


class Scaling(msgspec.Struct, kw_only=True):
    """How many servers there are to be, from how long requests wait for them."""

    least: int = 1
    most: int = 1
    high: float = 2.0
    """Seconds of queue above which one more is started."""
    low: float = 0.2
    """Seconds below which one is ended."""
    up_after: float = 10.0
    down_after: float = 120.0
    """How long the queue must have been so, since the last change too: loading a model takes time."""
    _since: float | None = None
    _side: int = 0

    def wanted(self, count: int, queue: float, now: float) -> int:
        """Return the number of servers, of which there are `count` now with the longest queue of `queue` seconds."""
        side = 1 if queue > self.high else -1 if queue < self.low else 0
        if side != self._side or self._since is None:
            self._side, self._since = side, now
        if side and now - self._since >= (self.up_after if side > 0 else self.down_after):
            self._since = now
            count += side
        return min(max(count, self.least), self.most)


class CairnReplica:
    """One server, as Ray sees it: the deployment's class."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """Start the server and wait until it is ready, then tell the router."""
        self._plan = msgspec.convert(plan, RayPlan)
        self._home = Path(tempfile.mkdtemp(prefix="cairn-ray-", dir=self._plan.folder or None))
        host = self._plan.host or _own_address()
        self.url = f"http://{host}:{_free_port(host)}"
        own = ["--host", host, "--port", self.url.rpartition(":")[2]]
        own += ["--agents-dir", str(self._home / "agents"), "--kv-dir", str(self._home / "kv")]
        command = [sys.executable, "-m", "cairn", "serve", *self._plan.options, *own]
        self._process = subprocess.Popen([sys.executable, "-c", _WATCHED, *command], stdin=subprocess.PIPE)
        self._wait_ready()
        self._tell("add")

    def check_health(self) -> None:
        """Raise RuntimeError if the server is gone: Ray starts another one in its place."""
        if self._process.poll() is not None:
            with contextlib.suppress(OSError):
                self._tell("remove")
            raise RuntimeError(f"the server at {self.url} ended with {self._process.returncode}")

    def __call__(self) -> str:
        """Return the server's address."""
        return self.url

    def __del__(self) -> None:
        """Let the router send it nothing more, wait for its requests, and end it."""
        with contextlib.suppress(OSError):
            self._tell("remove")
        self._end()
        shutil.rmtree(self._home, ignore_errors=True)

    def _end(self) -> None:
        """Close the pipe that the server lives by, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode} while it started; see its log")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health/ready", timeout=5):
                return
            time.sleep(0.2)
        self._end()
        raise RuntimeError(f"the server at {self.url} was not ready after {START_SECONDS:.0f} s")

    def _tell(self, what: str) -> None:
        """Tell the router to add or remove this server. Raise OSError if it does not."""
        headers = {"X-Cairn-Admin-Key": self._plan.admin_key} if self._plan.admin_key else {}
        address = f"{self._plan.router}/router/{what}?replica={quote(self.url, safe='')}"
        with urllib.request.urlopen(urllib.request.Request(address, b"", headers), timeout=90):
            return


def application(plan: RayPlan, replicas: int) -> Any:
    """Return the Serve application with so many servers."""
    serve = _ray().serve
    made = serve.deployment(
        CairnReplica,
        name=NAME,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        health_check_period_s=LOOK_SECONDS,
        graceful_shutdown_timeout_s=STOP_SECONDS + 60,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return made.bind(msgspec.to_builtins(plan))


def deploy(plan: RayPlan, replicas: int) -> None:
    """Start the application, or change the number of its servers. Returns when Ray has begun to."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address="auto")
    ray.serve.start(http_options={"location": "NoServer"})
    ray.serve.run(application(plan, replicas), name=NAME, route_prefix=None, blocking=False)


def keep_scaled(plan: RayPlan, scaling: Scaling, replicas: int) -> None:
    """Start the application and change its number by how long requests wait, until this is interrupted."""
    deploy(plan, count := replicas)
    while True:
        time.sleep(LOOK_SECONDS)
        wanted = scaling.wanted(count, longest_queue(plan), time.monotonic())
        if wanted != count:
            log.info("%d servers instead of %d", wanted, count)
            try:
                deploy(plan, wanted)
            except Exception as error:  # Ray's head may be starting again; the number is computed again in two seconds
                log.warning("Ray does not change the number of servers now: %s", error)
            else:
                count = wanted


def longest_queue(plan: RayPlan) -> float:
    """Return the longest time that requests wait for a server of the router; 0 where none says so."""
    headers = {"X-Cairn-Admin-Key": plan.admin_key} if plan.admin_key else {}
    waits = [0.0]
    with (
        contextlib.suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException),
        urllib.request.urlopen(
            urllib.request.Request(f"{plan.router}/router/replicas", None, headers), timeout=10
        ) as got,
    ):
        waits += [float(one["queue_seconds"]) for one in json.load(got)["data"] if one["up"]]
    return max(waits)


def _ray() -> Any:
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: pip install 'cairn-llm[ray]' ({error})") from error
    return ray


def _own_address() -> str:
    return str(_ray().util.get_node_ip_address())


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def parsed(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options of servers; raise ConfigError without the shared store, which all of them need."""
    if not {"--shared-store", "--cluster-key-file"} <= {one.partition("=")[0] for one in options}:
        raise ConfigError("servers under Ray need --shared-store and --cluster-key-file", field="shared_store")
    return tuple(options)
