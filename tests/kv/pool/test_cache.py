"""The prefix cache: what a new sequence finds, waits for and gives back."""

from __future__ import annotations

import pytest

from cairn.kv.pool import prefix
from cairn.kv.pool.blocks import Copy
from cairn.kv.pool.cache import MOST_SALTS, Cache
from cairn.kv.pool.sequence_kv import SequenceKV
from cairn.kv.pool.waiters import Waiters
from cairn.types.model_spec import CacheGroup
from cairn.types.step import NO_BLOCK, EngineInfo

SIZE = 4
TOKENS = list(range(50, 90))


def cache(*pools: tuple[int, int], identity: bytes = b"model") -> Cache:
    """Return a cache with one group for each (blocks, window); window 0 is full attention."""
    groups = tuple(
        CacheGroup(kind="window" if window else "full", layers=(layer,), window=window)
        for layer, (_, window) in enumerate(pools)
    )
    return Cache(
        EngineInfo(
            groups=groups,
            blocks=tuple(blocks for blocks, _ in pools),
            block_tokens=SIZE,
            block_bytes=(1,) * len(groups),
            context=1000,
            vocab=1000,
            max_rows=64,
            max_tokens=1000,
            identity=identity,
            device="none",
        )
    )


def compute(kv: Cache, tokens: list[int], salt: bytes = b"", *, reuse: bool = True, chunk: int = 1000) -> SequenceKV:
    """Open, grow and publish a whole sequence."""
    context = kv.context(salt)
    computed = kv.open(context, tokens, reuse=reuse)
    assert computed is not None
    kv.copies()
    while computed < len(tokens):
        end = min(len(tokens), computed + chunk)
        assert kv.grow(context, end)
        kv.publish(context, tokens, end)
        computed = end
    return context


def covered(kv: Cache, tokens: list[int], salt: bytes = b"") -> int:
    context = kv.context(salt)
    opened = kv.open(context, tokens)
    assert opened is not None
    kv.close(context, tokens)
    return opened


def waits(kv: Cache, context: SequenceKV, tokens: list[int]) -> bool:
    """Return whether a new match of a sequence is blocked on a block that another one computes."""
    return isinstance(kv.match(context, tokens).blocked_on, bytes)


def left(kv: Cache) -> list[tuple[int, int, int]]:
    return [(use.free, use.cached, use.held) for use in kv.use()]


def test_a_prefix_is_shared_without_a_copy() -> None:
    kv = cache((20, 0))
    first = compute(kv, TOKENS[:18])
    second = kv.context(b"")
    assert kv.open(second, [*TOKENS[:12], 1, 2, 3, 4]) == 12
    assert second.table.groups[0][:3] == first.table.groups[0][:3]
    assert not set(second.table.groups[0][3:]) & set(first.table.groups[0])


def test_a_whole_prompt_hit_leaves_something_to_compute() -> None:
    """At a block boundary and on both sides of it (known failure 33)."""
    kv = cache((20, 0))
    kv.close(compute(kv, TOKENS[:16]), TOKENS[:16])
    for length in (15, 16, 17, 4, 5, 2, 1):
        assert covered(kv, TOKENS[:length]) == length - 1
        assert len(kv.copies()) == ((length - 1) % 4 > 0)


def compute_part(kv: Cache, tokens: list[int], salt: bytes = b"") -> None:
    """Compute and close a sequence; its partly computed last block is kept."""
    kv.close(compute(kv, tokens, salt), tokens, len(tokens))


def test_of_a_block_the_first_tokens_are_reused_as_far_as_they_agree() -> None:
    kv = cache((20, 0), (20, 6))
    compute_part(kv, TOKENS[:15])
    for tokens, hit in (
        (TOKENS[:15], 14),
        (TOKENS[:20], 15),
        ([*TOKENS[:14], 1, 2, 3], 14),
        ([*TOKENS[:13], 1], 13),
        ([*TOKENS[:12], 1], 12),
        ([*TOKENS[:7], 1, 2], 7),
        ([1, *TOKENS[1:]], 0),
    ):
        assert covered(kv, tokens) == hit
        assert len(kv.copies()) == (2 if hit % 4 else 0)


def test_a_partial_block_is_copied_and_never_in_two_tables() -> None:
    kv = cache((20, 0))
    context = compute(kv, TOKENS[:7])
    source = context.table.groups[0][1]
    kv.close(context, TOKENS[:7], 7)
    first, second = kv.context(b""), kv.context(b"")
    assert kv.open(first, TOKENS[:9]) == kv.open(second, [*TOKENS[:6], 1, 2]) + 1 == 7
    assert kv.copies() == [Copy(0, source, one.table.groups[0][1]) for one in (first, second)]
    assert kv.pools[0].holders(source) == 0 and kv.pools[0].published(source) is not None


def test_uncomputed_tokens_of_a_block_are_not_found() -> None:
    """Nothing is known of tokens at which an engine failed."""
    kv = cache((20, 0))
    kv.close(compute(kv, TOKENS[:7]), TOKENS[:7], 6)
    assert covered(kv, TOKENS[:9]) == 6
    kv.close(compute(kv, TOKENS[10:17]), TOKENS[10:17])
    assert covered(kv, TOKENS[10:19]) == 14 - 10


def test_a_longer_partial_block_replaces_its_beginning() -> None:
    kv = cache((20, 0))
    for length in (5, 6, 7, 6):
        compute_part(kv, TOKENS[:length])
    assert left(kv) == [(18, 2, 0)]
    compute_part(kv, [*TOKENS[:6], 1])
    assert left(kv) == [(17, 3, 0)]
    compute_part(kv, TOKENS[:8])
    assert left(kv) == [(17, 3, 0)] and covered(kv, [*TOKENS[:6], 1, 2]) == 7
    compute_part(kv, TOKENS[:7])
    assert left(kv) == [(17, 3, 0)] and covered(kv, TOKENS[:9]) == 8


def test_a_copy_that_was_not_made_yet_is_not_kept() -> None:
    """The copy would have been made by a step that never runs."""
    kv = cache((20, 0))
    compute_part(kv, TOKENS[:7])
    context = kv.context(b"")
    assert kv.open(context, [*TOKENS[:6], 1]) == 6
    kv.close(context, [*TOKENS[:6], 1], 6)
    kv.forget(kv.context(b""), TOKENS[:7], 4)
    assert covered(kv, TOKENS[:7]) == 4


def test_another_tenant_finds_no_part_of_a_block() -> None:
    kv = cache((20, 0))
    compute_part(kv, TOKENS[:7], b"one")
    assert covered(kv, TOKENS[:7], b"one") == 6 and covered(kv, TOKENS[:7], b"two") == covered(kv, TOKENS[:7]) == 0


def test_a_part_of_a_block_goes_with_its_context() -> None:
    kv = cache((20, 0))
    compute_part(kv, TOKENS[:7])
    compute_part(kv, [*TOKENS[:5], 1])
    for keep, hit in ((8, 7), (7, 7), (6, 7), (4, 5), (0, 0)):
        kv.forget(kv.context(b""), TOKENS[:8], keep)
        assert covered(kv, TOKENS[:8]) == hit, keep


def test_the_source_of_a_pending_copy_is_not_evicted_for_it() -> None:
    """The pool has no other blocks than the sequence takes, so nothing is copied."""
    kv = cache((4, 0))
    compute_part(kv, TOKENS[:6])
    assert left(kv) == [(2, 2, 0)]
    assert covered(kv, [*TOKENS[:5], *range(10)]) == 4 and not kv.copies()
    assert covered(kv, [*TOKENS[:5], *range(6)]) == 4 and not kv.copies(), "what was copied from is gone"
    kv = cache((5, 0))
    compute_part(kv, TOKENS[:6])
    assert covered(kv, [*TOKENS[:5], *range(10)]) == 5


def test_a_shared_block_is_never_written_to() -> None:
    kv = cache((20, 0))
    first = compute(kv, TOKENS[:16])
    again = kv.context(b"")
    assert kv.open(again, TOKENS[:16]) == 15
    assert kv.copies() == [Copy(0, first.table.groups[0][3], again.table.groups[0][3])]
    assert kv.pools[0].holders(again.table.groups[0][3]) == 1
    assert kv.pools[0].published(again.table.groups[0][3]) is None
    kv.publish(again, TOKENS[:16], 16)
    assert again.table.groups == first.table.groups  # the copy gives way to the block it was made from


def test_a_partly_filled_block_is_not_published_while_it_is_written_to() -> None:
    """Known failure 34."""
    kv = cache((20, 0))
    context = compute(kv, TOKENS[:7])
    assert [kv.pools[0].published(block) is not None for block in context.table.groups[0]] == [True, False]
    kv.close(context, TOKENS[:7])
    assert left(kv) == [(19, 1, 0)]


def test_nothing_is_found_before_it_was_computed() -> None:
    """Having room for a prompt does not mean its content is there (known failure 34)."""
    kv = cache((20, 0))
    context = kv.context(b"")
    assert kv.open(context, TOKENS[:17]) == 0
    assert covered(kv, TOKENS[:17]) == 0
    kv.publish(context, TOKENS[:17], 7)
    assert covered(kv, TOKENS[:17]) == 4
    kv.publish(context, TOKENS[:17], 9)
    assert covered(kv, TOKENS[:17]) == 8
    kv.close(context, TOKENS[:17], 10)
    assert covered(kv, TOKENS[:17]) == 10


def test_a_hole_ends_the_prefix() -> None:
    """With a, b, c requested and b missing, only a counts (known failure 32)."""
    kv = cache((20, 0))
    keys = prefix.Chain(prefix.root(b"model", b"", kv.info.groups[0], SIZE), SIZE)
    for index in (0, 2):
        (block,) = kv.pools[0].take(1)
        kv.pools[0].publish(block, keys.key(index, TOKENS), TOKENS[index * SIZE : (index + 1) * SIZE])
    assert covered(kv, TOKENS) == SIZE


def test_another_tenant_finds_nothing() -> None:
    """Known failures 29, 40."""
    kv = cache((20, 0), (20, 6))
    compute(kv, TOKENS[:17], b"one")
    assert covered(kv, TOKENS[:17], b"one") == 16
    assert covered(kv, TOKENS[:17], b"two") == 0
    assert covered(kv, TOKENS[:17]) == 0


def test_the_first_keys_of_a_salt_are_its_own_however_many_salts_there_are() -> None:
    kv, groups = cache((4, 0), (4, 8)), range(2)
    salts = [number.to_bytes(2, "big") for number in range(MOST_SALTS + 10)]
    starts = [tuple(kv.context(salt).chains[group].before(0, []) for group in groups) for salt in salts * 2]
    assert starts[: len(salts)] == starts[len(salts) :], "a salt's keys change"
    assert len({key for start in starts for key in start}) == len(salts) * len(groups)
    assert starts[0] == tuple(prefix.root(kv.info.identity, salts[0], kv.info.groups[group], SIZE) for group in groups)
    assert len(kv._roots) <= MOST_SALTS


def test_equal_keys_of_other_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that always collides nothing wrong is found, and nothing breaks (known failure 26)."""
    monkeypatch.setattr(prefix, "extend", lambda parent, tokens: b"the same")
    kv = cache((20, 0), (20, 6))
    first, other = TOKENS[:17], list(range(17))
    contexts = [compute(kv, first, chunk=3), compute(kv, other, chunk=3)]
    assert covered(kv, other) == 0
    for context, tokens in zip(contexts, (first, other), strict=True):
        kv.close(context, tokens)
    assert [use.held for use in kv.use()] == [0, 0]


def test_a_failed_open_holds_nothing() -> None:
    """Known failure 12."""
    kv = cache((6, 0), (20, 6))
    compute(kv, TOKENS[:12])
    before = left(kv)
    context = kv.context(b"")
    assert kv.open(context, TOKENS[:40]) is None
    assert left(kv) == before
    assert not any(context.table.groups)
    assert not waits(kv, kv.context(b""), TOKENS[:40])


def test_a_failed_grow_takes_nothing() -> None:
    """The second pool is the exhausted one (known failure 12)."""
    kv = cache((20, 0), (3, 8))
    context = kv.context(b"")
    assert kv.open(context, TOKENS[:4]) == 0
    assert not kv.grow(context, 13)
    assert left(kv) == [(19, 0, 1), (3, 0, 0)]
    assert kv.grow(context, 12)
    assert context.table.capacity == 12


def test_spare_blocks_are_left() -> None:
    kv = cache((6, 0))
    assert kv.open(kv.context(b""), TOKENS[:20], spare=2) is None
    assert kv.open(kv.context(b""), TOKENS[:20], spare=1) == 0


def test_a_window_gives_back_what_it_has_passed_and_it_is_still_found() -> None:
    """Known failure 36."""
    kv = cache((40, 0), (40, 6))
    context = compute(kv, TOKENS[:18], chunk=3)
    # position 18 reads from 13 on: block 3
    assert context.table.groups[1][:3] == [NO_BLOCK] * 3
    assert NO_BLOCK not in context.table.groups[1][3:]
    assert NO_BLOCK not in context.table.groups[0]
    assert kv.use()[1].held == 2
    assert covered(kv, TOKENS[:9]) == 8


def test_a_hit_needs_the_window_before_it() -> None:
    kv = cache((40, 0), (7, 6))
    kv.close(compute(kv, TOKENS[:21], chunk=4), TOKENS[:21])
    assert covered(kv, TOKENS[:21]) == 20
    # The next sequence takes the oldest window blocks; the last ones still carry the longest hit.
    other = kv.context(b"")
    assert kv.open(other, [1, 2, 3, 4]) == 0
    assert kv.grow(other, 4 * SIZE)
    reopened = kv.context(b"")
    assert kv.open(reopened, TOKENS[:21]) == 20
    assert reopened.table.groups[1] == [NO_BLOCK] * 3 + reopened.table.groups[1][3:]
    assert len(reopened.table.groups[1]) == 5
    kv.close(reopened, TOKENS[:21])
    # Without block 4 of the window group the longest hit ends before it, but those before are gone.
    assert kv.grow(other, 6 * SIZE)
    kv.close(other, [1, 2, 3, 4])
    assert covered(kv, TOKENS[:21]) == 0


def test_a_shorter_hit_is_taken_where_the_longest_lacks_its_window() -> None:
    kv = cache((40, 0), (40, 6))
    tokens = TOKENS[:21]
    context = compute(kv, tokens, chunk=4)
    kv.close(context, tokens)
    pool = kv.pools[1]
    last = pool.find(context.chains[1].key(4, tokens), tokens[16:20])
    assert last is not None
    # use every other cached block again, so that only the last one is the oldest
    for block in range(pool.size):
        if block != last and pool.published(block) is not None:
            pool.hold(block)
            pool.release((block,))
    pool.take(pool.free + 1)
    assert covered(kv, tokens) == 16


def test_a_hit_in_the_smallest_window_pool_leaves_room_to_go_on() -> None:
    kv = cache((40, 0), (2, 5))
    kv.close(compute(kv, TOKENS[:21], chunk=1), TOKENS[:21])
    assert kv.use()[1].cached > 0
    again = compute(kv, [*TOKENS[:21], 1, 2, 3, 4, 5], chunk=1)
    assert again.table.capacity >= 26


def test_full_pools_come_first_and_windows_limit_the_longest_sequence() -> None:
    assert cache((10, 0)).longest == 40
    assert cache((10, 0), (3, 6)).longest == 40
    assert cache((10, 0), (2, 6)).longest == 8
    assert cache((3, 6)).longest > 1 << 32
    # A window of 6 with blocks of 4 may touch three blocks.
    kv = cache((3, 6))
    context = compute(kv, TOKENS, chunk=1)
    assert kv.use()[0].held <= 3
    kv.close(context, TOKENS)


def test_a_block_that_another_sequence_computes_is_waited_for() -> None:
    kv = cache((40, 0))
    first, second = kv.context(b""), kv.context(b"")
    tokens, longer = TOKENS[:17], TOKENS[:14]
    assert kv.open(first, tokens) == 0
    assert waits(kv, second, longer)
    kv.publish(first, tokens, 8)
    assert waits(kv, second, longer)
    kv.publish(first, tokens, 12)
    assert not waits(kv, second, longer)
    assert kv.open(second, longer) == 12


def test_a_waiter_takes_over_when_the_other_ends() -> None:
    kv = cache((40, 0))
    first, second, third = kv.context(b""), kv.context(b""), kv.context(b"")
    tokens = TOKENS[:17]
    assert kv.open(first, tokens) == 0
    kv.publish(first, tokens, 4)
    assert waits(kv, second, tokens)
    assert waits(kv, third, tokens)
    kv.close(first, tokens)
    assert not waits(kv, second, tokens)
    assert kv.open(second, tokens) == 4
    assert waits(kv, third, tokens)


def test_a_waiter_stops_waiting_when_prompts_diverge_or_the_other_restarts() -> None:
    kv = cache((60, 0), (60, 6))
    first, second, third = (kv.context(b"") for _ in range(3))
    one, other = TOKENS[:33], [*TOKENS[:16], *range(1, 18)]
    assert kv.open(first, one) == 0 and kv.grow(first, 33)
    assert waits(kv, second, other) and waits(kv, third, one)
    for computed in (8, 12):
        kv.publish(first, one, computed)
        assert waits(kv, second, other) and waits(kv, third, one)
        assert second.claim.match == (computed, 33 - computed, second.chains[0].key(3, other))
    kv.publish(first, one, 16)
    assert not waits(kv, second, other) and waits(kv, third, one)
    assert kv.open(second, other) == 16
    kv.close(first, one)
    assert kv.open(first, one) == 16 and kv.grow(first, 33)
    assert waits(kv, third, one)
    kv.publish(first, one, 32)
    assert not waits(kv, third, one)
    assert kv.open(third, one) == 32


def test_a_waiter_is_woken_only_by_its_block() -> None:
    """It waits for the last block that the other computes, so it is checked only once."""
    kv = cache((40, 0))
    first, second, third = (kv.context(b"") for _ in range(3))
    tokens, other = TOKENS[:17], [*TOKENS[:8], *range(1, 10)]
    assert kv.open(first, tokens) == 0
    assert kv.match(second, tokens) == (0, 17, second.chains[0].key(3, tokens))
    assert kv.match(third, other) == (0, 17, third.chains[0].key(1, other)) and kv.blocked == 2
    kv.publish(first, tokens, 4)
    assert second.claim.match and third.claim.match
    kv.publish(first, tokens, 8)
    assert second.claim.match and not third.claim.match and kv.blocked == 1
    assert kv.match(third, other) == (8, 9, None) and third.claim.match and kv.blocked == 1
    kv.publish(first, tokens, 12)
    assert second.claim.match
    kv.publish(first, tokens, 16)
    assert not second.claim.match and not kv.blocked
    assert kv.open(second, tokens) == 16


@pytest.mark.parametrize("end", ["closed", "lapsed"])
def test_a_waiter_is_woken_when_the_other_sequence_stops(end: str) -> None:
    """Known failure 7."""
    kv = cache((40, 0))
    first, second = kv.context(b""), kv.context(b"")
    tokens = TOKENS[:17]
    assert kv.open(first, tokens) == 0
    assert waits(kv, second, tokens)
    kv.publish(first, tokens, 4)
    assert second.claim.match
    (kv.close if end == "closed" else kv.release_claims)(first, tokens)
    assert not second.claim.match and kv.match(second, tokens) == (4, 13, None)
    assert kv.open(second, tokens) == 4


def test_uncached_prefixes_are_remembered_until_published() -> None:
    kv = cache((40, 0))
    context, other = kv.context(b""), kv.context(b"")
    compute(kv, TOKENS[:8])
    assert kv.match(context, TOKENS[:17]) == (8, 9, None)
    compute(kv, [*TOKENS[:8], *range(1, 9)])
    assert context.claim.match
    assert kv.open(other, TOKENS[:13]) == 8
    kv.publish(other, TOKENS[:13], 12)
    assert not context.claim.match and kv.match(context, TOKENS[:17]) == (12, 5, None)


def test_a_windows_missing_blocks_may_come_with_the_end_of_a_load() -> None:
    """A load brings only those blocks of a window that its end needs; nothing before that is of use."""
    kv = cache((40, 0), (40, 6))
    load, waiting, tokens = kv.context(b""), kv.context(b""), TOKENS[:33]
    assert kv.prepare(load, tokens, 0, 8, 0) and kv.extend(load, tokens, 4, [0])
    kv.publish(load, tokens, 16)
    assert kv.match(waiting, tokens) == (0, 33, None)
    assert kv.extend(load, tokens, 8, [0, 1])
    kv.publish(load, tokens, 32)
    assert not waiting.claim.match and kv.match(waiting, tokens) == (32, 1, None)


@pytest.mark.parametrize("change", ["none", "free", "held", "published"])
def test_a_waiter_for_room_is_woken_when_room_may_be_free(change: str) -> None:
    kv = cache((10, 0))
    compute(kv, TOKENS[:8])
    first = compute(kv, [1, *TOKENS[:11]])
    second, third = kv.context(b""), kv.context(b"")
    assert kv.open(second, [2] * 8) == 0
    wanted = TOKENS[:37]
    assert kv.open(third, wanted) is None
    assert third.claim.match is not None and third.claim.match.blocked_on is kv.pools[0]
    if change == "free":
        kv.close(first, [1, *TOKENS[:11]])
    elif change == "held":
        assert kv.open(kv.context(b""), TOKENS[:9]) == 8
    elif change == "published":
        fourth = kv.context(b"")
        kv.prepare(fourth, wanted, 2, 3, 0)
        assert kv.open(third, wanted) is None and kv.extend(fourth, wanted, 3, [0])
        kv.publish(fourth, wanted, 12)
    assert (third.claim.match is None) == (change != "none")


@pytest.mark.parametrize("running", [True, False])
def test_a_wake_that_was_forgotten_is_made_up_for(running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if an event was lost, no sequence may wait for ever for a block that nobody computes."""
    kv = cache((40, 0))
    first = kv.context(b"")
    waiting = [kv.context(b"") for _ in range(3)]
    assert kv.open(first, TOKENS[:17]) == 0
    assert all(waits(kv, context, TOKENS[:17]) for context in waiting)
    kv.recheck(running=True)
    assert kv.blocked == 3
    with monkeypatch.context() as patch:
        patch.setattr(Waiters, "settled", lambda *_: None)
        kv.publish(first, TOKENS[:17], 16)
    assert kv.blocked == 3
    for _ in range(3 if running else 1):
        kv.recheck(running=running)
    assert kv.blocked == 0


def test_another_tenant_or_another_prompt_does_not_wait() -> None:
    kv = cache((40, 0))
    assert kv.open(kv.context(b""), TOKENS[:17]) == 0
    assert not waits(kv, kv.context(b"other"), TOKENS[:17])
    assert not waits(kv, kv.context(b""), [1, *TOKENS[1:17]])
    # less than one block of a prompt is left, and computed anyway
    assert not waits(kv, kv.context(b""), TOKENS[:4])


def test_the_second_publisher_of_a_key_uses_the_first_block() -> None:
    kv = cache((40, 0))
    first = compute(kv, TOKENS[:9])
    second = compute(kv, TOKENS[:9], reuse=False)
    assert second.table.groups[0][:2] == first.table.groups[0][:2]
    assert second.table.groups[0][2] != first.table.groups[0][2]
    assert kv.use()[0].held == 4
    longer = TOKENS[:13]
    kv.publish(second, longer, 12)
    kv.close(first, TOKENS[:9])
    kv.close(second, longer)
    assert covered(kv, longer) == 12


def test_without_reuse_everything_is_computed_and_published() -> None:
    kv = cache((40, 0))
    context = kv.context(b"")
    compute(kv, TOKENS[:9])
    assert kv.open(context, TOKENS[:9], reuse=False) == 0


def test_leaves_are_evicted_first() -> None:
    kv = cache((6, 0))
    kv.close(compute(kv, TOKENS[:17]), TOKENS[:17])
    assert left(kv) == [(2, 4, 0)]
    compute(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert covered(kv, TOKENS[:9]) == 8


def test_a_context_can_be_opened_again_after_it_was_closed() -> None:
    kv = cache((20, 0), (20, 6))
    context = compute(kv, TOKENS[:18])
    kv.close(context, TOKENS[:18])
    assert [use.held for use in kv.use()] == [0, 0]
    assert kv.open(context, TOKENS[:18]) == 16
    kv.close(context, TOKENS[:18])
    kv.close(context, TOKENS[:18])
    assert [use.held for use in kv.use()] == [0, 0]


def test_another_model_of_the_same_shape_finds_nothing() -> None:
    """Its keys have another root (known failure 28)."""
    one, two = cache((20, 0)), cache((20, 0), identity=b"other weights")
    keys = [kv.context(b"").chains[0].key(0, TOKENS) for kv in (one, two)]
    assert keys[0] != keys[1]
