"""/openapi.json: the routes by OpenAPI 3.1, with bodies from the very types that check them.

What a method does is its endpoint's docstring. Fields that are accepted and have no effect (`chat/fields.py`) are not
among those of a body; docs/clients.md lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from cairn import __version__
from cairn.api.admin.models import DrainBody, LoadBody, SwapBody, UnloadBody
from cairn.api.anthropic.schemas import MessagesBody
from cairn.api.chat.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from cairn.api.http.auth import ADMIN, OPEN
from cairn.api.http.body import Body
from cairn.api.llamacpp.schemas import InfillBody, LlamaCompletionBody
from cairn.api.native.agent_schemas import CreateBody, EvictBody, ForkBody, NoBody, ResumeBody, RollbackBody, TurnBody
from cairn.api.native.collection_schemas import AskCollectionBody, CollectionBody, CollectionDocumentBody, SearchBody
from cairn.api.native.team_schemas import (
    PostBody,
    RoundsBody,
    TeamBody,
    TeamForkBody,
    TeamRollbackBody,
    ToolResultsBody,
    VoteBody,
)
from cairn.api.native.workflows import RunResumeBody, WorkflowBody, WorkflowRunBody
from cairn.api.ollama.schemas import (
    CopyBody,
    NameBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from cairn.api.openai.conversations import ConversationBody, ItemsBody
from cairn.api.openai.embeddings import EmbeddingBody, LlamaEmbeddingBody, RerankBody, ScoreBody, TextsBody
from cairn.api.openai.responses_schemas import ResponseBody
from cairn.api.openai.vector_store_schemas import (
    AttachBody,
    AttributesBody,
    BatchBody,
    StoreSearchBody,
    VectorStoreBody,
    VectorStoreChangeBody,
)

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


FILE = "application/octet-stream"
FORMS: Mapping[str, Mapping[str, Any]] = {
    "/v1/files": {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
    },
    "/v1/collections/{id}/documents": {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            **{name: {"type": "string"} for name in ("id", "name", "type", "metadata", "embedding_model", "stream")},
        },
    },
}
"""Forms with a file that routes take, beside JSON or in its place."""
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
    "/v1/teams": TeamBody,
    "/v1/teams/{id}": None,
    "/v1/teams/{id}/rounds": RoundsBody,
    "/v1/teams/{id}/messages": PostBody,
    "/v1/teams/{id}/votes": VoteBody,
    "/v1/teams/{id}/tool_results": ToolResultsBody,
    "/v1/teams/{id}/interrupt": NoBody,
    "/v1/teams/{id}/transcript": None,
    "/v1/teams/{id}/fork": TeamForkBody,
    "/v1/teams/{id}/rollback": TeamRollbackBody,
    "/v1/workflows/check": WorkflowBody,
    "/v1/workflows/runs": WorkflowRunBody,
    "/v1/workflows/runs/{id}": None,
    "/v1/workflows/runs/{id}/resume": RunResumeBody,
    "/v1/workflows/runs/{id}/interrupt": NoBody,
    "/v1/workflows/runs/{id}/graph": None,
    "/v1/collections": CollectionBody,
    "/v1/collections/{id}": None,
    "/v1/collections/{id}/documents": CollectionDocumentBody,
    "/v1/collections/{id}/documents/{document}": None,
    "/v1/collections/{id}/search": SearchBody,
    "/v1/collections/{id}/ask": AskCollectionBody,
    "/v1/files": None,
    "/v1/files/{id}": None,
    "/v1/files/{id}/content": None,
    "/v1/vector_stores": VectorStoreBody,
    "/v1/vector_stores/{id}": VectorStoreChangeBody,
    "/v1/vector_stores/{id}/search": StoreSearchBody,
    "/v1/vector_stores/{id}/files": AttachBody,
    "/v1/vector_stores/{id}/files/{file}": AttributesBody,
    "/v1/vector_stores/{id}/files/{file}/content": None,
    "/v1/vector_stores/{id}/file_batches": BatchBody,
    "/v1/vector_stores/{id}/file_batches/{batch}": None,
    "/v1/vector_stores/{id}/file_batches/{batch}/cancel": NoBody,
    "/v1/vector_stores/{id}/file_batches/{batch}/files": None,
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
    "/v1/admin/reload": NoBody,
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
    "/embedding": LlamaEmbeddingBody,
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
    "/livez": None,
    "/readyz": None,
    "/version": None,
}
"""Every route that is no file, and the body of what is sent to it."""
QUERIES: Mapping[str, tuple[str, ...]] = {
    "/v1/agents": ("limit", "after"),
    "/v1/agents/import": ("id", "kv"),
    "/v1/agents/{id}/export": ("kv",),
    "/v1/agents/{id}/turns": ("limit", "after"),
    "/v1/requests/{id}/events": ("after",),
    "/v1/collections": ("limit", "after"),
    "/v1/collections/{id}/documents": ("limit", "after"),
    "/v1/files": ("limit", "order", "after", "purpose"),
    "/v1/vector_stores": ("limit", "order", "after"),
    "/v1/vector_stores/{id}/files": ("limit", "order", "after", "filter"),
    "/v1/vector_stores/{id}/file_batches/{batch}/files": ("limit", "order", "after", "filter"),
    "/v1/teams": ("limit", "after"),
    "/v1/teams/{id}/transcript": ("format", "member"),
    "/v1/workflows/runs": ("limit", "after"),
    "/v1/workflows/runs/{id}/graph": ("format",),
    "/v1/responses/{id}": ("stream", "starting_after", "include"),
    "/v1/responses/{id}/input_items": ("limit", "order", "after"),
    "/v1/conversations/{id}/items": ("limit", "order", "after"),
}
"""Parameters in the URL of a GET, and of an import."""
SUMMARIES: Mapping[str, str] = {
    "POST /v1/chat/completions": "The next message of a chat, whole or as it comes.",
    "POST /v1/completions": "What follows a text.",
    "POST /v1/responses": "A response, kept for the next one to go on from.",
    "POST /v1/responses/input_tokens": "How many tokens a response's input has.",
    "POST /v1/responses/compact": "A shorter conversation that says the same.",
    "DELETE /v1/responses/{id}": "Delete a response.",
    "GET /v1/responses/{id}/input_items": "The items that a response was asked with.",
    "POST /v1/conversations": "A new conversation.",
    "GET /v1/conversations/{id}": "A conversation.",
    "POST /v1/conversations/{id}": "Give a conversation other metadata.",
    "DELETE /v1/conversations/{id}": "Delete a conversation; its responses stay.",
    "GET /v1/conversations/{id}/items": "The items of a conversation.",
    "POST /v1/conversations/{id}/items": "More items for a conversation.",
    "GET /v1/conversations/{id}/items/{item}": "One item.",
    "DELETE /v1/conversations/{id}/items/{item}": "Remove an item.",
    "POST /v1/messages": "The next message of a chat, as Anthropic has it.",
    "POST /v1/messages/count_tokens": "How many tokens a chat has.",
    "GET /v1/models": "The models that are served.",
    "GET /v1/models/{id}": "One model.",
    "POST /v1/embeddings": "Vectors of texts.",
    "POST /v1/agents": "A new agent.",
    "GET /v1/agents": "The agents, most recently created first.",
    "POST /v1/agents/import": "An agent of an exported file.",
    "GET /v1/agents/{id}": "One agent, and where its KV lies.",
    "DELETE /v1/agents/{id}": "Delete an agent, with its text and its KV.",
    "GET /v1/agents/{id}/turns": "The turns of an agent, branches that were left included.",
    "POST /v1/agents/{id}/fork": "A new agent that shares the history up to a turn.",
    "POST /v1/agents/{id}/rollback": "Go back to a turn.",
    "POST /v1/agents/{id}/unpin": "Its KV may be evicted again.",
    "POST /v1/agents/{id}/evict": "Give up its KV in memory, with `disk` everywhere.",
    "GET /v1/agents/{id}/export": "An agent as one portable file.",
    "POST /v1/teams": "A new team.",
    "GET /v1/teams": "The teams, most recently created first.",
    "GET /v1/teams/{id}": "One team, where it stands, and its report.",
    "DELETE /v1/teams/{id}": "Delete a team, with its members' agents and all their text.",
    "POST /v1/teams/{id}/rounds": "A round, or several.",
    "POST /v1/teams/{id}/messages": "A message to all members, or with `to` a whisper.",
    "POST /v1/teams/{id}/votes": "A vote beside the rounds.",
    "POST /v1/teams/{id}/tool_results": "What members' tools returned.",
    "POST /v1/teams/{id}/interrupt": "Cut off what runs.",
    "GET /v1/teams/{id}/transcript": "What was said.",
    "POST /v1/teams/{id}/fork": "A new team that shares the history up to a round.",
    "POST /v1/teams/{id}/rollback": "Go back behind a round.",
    "POST /v1/workflows/check": "What is wrong with a workflow, or its order and its graph.",
    "POST /v1/workflows/runs": "A run of a workflow.",
    "GET /v1/workflows/runs": "The runs, most recently created first.",
    "GET /v1/workflows/runs/{id}": "The nodes of a run, and its result.",
    "DELETE /v1/workflows/runs/{id}": "Delete a run, with its text.",
    "POST /v1/workflows/runs/{id}/resume": "A run that was cut off goes on.",
    "POST /v1/workflows/runs/{id}/interrupt": "Cut off a run.",
    "GET /v1/workflows/runs/{id}/graph": "The graph of a run, coloured by how far each node is.",
    "POST /v1/collections": "A new collection of documents.",
    "GET /v1/collections": "The collections, most recently created first.",
    "GET /v1/collections/{id}": "One collection.",
    "DELETE /v1/collections/{id}": "Delete a collection, with its text.",
    "POST /v1/collections/{id}/documents": "Add a document.",
    "GET /v1/collections/{id}/documents": "The documents, in the order in which they were added.",
    "GET /v1/collections/{id}/documents/{document}": "One document.",
    "DELETE /v1/collections/{id}/documents/{document}": "Delete a document, with its text.",
    "POST /v1/collections/{id}/search": "The passages that fit a query best.",
    "POST /v1/collections/{id}/ask": "An answer from the passages that fit a question best.",
    "POST /v1/files": "Upload a file.",
    "GET /v1/files": "The files, the newest first.",
    "GET /v1/files/{id}": "One file.",
    "GET /v1/files/{id}/content": "The bytes of a file.",
    "DELETE /v1/files/{id}": "Delete a file, and what vector stores have of it.",
    "POST /v1/vector_stores": "A new vector store, which is a collection.",
    "GET /v1/vector_stores": "The vector stores, the newest first.",
    "GET /v1/vector_stores/{id}": "One vector store.",
    "POST /v1/vector_stores/{id}": "Give a vector store another name or other metadata.",
    "DELETE /v1/vector_stores/{id}": "Delete a vector store, with its text; files stay.",
    "POST /v1/vector_stores/{id}/search": "The passages that fit a query best.",
    "POST /v1/vector_stores/{id}/files": "Put a file into a vector store.",
    "GET /v1/vector_stores/{id}/files": "The files of a vector store.",
    "GET /v1/vector_stores/{id}/files/{file}": "One file of a vector store.",
    "POST /v1/vector_stores/{id}/files/{file}": "Give a file other attributes.",
    "DELETE /v1/vector_stores/{id}/files/{file}": "Take a file out of a vector store.",
    "GET /v1/vector_stores/{id}/files/{file}/content": "The text of a file.",
    "POST /v1/vector_stores/{id}/file_batches": "Put several files into a vector store.",
    "GET /v1/vector_stores/{id}/file_batches/{batch}": "How far several files are.",
    "POST /v1/vector_stores/{id}/file_batches/{batch}/cancel": "Leave out what is not read yet.",
    "GET /v1/vector_stores/{id}/file_batches/{batch}/files": "The files of a batch.",
    "GET /v1/admin/models": "All models, what they take and what is left.",
    "POST /v1/admin/models/load": "Load a model.",
    "POST /v1/admin/models/unload": "Unload a model.",
    "POST /v1/admin/models/swap": "Another model in the name of one.",
    "POST /v1/models/load": "Load a model, as llama-server has it.",
    "POST /v1/models/unload": "Unload a model, as llama-server has it.",
    "POST /v1/admin/drain": "No new requests from now on.",
    "GET /v1/requests/{id}": "The state of a request, and its text so far.",
    "POST /v1/requests/{id}/cancel": "End a request.",
    "GET /v1/events": "A stream of what changes.",
    "GET /v1/savings": "What was not computed again, in all and by day.",
    "POST /api/chat": "The next message of a chat, as Ollama has it.",
    "POST /api/generate": "What follows a text, as Ollama has it.",
    "POST /api/embed": "Vectors of texts.",
    "POST /api/embeddings": "The vector of a text.",
    "GET /api/version": "The version of Ollama whose API this is.",
    "POST /api/show": "A model.",
    "POST /api/pull": "Download a model for a server to come.",
    "DELETE /api/delete": "Delete a download that is not served.",
    "POST /completion": "What follows a text, as llama-server has it.",
    "POST /infill": "The middle of a text.",
    "POST /apply-template": "The prompt of a chat as a text.",
    "POST /v1/chat/completions/input_tokens": "How many tokens a chat's prompt has.",
    "GET /slots": "How many requests can run at once.",
    "GET /lora-adapters": "None: adapters are not built.",
    "POST /tokenize": "The tokens of a text or a chat.",
    "POST /detokenize": "The text of tokens.",
    "GET /props": "What is served, and what applies where a request says nothing.",
    "GET /metrics": "Figures in Prometheus' text format.",
    "GET /version": "The version of this server.",
}
"""What a method does in a few words, where its endpoint's docstring says something else, which is then told as well."""


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


def _sample(path: str) -> str:
    """A path of this form."""
    for prefix, id in _SAMPLES.items():
        if path.startswith(prefix + "{"):
            path = path.replace("{id}", id)
    return re.sub(r"{\w+}", "0", path)


def _operation(path: str, method: str, text: str, kind: type[Body] | None) -> dict[str, Any]:
    words = " ".join(text.split())
    said = re.sub(r"^[A-Z]+ /\S*?(?:[:;]|\.\Z|\.\s|,|\s)\s*", "", f"{words} ").strip()
    said = said[:1].upper() + said[1:]
    summary = SUMMARIES.get(f"{method} {path}", said.partition(". ")[0])
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "tags": [_tag(path)],
        "summary": summary,
        "security": _security(path),
        "responses": responses(method, path),
    }
    if said not in ("", summary):
        found["description"] = said
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
    if method == "POST" and path in FORMS:
        content = found.setdefault("requestBody", {"required": True, "content": {}})["content"]
        content["multipart/form-data"] = {"schema": FORMS[path]}
    return found


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
