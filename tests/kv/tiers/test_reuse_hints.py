"""Reuse hints change the stores' order of eviction and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import Chunk, Standings, Store
from tests.files import CrashFiles
from tests.kv.stored import SIZE, Time, chain, keys, open_store

ROOM = 6
"""Chunks that each of the stores has room for."""


def disk(time: Time) -> Store:
    return open_store(CrashFiles(now=time.now), time, budget=(ROOM + 1) * 4096)  # the marker takes one


def memory(time: Time) -> Store:
    return RamStore(ROOM * (SIZE + 1024))


STORES = pytest.mark.parametrize("kind", [disk, memory])
Kind = Callable[[Time], Store]


def held(store: Store, *chains: list[Chunk]) -> list[int]:
    """Return how many leading chunks of each context are stored."""
    return [store.match_prefix(keys(chunks)) for chunks in chains]


def filled(kind: Kind) -> tuple[Store, Time, list[list[Chunk]]]:
    """Store three contexts of two chunks, in the order of their last use."""
    time = Time()
    store, chains = kind(time), [chain(2, salt=salt) for salt in (b"a", b"b", b"c")]
    for chunks in chains:
        assert store.keep(chunks) == 2
        time.sleep(60)
    return store, time, chains


@STORES
def test_superseded_contexts_are_evicted_before_older_ones(kind: Kind) -> None:
    store, _, (first, second, third) = filled(kind)
    store.mark(keys(third), "superseded")
    assert store.keep(chain(2, salt=b"new")) == 2
    assert held(store, first, second, third) == [2, 2, 0]


@STORES
def test_waiting_contexts_outlive_later_use_but_not_for_ever(kind: Kind) -> None:
    store, time, (first, second, third) = filled(kind)
    store.mark(keys(first), "waiting")
    assert store.keep(chain(2, salt=b"new")) == 2
    assert held(store, first, second, third) == [2, 0, 2]
    time.sleep(7200)
    for salt in range(ROOM):  # more than the whole budget
        assert store.keep(chain(1, salt=bytes([salt, 9]))) == 1
    assert held(store, first) == [0]


@STORES
def test_a_chunk_used_again_loses_its_hint(kind: Kind) -> None:
    store, time, (first, second, third) = filled(kind)
    store.mark(keys(third), "superseded")
    time.sleep(60)
    for chunk in third:
        assert store.fetch(chunk.key, chunk.tokens) == chunk
    assert store.keep(chain(2, salt=b"new")) == 2
    assert held(store, first, second, third) == [0, 2, 2]


@STORES
def test_a_hint_applies_to_chunks_stored_after_it(kind: Kind) -> None:
    store, time, (first, second, third) = filled(kind)
    late = chain(1, salt=b"late")
    store.mark(keys(late), "superseded")
    assert store.keep(late) == 1 and held(store, first) == [1]
    time.sleep(60)
    assert store.keep(chain(1, salt=b"new")) == 1
    assert held(store, first, second, third, late) == [1, 2, 2, 0]


@STORES
def test_pinned_or_extended_chunks_stay_whatever_their_standing(kind: Kind) -> None:
    store, _, (first, second, third) = filled(kind)
    store.mark(keys(second), "superseded")
    store.pin("ada", keys(second))
    store.mark(keys(third)[:1], "superseded")
    assert store.keep(chain(1, salt=b"new")) == 1
    assert held(store, second, third) == [2, 2] and held(store, first) < [2]


def test_no_more_is_remembered_than_so_many() -> None:
    standings = Standings(3)
    assert standings.set([b"a", b"b"], "waiting") == [b"a", b"b"]
    assert standings.set([b"b"], "waiting") == [] and standings.set([b"c"], "superseded") == [b"c"]
    assert standings.set([b"d"], "waiting") == [b"d", b"a"]
    assert [standings.of(key) for key in (b"a", b"b", b"c", b"d")] == ["idle", "waiting", "superseded", "waiting"]
    assert standings.set([b"b", b"x"], "idle") == [b"b"] and standings.of(b"b") == "idle"
