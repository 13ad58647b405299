"""What follows the grammar of one answer, and the compiled grammar that several answers share."""

from __future__ import annotations

import codecs
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, Literal, Protocol

from cairn.scheduler.sequence import Matcher
from cairn.text.grammar.compile_wire import MOST_BYTES
from cairn.text.grammar.grammar import MASK_SECONDS, SPARE_SECONDS, GrammarError
from cairn.text.grammar.vocabulary import Vocabulary, compile_grammar
from cairn.text.output.output_parser import MOST_LEAD
from cairn.text.output.reasoning_formats import thoughts
from cairn.types.errors import InvalidRequest
from cairn.types.request import Grammar, OutputFormat
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


class Masked(Protocol):
    """What needs a mask."""

    def compute(self) -> bytes:
        """The mask of what may come now. Called by a thread."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    asking: list[Masked] = field(default_factory=list)
    masks: Future[list[bytes]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Later:
    """A mask that is computed beside the step: an `engine.base.Pending`."""

    masks: Future[list[bytes]]
    number: int

    def wait(self) -> bytes:
        """The mask."""
        return self.masks.result()[self.number]


class Masks:
    """One thread asks."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-masks")
        self._lock = threading.Lock()
        self._open: _Batch | None = None

    def ask(self, row: Masked) -> Later:
        """Compute a row's mask. What it goes by may not change until that is there."""
        with self._lock:
            batch = self._open
            if batch is None:
                batch = self._open = _Batch()
                self._pool.submit(self._work, batch)
            batch.asking.append(row)
            return Later(batch.masks, len(batch.asking) - 1)

    def close(self) -> None:
        """Nothing more is computed."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, batch: _Batch) -> None:
        with self._lock:  # who asks from now on is of the next one
            self._open = None
        try:
            batch.masks.set_result([row.compute() for row in batch.asking])
        except BaseException as error:
            batch.masks.set_exception(error)


LEAST_BYTES = 64 << 10
"""What a compiled grammar counts at least."""
MOST_GROWTH = 128 << 20
"""What answers can add to one: its states are limited (`grammar.LIMITS`), and so is the time of making them."""
ALONE_SECONDS = 0.05
"""Within so much processor time a grammar must compile to be compiled again while a step waits."""


class CompiledGrammar:
    """A grammar that several answers of one tenant follow. llguidance shares among them what each finds out of it."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar | None) -> None:
        """Compile a grammar; None makes what has a vocabulary alone. Raises InvalidRequest."""
        self.vocabulary, self.grammar = vocabulary, grammar
        began = thread_time()
        self._matcher = None if grammar is None else self.fresh()
        if self._matcher is not None:
            self._matcher.compute_bitmask()  # what a first mask has to find out is then known to every copy
        self.seconds = thread_time() - began
        """Processor time that compiling took."""
        self.followed = 0
        """Tokens of all the answers that followed it."""
        self.broken = False
        """Whether one of them became too complex, which puts what they share out of action."""
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def size(self) -> int:
        """Bytes that it holds, by what was found out when it was tried."""
        if self.grammar is None:
            return LEAST_BYTES
        return max(LEAST_BYTES, self.grammar.bytes + min(MOST_GROWTH, self.grammar.growth * self.followed))

    @property
    def worn(self) -> bool:
        """Whether the next answer should have another that is compiled anew."""
        return self.broken or self.size > MOST_BYTES

    @property
    def held(self) -> bool:
        """Whether an answer follows it, or is about to."""
        return bool(self._users)

    def fresh(self) -> Any:
        """Return llguidance's matcher of it that shares nothing."""
        assert self.grammar is not None
        try:
            return compile_grammar(self.vocabulary.tokenizer, self.grammar.text)
        except GrammarError as error:
            raise InvalidRequest(f"the grammar cannot be followed: {error}", field="grammar") from None

    def hold(self, user: object) -> None:
        """Count as held as long as the user is there."""
        self._users.add(user)

    def copy(self) -> Any:
        """Return llguidance's matcher for an answer."""
        assert self._matcher is not None
        return self._matcher.deep_copy()


class GrammarMatcher:
    """`sequence.Matcher` by llguidance.

    Where the grammar may end, the tokens that end an answer may come, and only there; other control tokens never.
    """

    def __init__(self, compiled: CompiledGrammar, ends: Sequence[int], masks: Masks) -> None:
        """`ends`: the control tokens that end this answer."""
        self._compiled, self._masks = compiled, masks
        compiled.hold(self)
        self._follower = compiled.copy()
        self._said: list[int] = []
        self._alone = False
        """Whether the follower shares nothing with other answers."""
        self._slow = False
        """Whether a mask took long."""
        self._spent = 0.0
        """Processor time that masks took beyond `MASK_SECONDS` each."""
        self._ends = frozenset(ends)
        self._others = [token for token in compiled.vocabulary.tokenizer.eos_tokens if token not in self._ends]
        self._run: list[int] = []
        """Tokens that are perhaps the only ones that may come, the first of them next."""
        self._next: Ready[bytes] | None = None
        """The next mask, where `forced` has looked at it."""

    @property
    def over(self) -> bool:
        """`Matcher.over`."""
        return bool(self._follower.is_stopped()) and not self._follower.is_error()

    def mask(self) -> Pending[bytes]:
        """`Matcher.mask`."""
        return self._next or self._masks.ask(self)

    def consume(self, token: int) -> None:
        """`Matcher.consume`. A token that cannot come puts the grammar out of action: the next mask is empty."""
        self._run = self._run[1:] if self._run[:1] == [token] else []
        if token not in self._ends:
            self._next = None
            self._said.append(token)
            self._compiled.followed += 1
            self._follower.consume_token(token)

    def forced(self) -> int | None:
        """`Matcher.forced`. What llguidance would go on with is cut into tokens as a whole; each counts only where the
        mask says the same, which then looks at no other token."""
        self._run = self._run or self._follower.compute_ff_tokens()
        if not self._run:
            return None
        self._next = self._next or Ready(self.compute())
        token, mask = self._run[0], self._next.wait()
        only = bool(mask) and mask[token >> 3] == 1 << (token & 7) and mask.count(0) == len(mask) - 1
        return token if only else None

    def compute(self) -> bytes:
        """`Masked.compute`. Empty where the grammar is too complex to follow further."""
        began, used = perf_counter(), thread_time() if self._slow else 0.0
        found = self._follower.compute_bitmask()
        if self._slow:
            self._spent += max(0.0, thread_time() - used - MASK_SECONDS)
        elif perf_counter() - began > MASK_SECONDS:  # perhaps the machine is busy: from now on its own time counts
            self._slow = True
        if self._follower.is_error():
            found = self._computed_alone()
        if not found or self._spent > SPARE_SECONDS:
            return b""
        bits = bytearray(found)
        for token in self._others:
            bits[token >> 3] &= ~(1 << (token & 7)) & 255
        if self._ends and self._follower.is_accepting():
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def _computed_alone(self) -> bytes:
        """Return the mask by a matcher that shares nothing: another answer may have become too complex, not this one.
        Empty where it has, or where compiling takes so long that all others would wait."""
        self._compiled.broken = True
        if self._alone or self._compiled.seconds > ALONE_SECONDS:
            return b""
        self._alone = True
        self._follower = self._compiled.fresh()
        self._follower.consume_tokens(self._said)
        found = self._follower.compute_bitmask()
        return b"" if self._follower.is_error() else bytes(found)
