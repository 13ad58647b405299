"""Tools put together from the acts and roles of acttable.py, and the endless ways in which people ask for them.

A request starts from one of the act's templates; what the template leaves out is added behind it, in any order.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from . import words
from .acttable import Act, Role, roles
from .dialogue import AS_IS, ASKS, OPENERS, TAILS, lower_first
from .things import thing
from .toolbox import LITTLE, Param, Tool
from .values import Value, Values

CHOICE = re.compile(r"\(([^()]*/[^()]*)\)")
PLACE = re.compile(r"\{\^?(\w+)\}|<(\w+)>")
SPOKEN = "What What's Where When Who Which How How's Is Are Am Do Does Did Has Have Will Can Could Any".split()
# First words of short requests that are no commands, so that no "Can you" goes before them.
BARE = """weather time timer directions route flights hotels recipe news lights light table train area tip bmi sunrise
sunset distance travel alarm random exchange synonyms showtimes account last one a in we navigate email mail it's
volume base64 grep ls new""".split()
# Kinds that are put in quotes now and then.
FREE = set(
    """event message note query utterance word song film book subject content commitmsg issue post prompt notename pattern
    errand reviewx announce w2mailsay w2voicenote w3say w3opinion w4slackmsg w4thought w4err wktext x1jot x2say x2line
    x3imgidea""".split()
)
# Roles that may be added to any tool.
SPARE = """dayon city language limit priority format sort order tag category notify urgent private person assoc team
deadline repeat room colour size units amount status when reason folder""".split()
GENERIC = """city origin destination recipient person attendee assignee sender subject body message title name dayon
deadline time endtime when period year minutes hours span people limit percent language room colour size priority
status sort format repeat channel folder tofolder file tofile content branch repo assoc team environment version host
tag category reason account phone url topic rating urgent notify force private place address country currency""".split()


@dataclass(frozen=True, slots=True)
class Composed(Tool):
    """A tool of an act; each parameter keeps its role."""

    roles: tuple[Role, ...] = field(default=())
    act: Act | None = None

    def request(self, values: Values) -> tuple[str, dict[str, Any]]:
        """A request as a person may write it, and the arguments that it calls for."""
        text, arguments, first, last = self.said(values)
        return AS_IS + (text if first else asked(values, text, free=last)), arguments

    def said(self, values: Values) -> tuple[str, dict[str, Any], bool, bool]:
        """The bare request, its arguments, and whether it begins and whether it ends with words of the user's own."""
        rng = values.rng
        present = {param.slot for param in self.params}
        fitting = [t for t in self.requests if _places(t) <= present]
        template = _chosen(values, rng.choice(fitting))
        while not _places(template) <= present:
            template = _chosen(values, rng.choice(fitting))
        inside = _places(template)
        pairs = list(zip(self.params, self.roles, strict=True))
        extra = [(p, r) for p, r in pairs if p.slot not in inside and (p.required or rng.random() < 0.35)]
        extra = [(p, r) for p, r in extra if r.ways]
        rng.shuffle(extra)
        extra.sort(key=lambda pair: pair[1].last)
        drawn = {p.slot: _value(values, p, r) for p, r in pairs if p.slot in inside or (p, r) in extra}
        text = re.sub(" +", " ", template).strip()
        text = PLACE.sub(lambda match: _placed(values, match, drawn, dict((p.slot, r) for p, r in pairs)), text)
        ended = template[-1] in ".?!"
        body, end = (text[:-1], text[-1]) if ended else (text, "")
        front = extra and not ended and rng.random() < 0.05 and extra[0][1].slot in ("dayon", "time", "when", "place")
        tail = [_phrase(values, role, drawn[param.slot]) for param, role in extra]
        if front:
            body, tail = f"{tail[0]}, {lower_first(body)}", tail[1:]
        body = " ".join([body, *tail]).replace(" ,", ",").replace(" :", ":")
        order = [p.slot for p in self.params if p.slot in drawn]
        arguments = {p.name: drawn[p.slot].data for p in self.params if p.slot in order}
        final = extra[-1][0].kind if extra else _ending(template, self.params)
        return body + (end if not extra or end != "." else ""), arguments, template.startswith("{"), final in FREE


def _ending(template: str, params: tuple[Param, ...]) -> str:
    found = list(PLACE.finditer(template))
    if not found or found[-1].end() < len(template):
        return ""
    slot = found[-1].group(1) or found[-1].group(2)
    return next(p.kind for p in params if p.slot == slot)


def _places(template: str) -> set[str]:
    return {one or two for one, two in PLACE.findall(CHOICE.sub("", template))}


def _chosen(values: Values, template: str) -> str:
    while CHOICE.search(template):
        template = CHOICE.sub(lambda match: values.rng.choice(match[1].split("/")), template, count=1)
    return template


def _value(values: Values, param: Param, role: Role) -> Value:
    """A value of the parameter's type, with its text as the user writes it."""
    rng = values.rng
    if param.type == "b":
        told = not role.denials or rng.random() < 0.65
        return Value("", told)
    if param.choices:
        choice = rng.choice(param.choices)
        return Value(choice.capitalize() if choice.islower() and rng.random() < 0.06 else choice, choice)
    value = thing(values, param.kind)
    while param.type == "i" and isinstance(value.data, (str, float)):
        if isinstance(value.data, str) and value.data.isdigit() and value.data[0] != "0":
            return Value(value.text, int(value.data))
        again = isinstance(value.data, float) or param.kind in ("order", "code")
        value = thing(values, param.kind if again and param.kind != "float" else "code")
    if param.type == "s" and not isinstance(value.data, str):
        return Value(value.text, f"{value.data:g}" if isinstance(value.data, float) else str(value.data))
    if param.kind in FREE and isinstance(value.data, str):
        return _written(values, value.text, value.data)
    return value


def _written(values: Values, text: str, data: str) -> Value:
    rng = values.rng
    if rng.random() < 0.2 and text == data:
        text = data = data[0].upper() + data[1:]
    if rng.random() < 0.22:
        mark = '"' if rng.random() < 0.75 or "'" in data else "'"
        if data[-1].isalnum() and rng.random() < 0.25:
            data += rng.choice("..!?")
        return Value(f"{mark}{data}{mark}", data)
    return Value(text, data)


def _placed(values: Values, match: re.Match[str], drawn: dict[str, Value], roles: dict[str, Role]) -> str:
    if match[2]:
        return _phrase(values, roles[match[2]], drawn[match[2]])
    value = drawn[match[1]]
    return _with_article(values, value.text) if match[0][1] == "^" else value.text


def _with_article(values: Values, text: str) -> str:
    if not text[0].islower() or text.startswith(("my ", "the ", "a ")) or values.rng.random() < 0.25:
        return text
    return f"{values.rng.choice(('the', 'the', 'the', 'my', 'our'))} {text}"


def _phrase(values: Values, role: Role, value: Value) -> str:
    if isinstance(value.data, bool):
        return values.rng.choice(role.ways if value.data else role.denials)
    way = values.rng.choice(role.ways)
    return way.replace("{^}", _with_article(values, value.text)).replace("{}", value.text)


def asked(values: Values, text: str, *, free: bool = False) -> str:
    """A request as it may stand in a chat; behind words of the user's own no thanks are added."""
    rng, roll = values.rng, values.rng.random()
    first = text.split(" ", 1)[0]
    if first in SPOKEN:
        text = text if text.endswith("?") else text + ("?" if rng.random() < 0.85 else "")
        return rng.choice(OPENERS) + lower_first(text) if roll < 0.1 else _cased(values, text)
    if not text[0].islower() or first.strip(",:").lower() in BARE:
        if roll < 0.3 and text[-1] not in ".?!\"'":
            text += "."
        return _cased(values, text) if first in BARE else text
    if roll < 0.45:
        return _cased(values, text)
    if roll < 0.6 and text[-1] not in ".?!":
        return _cased(values, text + ".")
    if roll < 0.88 and text[-1] not in ".?!":
        return _cased(values, rng.choice(ASKS).format(text))
    return _cased(values, rng.choice(OPENERS) + text if free or roll < 0.93 else text + rng.choice(TAILS))


def _cased(values: Values, text: str) -> str:
    return text[:1].upper() + text[1:] if values.rng.random() < 0.75 else text


def tool_of(values: Values, act: Act) -> Composed:
    """A tool of the act: names, types and descriptions drawn, optional roles kept, dropped or made compulsory."""
    rng = values.rng
    listed = [(role, needed) for role, needed in act.roles if needed or rng.random() < 0.65]
    listed = [(role, needed or (bool(role.ways) and rng.random() < 0.25)) for role, needed in listed]
    if rng.random() < 0.08:
        spare = roles()[rng.choice(SPARE)]
        listed += [(spare, False)] if all(spare.slot != role.slot for role, _ in listed) else []
    requests = _plain(act) if not act.popular and rng.random() < 0.6 else act.requests
    if not _fit(requests, listed):
        requests, listed = act.requests, listed if _fit(act.requests, listed) else list(act.roles)
    if rng.random() < 0.25:
        rng.shuffle(listed)
    params: list[Param] = []
    for role, needed in listed:
        type_ = "s" if len(role.types) > 1 and rng.random() < 0.05 else rng.choice(role.types)
        kind = rng.choice(role.kinds)
        names = [n for n in role.names if all(n != p.name for p in params)] or [role.slot]
        name = names[min(int(rng.expovariate(0.6)), len(names) - 1)] if rng.random() < 0.7 else rng.choice(names)
        text = _described(values, rng.choice(role.descriptions), kind, type_, needed=needed)
        params.append(Param(role.slot, name, type_, kind, text, needed))
    verb, noun = rng.choice(act.verbs), rng.choice(act.nouns)
    own = {"@": verb.replace("_", " "), "~": noun.replace("_", " ")}
    description = _owned(rng.choice(act.descriptions), own)
    description = description[0].upper() + description[1:]
    if rng.random() < 0.1:
        description = f"{verb} {noun}".replace("_", " ").capitalize() + "."
    elif rng.random() < 0.3:
        description = description.rstrip(".")
    elif rng.random() < 0.15:
        names = f"{verb} {noun}".replace("_", " ")
        description += " " + rng.choice(
            (
                f"Use this when the user wants to {names}.",
                f"Call it for questions about {noun.replace('_', ' ')}.",
                f"Returns the {act.returns[0][0].replace('_', ' ')}.",
                "Needs " + " and ".join(p.name for p in params) + "." if params else "",
            )
        )
    return Composed(
        f"act {act.nouns[0]}", _name(values, verb, noun), description, _cameled(values, params),
        tuple(_owned(request, own) for request in requests), act.returns, tuple(role for role, _ in listed), act,
    )  # fmt: skip


def _fit(requests: tuple[str, ...], listed: list[tuple[Role, bool]]) -> bool:
    """Whether one of the requests says nothing that is not listed."""
    return any(_places(request) <= {role.slot for role, _ in listed} for request in requests)


@cache
def _plain(act: Act) -> tuple[str, ...]:
    """Those of an act's requests that share a word with its tools: what the others ask for carries over to no other."""
    names = (name for role, _ in act.roles for name in role.names)
    known = _stems(" ".join((*act.verbs, *act.nouns, *act.descriptions, *names)))
    return tuple(r for r in act.requests if "@" in r or "~" in r or known & _stems(PLACE.sub("", r)))


def _stems(text: str) -> set[str]:
    return {word[:4] for word in re.findall(r"[a-z]{3,}", text.lower())} - LITTLE


def _described(values: Values, text: str, kind: str, type_: str, *, needed: bool) -> str:
    """A parameter's description, now and then with an example, an article or a word on whether it must be there."""
    rng, roll = values.rng, values.rng.random()
    if roll < 0.14 and type_ not in "be":
        example = thing(values, kind).data
        return f"{text.rstrip('.')}{rng.choice((', e.g.', ', for example', ' such as', ', like'))} {example}"
    if roll < 0.22 and text[0].isupper() and text.split(" ")[0] not in ("Where", "Who", "How", "The", "What", "When"):
        return f"The {text[0].lower()}{text[1:]}"
    if roll < 0.3 and not needed:
        return f"{text} (optional)" if rng.random() < 0.5 else f"Optional. {text}"
    return text + "." if roll > 0.92 else text


def _owned(text: str, own: dict[str, str]) -> str:
    for mark, word in own.items():
        text = text.replace(mark, word)
    return text


def _cameled(values: Values, params: list[Param]) -> tuple[Param, ...]:
    if values.rng.random() < 0.92:
        return tuple(params)
    return tuple(replace(p, name=_camel(p.name)) for p in params)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _name(values: Values, verb: str, noun: str) -> str:
    rng = values.rng
    roll = rng.random()
    if roll < 0.04:
        return f"{values.made_up()}_{rng.choice((noun, values.noun(), '1'))}"
    name = f"{verb}_{noun}" if roll < 0.86 else noun if "_" in noun else f"{noun}_{verb}"
    if roll > 0.97:
        name = f"{values.noun()}_{name}"
    style = rng.random()
    return name if style < 0.8 else _camel(name) if style < 0.95 else name.replace("_", "-")


def random_act(values: Values, noun: str = "", verb: str = "") -> Act:
    """An act that nobody has thought of: any verb, any noun and one to three roles."""
    rng = values.rng
    verb, noun = verb or rng.choice(words.VERBS), noun or values.noun()
    picked = [roles()[name] for name in rng.sample(GENERIC, rng.choice((1, 1, 2, 2, 3)))]
    names = (noun, f"{noun}_id", f"{noun}_name", "name", "id", noun)
    item = Role("item", "s", ("orderx", "label", "notename", "title", "madeup", "phrase"), names,
                (f"The {noun}", f"Which {noun}", f"Name of the {noun}", f"{noun.capitalize()} to {verb}"))  # fmt: skip
    requests = [f"{verb} (the/my/a/this) {noun}", f"I (want/need) to {verb} (the/a/my) {noun}", f"{verb} {noun}s"]
    roles_ = [(role, rng.random() < 0.65) for role in picked]
    if rng.random() < 0.45:
        roles_.insert(0, (item, True))
        requests = [f"{verb} (the /){noun} {{item}}", f"{verb} {{item}}", f"{verb} the {noun} (called /named /){{item}}",
                    f"I (want/need) to {verb} the {noun} {{item}}"]  # fmt: skip
    elif rng.random() < 0.3:
        verb = rng.choice(("get", "show", "find", "list", "fetch"))
        requests = [f"What is the {noun}", f"(show/get/find/give/tell) me the {noun}", f"(show/list) all {noun}s",
                    f"Which {noun}s are there", f"Is there a {noun}"]  # fmt: skip
    described = (f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} {noun}s.")
    return Act((verb,), (noun, noun, f"{noun}s"), described, tuple(roles_), tuple(requests))
