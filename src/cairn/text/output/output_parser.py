"""The model's text -> content, reasoning and tool calls; each character belongs to exactly one of them.

An answer that begins with `<think>` or the model's equivalent (`cairn.text.output.reasoning_formats`), perhaps after
white space, begins with reasoning; so does one whose prompt ends with that tag. Reasoning ends at `</think>` or not at
all. After it, and after the first content, such tags are content like any other text. `<tool_call>` in content opens a
tool call if a call follows, and an answer that consists of one call is a call too (`cairn.text.output.tool_parser`).
So are calls without that tag (`unmarked_calls`) and calls in reasoning that never ends (`thought_calls`), unless a
grammar constrains the answer. Everything else is content. Line breaks around a tag belong to the tag: one before
`</think>` and `<tool_call>`, all after `<think>`, `</think>` and `</tool_call>`. The result does not depend on how the
text was split into pieces.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable

from cairn.text.output.begun_calls import BegunCall
from cairn.text.output.call_formats import FORMATS, form_by, markers_of
from cairn.text.output.harmony import HarmonySplitter
from cairn.text.output.reasoning_formats import HARMONY, own_markers, thoughts
from cairn.text.output.section_reader import SectionReader
from cairn.text.output.tagged_call_reader import CallReader
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
"""Tags that may be single tokens of a model; they must reach the splitter as text."""


def all_markers(find: Callable[[str], int | None]) -> tuple[str, ...]:
    """Return the markers of all call and reasoning formats; `find` looks up the model's token ids."""
    return tuple(dict.fromkeys((*TAGS, *own_markers(find), *markers_of(FORMATS))))


def markers(output: OutputFormat) -> tuple[str, ...]:
    """Return the markers that an answer of this format may contain."""
    if not (output.reasoning or output.tools):
        return ()
    form = form_by(output.calls)
    found = (*TAGS, *thoughts(output).markers)
    return found if form is None else (*found, *form.markers)


def further_markers(output: OutputFormat) -> tuple[str, ...]:
    """Return the markers of a format that is not in the table, so that `all_markers` lacks them."""
    form = form_by(output.calls)
    return () if form is None or form in FORMATS else form.markers


_BLANK = re.compile(r"\s*+")
MOST_BLANK = 256
"""Most white space after the tag that ends a content; with more the tag is text."""
MOST_LEAD = 16
"""Most white space before `<think>` or a call without tags; after more they are content."""


def splitter(output: OutputFormat, request: int, choice: int) -> Splitter | HarmonySplitter:
    """Return the splitter for an answer; `request` and `choice` determine the ids of tool calls."""
    made = HarmonySplitter if output.thoughts == HARMONY.name else Splitter
    return made(output, request, choice)


class Splitter:
    """Splitter of one choice's text. Linear: a piece is searched once, with at most one tag's length held back."""

    def __init__(self, output: OutputFormat, request: int, choice: int) -> None:
        """Take the format; `request` and `choice` determine the ids of tool calls."""
        self._output = output
        self._source = (request, choice)
        self._thought = thoughts(output)
        self._kind = "reasoning" if output.reasoning and output.reasoning_open else "text"
        self._trim = self._kind == "reasoning"
        self._thinks = output.reasoning and not output.reasoning_open
        """Whether reasoning may begin here."""
        self._lead = True
        """Whether no content has come yet."""
        self._form = form_by(output.calls) if output.tools else None
        self._begins = (OPEN, *(self._form.begins if self._form is not None else ())) if output.tools else ()
        self._loose_form = unmarked_form(output)
        self._lines = (
            None
            if self._loose_form is None
            else LineWatch(openings(self._loose_form, [tool.name for tool in output.offered]))
        )
        self._thought_calls = MOST_TRIED if output.offered and not output.held else 0
        """Number of further marks in reasoning that may begin calls."""
        self._wrapped = False
        """Whether the content is in the tags that the model puts around its answers."""
        self._wrap_end = ""
        """A tag that may end such a content, and the white space after it."""
        self._tags: tuple[str, ...] = ()
        self._pattern: re.Pattern[str] | None = None
        self._look_for_tags()
        self._held = ""
        self._ahead: list[str] = []
        """Received text that is still to be read, in pieces, last piece first."""
        self._one_call = output.one_call
        self._call: CallReader | SectionReader | BracketReader | None = None
        self._bare: BareReader | None = None
        self._thinking: ThoughtCallReader | None = None
        self._sent_pieces: int | None = None
        """Number of streamed pieces of the incomplete call's arguments; None before its name was sent."""
        self._sent_characters = 0
        """Characters in them."""
        self._made: set[tuple[str, str]] = set()
        """The calls so far, if a repeated call ends the answer."""
        self._total = 0
        """Characters received."""
        self._section = (0, 0)
        """Place where the current section begins; number of calls before it."""
        self._settled = 0
        """Characters shown or dropped."""
        self._runs: list[Run] = []
        self._tag_kind = TokenKind.REASONING_TAG
        """Kind of the last tag."""
        self._repeated = False
        self.shown: int | None = None
        """Number of characters that hold everything shown if the rest is dropped; -1 if it is unknown, None for all."""
        self.complete_calls = 0
        """Number of complete tool calls."""
        self.unread = False
        """Whether a text began like a call and was not one."""

    @property
    def over(self) -> bool:
        """Whether the only wanted call is complete, or a call was repeated; text after it is dropped."""
        return self._repeated or (self._one_call and self.complete_calls > 0 and self._call is None)

    @property
    def may_call(self) -> bool:
        """Whether the text being read may be a call or content."""
        return self._call is not None or self._bare is not None or self._thinking is not None

    @property
    def may_stop(self) -> bool:
        """Whether the text being read may turn out to be content, where stop strings apply.

        A call that has certainly begun is none, nor is reasoning that was not closed.
        """
        if self._thinking is not None:
            return self._thinking.may_close
        reader = self._bare if self._call is None else self._call
        return reader is None or reader.begun is None

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        pieces: list[Piece] = []
        if len(text) <= PUSHED:  # nearly always: the text of a token
            self._ahead.append(text)
        else:
            self._read_later(text)
        while self._ahead:
            more = self._ahead.pop()
            self._total += len(more)
            self._push(more, pieces)
        return pieces

    def finish(self, *, by_model: bool) -> list[Piece]:
        """End the text and return what was held back; `by_model`: it was not cut."""
        pieces: list[Piece] = []
        self._finish_thinking(pieces, by_model=by_model)
        self._finish_bare(pieces, by_model=by_model)
        while self._call is not None:
            reader, self._call = self._call, None
            reader.finish(by_model=by_model)
            self._put_calls(pieces, reader.take())
            if reader.begun is not None and self._put_begun(pieces, reader.begun):
                return pieces  # the answer was cut within a call
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
        """Return the runs of characters decided since the last time."""
        runs, self._runs = self._runs, []
        return runs

    def copy(self) -> Splitter:
        """Return a copy in the same state."""
        return copy.deepcopy(self, {id(self._output): self._output})

    def release(self) -> list[Piece]:
        """Return content that was held back as a possible tag; the caller knows that something else follows."""
        pieces: list[Piece] = []
        if self._kind == "text" and not self._lead:
            if self._lines is not None:
                self._lines.skip(self._held)
            self._put(pieces, "text", self._held)
            self._held = ""
        return pieces

    def _push_again(self, text: str) -> list[Piece]:
        """Split the last characters received again."""
        self._total -= len(text)
        return self.push(text)

    def _read_later(self, text: str) -> None:
        """Queue a text, in pieces, before the text that is still to be read."""
        last = (len(text) - 1) // PUSHED * PUSHED
        self._ahead += [text[start : start + PUSHED] for start in range(last, -1, -PUSHED)]

    def _reread(self, again: str, text: str, at: int) -> tuple[int, str]:
        """Return the index and the text to continue with so that `again`, which ends before text[at], is read again.

        A long one is queued in pieces.
        """
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
        """Emit content or reasoning up to the next tag, or up to text that may become one."""
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
        """Update the tags to look for, after the kind of text has changed."""
        if self._kind == "reasoning":
            self._tags = (self._thought.close, *(self._begins if self._thought_calls > 0 else ()))
        else:
            self._tags = (*self._begins, *([self._thought.answer[1]] if self._wrapped else []))
        self._pattern = _pattern(self._tags) if self._tags else None
        self._firsts = frozenset(tag[0] for tag in self._tags)
        self._longest = max(map(len, self._tags), default=0)

    def _enter(self, tag: str, text: str, at: int) -> None:
        """Enter what the tag at text[at] opens or closes."""
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
        """Return the reader after a tag; `begins`: it streams calls as soon as their arguments have begun."""
        if self._form is not None and opening.endswith(self._form.begins):
            return SectionReader(opening, self._output, self._form, begins=begins)
        return CallReader(opening, self._output, begins=begins)

    def _open_unmarked(self, text: str, at: int) -> None:
        assert self._loose_form is not None
        self._section = (self._total - (len(text) - at), self.complete_calls)
        self._call = unmarked_reader(self._loose_form, self._output)

    def _feed_lead(self, text: str, at: int) -> int:
        """Decide what an answer begins with; undecided text is held back."""
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
        """Read after a tag that may end the content; it does if only white space follows."""
        blank = _BLANK.match(text, at)
        end = blank.end() if blank else at
        self._wrap_end += text[at:end]
        if end < len(text) or len(self._wrap_end) > MOST_BLANK:
            self._put(pieces, "text", self._wrap_end)
            self._wrap_end = ""
        return end

    def _certain(self, text: str, at: int) -> int:
        """Return where the suffix of `text` begins that may become a tag."""
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
        return self._reread(reader.again, text, at)

    def _failed(self, reader: CallReader | SectionReader | BracketReader) -> str:
        """Record that a reader found no call; return its text without the part that is read again."""
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
        return self._reread(reader.kept, text, at)

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
        return self._reread(reader.again, text, len(text))

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
        """Record that a mark in reasoning began no call."""
        self._thought_calls -= 1
        self._look_for_tags()

    def _put(self, pieces: list[Piece], kind: str, text: str) -> None:
        if text:
            pieces.append((kind, text))
            self._decide(TokenKind.CONTENT if kind == "text" else TokenKind.REASONING, len(text))

    def _drop(self, end: int) -> None:
        """Mark undecided characters before `end` as part of a tag or a call."""
        self._decide(self._tag_kind, end - self._settled)

    def _decide(self, kind: TokenKind, size: int) -> None:
        if size > 0:
            self._settled += size
            self._runs.append((kind, size))

    def _put_calls(self, pieces: list[Piece], calls: list[ParsedCall]) -> None:
        for call in calls[: 1 - self.complete_calls] if self._one_call else calls:
            if self._output.calls_only and self._repeats(call):
                self._repeated, self._call = True, None
                self.shown = self._section[0] if self.complete_calls == self._section[1] else -1
                return
            index, sent = self.complete_calls, self._sent_pieces
            self.complete_calls, self._sent_pieces = index + 1, None
            self.unread |= call.broken
            if sent is None:
                id = call_id(*self._source, index, call.id)
                pieces.append(ToolCallDelta(index=index, id=id, name=call.name, arguments=call.arguments))
            elif rest := call.arguments[self._sent_characters :]:
                pieces.append(ToolCallDelta(index=index, arguments=rest))

    def _put_begun(self, pieces: list[Piece], call: BegunCall) -> bool:
        """Stream the certain part of an incomplete call.

        Return False if it must come whole, because it may turn out to repeat an earlier call.
        """
        index = self.complete_calls
        if index and (self._one_call or self._output.calls_only):
            return False
        if self._sent_pieces is None:
            pieces.append(ToolCallDelta(index=index, id=call_id(*self._source, index, call.id), name=call.name))
            self._sent_pieces = self._sent_characters = 0
        arguments, self._sent_pieces = call.since(self._sent_pieces)
        self._sent_characters += len(arguments)
        if arguments:
            pieces.append(ToolCallDelta(index=index, arguments=arguments))
        return True

    def _repeats(self, call: ParsedCall) -> bool:
        """Return whether an equal call was emitted before, and record this one."""
        if call.broken:
            return False
        made = call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
        known = made in self._made
        self._made.add(made)
        return known


@functools.lru_cache(maxsize=256)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of the tags, with an optional line break before it."""
    return re.compile("|".join("\n?" + re.escape(tag) for tag in dict.fromkeys(tags)))
