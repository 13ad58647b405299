"""The way of a request through the router: to a replica, to another one where that fails, and back to its client.

A request that found its replica gone is sent to another one, as long as its client has nothing of the answer and a
second computation changes nothing: each turn of an agent gets an Idempotency-Key, by which a replica knows it again.
A stream whose replica died in mid-answer goes on from another one, where that gives the same tokens (`delivered.py`).
A request that loses two replicas is an error: it may be what ended them (`losses.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cairn.cluster.router.calls import (
    ClientLeft,
    Message,
    Receive,
    Send,
    fail,
    read_whole,
    until_gone,
)
from cairn.cluster.router.counts import Counts
from cairn.cluster.router.delivered import EVENT_END, AnswersDiffer, Delivered, split
from cairn.cluster.router.losses import MOST_LOST, RequestLosses, request_digest
from cairn.cluster.router.prefill import PrefillGate
from cairn.cluster.router.replicas import Choice, Destination, Replica, Replicas
from cairn.cluster.router.routed_request import INLINE, RUN_HEADER, RUNS_PATH, RoutedRequest, last_part
from cairn.cluster.router.upstream import DROPPED, UpstreamConnection, UpstreamLost, request_bytes
from cairn.system.interfaces import Rng

log = logging.getLogger(__name__)

PATIENCE = 20.0
"""Seconds in which another replica is looked for, or a turn's last server is waited for."""
PAUSE = 0.2
WHOLE_BYTES = 4 << 20
"""Longest answer that is read as a whole before any of it is passed on."""
MOST_NAMES = 10_000
"""Requests whose replica is remembered, for those that ask for their events."""
LEAST_EXPECTED = 64
"""Fewest expected tokens for which a miss counts as stale."""
CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)": ?([0-9]{1,9})')
USAGE_BYTES = 4096
"""Bytes at the end of an answer in which its usage stands."""
ONCE = b"idempotency-key"
EVENTS = b"text/event-stream"
LOST = b'data: {"error":{"message":"the server that answered went away, and no other gives the same answer; send the \
request again","type":"server_error","param":null,"code":"unavailable"}}\n\n'


class AnsweredRequests:
    """The replicas that answered the newest requests, by the ids in their answers' headers."""

    def __init__(self) -> None:
        self._where: OrderedDict[bytes, Replica] = OrderedDict()

    def remember(self, headers: Sequence[tuple[bytes, bytes]], replica: Replica) -> None:
        """Remember which replica answered, by the ids in its answer's headers."""
        for name, value in headers:
            if name in (b"x-request-id", b"x-cairn-request-id", RUN_HEADER):
                self._where[last_part(value.decode("latin-1"))] = replica
                if len(self._where) > MOST_NAMES:
                    self._where.popitem(last=False)

    def replica_of(self, request: RoutedRequest) -> Replica | None:
        """Return the replica that has what a request is about, if this router passed its answer on."""
        for id in request.belongs_to:
            replica = self._where.get(id)
            if replica is not None and replica.up:
                return replica
        return None


@dataclass(frozen=True, slots=True)
class RouterState:
    """What all requests of a router share."""

    replicas: Replicas
    counts: Counts
    gate: PrefillGate
    answered: AnsweredRequests
    losses: RequestLosses
    rng: Rng


class RoutedCall:
    """One request on its way through the router, sent to other replicas where that is safe."""

    def __init__(
        self, shared: RouterState, scope: Message, receive: Receive, send: Send, body: bytes, request: RoutedRequest
    ) -> None:
        self._shared, self._send, self._body = shared, send, body
        self._replicas, self._counts = shared.replicas, shared.counts
        self._method: str = scope["method"]
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        query = scope["query_string"]
        self._target: bytes = scope.get("raw_path") or scope["path"].encode()
        if query:
            self._target += b"?" + query
        self._request = request
        self._given_headers = tuple(self._headers)
        self._digest = b""
        """What recognises the request when it is sent again; empty where nothing had to be compared."""
        self._lost_count = 0
        """How often a replica was lost that may have had it."""
        self._lost_last: Replica | None = None
        self._sent_at = 0.0
        if self._request.is_turn and ONCE not in dict(self._headers):
            self._headers.append((ONCE, f"router-{shared.rng.bits64():016x}{shared.rng.bits64():016x}".encode()))
        self._first = shared.answered.replica_of(self._request)
        self._wanted = Destination(request.key, not shared.replicas.by_kv or request.named, request.text)
        self._expected = 0
        """Tokens of the prompt that the replica is expected to have."""
        self._receive = receive
        self._apart = self._method == "POST"
        """Whether a prefill replica may still be asked for the prompt."""
        self._tried: list[Replica] = []
        self._end = time.monotonic() + PATIENCE
        self._sent_again = False
        """Whether a replica may have had the request before it went away."""
        self._started = False

    async def run(self) -> None:
        """Answer the client. Raise ClientLeft."""
        work = asyncio.ensure_future(self._answer())
        gone = asyncio.ensure_future(until_gone(self._receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientLeft
            work.result()
        finally:
            work.cancel()
            gone.cancel()

    async def _answer(self) -> None:
        losses, now = self._shared.losses, time.monotonic()
        if losses.compares(now) and losses.seconds_left(await self._recognise(), now):
            await self._refuse_harmful()
            return
        while True:
            choice = Choice(self._first) if self._first else self._replicas.choose(self._wanted, self._tried)
            self._first = None
            replica, self._expected = (None, 0) if choice is None else choice
            if replica is None:
                if time.monotonic() < self._end and (self._sent_again or self._tried):
                    await asyncio.sleep(PAUSE)
                    continue
                self._counts.refused += 1
                await fail(self._send, 503, "unavailable", "no server is up; ask again shortly", b"2")
                return
            if await self._try(replica):
                return
            self._counts.retries += 1
            await self._await_check(replica)

    async def _await_check(self, replica: Replica) -> None:
        """Wait until it is known whether a replica that was lost is down, if there is no other for the request."""
        if replica is self._lost_last and replica.up and not self._others(replica):
            await self._replicas.check(replica)
            await asyncio.sleep(PAUSE)

    def _others(self, replica: Replica) -> list[Replica]:
        """Return the replicas that are up and that the request was not sent to."""
        return [one for one in self._replicas.all if one.up and one not in self._tried and one is not replica]

    async def _try(self, replica: Replica) -> bool:
        """Pass the request to a replica and its answer to the client; return False to try another one."""
        replica.busy += 1
        replica.requests += 1
        connection = None
        self._sent_at = time.monotonic()
        try:
            if self._apart:
                self._apart = False
                gate, request = self._shared.gate, self._request
                lost = await gate.before(replica, request.key, request.path, self._headers, self._body)
                if lost is not None and await self._note_loss(lost):
                    await self._refuse_harmful()
                    return True
            connection = await self._exchange(replica)
            if await self._should_retry(replica, connection):
                return False
            if await self._pass_on(replica, connection) and self._digest:
                self._shared.losses.forget(self._digest)
            return True
        except UpstreamLost as error:
            return await self._lost(replica, error)
        finally:
            replica.busy -= 1
            if connection is not None:
                replica.pool.give(connection)

    async def _exchange(self, replica: Replica) -> UpstreamConnection:
        """Send the request and return the connection with the head of the answer."""
        self._sent_at = time.monotonic()
        data = request_bytes(self._method, self._target, replica.host, self._headers, self._body)
        connection = await replica.pool.exchange(
            data, head_only=self._method == "HEAD", repeatable=self._request.repeatable
        )
        self._sent_again |= connection.sent_before
        return connection

    async def _should_retry(self, replica: Replica, connection: UpstreamConnection) -> bool:
        """Return whether to try another replica, or again later, instead of answering with this."""
        status, now = connection.status, time.monotonic()
        others = self._others(replica)
        if status == 404 and self._request.on_one_replica and others:
            self._tried.append(replica)
            return True
        if status == 503 and self._request.repeatable and now < self._end and (others or self._sent_again):
            self._tried.append(replica)
            await asyncio.sleep(PAUSE if not others else 0)
            return True
        if status == 409 and (self._request.is_turn or self._request.is_work) and now < self._end:
            others = others if self._request.is_work else []
            if not (others or self._sent_again or self._replicas.lost_one_lately):
                return False
            body = await read_whole(connection)
            if b'"turn_running"' in body and (others or self._sent_again or self._replicas.lost_one_lately):
                # Another replica is at work on it, or was until it died. This one did nothing.
                if others:
                    self._tried.append(replica)
                await asyncio.sleep(0 if others else PAUSE)
                return True
            await self._respond(replica, connection, body)
            self._started = True
        return False

    async def _lost(self, replica: Replica, error: UpstreamLost) -> bool:
        """Take the loss of a replica; return False to try another one, True after an error to the client."""
        self._replicas.lost_connection(replica, error)
        self._tried.append(replica)
        self._lost_last = replica
        if not error.sent:
            if time.monotonic() < self._end or self._others(replica):
                return False
            self._counts.refused += 1
            await fail(self._send, 503, "unavailable", f"no server can be reached: {error}; ask again shortly", b"2")
            return True
        self._sent_again = True
        self._end = time.monotonic() + PATIENCE
        harmful = await self._note_loss(replica)
        if not self._request.repeatable:
            await fail(
                self._send,
                503,
                "unavailable",
                "the server went away while it had the request; look whether it was carried out before you repeat it",
            )
            return True
        if harmful:
            await self._refuse_harmful()
        return harmful

    async def _recognise(self) -> bytes:
        """Return the request's digest."""
        if not self._digest:
            given = self._method, self._target, self._given_headers, self._body
            long = len(self._body) > INLINE
            self._digest = await asyncio.to_thread(request_digest, *given) if long else request_digest(*given)
        return self._digest

    async def _note_loss(self, replica: Replica) -> bool:
        """Note that a replica was lost that may have had the request; return whether it has lost MOST_LOST."""
        digest = await self._recognise()
        self._lost_count += 1
        known = self._shared.losses.note(digest, replica, self._sent_at, time.monotonic())
        if max(known, self._lost_count) < MOST_LOST:
            return False
        log.error(
            "%s %s (%s) has lost %d servers, %s last; it may be what ends them, so it is not sent to another one",
            self._request.method,
            self._request.path[:100],
            digest.hex()[:8],
            max(known, self._lost_count),
            replica.url,
        )
        return True

    async def _refuse_harmful(self) -> None:
        """Answer that the request loses servers, and for how long it is refused."""
        self._counts.refused += 1
        seconds = math.ceil(self._shared.losses.seconds_left(await self._recognise(), time.monotonic()))
        message = (
            f"{self._request.method} {self._request.path[:100]}: {MOST_LOST} servers went away while they had this "
            f"request ({self._digest.hex()[:8]} in the router's log), so it is not sent to another one; find out from "
            "the servers' logs whether it ends them"
        )
        message += f"; it is taken again in {seconds} s" if seconds else ""
        await fail(self._send, 503, "servers_lost", message, b"%d" % seconds if seconds else b"")

    async def _pass_on(self, replica: Replica, connection: UpstreamConnection) -> bool:
        """Pass an answer on; return whether the client has all of it."""
        if self._started:  # answered already
            return True
        self._shared.answered.remember(connection.headers, replica)
        headers = dict(connection.headers)
        if headers.get(b"content-type", b"").startswith(EVENTS):
            return await self._stream(replica, connection)
        size = int(headers.get(b"content-length", b"-1"))
        if 0 <= size <= WHOLE_BYTES:
            body = b"" if self._method == "HEAD" else await read_whole(connection)
            self._check_expected(body)
            await self._respond(replica, connection, body)
            return True
        await self._start(replica, connection)
        try:
            while data := await connection.read():
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except UpstreamLost as error:  # the client sees that the answer was cut off
            self._replicas.lost_connection(replica, error)
            await self._note_loss(replica)
            self._counts.lost += 1
            raise ClientLeft from None
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    def _check_expected(self, answer: bytes) -> None:
        """Count a replica that had less than half of the prompt that it was expected to have, where it says so."""
        if self._expected >= LEAST_EXPECTED and (said := CACHED.search(answer, max(0, len(answer) - USAGE_BYTES))):
            self._replicas.index.stale += int(said[1]) < self._expected // 2

    async def _start(self, replica: Replica, connection: UpstreamConnection) -> None:
        headers = [one for one in connection.headers if one[0] not in DROPPED and one[0] != b"date"]
        headers.append((b"x-cairn-replica", replica.host.encode()))
        await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})

    async def _respond(self, replica: Replica, connection: UpstreamConnection, body: bytes) -> None:
        await self._start(replica, connection)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    # ----------------------------------------------------------------------------------------------------- streams

    async def _stream(self, replica: Replica, connection: UpstreamConnection) -> bool:
        """Pass a stream of events on, whole events only, and go on from other replicas where this one dies.

        Return False if it ended with an error that no server gave.
        """
        await self._start(replica, connection)
        delivered = Delivered()
        keep = self._request.followable and connection.status == 200
        try:
            rest = last = b""
            while data := await connection.read():
                data = rest + data if rest else data
                end = data.rfind(EVENT_END)
                if end < 0:
                    rest = data
                    continue
                end += len(EVENT_END)
                rest, data = data[end:], data[:end] if end < len(data) else data
                if keep:
                    delivered.add(data)
                last = data
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            await self._send({"type": "http.response.body", "body": rest, "more_body": False})
            self._check_expected(last)
            return True
        except UpstreamLost as error:
            self._replicas.lost_connection(replica, error)
            self._tried.append(replica)
            self._sent_again = True
            harmful = await self._note_loss(replica)
        run = self._request.run(dict(connection.headers))
        if not harmful and (
            (keep and delivered.whole and await self._follow(delivered)) or (run and await self._resume_run(run))
        ):
            self._counts.followed += 1
            return True
        self._counts.lost += 1
        await self._send({"type": "http.response.body", "body": LOST, "more_body": False})
        return False

    async def _follow(self, delivered: Delivered | None) -> bool:
        """Pass on the rest of a stream from other replicas; return False if none gives it.

        `delivered`: what the client has, to be cut off; None to pass on all.
        """
        self._end = time.monotonic() + PATIENCE
        if delivered is not None:
            await asyncio.to_thread(delivered.measure)
        while time.monotonic() < self._end:
            choice = self._replicas.choose(self._wanted, self._tried)
            if choice is None:
                await asyncio.sleep(PAUSE)
                continue
            replica = choice.replica
            connection = None
            replica.busy += 1
            try:
                connection = await self._exchange(replica)
                kind = dict(connection.headers).get(b"content-type", b"")
                if connection.status == 200 and kind.startswith(EVENTS):
                    await self._rest(delivered, connection)
                    return True
                if connection.status not in (409, 429, 503):
                    return False
                refusal = await read_whole(connection)
                if delivered is None and connection.status == 409 and await self._send_end_if_over(replica, refusal):
                    return True
                await asyncio.sleep(PAUSE)
            except UpstreamLost as error:
                self._replicas.lost_connection(replica, error)
                self._tried.append(replica)
                if error.sent:
                    await self._note_loss(replica)
                    return False
                await asyncio.sleep(0 if self._others(replica) else PAUSE)
            except AnswersDiffer:
                log.warning("%s gives another answer than the server that was lost; the stream ends", replica.url)
                return False
            finally:
                replica.busy -= 1
                if connection is not None:
                    replica.pool.give(connection)
        return False

    async def _resume_run(self, id: str) -> bool:
        """Let another replica go on with a run, and pass on its events; return False if none does.

        What was done is told again, after an event that says that the run was resumed.
        """
        self._method, self._body = "POST", b'{"stream":true}'
        self._target = f"{RUNS_PATH}/{id}/resume".encode()
        return await self._follow(None)

    async def _send_end_if_over(self, replica: Replica, refusal: bytes) -> bool:
        """Send the last event of a run that had ended before its replica died; return whether it had."""
        if b'"turn_running"' in refusal:
            return False
        connection = await replica.pool.exchange(
            request_bytes("GET", self._target.removesuffix(b"/resume"), replica.host, self._headers, b"")
        )
        try:
            run = msgspec.json.decode(await read_whole(connection), type=dict[str, Any])
        except msgspec.MsgspecError:
            return False
        finally:
            replica.pool.give(connection)
        if run.get("state") not in ("finished", "failed"):
            return False
        event = {name: run.get(name) for name in ("state", "result", "sources", "conflicts", "why")}
        data = b"data: " + msgspec.json.encode({"type": "run.done", **event, "why": event["why"] or ""}) + EVENT_END
        data += b"data: [DONE]" + EVENT_END
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        return True

    async def _rest(self, delivered: Delivered | None, connection: UpstreamConnection) -> None:
        rest = b""
        while data := await connection.read():
            data = rest + data
            end = data.rfind(EVENT_END) + len(EVENT_END) if EVENT_END in data else 0
            rest, data = data[end:], data[:end]
            news = data if delivered is None else b"".join(map(delivered.rest, split(data)))
            if news:
                await self._send({"type": "http.response.body", "body": news, "more_body": True})
        if delivered is not None:
            delivered.end()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
