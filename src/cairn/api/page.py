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
from cairn.api.admin.health import Answering, ServerHealth
from cairn.api.http.call import NOSNIFF, Headers, HTTPCall
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
"""Scripts and styles come from here alone and never stand in a document, and no text can become a script or HTML."""
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
"""Of every file. It is asked for each time and sent again where it has changed."""
DOCS = ("docs.html", "docs.js")
"""The files of /docs alone."""
COMMON = ("style.css", "icon.svg", "api.js", "dom.js")
"""What it has in common with the page."""
PAGE_HTML = "index.html"


class _PageFile(NamedTuple):
    data: bytes
    kind: bytes
    tag: bytes


class Page:
    """The routes. `described(path)` says what each method of a route does."""

    def __init__(self, config: Config, described: Callable[[str], dict[str, str]]) -> None:
        self._page, self._docs, self._described = config.page, config.docs, described
        self._openapi = b""

    def routes(self) -> dict[str, Answering]:
        """Every route, by path; none that is switched off."""
        found: dict[str, Answering] = {}
        if self._page or self._docs:
            names = [path.name for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS]
            wanted = [name for name in names if self._wanted(name)]
            found |= {f"/web/{name}": functools.partial(_send, name) for name in wanted}
        if self._page:
            found["/"] = self.root
        if self._docs:
            found |= {"/docs": self.docs, "/openapi.json": self.openapi}
        return found

    def _wanted(self, name: str) -> bool:
        if name in DOCS:
            return self._docs
        return self._page or name in COMMON

    async def root(self, call: HTTPCall, state: ServerHealth) -> None:
        """GET /: the page, for browsers; what clients of Ollama know a server by, for all others."""
        call.headers.append((b"vary", b"accept"))
        if b"text/html" in (call.header(b"accept") or b""):
            await _send(PAGE_HTML, call, state)
        else:
            await health.root(call, state)

    async def docs(self, call: HTTPCall, state: ServerHealth) -> None:
        """GET /docs: the API's description for people."""
        await _send(DOCS[0], call, state)

    async def openapi(self, call: HTTPCall, state: ServerHealth) -> None:
        """GET /openapi.json: every route and what its body may say, from the types that check it."""
        if not self._openapi:
            from cairn.api.openapi import document  # only for who asks

            self._openapi = document(self._described)
        await call.respond(200, self._openapi, [(b"content-type", b"application/json")])


async def _send(name: str, call: HTTPCall, state: ServerHealth) -> None:
    """A file of the page."""
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
