"""Calls inside reasoning that was never ended: `<think>I look it up. <tool_call>{...}</tool_call>`, and nothing more.

A model may also merely think about a call. So text in reasoning is a call only if its tool was offered, it fits the
tool's schema, and only further calls and the end of the reasoning follow it in the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from cairn.text.output.argument_fit import fits
from cairn.text.output.tool_parser import ParsedCall
from cairn.types.request import OutputFormat

MOST_TRIED = 8
"""Marks without a call in one reasoning after which further marks are ignored."""
MOST_BLANK = 256
"""Most white space after a call; after more the reasoning goes on."""
_BLANK = re.compile(r"\s*+")


class CallSource(Protocol):
    """A reader of a section of calls (`CallReader`, `SectionReader`)."""

    @property
    def closed(self) -> bool: ...  # noqa: D102
    @property
    def failed(self) -> bool: ...  # noqa: D102
    @property
    def again(self) -> str: ...  # noqa: D102
    def take(self) -> list[ParsedCall]: ...  # noqa: D102
    def feed(self, text: str, start: int) -> int: ...  # noqa: D102
    def finish(self, *, by_model: bool) -> None: ...  # noqa: D102


class ThoughtCallReader:
    """Reader from a mark in reasoning to the end of the answer, or to text that shows that there is no call."""

    def __init__(
        self, opening: str, output: OutputFormat, marks: Sequence[str], close: str, reader: Callable[[str], CallSource]
    ) -> None:
        """Begin after the mark `opening`, which may have a line break before it.

        `marks` are all marks that begin calls, `close` ends the reasoning, and `reader` makes the reader after a mark.
        """
        self._shapes = {tool.name: tool.shape for tool in output.offered}
        self._opening, self._marks, self._close, self._make = opening, tuple(marks), close, reader
        self._kept = [opening]
        self._reader: CallSource | None = reader(opening)
        self._calls: list[ParsedCall] = []
        self._behind = ""
        """Undecided text after the last call."""
        self._ended = False
        """Whether the reasoning has ended after the calls."""
        self.failed = False
        """Whether this is reasoning: `opening`, and then `again`, which must be read again."""
        self.may_close = False
        """Whether the text after the mark holds the end of the reasoning, wherever it stands."""
        self._last = ""
        """The last characters, as many as may begin the end of the reasoning."""

    @property
    def opening(self) -> str:
        """The mark at its beginning."""
        return self._opening

    @property
    def again(self) -> str:
        """The text read after the mark."""
        return "".join(self._kept)[len(self._opening) :]

    def feed(self, text: str, start: int) -> None:
        """Read text[start:]."""
        self._kept.append(text[start:])
        near = self._last + text[start:]
        self.may_close = self.may_close or self._close in near
        self._last = near[max(0, len(near) - len(self._close)) :]
        self._read(text[start:])

    def finish(self, *, by_model: bool) -> list[ParsedCall]:
        """Return the calls of an answer that ends here; [] if the text is reasoning after all."""
        if self._reader is not None and not self.failed:
            self._reader.finish(by_model=by_model)
            self._take(self._reader)
            self.failed |= self._reader.failed
        self.failed |= not by_model or not self._calls or bool(self._behind.strip())
        return [] if self.failed else self._calls

    def _read(self, text: str) -> None:
        while text and not self.failed:
            text = self._in_call(self._reader, text) if self._reader is not None else self._between(text)

    def _in_call(self, reader: CallSource, text: str) -> str:
        at = reader.feed(text, 0)
        self._take(reader)
        self.failed |= reader.failed
        if not reader.closed:
            return ""
        self._reader = None
        return reader.again + text[at:]

    def _take(self, reader: CallSource) -> None:
        for call in reader.take():
            self._calls.append(call)
            self.failed |= call.name not in self._shapes or not fits(call.arguments, self._shapes[call.name])

    def _between(self, text: str) -> str:
        """Read after a call: another call, the end of the reasoning, or text with which the reasoning goes on."""
        text, self._behind = self._behind + text, ""
        blank = _BLANK.match(text)
        at = blank.end() if blank else 0
        wanted = () if self._ended or at > MOST_BLANK else (self._close, *self._marks)
        found = next((one for one in wanted if text.startswith(one, at)), None)
        if found == self._close:
            self._ended = True
            return text[at + len(found) :]
        if found is not None:
            self._reader = self._make(found)
            return text[at + len(found) :]
        rest = text[at:]
        self.failed |= bool(rest) and not any(one.startswith(rest) for one in wanted)
        self.failed |= at > MOST_BLANK
        self._behind = text
        return ""
