"""/health while one part of the server refuses requests."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.rag import document_store
from tests.agents.house import talking_model
from tests.api.homes import home
from tests.files import Fault

TURN = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
WELL = {"status": "ok", "reasons": [], "troubles": [], "devices": ["fake"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("health") / "tiny")


async def trouble(http: httpx.AsyncClient) -> str:
    """Return the only trouble that every health route reports, with 200, while something is refused."""
    said: list[Any] = []
    for path in ("/health", "/v1/health", "/health/ready"):
        answer = await http.get(path)
        assert answer.status_code == 200 and answer.json()["reasons"] == []
        assert answer.json()["status"] == ("ready" if path == "/health/ready" else "degraded")
        said += answer.json()["troubles"]
    assert len(set(said)) == 1
    return str(said[0])


async def test_health_is_degraded_while_the_disk_refuses_turns(folder: Path) -> None:
    """A monitor that read only /health saw `ok` while every turn got a 503."""
    async with home(folder) as (house, http):
        await http.post("/v1/agents", json={"id": "ada"})
        assert (await http.get("/health")).json() == WELL
        house.files.fail(Fault(house.files.calls, errno.ENOSPC, sticky=True))
        assert (await http.post("/v1/agents/ada/turns", json=TURN)).status_code == 503
        assert (await http.post("/v1/chat/completions", json=TURN)).status_code == 200  # stores nothing
        assert "cannot be written: No space left on device" in await trouble(http)
        house.files.heal()
        await house.agents.tend()
        assert (await http.get("/health")).json() == WELL
        assert (await http.post("/v1/agents/ada/turns", json=TURN)).status_code == 200


async def test_health_is_degraded_where_agents_cannot_be_opened(folder: Path) -> None:
    async with home(folder) as (house, http):
        attribution = house.web.app.state.attribution  # type: ignore[attr-defined]
        attribution.agents = None
        assert (await http.get("/health")).json() == WELL  # no agents were asked for
        attribution.missing("another server has their folder")
        assert (await http.post("/v1/agents", json={"id": "ada"})).status_code == 503
        assert "another server has their folder" in await trouble(http)


async def test_health_is_degraded_while_the_disk_refuses_documents(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: dict[str, Any] = {"files": {"file": bytes(1 << 20)}, "data": {"purpose": "user_data"}}
    async with home(folder, agents_dir=str(tmp_path / "agents")) as (house, http):
        assert (await http.post("/v1/files", **form)).status_code == 200
        files = house.web.app.state.library._opened.files  # type: ignore[attr-defined]
        with files.database.read() as db:
            db.execute("PRAGMA max_page_count=1")  # acts like a full disk
        assert (await http.post("/v1/files", **form)).status_code == 503
        assert len((await http.get("/v1/files")).json()["data"]) == 1
        assert "disk is full" in await trouble(http)
        monkeypatch.setattr(document_store, "TROUBLE_SECONDS", 0.0)  # as if the last failure were a minute ago
        assert (await http.get("/health")).json() == WELL
        monkeypatch.undo()
        with files.database.read() as db:
            db.execute("PRAGMA max_page_count=1000000")
        assert (await http.post("/v1/files", **form)).status_code == 200
        assert (await http.get("/health")).json() == WELL
