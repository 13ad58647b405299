"""A chat template's renderings of a few probe calls, cut out of the conversations around them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cairn.text.chat.call_ids import with_ids
from cairn.text.chat.template_traits import ASKED, SAID, USER, Message, Render, Traits, in_parts
from cairn.text.output.call_formats import CONTROL
from cairn.text.output.reasoning_formats import THOUGHTS

FIRST, SECOND = "probe_first", "probe_other"
KEY, NEXT = "probe_key", "probe_next"
ID = "qzjx"
VALUE, LAST = "probe of value", "probe of more"
_WORDS = (FIRST, SECOND, KEY, NEXT, VALUE, LAST)
MAX_PLACE, MAX_COUNT = 1 << 16, 8
"""Most characters of a rendering of probe calls, and most repetitions of one of their words: the time to analyse it
grows with both."""

Arguments = Mapping[str, Any]
Calls = tuple[tuple[str, Arguments], ...]

ONE, TWO, MORE, NONE = "one", "two", "more", "none"
CHECKS: Mapping[str, Calls] = {
    ONE: ((FIRST, {KEY: VALUE}),),
    TWO: ((FIRST, {KEY: VALUE}), (SECOND, {KEY: VALUE})),
    MORE: ((FIRST, {KEY: VALUE, NEXT: LAST}),),
    NONE: ((FIRST, {}),),
    "three": ((FIRST, {KEY: VALUE}), (SECOND, {NEXT: LAST}), (FIRST, {})),
    "number": ((FIRST, {KEY: 1728}),),
    "flag and list": ((FIRST, {KEY: True, NEXT: [1, "two"]}),),
    "nested": ((FIRST, {KEY: {"probe_deep": [1.5, None, {"x": "y"}]}, NEXT: VALUE}),),
    "marks": ((FIRST, {KEY: 'a "quoted" text, {with} [all]\nof <it> & more'}),),
}
"""Name -> calls that a template is asked to write and a format has to read back."""
Written = Mapping[str, str]
"""Name in CHECKS -> the template's rendering of the calls; calls that it refuses are absent."""
_EMPTY_THOUGHT = re.compile("|".join(rf"{re.escape(one.open)}\s*{re.escape(one.close)}\s*" for one in THOUGHTS))


async def written_by(
    render: Render, traits: Traits, given: Mapping[str, Any], ends: Collection[str], checks: Iterable[str]
) -> dict[str, str]:
    """Return the rendering of each check that a template accepts, cut out of its conversation.

    `given` are its variables, tools among them; `ends` are the texts of the tokens that end an answer; `checks` are
    names in CHECKS.
    """
    variables = dict(given)
    said = await render(in_parts([ASKED, {"role": "assistant", "content": SAID}], traits.parts), variables)
    if said is None or SAID not in said:
        return {}
    head, _, tail = said.partition(SAID)
    found: dict[str, str] = {}
    for check in checks:
        calls = CHECKS[check]
        shown = with_ids([ASKED, _message(calls)], traits.ids if traits.ids == "kimi" else "any")
        text = await render(in_parts(shown, traits.parts), variables)
        if text is not None and all(name in text for name, _ in calls):
            place = _ended(_place(text, head, tail), ends, calls[-1][0])
            if len(place) <= MAX_PLACE and all(place.count(word) <= MAX_COUNT for word in _WORDS):
                found[check] = place
    return found


def _message(calls: Calls) -> Message:
    made = [
        {"type": "function", "id": f"{ID}0000{n}", "function": {"name": name, "arguments": dict(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _place(text: str, head: str, tail: str) -> str:
    """Return the part of a rendering that takes the place of a plain answer between `head` and `tail`."""
    start = _cut_back(text, _shared(text, head))
    rest = text[max(start, text.find(USER) + len(USER)) :]
    stop = CONTROL.match(tail.lstrip())
    place = rest.rfind(stop.group()) if stop is not None else -1
    if place >= 0 and tail.strip() and rest[place:].strip() == tail.strip():
        return _without_thought(rest[:place])
    same = _shared(rest[::-1], tail[::-1])
    return _without_thought(rest[: _cut_on(rest, len(rest) - same)])


def _ended(text: str, ends: Collection[str], name: str) -> str:
    """Return a text up to the token that ends an answer, searched after the name of its last call."""
    places = [at for end in ends if end and (at := text.find(end, text.rfind(name))) >= 0]
    return text[: min(places, default=len(text))].rstrip()


def _without_thought(text: str) -> str:
    """Return a text without empty reasoning at its beginning."""
    text = text.lstrip()
    found = _EMPTY_THOUGHT.match(text)
    return text[found.end() :] if found else text


def _cut_back(text: str, at: int) -> int:
    """Return `at`, or the beginning of the tag that contains it."""
    opened = max(text.rfind("<", 0, at), text.rfind("[", 0, at))
    found = CONTROL.match(text, opened) if opened >= 0 else None
    return opened if found and found.end() > at else at


def _cut_on(text: str, at: int) -> int:
    """Return `at`, or the end of the tag that contains it."""
    opened = max(text.rfind("<", 0, at), text.rfind("[", 0, at))
    found = CONTROL.match(text, opened) if opened >= 0 else None
    return found.end() if found and found.end() > at else at


def common_head(one: str, other: str) -> str:
    """Return the common prefix of two texts, without a tag that is only partly common."""
    at = _shared(one, other)
    opened = max(one.rfind("<", 0, at), one.rfind("[", 0, at))
    closed = max(one.rfind(">", 0, at), one.rfind("]", 0, at))
    return one[:opened] if opened > closed else one[:at]


def common_tail(one: str, other: str) -> str:
    """Return the common suffix of two texts, without a tag that is only partly common."""
    size = _shared(one[::-1], other[::-1])
    shared = one[len(one) - size :]
    opened = min((at for at in (shared.find("<"), shared.find("[")) if at >= 0), default=size)
    closed = min((at for at in (shared.find(">"), shared.find("]")) if at >= 0), default=size)
    return shared[opened:] if closed < opened and size < max(len(one), len(other)) else shared


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
