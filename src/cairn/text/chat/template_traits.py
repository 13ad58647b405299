"""Traits of a chat template, found by rendering probes, and messages adapted to them.

A template silently drops what it was not written for: content that it reads only as parts, tool calls, tool results.
So a few small conversations are rendered when a model is loaded, and the output is searched for the probes' texts.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cairn.text.chat.call_ids import CallIds

Message = dict[str, Any]
Render = Callable[[list[Message], dict[str, Any]], Awaitable[str | None]]
"""Conversation, variables -> rendered text; None if the template refuses or fails."""

USER, SYSTEM, SAID, MORE = "probe of user", "probe of system", "probe of answer", "probe of more"
NAME, VALUE, RESULT, TOOL, KEY = "probe_call", "probe of value", "probe of result", "probe_tool", "probe_key"
_IDS: Mapping[CallIds, tuple[str, ...]] = {
    "any": ("call_0123456789abcdef01234567", "a_1"),
    "nine": ("probe0001",),
    "kimi": (f"functions.{NAME}:0",),
}
"""Kind of ids -> ids of probe calls."""
ASKED: Message = {"role": "user", "content": USER}
OFFERED: Message = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": TOOL,
        "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": KEY}}, "required": []},
    },
}


LOOKS = 64
"""How many times over a rendered text is searched for contents that are out of order."""


class Traits(NamedTuple):
    """A template's behaviour, with tools or without."""

    absent: bool = False
    """Without tools, the variable `tools` must be undefined, not None."""
    parts: frozenset[str] = frozenset()
    """Roles whose content it reads only as a list of parts."""
    calls: bool = True
    """It shows an answer's calls."""
    beside: bool = True
    """It shows an answer's content beside its calls."""
    apart: bool = False
    """It shows content and calls if they are two messages, one after the other."""
    results: bool = True
    """It shows tool results."""
    offers: bool = False
    """It shows the offered tools."""
    ids: CallIds = "any"
    """The kind of call ids that it accepts, or takes names from."""
    middle: bool = True
    """It shows a later system message in its place; if it moved one, the prompt before it would change."""


async def find_traits(render: Render) -> tuple[Traits, Traits]:
    """Return a template's traits without tools and with tools."""
    nothing: dict[str, Any] = {"tools": None, "documents": None}
    with_none, without = await render([ASKED], nothing), await render([ASKED], {})
    absent = without is not None and (with_none is None or len(without) < len(with_none))
    given = {} if absent else nothing
    parts: frozenset[str] = frozenset()
    plain = Traits(absent=absent)
    if with_none is not None or without is not None:
        parts = await _find_parts(render, given)
        late = await render(in_parts([ASKED, {"role": "system", "content": SYSTEM}], parts), given)
        middle = late is not None and -1 < late.find(USER) < late.find(SYSTEM)
        plain = await _find_calls(render, Traits(absent=absent, parts=parts, middle=middle), given)
    offered = {**given, "tools": [OFFERED]}
    shown = await render(in_parts([ASKED], parts), offered)
    if not (_shows(shown, TOOL) or _shows(shown, KEY)):
        return plain, plain
    return plain, await _find_calls(render, plain._replace(offers=True), offered)


async def _find_parts(render: Render, given: dict[str, Any]) -> frozenset[str]:
    parts: set[str] = set()
    for role, probe, conversation in (
        ("user", USER, [ASKED]),
        ("system", SYSTEM, [{"role": "system", "content": SYSTEM}, ASKED]),
        ("assistant", SAID, [ASKED, _said(SAID), {"role": "user", "content": MORE}]),
    ):
        if not _shows(await render(in_parts(conversation, parts), given), probe) and _shows(
            await render(in_parts(conversation, {*parts, role}), given), probe
        ):
            parts.add(role)
    return frozenset(parts)


async def _find_calls(render: Render, traits: Traits, given: dict[str, Any]) -> Traits:
    """Return the traits completed by those of calls and results."""

    async def shows(conversation: list[Message], *probes: str) -> bool:
        return _shows(await render(in_parts(conversation, traits.parts), given), *probes)

    ids = await _find_ids(render, traits, given)
    call, result = _called(_IDS[ids][0])
    whole = [ASKED, call, result]
    both = await shows(whole, NAME, VALUE, RESULT)
    calls = both or await shows([ASKED, call], NAME, VALUE) or await shows(whole, NAME, VALUE)
    results = both or await shows([ASKED, call if calls else _said(SAID), result], RESULT)
    tail = [result] if results else []
    beside = not calls or await shows([ASKED, {**call, "content": SAID}, *tail], SAID, NAME)
    apart = not beside and await shows([ASKED, _said(SAID), call, *tail], SAID, NAME)
    return traits._replace(calls=calls, results=results, beside=beside, apart=apart, ids=ids)


async def _find_ids(render: Render, traits: Traits, given: dict[str, Any]) -> CallIds:
    """Return the kind of ids with which a template shows most of a call and its result; the first on a tie."""

    async def shown(id: str) -> int:
        call, result = _called(id)
        seen = 0
        for conversation in ([ASKED, call, result], [ASKED, call]):
            text = await render(in_parts(conversation, traits.parts), given)
            seen += sum(_shows(text, probe) for probe in (NAME, VALUE, RESULT))
        return seen

    best: CallIds = "any"
    most = -1
    for kind, ids in _IDS.items():
        seen = min([await shown(id) for id in ids])
        if seen > most:
            best, most = kind, seen
        if most == 5:
            break
    return best


def _called(id: str) -> tuple[Message, Message]:
    """Return a probe call and its result with this id."""
    call = {"type": "function", "id": id, "function": {"name": NAME, "arguments": {KEY: VALUE}}}
    result = {"role": "tool", "content": RESULT, "tool_call_id": id, "name": NAME}
    return {"role": "assistant", "content": "", "tool_calls": [call]}, result


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _shows(text: str | None, *probes: str) -> bool:
    return text is not None and all(probe in text for probe in probes)


def in_parts(messages: Sequence[Message], roles: Iterable[str]) -> list[Message]:
    """Return the messages with the content of these roles as a list of one part."""
    roles = {*roles, "tool"} if {"user", "assistant"} <= set(roles) else set(roles)
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]} if one["role"] in roles else one
        for one in messages
    ]


def fitted(messages: Sequence[Message], traits: Traits) -> list[Message]:
    """Adapt plain messages so that a template with these traits shows all of them.

    Calls and results that it does not know become text in the tags of the Hermes format.
    """
    made = _MessageList()
    open_result = False
    """Whether the last message is a tool result as a user's text, to which the next user text is appended."""
    for message in messages if traits.middle else _with_late_systems_as_user(messages):
        calls = message.get("tool_calls")
        result = message["role"] == "tool" and not traits.results
        if result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif calls and not (traits.calls and (traits.beside or not message["content"])):
            said = {key: value for key, value in message.items() if key != "tool_calls"}
            if traits.calls and traits.apart:
                made.append(said)
                message = {**message, "content": ""}
            else:
                text = "\n".join(filter(None, [message["content"], *map(_as_text, calls)]))
                message = {**said, "content": text}
        if open_result and message["role"] == "user":
            made.append_text("\n", message["content"])
        else:
            made.append(message)
            open_result = result
    return in_parts(made.messages(), traits.parts)


class _MessageList:
    """A message list whose last content can be appended to; texts are joined once, so it stays linear."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._more: list[str] = []

    @property
    def role(self) -> str:
        """The role of the last message; empty before the first."""
        return str(self._messages[-1]["role"]) if self._messages else ""

    def append(self, message: Message) -> None:
        """Add a message."""
        self._join()
        self._messages.append(message)

    def append_text(self, between: str, text: str) -> None:
        """Append a text to the content of the last message."""
        self._more += [between, text]

    def messages(self) -> list[Message]:
        """Return all messages."""
        self._join()
        return self._messages

    def _join(self) -> None:
        if self._more:
            last = self._messages[-1]
            self._messages[-1] = {**last, "content": "".join([last["content"], *self._more])}
            self._more = []


def _with_late_systems_as_user(messages: Sequence[Message]) -> list[Message]:
    """Turn every system message but a leading one into a user turn at its place.

    User turns that become neighbours by that are merged: many templates require alternating roles.
    """
    made = _MessageList()
    folded = False
    """Whether the next user text is appended to the last message."""
    for message in messages:
        role = message["role"]
        if role == "system" and made.role == "system":
            made.append_text("\n\n", message["content"])
            continue
        late = role == "system" and bool(made.role)
        if late:
            message = {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
        if message["role"] == "user" and made.role == "user" and (late or folded):
            made.append_text("\n", message["content"])
        else:
            made.append(message)
        folded = late or (folded and role == "user")
    return made.messages()


def _as_text(call: Message) -> str:
    """Return a call as text; arguments that are not a JSON object are written unchanged."""
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}\n</tool_call>'


def left_out(messages: Sequence[Message], text: str) -> list[tuple[int, str]]:
    """Return (index, "content" or "tool_calls") of the messages whose texts are missing from the rendering.

    White space around a text is ignored. Texts are searched in order, so together they take one pass. A text that is
    out of order takes a pass of its own; after LOOKS of these the search stops.
    """
    found: list[tuple[int, str]] = []
    search = _Finder(text)
    for n, message in enumerate(messages):
        if not search.passes(message["content"].strip()):
            found.append((n, "content"))
        calls = message.get("tool_calls", ())
        if not all(search.finds(call["function"]["name"]) for call in calls):
            found.append((n, "tool_calls"))
        if search.spent:
            break
    return found


class _Finder:
    """A bounded search for texts in a longer one: from the last match on, then from the beginning."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = self._near = 0
        """End of the last content; place of the last name found after it."""
        self._left = LOOKS * (len(text) + 1)
        self._seen: set[str] = set()

    @property
    def spent(self) -> bool:
        """Whether the search budget is used up."""
        return self._left < 0

    def passes(self, wanted: str) -> bool:
        """Find a content and move past it; return whether it was found."""
        place = self._find(wanted, self._at)
        if place < 0:
            place = self._find(wanted, 0)  # some templates move a message
        if place >= 0:
            self._at = self._near = place + len(wanted)
        return place >= 0

    def finds(self, name: str) -> bool:
        """Find the name of a call after the last content; return whether it was found."""
        if name in self._seen:
            return True
        place = self._find(name, self._near)
        if place >= 0:
            self._near = place
        elif self._find(name, 0) < 0:
            return False
        self._seen.add(name)
        return True

    def _find(self, wanted: str, start: int) -> int:
        """Return the index of `wanted`, -1 if it is absent, `start` if the budget is used up."""
        if self.spent:
            return start
        place = self._text.find(wanted, start)
        self._left -= (len(self._text) if place < 0 else place) - start
        return place


def standing_in(message: Message, others: Mapping[str, str]) -> Message:
    """Replace a message's content or its calls' names by stand-ins, keyed as `left_out` names them."""
    if "content" in others:
        message = {**message, "content": others["content"]}
    if "tool_calls" in others:
        name = others["tool_calls"]
        calls = [{**call, "function": {**call["function"], "name": name}} for call in message["tool_calls"]]
        message = {**message, "tool_calls": calls}
    return message
