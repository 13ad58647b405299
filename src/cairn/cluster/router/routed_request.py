"""What a request names: the agent or session that decides which replica it goes to."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec

from cairn.cluster.text_prefixes import KEY_HEADERS, NO_PREFIXES, PROMPT_PATHS, PromptFields, TextPrefixes, prefixes_of

AGENT_PATH = re.compile(r"/v1/agents/([^/]+)")
TURN_PATH = re.compile(r"/v1/agents/[^/]+/turns")
WORK_PATH = re.compile(r"/v1/(?:teams|workflows/runs)/([^/]+)")
RUNS_PATH = "/v1/workflows/runs"
RESUME_PATH = re.compile(RUNS_PATH + r"/([^/]+)/resume")
NAMED_PATHS = re.compile(
    r"/(?:v1/)?(?:requests|responses|conversations|teams|workflows/runs|collections|vector_stores|files)/([^/]+)"
)
RUN_HEADER = b"x-cairn-run"
AGENT_HEADER = b"x-cairn-agent"
SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-id", b"session-id")
COMPUTES = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/messages"),
        *("/v1/messages/count_tokens", "/chat/completions", "/completions", "/completion", "/infill", "/embedding"),
        *("/embeddings", "/rerank", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/tokenize"),
        "/detokenize",
        "/apply-template",
    )
)
"""Paths that only compute: a request that was cut off may be sent again."""
CHATS = frozenset(("/v1/chat/completions", "/chat/completions"))
INLINE = 1 << 20
"""Bytes of a body that are parsed on the event loop, in 2 to 3 ms; longer ones on a thread."""
BEGINNING = 2
"""Messages that a conversation is recognised by where nothing names it: its system text and first question."""
SMALL = 1 << 16
"""Bytes of the longest field that is read as a value. 16 MiB of empty lists would hold the interpreter's lock for two
seconds; unread bytes cost next to nothing."""
MOST_COMMAS = 1 << 16
"""Commas in messages that are cut into a list; of more, only the beginning is looked at."""
BEGINNING_BYTES = 1 << 16
_EMPTY = msgspec.Raw(b"")


class _SessionFields(PromptFields):
    """Fields of a body that say what it belongs to, or whether its answer is the same again, beside its text."""

    prompt_cache_key: msgspec.Raw = _EMPTY
    metadata: msgspec.Raw = _EMPTY
    previous_response_id: msgspec.Raw = _EMPTY
    conversation: msgspec.Raw = _EMPTY
    id: msgspec.Raw = _EMPTY
    seed: msgspec.Raw = _EMPTY
    temperature: msgspec.Raw = _EMPTY


_fields = msgspec.json.Decoder(_SessionFields)
_lists = msgspec.json.Decoder(list[msgspec.Raw])


def _value(field: msgspec.Raw) -> Any:
    """Return the value of a field; None for one that is absent, or too long to be any use here."""
    if field is _EMPTY or len(data := memoryview(field)) > SMALL:
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


class RoutedRequest:
    """One request as the router sees it."""

    def __init__(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        self.method, self.path = method, path
        self._headers = dict(headers)
        self._body = (
            _decoded(body) if method == "POST" and body[:1] in (b"{", b" ", b"\n", b"\r", b"\t") else _SessionFields()
        )

    @cached_property
    def key(self) -> bytes:
        """What it names, with the tenant's key; empty for nothing."""
        named = self._name or self._beginning()
        if not named:
            return b""
        digest = hashlib.blake2b(digest_size=16)
        for name in KEY_HEADERS:
            digest.update(self._headers.get(name, b"") + b"\0")
        digest.update(named)
        return digest.digest()

    @cached_property
    def _name(self) -> bytes:
        """The agent or session that it names; empty for none."""
        if (found := AGENT_PATH.match(self.path) or WORK_PATH.match(self.path)) is not None:
            return b"agent\0" + found[1].encode()
        for name in (AGENT_HEADER, *SESSION_HEADERS):
            if value := self._headers.get(name):
                return b"agent\0" + value
        body = self._body
        if self.path == "/v1/agents" and isinstance(id := _value(body.id), str):
            return b"agent\0" + id.encode("utf-8", "replace")
        said = _value(body.metadata)
        metadata = said if isinstance(said, Mapping) else {}
        names = (
            metadata.get("agent"),
            _value(body.prompt_cache_key),
            metadata.get("session_id"),
            metadata.get("user_id"),
            _value(body.previous_response_id),
            _value(body.conversation),
        )
        for one in names:
            if isinstance(one, str) and one:
                return b"agent\0" + one.encode("utf-8", "replace")
        return b""

    @cached_property
    def named(self) -> bool:
        """Whether it names an agent or a session."""
        return bool(self._name)

    @cached_property
    def _text(self) -> TextPrefixes:
        return prefixes_of(self._headers, self._body) if self.path in PROMPT_PATHS else NO_PREFIXES

    def text(self) -> TextPrefixes:
        """Return the digests of its prompt's text."""
        return self._text

    def _beginning(self) -> bytes:
        """Return what recognises a conversation that is sent again as a whole."""
        body = self._body
        if messages := _first(body.messages):
            return b"chat\0" + b"\0".join([body.system, *messages])
        if (prompt := bytes(memoryview(body.prompt)[:512])).startswith(b'"'):
            return b"text\0" + prompt
        if messages := _first(body.input):
            return b"input\0" + b"\0".join(messages)
        return b""

    @property
    def is_turn(self) -> bool:
        """Whether it is a new turn of an agent."""
        return self.method == "POST" and TURN_PATH.fullmatch(self.path) is not None

    @property
    def is_work(self) -> bool:
        """Whether it is about a team or a run, which one replica at a time may work on."""
        return WORK_PATH.match(self.path) is not None

    def run(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the id of the run whose events are answered with these headers; empty for none."""
        if self.method != "POST":
            return ""
        if self.path == RUNS_PATH:
            return headers.get(RUN_HEADER, b"").decode("latin-1")
        found = RESUME_PATH.fullmatch(self.path)
        return "" if found is None else found[1]

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent again although a replica may have had it."""
        return self.method in ("GET", "HEAD", "OPTIONS") or self.path in COMPUTES or self.is_turn

    @property
    def followable(self) -> bool:
        """Whether a second answer to it has the same tokens, and its stream is of chat completions."""
        if self.is_turn:
            return True
        return self.path in CHATS and (_value(self._body.seed) is not None or _value(self._body.temperature) == 0)

    @property
    def belongs_to(self) -> list[bytes]:
        """The ids of requests whose answers it is about, without what is in front of them."""
        named = [found[1]] if (found := NAMED_PATHS.match(self.path)) is not None else []
        fields = self._body.previous_response_id, self._body.conversation
        named += [one for one in map(_value, fields) if isinstance(one, str)]
        return [last_part(one) for one in named]

    @property
    def on_one_replica(self) -> bool:
        """Whether its object may be on one replica only: others answer 404 without effect."""
        return NAMED_PATHS.match(self.path) is not None


async def read_request(scope: Mapping[str, Any], body: bytes, *, by_kv: bool) -> RoutedRequest:
    """Return the request of a call. Parse a long body on another thread, and digest its text there if `by_kv`."""

    def read() -> RoutedRequest:
        request = routed()
        if by_kv and not request.named:
            request.text()
        return request

    routed = partial(RoutedRequest, scope["method"], scope["path"], scope["headers"], body)
    return await asyncio.to_thread(read) if len(body) > INLINE else routed()


def last_part(id: str) -> bytes:
    """Return an id without what is in front of it."""
    return re.split(r"[-_]", id)[-1].encode("utf-8", "replace")


def _first(messages: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the first messages of a list, unparsed, or how a very long list begins; none if it is no list."""
    if len(data := memoryview(messages)) > MOST_COMMAS and bytes(data).count(b",") > MOST_COMMAS:
        return [msgspec.Raw(bytes(data[:BEGINNING_BYTES]))] if bytes(data[:1]) == b"[" else []
    try:
        return _lists.decode(messages)[:BEGINNING]
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return []


def _decoded(body: bytes) -> _SessionFields:
    try:
        return _fields.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return _SessionFields()  # the replica refuses it
