"""The rule that decides which recurrent states are kept, as tables."""

from __future__ import annotations

import itertools

import pytest

from cairn.kv.pool.snapshots import BOUNDARY, SPACING, Snapshots, keeps


def wanted(snapshots: Snapshots, stop: int) -> list[int]:
    """Return the wanted boundaries up to `stop`."""
    return [place + 1 for place in snapshots.places(0, stop)]


@pytest.mark.parametrize(
    ("whole", "reach", "boundaries"),
    [
        (3, 0, [3]),
        (4, 0, [4]),
        (5, 0, [4, 5]),
        (7, 0, [4, 7]),
        (8, 0, [4, 8]),
        (23, 0, [20, 23]),
        (23, 10, [8, 20, 23]),
        (23, 3, [20, 23]),
        (23, 23, [20, 23]),
        (30, 99, [28, 30]),
    ],
)
def test_a_prompt_leaves_two_snapshots_before_its_end_and_one_where_it_diverges(
    whole: int, reach: int, boundaries: list[int]
) -> None:
    snapshots = Snapshots()
    snapshots.begin(whole, reach)
    assert wanted(snapshots, whole) == boundaries


def test_a_snapshot_that_another_waits_for_is_left_too() -> None:
    snapshots = Snapshots()
    snapshots.begin(23, 0)
    snapshots.want(12)
    assert wanted(snapshots, 23) == [12, 20, 23]
    snapshots.clear()
    assert wanted(snapshots, 23) == [] and not snapshots.wanted(12)


def test_a_long_prompt_leaves_some_on_its_way() -> None:
    snapshots = Snapshots()
    snapshots.begin(3 * SPACING + 5, 0)
    assert wanted(snapshots, 3 * SPACING + 5) == [SPACING, 2 * SPACING, 3 * SPACING, 3 * SPACING + 4, 3 * SPACING + 5]


def test_snapshots_are_wanted_at_boundaries_in_a_prompt_and_at_every_block_after_it() -> None:
    snapshots = Snapshots()
    snapshots.begin(10, 7)
    assert all(end % BOUNDARY == 0 for end in range(1, 10) if snapshots.wanted(end))
    assert all(snapshots.wanted(end) for end in range(10, 2 * SPACING))


@pytest.mark.parametrize(
    ("newest", "kept"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [2, 3]),
        (4, [2, 3, 4]),
        (5, [2, 4, 5]),
        (8, [4, 6, 7, 8]),
        (32, [16, 24, 28, 30, 31, 32]),
    ],
)
def test_the_longer_ago_the_fewer_are_kept(newest: int, kept: list[int]) -> None:
    assert [number for number in range(1, newest + 1) if keeps(number, newest)] == kept
    snapshots = Snapshots(BOUNDARY)
    snapshots.begin(10_000 * BOUNDARY, 0)
    there: set[int] = set()
    for number in range(1, newest + 1):
        there.add(number)
        there -= {gone // BOUNDARY for gone in snapshots.took(number * BOUNDARY)}
    assert sorted(there) == kept


def test_few_are_kept_of_any_length_and_the_distance_grows_with_the_age() -> None:
    for newest in range(1, 3000):
        kept = [number for number in range(1, newest + 1) if keeps(number, newest)]
        assert len(kept) <= 2 * newest.bit_length()
        assert kept[-1] == newest
        for older, younger in itertools.pairwise(kept):
            assert younger - older <= max(1, newest - older)


def test_of_an_answer_the_newest_is_kept() -> None:
    snapshots = Snapshots()
    snapshots.begin(21, 0)
    assert snapshots.took(20) == [] and snapshots.passing == 0
    assert snapshots.took(24) == [] and snapshots.passing == 24
    assert snapshots.took(28) == [24] and snapshots.passing == 28
    assert snapshots.took(32, own=False) == [28] and snapshots.passing == 0, "what others left is theirs"
    assert snapshots.took(36) == []


def test_of_the_ends_of_blocks_the_newest_is_kept_until_a_boundary_comes() -> None:
    snapshots = Snapshots()
    snapshots.begin(21, 0)
    assert snapshots.took(20) == [] and snapshots.took(21) == [] and snapshots.recent == 21
    assert snapshots.took(22) == [21] and snapshots.took(23, own=False) == [22] and snapshots.recent == 0
    assert snapshots.took(24) == [] and (snapshots.passing, snapshots.recent) == (24, 0)
    assert (
        snapshots.took(25) == [] and snapshots.took(28) == [25, 24] and (snapshots.passing, snapshots.recent) == (28, 0)
    )


def test_a_long_answer_leaves_some_for_good() -> None:
    snapshots = Snapshots()
    snapshots.begin(SPACING - 2, 0)
    assert snapshots.took(SPACING) == [] and snapshots.passing == 0
    assert snapshots.took(SPACING + BOUNDARY) == []
