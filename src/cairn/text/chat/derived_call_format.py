"""A model's call format, derived from its chat template's renderings of a few small conversations.

This is for models whose format is not in the table. The template renders probe calls with none, one and two arguments,
whose names and values are unique words; the texts around and between them are the parts of a `CallFormat`. The format
is accepted only if every probe call that the template wrote is read back exactly.

    A name B key C value D          one call with one argument; A to D are the template's texts
    A name B'                       a call without arguments: shows where D ends
    A name B key C value E key C value D    two arguments: E is between them
    A ... D M name B ...            two calls: M closes one and opens the next
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cairn.text.chat.written_calls import (
    CHECKS,
    FIRST,
    ID,
    KEY,
    LAST,
    MORE,
    NEXT,
    NONE,
    ONE,
    SECOND,
    TWO,
    VALUE,
    Written,
    common_head,
    common_tail,
)
from cairn.text.output.call_formats import BY_NAME, CONTROL, FORMATS, CallFormat, name_of
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool, OutputFormat

LEAST = 3
"""Fewest characters of the mark before a call; shorter marks occur by chance."""


class _Parts(NamedTuple):
    """The texts around the name of a call."""

    before: str
    behind: str
    """Text between the name and the arguments."""


def derive_form(written: Written) -> CallFormat | None:
    """Return the call format shown by a template's renderings; None if it cannot be derived."""
    if ONE not in written:
        return None
    for derive in (_as_object, _as_python, _as_braces, _as_named, _as_tagged):
        form = derive(written)
        if form is not None and sound(form) and reads(form, written):
            return form
    return None


def reads(form: CallFormat, written: Written) -> bool:
    """Return whether a format reads all rendered calls exactly, with no text left over."""
    from cairn.text.output.output_parser import splitter

    for check, text in written.items():
        calls = CHECKS[check]
        offered = tuple(
            OfferedTool(name, tuple(key for key, value in arguments.items() if not isinstance(value, str)))
            for name, arguments in calls
        )
        output = OutputFormat(
            tools=True, calls="" if form.plain else name_of(form), xml=form.name == "qwen_xml", offered=offered
        )
        reader = splitter(output, 0, 0)
        pieces = reader.push(text) + reader.finish(by_model=True)
        if form.begin.strip() not in text:
            return False  # it was read by the marks that are accepted from every model
        made = [(one.name, json.loads(one.arguments)) for one in pieces if isinstance(one, ToolCallDelta)]
        left = "".join(one[1] for one in pieces if not isinstance(one, ToolCallDelta))
        if left.strip() or made != [(name, dict(arguments)) for name, arguments in calls]:
            return False
    return True


def known_form(form: CallFormat, *others: CallFormat) -> CallFormat:
    """Return the format in the table or in `others` that differs from `form` only in white space; else `form`."""
    return next((one for one in (*FORMATS, *others) if one is form or _same(one, form)), form)


def _same(one: CallFormat, other: CallFormat) -> bool:
    def bare(form: CallFormat) -> list[Any]:
        opened, closed = form.begin + form.open, form.close + form.end
        parts = [opened, closed, *form.key, form.value_end, form.named, form.arguments, form.joint]
        flags = [form.kind, form.listed, form.single]
        return ["".join(part.split()) for part in parts] + flags

    return bare(one) == bare(other)


# --------------------------------------------------------------------------------------------------------- their kinds


def _as_object(written: Written) -> CallFormat | None:
    """Derive a format of objects that hold the name and the arguments."""
    text = written[ONE]
    found = _object_in(text)
    if found is None:
        return None
    start, end, head, arguments, tail = found
    before, behind = text[:start], text[end:]
    listed = before.rstrip().endswith("[") and behind.lstrip().startswith("]")
    if listed:
        before, behind = before.rstrip()[:-1], behind.lstrip()[1:]
    shape = {"kind": "object", "head": head, "arguments": arguments, "tail": tail, "listed": listed}
    if not before.strip() and not behind.strip():
        return BY_NAME["llama"] if not listed else None
    return _several(written, before, behind, shape)


def _object_in(text: str) -> tuple[int, int, str, str, str] | None:
    """Return begin and end of the call's object, its head, the member name of its arguments, and its tail."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"\{", text[: text.find(FIRST)]):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        inner = value.get("function") if isinstance(value.get("function"), dict) else value
        named = next((key for key, one in inner.items() if one == FIRST), None)
        held = next((key for key, one in inner.items() if _means(one)), None)
        if named is None or held is None or not _object_keys(named, held):
            return None
        written = text[found.end() : end]
        name = re.search(rf'"{re.escape(named)}"\s*:\s*(?="{FIRST}")', written)
        if name is None or written.find(f'"{held}"') < name.end():
            return None
        head = re.sub(r'"(\w*id)"\s*:\s*"[^"]*[0-9]"', r'"\1": "{index}"', written[: name.end()])
        return found.start(), end, head, held, "}}" if inner is not value else "}"
    return None


def _object_keys(named: str, held: str) -> bool:
    """Return whether both keys are plain words, which need no escape in a grammar."""
    return all(re.fullmatch(r"\w{1,64}", key) for key in (named, held))


def _means(value: Any) -> bool:
    try:
        return bool((json.loads(value) if isinstance(value, str) else value) == {KEY: VALUE})
    except ValueError:
        return False


def _as_named(written: Written) -> CallFormat | None:
    """Derive a format of a name followed by the arguments as JSON."""
    text = written[ONE]
    at = text.find(FIRST)
    start = text.find("{", at + len(FIRST))
    try:
        value, end = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except (ValueError, RecursionError):
        return None
    if value != {KEY: VALUE} or FIRST in text[at + len(FIRST) :]:
        return None
    parts = _Parts(text[:at], text[at + len(FIRST) : start])
    return _opened(written, parts, text[end:], {"kind": "named"})


def _as_tagged(written: Written) -> CallFormat | None:
    """Derive a format of a name followed by each argument between tags."""
    text, more, none = written[ONE], written.get(MORE), written.get(NONE)
    if more is None or none is None:
        return None
    found = re.fullmatch(rf"(.*?){FIRST}(.*?){KEY}(.*?){VALUE}(.*)", text, re.DOTALL)
    both = re.fullmatch(rf".*?{FIRST}.*?{KEY}.*?{VALUE}(.*?){NEXT}(.*?){LAST}(.*)", more, re.DOTALL)
    empty = re.fullmatch(rf"(.*?){FIRST}(.*)", none, re.DOTALL)
    if found is None or both is None or empty is None or both[2] != found[3] or both[3] != found[4]:
        return None
    behind = common_head(found[2], empty[2])
    before_key = common_tail(found[2][len(behind) :], both[1])
    if not both[1].endswith(before_key) or len(before_key) < len(found[2]) - len(behind):
        return None
    value_end = both[1].removesuffix(before_key)
    if not value_end.strip() or not found[4].startswith(value_end):
        return None
    behind_key, words = _kinds_told(found[3], written.get("number", ""))
    shape = {"kind": "tagged", "key": (before_key, behind_key), "words": words, "value_end": value_end}
    return _opened(written, _Parts(found[1], behind), found[4].removeprefix(value_end), shape)


def _kinds_told(behind: str, number: str) -> tuple[str, tuple[str, str]]:
    """Return the text between an argument's name and value, and the words in it for a text and any other value.

    The word is replaced by {kind}; without such words, both are empty.
    """
    found = re.search(rf"{KEY}(.*?)1728", number, re.DOTALL)
    if found is None or found[1] == behind:
        return behind, ("", "")
    one, other = re.findall(r"\w+|\W+", behind), re.findall(r"\w+|\W+", found[1])
    differ = [n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    if len(one) != len(other) or len(differ) != 1 or not one[differ[0]].isalpha() or not other[differ[0]].isalpha():
        return behind, ("", "")
    words = one[differ[0]], other[differ[0]]
    one[differ[0]] = "{kind}"
    return "".join(one), words


def _as_python(written: Written) -> CallFormat | None:
    """Derive a format of calls in Python's syntax."""
    found = re.fullmatch(rf"(.*?)(\[?){FIRST}\({KEY}=['\"]{VALUE}['\"]\)(\]?)(.*)", written[ONE], re.DOTALL)
    if found is None or bool(found[2]) != bool(found[3]):
        return None
    return _several(written, found[1], found[4], {"kind": "python"})


def _as_braces(written: Written) -> CallFormat | None:
    """Derive a format of arguments in braces, with marks around texts in place of quotes."""
    found = re.fullmatch(rf"(.*?){FIRST}\{{{KEY}:(.+?){VALUE}\2\}}(.*)", written[ONE], re.DOTALL)
    if found is None or not found[2].strip():
        return None
    before, tag = found[1], list(CONTROL.finditer(found[1]))
    if not tag:
        return None
    opened = before[tag[-1].end() :]
    shape = {"kind": "braces", "open": opened + "{name}", "value_end": found[2]}
    return _several(written, before.removesuffix(opened), found[3], shape)


# ------------------------------------------------------------------------------------------------- sections and calls


def _opened(written: Written, parts: _Parts, behind: str, shape: Mapping[str, Any]) -> CallFormat | None:
    """Build a format whose calls have a name outside of the arguments; `behind` is the text after the arguments."""
    two = _between(written, parts.before)
    if two is None:  # the template does not show two calls: assume that a section holds one call
        open = CONTROL.findall(parts.before)[-1:] or [parts.before]
        begin, head = _parted(parts.before, parts.before[parts.before.rfind(open[0]) + len(open[0]) :])
        return _form(begin=begin, end=behind, open=head + "{name}" + parts.behind, single=bool(behind), **shape)
    middle, numbered = two
    middle = middle.removeprefix(shape.get("value_end", ""))
    if ID in parts.behind:
        parts = _Parts(parts.before, re.sub(rf"{ID}[0-9]+", "{id}", parts.behind, count=1))
    elif numbered:
        parts = _Parts(parts.before, re.sub(r"[0-9]+", "{index}", parts.behind, count=1))
    if middle.startswith(behind) and middle.endswith(parts.before) and len(middle) >= len(behind + parts.before):
        apart = middle[len(behind) : len(middle) - len(parts.before)]
        first = CONTROL.match(parts.before.lstrip())
        size = first.end() + len(parts.before) - len(parts.before.lstrip()) if first else len(parts.before)
        begin, head = parts.before[:size], parts.before[size:]
        joint = {"single": True, "apart": apart} if behind.strip() else {"joint": apart + begin}
        return _form(begin=begin, end=behind, open=head + "{name}" + parts.behind, **joint, **shape)
    head = common_tail(parts.before, middle)
    close = common_head(behind, middle.removesuffix(head))
    joint_text = middle.removesuffix(head).removeprefix(close)
    return _form(
        begin=parts.before.removesuffix(head),
        end=behind.removeprefix(close),
        open=head + "{name}" + parts.behind,
        close=close,
        joint=joint_text,
        **shape,
    )


def _several(written: Written, before: str, behind: str, shape: Mapping[str, Any]) -> CallFormat | None:
    """Build a format whose calls hold their name."""
    two = written.get(TWO)
    made = _form(begin=before, end=behind, single=bool(behind.strip()), **shape)
    if two is None or made is None:
        return made
    middle = two[two.find(FIRST) : two.find(SECOND)]
    if before.strip() and before.strip() in middle:
        apart = middle[middle.rfind(behind.strip()) + len(behind.strip()) : middle.rfind(before.strip())]
        if behind.strip():
            return _form(begin=before, end=behind, single=True, apart=apart, **shape)
        return _form(begin=before, end=behind, joint=apart + before, **shape)
    apart = middle[max(middle.rfind("}"), middle.rfind(")")) :]
    return _form(begin=before, end=behind, joint=", " if "," in apart else "\n", **shape)


def _between(written: Written, before: str) -> tuple[str, bool] | None:
    """Return the text between the arguments of one call and the name of the next, and whether calls are numbered."""
    two, one = written.get(TWO), written[ONE]
    if two is None:
        return None
    shared = _argument_end(one, one.find(FIRST))
    at = _argument_end(two, two.find(FIRST))
    second = two.find(SECOND)
    if shared < 0 or at < 0 or second < at:
        return None
    behind = one[one.find(FIRST) + len(FIRST) : shared]
    other = two[second + len(SECOND) : _argument_end(two, second)]
    numbered = behind != other and re.sub(r"[0-9]+", "", behind, count=1) == re.sub(r"[0-9]+", "", other, count=1)
    return (two[at:second], numbered) if numbered or behind == other else None


def _argument_end(text: str, at: int) -> int:
    """Return the index after a call's only argument, including the closing braces of JSON; -1 if it is absent."""
    end = text.find(VALUE, at) + len(VALUE)
    if end < len(VALUE):
        return -1
    start = text.rfind("{", at, end)
    if start >= 0:
        try:
            return json.JSONDecoder().raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            pass
    return end


def _parted(text: str, end: str) -> tuple[str, str]:
    return (text.removesuffix(end), end) if end else (text, "")


def _form(**parts: Any) -> CallFormat:
    parts["begin"] = parts["begin"].lstrip()
    return CallFormat(name="derived", signs=(), **parts)


def sound(form: CallFormat) -> bool:
    """Return whether calls in this format can be told from ordinary text."""
    if form.plain:
        return True
    texts = (form.open, form.close, form.begin, form.end)
    if any("{" in text.replace("{name}", "").replace("{index}", "").replace("{id}", "") for text in texts):
        return False
    marked = form.kind not in ("tagged", "braces") or bool(form.value_end.strip())
    ends = form.kind not in ("python", "braces") or bool(form.end.strip())
    return len(form.begin.strip()) >= LEAST and marked and ends
