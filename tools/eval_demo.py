"""Score the demo model on names, numbers, tools and wordings that its training never saw.

``python tools/eval_demo.py src/cairn/demo`` asks greedily through Cairn; ``--backend torch`` asks the network that was
trained. It prints a table and ends with status 1 when a figure is below its target. Rows without a target inform.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from demo import chat, recall, toolchat
from demo.about import TOPICS
from demo.dialogue import Message, Talk, ask
from demo.toolbox import Tool, realistic, synthetic
from demo.values import Values
from rich.console import Console
from rich.progress import track
from rich.table import Table

TOOLS = Path(__file__).with_name("demo_realistic_tools.json")
LIMIT = 160

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


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table; a target of zero only informs."""

    name: str
    target: float
    items: list[Item]


class Backend(Protocol):
    """Something that answers greedily."""

    def answer(self, item: Item) -> Answer:
        """The reply to a conversation."""
        ...


class TorchBackend:
    """The training network, one conversation at a time."""

    def __init__(self, folder: Path) -> None:
        import torch
        from demo.batches import Renderer
        from demo.network import Network, Shape, generate
        from demo.tokenizer import TURN_END
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        config = json.loads((folder / "config.json").read_text("utf-8"))
        self._network = Network(Shape(**{name: config[name] for name in Shape.__slots__}))  # type: ignore[attr-defined]
        weights = load_file(folder / "model.safetensors")
        self._network.load_state_dict({name.removeprefix("model."): t.float() for name, t in weights.items()})
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._render, self._generate = Renderer(), generate
        self._end = self._tokenizer.token_to_id(TURN_END)
        torch.set_num_threads(1)

    def answer(self, item: Item) -> Answer:
        """Render, generate, split off the tool calls."""
        prompt = self._tokenizer.encode(self._render(item.messages, item.tools, prompt=True)).ids
        ids = self._generate(self._network, prompt, self._end, LIMIT)
        stopped = bool(ids) and ids[-1] == self._end
        text, *calls = self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False).split("<tool_call>")
        return Answer(text.strip(), [_parse_call(call) for call in calls], stopped)


def _parse_call(text: str) -> tuple[str, Any]:
    """A call as (name, arguments); a malformed one has an empty name."""
    body, closed, _ = text.partition("</tool_call>")
    try:
        call = json.loads(body)
        return (call["name"], call["arguments"]) if closed else ("", None)
    except (ValueError, KeyError, TypeError):
        return "", None


class CairnBackend:
    """The model as Cairn serves it."""

    def __init__(self, folder: Path) -> None:
        from cairn import LLM

        self._llm = LLM(str(folder))

    def answer(self, item: Item) -> Answer:
        """Ask through the Python API."""
        reply = self._llm.chat(item.messages, tools=item.tools or None, temperature=0.0, max_tokens=LIMIT)
        calls = [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        return Answer(reply.text, calls, str(reply.finish_reason) != "length")


def _contains(value: str) -> Callable[[Answer], bool]:
    return lambda answer: value in answer.text


def _calls(name: str, arguments: dict[str, Any]) -> Callable[[Answer], bool]:
    return lambda answer: answer.calls == [(name, arguments)]


def recall_items(rng: random.Random, count: int) -> Iterator[Item]:
    """Names, cities and numbers, told one to three turns before they are asked for."""
    for index in range(count):
        talk = Talk(Values(rng, evaluation=True))
        wanted = recall.FACTS[index % 3]
        other = rng.choice([fact for fact in recall.FACTS[:3] if fact is not wanted])
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
        messages = [{"role": "user", "content": ask(rng, text)}]
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


def realistic_items() -> Iterator[Item]:
    """The hand-written cases."""
    data = json.loads(TOOLS.read_text("utf-8"))
    for case in data["cases"]:
        messages = [{"role": "user", "content": case["user"]}]
        tools = [data["tools"][name] for name in case["offer"]]
        passes = _calls(case["name"], case["arguments"])
        yield Item(messages, passes, tools, f"{case['name']} {case['arguments']}")


def about_items() -> Iterator[Item]:
    """Questions about Cairn in the wordings held out; an answer needs one of the topic's keywords."""
    for topic in TOPICS:
        for asked in topic.held_out:
            words = topic.keywords
            passes: Callable[[Answer], bool] = lambda answer, words=words: any(w in answer.text.lower() for w in words)
            yield Item([{"role": "user", "content": asked}], passes, wanted="|".join(words))


def sum_items(rng: random.Random, count: int) -> Iterator[Item]:
    """Small sums."""
    for _ in range(count):
        asked, answer = chat.one_sum(Talk(Values(rng, evaluation=True)))
        result = answer.rsplit("= ", 1)[1]
        yield Item([{"role": "user", "content": asked}], lambda got, r=result: got.text.endswith(f" {r}"), wanted=answer)


def untold_items(rng: random.Random, count: int) -> Iterator[Item]:
    """Something that was never told is asked for."""
    for _ in range(count):
        talk = Talk(Values(rng, evaluation=True))
        hidden, shown = rng.sample(recall.FACTS, 2)
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


def figures(count: int, seed: int) -> list[Figure]:
    """Every row of the table."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    return [
        Figure("recall of names, cities and numbers", 95, list(recall_items(rng("recall"), count))),
        Figure("tool calls, generated tools (1-3 offered)", 90, list(tool_items(rng("tools"), count, made_tools))),
        Figure("tool calls, 40 hand-written tools", 75, list(realistic_items())),
        Figure("questions about Cairn, unseen wordings", 75, list(about_items())),
        Figure("recall, wordings of the evaluation's own", 0, list(fresh_items(rng("fresh"), 90))),
        Figure("tool calls, held-out tools of the catalogue", 0, list(tool_items(rng("cat"), 120, catalogue_tools))),
        Figure("answers after a tool result", 0, list(result_items(rng("result"), 60))),
        Figure("small sums", 0, list(sum_items(rng("sums"), 60))),
        Figure("says what it was not told", 0, list(untold_items(rng("untold"), 60))),
    ]


def main() -> int:
    """Score and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--backend", choices=("cairn", "torch"), default="cairn", help="what answers (default cairn)")
    parser.add_argument("--items", type=int, default=240, help="items in each generated set (default 240)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the generated sets (default 7)")
    parser.add_argument("--failures", action="store_true", help="print what went wrong")
    arguments = parser.parse_args()
    backend: Backend = TorchBackend(arguments.model) if arguments.backend == "torch" else CairnBackend(arguments.model)
    console, notes = Console(), Console(stderr=True)
    table = Table("figure", "right", "of", "score", "target", "")
    missed, answers, stopped = False, 0, 0
    for figure in figures(arguments.items, arguments.seed):
        right = 0
        for item in track(figure.items, figure.name, console=notes, transient=True):
            answer = backend.answer(item)
            good = item.passes(answer)
            right, answers, stopped = right + good, answers + 1, stopped + answer.stopped
            if not good and arguments.failures:
                _show(figure, item, answer)
        missed |= _row(table, figure.name, right, len(figure.items), figure.target)
    missed |= _row(table, "stops by itself (all of the above)", stopped, answers, 95)
    console.print(table)
    return int(missed)


def _row(table: Table, name: str, right: int, count: int, target: float) -> bool:
    score = 100 * right / count
    missed = score < target
    table.add_row(name, str(right), str(count), f"{score:.1f} %", f"{target:g} %" if target else "", "missed" if missed else "")
    return missed


def _show(figure: Figure, item: Item, answer: Answer) -> None:
    said = answer.calls or answer.text
    names = [tool["function"]["name"] for tool in item.tools]
    print(f"[{figure.name}] {names or ''} {item.messages[-1]['content']}\n  wanted {item.wanted}\n  said   {said}")


if __name__ == "__main__":
    sys.exit(main())
