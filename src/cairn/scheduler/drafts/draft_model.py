"""Drafts by a small model, which continues a sequence greedily.

The small model is an engine with a pool of its own, in the worker of the large one. It reads a new sequence in pieces,
one for each call, so that no step waits long for it. KV of accepted guesses stays; that of others is overwritten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.scheduler.drafts.acceptance_rate import WEIGHT, Acceptance
from cairn.types.request import SamplingParams
from cairn.types.step import Engine, Row

log = logging.getLogger(__name__)

PIECE: Final = 256
"""Most tokens of a sequence that the small model reads at a time."""
_GREEDY: Final = SamplingParams(max_tokens=1, temperature=0.0)


class DraftModel:
    """The small model and its KV, which all sequences of a scheduler share. Only the scheduler's thread uses it."""

    def __init__(self, engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
        """Guess with this engine. Raise ValueError if it keeps recurrent states, which guesses would change."""
        if any(group.kind == "state" for group in engine.info.groups):
            raise ValueError("a draft model has no recurrent states")
        self._engine, self._cache, self._now = engine, Cache(engine.info), now
        self.seconds = 0.0
        """Seconds of a guess, a moving average; 0 before the first."""
        self.broken = False
        """Whether its engine has failed; it guesses nothing from then on."""

    def open(self, salt: bytes, tokens: Sequence[int]) -> ModelGuesses | None:
        """Return a sequence's guesses; None if it is too long for the small model, or its pool has no room.

        Only sequences of the same `salt` share KV of the small model.
        """
        if self.broken or len(tokens) + 1 >= min(self._engine.info.context, self._cache.longest):
            return None
        kv = self._cache.context(salt)
        covered = self._cache.open(kv, tokens)
        if covered is None:
            return None
        try:
            for group, source, target in self._cache.copies():
                self._engine.copy_blocks(group, [(source, target)]).wait()
        except Exception:
            self._break()
            self._cache.close(kv, tokens, 0)
            return None
        return ModelGuesses(self, kv, tokens, covered)

    def read(self, guesses: ModelGuesses, width: int) -> list[int]:
        """Return `width` guesses of a sequence, fewer at the end of the context.

        If the small model has not read the whole sequence yet, it reads one more piece, and there are no guesses.
        """
        try:
            return self._read(guesses, width)
        except Exception:
            self._break()
            return []

    def _break(self) -> None:
        """Guess nothing from now on, because of the exception that is being handled."""
        log.exception("the draft model failed; answers go on without its guesses")
        self.broken = True

    def _read(self, guesses: ModelGuesses, width: int) -> list[int]:
        run, kv, start = list(guesses.tokens), guesses.kv, guesses.computed
        piece = min(PIECE, self._engine.info.max_tokens)
        if len(run) - start > piece:
            if not self._cache.grow(kv, start + piece):  # of a window's blocks only those that it needs
                return []
            self._step(guesses, run, start, start + piece)
            guesses.computed += piece
            self._cache.publish(kv, guesses.tokens, guesses.computed)
            return []
        width = min(width, self._engine.info.context - len(run))
        if width < 1 or not self._cache.grow(kv, len(run) + width - 1):
            return []
        for _ in range(width):
            began = self._now()
            token = self._step(guesses, run, start, len(run))
            if token is None:
                break
            if len(run) - start == 1:
                seconds = self._now() - began
                self.seconds += (seconds - self.seconds) * (WEIGHT if self.seconds else 1.0)
            start = len(run)
            run.append(token)
        guesses.computed, guesses.reached = len(guesses.tokens), start
        self._cache.publish(kv, guesses.tokens, guesses.computed)
        return run[len(guesses.tokens) :]

    def _step(self, guesses: ModelGuesses, run: list[int], start: int, end: int) -> int | None:
        """Compute positions [start, end) of a sequence and its guesses; return the token that follows, if any."""
        first = end - 1 if end == len(run) else None
        row = Row(run, start, end, guesses.kv.table.groups, first, guesses.prompt_len, _GREEDY, 0)
        (result,) = (self._engine.decode if end - start == 1 else self._engine.prefill)([row]).wait()
        return None if result.error else result.token

    def end(self, guesses: ModelGuesses) -> None:
        """Free a sequence's blocks."""
        self._cache.close(guesses.kv, guesses.tokens, guesses.computed)

    def states_from(self, length: int) -> int | None:
        """Return None: it needs no states of the large model."""
        return None

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class ModelGuesses:
    """The small model's guesses for one sequence, and its progress in that sequence."""

    def __init__(self, model: DraftModel, kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        self._model = model
        self.kv = kv
        self.tokens = list(tokens)
        self.prompt_len = len(tokens)
        self.computed = computed
        """Leading tokens whose KV the small model has."""
        self.reached = 0
        """Position up to which it computed its last guesses."""
        self._guesses: list[int] = []
        self._accepted = Acceptance()

    def chances(self, width: int) -> list[float]:
        """Return for each of the next guesses the chance that it and all before it are right."""
        return [] if self._model.broken else self._accepted.chances(width)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the sequence; guesses among them are computed already."""
        right = self._accepted.compare(self._guesses, tokens)
        if self._guesses:
            self.computed = min(len(self.tokens) + right, self.reached)
        self._guesses = []
        self.tokens += tokens

    def take_states(self, first: int, states: bytes, count: int) -> None:
        """Do nothing: it has states of its own."""

    def propose(self, width: int) -> Sequence[int]:
        """Return the small model's next tokens, greedily sampled."""
        self._guesses = self._model.read(self, width)
        return self._guesses

    def close(self) -> None:
        """Free the sequence's blocks."""
        self._model.end(self)
