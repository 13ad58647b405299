"""KV in a shared store: one server reads what another stored, and a failing store costs only time."""

from __future__ import annotations

import dataclasses
import errno
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cluster import feed, shared_kv
from cairn.cluster.feed import BATCH, Feed
from cairn.cluster.guard import FAILURES, Guarded
from cairn.cluster.shared_kv import QUEUE_BYTES, SharedChunks
from cairn.kv.tiers.store import HEAD_BYTES, Chunk
from cairn.system.posix import SystemClock
from tests.cluster.stores import Draws, MemoryBlobs, keys
from tests.cluster.test_keys import tampered
from tests.kv.stored import Time, chain


def replica(blobs: MemoryBlobs, time: Time, number: int) -> SharedChunks:
    sealed = keys(1000 * number)
    return SharedChunks(blobs, sealed, Feed(blobs, sealed, "kv-x", time, Draws(1000 * number)), time)


def same(chunk: Chunk | None, other: Chunk) -> bool:
    return chunk is not None and dataclasses.replace(chunk, pages=bytes(chunk.pages)) == other


def test_a_server_reads_what_another_stored() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(3)
    one, two = replica(blobs, clock, 1), replica(blobs, clock, 2)
    assert one.keep(chunks) == 3
    assert one.match_prefix([chunk.key for chunk in chunks]) == 3, "what is queued counts already"
    assert same(one.fetch(chunks[0].key, chunks[0].tokens), chunks[0])
    assert one.work() and two.work()
    assert two.match_prefix([chunk.key for chunk in chunks]) == 3
    for chunk in chunks:
        assert same(two.fetch(chunk.key, chunk.tokens), chunk)
    assert two.fetch(chunks[0].key, (1, 2, 3)) is None, "other tokens"
    assert two.stats().read > 0 and one.stats().written > 0


def test_two_sharing_servers_know_of_each_other_at_once() -> None:
    """Without waiting for `LOOK_SECONDS`: the clock stands still, so no periodic look happens."""
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(3)
    one, two = replica(blobs, clock, 1), replica(blobs, clock, 2)
    for each in (one, two):
        each.start()
        assert each.settle(60)
    assert one.keep(chunks) == 3
    assert one.settle(60) and len([name for name in blobs.objects if name.startswith("kv/")]) == 3
    assert not two.has(chunks[0].key)
    assert two.settle(60) and two.match_prefix([chunk.key for chunk in chunks]) == 3
    blobs.dead = True
    assert one.keep(chain(5)[3:]) == 2 and not one.settle(0.3), "a store that does not answer is not waited for"
    one.close()
    two.close()


def test_the_names_and_contents_of_objects_show_no_token() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(2)
    one = replica(blobs, clock, 1)
    one.keep(chunks)
    one.work()
    everything = b"".join(blobs.objects.values()) + "".join(blobs.objects).encode()
    assert all(chunk.key not in everything and chunk.key.hex().encode() not in everything for chunk in chunks)
    assert all(bytes(chunk.pages)[:32] not in everything for chunk in chunks)


def test_dropped_chunks_go_everywhere() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(3)
    one, two = replica(blobs, clock, 1), replica(blobs, clock, 2)
    one.keep(chunks)
    one.work()
    two.work()
    assert two.drop([chunks[1].key]) == 2, "and what extends it"
    two.work()
    clock.seconds += 1
    one.work()
    assert one.match_prefix([chunk.key for chunk in chunks]) == 1
    assert len([name for name in blobs.objects if name.startswith("kv/")]) == 1


def test_a_whole_chunk_takes_the_place_of_its_tail() -> None:
    blobs, clock = MemoryBlobs(), Time()
    one = replica(blobs, clock, 1)
    (whole,) = chain(1)
    tail = dataclasses.replace(whole, key=b"t" * 32, tokens=whole.tokens[:16])
    one.keep([tail])
    one.work()
    one.keep([dataclasses.replace(whole, heads=(tail.key[:HEAD_BYTES],))])
    one.work()
    one.work()
    assert not one.has(tail.key) and one.match_within([tail.key]) == (1, whole.key)
    assert [name for name in blobs.objects if name.startswith("kv/")] == [one.name(whole.key)]


def test_no_tampered_chunk_is_served(prove: bool, figure: Callable[[str, str], None]) -> None:
    rng, blobs, clock = random.Random(3), MemoryBlobs(), Time()
    chunks = [chain(1, salt=bytes([number]))[0] for number in range(40)]
    one, two = replica(blobs, clock, 1), replica(blobs, clock, 2)
    one.keep(chunks)
    one.work()
    two.work()
    sound = dict(blobs.objects)
    served = 0
    tries = 40_000 if prove else 2_000
    for number in range(tries):
        chunk, other = chunks[number % 40], chunks[rng.randrange(40)]
        name = two.name(chunk.key)
        blobs.objects[name] = tampered(rng, sound[name], sound[two.name(other.key)])
        fetched = two.fetch(chunk.key, chunk.tokens)
        served += fetched is not None and not same(fetched, chunk)
        if blobs.objects[name] != sound[name]:
            assert fetched is None
            assert not two.has(chunk.key), "it is forgotten, and computed again"
        blobs.objects[name] = sound[name]
        two._enter(chunk.key, one._places[chunk.key])
    assert not served
    figure("tampered chunks of a shared store served", f"0 of {tries:,}")


def test_a_dead_store_holds_up_nobody_and_is_tried_again() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(3)
    one, two = replica(blobs, clock, 1), replica(blobs, clock, 2)
    blobs.dead = True
    assert one.keep(chunks) == 3 and not one.work()
    assert "dead" in one.stats().trouble
    assert same(one.fetch(chunks[0].key, chunks[0].tokens), chunks[0]), "from the queue"
    assert two.fetch(chunks[0].key, chunks[0].tokens) is None
    blobs.dead = False
    assert one.work() and not one.stats().trouble and two.work()
    assert same(two.fetch(chunks[2].key, chunks[2].tokens), chunks[2])


def test_a_queue_that_is_full_refuses() -> None:
    blobs, clock = MemoryBlobs(), Time()
    one = replica(blobs, clock, 1)
    big = [dataclasses.replace(chunk, pages=bytes(QUEUE_BYTES // 2)) for chunk in chain(3)]
    assert one.keep(big) == 2 and one.stats().refused == 1
    assert one.match_prefix([chunk.key for chunk in big]) == 2


def test_a_feed_of_a_wrong_clock_is_heard_later() -> None:
    blobs, clock, late = MemoryBlobs(), Time(), Time()
    late.wall = -5 * 3600.0
    one, two = replica(blobs, late, 1), replica(blobs, clock, 2)
    two.work()
    one.keep(chain(1))
    one.work()
    clock.seconds += 1
    two.work()
    assert not two.has(chain(1)[0].key)
    clock.seconds += 700
    two.work()
    assert two.has(chain(1)[0].key)


def announced(blobs: MemoryBlobs, clock: Time, chunks: list[Chunk], number: int = 1) -> None:
    """Announce each chunk on its own, ten minutes apart, up to now."""
    one = replica(blobs, clock, number)
    end, clock.wall = clock.wall, clock.wall - 600.0 * len(chunks)
    for chunk in chunks:
        one.keep([chunk])
        assert one.work()
        clock.wall += 600.0
    assert clock.wall == end


def test_a_server_that_starts_writes_before_it_has_read_all_that_was_announced() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(302)
    announced(blobs, clock, chunks[:300])
    two = replica(blobs, clock, 2)
    for number, chunk in enumerate(chunks[300:], 1):
        two.keep([chunk])
        before = blobs.calls
        assert two.work() and two.name(chunk.key) in blobs.objects
        assert blobs.calls - before <= BATCH + 10
        known = [two.has(one.key) for one in chunks[:300]]
        assert known == [False] * (300 - number * BATCH) + [True] * (number * BATCH), "the newest first"
    while two._feed.behind:
        assert two.work()
    assert all(two.has(one.key) for one in chunks)
    blobs.calls = 0
    clock.seconds += 1000
    assert two.work() and blobs.calls < 10, "nothing is read twice"


def test_what_was_announced_is_read_with_several_requests_at_once() -> None:
    blobs, clock = MemoryBlobs(), Time()
    announced(blobs, clock, chain(40))
    running = threading.Barrier(4)

    def together(call: str, name: str) -> None:
        if call == "read":
            running.wait(60)

    two = replica(blobs, clock, 2)
    blobs.before = together
    assert two.work() and all(two.has(one.key) for one in chain(40))


def test_a_settled_server_knows_what_was_announced_lately_and_reads_the_rest_later() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(600)
    announced(blobs, clock, chunks)
    two = replica(blobs, clock, 2)
    blobs.slow = 0.002
    two.start()
    assert two.settle(60) and two.has(chunks[-1].key)
    for _ in range(6000):
        if two.has(chunks[0].key):
            break
        time.sleep(0.01)
    assert all(two.has(one.key) for one in chunks)
    two.close()


def test_the_index_of_a_server_that_starts_holds_the_newest_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_kv, "MOST_CHUNKS", 2 * BATCH)
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(6 * BATCH)
    announced(blobs, clock, chunks)
    two = replica(blobs, clock, 2)
    before = blobs.calls
    while two._looked < 0 or two._feed.behind:
        assert two.work()
    assert blobs.calls - before < 3 * BATCH, "the rest is not read"
    assert [two.has(one.key) for one in chunks] == [False] * (4 * BATCH) + [True] * (2 * BATCH)
    extra = chain(6 * BATCH + 1)[-1]
    two.keep([extra])
    known = [two.has(one.key) for one in chunks]
    assert two.has(extra.key) and known == [False] * (4 * BATCH + 1) + [True] * (2 * BATCH - 1), "the oldest goes"


def test_names_of_announcements_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_SEEN", 100)
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(300)
    announced(blobs, clock, chunks)
    two = replica(blobs, clock, 2)
    for _ in range(20):
        assert two.work()
        clock.seconds += 1000.0  # each look is at all hours
    assert sum(map(len, two._feed._seen.values())) <= 100
    known = [two.has(one.key) for one in chunks]
    assert known == sorted(known) and 80 < sum(known) <= 100, "the newest, and what is older is not read"


def test_an_old_announcement_changes_nothing_of_what_newer_ones_say() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(BATCH + 10)
    one = replica(blobs, clock, 1)

    def announce(chunk: Chunk, *, dropped: bool = False) -> None:
        one.drop([chunk.key]) if dropped else one.keep([chunk])
        assert one.work()
        clock.wall += 60.0

    back, gone, mine = (dataclasses.replace(chain(1)[0], key=bytes([value]) * 32) for value in (1, 2, 3))
    for chunk, dropped in ((back, False), (back, True), (gone, False), (mine, False), (mine, True)):
        announce(chunk, dropped=dropped)
    announce(back)
    announce(gone, dropped=True)
    for chunk in chunks:
        announce(chunk)
    two = replica(blobs, clock, 2)
    two.keep([mine])
    while two._looked < 0 or two._feed.behind:
        assert two.work()
    assert two.has(back.key) and two.has(mine.key) and not two.has(gone.key)
    assert two.name(mine.key) in blobs.objects and two.name(gone.key) not in blobs.objects
    assert not two._decided


def test_one_object_that_fails_hides_no_announcement_and_holds_up_no_chunk() -> None:
    blobs, clock, chunks = MemoryBlobs(), Time(), chain(6)
    announced(blobs, clock, chunks[:4])
    bad = sorted(name for name in blobs.objects if name.startswith("feed/"))[1]
    guarded = Guarded(blobs, SystemClock())
    sealed = keys(5000)
    two = SharedChunks(guarded, sealed, Feed(guarded, sealed, "kv-x", clock, Draws(5000)), clock)
    failing = {bad, two.name(chunks[0].key), two.name(chunks[4].key)}

    def fails(call: str, name: str) -> None:
        if name in failing:
            raise OSError(errno.EACCES, "no right")

    blobs.before = fails
    two.keep(chunks[4:])
    assert two.work() and not two._feed.behind
    assert [two.has(one.key) for one in chunks] == [True, False, True, True, False, True]
    assert two.name(chunks[5].key) in blobs.objects and two.stats().refused == 1
    delete = blobs.delete

    def refuses(names: Sequence[str]) -> None:
        for name in names:
            fails("delete", name)
            delete([name])

    blobs.delete = refuses  # type: ignore[method-assign]
    two.drop([chunks[0].key, chunks[2].key])
    assert two.work() and two.name(chunks[2].key) not in blobs.objects and two.name(chunks[0].key) in blobs.objects


def test_a_call_to_a_store_that_hangs_is_given_up_and_then_none_is_made() -> None:
    blobs = MemoryBlobs()
    blobs.slow = 30.0
    guarded = Guarded(blobs, SystemClock(), deadline=0.05)
    began = time.monotonic()
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="did not answer within"):
            guarded.read("x")
    calls = blobs.calls
    for _ in range(100):
        with pytest.raises(OSError, match="does not work"):
            guarded.read("x")
    assert blobs.calls == calls and time.monotonic() - began < 20
    assert "did not answer" in guarded.trouble


def test_an_object_that_is_there_with_the_same_content_counts_as_made() -> None:
    """A create whose answer was lost is retried, and must not be taken for another writer's."""
    guarded = Guarded(MemoryBlobs(), SystemClock())
    assert (
        guarded.create("x", b"mine")
        and guarded.create("x", bytes(bytearray(b"mine")))
        and not guarded.create("x", b"another's")
    )
