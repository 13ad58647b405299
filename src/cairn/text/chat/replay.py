"""Exact replay: an assistant message that comes back unchanged becomes the very ids that were sampled for it.

Rendering and encoding an old answer again may give other ids than were sampled (reasoning left out, JSON written
anew, another split into tokens), and then nothing that was computed after it can be used again. So what was sampled
is remembered, found again by tenant, the exact ids before the message, its visible content byte for byte and its tool
calls as parsed JSON, and put into the prompt in place of what the template makes of the message:

    marked rendering    A0 <mark 0> A1 <mark 1> A2     each remembered answer is one mark
    plain rendering     A0 answer 0 A1 answer 1 A2     what a template makes of them
    prompt              ids(A0) sampled 0 ids(A1) sampled 1 ids(A2)

Where nothing fits, the plain rendering is used, encoded as a whole. Nothing here touches the outside world.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cairn.text.output.reasoning_formats import EMPTY, THINK, ThoughtFormat

ENTRY_COST = 64
"""Tokens that an entry counts in the bound beside its own ids: keys and objects."""
MAX_MISSES = 8
"""Remembered answers that may fail to fit before the rest of a conversation is left to the template."""


class AnswerIdentity(NamedTuple):
    """What identifies an assistant message: `visible` must be equal; reasoning must be equal unless left out."""

    visible: bytes
    reasoning: str


def answer_of(message: Mapping[str, Any]) -> AnswerIdentity | None:
    """The identity of an assistant message; None if it says nothing or holds what is no part of an answer."""
    content = message.get("content") or ""
    calls = message.get("tool_calls") or []
    known = {"role", "content", "reasoning_content", "tool_calls"}
    if not isinstance(content, str) or not (content or calls) or message.keys() - known:
        return None
    try:
        parts = [[call["function"]["name"], _canonical(call["function"]["arguments"])] for call in calls]
        text = json.dumps([content, parts], ensure_ascii=False)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return AnswerIdentity(
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), message.get("reasoning_content") or ""
    )


def _canonical(arguments: Any) -> str:
    """Return JSON that is the same for the same value, whatever its spacing and order; a text that is no JSON as it is,
    which no other call's arguments can be."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    return json.dumps(value, sort_keys=True, allow_nan=False)


def arguments_meant(arguments: Any) -> Any:
    """Return the arguments of a call as parsed JSON. A text that is none stays as it is: calls are broken, or cut."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


class Prefix:
    """The ids before a message, and their digest, both growing."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._digest = hashlib.sha256()

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids."""
        self.ids += ids
        self._digest.update(array("I", ids).tobytes())

    def digest(self, more: Sequence[int] = ()) -> bytes:
        """SHA-256 of the ids so far and `more`, 4 bytes each."""
        digest = self._digest.copy()
        digest.update(array("I", more).tobytes())
        return digest.digest()


class ReplayTable:
    """What was sampled, by (tenant, ids before, visible answer): bounded, the least recently used goes first.

    Safe to use from several threads.
    """

    def __init__(self, limit: int = 1 << 22) -> None:
        """`limit`: tokens kept, with `ENTRY_COST` more for each entry."""
        self._limit = limit
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        """As `_packed`. One object of bytes for each: there are many of them, and most are short."""
        self._visible: Counter[int] = Counter()
        """How many entries there are of an answer, whatever was before it."""
        self._tokens = 0
        """What counts against the limit now."""
        self._lock = threading.Lock()

    def put(self, tenant: str, before: bytes, answer: AnswerIdentity, ids: Sequence[int]) -> None:
        """Remember the ids that follow the prefix with digest `before`."""
        said = _said(tenant, answer)
        key = _key(said, before)
        with self._lock:
            self._drop(key)
            self._entries[key] = _packed(said, ids, answer.reasoning)
            self._visible[_short(said)] += 1
            self._tokens += len(ids) + ENTRY_COST
            while self._tokens > self._limit:
                self._drop(next(iter(self._entries)))

    def knows(self, tenant: str, answer: AnswerIdentity) -> bool:
        """Whether this tenant ever got this answer, in whatever conversation."""
        with self._lock:
            return _short(_said(tenant, answer)) in self._visible

    def find(self, tenant: str, before: bytes, answer: AnswerIdentity) -> Sequence[int] | None:
        """The ids sampled for an answer behind exactly these ids, unless the client changed the reasoning it sends."""
        key = _key(_said(tenant, answer), before)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            _, ids, reasoning = _unpacked(entry)
            if answer.reasoning not in ("", reasoning):
                return None
            self._entries.move_to_end(key)
            return ids

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        said, ids, _ = _unpacked(entry)
        self._tokens -= len(ids) + ENTRY_COST
        self._visible[said] -= 1
        if not self._visible[said]:
            del self._visible[said]


def _said(tenant: str, answer: AnswerIdentity) -> bytes:
    """Digest of a tenant and what it saw."""
    return hashlib.sha256(answer.visible + tenant.encode("utf-8", "surrogatepass")).digest()


def _key(said: bytes, before: bytes) -> bytes:
    return hashlib.sha256(said + before).digest()


def _short(said: bytes) -> int:
    """Enough of it to count by: two that fall together cost a lookup in vain."""
    return int.from_bytes(said[:7], "little")


_HEAD = struct.Struct("<QI")


def _packed(said: bytes, ids: Sequence[int], reasoning: str) -> bytes:
    """What an answer is counted by, its ids, and the reasoning."""
    return _HEAD.pack(_short(said), len(ids)) + array("I", ids).tobytes() + reasoning.encode("utf-8", "surrogatepass")


def _unpacked(entry: bytes) -> tuple[int, array[int], str]:
    said, count = _HEAD.unpack_from(entry)
    end = _HEAD.size + 4 * count
    ids = array("I", entry[_HEAD.size : end])
    return said, ids, entry[end:].decode("utf-8", "surrogatepass")


def assemble(
    plain: str,
    marked: str,
    marks: Mapping[str, AnswerIdentity],
    encode: Callable[[str], list[int]],
    find: Callable[[bytes, AnswerIdentity], Sequence[int] | None],
    separable: Callable[[str], bool],
    thought: ThoughtFormat = THINK,
) -> list[int]:
    """The ids of a conversation with every answer that is found put back.

    `plain` and `marked` are the two renderings, `marks` the marks in order (one at least) and the answers they stand
    for; a mark is nowhere in `plain`. `find` looks up what was sampled behind the ids with a digest. `separable` tells
    whether a text holds a control token: only then can its place in the plain rendering not be mistaken for something
    a user wrote. `thought`: what stands around an answer.
    """
    parts = _between(plain, marked, list(marks), thought)
    if parts is None or not all(separable(text) for text, _ in parts[1:]):
        return encode(plain)
    done = Prefix()
    pending = ""
    misses = 0
    for (text, rendered), answer in zip(parts, marks.values(), strict=False):
        pending += text
        if misses < MAX_MISSES:
            head = encode(pending)
            sampled = find(done.digest(head), answer)
            if sampled is not None:
                done.extend(head)
                done.extend(sampled)
                pending = ""
                continue
            misses += 1
        pending += rendered
    return done.ids + encode(pending + parts[-1][0])


def _between(plain: str, marked: str, marks: list[str], thought: ThoughtFormat = THINK) -> list[tuple[str, str]] | None:
    """(text before an answer, the answer as the template writes it), in order, and the text after the last.

    None if the marks did not come out once each and in order, or if the renderings differ in more than the answers.
    An empty thought that a template puts before an answer without reasoning belongs to the answer.
    """
    texts = []
    for mark in marks:
        before, found, marked = marked.partition(mark)
        place = thought.place(before, marked)
        if not found or place is None:
            return None
        before, marked = place
        texts.append(EMPTY.sub("", before))
    if not plain.startswith(texts[0]) or not plain.endswith(marked):
        return None
    parts = []
    at = len(texts[0])
    for text, following in pairwise(texts):
        end = plain.find(following, at)
        if end < 0:
            return None
        parts.append((text, plain[at:end]))
        at = end + len(following)
    end = len(plain) - len(marked)
    return [*parts, (texts[-1], plain[at:end]), (marked, "")] if end >= at else None
