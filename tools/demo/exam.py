"""What the demo model is asked when it is scored: names, numbers, tools and wordings that training never uses."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import chat, facts, recall, toolchat
from .about import TOPICS
from .dialogue import AS_IS, Message, Talk, ask
from .toolbox import Tool, realistic, synthetic
from .values import Values

TOOLS = Path(__file__).parent.with_name("demo_realistic_tools.json")
PRACTICE = TOOLS.with_name("demo_practice_tools.json"), TOOLS.with_name("demo_practice_tools_2.json")
"""Written by hand as well, apart from the training text; what training is decided by, so that `TOOLS` need not be."""

# Wordings written for the evaluation alone: statement, question, kind of value.
FRESH = (
    ("Allow me to introduce myself: {} is my name.", "Could you repeat my name?", "person"),
    ("{} here, hello.", "Who is talking to you?", "person"),
    ("You're speaking with {}.", "By what name do you know me?", "person"),
    ("I've been staying in {} for years.", "In what place have I been staying?", "city"),
    ("At the moment I'm in {}.", "Which town was it that I mentioned?", "city"),
    ("I was born in {}.", "Where was I born?", "city"),
    ("Write this number down: {}.", "Which number should you have written down?", "code"),
    ("My badge has the number {} on it.", "What number does my badge have?", "code"),
    ("Our flat has the number {}.", "What's the number of our flat?", "code"),
)


@dataclass(slots=True)
class Answer:
    """What a model said: visible text, tool calls as (name, arguments), and whether it stopped by itself."""

    text: str
    calls: list[tuple[str, Any]]
    stopped: bool


@dataclass(slots=True)
class Item:
    """A conversation that ends with a user's turn, and the test that its answer must pass."""

    messages: list[Message]
    passes: Callable[[Answer], bool]
    tools: list[dict[str, Any]] = field(default_factory=list)
    wanted: str = ""


def _contains(value: str) -> Callable[[Answer], bool]:
    return lambda answer: value in answer.text


def _calls(name: str, arguments: dict[str, Any]) -> Callable[[Answer], bool]:
    return lambda answer: answer.calls == [(name, arguments)]


def recall_items(rng: random.Random, count: int) -> Iterator[Item]:
    """Names, cities and numbers, told one to three turns before they are asked for."""
    for index in range(count):
        talk = Talk(Values(rng, evaluation=True))
        wanted = facts.FACTS[index % 3]
        other = rng.choice([fact for fact in facts.FACTS[:3] if fact is not wanted])
        told = recall.tell(talk, [wanted, other] if rng.random() < 0.5 else [wanted])
        for _ in range(rng.randrange(0, 3)):
            chat.between(talk)
        talk.user(rng.choice(wanted.questions))
        yield Item(talk.messages, _contains(told[0][1]), wanted=told[0][1])


def fresh_items(rng: random.Random, count: int) -> Iterator[Item]:
    """The same in wordings of the evaluation's own."""
    for index in range(count):
        statement, asked, kind = FRESH[index % len(FRESH)]
        talk = Talk(Values(rng, evaluation=True))
        value = talk.values.text(kind)
        talk.turn(statement.format(value), "Noted.")
        for _ in range(rng.randrange(0, 3)):
            chat.between(talk)
        talk.user(asked)
        yield Item(talk.messages, _contains(value), wanted=value)


def tool_items(rng: random.Random, count: int, offer: Callable[[Values, int], list[Tool]]) -> Iterator[Item]:
    """A request with one, two or three tools on offer, in equal parts."""
    for index in range(count):
        values = Values(rng, evaluation=True)
        tools = offer(values, 1 + index % 3)
        tool = rng.choice(tools)
        text, arguments = tool.request(values)
        schemas = [tool.schema(values) for tool in tools]
        messages = [{"role": "user", "content": ask(rng, text).removeprefix(AS_IS)}]
        yield Item(messages, _calls(tool.name, arguments), schemas, f"{tool.name} {arguments}")


def made_tools(values: Values, count: int) -> list[Tool]:
    """Made-up tools over nouns that training never used."""
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        tool = synthetic(values)
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def catalogue_tools(values: Values, count: int) -> list[Tool]:
    """The catalogue's tools that training leaves out."""
    return values.rng.sample(realistic(True), count)


def realistic_items(path: Path = TOOLS) -> Iterator[Item]:
    """The hand-written cases of a file."""
    data = json.loads(path.read_text("utf-8"))
    for case in data["cases"]:
        messages = [{"role": "user", "content": case["user"]}]
        tools = [data["tools"][name] for name in case["offer"]]
        passes = _calls(case["name"], case["arguments"])
        yield Item(messages, passes, tools, f"{case['name']} {case['arguments']}")


def about_items() -> Iterator[Item]:
    """Questions about Cairn in the wordings held out; an answer needs one of the topic's keywords."""
    for topic in TOPICS:
        for asked in topic.held_out:
            yield Item([{"role": "user", "content": asked}], _any_of(topic.keywords), wanted="|".join(topic.keywords))


def _any_of(keywords: tuple[str, ...]) -> Callable[[Answer], bool]:
    return lambda answer: any(word in answer.text.lower() for word in keywords)


def sum_items(rng: random.Random, count: int) -> Iterator[Item]:
    """Small sums."""
    for _ in range(count):
        asked, answer = chat.one_sum(Talk(Values(rng, evaluation=True)))
        result = answer.rsplit("= ", 1)[1]
        yield Item(
            [{"role": "user", "content": asked}], lambda got, r=result: got.text.endswith(f" {r}"), wanted=answer
        )


def untold_items(rng: random.Random, count: int) -> Iterator[Item]:
    """Something that was never told is asked for."""
    for _ in range(count):
        talk = Talk(Values(rng, evaluation=True))
        hidden, shown = rng.sample(facts.FACTS, 2)
        recall.tell(talk, [shown])
        talk.user(rng.choice(hidden.questions))
        yield Item(talk.messages, _contains("not told me"), wanted=recall.UNTOLD)


def result_items(rng: random.Random, count: int) -> Iterator[Item]:
    """A tool has answered; the model has to say what it returned."""
    for _ in range(count):
        values = Values(rng, evaluation=True)
        talk = Talk(values)
        tools = made_tools(values, 2)
        toolchat.one_call(talk, tools[0])
        said = talk.messages[3]["content"]
        schemas = [tool.schema(values) for tool in tools]
        yield Item(talk.messages[:3], lambda got, said=said: got.text == said, schemas, said)
