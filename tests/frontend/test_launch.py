"""The first worker, started before the rest of a server: nothing of it stays if the server fails to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cairn.api import server
from cairn.config.config import Config
from cairn.frontend import launch
from cairn.frontend.service import Service
from cairn.system.posix import without_secrets
from cairn.text.chat import prompt as chat
from cairn.text.chat.prompt import Chat
from cairn.types.errors import CairnError, ConfigError, ModelError
from tests.service.tiny import collect, config, request

START = (
    sys.executable,
    "-c",
    "import sys; from cairn.cli import main; main(sys.argv[1:])",
    *("serve", "--engine", "fake", "--port", "0", "--kv-gb", "0.1"),
)


def group(pgid: int) -> list[str]:
    """Return the processes of a group that still run."""
    results = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(number) == pgid and state != "Z":
            results.append(stat.parent.name)
    return results


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.02, 0.1, 0.3, 0.45])
@pytest.mark.parametrize("everybody", [True, False])
def test_a_signal_while_a_server_starts_leaves_no_worker_and_no_traceback(
    delay: float, everybody: bool, tmp_path: Path, prove: bool
) -> None:
    """Known failure 3: a terminal signals every process at once, also one that is still importing."""
    if not prove and delay not in (0.0, 0.1):
        pytest.skip("every moment of a start: for `make prove`")
    env = without_secrets() | {"XDG_DATA_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(START, stderr=subprocess.PIPE, env=env, start_new_session=True)
    assert process.stderr is not None
    with process.stderr:
        while len(group(process.pid)) < 2 and process.poll() is None:
            time.sleep(0.01)  # before that there is no worker
        time.sleep(delay)
        if everybody:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and not group(process.pid)
        assert "Traceback" not in process.stderr.read().decode()


def test_two_servers_cannot_have_one_port() -> None:
    """Known failure 3: the second server refuses before it starts a worker, however soon after the first it comes."""
    with server.bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="is used by another program"):
        server.bind("127.0.0.1", first.getsockname()[1])


def test_little_is_imported_before_the_first_worker_is_started() -> None:
    """Otherwise the model would be loaded that much later."""
    script = """if True:
        import sys
        from cairn.frontend import launch
        def launched(load, in_process=False):
            print([name for name in ("numpy", "tokenizers", "uvloop", "rich._emoji_codes") if name in sys.modules])
            raise SystemExit
        launch.launch = launched
        from cairn.cli import main
        main(["serve", "--engine", "fake", "--port", "0"])
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_server_that_does_not_come_about_takes_its_worker_along(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[launch.First] = []

    def fails(config: Config, sock: object, models: object, first: launch.First, *_: object) -> None:
        seen.append(first)
        raise RuntimeError("no server")

    monkeypatch.setattr("cairn.api.lifetime.run", fails)
    with pytest.raises(RuntimeError, match="no server"):
        server.serve(Config(model="demo", engine="fake", port=0, kv_disk=False))
    (first,) = seen
    process = first.worker.process
    assert process is not None and process.returncode == -signal.SIGKILL and first.worker.sock.fileno() == -1


def test_a_worker_that_cannot_be_started_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WORKER", ("/no/such/program",))
    with pytest.raises(ModelError, match=r"could not be started.*No such file"):
        launch.launch_first(Config(model="demo"))


async def test_no_process_runs_what_lies_in_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server may be started in a downloaded folder, which may hold Python files, too."""
    for name in ("ml_dtypes", "jinja2"):
        text = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\nraise SystemExit\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    try:
        service = await Service.start(config(folder))
        try:
            prompt = await service.chat.prompt([{"role": "user", "content": "hello"}])
            assert (await collect(service.generate(request(service, prompt.tokens, 4)))).tokens
        finally:
            await service.close()
    finally:
        assert not [*tmp_path.rglob("*.ran")]


def test_files_that_cannot_be_read_keep_no_first_worker_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> bytes:
        raise PermissionError("no")

    monkeypatch.setattr(launch, "code_digest", unreadable)
    first = launch.launch_first(Config(model="demo", engine="fake"))
    first.end()
    assert first.code == b""


async def test_a_tokenizer_that_cannot_be_read_leaves_no_rendering_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []

    def launched() -> chat.Process:
        started.append(process := launching())
        return process

    launching = chat.launch
    monkeypatch.setattr(chat, "launch", launched)
    with pytest.raises(CairnError, match=r"must hold a tokenizer\.json"):
        await Chat.start(tmp_path, Config())
    (process,) = started
    assert process.popen.returncode is not None and process.sock.fileno() == -1


async def test_a_model_without_a_template_needs_no_rendering_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    demo = Path(launch.locate("demo"))

    def launched() -> chat.Process:
        started.append(process := launching())
        return process

    launching, load_text = chat.launch, chat.load_text
    monkeypatch.setattr(chat, "launch", launched)
    monkeypatch.setattr(chat, "load_text", lambda *given: (load_text(*given)[0], {}))
    made = await Chat.start(demo, Config())
    (process,) = started
    assert process.popen.returncode is not None
    await made.close()


def test_an_option_that_is_not_utf_8_is_a_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory named in another encoding is part of all folder names below it."""
    monkeypatch.setattr(launch, "_process", lambda _: pytest.fail("a worker was started"))
    with pytest.raises(ConfigError, match=r"^'/mod.udce8le/kv' is not UTF-8"):
        launch.launch_first(Config(model="demo", kv_dir="/mod\udce8le/kv"))
