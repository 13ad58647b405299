"""Calls whose mark a model left out: `<function=f>` without `<tool_call>`, `call:f{x:1}` and `f(x=1)` without theirs.

A text may look like one, so it is a call only if its tool was offered, it begins a line, stands outside code fences,
is whole and fits the tool's schema. Nothing but blanks may follow it on its line where brackets alone set it apart.

An answer that is nothing but one JSON object, perhaps in a Markdown fence, and calls a tool that was offered is a call
too.
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
from cairn.text.output.call_section import SectionReader
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.python_calls import python_calls
from cairn.text.output.tool_parser import ParsedCall, call_of
from cairn.types.request import OutputFormat

MOST_TRIED = 16
"""Beginnings of calls in one answer that turn out to be none; behind them nothing is looked at any more, so that a text
is read a bounded number of times."""
LEAST = 3
"""Characters that stand before a name in tags; fewer are said by chance."""
MOST_BLANK = 64
"""White space between a sign and the quote behind it; behind more a quote is a character like others."""
MOST_FENCE = 64
"""Characters of a line that opens or closes a code fence, as far as they are looked at."""
_BLANK = re.compile(r"\s*+")
_LINE_BLANK = re.compile(r"[ \t]*+")
_INDENT = re.compile(r" {0,3}")
_FENCE = re.compile(r"(`{3,}|~{3,})")
_JSON_FENCE = re.compile(r"(?:```[a-z_]{0,16}\s{0,16})?")
_FENCE_SO_FAR = re.compile(r"`{1,2}|```[a-z_]{0,16}\s{0,16}")
_AFTER_FENCED = re.compile(r"\s{0,16}(?:`{1,2}|```\s{0,16})?")
_OF_A_CALL = frozenset({"", "name", "arguments", "parameters", "id", "type", "function"})
"""Members of an answer that is nothing but a call, and the key that is not read yet."""
_AFTER_BARE = re.compile(r"\s{0,16}")
_KEY = re.compile(r"([^\s:=,(){}\[\]<>\"']{0,128})\s{0,64}")
_OPENED = re.compile(r"[({]")


def unmarked_form(output: OutputFormat) -> CallFormat | None:
    """Return the form whose calls are known without their marks; None where there is none."""
    form = form_by(output.calls) if output.calls else BY_NAME["qwen_xml"] if output.xml else None
    return form if output.tools and output.offered and not output.held else None


def openings(form: CallFormat, names: Sequence[str]) -> tuple[str, ...]:
    """Return what calls of these tools begin with where their section's mark is missing."""
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
    """Return what reads from the beginning of a call without a mark."""
    if form.kind in ("braces", "python"):
        return BracketReader(form, output)
    return SectionReader("", output, form, marked=False)


class Look(NamedTuple):
    """How far a text was looked at."""

    end: int
    """All before it is content and nothing else."""
    opens: bool
    """A call may begin there; else what follows cannot be told yet, or was not looked at."""


class LineWatch:
    """Follows the lines of a content, its code fences among them, and finds the lines that begin as calls do."""

    def __init__(self, openings: Sequence[str]) -> None:
        self._openings = tuple(openings)
        self._firsts = frozenset(one[0] for one in self._openings) | {"`", "~"}
        self._fence = ""
        """What has opened the code fence that the text is in."""
        self._at_start = True
        """A line begins where looking goes on."""
        self.tried = 0
        """Calls that turned out to be none."""

    def look(self, text: str, at: int, end: int, *, decided: bool) -> Look:
        """Look at text[at:end]. `decided`: no more of this line comes."""
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
        """Pass over content that holds no call."""
        tried, self.tried = self.tried, MOST_TRIED
        self.look(text, 0, len(text), decided=True)
        self.tried = tried

    def fresh(self) -> None:
        """Note that a line begins here: behind a call, or where content begins."""
        self._at_start = True

    def _judge(self, line: str, *, ended: bool) -> int | None:
        """Return where in a line a call begins, -1 for nowhere, None where more of it must come; follow code fences."""
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
    """What comes next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    TAIL = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()


class BracketReader:
    """Reads a call that brackets alone set apart: the same interface as `SectionReader`. Linear: every character is
    looked at once, and the call is read where its last bracket comes."""

    marked = False
    begun: BegunCall | None = None
    """It comes whole."""

    def __init__(self, form: CallFormat, output: OutputFormat) -> None:
        self._form = form
        self._tools = {tool.name: tool for tool in output.offered}
        self._text = ""
        self._at = _BracketAt.HEAD
        self._next = 0
        """Where looking goes on."""
        self._blank_end = 0
        """Up to where blanks were passed over behind what is being decided."""
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
        """The call and the rest of its line were read."""
        return self._at is _BracketAt.CLOSED

    @property
    def failed(self) -> bool:
        """This is no call: `rest` is content, `again` is to be read again as what follows it."""
        return self._at is _BracketAt.FAILED

    @property
    def rest(self) -> str:
        """The first character of what is no call."""
        return self._text[:1]

    @property
    def again(self) -> str:
        """What is to be read again."""
        return self._text[self._end :] if self.closed else self._text[1:]

    def take(self) -> list[ParsedCall]:
        """Return the calls that came out since the last time."""
        if not self.closed:
            return []
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str, start: int) -> int:
        """Read on from text[start] to its end, which it returns; `again` is what was read too far."""
        kept, self._text = self._text, ""  # held by one name alone, a text is made longer in its place
        kept += text[start:]
        self._text = kept
        del kept
        self._read(whole=False)
        return len(text)

    def finish(self, *, by_model: bool) -> None:
        """End the text here."""
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
        """Fail where behind the first bracket stands neither its end nor the name of an argument."""
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
        """Find the bracket that closes the first."""
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
        """Follow a quote; False where what comes behind it decides."""
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
        """Read behind the call: the mark that would have ended its section, and the end of the line."""
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
        """Return the place behind the blanks that begin at one; those that were there the last time are not looked at
        again."""
        found = blanks.match(self._text, max(at, self._blank_end))
        self._blank_end = found.end() if found else at
        return self._blank_end


class BareReader:
    """Reads a whole answer that may be nothing but the JSON object of a call, perhaps in a fence."""

    def __init__(self, opening: str, output: OutputFormat) -> None:
        """`opening` is the white space before it."""
        self._names = {tool.name for tool in output.offered}
        self._kept = [opening]
        self._head = ""
        self._tail: str | None = None
        self._scanner: JsonScanner | None = None
        self._looked_at = 0
        """Members of the object that were looked at."""
        self._strange = self._has_arguments = self._misnamed = False
        """Of those: one is no call's; the arguments are among them; the name is no tool's."""
        self._streamed = frozenset(self._names) if output.calls_only else frozenset[str]()
        self._object: BegunObject | None = None
        self.failed = False
        """What was read is no call."""

    @property
    def begun(self) -> BegunCall | None:
        """The call that is being written, where a grammar sees to it that the answer is one."""
        return None if self._object is None else self._object.call

    @property
    def kept(self) -> str:
        """All that was read."""
        return "".join(self._kept)

    def feed(self, text: str, start: int) -> int:
        """Read on from text[start]. Returns where it stopped: len(text) unless `failed`."""
        at = start
        while at < len(text) and not self.failed:
            end = self._step(text, at)
            self._kept.append(text[at:end])
            at = end
        return at

    def finish(self, *, by_model: bool) -> ParsedCall | None:
        """The text ends here: the call, if it is one."""
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
        """Return whether what was read begins no call of a tool that was offered: then nothing more is held back.

        Each member is looked at once, so that an object of many takes time that grows with its length alone.
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
