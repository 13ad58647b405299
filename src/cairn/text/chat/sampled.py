"""Which of the ids that were sampled stand for what a client saw of an answer, and nothing beyond it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.text.chat.replay import arguments_meant
from cairn.text.output.argument_fit import shape_of
from cairn.text.output.json_scan import JsonScanner
from cairn.text.output.output_parser import markers, splitter
from cairn.text.output.reasoning_formats import ThoughtFormat, thoughts
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import ToolCallDelta
from cairn.types.request import OfferedTool, OutputFormat

_OPENER_TOKENS = 8
_TAIL = 64  # tokens looked at one by one at first: what is cut off is short


def opener(tokenizer: Tokenizer, prompt: Sequence[int], form: ThoughtFormat) -> int:
    """How many ids at the end of a prompt open (or open and close) the reasoning: a template writes them for the
    turn to come, and not in front of an answer of old."""
    think = tokenizer.token_id(form.markers[0])
    tail = list(prompt[-_OPENER_TOKENS:])
    if think is None or think not in tail:
        return 0
    size = tail[::-1].index(think) + 1
    text = b"".join(tokenizer.token_bytes(i) for i in tail[-size:]).decode("utf-8", "replace")
    opened = rf"{re.escape(form.open)}\s*(?:{re.escape(form.close)}\s*)?"
    return size if re.fullmatch(opened, text) else 0


def visible_ids(
    tokenizer: Tokenizer, generated: Sequence[int], message: Mapping[str, Any], output: OutputFormat
) -> list[int] | None:
    """The ids of `generated` up to the end of what `message` shows; None if that cannot be told exactly.

    A stop string, an incomplete character and the end token are not part of it. Where a token reaches beyond what is
    visible it is dropped whole, and the visible text that it began is encoded again.
    """
    skip = (tokenizer.special_ids | (tokenizer.end_ids & tokenizer.control_ids)) - {
        i for tag in {*markers(output), *thoughts(output).markers} if (i := tokenizer.token_id(tag)) is not None
    }
    ids = list(generated)
    # What a form writes around a content is the model's, and only what ends the answer is the template's to write.
    behind = tokenizer.end_ids if thoughts(output).turn else skip
    while ids and ids[-1] in behind:
        ids.pop()
    detokenizer = tokenizer.detokenizer(skip=skip)
    certain = detokenizer.push(ids)
    text = certain + detokenizer.flush()
    shown = message.get("content") or ""
    for by_model in (True, False):  # who ended it decides on a call without its last brace
        content, reasoning, calls, end = _parse(text, output, by_model=by_model)
        same = _same_calls(calls, message.get("tool_calls") or [])
        if same and reasoning == (message.get("reasoning_content") or ""):
            break
    else:
        return None
    if end is not None:  # what follows was dropped
        return _cut(tokenizer, ids, skip, text[:end].rstrip("\n")) if end >= 0 and content == shown else None
    if content == shown and certain == text:
        return ids
    if not content.startswith(shown) or not text.endswith(content):
        return None
    return _cut(tokenizer, ids, skip, text[: len(text) - len(content) + len(shown)])


def offered_by(message: Mapping[str, Any]) -> tuple[OfferedTool, ...]:
    """The tools that a message calls, as far as reading its text again needs them: which were offered is not kept."""
    values: dict[str, set[str]] = {}
    known: dict[str, dict[str, Any]] = {}
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        given = arguments if isinstance(arguments, Mapping) else _begun(arguments)
        values.setdefault(name, set()).update(key for key, value in given.items() if not isinstance(value, str))
        known.setdefault(name, {}).update((key, {}) for key in given)
    return tuple(
        OfferedTool(name, tuple(sorted(values[name])), shape_of({"properties": known[name]})) for name in values
    )


def _begun(arguments: Any) -> dict[str, Any]:
    """Return the arguments that are whole in a text that is no JSON, because the call is broken or was cut."""
    scanner = JsonScanner()
    scanner.feed(arguments if isinstance(arguments, str) else "")
    return {key: json.loads(value) for key, value in scanner.members}


def _parse(text: str, output: OutputFormat, *, by_model: bool) -> tuple[str, str, list[tuple[str, str]], int | None]:
    """Content, reasoning and tool calls (name, arguments) of a whole text, and how many of its characters hold them
    where the rest was dropped; -1 where that cannot be told."""
    reader = splitter(output, 0, 0)
    texts = {"text": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for piece in reader.push(text) + reader.finish(by_model=by_model):
        if isinstance(piece, ToolCallDelta):
            name, arguments = calls.pop() if not piece.id else (piece.name, "")
            calls.append((name, arguments + piece.arguments))
        else:
            texts[piece[0]] += piece[1]
    return texts["text"], texts["reasoning"], calls, reader.shown


def _same_calls(calls: list[tuple[str, str]], shown: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the calls read from the text are the ones of the message, arguments compared as parsed JSON."""
    if len(calls) != len(shown):
        return False
    try:
        for (name, arguments), call in zip(calls, shown, strict=True):
            given = arguments_meant(call["function"]["arguments"])
            if name != call["function"]["name"] or arguments_meant(arguments) != given:
                return False
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


def _cut(tokenizer: Tokenizer, ids: list[int], skip: frozenset[int], visible: str) -> list[int] | None:
    """The fewest ids that show the most of `visible` and nothing else, then the encoding of the rest of it."""
    tail = _TAIL
    while True:
        detokenizer = tokenizer.detokenizer(skip=skip)
        best = max(len(ids) - tail, 0)
        shown = best_shown = len(detokenizer.push(ids[:best]))
        if best == 0 or shown < len(visible):
            break
        tail *= 8
    for count, i in enumerate(ids[best:], best + 1):
        shown += len(detokenizer.push((i,)))
        if shown > len(visible):
            break
        if shown > best_shown:
            best, best_shown = count, shown
    cut = ids[:best] + tokenizer.encode(visible[best_shown:])
    check = tokenizer.detokenizer(skip=skip)
    return cut if check.push(cut) + check.flush() == visible else None
