"""Following a stream after its replica died: another one gives the same answer, whose beginning the client has.

The second answer is made from the first token on, since an answer never depends on who computes it. Its events may cut
the text in other places, so the text of each field is compared with what was delivered, and cut off. Where it differs,
as between machines whose kernels round otherwise, the stream cannot go on: half of each answer would be neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

EVENT_END = b"\n\n"
DONE = b"[DONE]"
TEXTS = ("content", "reasoning_content", "refusal")
MOST_BYTES = 8 << 20
"""Longest stream that is remembered to be followed."""

Place = tuple[object, ...]
"""A text in an answer: its choice and its field, and for a tool call its number and the field there."""


class AnswersDiffer(Exception):
    """The second answer is not the one whose beginning the client has."""


class Delivered:
    """The events of a chat completion that a client has got."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._texts: dict[Place, str] = {}
        self._compared: dict[Place, int] = {}
        """Characters of each text that the second answer has had."""
        self._pending: Counter[object] = Counter()
        """Texts of each choice that the second answer has not had as a whole."""
        self._finished: dict[object, object] = {}
        """Why choices ended."""
        self._named: dict[str, Any] = {}
        """Fields that the second answer takes over from the first: its id and time."""
        self._begun = self._usage = False

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
        """Read what was delivered. Call it before `rest`."""
        parts: dict[Place, list[str]] = {}
        for event in split(b"".join(self._pieces)):
            self._begun = True
            if (body := _data(event)) is None:
                continue
            if not self._named:
                self._named = {name: body[name] for name in ("id", "created") if name in body}
            self._usage |= _is_usage(body)
            for place, text in _texts(body):
                parts.setdefault(place, []).append(text)
            for choice in body.get("choices") or ():
                if reason := choice.get("finish_reason"):
                    self._finished[choice.get("index")] = reason
        self._pieces.clear()
        self._texts = {place: "".join(texts) for place, texts in parts.items()}
        self._pending.update(place[0] for place, text in self._texts.items() if text)

    def rest(self, event: bytes) -> bytes:
        """Return what an event of the second answer adds to what was delivered; empty for nothing.

        Raise AnswersDiffer if it has another text than what was delivered.
        """
        body = _data(event)
        if body is None:
            if DONE in event:
                self.end()
            return b"" if self._begun and DONE not in event else event
        if "error" in body:  # the client learns why, and the stream ends
            self._pending.clear()
        if self._usage and _is_usage(body):
            return b""
        kinds = [self._cut_choice(choice) for choice in body.get("choices") or ()]
        news, cut = any(news for news, _ in kinds), any(cut for _, cut in kinds)
        if self._begun and not news and (cut or _opens(body)):
            return b""
        return b"data: " + msgspec.json.encode(body | self._named) + EVENT_END

    def end(self) -> None:
        """Note that the second answer is over. Raise AnswersDiffer if it is shorter than what was delivered."""
        if self._pending.total():
            raise AnswersDiffer

    def _cut_choice(self, choice: dict[str, Any]) -> tuple[bool, bool]:
        """Cut what was delivered off a choice, in place; return whether it has news, and whether it had text."""
        number, delta = choice.get("index"), choice.get("delta") or {}
        cut = news = False
        for name in TEXTS:
            if isinstance(text := delta.get(name), str) and text:
                delta[name] = self._cut((number, name), text)
                cut, news = True, news or bool(delta[name])
        for call in delta.get("tool_calls") or ():
            news |= self._cut_call(number, call)
            cut = True
        reason = choice.get("finish_reason")
        # A choice is written in one order: new text before all of the delivered has come again belongs to another one.
        if (news or reason) and self._pending[number]:
            raise AnswersDiffer
        if number in self._finished:
            if news or reason not in (None, self._finished[number]):
                raise AnswersDiffer
            choice["finish_reason"] = reason = None
        return news or bool(reason), cut

    def _cut(self, place: Place, text: str) -> str:
        """Return the text without what was delivered of it. Raise AnswersDiffer if that is another text."""
        delivered, at = self._texts.get(place, ""), self._compared.get(place, 0)
        if at == len(delivered):
            return text
        known = text[: len(delivered) - at]
        if not delivered.startswith(known, at):
            raise AnswersDiffer
        self._compared[place] = at + len(known)
        if at + len(known) == len(delivered):
            self._pending[place[0]] -= 1
        return text[len(known) :]

    def _cut_call(self, choice: object, call: dict[str, Any]) -> bool:
        """Cut a piece of a tool call, in place; return whether anything of it is new."""
        function = call.get("function") or {}
        place = (choice, "call", call.get("index"))
        if function.get("name"):
            if (name := self._cut((*place, "name"), function["name"])) == "":
                function.pop("name")
                for field in ("id", "type"):
                    call.pop(field, None)
            elif name != function["name"]:
                raise AnswersDiffer
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


def _texts(body: dict[str, Any]) -> Iterator[tuple[Place, str]]:
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


def _is_usage(body: dict[str, Any]) -> bool:
    """Return whether an event only tells the usage."""
    return bool(body.get("usage")) and not body.get("choices")


def _opens(body: dict[str, Any]) -> bool:
    """Return whether an event only opens a choice, or has nothing."""
    choices = body.get("choices")
    return bool(choices) and not any(choice.get("finish_reason") for choice in choices or ())
