"""The servers' checks of Host and Origin, for a router: it writes another Host, so that servers cannot check it."""

from __future__ import annotations

from cairn.api.http.auth import Access, preflight
from cairn.api.http.body import check_origin
from cairn.api.http.call import AUTHORITY, BodyBudget, HTTPCall, shown
from cairn.cluster.router.calls import PLAIN, Message, Receive, RequestAccess, Send
from cairn.config.config import Config
from cairn.types.errors import Forbidden

MOST_ADMITTED = 1_000
"""Host headers that are remembered as admitted."""
_NO_BODIES = BodyBudget(0, 0)


class RouterAccess:
    """The rules by which a router admits calls: those of a server with the same options."""

    def __init__(self, config: Config) -> None:
        self._access = Access(config)
        self._cors = bool(config.cors_origins)
        self._admitted: set[tuple[bytes | None, object]] = set()
        """Host headers that passed, with the address that they came to: to read one again takes longer."""

    def __call__(self, scope: Message, receive: Receive, send: Send) -> RequestAccess:
        """Return what a call may do. Raise InvalidRequest or Forbidden for a Host that is not the router's."""
        host, web = None, self._cors
        for name, value in scope["headers"]:
            if name == b"host":
                host = value if host is None else b""  # two of them never pass
            elif name == b"origin":
                web = True
        if web:
            return self._page(scope, receive, send)
        known = host, scope.get("server")
        if known not in self._admitted or AUTHORITY in scope:
            self._access.check_host(scope)
            if len(self._admitted) < MOST_ADMITTED:
                self._admitted.add(known)
        return PLAIN

    def _page(self, scope: Message, receive: Receive, send: Send) -> RequestAccess:
        """Return what a web page may do, if it is one."""
        call = HTTPCall(scope, receive, send, 0, _NO_BODIES)
        self._access.cors(call)
        if self._access.is_preflight(call):
            return RequestAccess(preflight=[*preflight(call), *call.headers])
        self._access.check_host(scope)
        try:
            check_origin(call)
        except Forbidden:
            origin = shown((call.header(b"origin") or b"").decode("latin-1"))
            why = f"pages of {origin} may not change this router's servers; allow them with --cors-origins"
            return RequestAccess(call.headers, foreign=why)
        return RequestAccess(call.headers, vouched=True)
