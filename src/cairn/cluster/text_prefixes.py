"""Digests of the beginnings of a request's text, by which a router and its servers mean the same context.

The text is what a prompt is rendered from, as the client wrote it: tools, system text, then messages or a prompt. It is
cut at fixed places, and the digest at a place covers the model's name, the caller's key and all text before it. So two
requests that begin alike have the same first digests, a server can say which tokens belong to one, and nobody without
the key can test a guess of a text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""Headers with the caller's key."""
PROMPT_PATHS = frozenset(
    f"{version}/{name}"
    for version in ("", "/v1")
    for name in ("chat/completions", "completions", "messages", "responses")
) | {"/api/chat", "/api/generate"}
"""Paths whose body holds the text of a prompt."""
FINEST = 256
"""Bytes between two places in the first `FINE_BYTES` bytes; twice as many from there on, and from each doubling on."""
FINE_BYTES = FINEST * 64
DIGEST_BYTES = 8
_MARK_NAME = b'"cache_control"'
_CACHE_MARKS = re.compile(_MARK_NAME + rb"\s*+:\s*+\{[^{}]*+\}")
"""Marks that clients of Anthropic move from one message to the next, and that are no text."""
_SPACE = b" \t\n\r\f\v"
TAIL_BYTES = 4096
_CONTENT = re.compile(rb'[^][" \t\r\n]')
_ENDS = b']" \t\r\n'
"""Closing bytes of a text that change once the text is extended."""
_EMPTY = msgspec.Raw(b"")


class PromptFields(msgspec.Struct):
    """The fields that a prompt's text comes from, unparsed."""

    model: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY


_decoder = msgspec.json.Decoder(PromptFields)


class TextPrefixes(NamedTuple):
    """The beginnings of one request's text, the shortest first."""

    digests: tuple[int, ...]
    """64-bit numbers."""
    ends: tuple[int, ...]
    """Bytes of text that each covers."""

    @property
    def size(self) -> int:
        """Bytes of the whole text."""
        return self.ends[-1] if self.ends else 0


NO_PREFIXES = TextPrefixes((), ())


def text_prefixes(path: str, headers: Mapping[bytes, bytes], body: bytes) -> TextPrefixes:
    """Return the digests of a request's text; none for a path or a body without any. Takes time linear in the body."""
    if path not in PROMPT_PATHS:
        return NO_PREFIXES
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return NO_PREFIXES  # refused elsewhere
    return prefixes_of(headers, found)


def prefixes_of(headers: Mapping[bytes, bytes], fields: PromptFields) -> TextPrefixes:
    """Return the digests of the text in a body's fields; none without a text."""
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    text = _without_marks(text)
    size = _size(text)
    if not size:
        return NO_PREFIXES
    # Of a long text every copy takes as long as half of its digests.
    parts = [bytes(one) for one in (fields.tools, fields.system, fields.instructions)]
    if any(parts):
        head = _without_marks(b"\0".join([*parts, b""]))
        text, size = head + text, len(head) + size
    seed = hashlib.sha256(b"\0".join([*(headers.get(name, b"") for name in KEY_HEADERS), bytes(fields.model)]))
    digest = hashlib.sha256(seed.digest())
    digests, ends, view, at = list[int](), list[int](), memoryview(text), 0
    for end in places(size):
        digest.update(view[at:end])
        digests.append(int.from_bytes(digest.digest()[:DIGEST_BYTES], "big"))
        ends.append(end)
        at = end
    return TextPrefixes(tuple(digests), tuple(ends))


def _without_marks(text: bytes) -> bytes:
    """Return a text without its cache marks, each with the spaces and the comma before it.

    Takes time linear in the text: a pattern that began with optional spaces would read a run of them once from each.
    """
    if _MARK_NAME not in text:
        return text
    parts, at = list[bytes](), 0
    for mark in _CACHE_MARKS.finditer(text):
        parts.append(text[at : mark.start()].rstrip(_SPACE).removesuffix(b","))
        at = mark.end()
    return b"".join([*parts, text[at:]])


def _size(text: bytes) -> int:
    """Return the length of a text up to its closing brackets and quotes; 0 for an empty list or text."""
    if _CONTENT.search(text) is None:
        return 0
    end = len(text)
    while not (piece := text[max(0, end - TAIL_BYTES) : end].rstrip(_ENDS)):
        end -= TAIL_BYTES
    return max(0, end - TAIL_BYTES) + len(piece)


def places(size: int) -> Iterator[int]:
    """Yield the places at which a text of `size` bytes is cut, its end last: 64, and 32 more for each doubling."""
    at, step = FINEST, FINEST
    while at < size:
        yield at
        if at >= FINE_BYTES * (step // FINEST):
            step *= 2
        at += step
    if size:
        yield size
