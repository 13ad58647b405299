"""From conversations to batches of token ids: rendering, loss masks, rows of like length together."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch import Tensor

from .dialogue import Message, Talk
from .tokenizer import END_OF_TEXT, TURN_END, TURN_START

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
LENGTHS = (96, 160, 224, 288, 352, 416, 480, 576, 704, 832, 1216, 1920)
BATCH_TOKENS = 4096


class Renderer:
    """Turns messages into text as a server would: the sandboxed template, and JSON that keeps its letters."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(TEMPLATE.read_text("utf-8"))

    def __call__(self, messages: list[Message], tools: list[dict[str, Any]], *, prompt: bool = False) -> str:
        """The text of a conversation; with ``prompt`` it ends where the assistant begins."""
        return self._template.render(messages=messages, tools=tools or None, add_generation_prompt=prompt)


@dataclass(slots=True)
class Row:
    """The ids of a conversation; for each, whether the assistant wrote it (its end mark included), and its branch.

    Branch 0 is seen by all that follows, every other only by itself, and begins where branch 0 ended.
    """

    ids: list[int]
    counts: list[bool]
    branches: list[int]


@dataclass(slots=True)
class Batch:
    """Token ids, their branches and positions (rows, length), and which place predicts which token: first those that
    the assistant wrote (`said` of them), then those of the others."""

    ids: Tensor
    branches: Tensor
    positions: Tensor
    places: Tensor
    targets: Tensor
    said: int


class Batches:
    """An endless source of batches; each holds rows of about one length, so little is padding."""

    def __init__(self, talks: Iterator[Talk], tokenizer: Tokenizer, seed: int) -> None:
        self._talks, self._tokenizer, self._render = talks, tokenizer, Renderer()
        self._rows: dict[int, list[Row]] = {length: [] for length in LENGTHS}
        self._random = random.Random(seed)
        self._start = tokenizer.token_to_id(TURN_START)
        self._end = tokenizer.token_to_id(TURN_END)
        self._pad = tokenizer.token_to_id(END_OF_TEXT)
        self._head = tokenizer.encode(f"{TURN_START}assistant\n").ids
        self._asked = tokenizer.encode(f"{TURN_START}user\n").ids

    def row(self, talk: Talk) -> Row:
        """A conversation as ids."""
        ids: list[int] = self._tokenizer.encode(self._render(talk.messages, talk.tools)).ids
        counts = [False] * len(ids)
        head, spot = self._head, 0
        while spot < len(ids):
            if ids[spot] == self._start and ids[spot : spot + len(head)] == head:
                spot += len(head)
                while spot < len(ids):
                    counts[spot] = True
                    if ids[spot] == self._end:
                        break
                    spot += 1
            spot += 1
        asked = [talk.separate and ids[at : at + len(self._asked)] == self._asked for at in range(len(ids))]
        return Row(ids, counts, list(itertools.accumulate(asked, initial=0))[1:])

    def __iter__(self) -> Iterator[Batch]:
        """Fill the buckets until some are ready, then hand those out in random order."""
        ready: list[Batch] = []
        while True:
            while len(ready) < 24:
                row = self.row(next(self._talks))
                length = next((size for size in LENGTHS if len(row.ids) <= size + 1), None)
                if length is None:
                    continue
                bucket = self._rows[length]
                bucket.append(row)
                if len(bucket) == max(1, BATCH_TOKENS // length):
                    ready.append(self._batch(bucket, length))
                    self._rows[length] = []
            yield ready.pop(self._random.randrange(len(ready)))

    def _batch(self, rows: list[Row], length: int) -> Batch:
        inputs = torch.full((len(rows), length), self._pad, dtype=torch.long)
        branches = torch.zeros((len(rows), length), dtype=torch.long)
        positions = torch.arange(length).repeat(len(rows), 1)
        said, others = list[tuple[int, int]](), list[tuple[int, int]]()
        for index, row in enumerate(rows):
            end = len(row.ids) - 1
            inputs[index, :end] = torch.tensor(row.ids[:-1])
            branches[index, :end] = torch.tensor(row.branches[:-1])
            positions[index, :end] = torch.tensor(_positions(row.branches))[:-1]
            for spot in range(1, len(row.ids)):
                if row.branches[spot - 1] in (0, row.branches[spot]):
                    (said if row.counts[spot] else others).append((index * length + spot - 1, row.ids[spot]))
        places, targets = torch.tensor(said + others).T
        return Batch(inputs, branches, positions, places, targets, len(said))


def _positions(branches: list[int]) -> list[int]:
    """Where each token stands when no branch is there but branch 0 and its own."""
    shared, positions = branches.count(0), list[int]()
    for branch, tokens in itertools.groupby(branches):
        begin = shared if branch else 0
        positions += range(begin, begin + len(list(tokens)))
    return positions
