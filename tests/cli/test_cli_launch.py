"""`cairn launch`: what an agent is started with, and that its own files are left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.cli.launch import ServerAddress, check_context, filled, start
from cairn.cli.launch_table import AGENTS
from cairn.types.errors import ConfigError
from tests.api.process import free_port, served
from tests.cli.test_cli import run

PLACE = ServerAddress("http://127.0.0.1:8000", "org/model:Q8_0", "secret", 32768)
AGENT = """#!/usr/bin/env python3
import json, os, sys, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
models = json.load(urllib.request.urlopen(url + "/v1/models"))
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
asked = {"max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
request = urllib.request.Request(url + "/v1/messages", json.dumps(asked).encode(), {"content-type": "application/json"})
try:
    seen = urllib.request.urlopen(request).status
except urllib.error.HTTPError as error:
    seen = error.code
window = os.environ["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]
print(json.dumps({"arguments": sys.argv[1:], "window": window, "models": models, "seen": seen}))
sys.exit(7)
"""


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_gets_the_servers_address_model_and_context(name: str, tmp_path: Path) -> None:
    begun = start(AGENTS[name], PLACE, tmp_path, ("--more",))
    result = json.dumps([begun.command, begun.env, {str(path): text for path, text in begun.files.items()}])
    # Copilot gets two numbers: how much of the context a prompt may take, and how much an answer.
    context = "24576" if name == "copilot" else str(PLACE.context)
    for wanted in (PLACE.url, PLACE.model, PLACE.key, context):
        assert wanted in result, wanted
    assert not re.search(r"\{(url|model|key|context|answer|prompt|folder)\}", result)
    assert begun.command[0] == AGENTS[name].program and begun.command[-1] == "--more"
    assert all(path.parent == tmp_path and json.loads(text) for path, text in begun.files.items())
    assert not any(variable.startswith("CAIRN_") for variable in begun.env), "cairn would not know it"


def test_values_of_the_table() -> None:
    values = {"context": 5, "model": "m", "url": "u{context}"}
    assert filled({"{model}": ["{context}", "{model} {context}", True]}, values) == {"m": [5, "m 5", True]}


def test_unknown_agents_and_missing_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for arguments in ((), ("vim",)):
        done = run("launch", *arguments)
        assert done.returncode == 2 and ", ".join(AGENTS) in done.stderr
    done = run("launch", "claude")
    assert done.returncode == 1 and AGENTS["claude"].install in done.stderr


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine on which a fake agent is installed."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(AGENT.replace("/usr/bin/env python3", sys.executable))
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def launch(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cairn", "launch", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_an_agent_finds_the_server_that_runs(fake: dict[str, str], tmp_path: Path) -> None:
    with served() as server:
        done = launch(fake, "claude", "--anyway", "--host", server.url, "--", "-p", "hi")
        assert done.returncode == 7, done.stderr
        parsed = json.loads(done.stdout)
        (model,) = parsed["models"]["data"]
        assert (
            parsed["seen"] == 400
            and parsed["arguments"] == ["-p", "hi"]
            and parsed["window"] == str(model["max_model_len"])
        )
        shown = launch(fake, "pi", "--print", "--host", server.url)
        assert shown.stdout.startswith("export PI_CODING_AGENT_DIR=") and model["id"] in shown.stdout
        assert not (tmp_path / "cache" / "cairn" / "launch" / "pi").exists(), "--print writes no files"


def test_a_server_is_started_and_ended_with_the_agent(fake: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    done = launch(fake, "claude", "--port", str(port), "--context", "2048", "--model", "demo", "--anyway", "--", "x")
    assert done.returncode == 7, done.stderr
    parsed = json.loads(done.stdout)
    assert parsed["window"] == "2048" and parsed["arguments"] == ["x"]
    assert parsed["seen"] == 200, "an image that a user pastes does not end the session"
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(("127.0.0.1", port))
    log = tmp_path / "cache" / "cairn" / "launch" / "server" / "serve.log"
    assert "listens on" in log.read_text() and stat.S_IMODE(log.stat().st_mode) == 0o600
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_started_server_has_the_options_of_the_file(fake: dict[str, str], tmp_path: Path) -> None:
    port, agents, file = free_port(), tmp_path / "agents", tmp_path / "its.toml"
    of_server = f'port = {port}\nkv_disk = false\nkv_gb = 0.05\nagents_dir = "{agents}"\n'
    file.write_text(of_server + '[[models]]\nmodel = "demo"\nname = "mine"\ncontext = 1024\n')
    done = launch(fake, "claude", "--anyway", "--config", str(file))
    assert done.returncode == 7, done.stderr
    parsed = json.loads(done.stdout)
    assert [one["id"] for one in parsed["models"]["data"]] == ["mine"] and parsed["window"] == "1024"
    assert agents.is_dir() and not (tmp_path / "cache" / "cairn" / "kv").exists()
    assert "the context of mine is 1,024 tokens: it will be refused" in done.stderr
    done = launch(fake, "claude", "--config", str(file))
    assert done.returncode == 2 and "it would be refused" in done.stderr
    done = launch(fake, "claude", "--anyway", "--config", str(file), "--model", "demo")
    assert done.returncode == 7 and json.loads(done.stdout)["models"]["data"][0]["id"] != "mine"


def test_a_port_of_its_own_choice_is_refused(fake: dict[str, str]) -> None:
    done = launch(fake, "claude", "--anyway", "--port", "0")
    assert (done.returncode, done.stdout) == (2, "") and "port is 0" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_agent_and_the_started_server(fake: dict[str, str], tmp_path: Path, number: int) -> None:
    (tmp_path / "bin" / "claude").write_text(
        f"#!{sys.executable}\nimport time\nprint('here', flush=True)\ntime.sleep(99)"
    )
    port = free_port()
    options = ("--anyway", "--port", str(port), "--model", "demo")
    command = [sys.executable, "-m", "cairn", "launch", "claude", *options]
    with subprocess.Popen(command, env=fake, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None and launched.stdout.readline() == "here\n"
        launched.send_signal(number)
        out, err = launched.communicate(timeout=100)  # ends once the agent, which has the same stdout, has ended
    assert (launched.returncode, out) == (128 + number, "") and "Traceback" not in err
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(("127.0.0.1", port))


def test_a_server_that_does_not_start_says_why(fake: dict[str, str], tmp_path: Path) -> None:
    done = launch(fake, "claude", "--port", str(free_port()), "--model", str(tmp_path))
    assert done.returncode == 1 and "the server did not start: " in done.stderr and "the file is missing" in done.stderr
    done = launch(fake, "claude", "--port", str(free_port()), "--model", "/nowhere")
    assert done.returncode == 2 and "there is no folder /nowhere" in done.stderr


def test_a_context_too_small_for_the_first_prompt_is_refused_before_a_start(
    fake: dict[str, str], tmp_path: Path
) -> None:
    done = launch(fake, "claude", "--port", str(free_port()), "--model", "demo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Claude Code's first prompt has about 17,000 to 32,000 tokens" in done.stderr
    assert "the context of demo is 2,048 tokens" in done.stderr and "--context 40000" in done.stderr
    assert not (tmp_path / "cache" / "cairn" / "launch" / "server").exists(), "no server was started for it"
    with served() as server:
        done = launch(fake, "claude", "--host", server.url)
        assert done.returncode == 2 and "it would be refused" in done.stderr


def test_how_a_context_fits(capsys: pytest.CaptureFixture[str]) -> None:
    check_context(AGENTS["claude"], False, "m", 40_000)
    check_context(AGENTS["aider"], False, "m", 2048)
    assert capsys.readouterr().err == ""
    check_context(AGENTS["claude"], False, "m", 20_000)
    assert "it may soon be full" in capsys.readouterr().err
    check_context(AGENTS["claude"], True, "m", 8_192)
    assert "it will be refused" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="codex's first prompt has about 13,000 tokens"):
        check_context(AGENTS["codex"], False, "m", 12_000)
