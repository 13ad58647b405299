"""Tools to practise with: a catalogue of realistic ones, and families that make up any number of others."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import words
from .values import Value, Values, held_out

CATALOGUE = Path(__file__).with_name("catalogue.txt")
TYPES = {"s": "string", "i": "integer", "n": "number", "b": "boolean", "e": "string"}

ALIASES = {
    "city": "location place town city_name destination",
    "location": "city place town",
    "query": "q text search_query keywords term",
    "path": "file file_path filename target",
    "name": "title label id",
    "title": "name subject heading",
    "person": "name user contact",
    "to": "recipient email address receiver",
    "text": "content message body input",
    "message": "text body content",
    "minutes": "duration length time_minutes",
    "order_id": "order id order_number",
    "service": "name app service_name",
    "amount": "sum value total",
    "topic": "subject query about",
    "user": "username user_name account",
    "number": "id n index",
    "host": "server machine hostname",
    "level": "value percent",
    "date": "day when",
    "time": "at when start",
    "url": "link address page uri",
}


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
        return {"type": "function", "function": function}

    def request(self, values: Values) -> tuple[str, dict[str, Any]]:
        """A request in words (imperatives in lower case) and the arguments that it calls for."""
        template, _, fixed = values.pick(self.requests).partition(" :: ")
        arguments: dict[str, Any] = {}
        text = template
        for param in self.params:
            if f"{{{param.slot}}}" in text:
                value = _value(param, values)
                text = text.replace(f"{{{param.slot}}}", value.text)
                arguments[param.name] = value.data
            elif fixed.startswith(f"{param.slot}="):
                arguments[param.name] = fixed.endswith("true")
        return text, arguments


def _value(param: Param, values: Values) -> Value:
    if param.choices:
        choice = values.pick(param.choices)
        return Value(choice, choice)
    value = values.draw(param.kind)
    if param.type == "s" and not isinstance(value.data, str):
        return Value(str(value.data), str(value.data))
    return value


@cache
def catalogue() -> tuple[Tool, ...]:
    """Every tool of catalogue.txt."""
    tools = [_parse(block) for block in CATALOGUE.read_text("utf-8").split("\n# ")]
    return tuple(tools)


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
    return tuple(tool for tool in catalogue() if held_out(tool.name) == evaluation)


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
        elif rng.random() < 0.05:
            name = values.made_up()
        taken = {p.name for p in params}
        params.append(replace(param, name=param.name if name in taken else name))
    names = [p.name for p in params]
    if len(set(names)) < len(names):
        params = list(tool.params)
    return replace(tool, name=_restyle(tool.name, values), params=tuple(params))


def _restyle(name: str, values: Values) -> str:
    """Another spelling of a tool name: other verb, camel case, a prefix, or a made-up word in it."""
    rng = values.rng
    parts = name.split("_")
    if rng.random() < 0.15 and parts[0] in ("get", "find", "list", "search", "check", "show"):
        parts[0] = rng.choice(("get", "fetch", "find", "lookup", "read", "query", "show", "retrieve"))
    roll = rng.random()
    if roll < 0.06:
        parts = parts[1:] or parts
    elif roll < 0.12:
        parts.insert(0, values.made_up())
    elif roll < 0.16:
        parts.append(rng.choice(("v2", "tool", "now", "api", "fn", values.made_up())))
    elif roll < 0.22:
        parts = [values.made_up()] + ([values.made_up()] if rng.random() < 0.4 else [])
    style = rng.random()
    if style < 0.78:
        return "_".join(parts)
    if style < 0.9:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return ("-" if style < 0.95 else "").join(part if style < 0.95 else part.capitalize() for part in parts)


# Families: name | description | slots | requests. {n} and {m} are nouns, {v} a verb; digits are arguments.
FAMILIES = """
get_{n}|Get the {n} of a {m}.|{m}|What is the {n} of {0}?|get the {n} for {0}|tell me {0}'s {n}|I need the {n} of {0}|show me the {n} of {0}|Which {n} does {0} have?|check the {n} of {0}|What {n} does the {m} {0} have?|{n} of {0}?|look at the {n} for {m} {0}
{v}_{n}|{V} a {n}.|{n}|{v} the {n} {0}|{v} {n} {0}|{v} {0}|the {n} {0} is ready, {v} it|I want to {v} the {n} {0}|{v} a {n} called {0}|There is a {n} named {0}. {V} it.
{v}_{n}|{V} the {n}.|name|{v} the {n} {0}|{v} {n} {0}|{v} the {n} named {0}|use {0} as the {n} and {v} it|We have to {v} the {n} {0}.
create_{n}|Create a new {n}.|name|create a {n} called {0}|make a new {n} named {0}|add a {n}: {0}|I need a new {n}, call it {0}|set up a {n} with the name {0}|start a {n} {0}
delete_{n}|Delete a {n}.|{n}_id|delete {n} {0}|remove the {n} {0}|get rid of {n} {0}|I no longer need the {n} {0}|drop {n} {0}
list_{n}s|List all {n}s of a {m}.|{m}|list the {n}s of {0}|show me all {n}s for {0}|Which {n}s are there in {0}?|What {n}s does {0} have?|give me every {n} of {0}
count_{n}s|Count the {n}s in a {m}.|{m}|How many {n}s are in {0}?|count the {n}s of {0}|tell me how many {n}s {0} has|number of {n}s in {0}?
search_{n}s|Search for {n}s.|query|find a {n} about {0}|search the {n}s for {0}|I am looking for a {n}: {0}|Is there a {n} like {0}?|look for {n}s with {0}|find {0} in the {n}s
set_{n}|Set the {n} to a value.|#value|set the {n} to {0}|change the {n} to {0}|make the {n} {0}|the {n} should be {0}|put the {n} at {0}|turn the {n} to {0}
set_{n}_{m}|Set the {m} of a {n}.|{n} #{m}|set the {m} of {n} {0} to {1}|change {0}'s {m} to {1}|give {n} {0} the {m} {1}|the {m} of {0} must be {1}|{n} {0} needs {m} {1}
send_{n}|Send a {n} to someone.|recipient {n}|send {0} the {n} {1}|send the {n} {1} to {0}|give {0} the {n} {1}|{0} should get the {n} {1}|let {0} have the {n} {1}
order_{n}|Order a {n}.|#quantity {n}|order {0} {1}|I want {0} {1}|buy {0} of {1}|get me {0} {1}|we need {0} {1}, order them
move_{n}|Move a {n} to another {m}.|{n} {m}|move the {n} {0} to {1}|put {n} {0} into {1}|{n} {0} belongs in {m} {1}, move it|bring {0} to {1}
compute_{n}|Compute the {n} from {m} and size.|#{m} #size|compute the {n} with {m} {0} and size {1}|What is the {n} for {m} {0} and size {1}?|work out the {n}: {m} {0}, size {1}
{v}_{n}_{m}|{V} the {m} of a {n}.|{n}|{v} the {m} of {0}|{v} {0}'s {m}|{v} the {n} {m} for {0}|I want to {v} the {m} of the {n} {0}
{n}_lookup|Look up a {n} by its {m}.|{m}|Which {n} has the {m} {0}?|look up the {n} with {m} {0}|find the {n} whose {m} is {0}|What {n} belongs to {0}?
{n}_{m}|Find the {m} that belongs to a {n}.|{n}|What is the {m} for the {n} {0}?|Where is the {m} of {0}?|I need a {m} for {n} {0}|find a {m} for {0}
get_current_{n}|Get the current {n}.||What is the current {n}?|show the {n}|tell me the {n}|get the current {n}|Which {n} is it now?|How is the {n}?
{x}|Run {x} on a {n}.|{n}|run {x} on {0}|{x} {0}|use {x} with {0}|I want {x} for {0}|apply {x} to the {n} {0}|do a {x} of {0}
{x}_{n}|Tell the {n} of a {m}.|{m}|What {n} does {0} have?|tell me the {n} of the {m} {0}|find out {0}'s {n}|{n} for {0}?
assign_{n}|Assign a {n} to a person.|{n} person|assign {n} {0} to {1}|give the {n} {0} to {1}|{1} takes the {n} {0}|let {1} have {n} {0}
schedule_{n}|Schedule a {n}.|{n} date|schedule the {n} {0} for {1}|plan {n} {0} on {1}|the {n} {0} should take place on {1}|put the {n} {0} on {1}
""".strip().splitlines()

KINDS = "person city label word id phrase email file brand topic noun fullname madeup title date int anyone foreign sentence url code".split()
RESULT_KINDS = "int word adjective float id brand phrase date person city".split()


def synthetic(values: Values) -> Tool:
    """A made-up tool from one of the families, with real nouns or made-up ones."""
    rng = values.rng
    n, m = (values.noun() if rng.random() < 0.82 else values.made_up() for _ in range(2))
    names = {"n": n, "m": m, "v": rng.choice(words.VERBS), "x": values.made_up()}
    names["V"] = names["v"].capitalize()
    name, description, slots, *requests = (_fill(part, names) for part in rng.choice(FAMILIES).split("|"))
    params = []
    for index, slot in enumerate(slots.split()):
        numeric = slot.startswith("#")
        bare = slot.lstrip("#")
        kind = {"person": "anyone", "date": "date"}.get(bare) or ("int" if numeric else rng.choice(KINDS))
        type_ = rng.choice("iin") if numeric else "i" if kind == "int" and rng.random() < 0.7 else "s"
        text = rng.choice((f"The {bare}", f"{bare.capitalize()} to use", f"Name of the {bare}", bare))
        params.append(Param(str(index), bare if n != m else f"{bare}_{index}", type_, kind, text.replace("_", " ")))
    key = rng.choice((n, "result", "value", m, "status"))
    returns = ((key, "ok" if key == "status" else rng.choice(RESULT_KINDS)),)
    return Tool(f"{n}-{m}", name, description, tuple(params), tuple(requests), returns)


def _fill(text: str, names: dict[str, str]) -> str:
    for key, value in names.items():
        text = text.replace(f"{{{key}}}", value)
    return text
