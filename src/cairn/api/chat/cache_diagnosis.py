"""Diagnosis of cache misses for clients: where a prompt differs from that of an earlier answer that they name.

Recent prompts are compared as token ids, so a change that changes no token does not count. They are kept in memory
only: after a restart none is known.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TOKENS = 1 << 20
"""Tokens kept of all prompts together: 4 MB."""
OPENING = 16
"""Tokens at the end of a prompt with which a template may open the answer, and which its continuation lacks."""


class Divergence(NamedTuple):
    """The place at which a prompt diverges from an earlier one."""

    common: int
    """Length of the common prefix in tokens."""
    before: int
    """Length of the earlier prompt in tokens."""
    part: str | None
    """The named part of the request that differs; "" if none of them does, None if the earlier prompt was only
    continued."""


class _Asked(NamedTuple):
    parts: dict[str, bytes]
    prompt: array[int]


class RecentPrompts:
    """The prompts of recent answers, by tenant and the answer's id. The oldest are dropped first."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[str, str], _Asked] = OrderedDict()
        self._tokens = 0

    def note(self, tenant: str, id: str, parts: Mapping[str, Any], prompt: Sequence[int]) -> None:
        """Remember the prompt of an answer. `parts` of the request may be named as changed, in this order."""
        if len(prompt) > TOKENS:
            return
        asked = {name: _digest(value) for name, value in parts.items()}
        self._asked[tenant, id] = _Asked(asked, array("I", prompt))
        self._tokens += len(prompt) + OPENING
        while self._tokens > TOKENS:
            _, old = self._asked.popitem(last=False)
            self._tokens -= len(old.prompt) + OPENING

    def compare(self, tenant: str, id: str, parts: Mapping[str, Any], prompt: Sequence[int]) -> Divergence | None:
        """Return where a prompt diverges from that of an earlier answer; None if that answer is unknown."""
        before = self._asked.get((tenant, id))
        if before is None:
            return None
        common = _common(before.prompt, array("I", prompt))
        part = None
        if common < len(before.prompt) - OPENING:
            changed = (name for name, value in parts.items() if before.parts.get(name) != _digest(value))
            part = next(changed, "")
        return Divergence(common, len(before.prompt), part)


def message_diagnostics(divergence: Divergence | None) -> dict[str, Any] | None:
    """Return Anthropic's `diagnostics`; None if nothing diverged."""
    if divergence is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if divergence.part is None:
        return None
    kind = f"{divergence.part or 'messages'}_changed"
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": divergence.before - divergence.common}}


def response_diagnostics(divergence: Divergence | None, prompt: int, cached: int) -> dict[str, Any]:
    """Return OpenAI's `prompt_cache_diagnostics`.

    It is `unavailable` if nothing changed but the cache no longer had the prompt.
    """
    if divergence is None:
        return {"type": "comparison_response_not_found"}
    if divergence.part is None:
        return {"type": "cache_hit" if cached >= divergence.common - OPENING else "unavailable"}
    return {
        "type": "cache_miss",
        "reason": divergence.part or "input_changed",
        "cache_missed_tokens": prompt - divergence.common,
        "comparison_reusable_tokens": divergence.common,
    }


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "replace")).digest()


def _common(one: array[int], other: array[int]) -> int:
    """Return how many leading items are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared at memory speed
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
