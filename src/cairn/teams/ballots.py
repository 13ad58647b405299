"""How ballots are counted. Each rule says how a tie ends.

majority     an option with more than half of the votes; none else, so a tie decides nothing
weighted     the same, where each vote weighs what its member does
unanimous    the option that all chose
coordinator  what that one member chose
ranked       instant runoff: the option with the fewest first choices is taken off until one has more than half of the
             ballots that still count. Of several with the fewest, the one that had fewer in the count before is taken
             off, looking back count by count; where they never differed, the one that stands last among the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cairn.teams.definition import Rule


class Counted(NamedTuple):
    """The result of a vote."""

    decision: str | None
    why: str
    counts: tuple[dict[str, float], ...]


def count(
    rule: Rule, options: Sequence[str], ballots: Mapping[str, Sequence[str]], weights: Mapping[str, float]
) -> Counted:
    """Count ballots, each an option or a ranking, by voter. `weights` by voter, for the rule `weighted` alone."""
    if rule == "ranked":
        return instant_runoff(options, list(ballots.values()))
    weigh = weights if rule == "weighted" else dict.fromkeys(ballots, 1.0)
    tally = dict.fromkeys(options, 0.0)
    for voter, ballot in ballots.items():
        tally[ballot[0]] += weigh[voter]
    total = sum(weigh[voter] for voter in ballots)
    best = max(options, key=lambda option: tally[option])
    if rule == "unanimous":
        agreed = len(ballots) > 0 and tally[best] == total
        return Counted(best if agreed else None, "all agree" if agreed else "not all agree", (tally,))
    if rule == "coordinator":
        return Counted(best if total else None, "the coordinator decides", (tally,))
    if 2 * tally[best] > total:
        return Counted(best, f"{tally[best]:g} of {total:g} votes", (tally,))
    return Counted(None, f"no option has more than half of {total:g} votes", (tally,))


def instant_runoff(options: Sequence[str], rankings: Sequence[Sequence[str]]) -> Counted:
    """Count rankings, which need not name every option."""
    left = list(options)
    counts: list[dict[str, float]] = []
    while True:
        tally = dict.fromkeys(left, 0.0)
        for ranking in rankings:
            first = next((option for option in ranking if option in tally), None)
            if first is not None:
                tally[first] += 1
        counts.append(tally)
        total = sum(tally.values())
        if not total:
            return Counted(None, "no ballot counts", tuple(counts))
        best = max(left, key=lambda option: tally[option])
        if 2 * tally[best] > total:
            return Counted(best, f"{tally[best]:g} of {total:g} ballots in count {len(counts)}", tuple(counts))
        left.remove(_last(left, counts))


def _last(left: Sequence[str], counts: Sequence[Mapping[str, float]]) -> str:
    """The option that is taken off."""
    fewest = list(left)
    for tally in reversed(counts):
        least = min(tally[option] for option in fewest)
        fewest = [option for option in fewest if tally[option] == least]
        if len(fewest) == 1:
            break
    return fewest[-1]
