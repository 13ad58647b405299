"""Score the demo model on names, numbers, tools and wordings that its training never saw.

``python tools/eval_demo.py src/cairn/demo`` asks greedily through Cairn; ``--backend torch`` asks the network that was
trained. It prints a table and ends with status 1 when a figure is below its target. Rows without a target inform.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track
from rich.table import Table

from demo import exam
from demo.exam import Answer, Item

LIMIT = 160


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
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        from demo.batches import Renderer
        from demo.network import Network, Shape, generate
        from demo.tokenizer import TURN_END

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
        said = self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
        text, *calls = said.split("<tool_call>")
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
        reply = self._llm.chat(item.messages, item.tools or None, temperature=0.0, max_tokens=LIMIT)
        calls = [_call(call.name, call.arguments) for call in reply.tool_calls]
        return Answer(reply.text, calls, reply.finish_reason is not None and reply.finish_reason.value != "length")


def _call(name: str, arguments: str) -> tuple[str, Any]:
    try:
        return name, json.loads(arguments)
    except ValueError:
        return "", None


def figures(count: int, seed: int) -> list[Figure]:
    """Every row of the table."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    made = exam.tool_items(rng("tools"), count, exam.made_tools)
    held_out = exam.tool_items(rng("catalogue"), 120, exam.catalogue_tools)
    return [
        Figure("recall of names, cities and numbers", 95, list(exam.recall_items(rng("recall"), count))),
        Figure("tool calls, generated tools (1-3 offered)", 90, list(made)),
        Figure("tool calls, 40 hand-written tools", 75, list(exam.realistic_items())),
        Figure("questions about Cairn, unseen wordings", 75, list(exam.about_items())),
        Figure("tool calls, 118 tools that decide about training", 0, list(exam.realistic_items(exam.PRACTICE[0]))),
        Figure("tool calls, 100 more that do", 0, list(exam.realistic_items(exam.PRACTICE[1]))),
        Figure("recall, wordings of the evaluation's own", 0, list(exam.fresh_items(rng("fresh"), 90))),
        Figure("tool calls, held-out tools of the catalogue", 0, list(held_out)),
        Figure("answers after a tool result", 0, list(exam.result_items(rng("result"), 60))),
        Figure("small sums", 0, list(exam.sum_items(rng("sums"), 60))),
        Figure("says what it was not told", 0, list(exam.untold_items(rng("untold"), 60))),
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
    table.add_row(
        name, str(right), str(count), f"{score:.1f} %", f"{target:g} %" if target else "", "missed" if missed else ""
    )
    return missed


def _show(figure: Figure, item: Item, answer: Answer) -> None:
    said = answer.calls or answer.text
    names = [tool["function"]["name"] for tool in item.tools]
    print(f"[{figure.name}] {names or ''} {item.messages[-1]['content']}\n  wanted {item.wanted}\n  said   {said}")


if __name__ == "__main__":
    sys.exit(main())
