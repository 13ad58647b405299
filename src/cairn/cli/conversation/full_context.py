"""Making room in a conversation that no longer fits the context: drop or summarise its oldest turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cairn.types.errors import CairnError, ContextTooLong

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
_TRIES = 8
_SHORTER = 0.6
"""What is left of the older texts at each try, if they and the summary do not fit the context together."""


def older_half(messages: Sequence[dict[str, Any]]) -> int:
    """Return how many messages make up the older half by characters: whole turns, at least one.

    Fewer than half if the newest turn is that long, but at least a quarter: else hardly any room would be made.
    """
    sizes = [len(str(one.get("content") or "")) for one in messages]
    ends = [number for number, one in enumerate(messages) if one["role"] == "user" and number]
    for least in (0.5, 0.25):
        for end in ends:
            if sum(sizes[:end]) >= least * sum(sizes):
                return end
    return len(messages)


def summary_of(model: AnswerSource, older: Messages, system: str | None, context: int | None = None) -> Messages:
    """Return a question and an answer that summarise older messages. CairnError if the model gives no summary.

    `context`: its tokens, if known. Where the messages leave no room for a summary, their ends are summarised.
    """
    first = [{"role": "system", "content": system}] if system else []
    most = min(_SUMMARY_TOKENS, context // 6) if context else _SUMMARY_TOKENS
    text, room = "", False
    for _ in range(_TRIES):
        try:
            text, room = _answer_of(model, [*first, *older, {"role": "user", "content": _ASK}], most)
        except ContextTooLong as error:
            most = min(most, max(1, (error.context or context or 6 * most) // 6))
        if room:
            break
        older = _newest_part(older)
    if not text:
        raise CairnError("the model gave no summary")
    return [{"role": "user", "content": _RECALL}, {"role": "assistant", "content": text}]


def _answer_of(model: AnswerSource, messages: Messages, most: int) -> tuple[str, bool]:
    """Return an answer of at most `most` tokens, and whether there was room for that many."""
    answering = model.chat(messages, max_tokens=most, temperature=0)
    try:
        for _ in answering:
            pass
        answer = answering.answer
    finally:
        answering.close()
    cut = answer.finish_reason == "length" and answer.usage is not None and answer.usage.completion_tokens < most
    return answer.text.strip(), not cut


def _newest_part(messages: Messages) -> Messages:
    """Return the newest turns, or the ends of the texts of a single turn."""
    later = [number for number, one in enumerate(messages) if one["role"] == "user" and number]
    if later:
        return messages[later[0] :]
    texts = [str(one.get("content") or "") for one in messages]
    return [
        {**one, "content": text[len(text) - int(_SHORTER * len(text)) :]}
        for one, text in zip(messages, texts, strict=True)
    ]
