"""Constraints on an answer -> the text that llguidance compiles: JSON of grammars that refer to each other.

A client gives a JSON schema, a regular expression, a list of choices, or a grammar in Lark or GBNF. A grammar covers
the whole text of an answer as `output_parser` reads it, so reasoning may come first. It is made and tried in a helper
process, where a bomb costs only its own request (`trial`), and compiled again by the worker.

llguidance is imported inside functions, so that starting the server does not wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from cairn.text.grammar.exact_numbers import RuleList, expression, is_exact
from cairn.text.grammar.lark import MAX_GRAMMAR, literal, with_blanks
from cairn.text.grammar.prepare_schema import SchemaError, check_bounds, loosened, prepared
from cairn.text.output.reasoning_formats import FORMS, HARMONY

MAX_TEXT = MAX_GRAMMAR // 4
"""Most characters of a client's constraint; the grammar made from it may have four times as many."""
MAX_CHOICES = 4096
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's limits for compiling and following a grammar. With its default of 50,000 items per step, ambiguous
grammars take seconds per step; a state takes up to 5 kB, and a text of bounded length has one per character."""
MASK_SECONDS = 0.005
"""Acceptable processor time of a mask; ordinary ones take a tenth of it."""
SPARE_SECONDS = 1.0
"""Most seconds above MASK_SECONDS of all masks of one answer: a step of all requests waits for each mask."""
TOO_SLOW = "finding out what may follow takes too long"
HARMONY_FINAL = "<|channel|>final<|message|>"
"""Header of an answer to the user in Harmony's format."""
_LEADS = {"": "", "may": "( think BREAKS )?", "open": "think BREAKS"}
_INLINE = re.compile(r"%json\s*(?=\{)")

Kind = Literal["json", "regex", "choice", "lark", "gbnf", "grammar"]


class GrammarError(ValueError):
    """An invalid grammar, or one that cannot be followed; the message is for the client."""


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A client's constraint on the content of an answer."""

    kind: Kind
    """`grammar` is Lark or GBNF, whichever it looks like."""
    text: str
    """The schema as JSON, the choices as a JSON list, else the text as it was sent."""
    field: str = "response_format"
    """The client's name for it, for error messages."""
    strict: bool = True
    """If True, a schema that cannot be enforced in full is an error; else that part is left out with a warning."""


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The offered tools that an answer may or must call."""

    required: bool = False
    names: tuple[str, ...] | None = None
    """The allowed tools; None for all."""
    strict: tuple[str, ...] = ()
    """Tools whose arguments must fit their schema in full."""
    parallel: bool = True
    """Whether one answer may make several calls."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """All constraints of a client on an answer."""

    structure: Structure | None = None
    choice: ToolChoice = ToolChoice()


ANYTHING = Wanted()


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a whole answer: either `structure` or `calls`, if both are given."""

    structure: Structure | None = None
    calls: str = ""
    """A Lark grammar of answers that call tools."""
    reasoning: Literal["", "may", "open"] = ""
    """Whether reasoning may come first, or comes first because the prompt has opened it."""
    thoughts: str = ""
    """Name of the reasoning format."""


def limits() -> Any:
    """Return `LIMITS` in llguidance's form."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


class AnswerPart(NamedTuple):
    """The part of a grammar that enforces a structure."""

    grammar: Mapping[str, Any]
    """The part in llguidance's form."""
    warnings: tuple[str, ...] = ()
    """Requested constraints that are not enforced: sentences that name the client's field."""


def part_of(structure: Structure | None) -> AnswerPart | None:
    """Build the part of a structure, which may not compile; None without a structure. Raises GrammarError."""
    if structure is None:
        return None
    if structure.kind != "json":
        return AnswerPart(_part(structure))
    schema, warnings = _schema_of(structure)
    return AnswerPart(_json_part(schema), tuple(f"{structure.field}: {one}" for one in warnings))


def loosened_part(structure: Structure | None) -> AnswerPart | None:
    """Rebuild the part of a structure that did not compile, without the keywords that llguidance does not support.

    Returns None if nothing may be left out: for anything but a schema, and for a strict schema. Raises GrammarError
    for an invalid schema.
    """
    if structure is None or structure.kind != "json" or structure.strict:
        return None
    schema, warnings = _schema_of(structure)
    schema, more = loosened(schema, _why_not)
    return AnswerPart(_json_part(schema), tuple(f"{structure.field}: {one}" for one in (*warnings, *more)))


def grammar_text(shape: Shape, part: AnswerPart | None = None) -> str:
    """Return llguidance's text of a grammar, which may not compile. Raises GrammarError if it is too long.

    `part` is that of the shape's structure; None: it is built by `part_of`.
    """
    part = part or part_of(shape.structure)
    text = grammar_of(shape, None if part is None else part.grammar)
    if len(text) > MAX_GRAMMAR:
        raise GrammarError(f"it makes a grammar of {len(text)} characters; the limit is {MAX_GRAMMAR}")
    return text


def _why_not(schema: Any) -> str:
    """Return llguidance's error for a schema; "" if it compiles."""
    from llguidance import LLMatcher

    text = json.dumps({"grammars": [{"json_schema": with_blanks(schema)}]}, ensure_ascii=False)
    failed, said = LLMatcher.validate_grammar_with_warnings(text, None, limits=limits())
    return " ".join(" ".join(said).split())[:400] if failed else ""


def grammar_of(shape: Shape, part: Mapping[str, Any] | None) -> str:
    """Return llguidance's text of a grammar; `part` is that of the structure."""
    parts: list[Mapping[str, Any]] = []
    if shape.calls:
        parts.append({"name": "calls", "lark_grammar": shape.calls})
    if part is not None:
        parts.append({"name": "answer", **part})
    form, harmony = FORMS[shape.thoughts], shape.thoughts == HARMONY.name
    said = literal(HARMONY_FINAL) + " @answer" if harmony else "@answer"
    answer = " | ".join(said if part["name"] == "answer" else f"@{part['name']}" for part in parts)
    start = f"start: {_LEADS[shape.reasoning]} ( {answer} )\n"
    if shape.reasoning:
        opened = "" if shape.reasoning == "open" else literal(form.open)
        start += f"think[lazy]: {opened} /(.|\\n)*/ {literal(form.until or form.close)}\n"
        start += f"BREAKS: {literal('<|start|>assistant')}" if harmony else r"BREAKS: /\n{0,4}/"
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": start}, *parts]}, ensure_ascii=False)


def _schema_of(structure: Structure) -> tuple[Any, list[str]]:
    """Return the schema to enforce, and warnings about what is left out of the client's."""
    _check_length(structure.text)
    try:
        found = prepared(json.loads(structure.text), strict=structure.strict)
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    return found.schema, [*found.warnings]


def _json_part(schema: Any) -> dict[str, Any]:
    try:
        check_bounds(schema)
        if is_exact(schema):
            return {"json_schema": with_blanks(schema)}
        rules = RuleList()
        return {"lark_grammar": rules.text(expression(schema, rules))}
    except SchemaError as error:
        raise GrammarError(str(error)) from None


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise GrammarError(f"it has {len(text)} characters; the limit is {MAX_TEXT}")


def _part(structure: Structure) -> dict[str, Any]:
    text = structure.text
    _check_length(text)
    match structure.kind:
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(literal, json.loads(text)))}
        case "regex":
            from llguidance import LLMatcher

            (made,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return {"lark_grammar": made["lark_grammar"]}
    lark = text if structure.kind == "lark" else _from_gbnf(text, surely=structure.kind == "gbnf")
    try:
        for schema in _inline_schemas(lark):
            check_bounds(schema)
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    return {"lark_grammar": lark}


def _inline_schemas(lark: str) -> Iterator[Any]:
    """Yield the JSON schemas inside a grammar; invalid JSON is left for llguidance to refuse."""
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
    except Exception as error:  # the converter raises errors of any type
        raise GrammarError(f"it cannot be read as GBNF: {' '.join(str(error).split())[:200]}") from None
