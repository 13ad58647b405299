"""Lists over all replicas: agents, teams, runs, collections and files, each of which one replica may know alone.

Every replica is asked for all that it has, page by page, so an item's place does not depend on who has it. Items of one
id, which several replicas know, are one: the one with most turns or rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from cairn.cluster.router.calls import read_whole
from cairn.cluster.router.replicas import Replica
from cairn.cluster.router.upstream import UpstreamLost, request_bytes

LISTS = frozenset(
    ("/v1/agents", "/v1/teams", "/v1/workflows/runs", "/v1/collections", "/v1/files", "/v1/vector_stores")
)
LISTED, MOST_LISTED = 20, 100
"""Items of a page, if the request names no number, and at most."""
PAGE_SECONDS = 10.0
"""Longest time in which a replica must give one page of a list; else the list is made without it."""
MOST_PAGES = 50
"""Pages that one replica is asked for at most."""

Headers = Sequence[tuple[bytes, bytes]]


class ReplicaAnswer(NamedTuple):
    """The answer of a replica, read as a whole."""

    status: int
    body: bytes


class ListRefused(Exception):
    """A replica answered with an error, which is the client's answer."""

    def __init__(self, answer: ReplicaAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


async def fetch(replica: Replica, target: bytes, headers: Headers) -> ReplicaAnswer:
    """Get one path of a replica. Raise UpstreamLost, also if it takes longer than PAGE_SECONDS."""
    connection = None
    try:
        async with asyncio.timeout(PAGE_SECONDS):
            connection = await replica.pool.exchange(request_bytes("GET", target, replica.host, headers, b""))
            return ReplicaAnswer(connection.status, await read_whole(connection))
    except TimeoutError as error:
        what = f"a server did not answer {target.decode('latin-1')[:100]} in {PAGE_SECONDS:g} s"
        raise UpstreamLost(what, sent=True, cause="silent") from error
    finally:
        if connection is not None:
            replica.pool.give(connection)


async def merged_list(replicas: Sequence[Replica], path: str, query: bytes, headers: Headers) -> dict[str, Any]:
    """Return a page of the list over all replicas; those that go away meanwhile are left out.

    Raise ListRefused where a replica refuses the request, UpstreamLost if none answers.
    """
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    after, limit = asked.pop("after", ""), asked.pop("limit", "")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
        if limit:  # a replica says what is wrong with it
            raise ListRefused(
                await fetch(replicas[0], path.encode() + b"?" + urlencode({"limit": limit}).encode(), headers)
            )
        limit = str(LISTED)
    every = (_pages(one, path, asked, headers) for one in replicas)
    found = await asyncio.gather(*every, return_exceptions=True)
    lists: list[list[dict[str, Any]]] = []
    for one in found:
        if isinstance(one, list):
            lists.append(one)
        elif not isinstance(one, UpstreamLost):
            raise one
    if not lists:
        raise UpstreamLost("no replica answered", sent=True)
    ascending = asked.get("order") == "asc"
    items = {
        one["id"]: one for one in sorted(_items(lists), key=lambda one: one.get("turns") or one.get("rounds") or 0)
    }
    ordered = sorted(items.values(), key=lambda one: (_created(one) * (1 if ascending else -1), str(one["id"])))
    return _page([pages[0] for pages in lists], ordered, int(limit), after, ascending=ascending)


async def _pages(replica: Replica, path: str, asked: Mapping[str, str], headers: Headers) -> list[dict[str, Any]]:
    """Return all pages of a replica's list."""
    pages: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None and len(pages) < MOST_PAGES:
        query = {**asked, "limit": str(MOST_LISTED)} | ({"after": cursor} if cursor else {})
        answer = await fetch(replica, f"{path}?{urlencode(query)}".encode(), headers)
        if answer.status == 404 and cursor:  # deleted meanwhile
            break
        if answer.status != 200:
            raise ListRefused(answer)
        try:
            page = msgspec.json.decode(answer.body, type=dict[str, Any])
            pages.append(page)
            more = page.get("has_more") and page["data"]
            cursor = (page.get("next") or str(page["data"][-1]["id"])) if more else None
        except (msgspec.MsgspecError, LookupError, TypeError, UnicodeError):
            raise ListRefused(answer) from None
    return pages


def _items(lists: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    return (item for pages in lists for page in pages for item in page["data"])


def _created(item: Mapping[str, Any]) -> float:
    return float(item.get("created", item.get("created_at", 0)) or 0)


def _page(
    first: Sequence[Mapping[str, Any]], items: list[dict[str, Any]], limit: int, after: str, *, ascending: bool
) -> dict[str, Any]:
    """Return the page after an item, or after the place `created:id`, in the form of the replicas' own."""
    if after:
        ids = [str(one["id"]) for one in items]
        if after in ids:
            items = items[ids.index(after) + 1 :]
        else:
            created, _, id = after.rpartition(":")
            try:
                place = float(created) * (1 if ascending else -1), id
            except ValueError:
                items = []  # it is nowhere now
            else:
                items = [one for one in items if (_created(one) * (1 if ascending else -1), str(one["id"])) > place]
    data, more = items[:limit], len(items) > limit
    page = {**first[0], "data": data, "has_more": more}
    if "next" in page:
        page["next"] = f"{_created(data[-1])!r}:{data[-1]['id']}" if more else None
    for name, place_ in (("first_id", 0), ("last_id", -1)):
        if name in page:
            page[name] = data[place_]["id"] if data else None
    if isinstance(page.get("savings"), dict):
        page["savings"] = _summed([one.get("savings") or {} for one in first])
    return page


def _summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of numbers by name; anything else as the first part has it."""
    total = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            numbers = isinstance(value, int | float) and isinstance(total.get(name, 0), int | float)
            total[name] = total.get(name, 0) + value if numbers else total.get(name, value)
    return total
