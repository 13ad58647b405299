"""Calls whose mark a model left out: `<function=f>` without `<tool_call>`, `call:f{x:1}` and `f(x=1)` without theirs.

Ordinary text may look like one, so it is a call only if its tool was offered, it begins a line outside code fences, is
complete and fits the tool's schema. If only brackets delimit it, nothing but white space may follow it on its line.

An answer that is one JSON object, perhaps in a Markdown fence, and calls an offered tool is a call too.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from cairn.text.output.argument_fit import fits
from cairn.text.output.begun_calls import BegunCall, BegunObject
from cairn.text.output.brace_calls import brace_call
from cairn.text.output.call_formats import BY_NAME, CallFormat, form_by
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.python_calls import python_calls
from cairn.text.output.section_reader import SectionReader
from cairn.text.output.tool_parser import ParsedCall, call_of
from cairn.types.request import OutputFormat

MOST_TRIED = 16
"""Failed attempts to read a call in one answer after which no more are made, so that a text is read a bounded number of
times."""
LEAST = 3
"""Fewest characters before a name in tags; fewer occur by chance."""
MOST_BLANK = 64
"""Most white space between a sign and an opening quote; after more a quote is an ordinary character."""
MOST_FENCE = 64
"""Most characters examined of a line that opens or closes a code fence."""
_BLANK = re.compile(r"\s*+")
_LINE_BLANK = re.compile(r"[ \t]*+")
_INDENT = re.compile(r" {0,3}")
_FENCE = re.compile(r"(`{3,}|~{3,})")
_JSON_FENCE = re.compile(r"(?:```[a-z_]{0,16}\s{0,16})?")
_FENCE_SO_FAR = re.compile(r"`{1,2}|```[a-z_]{0,16}\s{0,16}")
_AFTER_FENCED = re.compile(r"\s{0,16}(?:`{1,2}|```\s{0,16})?")
_OF_A_CALL = frozenset({"", "name", "arguments", "parameters", "id", "type", "function"})
"""Member names of an answer that is a call; "" is a name not read yet."""
_AFTER_BARE = re.compile(r"\s{0,16}")
_KEY = re.compile(r"([^\s:=,(){}\[\]<>\"']{0,128})\s{0,64}")
_OPENED = re.compile(r"[({]")


def unmarked_form(output: OutputFormat) -> CallFormat | None:
    """Return the format whose calls are recognised without their marks; None if there is none."""
    form = form_by(output.calls) if output.calls else BY_NAME["qwen_xml"] if output.xml else None
    return form if output.tools and output.offered and not output.held else None


def openings(form: CallFormat, names: Sequence[str]) -> tuple[str, ...]:
    """Return the texts with which calls of these tools begin if the mark of their section is missing."""
    if form.kind == "braces":
        before = form.open.partition("{name}")[0]
        return tuple(start for name in names for start in (f"{before}{name}{{", f"{before}{name}(", f"{name}("))
    if form.kind == "python":
        return tuple(start for name in names for start in (f"{name}(", f"[{name}("))
    if form.kind not in ("tagged", "named"):
        return ()
    before, _, behind = form.open.partition("{name}")
    behind = re.split(r"[\s{]", behind, maxsplit=1)[0]
    return tuple(before.lstrip() + name + behind for name in names) if len(before.strip()) >= LEAST else ()


def unmarked_reader(form: CallFormat, output: OutputFormat) -> SectionReader | BracketReader:
    """Return the reader of a call without a mark, from its beginning."""
    if form.kind in ("braces", "python"):
        return BracketReader(form, output)
    return SectionReader("", output, form, marked=False)


class Look(NamedTuple):
    """How far a text was examined."""

    end: int
    """Index up to which the text is certainly content."""
    opens: bool
    """Whether a call may begin there; else the text after it is undecided or was not examined."""


class LineWatch:
    """Finder of lines in a content that begin like calls; it follows code fences."""

    def __init__(self, openings: Sequence[str]) -> None:
        self._openings = tuple(openings)
        self._firsts = frozenset(one[0] for one in self._openings) | {"`", "~"}
        self._fence = ""
        """The text that opened the current code fence; empty outside of fences."""
        self._at_start = True
        """Whether a line begins at the current place."""
        self.tried = 0
        """Number of attempts that found no call."""

    def look(self, text: str, at: int, end: int, *, decided: bool) -> Look:
        """Examine text[at:end]; `decided`: the line ends at `end`."""
        while at < end:
            stop = text.find("\n", at, end)
            if self._at_start:
                verdict = self._judge(text[at : end if stop < 0 else stop], ended=decided or stop >= 0)
                if verdict is None:
                    return Look(at, False)
                if verdict >= 0 and self.tried < MOST_TRIED:
                    return Look(at + verdict, True)
            self._at_start = stop >= 0
            at = end if stop < 0 else stop + 1
        return Look(end, False)

    def skip(self, text: str) -> None:
        """Follow content that is known to hold no call."""
        tried, self.tried = self.tried, MOST_TRIED
        self.look(text, 0, len(text), decided=True)
        self.tried = tried

    def fresh(self) -> None:
        """Record that a line begins here: after a call, or at the beginning of content."""
        self._at_start = True

    def _judge(self, line: str, *, ended: bool) -> int | None:
        """Return where in a line a call begins, -1 if nowhere, None if more of it is needed; follow code fences."""
        indent = _INDENT.match(line)
        start = indent.end() if indent else 0
        rest = line[start:]
        if not rest:
            return -1 if ended else None
        if rest[0] not in self._firsts:
            return -1
        if self._fence:
            return self._in_fence(rest, ended=ended)
        if (found := _FENCE.match(rest)) is not None:
            if found.end() == len(rest) < MOST_FENCE and not ended:
                return None
            self._fence = found[1][:MOST_FENCE]
            return -1
        if rest.startswith(self._openings):
            return start
        partial = rest in ("`", "``", "~", "~~") or any(one.startswith(rest) for one in self._openings)
        return None if partial and not ended else -1

    def _in_fence(self, rest: str, *, ended: bool) -> int | None:
        closes = rest.rstrip().strip(self._fence[0]) == "" and len(rest) <= MOST_FENCE
        if closes and not ended:
            return None
        if closes and len(rest.rstrip()) >= len(self._fence):
            self._fence = ""
        return -1


class _BracketAt(enum.Enum):
    """The element that comes next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    TAIL = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()


class BracketReader:
    """Reader of a call that only brackets delimit, with the interface of `SectionReader`.

    Linear: every character is examined once, and the call is parsed at its last bracket.
    """

    marked = False
    begun: BegunCall | None = None
    """Always None: these calls are not streamed."""

    def __init__(self, form: CallFormat, output: OutputFormat) -> None:
        self._form = form
        self._tools = {tool.name: tool for tool in output.offered}
        self._text = ""
        self._at = _BracketAt.HEAD
        self._next = 0
        """Where reading continues."""
        self._blank_end = 0
        """End of the white space already skipped before the deciding character."""
        self._depth = 0
        self._quote = ""
        self._end = 0
        self._calls: list[ParsedCall] = []
        mark = form.value_end if form.kind == "braces" else ""
        self._mark = mark
        alternatives = [re.escape(mark)] if mark else []
        self._tokens = re.compile("|".join([*alternatives, r"\\.", r"[()\[\]{}'\"]"]), re.DOTALL)

    @property
    def closed(self) -> bool:
        """Whether the call and the rest of its line were read."""
        return self._at is _BracketAt.CLOSED

    @property
    def failed(self) -> bool:
        """Whether this is not a call: `rest` is content, and `again` must be read again after it."""
        return self._at is _BracketAt.FAILED

    @property
    def rest(self) -> str:
        """The first character, which is content if this is not a call."""
        return self._text[:1]

    @property
    def again(self) -> str:
        """The text that must be read again."""
        return self._text[self._end :] if self.closed else self._text[1:]

    def take(self) -> list[ParsedCall]:
        """Return the calls completed since the last time."""
        if not self.closed:
            return []
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str, start: int) -> int:
        """Read text[start:] and return len(text); text read too far is in `again`."""
        kept, self._text = self._text, ""  # with only one reference CPython appends in place
        kept += text[start:]
        self._text = kept
        del kept
        self._read(whole=False)
        return len(text)

    def finish(self, *, by_model: bool) -> None:
        """End the text."""
        self._read(whole=True)
        if not self.closed:
            self._at = _BracketAt.FAILED

    def _read(self, *, whole: bool) -> None:
        if self._at is _BracketAt.HEAD:
            self._head()
        if self._at is _BracketAt.BODY:
            self._body(whole=whole)
        if self._at is _BracketAt.TAIL:
            self._tail(whole=whole)

    def _head(self) -> None:
        """Fail unless an argument's name or the closing bracket follows the first bracket."""
        opened = _OPENED.search(self._text)
        if opened is None:
            return
        key = _KEY.match(self._text, self._behind_blanks(opened.end()))
        following = self._text[key.end() : key.end() + 1] if key else ""
        if not following:
            return
        named = following in ":=" if key and key[1] else following in "})\"'<"
        self._at = _BracketAt.BODY if named else _BracketAt.FAILED

    def _body(self, *, whole: bool) -> None:
        """Find the bracket that closes the first one."""
        safe = len(self._text) if whole else len(self._text) - max(len(self._mark), 1)
        while (found := self._tokens.search(self._text, self._next)) is not None and found.end() <= safe + 1:
            token, at = found.group(), found.start()
            if token in ("'", '"', self._mark):
                if not self._quoted(token, at, found.end(), whole=whole):
                    return
            elif not self._quote and token in "([{":
                self._depth += 1
            elif not self._quote and token in ")]}":
                self._depth -= 1
            self._next = found.end()
            if not self._depth:
                self._end = found.end()
                self._parse()
                return
        if found is None:
            self._next = max(self._next, safe)

    def _quoted(self, token: str, at: int, behind: int, *, whole: bool) -> bool:
        """Process a quote; return False if the next character is needed to decide."""
        if self._quote:
            if token != self._quote:
                return True
            if token == self._mark:
                behind = self._behind_blanks(behind)
                following = self._text[behind : behind + 1]
                if not following and not whole:
                    self._next = at
                    return False
                self._quote = "" if following in tuple(",}]):=") else token
            else:
                self._quote = ""
        elif self._text[max(0, at - MOST_BLANK) : at].rstrip()[-1:] in tuple("=:,([{"):
            self._quote = token
        return True

    def _parse(self) -> None:
        said = self._text[: self._end]
        if self._form.kind == "python":
            calls = python_calls(said) or []
        else:
            call = brace_call(said, self._form.value_end, self._form.open.partition("{name}")[0])
            calls = [] if call is None else [call]
        tools = [self._tools.get(call.name) for call in calls]
        good = all(tool and fits(call.arguments, tool.shape) for call, tool in zip(calls, tools, strict=True))
        self._at = _BracketAt.TAIL if calls and good else _BracketAt.FAILED
        self._calls = calls if good else []

    def _tail(self, *, whole: bool) -> None:
        """Read after the call: the optional mark that ends a section, and the end of the line."""
        mark = self._form.end.strip()
        at = self._behind_blanks(self._end, _LINE_BLANK)
        rest = self._text[at : at + max(len(mark), 1)]
        if mark and rest == mark:
            self._end = at + len(mark)
            self._at = _BracketAt.CLOSED
        elif rest.startswith("\n") or (not rest and whole):
            self._end = at
            self._at = _BracketAt.CLOSED
        elif rest and (whole or not mark.startswith(rest)):
            self._at = _BracketAt.FAILED

    def _behind_blanks(self, at: int, blanks: re.Pattern[str] = _BLANK) -> int:
        """Return the index after the white space at `at`, without reading again what was skipped the last time."""
        found = blanks.match(self._text, max(at, self._blank_end))
        self._blank_end = found.end() if found else at
        return self._blank_end


class BareReader:
    """Reader of a whole answer that may be the JSON object of a call, perhaps in a fence."""

    def __init__(self, opening: str, output: OutputFormat) -> None:
        """Begin after `opening`, the white space before the answer."""
        self._names = {tool.name for tool in output.offered}
        self._kept = [opening]
        self._head = ""
        self._tail: str | None = None
        self._scanner: JsonScanner | None = None
        self._looked_at = 0
        """Number of members examined."""
        self._strange = self._has_arguments = self._misnamed = False
        """Whether a member does not belong to a call; whether there are arguments; whether the name is not a tool's."""
        self._streamed = frozenset(self._names) if output.calls_only else frozenset[str]()
        self._object: BegunObject | None = None
        self.failed = False
        """Whether the answer is not a call."""

    @property
    def begun(self) -> BegunCall | None:
        """The incomplete call, if a grammar guarantees that the answer is a call."""
        return None if self._object is None else self._object.call

    @property
    def kept(self) -> str:
        """All text so far."""
        return "".join(self._kept)

    def feed(self, text: str, start: int) -> int:
        """Read text[start:] and return where it stopped: len(text) unless `failed`."""
        at = start
        while at < len(text) and not self.failed:
            end = self._step(text, at)
            self._kept.append(text[at:end])
            at = end
        return at

    def finish(self, *, by_model: bool) -> ParsedCall | None:
        """End the text and return the call; None if it is not one."""
        scanner = self._scanner
        if scanner is None or not by_model or self.failed:
            return None
        if scanner.lacking == 1 and any(key in ("arguments", "parameters") for key, _ in scanner.members):
            scanner.close()
        call = call_of(scanner.members) if scanner.done else None
        return call if call is not None and call.name in self._names else None

    def _step(self, text: str, at: int) -> int:
        if self._scanner is None:
            return self._fence(text, at)
        if self._tail is None:
            end = self._scanner.feed(text, at)
            if self._object is not None:
                self._object.look()
            self.failed = self._scanner.failed or self._unlike(self._scanner)
            if self._scanner.done:
                self._tail = ""
            return end
        self._tail += text[at:]
        self.failed = (_AFTER_FENCED if self._head else _AFTER_BARE).fullmatch(self._tail) is None
        return at if self.failed else len(text)

    def _fence(self, text: str, at: int) -> int:
        brace = text.find("{", at)
        end = len(text) if brace < 0 else brace
        self._head += text[at:end]
        self.failed = (_FENCE_SO_FAR if brace < 0 else _JSON_FENCE).fullmatch(self._head) is None
        if brace >= 0 and not self.failed:
            self._scanner = JsonScanner()
            self._object = BegunObject(self._scanner, self._streamed)
        return at if self.failed else end

    def _unlike(self, scanner: JsonScanner) -> bool:
        """Return whether the object cannot be a call of an offered tool; then it is no longer held back.

        Each member is examined once, so the time is linear in the object's length.
        """
        for key, value in scanner.members[self._looked_at :]:
            self._begin(key)
            self._misnamed |= key == "name" and value.startswith('"') and json.loads(value) not in self._names
        self._looked_at = len(scanner.members)
        self._begin(scanner.key)
        return self._misnamed or (self._strange and not self._has_arguments)

    def _begin(self, key: str) -> None:
        self._strange |= key not in _OF_A_CALL
        self._has_arguments |= key == "arguments"
