"""The page and the API's description: static files of the room `web`, and headers that let nothing else in.

The files hold nothing of the server, so they need no key; everything that they show is asked for with one. They are
read when they are first wanted.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cairn.api.admin import health
from cairn.api.admin.health import ServerHealth
from cairn.api.http.call import NOSNIFF, Headers, HTTPCall
from cairn.api.http.routes import Route
from cairn.config.config import Config

FOLDER = Path(__file__).parent.parent / "web"
KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    b"trusted-types 'none'"
)
"""The content security policy: scripts and styles come from here alone, never from a document, and no text can
become a script or HTML."""
HEADERS: Headers = [
    (b"content-security-policy", POLICY),
    NOSNIFF,
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    (b"cache-control", b"no-cache"),
]
"""Headers of every file. Browsers ask for it each time, and get it again if it has changed."""
DOCS = ("docs.html", "docs.js")
"""The files of /docs alone."""
COMMON = ("style.css", "icon.svg", "api.js", "dom.js")
"""The files of both."""
PAGE_HTML = "index.html"


class _PageFile(NamedTuple):
    data: bytes
    kind: bytes
    tag: bytes


class Page:
    """The routes. `described` returns /openapi.json."""

    def __init__(self, config: Config, described: Callable[[], bytes]) -> None:
        self._page, self._docs, self._described = config.page, config.docs, described
        self._openapi = b""

    def routes(self) -> list[Route]:
        """Return the table of these routes, without those that are switched off."""
        found: list[Route] = []
        if self._page:
            found.append(Route("GET", "/", self.root, access="open", always=True))
        if self._docs:
            found.append(Route("GET", "/docs", self.docs, access="open", always=True))
            found.append(Route("GET", "/openapi.json", self.openapi, always=True))
        for path in sorted(FOLDER.iterdir()) if self._page or self._docs else ():
            if path.suffix in KINDS and self._wanted(path.name):
                send = functools.partial(_send, path.name)
                found.append(Route("GET", f"/web/{path.name}", send, access="open", always=True, listed=False))
        return found

    def _wanted(self, name: str) -> bool:
        if name in DOCS:
            return self._docs
        return self._page or name in COMMON

    async def root(self, call: HTTPCall, state: ServerHealth) -> None:
        """Return the page to browsers, and to all others what clients of Ollama know a server by."""
        call.headers.append((b"vary", b"accept"))
        if b"text/html" in (call.header(b"accept") or b""):
            await _send(PAGE_HTML, call, state)
        else:
            await health.root(call, state)

    async def docs(self, call: HTTPCall, state: ServerHealth) -> None:
        """Return the API's description for people."""
        await _send(DOCS[0], call, state)

    async def openapi(self, call: HTTPCall, state: ServerHealth) -> None:
        """Return every route and what its body may hold, from the types that check it."""
        if not self._openapi:
            self._openapi = self._described()
        await call.respond(200, self._openapi, [(b"content-type", b"application/json")])


async def _send(name: str, call: HTTPCall, state: ServerHealth) -> None:
    """Send a file of the page."""
    file = _file(name)
    headers = [*HEADERS, (b"content-type", file.kind), (b"etag", file.tag)]
    if call.header(b"if-none-match") == file.tag:
        await call.respond(304, b"", headers)
    else:
        await call.respond(200, file.data, headers)


@functools.cache
def _file(name: str) -> _PageFile:
    path = FOLDER / name
    data = path.read_bytes()
    return _PageFile(data, KINDS[path.suffix], b'"%b"' % hashlib.sha256(data).hexdigest()[:32].encode())
