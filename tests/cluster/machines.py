"""A cluster of processes: servers that share a folder, and a router in front of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.cluster.keys import new_key_file
from cairn.system.posix import SystemRng
from tests.api.process import Served, free_port


class Cluster:
    """Servers with folders and ports of their own, which a restart keeps."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        router: bool = True,
        roles: Sequence[str] = (),
        routed: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Start the servers and the router.

        `roles`: of the servers; `routed`: options of the router; `options`: of all servers.
        """
        self._folder, self._roles, self.routed = folder, roles, routed
        self.key, self.store = folder / "cluster.key", folder / "store"
        with os.fdopen(os.open(self.key, os.O_CREAT | os.O_WRONLY, 0o600), "w") as out:
            out.write(new_key_file(SystemRng()))
        self._options = options
        self._admin = {"X-Cairn-Admin-Key": options["admin_key"]} if "admin_key" in options else {}
        self.ports = [free_port() for _ in range(count)]
        self.servers = [self._serve(number) for number in range(count)]
        self.port = free_port()
        self.router: subprocess.Popen[bytes] | None = None
        for server in self.servers:
            server.wait_ready()
        if router:
            self.start_router()

    def _serve(self, number: int) -> Served:
        return Served(
            port=self.ports[number],
            agents_dir=str(self._folder / f"agents-{number}"),
            kv_dir=str(self._folder / f"kv-{number}"),
            cluster_key_file=str(self.key),
            **({"role": self._roles[number]} if self._roles else {}),
            **{"shared_store": str(self.store), **self._options},
        )

    def start_router(self) -> None:
        """Start the router and wait until it knows that all servers are up."""
        replicas = [word for port in self.ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        self.router = subprocess.Popen(
            [sys.executable, "-m", "cairn", "route", "--port", str(self.port), *replicas, *self.routed],
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")},
        )
        self.wait_up(len(self.ports))

    def wait_up(self, count: int, seconds: float = 90.0) -> None:
        """Wait until the router knows that so many servers are up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                replicas = self.call("GET", "/router/replicas")["data"]
                if sum(replica["up"] for replica in replicas) >= count:
                    return
            time.sleep(0.05)
        raise AssertionError("the router does not see its servers")

    def kill(self, number: int) -> None:
        """Kill a server with SIGKILL, together with its worker."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.servers[number].pid, signal.SIGKILL)
        self.servers[number].process.wait()

    def stop(self, number: int) -> None:
        """Stop a server with SIGSTOP, together with its worker: its port and connections stay open."""
        os.killpg(self.servers[number].pid, signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        """Let a stopped server go on."""
        os.killpg(self.servers[number].pid, signal.SIGCONT)

    def restart(self, number: int) -> None:
        """Start a server again, with its own folders."""
        self.servers[number] = self._serve(number)
        self.servers[number].wait_ready()

    def kill_router(self) -> None:
        """Kill the router with SIGKILL."""
        if self.router is not None:
            self.router.kill()
            self.router.wait()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        port: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the parsed answer of the router, or of the server at a port."""
        with self.open(method, path, body, port, headers) as response:
            return json.load(response)

    def open(
        self, method: str, path: str, body: Any = None, port: int | None = None, more: Mapping[str, str] | None = None
    ) -> Any:
        """Return the open response. Raise AssertionError with its text for an error."""
        data = None if body is None else json.dumps(body).encode()
        headers = ({"Content-Type": "application/json"} if data else {}) | self._admin | dict(more or {})
        url = f"http://127.0.0.1:{port or self.port}{path}"
        try:
            return urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=90)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.code} {error.read()[:500]!r}") from error

    def server_of(self, headers: Any) -> int:
        """Return the number of the server that answered."""
        return self.ports.index(int(headers["x-cairn-replica"].rpartition(":")[2]))

    def close(self) -> None:
        """End all processes."""
        self.kill_router()
        for number in range(len(self.servers)):
            self.kill(number)


@contextlib.contextmanager
def cluster(folder: Path, count: int, **options: Any) -> Iterator[Cluster]:
    """Run a cluster for the length of a block."""
    made = Cluster(folder, count, **options)
    try:
        yield made
    finally:
        made.close()


def events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of an event stream."""
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
