"""Parser of gpt-oss's answers: messages on channels (https://cookbook.openai.com/articles/openai-harmony).

    <|channel|>analysis<|message|>Thoughts.<|end|><|start|>assistant<|channel|>final<|message|>The answer.
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}

`analysis` is reasoning, a message to `functions` is a call, and everything else is content. A header without
`<|message|>` ends at the next mark, or where text follows that cannot be part of a header; that text is its message. A
call of an offered tool is streamed once its arguments have begun (`begun_calls`). Other calls come whole or not at all;
one that cannot be parsed is content, with its header. Several messages of one kind are joined by line breaks.
"""

from __future__ import annotations

import copy
import enum
import re

from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.token_kinds import Run
from cairn.text.output.tool_parser import PUSHED, Piece, call_id, whole_json
from cairn.types.outputs import TokenKind, ToolCallDelta
from cairn.types.request import OutputFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ROLE = START + "assistant"
RECIPIENT = "functions."
MAX_HEADER = 256
MOST_NEAR = 2 * MAX_HEADER
"""Characters in which a header is searched."""
MAX_STRAY = 64
"""Characters after the channel within which `<|message|>` may still come."""
_BEGINS = (CHANNEL, START, MESSAGE, "<|constrain|>", " to=", "to=")
_KNOWN = r"analysis|commentary|final"
_BLANK = r"[^\S\n]"
"""A header is one line."""
_CHANNEL = re.compile(rf"<\|channel\|>{_BLANK}*({_KNOWN})(?![a-z])|<\|channel\|>{_BLANK}*(\w+)")
_TO = re.compile(r"(?:^|[\s>])to=([^\s<{]+)")
_TO_PART = rf"{_BLANK}*+to=[^\s<{{]++"
_CHANNEL_PART = rf"{_BLANK}*+<\|channel\|>{_BLANK}*+(?:(?:{_KNOWN})(?![a-z])|\w++)"
_TYPE_PART = rf"{_BLANK}*+<\|constrain\|>{_BLANK}*+\w*+|{_BLANK}*+(?:json|code)(?!\w)"
_PARTS = re.compile(f"(?:{_TO_PART})*+(?:{_CHANNEL_PART})?+(?:{_TO_PART}|{_TYPE_PART})*+")
"""The parts of a header, from its beginning on."""
_MARKS = (START, CHANNEL, "<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _MARKS)))
_HEADER_END = re.compile("|".join(map(re.escape, (MESSAGE, *_MARKS))))
_LONGEST = max(map(len, _MARKS))


def _is_sure(channel: re.Match[str] | None, to: re.Match[str] | None) -> bool:
    """Return whether a header is complete enough without the mark that ends it."""
    return channel is not None and (bool(channel[1]) or to is not None)


class _HarmonyAt(enum.Enum):
    """The element that comes next."""

    HEADER = enum.auto()
    BODY = enum.auto()
    BETWEEN = enum.auto()


class HarmonySplitter:
    """Splitter of one choice's text, with the interface of `Splitter`. Linear: headers are short."""

    def __init__(self, output: OutputFormat, request: int, choice: int) -> None:
        """Take the format; `request` and `choice` determine the ids of tool calls."""
        self._output = output
        self._source = (request, choice)
        self._offered = {tool.name for tool in output.offered}
        self._at = _HarmonyAt.HEADER
        self._held = ""
        self._kind = "text"
        self._name: str | None = None
        """The tool that the current message calls; None for other messages."""
        self._kept: list[str] = []
        """The header of a call."""
        self._body: list[str] = []
        self._scanner = JsonScanner()
        """Reader of a call's arguments."""
        self._streamed = False
        """Whether the call is streamed while it is written (`begun_calls`)."""
        self._sent = 0
        """Number of pieces of its JSON that were streamed."""
        self._kinds_seen: set[str] = set()
        """Kinds of messages that occurred."""
        self._fresh = False
        """Whether nothing of this message was shown yet."""
        self._bare = False
        """Whether its header has no `<|message|>`; white space after such a header is dropped."""
        self._total = self._settled = self._begun = 0
        """Characters received; characters shown or dropped; place where the header of a call begins."""
        self._runs: list[Run] = []
        self.shown: int | None = None
        """Number of characters that hold everything shown; None for all of them."""
        self.complete_calls = 0
        """Number of complete tool calls."""
        self.unread = False
        """Whether a message to a tool could not be parsed and became content."""

    @property
    def over(self) -> bool:
        """Whether the only wanted call is complete; text after it is dropped."""
        return self._output.one_call and self.complete_calls > 0

    @property
    def may_call(self) -> bool:
        """Whether the text being read may be a call or content."""
        return self._name is not None or (self._at is _HarmonyAt.HEADER and bool(self._held))

    @property
    def may_stop(self) -> bool:
        """Whether the text being read may turn out to be content: a call that has certainly begun is none."""
        return self._name is None or not self._streamed

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        pieces: list[Piece] = []
        steps = {_HarmonyAt.HEADER: self._header, _HarmonyAt.BODY: self._text, _HarmonyAt.BETWEEN: self._between}
        for start in range(0, len(text), PUSHED):
            self._held += text[start : start + PUSHED]
            self._total += len(text[start : start + PUSHED])
            while self._held and not self.over and steps[self._at](pieces):
                pass
        return pieces

    def finish(self, *, by_model: bool) -> list[Piece]:
        """End the text and return what was held back; `by_model`: it was not cut."""
        pieces: list[Piece] = []
        if self._at is _HarmonyAt.HEADER and self._held and not self.over and not self._cut_header():
            self._header(pieces, whole=True)
        held, self._held = self._held, ""
        if self._at is _HarmonyAt.BODY:
            if self._name is None:
                self._drop(self._total - len(held))
            self._add(held, pieces)
            self._end_message(pieces, self._total, whole=by_model)
        return pieces

    def decided(self) -> list[Run]:
        """Return the runs of characters decided since the last time."""
        runs, self._runs = self._runs, []
        return runs

    def _cut_header(self) -> bool:
        """Return whether the held text is only the beginning of a header."""
        parts = _PARTS.match(self._held)
        rest = self._held[parts.end() if parts else 0 :]
        return any(one.startswith(rest) for one in (*_BEGINS, *_MARKS) if rest[:1] in ("", "<"))

    def copy(self) -> HarmonySplitter:
        """Return a copy in the same state."""
        return copy.deepcopy(self, {id(self._output): self._output})

    def release(self) -> list[Piece]:
        """Return content that was held back as a possible mark; the caller knows that something else follows."""
        pieces: list[Piece] = []
        if self._at is _HarmonyAt.BODY and self._name is None and self._kind == "text":
            held, self._held = self._held, ""
            self._drop(self._total - len(held))
            self._add(held, pieces)
        return pieces

    def _header(self, pieces: list[Piece], *, whole: bool = False) -> bool:
        """Read a header, if there is one; return whether to go on. `whole`: the text has ended."""
        text = self._held
        if text.startswith(START):
            self._at = _HarmonyAt.BETWEEN
            return True
        begins = any(text.startswith(one[: len(text)]) for one in _BEGINS)
        if begins and not text.startswith(_BEGINS) and not whole:
            return False
        end = self._header_end(text, whole=whole) if begins else -1
        if end is None:
            return False
        header = text[: max(end, 0)]
        channel, to = _CHANNEL.search(header), _TO.search(header)
        behind = end + len(MESSAGE) if text.startswith(MESSAGE, end) else end
        known = begins and end >= 0 and (to is None or self._calls(to[1])) and (behind > end or _is_sure(channel, to))
        said = "" if channel is None else channel[1] or channel[2]
        self._name = to[1].removeprefix(RECIPIENT) if known and to is not None else None
        self._kind = "reasoning" if known and said == "analysis" else "text"
        self._kept, self._body = [text[:behind]] if self._name is not None else [], []
        self._scanner, self._streamed, self._sent = JsonScanner(), False, 0
        self._at, self._fresh, self._bare = _HarmonyAt.BODY, True, known and behind == end
        self._begun = self._total - len(text)
        if not known or self._name is not None:
            self._drop(self._begun)
        if known:
            self._held = text[behind:]
        elif begins and behind > end >= 0:  # to an unknown recipient: shown unchanged
            self._add(text[:behind], pieces)
            self._held = text[behind:]
        elif text.startswith(CHANNEL):
            self._add(CHANNEL, pieces)
            self._held = text[len(CHANNEL) :]
        return True

    def _header_end(self, text: str, *, whole: bool) -> int | None:
        """Return where a header ends, -1 if it is not a header, None if more text is needed and may come."""
        near = text[:MOST_NEAR]
        parts = _PARTS.match(near)
        end = parts.end() if parts else 0
        channel, to = _CHANNEL.search(near[:end]), _TO.search(near[:end])
        sure = _is_sure(channel, to)
        most = end + MAX_STRAY if sure else MAX_HEADER
        line = near.partition("\n")[0]
        begun = end + len(line[end:]) - len(line[end:].lstrip())
        if channel is None and line.startswith(CHANNEL, begun):
            begun += len(CHANNEL)  # the channel's name is still to come
        mark = _HEADER_END.search(line, begun)
        if mark is not None and mark.start() <= most:
            if mark.group() == MESSAGE:
                return mark.start()
            return end if sure else -1
        if line == near and len(text) < min(most + _LONGEST, MOST_NEAR) and not whole:
            return None
        return end if sure else -1

    def _calls(self, to: str) -> bool:
        return self._output.tools and (to.startswith(RECIPIENT) or to in self._offered)

    def _text(self, pieces: list[Piece]) -> bool:
        """Read a message up to its end, or up to text that may be its end; return whether to go on."""
        text = self._held
        place = self._total - len(text)
        if self._name is None:
            self._drop(place)
        found = _END.search(text)
        if found is None:
            first = max(0, len(text) - _LONGEST + 1)
            begin = text.find("<", first)
            while begin >= 0 and not any(mark.startswith(text[begin:]) for mark in _MARKS):
                begin = text.find("<", begin + 1)
            end = len(text) if begin < 0 else begin
            self._held = text[end:]
            self._add(text[:end], pieces)
            return False
        self._add(text[: found.start()], pieces)
        self._end_message(pieces, place + found.start(), whole=True)
        going = found.group() in (START, CHANNEL)
        if not going:
            self._drop(place + found.end())
        self._held = text[found.start() if going else found.end() :]
        self._at = _HarmonyAt.HEADER if found.group() == CHANNEL else _HarmonyAt.BETWEEN
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        """Skip the start of another message; return whether to go on."""
        text = self._held
        if len(text) < len(ROLE) and ROLE.startswith(text):
            return False
        self._held = text.removeprefix(ROLE) if text.startswith(ROLE) else text.removeprefix(START)
        self._at = _HarmonyAt.HEADER
        return True

    def _add(self, text: str, pieces: list[Piece]) -> None:
        """Add text to the current message."""
        if self._bare:
            blank = len(text) - len(text.lstrip())
            if self._name is None:
                self._drop(self._settled + blank)
            text = text[blank:]
        if not text:
            return
        self._bare = False
        if self._name is not None:
            self._body.append(text)
            self._scanner.feed(text)
            if not self._streamed and self._scanner.is_object and self._name in self._offered:
                self._streamed = True
                pieces.append(self._first(self._name, ""))
            self._stream(pieces)
            return
        self._decide(TokenKind.CONTENT if self._kind == "text" else TokenKind.REASONING, len(text))
        if self._fresh and self._kind in self._kinds_seen:
            text = "\n" + text
        self._fresh = False
        self._kinds_seen.add(self._kind)
        pieces.append((self._kind, text))

    def _drop(self, end: int) -> None:
        """Mark undecided characters before `end` as hidden: they are a header, a mark or a call."""
        self._decide(TokenKind.REASONING_TAG if self._kind == "reasoning" else TokenKind.HIDDEN, end - self._settled)

    def _decide(self, kind: TokenKind, size: int) -> None:
        if size > 0:
            self._settled += size
            self._runs.append((kind, size))

    def _end_message(self, pieces: list[Piece], end: int, *, whole: bool) -> None:
        """End the current message at `end`; emit it if it is a call."""
        name, self._name = self._name, None
        if name is None:
            return
        body = "".join(self._body)
        if self._streamed and not whole:
            return
        if self._streamed:
            self._end_streamed(body, pieces, end)
            return
        arguments = whole_json(body.strip() or "{}") if whole else None
        if arguments is None or not arguments.startswith("{") or not name:
            self._kind, self.unread = "text", True
            self._add("".join(self._kept) + body, pieces)
            return
        pieces.append(self._first(name, arguments))
        self._end_call(end)

    def _stream(self, pieces: list[Piece]) -> None:
        """Stream the certain part of the current call."""
        end = self._scanner.certain[0]
        if self._streamed and end > self._sent:
            text = self._scanner.between(self._sent, end)
            if text := text if self._sent else text.lstrip():
                pieces.append(ToolCallDelta(index=self.complete_calls, arguments=text))
            self._sent = end

    def _first(self, name: str, arguments: str) -> ToolCallDelta:
        index = self.complete_calls
        return ToolCallDelta(index=index, id=call_id(*self._source, index), name=name, arguments=arguments)

    def _end_streamed(self, body: str, pieces: list[Piece], end: int) -> None:
        """End a streamed call. Text after its arguments is content; broken arguments are passed on as written."""
        if self._scanner.lacking == 1 and not self._scanner.failed:
            self._scanner.close()
            self._stream(pieces)
        rest = body[self._scanner.certain[1] :]
        if not self._scanner.done and rest:
            pieces.append(ToolCallDelta(index=self.complete_calls, arguments=rest))
        self.unread |= not self._scanner.done
        self._end_call(end if not self._scanner.done else end - len(rest))
        if self._scanner.done and rest.strip():
            self._add(rest, pieces)

    def _end_call(self, end: int) -> None:
        self.complete_calls += 1
        self._kind = "text"
        self._drop(end)
