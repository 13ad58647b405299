"""`cairn backup` of a busy server, and `cairn restore` elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cairn.cli import main
from cairn.system.posix import SystemFiles
from tests.api.process import Served, served
from tests.service.tiny import make_embedder


def command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "CAIRN_AGENTS_DIR", "CAIRN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


class Load:
    """Clients that work all the time: turns, agents created and deleted, documents added and removed."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.turns: dict[str, list[str]] = {}
        """What each agent was told in turns that have ended."""
        self.doomed: set[str] = set()
        """Agents that are being deleted, or were."""
        self.deleted: set[str] = set()
        self.documents: set[str] = set()
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (*[self._talk] * 2, self._file)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures, self._failures

    def _run(self, work: object) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                number += 1
                work(number, threading.get_ident() % 9999)  # type: ignore[operator]
        except BaseException as error:
            self._failures.append(error)

    def _talk(self, number: int, who: int) -> None:
        agent = f"agent-{who}-{number}"
        self.server.post("/v1/agents", {"id": agent})
        self.turns[agent] = []
        for turn in range(3):
            text = f"turn {turn} of {agent}"
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "ignore_eos": True}
            self.server.post(f"/v1/agents/{agent}/turns", body)
            self.turns[agent].append(text)
        if number % 3 == 0:
            self.doomed.add(agent)
            httpx.delete(f"{self.server.url}/v1/agents/{agent}", timeout=60).raise_for_status()
            self.deleted.add(agent)

    def _file(self, number: int, who: int) -> None:
        if number > 80:  # one page of the list shows as many
            self._stop.wait(0.1)
            return
        made = self.server.post(
            "/v1/collections/docs/documents", {"name": f"{number}.txt", "text": f"Stone {number}. " * 40}
        )
        self.documents.add(made["id"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["demo", str(make_embedder(tmp_path_factory.mktemp("models") / "embedder"))]


@pytest.fixture
def kept(tmp_path: Path, models: list[str]) -> Iterator[tuple[Path, Served]]:
    """Yield the folder of a server's agents, and the server."""
    with served(models=models, agents_dir=str(tmp_path / "kept" / "agents")) as server:
        made = False
        while not made:  # until the second model is loaded, too
            try:
                made = bool(server.post("/v1/collections", {"id": "docs"}))
            except urllib.error.HTTPError as error:
                assert error.code == 503 and error.headers["retry-after"], error
                error.close()
                threading.Event().wait(0.1)
        yield tmp_path / "kept" / "agents", server


def test_a_backup_under_load_is_restored_whole(kept: tuple[Path, Served], models: list[str], tmp_path: Path) -> None:
    """Everything that had ended when the backup began is in it, nothing is damaged, and deleted agents stay deleted."""
    folder, server = kept
    copies = []
    with Load(server) as load:
        while len(load.turns) < 4 or not load.deleted or not load.documents:
            threading.Event().wait(0.05)
        for number in range(2):
            before = (
                {id: list(texts) for id, texts in dict(load.turns).items()},
                set(load.deleted),
                set(load.documents),
            )
            place = tmp_path / f"backup{number}"
            code, out, err = command("backup", str(place), "--agents-dir", str(folder))
            assert code == 0 and "files, " in out, err
            copies.append((place, before, set(load.doomed)))
    for number, (place, (turns, deleted, documents), later) in enumerate(copies):
        new = tmp_path / f"new{number}" / "agents"
        code, out, err = command("restore", str(place), "--agents-dir", str(new))
        assert (code, err) == (0, "") and str(new) in out
        with (
            served(models=models, agents_dir=str(new)) as second,
            httpx.Client(base_url=second.url, timeout=60) as web,
        ):
            for id, texts in turns.items():
                answer = web.get(f"/v1/agents/{id}/turns?limit=100")
                if answer.status_code == 404:
                    assert id in later, f"{id} is lost"
                    continue
                assert web.get(f"/v1/agents/{id}").json()["damage"] is None
                results = [turn["messages"][-1]["content"] for turn in answer.json()["data"]]
                assert results[: len(texts)] == texts, id
            assert all(web.get(f"/v1/agents/{id}").status_code == 404 for id in deleted)
            held = {item["id"] for item in web.get("/v1/collections/docs/documents?limit=100").json()["data"]}
            assert documents <= held
            result = second.post("/v1/collections/docs/search", {"query": "stone", "top_k": 1})
            assert len(result["data"]) == 1
            second.post("/v1/agents", {"id": "later"})
            second.post("/v1/agents/later/turns", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})


def test_options_are_restored_too_and_say_where_agents_go(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(agents_dir=str(tmp_path / "mine" / "agents")) as server:
        server.post("/v1/agents", {"id": "ada"})
        text = f'agents_dir = "{tmp_path / "moved" / "agents"}"\nmax_running = 3\n'
        (tmp_path / "options.toml").write_text(text.replace("moved", "mine"))
        code, _, err = command("backup", str(tmp_path / "copy"), "--config", str(tmp_path / "options.toml"))
        assert code == 0, err
        code, _, err = command("backup", str(tmp_path / "copy"), "--config", str(tmp_path / "options.toml"))
        assert code == 2 and "is not empty" in err
        # The same place, where the server runs and has agents.
        code, _, err = command("restore", str(tmp_path / "copy"), "--agents-dir", str(tmp_path / "none" / "agents"))
        assert code == 0, err
    assert (home / ".config" / "cairn" / "cairn.toml").read_text() == text.replace("moved", "mine")
    assert (home / ".config" / "cairn" / "cairn.toml").stat().st_mode & 0o777 == 0o600
    code, _, err = command("restore", str(tmp_path / "copy"))
    assert code == 2 and "is not empty; move it away" in err
    (tmp_path / "mine").rename(tmp_path / "away")
    code, out, err = command("restore", str(tmp_path / "copy"))
    assert code == 0 and str(tmp_path / "mine" / "agents") in out, err
    (tmp_path / "mine").rename(tmp_path / "away2")
    (home / ".config" / "cairn" / "cairn.toml").write_text(text.replace("moved", "mine") + "port = 9000\n")
    code, out, err = command("restore", str(tmp_path / "copy"))
    assert code == 0 and "was not changed" in out, err


def test_an_incomplete_backup_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "new" / "agents"
    code, _, err = command("backup", str(tmp_path / "copy"), "--agents-dir", str(new))
    assert code == 2 and "there is nothing to copy" in err
    with served(agents_dir=str(tmp_path / "mine")) as server:
        server.post("/v1/agents", {"id": "ada"})
        assert command("backup", str(tmp_path / "copy"), "--agents-dir", str(tmp_path / "mine"))[0] == 0
        monkeypatch.setattr("cairn.cli.backup._WAIT", 0.1)
        code, _, err = command("restore", str(tmp_path / "copy"), "--agents-dir", str(tmp_path / "mine"))
        assert code == 2 and "a server is using it" in err
    copy = tmp_path / "copy"
    manifest = json.loads((copy / "manifest.json").read_text())
    (segment,) = (copy / "agents").glob("*.log")
    data = segment.read_bytes()

    def refused(said: str) -> None:
        code, _, err = command("restore", str(copy), "--agents-dir", str(new))
        assert code == 2 and said in err and not new.exists(), err

    segment.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused("has changed since the backup")
    segment.unlink()
    refused("cannot be read")
    segment.write_bytes(data)
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    refused("newer Cairn (format 2)")
    evil = {"../../evil": manifest["files"][f"agents/{segment.name}"]}
    (copy / "manifest.json").write_text(json.dumps(manifest | {"files": evil}))
    refused("is not part of a backup")
    (copy / "manifest.json").unlink()
    refused("not a complete backup")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert command("restore", str(copy), "--agents-dir", str(new))[0] == 0


def test_a_restore_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(agents_dir=str(tmp_path / "mine")) as server:
        server.post("/v1/agents", {"id": "ada"})
        assert command("backup", str(tmp_path / "copy"), "--agents-dir", str(tmp_path / "mine"))[0] == 0
    new = tmp_path / "new" / "agents"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SystemFiles, "replace", full)
        code, _, err = command("restore", str(tmp_path / "copy"), "--agents-dir", str(new))
    assert code == 1 and "No space left" in err
    assert [path.name for path in new.iterdir()] == [".lock"]
    assert command("restore", str(tmp_path / "copy"), "--agents-dir", str(new))[0] == 0


def test_every_agent_is_exported(tmp_path: Path) -> None:
    with served() as server:
        for id in ("ada", "bob.2", "eve"):
            server.post("/v1/agents", {"id": id})
        code, out, _ = command("agents", "export", "--all", str(tmp_path / "out"), "--host", server.url)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert code == 0 and names == {"ada.cairn", "bob.2.cairn", "eve.cairn"} and len(out.splitlines()) == 3
        for arguments, said in (
            ((), "name an agent, or give --all"),
            (("--all", "a", "b"), "--all takes only a folder"),
        ):
            code, _, err = command("agents", "export", *arguments, "--host", server.url)
            assert code == 2 and said in err
        with pytest.raises(urllib.error.HTTPError):
            server.post("/v1/agents", {"id": "ada"})
