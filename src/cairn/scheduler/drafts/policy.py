"""The policy of which sequences speculate, and how far: by the engine's measured costs and by how guesses fared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from cairn.scheduler.drafts.combined import CombinedDrafter, GuessingModel
from cairn.scheduler.drafts.drafter import Drafter, DraftPolicy
from cairn.scheduler.drafts.step_cost import MOST_TOKENS as LARGEST_STEP
from cairn.scheduler.drafts.step_cost import StepCost
from cairn.scheduler.drafts.suffix import LEAST_TOKENS, MOST_TOKENS, TOKEN_BYTES, SuffixDrafter
from cairn.types.request import Request

WIDEST: Final = 7
"""Most guesses of a sequence in a step: more cost more than they bring, wherever it was measured."""
INDEX_BYTES: Final = 64 << 20
"""Most bytes of all indexes together; sequences that start when they are used up do not speculate."""
FEWEST_TOKENS: Final = 8
"""Shorter answers do not speculate: they cannot win back the cost of an index."""
_MARGIN: Final = 1.05
"""Factor by which a draft must be expected to speed the step up."""
_MOST_DELAY: Final = 1.5
"""Factor by which drafts may lengthen a step that other sequences share."""


class Weighed(Drafter, Protocol):
    """A drafter that estimates the chances and the cost of its guesses."""

    @property
    def guess_seconds(self) -> float:
        """Seconds that each of the guesses in `chances` takes to make."""
        ...

    def chances(self, width: int) -> list[float]:
        """Return for each of the next guesses, at most `width`, the chance that it and all before it are right."""
        ...

    def close(self) -> None:
        """Free what a model holds for its guesses."""
        ...


class MeasuredPolicy:
    """A `DraftPolicy`: a suffix drafter for each sequence, with as many guesses as are expected to pay.

    A step is worth its tokens divided by its time. A draft adds the guesses that are expected to be right and the
    time of all. So a batch that fills the engine's matrix products leaves no room for drafts, and sequences that repeat
    nothing have none.
    """

    def __init__(
        self,
        fixed: int = 0,
        *,
        states: bool = False,
        model: GuessingModel | None = None,
        index_bytes: int = INDEX_BYTES,
    ) -> None:
        """Make the policy of one scheduler. `fixed`: ask for so many guesses wherever there is a match; 0: measure.

        `states`: the model has recurrent states, so what is accepted before a wrong guess is computed a second time.
        `model`: guesses where nothing repeats: a small model, or an MTP head.
        """
        self._fixed, self._states, self._model = fixed, states, model
        self._left = index_bytes
        self._reserved: dict[int, int] = {}
        """Bytes set aside for each open drafter's index, by its id."""
        self._cost = StepCost()
        self._guesses, self._expected = 0, 0.0
        """Guesses granted since the last step, and how many of them are expected to be right."""
        self.offered = self.accepted = 0
        """Guesses that were checked so far, and those that were right."""

    @property
    def bytes(self) -> int:
        """Bytes set aside for indexes."""
        return sum(self._reserved.values())

    def open(self, request: Request, prompt: Sequence[int]) -> Weighed | None:
        """Implement `DraftPolicy.open`. None for short answers, mirostat, hidden states, and if memory is used up."""
        sampling = request.sampling
        if not _speculates(request):
            return None
        room = LEAST_TOKENS
        while room < MOST_TOKENS and room < len(prompt) + len(request.prediction) + sampling.max_tokens:
            room *= 2
        while room * TOKEN_BYTES > self._left:
            room //= 2
        if room < LEAST_TOKENS:
            return None
        before = len(request.prompt)
        drafter = SuffixDrafter(prompt[:before], request.prediction, most=room)
        drafter.extend(prompt[before:])  # what was generated follows the prediction, if it is right
        guesses = None if self._model is None else self._model.open(request.salt, prompt)
        found: Weighed = drafter
        if self._model is not None and guesses is not None:
            found = CombinedDrafter(drafter, guesses, self._model)
        self._reserved[id(found)] = room * TOKEN_BYTES
        self._left -= room * TOKEN_BYTES
        return found

    def states_from(self, request: Request, length: int) -> int | None:
        """Implement `DraftPolicy.states_from`."""
        return None if self._model is None or not _speculates(request) else self._model.states_from(length)

    def close(self, drafter: Weighed) -> None:
        """Implement `DraftPolicy.close`."""
        self._left += self._reserved.pop(id(drafter), 0)
        drafter.close()

    def width(self, drafter: Weighed, rows: int) -> int:
        """Implement `DraftPolicy.width`: maximise the expected tokens a second; 0 if no draft improves them."""
        chances = drafter.chances(WIDEST)
        if self._fixed:
            return self._fixed
        if not chances or (before := rows + self._guesses) + len(chances) > LARGEST_STEP:
            return 0
        cost, tokens = self._cost, rows + self._expected
        best, width, expected, gain = _MARGIN * tokens / cost.of(before), 0, 0.0, 0.0
        most = cost.of(rows) * _MOST_DELAY if rows > 1 else float("inf")
        each = cost.relative(drafter.guess_seconds)
        for count, chance in enumerate(chances, 1):
            gain += chance
            time = cost.of(before + count) + each * count
            if time > most:
                break
            if self._states:
                time += (1 - chance) * (cost.of(before + round(gain)) - cost.of(before))
            if (tokens + gain) / time > best:
                best, width, expected = (tokens + gain) / time, count, gain
        self._guesses += width
        self._expected += expected
        return width

    def record(self, drafter: Weighed, offered: int, accepted: int) -> None:
        """Implement `DraftPolicy.record`."""
        self.offered += offered
        self.accepted += accepted
        self._guesses, self._expected = 0, 0.0

    def step_took(self, rows: int, tokens: int, seconds: float) -> None:
        """Implement `DraftPolicy.step_took`."""
        self._cost.record(tokens, seconds)
        self._guesses, self._expected = 0, 0.0


def _speculates(request: Request) -> bool:
    sampling = request.sampling
    if request.want == "hidden" or sampling.max_tokens < FEWEST_TOKENS:
        return False
    return sampling.extras is None or not sampling.extras.mirostat


def chosen_policy(speculate: str, *, states: bool, model: GuessingModel | None = None) -> DraftPolicy | None:
    """Return the policy that the option `speculate` asks for; None where it is off. The rest as for the policy."""
    if speculate == "off":
        return None
    return MeasuredPolicy(0 if speculate == "auto" else int(speculate), states=states, model=model)
