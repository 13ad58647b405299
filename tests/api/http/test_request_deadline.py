"""Deadlines sent in a header."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.config.config import Config
from cairn.engine.fake import FakeEngine
from cairn.frontend.service import Service
from tests.api.sockets import Site, site
from tests.service.several import several
from tests.service.tiny import make_model, serving

ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1500, "temperature": 0}


@pytest.fixture
async def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Site, Service, httpx.AsyncClient]]:
    """Yield a server whose steps take 5 ms, so that a long answer takes seconds."""
    prefill = FakeEngine.prefill

    def slowly(self: FakeEngine, rows: Any) -> Any:
        time.sleep(0.005)
        return prefill(self, rows)

    monkeypatch.setattr(FakeEngine, "prefill", slowly)
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at, at.http() as http:
        yield at, service, http


async def test_a_call_ends_at_the_deadline_in_its_header(at: tuple[Site, Service, httpx.AsyncClient]) -> None:
    _, service, http = at
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.5)
    for headers in (
        {"X-Request-Timeout": "0.4"},
        {"X-Request-Timeout": "400ms"},
        {"X-Request-Timeout": "1m", "X-Cairn-Deadline": str(time.time() + 0.4)},
        {"X-Cairn-Deadline": soon.isoformat()},
    ):
        began = time.monotonic()
        answer = await http.post("/v1/chat/completions", json=ASKED, headers=headers)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded", answer.text
        assert time.monotonic() - began < 5
    assert service.stats().running == 0
    made = await http.post("/v1/agents", json={"id": "ada"})
    if made.status_code == 201:  # also for a turn of an agent
        turn = await http.post("/v1/agents/ada/turns", json=ASKED, headers={"X-Request-Timeout": "0.3"})
        assert turn.status_code == 504
    in_time = await http.post(
        "/v1/chat/completions", json={**ASKED, "max_tokens": 4}, headers={"x-request-timeout": "9s"}
    )
    assert in_time.status_code == 200


@pytest.mark.parametrize(
    "name, value, status",
    [
        ("X-Request-Timeout", "soon", 400),
        ("X-Request-Timeout", "0", 400),
        ("X-Request-Timeout", "-1", 400),
        ("X-Request-Timeout", "nan", 400),
        ("X-Cairn-Deadline", "2026-01-01T00:00:00", 400),
        ("X-Cairn-Deadline", "tomorrow", 400),
        ("X-Cairn-Deadline", "1000000000", 504),
    ],
)
async def test_an_invalid_deadline_is_refused(
    at: tuple[Site, Service, httpx.AsyncClient], name: str, value: str, status: int
) -> None:
    answer = await at[2].post("/v1/chat/completions", json=ASKED, headers={name: value})
    assert answer.status_code == status and answer.json()["error"]["param"] == name


async def test_waiting_for_a_model_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with several(tmp_path, "alpha beta") as models:
        start = Service.start

        async def slowly(*arguments: Any, **more: Any) -> Service:
            await asyncio.sleep(4)
            return await start(*arguments, **more)

        monkeypatch.setattr(Service, "start", slowly)
        async with site(models.services.first, Config()) as at, at.http() as http:
            at.app.state.open(models)
            began = time.monotonic()
            asked = {**ASKED, "model": "beta", "max_tokens": 4}
            answer = await http.post("/v1/chat/completions", json=asked, headers={"X-Request-Timeout": "0.3"})
            assert answer.status_code == 504 and time.monotonic() - began < 3.5
            assert int(answer.headers["retry-after"]) >= 1
            assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
