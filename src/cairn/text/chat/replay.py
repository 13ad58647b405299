"""Exact replay: an assistant message that comes back unchanged becomes the very ids that were sampled for it.

Rendering and encoding an old answer again may give other ids than were sampled (reasoning dropped, JSON reformatted,
another split into tokens), and then no KV after it can be reused. So the sampled ids are stored under the tenant, the
exact ids before the message, its visible content byte for byte and its tool calls as parsed JSON. They replace the
template's rendering of the message in the prompt:

    marked rendering    A0 <mark 0> A1 <mark 1> A2     each stored answer is one mark
    plain rendering     A0 answer 0 A1 answer 1 A2     the template's own rendering
    prompt              ids(A0) sampled 0 ids(A1) sampled 1 ids(A2)

If no entry matches, the plain rendering is encoded as a whole. Nothing here touches the outside world.
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
"""Overhead of an entry (keys and objects), in tokens of the table's limit."""
MAX_MISSES = 8
"""Failed lookups after which the rest of a conversation is left to the template."""


class AnswerIdentity(NamedTuple):
    """The identity of an assistant message: `visible` must be equal; reasoning must be equal unless it is absent."""

    visible: bytes
    reasoning: str


def answer_of(message: Mapping[str, Any]) -> AnswerIdentity | None:
    """Return the identity of an assistant message; None if it is empty or has fields that no answer has."""
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
    """Return canonical JSON of the arguments, independent of spacing and key order.

    A text that is not JSON is returned unchanged: it cannot equal any canonical JSON.
    """
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    return json.dumps(value, sort_keys=True, allow_nan=False)


def parsed_arguments(arguments: Any) -> Any:
    """Parse a call's arguments; a text that is not JSON (a broken or cut call) is returned unchanged."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def conversation_digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest of the conversation up to each message, with it: what the client sees, without reasoning."""
    found, before = list[bytes](), b""
    for message in messages:
        answer = answer_of(message) if message["role"] == "assistant" else None
        before = _next_digest(before, _seen(message) if answer is None else answer.visible)
        found.append(before)
    return found


def digest_after(before: bytes, answer: AnswerIdentity) -> bytes:
    """Return the digest of a conversation with an answer, as `conversation_digests` does. `before`: that without it."""
    return _next_digest(before, answer.visible)


def _next_digest(before: bytes, seen: bytes) -> bytes:
    return hashlib.sha256(b"conversation" + before + seen).digest()


def _seen(message: Mapping[str, Any]) -> bytes:
    seen = [message["role"], message.get("content"), message.get("tool_calls"), message.get("name")]
    text = json.dumps(seen, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class Prefix:
    """The ids before a message and their digest; ids can be appended."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._digest = hashlib.sha256()

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids."""
        self.ids += ids
        self._digest.update(array("I", ids).tobytes())

    def digest(self, more: Sequence[int] = ()) -> bytes:
        """Return the SHA-256 of the ids so far and `more`, 4 bytes each."""
        digest = self._digest.copy()
        digest.update(array("I", more).tobytes())
        return digest.digest()


class ReplayTable:
    """Sampled ids by (tenant, ids before, visible answer); a bounded LRU table. Thread-safe."""

    def __init__(self, limit: int = 1 << 22) -> None:
        """Keep at most `limit` tokens; each entry counts `ENTRY_COST` more."""
        self._limit = limit
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        """Key -> entry, packed into one bytes object: there are many entries, and most are short."""
        self._visible: Counter[int] = Counter()
        """Short digest of tenant and answer -> number of entries, whatever came before."""
        self._tokens = 0
        """Tokens that count against the limit now."""
        self._lock = threading.Lock()

    def put(self, tenant: str, before: bytes, answer: AnswerIdentity, ids: Sequence[int]) -> None:
        """Store the ids that follow the prefix with digest `before`."""
        visible_key = _visible_key(tenant, answer)
        key = _key(visible_key, before)
        with self._lock:
            self._drop(key)
            self._entries[key] = _packed(visible_key, ids, answer.reasoning)
            self._visible[_short(visible_key)] += 1
            self._tokens += len(ids) + ENTRY_COST
            while self._tokens > self._limit:
                self._drop(next(iter(self._entries)))

    def knows(self, tenant: str, answer: AnswerIdentity) -> bool:
        """Return whether an entry holds this answer for this tenant, in any conversation."""
        with self._lock:
            return _short(_visible_key(tenant, answer)) in self._visible

    def find(self, tenant: str, before: bytes, answer: AnswerIdentity) -> Sequence[int] | None:
        """Return the ids sampled for an answer after exactly these ids; None if the client changed the reasoning."""
        key = _key(_visible_key(tenant, answer), before)
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
        visible_key, ids, _ = _unpacked(entry)
        self._tokens -= len(ids) + ENTRY_COST
        self._visible[visible_key] -= 1
        if not self._visible[visible_key]:
            del self._visible[visible_key]


def _visible_key(tenant: str, answer: AnswerIdentity) -> bytes:
    """Return the digest of a tenant and the visible answer."""
    return hashlib.sha256(answer.visible + tenant.encode("utf-8", "surrogatepass")).digest()


def _key(visible_key: bytes, before: bytes) -> bytes:
    return hashlib.sha256(visible_key + before).digest()


def _short(visible_key: bytes) -> int:
    """Return 7 bytes of a digest as a number, to count by; a collision costs only a failed lookup."""
    return int.from_bytes(visible_key[:7], "little")


_HEAD = struct.Struct("<QI")


def _packed(visible_key: bytes, ids: Sequence[int], reasoning: str) -> bytes:
    """Pack an entry: short digest, ids, reasoning."""
    return (
        _HEAD.pack(_short(visible_key), len(ids))
        + array("I", ids).tobytes()
        + reasoning.encode("utf-8", "surrogatepass")
    )


def _unpacked(entry: bytes) -> tuple[int, array[int], str]:
    visible_key, count = _HEAD.unpack_from(entry)
    end = _HEAD.size + 4 * count
    ids = array("I", entry[_HEAD.size : end])
    return visible_key, ids, entry[end:].decode("utf-8", "surrogatepass")


def assemble(
    plain: str,
    marked: str,
    marks: Mapping[str, AnswerIdentity],
    encode: Callable[[str], list[int]],
    find: Callable[[bytes, AnswerIdentity], Sequence[int] | None],
    separable: Callable[[str], bool],
    thought: ThoughtFormat = THINK,
) -> list[int]:
    """Return the ids of a conversation in which every stored answer is replaced by its sampled ids.

    `plain` and `marked` are the two renderings, `marks` the marks in order (at least one) and their answers; no mark
    occurs in `plain`. `find` looks up the ids sampled after the prefix with a digest. `separable` returns whether a
    text holds a control token: only then is its place in the plain rendering unambiguous, since users cannot write
    one. `thought` is the reasoning format around an answer.
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
    """Return (text before an answer, the answer as the template writes it) in order; the last pair is the rest.

    Returns None unless each mark was rendered once and in order, and the renderings differ only in the answers. An
    empty thought that a template puts before an answer without reasoning counts as part of the answer.
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
_TAIL = 64  # tokens decoded one by one at first: the cut-off part is usually short


def opener(tokenizer: Tokenizer, prompt: Sequence[int], form: ThoughtFormat) -> int:
    """Count the ids at the end of a prompt that open (or open and close) the reasoning.

    A template writes them for the next turn, not before earlier answers.
    """
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
    """Return the ids of `generated` up to the end of the text that `message` shows; None if that is not exact.

    Stop strings, incomplete characters and the end token are left out. A token that reaches beyond the visible text is
    dropped, and the visible text that it began is encoded again.
    """
    skip = (tokenizer.special_ids | (tokenizer.end_ids & tokenizer.control_ids)) - {
        i for tag in {*markers(output), *thoughts(output).markers} if (i := tokenizer.token_id(tag)) is not None
    }
    ids = list(generated)
    # With turn markers the tokens around the content are the model's own; the template writes only the end token.
    behind = tokenizer.end_ids if thoughts(output).turn else skip
    while ids and ids[-1] in behind:
        ids.pop()
    detokenizer = tokenizer.detokenizer(skip=skip)
    certain = detokenizer.push(ids)
    text = certain + detokenizer.flush()
    shown = message.get("content") or ""
    for by_model in (True, False):  # whether the model ended the answer decides on a call without its last brace
        content, reasoning, calls, end = _parse(text, output, by_model=by_model)
        same = _same_calls(calls, message.get("tool_calls") or [])
        if same and reasoning == (message.get("reasoning_content") or ""):
            break
    else:
        return None
    if end is not None:  # the text after `end` was dropped
        return _cut(tokenizer, ids, skip, text[:end].rstrip("\n")) if end >= 0 and content == shown else None
    if content == shown and certain == text:
        return ids
    if not content.startswith(shown) or not text.endswith(content):
        return None
    return _cut(tokenizer, ids, skip, text[: len(text) - len(content) + len(shown)])


def offered_by(message: Mapping[str, Any]) -> tuple[OfferedTool, ...]:
    """Derive tools from the calls of a message, enough to parse its text again: the offered tools are not stored."""
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
    """Return the complete arguments in the text of a broken or cut call."""
    scanner = JsonScanner()
    scanner.feed(arguments if isinstance(arguments, str) else "")
    return {key: json.loads(value) for key, value in scanner.members}


def _parse(text: str, output: OutputFormat, *, by_model: bool) -> tuple[str, str, list[tuple[str, str]], int | None]:
    """Parse a whole answer into content, reasoning, tool calls (name, arguments) and the end of the kept text.

    The end is a number of characters if the parser dropped the rest, -1 if that number is unknown, else None.
    """
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
    """Return whether the parsed calls equal the message's calls, arguments compared as parsed JSON."""
    if len(calls) != len(shown):
        return False
    try:
        for (name, arguments), call in zip(calls, shown, strict=True):
            given = parsed_arguments(call["function"]["arguments"])
            if name != call["function"]["name"] or parsed_arguments(arguments) != given:
                return False
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


def _cut(tokenizer: Tokenizer, ids: list[int], skip: frozenset[int], visible: str) -> list[int] | None:
    """Return the ids that show the longest prefix of `visible` and nothing else, then the encoding of its rest."""
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
