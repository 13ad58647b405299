"""Contents of turns: messages, token ids and answers. Those of ended turns are in the log; see `archive.py`.

The ids of a context are assembled on request from what each turn on the branch added.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cairn.agents.log.records import EndRecord, TokensRecord, TurnRecord, pack, unpack


class Content:
    """What came in with one turn, and its answer so far."""

    __slots__ = ("_growing", "answer", "began", "ended", "lost")

    def __init__(self, began: TurnRecord) -> None:
        self.began = began
        self.answer: dict[str, Any] | None = None
        self.ended: EndRecord | None = None
        self.lost = False
        """Whether the turn's end cannot be read although there is one."""
        self._growing: array[int] | None = array("I")
        """Ids of an answer that has no end yet or is being continued; None if the end record has them."""

    @property
    def tokens(self) -> array[int]:
        """Ids of the answer; not to be changed."""
        if self._growing is not None:
            return self._growing
        return unpack(self.ended.ids) if self.ended is not None else array("I")

    @property
    def last(self) -> float:
        """When the turn was last used, in seconds since 1970."""
        return self.began.began if self.ended is None else self.ended.ended

    @property
    def size(self) -> int:
        """Tokens of the context after this turn."""
        if not self.began.number:
            return 0
        end = self.ended
        added = len(self.tokens) if end is None or end.keep < 0 else end.keep + len(end.more) // 4
        return self.began.prefix + len(self.began.ids) // 4 + added

    def extend(self, tokens: Iterable[int]) -> None:
        """Append sampled tokens to the answer."""
        if self._growing is None:
            self._growing = self.tokens
        self._growing.extend(tokens)

    def piece(self, record: TokensRecord) -> None:
        """Append a recorded piece of the answer.

        Raise ValueError, and change nothing, if it does not follow the tokens that are here.
        """
        if record.at not in (-1, len(self.tokens)):
            raise ValueError(f"a piece for position {record.at} of an answer with {len(self.tokens)} tokens")
        self.extend(unpack(record.ids))
        answer = self.answer or {}
        self.answer = _message(
            (answer.get("content") or "") + record.text, (answer.get("reasoning_content") or "") + record.reasoning
        )
        self.ended = None

    def end(self, record: EndRecord) -> None:
        """Set the end of the answer, complete or not.

        Raise ValueError, and change nothing, if its ids are not a whole number of tokens.
        """
        unpack(record.ids)
        self.answer, self.ended, self._growing = record.message, record, None

    def to_prompt(self, ids: list[int], most: int = sys.maxsize) -> list[int]:
        """Turn the context before this turn into its prompt, in place; return the ids that were cut off.

        Both are limited to `most` ids.
        """
        began = self.began
        gone = ids[began.prefix :]
        del ids[began.prefix :]
        ids += unpack(began.ids)[: most - len(ids)]
        return gone

    def append_answer(self, prompt: list[int], most: int = sys.maxsize) -> None:
        """Append to the prompt what the next turn's context holds of the answer, up to `most` ids in all."""
        end = self.ended
        if end is not None and end.keep >= 0:
            prompt += self.tokens[: min(end.keep, most - len(prompt))]
            prompt += unpack(end.more)[: most - len(prompt)]

    def context(self, prompt: list[int], most: int = sys.maxsize) -> list[int] | None:
        """Return the ids that the next turn's prompt begins with; None if they are not known exactly.

        `prompt`: the prompt of this turn.
        """
        if self.ended is None or self.ended.keep < 0 or digest(prompt) != self.began.digest:
            return None  # damage may have lost a turn before this one
        ids = prompt[:]
        self.append_answer(ids, most)
        return ids

    def known(self, prompt: list[int], most: int = sys.maxsize) -> list[int]:
        """Return the first `most` ids of the context, or of the nearest to it that is known.

        Of `prompt`, the first `most` ids are enough.
        """
        if len(prompt) >= most:
            return prompt[:most]
        return self.context(prompt, most) or [*prompt, *self.tokens[: most - len(prompt)]]


class Branch:
    """A turn and all turns before it."""

    def __init__(self, contents: Sequence[Content]) -> None:
        """Create a branch from its contents, the beginning first."""
        self.contents = contents

    @property
    def beginning(self) -> TurnRecord:
        """The messages before the agent's first turn, and its tools."""
        return self.contents[0].began

    @property
    def last(self) -> Content:
        """Content of the last turn."""
        return self.contents[-1]

    def prompt(self, most: int = sys.maxsize) -> list[int]:
        """Return the prompt of the last turn, or its first `most` ids."""
        start = max(at for at, one in enumerate(self.contents) if not one.began.prefix)
        ids: list[int] = []
        for content in self.contents[start:]:
            content.to_prompt(ids, most)
            if content is not self.last:
                content.append_answer(ids, most)
        return ids

    def prompts(self) -> Iterator[tuple[Content, list[int]]]:
        """Yield every turn with its prompt, in one pass. The list is always the same object, and grows."""
        ids: list[int] = []
        for content in self.contents:
            content.to_prompt(ids)
            yield content, ids
            content.append_answer(ids)

    def context(self) -> list[int] | None:
        """Return the ids that the next turn begins with; None if they are not known exactly."""
        return self.last.context(self.prompt())

    def known(self, most: int = sys.maxsize) -> list[int]:
        """Return the first `most` ids of the context, or of the nearest to it that is known."""
        return self.last.known(self.prompt(most), most)

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation up to the last turn."""
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
        """Record a step.

        `start`: where the turn's own part of its prompt begins. `size`: length of its prompt. `gone`: ids of the
        context before it that its prompt does not have.
        """
        self.content, self.start, self.size, self.gone = content, start, size, gone
        self.extended = False


class Descent:
    """A walk down a tree of turns and up again, which assembles what branches share only once."""

    def __init__(self, most: int) -> None:
        """Create a walk. `most`: limit on the ids of a context."""
        self._most = most
        self._ids: list[int] = []
        self._steps: list[_Step] = []

    def down(self, content: Content) -> None:
        """Go to a turn that follows the current one."""
        began, before = content.began, len(self._ids)
        if began.prefix and self._steps and self._steps[-1].content.began.identity == began.identity:
            self._steps[-1].extended = True
        gone = array("I", content.to_prompt(self._ids, self._most))  # compact: it may be the whole context of each turn
        self._steps.append(_Step(content, before - len(gone), len(self._ids), gone))
        content.append_answer(self._ids, self._most)

    def up(self, *, wanted: bool) -> list[int] | None:
        """Leave the current turn for the one before it.

        Return its context if `wanted`, unless a later turn of the same model contains all of it; else None.
        """
        step, ids = self._steps.pop(), self._ids
        del ids[step.size :]
        context = step.content.known(ids, self._most) if wanted and not step.extended else None
        del ids[step.start :]
        ids += step.gone
        return context


def digest(ids: Sequence[int]) -> bytes:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(pack(ids)).digest()


def _message(content: str, reasoning: str) -> dict[str, Any] | None:
    if not (content or reasoning):
        return None
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
