"""GET /v1/events: every change once and in order, bounded, and only to its tenant."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.native import live_events as changes
from cairn.config.values import Secret, TenantKeys
from cairn.engine.fake import FakeEngine
from tests.agents.house import talking_model
from tests.api.homes import open_house
from tests.api.sockets import Site

TURN = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "messages": [{"role": "user", "content": "hi"}]}
Event = tuple[str, str, Any]
"""Id, name and data."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "TICK", 0.02)
    monkeypatch.setattr(changes, "SHARE", 0)


class Listener:
    """Reads a stream of changes event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.last = ""

    async def next(self) -> Event:
        id, name, data = "", "", ""
        async for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "id":
                id = self.last = value
            elif field == "event":
                name = value
            elif field == "data":
                data = value
            elif not line and name:
                return id, name, json.loads(data)
        raise EOFError

    async def until(self, name: str) -> Any:
        """Return the data of the next event with this name."""
        async with asyncio.timeout(10):
            while True:
                _, event, data = await self.next()
                if event == name:
                    return data

    async def snapshot(self) -> dict[str, Any]:
        """Return the agents of a complete snapshot, by id."""
        results: dict[str, Any] = {}
        while True:
            data = await self.until("snapshot")
            if data["begin"]:
                results = {}
            results |= {agent["id"]: agent for agent in data["agents"]}
            if data["end"]:
                return results


@contextlib.asynccontextmanager
async def listening(http: httpx.AsyncClient, seen: str = "", **headers: str) -> AsyncIterator[Listener]:
    last_id = {"Last-Event-ID": seen} if seen else {}
    async with http.stream("GET", "/v1/events", headers=last_id | headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Listener(response)


async def make(http: httpx.AsyncClient, id: str, **headers: str) -> None:
    (await http.post("/v1/agents", json={"id": id}, headers=headers)).raise_for_status()


async def test_a_stream_begins_with_a_snapshot_and_continues_with_changes(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        await make(http, "a")
        async with listening(http) as stream:
            hello = await stream.until("hello")
            assert hello["agents"] is True and hello["server"] is True
            result = await stream.snapshot()
            assert set(result) == {"a"} and result["a"] == (await http.get("/v1/agents")).json()["data"][0]
            await make(http, "b")
            news = await stream.until("agents")
            assert [agent["id"] for agent in news["changed"]] == ["b"] and news["gone"] == []
            await http.post("/v1/agents/b/pin")
            assert (await stream.until("agents"))["changed"][0]["pinned"] is True
            await http.delete("/v1/agents/a")
            assert (await stream.until("agents"))["gone"] == ["a"]


async def test_a_stream_without_news_shows_that_it_lives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look woke its readers, so that their silence never lasted until a comment was due."""
    monkeypatch.setattr(changes, "MOST_SILENCE", 0.1)
    async with open_house(folder) as (_, _, http), http.stream("GET", "/v1/events") as response:
        async with asyncio.timeout(60):
            lines = response.aiter_lines()
            while "still here" not in await anext(lines):
                pass


async def test_a_turn_shows_while_it_runs_and_after_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = FakeEngine.prefill

    def slow(self: FakeEngine, rows: Any) -> Any:
        time.sleep(0.03)
        return prefill(self, rows)

    monkeypatch.setattr(FakeEngine, "prefill", slow)
    async with open_house(folder) as (_, _, http):
        await make(http, "a")
        async with listening(http) as stream:
            await stream.snapshot()
            answered = asyncio.create_task(http.post("/v1/agents/a/turns", json=TURN | {"max_tokens": 20}))
            states: set[str] = set()
            rows: list[dict[str, Any]] = []
            async with asyncio.timeout(10):
                while not {"running", "idle"} <= states or not rows:
                    _, name, data = await stream.next()
                    if name == "requests":
                        rows += data["requests"]
                    elif name == "agents":
                        states |= {agent["state"] for agent in data["changed"]}
            await answered
            assert states == {"running", "idle"} and {row["agent"] for row in rows} - {None} == {"a"}
            assert rows[-1]["completion_tokens"] > 1 and {row["id"] for row in rows} == {rows[0]["id"]}
            assert (await stream.until("savings"))["total"]["requests"] == 1


async def test_a_reconnecting_client_gets_missed_events_once(folder: Path) -> None:
    async with open_house(folder) as (_, _, http):
        async with listening(http) as stream:
            await stream.snapshot()
            await make(http, "a")
            await stream.until("agents")
            seen = stream.last
        for name in ("b", "c"):
            await make(http, name)
            await asyncio.sleep(0.05)
        async with listening(http, seen) as stream:
            results: list[str] = []
            async with asyncio.timeout(10):
                while "c" not in results:
                    _, name, data = await stream.next()
                    assert name != "snapshot"
                    if name == "agents":
                        results += [agent["id"] for agent in data["changed"]]
            results = [name for name in results if name != "a"]
            assert results == sorted(results) and set(results) == {"b", "c"}


@pytest.mark.parametrize("seen", ["", "nonsense", "0123456789abcdef-1", "-1", "x-99999999999999999999"])
async def test_an_unknown_event_id_brings_a_snapshot(folder: Path, seen: str) -> None:
    async with open_house(folder) as (_, _, http):
        await make(http, "a")
        async with listening(http, seen) as stream:
            assert set(await stream.snapshot()) == {"a"}


async def test_an_expired_event_id_brings_a_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "KEPT_EVENTS", 3)
    async with open_house(folder) as (_, web, http):
        async with listening(http) as stream:
            await stream.snapshot()
            seen = stream.last
        names = {f"a{number}" for number in range(6)}
        for name in names:
            await make(http, name)
            await asyncio.sleep(0.05)
        (feed,) = feeds(web)
        assert len(feed._events) <= 3
        async with listening(http, seen) as stream:
            assert set(await stream.snapshot()) == names


def feeds(web: Site) -> list[changes.ChangeFeed]:
    route = web.app.router.find("/v1/events")["GET"]  # type: ignore[index]
    change_feeds: changes.ChangeFeeds = route.endpoint.__self__  # type: ignore[attr-defined]
    return list(change_feeds._feeds.values())


async def test_events_are_bounded_by_bytes_and_large_lists_come_in_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PIECE", 4)
    monkeypatch.setattr(changes, "KEPT_BYTES", 4000)
    async with open_house(folder) as (at, web, http):
        for number in range(10):
            await make(http, f"a{number}")
        async with listening(http) as stream:
            sizes, ended = [], False
            while not ended:
                data = await stream.until("snapshot")
                sizes.append(len(data["agents"]))
                ended = data["end"]
            assert sum(sizes) == 10 and max(sizes) == 4
            (feed,) = feeds(web)
            for number in range(10):
                await at.agents.pin("default", f"a{number}", True)
            await asyncio.sleep(0.1)
            assert feed._bytes <= 4000 or len(feed._events) == 1
            assert feed._bytes == sum(len(event.data) for event in feed._events)


async def test_a_tenant_sees_its_own_alone_and_figures_of_the_server_need_the_admin_key(folder: Path) -> None:
    tenants = tuple(TenantKeys(name=name, keys=(Secret(name),)) for name in ("one", "two"))
    async with open_house(folder, tenants=tenants, admin_key=Secret("root")) as (_, _, http):
        one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
        await make(http, "mine", **one)
        async with listening(http, **two) as stream:
            assert (await stream.until("hello"))["server"] is False
            assert await stream.snapshot() == {}
            await make(http, "other", **one)
            await make(http, "own", **two)
            assert [agent["id"] for agent in (await stream.until("agents"))["changed"]] == ["own"]
        async with listening(http, **two, **{"X-Cairn-Admin-Key": "root"}) as stream:
            assert (await stream.until("hello"))["server"] is True
            assert (await stream.until("server"))["models"][0]["pool_tokens"] > 0
        wrong = await http.get("/v1/events", headers=two | {"X-Cairn-Admin-Key": "wrong"})
        assert wrong.status_code == 401
        assert (await http.get("/v1/events", headers={"Authorization": "Bearer root"})).status_code == 401
        assert (await http.get("/v1/events")).status_code == 401


async def test_an_admins_events_reach_no_other_reader(folder: Path) -> None:
    async with open_house(folder, api_key=(Secret("k"),), admin_key=Secret("root")) as (_, _, http):
        key = {"Authorization": "Bearer k"}
        async with listening(http, **key, **{"X-Cairn-Admin-Key": "root"}) as first:
            await first.until("server")
            async with listening(http, **key) as second:
                await second.snapshot()
                await make(http, "a", **key)
                (await http.post("/v1/agents/a/turns", json=TURN, headers=key)).raise_for_status()
                async with asyncio.timeout(10):
                    while not (await first.until("server"))["models"][0]["tokens"]["generated"]:
                        pass
                await make(http, "b", **key)
                names, seen = set(), set()
                async with asyncio.timeout(10):
                    while "b" not in seen or "savings" not in names:
                        _, name, data = await second.next()
                        names.add(name)
                        seen |= {agent["id"] for agent in data.get("changed", ())}
                assert "server" not in names


async def test_the_number_of_listeners_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_READERS", 1)
    async with open_house(folder) as (_, _, http):
        async with listening(http) as stream:
            await stream.snapshot()
            refused = await http.get("/v1/events")
            assert refused.status_code == 429 and "retry-after" in refused.headers
        await asyncio.sleep(0.1)
        async with listening(http) as stream:
            await stream.snapshot()


async def test_without_listeners_nothing_is_watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "GRACE", 0.05)
    async with open_house(folder) as (_, web, http):
        assert feeds(web) == []
        async with listening(http) as stream:
            await stream.snapshot()
            assert len(feeds(web)) == 1
        async with asyncio.timeout(10):
            while feeds(web):
                await asyncio.sleep(0.02)
        async with listening(http) as stream:
            await stream.snapshot()


async def test_a_server_that_ends_ends_the_stream(folder: Path) -> None:
    async with open_house(folder) as (_, web, http), listening(http) as stream:
        await stream.snapshot()
        web.app.state.draining = True
        with pytest.raises(EOFError):
            await stream.until("nothing")


async def test_savings_by_day_survive_a_restart_and_add_up(folder: Path) -> None:
    async with open_house(folder) as (at, web, http):
        await make(http, "a")
        (await http.post("/v1/agents/a/turns", json=TURN)).raise_for_status()
        before = (await http.get("/v1/savings")).json()
        at.clock.ahead += 86_400
        (await http.post("/v1/agents/a/turns", json=TURN)).raise_for_status()
        after = (await http.get("/v1/savings")).json()
        assert len(before["days"]) == 1 and len(after["days"]) == 2 and after["days"][0] == before["days"][0]
        for name, value in after["total"].items():
            assert value == pytest.approx(sum(day[name] for day in after["days"])), name
        await at.again()
        web.app.state.attribution.agents = at.agents
        assert (await http.get("/v1/savings")).json() == after


async def test_days_that_are_too_long_ago_are_forgotten(folder: Path) -> None:
    async with open_house(folder) as (at, web, http):
        await make(http, "a")
        (await http.post("/v1/agents/a/turns", json=TURN)).raise_for_status()
        at.clock.ahead += 500 * 86_400
        await at.agents.tend()
        assert (await http.get("/v1/savings")).json()["days"] == []
        await at.again(clean=True)
        web.app.state.attribution.agents = at.agents
        answer = (await http.get("/v1/savings")).json()
        assert answer["days"] == [] and answer["total"]["requests"] == 1


async def test_a_listening_client_keeps_no_model_loaded(folder: Path) -> None:
    async with open_house(folder) as (_, web, http), listening(http) as stream:
        await stream.snapshot()
        assert web.app.state.models is not None
        (model,) = web.app.state.models.models
        assert model.loaded is not None and model.loaded.users == 0
