"""What a chat template ends the assistant's turns with: the control token behind an answer, where there is one."""

from __future__ import annotations

from cairn.text.tokenizer import Tokenizer

_SAID = ("qzjfirst", "qzjsecond", "qzjthird")
"""Words that no template writes."""
_ROLES = ("user", "assistant", "user")


ANSWERED = [{"role": role, "content": text} for role, text in zip(_ROLES, _SAID, strict=True)]
"""A conversation of these."""


def turn_ends(text: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer, of the conversation ANSWERED as it was rendered; none where it cannot be told.

    What stands behind an answer may also begin the next turn. It does where the whole text begins with it, or where it
    is all that stands there and stood before the first question too; but not where the text begins with plain text and
    the question has it behind it as well: then turns begin with plain text.
    """
    before, _, rest = text.partition(_SAID[0])
    between, answered, rest = rest.partition(_SAID[1])
    behind, found, _ = rest.partition(_SAID[2])
    controls = tokenizer.controls.ids
    spans = list(tokenizer.controls.find(behind))
    if not answered or not found or not spans or behind[: spans[0][0]].strip():
        return frozenset()
    end = behind[slice(*spans[0])]
    opening = [before[slice(*span)] for span in tokenizer.controls.find(before)]
    bos = tokenizer.special_tokens.get("bos_token") or ""
    start = before.lstrip().removeprefix(bos).lstrip()
    closes = not any(at == 0 for at, _ in tokenizer.controls.find(start)) and between.lstrip().startswith(end)
    same = len(spans) == 1 and opening[-1:] == [end] and end != tokenizer.special_tokens.get("eos_token")
    begins = start.startswith(end) or (same and not closes)
    return frozenset() if begins else frozenset((controls[end],))
