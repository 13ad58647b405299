"""What answers look like in /openapi.json: their status, their type, and errors in the form of each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REF = "#/components/schemas/{model}"
STREAMS = frozenset({"/v1/events", "/v1/requests/{id}/events"})
CREATED = frozenset(
    {
        "/v1/agents",
        "/v1/agents/import",
        "/v1/agents/{id}/fork",
        "/v1/teams",
        "/v1/teams/{id}/fork",
        "/v1/teams/{id}/messages",
        "/v1/collections",
        "/v1/collections/{id}/documents",
    }
)
"""Where a POST makes something that has an address of its own, or is kept: 201."""
PROGRESS = frozenset({"/v1/collections/{id}/documents"})
"""Where a POST of those may be asked for a stream of its progress: 200."""

_TEXT = {"type": "string"}
_PERHAPS = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


ERRORS: Mapping[str, Any] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_PERHAPS, code=_PERHAPS)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
    "OllamaError": _object(error=_TEXT),
}
"""The forms of errors."""


def responses(method: str, path: str) -> dict[str, Any]:
    """The answers of a method of a route."""
    good: dict[str, Any] = {"description": "The answer."}
    if path in STREAMS:
        good["content"] = {"text/event-stream": {}}
    model = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    model = "OllamaError" if path.startswith("/api/") else model
    error = {"schema": {"$ref": REF.format(model=model)}}
    status = "201" if method == "POST" and path in CREATED else "200"
    found = {status: good, "default": {"description": "An error.", "content": {"application/json": error}}}
    if method == "POST" and path in PROGRESS:
        found["200"] = {"description": "Its progress.", "content": {"text/event-stream": {}}}
    return found
