"""The formats in which models mark their reasoning: one record per format, detected in the chat template.

A model whose template has none of the table's signs uses `<think>` and `</think>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cairn.types.request import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtFormat:
    """One way to mark reasoning."""

    name: str = ""
    signs: tuple[str, ...] = ()
    """Texts that all occur in a template with this format."""
    open: str
    close: str
    """Text that ends reasoning and begins the answer."""
    until: str = ""
    """Text that ends reasoning, whatever follows; "" if that is `close`."""
    markers: tuple[str, ...]
    """Parts that may be control tokens of a model and must be read as text; the first is in `open`."""
    turn: str = ""
    """Text after which the model's own tokens begin, if the model also writes headers that the template writes around
    an answer; "" if the answer is all that the model writes."""
    over: tuple[str, ...] = ()
    """Texts that end such an answer: the model's last token, or the template's replacement for it."""

    answer: tuple[str, str] = ("", "")
    """Tags around everything after the reasoning; empty without them."""
    shut: bool = False
    """Whether a complete answer ends with a control token of its own, before a text of `over`."""

    def place(self, before: str, behind: str) -> tuple[str, str] | None:
        """Return the texts before and after everything that the model wrote.

        `before` and `behind` surround an answer's content or a call's arguments in a rendering. None if it is not
        certain.
        """
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
"""All formats; the first whose signs occur in a template is its format."""

FORMS = {one.name: one for one in THOUGHTS}
_EMPTY = "|".join(rf"{re.escape(one.open)}\s*{re.escape(one.close)}" for one in THOUGHTS)
EMPTY = re.compile(rf"(?:{_EMPTY})\s*\Z")
"""Empty reasoning at the end of a text."""


def thoughts_of(templates: Iterable[str]) -> ThoughtFormat:
    """Return the reasoning format of a model with these templates."""
    texts = [*templates, ""]
    return next(one for one in THOUGHTS if any(all(sign in text for sign in one.signs) for text in texts))


def thoughts(output: OutputFormat) -> ThoughtFormat:
    """Return the reasoning format with which an answer is parsed."""
    return FORMS.get(output.thoughts, THINK)


def thinks(form: ThoughtFormat, templates: Iterable[str]) -> bool:
    """Return whether a model with these templates marks reasoning."""
    return bool(form.signs) or any(tag in text for tag in (form.open, form.close) for text in templates)


def own_markers(find: Callable[[str], int | None]) -> tuple[str, ...]:
    """Return the markers of all formats; `find` looks up the model's token ids.

    Harmony's markers end the answers of other models, so they are included only if the model has a token that only
    Harmony has.
    """
    forms = [one for one in THOUGHTS if one is not HARMONY or find("<|constrain|>") is not None]
    return tuple(dict.fromkeys(marker for one in forms for marker in one.markers))
