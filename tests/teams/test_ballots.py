"""Counting of ballots."""

from __future__ import annotations

import random

import pytest

from cairn.teams import team_round
from cairn.teams.team_round import count, instant_runoff

OPTIONS = ("a", "b", "c", "d", "e")


def slow_runoff(options: tuple[str, ...], rankings: list[tuple[str, ...]]) -> str | None:
    """Apply the rule as it is stated, and share no code: every earlier count is made anew from the ballots."""

    def firsts(gone: frozenset[str], option: str) -> int:
        votes = 0
        for ranking in rankings:
            rest = [one for one in ranking if one not in gone]
            votes += bool(rest) and rest[0] == option
        return votes

    taken: list[str] = []
    while True:
        gone = frozenset(taken)
        left = [option for option in options if option not in gone]
        here = {option: firsts(gone, option) for option in left}
        total = sum(here.values())
        if total == 0:
            return None
        for option in left:
            if here[option] * 2 > total:
                return option
        # Each option's counts, the latest first, then its place from the end: the least of these goes.
        order = {
            option: (
                [firsts(frozenset(taken[:past]), option) for past in range(len(taken), -1, -1)],
                -options.index(option),
            )
            for option in left
        }
        taken.append(min(left, key=lambda option: order[option]))


def random_ballots(rng: random.Random) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    options = OPTIONS[: rng.randint(2, 5)]
    few = rng.randint(0, 9)
    return options, [tuple(rng.sample(options, rng.randint(0, len(options)))) for _ in range(few)]


def disagreements(times: int) -> int:
    rng = random.Random(1)
    different = 0
    for _ in range(times):
        options, rankings = random_ballots(rng)
        different += instant_runoff(options, rankings).decision != slow_runoff(options, rankings)
    return different


def test_instant_runoff_is_what_a_slow_reference_says_of_10000_random_ballots() -> None:
    assert disagreements(10_000) == 0


def test_a_wrong_tie_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: among tied options the first is eliminated, without a look at earlier counts."""
    last = team_round._last
    monkeypatch.setattr(team_round, "_last", lambda left, counts: last(left[::-1], counts))
    assert disagreements(2_000) > 0
    monkeypatch.setattr(team_round, "_last", lambda left, counts: last(left, counts[-1:]))
    assert disagreements(2_000) > 0


def test_the_counts_say_how_it_went() -> None:
    rankings = [("a", "c"), ("a", "c"), ("b", "c"), ("b", "c"), ("c", "b")]
    counted = instant_runoff(("a", "b", "c"), rankings)
    assert counted.decision == "b"
    assert counted.counts == ({"a": 2, "b": 2, "c": 1}, {"a": 2, "b": 3})
    assert counted.why == "3 of 5 ballots in count 2"


WEIGHTS = {"x": 1.0, "y": 1.0, "z": 3.0}


@pytest.mark.parametrize(
    ("rule", "cast", "decision"),
    [
        ("majority", "aab", "a"),
        ("majority", "aa", "a"),
        ("majority", "ab", None),
        ("majority", "abc", None),
        ("unanimous", "aaa", "a"),
        ("unanimous", "aab", None),
        ("weighted", "aab", "b"),
        ("weighted", "aba", "a"),
        ("coordinator", "b", "b"),
        ("majority", "", None),
        ("unanimous", "", None),
    ],
)
def test_the_other_rules(rule: str, cast: str, decision: str | None) -> None:
    ballots = {name: (option,) for name, option in zip("xyz", cast, strict=False)}
    assert count(rule, ("a", "b", "c"), ballots, WEIGHTS).decision == decision  # type: ignore[arg-type]


def test_a_weighted_tie_decides_nothing() -> None:
    ballots = {"x": ("a",), "y": ("a",), "z": ("b",)}
    assert count("weighted", ("a", "b"), ballots, {"x": 1.0, "y": 2.0, "z": 3.0}).decision is None
