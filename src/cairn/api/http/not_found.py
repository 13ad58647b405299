"""Answers to unknown paths: a hint, in the shape that the callers read.

Nothing here looks at what the server holds: a path is judged by its form alone, before a key is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cairn.api.http.call import error_body, shown
from cairn.types.errors import CairnError, ContextTooLong, NotFound

_BARE = re.compile(r"/(?:chat/completions|completions|models)(?:/.*)?|/(?:embeddings|rerank|reranking|score)")
_SLASHES = re.compile(r"/{2,}")
_DOUBLED = re.compile(r"(?:/v1)+(?=/v1(?:/|\Z))")
_ANTHROPIC = re.compile(r"/v1/messages(?:/.*)?|/v1/complete")
_OLLAMA = re.compile(r"/api(?:/.*)?")

_EMBEDDINGS = "POST {base}/embeddings makes vectors of texts"
_OLLAMA_USE = (
    "of Ollama's API there are /api/chat, generate, embed, embeddings, tags, show, ps, version, pull, delete and copy"
)
_RANKING = "POST {base}/rerank and {base}/score say how well texts go together"
_ELSEWHERE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r"/embed_all|/embed_sparse", _EMBEDDINGS),
        (r"/api/(?:push|create|blobs/.*)", "models are neither made nor uploaded here: cairn serve takes their files"),
        (r"/api(?:/.*)?", _OLLAMA_USE),
        (
            r"/v1/messages/.*|/v1/complete",
            "of Anthropic's API there are POST {base}/messages and {base}/messages/count_tokens",
        ),
        (r"/v1/responses/.*", "of OpenAI's Responses API there are POST {base}/responses and what is below a response"),
        (r"/v1/images(?:/.*)?", "images are neither made nor edited here: the model writes text"),
        (r"/v1/videos(?:/.*)?", "videos are not made here: the model writes text"),
        (
            r"/v1/(?:audio|realtime)(?:/.*)?",
            "speech is neither made nor understood here: the model reads and writes text",
        ),
        (r"/v1/moderations", "moderation is not built into this model"),
        (r"/pooling|/classify|/predict", _RANKING),
        (
            r"/v1/(?:uploads|batches|fine_tuning|evals|containers)(?:/.*)?",
            "this server runs no batches and no training; whole files go to {base}/files",
        ),
        (
            r"/v1/(?:assistants|threads)(?:/.*)?",
            "OpenAI's assistants are not built; agents, which keep their history here, are at {base}/agents",
        ),
        (r"/slots/.*", "there is nothing to save, restore or erase of a slot: KV is kept without being asked"),
        (r"/generate(?:_stream)?|/invocations", "POST {base}/completions completes a text"),
        (r"/ping", "ask /health/live whether the server is alive"),
        (r"/(?:v1)?", "Cairn listens here; OpenAI's API begins at {base}"),
    )
)
"""Paths of other servers with the hints that they get; the first match counts."""


def canonical(path: str) -> str:
    """Return a route's path in its canonical form: without a slash at its end, and with /v1 if that was left out."""
    if path.endswith("/") and not path.endswith("//"):
        path = path[:-1] or "/"
    return "/v1" + path if _BARE.fullmatch(path) else path


def no_route(path: str, host: str, known: Callable[[str], bool]) -> NotFound:
    """Return the 404 error for a path that is no route, with a hint.

    `host` is the Host that the client sent; `known` tells whether a path is a route.
    """
    base = f"http://{shown(host)}/v1"
    near = _nearest(path, known)
    if near is not None:
        text = f"there is no route {shown(path)}; it is {shown(near)}"
        if near.startswith("/v1/"):
            text += f", and the base URL is {base}"
        return NotFound(text)
    for pattern, said in _ELSEWHERE:
        if pattern.fullmatch(_tidy(path)):
            return NotFound(f"there is no route {shown(path)}: {said.format(base=base)}")
    return NotFound(f"there is no route {shown(path)}")


def body_of(path: str, error: CairnError, id: str) -> dict[str, Any]:
    """Return the error in the shape that clients of this path read: Anthropic's, Ollama's, or else OpenAI's."""
    if _ANTHROPIC.fullmatch(path):
        return anthropic_error(error, id)
    if _OLLAMA.fullmatch(path):
        return {"error": str(error)}
    return error_body(error)


def anthropic_error(error: CairnError, id: str) -> dict[str, Any]:
    """Return the error in Anthropic's shape.

    Clients recognise a prompt that is too long by how the message begins.
    """
    text = str(error)
    if isinstance(error, ContextTooLong):
        text = f"prompt is too long: {text}"
        if error.prompt_tokens is not None:
            text = f"prompt is too long: {error.prompt_tokens} tokens > {error.context} maximum"
    return {"type": "error", "error": {"type": _kind(error.status), "message": text}, "request_id": id}


def _tidy(path: str) -> str:
    """Remove doubled slashes, a doubled /v1 and a slash at the end."""
    path = _SLASHES.sub("/", path)
    return _DOUBLED.sub("", path).rstrip("/") or "/"


def _nearest(path: str, known: Callable[[str], bool]) -> str | None:
    """Return the route that a wrong base URL has missed; None if there is none."""
    tidy = _tidy(path)
    at = tidy.rfind("/v1/")
    for one in (tidy, tidy[at:] if at > 0 else tidy, canonical(tidy), "/v1" + tidy, tidy.removeprefix("/v1")):
        if one != path and known(one):
            return one
    return None


def _kind(status: int) -> str:
    """Return the name of Anthropic's API for errors of this status."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    return kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
