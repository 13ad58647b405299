"""The router's application (ASGI 3): it passes requests on to replicas, and their answers back.

`failover.py` sends a request to another replica where the first one fails. Keys pass through: replicas check them.

    GET  /router/replicas        POST /router/drain?replica=URL      POST /router/undrain?replica=URL
                                 POST /router/add?replica=URL        POST /router/remove?replica=URL
    POST /router/restart         GET  /health/live                   GET  /health/ready
    GET  /metrics
"""

from __future__ import annotations

import asyncio
import hmac
import logging

import msgspec

from cairn.cluster.router.calls import (
    PLAIN,
    Admit,
    ClientLeft,
    Message,
    Receive,
    RequestAccess,
    Send,
    fail,
    read_body,
    replica_url,
    respond,
    with_headers,
)
from cairn.cluster.router.counts import Counts
from cairn.cluster.router.delivered import EVENT_END
from cairn.cluster.router.failover import AnsweredRequests, RoutedCall, RouterState
from cairn.cluster.router.lists import LISTS, ListRefused, merged_list
from cairn.cluster.router.losses import RequestLosses
from cairn.cluster.router.prefill import PrefillGate
from cairn.cluster.router.replicas import DRAIN_SECONDS, Replicas, Restart
from cairn.cluster.router.routed_request import read_request
from cairn.cluster.router.routing_options import Apart
from cairn.cluster.router.upstream import UpstreamLost
from cairn.system.interfaces import Rng
from cairn.types.errors import CairnError, ConfigError, Forbidden

log = logging.getLogger(__name__)


class RouterApp:
    """The application."""

    def __init__(
        self,
        replicas: Replicas,
        rng: Rng,
        admit: Admit,
        admin_key: str = "",
        restart: Restart | None = None,
        apart: Apart = "auto",
    ) -> None:
        """Route to `replicas`. `admin_key` is wanted for /router and /metrics; empty: they answer this machine.

        `admit` checks the Host and Origin of every call: replicas see another Host, so that they cannot.
        `restart` ends a replica that is started again; None where the router does not keep the replicas. `apart`: when
        prompts are computed by prefill replicas.
        """
        self.replicas, self.counts, self.gate = replicas, Counts(), PrefillGate(replicas, apart)
        self._shared = RouterState(replicas, self.counts, self.gate, AnsweredRequests(), RequestLosses(), rng)
        self._admit = admit
        self._restart, self._restarting = restart, asyncio.Lock()
        self._admin_key = admin_key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a call."""
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection is not served")
        try:
            access = self._admit(scope, receive, send)
        except CairnError as error:
            await fail(send, error.status, error.code, str(error))
            return
        if access is not PLAIN:
            if access.preflight is not None:
                await respond(with_headers(send, access.preflight), 200, b"")
                return
            if access.headers:
                send = with_headers(send, access.headers)
            if access.vouched:  # a replica would compare it with the Host that the router writes
                scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != b"origin"]}
        path = scope["path"]
        if path == "/metrics" or path.startswith(("/router/", "/health/")):
            await self._own(scope, path, send, access)
            return
        self.counts.requests += 1
        try:
            body = await read_body(receive)
            if scope["method"] == "GET" and path in LISTS:
                await self._list(scope, path, send)
                return
            request = await read_request(scope, body, by_kv=self.replicas.by_kv)
            await RoutedCall(self._shared, scope, receive, send, body, request).run()
        except (ClientLeft, asyncio.CancelledError):  # cancelled: the router ends, and has waited long enough
            return

    async def _list(self, scope: Message, path: str, send: Send) -> None:
        """Answer with a list over all replicas."""
        try:
            found = await merged_list(self.replicas.all, path, scope["query_string"], scope["headers"])
        except ListRefused as error:
            await respond(send, error.answer.status, error.answer.body)
        except UpstreamLost as error:
            self.counts.refused += 1
            await fail(send, 503, "unavailable", str(error), b"2")
        else:
            if found.missing:
                send = with_headers(send, [(b"x-cairn-warning", found.warning.encode())])
            await respond(send, 200, msgspec.json.encode(found.page))

    # ------------------------------------------------------------------------------------------------- its own paths

    async def _own(self, scope: Message, path: str, send: Send, access: RequestAccess) -> None:
        if path.startswith("/health/"):
            ready = path == "/health/live" or any(one.up for one in self.replicas.all)
            await respond(send, 200 if ready else 503, msgspec.json.encode(self._health(ready)))
            return
        if access.foreign and scope["method"] not in ("GET", "HEAD"):
            await fail(send, 403, Forbidden.code, access.foreign)
            return
        if not self._allowed(scope):
            await fail(send, 401, "invalid_api_key", "this route needs the admin key, in the header X-Cairn-Admin-Key")
            return
        if path == "/metrics":
            await respond(send, 200, self.counts.text(self.replicas, self.gate), b"text/plain; version=0.0.4")
        elif path == "/router/replicas" and scope["method"] == "GET":
            found = {"object": "list", "data": [one.described() for one in self.replicas.all]}
            await respond(send, 200, msgspec.json.encode(found))
        elif path == "/router/add" and scope["method"] == "POST":
            await self._add(scope, send)
        elif path in ("/router/drain", "/router/undrain", "/router/remove") and scope["method"] == "POST":
            await self._drain(scope, path, send)
        elif path == "/router/restart" and scope["method"] == "POST":
            await self._restart_all(send)
        else:
            await fail(send, 404, "not_found", f"{path[:100]} is no route of the router")

    async def _add(self, scope: Message, send: Send) -> None:
        try:
            replica = self.replicas.add(replica_url(scope))
        except ConfigError as error:
            await fail(send, 400, "invalid_value", str(error))
            return
        await self.replicas.check(replica)
        await respond(send, 200, msgspec.json.encode(replica.described()))

    def _health(self, ready: bool) -> dict[str, object]:
        """Return what /health says, with a server's fields: the replicas that are down are its troubles."""
        down = [f"{one.url} is down: {one.last_check}" for one in self.replicas.all if not one.up]
        reasons = [] if ready else ["no replica is up"]
        status = "ready" if ready else "no replica is up"
        return {"status": status, "role": "router", "reasons": reasons, "troubles": down if ready else []}

    async def _drain(self, scope: Message, path: str, send: Send) -> None:
        replica = self.replicas.find(replica_url(scope))
        if replica is None:
            known = ", ".join(one.url for one in self.replicas.all) or "those that were added; there is none"
            await fail(send, 404, "not_found", f"replica must be one of {known}")
            return
        if path == "/router/undrain":
            replica.draining, over = False, True
        elif path == "/router/remove":
            over = await self.replicas.remove(replica, DRAIN_SECONDS)
        else:
            over = await self.replicas.drain(replica, DRAIN_SECONDS)
        await respond(send, 200, msgspec.json.encode(replica.described() | {"drained": over and replica.draining}))

    async def _restart_all(self, send: Send) -> None:
        """Restart the replicas one after another; answer with an event for each."""
        if self._restart is None:
            await fail(send, 409, "conflict", "this router did not start its replicas; drain and restart each of them")
            return
        if self._restarting.locked():
            await fail(send, 409, "conflict", "the replicas are being restarted already")
            return
        async with self._restarting:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for replica, ready in self.replicas.restart(self._restart):
                event = b"data: " + msgspec.json.encode({"replica": replica.url, "ready": ready}) + EVENT_END
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]" + EVENT_END, "more_body": False})

    def _allowed(self, scope: Message) -> bool:
        if not self._admin_key:
            return (scope.get("client") or ("",))[0] in ("127.0.0.1", "::1")
        headers = dict(scope["headers"])
        given = headers.get(b"x-cairn-admin-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return hmac.compare_digest(given, self._admin_key)
