"""Holds the reasoning of an answer to a number of tokens: then the tag that ends it is the only thing that may come.

What comes next is a function of the tokens so far alone, so preemption and a worker's death change nothing, and an
answer that keeps to its budget is the same as one without: nothing is masked before the budget is used up. Reasoning is
told apart as the front does it (`cairn.text.output.output_parser`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

from cairn.scheduler.sequence import Matcher
from cairn.text.grammar.vocabulary import Vocabulary
from cairn.text.output.output_parser import MOST_LEAD
from cairn.text.output.reasoning_formats import thoughts
from cairn.types.request import OutputFormat
from cairn.types.step import Pending, Ready


class BudgetMatcher:
    """`sequence.Matcher` of an answer with a budget, beside the grammar that it may have."""

    def __init__(self, inner: Matcher | None, vocabulary: Vocabulary, budget: int, output: OutputFormat) -> None:
        """`inner` follows the grammar. `budget`: tokens of reasoning, its tags not counted; `output`: how the answer is
        read."""
        form = thoughts(output)
        self._open, self._until = form.open, form.until or form.close
        self._tag = vocabulary.closes[form.name]
        self._inner, self._vocabulary, self._left = inner, vocabulary, budget
        self._state: Literal["before", "within", "closing", "over"] = "within" if output.reasoning_open else "before"
        self._text = ""
        """Before reasoning what the answer begins with; within it what may be the beginning of the tag."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced: Sequence[int] = ()
        """The tokens that are still to come of the tag."""
        self._close()

    @property
    def over(self) -> bool:
        """`Matcher.over`."""
        return self._inner is not None and self._inner.over

    def mask(self) -> Pending[bytes] | None:
        """`Matcher.mask`."""
        if self._state != "closing":
            return None if self._inner is None else self._inner.mask()
        made = bytearray(-(-self._vocabulary.tokenizer.vocab_size // 32) * 4)
        token = self._forced[0]
        made[token >> 3] |= 1 << (token & 7)
        return Ready(bytes(made))

    def forced(self) -> int | None:
        """`Matcher.forced`."""
        if self._state == "closing":
            return self._forced[0]
        return None if self._inner is None else self._inner.forced()

    def consume(self, token: int) -> None:
        """`Matcher.consume`."""
        if self._inner is not None:
            self._inner.consume(token)
        if self._state == "over":
            return
        if self._state == "closing":
            self._forced = self._forced[1:]
            self._state = "closing" if self._forced else "over"
            return
        control = token in self._vocabulary.controls
        text = self._decoder.decode(b"" if control else self._vocabulary.tokenizer.decode_bytes([token]))
        if self._state == "before":
            self._begin(text)
        else:
            self._left -= 1
            self._look(text)
        self._close()

    def _begin(self, text: str) -> None:
        """Find out whether the answer begins with reasoning."""
        self._text += text
        begin = self._text.lstrip()
        if len(self._text) - len(begin) > MOST_LEAD or not _agree(begin, self._open):
            self._state = "over"
        elif begin.startswith(self._open):
            self._state, self._text = "within", ""
            self._look(begin[len(self._open) :])

    def _look(self, text: str) -> None:
        """Find out whether reasoning has ended by itself."""
        self._text += text
        if self._until in self._text:
            self._state = "over"
        self._text = self._text[1 - len(self._until) :]

    def _close(self) -> None:
        """End reasoning where its budget is used up, and not within a character."""
        if self._state == "within" and self._left <= 0 and not self._decoder.getstate()[0]:
            self._state, self._forced = "closing", self._tag


def _agree(one: str, other: str) -> bool:
    """Whether one of two texts begins with the other."""
    return one.startswith(other) or other.startswith(one)
