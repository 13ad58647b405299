"""What an answer has to be -> the text that llguidance compiles: JSON of grammars that refer to each other.

A client says it as a JSON schema, a regular expression, a list of choices, or a grammar in Lark or GBNF. Reasoning may
stand before it: a grammar is about the whole text of an answer, as `output_parser` reads it. It is made and tried in a
helper process, where a bomb costs its own request alone (`trial`), and compiled again by the worker.

llguidance is imported where it is needed: no start waits for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from cairn.text.grammar.exact_numbers import RuleList, expression, is_exact
from cairn.text.grammar.json_schema import SchemaError, check_bounds, loosened, prepared
from cairn.text.grammar.lark import literal, with_blanks
from cairn.text.output.reasoning_formats import FORMS, HARMONY

MAX_TEXT = 1 << 18
"""Characters of what a client sends, and four times as many of what is made of it."""
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
"""What compiling, and following, may take. Where llguidance allows 50,000 items a step, ambiguous grammars take seconds
of it; a state takes up to 5 kB, and a text of bounded length has one for each of its characters."""
MASK_SECONDS = 0.005
"""Processor time of a mask that nobody minds; ordinary ones take a tenth of it."""
SPARE_SECONDS = 1.0
"""How much more the masks of one answer may take together: a step of all requests waits for each."""
TOO_SLOW = "finding out what may follow takes too long"
HARMONY_FINAL = "<|channel|>final<|message|>"
"""Before an answer that is said to the user, where each message has a header."""
_LEADS = {"": "", "may": "( think BREAKS )?", "open": "think BREAKS"}
_INLINE = re.compile(r"%json\s*(?=\{)")

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
    strict: bool = True
    """A schema that an answer cannot be held to in full is an error; else that part is told and left out."""


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


class AnswerPart(NamedTuple):
    """The part of a grammar that holds an answer to a structure."""

    grammar: Mapping[str, Any]
    """As llguidance reads it."""
    warnings: tuple[str, ...] = ()
    """What a client wanted and answers are not held to: sentences that name its field."""


def part_of(structure: Structure | None) -> AnswerPart | None:
    """Return the part of a structure, which may not compile; None where there is no structure. Raises GrammarError."""
    if structure is None:
        return None
    if structure.kind != "json":
        return AnswerPart(_part(structure))
    schema, told = _schema_of(structure)
    return AnswerPart(_json_part(schema), tuple(f"{structure.field}: {one}" for one in told))


def loosened_part(structure: Structure | None) -> AnswerPart | None:
    """Return the part of a structure that did not compile, without what llguidance does not build.

    None where nothing is to be left out: of what is no schema, and of one that a client wants to be held to in full.
    Raises GrammarError for a schema that is wrong.
    """
    if structure is None or structure.kind != "json" or structure.strict:
        return None
    schema, told = _schema_of(structure)
    schema, more = loosened(schema, _why_not)
    return AnswerPart(_json_part(schema), tuple(f"{structure.field}: {one}" for one in (*told, *more)))


def grammar_text(shape: Shape, part: AnswerPart | None = None) -> str:
    """Return the grammar as llguidance reads it, which may not compile. Raises GrammarError.

    `part`: that of the shape's structure; None: as `part_of` makes it.
    """
    part = part or part_of(shape.structure)
    text = grammar_of(shape, None if part is None else part.grammar)
    if len(text) > 4 * MAX_TEXT:
        raise GrammarError(f"it makes a grammar of {len(text)} characters; the limit is {4 * MAX_TEXT}")
    return text


def _why_not(schema: Any) -> str:
    """Return what llguidance has against a schema; "" for nothing."""
    from llguidance import LLMatcher

    text = json.dumps({"grammars": [{"json_schema": with_blanks(schema)}]}, ensure_ascii=False)
    failed, said = LLMatcher.validate_grammar_with_warnings(text, None, limits=limits())
    return " ".join(" ".join(said).split())[:400] if failed else ""


def grammar_of(shape: Shape, part: Mapping[str, Any] | None) -> str:
    """The grammar as llguidance reads it; `part` is that of the structure."""
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
    """The schema that answers are held to, and what of the client's is left out."""
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
