"""Matchers: they follow an answer's grammar and reasoning budget and compute the mask of its next token.

Answers of one tenant share a compiled grammar. The masks of a step are computed one after another in a thread parallel
to the step: most take a few microseconds, less than it costs to hand each to a thread of its own, and llguidance
releases the interpreter lock.
"""

from __future__ import annotations

import codecs
import copy
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

LEAST_BYTES = 64 << 10
"""Least bytes that a compiled grammar counts for."""
MOST_GROWTH = 128 << 20
"""Most bytes that answers can add to a grammar: its states and their computation are limited (`grammar.LIMITS`)."""
ALONE_SECONDS = 0.05
"""Most CPU seconds that a grammar may have taken to compile, if it is to be compiled again while a step waits."""


class MaskSource(Protocol):
    """Computes the masks of its next token and of those after a draft's."""

    def compute(self, draft: Sequence[int]) -> list[bytes]:
        """Return the masks of the tokens allowed now and after each token of a draft. Called on the mask thread."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    sources: list[tuple[MaskSource, Sequence[int]]] = field(default_factory=list)
    masks: Future[list[list[bytes]]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class PendingMask:
    """A mask that is being computed: a `types.step.Pending`."""

    masks: Future[list[list[bytes]]]
    number: int
    place: int = 0
    """How many tokens of a draft it follows."""

    def wait(self) -> bytes:
        """Wait for the mask and return it."""
        return self.masks.result()[self.number][self.place]


class Masks:
    """The thread that computes masks. Requests made before it starts on them form one batch."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-masks")
        self._lock = threading.Lock()
        self._open: _Batch | None = None

    def ask(self, row: MaskSource, draft: Sequence[int] = ()) -> PendingMask:
        """Start computing a row's mask, and those after each token of a `draft`.

        The row must not change until they are done.
        """
        with self._lock:
            batch = self._open
            if batch is None:
                batch = self._open = _Batch()
                self._pool.submit(self._work, batch)
            batch.sources.append((row, draft))
            return PendingMask(batch.masks, len(batch.sources) - 1)

    def close(self) -> None:
        """Stop the thread, cancelling batches that have not started."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, batch: _Batch) -> None:
        with self._lock:  # later requests go to the next batch
            self._open = None
        try:
            batch.masks.set_result([row.compute(draft) for row, draft in batch.sources])
        except BaseException as error:
            batch.masks.set_exception(error)


class CompiledGrammar:
    """A compiled grammar that several answers of one tenant follow. llguidance caches lexer states across them."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar | None) -> None:
        """Compile a grammar; with None it only holds the vocabulary. Raises `InvalidRequest` if it does not compile."""
        self.vocabulary, self.grammar = vocabulary, grammar
        began = thread_time()
        self._matcher = None if grammar is None else self.fresh()
        if self._matcher is not None:
            self._matcher.compute_bitmask()  # fills the cache that all copies share
        self.seconds = thread_time() - began
        """CPU seconds that compiling took."""
        self.followed = 0
        """Tokens consumed by all answers that follow it."""
        self.broken = False
        """Whether an answer became too complex, which makes the shared state unusable."""
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def size(self) -> int:
        """Estimated bytes in memory, from the trial compilation's figures."""
        if self.grammar is None:
            return LEAST_BYTES
        return max(LEAST_BYTES, self.grammar.bytes + min(MOST_GROWTH, self.grammar.growth * self.followed))

    @property
    def worn(self) -> bool:
        """Whether it must be compiled anew for the next answer."""
        return self.broken or self.size > MOST_BYTES

    @property
    def held(self) -> bool:
        """Whether an answer follows it or is about to."""
        return bool(self._users)

    def fresh(self) -> Any:
        """Compile the grammar again; return an llguidance matcher that shares nothing with others."""
        assert self.grammar is not None
        try:
            return compile_grammar(self.vocabulary.tokenizer, self.grammar.text)
        except GrammarError as error:
            raise InvalidRequest(f"the grammar cannot be followed: {error}", field="grammar") from None

    def hold(self, user: object) -> None:
        """Count as held until `user` is garbage-collected."""
        self._users.add(user)

    def copy(self) -> Any:
        """Return a new llguidance matcher at the start of an answer."""
        assert self._matcher is not None
        return self._matcher.deep_copy()


class GrammarMatcher:
    """`sequence.Matcher` for a grammar, by llguidance.

    Stop tokens are allowed exactly where the grammar may end; other control tokens never.
    """

    def __init__(self, compiled: CompiledGrammar, ends: Sequence[int], masks: Masks) -> None:
        """Start following a grammar. `ends`: the control tokens that end this answer."""
        self._compiled, self._masks = compiled, masks
        compiled.hold(self)
        self._follower = compiled.copy()
        self._consumed: list[int] = []
        self._alone = False
        """Whether the follower was compiled for this answer alone."""
        self._slow = False
        """Whether a mask took longer than `MASK_SECONDS`; from then on CPU time is measured."""
        self._spent = 0.0
        """CPU seconds that masks took beyond `MASK_SECONDS` each."""
        self._ends = frozenset(ends)
        self._others = [token for token in compiled.vocabulary.tokenizer.eos_tokens if token not in self._ends]
        self._run: list[int] = []
        """Candidates for the next forced tokens, in order."""
        self._next: Ready[bytes] | None = None
        """The next mask, if `forced` has computed it already."""

    @property
    def over(self) -> bool:
        """Implement `Matcher.over`."""
        return bool(self._follower.is_stopped()) and not self._follower.is_error()

    def mask(self) -> Pending[bytes]:
        """Implement `Matcher.mask`."""
        return self._next or self._masks.ask(self)

    def accepts(self, draft: Sequence[int]) -> int:
        """Implement `Matcher.accepts`. Return 0 if masks are slow, since masks after wrong guesses are of no use."""
        if self._slow:
            return 0
        apart = (*self._ends, *self._others)
        count = next((at for at, token in enumerate(draft) if token in apart), len(draft))
        found = int(self._follower.validate_tokens(list(draft[:count])))
        if self._follower.is_error():
            self._start_over()
            return 0
        return found

    def masks(self, draft: Sequence[int]) -> tuple[Pending[bytes], ...]:
        """Implement `Matcher.masks`."""
        first = self._masks.ask(self, draft)
        return (first, *(PendingMask(first.masks, first.number, place + 1) for place in range(len(draft))))

    def consume(self, token: int) -> None:
        """Implement `Matcher.consume`. After a token that the grammar does not allow, the next mask is empty."""
        self._run = self._run[1:] if self._run[:1] == [token] else []
        if token not in self._ends:
            self._next = None
            self._consumed.append(token)
            self._compiled.followed += 1
            self._follower.consume_token(token)

    def forced(self) -> int | None:
        """Implement `Matcher.forced`. Each of llguidance's fast-forward tokens counts only if the mask allows no other.

        Those tokens are the forced text, tokenised as a whole, so the mask might allow other ways to begin it.
        """
        self._run = self._run or self._follower.compute_ff_tokens()
        if not self._run:
            return None
        self._next = self._next or Ready(self._compute())
        token, mask = self._run[0], self._next.wait()
        only = bool(mask) and mask[token >> 3] == 1 << (token & 7) and mask.count(0) == len(mask) - 1
        return token if only else None

    def likely(self) -> Sequence[int]:
        """Implement `Matcher.likely`."""
        if not self._slow:
            self._run = self._run or self._follower.compute_ff_tokens()
        return self._run

    def compute(self, draft: Sequence[int] = ()) -> list[bytes]:
        """Implement `MaskSource.compute`."""
        masks = [self._next.wait() if self._next is not None else self._compute()]
        if draft and masks[0]:
            masks += self._compute_behind(draft)
        return masks + [b""] * (len(draft) + 1 - len(masks))

    def _compute_behind(self, draft: Sequence[int]) -> list[bytes]:
        """Return the masks after each token of a draft, fewer if the grammar becomes too complex to follow."""
        masks: list[bytes] = []
        self._compiled.followed += len(draft)
        for token in draft:
            self._follower.consume_token(token)
            mask = self._follower.compute_bitmask()
            if self._follower.is_error():
                self._start_over()
                return masks
            masks.append(self._with_ends(mask))
        self._follower.rollback(len(draft))
        return masks

    def _start_over(self) -> None:
        """Follow the answer's tokens again from its start: a draft led to what is too complex to follow."""
        self._follower = self._compiled.fresh() if self._alone else self._compiled.copy()
        self._follower.consume_tokens(self._consumed)

    def _compute(self) -> bytes:
        """Return the mask of the next token. Empty if the grammar is too complex to follow further."""
        began, used = perf_counter(), thread_time() if self._slow else 0.0
        mask = self._follower.compute_bitmask()
        if self._slow:
            self._spent += max(0.0, thread_time() - used - MASK_SECONDS)
        elif perf_counter() - began > MASK_SECONDS:  # perhaps only the machine is busy: measure CPU time from now on
            self._slow = True
        if self._follower.is_error():
            mask = self._compute_alone()
        if not mask or self._spent > SPARE_SECONDS:
            return b""
        return self._with_ends(mask)

    def _with_ends(self, mask: bytes) -> bytes:
        """Return llguidance's mask with the tokens that end the answer where it may end, and no other control token."""
        bits = bytearray(mask)
        for token in self._others:
            bits[token >> 3] &= ~(1 << (token & 7)) & 255
        if self._ends and self._follower.is_accepting():
            for token in self._ends:
                bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def _compute_alone(self) -> bytes:
        """Compute the mask with a newly compiled matcher, in case another answer broke the shared one.

        Empty if this answer is too complex itself, or if compiling would delay the step too long.
        """
        self._compiled.broken = True
        if self._alone or self._compiled.seconds > ALONE_SECONDS:
            return b""
        self._alone = True
        self._follower = self._compiled.fresh()
        self._follower.consume_tokens(self._consumed)
        mask = self._follower.compute_bitmask()
        return b"" if self._follower.is_error() else bytes(mask)


class BudgetMatcher:
    """`sequence.Matcher` that ends reasoning at a token budget by forcing its closing tag.

    Its state is a function of the answer's tokens alone, so preemption and a worker's death change nothing. Nothing is
    masked before the budget is used up. Reasoning is detected as `cairn.text.output.output_parser` does it.
    """

    def __init__(self, inner: Matcher | None, vocabulary: Vocabulary, budget: int, output: OutputFormat) -> None:
        """Start at the beginning of an answer.

        `inner`: the grammar's matcher, if any; `budget`: most tokens of reasoning without tags; `output`: how the
        answer is parsed.
        """
        form = thoughts(output)
        self._open, self._until = form.open, form.until or form.close
        self._tag = vocabulary.closes[form.name]
        self._inner, self._vocabulary, self._left = inner, vocabulary, budget
        self._state: Literal["before", "within", "closing", "over"] = "within" if output.reasoning_open else "before"
        self._text = ""
        """The answer so far, before reasoning; within it, the end of the text, which may begin the closing tag."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced: Sequence[int] = ()
        """Remaining tokens of the closing tag."""
        self._close()

    @property
    def over(self) -> bool:
        """Implement `Matcher.over`."""
        return self._inner is not None and self._inner.over

    def mask(self) -> Pending[bytes] | None:
        """Implement `Matcher.mask`."""
        if self._state != "closing":
            return None if self._inner is None else self._inner.mask()
        mask = bytearray(-(-self._vocabulary.tokenizer.vocab_size // 32) * 4)
        token = self._forced[0]
        mask[token >> 3] |= 1 << (token & 7)
        return Ready(bytes(mask))

    def accepts(self, draft: Sequence[int]) -> int:
        """Implement `Matcher.accepts`."""
        twin = self._twin()
        for count, token in enumerate(draft):
            if twin._state == "closing" and token != twin._forced[0]:
                draft = draft[:count]
                break
            twin.consume(token)
        return len(draft) if self._inner is None else self._inner.accepts(draft)

    def masks(self, draft: Sequence[int]) -> tuple[Pending[bytes] | None, ...]:
        """Implement `Matcher.masks`."""
        twin = self._twin()
        own = [twin.mask()]
        for token in draft:
            twin.consume(token)
            own.append(twin.mask())
        inner = (None,) * len(own) if self._inner is None else self._inner.masks(draft)
        return tuple(one or other for one, other in zip(own, inner, strict=True))

    def _twin(self) -> BudgetMatcher:
        """Return a copy in the same state, without the grammar's matcher."""
        twin = copy.copy(self)
        twin._inner, twin._decoder = None, codecs.getincrementaldecoder("utf-8")("replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin

    def forced(self) -> int | None:
        """Implement `Matcher.forced`."""
        if self._state == "closing":
            return self._forced[0]
        return None if self._inner is None else self._inner.forced()

    def likely(self) -> Sequence[int]:
        """Implement `Matcher.likely`."""
        if self._state == "closing":
            return self._forced
        return () if self._inner is None else self._inner.likely()

    def consume(self, token: int) -> None:
        """Implement `Matcher.consume`."""
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
        """Detect whether the answer begins with reasoning."""
        self._text += text
        begin = self._text.lstrip()
        if len(self._text) - len(begin) > MOST_LEAD or not _agree(begin, self._open):
            self._state = "over"
        elif begin.startswith(self._open):
            self._state, self._text = "within", ""
            self._look(begin[len(self._open) :])

    def _look(self, text: str) -> None:
        """Detect whether the model has ended its reasoning."""
        self._text += text
        if self._until in self._text:
            self._state = "over"
        self._text = self._text[1 - len(self._until) :]

    def _close(self) -> None:
        """Start forcing the closing tag once the budget is used up, but not in the middle of a UTF-8 character."""
        if self._state == "within" and self._left <= 0 and not self._decoder.getstate()[0]:
            self._state, self._forced = "closing", self._tag


def _agree(one: str, other: str) -> bool:
    """Tell whether one of two texts begins with the other."""
    return one.startswith(other) or other.startswith(one)
