"""The block pool: allocation, sharing, eviction and look-up by key and tokens."""

from __future__ import annotations

import random

import pytest

from cairn.kv.pool.blocks import BlockPool


def add_up(pool: BlockPool) -> bool:
    return pool.free + pool.cached + pool.held == pool.size


def published(pool: BlockPool, keys: list[bytes]) -> list[int]:
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        assert pool.publish(block, key, (key[0],)) == block
    return blocks


def test_taking_is_all_or_none() -> None:
    """Exhaustion half-way through an allocation must roll back (known failure 12)."""
    pool = BlockPool(4)
    held = pool.take(3)
    with pytest.raises(MemoryError):
        pool.take(2)
    assert (pool.free, pool.held) == (1, 3)
    pool.release(held)
    assert (pool.free, pool.held) == (4, 0)


def test_a_block_cannot_be_given_back_twice() -> None:
    """Known failure 34."""
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release((block,))
    with pytest.raises(RuntimeError, match="twice"):
        pool.release((block,))
    assert sorted(pool.take(2)) == [0, 1]


def test_a_published_block_is_found_after_its_last_user_left() -> None:
    pool = BlockPool(2)
    (block,) = published(pool, [b"k"])
    pool.release((block,))
    assert (pool.free, pool.cached, pool.held) == (1, 1, 0)
    assert pool.find(b"k", (ord("k"),)) == block
    pool.hold(block)
    assert (pool.free, pool.cached, pool.held) == (1, 0, 1)


def test_tokens_are_compared_on_every_hit() -> None:
    """The same key with other tokens is a miss, and is not replaced (known failure 26)."""
    pool = BlockPool(3)
    (first,) = pool.take(1)
    assert pool.publish(first, b"collision", (1, 2)) == first
    assert pool.find(b"collision", (1, 2)) == first
    assert pool.find(b"collision", (1, 3)) is None
    (second,) = pool.take(1)
    assert pool.publish(second, b"collision", (1, 3)) is None
    assert pool.published(second) is None
    assert pool.find(b"collision", (1, 2)) == first


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    assert pool.publish(first, b"k", (1,)) == first
    assert pool.publish(second, b"k", (1,)) == first
    assert (pool.holders(first), pool.holders(second), pool.free) == (2, 0, 2)


def test_the_longest_unused_goes_first_and_its_key_with_it() -> None:
    pool = BlockPool(3)
    a, b, c = published(pool, [b"a", b"b", b"c"])
    pool.release((b, a, c))
    pool.hold(b)
    pool.release((b,))
    assert pool.take(1) == [a]
    assert pool.find(b"a", (ord("a"),)) is None
    assert pool.take(2) == [c, b]


def test_evicted_blocks_can_be_published_again() -> None:
    pool = BlockPool(1)
    pool.release(published(pool, [b"k"]))
    (block,) = pool.take(1)
    assert pool.publish(block, b"k", (ord("k"),)) == block
    assert pool.find(b"k", (ord("k"),)) == block


def test_blocks_are_evicted_after_their_descendants() -> None:
    pool = BlockPool(4)
    chain = published(pool, [b"1", b"2", b"3", b"4"])
    pool.release(reversed(chain))
    assert pool.take(4) == [chain[3], chain[2], chain[1], chain[0]]


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(2)
    (block,) = published(pool, [b"k"])
    pool.release((block,))
    pool.take(1)
    assert pool.find(b"k", (ord("k"),)) == block


def test_a_free_block_cannot_be_shared_or_published() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError):
        pool.hold(0)
    with pytest.raises(RuntimeError):
        pool.publish(0, b"k", (1,))


def test_a_block_is_published_once() -> None:
    pool = BlockPool(1)
    (block,) = published(pool, [b"k"])
    with pytest.raises(RuntimeError):
        pool.publish(block, b"other", (1,))


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_the_blocks_always_add_up() -> None:
    chance = random.Random(7)
    pool = BlockPool(12)
    tables: list[list[int]] = []
    for step in range(3000):
        action = chance.random()
        if action < 0.5 and pool.available:
            tables.append(pool.take(chance.randint(1, pool.available)))
        elif action < 0.7 and tables:
            block = chance.choice(chance.choice(tables))
            if pool.published(block) is None:
                pool.publish(block, step.to_bytes(4, "big"), (step,))
        elif action < 0.8 and tables and pool.published(table := chance.choice(tables)[0]) is not None:
            pool.hold(table)
            tables.append([table])
        elif tables:
            pool.release(reversed(tables.pop(chance.randrange(len(tables)))))
        assert add_up(pool)
        assert pool.held == len({block for table in tables for block in table})
