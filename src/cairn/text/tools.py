"""Tool calls in the Hermes/Qwen format, read while they are written:

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

A text is a call if it is a JSON object with a `name` (a text that is not empty) and optionally `arguments` (an object,
or a text that holds one) and `id`, and nothing else. `arguments` are passed on exactly as written, piece by piece,
once the name and the beginning of the first argument were read. What is no call is noticed, in most cases, before
anything was passed on: then all of its text is content, unchanged. Otherwise only what was not passed on is content.

Behind a name and complete arguments nothing can take the call back: other keys are passed over, another object before
the closing tag is another call, and what fits neither is content. The last brace waits for any of these, or for the
model to end by its own will, so complete arguments always belong to a complete call: one that is cut off lacks it.
"""

from __future__ import annotations

import enum
import hashlib
import json

from cairn.text.json_scan import SPACE, JsonScanner
from cairn.text.tokenizer import valid_text
from cairn.types import ToolCallDelta

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def call_id(request: int, choice: int, index: int) -> str:
    """The id of a call, the same whenever the same generation is read again."""
    return f"call_{hashlib.sha256(f'tool call {request} {choice} {index}'.encode()).hexdigest()[:24]}"


class _At(enum.Enum):
    """What the next character belongs to."""

    BRACE = enum.auto()
    NEXT_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    CLOSE = enum.auto()
    COMPLETE = enum.auto()
    FOLLOWED = enum.auto()
    FAILED = enum.auto()


_NEXT = {
    (_At.BRACE, "{"): _At.NEXT_KEY,
    (_At.NEXT_KEY, '"'): _At.KEY,
    (_At.COLON, ":"): _At.VALUE,
    (_At.COMMA, ","): _At.NEXT_KEY,
    (_At.COMMA, "}"): _At.CLOSE,
}


class CallScanner:
    """Reads one call from just behind its `<tool_call>`, or behind the call before it."""

    def __init__(self, index: int, id: str, opening: str) -> None:
        """`opening` is the text already consumed for this call: part of `rest` if it turns out to be none."""
        self._index = index
        self._id = id
        self._at = _At.BRACE
        self._kept = [opening]
        self._scanner = JsonScanner()
        self._scanned: list[str] = []
        self._key = ""
        self._seen: set[str] = set()
        self._name = ""
        self._arguments: list[str] = []
        self._arguments_done = False
        self._settled = False
        """Name and arguments are complete and were passed on, all but the last brace."""
        self._whole = False
        """The object of a call with arguments is closed: all of it belongs to the call."""
        self._tag = ""
        self.began = False
        """Whether anything was passed on."""

    @property
    def complete(self) -> bool:
        """The call came out whole, whatever ended it."""
        return self.closed or self.followed or (self.failed and self._settled)

    @property
    def closed(self) -> bool:
        """The call ended with its closing tag, or with all that the model said."""
        return self._at is _At.COMPLETE

    @property
    def followed(self) -> bool:
        """The call is complete, and where reading stopped another object begins."""
        return self._at is _At.FOLLOWED

    @property
    def failed(self) -> bool:
        """This is no call, or no longer one: `rest` is content, `again` is to be read again as what follows it."""
        return self._at is _At.FAILED

    @property
    def rest(self) -> str:
        """Text that was read and belongs to no call, without `again`."""
        text = "".join(self._kept)
        return text[: len(text) - len(self.again)]

    @property
    def again(self) -> str:
        """The beginning of a closing tag that turned out to be none, or all that followed the object of a call: another
        tag may begin in it."""
        return "".join(self._kept) if self._whole else self._tag

    def feed(self, text: str, start: int) -> tuple[int, list[ToolCallDelta]]:
        """Read on from text[start]. Returns where it stopped: len(text) unless `complete` or `failed`."""
        deltas: list[ToolCallDelta] = []
        at = start
        while at < len(text) and not self.failed and not self.complete:
            end = self._step(text, at)
            self._kept.append(text[at:end])
            if self._at is _At.CLOSE and self._settled and not self._whole:
                self._whole, self._kept = True, []
            at = end
            deltas += self._emit()
        return at, deltas

    def end(self) -> list[ToolCallDelta]:
        """The text ends here by the model's own will: a call whose name and arguments are complete is complete."""
        if self._at is _At.CLOSE or self._settled:
            self._at = _At.COMPLETE
        return self._emit()

    def _step(self, text: str, at: int) -> int:
        """Read one element; the place behind it, or where reading failed."""
        if self._at is _At.KEY or (self._at is _At.VALUE and self._scanned):
            return self._value(text, at)
        if self._tag:
            return self._closing(text, at)  # no blank within a tag
        blank = SPACE.match(text, at)
        at = blank.end() if blank else at
        if at == len(text):
            return at
        if self._at is _At.VALUE:
            return self._value(text, at)
        if self._at is _At.CLOSE:
            return self._closing(text, at)
        self._at = _NEXT.get((self._at, text[at]), _At.FAILED)
        if self._at is _At.CLOSE and not self._name:
            self._at = _At.FAILED
        return at if self._at in (_At.KEY, _At.FAILED) else at + 1

    def _value(self, text: str, at: int) -> int:
        """Read on in a key or a value."""
        end = self._scanner.feed(text, at)
        self._scanned.append(text[at:end])
        if self._at is _At.VALUE and self._key == "arguments":
            self._arguments.append(text[at:end])
        if self._scanner.failed:
            self._at = _At.FAILED
        elif self._scanner.done:
            whole = "".join(self._scanned)
            self._scanner, self._scanned = JsonScanner(), []
            self._at = self._end_key(whole) if self._at is _At.KEY else self._end_value(whole)
        return end

    def _end_key(self, text: str) -> _At:
        self._key = json.loads(text)
        if self._settled:
            self._key = ""  # passed over, whatever it is
            return _At.COLON
        if self._key not in ("name", "arguments", "id") or self._key in self._seen:
            return _At.FAILED
        self._seen.add(self._key)
        return _At.COLON

    def _end_value(self, text: str) -> _At:
        if self._key == "name":
            name = json.loads(text)
            if not isinstance(name, str):
                return _At.FAILED
            self._name = valid_text(name)
        elif self._key == "arguments":
            if text.startswith('"'):
                text = valid_text(json.loads(text)).strip()
                inner = JsonScanner()
                if inner.feed(text) != len(text) or not inner.done:
                    return _At.FAILED
                self._arguments = [text]
            if not text.startswith("{"):
                return _At.FAILED
            self._arguments_done = True
        return _At.COMMA

    def _closing(self, text: str, at: int) -> int:
        if not self._tag and text[at] == "{":
            self._at = _At.FOLLOWED
            return at
        piece = text[at : at + len(CLOSE) - len(self._tag)]
        if not CLOSE.startswith(self._tag + piece):
            self._at = _At.FAILED
            return at
        self._tag += piece
        if self._tag == CLOSE:
            self._at = _At.COMPLETE
        return at + len(piece)

    def _emit(self) -> list[ToolCallDelta]:
        """What is certain by now and was not passed on yet."""
        if self._settled:
            text = "}" if self.complete else ""
        elif self.complete:
            text = "{}"
        else:
            text = self._take_arguments()
        if not text:
            return []
        first = not self.began
        self.began = True
        if not first:
            return [ToolCallDelta(index=self._index, arguments=text)]
        return [ToolCallDelta(index=self._index, id=self._id, name=self._name, arguments=text)]

    def _take_arguments(self) -> str:
        """What was read of the arguments since the last time, also where reading failed behind it."""
        if not self._name or not self._arguments or not self._streamable():
            return ""
        text = "".join(self._arguments)
        self._arguments, self._kept = [], []
        self._settled = self._arguments_done
        return text[:-1] if self._settled else text

    def _streamable(self) -> bool:
        """Whether what was read of the arguments is an object whose first argument has begun."""
        return self.began or self._arguments_done or (self._arguments[0].startswith("{") and self._scanner.values > 1)
