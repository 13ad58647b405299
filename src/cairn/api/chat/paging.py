"""Lists of items as OpenAI's API has them, and the parameters in a URL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cairn.api.http.call import HTTPCall, query, shown
from cairn.types.errors import InvalidRequest, NotFound
from cairn.types.list_place import ListPlace

LISTED = 20
MOST_LISTED = 100


def page_of_items(call: HTTPCall, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the page of a list that the URL asks for, newest first unless `order` is asc. `items`: oldest first."""
    asked = parameters(call, ("limit", "order", "after", "before", "include", "include[]"))
    limit, order = asked.get("limit", str(LISTED)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_LISTED):
        raise InvalidRequest(f"limit must be 1 to {MOST_LISTED}", field="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    in_order = items if order == "asc" else items[::-1]
    return page(in_order, int(limit), asked.get("after"), before=asked.get("before"))


def page(
    items: Sequence[dict[str, Any]],
    limit: int,
    after: str | None,
    *,
    before: str | None = None,
    ascending: bool = False,
) -> dict[str, Any]:
    """Return the page of at most `limit` items after the item `after`, or of those just before the item `before`.

    `after` is an id, or a `ListPlace`, which also names an item that only another server has. Places are for items that
    have `created` and are sorted by it; `ascending`: the oldest first.
    """
    rest = items if after is None else _behind(items, after, ascending)
    if before is not None:
        ids = [item["id"] for item in rest]
        if before not in ids:
            raise NotFound(f"there is no item {shown(before)!r} here", field="before")
        rest = rest[: ids.index(before)]
    data = list(rest[:limit] if before is None else rest[-limit:])
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(rest) > limit, **ends}


def _behind(items: Sequence[dict[str, Any]], after: str, ascending: bool) -> Sequence[dict[str, Any]]:
    ids = [item["id"] for item in items]
    if after in ids:
        return items[ids.index(after) + 1 :]
    if (place := ListPlace.read(after)) is not None and all("created" in item for item in items):
        places = [ListPlace.of(item["created"], item["id"]) for item in items]
        return [item for item, own in zip(items, places, strict=True) if (own < place if ascending else own > place)]
    raise NotFound(f"there is no item {shown(after)!r} here", field="after")


async def page_by_id(
    created: Mapping[str, float],
    limit: int,
    after: str | None,
    show: Callable[[str], dict[str, Any]],
    refresh: Callable[[Sequence[str]], Awaitable[object]] | None = None,
) -> dict[str, Any]:
    """Return a part of a list. Only its items are made, by `show`, and others get their turn between them.

    `created`: the times at which the items of the list were made, in their order.
    `refresh` is given their ids before. An item that is deleted meanwhile is left out.
    """
    found = page([{"id": id, "created": time} for id, time in created.items()], limit, after)
    if refresh is not None:
        await refresh([item["id"] for item in found["data"]])
    data: list[dict[str, Any]] = []
    for item in found["data"]:
        with contextlib.suppress(NotFound):
            data.append(show(item["id"]))
        await asyncio.sleep(0)
    return found | {"data": data}


def parameters(call: HTTPCall, known: Sequence[str]) -> dict[str, str]:
    """Return the URL's parameters by name. Raises InvalidRequest for a name not in `known`."""
    found = {}
    for name, value in query(call):
        if name not in known:
            raise InvalidRequest(f"the parameters of this route are {', '.join(known)}", field=shown(name))
        found[name] = value
    return found
