"""What turns hold: messages, tokens, answers. Of turns that have ended the log has it; see `archive.py`.

The tokens of a context are put together when they are asked for, from what each turn on its branch added.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cairn.agents.log.records import EndRecord, TokensRecord, TurnRecord, pack, unpack


class Content:
    """What came in with one turn, and what was answered so far."""

    __slots__ = ("_growing", "answer", "began", "ended", "lost")

    def __init__(self, began: TurnRecord) -> None:
        self.began = began
        self.answer: dict[str, Any] | None = None
        self.ended: EndRecord | None = None
        self.lost = False
        """The turn has an end, and it cannot be read."""
        self._growing: array[int] | None = array("I")
        """Tokens of an answer without an end, or one that goes on; else its end has them."""

    @property
    def tokens(self) -> array[int]:
        """Ids of the answer's tokens; only to be read."""
        if self._growing is not None:
            return self._growing
        return unpack(self.ended.ids) if self.ended is not None else array("I")

    @property
    def last(self) -> float:
        """When it was last used, in seconds since 1970."""
        return self.began.began if self.ended is None else self.ended.ended

    @property
    def size(self) -> int:
        """How many tokens the context has after this turn."""
        if not self.began.number:
            return 0
        end = self.ended
        added = len(self.tokens) if end is None or end.keep < 0 else end.keep + len(end.more) // 4
        return self.began.prefix + len(self.began.ids) // 4 + added

    def extend(self, tokens: Iterable[int]) -> None:
        """The answer goes on."""
        if self._growing is None:
            self._growing = self.tokens
        self._growing.extend(tokens)

    def piece(self, record: TokensRecord) -> None:
        """Some tokens of the answer. ValueError, and no change, where they do not follow those that are here."""
        if record.at not in (-1, len(self.tokens)):
            raise ValueError(f"a piece at {record.at} of an answer of {len(self.tokens)} tokens")
        self.extend(unpack(record.ids))
        said = self.answer or {}
        self.answer = _message(
            (said.get("content") or "") + record.text, (said.get("reasoning_content") or "") + record.reasoning
        )
        self.ended = None

    def end(self, record: EndRecord) -> None:
        """The answer is whole, or cut. ValueError, and no change, where it has no whole number of tokens."""
        unpack(record.ids)
        self.answer, self.ended, self._growing = record.message, record, None

    def ask(self, ids: list[int], most: int = sys.maxsize) -> list[int]:
        """Make the prompt of this turn of the context before it, both cut to `most` ids; what is taken away for it."""
        began = self.began
        gone = ids[began.prefix :]
        del ids[began.prefix :]
        ids += unpack(began.ids)[: most - len(ids)]
        return gone

    def follow(self, prompt: list[int], most: int = sys.maxsize) -> None:
        """Put what of the answer the next turn's context holds behind the prompt, up to `most` ids in all."""
        end = self.ended
        if end is not None and end.keep >= 0:
            prompt += self.tokens[: min(end.keep, most - len(prompt))]
            prompt += unpack(end.more)[: most - len(prompt)]

    def context(self, prompt: list[int], most: int = sys.maxsize) -> list[int] | None:
        """What the next turn's begins with, behind the prompt of this one; None where that cannot be told exactly."""
        if self.ended is None or self.ended.keep < 0 or digest(prompt) != self.began.digest:
            return None  # damage may have cost a turn before this one
        ids = prompt[:]
        self.follow(ids, most)
        return ids

    def known(self, prompt: list[int], most: int = sys.maxsize) -> list[int]:
        """The context, or what comes nearest to it; its first `most` ids, and as many of the prompt will do."""
        if len(prompt) >= most:
            return prompt[:most]
        return self.context(prompt, most) or [*prompt, *self.tokens[: most - len(prompt)]]


class Branch:
    """A turn and all before it."""

    def __init__(self, contents: Sequence[Content]) -> None:
        """`contents`: the beginning first."""
        self.contents = contents

    @property
    def beginning(self) -> TurnRecord:
        """What the agent was told before its first turn, and its tools."""
        return self.contents[0].began

    @property
    def last(self) -> Content:
        """The content of the turn that the branch ends with."""
        return self.contents[-1]

    def prompt(self, most: int = sys.maxsize) -> list[int]:
        """The ids that the last turn answered, or the first `most` of them."""
        start = max(at for at, one in enumerate(self.contents) if not one.began.prefix)
        ids: list[int] = []
        for content in self.contents[start:]:
            content.ask(ids, most)
            if content is not self.last:
                content.follow(ids, most)
        return ids

    def prompts(self) -> Iterator[tuple[Content, list[int]]]:
        """Every turn with the ids that it answered, in one pass: the list is the same one all along, and grows on."""
        ids: list[int] = []
        for content in self.contents:
            content.ask(ids)
            yield content, ids
            content.follow(ids)

    def context(self) -> list[int] | None:
        """The ids that the next turn begins with; None where the answer cannot be put behind its prompt exactly."""
        return self.last.context(self.prompt())

    def known(self, most: int = sys.maxsize) -> list[int]:
        """The context, or what comes nearest to it, or the first `most` ids of that."""
        return self.last.known(self.prompt(most), most)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to here."""
        messages: list[dict[str, Any]] = []
        for content in self.contents:
            messages += content.began.messages
            if content.began.number:
                messages.append(content.answer or {"role": "assistant", "content": ""})
        return messages


class _Step:
    """A turn on the way down."""

    __slots__ = ("content", "extended", "gone", "size", "start")

    def __init__(self, content: Content, start: int, size: int, gone: array[int]) -> None:
        """`start`: where its own part of its prompt begins. `size`: of its prompt. `gone`: of the context before it,
        what its prompt does not have."""
        self.content, self.start, self.size, self.gone = content, start, size, gone
        self.extended = False


class Descent:
    """A way down a tree of turns, and up again to go down elsewhere: what branches have in common is put together
    once."""

    def __init__(self, most: int) -> None:
        """`most`: how many ids of a context are told."""
        self._most = most
        self._ids: list[int] = []
        self._steps: list[_Step] = []

    def down(self, content: Content) -> None:
        """Go to a turn that follows the one where this stands."""
        began, before = content.began, len(self._ids)
        if began.prefix and self._steps and self._steps[-1].content.began.identity == began.identity:
            self._steps[-1].extended = True
        gone = array("I", content.ask(self._ids, self._most))  # packed: of each turn it may be all of its context
        self._steps.append(_Step(content, before - len(gone), len(self._ids), gone))
        content.follow(self._ids, self._most)

    def up(self, *, told: bool) -> list[int] | None:
        """Leave a turn for the one before it. If it is to be `told`: its context, unless one of the same model that
        followed it has all of that."""
        step, ids = self._steps.pop(), self._ids
        del ids[step.size :]
        context = step.content.known(ids, self._most) if told and not step.extended else None
        del ids[step.start :]
        ids += step.gone
        return context


def digest(ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids."""
    return hashlib.sha256(pack(ids)).digest()


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids two contexts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _message(content: str, reasoning: str) -> dict[str, Any] | None:
    if not (content or reasoning):
        return None
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
