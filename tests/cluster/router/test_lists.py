"""Lists that the router merges from all replicas."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from cairn.cluster.router import lists
from cairn.cluster.router.app import RouterApp
from tests.cluster.router.stubs import Answer, Stub, as_json, ask, head, routed


def lister(
    items: list[dict[str, Any]], *, cursor: bool = True, most: int = 100, time: str = "created", **more: Any
) -> Answer:
    """Return the handler of a replica that lists its items, the newest first, at most `most` a page.

    `cursor`: lists say `next`, as those of agents; else clients go on after an item's id. `time`: the field with an
    item's time.
    """

    def place(item: dict[str, Any]) -> tuple[float, str]:
        return -item[time], item["id"]

    async def answer(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(path)
        asked, shown = dict(parse_qsl(parts.query)), {item["id"]: item for item in items}
        if len(parts.path.split("/")) > 3:
            item = shown.get(parts.path.rpartition("/")[2])
            await as_json(writer, item or {"error": {"message": "there is no such item"}}, 200 if item else 404)
            return
        ascending = asked.get("order") == "asc"
        rest, size = sorted(items, key=place, reverse=ascending), min(most, int(asked.get("limit", 20)))
        created, mark, id = asked.get("after", "").rpartition(":")
        if mark:
            after = -float(created), id
            rest = [item for item in rest if (place(item) < after if ascending else place(item) > after)]
        elif id:
            await as_json(writer, {"error": {"message": "the router has to find the place"}}, 400)
            return
        page, cut = rest[:size], len(rest) > size
        listing: dict[str, Any] = {"object": "list", "data": page, "has_more": cut, **more}
        if cursor:
            listing["next"] = f"{page[-1][time]!r}:{page[-1]['id']}" if cut else None
        else:
            listing |= {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        await as_json(writer, listing)

    return answer


def made(prefix: str, *times: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"{prefix}{time}", "created": float(time), **more} for time in sorted(times, reverse=True)]


async def ids(app: RouterApp, path: str, limit: int, order: str = "") -> list[str]:
    """Return the ids of a list, read page by page."""
    listed: list[str] = []
    after = ""
    for _ in range(50):
        page = (await ask(app, "GET", f"{path}?limit={limit}{order}{after}")).json()
        assert len(page["data"]) <= limit
        listed += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            return listed
        after = f"&after={page.get('next') or page['last_id']}"
    raise AssertionError("the list has no end")


@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize("order", ["", "&order=asc"])
@pytest.mark.parametrize("cursor", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
async def test_a_list_has_the_items_of_all_replicas_in_order(limit: int, cursor: bool, order: str, most: int) -> None:
    held = [made("a", 1, 4, 7, 10, 13, 16), made("b", 2, 5, 7), made("c", 9), []]
    every = sorted((one for part in held for one in part), key=lambda one: (-one["created"], one["id"]))
    wanted = list(dict.fromkeys(one["id"] for one in every))
    async with routed(*(lister(one, cursor=cursor, most=most) for one in held)) as (app, _):
        assert await ids(app, "/v1/vector_stores", limit, order) == (wanted[::-1] if order else wanted)


async def test_a_page_costs_two_requests_of_a_replica_however_long_the_list_is() -> None:
    """6,000 agents: the pages after the five thousandth are there, too."""
    held = [made("a", *range(0, 12_000, 4)), made("b", *range(1, 12_000, 4))]
    async with routed(*map(lister, held)) as (app, stubs):
        page = (await ask(app, "GET", "/v1/agents?limit=100&after=a4000")).json()
        assert [item["id"] for item in page["data"][:2]] == ["b3997", "a3996"] and page["has_more"]
        assert [len(stub.asked) for stub in stubs] == [2, 2], "the item's place, and a page"
        page = (await ask(app, "GET", f"/v1/agents?limit=100&after={page['next']}")).json()
        assert len(page["data"]) == 100 and [len(stub.asked) for stub in stubs] == [3, 3]
        last = (await ask(app, "GET", "/v1/agents?limit=100&after=200.0:a200")).json()
        assert [item["id"] for item in last["data"][-2:]] == ["b1", "a0"] and not last["has_more"]


async def test_files_are_listed_as_far_as_a_server_lists_them() -> None:
    files = made("f", *range(300))
    async with routed(lister(files, most=10_000, cursor=False), lister([], cursor=False)) as (app, _):
        assert len((await ask(app, "GET", "/v1/files")).json()["data"]) == 300
        assert len((await ask(app, "GET", "/v1/files?limit=250")).json()["data"]) == 250
        assert len((await ask(app, "GET", "/v1/vector_stores?limit=30")).json()["data"]) == 30


async def test_replicas_that_fail_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "PAGE_SECONDS", 0.2)

    async def overloaded(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await as_json(writer, {"error": {"code": "overloaded"}}, 503)

    async def hangs(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async with routed(lister(made("a", 1, 2)), overloaded, hangs, lister(made("d", 3))) as (app, _):
        app.replicas.all[3].up = False
        for path in ("/v1/agents?limit=1", "/v1/agents?limit=1&after=9.0:x", "/v1/agents?limit=1&after=a2"):
            got = await ask(app, "GET", path)
            assert got.status == 200 and len(got.json()["data"]) == 1
            said = got.headers[b"x-cairn-warning"].decode()
            for number, why in ((1, "answered 503"), (2, "did not answer /v1/agents"), (3, "is down")):
                assert f"{app.replicas.all[number].url}: it {why}" in said
            assert app.replicas.all[0].url not in said
    async with routed(overloaded, overloaded) as (app, _):
        assert (await ask(app, "GET", "/v1/agents")).status == 503
        assert (await ask(app, "GET", "/v1/agents?after=a1")).status == 503
    async with routed(lister(made("a", 1))) as (app, _):
        assert b"x-cairn-warning" not in (await ask(app, "GET", "/v1/agents")).headers


NO_PAGES = (
    b"[]",
    b"{}",
    b'{"data":1}',
    b'{"data":[1]}',
    b'{"data":[{}]}',
    b'{"data":[{"id":1,"created":"x"}]}',
    b"[" * 9999,
)


@pytest.mark.parametrize("body", NO_PAGES)
async def test_an_answer_that_is_no_page_is_passed_on(body: bytes) -> None:
    async def answers(stub: Stub, path: str, headers: object, _: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "application/json", len(body)) + body)
        await writer.drain()

    async with routed(answers, lister(made("a", 1))) as (app, _):
        assert (await ask(app, "GET", "/v1/agents")).body == body


async def test_an_agent_that_several_replicas_know_is_listed_once_as_the_longest() -> None:
    old, new = made("a", 5, turns=1), made("a", 5, turns=3)
    for pair in ((old, new), (new, old)):
        async with routed(*map(lister, pair)) as (app, _):
            assert (await ask(app, "GET", "/v1/agents")).json()["data"] == new


async def test_savings_are_added_up_and_a_page_after_a_deleted_agent_goes_on() -> None:
    one = lister(made("a", 1, 3, 5), savings={"tokens": 2, "since": "x"})
    two = lister(made("b", 2, 4), savings={"tokens": 5, "since": "x"})
    async with routed(one, two) as (app, _):
        assert (await ask(app, "GET", "/v1/agents")).json()["savings"] == {"tokens": 7, "since": "x"}
        page = (await ask(app, "GET", "/v1/agents?after=4.0:b9")).json()
        assert [item["id"] for item in page["data"]] == ["a3", "b2", "a1"]


async def test_a_replica_that_goes_away_is_left_out_and_a_refusal_is_passed_on() -> None:
    async def refuses(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await as_json(writer, {"error": {"message": "no"}}, 401)

    async with routed(lister(made("a", 1)), lister(made("b", 2))) as (app, stubs):
        await stubs[1].die()
        assert [item["id"] for item in (await ask(app, "GET", "/v1/teams")).json()["data"]] == ["a1"]
        await stubs[0].die()
        assert (await ask(app, "GET", "/v1/teams")).status == 503
    async with routed(refuses, refuses) as (app, _):
        assert (await ask(app, "GET", "/v1/files")).status == 401
        assert (await ask(app, "GET", "/v1/files?limit=x")).status == 401
