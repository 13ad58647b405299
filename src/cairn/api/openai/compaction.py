"""POST /v1/responses/compact: a conversation in, items that stand for it out.

The model that is served writes a summary; it comes back as a `compaction` item, which a later request sends in place of
what was said. Messages of the system and of developers stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cairn.api.chat.exchange import ChoiceStream
from cairn.api.chat.reasoning_text import pack
from cairn.api.openai.response_answer import completed
from cairn.api.openai.responses_items import items_of
from cairn.types.errors import CairnError
from cairn.types.outputs import Delta, Done

TASK = (
    "Write a summary of this conversation from which it can go on without the rest: what the user wants, what was "
    "decided and found out, names of files and values that matter, what tools gave, and what is still to be done. "
    "Write the summary and nothing else."
)
OPENING = "Summary of the conversation so far:\n"
SUMMARY_TOKENS = 4096
"""The longest summary."""


def compacting(chat: dict[str, Any]) -> dict[str, Any]:
    """The chat that asks for a summary of another. Its tools are told, so that its prefix is found in the cache."""
    messages = [*chat["messages"], {"role": "user", "content": TASK}]
    most = chat.get("max_completion_tokens", SUMMARY_TOKENS)
    wanted = {"messages": messages, "max_completion_tokens": most, "reasoning_effort": "none"}
    left_out = ("tool_choice", "response_format", "logprobs", "top_logprobs")
    return {name: value for name, value in chat.items() if name not in left_out} | wanted


class CompactedAnswer:
    """The adapter of a summary, which is only ever sent whole."""

    def __init__(self, id: str, messages: Sequence[dict[str, Any]], choices: Sequence[ChoiceStream]) -> None:
        """`messages`: what is compacted."""
        (self._choice,) = choices
        self._id = id
        kept = [one for one in messages if one["role"] in ("system", "developer")]
        self._kept = items_of(kept, {}, id.removeprefix("resp_"))

    def begin(self) -> bytes:
        """Nothing is streamed."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Nothing is streamed."""
        return b""

    def finish(self, index: int, done: Done, reason: str) -> bytes:
        """Nothing is streamed."""
        return b""

    def end(self) -> bytes:
        """Nothing is streamed."""
        return b""

    def error(self, error: CairnError) -> bytes:
        """Nothing is streamed."""
        return b""

    def heartbeat(self) -> bytes:
        """Nothing is streamed."""
        return b""

    def whole(self) -> dict[str, Any]:
        """The items, and what they cost."""
        done = self._choice.done
        assert done is not None
        text = OPENING + self._choice.said.text
        item = {"id": "cmp_" + self._id.removeprefix("resp_"), "type": "compaction", "encrypted_content": pack(text)}
        head = {"id": self._id, "object": "response.compaction", "created_at": int(time.time())}
        usage = completed({}, [], done.usage, self._choice.reasoning_tokens, cut=False)["usage"]
        return head | {"output": [*self._kept, item], "usage": usage}
