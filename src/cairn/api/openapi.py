"""/openapi.json: the table of routes as OpenAPI 3.1, with bodies from the types that check them.

An operation's description is its endpoint's docstring. Fields that are accepted and ignored (`chat/fields.py`) are left
out of bodies; docs/clients.md lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from cairn import __version__
from cairn.api.http.routes import Route

REF = "#/components/schemas/{model}"
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


FILE = "application/octet-stream"
STREAM: Mapping[str, Any] = {"text/event-stream": {}}


def document(routes: Iterable[Route]) -> bytes:
    """Return the whole document: all `routes` that are listed."""
    listed = [route for route in routes if route.listed]
    kinds = list(dict.fromkeys(route.body for route in listed if route.body is not None))
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    paths: dict[str, Any] = {}
    for route in listed:
        paths.setdefault(route.public_path, {})[route.method.lower()] = _operation(route)
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": "Cairn",
            "version": __version__,
            "description": "An LLM server for agents. Errors are OpenAI's: {error: {message, type, param, code}}; "
            "Anthropic's and Ollama's routes have their own.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name} for name in dict.fromkeys(_tag(path) for path in paths)],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | dict(ERRORS),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, on a server with keys."},
                "admin": {"type": "http", "scheme": "bearer", "description": "The admin key, on a server with keys."},
            },
        },
    }
    return msgspec.json.encode(found)


def _operation(route: Route) -> dict[str, Any]:
    path = route.public_path
    text = " ".join((route.endpoint.__doc__ or "").split())
    summary, dot, rest = text.partition(". ")
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "tags": [_tag(path)],
        "summary": summary + "." if dot else summary,
        "security": [] if route.access == "open" else [{}, {route.access: []}],
        "responses": _responses(route),
    }
    if rest:
        found["description"] = rest
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query]
    if parameters:
        found["parameters"] = parameters
    if (body := _request_body(route)) is not None:
        found["requestBody"] = body
    return found


def _request_body(route: Route) -> dict[str, Any] | None:
    content: dict[str, Any] = {}
    required = True
    if route.upload:
        content[FILE] = {}
    if route.body is not None:
        required = any(field.is_required() for field in route.body.model_fields.values())
        content["application/json"] = {"schema": {"$ref": REF.format(model=route.body.__name__)}}
    if route.form is not None:
        content["multipart/form-data"] = {"schema": route.form}
    return {"required": required, "content": content} if content else None


def _responses(route: Route) -> dict[str, Any]:
    model = "AnthropicError" if route.path.startswith("/v1/messages") else "Error"
    model = "OllamaError" if route.path.startswith("/api/") else model
    error = {"schema": {"$ref": REF.format(model=model)}}
    good: dict[str, Any] = {"description": "The answer."}
    found = {
        str(route.status): good,
        "default": {"description": "An error.", "content": {"application/json": error}},
    }
    if route.stream and route.status == 200:
        good["content"] = STREAM
    elif route.stream:
        found["200"] = {"description": "Its progress.", "content": STREAM}
    return found


def _tag(path: str) -> str:
    """Return the part of the API that a path belongs to."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        return "Ollama"
    if parts[0] in ("v1", "v2") and len(parts) > 1:
        return _TAGS.get(parts[1], "OpenAI")
    return _TAGS.get(parts[0], "server")


_TAGS = {
    "agents": "agents",
    "teams": "teams",
    "workflows": "workflows",
    "collections": "collections",
    "admin": "administration",
    "requests": "requests",
    "events": "requests",
    "savings": "agents",
    "messages": "Anthropic",
    "cache": "administration",
    "health": "server",
    "embed": "OpenAI",
    "completion": "llama-server",
    "infill": "llama-server",
    "apply-template": "llama-server",
    "slots": "llama-server",
    "lora-adapters": "llama-server",
}
