"""The table of routes: one `Route` a method and path. Keys, limits, OpenAPI, traces and hints are read from it.

A path names its variable parts: `{id}` is one segment, `{id:resp_}` one that begins with `resp_`, `{id:*}` all that
follows, slashes included. A route without variable parts comes before any that has some.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from cairn.api.http.body import Body
from cairn.api.http.call import HTTPCall

Endpoint = Callable[[HTTPCall, Any], Awaitable[None]]
"""Answers a call; gets the model's `Service`, or the `ServerHealth` if its route is there `always`.

Its docstring is its description in /openapi.json, the first sentence the summary."""
Upload = Literal["", "file", "form"]
_VARIABLE = re.compile(r"{(\w+)(?::([^}]*))?}")


@dataclass(frozen=True, slots=True)
class Route:
    """A method of a path, with what the server and the API's description need to know of it."""

    method: str
    path: str
    endpoint: Endpoint
    body: type[Body] | None = None
    query: tuple[str, ...] = ()
    """Parameters in the URL."""
    access: Literal["open", "key", "admin"] = "key"
    model: Literal["", "chat", "embed", "rerank", "agent", "team", "run", "url"] = ""
    """The model to load. A kind means the one that the body names, else the first of that kind; `agent`, `team` and
    `run` mean the model of the one in the path; `url` means the loaded model that the URL names: such a route
    loads none. Empty: none, or the route finds its own."""
    always: bool = False
    """Whether it also answers while no model is loaded."""
    keeps: bool = False
    """Whether it adds to its tenant's bytes on the disk, which `max_disk_mib` limits."""
    upload: bool = False
    """Whether the body is a file, of at most `max_import_mib`."""
    form: Mapping[str, Any] | None = None
    """The schema of a form with a file, which it takes beside JSON or instead."""
    status: int = 200
    stream: bool = False
    """Whether it sends server-sent events. With a status of 201 that is a second answer, of 200."""
    listed: bool = True
    """Whether /openapi.json and traces name it."""

    @property
    def public_path(self) -> str:
        """The path as clients see it, such as /v1/responses/{id}."""
        return _public(self.path)


@cache
def _public(path: str) -> str:
    return _VARIABLE.sub(r"{\1}", path)


@dataclass(slots=True)
class _Node:
    """A place in the tree of segments."""

    methods: dict[str, Route] = field(default_factory=dict)
    literal: dict[str, _Node] = field(default_factory=dict)
    variable: dict[str, _Node] = field(default_factory=dict)
    """By the segment's prefix, or `*` for all that follows."""


class Router:
    """Finds routes by their paths."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._fixed: dict[str, dict[str, Route]] = {}
        self._root = _Node()
        for route in self.routes:
            methods = self._node(route.path).methods if "{" in route.path else self._fixed.setdefault(route.path, {})
            if methods.setdefault(route.method, route) is not route:
                raise ValueError(f"{route.method} {route.path} is in the table twice")

    def find(self, path: str) -> Mapping[str, Route] | None:
        """Return the routes of a path by method; None if there are none."""
        return self._fixed.get(path) or _find(self._root, path.split("/"), 0)

    def upload(self, path: str) -> Upload:
        """Return which kind of file may be sent to a path, as the body or in a form."""
        routes = (self.find(path) or {}).values()
        return "file" if any(one.upload for one in routes) else "form" if any(one.form for one in routes) else ""

    def _node(self, path: str) -> _Node:
        node = self._root
        for part in path.split("/"):
            variable = _VARIABLE.fullmatch(part)
            children, key = (node.literal, part) if variable is None else (node.variable, variable[2] or "")
            node = children.setdefault(key, _Node())
        return node


def _find(node: _Node, parts: list[str], at: int) -> dict[str, Route] | None:
    if at == len(parts):
        return node.methods or None
    part = parts[at]
    if (child := node.literal.get(part)) is not None and (found := _find(child, parts, at + 1)) is not None:
        return found
    for prefix, child in node.variable.items():
        if prefix == "*" and (part or at + 1 < len(parts)):
            return child.methods
        if part and part.startswith(prefix) and (found := _find(child, parts, at + 1)) is not None:
            return found
    return None
