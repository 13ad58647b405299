"""Recent contexts of each tenant: with them the front says more exactly than the worker why a prompt was not found.

The worker knows keys only, so to it a prompt whose third message was edited is `never seen`. Here are the ids of what
the same tenant asked lately, so that the report can name the place where the two part, and show both sides. A tenant
is known by its salt, which no two share; nothing here is ever compared with, or shown to, another.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.types.model_spec import BLOCK_TOKENS, CHUNK_TOKENS
from cairn.types.stats import Differs, Miss, MissReason

CONTEXTS = 256
"""Kept of one tenant."""
TOKENS = 1 << 18
"""Kept of one tenant: 1 MB."""
TENANTS = 64
SHOWN_TOKENS = 16
SHOWN = 48
"""Characters of each side's text."""
REACH = 1 << 16
"""Tokens in which a system's text is looked for."""
OPENING = 16
"""At the end of a prompt a template opens the answer: at most so many tokens, which follow no message."""
_DIGEST = 8
_ID = 4  # bytes


class PromptOrigin(NamedTuple):
    """What the front knows of a request beside its ids."""

    messages: tuple[bytes, ...] = ()
    """A digest of each message that the prompt was rendered from."""
    store: bool = True
    """Whether a later report of the tenant may show its text."""
    why: MissReason | None = None
    """What a caller knows to be the reason, if something is missing."""
    system: str = ""
    """The system's text that the messages begin with."""


class _Context(NamedTuple):
    ids: bytes
    prompts: tuple[tuple[int, bytes], ...]
    """(tokens, digests of messages one after another) of prompts that it begins with."""


class RecentContexts:
    """The table. Bounded in tenants, contexts and tokens; what was used longest ago goes first."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, list[_Context]] = OrderedDict()

    def note(self, salt: bytes, ids: Sequence[int], prompt: int, messages: tuple[bytes, ...] = ()) -> None:
        """A context was computed, of which the first `prompt` ids were rendered from `messages`."""
        data = array("I", ids).tobytes()
        if len(data) > TOKENS * _ID:
            return
        found = self._tenants.setdefault(salt, [])
        self._tenants.move_to_end(salt)
        prompts = {prompt: b"".join(messages)} if messages else {}
        kept = []
        for other in found:
            if data.startswith(other.ids) or other.ids.startswith(data):
                data = max(data, other.ids, key=len)
                prompts = dict(other.prompts) | prompts
            else:
                kept.append(other)
        kept.append(_Context(data, tuple(prompts.items())[-CONTEXTS:]))
        while len(kept) > CONTEXTS or sum(len(one.ids) for one in kept) > TOKENS * _ID:
            del kept[0]
        self._tenants[salt] = kept
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def forget(self, salt: bytes) -> None:
        """Keep nothing more of a tenant: something of it was erased, and its text must not come back here."""
        self._tenants.pop(salt, None)

    def explain(
        self, miss: Miss, salt: bytes, ids: Sequence[int], told: PromptOrigin, decode: Callable[[Sequence[int]], str]
    ) -> Miss:
        """The worker's reason, or a better one. Only `never seen` leaves something to say."""
        if miss.reason != "never seen":
            return miss
        if told.why is not None:
            return msgspec.structs.replace(miss, reason=told.why)
        at, again, known = self._nearest(salt, array("I", ids).tobytes(), told.messages)
        if known is None or at < miss.position:
            return miss
        size, end = len(known.ids) // _ID, (miss.position // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        if (
            at > miss.position + BLOCK_TOKENS
        ):  # the first that is missing was computed; stores may have had whole chunks
            return msgspec.structs.replace(miss, reason="evicted" if at >= end and size > end else "not stored")
        if at < size and at < len(ids):
            differs = Differs(
                position=at,
                known=_shown(decode, array("I", known.ids[at * _ID : (at + SHOWN_TOKENS) * _ID])),
                given=_shown(decode, ids[at : at + SHOWN_TOKENS]),
            )
            reason: MissReason = "template" if again else "different tokens"
            if not again and _within(told.system, lambda count: decode(ids[:count]), at, len(ids)):
                reason = "system text changed"
            return Miss(position=miss.position, reason=reason, differs=differs)
        return miss

    def _nearest(self, salt: bytes, data: bytes, messages: Sequence[bytes]) -> tuple[int, bool, _Context | None]:
        """The context that a prompt has most first ids in common with; how many, and whether it has the same messages,
        of which a template made other ids.

        Of several it is the one of the same messages, then the one that has most of the prompt's messages in any place,
        since one that was edited is followed by others that were not; then the one that was noted last.
        """
        said, found, known = b"".join(messages), (0, False, 0), None
        for context in self._tenants.get(salt, ()):
            if (same := _common(context.ids, data)) < max(found[0], 1):
                continue
            again = any(same < _rendered(length, which, said) for length, which in context.prompts)
            near = same, again, _shared(context, messages)
            if near >= found:
                found, known = near, context
        return found[0], found[1], known


def told_of(
    messages: Sequence[Mapping[str, Any]], *, store: bool = True, why: MissReason | None = None
) -> PromptOrigin:
    """What is known of a request that was rendered from these messages."""
    first = messages[0] if messages else {}
    said = first.get("content") if first.get("role") in ("system", "developer") else ""
    system = said.strip() if isinstance(said, str) else ""
    return PromptOrigin(tuple(_digest(message) for message in messages), store, why, system)


def _within(system: str, before: Callable[[int], str], at: int, size: int) -> bool:
    """Whether a place in a prompt is in the system's text: `before` gives the text of so many ids."""
    if not system or at > REACH:
        return False
    head, tail = system[:SHOWN_TOKENS], system[-SHOWN:]
    text = before(min(at + SHOWN_TOKENS, size))
    begun = text.find(head)
    return begun >= 0 and tail not in before(at)[begun:]


def _digest(message: Mapping[str, Any]) -> bytes:
    """A digest of one message; the last bit tells an assistant's."""
    digest = hashlib.sha256(json.dumps(message, sort_keys=True, default=str).encode()).digest()
    return digest[: _DIGEST - 1] + bytes([digest[_DIGEST] & 0xFE | (message.get("role") == "assistant")])


def _shared(context: _Context, messages: Sequence[bytes]) -> int:
    """How many of these messages the longest prompt of a context has."""
    which = context.prompts[-1][1] if context.prompts else b""
    there = {which[at : at + _DIGEST] for at in range(0, len(which), _DIGEST)}
    return sum(message in there for message in messages)


def _rendered(length: int, which: bytes, said: bytes) -> int:
    """How many ids of a prompt of `length`, made from the messages `which`, the same template makes of the messages
    `said` too. Where no answer follows them there, that is not so of what opens one."""
    if not said.startswith(which):
        return 0
    follows = said[len(which) : len(which) + _DIGEST]
    return length - OPENING if follows and not follows[-1] & 1 else length


def _common(one: bytes, other: bytes) -> int:
    """Leading ids that two contexts have in common."""
    low, high = 0, min(len(one), len(other)) // _ID
    left, right = memoryview(one), memoryview(other)
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * _ID : middle * _ID] == right[low * _ID : middle * _ID]:
            low = middle
        else:
            high = middle - 1
    return low


def _shown(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    return decode(ids)[:SHOWN]
