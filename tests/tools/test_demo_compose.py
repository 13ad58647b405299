"""Composed tools: the tables agree with each other, and what a request says is what its call passes on."""

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from demo import acttable, acttalk, compose, grounded, things  # noqa: E402
from demo.acttable import Act  # noqa: E402
from demo.compose import Composed  # noqa: E402
from demo.dialogue import AS_IS, Talk  # noqa: E402
from demo.grounded import Grounded  # noqa: E402
from demo.toolbox import TYPES, Tool  # noqa: E402
from demo.values import Values  # noqa: E402

ACTS = acttable.acts(False) + acttable.acts(True)
JSON_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.descriptions[0])
def test_an_act_can_be_asked_for(act: Act) -> None:
    """Requests name known slots only, and say whatever cannot be added behind them."""
    values = Values(random.Random(1))
    slots = [role.slot for role, _ in act.roles]
    assert act.requests and len(set(slots)) == len(slots)
    for request in act.requests:
        named = {one or two for one, two in compose.PLACE.findall(request)}
        assert named <= set(slots), f"{named - set(slots)} in {request!r}"
        silent = {role.slot for role, needed in act.roles if needed and not role.ways}
        assert silent <= named, f"{silent - named} missing in {request!r}"
        announced = set(re.findall(r"<(\w+)>", request))
        assert announced <= {role.slot for role, _ in act.roles if role.ways}
    for role, _ in act.roles:
        assert set(role.types) <= set(TYPES)
        for kind in role.kinds if role.types not in ("e", "b") else ():
            things.thing(values, kind)
    for _, kind in act.returns:
        values.draw(kind)


def test_every_listed_thing_can_be_drawn() -> None:
    """No item names a kind that does not exist, and what is passed on stands in what is said, but for currencies."""
    values = Values(random.Random(2))
    for kind, items in things.lists().items():
        for item in items:
            value = things._expanded(values, item)
            assert value.text and isinstance(value.data, str) and value.data
            assert kind == "moneycode" or value.data in value.text, item


def _calls(count: int) -> list[tuple[Values, Composed, str, dict[str, object]]]:
    values = Values(random.Random(3))
    found = []
    for index in range(count):
        act = ACTS[index % len(ACTS)] if index % 3 else compose.random_act(values)
        tool = compose.tool_of(values, act)
        found.append((values, tool, *tool.request(values)))
    return found


def test_calls_fit_their_schemas() -> None:
    """Required arguments are there, none is unknown, and each has the type and one of the values of its schema."""
    for values, tool, text, arguments in _calls(700):
        parameters = tool.schema(values)["function"]["parameters"]
        assert set(parameters.get("required", ())) <= set(arguments) <= set(parameters["properties"]), text
        for name, value in arguments.items():
            entry = parameters["properties"][name]
            assert isinstance(value, JSON_TYPES[entry["type"]]), f"{text}: {name} is {value!r}"
            assert value in entry.get("enum", [value])


def test_words_are_passed_on_as_they_are_said() -> None:
    """Text arguments are copied from the request, places and things without their article, and no slot is left open."""
    for _, tool, text, arguments in _calls(700):
        assert not re.search(r"\{\^?\w+\}|<\w+>", text), text
        assert not any(mark in request for request in tool.requests for mark in "@~")
        kinds = {param.name: param.kind for param in tool.params}
        for name, value in arguments.items():
            if not isinstance(value, str) or kinds[name] == "moneycode" or value.replace(".", "").isdigit():
                continue
            assert value.lower() in text.lower(), f"{text}: {name} is {value!r}"
            own_words = kinds[name] in {*compose.FREE, "reason", "iftrigger", "wkcomplaint"}
            assert own_words or not value.startswith("the "), f"{text}: {name} is {value!r}"


def test_all_that_is_required_is_said_and_nothing_unsaid_is_passed_on() -> None:
    """An optional argument is in some calls and not in others."""
    values = Values(random.Random(4))
    act = next(act for act in ACTS if "Schedule a meeting with someone." in act.descriptions)
    seen = set()
    for _ in range(200):
        tool = compose.tool_of(values, act)
        _, arguments = tool.request(values)
        optional = [p.name for p in tool.params if not p.required]
        seen |= {name in arguments for name in optional}
    assert seen == {True, False}


def test_the_sides_share_no_act() -> None:
    """What is scored as unseen is unseen."""
    train, held = (set(acttable.acts(side)) for side in (False, True))
    assert held and not train & held
    assert len(train) > 10 * len(held)


def test_offered_tools_differ_and_some_are_near() -> None:
    """Names and descriptions tell the offered tools apart, although they may share a verb or a noun."""
    values, near = Values(random.Random(5)), 0
    for _ in range(80):
        tools = acttalk.offer(values, 3)
        assert len({tool.name for tool in tools}) == len({tool.description for tool in tools}) == 3
        words = [tool.act.words for tool in tools if isinstance(tool, Composed) and tool.act]
        near += any(one & two for index, one in enumerate(words) for two in words[:index])
    assert 25 < near < 80


def test_a_talk_calls_only_what_is_offered() -> None:
    """Every call of a conversation is to one of its tools, and no mark of the generator is left in it."""
    for seed in range(80):
        talk = Talk(Values(random.Random(seed)))
        acttalk.act_talk(talk, lambda talk: talk.turn("Hello", "Hello! How can I help?"))
        names = {tool["function"]["name"] for tool in talk.tools}
        for message in talk.messages:
            assert AS_IS not in message["content"]
            assert all(call["function"]["name"] in names for call in message.get("tool_calls", ()))


def _grounded(count: int) -> list[tuple[list[Tool], Grounded, str, dict[str, Any], Values]]:
    values, found = Values(random.Random(6)), []
    while len(found) < count:
        tools = grounded.offer(values, 3)
        for tool in tools:
            if isinstance(tool, Grounded):
                text, arguments = tool.request(values)
                found.append((tools, tool, text.removeprefix(AS_IS), arguments, values))
    return found


def test_grounded_calls_fit_their_schemas_and_are_read_off_the_request() -> None:
    """What a call passes on has the type of its argument and stands in the request, but for switches and numbers."""
    for _, tool, text, arguments, values in _grounded(600):
        parameters = tool.schema(values)["function"]["parameters"]
        assert set(parameters.get("required", ())) <= set(arguments) <= set(parameters["properties"]), text
        for name, value in arguments.items():
            entry = parameters["properties"][name]
            assert isinstance(value, JSON_TYPES[entry["type"]]), f"{text}: {name} is {value!r}"
            assert value in entry.get("enum", [value])
            said = text.lower() if "enum" in entry else text
            assert not isinstance(value, str) or (value.lower() if "enum" in entry else value) in said, (
                f"{text}: {name} is {value!r}"
            )


def test_a_grounded_request_says_which_tool_is_meant() -> None:
    """It says the last word of the noun, or one that no other tool has; and the verb where two tools share the noun."""
    for tools, tool, text, _, _ in _grounded(600):
        said = text.lower()
        nouns = tool.noun, tool.alias, tool.short
        assert any(noun[-1].lower() in said for noun in nouns if noun), text
        twins = [t for t in tools if isinstance(t, Grounded) and t is not tool and set(t.noun) == set(tool.noun)]
        assert tool.by_verb == bool(twins)
        assert not twins or tool.verb.replace("_", " ") in said, text
        others = {word for other in tools if other is not tool for word in grounded._told(other)}
        assert not others & {word.lower() for word in tool.short}
