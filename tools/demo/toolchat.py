"""Conversations with tools on offer: calls, results, answers, and the cases in which no tool is wanted."""

import json
from collections.abc import Callable

from .dialogue import Talk, ask, question
from .toolbox import POPULAR, Tool, drawn, realistic, renamed, synthetic, varied
from .values import Values

NO_TOOL = "I have no tool for that."


def offered(values: Values, count: int, *, real: float) -> list[Tool]:
    """Tools to offer together, no two alike; ``real`` is the share from the catalogue."""
    rng = values.rng
    tools = [t for t in realistic(values.evaluation) if t.name in POPULAR and rng.random() < 0.04][:count]
    while len(tools) < count:
        tool = rng.choice(realistic(values.evaluation)) if rng.random() < real else synthetic(values)
        if tools and rng.random() < 0.15:
            tool = rival(values, tools[0])
        if not values.evaluation or tool in realistic(True):
            tool = renamed(tool, values) if rng.random() < 0.45 else tool
            tool = varied(tool, values)
        if all(tool.name != other.name and tool.description != other.description for other in tools):
            tools.append(tool)
    return tools


def rival(values: Values, tool: Tool) -> Tool:
    """A tool of the same domain, or one that shares a noun: the hard choice."""
    same = [t for t in realistic(values.evaluation) if t.domain == tool.domain and t.description != tool.description]
    if same:
        return values.rng.choice(same)
    noun = tool.domain.split("-")[0]
    other = synthetic(values)
    if "-" not in tool.domain or not noun:
        return other
    mine = other.domain.split("-")[0]
    swap: Callable[[str], str] = lambda text: text.replace(mine, noun)  # noqa: E731
    params = tuple(type(p)(p.slot, swap(p.name), p.type, p.kind, swap(p.description), p.required) for p in other.params)
    if len({p.name for p in params}) < len(params):
        return other
    requests = tuple(swap(request) for request in other.requests)
    returns = tuple((swap(key), kind) for key, kind in other.returns)
    return Tool(other.domain.replace(mine, noun), swap(other.name), swap(other.description), params, requests, returns)


def one_call(talk: Talk, tool: Tool) -> None:
    """A request, the call, the result and the answer; sometimes followed by "And what about ...?"."""
    rng = talk.rng
    text, arguments = tool.request(talk.values)
    talk.user(ask(rng, text))
    talk.call(tool.name, arguments)
    talk.tool_result(*result(talk.values, tool))
    texts = [p for p in tool.params if p.type == "s" and p.name in arguments]
    if texts and rng.random() < 0.12:
        param = texts[0]
        value = drawn(param, talk.values).text
        talk.user(
            rng.choice(("And {}?", "What about {}?", "And what about {}?", "The same for {}.", "Now {}.")).format(value)
        )
        talk.call(tool.name, {**arguments, param.name: value})
        talk.tool_result(*result(talk.values, tool))


def result(values: Values, tool: Tool) -> tuple[str, str]:
    """What a tool returns, and the answer that puts it into words."""
    rng, roll = values.rng, values.rng.random()
    if roll < 0.07:
        reason = rng.choice(
            (
                "not found",
                "timeout",
                "permission denied",
                f"unknown {values.noun()}",
                f"no such {values.noun()}",
                "bad request",
            )
        )
        return json.dumps({"error": reason}), f"That did not work: {reason}."
    if roll < 0.14:
        text = values.text(rng.choice(("sentence", "phrase", "topic")))
        return text, f"The tool says: {text}."
    if roll < 0.19:
        items = [values.text(rng.choice(("person", "title", "city", "label"))) for _ in range(rng.choice((0, 1, 2, 3)))]
        body = json.dumps({rng.choice(("results", "items", f"{values.noun()}s")): items}, ensure_ascii=False)
        return body, f"I found {_listed(items)}."
    pairs = list(tool.returns) if roll < 0.75 else []
    if not pairs or rng.random() < 0.15:
        pairs.append(
            (
                values.noun() if rng.random() < 0.7 else f"{values.noun()}_{values.noun()}",
                rng.choice("int word adjective float phrase city".split()),
            )
        )
    data = {key: values.draw(kind).data for key, kind in pairs}
    if rng.random() < 0.1:
        data = {"status": "ok", **data}
    answer = ["Done."] if data.pop("status", None) == "ok" else []
    body = {"status": "ok", **data} if answer else data
    if not data and rng.random() < 0.5:
        return rng.choice(('{"success": true}', "ok", "done", '{"result": "ok"}', "success", "true")), "Done."
    if data:
        said = " and ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in data.items())
        answer.append(said[0].upper() + said[1:] + ".")
    dumped = json.dumps(body, ensure_ascii=False, separators=(",", ":") if rng.random() < 0.1 else None)
    return dumped, " ".join(answer)


def _listed(items: list[str]) -> str:
    if not items:
        return "nothing"
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def no_tool(talk: Talk, tools: list[Tool]) -> None:
    """A request that clearly belongs to a tool that is not on offer."""
    domains = {tool.domain for tool in tools}
    other = talk.rng.choice([t for t in realistic(False) if t.domain not in domains and len(t.params) > 0])
    text, _ = other.request(talk.values)
    talk.turn(ask(talk.rng, text), NO_TOOL)


def tool_talk(talk: Talk, between: Callable[[Talk], None], *, real: float = 0.75) -> None:
    """Some requests over one to four tools: each by itself, or one after the other with results and other talk."""
    rng = talk.rng
    tools = offered(talk.values, rng.choices((1, 2, 3, 4), (18, 30, 49, 3))[0], real=real)
    talk.tools = [tool.schema(talk.values) for tool in tools]
    if rng.random() < 0.6:
        talk.separate = True
        for _ in range(rng.randint(4, 8)):
            tool = rng.choice(tools)
            text, arguments = tool.request(talk.values)
            talk.user(ask(rng, text))
            talk.call(tool.name, arguments)
        return
    for _ in range(rng.choice((1, 2, 3, 3, 4, 5))):
        roll = rng.random()
        if roll < 0.1:
            between(talk)
        elif roll < 0.13 and all("-" not in tool.domain for tool in tools):
            no_tool(talk, tools)
        else:
            one_call(talk, rng.choice(tools))
        if rng.random() < 0.06:
            talk.turn(rng.choice(("Thanks", "Thank you", "Thanks!", "Thank you very much!")), "You are welcome.")
    if rng.random() < 0.05:
        names = [tool["function"]["name"] for tool in talk.tools]
        asked = rng.choice(
            ("Which tools do you have?", "What tools can you use?", "List your tools.", "Which functions can you call?")
        )
        talk.turn(question(rng, asked), f"I can call {_listed(names)}.")
