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
import re
import struct
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cairn.text.output.argument_fit import shape_of
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.output_parser import markers, splitter
from cairn.text.output.reasoning_formats import EMPTY, THINK, ThoughtFormat, thoughts
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool, OutputFormat

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


_OPENER_TOKENS = 8
_TAIL = 64  # tokens looked at one by one at first: what is cut off is short


def opener(tokenizer: Tokenizer, prompt: Sequence[int], form: ThoughtFormat) -> int:
    """How many ids at the end of a prompt open (or open and close) the reasoning: a template writes them for the
    turn to come, and not in front of an answer of old."""
    think = tokenizer.token_id(form.markers[0])
    tail = list(prompt[-_OPENER_TOKENS:])
    if think is None or think not in tail:
        return 0
    size = tail[::-1].index(think) + 1
    text = b"".join(tokenizer.token_bytes(i) for i in tail[-size:]).decode("utf-8", "replace")
    opened = rf"{re.escape(form.open)}\s*(?:{re.escape(form.close)}\s*)?"
    return size if re.fullmatch(opened, text) else 0


def visible_ids(
    tokenizer: Tokenizer, generated: Sequence[int], message: Mapping[str, Any], output: OutputFormat
) -> list[int] | None:
    """The ids of `generated` up to the end of what `message` shows; None if that cannot be told exactly.

    A stop string, an incomplete character and the end token are not part of it. Where a token reaches beyond what is
    visible it is dropped whole, and the visible text that it began is encoded again.
    """
    skip = (tokenizer.special_ids | (tokenizer.end_ids & tokenizer.control_ids)) - {
        i for tag in {*markers(output), *thoughts(output).markers} if (i := tokenizer.token_id(tag)) is not None
    }
    ids = list(generated)
    # What a form writes around a content is the model's, and only what ends the answer is the template's to write.
    behind = tokenizer.end_ids if thoughts(output).turn else skip
    while ids and ids[-1] in behind:
        ids.pop()
    detokenizer = tokenizer.detokenizer(skip=skip)
    certain = detokenizer.push(ids)
    text = certain + detokenizer.flush()
    shown = message.get("content") or ""
    for by_model in (True, False):  # who ended it decides on a call without its last brace
        content, reasoning, calls, end = _parse(text, output, by_model=by_model)
        same = _same_calls(calls, message.get("tool_calls") or [])
        if same and reasoning == (message.get("reasoning_content") or ""):
            break
    else:
        return None
    if end is not None:  # what follows was dropped
        return _cut(tokenizer, ids, skip, text[:end].rstrip("\n")) if end >= 0 and content == shown else None
    if content == shown and certain == text:
        return ids
    if not content.startswith(shown) or not text.endswith(content):
        return None
    return _cut(tokenizer, ids, skip, text[: len(text) - len(content) + len(shown)])


def offered_by(message: Mapping[str, Any]) -> tuple[OfferedTool, ...]:
    """The tools that a message calls, as far as reading its text again needs them: which were offered is not kept."""
    values: dict[str, set[str]] = {}
    known: dict[str, dict[str, Any]] = {}
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        given = arguments if isinstance(arguments, Mapping) else _begun(arguments)
        values.setdefault(name, set()).update(key for key, value in given.items() if not isinstance(value, str))
        known.setdefault(name, {}).update((key, {}) for key in given)
    return tuple(
        OfferedTool(name, tuple(sorted(values[name])), shape_of({"properties": known[name]})) for name in values
    )


def _begun(arguments: Any) -> dict[str, Any]:
    """Return the arguments that are whole in a text that is no JSON, because the call is broken or was cut."""
    scanner = JsonScanner()
    scanner.feed(arguments if isinstance(arguments, str) else "")
    return {key: json.loads(value) for key, value in scanner.members}


def _parse(text: str, output: OutputFormat, *, by_model: bool) -> tuple[str, str, list[tuple[str, str]], int | None]:
    """Content, reasoning and tool calls (name, arguments) of a whole text, and how many of its characters hold them
    where the rest was dropped; -1 where that cannot be told."""
    reader = splitter(output, 0, 0)
    texts = {"text": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for piece in reader.push(text) + reader.finish(by_model=by_model):
        if isinstance(piece, ToolCallDelta):
            name, arguments = calls.pop() if not piece.id else (piece.name, "")
            calls.append((name, arguments + piece.arguments))
        else:
            texts[piece[0]] += piece[1]
    return texts["text"], texts["reasoning"], calls, reader.shown


def _same_calls(calls: list[tuple[str, str]], shown: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the calls read from the text are the ones of the message, arguments compared as parsed JSON."""
    if len(calls) != len(shown):
        return False
    try:
        for (name, arguments), call in zip(calls, shown, strict=True):
            given = arguments_meant(call["function"]["arguments"])
            if name != call["function"]["name"] or arguments_meant(arguments) != given:
                return False
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


def _cut(tokenizer: Tokenizer, ids: list[int], skip: frozenset[int], visible: str) -> list[int] | None:
    """The fewest ids that show the most of `visible` and nothing else, then the encoding of the rest of it."""
    tail = _TAIL
    while True:
        detokenizer = tokenizer.detokenizer(skip=skip)
        best = max(len(ids) - tail, 0)
        shown = best_shown = len(detokenizer.push(ids[:best]))
        if best == 0 or shown < len(visible):
            break
        tail *= 8
    for count, i in enumerate(ids[best:], best + 1):
        shown += len(detokenizer.push((i,)))
        if shown > len(visible):
            break
        if shown > best_shown:
            best, best_shown = count, shown
    cut = ids[:best] + tokenizer.encode(visible[best_shown:])
    check = tokenizer.detokenizer(skip=skip)
    return cut if check.push(cut) + check.flush() == visible else None
