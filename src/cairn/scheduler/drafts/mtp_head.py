"""Drafts of a model's MTP head (multi-token prediction), which predicts further tokens; many models have one.

The head takes the model's hidden state of a position and the token that follows, and predicts the token after that
one. Its own state and prediction are the input of the next guess. So each step returns the hidden states of its tokens,
and the drafter keeps those that the head has not read yet. The head has KV of its own for each sequence, which no other
sequence reads. It covers what was computed while the sequence ran, but of a long prompt only the end: where the states
of earlier positions are not at hand, the head's context begins later, and its guesses are a little worse.

KV that the head computed from its own states is overwritten once the model's states are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from cairn.scheduler.drafts.acceptance_rate import WEIGHT, Acceptance
from cairn.types.request import SamplingParams
from cairn.types.step import Engine, Row, RowResult

log = logging.getLogger(__name__)

READ: Final = 512
"""Last tokens of a prompt that the head reads."""
MOST_WAITING: Final = 2 * READ
"""Most states of a sequence that wait for the head; beyond that the head's context is given up."""
STATE_BYTES: Final = 64 << 20
"""Most bytes of the states of all sequences that wait for the head."""
_GREEDY: Final = SamplingParams(max_tokens=1, temperature=0.0)


class MtpHead:
    """The head and its KV, in which each sequence has blocks of its own. Only the scheduler's thread uses it."""

    def __init__(self, engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
        """Guess with this engine, whose rows have `Row.before`."""
        self._engine, self._now, self.blocks = engine, now, engine.info.blocks[0]
        self._free = list(range(self.blocks))
        self.accepted = Acceptance()
        """Of all sequences together."""
        self.waiting = 0
        """Bytes of the states that it has not read."""
        self.seconds = 0.0
        """Seconds of a guess, a moving average; 0 before the first."""
        self.broken = False
        """Whether its engine has failed; it guesses nothing from then on."""

    def states_from(self, length: int) -> int | None:
        """Return the first position of a prompt of so many tokens whose state the head needs; None for none."""
        return None if self.broken else max(0, length - READ)

    def open(self, salt: bytes, tokens: Sequence[int]) -> MtpGuesses | None:
        """Return a sequence's guesses; None if the head has failed. Sequences share nothing, so `salt` is ignored."""
        return None if self.broken else MtpGuesses(self, tokens)

    def read(self, guesses: MtpGuesses, width: int) -> list[int]:
        """Return `width` guesses of a sequence, fewer at the end of the context or the pool.

        If the head has not read the whole sequence yet, it reads a piece of it and returns none.
        """
        try:
            return self._read(guesses, width)
        except Exception:
            log.exception("the head for further tokens failed; answers go on without its guesses")
            self.broken = True
            return []

    def _read(self, guesses: MtpGuesses, width: int) -> list[int]:
        run, start, piece = guesses.run, guesses.read, self._engine.info.max_tokens
        if len(run) - start > piece:
            if self._grow(guesses, start + piece):
                self._step(guesses, start, start + piece, guesses.take(piece))
            return []
        if not start < len(run) or guesses.waiting < len(run) - start:
            return []
        width, known, found = min(width, self._engine.info.context - len(run) + 1), len(run), list[int]()
        if width < 1 or not self._grow(guesses, known + width - 1):
            return []
        states = guesses.take(known - start)
        try:
            for _ in range(width):
                began, end = self._now(), len(run)
                result = self._step(guesses, start, end, states)
                if result.token is None:
                    break
                if end - start == 1:
                    seconds = self._now() - began
                    self.seconds += (seconds - self.seconds) * (WEIGHT if self.seconds else 1.0)
                found.append(result.token)
                run.append(result.token)
                start, states = end, result.states
        finally:
            del run[known:]
        return found

    def _step(self, guesses: MtpGuesses, start: int, end: int, states: bytes) -> RowResult:
        """Compute positions `start` to `end` of a run; the result samples a token if `end` is the run's end."""
        last = end - 1 if end == len(guesses.run) else None
        tables = (guesses.blocks,)
        row = Row(guesses.run, start, end, tables, last, 0, _GREEDY, 0, states_from=last, before=states)
        (result,) = self._engine.prefill([row]).wait()
        return result

    def _grow(self, guesses: MtpGuesses, places: int) -> bool:
        """Give a sequence blocks for so many positions; if there are too few, return False and free all that it has."""
        missing = -(-places // self._engine.info.block_tokens) - len(guesses.blocks)
        if missing > len(self._free):
            guesses.forget()
            return False
        for _ in range(missing):
            guesses.blocks.append(self._free.pop())
        return True

    def give_back(self, blocks: list[int]) -> None:
        """Free a sequence's blocks and clear its list of them."""
        self._free += blocks
        blocks.clear()

    @property
    def free(self) -> int:
        """How many blocks no sequence has."""
        return len(self._free)

    def close(self) -> None:
        """Do nothing: the engine is closed with that of its model."""


class MtpGuesses:
    """The guesses of the head for one sequence, and the states that it has not read yet."""

    def __init__(self, head: MtpHead, tokens: Sequence[int]) -> None:
        self._head, self._tokens = head, list(tokens)
        self._begun = self._next = 0
        """Position of the first state of the head's context, and of the next state to take."""
        self._states = bytearray()
        """The states before the tokens of the run that the head has not read."""
        self._width = 0
        """Bytes of a state; 0 while the head has no context."""
        self.run: list[int] = []
        """The tokens of the head's context: all after the position of its first state."""
        self.read = 0
        """Leading tokens of the run that the head has read."""
        self.blocks: list[int] = []
        self._guesses: list[int] = []
        self._accepted = Acceptance(head.accepted)

    @property
    def waiting(self) -> int:
        """How many states the head has not read."""
        return len(self._states) // self._width if self._width else 0

    def take(self, count: int) -> bytes:
        """Return the next states, which the head reads now."""
        size = count * self._width
        found = bytes(self._states[:size])
        del self._states[:size]
        self._head.waiting -= size
        self.read += count
        return found

    def forget(self) -> None:
        """Give up the head's context and free its blocks; a new one begins with the next state."""
        self._head.waiting -= len(self._states)
        self._states.clear()
        self._width = self.read = 0
        self.run = []
        self._head.give_back(self.blocks)

    def chances(self, width: int) -> list[float]:
        """Return for each of the next guesses the chance that it and all before it are right."""
        return [] if self._head.broken or not self.waiting else self._accepted.chances(width)

    def take_states(self, first: int, states: bytes, count: int) -> None:
        """Take the states of `count` positions from `first` on, except those taken before."""
        if self._head.broken:
            return
        width = len(states) // count
        if not self._width or first > self._next:  # the states in between are missing
            self.forget()
            self._width, self._begun, self._next = width, first, first
            self.run = self._tokens[first + 1 :]
        states = states[(self._next - first) * width :]
        self._next = max(self._next, first + count)
        self._states += states
        self._head.waiting += len(states)
        if self.waiting > MOST_WAITING or self._head.waiting > STATE_BYTES:
            self.forget()

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the sequence."""
        self._accepted.compare(self._guesses, tokens)
        self._guesses = []
        self._tokens += tokens
        if self._width:
            self.run += self._tokens[self._begun + 1 + len(self.run) :]

    def propose(self, width: int) -> Sequence[int]:
        """Return what the head predicts next."""
        self._guesses = self._head.read(self, width)
        return self._guesses

    def close(self) -> None:
        """Free the head's blocks and states of the sequence."""
        self.forget()
