"""/openapi.json: the routes by OpenAPI 3.1, with bodies from the very types that check them.

What a method does is its endpoint's docstring. Fields that are accepted and have no effect (`fields.py`) are not among
those of a body; docs/clients.md lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from cairn import __version__
from cairn.api.agent_schemas import CreateBody, EvictBody, ForkBody, NoBody, ResumeBody, RollbackBody, TurnBody
from cairn.api.anthropic_schemas import MessagesBody
from cairn.api.auth import ADMIN, OPEN
from cairn.api.conversations import ConversationBody, ItemsBody
from cairn.api.llama_schemas import InfillBody, LlamaCompletionBody
from cairn.api.model_admin import DrainBody, LoadBody, SwapBody, UnloadBody
from cairn.api.ollama_schemas import (
    CopyBody,
    NameBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from cairn.api.responses_schemas import ResponseBody
from cairn.api.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TextsBody,
    TokenizeBody,
)

REF = "#/components/schemas/{model}"
FILE = "application/octet-stream"
_SAMPLES = {"/v1/responses/": "resp_0", "/v1/conversations/": "conv_0"}
"""An id of a form that these routes know."""

ROUTES: Mapping[str, type[Body] | None] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/responses/input_tokens": ResponseBody,
    "/v1/responses/compact": ResponseBody,
    "/v1/responses/{id}": None,
    "/v1/responses/{id}/cancel": NoBody,
    "/v1/responses/{id}/input_items": None,
    "/v1/conversations": ConversationBody,
    "/v1/conversations/{id}": ConversationBody,
    "/v1/conversations/{id}/items": ItemsBody,
    "/v1/conversations/{id}/items/{item}": None,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/models": None,
    "/v1/models/{id}": None,
    "/v1/embeddings": EmbeddingBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/v1/reranking": RerankBody,
    "/v1/score": ScoreBody,
    "/v1/agents": CreateBody,
    "/v1/agents/import": None,
    "/v1/agents/{id}": None,
    "/v1/agents/{id}/turns": TurnBody,
    "/v1/agents/{id}/resume": ResumeBody,
    "/v1/agents/{id}/fork": ForkBody,
    "/v1/agents/{id}/rollback": RollbackBody,
    "/v1/agents/{id}/pin": NoBody,
    "/v1/agents/{id}/unpin": NoBody,
    "/v1/agents/{id}/prefetch": NoBody,
    "/v1/agents/{id}/evict": EvictBody,
    "/v1/agents/{id}/export": None,
    "/v1/requests/{id}": None,
    "/v1/requests/{id}/cancel": NoBody,
    "/v1/requests/{id}/events": None,
    "/v1/events": None,
    "/v1/savings": None,
    "/v1/admin/models": None,
    "/v1/admin/models/load": LoadBody,
    "/v1/admin/models/unload": UnloadBody,
    "/v1/admin/models/swap": SwapBody,
    "/v1/admin/drain": DrainBody,
    "/v1/models/load": LoadBody,
    "/v1/models/unload": UnloadBody,
    "/v1/cache": None,
    "/v1/cache/flush": NoBody,
    "/v1/cache/scrub": NoBody,
    "/v1/cache/prune": NoBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbeddingsBody,
    "/api/tags": None,
    "/api/ps": None,
    "/api/version": None,
    "/api/show": NameBody,
    "/api/pull": NameBody,
    "/api/delete": NameBody,
    "/api/copy": CopyBody,
    "/embed": TextsBody,
    "/completion": LlamaCompletionBody,
    "/infill": InfillBody,
    "/apply-template": ChatBody,
    "/v1/chat/completions/input_tokens": ChatBody,
    "/slots": None,
    "/lora-adapters": None,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/props": None,
    "/metrics": None,
    "/": None,
    "/docs": None,
    "/openapi.json": None,
    "/health": None,
    "/v1/health": None,
    "/health/live": None,
    "/health/ready": None,
    "/health/startup": None,
    "/version": None,
}
"""Every route that is no file, and the body of what is sent to it."""
QUERIES: Mapping[str, tuple[str, ...]] = {
    "/v1/agents": ("limit", "after"),
    "/v1/agents/import": ("id",),
    "/v1/agents/{id}/turns": ("limit", "after"),
    "/v1/requests/{id}/events": ("after",),
    "/v1/responses/{id}": ("stream", "starting_after", "include"),
    "/v1/responses/{id}/input_items": ("limit", "order", "after"),
    "/v1/conversations/{id}/items": ("limit", "order", "after"),
}
"""Parameters in the URL of a GET, and of an import."""
STREAMS = frozenset({"/v1/events", "/v1/requests/{id}/events"})


def document(described: Callable[[str], Mapping[str, str]]) -> bytes:
    """The whole document. `described(path)`: what each method of a route does; nothing for what is not served."""
    kinds = list(dict.fromkeys(kind for kind in ROUTES.values() if kind is not None))
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    paths: dict[str, Any] = {}
    for path, kind in ROUTES.items():
        methods = described(_sample(path))
        if methods:
            paths[path] = {method.lower(): _operation(path, method, text, kind) for method, text in methods.items()}
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": "Cairn",
            "version": __version__,
            "description": "An LLM server for agents. Errors are OpenAI's: {error: {message, type, param, code}}.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name} for name in dict.fromkeys(_tag(path) for path in paths)],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, on a server with keys."},
                "admin": {"type": "http", "scheme": "bearer", "description": "The admin key, on a server with keys."},
            },
        },
    }
    return msgspec.json.encode(found)


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _sample(path: str) -> str:
    """A path of this form."""
    for prefix, id in _SAMPLES.items():
        if path.startswith(prefix + "{"):
            path = path.replace("{id}", id)
    return re.sub(r"{\w+}", "0", path)


def _operation(path: str, method: str, text: str, kind: type[Body] | None) -> dict[str, Any]:
    first, _, rest = text.strip().partition("\n\n")
    said = re.sub(r"^[A-Z]+ /\S*?(?::|\.$|\.\s|,)\s*", "", " ".join(first.split()))
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "tags": [_tag(path)],
        "summary": said[:1].upper() + said[1:] if said else f"{method} {path}",
        "security": _security(path),
        "responses": _responses(path),
    }
    if rest:
        found["description"] = " ".join(rest.split())
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if method == "GET" or path not in ROUTES or kind is None:
        parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in QUERIES.get(path, ())]
    if parameters:
        found["parameters"] = parameters
    if method != "GET" and path == "/v1/agents/import":
        found["requestBody"] = {"required": True, "content": {FILE: {}}}
    elif (method == "POST" and kind is not None) or path == "/api/delete":
        assert kind is not None
        schema = {"$ref": REF.format(model=kind.__name__)}
        required = any(field.is_required() for field in kind.model_fields.values())
        found["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return found


def _responses(path: str) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "The answer."}
    if path in STREAMS:
        good["content"] = {"text/event-stream": {}}
    error = {"schema": {"$ref": REF.format(model="Error")}}
    return {"200": good, "default": {"description": "An error.", "content": {"application/json": error}}}


def _security(path: str) -> list[dict[str, list[str]]]:
    if path in OPEN:
        return []
    admin = any(path == route or path.startswith(f"{route}/") for route in ADMIN)
    return [{}, {"admin" if admin else "key": []}]


def _tag(path: str) -> str:
    """The part of the API that a path belongs to."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        return "Ollama"
    if parts[0] in ("v1", "v2") and len(parts) > 1:
        return _TAGS.get(parts[1], "OpenAI")
    return _TAGS.get(parts[0], "server")


_TAGS = {
    "agents": "agents",
    "requests": "requests",
    "events": "requests",
    "savings": "agents",
    "messages": "Anthropic",
    "cache": "stored KV",
    "health": "server",
    "embed": "OpenAI",
    "completion": "llama-server",
    "infill": "llama-server",
    "apply-template": "llama-server",
    "slots": "llama-server",
    "lora-adapters": "llama-server",
}
