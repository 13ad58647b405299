"""How models set what they think apart from what they answer: one record a form, seen in the chat template.

A model whose template shows none of the table's signs writes `<think>` and `</think>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cairn.types.request import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtFormat:
    """One way to write thoughts."""

    name: str = ""
    signs: tuple[str, ...] = ()
    """A template that shows this form holds all of these."""
    open: str
    close: str
    """What ends a thought and begins an answer."""
    until: str = ""
    """What ends a thought, whatever follows it; "" where that is `close`."""
    markers: tuple[str, ...]
    """What of it may be control tokens of a model, and must be read as text; the first stands in `open`."""
    turn: str = ""
    """What an answer's own tokens stand behind, where the template writes something around an answer that the model
    writes too, such as the header of a message; "" where an answer is all that stands in its place."""
    over: tuple[str, ...] = ()
    """What ends such an answer: the model's last token, or what the template has in its place."""

    answer: tuple[str, str] = ("", "")
    """What stands around all that follows the thought, where something does."""
    shut: bool = False
    """An answer that is whole ends with a control token of its own, before what is in `over`."""

    def place(self, before: str, behind: str) -> tuple[str, str] | None:
        """What stands before and behind all that a model said, of what stands before and behind an answer's content or
        a call's arguments; None where that cannot be told."""
        if not self.turn:
            return before, behind
        start = before.rfind(self.turn)
        ends = [at for one in self.over if (at := behind.find(one)) >= 0]
        return (before[: start + len(self.turn)], behind[min(ends) :]) if start >= 0 and ends else None


THINK = ThoughtFormat(open="<think>", close="</think>", markers=("<think>", "</think>"))
HARMONY = ThoughtFormat(
    name="harmony",
    signs=("<|channel|>", "<|message|>"),
    open="<|channel|>analysis<|message|>",
    close="<|end|><|start|>assistant<|channel|>final<|message|>",
    until="<|end|>",
    markers=("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>"),
    turn="<|start|>assistant",
    over=("<|end|>", "<|call|>", "<|return|>"),
)
THOUGHTS: tuple[ThoughtFormat, ...] = (
    HARMONY,
    ThoughtFormat(
        name="gemma",
        signs=("<|channel>", "<channel|>"),
        open="<|channel>thought",
        close="<channel|>",
        markers=("<|channel>", "<channel|>"),
    ),
    ThoughtFormat(
        name="cohere",
        signs=("<|START_THINKING|>",),
        open="<|START_THINKING|>",
        close="<|END_THINKING|>",
        markers=("<|START_THINKING|>", "<|END_THINKING|>"),
        turn="<|CHATBOT_TOKEN|>",
        over=("<|END_OF_TURN_TOKEN|>",),
        shut=True,
    ),
    ThoughtFormat(
        name="mistral", signs=("[THINK]",), open="[THINK]", close="[/THINK]", markers=("[THINK]", "[/THINK]")
    ),
    ThoughtFormat(
        name="seed",
        signs=("<seed:think>",),
        open="<seed:think>",
        close="</seed:think>",
        markers=("<seed:think>", "</seed:think>"),
    ),
    ThoughtFormat(
        name="apertus",
        signs=("<|inner_prefix|>",),
        open="<|inner_prefix|>",
        close="<|inner_suffix|>",
        markers=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    ThoughtFormat(
        name="hunyuan",
        signs=("<answer>", "</answer>"),
        open="<think>",
        close="</think>",
        markers=("<think>", "</think>", "<answer>", "</answer>"),
        answer=("<answer>", "</answer>"),
    ),
    THINK,
)
"""The first whose signs a template holds is its form."""

FORMS = {one.name: one for one in THOUGHTS}
_EMPTY = "|".join(rf"{re.escape(one.open)}\s*{re.escape(one.close)}" for one in THOUGHTS)
EMPTY = re.compile(rf"(?:{_EMPTY})\s*\Z")
"""A thought without words at the end of a text."""


def thoughts_of(templates: Iterable[str]) -> ThoughtFormat:
    """The form of a model, by its templates."""
    texts = [*templates, ""]
    return next(one for one in THOUGHTS if any(all(sign in text for sign in one.signs) for text in texts))


def thoughts(output: OutputFormat) -> ThoughtFormat:
    """The form by which an answer is read."""
    return FORMS.get(output.thoughts, THINK)


def thinks(form: ThoughtFormat, templates: Iterable[str]) -> bool:
    """Whether a model with these templates knows reasoning."""
    return bool(form.signs) or any(tag in text for tag in (form.open, form.close) for text in templates)


def own_markers(find: Callable[[str], int | None]) -> tuple[str, ...]:
    """The markers of the forms that a model may write, by the tokens that `find` knows. Those of harmony end the
    answers of other models, and count where a token is there that no other has."""
    forms = [one for one in THOUGHTS if one is not HARMONY or find("<|constrain|>") is not None]
    return tuple(dict.fromkeys(marker for one in forms for marker in one.markers))
