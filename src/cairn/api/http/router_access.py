"""The servers' checks of Host and Origin, for a router: it writes another Host, so that servers cannot check it."""

from __future__ import annotations

from cairn.api.http.auth import Access, preflight
from cairn.api.http.body import check_origin
from cairn.api.http.call import BodyBudget, HTTPCall
from cairn.cluster.router.calls import PLAIN, Admission, Message, Receive, Send
from cairn.config.config import Config
from cairn.types.errors import Forbidden

_NO_BODIES = BodyBudget(0, 0)


class RouterAccess:
    """The rules by which a router admits calls: those of a server with the same options."""

    def __init__(self, config: Config) -> None:
        self._access = Access(config)
        self._cors = bool(config.cors_origins)

    def __call__(self, scope: Message, receive: Receive, send: Send) -> Admission:
        """Return what a call may do. Raise InvalidRequest or Forbidden for a Host that is not the router's."""
        if not self._cors and all(name != b"origin" for name, _ in scope["headers"]):
            self._access.check_host(scope)
            return PLAIN
        call = HTTPCall(scope, receive, send, 0, _NO_BODIES)
        self._access.cors(call)
        if self._access.is_preflight(call):
            return Admission(preflight=[*preflight(call), *call.headers])
        self._access.check_host(scope)
        try:
            check_origin(call)
        except Forbidden as error:
            return Admission(call.headers, foreign=str(error))
        return Admission(call.headers, vouched=True)
