"""The model's text -> content, reasoning and tool calls, each character to exactly one of them.

Text between `<think>` and `</think>` is reasoning, text between `<tool_call>` and `</tool_call>` is a tool call if it
is one (`cairn.text.tools`), all else is content. Line breaks that only set a tag apart belong to the tag: one before
`</think>` and `<tool_call>`, all behind `<think>`, `</think>` and `</tool_call>`. Reasoning that never ends is
reasoning. What comes out does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re

from cairn.text.tools import OPEN, CallScanner, call_id
from cairn.types import OutputFormat, ToolCallDelta

THINK = "<think>"
END_THINK = "</think>"
TAGS = (THINK, END_THINK, OPEN, "</tool_call>")
"""What the tokens of a model may spell as one: they must reach the splitter as text."""

Content = tuple[str, str]
"""("text" or "reasoning", characters)."""
Piece = Content | ToolCallDelta


class Splitter:
    """Splits one choice's text. Linear: a piece is searched once, with at most one tag's length held back."""

    def __init__(self, output: OutputFormat, request: int, choice: int) -> None:
        """`request` and `choice` make the ids of tool calls."""
        self._source = (request, choice)
        self._kind = "reasoning" if output.reasoning and output.reasoning_open else "text"
        self._trim = self._kind == "reasoning"
        tags = [tag for tag, on in ((THINK, output.reasoning), (OPEN, output.tools)) if on]
        self._tags = {"text": tags, "reasoning": [END_THINK]}
        self._patterns = {kind: _pattern(tags) for kind, tags in self._tags.items()}
        self._held = ""
        self._call: CallScanner | None = None
        self._calls = 0
        self._one_call = output.one_call
        self.complete_calls = 0
        """Tool calls that came out complete."""

    @property
    def over(self) -> bool:
        """The only call that is wanted is complete: what follows is no part of the answer."""
        return self._one_call and self.complete_calls > 0

    def push(self, text: str) -> list[Piece]:
        """Split what is certain by now."""
        pieces: list[Piece] = []
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text) and not self.over:
            if self._call is not None:
                at, text = self._feed_call(self._call, text, at, pieces)
            else:
                at = self._feed_text(text, at, pieces)
        return pieces

    def finish(self, *, by_model: bool) -> list[Piece]:
        """The text ends: what was held back. `by_model`: it ended by itself and was not cut."""
        pieces: list[Piece] = []
        call, self._call = self._call, None
        if call is not None:
            if by_model:
                pieces += call.end()
            if call.complete:
                self.complete_calls += 1
            elif not call.began:
                self._put(pieces, "text", call.rest + call.again)
        self._put(pieces, self._kind, self._held)
        self._held = ""
        return pieces

    def _feed_text(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Pass on content or reasoning up to the next tag, or up to what may become one."""
        if self._trim:
            while at < len(text) and text[at] == "\n":
                at += 1
            if at == len(text):
                return at
            self._trim = False
        pattern = self._patterns[self._kind]
        found = pattern.search(text, at) if pattern else None
        if found is None:
            end = self._certain(text, at)
            self._held = text[end:]
            self._put(pieces, self._kind, text[at:end])
            return len(text)
        self._put(pieces, self._kind, text[at : found.start()])
        self._open(found.group())
        return found.end()

    def _open(self, tag: str) -> None:
        """Go on behind a tag, which may have a line break before it."""
        if tag.endswith(OPEN):
            self._call = self._next_call(tag)
            return
        self._kind = "reasoning" if tag.endswith(THINK) and not tag.endswith(END_THINK) else "text"
        self._trim = True

    def _feed_call(self, call: CallScanner, text: str, at: int, pieces: list[Piece]) -> tuple[int, str]:
        at, deltas = call.feed(text, at)
        pieces += deltas
        if not call.complete and not call.failed:
            return at, text
        self._calls += call.began
        self.complete_calls += call.complete
        self._call = self._next_call("") if call.followed else None
        self._trim = call.closed
        if call.failed:
            self._put(pieces, "text", call.rest)
            again = call.again
            return (at - len(again), text) if len(again) <= at else (0, again + text[at:])
        return at, text

    def _next_call(self, opening: str) -> CallScanner:
        return CallScanner(self._calls, call_id(*self._source, self._calls), opening)

    def _certain(self, text: str, at: int) -> int:
        """Where the end of `text` begins that may become a tag."""
        tags = self._tags[self._kind]
        end = len(text)
        bracket = text.rfind("<", max(at, end - len(OPEN)))
        if bracket >= 0 and any(tag.startswith(text[bracket:]) for tag in tags):
            end = bracket
        broken = end > at and text[end - 1] == "\n" and (self._kind == "reasoning" or OPEN in tags)
        return end - 1 if broken else end

    def _put(self, pieces: list[Piece], kind: str, text: str) -> None:
        if text:
            pieces.append((kind, text))


def _pattern(tags: list[str]) -> re.Pattern[str] | None:
    """Any of `tags`, with one line break before those that close something or open a call."""
    if not tags:
        return None
    return re.compile("|".join(re.escape(tag) if tag == THINK else "\n?" + re.escape(tag) for tag in tags))
