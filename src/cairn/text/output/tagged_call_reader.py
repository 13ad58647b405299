"""Incremental reader of the calls between two tags of `tool_parser`."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

from cairn.text.output.begun_calls import BegunCall, BegunObject, TaggedArguments, up_to
from cairn.text.output.json_scan import SPACE, JsonScanner
from cairn.text.output.tagged_values import ValueScanner
from cairn.text.output.tool_parser import (
    CLOSE,
    FUNCTION,
    OPEN,
    XML_CLOSE,
    XML_KEY,
    XML_LONGEST,
    XML_NAME,
    XML_TAGS,
    ParsedCall,
    behind_blanks,
    call_of,
    calls_in_xml,
    known_names,
    xml_value,
)
from cairn.types.request import OfferedTool, OutputFormat

MOST_LACKING = 2
"""Most closing braces that may be missing before a closing tag: of the arguments and of the call."""
_BRACES = re.compile(r"[ \t\n\r}]*")
_END = re.compile(r"</function>\s{0,40}</tool_call>")
_REACH = len("</function>" + CLOSE) + 40 - 1


class XmlProgress:
    """Functions in tags that arrive in pieces; the first is streamed once its first argument begins."""

    def __init__(self, offered: Iterable[OfferedTool]) -> None:
        self._tools = {tool.name: tool for tool in offered}
        self.text = ""
        """All text so far."""
        self.place = 0
        """Number of characters from which the streamed part was read."""
        self._blank_end = 0
        """End of the white space already skipped before the next tag."""
        self._keys: set[str] = set()
        self._key = ""
        self._values: ValueScanner | None = None
        """Search for the end of the current value; None between values."""
        self._arguments: TaggedArguments | None = None
        self._over = False
        self.call: BegunCall | None = None
        """The call, once it is certain to be one."""

    def look(self, *, mends: bool) -> None:
        """Stream what was added to the text; `mends` as in `calls_in_xml`."""
        while not self._over and (self._value() if self._values is not None else self._tag(mends=mends)):
            pass

    def _tag(self, *, mends: bool) -> bool:
        """Read the name, the next argument's name, or the end; return whether to go on."""
        at = self._blank_end = behind_blanks(self.text, max(self.place, self._blank_end))
        if self.place == 0:
            found = XML_NAME.match(self.text, at)
            if found is not None:
                self._name, self.place = found[1].strip(), found.end()
                self._over = self._name not in self._tools
            else:
                self._over = len(self.text) - at >= XML_LONGEST
            return found is not None
        if (key := XML_KEY.match(self.text, at)) is None:
            closed = self.text.startswith(XML_CLOSE, at)
            if closed and self._arguments is not None:
                self._arguments.end()
            self._over = closed or len(self.text) - at >= XML_LONGEST  # of other tags there is none as long
            return False
        self._key = key[1].strip()
        self._over = self._key in self._keys
        if self._over:
            return False
        self._keys.add(self._key)
        self.place = key.end()
        if self.call is None:
            self.call = BegunCall(self._name)
            self._arguments = TaggedArguments(self.call)
        known = known_names(self._tools[self._name])
        self._values = ValueScanner(XML_TAGS, self.place, self._key, known, self._keys, mends=mends)
        return True

    def _value(self) -> bool:
        """Stream the certain part of a value; return whether it has ended."""
        assert self._values is not None and self._arguments is not None
        end = self._values.find(self.text, whole=False)
        is_text = self._key not in self._tools[self._name].values
        begin = self._values.start
        until = self._values.certain(self.text) if end is None else end.end
        if is_text and until > begin:
            first = max(self.place, begin + (self.text[begin] == "\n"))
            last = until - (self.text[until - 1] == "\n" and until > begin)
            if last > first:
                self._arguments.text(self._key, self.text[first:last])
                self.place = last
        if end is None:
            return False
        self._arguments.value(self._key, xml_value(self.text[begin : end.end], is_text=is_text))
        self._values, self.place = None, end.behind
        return True


class _At(enum.Enum):
    """The element that the next character belongs to."""

    START = enum.auto()
    JSON = enum.auto()
    LACKING = enum.auto()
    XML = enum.auto()
    BEHIND = enum.auto()
    BROKEN = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()


class CallReader:
    """Reader from just after a `<tool_call>` up to its end."""

    def __init__(self, opening: str, output: OutputFormat, *, begins: bool = True) -> None:
        """Begin after `opening`, which is content if this turns out not to be a call.

        `begins`: calls are streamed as soon as their arguments have begun.
        """
        self._output = output
        self._offered = frozenset(tool.name for tool in output.offered) if begins else frozenset()
        self._opening = len(opening)
        self._kept = [opening]
        """Text read since the last complete call."""
        self._at = _At.START
        self._scanner = JsonScanner()
        self._object = BegunObject(self._scanner, self._offered)
        self._object_from = 0
        """Index in the kept text where the object begins."""
        self._tag = ""
        """The beginning of a tag."""
        self._xml = XmlProgress(())
        self._broken: BegunCall | None = None
        """A broken call, streamed as it is written up to a tag, of which `_tag` may be the beginning."""
        self._calls: list[ParsedCall] = []
        self._rest: str | None = None
        """Replacement for the kept text after the current element; None to keep all of it."""
        self._from = 0

    @property
    def begun(self) -> BegunCall | None:
        """The incomplete call, if it is certain to be a call."""
        if self._at in (_At.JSON, _At.LACKING):
            return self._object.call
        return self._broken or (self._xml.call if self._at is _At.XML else None)

    @property
    def closed(self) -> bool:
        """Whether the closing tag was read."""
        return self._at is _At.CLOSED

    @property
    def failed(self) -> bool:
        """Whether no further call can follow: `rest` is content, and `again` must be read again after it."""
        return self._at is _At.FAILED

    @property
    def rest(self) -> str:
        """The text read outside of calls, without `again`."""
        return "".join(self._kept)[: self._from]

    @property
    def again(self) -> str:
        """The text that must be read again: the end of the text outside of calls, in which another call may begin."""
        return "".join(self._kept)[self._from :] if self.failed else ""

    def take(self) -> list[ParsedCall]:
        """Return the calls completed since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str, start: int) -> int:
        """Read text[start:] and return where it stopped: len(text) unless `closed` or `failed`."""
        at = start
        while at < len(text) and not self.closed and not self.failed:
            end = self._step(text, at)
            self._kept.append(text[at:end])
            if self._rest is not None:
                self._kept, self._opening, self._rest = [self._rest], 0, None
            at = end
            if self._at is _At.BROKEN and self._broken is None:
                self._break()
        if self.failed:
            self._part()
        return at

    def finish(self, *, by_model: bool) -> None:
        """End the text, `by_model` or because it was cut.

        After a cut an incomplete call stays in `begun`; otherwise it is taken as it was written.
        """
        if by_model and self._at in (_At.JSON, _At.LACKING) and self._scanner.lacking == 1:
            self._scanner.close()
            if any(key in ("arguments", "parameters") for key, _ in self._scanner.members):
                self._end_object(_At.CLOSED)
        elif by_model and self._at is _At.XML:
            self._end_xml(self._xml.text)
        if self.begun is not None and not by_model:
            return
        if self._at in (_At.JSON, _At.LACKING) and self._object.call is not None:
            self._break()
        if self._broken is not None:
            self._broken.add(self._tag)
            self._end_broken(_At.CLOSED)
        if self._at not in (_At.BEHIND, _At.CLOSED):
            self._at = _At.FAILED
            self._part()

    def _part(self) -> None:
        """Set where in the kept text another call may begin: at the last opening tag, else at its end.

        After a complete call the text is read again from its beginning, unless an object begins there.
        """
        kept = "".join(self._kept)
        last = kept.rfind(OPEN, self._opening)
        last -= last > self._opening and kept[last - 1] == "\n"  # the line break that sets it apart
        if self._opening or kept.startswith("{"):
            self._from = last if last >= 0 else len(kept) - len(self._tag)

    def _step(self, text: str, at: int) -> int:
        """Read one element; return the index after it, or where reading failed."""
        if self._at is _At.JSON:
            return self._json(text, at)
        if self._at is _At.XML:
            return self._more_xml(text, at)
        if self._at is _At.BROKEN:
            return self._more_broken(text, at)
        if self._at is _At.LACKING or self._tag:
            return self._more_tag(text, at)  # a tag contains no white space
        blank = (_BRACES if self._at is _At.BEHIND else SPACE).match(text, at)
        end = blank.end() if blank else at
        if end == len(text):
            return end
        if text[end] == "{":
            self._scanner = JsonScanner()
            self._object = BegunObject(self._scanner, self._offered)
            self._rest = "" if self._at is _At.BEHIND else None
            self._object_from = 0 if self._at is _At.BEHIND else sum(map(len, self._kept)) + end - at
            self._at = _At.JSON
            return end
        return self._more_tag(text, end)

    def _json(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._object.look()
        if self._scanner.done:
            self._end_object(_At.BEHIND)
        elif self._scanner.failed and 0 < self._scanner.lacking <= MOST_LACKING:
            self._at = _At.LACKING
        elif self._scanner.failed:
            self._at = _At.FAILED if self._object.call is None else _At.BROKEN
        return end

    def _end_object(self, then: _At) -> None:
        self._object.look()
        begun = self._object.call
        call = call_of(self._scanner.members) if begun is None else ParsedCall(begun.name, begun.arguments, begun.id)
        self._at = _At.FAILED if call is None else then
        self._rest = None if call is None else ""
        self._calls += [] if call is None else [call]

    def _more_tag(self, text: str, at: int) -> int:
        """Continue reading the tag that must come here."""
        head = self._at is _At.START
        wanted = (FUNCTION if self._output.xml else "") if head else CLOSE
        piece = text[at : at + len(wanted) - len(self._tag)]
        if not piece or not wanted.startswith(self._tag + piece):
            broken = self._at is _At.LACKING and self._object.call is not None
            self._at = _At.BROKEN if broken else _At.FAILED
            return at
        self._tag += piece
        if self._tag == wanted:
            self._tag = ""
            if head:
                self._at = _At.XML
                self._xml = XmlProgress(self._output.offered if self._offered else ())
                self._xml.text = FUNCTION
            elif self._at is _At.LACKING:
                self._scanner.close()
                self._end_object(_At.CLOSED)
            else:
                self._at = _At.CLOSED
        return at + len(piece)

    def _more_xml(self, text: str, at: int) -> int:
        xml, before = self._xml, len(self._xml.text)
        kept, xml.text = xml.text, ""  # with only one reference CPython appends in place
        kept += text[at:]
        xml.text = kept
        del kept
        found = _END.search(xml.text, max(before - _REACH, 0))
        if found is not None:
            xml.text = xml.text[: found.end() - len(CLOSE)]
        xml.look(mends=not self._output.held)
        if found is None:
            return len(text)
        self._end_xml(xml.text, CLOSE)
        return at + found.end() - before

    def _end_xml(self, text: str, close: str = "") -> None:
        """Read all functions before `close`. A broken call ends where another begins."""
        calls = calls_in_xml(text, self._output.offered, mends=not self._output.held)
        begun = self._xml.call
        self._at = _At.FAILED if calls is None else _At.CLOSED
        if begun is not None and not (calls and calls[0].arguments.startswith(begun.arguments)):
            end, mark = up_to(text, self._xml.place, (OPEN,))
            begun.add(text[self._xml.place : end if mark else len(text)])
            calls = [ParsedCall(begun.name, begun.arguments, broken=True)]
            self._at = _At.FAILED if mark else _At.CLOSED
            if mark:
                self._rest, self._opening = text[end:] + close, 0
                self._kept = [self._rest]
        self._calls += calls or []

    def _break(self) -> None:
        """Continue an invalid streamed object: after its arguments it is content, within them a broken call."""
        kept, found = "".join(self._kept), self._object
        assert found.call is not None
        if found.end is not None:
            self._calls.append(ParsedCall(found.call.name, found.call.arguments, found.call.id))
            self._kept, self._opening, self._tag, self._at = [kept[self._object_from + found.end :]], 0, "", _At.FAILED
            return
        self._broken, self._at = found.call, _At.BROKEN
        self._broken.add(kept[self._object_from + found.place : len(kept) - len(self._tag)])

    def _more_broken(self, text: str, at: int) -> int:
        """Read up to the tag that ends a broken call or begins another."""
        assert self._broken is not None
        read, before = self._tag + text[at:], len(self._tag)
        end, mark = up_to(read, 0, (CLOSE, OPEN))
        self._broken.add(read[:end])
        self._tag, self._rest = ("" if mark else read[end:]), ""
        if not mark:
            return len(text)
        if mark.endswith(OPEN):
            self._rest = mark
        self._end_broken(_At.FAILED if mark.endswith(OPEN) else _At.CLOSED)
        return at + end + len(mark) - before

    def _end_broken(self, then: _At) -> None:
        begun, self._broken, self._tag = self._broken, None, ""
        assert begun is not None
        self._calls.append(ParsedCall(begun.name, begun.arguments, begun.id, broken=True))
        self._at = then
