"""Making room in a conversation that no longer fits the context: drop or summarise its oldest turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cairn.types.errors import CairnError

if TYPE_CHECKING:
    from cairn.cli.common.sampling import AnswerSource

Messages = list[dict[str, Any]]

OFFER = """\
What now?
  d  drop the oldest turns, and ask again
  s  replace them by a summary, and ask again
  n  start a new chat with this question
Enter alone takes the question back."""
_ASK = "Summarise our conversation so far in at most 150 words: names, facts, decisions, and what is still open."
_RECALL = "What did we say before this?"
_SUMMARY_TOKENS = 300


def older_half(messages: Sequence[dict[str, Any]]) -> int:
    """Return how many messages make up the older half by characters: whole turns, at least one."""
    sizes = [len(str(one.get("content") or "")) for one in messages]
    half, total, count = sum(sizes) / 2, 0, 0
    for number, (one, size) in enumerate(zip(messages, sizes, strict=True)):
        if one["role"] == "user" and number:
            count = number
            if total >= half:
                break
        total += size
    return count or len(messages)


def summary_of(model: AnswerSource, older: Messages, system: str | None) -> Messages:
    """Return a question and an answer that summarise older messages. CairnError if the model gives no summary."""
    first = [{"role": "system", "content": system}] if system else []
    answering = model.chat(
        [*first, *older, {"role": "user", "content": _ASK}], max_tokens=_SUMMARY_TOKENS, temperature=0
    )
    try:
        for _ in answering:
            pass
        text = answering.answer.text.strip()
    finally:
        answering.close()
    if not text:
        raise CairnError("the model gave no summary")
    return [{"role": "user", "content": _RECALL}, {"role": "assistant", "content": text}]
