"""`cairn cluster` and `cairn route`: key files, pruning, and servers that are started, restarted and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cli import app, cluster
from cairn.cluster.keys import parse_keys
from cairn.config.config import Config
from cairn.types.errors import ConfigError
from tests.api.process import alive, free_port


def test_a_key_file_is_made_and_rotated_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "cluster.key"
    assert CliRunner().invoke(app, ["cluster", "key", str(file)]).exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    names, keys = parse_keys(file.read_text(), "")
    again = CliRunner().invoke(app, ["cluster", "key", str(file)])
    assert isinstance(again.exception, ConfigError) and "--rotate" in str(again.exception)
    assert CliRunner().invoke(app, ["cluster", "key", str(file), "--rotate"]).exit_code == 0
    same, more = parse_keys(file.read_text(), "")
    assert same == names and more[1:] == keys and len(more) == 2
    missing = CliRunner().invoke(app, ["cluster", "key", str(tmp_path / "none"), "--rotate"])
    assert isinstance(missing.exception, ConfigError)


def test_old_kv_is_pruned_and_agents_stay(tmp_path: Path) -> None:
    for name, days in (("kv/aa/old", 40), ("kv/aa/new", 1), ("feed/kv-x/1/old", 40), ("agents/a/0", 40)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (time.time() - days * 86400,) * 2)
    result = CliRunner().invoke(app, ["cluster", "prune", "--shared-store", str(tmp_path), "--days", "30"])
    assert result.exit_code == 0 and "2 files" in result.output
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["0", "new"]
    refused = CliRunner().invoke(app, ["cluster", "prune", "--shared-store", "s3://bucket"])
    assert isinstance(refused.exception, ConfigError) and "folder" in str(refused.exception)


async def test_a_server_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    async def start(*command: str, **options: bool) -> SimpleNamespace:
        tries.append(command)
        if len(tries) < 3:
            raise OSError(errno.EAGAIN, "no process is left")
        return SimpleNamespace(wait=wait)

    async def wait() -> int:
        return ConfigError.exit_code

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)
    monkeypatch.setattr(cluster, "AGAIN_SECONDS", 0.0)
    over = asyncio.Event()
    await cluster._Servers("demo", [["cairn"]])._keep(0, ["cairn"], over)
    assert len(tries) == 3 and over.is_set()


def test_the_router_and_its_servers_get_the_options_for_browsers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The router admits hosts and pages for all of them."""
    served: list[tuple[Config, Callable[..., object]]] = []
    monkeypatch.setattr(
        "cairn.api.router_server.serve_router", lambda config, urls, run, *more, **how: served.append((config, run))
    )
    monkeypatch.setattr("cairn.cli.models.fetched", lambda model: None)
    options = ["--allowed-hosts", "a.example", "--cors-origins", "https://b.example", "--cors-origins", "localhost"]
    result = CliRunner().invoke(app, ["cluster", "up", "demo", "--folder", str(tmp_path), *options])
    assert result.exception is None
    ((config, run),) = served
    assert config.allowed_hosts == ("a.example",) and config.cors_origins == ("https://b.example", "localhost")
    for command in run.__self__._commands:  # type: ignore[attr-defined]
        assert "--allowed-hosts=a.example" in command and "--cors-origins=localhost" in command


def test_a_shared_store_without_a_key_file_is_refused() -> None:
    command = [sys.executable, "-m", "cairn", "serve", "demo", "--port", "0", "--shared-store", "/nowhere/x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "cairn cluster key" in result.stderr


def three_ports() -> int:
    """Return the first of three consecutive free ports."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(3):
                stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port


def replicas(port: int) -> list[dict[str, object]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/router/replicas", timeout=10) as answer:
        items: list[dict[str, object]] = json.load(answer)["data"]
        return items


def wait_up(port: int, count: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if sum(bool(replica["up"]) for replica in replicas(port)) == count:
                return
        time.sleep(0.1)
    raise AssertionError("the servers did not come up")


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.1)


def children(pid: int) -> set[int]:
    with contextlib.suppress(OSError):
        results = {
            int(part) for path in Path(f"/proc/{pid}/task").glob("*/children") for part in path.read_text().split()
        }
        return results | {deeper for result in results for deeper in children(result)}
    return set()


def direct_children(pid: int) -> set[int]:
    return {int(part) for path in Path(f"/proc/{pid}/task").glob("*/children") for part in path.read_text().split()}


def restarted_one_after_another(port: int, pid: int) -> None:
    """Restart all servers while a client keeps asking: each is a new process, and no answer is missing."""
    before, over = direct_children(pid), threading.Event()
    statuses: Counter[int] = Counter()

    def ask() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1}).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        asked.add_header("Content-Type", "application/json")
        while not over.is_set():
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(asked, timeout=90) as answer:
                statuses[answer.status] += 1
                continue
            statuses[0] += 1

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        command = [sys.executable, "-m", "cairn", "cluster", "restart", "--host", f"http://127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    finally:
        over.set()
        asking.join()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"http://127.0.0.1:{port + n}: restarted" for n in (1, 2)]
    assert not before & direct_children(pid) and len(direct_children(pid)) == 2
    assert set(statuses) == {200}, statuses
    assert not any(replica["draining"] for replica in replicas(port))


def test_up_starts_all_restarts_what_ends_and_leaves_nothing(tmp_path: Path, prove: bool) -> None:
    port, log_file = three_ports(), tmp_path / "log"
    log = log_file.open("w")
    command = [sys.executable, "-m", "cairn", "cluster", "up", "demo", "--replicas", "2", "--folder", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--engine", "fake", "--kv-gb", "0.1"],
        stderr=log,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_up(port, 2)
        said = f"2 servers serve demo at http://127.0.0.1:{port}/v1. Ctrl-C ends all."
        wait_until(lambda: said in log_file.read_text())
        assert "curl" not in log_file.read_text(), "clients must use the router's address"
        family = children(process.pid)
        servers = direct_children(process.pid)
        assert len(servers) == 2
        os.kill(min(servers), signal.SIGKILL)
        end = time.monotonic() + 60
        while not children(process.pid) - family and time.monotonic() < end:
            time.sleep(0.1)
        wait_up(port, 2)
        family |= children(process.pid)
        if prove:
            restarted_one_after_another(port, process.pid)
            family |= children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        end = time.monotonic() + 60
        while alive(family) and time.monotonic() < end:
            time.sleep(0.1)
        assert not alive(family)
        assert {"store", "cluster.key", "agents-1", "agents-2", "kv-1", "kv-2"} <= {
            path.name for path in tmp_path.iterdir()
        }
    finally:
        for pid in children(process.pid) | {process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        log.close()
