"""Start and end of a server: the port, signals, the exit code, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cairn.agents.log.token_log import TokenLog
from cairn.api import data_folders, lifetime, server
from cairn.api.app import build_app
from cairn.cli import main
from cairn.config.config import Config
from cairn.config.paths import with_folder
from cairn.frontend.launch import KILL_SECONDS
from cairn.frontend.service import Service
from cairn.frontend.supervisor import STORE_SECONDS
from cairn.served_models.served_model import served_models
from cairn.system.posix import SystemFile, SystemFiles
from cairn.types.errors import ConfigError, ModelFileError, Unavailable
from cairn.types.outputs import Delta
from tests.api.process import FOLDERS, Served, alive, free_port, served
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import answer, events, request_bytes

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
FIRST: Any = object()
"""The first worker of a scripted service, which needs none."""
PATIENCE = 120
"""Seconds after which an awaited event counts as missing, however busy the machine is."""
SCRIPTED = json.dumps(CHAT | {"model": "scripted"}).encode()


class SlowService(ScriptedService):
    """A service that loads when told to; `drain` waits, then ends running requests with an error."""

    def __init__(self, script: Any = None) -> None:
        super().__init__(script)
        self.load = asyncio.Event()
        self.closed = False

    async def start(self, config: Config, first: Any, **more: Any) -> SlowService:
        await self.load.wait()
        return self

    @property
    def busy(self) -> bool:
        return any(not stream.over for stream in self.streams)

    def stats(self) -> Any:
        return SimpleNamespace(running=len([stream for stream in self.streams if not stream.over]), waiting=0)

    async def drain(self, grace: float, why: str) -> None:
        try:
            async with asyncio.timeout(grace):
                while not all(stream.over for stream in self.streams):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            for stream in self.streams:
                if not stream.over:
                    stream.push(Unavailable(why, retry_after=1))

    async def close(self) -> None:
        self.closed = True


class Running:
    """A server in this process with a scripted service."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, service: SlowService, config: Config) -> None:
        monkeypatch.setattr("cairn.served_models.loader.Service", service)
        monkeypatch.setenv("XDG_DATA_HOME", tempfile.mkdtemp(dir=FOLDERS))
        self.service = service
        self.sock = server.bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.task = asyncio.create_task(lifetime._serve(config, self.sock, served_models(config), FIRST))

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, verify=False, timeout=PATIENCE) as http:
            return await http.get(path)

    async def ready(self) -> None:
        """Let the model load, and wait until it is served."""
        self.service.load.set()
        while (await self.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.01)

    async def connect(self, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.sock.getsockname()[1])
        body = json.dumps(json.loads(SCRIPTED) | {"stream": stream}).encode()
        writer.write(request_bytes("POST", "/v1/chat/completions", body))
        return reader, writer

    async def end(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.task
        self.sock.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_port_answers_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 1: loading never delays the port."""
    running = Running(monkeypatch, SlowService(), Config())
    assert (await running.get("/health/live")).status_code == 200
    assert (await running.get("/health/ready")).status_code == 503
    running.service.load.set()
    while (await running.get("/health/ready")).status_code != 200:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await running.end()
    assert running.service.closed


async def test_a_signal_while_the_model_loads_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 3."""
    running = Running(monkeypatch, SlowService(), Config())
    assert (await running.get("/health/live")).status_code == 200
    os.kill(os.getpid(), signal.SIGINT)
    await running.end()


async def join_pool_threads(goes_on: threading.Event) -> None:
    """Act as the end of a program, which joins the threads of the loop's pool whatever they wait for."""
    bound = threading.Timer(20, goes_on.set)
    bound.start()
    await asyncio.get_running_loop().shutdown_default_executor()
    bound.cancel()
    assert not goes_on.is_set()


async def test_a_signal_while_the_token_log_is_opened_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 3: the log's disk may hang."""
    began, goes_on = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        began.set()
        goes_on.wait()

    monkeypatch.setattr(TokenLog, "open", hangs)
    running = Running(monkeypatch, SlowService(), Config())
    running.service.load.set()
    try:
        await until(began.is_set)
        os.kill(os.getpid(), signal.SIGTERM)
        await running.end()
        await join_pool_threads(goes_on)
    finally:
        goes_on.set()
    assert running.service.closed


async def test_a_disk_that_hangs_under_the_token_log_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 3."""
    stuck, goes_on = threading.Event(), threading.Event()

    def hangs(file: SystemFile) -> None:
        stuck.set()
        goes_on.wait()

    running = Running(monkeypatch, SlowService(), Config())
    await running.ready()
    monkeypatch.setattr(SystemFile, "sync", hangs)
    monkeypatch.setattr(lifetime, "LOG_SECONDS", 0.2)
    async with httpx.AsyncClient(base_url=running.url, trust_env=False, verify=False, timeout=None) as http:
        made = asyncio.create_task(http.post("/v1/agents", json={"id": "ada"}))
        try:
            await until(stuck.is_set)
            os.kill(os.getpid(), signal.SIGTERM)
            await running.end()
            await join_pool_threads(goes_on)
        finally:
            goes_on.set()
            await asyncio.gather(made, return_exceptions=True)
    assert running.service.closed


def test_a_close_has_the_time_that_a_worker_has_to_store_and_to_be_killed() -> None:
    assert lifetime.CLOSE_SECONDS > STORE_SECONDS + KILL_SECONDS


async def test_a_model_that_cannot_be_served_ends_the_server_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(config: Config, first: Any, **more: Any) -> Any:
        raise ModelFileError("model.safetensors is cut off")

    service = SlowService()
    service.start = start  # type: ignore[method-assign]
    running = Running(monkeypatch, service, Config())
    with pytest.raises(ModelFileError, match="cut off"):
        await running.end()
    running.sock.close()


async def test_the_first_signal_lets_running_requests_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 3: running requests end before the server does; new ones get a 503 with Retry-After meanwhile."""
    script = [Delta(text="a"), 0.5, Delta(text="b"), done()]
    running = Running(monkeypatch, SlowService(lambda request: list(script)), Config(shutdown_grace=5))
    await running.ready()
    streamed = await running.connect(True)
    whole = await running.connect(False)
    await until(lambda: len(running.service.streams) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    late = await running.connect(False)
    status, headers, body = await answer(late[0])
    assert status == 503 and headers["retry-after"] == "5"
    assert json.loads(body)["error"]["code"] == "unavailable"
    status, _, body = await answer(whole[0])
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "ab"
    text = (await streamed[0].read()).decode()
    assert '"content":"b"' in text and "[DONE]" in text
    await running.end()
    for _, writer in (streamed, whole, late):
        writer.close()


async def test_what_runs_beyond_the_grace_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failures 3, 47."""
    running = Running(monkeypatch, SlowService(lambda request: [Delta(text="a"), 60.0]), Config(shutdown_grace=0.2))
    await running.ready()
    reader, writer = await running.connect(True)
    whole, other = await running.connect(False)
    await until(lambda: len(running.service.streams) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    pieces = [line for line in text.split("\r\n") if line.startswith("data")]
    assert events("".join(pieces))[-1]["error"]["code"] == "unavailable" and "[DONE]" not in text
    status, _, body = await answer(whole)
    assert status == 503 and json.loads(body)["error"]["code"] == "unavailable"
    await running.end()
    writer.close()
    other.close()


async def test_a_second_signal_is_immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failures 3, 47: at once, but still with an error event."""
    running = Running(monkeypatch, SlowService(lambda request: [Delta(text="a"), 60.0]), Config(shutdown_grace=600))
    await running.ready()
    reader, writer = await running.connect(True)
    await until(lambda: len(running.service.streams) == 1)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    assert not running.task.done()
    os.kill(os.getpid(), signal.SIGINT)
    text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    pieces = [line for line in text.split("\r\n") if line.startswith("data")]
    assert events("".join(pieces))[-1]["error"]["code"] == "unavailable" and "[DONE]" not in text
    await running.end()
    assert running.service.closed and running.service.streams[0].closed
    writer.close()


def test_a_busy_port_is_a_short_error_and_exit_code_2() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is used") as caught:
            server.serve(Config(engine="fake", port=port))
        assert caught.value.exit_code == 2
        process = Served(port=port)
        assert process.wait() == 2
        assert process.stderr().strip().count("\n") == 0 and "used by another program" in process.stderr()


@pytest.mark.parametrize("host", ["nowhere.invalid", "300.1.1.1", "203.0.113.7"])
def test_a_foreign_address_is_a_short_error(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        server.serve(Config(host=host, unsafe_no_auth=True))


def test_another_address_without_a_key_is_refused_before_anything_starts() -> None:
    """Known failure 45."""
    process = Served(host="0.0.0.0")
    assert process.wait() == 2 and "--unsafe-no-auth" in process.stderr()


def test_a_missing_model_is_exit_code_2(tmp_path: Any) -> None:
    process = Served(model=str(tmp_path / "nothing"))
    assert process.wait() == 2
    assert "nothing" in process.stderr() and "Traceback" not in process.stderr()


@pytest.mark.parametrize(
    ("kv", "agents"), [("x", "x"), ("x/y/../", "x/"), ("x/kv", "x"), ("x", "x/agents"), ("l", "x")]
)
def test_kv_and_agents_in_one_folder_are_refused_before_one_is_made(kv: str, agents: str, tmp_path: Path) -> None:
    (tmp_path / "l").symlink_to(tmp_path / "x")
    config = Config(kv_dir=f"{tmp_path}/{kv}", agents_dir=f"{tmp_path}/{agents}", port=free_port())
    with pytest.raises(ConfigError, match="must be two folders") as refused:
        server.serve(config)
    assert refused.value.field == "agents_dir" and not (tmp_path / "x").exists()


def test_separate_or_unused_folders_pass_the_check(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path)}
    inside = f"{tmp_path}/cairn/agents/kv"
    data_folders.check_folders(Config(kv_dir=inside, kv_disk=False), env)
    data_folders.check_folders(Config(), env)
    data_folders.check_folders(Config(kv_dir=f"{tmp_path}/cairn/kv"), env)
    with pytest.raises(ConfigError, match="must be two folders"):
        data_folders.check_folders(Config(kv_dir=inside), env)


class Pauses:
    """A clock that advances with each pause; after `enough` of them a signal has arrived."""

    def __init__(self, enough: int = 1000) -> None:
        self.seconds, self.enough = 0.0, enough

    def now(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return 0

    def __call__(self) -> bool:
        self.seconds += 1
        return self.seconds < self.enough


def usual(tmp_path: Path, pauses: Pauses, **options: Any) -> Any:
    """Hold the user's default folders, with options as the command line gives them."""
    env = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    config = with_folder(Config(**options), env)
    return data_folders.usual_held(config, env, SystemFiles(), pauses, pauses, 5.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "agents in {data}/agents and KV in {cache}/kv; .*: --agents-dir {data}/agents-2 --kv-dir {cache}/kv-2$"),
        ({"port": 8001}, "place of its own: --agents-dir {data}/agents-8001 --kv-dir {cache}/kv-8001$"),
        ({"kv_disk": False}, "keeps its agents in {data}/agents; .*: --agents-dir {data}/agents-2$"),
        ({"agents_dir": "/elsewhere"}, "keeps its KV in {cache}/kv; .*: --kv-dir {cache}/kv-2$"),
    ],
)
def test_a_second_server_is_refused_with_the_two_options_named(tmp_path: Path, options: Any, words: str) -> None:
    """Without these options the second server would store nothing."""
    places = {"data": f"{tmp_path}/data/cairn", "cache": f"{tmp_path}/cache/cairn"}
    pauses = Pauses()
    with usual(tmp_path, pauses):
        with pytest.raises(ConfigError, match=words.format(**places)), usual(tmp_path, pauses, **options):
            pass
        assert pauses.seconds == 5
        with usual(tmp_path, pauses, agents_dir="/elsewhere", kv_dir="/else/kv"):
            pass  # both folders given
    with usual(tmp_path, pauses):
        pass  # the first server has ended


def test_a_start_waits_for_an_ending_server_but_heeds_signals(tmp_path: Path) -> None:
    first = usual(tmp_path, Pauses())
    first.__enter__()

    class Ends(Pauses):
        def __call__(self) -> bool:
            if self.seconds == 2:
                first.__exit__(None, None, None)
            return super().__call__()

    pauses = Ends()
    with usual(tmp_path, pauses):
        assert pauses.seconds == 3
        hasty = Pauses(enough=2)
        with pytest.raises(ConfigError, match="another server keeps"), usual(tmp_path, hasty):
            pass
        assert hasty.seconds <= 3


def test_a_server_starts_even_if_no_lock_can_be_taken(tmp_path: Path) -> None:
    """Whoever opens the folder later reports what is wrong with it."""
    (tmp_path / "data").write_text("in the way")
    with usual(tmp_path, Pauses()), pytest.raises(ConfigError, match="keeps its KV in"), usual(tmp_path, Pauses()):
        pass


def test_serve_looks_for_another_server_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(server, "FOLDER_SECONDS", 0.0)
    with usual(tmp_path, Pauses()), pytest.raises(ConfigError, match="another server keeps its agents in"):
        server.serve(Config(model="nowhere/at-all", port=0))


async def test_without_the_usual_folder_of_agents_the_server_goes_on_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/health/ready reports it, without naming a folder, as this route needs no key."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(lifetime, "AGENTS_SECONDS", 0.05)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cairn").write_text("in the way")
    config = Config(model="demo", engine="fake", kv_gb=0.01)
    app = build_app(None, config)
    service = app.service = await Service.start(config, in_process=True)
    opening = await lifetime._open_agents(app, app.state.models, config)
    try:
        assert opening is not None and str(tmp_path) in caplog.text
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            ready = await http.get("/health/ready")
            (trouble,) = ready.json()["troubles"]
            assert ready.status_code == 200 and "keeps no agents" in trouble and str(tmp_path) not in trouble
            assert (await http.get("/v1/agents")).status_code == 503
            (tmp_path / "data" / "cairn").unlink()
            await asyncio.wait_for(opening, 20)
            assert (await http.get("/health/ready")).json()["troubles"] == []
            assert (await http.get("/v1/agents")).status_code == 200
        with pytest.raises(ConfigError, match="cannot be read"):
            (tmp_path / "file").write_text("in the way")
            await lifetime._open_agents(app, app.state.models, Config(agents_dir=str(tmp_path / "file" / "agents")))
    finally:
        if app.state.attribution.agents is not None:
            await app.state.attribution.agents.close()
        await service.close()


def test_the_file_limit_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
        server.raise_file_limit(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_with_0_and_leaves_nothing(number: int) -> None:
    """Known failure 3."""
    with served() as process:
        assert process.post("/v1/chat/completions", CHAT)["choices"][0]["finish_reason"] == "length"
        family = process.family()
        assert len(family) >= 2
        process.signal(number)
        assert process.wait(20) == 0
        assert not alive(family)
        assert "Traceback" not in process.stderr()
        assert "curl" in process.stderr() and process.url in process.stderr()


@pytest.mark.parametrize("delay", [0.0, 0.3, 0.8])
def test_a_signal_in_start_up_ends_with_0(delay: float, prove: bool) -> None:
    if not prove and delay == 0.3:
        pytest.skip("one more moment of a start: for `make prove`")
    process = Served(port=free_port())
    try:
        process.wait_live()
        import time

        time.sleep(delay)
        family = process.family()
        process.signal()
        assert process.wait(20) == 0
        assert not alive(family)
        assert "Traceback" not in process.stderr()
    finally:
        process.end()


async def test_prompts_are_not_logged() -> None:
    with served(log_level="debug") as process:
        async with httpx.AsyncClient(base_url=process.url, trust_env=False, verify=False, timeout=30) as http:
            secret = "xyzzy-prompt-text"
            body = CHAT | {"messages": [{"role": "user", "content": secret}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            assert (await http.post("/v1/chat/completions", json=body | {"n": 99})).status_code == 400
            assert (await http.post("/v1/completions", json={"model": "demo", "prompt": secret})).status_code == 200
        process.signal()
        assert process.wait(20) == 0
        assert "xyzzy" not in process.stderr()


def test_a_closed_log_pipe_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends both sides of `cairn serve 2>&1 | tee log`, and running requests must still finish."""
    read, write = os.pipe()
    os.close(read)
    for broken in (open(write, "w"), open("/dev/full", "w")):  # noqa: SIM115  (closing fails too)
        monkeypatch.setattr("sys.stderr", broken)
        lifetime._say(Config(), "Finishing 2 requests")
        with contextlib.suppress(OSError):
            broken.close()


async def test_a_token_log_of_zeros_is_a_trouble_and_in_the_doctors_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All agents are gone and every request for one is a 404: /health says why, without naming a folder."""
    folder = tmp_path / "agents"
    config = Config(model="demo", engine="fake", kv_gb=0.01, agents_dir=str(folder), kv_dir=str(tmp_path / "kv"))

    async def served(work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        app = build_app(None, config)
        service = app.service = await Service.start(config, in_process=True)
        try:
            await lifetime._open_agents(app, app.state.models, config)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                await work(http)
        finally:
            if app.state.attribution.agents is not None:
                await app.state.attribution.agents.close()
            await service.close()

    async def made(http: httpx.AsyncClient) -> None:
        assert (await http.post("/v1/agents", json={"id": "ada"})).status_code == 201
        assert (await http.get("/health")).json()["troubles"] == []

    async def lost(http: httpx.AsyncClient) -> None:
        assert (await http.get("/v1/agents/ada")).status_code == 404
        (trouble,) = (await http.get("/health")).json()["troubles"]
        assert trouble.startswith("the token log in its folder was damaged: 1 of its files had no readable header")

    def told() -> str:
        with pytest.raises(SystemExit):
            main(["doctor", "demo", "--agents-dir", str(folder)])
        return " ".join(capsys.readouterr().out.split())

    await served(made)
    assert "token log sound" in told()
    for path in folder.glob("*.log"):
        path.write_bytes(bytes(path.stat().st_size))
    assert f"the token log in {folder} was damaged" in told()
    await served(lost)
    assert f"the token log in {folder} was damaged" in told()


FREED = """
import sys
from pathlib import Path
from cairn.api.server import return_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8
if sys.argv[1] == "tuned":
    return_freed_memory()
large = b"x" * (20 << 20)
del large  # glibc keeps twice as much from here on
before = resident()
small = [b"x" * (100 << 10) for _ in range(300)]
del small
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's memory is left as it is")
def test_memory_that_is_freed_goes_back() -> None:
    kept = [
        int(subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, check=True).stdout)
        for how in ("tuned", "as it is")
    ]
    assert kept[0] <= 4 < 20 <= kept[1], "MiB"
