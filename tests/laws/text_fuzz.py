"""The text fuzz: random answers of a model, and chats over several turns, each from one seed.

An answer is a script of reasoning, content, tool calls and look-alikes, spelt in tokens that no encoder would choose.
What a client must see of it follows from the script alone, however the stream is cut. A chat is several such answers,
with users who type control tokens and clients that edit; its prompts must begin with the very ids of the turn before,
unless the client changed something.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cairn.config.config import Config
from cairn.text.chat.prompt import Chat
from cairn.text.chat.replay import visible_ids
from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import Delta, FinishReason
from cairn.types.request import OutputFormat, Request, SamplingParams
from tests.laws.simulator import law
from tests.text import text_models

BOTH = OutputFormat(reasoning=True, tools=True)
WORDS = [
    "a",
    "b",
    "END",
    "EN",
    "D",
    " ",
    "é",
    "你",
    "😀",
    ".",
    "<",
    "</",
    "<tool",
    "<thin",
    "{",
    '"',
    "\\",
    "fox",
    "\n",
]
FAKES = ["<tool_call>{bad}</tool_call>", '<tool_call>{"name": 1}', "</tool_call>", "<tool_call>[]", "</think>"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def folder(kind: str) -> Path:
    """Return a model folder whose tags are plain text, added tokens or special tokens."""
    data = json.loads(text_models.byte_level())
    tags = [one for one in data["added_tokens"] if one["content"].strip("</>") in ("think", "tool_call")]
    if kind == "plain":
        data["added_tokens"] = [one for one in data["added_tokens"] if one["special"]]
    for tag in tags:
        tag["special"] = kind == "special"
    path = Path(tempfile.mkdtemp(prefix="cairn-fuzz-"))
    return text_models.write_model(path, json.dumps(data), text_models.QWEN_CONFIG, text_models.QWEN_TEMPLATE)


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return the tokenizer of such a folder."""
    return Tokenizer.load(folder(kind))


def words(chance: random.Random, most: int) -> str:
    """Return text full of things that could be mistaken for markup, without newlines at its ends."""
    text = "".join(chance.choice(WORDS) for _ in range(chance.randint(1, most)))
    return text.strip("\n") or "x"


@dataclass
class Script:
    """An answer, and what a client must see of it."""

    said: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def think(self, chance: random.Random) -> None:
        """Add reasoning; a fake call in it is reasoning too."""
        text = words(chance, 8) + chance.choice(["", "<tool_call>", FAKES[0]]) + words(chance, 3)
        self.said += f"<think>\n{text}\n</think>\n\n"
        self.reasoning += text

    def talk(self, chance: random.Random) -> None:
        """Add content, perhaps with something that looks like a call."""
        text = words(chance, 12)
        if chance.random() < 0.3:
            text += chance.choice(FAKES) + " " + words(chance, 4)
        self.said += text
        self.content += text

    def call(self, chance: random.Random) -> None:
        """Add a tool call, its JSON written in a random style."""
        objects = [self._object(chance) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
        text = chance.choice(["", "\n"]).join(objects)
        self.said += f"\n<tool_call>\n{text}\n</tool_call>\n"

    def _object(self, chance: random.Random) -> str:
        """Return one call without tags, perhaps with keys that are skipped."""
        name = chance.choice(["f", "get_weather", "é", "\ud800"])
        arguments = {words(chance, 3): value(chance, 3) for _ in range(chance.randint(0, 3))}
        encoded = json.dumps(arguments) if chance.random() < 0.1 else arguments
        call = {"name": name, "arguments": encoded} if chance.random() < 0.8 else {"arguments": encoded, "name": name}
        if chance.random() < 0.2:
            call |= {"id": 1} if chance.random() < 0.5 else {words(chance, 2) + "+": value(chance, 2)}
        self.calls.append((name.replace("\ud800", "\ufffd"), arguments))
        escaped = name == "\ud800" or chance.random() < 0.5
        text = json.dumps(call, ensure_ascii=escaped, indent=chance.choice([None, None, 1]))
        return mistyped(chance, text) if chance.random() < 0.3 else text


def mistyped(chance: random.Random, text: str) -> str:
    """Return a JSON object as a model may mistype it, with only one possible meaning."""
    end = text.rindex("}")
    return chance.choice(
        [
            text[:end] + "," + text[end:],
            text + "}",
            text.replace("\\n", "\n") if "\\\\n" not in text else text,
            text.replace(": true", ": True").replace(": null", ": None") if '\\"' not in text else text,
        ]
    )


def value(chance: random.Random, depth: int) -> Any:
    """Return a random JSON value."""
    if depth and chance.random() < 0.4:
        if chance.random() < 0.5:
            return [value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
        return {words(chance, 2): value(chance, depth - 1) for _ in range(chance.randint(0, 2))}
    return chance.choice([None, True, 0, -1.5e-7, 10**20, words(chance, 6), "</tool_call>", "<think>"])


def script(chance: random.Random) -> Script:
    """Return a script of reasoning, then content, then calls; each may be missing."""
    made = Script()
    if chance.random() < 0.5:
        made.think(chance)
    if chance.random() < 0.8:
        made.talk(chance)
    for _ in range(chance.choice([0, 0, 1, 2])):
        made.call(chance)
    if not made.said:
        made.talk(chance)
    return made


def spell(chance: random.Random, words: Tokenizer, text: str) -> list[int]:
    """Return tokens for a text that no encoder would choose; tags are single tokens or letters."""
    tokens: list[int] = []
    at = 0
    while at < len(text):
        if chance.random() < 0.7:
            tag = next((one for one in words.controls.ids if text.startswith(one, at) and "|" not in one), None)
            if tag is not None:
                tokens.append(words.controls.ids[tag])
                at += len(tag)
                continue
        size = chance.randint(1, 5)
        tags = [start for start, _ in words.controls.find(text[at : at + size + 12]) if start > 0]
        size = min([size, *tags])
        tokens += words.encode(text[at : at + size])
        at += size
    return tokens


def cut(text: str, stops: Sequence[str]) -> str | None:
    """Return the text before the stop string that completes first, or None."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


def read(stream: TextStream, tokens: Sequence[int], chance: random.Random, most: int) -> tuple[dict[str, Any], str]:
    """Return the message that a client puts together, and the finish reason."""
    deltas: list[Delta] = []
    at = 0
    while at < len(tokens):
        size = chance.randint(1, most)
        piece = tokens[at : at + size]
        deltas += stream.push(piece)
        at += size
    last, reason = stream.finish(FinishReason.STOP)
    deltas += last
    calls: list[dict[str, Any]] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.id:
            law(piece.index == len(calls), "calls come out of order")
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    law([token for delta in deltas for token in delta.tokens] == stream.tokens, "a token is missing or comes twice")
    law(list(tokens[: len(stream.tokens)]) == stream.tokens, "tokens past a stop are counted")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
    message["reasoning_content"] = "".join(delta.reasoning for delta in deltas)
    message["tool_calls"] = calls
    return message, str(reason)


def answer(seed: int) -> int:
    """Check one answer, cut in several ways; return the number of its tokens."""
    chance = random.Random(seed)
    speech = tokenizer(chance.choice(["plain", "added", "special"]))
    made = script(chance)
    stops = tuple(chance.sample(["END", "D", "foxa", "\n\n", "你", "a a"], chance.choice([0, 0, 1, 3])))
    tokens = [*spell(chance, speech, made.said), *([speech.eos_id or 0] if chance.random() < 0.8 else [])]
    request = Request(id=seed, prompt=(1,), sampling=SamplingParams(max_tokens=9999), stop=stops, output=BOTH)
    visible = cut(made.content, stops)
    for most in (1, 3, len(tokens)):
        stream = TextStream(speech, request)
        message, reason = read(stream, tokens, chance, most)
        law(message["reasoning_content"] == made.reasoning, "reasoning is reasoning")
        law(message["content"] == (made.content if visible is None else visible), "content up to the stop, and no more")
        law(stream.stopped == (visible is not None), "a stop is missed")
        calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
        law(calls == (made.calls if visible is None else []), "a tool call is wrong, or its arguments are no JSON")
        law(reason == ("tool_calls" if calls else "stop"), "the reason fits")
        ids = visible_ids(speech, stream.tokens, message, BOTH)
        if message["content"] or calls:
            law(ids is not None, "a visible answer cannot be put back")
            again = read(
                TextStream(speech, Request(id=seed, prompt=(1,), sampling=request.sampling, output=BOTH)),
                ids or [],
                chance,
                2,
            )
            law(again[0] == message, "an answer that is put back says something else")
            law(
                visible is not None or [*(ids or []), *tokens[len(ids or []) :]] == tokens,
                "a remembered answer differs from the sampled one",
            )
    return len(tokens)


class Chats:
    """Conversations with one model."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    @classmethod
    async def start(cls) -> Chats:
        """Start a chat whose templates are rendered in a process, as in a server."""
        path = folder("added")
        return cls(await Chat.start(path, Config()))

    async def run(self, seed: int) -> int:
        """Run a conversation of several turns; return how many prompts were continued exactly."""
        chance = random.Random(seed)
        words_of = self.chat.tokenizer
        tenant = f"tenant {seed}"
        arguments = chance.choice([{}, {"enable_thinking": False}])
        messages: list[dict[str, Any]] = []
        said: tuple[int, ...] = ()
        exact = 0
        for turn in range(chance.randint(2, 5)):
            role = "tool" if messages and messages[-1].get("tool_calls") else "user"
            typed = words(chance, 6) + "".join(chance.sample(list(words_of.controls.ids), 2)) + words(chance, 3)
            messages.append({"role": role, "content": typed})
            edited = bool(said) and chance.random() < 0.2
            if edited:
                chance.choice(messages[:-1])["content"] += "!"
                for message in messages:  # the template may show such a message differently in the next turn
                    message.pop("reasoning_content", None)
            prompt = await self.chat.prompt(messages, TOOLS, tenant=tenant, template_args=arguments)
            plain = await self.chat.prompt(messages, TOOLS, tenant="a stranger", template_args=arguments)
            law(not edited or prompt.tokens[: len(said)] != said, "an edit was lost")
            if said and not edited:
                law(prompt.tokens[: len(said)] == said, f"turn {turn} does not begin with the ids of the one before")
                exact += 1
            law(
                self._controls(plain.tokens) == await self._controls_of_clean(messages, arguments),
                "typed tags are text",
            )
            made = script(chance)
            if arguments:
                made = Script(made.content + "!", made.content + "!")
            tokens = [*spell(chance, words_of, made.said), words_of.eos_id or 0]
            request = Request(
                id=seed, prompt=prompt.tokens, sampling=SamplingParams(max_tokens=9999), output=prompt.output
            )
            stream = TextStream(words_of, request)
            message, _ = read(stream, tokens, chance, 4)
            self.chat.remember(tenant, prompt.tokens, stream.tokens, message)
            said = (*prompt.tokens, *stream.tokens)
            if not message["content"] and not message["tool_calls"]:
                return exact
            if chance.random() < 0.7:
                del message["reasoning_content"]
            for one in message["tool_calls"]:
                one["function"]["arguments"] = json.dumps(json.loads(one["function"]["arguments"]), indent=2)
            messages.append(message)
        return exact

    def _controls(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self.chat.tokenizer.control_ids]

    async def _controls_of_clean(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
        """Return the control tokens of the same chat with every look-alike removed."""
        text = json.dumps(messages, ensure_ascii=False)
        for tag in self.chat.tokenizer.controls.ids:
            text = text.replace(tag, "y" * len(tag))
        prompt = await self.chat.prompt(json.loads(text), TOOLS, tenant="a stranger", template_args=arguments)
        return self._controls(prompt.tokens)
