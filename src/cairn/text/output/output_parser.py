"""The model's text -> content, reasoning and tool calls, each character to exactly one of them.

An answer that begins with `<think>`, or what the model has in its place (`cairn.text.output.reasoning_formats`),
perhaps behind white space, begins with reasoning, and so does one whose prompt ends with it. Reasoning ends at
`</think>` or not at all. Behind it, and behind the first content, such tags are content like any other text.
`<tool_call>` in content opens a tool call if it is one, and so is an answer a call that is nothing but one
(`cairn.text.output.tool_parser`); all else is content. Line breaks that only set a tag apart belong to the tag: one
before `</think>` and `<tool_call>`, all behind `<think>`, `</think>` and `</tool_call>`. What comes out does not depend
on how the text was cut into pieces.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

from cairn.text.output.call_formats import FORMATS, form_by, markers_of
from cairn.text.output.call_section import SectionReader
from cairn.text.output.harmony import HarmonySplitter
from cairn.text.output.pieces import PUSHED, Piece
from cairn.text.output.reasoning_formats import HARMONY, own_markers, thoughts
from cairn.text.output.tool_parser import OPEN, BareReader, CallReader, ParsedCall, call_id
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat

TAGS = (OPEN, "</tool_call>")
"""What the tokens of a model may spell as one: they must reach the splitter as text."""


def all_markers(find: Callable[[str], int | None]) -> tuple[str, ...]:
    """The same of every form of calls and of reasoning, where the model's tokens, which `find` finds, may be one."""
    return tuple(dict.fromkeys((*TAGS, *own_markers(find), *markers_of(FORMATS))))


def markers(output: OutputFormat) -> tuple[str, ...]:
    """Those of a format."""
    if not (output.reasoning or output.tools):
        return ()
    form = form_by(output.calls)
    found = (*TAGS, *thoughts(output).markers)
    return found if form is None else (*found, *form.markers)


def further_markers(output: OutputFormat) -> tuple[str, ...]:
    """Those of a form that is no other model's: `all_markers` lacks them."""
    form = form_by(output.calls)
    return () if form is None or form in FORMATS else form.markers


MOST_LEAD = 16
"""White space before `<think>` or a call without tags; behind more it is content."""


def splitter(output: OutputFormat, request: int, choice: int) -> Splitter | HarmonySplitter:
    """What splits an answer. `request` and `choice` make the ids of tool calls."""
    made = HarmonySplitter if output.thoughts == HARMONY.name else Splitter
    return made(output, request, choice)


class Splitter:
    """Splits one choice's text. Linear: a piece is searched once, with at most one tag's length held back."""

    def __init__(self, output: OutputFormat, request: int, choice: int) -> None:
        """`request` and `choice` make the ids of tool calls."""
        self._output = output
        self._source = (request, choice)
        self._thought = thoughts(output)
        self._kind = "reasoning" if output.reasoning and output.reasoning_open else "text"
        self._trim = self._kind == "reasoning"
        self._thinks = output.reasoning and not output.reasoning_open
        """Reasoning may begin here."""
        self._lead = True
        """No content has come yet."""
        self._form = form_by(output.calls) if output.tools else None
        self._sign = self._form.begin.strip() if self._form is not None else ""
        marks = dict.fromkeys([OPEN, self._sign] if self._sign else [OPEN])
        self._tags = {"text": list(marks) if output.tools else [], "reasoning": [self._thought.close]}
        self._patterns = {
            kind: re.compile("|".join("\n?" + re.escape(tag) for tag in tags)) if tags else None
            for kind, tags in self._tags.items()
        }
        self._held = ""
        self._one_call = output.one_call
        self._call: CallReader | SectionReader | None = None
        self._bare: BareReader | None = None
        self.complete_calls = 0
        """Tool calls that came out; each is complete."""
        self.unread = False
        """Something began as a call does and was none, so that it is content."""

    @property
    def over(self) -> bool:
        """The only call that is wanted is complete: what follows is no part of the answer."""
        return self._one_call and self.complete_calls > 0 and self._call is None

    @property
    def may_call(self) -> bool:
        """What is being read may be a call, and may turn out to be content."""
        return self._call is not None or self._bare is not None

    def push(self, text: str) -> list[Piece]:
        """Split what is certain by now."""
        pieces: list[Piece] = []
        if len(text) <= PUSHED:  # a token's, nearly always
            self._push(text, pieces)
            return pieces
        for start in range(0, len(text), PUSHED):
            self._push(text[start : start + PUSHED], pieces)
        return pieces

    def _push(self, text: str, pieces: list[Piece]) -> None:
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text) and not self.over:
            if self._call is not None:
                at, text = self._feed_call(self._call, text, at, pieces)
            elif self._bare is not None:
                at, text = self._feed_bare(self._bare, text, at)
            else:
                at = self._feed_text(text, at, pieces)

    def finish(self, *, by_model: bool) -> list[Piece]:
        """The text ends: what was held back. `by_model`: it ended by itself and was not cut."""
        pieces: list[Piece] = []
        bare, self._bare = self._bare, None
        if bare is not None:
            if (call := bare.finish(by_model=by_model)) is not None:
                self._put_calls(pieces, [call])
            else:
                pieces += self.push(bare.kept)
        while self._call is not None:
            reader, self._call = self._call, None
            reader.finish(by_model=by_model)
            self._put_calls(pieces, reader.take())
            if reader.failed:
                self.unread = True
                self._put(pieces, "text", reader.rest)
                pieces += self.push(reader.again)
        self._put(pieces, self._kind, self._held)
        self._held = ""
        return pieces

    def copy(self) -> Splitter:
        """Another one in the same state."""
        return copy.deepcopy(self, {id(self._output): self._output})

    def release(self) -> list[Piece]:
        """Content held back because a tag may begin with it: something else follows."""
        pieces: list[Piece] = []
        if self._kind == "text" and not self._lead:
            self._put(pieces, "text", self._held)
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
        if self._lead and self._kind == "text":
            return self._feed_lead(text, at)
        pattern = self._patterns[self._kind]
        found = pattern.search(text, at) if pattern else None
        if found is None:
            end = self._certain(text, at)
            self._held = text[end:]
            self._put(pieces, self._kind, text[at:end])
            return len(text)
        self._put(pieces, self._kind, text[at : found.start()])
        if self._kind == "text":
            self._call = self._reader(found.group())
        else:
            self._kind = "text"
            self._trim = True
        return found.end()

    def _reader(self, opening: str) -> CallReader | SectionReader:
        """What reads behind a tag."""
        if self._form is not None and opening.endswith(self._sign):
            return SectionReader(opening, self._output, self._form)
        return CallReader(opening, self._output)

    def _feed_lead(self, text: str, at: int) -> int:
        """Find out what an answer begins with; nothing is passed on, and what may be either is held back."""
        first = at
        while first < len(text) and first - at <= MOST_LEAD and text[first].isspace():
            first += 1
        think = self._thought.open
        begin = text[first : first + len(think)] if first - at <= MOST_LEAD else "no tag"
        if not begin or (self._thinks and begin != think and think.startswith(begin)):
            self._held = text[at:]
            return len(text)
        thinks, self._thinks = self._thinks and begin == think, False
        if thinks:
            self._kind = "reasoning"
            self._trim = True
            return first + len(think)
        self._lead = False
        if self._output.offered and begin[0] in "{`":
            self._bare = BareReader(text[at:first], self._output)
            return first
        return at

    def _feed_call(
        self, reader: CallReader | SectionReader, text: str, at: int, pieces: list[Piece]
    ) -> tuple[int, str]:
        at = reader.feed(text, at)
        self._put_calls(pieces, reader.take())
        if reader.closed or reader.failed:
            self._call = None
            self._trim = reader.closed
        if not reader.failed:
            return at, text
        self.unread = True
        self._put(pieces, "text", reader.rest)
        return _back(reader.again, text, at)

    def _feed_bare(self, reader: BareReader, text: str, at: int) -> tuple[int, str]:
        at = reader.feed(text, at)
        if not reader.failed:
            return at, text
        self._bare = None
        return _back(reader.kept, text, at)

    def _certain(self, text: str, at: int) -> int:
        """Where the end of `text` begins that may become a tag."""
        tags = self._tags[self._kind]
        end = len(text)
        first = max(at, end - max(map(len, tags), default=0) + 1)
        for start in {tag[0] for tag in tags}:
            place = text.find(start, first)
            while place >= 0 and not any(tag.startswith(text[place:]) for tag in tags):
                place = text.find(start, place + 1)
            end = min(end, place) if place >= 0 else end
        return end - 1 if tags and end > at and text[end - 1] == "\n" else end

    def _put(self, pieces: list[Piece], kind: str, text: str) -> None:
        if text:
            pieces.append((kind, text))

    def _put_calls(self, pieces: list[Piece], calls: list[ParsedCall]) -> None:
        for call in calls[: 1 - self.complete_calls] if self._one_call else calls:
            index = self.complete_calls
            self.complete_calls += 1
            id = call_id(*self._source, index)
            pieces.append(ToolCallDelta(index=index, id=id, name=call.name, arguments=call.arguments))


def _back(again: str, text: str, at: int) -> tuple[int, str]:
    """The place and the text to go on with where `again`, which ends before text[at], is to be read once more."""
    return (at - len(again), text) if len(again) <= at else (0, again + text[at:])
