"""Drafts from a sequence's own tokens: equal to a plain search, bounded in memory, and never of another sequence."""

from __future__ import annotations

import random
import time

import pytest

from cairn.scheduler.drafts import suffix
from cairn.scheduler.drafts.suffix import LEAST_TOKENS, LONGEST, SHORT_TOKENS, TOKEN_BYTES, SuffixDrafter


def longest_match(tokens: list[int]) -> int:
    """Return how many of the latest tokens also occur earlier, by comparing all places; 0 below two."""
    best, end = 0, len(tokens)
    for place in range(1, end):
        length = 0
        while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best > 1 else 0


def test_a_repeated_text_is_proposed() -> None:
    text = random.Random(1).choices(range(5000), k=200)
    drafter = SuffixDrafter([*text, 7000, *text[50:53]])
    assert drafter.match == 3
    assert list(drafter.propose(7)) == text[53:60]
    drafter.extend(text[53:60])
    assert drafter.match == 10 and list(drafter.propose(3)) == text[60:63]


def test_a_periodic_text_is_proposed_beyond_its_end() -> None:
    drafter = SuffixDrafter([9, 1, 2, 3, 1, 2, 3])
    assert list(drafter.propose(7)) == [1, 2, 3, 1, 2, 3, 1]
    assert list(SuffixDrafter([4, 4, 4]).propose(5)) == [4] * 5


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_a_text_that_repeats_nothing_has_no_draft(tokens: list[int]) -> None:
    drafter = SuffixDrafter(tokens)
    assert drafter.match == 0 and not drafter.propose(7) and not drafter.chances(7)
    drafter.extend([90, 91])
    assert not drafter.propose(7)


@pytest.mark.parametrize("seed", range(20))
def test_every_proposal_followed_the_match_that_it_names(seed: int) -> None:
    """The matched tokens stand before the proposed ones, and few long matches are overlooked."""
    chance = random.Random(seed)
    vocabulary = chance.choice((3, 20, 400))
    tokens = [chance.randrange(vocabulary) for _ in range(chance.randrange(300))]
    drafter = SuffixDrafter(tokens)
    matched = possible = 0
    for _ in range(60):
        if chance.random() < 0.3 and len(tokens) > 20:
            start = chance.randrange(len(tokens) - 10)
            more = tokens[start : start + chance.randrange(1, 10)]
        else:
            more = [chance.randrange(vocabulary)]
        drafter.extend(more)
        tokens += more
        match, guesses = drafter.match, list(drafter.propose(4))
        if match:
            run = [*tokens[-match:], *guesses]
            whole = [*tokens, *guesses]
            assert any(whole[i : i + len(run)] == run for i in range(len(tokens) - match)), (match, guesses)
        assert match <= longest_match(tokens)
        matched, possible = matched + match, possible + longest_match(tokens)
    assert matched >= 0.8 * possible


def test_an_index_that_grows_is_the_one_that_is_built_at_once() -> None:
    chance = random.Random(5)
    tokens = [chance.randrange(40) for _ in range(3 * LEAST_TOKENS)]
    grown, built = SuffixDrafter(tokens[:10]), SuffixDrafter(tokens)
    for token in tokens[10:]:
        grown.extend([token])
    assert grown.bytes == built.bytes
    grown.extend([1, 2])
    built.extend([1, 2])
    assert grown.match == built.match and list(grown.propose(7)) == list(built.propose(7))


@pytest.mark.parametrize("vocabulary", [(0, 1, 256, 65536), tuple(range(20)), tuple(range(3000))])
def test_a_short_sequence_is_searched_as_its_index_would_be(
    vocabulary: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the first vocabulary's pairs also occur where no token begins."""
    chance = random.Random(9)
    for size in (0, 1, 2, 40, SHORT_TOKENS - 3, SHORT_TOKENS + 1):
        tokens = chance.choices(vocabulary, k=size)
        searched = SuffixDrafter(tokens)
        assert bool(searched._newest) == (size > SHORT_TOKENS)
        with monkeypatch.context() as patched:
            patched.setattr(suffix, "SHORT_TOKENS", -1)
            indexed = SuffixDrafter(tokens)
        assert indexed._newest
        for _ in range(100):
            start = chance.randrange(len(tokens)) if tokens and chance.random() < 0.5 else 0
            more = tokens[start : start + 4] or [chance.choice(vocabulary)]
            for drafter in (searched, indexed):
                drafter.extend(more)
            tokens += more
            assert searched.match == indexed.match and list(searched.propose(7)) == list(indexed.propose(7))
            assert searched.chances(7) == indexed.chances(7)
        assert searched._newest, "a sequence that has grown has an index"


def test_memory_is_bounded_and_the_latest_tokens_are_kept() -> None:
    chance = random.Random(6)
    most = 2 * LEAST_TOKENS
    drafter = SuffixDrafter([chance.randrange(9000) for _ in range(10 * most)], most=most)
    for _ in range(3 * most // 8):
        drafter.extend([chance.randrange(9000) for _ in range(8)])
        assert drafter.bytes <= TOKEN_BYTES * most
        assert len(drafter._tokens) <= most and len(drafter._newest) <= most  # what `bytes` stands for
    latest = [chance.randrange(9000) for _ in range(40)]
    drafter.extend([*latest, 9500, *latest[:4]])
    assert list(drafter.propose(7)) == latest[4:11]


def test_a_prediction_is_followed_from_the_first_token_and_never_beyond_its_end() -> None:
    drafter = SuffixDrafter([1, 2, 3], prediction=[11, 12, 13, 14, 15])
    assert list(drafter.propose(3)) == [11, 12, 13] and drafter.chances(3)[0] >= 0.6
    drafter.extend([11, 12, 99, 13, 14])  # the answer differs in one place
    assert list(drafter.propose(7)) == [15]
    drafter.extend([15])
    assert list(drafter.propose(7)) == []


def test_an_answer_that_repeats_nothing_offers_less_and_less() -> None:
    """The rate falls with wrong guesses, offered or not, and rises with right ones."""
    chance = random.Random(7)
    drafter = SuffixDrafter([chance.randrange(30) for _ in range(600)])
    offered = []
    for _ in range(600):
        drafter.extend([chance.randrange(30)])
        offered.append(bool(drafter.chances(1)))
    assert sum(offered[300:]) <= 0.02 * 300, "noise is offered"
    for _ in range(3):
        drafter.extend([*range(1000, 1100)])
    assert min(drafter.chances(4)) > 0.4, "a text that repeats itself is not"


def test_indexes_share_nothing() -> None:
    """One sequence's tokens, perhaps another tenant's, are never guesses of another."""
    secret = [*range(2000, 2100)]
    owner, other = SuffixDrafter(secret), SuffixDrafter([1, 2, 3, *secret[:8]])
    owner.extend(secret)
    assert list(owner.propose(2)) and not list(other.propose(7))


def test_a_step_costs_little() -> None:
    """At most 30 us for the tokens of a step and a proposal; the bound leaves room for a loaded machine."""
    chance = random.Random(8)
    drafter = SuffixDrafter([chance.randrange(2000) for _ in range(50_000)])
    tokens = [chance.randrange(2000) for _ in range(2000)]
    times = []
    for place in range(0, 2000, 2):
        start = time.thread_time_ns()
        drafter.extend(tokens[place : place + 2])
        if drafter.chances(7):
            drafter.propose(7)
        times.append(time.thread_time_ns() - start)
    assert sorted(times)[len(times) // 2] < 100_000
