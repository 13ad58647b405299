"""Tools to practise with: a catalogue of realistic ones, and families that make up any number of others."""

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import words
from .dialogue import AS_IS
from .toolwords import ALIASES, CONTEXT, FAMILIES, KINDS, PLAIN, RESULT_KINDS, SYNONYMS
from .values import Value, Values, held_out

CATALOGUE = Path(__file__).with_name("catalogue")
# Never held out and shown often: the same requests are also made without any tool (chat.LIVE_QUESTIONS), and only
# what is on offer may decide between a call and an excuse.
POPULAR = (
    "get_weather",
    "get_time",
    "web_search",
    "send_email",
    "read_file",
    "set_timer",
    "play_music",
    "call_contact",
)
# First letters of words that say nothing about a tool.
LITTLE = set("the for and with from this that what whic who when how all one are".split())
TYPES = {"s": "string", "i": "integer", "n": "number", "b": "boolean", "e": "string"}


@dataclass(frozen=True, slots=True)
class Param:
    """One argument: its name in the schema, its slot in the requests, its type and what it may hold."""

    slot: str
    name: str
    type: str
    kind: str
    description: str
    required: bool = True

    @property
    def choices(self) -> list[str]:
        """The allowed values of an enumeration; empty for other types."""
        return self.kind.split(",") if self.type == "e" else []


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, the ways people ask for it, and what it returns (key and kind)."""

    domain: str
    name: str
    description: str
    params: tuple[Param, ...]
    requests: tuple[str, ...]
    returns: tuple[tuple[str, str], ...] = field(default=())

    def schema(self, values: Values) -> dict[str, Any]:
        """The tool as an OpenAI function schema, with the liberties that real schemas take."""
        rng = values.rng
        described = rng.random() < 0.75
        properties: dict[str, Any] = {}
        for param in self.params:
            entry: dict[str, Any] = {"type": TYPES[param.type]}
            if described:
                entry["description"] = param.description
            if param.choices:
                entry["enum"] = param.choices
            if rng.random() < 0.03:
                entry = {"title": param.name.replace("_", " ").title(), **entry}
            properties[param.name] = entry
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if self.params or rng.random() < 0.5:
            parameters["required"] = [p.name for p in self.params if p.required]
        if rng.random() < 0.08:
            parameters["additionalProperties"] = False
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        if rng.random() < 0.06:
            function = dict(rng.sample(list(function.items()), 3))
        if rng.random() < 0.04:
            function = json.loads(json.dumps(function, sort_keys=True))
        return {"type": "function", "function": function}

    def request(self, values: Values) -> tuple[str, dict[str, Any]]:
        """A request in words (imperatives in lower case) and the arguments that it calls for."""
        template, _, fixed = values.pick(self.requests).partition(" :: ")
        if self.params and not fixed and values.rng.random() < 0.06:
            template = self._plain(values)
        arguments: dict[str, Any] = {}
        text = _reworded(template, values)
        if text.startswith("{"):
            text = AS_IS + text
        for param in self.params:
            if f"{{{param.slot}}}" in text:
                value = drawn(param, values)
                text = text.replace(f"{{{param.slot}}}", value.text)
                arguments[param.name] = value.data
            elif fixed.startswith(f"{param.slot}="):
                arguments[param.name] = fixed.endswith("true")
        return text, arguments

    def _plain(self, values: Values) -> str:
        """A template that names the tool or quotes its description."""
        rng = values.rng
        wanted = [p for p in self.params if p.type != "b" and (p.required or rng.random() < 0.3)]
        style = rng.choice(
            (
                "{0} {{{1}}}",
                "{0}: {{{1}}}",
                "{0}={{{1}}}",
                "{0} = {{{1}}}",
                "{{{1}}}" if len(wanted) == 1 else "{0} {{{1}}}",
            )
        )
        said = rng.choice((", ", " and ")).join(
            style.format(p.name.replace("_", rng.choice(" _")), p.slot) for p in wanted
        )
        words_of = self.description.rstrip(".")
        return rng.choice(PLAIN).format(t=self.name, d=words_of[0].lower() + words_of[1:], a=said)


def _reworded(template: str, values: Values) -> str:
    """The template with some words replaced by others of like meaning, and rarely a sentence before it."""
    rng = values.rng
    if rng.random() < 0.18:
        pieces = template.split(" ")
        for spot, word in enumerate(pieces):
            bare = word.rstrip("?.,!").lower()
            if bare in SYNONYMS and rng.random() < 0.5:
                new = rng.choice(SYNONYMS[bare]) + word[len(bare) :]
                pieces[spot] = new[0].upper() + new[1:] if word[0].isupper() else new
        template = " ".join(pieces)
    if rng.random() < 0.06:
        template = f"{rng.choice(CONTEXT)} {template[0].upper() + template[1:]}"
    return template


def drawn(param: Param, values: Values) -> Value:
    """A value for an argument: of its enumeration, of its own list, or of its kind."""
    if param.choices:
        choice = values.pick(param.choices)
        return Value(choice, choice)
    if param.kind.startswith("="):
        listed = values.pick(param.kind[1:].split("/")).replace("_", " ")
        return Value(listed, _literal(listed, param.type))
    value = values.draw(param.kind)
    if param.type == "s" and not isinstance(value.data, str):
        return Value(str(value.data), str(value.data))
    return value


def _literal(text: str, type_: str) -> str | int | float:
    return int(text) if type_ == "i" else float(text) if type_ == "n" else text


@cache
def catalogue() -> tuple[Tool, ...]:
    """Every tool of the files in the catalogue's folder; the first of a name counts."""
    tools: dict[str, Tool] = {}
    for path in sorted(CATALOGUE.glob("*.txt")):
        for block in f"\n{path.read_text('utf-8')}".split("\n# ")[1:]:
            tool = _parse(block)
            tools.setdefault(tool.name, tool)
    return tuple(tools.values())


def _parse(block: str) -> Tool:
    head, *lines = block.removeprefix("# ").strip().splitlines()
    names, description = head.split(" | ")
    domain, name = names.split()
    params = []
    for line in (line[2:] for line in lines if line.startswith("- ")):
        slot, kind_of, kind, text = line.split(" ", 3)
        bare = slot.rstrip("?")
        params.append(Param(bare, bare, kind_of, kind, text, required=bare == slot))
    requests = tuple(line[2:] for line in lines if line.startswith("> "))
    returns = tuple(tuple(pair.split(":")) for line in lines if line.startswith("< ") for pair in line[2:].split())
    return Tool(domain, name, description, tuple(params), requests, returns)  # type: ignore[arg-type]


@cache
def realistic(evaluation: bool) -> tuple[Tool, ...]:
    """The catalogue's tools of one side: training, or held out."""
    side = (tool for tool in catalogue() if (held_out(tool.name, 12) and tool.name not in POPULAR) == evaluation)
    return tuple(side) if evaluation else tuple(_plainer(tool) for tool in side)


def _plainer(tool: Tool) -> Tool:
    """The tool with those requests alone that share a word with it: the others teach nothing that carries over."""
    told = " ".join((tool.name, tool.description, *(f"{p.name} {p.description}" for p in tool.params)))
    known = {word[:4] for word in re.findall(r"[a-z]{3,}", re.sub(r"([A-Z])", r" \1", told).lower())} - LITTLE
    kept = [r for r in tool.requests if known & {w[:4] for w in re.findall(r"[a-z]{3,}", _bare(r))}]
    return replace(tool, requests=tuple(kept)) if kept else tool


def _bare(request: str) -> str:
    return re.sub(r"\{\w+\}", "", request.partition(" :: ")[0]).lower()


def renamed(tool: Tool, values: Values) -> Tool:
    """The same tool under other names, so that names are read from the schema and not remembered."""
    rng = values.rng
    params = []
    for param in tool.params:
        name = param.name
        if name in ALIASES and rng.random() < 0.35:
            name = rng.choice(ALIASES[name].split())
        elif rng.random() < 0.06:
            name = f"{name}_{rng.choice(('value', 'name', 'text', 'id', 'param', 'input'))}"
        elif rng.random() < 0.03:
            name = values.made_up()
        elif rng.random() < 0.12:
            name = values.noun() if rng.random() < 0.5 else f"{values.noun()}_{name}"
        taken = {p.name for p in params}
        params.append(replace(param, name=param.name if name in taken else name))
    names = [p.name for p in params]
    if len(set(names)) < len(names):
        params = list(tool.params)
    return replace(tool, name=_restyle(tool.name, values), params=tuple(params))


def varied(tool: Tool, values: Values) -> Tool:
    """The same tool with its arguments in another order, one more that nobody gives, other values or an example.

    What stays fixed in a catalogue is learnt by heart instead of read from the schema.
    """
    rng = values.rng
    params = list(tool.params)
    if rng.random() < 0.25:
        params = [_widened(param) for param in params]
    if rng.random() < 0.2:
        spare = rng.choice(_spares())
        if all(spare.name != p.name and spare.slot != p.slot for p in params):
            params.append(spare)
    if rng.random() < 0.35:
        rng.shuffle(params)
    description = tool.description
    if rng.random() < 0.08:
        told = rng.choice(tool.requests).partition(" :: ")[0]
        for param in tool.params:
            told = told.replace(f"{{{param.slot}}}", values.noun())
        description = f"{description.rstrip('.')}. {rng.choice(('Example', 'E.g.', 'For requests like'))}: {told}"
    return replace(tool, params=tuple(params), description=description)


def _widened(param: Param) -> Param:
    """Any words instead of the catalogue's own list: a value is copied, not recognised."""
    if param.type != "s" or not param.kind.startswith("="):
        return param
    listed = param.kind[1:].split("/")
    long = sum("_" in value for value in listed) * 2 > len(listed)
    return replace(param, kind="phrase" if long else "label" if any(c.isdigit() for c in param.kind) else "noun")


@cache
def _spares() -> tuple[Param, ...]:
    """Optional arguments to add to other tools."""
    return tuple(p for tool in realistic(False) for p in tool.params if not p.required)


def _restyle(name: str, values: Values) -> str:
    """Another spelling of a tool name: other verb, camel case, a prefix, or a made-up word in it."""
    rng = values.rng
    parts = name.split("_")
    if rng.random() < 0.15 and parts[0] in ("get", "find", "list", "search", "check", "show"):
        parts[0] = rng.choice(("get", "fetch", "find", "lookup", "read", "query", "show", "retrieve"))
    roll = rng.random()
    if roll < 0.05:
        parts = parts[1:] or parts
    elif roll < 0.1:
        parts.insert(0, values.made_up())
    elif roll < 0.13:
        parts.append(rng.choice(("v2", "tool", "now", "api", "fn", values.made_up())))
    elif roll < 0.18:
        parts = [values.made_up()] + ([values.made_up()] if rng.random() < 0.4 else [])
    elif roll < 0.3:
        parts.append(values.noun())
    elif roll < 0.38:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(words.ADJECTIVES))
    elif roll < 0.5:
        parts[0] = rng.choice(words.VERBS)
    elif roll < 0.58:
        parts.insert(0, values.noun())
    elif roll < 0.63:
        parts = [rng.choice(words.VERBS), values.noun()]
    return _joined(parts, rng.random())


def _joined(parts: list[str], style: float) -> str:
    """The words of a name with underscores mostly, else in camel case, with hyphens or in title case."""
    if style < 0.78:
        return "_".join(parts)
    if style < 0.9:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return ("-" if style < 0.95 else "").join(part if style < 0.95 else part.capitalize() for part in parts)


def synthetic(values: Values) -> Tool:
    """A made-up tool from one of the families, with real nouns or made-up ones."""
    rng = values.rng
    n, m = (values.noun() if rng.random() < 0.9 else values.made_up() for _ in range(2))
    names = {"n": n, "m": m, "v": rng.choice(words.VERBS), "x": values.made_up()}
    names["V"] = names["v"].capitalize()
    name, description, slots, *requests = (_fill(part, names) for part in rng.choice(FAMILIES).split("|"))
    params = []
    for index, slot in enumerate(slots.split()):
        numeric = slot.startswith("#")
        bare = slot.lstrip("#")
        kind = {"person": "anyone", "date": "date"}.get(bare) or ("int" if numeric else rng.choice(KINDS))
        type_ = rng.choice("iin") if numeric else "i" if kind == "int" else "s"
        text = rng.choice((f"The {bare}", f"{bare.capitalize()} to use", f"Name of the {bare}", bare))
        params.append(Param(str(index), bare if n != m else f"{bare}_{index}", type_, kind, text.replace("_", " ")))
    key = rng.choice((n, "result", "value", m, "status"))
    returns = ((key, "ok" if key == "status" else rng.choice(RESULT_KINDS)),)
    return Tool(f"{n}-{m}", name, description, tuple(params), tuple(requests), returns)


def _fill(text: str, names: dict[str, str]) -> str:
    for key, value in names.items():
        text = text.replace(f"{{{key}}}", value)
    return text
