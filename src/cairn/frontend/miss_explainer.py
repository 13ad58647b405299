"""Recent contexts of each tenant, with which the front explains cache misses better than the worker can.

The worker knows only keys, so a prompt whose third message was edited is `never seen` to it. This table has the ids of
each tenant's recent contexts, so that the report can name the place where a prompt differs and show both sides. A
tenant is known by its salt, which no two share; nothing here is ever compared with, or shown to, another tenant.
Contexts that were computed with other adapters are not compared either: they share no KV.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.types.model_spec import BLOCK_TOKENS, CHUNK_TOKENS
from cairn.types.request import Adapters
from cairn.types.stats import Differs, Miss, MissReason

CONTEXTS = 256
"""Most contexts of one tenant with the same adapters."""
TOKENS = 1 << 18
"""Most tokens of these contexts: 1 MB."""
TENANTS = 64
"""Most tenants; one counts again for each combination of adapters."""
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
    serial: int
    """Number of the note that made it: the latest has the highest."""
    prompts: tuple[tuple[int, bytes], ...]
    """(tokens, concatenated digests of messages) of the prompts that it begins with."""
    messages: frozenset[bytes]
    """Digests of the longest prompt's messages."""


class _Contexts:
    """The contexts of one tenant with the same adapters, by their ids as bytes. None of them begins with another."""

    __slots__ = ("_ordered", "_serials", "_size", "by_ids")

    def __init__(self) -> None:
        self.by_ids: dict[bytes, _Context] = {}
        """In the order of use, the latest last."""
        self._ordered: list[bytes] = []
        """The same ids, sorted: contexts with a common beginning are neighbours."""
        self._serials = itertools.count()
        self._size = 0

    def note(self, ids: bytes, prompt: int, messages: Sequence[bytes]) -> None:
        """Add a context, in the place of those that it continues or that continue it."""
        prompts = {prompt: b"".join(messages)} if messages else {}
        at = bisect_left(self._ordered, ids)
        if at < len(self._ordered) and self._ordered[at].startswith(ids):
            ids = self._ordered[at]
            prompts = dict(self._remove(ids, at).prompts) | prompts
        elif at and ids.startswith(self._ordered[at - 1]):  # all between the two would begin with it, so none is
            at -= 1
            prompts = dict(self._remove(self._ordered[at], at).prompts) | prompts
        self._ordered.insert(at, ids)
        self._size += len(ids)
        kept = tuple(prompts.items())[-CONTEXTS:]
        longest = kept[-1][1] if kept else b""
        digests = frozenset(longest[n : n + _DIGEST] for n in range(0, len(longest), _DIGEST))
        self.by_ids[ids] = _Context(next(self._serials), kept, digests)
        while len(self.by_ids) > CONTEXTS or self._size > TOKENS * _ID:
            oldest = next(iter(self.by_ids))
            self._remove(oldest, bisect_left(self._ordered, oldest))

    def _remove(self, ids: bytes, at: int) -> _Context:
        del self._ordered[at]
        self._size -= len(ids)
        return self.by_ids.pop(ids)

    def nearest(self, ids: bytes) -> tuple[int, Sequence[bytes]]:
        """Return how many leading ids of a prompt the nearest contexts have, and these contexts; none for 0."""
        ordered = self._ordered
        first = last = bisect_left(ordered, ids)
        same = max((_common(one, ids) for one in ordered[max(0, first - 1) : first + 1]), default=0)
        if not same:
            return 0, ()
        wanted = ids[: same * _ID]
        while first and ordered[first - 1].startswith(wanted):
            first -= 1
        while last < len(ordered) and ordered[last].startswith(wanted):
            last += 1
        return same, ordered[first:last]


class RecentContexts:
    """The table of contexts. Bounded in tenants, contexts and tokens; the least recently used are evicted."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[tuple[bytes, Adapters], _Contexts] = OrderedDict()
        """By the tenant's salt and the adapters."""

    def note(
        self,
        salt: bytes,
        ids: Sequence[int],
        prompt: int,
        messages: Sequence[bytes] = (),
        *,
        adapters: Adapters = (),
    ) -> None:
        """Add a context that was computed with `adapters`; its first `prompt` ids were rendered from `messages`."""
        data = array("I", ids).tobytes()
        if len(data) > TOKENS * _ID:
            return
        self._tenants.setdefault((salt, adapters), _Contexts()).note(data, prompt, messages)
        self._tenants.move_to_end((salt, adapters))
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def forget(self, salt: bytes) -> None:
        """Forget a tenant's contexts, with any adapters: some of its text was erased and must not reappear here."""
        for key in [one for one in self._tenants if one[0] == salt]:
            del self._tenants[key]

    def explain(
        self,
        miss: Miss,
        salt: bytes,
        ids: Sequence[int],
        origin: PromptOrigin,
        decode: Callable[[Sequence[int]], str],
        *,
        adapters: Adapters = (),
    ) -> Miss:
        """Return the worker's miss, or one with a better reason. Only `never seen` can be improved."""
        if miss.reason != "never seen":
            return miss
        if origin.why is not None:
            return msgspec.structs.replace(miss, reason=origin.why)
        at, again, known = self._nearest((salt, adapters), array("I", ids).tobytes(), origin.messages)
        if not known or at < miss.position:
            return miss
        size, end = len(known) // _ID, (miss.position // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        if at > miss.position + BLOCK_TOKENS:
            # The first missing block was computed before, but only whole chunks may have been stored.
            return msgspec.structs.replace(miss, reason="evicted" if at >= end and size > end else "not stored")
        if at < size and at < len(ids):
            differs = Differs(
                position=at,
                known=_shown(decode, array("I", known[at * _ID : (at + SHOWN_TOKENS) * _ID])),
                given=_shown(decode, ids[at : at + SHOWN_TOKENS]),
            )
            reason: MissReason = "template" if again else "different tokens"
            if not again and _within(origin.system, lambda count: decode(ids[:count]), at, len(ids)):
                reason = "system text changed"
            return Miss(position=miss.position, reason=reason, differs=differs)
        return miss

    def _nearest(self, key: tuple[bytes, Adapters], data: bytes, messages: Sequence[bytes]) -> tuple[int, bool, bytes]:
        """Return the longest common prefix's length, whether the messages are the same, and the context that has it.

        "The same" means that a template rendered other ids from the same messages. Of several contexts, prefer one with
        the same messages, then the one with most of the prompt's messages in any place, since an edited message is
        followed by unedited ones, then the latest. The context is empty if none begins with the prompt's first id.
        """
        if (contexts := self._tenants.get(key)) is None:
            return 0, False, b""
        same, nearest = contexts.nearest(data)
        digests, best, known = b"".join(messages), (False, -1, 0), b""
        for ids in nearest:
            context = contexts.by_ids[ids]
            again = any(same < _rendered(length, which, digests) for length, which in context.prompts)
            rank = again, len(context.messages.intersection(messages)), context.serial
            if rank > best:
                best, known = rank, ids
        return same, best[0], known


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


def _rendered(length: int, which: bytes, said: bytes) -> int:
    """Return how many ids of a prompt with the messages `which` the same template renders for `said` too.

    If no answer follows these messages in `said`, the ids that open an answer are left out.
    """
    if not said.startswith(which):
        return 0
    follows = said[len(which) : len(which) + _DIGEST]
    return length - OPENING if follows and not follows[-1] & 1 else length


def _common(one: bytes, other: bytes) -> int:
    """Return the number of leading ids that two contexts have in common."""
    size, low, step = min(len(one), len(other)), 0, _ID
    while low < size and one[low : low + step] == other[low : low + step]:
        low, step = low + step, 2 * step
    left, right = one[low : min(low + step, size)], other[low : min(low + step, size)]
    differing = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    if not differing:
        return size // _ID
    return low // _ID + ((differing & -differing).bit_length() - 1) // (8 * _ID)


def _shown(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    return decode(ids)[:SHOWN]
