"""Recent contexts of each tenant, with which the front explains cache misses better than the worker can.

The worker knows only keys, so a prompt whose third message was edited is `never seen` to it. This table has the ids of
each tenant's recent contexts, so that the report can name the place where a prompt differs and show both sides. A
tenant is known by its salt, which no two share; nothing here is ever compared with, or shown to, another tenant.
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
"""Most contexts of one tenant."""
TOKENS = 1 << 18
"""Most tokens of one tenant: 1 MB."""
TENANTS = 64
SHOWN_TOKENS = 16
SHOWN = 48
"""Characters of each side's text."""
REACH = 1 << 16
"""Tokens in which a system prompt's text is searched."""
OPENING = 16
"""Most tokens at the end of a prompt with which a template opens the answer; they belong to no message."""
_DIGEST = 8
_ID = 4  # bytes


class PromptOrigin(NamedTuple):
    """What the front knows about a prompt besides its ids."""

    messages: tuple[bytes, ...] = ()
    """A digest of each message that the prompt was rendered from."""
    store: bool = True
    """Whether a later report to the tenant may show its text."""
    why: MissReason | None = None
    """The reason for a miss, if the caller knows it."""
    system: str = ""
    """The system prompt's text that the messages begin with."""


class _Context(NamedTuple):
    ids: bytes
    prompts: tuple[tuple[int, bytes], ...]
    """(tokens, concatenated digests of messages) of the prompts that it begins with."""


class RecentContexts:
    """The table of contexts. Bounded in tenants, contexts and tokens; the least recently used are evicted."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, list[_Context]] = OrderedDict()

    def note(self, salt: bytes, ids: Sequence[int], prompt: int, messages: tuple[bytes, ...] = ()) -> None:
        """Add a context that was computed; its first `prompt` ids were rendered from `messages`."""
        data = array("I", ids).tobytes()
        if len(data) > TOKENS * _ID:
            return
        contexts = self._tenants.setdefault(salt, [])
        self._tenants.move_to_end(salt)
        prompts = {prompt: b"".join(messages)} if messages else {}
        kept = []
        for other in contexts:
            if data.startswith(other.ids) or other.ids.startswith(data):
                data = max(data, other.ids, key=len)
                prompts = dict(other.prompts) | prompts
            else:
                kept.append(other)
        kept.append(_Context(data, tuple(prompts.items())[-CONTEXTS:]))
        size = sum(len(one.ids) for one in kept)
        while len(kept) > CONTEXTS or size > TOKENS * _ID:
            size -= len(kept.pop(0).ids)
        self._tenants[salt] = kept
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def forget(self, salt: bytes) -> None:
        """Forget a tenant's contexts: some of its text was erased and must not reappear here."""
        self._tenants.pop(salt, None)

    def explain(
        self, miss: Miss, salt: bytes, ids: Sequence[int], origin: PromptOrigin, decode: Callable[[Sequence[int]], str]
    ) -> Miss:
        """Return the worker's miss, or one with a better reason. Only `never seen` can be improved."""
        if miss.reason != "never seen":
            return miss
        if origin.why is not None:
            return msgspec.structs.replace(miss, reason=origin.why)
        at, again, known = self._nearest(salt, array("I", ids).tobytes(), origin.messages)
        if known is None or at < miss.position:
            return miss
        size, end = len(known.ids) // _ID, (miss.position // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        if at > miss.position + BLOCK_TOKENS:
            # The first missing block was computed before, but only whole chunks may have been stored.
            return msgspec.structs.replace(miss, reason="evicted" if at >= end and size > end else "not stored")
        if at < size and at < len(ids):
            differs = Differs(
                position=at,
                known=_shown(decode, array("I", known.ids[at * _ID : (at + SHOWN_TOKENS) * _ID])),
                given=_shown(decode, ids[at : at + SHOWN_TOKENS]),
            )
            reason: MissReason = "template" if again else "different tokens"
            if not again and _within(origin.system, lambda count: decode(ids[:count]), at, len(ids)):
                reason = "system text changed"
            return Miss(position=miss.position, reason=reason, differs=differs)
        return miss

    def _nearest(self, salt: bytes, data: bytes, messages: Sequence[bytes]) -> tuple[int, bool, _Context | None]:
        """Return the longest common prefix's length, whether the messages are the same, and the context that has it.

        "The same" means that a template rendered other ids from the same messages. Of several contexts, prefer one with
        the same messages, then the one with most of the prompt's messages in any place, since an edited message is
        followed by unedited ones, then the latest.
        """
        digests, best, known, wanted = b"".join(messages), (0, False, 0), None, data[:_ID]
        for context in self._tenants.get(salt, ()):
            if not context.ids.startswith(wanted):  # most differ early, and are cheap to rule out
                continue
            if (same := _common(context.ids, data, len(wanted) // _ID)) > best[0]:
                wanted = data[: same * _ID]
            again = any(same < _rendered(length, which, digests) for length, which in context.prompts)
            near = same, again, _shared(context, messages)
            if near >= best:
                best, known = near, context
        return best[0], best[1], known


def describe_prompt(
    messages: Sequence[Mapping[str, Any]], *, store: bool = True, why: MissReason | None = None
) -> PromptOrigin:
    """Describe a prompt that was rendered from these messages."""
    first = messages[0] if messages else {}
    content = first.get("content") if first.get("role") in ("system", "developer") else ""
    system = content.strip() if isinstance(content, str) else ""
    return PromptOrigin(tuple(_digest(message) for message in messages), store, why, system)


def _within(system: str, before: Callable[[int], str], at: int, size: int) -> bool:
    """Return whether a position of a prompt is within the system prompt; `before` gives the text of so many ids."""
    if not system or at > REACH:
        return False
    head, tail = system[:SHOWN_TOKENS], system[-SHOWN:]
    text = before(min(at + SHOWN_TOKENS, size))
    begun = text.find(head)
    return begun >= 0 and tail not in before(at)[begun:]


def _digest(message: Mapping[str, Any]) -> bytes:
    """Return a digest of one message; its last bit is set for an assistant's."""
    digest = hashlib.sha256(json.dumps(message, sort_keys=True, default=str).encode()).digest()
    return digest[: _DIGEST - 1] + bytes([digest[_DIGEST] & 0xFE | (message.get("role") == "assistant")])


def _shared(context: _Context, messages: Sequence[bytes]) -> int:
    """Return how many of these messages the longest prompt of a context has."""
    which = context.prompts[-1][1] if context.prompts else b""
    there = {which[at : at + _DIGEST] for at in range(0, len(which), _DIGEST)}
    return sum(message in there for message in messages)


def _rendered(length: int, which: bytes, said: bytes) -> int:
    """Return how many ids of a prompt with the messages `which` the same template renders for `said` too.

    If no answer follows these messages in `said`, the ids that open an answer are left out.
    """
    if not said.startswith(which):
        return 0
    follows = said[len(which) : len(which) + _DIGEST]
    return length - OPENING if follows and not follows[-1] & 1 else length


def _common(one: bytes, other: bytes, known: int) -> int:
    """Return the number of leading ids that two contexts have in common, of which `known` are known to be equal."""
    size, low, step = min(len(one), len(other)), known * _ID, _ID
    while low < size and one[low : low + step] == other[low : low + step]:
        low, step = low + step, 2 * step
    left, right = one[low : min(low + step, size)], other[low : min(low + step, size)]
    differing = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    if not differing:
        return size // _ID
    return low // _ID + ((differing & -differing).bit_length() - 1) // (8 * _ID)


def _shown(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    return decode(ids)[:SHOWN]
