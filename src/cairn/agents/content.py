"""What turns hold: messages, tokens, answers. Of turns that have ended the log has it; see `archive.py`.

The tokens of a context are put together when they are asked for, from what each turn on its branch added.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cairn.agents.records import EndRecord, TokensRecord, TurnRecord, pack, unpack


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
        """Of the answer; to be read only."""
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

    def follow(self, prompt: list[int]) -> None:
        """Put what of the answer the next turn's context holds behind the prompt."""
        end = self.ended
        if end is not None and end.keep >= 0:
            prompt += self.tokens[: end.keep]
            prompt += unpack(end.more)

    def context(self, prompt: list[int]) -> list[int] | None:
        """What the next turn's begins with, behind the prompt of this one; None where that cannot be told exactly."""
        if self.ended is None or self.ended.keep < 0 or digest(prompt) != self.began.digest:
            return None  # damage may have cost a turn before this one
        ids = prompt[:]
        self.follow(ids)
        return ids

    def known(self, prompt: list[int]) -> list[int]:
        """The same, or what comes nearest to it."""
        return self.context(prompt) or [*prompt, *self.tokens]


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
        """Of the turn that the branch ends with."""
        return self.contents[-1]

    def prompt(self) -> list[int]:
        """The ids that the last turn answered."""
        start = max(at for at, one in enumerate(self.contents) if not one.began.prefix)
        ids: list[int] = []
        for content in self.contents[start:]:
            del ids[content.began.prefix :]
            ids += unpack(content.began.ids)
            if content is not self.last:
                content.follow(ids)
        return ids

    def prompts(self) -> Iterator[tuple[Content, list[int]]]:
        """Every turn with the ids that it answered, in one pass: the list is the same one all along, and grows on."""
        ids: list[int] = []
        for content in self.contents:
            del ids[content.began.prefix :]
            ids += unpack(content.began.ids)
            yield content, ids
            content.follow(ids)

    def context(self) -> list[int] | None:
        """The ids that the next turn begins with; None where the answer cannot be put behind its prompt exactly."""
        return self.last.context(self.prompt())

    def known(self) -> list[int]:
        """The context, or what comes nearest to it."""
        return self.last.known(self.prompt())

    def contexts(self, identity: bytes) -> Iterator[tuple[int, list[int]]]:
        """Of one model: the contexts along the branch that no later one extends, each with its turn's place here."""
        for at, (one, prompt) in enumerate(self.prompts()):
            after = self.contents[at + 1].began if one is not self.last else None
            extended = after is not None and after.prefix and after.identity == identity
            if one.began.number and one.began.identity == identity and not extended:
                yield at, one.known(prompt)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to here."""
        messages: list[dict[str, Any]] = []
        for content in self.contents:
            messages += content.began.messages
            if content.began.number:
                messages.append(content.answer or {"role": "assistant", "content": ""})
        return messages


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
