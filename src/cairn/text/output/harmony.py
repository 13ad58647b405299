"""Reads answers of gpt-oss: messages on channels, each with a header (https://cookbook.openai.com/articles/openai-harmony).

    <|channel|>analysis<|message|>Thoughts.<|end|><|start|>assistant<|channel|>final<|message|>The answer.
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}

`analysis` is reasoning, a message to `functions` is a call, and all else is content. A call comes out whole or not at
all; one that cannot be read is content with its header. Texts of one kind that are several messages are lines of one.
"""

from __future__ import annotations

import copy
import enum
import re

from cairn.text.output.pieces import PUSHED, Piece
from cairn.text.output.tool_parser import ParsedCall, call_id, whole_json
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OutputFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ROLE = START + "assistant"
RECIPIENT = "functions."
MAX_HEADER = 256
_BEGINS = (CHANNEL, START, MESSAGE, "<|constrain|>", " to=", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_MARKS = (START, CHANNEL, "<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _MARKS)))
_LONGEST = max(map(len, _MARKS))


class _HarmonyAt(enum.Enum):
    """What comes next."""

    HEADER = enum.auto()
    BODY = enum.auto()
    BETWEEN = enum.auto()


class HarmonySplitter:
    """Splits one choice's text: the same interface as `split.Splitter`. Linear: a header is short."""

    def __init__(self, output: OutputFormat, request: int, choice: int) -> None:
        """`request` and `choice` make the ids of tool calls."""
        self._output = output
        self._source = (request, choice)
        self._offered = {tool.name for tool in output.offered}
        self._at = _HarmonyAt.HEADER
        self._held = ""
        self._kind = "text"
        self._name: str | None = None
        """Which tool the message calls; it is kept until it is whole."""
        self._kept: list[str] = []
        """The header and the text of a call."""
        self._body: list[str] = []
        self._said: set[str] = set()
        """Kinds of which there were messages."""
        self._fresh = False
        """Nothing of this message has come out."""
        self.complete_calls = 0
        """Tool calls that came out; each is complete."""
        self.unread = False
        """A message to a tool could not be read, so that it is content."""

    @property
    def over(self) -> bool:
        """The only call that is wanted is complete: what follows is no part of the answer."""
        return self._output.one_call and self.complete_calls > 0

    @property
    def may_call(self) -> bool:
        """What is being read may be a call, and may turn out to be content."""
        return self._name is not None or (self._at is _HarmonyAt.HEADER and bool(self._held))

    def push(self, text: str) -> list[Piece]:
        """Split what is certain by now."""
        pieces: list[Piece] = []
        steps = {_HarmonyAt.HEADER: self._header, _HarmonyAt.BODY: self._text, _HarmonyAt.BETWEEN: self._between}
        for start in range(0, len(text), PUSHED):
            self._held += text[start : start + PUSHED]
            while self._held and not self.over and steps[self._at](pieces):
                pass
        return pieces

    def finish(self, *, by_model: bool) -> list[Piece]:
        """The text ends: what was held back. `by_model`: it ended by itself and was not cut."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._at is _HarmonyAt.BODY:
            self._take(held, pieces)
            self._leave(pieces, whole=by_model)
        return pieces

    def copy(self) -> HarmonySplitter:
        """Another one in the same state."""
        return copy.deepcopy(self, {id(self._output): self._output})

    def release(self) -> list[Piece]:
        """Content held back because a mark may begin with it: something else follows."""
        pieces: list[Piece] = []
        if self._at is _HarmonyAt.BODY and self._name is None and self._kind == "text":
            held, self._held = self._held, ""
            self._take(held, pieces)
        return pieces

    def _header(self, pieces: list[Piece]) -> bool:
        """Read a header, if there is one; whether to go on."""
        text = self._held
        line = text.partition("\n")[0]
        end = line.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE))
        begins = any(text.startswith(one[: len(text)]) for one in _BEGINS)
        if end < 0 and begins and line == text and len(text) < MAX_HEADER + len(MESSAGE):
            return False
        header = text[:end] if begins and end >= 0 else ""
        if text.startswith(START):
            self._at = _HarmonyAt.BETWEEN
            return True
        channel, to = _CHANNEL.search(header), _TO.search(header)
        known = begins and end >= 0 and (to is None or self._calls(to[1]))
        self._name = to[1].removeprefix(RECIPIENT) if known and to is not None else None
        self._kind = "reasoning" if known and channel is not None and channel[1] == "analysis" else "text"
        if known:
            self._held = text[end + len(MESSAGE) :]
        self._kept, self._body = [text[: end + len(MESSAGE)]] if self._name is not None else [], []
        self._at, self._fresh = _HarmonyAt.BODY, True
        if not known and end >= 0 and begins:  # to somebody else: shown as it is
            self._take(text[: end + len(MESSAGE)], pieces)
            self._held = text[end + len(MESSAGE) :]
        elif not known and text.startswith(CHANNEL):
            self._take(CHANNEL, pieces)
            self._held = text[len(CHANNEL) :]
        return True

    def _calls(self, to: str) -> bool:
        return self._output.tools and (to.startswith(RECIPIENT) or to in self._offered)

    def _text(self, pieces: list[Piece]) -> bool:
        """Pass a message on up to its end, or up to what may be one."""
        text = self._held
        found = _END.search(text)
        if found is None:
            first = max(0, len(text) - _LONGEST + 1)
            place = text.find("<", first)
            while place >= 0 and not any(mark.startswith(text[place:]) for mark in _MARKS):
                place = text.find("<", place + 1)
            end = len(text) if place < 0 else place
            self._held = text[end:]
            self._take(text[:end], pieces)
            return False
        self._take(text[: found.start()], pieces)
        self._leave(pieces, whole=True)
        going = found.group() in (START, CHANNEL)
        self._held = text[found.start() if going else found.end() :]
        self._at = _HarmonyAt.HEADER if found.group() == CHANNEL else _HarmonyAt.BETWEEN
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        """Pass over what begins another message."""
        text = self._held
        if len(text) < len(ROLE) and ROLE.startswith(text):
            return False
        self._held = text.removeprefix(ROLE) if text.startswith(ROLE) else text.removeprefix(START)
        self._at = _HarmonyAt.HEADER
        return True

    def _take(self, text: str, pieces: list[Piece]) -> None:
        """More of a message."""
        if not text:
            return
        if self._name is not None:
            self._body.append(text)
            return
        if self._fresh and self._kind in self._said:
            text = "\n" + text
        self._fresh = False
        self._said.add(self._kind)
        pieces.append((self._kind, text))

    def _leave(self, pieces: list[Piece], *, whole: bool) -> None:
        """The end of a message: a call comes out, if it is one."""
        name, self._name = self._name, None
        if name is None:
            return
        body = "".join(self._body)
        arguments = whole_json(body.strip() or "{}") if whole else None
        if arguments is None or not arguments.startswith("{") or not name:
            self._kind, self.unread = "text", True
            self._take("".join(self._kept) + body, pieces)
            return
        call = ParsedCall(name, arguments)
        index, self.complete_calls = self.complete_calls, self.complete_calls + 1
        id = call_id(*self._source, index)
        pieces.append(ToolCallDelta(index=index, id=id, name=call.name, arguments=call.arguments))
