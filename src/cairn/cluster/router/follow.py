"""Following a stream after its replica died: another one gives the same answer, whose beginning the client has.

The second answer is made from the first token on, since an answer never depends on who computes it. Its events may cut
the text in other places, so text is counted: as much as was delivered of each field is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

EVENT_END = b"\n\n"
DONE = b"[DONE]"
TEXTS = ("content", "reasoning_content", "refusal")
MOST_BYTES = 8 << 20
"""Longest stream that is remembered to be followed."""


class Delivered:
    """The events of a chat completion that a client has got."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._lengths: dict[tuple[object, ...], int] = {}
        self._named: dict[str, Any] = {}
        """Fields that the second answer takes over from the first: its id and time."""
        self._begun = False

    @property
    def whole(self) -> bool:
        """Whether all of it is remembered."""
        return self._bytes <= MOST_BYTES

    def add(self, events: bytes) -> None:
        """Remember whole events."""
        self._bytes += len(events)
        if self.whole:
            self._pieces.append(events)
        else:
            self._pieces.clear()

    def measure(self) -> None:
        """Count what was delivered. Call it before `rest`."""
        for event in split(b"".join(self._pieces)):
            self._begun = True
            if (body := _data(event)) is None:
                continue
            if not self._named:
                self._named = {name: body[name] for name in ("id", "created") if name in body}
            for place, text in _texts(body):
                self._lengths[place] = self._lengths.get(place, 0) + len(text)
        self._pieces.clear()

    def rest(self, event: bytes) -> bytes:
        """Return what an event of the second answer adds to what was delivered; empty for nothing."""
        body = _data(event)
        if body is None:
            return b"" if self._begun and DONE not in event else event
        cut = False
        news = False
        for choice in body.get("choices") or ():
            delta = choice.get("delta") or {}
            for name in TEXTS:
                if isinstance(text := delta.get(name), str) and text:
                    delta[name] = self._cut((choice.get("index"), name), text)
                    cut, news = True, news or bool(delta[name])
            for call in delta.get("tool_calls") or ():
                news |= self._cut_call(choice.get("index"), call)
                cut = True
            news |= bool(choice.get("finish_reason"))
        if self._begun and not news and (cut or _opens(body)):
            return b""
        return b"data: " + msgspec.json.encode(body | self._named) + EVENT_END

    def _cut(self, place: tuple[object, ...], text: str) -> str:
        """Return the text without what was delivered of it."""
        left = self._lengths.get(place, 0)
        self._lengths[place] = max(0, left - len(text))
        return text[left:]

    def _cut_call(self, choice: object, call: dict[str, Any]) -> bool:
        """Cut a piece of a tool call, in place; return whether anything of it is new."""
        function = call.get("function") or {}
        place = (choice, "call", call.get("index"))
        known = False
        if function.get("name"):
            known = self._cut((*place, "name"), function["name"]) == ""
            if known:
                function.pop("name")
                for name in ("id", "type"):
                    call.pop(name, None)
        if isinstance(text := function.get("arguments"), str):
            function["arguments"] = self._cut((*place, "arguments"), text)
        return bool(function.get("name") or function.get("arguments"))


def split(data: bytes) -> Iterator[bytes]:
    """Yield the events in these bytes, each with its end."""
    at = 0
    while (end := data.find(EVENT_END, at)) >= 0:
        yield data[at : end + len(EVENT_END)]
        at = end + len(EVENT_END)


def _data(event: bytes) -> dict[str, Any] | None:
    """Return the object in an event; None for a comment, the end mark, or anything else."""
    for line in event.splitlines():
        if line.startswith(b"data:") and not line.endswith(DONE):
            try:
                body = msgspec.json.decode(line[5:])
            except msgspec.DecodeError:
                return None
            return body if isinstance(body, dict) else None
    return None


def _texts(body: dict[str, Any]) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield the texts that an event adds, with the places that they are added to."""
    for choice in body.get("choices") or ():
        delta = choice.get("delta") or {}
        for name in TEXTS:
            if isinstance(text := delta.get(name), str):
                yield (choice.get("index"), name), text
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            for name in ("name", "arguments"):
                if isinstance(text := function.get(name), str):
                    yield (choice.get("index"), "call", call.get("index"), name), text


def _opens(body: dict[str, Any]) -> bool:
    """Return whether an event only opens a choice, or has nothing."""
    choices = body.get("choices")
    return bool(choices) and not any(choice.get("finish_reason") for choice in choices or ())
