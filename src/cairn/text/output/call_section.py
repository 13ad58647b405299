"""Reads calls in the forms of `call_formats` that have a section of their own, from a text that comes in pieces.

As in `tool_parser`, a call is passed on once its arguments have begun (`begun_calls`), and what is no call is content,
all of it and unchanged. Calls in Python and in braces, and those behind which a model writes their ids, come whole.
Linear: a text is looked at again only behind a mark that begins another section, and Python's calls only where their
end comes.
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
"""How often the end of Python's calls may turn out to stand in a text."""
_MADE_UP = {"{index}": re.compile(r"[0-9]{0,9}"), "{id}": re.compile(r"[0-9A-Za-z]{0,64}")}
"""What a model makes up where a form has these."""


class _SectionAt(enum.Enum):
    """What comes next."""

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
"""What is read on where it stopped; all else is looked at again from its beginning, which is near."""


class SectionReader(GrowingText):
    """Reads from just behind the mark that begins a section up to its end: the same interface as `tools.CallReader`."""

    def __init__(
        self, opening: str, output: OutputFormat, form: CallFormat, *, marked: bool = True, begins: bool = True
    ) -> None:
        """`opening` is the text already consumed for this section: content if it turns out to be none.

        `marked`: it is the mark that begins a section. Without one a call has to fit its tool. `begins`: a call is one
        as soon as its arguments have begun.
        """
        self._form = form
        self.marked = marked
        """It began with the mark of a section."""
        self._tools = {tool.name: tool for tool in output.offered}
        self._mends = not output.held
        super().__init__(opening)
        self._opening = len(opening)
        self._at = _SectionAt.SECTION if marked else _SectionAt.OPEN
        self._start = 0
        """Behind the last call that came out: what follows is content if it is none."""
        self._searched = self._from = 0
        self._over = False
        """No more of the text comes."""
        self._ends = 0
        self._in_list = False
        self._pending: ParsedCall | None = None
        self._name = self._key = self._id = ""
        self._is_text = self._own = False
        self._values: ValueScanner | None = None
        self._members: dict[str, str] = {}
        self._scanner = JsonScanner()
        self._streamed = frozenset(self._tools) if begins and marked and not form.ids_last else frozenset[str]()
        """The tools whose calls are passed on while they are written."""
        self._own_object = BegunObject(self._scanner, ())
        self._call: BegunCall | None = None
        """The call that is passed on."""
        self._arguments: TaggedArguments | None = None
        self._told = 0
        """Up to where it was: pieces of the JSON of its arguments, or characters of a text."""
        self._calls: list[ParsedCall] = []

    @property
    def begun(self) -> BegunCall | None:
        """The call that is being written, if it is certain to be one."""
        return self._call

    @property
    def closed(self) -> bool:
        """The end of the section was read."""
        return self._at is _SectionAt.CLOSED

    @property
    def failed(self) -> bool:
        """This is no call, or no longer one: `rest` is content, `again` is to be read again as what follows it."""
        return self._at is _SectionAt.FAILED

    @property
    def rest(self) -> str:
        """What was read and belongs to no call, without `again`."""
        return self._text[self._start : self._again]

    @property
    def again(self) -> str:
        """What is to be read again: behind the end of the section, or the end of what belongs to no call, in which
        another may begin."""
        return self._text[self._next if self.closed else self._again :]

    def take(self) -> list[ParsedCall]:
        """The calls that came out since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str, start: int) -> int:
        """Read on from text[start] to its end, which it returns; `again` is what was read too far."""
        kept, self._text = self._text, ""  # held by one name alone, a text is made longer in its place
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
        """The text ends here, by the model's own will or because it was cut. A call that has begun is `begun` behind
        a cut, and otherwise taken as it is."""
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
    def _again(self) -> int:
        """Where what was kept is to be read again: at the last mark that was read as a part of something else, or where
        reading failed, which does not depend on how the text was cut."""
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
        """Go as far as one element; Wait where what is there does not say yet what it is."""
        self._steps[self._at](self)

    def _section(self) -> None:
        form = self._form
        if form.kind in ("python", "braces"):
            self._searched, self._at = self._next, _SectionAt.PYTHON
            return
        self._in_list = form.listed and self._take("[")  # some write one object without its list
        self._at = _SectionAt.OPEN

    def _open(self) -> None:
        form = self._form
        self._scanner = JsonScanner()
        self._id = ""
        self._blank()
        self._need(1)
        self._own = form.kind == "object" or self._text[self._next] == "{"
        self._from = self._next
        if self._own:  # also where the form has another kind, and the model wrote an object
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
        """Go behind a number or an id, which is kept."""
        at = self._next
        found = self._word(_MADE_UP[kind])
        self._id = self._text[at : self._next]
        return found

    def _object(self) -> None:
        """A whole object: a call's own, or its arguments."""
        self._next = self._scanner.feed(self._text, self._next)
        self._look()
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

    def _look(self) -> None:
        """Pass on what was read of an object."""
        if self._own:
            self._own_object.look()
            self._call = self._own_object.call
            return
        end = self._scanner.certain[0]
        if self._call is None and self._name in self._streamed and self._scanner.is_object:
            self._call, self._told = BegunCall(self._name, self._id), 0
        if self._call is not None and end > self._told:
            text = self._scanner.between(self._told, end)
            self._call.add(text if self._told else text.lstrip())
            self._told = end

    @property
    def _names(self) -> dict[str, str]:
        """What the form calls the members of a call -> what they are called."""
        return {self._form.named: "name", self._form.arguments: "arguments"}

    def _usual(self, members: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The members of a call by the names that `tool_parser` knows."""
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
        """The next argument, or the end of the call."""
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
        """Behind the name of an argument: what else stands before its value."""
        before, told, behind = self._form.key[1].partition("{kind}")
        text, other = self._form.words
        tool = self._tools.get(self._name, OfferedTool(self._name))
        known = self._key not in tool.values
        if told and not self._take(before):
            self._fail()
            return
        if told:
            word = text if self._begins(text) is not None else other
            known = word == text
            if not self._take(word):
                self._fail()
                return
        if not self._take(behind if told else before):
            self._fail()
            return
        if self._form.key[1].endswith("\n"):
            self._need(1)
            self._next += self._text[self._next] == "\n"
        self._scanner = JsonScanner()
        self._from = self._told = self._next
        self._values = ValueScanner(
            self._form.tags, self._next, self._key, known_names(tool), self._members, mends=self._mends
        )
        self._is_text = known
        self._at = _SectionAt.TEXT_VALUE if known else _SectionAt.JSON_VALUE

    def _json_value(self) -> None:
        """What should be JSON and is none stays a text."""
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
            self._pass_on(self._values.certain(self._text))
            raise Wait
        value = self._text[self._next : found.end]
        value = value.removesuffix("\n") if self._form.value_end.startswith("\n") or not found.tagged else value
        written = None if self._is_text else literal(value.strip())
        self._pass_on(self._next + len(value))
        self._next = found.behind
        self._end_value(written or json.dumps(valid_text(value), ensure_ascii=False))

    def _pass_on(self, end: int) -> None:
        """Pass on a text that is the value up to there."""
        if self._arguments is not None and self._is_text and end > self._told:
            self._arguments.text(self._key, self._text[self._told : end])
            self._told = end

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
        """A call comes out, and what follows it begins at `start`."""
        self._calls.append(call)
        self._pending = self._call = self._arguments = None
        self._start, self._at = start, then

    def _whole(self, *, broken: bool = False) -> ParsedCall:
        assert self._call is not None
        return ParsedCall(self._call.name, self._call.arguments, self._call.id, broken)

    def _break(self, before: int) -> None:
        """Go on with a call that has begun and cannot be read from `before` on: behind its arguments it is content,
        within them a broken call."""
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
        """How many characters were read of the JSON that was passed on."""
        return self._own_object.place if self._own else self._scanner.certain[1]

    def _broken(self) -> None:
        """Read on up to what may end a broken call, or begin another."""
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
        """Take a call that has begun as it is: the model has ended there."""
        assert self._call is not None
        state, end = self._at, len(self._text)
        if self._pending is not None:
            self._end_begun(self._pending, self._next, _SectionAt.CLOSED)
            return
        whole = state is _SectionAt.KEY and not self._text[self._next :].strip()
        if state in (_SectionAt.OBJECT, _SectionAt.ARGUMENTS):
            if self._scanner.lacking == 1:
                self._scanner.close()
                self._look()
            whole = self._scanner.done or (self._own and self._own_object.end is not None)
        if whole and self._arguments is not None:
            self._arguments.end()
        elif state is _SectionAt.TEXT_VALUE and self._is_text:
            self._pass_on(end)
        elif not whole:
            scanned = self._arguments is None and state is not _SectionAt.BROKEN
            self._call.add(self._text[self._from + self._place if scanned else self._next :])
        self._next = end
        self._end_begun(self._whole(broken=not whole), end, _SectionAt.CLOSED)

    def _joint(self) -> None:
        """Behind a call: another one, or the end of the section."""
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
        """Python's calls, and those in braces, are read where they end."""
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
