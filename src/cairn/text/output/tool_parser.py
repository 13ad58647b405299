"""Tool calls in the text of a model:

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

A text is a call if it is a JSON object with a `name` (a text that is not empty) and `arguments` (an object, or a text
that holds one; `parameters` is another name for them), or with a `name` alone. JSON is read as models write it
(`json_scan`); what is mended there has one meaning only. Behind the closing tag one or two braces may lack, before the
end of an answer that the model ended itself one, and more than are needed are passed over. Several objects may stand
between two tags.

Two other forms are read where they are asked for. Functions as XML, in the same tags, for templates that teach it:

    <tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

and an answer that is nothing but one JSON object, perhaps in a Markdown fence, which calls a tool that was offered.

A call comes out whole or not at all: nothing of it is passed on before its last brace or closing tag is read. What is
no call is content, all of it and unchanged.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cairn.text.output.argument_fit import names_in, shape_of
from cairn.text.output.json_scan import SPACE, JsonScanner
from cairn.text.output.tagged_values import ValueScanner, ValueTags
from cairn.text.tokens.tokenizer import valid_text
from cairn.types.request import OfferedTool, OutputFormat

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
MOST_LACKING = 2
"""Closing braces that may lack before a closing tag: that of the arguments and that of the call."""

_BRACES = re.compile(r"[ \t\n\r}]*")
_XML_END = re.compile(r"</function>\s{0,40}</tool_call>")
_XML_REACH = len("</function>" + CLOSE) + 40 - 1
_XML_NAME = re.compile(r"\s*<function=([^<>\n]+)>")
_XML_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
_XML_CLOSE = re.compile(r"\s*</function>\s*")
_XML_TAGS = ValueTags("</parameter>", ("<parameter=", ">"), "</function>", "", (FUNCTION,))
_FENCE = re.compile(r"(?:```[a-z_]{0,16}\s{0,16})?")
_FENCE_SO_FAR = re.compile(r"`{1,2}|```[a-z_]{0,16}\s{0,16}")
_AFTER_FENCED = re.compile(r"\s{0,16}(?:`{1,2}|```\s{0,16})?")
_AFTER_BARE = re.compile(r"\s{0,16}")

_JSON_COMMA = re.compile(r"\s*+(,)?\s*+")
_OWN_ID = re.compile(r'"([0-9A-Za-z]{9})"')
"""The id that a model writes into its call, as Mistral's do."""
_EITHER = ({"arguments", "parameters"}, {"name", "tool_name"})
"""Members of a call of which there may be one."""
_OF_A_CALL = frozenset({"", "name", "arguments", "parameters", "id", "type", "function"})
"""Members of an answer that is nothing but a call, and the key that is not read yet."""
_WITHOUT = frozenset({"name", "id", "type", "tool_name", "tool_call_id"})
"""Members of a call without arguments."""


class ParsedCall(NamedTuple):
    """A call as it is passed on; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""
    """The id or number that the model wrote into the call: letters and digits, "" in forms that have none."""


_ID_SIZE = 24
_WRITTEN_ID = re.compile(r"call_[0-9a-f]{8,24}z([0-9A-Za-z]{1,15})")


def call_id(request: int, choice: int, index: int, own: str = "") -> str:
    """Return the id of a call, the same whenever the same generation is read again.

    `own`: the id that the model wrote. It ends this one behind a letter that is no hexadecimal digit, so that a result
    can be given to the template under the id that stands in the sampled answer (`written_id`).
    """
    digest = hashlib.sha256(f"tool call {request} {choice} {index}".encode()).hexdigest()
    if not 0 < len(own) < 16:
        return f"call_{digest[:_ID_SIZE]}"
    return f"call_{digest[: _ID_SIZE - 1 - len(own)]}z{own}"


def written_id(id: str) -> str:
    """Return what a model wrote as the id of a call, from an id that `call_id` made; "" where it wrote none."""
    found = _WRITTEN_ID.fullmatch(id)
    return found[1] if found else ""


def offered_tools(tools: Iterable[Any], *, xml: bool) -> tuple[OfferedTool, ...]:
    """What is to be known of OpenAI's tools to read calls to them. Tools without a name cannot be called."""
    offered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        known = properties.items() if xml and isinstance(properties, Mapping) else ()
        values = tuple(valid_text(key) for key, schema in known if not is_text(schema))
        offered.append(OfferedTool(valid_text(function["name"]), values, shape_of(parameters)))
    return tuple(offered)


def is_text(schema: Any) -> bool:
    """Whether a parameter with this schema may be a text, or may be anything."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    if isinstance(schema.get("enum"), list):
        return any(isinstance(one, str) for one in schema["enum"])
    choices = [one for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for one in schema[key]]
    if choices:
        return any(is_text(one) for one in choices)
    return not schema.keys() & {"$ref", "allOf", "properties", "items"}


def call_of(members: Sequence[tuple[str, str]]) -> ParsedCall | None:
    """The call that an object's members (key, JSON) say; None where they say none, or not which."""
    given = dict(members)
    telling = [key for key, _ in members if key in ("name", "tool_name", "arguments", "parameters", "function")]
    if len(telling) != len(set(telling)) or any(pair <= set(telling) for pair in _EITHER):
        return None  # one of them twice
    if "name" not in given and given.get("function", "").startswith("{"):
        inner = JsonScanner()
        inner.feed(given["function"])
        return call_of(inner.members)
    name = json.loads(given.get("name", given.get("tool_name", "null")))
    if not isinstance(name, str) or not name:
        return None
    arguments = given.get("arguments", given.get("parameters"))
    own = _OWN_ID.fullmatch(given.get("id", ""))
    id = own[1] if own else ""
    if arguments is None:
        return ParsedCall(valid_text(name), "{}", id) if given.keys() <= _WITHOUT else None
    if arguments.startswith('"'):
        arguments = whole_json(valid_text(json.loads(arguments)).strip() or "null")
    arguments = "{}" if arguments == "null" else arguments
    if arguments is None or not arguments.startswith("{"):
        return None
    return ParsedCall(valid_text(name), arguments, id)


def calls_in_json(text: str) -> list[ParsedCall] | None:
    """The calls that one object, or a list of objects, makes; None if the text is anything else."""
    text = text.strip()
    listed = text.startswith("[") and text.endswith("]")
    text = text[1:-1].strip() if listed else text
    calls: list[ParsedCall] = []
    at = 0
    while at < len(text):
        scanner = JsonScanner()
        at = scanner.feed(text, at)
        call = call_of(scanner.members) if scanner.done else None
        if call is None:
            return None
        calls.append(call)
        behind = _JSON_COMMA.match(text, at)
        if behind is None or (behind.end() == len(text)) != (behind[1] is None) or not (listed or behind[1] is None):
            return None
        at = behind.end()
    return calls or None


def whole_json(text: str) -> str | None:
    """One JSON value and nothing else, as strict JSON."""
    scanner = JsonScanner()
    end = scanner.feed(text + " ")
    return scanner.text if scanner.done and end >= len(text) else None


def calls_in_xml(text: str, offered: Iterable[OfferedTool], *, mends: bool = True) -> list[ParsedCall] | None:
    """Return the calls that a text of `<function=...>` tags holds; None if it is anything else.

    `mends`: a closing tag of a parameter may be missing.
    """
    tools = {tool.name: tool for tool in offered}
    calls: list[ParsedCall] = []
    at = 0
    while found := _XML_NAME.match(text, at):
        name, at = found[1].strip(), found.end()
        tool = tools.get(name, OfferedTool(name))
        known = known_names(tool)
        arguments: dict[str, str] = {}
        while key := _XML_KEY.match(text, at):
            argument = key[1].strip()
            scanner = ValueScanner(_XML_TAGS, key.end(), argument, known, arguments, mends=mends)
            end = scanner.find(text, whole=True)
            if end is None or argument in arguments:
                return None
            value, at = text[key.end() : end.end], end.behind
            if "</parameter>" in value and "<parameter=" in value:
                return None
            arguments[argument] = _xml_value(value, is_text=argument not in tool.values)
        close = _XML_CLOSE.match(text, at)
        if close is None or not name:
            return None
        at = close.end()
        calls.append(ParsedCall(name, joined(arguments)))
    return calls if calls and at == len(text) else None


def known_names(tool: OfferedTool) -> frozenset[str]:
    """Return the arguments of a tool; none where they are not known."""
    return names_in(tool.shape)


def joined(members: Mapping[str, str]) -> str:
    """Return a JSON object of members whose values are JSON already."""
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {one}" for key, one in members.items()) + "}"


def _xml_value(text: str, *, is_text: bool) -> str:
    """A parameter's value as JSON. What should be JSON and is none stays a text."""
    text = text.removeprefix("\n").removesuffix("\n")
    return (None if is_text else whole_json(text.strip())) or json.dumps(text, ensure_ascii=False)


class _At(enum.Enum):
    """What the next character belongs to."""

    START = enum.auto()
    JSON = enum.auto()
    LACKING = enum.auto()
    XML = enum.auto()
    BEHIND = enum.auto()
    CLOSED = enum.auto()
    FAILED = enum.auto()


class CallReader:
    """Reads from just behind a `<tool_call>` up to its end."""

    def __init__(self, opening: str, output: OutputFormat) -> None:
        """`opening` is the text already consumed for this call: content if it turns out to be none."""
        self._output = output
        self._opening = len(opening)
        self._kept = [opening]
        """What was read since the last call that came out."""
        self._at = _At.START
        self._scanner = JsonScanner()
        self._tag = ""
        """The beginning of a tag."""
        self._xml: list[str] = []
        self._calls: list[ParsedCall] = []
        self._forget = False
        """What was read up to here belongs to a call, or sets one apart."""
        self._from = 0

    @property
    def closed(self) -> bool:
        """The closing tag was read."""
        return self._at is _At.CLOSED

    @property
    def failed(self) -> bool:
        """This is no call, or no longer one: `rest` is content, `again` is to be read again as what follows it."""
        return self._at is _At.FAILED

    @property
    def rest(self) -> str:
        """What was read and belongs to no call, without `again`."""
        return "".join(self._kept)[: self._from]

    @property
    def again(self) -> str:
        """What is to be read again: the end of what belongs to no call, in which another may begin."""
        return "".join(self._kept)[self._from :] if self.failed else ""

    def take(self) -> list[ParsedCall]:
        """The calls that came out since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str, start: int) -> int:
        """Read on from text[start]. Returns where it stopped: len(text) unless `closed` or `failed`."""
        at = start
        while at < len(text) and not self.closed and not self.failed:
            end = self._step(text, at)
            self._kept.append(text[at:end])
            if self._forget:
                self._kept, self._opening, self._forget = [], 0, False
            at = end
        if self.failed:
            self._part()
        return at

    def finish(self, *, by_model: bool) -> None:
        """The text ends here, by the model's own will or because it was cut."""
        if by_model and self._at in (_At.JSON, _At.LACKING) and self._scanner.lacking == 1:
            self._scanner.close()
            if any(key in ("arguments", "parameters") for key, _ in self._scanner.members):
                self._end_object(_At.CLOSED)
        elif by_model and self._at is _At.XML:
            self._end_xml("".join(self._xml))
        if self._at not in (_At.BEHIND, _At.CLOSED):
            self._at = _At.FAILED
            self._part()

    def _part(self) -> None:
        """Where in what was kept another call may begin: at the last opening tag, and behind a call anywhere."""
        kept = "".join(self._kept)
        last = kept.rfind(OPEN, self._opening)
        last -= last > self._opening and kept[last - 1] == "\n"  # the line break that sets it apart
        if self._opening or kept.startswith("{"):
            self._from = last if last >= 0 else len(kept) - len(self._tag)

    def _step(self, text: str, at: int) -> int:
        """Read one element; the place behind it, or where reading failed."""
        if self._at is _At.JSON:
            return self._json(text, at)
        if self._at is _At.XML:
            return self._more_xml(text, at)
        if self._at is _At.LACKING or self._tag:
            return self._more_tag(text, at)  # no blank within a tag
        blank = (_BRACES if self._at is _At.BEHIND else SPACE).match(text, at)
        at = blank.end() if blank else at
        if at == len(text):
            return at
        if text[at] == "{":
            self._scanner = JsonScanner()
            self._forget = self._at is _At.BEHIND
            self._at = _At.JSON
            return at
        return self._more_tag(text, at)

    def _json(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        if self._scanner.done:
            self._end_object(_At.BEHIND)
        elif self._scanner.failed:
            self._at = _At.LACKING if 0 < self._scanner.lacking <= MOST_LACKING else _At.FAILED
        return end

    def _end_object(self, then: _At) -> None:
        call = call_of(self._scanner.members)
        self._at = _At.FAILED if call is None else then
        self._forget = call is not None
        self._calls += [] if call is None else [call]

    def _more_tag(self, text: str, at: int) -> int:
        """Read on in the tag that has to stand here."""
        head = self._at is _At.START
        wanted = (FUNCTION if self._output.xml else "") if head else CLOSE
        piece = text[at : at + len(wanted) - len(self._tag)]
        if not piece or not wanted.startswith(self._tag + piece):
            self._at = _At.FAILED
            return at
        self._tag += piece
        if self._tag == wanted:
            self._tag = ""
            if head:
                self._at = _At.XML
                self._xml = [FUNCTION]
            elif self._at is _At.LACKING:
                self._scanner.close()
                self._end_object(_At.CLOSED)
            else:
                self._at = _At.CLOSED
        return at + len(piece)

    def _more_xml(self, text: str, at: int) -> int:
        tail = self._xml[-1][-_XML_REACH:]
        found = _XML_END.search(tail + text[at:])
        if found is None:
            # The last piece is long enough to search an end that begins in it.
            self._xml[-1] = self._xml[-1][: len(self._xml[-1]) - len(tail)]
            self._xml.append(tail + text[at:])
            return len(text)
        end = at + found.end() - len(tail)
        self._xml.append(text[at:end])
        self._end_xml("".join(self._xml)[: -len(CLOSE)])
        return end

    def _end_xml(self, text: str) -> None:
        calls = calls_in_xml(text, self._output.offered, mends=not self._output.held)
        self._at = _At.FAILED if calls is None else _At.CLOSED
        self._calls += calls or []


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
        self.failed = False
        """What was read is no call."""

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
        self.failed = (_FENCE_SO_FAR if brace < 0 else _FENCE).fullmatch(self._head) is None
        if brace >= 0 and not self.failed:
            self._scanner = JsonScanner()
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
