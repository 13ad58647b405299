"""The guesses of a step: asked of the sequences' drafters before it, and compared with what it sampled after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens

from cairn.scheduler.drafts.drafter import Drafter, DraftPolicy
from cairn.scheduler.sequence import Sequence
from cairn.types.outputs import TokenLogprob
from cairn.types.step import Row, RowResult


class Speculation:
    """Asks for guesses and reports what became of them. One scheduler's."""

    def __init__(self, policy: DraftPolicy, vocab: int) -> None:
        self.policy = policy
        self._vocab = vocab

    def guess(
        self, sequences: Mapping[Sequence, int], most: int, *, running: bool = False
    ) -> dict[Sequence, list[int]]:
        """Return guesses for sequences that decode in one step, at most so many together.

        `running`: the step before has not ended, so no model is asked; what it would guess counts as one guess.
        """
        found, rows = dict[Sequence, list[int]](), len(sequences)
        for sequence in sequences:
            if not sequence.speculates or sequence.again or sequence.first_token is None:
                continue
            length = len(sequence.tokens)
            room = min(most, sequence.longest - length - 1)  # the answer's last token needs no guess behind it
            if room < 1 or (drafter := sequence.drafter or self._open(sequence)) is None:
                continue
            if sequence.known < length:  # before `width`, which may ask what the drafter makes of them
                drafter.extend(sequence.tokens[sequence.known :])
                sequence.known = length
            if sequence.matcher is not None:
                drafter.expect(sequence.matcher.likely())
            width = min(room, self.policy.width(drafter, rows))
            if running and width > 0 and drafter.asks_model:
                return {sequence: []}
            if width > 0 and (guesses := self._guesses(sequence, drafter, width)):
                found[sequence] = guesses
                most -= len(guesses)
        return found

    def start(self, sequence: Sequence) -> None:
        """Ask for the hidden states that the drafter of a sequence wants, which starts to run."""
        if sequence.speculates:
            sequence.states_from = self.policy.states_from(sequence.request, len(sequence.tokens))

    def take_states(self, sequence: Sequence, row: Row, states: bytes, end: int) -> None:
        """Pass a row's hidden states of positions below `end` on to the sequence's drafter.

        Before its first token they are kept: the drafter is opened then.
        """
        assert row.states_from is not None
        count = end - row.states_from
        if count < 1 or not sequence.speculates:
            return
        part = (row.states_from, states[: len(states) // (row.end - row.states_from) * count], count)
        if sequence.drafter is None:
            sequence.unread.append(part)
        else:
            sequence.drafter.take_states(*part)

    def checked(self, sequence: Sequence, row: Row, count: int) -> int:
        """Record a row's guesses, of whose sampled tokens the answer has `count`; return how many were right.

        The answer's tokens hold them already.
        """
        first = row.end - row.draft
        accepted = agreeing(row.tokens[first : first + count], sequence.tokens[first : first + count])
        if sequence.drafter is not None:
            self.policy.record(sequence.drafter, row.draft, accepted)
        return accepted

    def _open(self, sequence: Sequence) -> Drafter | None:
        """Open the sequence's drafter; None if it is to have none."""
        sequence.drafter = drafter = self.policy.open(sequence.request, sequence.tokens)
        sequence.known = len(sequence.tokens)
        sequence.speculates = drafter is not None
        if drafter is not None:
            for part in sequence.unread:
                drafter.take_states(*part)
        sequence.unread.clear()
        return drafter

    def _guesses(self, sequence: Sequence, drafter: Drafter, width: int) -> list[int]:
        """Return a drafter's guesses up to the first that a grammar forbids, or that nothing follows: a stop token."""
        stops, guesses = sequence.request.sampling.stop_token_ids, list[int]()
        for token in drafter.propose(width)[:width]:
            if not 0 <= token < self._vocab or token in stops:
                break
            guesses.append(token)
        return guesses[: sequence.matcher.accepts(guesses)] if guesses and sequence.matcher is not None else guesses


def sampled(row: Row, result: RowResult) -> list[tuple[int, TokenLogprob | None]]:
    """Return the tokens that follow a row with guesses, each with its log-probability, up to the first wrong guess.

    A place that failed ends them: the next row computes it again and fails there. Empty without a first token.
    """
    guesses: Tokens[int] = row.tokens[row.end - row.draft : row.end]
    found: list[tuple[int, TokenLogprob | None]] = []
    for place, one in enumerate((result, *result.more)):
        if one.token is None or (place and found[-1][0] != guesses[place - 1]):
            break
        found.append((one.token, one.logprob))
    return found


def agreeing(guesses: Iterable[int], tokens: Iterable[int]) -> int:
    """Return how many leading guesses are right."""
    count = 0
    for guess, token in zip(guesses, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count
