"""Lists that the router merges from all replicas."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from cairn.cluster.router.app import RouterApp
from tests.cluster.router.stubs import Answer, Stub, as_json, ask, routed


def lister(items: list[dict[str, Any]], *, cursor: bool = True, **more: Any) -> Answer:
    """Return the handler of a replica that lists its items, newest first, at most 3 a page."""

    async def answer(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = dict(parse_qsl(urlsplit(path).query))
        rest, size = items, min(3, int(asked.get("limit", 20)))
        if after := asked.get("after", "").rpartition(":")[2]:
            ids = [item["id"] for item in items]
            if after not in ids:
                await as_json(writer, {"error": {"message": "there is no such item"}}, 404)
                return
            rest = items[ids.index(after) + 1 :]
        page, cut = rest[:size], len(rest) > size
        listing: dict[str, Any] = {"object": "list", "data": page, "has_more": cut, **more}
        if cursor:
            listing["next"] = f"{page[-1]['created']!r}:{page[-1]['id']}" if cut else None
        else:
            listing |= {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        await as_json(writer, listing)

    return answer


def made(prefix: str, *times: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"{prefix}{time}", "created": float(time), **more} for time in sorted(times, reverse=True)]


async def ids(app: RouterApp, path: str, limit: int) -> list[str]:
    """Return the ids of a list, read page by page."""
    listed: list[str] = []
    after = ""
    for _ in range(50):
        page = (await ask(app, "GET", f"{path}?limit={limit}{after}")).json()
        assert len(page["data"]) <= limit
        listed += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            return listed
        after = f"&after={page.get('next') or page['last_id']}"
    raise AssertionError("the list has no end")


@pytest.mark.parametrize("cursor", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
async def test_a_list_has_the_items_of_all_replicas_in_order(limit: int, cursor: bool) -> None:
    lists = [made("a", 1, 4, 7, 10, 13, 16), made("b", 2, 5), made("c", 9)]
    wanted = [one["id"] for one in sorted((one for part in lists for one in part), key=lambda one: -one["created"])]
    async with routed(*(lister(one, cursor=cursor) for one in lists)) as (app, _):
        assert await ids(app, "/v1/agents", limit) == wanted


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
