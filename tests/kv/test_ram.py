"""The store in memory: the contract of `Store`, and its budget."""

from __future__ import annotations

import itertools

from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import Chunk

SIZE = 1024 + 100
"""Bytes that one chunk of these tests counts for."""


def chain(name: str, count: int) -> list[Chunk]:
    keys = [b"", *(f"{name}{n}".encode() for n in range(count))]
    return [Chunk(key, parent, (n,), n, bytes(100)) for n, (parent, key) in enumerate(itertools.pairwise(keys))]


def test_match_prefix_counts_leading_keys() -> None:
    """Known failure 32."""
    store, chunks = RamStore(100 * SIZE), chain("a", 5)
    keys = [chunk.key for chunk in chunks]
    assert store.keep(chunks) == 5 and store.match_prefix(keys) == 5
    assert store.match_prefix([b"other", *keys]) == 0 and store.match_prefix([*keys[:2], b"other", *keys[3:]]) == 2
    assert store.drop([keys[2]]) == 3
    assert store.match_prefix(keys) == 2 and store.stats().bytes == 2 * SIZE
    assert store.drop([keys[2]]) == 0


def test_a_chunk_is_returned_only_for_its_tokens() -> None:
    """Known failure 26."""
    store, (chunk,) = RamStore(100 * SIZE), chain("a", 1)
    store.keep([chunk])
    assert store.fetch(chunk.key, [0]) is chunk
    assert store.fetch(chunk.key, [1]) is None and store.fetch(b"other", [0]) is None
    assert store.stats().read == SIZE


def test_a_chunk_without_its_parent_is_refused_with_those_after_it() -> None:
    store, chunks = RamStore(100 * SIZE), chain("a", 3)
    assert store.keep(chunks[1:]) == 0 and store.stats().refused == 2
    assert store.keep([chunks[0], chunks[2], chunks[1]]) == 1
    assert store.stats().chunks == 1


def test_leaves_go_first_the_one_used_longest_ago_before_the_others() -> None:
    store = RamStore(4 * SIZE)
    first, second = chain("a", 2), chain("b", 2)
    store.keep([*first, *second])
    store.fetch(first[1].key, first[1].tokens)
    (new,) = chain("c", 1)
    assert store.keep([new]) == 1
    assert store.match_prefix([one.key for one in first]) == 2 and store.match_prefix([one.key for one in second]) == 1
    assert store.stats().bytes == 4 * SIZE and store.stats().evicted == 1


def test_pinned_chunks_stay_until_their_owner_pins_others() -> None:
    store, chunks = RamStore(2 * SIZE), chain("a", 2)
    store.keep(chunks)
    store.pin("agent", [chunk.key for chunk in chunks])
    assert store.stats().pinned == 2
    new = chain("b", 1)
    assert store.keep(new) == 0
    store.pin("agent", [])
    assert store.keep(new) == 1 and store.match_prefix([chunks[0].key]) == 1


def test_a_chunk_larger_than_the_budget_is_refused() -> None:
    store = RamStore(SIZE - 1)
    assert store.keep(chain("a", 1)) == 0 and store.stats().chunks == 0
    store.close()
