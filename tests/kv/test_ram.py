"""The store in memory: the contract of `Store`, and its budget."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

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


class CountedUses(dict[Any, Any]):
    """A dictionary that counts lookups by `get`, and walks over all values."""

    uses = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.uses += 1
        return super().get(key, default)

    def values(self) -> Any:
        self.uses += len(self)
        return super().values()


def test_a_pin_that_is_replaced_costs_what_changed() -> None:
    """Figures are asked for between steps, and an agent's pin is replaced after each of its turns."""
    store, agents = RamStore(1000 * SIZE), [chain(f"{number:02}-", 5) for number in range(20)]
    for number, chunks in enumerate(agents):
        store.keep(chunks)
        store.pin(str(number), [chunk.key for chunk in chunks[:4]])
    assert store.stats().pinned == 80
    pins = store._pins = CountedUses(store._pins)
    heads = store._chunks_by_head = CountedUses(store._chunks_by_head)
    store.pin("7", [chunk.key for chunk in agents[7]])
    assert store.stats().pinned == 81
    assert pins.uses + heads.uses < 10


@pytest.mark.parametrize("seed", range(5))
def test_pinned_chunks_are_counted_with_each_change(seed: int) -> None:
    draw = random.Random(seed)
    store, chains = RamStore(12 * SIZE), [chain(f"{number}-", 4) for number in range(6)]

    def expected() -> int:
        pinned = {key[:8] for keys in store._pins.values() for key in keys}
        return sum(bool(pinned & {*one.heads, one.key[:8]}) for one in store._chunks.values())

    most = 0
    for _ in range(300):
        chunks = draw.choice(chains)
        match draw.randrange(3):
            case 0:
                store.keep(chunks[: draw.randint(1, 4)])
            case 1:
                store.pin(draw.choice("abc"), [one.key for one in draw.sample(chunks, draw.randrange(4))])
            case 2:
                store.drop([draw.choice(chunks).key])
        assert store.stats().pinned == expected()
        most = max(most, store.stats().pinned)
    assert most > 3


def test_a_chunk_larger_than_the_budget_is_refused() -> None:
    store = RamStore(SIZE - 1)
    assert store.keep(chain("a", 1)) == 0 and store.stats().chunks == 0
    store.close()
