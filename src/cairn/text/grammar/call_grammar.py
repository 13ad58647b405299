"""A call format and the offered tools -> the grammar of answers that call them, in llguidance's Lark.

Everything that it allows is read as calls by the parser of the same format (`tool_parser`, `section_reader`): names are
literal, arguments fit their schemas, and a text in tags never contains a tag that would end it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.text.grammar.exact_numbers import expression
from cairn.text.grammar.grammar import HARMONY_FINAL, MAX_TEXT, GrammarError
from cairn.text.grammar.lark import literal
from cairn.text.grammar.prepare_schema import SchemaError, check_bounds, prepared_text
from cairn.text.output.call_formats import CallFormat
from cairn.text.output.references import followed
from cairn.text.output.tool_parser import is_text

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The parameters of a tool without any."""
_encoder = msgspec.json.Encoder()
_NO_CALL = r"~/[ \t\r\n]*(```[a-z_]*[ \t\r\n]*)?\{(.|\n)*/"
"""A text that does not begin like a call without tags."""
_NEW_NAME = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""Names of arguments that a schema allows without naming them."""


class Offered(NamedTuple):
    """A tool and the schema that its calls must fit."""

    name: str
    schema: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    """Parts of its schema that are not enforced."""


def callable_tools(
    tools: Sequence[Mapping[str, Any]],
    names: Sequence[str] | None,
    held: Sequence[str] | None,
    strict: Sequence[str] = (),
) -> list[Offered]:
    """Return the tools that may be called; only the schemas of the tools in `held` (None: of all) are enforced.

    Raises GrammarError for a schema of a `strict` tool that cannot be enforced in full, and for too long schemas.
    """
    found, size = [], 0
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        if names is not None and name not in names:
            continue
        if held is not None and name not in held:
            found.append(Offered(name, ANY_OBJECT))
            continue
        given = _encoded(function.get("parameters") or NO_ARGUMENTS)
        size += len(given)
        if len(given) > MAX_TEXT or size > 4 * MAX_TEXT:
            raise GrammarError(
                f"{name[:64]}: the schemas of one tool may have {MAX_TEXT} bytes, of all tools {4 * MAX_TEXT}"
            )
        try:
            schema, warnings = prepared_text(given, name in strict)
        except (SchemaError, RecursionError) as error:
            raise GrammarError(f"{name[:64]}: {error}") from None
        enforced = schema if isinstance(schema, Mapping) else ANY_OBJECT
        found.append(Offered(name, enforced, tuple(f"tools: {name[:64]}: {one}" for one in warnings)))
    return found


def _encoded(schema: Any) -> bytes:
    try:
        return _encoder.encode(schema)
    except (OverflowError, TypeError, UnicodeEncodeError):  # whole numbers of any size, and half surrogates
        return json.dumps(schema).encode()


def lark_of_calls(form: CallFormat, tools: Sequence[Offered], *, required: bool, parallel: bool) -> str:
    """Return the grammar of answers that call these tools.

    If `required` the answer is one call at least; else it is text, or text followed by calls.
    """
    made = _Grammar(form)
    made.rule("call", " | ".join([made.call(tool) for tool in tools]))
    if form.kind == "channel":
        made.rule("start", "call" if required else f"call | {_literal(HARMONY_FINAL)} ANY")
        made.rule("ANY", "/(.|\\n)*/")
        return made.text()
    several = parallel and bool(form.begin)
    more = f" ({_literal(form.joint)} call)*" if several and not form.single else ""
    opened, closed = ("[", "]") if form.listed or form.kind == "python" else ("", "")
    made.rule("rest", f"{_literal(opened)} call{more} {_literal(closed + form.end)}")
    again = f" ({_literal(form.apart + form.begin)} rest)*" if several and form.single else ""
    if required:
        made.rule("start", f"{_literal(form.begin)} rest{again}")
        return made.text()
    made.rule("ANY", rf"/(.|\n)*/ & {_NO_CALL}")
    if not form.begin:
        made.rule("start", "rest | ANY")
        return made.text()
    sign = form.begin.rstrip("\n")
    made.rule("start", f"ANY | before {_literal(form.begin[len(sign) :])} rest{again}")
    made.rule("before[lazy]", f"ANY {_literal(sign)}")
    return made.text()


class _Grammar:
    """A grammar of calls under construction."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._rules: list[str] = []
        self._size = self._json_size = 0
        self._count = 0

    def text(self) -> str:
        """Return the whole grammar."""
        return "\n".join(["%llguidance {}", *reversed(self._rules)]) + "\n"

    def rule(self, name: str, body: str) -> None:
        """Add a rule. Raises GrammarError if the grammar becomes too long."""
        self._size += len(name) + len(body)
        if self._size > 4 * MAX_TEXT:
            raise GrammarError(f"the tools make a grammar of more than {4 * MAX_TEXT} characters, the limit")
        self._rules.append(f"{name}: {body}")

    def call(self, tool: Offered) -> str:
        """Add the rule of a call of this tool and return its name."""
        form, name = self._form, self.new("f")
        if form.kind == "object":
            start = f'{{{form.head}{json.dumps(tool.name)}, "{form.arguments}": '
            self.rule(name, f"{_numbered(start)} {self.json(tool.schema)} {_literal(form.tail)}")
        elif form.kind == "python":
            given = self._keywords(tool.schema, "=", ", ", self.json)
            self.rule(name, f"{_literal(tool.name + '(')} {given} {_literal(')')}")
        elif form.kind == "braces":
            given = self._keywords(tool.schema, ":", ",", self._braced)
            start = form.open.replace("{name}", tool.name) + "{"
            self.rule(name, f"{_literal(start)} {given} {_literal('}')}")
        elif form.kind == "channel":
            header = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
            self.rule(name, f"{_literal(header)} {self.json(tool.schema)}")
        else:
            opened = _numbered(form.open.replace("{name}", tool.name))
            arguments = self.json(tool.schema) if form.kind == "named" else self._tagged(tool.schema)
            self.rule(name, f"{opened} {arguments} {_literal(form.close)}")
        return name

    def json(self, schema: Any) -> str:
        """Return the expression of a schema's JSON. Raises GrammarError if there is none."""
        try:
            check_bounds(schema)
            written = expression(schema, self)
        except SchemaError as error:
            raise GrammarError(str(error)) from None
        self._json_size += len(written)
        if self._json_size > 4 * MAX_TEXT:  # checked here too: many expressions are built before they join a rule
            raise GrammarError(f"the tools make a grammar of more than {4 * MAX_TEXT} characters, the limit")
        return written

    def new(self, kind: str) -> str:
        """Return an unused rule name that begins with `kind`."""
        self._count += 1
        return f"{kind}{self._count}"

    def _tagged(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of arguments in tags, in the schema's order; optional ones may be left out."""
        form = self._form
        parts = []
        arguments = _arguments(schema, texts=True)
        for key, value, required in arguments.named:
            name = self.new("a")
            word = form.words[0 if is_text(value) else 1]
            before = _literal(form.key[0] + key + form.key[1].replace("{kind}", word))
            self.rule(name, f"{before} {self._value(value)}")
            parts.append(name if required else f"{name}?")
        if arguments.others is not False:
            before = self._new_name(form.key[0], form.key[1].replace("{kind}", form.words[0]), arguments)
            parts.append(f"({before} {self._value(arguments.others)})*")
        return " ".join(parts)

    def _value(self, schema: Any) -> str:
        """Return the expression of a value and its closing tag."""
        form = self._form
        if not is_text(schema):
            return f"{self.json(schema)} {_literal(form.value_end)}"
        if isinstance(schema, Mapping) and _fits_tags(schema.get("enum"), self._stops()):
            return f"({' | '.join(map(_literal, schema['enum']))}) {_literal(form.value_end)}"
        # A text ends at its closing tag; whether a line break precedes the tag is up to the model.
        tag = form.value_end.strip()
        if pattern := _whole_pattern(schema):
            return f"{self._matching(pattern)} {_literal(form.value_end)}"
        name = self.new("v")
        self.rule(f"{name}[lazy]", f"{self._free()} {_literal(tag)}")
        return f"{name} {_literal(form.value_end.partition(tag)[2])}".rstrip()

    def _matching(self, pattern: str) -> str:
        """Return the rule of a text that matches a pattern and contains nothing that would end it."""
        name = self.new("v").upper()
        self.rule(name, rf"/{pattern}/ & ~/(.|\n)*({_either(self._stops())})(.|\n)*/")
        return name

    def _stops(self) -> list[str]:
        """Return the texts that a text in tags must not contain: those that end its value, call or section."""
        parts = (self._form.value_end, self._form.close, self._form.end)
        return [part.strip() for part in parts if part.strip()]

    def _free(self) -> str:
        if not any(one.startswith("FREE:") for one in self._rules):
            stops = _either(self._stops()[1:])
            self.rule("FREE", rf"/(.|\n)*/ & ~/(.|\n)*({stops})(.|\n)*/")
        return "FREE"

    def _keywords(self, schema: Mapping[str, Any], is_: str, joint: str, value: Callable[[Any], str]) -> str:
        """Return the expression of keyword arguments: all required ones, then any of the others."""
        arguments = _arguments(schema)
        given = [(f"{_literal(key + is_)} {value(one)}", required) for key, one, required in arguments.named]
        apart = _literal(joint)
        needed = [self._named("p", one) for one, required in given if required]
        others = [self._named("p", one) for one, required in given if not required]
        if arguments.others is not False:
            one = self._named("p", f"{self._new_name('', is_, arguments)} {value(arguments.others)}")
            others.append(self._named("p", f"{one} ({apart} {one})*"))
        if needed:
            return f" {apart} ".join(needed) + "".join(f" ({apart} {one})?" for one in others)
        if not others:
            return ""
        starts, rest = list[str](), ""
        for one in reversed(others):  # each rule of what may follow continues with the rule of the next
            starts.append(f"{one} {rest}".rstrip())
            rest = self._named("r", f"({apart} {one})? {rest}".rstrip())
        return f"({' | '.join(reversed(starts))})?"

    def _new_name(self, before: str, behind: str, arguments: _Arguments) -> str:
        """Return the rule of an argument's name that is not among the named ones, and of the texts around it.

        They are one terminal: a terminal of `before` alone would end where a named argument may still follow.
        """
        name, taken = self.new("k").upper(), _either([before + key + behind for key, _, _ in arguments.named])
        beside = f" & ~/{taken}/" if taken else ""
        self.rule(name, f"/{_either([before])}{_NEW_NAME}{_either([behind])}/{beside}")
        return name

    def _braced(self, schema: Any) -> str:
        """Return the expression of a value in braces.

        Lengths of texts and lists are not enforced, nor is a pattern that does not cover a whole text.
        """
        if not isinstance(schema, Mapping):
            return self._any()
        if isinstance(values := schema.get("enum"), list) and values:
            return f"({' | '.join(_literal(self._written(one)) for one in values)})"
        choices = [one for key in ("anyOf", "oneOf") for one in schema.get(key) or ()]
        choices = choices or [{**schema, "type": one} for one in _kinds(schema.get("type"))]
        if choices:
            return f"({' | '.join(map(self._braced, choices))})"
        kind = schema.get("type")
        if kind == "string" and (pattern := _whole_pattern(schema)):
            mark = _literal(self._form.value_end)
            return f"{mark} {self._matching(pattern)} {mark}"
        if kind == "string":
            return self._marked()
        if kind == "array":
            item = self._named("i", self._braced(schema.get("items")))  # a rule: it is written twice
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), Mapping):
            return f'"{{" {self._keywords(schema, ":", ",", self._braced)} "}}"'
        return self.json(schema) if kind in ("integer", "number", "boolean", "null") else self._any()

    def _marked(self) -> str:
        """Return the rule of a text between marks."""
        if not any(one.startswith("marked[lazy]:") for one in self._rules):
            mark = _literal(self._form.value_end)
            self.rule("marked[lazy]", f"{mark} {self._free()} {mark}")
        return "marked"

    def _any(self) -> str:
        """Return the rule of any value in braces."""
        if not any(one.startswith("any:") for one in self._rules):
            self.rule("any", "marked | scalar | object | list")
            self.rule("scalar", f"{self.json({'type': ['number', 'boolean', 'null']})}")
            self.rule("object", '"{" (pair ("," pair)*)? "}"')
            self.rule("pair", f'/{_NEW_NAME}/ ":" any')
            self.rule("list", '"[" (any ("," any)*)? "]"')
            self._marked()
        return "any"

    def _written(self, value: Any) -> str:
        """Return an enum's value as it is written in braces."""
        mark = self._form.value_end
        if isinstance(value, str):
            if mark in value or self._form.end in value:
                raise GrammarError(f"{value[:64]!r} cannot be written in this model's calls")
            return f"{mark}{value}{mark}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{self._written(key)}:{self._written(one)}" for key, one in value.items()) + "}"
        return "[" + ",".join(map(self._written, value)) + "]" if isinstance(value, list) else json.dumps(value)

    def _named(self, kind: str, body: str) -> str:
        name = self.new(kind)
        self.rule(name, body)
        return name


class _Arguments(NamedTuple):
    """The arguments that a schema allows."""

    named: list[tuple[str, Any, bool]]
    """(name, schema, whether it is required) of each argument that the schema names."""
    others: Any
    """The schema of any further arguments; False if there are none."""


def _arguments(schema: Mapping[str, Any], *, texts: bool = False) -> _Arguments:
    """Return the arguments that a whole schema allows; any if it names none and is not closed.

    Further arguments never have the name of a named one. They may repeat each other's, which no grammar can prevent.
    `texts`: they must be texts, because the parser reads no other values of arguments that the schema does not name.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    schema = followed(schema)
    properties, required = schema.get("properties"), schema.get("required")
    needed = dict.fromkeys(map(str, required)) if isinstance(required, list) else {}
    if wrong := next((key for key in needed if not _NAME.fullmatch(key)), None):
        raise GrammarError(f"an argument named {wrong[:64]!r} cannot be written in this model's calls")
    known = properties if isinstance(properties, Mapping) else {}
    others = schema.get("additionalProperties", not known)
    if "patternProperties" in schema and not known:
        others = True
    if texts and not is_text(others):
        others = True
    if others is not False:
        known = {**known, **{key: others for key in needed if key not in known}}
    named = [(key, _beside(shared, one), key in needed) for key, one in known.items() if _NAME.fullmatch(key)]
    return _Arguments(named, _beside(shared, others))


def _beside(shared: Mapping[str, Any], schema: Any) -> Any:
    """Return a schema with the definitions that it may refer to."""
    return {**shared, **schema} if shared and isinstance(schema, Mapping) else schema


_NAME = re.compile(r"[^<>\n\"'=,(){}\s]{1,128}")
"""Argument names that can be written in tags."""


def _fits_tags(values: Any, stops: Sequence[str]) -> bool:
    """Return whether an enum's values can be written in tags unchanged."""
    if not isinstance(values, list) or not values or not all(isinstance(one, str) for one in values):
        return False
    return not any(stop in one for one in values for stop in stops) and not any(one.strip() != one for one in values)


def _either(texts: Sequence[str]) -> str:
    """Return a pattern of any of these texts, escaped for use between slashes."""
    return "|".join(re.escape(text).replace("/", r"\/").replace("\n", "n") for text in texts)


def _whole_pattern(schema: Any) -> str:
    """Return a schema's pattern, escaped for use between slashes; "" without one that covers the whole text."""
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    if not isinstance(pattern, str) or not (pattern.startswith("^(?:") and pattern.endswith(")$")):
        return ""
    # Escaped characters are taken in pairs: the backslash before a slash may itself be escaped.
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern[1:-1], flags=re.DOTALL)


def _kinds(kind: Any) -> list[str]:
    """Return the distinct types of a schema with a list of types; [] for a single type."""
    return [one for n, one in enumerate(kind) if one not in kind[:n]] if isinstance(kind, list) else []


def _numbered(text: str) -> str:
    """Return the expression of a text with at most one {index} (a number) or {id} (letters and digits)."""
    for made_up, pattern in (("{index}", "[0-9]{1,3}"), ("{id}", "[0-9A-Za-z]{9}")):
        before, found, behind = text.partition(made_up)
        if found:
            return f"{_literal(before)} /{pattern}/ {_literal(behind)}"
    return _literal(text)


def _literal(text: str) -> str:
    return literal(text) if text else ""
