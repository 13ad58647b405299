"""The guesses of a step: asked of the sequences' drafters before it, and compared with what it sampled after it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Tokens

from cairn.kv.pool.blocks import common_length
from cairn.scheduler.drafts.drafter import Drafter, DraftPolicy
from cairn.scheduler.sequence import Sequence
from cairn.types.outputs import TokenLogprob
from cairn.types.step import Row, RowResult


class Speculation:
    """Asks the drafters of one scheduler's sequences for guesses, and reports which were right."""

    def __init__(self, policy: DraftPolicy, vocab: int) -> None:
        self.policy = policy
        self._vocab = vocab

    def guess(
        self, sequences: Mapping[Sequence, int], most: int, *, running: bool = False
    ) -> dict[Sequence, list[int]]:
        """Return guesses for sequences that decode in one step, at most `most` in all.

        `running`: the step before still runs, so no model is asked. A sequence whose guesses a model would make is
        returned alone, without any.
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
        """Note from which position on the drafter of a sequence that starts to run will want hidden states."""
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
        """Count the right guesses of a row, report them to the policy, and return their number.

        `count`: how many of the tokens that the row sampled are in the answer; `sequence.tokens` has them already.
        """
        first = row.end - row.draft
        accepted = common_length(row.tokens[first : first + count], sequence.tokens[first : first + count])
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
        """Return a drafter's guesses up to the first stop token, unknown token, or token that the grammar forbids."""
        stops, guesses = sequence.request.sampling.stop_token_ids, list[int]()
        for token in drafter.propose(width)[:width]:
            if not 0 <= token < self._vocab or token in stops:
                break
            guesses.append(token)
        return guesses[: sequence.matcher.accepts(guesses)] if guesses and sequence.matcher is not None else guesses


def sampled(row: Row, result: RowResult) -> list[tuple[int, TokenLogprob | None]]:
    """Return the tokens that a row with guesses sampled, with their log-probabilities, up to the first wrong guess.

    They end before a position that failed: the next row computes it again, and reports the error. Empty if the first
    one failed.
    """
    guesses: Tokens[int] = row.tokens[row.end - row.draft : row.end]
    found: list[tuple[int, TokenLogprob | None]] = []
    for place, one in enumerate((result, *result.more)):
        if one.token is None or (place and found[-1][0] != guesses[place - 1]):
            break
        found.append((one.token, one.logprob))
    return found
