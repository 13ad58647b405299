from __future__ import annotations

from collections.abc import Callable

from tests.laws import agents


def test_agents_match_their_history_and_deletion_leaves_nothing(
    prove: bool, figure: Callable[[str, str], None]
) -> None:
    """Known failures 31, 38: whatever is said, forked, rolled back and deleted, and whenever the power goes."""
    count = agents.run_many(0, 200 if prove else 12)
    figure("agents: schedules of turns, forks, rollbacks and deletions, equal to a plain model", f"{count}")
