"""Conversations over tools of compose.py: several offered that are easily mixed up, or not; calls and follow-ups."""

from collections.abc import Callable

from .acttable import Act, acts, popular_acts
from .compose import Composed, random_act, tool_of
from .dialogue import AS_IS, Talk
from .things import thing
from .toolbox import Tool
from .toolchat import NO_TOOL, offered, result
from .values import Values

POPULAR = 0.45
"""How often a popular act is drawn."""

Offer = Callable[[Values, int], list[Tool]]

AGAIN = ("And {}?", "What about {}?", "And what about {}?", "The same {}, please.", "Now {}.", "and {}")


def any_act(values: Values) -> Act:
    """An act of this side, half the time a popular one, or one made up on the spot."""
    roll = values.rng.random()
    if roll < 0.86:
        return values.rng.choice((popular_acts if roll < POPULAR else acts)(values.evaluation))
    return random_act(values)


def rival(values: Values, act: Act) -> Act:
    """An act that is easily taken for another: the same with another verb, or one that shares words with it."""
    rng, roll = values.rng, values.rng.random()
    if roll < 0.35 and any("@" in text or "~" in text for text in act.requests):
        return act
    if roll < 0.55:
        noun = rng.choice(act.nouns).split("_")[0]
        return random_act(values, noun=noun) if rng.random() < 0.6 else random_act(values, verb=act.verbs[0])
    candidates = [other for other in rng.sample(acts(False), 25) if other is not act]
    return max(candidates, key=lambda other: len(act.words & other.words) + rng.random() * 0.5)


def offer(values: Values, count: int) -> list[Tool]:
    """Tools to offer together; the first is composed, and so are most of the others."""
    rng = values.rng
    first = any_act(values)
    tools: list[Tool] = [tool_of(values, first)]
    while len(tools) < count:
        roll = rng.random()
        if roll < 0.1:
            other = offered(values, 1, real=0.5)[0]
        else:
            other = tool_of(values, rival(values, first) if roll < 0.5 else any_act(values))
        if all(other.name != t.name and other.description.rstrip(".") != t.description.rstrip(".") for t in tools):
            tools.append(other)
    rng.shuffle(tools)
    return tools


def act_talk(talk: Talk, between: Callable[[Talk], None], offering: Offer = offer) -> None:
    """Some requests over one to four tools: mostly each by itself, or one after the other with other talk."""
    rng, values = talk.rng, talk.values
    tools = offering(values, rng.choices((1, 2, 3, 4), (18, 28, 50, 4))[0])
    talk.tools = [tool.schema(values) for tool in tools]
    talk.separate = rng.random() < 0.75
    for _ in range(rng.randint(4, 8) if talk.separate else rng.randint(1, 6)):
        roll = rng.random()
        if roll < 0.04 and not talk.separate:
            between(talk)
            continue
        if roll < 0.07 and _nothing_fits(talk, tools):
            continue
        # A tool of the catalogue is there to be mixed up with the others.
        tool = rng.choice([t for t in tools if type(t) is not Tool])
        text, arguments = tool.request(values)
        talk.user(text)
        talk.call(tool.name, arguments)
        if talk.separate:
            continue
        if rng.random() < 0.15:
            talk.tool_result(*result(values, tool))
        if isinstance(tool, Composed) and rng.random() < 0.1:
            _again(talk, tool, arguments)


def _again(talk: Talk, tool: Composed, arguments: dict[str, object]) -> None:
    """ "And in Lisbon?": the same call with one other argument."""
    rng, values = talk.rng, talk.values
    pairs = zip(tool.params, tool.roles, strict=True)
    fitting = [(p, r) for p, r in pairs if p.type == "s" and p.name in arguments and r.ways and not r.last]
    if not fitting:
        return
    param, role = rng.choice(fitting)
    value = thing(values, param.kind)
    way = rng.choice(role.ways).replace("{^}", "{}") if rng.random() < 0.6 else "{}"
    talk.user(AS_IS + rng.choice(AGAIN).format(way.replace("{}", value.text)))
    talk.call(tool.name, {**arguments, param.name: str(value.data)})


def _nothing_fits(talk: Talk, tools: list[Tool]) -> bool:
    """A request for which no offered tool will do; false if none was found at once."""
    used = {word for tool in tools for word in _words(tool)}
    act = talk.rng.choice(acts(False))
    if used & act.words - {"date", "time", "name"} or {"query", "web", "message"} & (used | act.words):
        return False
    talk.user(tool_of(talk.values, act).request(talk.values)[0])
    talk.messages.append({"role": "assistant", "content": NO_TOOL})
    return True


def _words(tool: Tool) -> set[str]:
    if isinstance(tool, Composed) and tool.act:
        return tool.act.words
    return set(tool.name.split("_")) | {param.name for param in tool.params}
