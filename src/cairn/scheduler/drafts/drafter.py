"""The protocols between the scheduler and drafters.

The scheduler checks every guess: a step samples the next token after each of them, and only sampled tokens enter the
answer. So a wrong guess costs time and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cairn.types.request import Request

States = bytes
"""Hidden states of consecutive positions."""


class Drafter(Protocol):
    """Guesses how one sequence goes on. Only the scheduler's thread calls it."""

    @property
    def bytes(self) -> int:
        """Approximate memory that it holds."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that the answer has now. Called with accepted tokens alone, never with guesses."""
        ...

    def expect(self, tokens: Sequence[int]) -> None:
        """Set the tokens that the answer's grammar makes likely to come next; empty if it makes none likely."""
        ...

    @property
    def asks_model(self) -> bool:
        """Whether a model makes its next guesses, as `DraftPolicy.width` left it: asking takes a while."""
        ...

    def take_states(self, first: int, states: States, count: int) -> None:
        """Take the hidden states of `count` positions from `first` on, if the policy wants them (`states_from`).

        They may be of tokens that it did not get yet, and of positions whose states it had before.
        """
        ...

    def propose(self, width: int) -> Sequence[int]:
        """Return at most `width` guesses of the next tokens, in order; empty if it has none. Changes nothing.

        A guess outside of the vocabulary is ignored, with all that follow it.
        """
        ...


class DraftPolicy(Protocol):
    """Decides for one scheduler which sequences speculate, and how far. Only the scheduler's thread calls it.

    A `drafter` of its other methods is one that its own `open` returned.
    """

    def open(self, request: Request, prompt: Sequence[int]) -> Drafter | None:
        """Return a drafter for a request that runs for the first time; None if it is never to speculate.

        `prompt`: all tokens of the request so far, including those generated on another worker.
        """
        ...

    def states_from(self, request: Request, length: int) -> int | None:
        """Return the first position whose hidden state its drafter wants, of a sequence of `length` that starts to run.

        None for none, now and later.
        """
        ...

    def close(self, drafter: Any) -> None:
        """Release a drafter whose request has ended, however it ended."""
        ...

    def width(self, drafter: Any, rows: int) -> int:
        """Return how many guesses to ask for in a step of `rows` decoding sequences; 0 for none."""
        ...

    def record(self, drafter: Any, offered: int, accepted: int) -> None:
        """Record the result of a draft: `accepted` of its `offered` guesses were right."""
        ...

    def step_took(self, rows: int, tokens: int, seconds: float) -> None:
        """Record the time of a step without prompts: `tokens` of `rows` sequences, guesses included."""
        ...
