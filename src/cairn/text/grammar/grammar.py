"""What an answer has to be -> the text that llguidance compiles: JSON of grammars that refer to each other.

A client says it as a JSON schema, a regular expression, a list of choices, or a grammar in Lark or GBNF. Reasoning may
stand before it: a grammar is about the whole text of an answer, as `output_parser` reads it. It is made and tried in a
helper process, where a bomb costs its own request alone (`trial`), and compiled again by the worker.

llguidance is imported where it is needed: no start waits for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from cairn.text.grammar.exact_numbers import RuleList, expression, is_exact
from cairn.text.grammar.json_schema import loosened, prepared
from cairn.text.grammar.lark import literal, with_blanks
from cairn.text.grammar.schema_limits import SchemaError, check_all
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


def grammar_text(shape: Shape) -> str:
    """Return the grammar of a prepared shape as llguidance reads it, which may not compile. Raises GrammarError."""
    text = _grammar_of(shape)
    if len(text) > 4 * MAX_TEXT:
        raise GrammarError(f"it makes a grammar of {len(text)} characters; the limit is {4 * MAX_TEXT}")
    return text


def prepared_shape(shape: Shape) -> tuple[Shape, tuple[str, ...]]:
    """Return what an answer has to be without what it cannot be held to, and that: sentences that name a field.

    Raises GrammarError where a schema is none, or strict and cannot be held to in full.
    """
    structure = shape.structure
    if structure is None or structure.kind != "json":
        return shape, ()
    _check_length(structure.text)
    try:
        schema, told = prepared(json.loads(structure.text), strict=structure.strict)
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    return _with_schema(shape, schema, told)


def loosened_shape(shape: Shape, why_not: Callable[[str], str]) -> tuple[Shape, tuple[str, ...]]:
    """Return a prepared shape without what llguidance does not build, and that. `why_not` says what it has against the
    text of a grammar, "" for nothing."""
    structure = shape.structure
    assert structure is not None

    def against(schema: Any) -> str:
        return why_not(json.dumps({"grammars": [{"json_schema": with_blanks(schema)}]}, ensure_ascii=False))

    schema, told = loosened(json.loads(structure.text), against)
    return _with_schema(shape, schema, told)


def _with_schema(shape: Shape, schema: Any, told: Sequence[str]) -> tuple[Shape, tuple[str, ...]]:
    assert shape.structure is not None
    structure = msgspec.structs.replace(shape.structure, text=json.dumps(schema, ensure_ascii=False))
    said = tuple(f"{structure.field}: {one}" for one in told)
    return msgspec.structs.replace(shape, structure=structure), said


def _grammar_of(shape: Shape) -> str:
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


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise GrammarError(f"it has {len(text)} characters; the limit is {MAX_TEXT}")


def _json_part(structure: Structure) -> dict[str, Any]:
    try:
        schema = json.loads(structure.text)
        if is_exact(schema):
            check_all(schema)
            return {"json_schema": with_blanks(schema)}
        rules = RuleList()
        return {"lark_grammar": rules.text(expression(schema, rules))}
    except SchemaError as error:
        raise GrammarError(str(error)) from None


def _part(structure: Structure) -> dict[str, Any]:
    text = structure.text
    if structure.kind != "json":
        _check_length(text)  # what a schema becomes may be longer
    match structure.kind:
        case "json":
            return _json_part(structure)
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(literal, json.loads(text)))}
        case "regex":
            from llguidance import LLMatcher

            (made,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return {"lark_grammar": made["lark_grammar"]}
    lark = text if structure.kind == "lark" else _from_gbnf(text, surely=structure.kind == "gbnf")
    for schema in _inline_schemas(lark):
        try:
            check_all(schema)
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
