"""What an answer has to be -> the text that llguidance compiles: JSON of grammars that refer to each other.

A client says it as a JSON schema, a regular expression, a list of choices, or a grammar in Lark or GBNF. Reasoning may
stand before it: a grammar is about the whole text of an answer, as `output_parser` reads it. It is made and tried in a
helper process, where a bomb costs its own request alone (`trial`), and compiled again by the worker.

llguidance is imported where it is needed: no start waits for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal

import msgspec

from cairn.text.output.reasoning_formats import FORMS, HARMONY

MAX_TEXT = 1 << 18
"""Characters of what a client sends, and four times as many of what is made of it."""
MAX_CHOICES = 4096
BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between two parts of JSON: with no bound, models are known to write nothing else for ever."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""What compiling, and following, may take. Where llguidance allows 50,000 items a step, ambiguous grammars take seconds
of it; a state takes up to 5 kB, and a text of bounded length has one for each of its characters."""
MASK_SECONDS = 0.005
"""Processor time of a mask that nobody minds; ordinary ones take a tenth of it."""
SPARE_SECONDS = 1.0
"""How much more the masks of one answer may take together: a step of all requests waits for each."""
TOO_SLOW = "finding out what may follow takes too long"
MAX_OPTIONAL = 400
"""Properties of one object that may be left out: each is up to four items of one step."""
MAX_MULTIPLE = 100_000
"""Of `multipleOf`: a number has as many states, of up to 500 bytes, and they are all made when it is compiled."""
HARMONY_FINAL = "<|channel|>final<|message|>"
"""Before an answer that is said to the user, where each message has a header."""
_LEADS = {"": "", "may": "( think BREAKS )?", "open": "think BREAKS"}
_INLINE = re.compile(r"%json\s*(?=\{)")
_REPEATS = "an object may name a key twice, so how many it has cannot be held to"

Kind = Literal["json", "regex", "choice", "lark", "gbnf", "grammar"]


class GrammarError(ValueError):
    """What was sent is no grammar, or one that cannot be followed: a sentence for its sender."""


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants an answer to be."""

    kind: Kind
    """`grammar` is Lark or GBNF, whichever it looks like."""
    text: str
    """The schema as JSON, the choices as a list in JSON, else as it was sent."""
    field: str = "response_format"
    """What the client calls it."""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the tools that were offered an answer may or must call."""

    required: bool = False
    names: tuple[str, ...] | None = None
    """These alone; None: any of them."""
    strict: tuple[str, ...] = ()
    """Those whose arguments must fit their schema whoever calls them."""
    parallel: bool = True
    """Whether one answer may call more than once."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of an answer."""

    structure: Structure | None = None
    choice: ToolChoice = ToolChoice()


ANYTHING = Wanted()


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """All that an answer has to be: one of `structure` and `calls`, whichever there are."""

    structure: Structure | None = None
    calls: str = ""
    """A Lark grammar of answers that call tools."""
    reasoning: Literal["", "may", "open"] = ""
    """Whether reasoning may stand before it, or stands there because the prompt has opened it."""
    thoughts: str = ""
    """In which form (`text.thoughts`)."""


def limits() -> Any:
    """`LIMITS` as llguidance takes them."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


def grammar_text(shape: Shape) -> str:
    """Return the grammar as llguidance reads it, which may not compile. Raises GrammarError."""
    text = grammar_of(shape)
    if len(text) > 4 * MAX_TEXT:
        raise GrammarError(f"it makes a grammar of {len(text)} characters; the limit is {4 * MAX_TEXT}")
    return text


def grammar_of(shape: Shape) -> str:
    """The grammar as llguidance reads it. Raises GrammarError."""
    parts: list[Mapping[str, Any]] = []
    if shape.calls:
        parts.append({"name": "calls", "lark_grammar": shape.calls})
    if shape.structure is not None:
        parts.append({"name": "answer", **_part(shape.structure)})
    form, harmony = FORMS[shape.thoughts], shape.thoughts == HARMONY.name
    said = literal(HARMONY_FINAL) + " @answer" if harmony else "@answer"
    answer = " | ".join(said if part["name"] == "answer" else f"@{part['name']}" for part in parts)
    start = f"start: {_LEADS[shape.reasoning]} ( {answer} )\n"
    if shape.reasoning:
        opened = "" if shape.reasoning == "open" else literal(form.open)
        start += f"think[lazy]: {opened} /(.|\\n)*/ {literal(form.until or form.close)}\n"
        start += f"BREAKS: {literal('<|start|>assistant')}" if harmony else r"BREAKS: /\n{0,4}/"
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": start}, *parts]}, ensure_ascii=False)


def _part(structure: Structure) -> dict[str, Any]:
    text = structure.text
    if len(text) > MAX_TEXT:
        raise GrammarError(f"it has {len(text)} characters; the limit is {MAX_TEXT}")
    match structure.kind:
        case "json":
            return {"json_schema": with_blanks(json.loads(text))}
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(literal, json.loads(text)))}
        case "regex":
            from llguidance import LLMatcher

            (made,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return {"lark_grammar": made["lark_grammar"]}
    lark = text if structure.kind == "lark" else _from_gbnf(text, surely=structure.kind == "gbnf")
    for schema in _inline_schemas(lark):
        _check(schema, 0)
    return {"lark_grammar": lark}


def _inline_schemas(lark: str) -> Iterator[Any]:
    """Yield the JSON schemas that stand in a grammar; one that is not valid JSON is llguidance's to refuse."""
    decoder, at = json.JSONDecoder(), 0
    while found := _INLINE.search(lark, at):
        at = found.end()
        try:
            schema, at = decoder.raw_decode(lark, at)
        except (ValueError, RecursionError):
            continue
        yield schema


def _from_gbnf(text: str, *, surely: bool) -> str:
    from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

    try:
        return str((gbnf_to_lark if surely else any_to_lark)(text))
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises what it meets
        raise GrammarError(f"it cannot be read as GBNF: {' '.join(str(error).split())[:200]}") from None


def with_blanks(schema: Any) -> Any:
    """A schema whose JSON has bounded white space. Raises GrammarError for what llguidance would read otherwise."""
    _check(schema, 0)
    if not isinstance(schema, dict):
        return schema if schema is not True else {"x-guidance": {"whitespace_pattern": BLANKS}}
    return {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}


def _check(schema: Any, depth: int) -> None:
    """Raise GrammarError for what llguidance would read otherwise, or at a cost that grows with a number."""
    if depth > 128:
        raise GrammarError("the schema is nested too deeply")
    if isinstance(schema, dict):
        _check_object(schema)
        for value in schema.values():
            _check(value, depth + 1)
    elif isinstance(schema, list):
        for value in schema:
            _check(value, depth + 1)


def _check_object(schema: dict[str, Any]) -> None:
    least, required, properties = schema.get("minProperties"), schema.get("required"), schema.get("properties")
    sure = set(map(str, required)) if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(sure):  # it counts keys, and a model may write one twice
        raise GrammarError(f'Unimplemented keys: ["minProperties"]: {_REPEATS}')
    optional = len(properties.keys() - sure) if isinstance(properties, dict) else 0
    if optional > MAX_OPTIONAL:
        raise GrammarError(
            f"an object has {optional} properties that are not required; the limit is {MAX_OPTIONAL}: "
            "make more of them required, or put them into objects within it"
        )
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not _few_units(multiple):
        raise GrammarError(
            f"multipleOf is {multiple!s:.40}; the limit is {MAX_MULTIPLE}, counted in units of its last decimal place"
        )


def _few_units(number: float) -> bool:
    """Return whether a number, in units of its last decimal place (25 for 2.5), is within `MAX_MULTIPLE`."""
    if isinstance(number, int):
        return abs(number) <= MAX_MULTIPLE
    if not math.isfinite(number):
        return False
    exact = abs(Decimal(str(number))).normalize()
    places = exact.as_tuple().exponent
    return exact.scaleb(max(0, -places if isinstance(places, int) else 0)) <= MAX_MULTIPLE


def literal(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
