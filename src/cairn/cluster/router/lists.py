"""Lists over all replicas: agents, teams, runs, collections and files, each of which one replica may know alone.

All replicas list in one order: the newest first, and those of one time by their ids. So a page needs one page of each
replica, after the same place (`ListPlace`); an item that one replica has is a place at all of them. Items of one id,
which several replicas know, are one: the one with most turns or rounds. A replica that fails is left out, and named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from cairn.cluster.router.replicas import Replica
from cairn.cluster.router.upstream import UpstreamLost, request_bytes
from cairn.types.list_place import ListPlace


class ListLimits(NamedTuple):
    """How many items a page of a list has."""

    usual: int = 20
    most: int = 100


LISTS: Mapping[str, ListLimits] = {
    "/v1/agents": ListLimits(),
    "/v1/teams": ListLimits(),
    "/v1/workflows/runs": ListLimits(),
    "/v1/collections": ListLimits(),
    "/v1/vector_stores": ListLimits(),
    "/v1/files": ListLimits(10_000, 10_000),
}
"""The lists, and the limits that servers have for each."""
PAGE_SECONDS = 10.0
"""How long a replica may take for a page."""
MOST_BYTES = 64 << 20
"""Longest page of one replica: 100 teams of long members have some MB."""
INLINE = 1 << 18
"""Bytes of pages that are merged on the event loop, in some 2 ms; longer ones on a thread."""
EMPTY_PAGES = 3
"""Times that a replica is asked for a page whose items were all deleted while it was made."""
MOST_NAMED = 8
"""Replicas that a warning names."""

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


class MergedList(NamedTuple):
    """A page over all replicas."""

    page: dict[str, Any]
    missing: list[str]
    """The replicas whose items are not in it, and why."""

    @property
    def warning(self) -> str:
        """Text of the warning header; empty if nothing is missing."""
        if not self.missing:
            return ""
        more = len(self.missing) - MOST_NAMED
        said = "; ".join(self.missing[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return "the list lacks the items of " + "".join(char if " " <= char <= "~" else "?" for char in said)


async def fetch(replica: Replica, target: bytes, headers: Headers) -> ReplicaAnswer:
    """Get one path of a replica. Raise UpstreamLost, also for one that fails (5xx) or takes too long."""
    try:
        async with asyncio.timeout(PAGE_SECONDS):
            connection = await replica.pool.exchange(request_bytes("GET", target, replica.host, headers, b""))
            try:
                body = bytearray()
                while data := await connection.read():
                    body += data
                    if len(body) > MOST_BYTES:
                        raise UpstreamLost(f"it sent more than {MOST_BYTES >> 20} MiB", sent=True)
            finally:
                replica.pool.give(connection)
    except TimeoutError:
        path = target.partition(b"?")[0].decode("latin-1")[:100]
        raise UpstreamLost(f"it did not answer {path} in {PAGE_SECONDS:g} s", sent=True, cause="silent") from None
    if connection.status >= 500:
        raise UpstreamLost(f"it answered {connection.status}", sent=True)
    return ReplicaAnswer(connection.status, bytes(body))


async def merged_list(every: Sequence[Replica], path: str, query: bytes, headers: Headers) -> MergedList:
    """Return a page of the list over all replicas; those that are down or fail are left out.

    Raise ListRefused where a replica refuses the request, UpstreamLost if none answers.
    """
    replicas = [one for one in every if one.up]
    if not replicas:
        raise UpstreamLost("no server is up; ask again shortly", sent=False)
    limits = LISTS[path]
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    limit = asked.setdefault("limit", str(limits.usual))
    if after := asked.get("after", ""):
        asked["after"] = await _place_of(replicas, path, after, headers)
    target = f"{path}?{urlencode(asked)}".encode()
    found = await asyncio.gather(*(_page_of(one, target, headers) for one in replicas), return_exceptions=True)
    answers, missing = list[ReplicaAnswer](), [f"{one.url}: it is down" for one in every if not one.up]
    for replica, answer in zip(replicas, found, strict=True):
        if isinstance(answer, UpstreamLost):
            missing.append(f"{replica.url}: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        elif answer.status != 200:
            raise ListRefused(answer)
        else:
            answers.append(answer)
    if not answers:
        raise UpstreamLost("no replica answered: " + "; ".join(missing), sent=True)
    count = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= len(str(limits.most)) else limits.usual
    merge = partial(_merged, answers, min(count, limits.most), ascending=asked.get("order") == "asc")
    large = sum(len(one.body) for one in answers) > INLINE
    return MergedList(await asyncio.to_thread(merge) if large else merge(), missing)


async def _place_of(replicas: Sequence[Replica], path: str, after: str, headers: Headers) -> str:
    """Return the place that `after` names: one, or the id of an item, which one replica may know alone.

    Raise ListRefused if none knows it, UpstreamLost if none answers.
    """
    if ListPlace.read(after) is not None:
        return after
    target = f"{path}/{quote(after, safe='')}".encode()
    found = await asyncio.gather(*(fetch(one, target, headers) for one in replicas), return_exceptions=True)
    refused = None
    for answer in found:
        if isinstance(answer, ReplicaAnswer):
            item = _decoded(answer) if answer.status == 200 else {}
            if item.get("id") == after:
                return str(_place(item))
            refused = refused or answer
        elif not isinstance(answer, UpstreamLost):
            raise answer
    if refused is None:
        raise UpstreamLost("no replica answered", sent=True)
    raise ListRefused(refused)


async def _page_of(replica: Replica, target: bytes, headers: Headers) -> ReplicaAnswer:
    """Return a replica's page. It says that there is more only if it has an item."""
    for _ in range(EMPTY_PAGES):
        answer = await fetch(replica, target, headers)
        if answer.status != 200 or b'"has_more":true' not in answer.body or b'"data":[]' not in answer.body:
            break
    return answer


def _decoded(answer: ReplicaAnswer) -> dict[str, Any]:
    """Return the object in an answer. Raise ListRefused with the answer if there is none."""
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise ListRefused(answer) from None


def _place(item: Mapping[str, Any]) -> ListPlace:
    return ListPlace.of(float(item.get("created", item.get("created_at", 0)) or 0), str(item["id"]))


def _length(item: Mapping[str, Any]) -> float:
    """Return how far the item had come when a replica last saw it."""
    said = item.get("turns") or item.get("rounds")
    return said if isinstance(said, int | float) else 0.0


def _pages(answers: Sequence[ReplicaAnswer]) -> Iterator[dict[str, Any]]:
    """Yield the pages. Raise ListRefused with an answer that is no page."""
    for answer in answers:
        page = _decoded(answer)
        try:
            for item in page["data"]:
                _place(item)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise ListRefused(answer) from None
        yield page


def _merged(answers: Sequence[ReplicaAnswer], limit: int, *, ascending: bool) -> dict[str, Any]:
    """Return a page of the items that follow, in the form of the replicas' own pages."""
    pages = list(_pages(answers))
    every = (item for page in pages for item in page["data"])
    items = {str(item["id"]): item for item in sorted(every, key=_length)}
    ordered = sorted(items.values(), key=_place, reverse=ascending)
    cut = [_place(page["data"][-1]) for page in pages if page.get("has_more") and page["data"]]
    end = (max(cut) if ascending else min(cut)) if cut else None
    if end is not None:  # what a replica has behind its page may come before the items of others
        ordered = [item for item in ordered if (_place(item) >= end if ascending else _place(item) <= end)]
    data, more = ordered[:limit], len(ordered) > limit or end is not None
    merged = {**pages[0], "data": data, "has_more": more}
    if "next" in merged:
        last = _place(data[-1]) if data else end
        merged["next"] = str(last) if more else None
    for name, number in (("first_id", 0), ("last_id", -1)):
        if name in merged:
            merged[name] = data[number]["id"] if data else None
    if isinstance(merged.get("savings"), dict):
        merged["savings"] = _summed([page.get("savings") or {} for page in pages])
    return merged


def _summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of numbers by name; anything else as the first part has it."""
    total = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            numbers = isinstance(value, int | float) and isinstance(total.get(name, 0), int | float)
            total[name] = total.get(name, 0) + value if numbers else total.get(name, value)
    return total
