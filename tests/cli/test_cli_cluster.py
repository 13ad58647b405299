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
from cairn.cluster import ray_serve
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

    async def start(*command: str, env: dict[str, str], **options: bool) -> SimpleNamespace:
        assert "CAIRN_TLS_CERT" not in env and "PATH" in env
        tries.append(command)
        if len(tries) < 3:
            raise OSError(errno.EAGAIN, "no process is left")
        return SimpleNamespace(wait=wait)

    async def wait() -> int:
        return ConfigError.exit_code

    monkeypatch.setattr("asyncio.create_subprocess_exec", start)
    monkeypatch.setattr(cluster, "AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("CAIRN_TLS_CERT", "c")
    over = asyncio.Event()
    servers = cluster._Servers("demo", [["cairn"]])
    await servers._keep(0, ["cairn"], over)
    assert len(tries) == 3 and over.is_set() and servers.refused


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Config, cluster._Servers]]:
    """Return a function that runs `cairn cluster up` without serving; it returns what would be served."""
    monkeypatch.setattr("cairn.cli.models.fetched", lambda model: None)

    def invoke(*options: str, refused: bool = False) -> tuple[Config, cluster._Servers]:
        served: list[tuple[Config, cluster._Servers]] = []

        def serve(config: Config, urls: object, run: Callable[..., object], *more: object, **how: object) -> None:
            servers: cluster._Servers = run.__self__  # type: ignore[attr-defined]
            servers.refused = refused
            served.append((config, servers))

        monkeypatch.setattr("cairn.api.router_server.serve_router", serve)
        result = CliRunner().invoke(app, ["cluster", "up", "demo", "--folder", str(tmp_path), *options])
        if result.exception is not None:
            raise result.exception
        return served[0]

    return invoke


def test_the_router_and_its_servers_get_the_options_for_browsers(
    up: Callable[..., tuple[Config, cluster._Servers]],
) -> None:
    """The router admits hosts and pages for all of them."""
    options = ["--allowed-hosts", "a.example", "--cors-origins", "https://b.example", "--cors-origins", "localhost"]
    config, servers = up(*options)
    assert config.allowed_hosts == ("a.example",) and config.cors_origins == ("https://b.example", "localhost")
    for command in servers._commands:
        assert "--allowed-hosts=a.example" in command and "--cors-origins=localhost" in command


def test_the_router_and_its_servers_get_the_keys_and_the_file(
    up: Callable[..., tuple[Config, cluster._Servers]], tmp_path: Path
) -> None:
    """Servers ask the router for the admin key, and callers for theirs."""
    file = tmp_path / "other.toml"
    file.write_text('log_level = "error"\n')
    keys = ["--api-key", "k1", "--api-key", "k2", "--admin-key", "a", "--config", str(file)]
    config, servers = up("--host", "0.0.0.0", "--unsafe-no-auth", *keys, "--kv-gb", "1")
    assert config.unsafe_no_auth and config.log_level == "error"
    assert config.admin_key is not None and config.admin_key.reveal() == "a"
    assert [key.reveal() for key in config.api_key] == ["k1", "k2"]
    for command in servers._commands:
        assert {"--api-key=k1", "--api-key=k2", "--admin-key=a", str(file), "--kv-gb"} <= set(command)
        assert "--unsafe-no-auth" not in command


def test_the_router_alone_has_the_certificate(
    up: Callable[..., tuple[Config, cluster._Servers]], tmp_path: Path
) -> None:
    config, servers = up("--tls-cert", "c", "--tls-key", "k")
    assert (config.tls_cert, config.tls_key) == ("c", "k")
    assert not any("tls" in word for command in servers._commands for word in command)
    for lines, said in (('tls_cert = "c"\ntls_key = "k"', "use --tls-cert"), ("admin_port = 9", "one by one")):
        (tmp_path / "cairn.toml").write_text(lines)
        with pytest.raises(ConfigError, match=f"cairn.toml: all servers .* take it out and .*{said}"):
            up("--config", str(tmp_path / "cairn.toml"), "--tls-cert", "c", "--tls-key", "k")


def test_a_server_that_cannot_start_fails_the_command(up: Callable[..., tuple[Config, cluster._Servers]]) -> None:
    with pytest.raises(ConfigError, match="a server cannot start"):
        up(refused=True)


@pytest.mark.parametrize(
    ("options", "scaling"),
    [("", (1, 1, 1)), ("--replicas 2 --most 8", (1, 8, 2)), ("--least 3 --most 8", (3, 8, 3)), ("--least 3", (3, 3, 3)),
     ("--most 3 --replicas 5", (1, 3, 3)), ("--least 4 --most 3", None)],
)  # fmt: skip
def test_servers_under_ray_stay_between_least_and_most(
    monkeypatch: pytest.MonkeyPatch, options: str, scaling: tuple[int, int, int] | None
) -> None:
    scaled: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        ray_serve, "keep_scaled", lambda plan, limits, count: scaled.append((limits.least, limits.most, count))
    )
    store = ["--shared-store=/s", "--cluster-key-file", "/k"]
    result = CliRunner().invoke(app, ["cluster", "ray", "demo", "--router", "http://r", *options.split(), *store])
    assert scaled == ([scaling] if scaling else []) and (result.exception is None) == bool(scaling)


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
