"""A request that ends replicas, or seems to, is not sent to one after another; others notice nothing."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from cairn.cluster.router.losses import (
    MEMORY_SECONDS,
    MOST_REQUESTS,
    REFUSED_SECONDS,
    RequestLosses,
    request_digest,
)
from cairn.cluster.router.replicas import replica_of
from tests.cluster.router.stubs import Answer, Stub, as_json, ask, event, head, named, piece, routed, text_of

CHATS = "/v1/chat/completions"
POISON = {"messages": [{"role": "user", "content": "poison"}], "temperature": 0}
ONE, TWO, THREE = (replica_of(f"http://127.0.0.1:{port}") for port in (1, 2, 3))


def poisoned(dies: bool, after: bytes = b"") -> Answer:
    """Return a replica that loses the requests with POISON's text; with `dies` it ends by them."""

    async def answer(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if b"poison" not in body:
            await as_json(writer, {"by": stub.name})
            return
        if after:
            writer.write(head(200, "text/event-stream", None) + piece(after))
            await writer.drain()
            await asyncio.sleep(0.05)
        if dies:
            await stub.die()
        writer.transport.abort()

    return answer


def sent(stubs: list[Stub]) -> list[str]:
    """Return the names of the replicas that had POISON."""
    return [stub.name for stub in stubs if any(b"poison" in body for _, _, body in stub.asked)]


@pytest.mark.parametrize("dies", [False, True])
async def test_a_request_loses_two_replicas_at_most(dies: bool) -> None:
    async with routed(*[poisoned(dies)] * 4) as (app, stubs):
        poison = asyncio.create_task(ask(app, "POST", CHATS, POISON))
        others = [await ask(app, "GET", f"/v1/agents/a{number}") for number in range(40)]
        got = await poison
        others += [await ask(app, "GET", f"/v1/agents/a{number}") for number in range(40)]
        assert {one.status for one in others} == {200}, "nobody else notices"
        error = got.json()["error"]
        assert got.status == 503 and error["code"] == "servers_lost" and len(sent(stubs)) == 2
        assert error["message"].startswith(f"POST {CHATS}: 2 servers went away while they had this request")
        async with asyncio.timeout(60):  # both were checked as they were lost
            while sum(replica.up for replica in app.replicas.all) > (2 if dies else 4):
                await asyncio.sleep(0.01)
        for replica in app.replicas.all:
            await app.replicas.check(replica)
        assert sum(replica.up for replica in app.replicas.all) == (2 if dies else 4)

        again = await ask(app, "POST", CHATS, POISON)
        assert again.status == 503 and again.json()["error"]["code"] == "servers_lost" and len(sent(stubs)) == 2
        assert 1 <= int(again.headers[b"retry-after"]) <= REFUSED_SECONDS
        assert (await ask(app, "POST", CHATS, {"messages": []})).status == 200


async def test_a_stream_that_loses_two_replicas_is_not_begun_again() -> None:
    async with routed(*[poisoned(True, event("The", role="assistant"))] * 3) as (app, stubs):
        got = await ask(app, "POST", CHATS, POISON | {"stream": True})
        assert got.status == 200 and text_of(got) == "The" and b'"code":"unavailable"' in got.body
        again = await ask(app, "POST", CHATS, POISON | {"stream": True})
        assert again.json()["error"]["code"] == "servers_lost" and len(sent(stubs)) == 2


async def test_a_stream_does_not_go_on_if_its_request_lost_a_server_before() -> None:
    body = POISON | {"stream": True}
    async with routed(*[poisoned(True, event("The", role="assistant"))] * 3) as (app, stubs):
        digest, now = request_digest("POST", CHATS.encode(), (), json.dumps(body).encode()), time.monotonic()
        app._shared.losses.note(digest, TWO, now, now)
        got = await ask(app, "POST", CHATS, body)
        assert b'"code":"unavailable"' in got.body and len(sent(stubs)) == 1


async def test_a_replica_that_drops_a_request_stays_up_and_gets_it_again_where_it_is_alone() -> None:
    async with routed(named) as (app, stubs):
        app.replicas.all[0].pool.close()
        stubs[0].drops = 1
        got = await ask(app, "POST", CHATS, POISON)
        assert got.status == 200 and app.replicas.all[0].up and app.replicas.all[0].failures == 1


async def test_many_equal_requests_at_a_replica_that_dies_are_all_answered() -> None:
    first: list[Stub] = []

    async def answers(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        first.append(stub)
        if stub is first[0]:
            if sum(one is stub for one in first) == 6:  # more may be too many for one replica
                await stub.die()
            await asyncio.Event().wait()
        await as_json(writer, {"by": stub.name})

    async with routed(answers, answers, answers) as (app, _):
        app.replicas._routing = "names"
        hot = [(b"x-cairn-agent", b"ada")]
        got = await asyncio.gather(*(ask(app, "POST", CHATS, {"messages": []}, hot) for _ in range(24)))
        assert {one.status for one in got} == {200}
        assert (await ask(app, "POST", CHATS, {"messages": []}, hot)).status == 200


async def test_an_answer_ends_the_count() -> None:
    seen: list[str] = []

    async def answers(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        seen.append(stub.name)
        if len(seen) % 2:
            writer.transport.abort()
        await as_json(writer, {"by": stub.name})

    async with routed(answers, answers, answers) as (app, _):
        app.replicas._routing = "round-robin"
        for number in range(1, 7):
            for replica in app.replicas.all:
                replica.pool.close()
            assert (await ask(app, "POST", CHATS, POISON)).status == 200 and len(seen) == 2 * number
        assert len(set(seen[::2])) > 1, "several replicas lost it"


def test_requests_that_were_lost_together_count_once_and_each_further_loss_doubles_the_wait() -> None:
    losses, digest = RequestLosses(), b"d"
    assert not losses.compares(10.0) and losses.seconds_left(digest, 10.0) == 0.0
    assert [losses.note(digest, one, 9.0, 10.0) for one in (ONE, ONE, TWO, THREE)] == [1] * 4, "the power failed"
    assert losses.seconds_left(digest, 10.0) == 0.0
    assert losses.note(digest, TWO, 10.0, 20.0) == 2, "it was sent to this one after the first was lost"
    assert losses.compares(20.0) and losses.seconds_left(digest, 20.0) == REFUSED_SECONDS
    assert losses.seconds_left(digest, 20.0 + REFUSED_SECONDS) == 0.0, "it may be tried again"
    assert losses.note(digest, ONE, 100.0, 100.0) == 2, "it dropped the request and had not ended"
    ONE.starts += 1
    assert losses.note(digest, ONE, 100.0, 100.0) == 3
    assert losses.seconds_left(digest, 100.0) == 2 * REFUSED_SECONDS
    for _ in range(20):
        THREE.starts += 1
        losses.note(digest, THREE, 200.0, 200.0)
    assert losses.seconds_left(digest, 200.0) == MEMORY_SECONDS
    later = 201.0 + MEMORY_SECONDS
    assert losses.note(digest, ONE, later, later) == 1 and not losses.compares(later)
    losses.note(digest, TWO, later, later)
    losses.forget(digest)
    assert losses.seconds_left(digest, later) == 0.0 and losses.note(digest, ONE, later, later) == 1


def test_losses_are_remembered_of_so_many_requests() -> None:
    losses = RequestLosses()
    for number in range(MOST_REQUESTS + 5):
        losses.note(b"%d" % number, ONE, 0.0, 0.0)
    assert len(losses._known) == MOST_REQUESTS
    assert losses.note(b"0", TWO, 1.0, 1.0) == 1, "the oldest is forgotten"


def test_a_request_is_recognised_by_all_that_it_asks_and_by_who_asks() -> None:
    body, mine = json.dumps(POISON).encode(), [(b"authorization", b"Bearer a")]
    digest = request_digest("POST", b"/v1/x", mine, body)
    assert digest == request_digest("POST", b"/v1/x", [*mine, (b"idempotency-key", b"new")], body)
    others = [
        request_digest("PUT", b"/v1/x", mine, body),
        request_digest("POST", b"/v1/y", mine, body),
        request_digest("POST", b"/v1/x", [(b"authorization", b"Bearer b")], body),
        request_digest("POST", b"/v1/x", mine, body + b" "),
    ]
    assert len({digest, *others}) == 5
