"""Incremental reader of calls in the formats of `call_formats` that have a section of their own.

As in `tool_parser`, a call is streamed once its arguments have begun (`begun_calls`), and text that is not a call is
content, complete and unchanged. Calls in Python's syntax and in braces, and those whose id follows them, come whole.
Linear: text is read again only after a mark that begins another section, and Python's calls only at their end.
"""

from __future__ import annotations

import enum
import json
import re
from typing import ClassVar

from cairn.text.output.argument_fit import fits
from cairn.text.output.begun_calls import BegunCall, BegunObject, TaggedArguments, up_to
from cairn.text.output.brace_calls import brace_call
from cairn.text.output.call_formats import CallFormat
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.python_calls import literal, python_calls
from cairn.text.output.tagged_values import GrowingText, ValueScanner, Wait
from cairn.text.output.tool_parser import ParsedCall, call_of, calls_in_json, joined, known_names
from cairn.text.tokens.tokenizer import valid_text
from cairn.types.request import OfferedTool, OutputFormat

MAX_ENDS = 32
"""Most end marks that may turn out to be inside a text of Python's calls."""
_MADE_UP = {"{index}": re.compile(r"[0-9]{0,9}"), "{id}": re.compile(r"[0-9A-Za-z]{0,64}")}
"""Placeholder in a format -> pattern of what the model makes up for it."""


class _SectionAt(enum.Enum):
    """The element that comes next."""

    SECTION = enum.auto()
    OPEN = enum.auto()
    OBJECT = enum.auto()
    ARGUMENTS = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    JSON_VALUE = enum.auto()
    TEXT_VALUE = enum.auto()
    CLOSE = enum.auto()
    JOINT = enum.auto()
    PYTHON = enum.auto()
    BROKEN = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()


_SCANNED = frozenset(
    {
        _SectionAt.OBJECT,
        _SectionAt.ARGUMENTS,
        _SectionAt.JSON_VALUE,
        _SectionAt.TEXT_VALUE,
        _SectionAt.PYTHON,
        _SectionAt.BROKEN,
    }
)
"""States that continue where reading stopped; other elements are short and read again from their beginning."""


class SectionReader(GrowingText):
    """Reader from just after the mark that begins a section up to its end; same interface as `CallReader`."""

    def __init__(
        self, opening: str, output: OutputFormat, form: CallFormat, *, marked: bool = True, begins: bool = True
    ) -> None:
        """Begin after `opening`, which is content if this turns out not to be a section.

        `marked`: `opening` is the mark of a section; without one a call has to fit its tool. `begins`: calls are
        streamed as soon as their arguments have begun.
        """
        self._form = form
        self.marked = marked
        """Whether it began with the mark of a section."""
        self._tools = {tool.name: tool for tool in output.offered}
        self._mends = not output.held
        super().__init__(opening)
        self._opening = len(opening)
        self._at = _SectionAt.SECTION if marked else _SectionAt.OPEN
        self._start = 0
        """End of the last complete call; text after it that is not a call is content."""
        self._searched = self._from = 0
        self._over = False
        """Whether the text has ended."""
        self._ends = 0
        self._in_list = False
        self._pending: ParsedCall | None = None
        self._name = self._key = self._id = ""
        self._is_text = self._own = False
        self._values: ValueScanner | None = None
        self._members: dict[str, str] = {}
        self._scanner = JsonScanner()
        self._streamed = frozenset(self._tools) if begins and marked and not form.ids_last else frozenset[str]()
        """The tools whose calls are streamed while they are written."""
        self._own_object = BegunObject(self._scanner, ())
        self._call: BegunCall | None = None
        """The call that is being streamed."""
        self._arguments: TaggedArguments | None = None
        self._sent = 0
        """How much of it was streamed: pieces of its arguments' JSON, or characters of a text."""
        self._calls: list[ParsedCall] = []

    @property
    def begun(self) -> BegunCall | None:
        """The incomplete call, if it is certain to be a call."""
        return self._call

    @property
    def closed(self) -> bool:
        """Whether the end of the section was read."""
        return self._at is _SectionAt.CLOSED

    @property
    def failed(self) -> bool:
        """Whether no further call can follow: `rest` is content, and `again` must be read again after it."""
        return self._at is _SectionAt.FAILED

    @property
    def rest(self) -> str:
        """The text read outside of calls, without `again`."""
        return self._text[self._start : self._again_from]

    @property
    def again(self) -> str:
        """The text that must be read again: after the section's end, or at the last mark in text outside of calls."""
        return self._text[self._next if self.closed else self._again_from :]

    def take(self) -> list[ParsedCall]:
        """Return the calls completed since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str, start: int) -> int:
        """Read text[start:] and return len(text); text read too far is in `again`."""
        kept, self._text = self._text, ""  # with only one reference CPython appends in place
        kept += text[start:]
        self._text = kept
        del kept
        while not self.closed and not self.failed:
            before = self._next
            try:
                self._step()
            except Wait:
                if self._at not in _SCANNED:
                    self._next = before
                break
            if self.failed and self._call is not None:
                self._break(before)
        return len(text)

    def finish(self, *, by_model: bool) -> None:
        """End the text, `by_model` or because it was cut.

        After a cut an incomplete call stays in `begun`; otherwise it is taken as it was written.
        """
        self._over = True
        if self._at is _SectionAt.TEXT_VALUE and by_model:
            self.feed("", 0)
        if self._call is not None and not by_model:
            return
        if self._call is not None:
            self._finish_begun()
        if self.closed:
            return
        whole = self._at is _SectionAt.PYTHON and by_model and self._python(len(self._text))
        whole |= self._at is _SectionAt.JOINT and (by_model or not self._form.end or not self.marked)
        self._next = len(self._text) if self.marked else self._start
        self._at = _SectionAt.CLOSED if whole else _SectionAt.FAILED

    @property
    def _again_from(self) -> int:
        """Where the text must be read again: at the last mark inside other text, or where reading failed.

        It does not depend on how the text was split.
        """
        text = self._text
        first = self._start or self._opening
        if not self.marked:
            return self._start or min(len(text), 1)
        stop = len(text) if self._over else max(self._next, self._searched, first)
        last = max(text.rfind(mark, first, stop) for mark in self._form.begins)
        if last < 0:
            return stop
        return last - (last > first and text[last - 1] == "\n")  # the line break that sets it apart

    def _step(self) -> None:
        """Read one element. Raises Wait if more text is needed to identify it."""
        self._steps[self._at](self)

    def _section(self) -> None:
        form = self._form
        if form.kind in ("python", "braces"):
            self._searched, self._at = self._next, _SectionAt.PYTHON
            return
        self._in_list = form.listed and self._take("[")  # some models write one object without its list
        self._at = _SectionAt.OPEN

    def _open(self) -> None:
        form = self._form
        self._scanner = JsonScanner()
        self._id = ""
        self._blank()
        self._need(1)
        self._own = form.kind == "object" or self._text[self._next] == "{"
        self._from = self._next
        if self._own:  # also in a format of another kind, if the model wrote an object
            self._own_object = BegunObject(self._scanner, self._streamed, self._names)
            self._at = _SectionAt.OBJECT
            return
        before, _, behind = form.open.partition("{name}")
        kind = "{id}" if "{id}" in behind else "{index}"
        behind, numbered, after = behind.partition(kind)
        stops = [part.strip() for part in (behind, form.key[0], form.end) if part.strip()]
        stops += ["\n"] if behind and not behind.strip() else []
        stops += ["{"] if form.bare_name else []
        if not self._take(before) or (name := self._until(*stops)) is None:
            self._fail()
            return
        name, _, self._id = name.partition(form.id_mark) if form.id_mark else (name, "", "")
        self._name, self._members = name.strip(), {}
        if not self._name or (form.bare_name and self._name not in self._tools):
            self._fail()
            return
        self._take(behind)
        if numbered and not (self._made_up(kind) and self._take(after)):
            self._fail()
            return
        self._from = self._next
        self._at = _SectionAt.ARGUMENTS if form.kind == "named" else _SectionAt.KEY

    def _made_up(self, kind: str) -> bool:
        """Read a number or an id into `_id`; return whether there was one."""
        at = self._next
        found = self._word(_MADE_UP[kind])
        self._id = self._text[at : self._next]
        return found

    def _object(self) -> None:
        """Read an object: the whole call, or its arguments."""
        self._next = self._scanner.feed(self._text, self._next)
        self._stream_object()
        if self._scanner.failed:
            self._fail()
            return
        if not self._scanner.done:
            raise Wait
        text = self._scanner.text.strip()
        call = ParsedCall(self._name, text, self._id) if text.startswith("{") else None
        if self._own:
            call = call_of(self._usual(self._scanner.members))
        self._end_call(call)

    def _stream_object(self) -> None:
        """Stream the certain part of the object."""
        if self._own:
            self._own_object.look()
            self._call = self._own_object.call
            return
        end = self._scanner.certain[0]
        if self._call is None and self._name in self._streamed and self._scanner.is_object:
            self._call, self._sent = BegunCall(self._name, self._id), 0
        if self._call is not None and end > self._sent:
            text = self._scanner.between(self._sent, end)
            self._call.add(text if self._sent else text.lstrip())
            self._sent = end

    @property
    def _names(self) -> dict[str, str]:
        """Member names of a call in this format -> their usual names."""
        return {self._form.named: "name", self._form.arguments: "arguments"}

    def _usual(self, members: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Rename the members of a call to the names that `tool_parser` knows."""
        names = self._names
        taken = {key for key, _ in members}
        return [
            (new if (new := names.get(key, key)) == key or new not in taken else key, value) for key, value in members
        ]

    def _end_call(self, call: ParsedCall | None) -> None:
        if self._call is not None:
            call = ParsedCall(self._call.name, self._call.arguments, self._call.id)
        elif call is not None and (not self.marked or (self._own and self._form.bare_name)):
            tool = self._tools.get(call.name)
            known = tool is not None and (self.marked or fits(call.arguments, tool.shape))
            call = call if known else None
        self._pending, self._at = call, _SectionAt.FAILED if call is None else _SectionAt.CLOSE

    def _tag(self) -> None:
        """Read the next argument's name, or find the end of the call."""
        if self._take(self._form.key[0]):
            key = self._until(self._form.key[1].partition("{kind}")[0].partition("\n")[0])
            if key is None or not key.strip() or key.strip() in self._members:
                self._fail()
                return
            self._key, self._at = key.strip(), _SectionAt.VALUE
            if self._call is None and self._name in self._streamed:
                self._call = BegunCall(self._name, self._id)
                self._arguments = TaggedArguments(self._call)
        elif self._form.bare_name and not self._members and self._begins("{") is not None:
            self._at = _SectionAt.ARGUMENTS
        elif self._begins(self._form.close or self._form.end) is None:
            self._fail()
        else:
            if self._arguments is not None:
                self._arguments.end()
            self._end_call(ParsedCall(self._name, joined(self._members), self._id))

    def _value(self) -> None:
        """Read the text between an argument's name and its value."""
        before, stated, behind = self._form.key[1].partition("{kind}")
        text, other = self._form.words
        tool = self._tools.get(self._name, OfferedTool(self._name))
        known = self._key not in tool.values
        if stated and not self._take(before):
            self._fail()
            return
        if stated:
            word = text if self._begins(text) is not None else other
            known = word == text
            if not self._take(word):
                self._fail()
                return
        if not self._take(behind if stated else before):
            self._fail()
            return
        if self._form.key[1].endswith("\n"):
            self._need(1)
            self._next += self._text[self._next] == "\n"
        self._scanner = JsonScanner()
        self._from = self._sent = self._next
        self._values = ValueScanner(
            self._form.tags, self._next, self._key, known_names(tool), self._members, mends=self._mends
        )
        self._is_text = known
        self._at = _SectionAt.TEXT_VALUE if known else _SectionAt.JSON_VALUE

    def _json_value(self) -> None:
        """Read a JSON value; if it is not valid JSON, it is a text."""
        if not self._scanner.failed:
            self._next = self._scanner.feed(self._text, self._next)
        if not self._scanner.failed and not self._scanner.done:
            raise Wait
        if not self._scanner.failed and self._take(self._form.value_end):
            self._end_value(self._scanner.text.strip())
        else:
            self._next, self._at = self._from, _SectionAt.TEXT_VALUE

    def _text_value(self) -> None:
        assert self._values is not None
        found = self._values.find(self._text, whole=self._over)
        if found is None:
            self._stream_text(self._values.certain(self._text))
            raise Wait
        value = self._text[self._next : found.end]
        value = value.removesuffix("\n") if self._form.value_end.startswith("\n") or not found.tagged else value
        written = None if self._is_text else literal(value.strip())
        self._stream_text(self._next + len(value))
        self._next = found.behind
        self._end_value(written or json.dumps(valid_text(value), ensure_ascii=False))

    def _stream_text(self, end: int) -> None:
        """Stream the text of the value up to `end`."""
        if self._arguments is not None and self._is_text and end > self._sent:
            self._arguments.text(self._key, self._text[self._sent : end])
            self._sent = end

    def _end_value(self, written: str) -> None:
        self._members[self._key], self._at = written, _SectionAt.KEY
        if self._arguments is not None:
            self._arguments.value(self._key, written)

    def _close(self) -> None:
        assert self._pending is not None
        if not (self._own and self._form.kind != "object") and not self._take(self._form.close):
            self._fail()
            return
        self._end_begun(self._pending, self._next, _SectionAt.JOINT)

    def _end_begun(self, call: ParsedCall, start: int, then: _SectionAt) -> None:
        """Complete a call; the text after it begins at `start`."""
        self._calls.append(call)
        self._pending = self._call = self._arguments = None
        self._start, self._at = start, then

    def _whole(self, *, broken: bool = False) -> ParsedCall:
        assert self._call is not None
        return ParsedCall(self._call.name, self._call.arguments, self._call.id, broken)

    def _break(self, before: int) -> None:
        """Continue a streamed call that cannot be read from `before` on.

        After its arguments the text is content; within them the call is broken.
        """
        assert self._call is not None
        if self._pending is not None:
            self._next = before
            self._end_begun(self._pending, before, _SectionAt.FAILED)
        elif self._own and self._own_object.end is not None:
            self._end_begun(self._whole(), self._from + self._own_object.end, _SectionAt.FAILED)
        else:
            self._next = before if self._arguments is not None else self._from + self._place
            self._at = _SectionAt.BROKEN

    @property
    def _place(self) -> int:
        """Number of characters from which the streamed JSON was read."""
        return self._own_object.place if self._own else self._scanner.certain[1]

    def _broken(self) -> None:
        """Read a broken call up to a mark that may end it or begin another."""
        assert self._call is not None
        marks = [self._form.close.strip(), *map(str.strip, self._ends_of_section), *self._form.begins]
        end, mark = up_to(self._text, self._next, [mark for mark in marks if mark])
        self._call.add(self._text[self._next : end])
        self._next = end
        if not mark:
            raise Wait
        self._end_begun(self._whole(broken=True), end, _SectionAt.JOINT)
        if self._form.close.strip() == mark.strip():
            self._next = self._start = end + len(mark)

    def _finish_begun(self) -> None:
        """Complete an incomplete call as it was written, because the model ended its answer."""
        assert self._call is not None
        state, end = self._at, len(self._text)
        if self._pending is not None:
            self._end_begun(self._pending, self._next, _SectionAt.CLOSED)
            return
        whole = state is _SectionAt.KEY and not self._text[self._next :].strip()
        if state in (_SectionAt.OBJECT, _SectionAt.ARGUMENTS):
            if self._scanner.lacking == 1:
                self._scanner.close()
                self._stream_object()
            whole = self._scanner.done or (self._own and self._own_object.end is not None)
        if whole and self._arguments is not None:
            self._arguments.end()
        elif state is _SectionAt.TEXT_VALUE and self._is_text:
            self._stream_text(end)
        elif not whole:
            scanned = self._arguments is None and state is not _SectionAt.BROKEN
            self._call.add(self._text[self._from + self._place if scanned else self._next :])
        self._next = end
        self._end_begun(self._whole(broken=not whole), end, _SectionAt.CLOSED)

    def _joint(self) -> None:
        """Read after a call: another call, or the end of the section."""
        form = self._form
        listed = self._in_list and self._take("]")
        over = listed and not form.end.strip()
        if over or any(self._take(end) for end in self._ends_of_section):
            self._start, self._at = self._next, _SectionAt.CLOSED
        elif not self.marked:
            more = self._begins(form.open.partition("{name}")[0]) is not None
            self._at = _SectionAt.OPEN if more else _SectionAt.CLOSED
        elif listed or form.single or not self._take(form.joint.strip()):
            self._fail()
        else:
            self._blank()
            self._need(1)
            self._at = _SectionAt.OPEN

    @property
    def _ends_of_section(self) -> list[str]:
        return [end for end in (self._form.end, *(end for _, end in self._form.others)) if end.strip()]

    def _find_end(self) -> None:
        """Find the end of calls in Python's syntax or in braces, and read them there."""
        end = self._text.find(self._form.end, self._searched)
        if end < 0:
            self._searched = max(self._next, len(self._text) - len(self._form.end) + 1)
            raise Wait
        if self._python(end):
            self._next = self._start = end + len(self._form.end)
            self._at = _SectionAt.CLOSED
            return
        self._ends += 1
        self._searched = end + 1
        if self._ends == MAX_ENDS:
            self._fail()

    def _python(self, end: int) -> bool:
        text = self._text[self._next : end]
        if self._form.kind == "braces":
            call = brace_call(text, self._form.value_end, self._form.open.partition("{name}")[0])
            calls = None if call is None else [call]
        else:
            calls = python_calls(text) or calls_in_json(text)
        self._calls += calls or []
        if calls:
            self._start = end
        return calls is not None

    # ------------------------------------------------------------------------------------------------ small steps

    def _fail(self) -> None:
        self._at = _SectionAt.FAILED

    _steps: ClassVar = {
        _SectionAt.SECTION: _section,
        _SectionAt.OPEN: _open,
        _SectionAt.OBJECT: _object,
        _SectionAt.ARGUMENTS: _object,
        _SectionAt.KEY: _tag,
        _SectionAt.VALUE: _value,
        _SectionAt.JSON_VALUE: _json_value,
        _SectionAt.TEXT_VALUE: _text_value,
        _SectionAt.CLOSE: _close,
        _SectionAt.JOINT: _joint,
        _SectionAt.PYTHON: _find_end,
        _SectionAt.BROKEN: _broken,
    }
