"""The model's text -> content, reasoning and tool calls, each character to exactly one of them.

An answer that begins with `<think>`, or what the model has in its place (`cairn.text.output.reasoning_formats`),
perhaps behind white space, begins with reasoning, and so does one whose prompt ends with it. Reasoning ends at
`</think>` or not at all. Behind it, and behind the first content, such tags are content like any other text.
`<tool_call>` in content opens a tool call if it is one, and so is an answer a call that is nothing but one
(`cairn.text.output.tool_parser`). A call without that tag (`unmarked_calls`) and one in reasoning that never ends
(`thought_calls`) are calls too, unless a grammar holds them; all else is content. Line breaks that only set a tag
apart belong to the tag: one before `</think>` and `<tool_call>`, all behind `<think>`, `</think>` and `</tool_call>`.
What comes out does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable

from cairn.text.output.begun_calls import BegunCall
from cairn.text.output.call_formats import FORMATS, form_by, markers_of
from cairn.text.output.call_reader import CallReader
from cairn.text.output.call_section import SectionReader
from cairn.text.output.harmony import HarmonySplitter
from cairn.text.output.reasoning_formats import HARMONY, own_markers, thoughts
from cairn.text.output.thought_calls import MOST_TRIED, ThoughtCallReader
from cairn.text.output.token_kinds import Run
from cairn.text.output.tool_parser import OPEN, PUSHED, ParsedCall, Piece, call_id
from cairn.text.output.unmarked_calls import (
    BareReader,
    BracketReader,
    LineWatch,
    openings,
    unmarked_form,
    unmarked_reader,
)
from cairn.types.outputs import TokenKind, ToolCallDelta
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


_BLANK = re.compile(r"\s*+")
MOST_BLANK = 256
"""White space behind the tag that ends a content; behind more it is text."""
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
        self._begins = (OPEN, *(self._form.begins if self._form is not None else ())) if output.tools else ()
        self._loose_form = unmarked_form(output)
        self._lines = (
            None
            if self._loose_form is None
            else LineWatch(openings(self._loose_form, [tool.name for tool in output.offered]))
        )
        self._thought_calls = MOST_TRIED if output.offered and not output.held else 0
        """How many more marks in reasoning may begin calls."""
        self._wrapped = False
        """The content stands in the tags that the model puts around its answers."""
        self._wrap_end = ""
        """The tag that may end such a content, and the blanks behind it."""
        self._tags: tuple[str, ...] = ()
        self._pattern: re.Pattern[str] | None = None
        self._look_for_tags()
        self._held = ""
        self._ahead: list[str] = []
        """What is still to be read of what came, in pieces, the last one first."""
        self._one_call = output.one_call
        self._call: CallReader | SectionReader | BracketReader | None = None
        self._bare: BareReader | None = None
        self._thinking: ThoughtCallReader | None = None
        self._told: int | None = None
        """Pieces of the arguments that were passed on of a call that is being written; None before its name was."""
        self._said = 0
        """Characters in them."""
        self._made: set[tuple[str, str]] = set()
        """The calls that came out, where one that comes again ends the answer."""
        self._total = 0
        """Characters that came."""
        self._section = (0, 0)
        """Where what `_call` reads begins, of those, and how many calls had come out before."""
        self._settled = 0
        """How many of them were shown or passed over."""
        self._runs: list[Run] = []
        self._tag_kind = TokenKind.REASONING_TAG
        """What the tag is a part of that was read last."""
        self._repeated = False
        self.shown: int | None = None
        """How many characters hold all that is shown, where the rest is dropped; -1 where that cannot be told."""
        self.complete_calls = 0
        """Tool calls that came out; each is complete."""
        self.unread = False
        """Something began as a call does and was none, so that it is content."""

    @property
    def over(self) -> bool:
        """The only call that is wanted is complete, or one came again: what follows is no part of the answer."""
        return self._repeated or (self._one_call and self.complete_calls > 0 and self._call is None)

    @property
    def may_call(self) -> bool:
        """What is being read may be a call, and may turn out to be content."""
        return self._call is not None or self._bare is not None or self._thinking is not None

    def push(self, text: str) -> list[Piece]:
        """Split what is certain by now."""
        pieces: list[Piece] = []
        if len(text) <= PUSHED:  # a token's, nearly always
            self._ahead.append(text)
        else:
            self._read_later(text)
        while self._ahead:
            more = self._ahead.pop()
            self._total += len(more)
            self._push(more, pieces)
        return pieces

    def finish(self, *, by_model: bool) -> list[Piece]:
        """The text ends: what was held back. `by_model`: it ended by itself and was not cut."""
        pieces: list[Piece] = []
        self._finish_thinking(pieces, by_model=by_model)
        self._finish_bare(pieces, by_model=by_model)
        while self._call is not None:
            reader, self._call = self._call, None
            reader.finish(by_model=by_model)
            self._put_calls(pieces, reader.take())
            if reader.begun is not None and self._put_begun(pieces, reader.begun):
                return pieces  # it was cut
            if not reader.closed and self._output.calls_only and not by_model:
                self.shown = self._section[0] if self.complete_calls == self._section[1] else -1
                return pieces
            self._tag_kind = TokenKind.HIDDEN
            self._drop(self._total - len(reader.again) - (len(reader.rest) if reader.failed else 0))
            if reader.failed:
                self._put(pieces, "text", self._failed(reader))
            self._trim = reader.closed
            pieces += self._push_again(reader.again)
        if self._held and self._output.calls_only and not by_model:
            self.shown = self._total - len(self._held)
        else:
            self._put(pieces, self._kind, self._held)
        self._held = self._wrap_end = ""
        return pieces

    def decided(self) -> list[Run]:
        """What was decided of the characters, one behind the other, since the last time."""
        runs, self._runs = self._runs, []
        return runs

    def copy(self) -> Splitter:
        """Another one in the same state."""
        return copy.deepcopy(self, {id(self._output): self._output})

    def release(self) -> list[Piece]:
        """Content held back because a tag may begin with it: something else follows."""
        pieces: list[Piece] = []
        if self._kind == "text" and not self._lead:
            if self._lines is not None:
                self._lines.skip(self._held)
            self._put(pieces, "text", self._held)
            self._held = ""
        return pieces

    def _push_again(self, text: str) -> list[Piece]:
        """Split the end of what came once more."""
        self._total -= len(text)
        return self.push(text)

    def _read_later(self, text: str) -> None:
        """Put a text before what is still to be read, in pieces."""
        last = (len(text) - 1) // PUSHED * PUSHED
        self._ahead += [text[start : start + PUSHED] for start in range(last, -1, -PUSHED)]

    def _back(self, again: str, text: str, at: int) -> tuple[int, str]:
        """Return the place and the text to go on with where `again`, which ends before text[at], is to be read once
        more. A long one comes in pieces, like any text."""
        if len(again) <= at:
            return at - len(again), text
        if len(again) <= PUSHED:
            return 0, again + text[at:]
        self._total -= len(again) + len(text) - at
        self._read_later(text[at:])
        self._read_later(again)
        return 0, ""

    def _push(self, text: str, pieces: list[Piece]) -> None:
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text) and not self.over:
            if self._call is not None:
                at, text = self._feed_call(self._call, text, at, pieces)
            elif self._bare is not None:
                at, text = self._feed_bare(self._bare, text, at, pieces)
            elif self._thinking is not None:
                at, text = self._feed_thinking(self._thinking, text, at, pieces)
            else:
                at = self._feed_text(text, at, pieces)
        if self.over and self.shown is None and at < len(text):
            self.shown = self._total - (len(text) - at)

    # ------------------------------------------------------------------------------------------ content and reasoning

    def _feed_text(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Pass on content or reasoning up to the next tag, or up to what may become one."""
        if self._trim:
            while at < len(text) and text[at] == "\n":
                at += 1
            self._drop(self._total - len(text) + at)
            if at == len(text):
                return at
            self._trim = False
        if self._lead and self._kind == "text":
            return self._feed_lead(text, at)
        if self._wrap_end and (at := self._behind_wrap(text, at, pieces)) == len(text):
            return at
        found = None if self._pattern is None else self._pattern.search(text, at)
        end = self._certain(text, at) if found is None else found.start()
        if self._kind == "text" and self._lines is not None:
            look = self._lines.look(text, at, end, decided=found is not None)
            if look.opens or look.end < end:
                self._put(pieces, "text", text[at : look.end])
                if look.opens:
                    self._open_unmarked(text, look.end)
                    return look.end
                self._held = text[look.end :]
                return len(text)
        self._put(pieces, self._kind, text[at:end])
        if found is None:
            self._held = text[end:]
            return len(text)
        self._enter(found.group(), text, found.start())
        return found.end()

    def _look_for_tags(self) -> None:
        """Set what ends the text that is being read, or may: whenever that changes."""
        if self._kind == "reasoning":
            self._tags = (self._thought.close, *(self._begins if self._thought_calls > 0 else ()))
        else:
            self._tags = (*self._begins, *([self._thought.answer[1]] if self._wrapped else []))
        self._pattern = _pattern(self._tags) if self._tags else None
        self._firsts = frozenset(tag[0] for tag in self._tags)
        self._longest = max(map(len, self._tags), default=0)

    def _enter(self, tag: str, text: str, at: int) -> None:
        """Go on behind a tag, which stands at text[at]."""
        if self._kind == "reasoning" and tag.endswith(self._thought.close):
            self._kind, self._trim = "text", True
            self._drop(self._total - len(text) + at + len(tag))
            self._look_for_tags()
        elif self._kind == "reasoning":
            marks = self._begins
            reader = functools.partial(self._reader, begins=False)
            self._thinking = ThoughtCallReader(tag, self._output, marks, self._thought.close, reader)
        elif self._wrapped and tag.endswith(self._thought.answer[1]):
            self._wrap_end = tag
        else:
            self._section = (self._total - (len(text) - at), self.complete_calls)
            self._call = self._reader(tag)

    def _reader(self, opening: str, *, begins: bool = True) -> CallReader | SectionReader:
        """Return what reads behind a tag. `begins`: a call is one as soon as its arguments have begun."""
        if self._form is not None and opening.endswith(self._form.begins):
            return SectionReader(opening, self._output, self._form, begins=begins)
        return CallReader(opening, self._output, begins=begins)

    def _open_unmarked(self, text: str, at: int) -> None:
        assert self._loose_form is not None
        self._section = (self._total - (len(text) - at), self.complete_calls)
        self._call = unmarked_reader(self._loose_form, self._output)

    def _feed_lead(self, text: str, at: int) -> int:
        """Find out what an answer begins with; nothing is passed on, and what may be either is held back."""
        first = at
        while first < len(text) and first - at <= MOST_LEAD and text[first].isspace():
            first += 1
        near = first - at <= MOST_LEAD
        leads = [self._thought.open] if self._thinks else []
        leads += [self._thought.answer[0]] if self._thought.answer[0] and not self._wrapped else []
        begin = text[first:] if near else "no tag"
        if not begin or any(lead.startswith(begin) and lead != begin for lead in leads):
            self._held = text[at:]
            return len(text)
        found = next((lead for lead in leads if begin.startswith(lead)), "")
        thinks, self._thinks = self._thinks and found == self._thought.open, False
        if found:
            self._kind = "reasoning" if thinks else "text"
            self._wrapped |= not thinks
            self._trim = True
            self._tag_kind = TokenKind.REASONING_TAG if thinks else TokenKind.HIDDEN
            self._drop(self._total - len(text) + first + len(found))
            self._look_for_tags()
            return first + len(found)
        self._lead = False
        if self._output.offered and begin[0] in "{`":
            self._bare = BareReader(text[at:first], self._output)
            return first
        return at

    def _behind_wrap(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Read behind what may be the tag that ends a content: it is that if nothing but blanks follows."""
        blank = _BLANK.match(text, at)
        end = blank.end() if blank else at
        self._wrap_end += text[at:end]
        if end < len(text) or len(self._wrap_end) > MOST_BLANK:
            self._put(pieces, "text", self._wrap_end)
            self._wrap_end = ""
        return end

    def _certain(self, text: str, at: int) -> int:
        """Where the end of `text` begins that may become a tag."""
        end = len(text)
        first = max(at, end - self._longest + 1)
        for start in self._firsts:
            place = text.find(start, first)
            while place >= 0 and not any(tag.startswith(text[place:]) for tag in self._tags):
                place = text.find(start, place + 1)
            end = min(end, place) if place >= 0 else end
        return end - 1 if self._tags and end > at and text[end - 1] == "\n" else end

    # ------------------------------------------------------------------------------------------ calls

    def _feed_call(
        self, reader: CallReader | SectionReader | BracketReader, text: str, at: int, pieces: list[Piece]
    ) -> tuple[int, str]:
        at = reader.feed(text, at)
        self._put_calls(pieces, reader.take())
        if not (reader.closed or reader.failed):
            if reader.begun is not None:
                self._put_begun(pieces, reader.begun)
            return at, text
        self._call = None
        self._trim = reader.closed
        self._tag_kind = TokenKind.HIDDEN
        self._drop(self._total - len(text) + at - len(reader.again) - (len(reader.rest) if reader.failed else 0))
        if reader.failed:
            self._put(pieces, "text", self._failed(reader))
        elif self._lines is not None:
            self._lines.fresh()
        return self._back(reader.again, text, at)

    def _failed(self, reader: CallReader | SectionReader | BracketReader) -> str:
        """Note that a reader found no call; return what it read, without what is to be read again."""
        if self._lines is not None:
            self._lines.skip(reader.rest)
        if self._lines is not None and not isinstance(reader, CallReader) and not reader.marked:
            self._lines.tried += 1
        else:
            self.unread = True
        return reader.rest

    def _feed_bare(self, reader: BareReader, text: str, at: int, pieces: list[Piece]) -> tuple[int, str]:
        at = reader.feed(text, at)
        if reader.begun is not None:
            self._put_begun(pieces, reader.begun)
            return len(text), text
        if not reader.failed:
            return at, text
        self._bare = None
        return self._back(reader.kept, text, at)

    def _finish_bare(self, pieces: list[Piece], *, by_model: bool) -> None:
        bare, self._bare = self._bare, None
        if bare is None:
            return
        if (call := bare.finish(by_model=by_model)) is not None:
            self._put_calls(pieces, [call])
        elif bare.begun is not None:
            self._put_begun(pieces, bare.begun)
            self.unread |= by_model
            self.complete_calls += by_model
        elif self._output.calls_only and not by_model:
            self.shown = self._total - len(bare.kept)
        else:
            pieces += self._push_again(bare.kept)

    def _feed_thinking(self, reader: ThoughtCallReader, text: str, at: int, pieces: list[Piece]) -> tuple[int, str]:
        reader.feed(text, at)
        if not reader.failed:
            return len(text), text
        self._thinking = None
        self._not_called()
        self._put(pieces, "reasoning", reader.opening)
        return self._back(reader.again, text, len(text))

    def _finish_thinking(self, pieces: list[Piece], *, by_model: bool) -> None:
        while self._thinking is not None:
            reader, self._thinking = self._thinking, None
            calls = reader.finish(by_model=by_model)
            if calls:
                self._put_calls(pieces, calls)
                return
            self._not_called()
            self._put(pieces, "reasoning", reader.opening)
            pieces += self._push_again(reader.again)

    def _not_called(self) -> None:
        """Note that a mark in reasoning began no call."""
        self._thought_calls -= 1
        self._look_for_tags()

    def _put(self, pieces: list[Piece], kind: str, text: str) -> None:
        if text:
            pieces.append((kind, text))
            self._decide(TokenKind.CONTENT if kind == "text" else TokenKind.REASONING, len(text))

    def _drop(self, end: int) -> None:
        """What was not decided before this place in the answer is passed over: it is a tag, or a call."""
        self._decide(self._tag_kind, end - self._settled)

    def _decide(self, kind: TokenKind, size: int) -> None:
        if size > 0:
            self._settled += size
            self._runs.append((kind, size))

    def _put_calls(self, pieces: list[Piece], calls: list[ParsedCall]) -> None:
        for call in calls[: 1 - self.complete_calls] if self._one_call else calls:
            if self._output.calls_only and self._again(call):
                self._repeated, self._call = True, None
                self.shown = self._section[0] if self.complete_calls == self._section[1] else -1
                return
            index, told = self.complete_calls, self._told
            self.complete_calls, self._told = index + 1, None
            self.unread |= call.broken
            if told is None:
                id = call_id(*self._source, index, call.id)
                pieces.append(ToolCallDelta(index=index, id=id, name=call.name, arguments=call.arguments))
            elif rest := call.arguments[self._said :]:
                pieces.append(ToolCallDelta(index=index, arguments=rest))

    def _put_begun(self, pieces: list[Piece], call: BegunCall) -> bool:
        """Pass on what is certain of a call that is being written. False where it has to come whole, because it may
        turn out to be one that came before."""
        index = self.complete_calls
        if index and (self._one_call or self._output.calls_only):
            return False
        if self._told is None:
            pieces.append(ToolCallDelta(index=index, id=call_id(*self._source, index, call.id), name=call.name))
            self._told = self._said = 0
        arguments, self._told = call.since(self._told)
        self._said += len(arguments)
        if arguments:
            pieces.append(ToolCallDelta(index=index, arguments=arguments))
        return True

    def _again(self, call: ParsedCall) -> bool:
        """Tell whether the same call came out before, and note it."""
        if call.broken:
            return False
        made = call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
        known = made in self._made
        self._made.add(made)
        return known


@functools.lru_cache(maxsize=256)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of some tags, with the line break that sets it apart."""
    return re.compile("|".join("\n?" + re.escape(tag) for tag in dict.fromkeys(tags)))
