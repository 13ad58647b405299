"""A call format and the offered tools -> the grammar of answers that call them, in llguidance's Lark.

Everything that it allows is read as calls by the parser of the same format (`tool_parser`, `section_reader`): names are
literal, arguments fit their schemas, and a text in tags never contains a tag that would end it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.text.grammar.exact_numbers import expression
from cairn.text.grammar.grammar import HARMONY_FINAL, MAX_TEXT, GrammarError
from cairn.text.grammar.lark import literal
from cairn.text.grammar.prepare_schema import SchemaError, check_bounds, kinds_of, prepared_text
from cairn.text.output.call_formats import CallFormat
from cairn.text.output.references import followed, resolved
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
    strict: bool = False
    """Whether a part that cannot be enforced is an error."""


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
        found.append(Offered(name, enforced, tuple(f"tools: {name[:64]}: {one}" for one in warnings), name in strict))
    return found


def _encoded(schema: Any) -> bytes:
    try:
        return _encoder.encode(schema)
    except (OverflowError, TypeError, UnicodeEncodeError):  # whole numbers of any size, and half surrogates
        return json.dumps(schema).encode()


def lark_of_calls(
    form: CallFormat, tools: Sequence[Offered], *, required: bool, parallel: bool, warnings: list[str] | None = None
) -> str:
    """Return the grammar of answers that call these tools; append parts of schemas that it leaves out to `warnings`.

    If `required` the answer is one call at least; else it is text, or text followed by calls. Raises GrammarError for
    a part of a strict tool's schema that cannot be enforced in this form.
    """
    made = _Grammar(form, [] if warnings is None else warnings)
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

    def __init__(self, form: CallFormat, warnings: list[str]) -> None:
        self._form, self._warnings = form, warnings
        self._tool = Offered("", ANY_OBJECT)
        self._references: dict[str, str] = {}
        self._due: list[str] = []
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
        self._tool, self._references = tool, {}
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
        while self._due:  # one after another, because each may lead to further ones
            reference = self._due.pop()
            self.rule(self._references[reference], self._braced(resolved(tool.schema, reference)))
        return name

    def _leave_out(self, keys: Iterable[str]) -> None:
        """Record keywords that are not enforced. Raises GrammarError if the tool is strict."""
        for key in sorted(keys):
            name = self._tool.name[:64]
            if self._tool.strict:
                raise GrammarError(f'{name}: "{key}" cannot be enforced in this model\'s calls')
            said = f'tools: {name}: "{key}" is not enforced in this model\'s calls'
            if said not in self._warnings:
                self._warnings.append(said)

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
        arguments = self._arguments(schema, texts=True)
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
        if bound := self._bound(schema):
            return f"{bound} {_literal(form.value_end)}"
        # A text ends at its closing tag; whether a line break precedes the tag is up to the model.
        tag = form.value_end.strip()
        name = self.new("v")
        self.rule(f"{name}[lazy]", f"{self._free()} {_literal(tag)}")
        return f"{name} {_literal(form.value_end.partition(tag)[2])}".rstrip()

    def _bound(self, schema: Any) -> str:
        """Return the expression of the texts that a schema lists or has a whole pattern for; "" if any text may come.

        Lengths are not enforced, nor is a pattern that does not cover a whole text.
        """
        if not isinstance(schema, Mapping):
            return ""
        parts = schema.get("allOf") or []
        self._leave_out(schema.keys() & {"$ref"} | ({"allOf"} if any(map(_constrains, parts)) else set()))
        values = _listed(schema)
        if written := [one for one in values or () if _fits_tags(one, self._stops())]:
            return f"({' | '.join(map(_literal, written))})"
        if values is not None:
            self._leave_out(schema.keys() & {"enum", "const"})
            return ""
        if patterns := [one for one in map(_whole_pattern, (schema, *parts)) if one]:
            return self._matching(patterns)
        bound = [self._bound(one) for one in _choices(schema) if is_text(one)]
        return f"({' | '.join(bound)})" if bound and all(bound) else ""

    def _matching(self, patterns: Sequence[str]) -> str:
        """Return the rule of a text that matches patterns and contains nothing that would end it."""
        name = self.new("v").upper()
        matched = " & ".join(f"/{one}/" for one in patterns)
        self.rule(name, rf"{matched} & ~/(.|\n)*({_either(self._stops())})(.|\n)*/")
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
        arguments = self._arguments(schema)
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

    def _arguments(self, schema: Mapping[str, Any], *, texts: bool = False) -> _Arguments:
        """Return the arguments that a schema allows; any if it names none and is not closed.

        Further arguments never have the name of a named one; they may repeat each other's, which no grammar prevents.
        `texts`: they must be texts, because the parser reads no other values of arguments without a schema.
        """
        whole = self._tool.schema
        # In braces references become rules, and definitions are not needed beside each value.
        shared_keys = () if self._form.kind == "braces" else ("$defs", "definitions")
        shared = {key: whole[key] for key in shared_keys if key in whole}
        schema = followed(schema) if schema is whole else schema
        properties, required = schema.get("properties"), schema.get("required")
        needed = dict.fromkeys(map(str, required)) if isinstance(required, list) else {}
        if wrong := next((key for key in needed if not _NAME.fullmatch(key)), None):
            raise GrammarError(f"an argument named {wrong[:64]!r} cannot be written in this model's calls")
        known = properties if isinstance(properties, Mapping) else {}
        others = schema.get("additionalProperties", not known)
        if "patternProperties" in schema and not known:
            others = True
        if texts and not is_text(others):
            self._leave_out(["additionalProperties"])
            others = True
        left = schema.keys() & {*_COMBINED, "enum", "const", "patternProperties", "maxProperties"}
        self._leave_out(left | ({"required"} if others is False and needed.keys() - known.keys() else set()))
        if others is not False:
            known = {**known, **{key: others for key in needed if key not in known}}
        named = [(key, _beside(shared, one), key in needed) for key, one in known.items() if _NAME.fullmatch(key)]
        return _Arguments(named, _beside(shared, others))

    def _new_name(self, before: str, behind: str, arguments: _Arguments) -> str:
        """Return the rule of an argument's name that is not among the named ones, and of the texts around it.

        They are one terminal: a terminal of `before` alone would end where a named argument may still follow.
        """
        name, taken = self.new("k").upper(), _either([before + key + behind for key, _, _ in arguments.named])
        beside = f" & ~/{taken}/" if taken else ""
        self.rule(name, f"/{_either([before])}{_NEW_NAME}{_either([behind])}/{beside}")
        return name

    def _braced(self, schema: Any) -> str:
        """Return the expression of a value in braces. Lengths of texts and lists are not enforced."""
        if not isinstance(schema, Mapping):
            return self._any()
        kinds = _kinds(schema)
        if kinds and set(kinds) <= _SCALARS:
            return self.json(schema)
        if (values := _listed(schema)) is not None:
            self._leave_out(schema.keys() & _COMBINED)
            return f"({' | '.join(_literal(self._written(one)) for one in values)})"
        if kinds == ["string"]:
            mark, bound = _literal(self._form.value_end), self._bound(schema)
            return f"{mark} {bound} {mark}" if bound else self._marked()
        if combined := self._combined(schema):
            return combined
        if len(kinds) > 1:
            return f"({' | '.join(self._braced({**schema, 'type': one}) for one in kinds)})"
        if kinds == ["array"]:
            return self._list(schema)
        if kinds == ["object"]:
            return f'"{{" {self._keywords(schema, ":", ",", self._braced)} "}}"'
        self._leave_out(schema.keys() & _CONSTRAINING)
        return self._any()

    def _combined(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of a schema that is a reference or made of other schemas; "" for any other."""
        key = next((key for key in _COMBINED if schema.get(key)), "")
        if not key or schema.keys() & {"properties", "items", "prefixItems"}:
            return ""  # what names members says most; what stands beside it is left out there
        self._leave_out(schema.keys() & _CONSTRAINING - {key})
        if key == "$ref":
            return self._reference(str(schema[key]))
        if key == "allOf" and len(schema[key]) > 1:
            self._leave_out([key])
            return self._any()
        kind = {"type": schema["type"]} if "type" in schema else {}
        parts = [{**kind, **one} if isinstance(one, Mapping) else one for one in schema[key]]
        return f"({' | '.join(map(self._braced, parts))})"

    def _reference(self, reference: str) -> str:
        """Return the rule of a schema that a reference points to, which may refer to itself."""
        if not isinstance(resolved(self._tool.schema, reference), Mapping):
            self._leave_out(["$ref"])
            return self._any()
        if reference not in self._references:
            self._references[reference] = self.new("s")
            self._due.append(reference)
        return self._references[reference]

    def _list(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of a list in braces: its first items, each with its own schema, then any further."""
        self._leave_out(schema.keys() & {*_COMBINED, "additionalItems"})
        first, items = schema.get("prefixItems") or [], schema.get("items", True)
        closed = items is False or schema.get("maxItems", len(first) + 1) <= len(first)
        item = "" if closed else self._named("i", self._braced(items))  # a rule: it is written twice
        if not first:
            return f'"[" ({item} ("," {item})*)? "]"' if item else '"[" "]"'
        rest = f'("," {item})*' if item else ""
        for number, one in reversed(list(enumerate(first))):
            more = f"{self._braced(one)} {rest}".rstrip()
            more = f'"," {more}' if number else more
            rest = more if number < schema.get("minItems", 0) else f"({more})?"
        return f'"[" {rest} "]"'

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


def _beside(shared: Mapping[str, Any], schema: Any) -> Any:
    """Return a schema with the definitions that it may refer to."""
    return {**shared, **schema} if shared and isinstance(schema, Mapping) else schema


_NAME = re.compile(r"[^<>\n\"'=,(){}\s]{1,128}")
"""Argument names that can be written in tags."""


def _fits_tags(value: Any, stops: Sequence[str]) -> bool:
    """Return whether a value is a text that can be written in tags unchanged."""
    return isinstance(value, str) and value.strip() == value and not any(stop in value for stop in stops)


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


_COMBINED = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords whose schemas constrain the same value."""
_CONSTRAINING = frozenset(
    {*_COMBINED, "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "items"}
    | {"maxProperties", "prefixItems", "additionalItems", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "multipleOf"}
)
"""Keywords that constrain a value in braces or tags; types, lengths and patterns are not among them."""
_SCALARS = frozenset({"integer", "number", "boolean", "null"})


def _constrains(schema: Any) -> bool:
    return not isinstance(schema, Mapping) or not _CONSTRAINING.isdisjoint(schema)


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """Return a schema's distinct types; without `type` that of its members or items, if it names any."""
    kinds = kinds_of(schema)
    if not kinds:
        named = (("object", {"properties"}), ("array", {"items", "prefixItems"}))
        return [kind for kind, keys in named if schema.keys() & keys][:1]
    return [one for n, one in enumerate(kinds) if one not in kinds[:n]]


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of which a value must fit one."""
    return [one for key in ("anyOf", "oneOf") for one in schema.get(key) or ()]


def _numbered(text: str) -> str:
    """Return the expression of a text with at most one {index} (a number) or {id} (letters and digits)."""
    for made_up, pattern in (("{index}", "[0-9]{1,3}"), ("{id}", "[0-9A-Za-z]{9}")):
        before, found, behind = text.partition(made_up)
        if found:
            return f"{_literal(before)} /{pattern}/ {_literal(behind)}"
    return _literal(text)


def _literal(text: str) -> str:
    return literal(text) if text else ""
