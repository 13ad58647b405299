"""Drafts that combine two sources: the sequence's own tokens where they repeat, and a model everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cairn.scheduler.drafts.drafter import States
from cairn.scheduler.drafts.suffix import SuffixDrafter


class SequenceGuesses(Protocol):
    """What a `GuessingModel` guesses for one sequence."""

    def chances(self, width: int) -> list[float]:
        """Return the chance of each of the next guesses that it and all before it are right; empty without guesses."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the sequence."""
        ...

    def take_states(self, first: int, states: States, count: int) -> None:
        """Take the hidden states of `count` positions from `first` on, if the model wants them."""
        ...

    def propose(self, width: int) -> Sequence[int]:
        """Return at most `width` guesses of the next tokens."""
        ...

    def close(self) -> None:
        """Free what the model holds for the sequence."""
        ...


class GuessingModel(Protocol):
    """A model that guesses: a small one, or an MTP head. It measures the seconds of a guess."""

    @property
    def seconds(self) -> float:
        """Seconds of a guess; 0 before the first."""
        ...

    def open(self, salt: bytes, tokens: Sequence[int]) -> SequenceGuesses | None:
        """Return a sequence's guesses, or None. Only sequences of the same `salt` may share what it computes."""
        ...

    def states_from(self, length: int) -> int | None:
        """Return the first position of so many tokens whose hidden state it wants; None for none."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


class CombinedDrafter:
    """A `Drafter`: the sequence's own tokens where they repeat, the model everywhere else."""

    def __init__(self, own: SuffixDrafter, guesses: SequenceGuesses, model: GuessingModel) -> None:
        """Combine a sequence's `own` repetitions with the `guesses` of a model for it."""
        self.own, self.guesses, self._model = own, guesses, model
        self.asks_model = False
        """Whether the guesses whose `chances` were returned last are the model's."""

    @property
    def bytes(self) -> int:
        """Memory of the index; the model's KV is in its pool."""
        return self.own.bytes

    @property
    def guess_seconds(self) -> float:
        """Seconds that each of the guesses in `chances` takes to make."""
        return self._model.seconds if self.asks_model else 0.0

    def chances(self, width: int) -> list[float]:
        """Return the chances of whichever guesses are likelier."""
        own, other = self.own.chances(width), self.guesses.chances(width)
        self.asks_model = bool(other) and (not own or own[0] < other[0])
        return other if self.asks_model else own

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the sequence."""
        self.own.extend(tokens)
        self.guesses.extend(tokens)

    def expect(self, tokens: Sequence[int]) -> None:
        """Take tokens that the answer's form makes likely."""
        self.own.expect(tokens)

    def take_states(self, first: int, states: States, count: int) -> None:
        """Take hidden states, for the model."""
        self.guesses.take_states(first, states, count)

    def propose(self, width: int) -> Sequence[int]:
        """Return the guesses whose `chances` were returned last."""
        return self.guesses.propose(width) if self.asks_model else self.own.propose(width)

    def close(self) -> None:
        """Free what the model holds for the sequence."""
        self.guesses.close()
