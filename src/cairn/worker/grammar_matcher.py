"""What follows the grammar of one answer, and the compiled grammar that several answers share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

from cairn.text.grammar.compile_wire import MOST_BYTES
from cairn.text.grammar.grammar import MASK_SECONDS, SPARE_SECONDS, GrammarError
from cairn.text.grammar.vocabulary import Vocabulary, compile_grammar
from cairn.types.errors import InvalidRequest
from cairn.types.request import Grammar
from cairn.types.step import Pending, Ready
from cairn.worker.masks import Masks

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
