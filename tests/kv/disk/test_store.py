"""The disk store: what it keeps, returns and evicts."""

from __future__ import annotations

import errno
import hashlib
import math
import random
import re
import threading
import time as machine_time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.kv.disk.chunk_file import Name
from cairn.kv.disk.codec import Raw
from cairn.kv.disk.index import DiskIndex, IndexEntry
from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import OVERHEAD, Chunk
from cairn.kv.tiers.store_writer import StoreWriter
from cairn.system.posix import SystemFiles
from cairn.types.errors import ConfigError, Conflict
from tests.files import CrashFile, CrashFiles, Fault
from tests.kv.stored import FOLDER, SIZE, Time, chain, chunk_path, held, keys, on_disk, open_store


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def files(time: Time) -> CrashFiles:
    return CrashFiles(now=time.now)


# ------------------------------------------------------------------------------------------------- keep, find, fetch


def test_stored_chunks_are_found_after_a_restart(files: CrashFiles, time: Time) -> None:
    """The files themselves say what a store holds; there is no index that a crash could lose (known failure 31)."""
    store = open_store(files, time)
    chunks = chain(5)
    assert store.keep(chunks) == 5
    before = store.stats()
    store.close()
    again = open_store(files, time)
    assert again.match_prefix(keys(chunks)) == 5
    assert [again.fetch(chunk.key, chunk.tokens) for chunk in chunks] == chunks
    assert (again.stats().chunks, again.stats().bytes) == (5, before.bytes) == (5, on_disk(files))


def test_other_tokens_under_the_same_key_are_a_miss(files: CrashFiles, time: Time) -> None:
    """Known failure 26."""
    store = open_store(files, time)
    [chunk] = chain(1)
    store.keep([chunk])
    assert store.fetch(chunk.key, (*chunk.tokens[:-1], chunk.tokens[-1] + 1)) is None
    assert store.fetch(chunk.key, (*chunk.tokens, 1)) is None
    assert store.fetch(chunk.key, chunk.tokens[:-1]) == chunk, "it begins with these"
    assert store.fetch(chunk.key, chunk.tokens) == chunk
    assert store.stats().damaged == 0


def test_a_chunk_is_read_into_the_buffer_that_was_given(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    [chunk] = chain(1)
    store.keep([chunk])
    buffer = memoryview(bytearray(len(chunk.pages) + OVERHEAD))
    got = store.fetch(chunk.key, chunk.tokens, buffer)
    assert got == chunk
    buffer[:] = bytes(len(buffer))
    assert got is not None and bytes(got.pages) == bytes(len(chunk.pages)), "the pages lie in it"
    assert store.fetch(chunk.key, chunk.tokens, buffer[:100]) == chunk, "one that is too small is left alone"
    assert bytes(buffer) == bytes(len(buffer))


def test_a_longer_or_shorter_file_is_damaged_in_a_buffer_too(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = [*chain(1), *chain(1, salt=b"other")]
    store.keep(chunks)
    buffer = memoryview(bytearray(len(chunks[0].pages) + OVERHEAD))
    for chunk, bend in zip(chunks, (lambda data: data + b"x", lambda data: data[:-1]), strict=True):
        path = chunk_path(files, chunk)
        files.put(path, bend(files.files()[path]))
        assert store.fetch(chunk.key, chunk.tokens, buffer) is None
    assert store.stats().damaged == 2


def test_the_disk_gets_a_hint_of_the_next_reads(files: CrashFiles, time: Time) -> None:
    """Two chunks ahead, as far as contexts do not diverge, and only for a reader that brings a buffer."""
    store = open_store(files, time)
    chunks = chain(5)
    forks = chain(1, salt=b"one", after=chunks[-1]) + chain(1, salt=b"other", after=chunks[-1])
    store.keep([*chunks, *forks])
    store.fetch(chunks[0].key, chunks[0].tokens)
    assert files.announced == []
    buffer = memoryview(bytearray(len(chunks[0].pages) + OVERHEAD))
    for chunk in [*chunks, *forks]:
        assert store.fetch(chunk.key, chunk.tokens, buffer) == chunk
    assert files.announced == [chunk_path(files, chunk) for chunk in chunks[2:]]


def test_a_hole_ends_the_run(files: CrashFiles, time: Time) -> None:
    """With a, b, c requested and b missing, only a may be returned (known failure 32)."""
    store = open_store(files, time)
    chunks = chain(4)
    store.keep(chunks)
    a, _, c, d = keys(chunks)
    assert store.match_prefix([a, b"?" * 32, c, d]) == 1
    assert store.match_prefix([b"?" * 32, a]) == 0
    assert store.match_prefix([]) == 0


def test_a_chunk_without_its_prefix_is_refused(files: CrashFiles, time: Time) -> None:
    """The store itself never has a hole (known failure 32)."""
    store = open_store(files, time)
    a, b, c, d = chain(4)
    assert store.keep([b]) == 0
    assert store.keep([a, c, d]) == 1
    assert store.keep([a, b, b, c]) == 4
    assert store.match_prefix(keys([a, b, c, d])) == 3
    assert store.stats().refused == 3


def test_a_chunk_is_written_once(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = chain(3)
    store.keep(chunks)
    written = store.stats().written
    assert store.keep(chunks) == 3
    assert store.stats().written == written


@pytest.mark.parametrize("how", [{"identity": b"other"}, {"codec": Raw([SIZE // 4, SIZE // 4])}])
def test_models_share_a_folder_and_nothing_else(files: CrashFiles, time: Time, how: dict[str, object]) -> None:
    """The same keys under another identity belong to another model (known failure 28)."""
    store = open_store(files, time)
    chunks = chain(3)
    store.keep(chunks)
    store.close()
    other = open_store(files, time, **how)
    mine = "identity" not in how
    assert other.match_prefix(keys(chunks)) == (3 if mine else 0)
    assert (other.fetch(chunks[0].key, chunks[0].tokens) is not None) == mine
    assert other.stats().chunks == 3
    assert other.keep(chunks) == 3
    assert other.stats().chunks == (3 if mine else 6)


def test_a_chunk_offered_again_after_a_refusal_counts_as_refused_once(files: CrashFiles, time: Time) -> None:
    """A batch is offered again without the refused chunks; 10 refusals were once counted as 105."""
    store, memory = open_store(files, time), RamStore(1 << 20)
    lost = [chunk for number in range(5) for chunk in chain(3, salt=bytes([number]))[1:]]
    whole = [chunk for number in range(5) for chunk in chain(1, salt=b"whole%d" % number)]
    writer = StoreWriter((memory, store), time, lambda: None, lambda: None)
    for chunk in [*lost, *whole]:
        writer.push(chunk)
    assert writer.work() and not writer.work()
    assert list(writer.finished) == [(key, False) for key in keys(lost)] + [(key, True) for key in keys(whole)]
    for stats in (store.stats(), memory.stats()):
        assert (stats.chunks, stats.refused) == (5, 10)


def test_pages_of_another_size_are_refused_and_not_read(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    [chunk] = chain(1, size=SIZE - 4)
    assert store.keep([chunk]) == 0
    store.keep(chain(1))
    store.close()
    wider = open_store(files, time, size=2 * SIZE)
    [chunk] = chain(1)
    assert wider.fetch(chunk.key, chunk.tokens) is None
    assert wider.stats().damaged == 1


# ---------------------------------------------------------------------------------------------- budget and eviction


def test_the_budget_holds_at_every_moment_and_after_a_restart(files: CrashFiles, time: Time) -> None:
    """The budget counts headers, pins and leftovers too (known failure 31)."""
    budget = 40 * 4096
    most = 0

    def look(kind: str) -> None:
        nonlocal most
        most = max(most, on_disk(files))

    files.after_change = look
    for round_ in range(4):
        store = open_store(files, time, budget=budget)
        for number in range(6):
            store.keep(chain(5, salt=bytes([round_, number])))
            assert store.stats().bytes == on_disk(files)
        store.pin("a", keys(chain(3, salt=bytes([round_, 5]))))
        assert store.stats().bytes == on_disk(files) <= budget
        store.close()
    assert budget - 4096 * 6 < most <= budget
    small = open_store(files, time, budget=10 * 4096)
    assert small.stats().bytes == on_disk(files) <= 10 * 4096
    assert small.stats().evicted > 0


def test_the_budget_holds_on_a_disk_that_reports_file_sizes_late(
    files: CrashFiles, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ZFS a file seems to take next to nothing until some seconds after the sync."""
    monkeypatch.setattr(CrashFile, "disk", lambda file: 512)
    store = open_store(files, time, budget=10 * 4096)
    for number in range(6):
        assert store.keep(chain(5, salt=bytes([number]))) == 5
    assert store.stats().bytes == on_disk(files) <= 10 * 4096


def test_leaves_go_first_the_oldest_of_them(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, budget=(12 + 1) * 4096)
    deep, old, new = chain(10), chain(1, salt=b"old"), chain(1, salt=b"new")
    for one in (deep, old, new):
        assert store.keep(one) == len(one)
        time.sleep(100)
    assert store.match_prefix(keys(old)) == 1  # now it is the most recently used
    time.sleep(100)
    store.keep(chain(1, salt=b"more"))
    assert [held(files, one) for one in (deep, old, new)] == [9, 1, 1]
    assert store.match_prefix(keys(deep)) == 9
    time.sleep(100)
    store.keep(chain(1, salt=b"even more"))
    assert [held(files, one) for one in (deep, old, new)] == [9, 1, 0]


def test_using_a_chunk_uses_its_ancestors(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, budget=(5 + 1) * 4096)
    long, other = chain(3), chain(2, salt=b"o")
    store.keep(long)
    time.sleep(100)
    store.keep(other)
    time.sleep(100)
    store.match_prefix(keys(long))
    time.sleep(100)
    store.keep(chain(2, salt=b"x"))
    assert (held(files, long), held(files, other)) == (3, 0)
    store.keep(chain(1, salt=b"y", after=chain(2, salt=b"x")[1]))
    assert held(files, long) == 2
    store.keep(chain(2, salt=b"z"))
    assert (held(files, long), held(files, chain(2, salt=b"x"))) == (0, 2)


def test_a_use_that_a_dropped_chunk_left_behind_outlives_a_restart(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, budget=(3 + 1) * 4096)
    used, other = chain(2), chain(1, salt=b"o")
    for one in (used, other):
        assert store.keep(one) == len(one)
        time.sleep(100)
    assert store.match_prefix(keys(used)) == 2
    assert store.drop([used[1].key]) == 1
    store.close()
    store = open_store(files, time, budget=(3 + 1) * 4096)
    store.keep(chain(2, salt=b"x"))
    assert (held(files, used), held(files, other)) == (1, 0)


def test_dear_chunks_outlast_cheap_ones(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, budget=103 * 4096)
    deep = chain(100)
    for chunk in deep:
        assert store.keep([chunk]) == 1
    cheap = chain(1, salt=b"cheap")
    time.sleep(100)
    store.keep(cheap)
    time.sleep(100)
    store.keep(chain(1, salt=b"x"))
    assert store.stats().evicted == 0
    time.sleep(100)
    store.keep(chain(1, salt=b"y"))
    assert held(files, cheap) == 0, "a chunk at the start costs less to compute than one at 6,400"
    assert held(files, deep) == 100


def test_pinned_chunks_stay_with_their_prefix(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, budget=9 * 4096)
    chunks = chain(4)
    store.keep(chunks)
    store.pin("agent", [chunks[2].key])
    assert store.stats().pinned == 3
    store.close()
    store = open_store(files, time, budget=9 * 4096)
    assert store.stats().pinned == 3
    for number in range(9):
        time.sleep(100)
        assert store.keep(chain(2, salt=bytes([number]))) == 2
    assert held(files, chunks) == 3
    store.pin("agent", [])
    for number in range(9):
        time.sleep(100)
        assert store.keep(chain(2, salt=bytes([number, 1]))) == 2
    assert held(files, chunks) == 0
    store.close()
    assert open_store(files, time).stats().pinned == 0


def test_a_pin_holds_for_chunks_that_come_later_and_for_each_owner(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, budget=9 * 4096)
    chunks = chain(3)
    store.pin("a", keys(chunks))
    store.pin("b", keys(chunks)[:1])
    store.keep(chunks)
    store.pin("a", [])
    for number in range(9):
        time.sleep(100)
        assert store.keep(chain(2, salt=bytes([number]))) == 2
    assert held(files, chunks) == 1


def test_unpinning_reaches_other_models(files: CrashFiles, time: Time) -> None:
    first = open_store(files, time)
    first.keep(chain(2))
    first.pin("agent", keys(chain(2)))
    first.pin("else", keys(chain(1)))
    first.close()
    second = open_store(files, time, identity=b"second")
    assert second.stats().pinned == 2
    second.pin("agent", [])
    assert second.stats().pinned == 1
    second.close()
    assert open_store(files, time).stats().pinned == 1


def test_unpinning_reaches_other_models_when_the_disk_is_back(files: CrashFiles, time: Time) -> None:
    first = open_store(files, time, identity=b"first")
    first.keep(chain(3))
    first.pin("agent", keys(chain(3)))
    first.pin("else", keys(chain(1)))
    first.close()
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    store = open_store(files, time)
    store.pin("agent", [])
    store.pin("agent", keys(chain(2, salt=b"mine")))
    files.heal()
    time.sleep(2)
    store.tend()
    assert (store.stats().trouble, store.stats().pinned) == ("", 1)
    assert store.keep(chain(2, salt=b"mine")) == 2
    store.close()
    assert open_store(files, time).stats().pinned == 1 + 2


def test_a_pin_that_could_not_be_read_can_be_undone(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    store.keep(chain(2))
    store.pin("agent", keys(chain(2)))
    store.close()
    files.log = []
    open_store(files, time).close()
    kinds = [kind for kind, _ in files.log]
    last_read = len(kinds) - 1 - kinds[::-1].index("read")
    files.fail(Fault(files.calls + last_read, only=frozenset({"read"})))
    store = open_store(files, time)
    assert (files.fired, store.stats().pinned) == (1, 0)
    store.pin("agent", [])
    assert not files.files(FOLDER / "pins") and store.stats().bytes == on_disk(files)
    store.close()
    assert open_store(files, time).stats().pinned == 0


class CountedLookups(dict[bytes, Any]):
    """A dictionary that counts its lookups by `get`."""

    lookups = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(key, default)


def test_a_pin_that_is_replaced_costs_what_changed(files: CrashFiles, time: Time) -> None:
    """Metrics are read between steps, and an agent's pin is replaced after each of its turns."""
    store = open_store(files, time)
    agents = [chain(6, salt=bytes([number])) for number in range(20)]
    for number, chunks in enumerate(agents):
        store.keep(chunks)
        store.pin(str(number), keys(chunks)[:5])
    assert store.stats().pinned == 100
    index = store._state.index
    counted = index._chunks_by_head = CountedLookups(index._chunks_by_head)
    store.pin("7", keys(agents[7])[1:])
    assert store.stats().pinned == 101, "the first chunk has lost its own pin, but others extend it"
    assert counted.lookups < 10


@pytest.mark.parametrize("seed", range(5))
def test_pinned_chunks_are_counted_with_each_change(seed: int) -> None:
    draw, index, tag = random.Random(seed), DiskIndex(), b"t" * 8
    numbers = iter(range(10**6))

    def key() -> bytes:
        return hashlib.sha256(f"{seed} {next(numbers)}".encode()).digest()

    def expected() -> int:
        pinned = {(id[:8] + id[8:16]) for ids in index.pins.values() for id in ids}
        found = set[bytes]()
        for entry in index.live():
            blocks = {tag + head for head in (*entry.name.heads, entry.name.key[:8])}
            one: IndexEntry | None = entry if blocks & pinned else None
            while one is not None:
                found.add(one.id)
                one = index.get(one.parent)
        return len(found)

    known, most = [key() for _ in range(20)], 0
    for _ in range(400):
        live = index.live()
        match draw.randrange(4):
            case 0 | 1:
                parent = draw.choice([*live, None])
                fresh = known.pop(draw.randrange(len(known))) if draw.random() < 0.5 and len(known) > 5 else key()
                if not index.known(tag + fresh):
                    above = (parent.id, parent.name.key) if parent is not None else (b"", b"")
                    blocks = [draw.choice(known)[:8], key()[:8]] if draw.random() < 0.5 else []
                    name = Name(fresh, above[1], tag, 64, 1000, tuple(blocks))
                    index.add(IndexEntry(tag + fresh, above[0], name, 4096, 1.0, 1.0))
                    known.append(fresh)
            case 2:
                ids = draw.sample([tag + one for one in known], draw.randrange(5))
                index.pin(draw.choice("abc"), ids)
            case 3 if live:
                for entry in index.family([draw.choice(live).id]):
                    index.mark_deleted(entry)
                    index.forget(entry)
        assert index.pinned == expected()
        most = max(most, index.pinned)
    assert most > 3


def test_more_pinned_than_the_budget_is_reported_until_some_is_unpinned(files: CrashFiles, time: Time) -> None:
    """Also with pins of chunks that are not stored yet, and after a restart."""
    budget = 10 * 4096
    store = open_store(files, time, budget=budget)
    chunks = chain(20)
    store.pin("early", keys(chunks))
    assert not store.stats().trouble, "nobody knows yet what a chunk takes"
    store.keep(chunks[:5])
    store.tend()
    assert "pinned KV needs about 81,920 bytes" in store.stats().trouble and "--kv-disk-gb" in store.stats().trouble
    store.close()
    store = open_store(files, time, budget=budget)
    assert "pinned KV" in store.stats().trouble
    store.pin("early", keys(chunks[:5]))
    assert not store.stats().trouble
    store.pin("other", keys(chunks[:9]))
    assert not store.stats().trouble, "what two pin is there once"
    store.pin("other", keys(chunks))
    assert store.stats().trouble
    store.pin("other", [])
    assert not store.stats().trouble


def test_without_a_time_to_live_nothing_grows_too_old_and_a_short_one_is_kept_to(files: CrashFiles, time: Time) -> None:
    chunks = chain(2)
    store = open_store(files, time, ttl=math.inf)
    store.keep(chunks)
    time.seconds += 10 * 365 * 86400
    store.tend()
    assert store.prune() == 0 and store.match_prefix(keys(chunks)) == 2
    store.close()
    store = open_store(files, time, ttl=60.0)
    store.match_prefix(keys(chunks))
    store.tend()
    time.seconds += 59
    store.tend()
    assert held(files, chunks) == 2
    time.seconds += 7
    store.tend()
    assert held(files, chunks) == 0


def test_an_owner_is_never_a_file_name(files: CrashFiles, time: Time) -> None:
    """The name that a client gives its agent must not appear on the disk (known failure 29)."""
    store = open_store(files, time)
    store.pin("../../etc/passwd", keys(chain(1)))
    assert not any("passwd" in str(path) for path in files.files())
    assert all(path.is_relative_to(FOLDER) for path in files.files())


def test_chunks_unused_for_the_time_to_live_are_removed(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time, ttl=1000.0)
    old, used, pinned = chain(3), chain(3, salt=b"used"), chain(2, salt=b"pinned")
    for one in (old, used, pinned):
        store.keep(one)
    store.pin("a", keys(pinned))
    time.sleep(900)
    store.match_prefix(keys(used))
    store.tend()
    store.close()
    time.sleep(200)
    store = open_store(files, time, ttl=1000.0)
    store.tend()
    assert [store.match_prefix(keys(one)) for one in (old, used, pinned)] == [0, 3, 2]


def test_a_wall_clock_that_jumps_makes_nothing_old(files: CrashFiles, time: Time) -> None:
    time.wall = -900_000.0  # a machine that thinks it is 1970 until it has the network's time
    store = open_store(files, time, ttl=1000.0)
    store.keep(chain(3))
    time.wall = 1e9
    time.sleep(700)
    store.tend()
    assert store.match_prefix(keys(chain(3))) == 3


def test_a_wall_clock_that_is_ahead_at_the_start_makes_nothing_old(files: CrashFiles, time: Time) -> None:
    """Nor does a long rest: chunks are pruned only when unused for the time to live since the start."""
    store = open_store(files, time, ttl=1000.0)
    older, newer = chain(2, salt=b"older"), chain(3)
    store.keep(older)
    time.sleep(900)
    store.keep(newer)
    store.close()
    time.sleep(1)
    time.wall = 1e6
    store = open_store(files, time, ttl=1000.0)
    store.tend()
    assert (held(files, older), held(files, newer)) == (2, 3)
    time.sleep(700)
    store.tend()
    assert (held(files, older), held(files, newer)) == (0, 3)
    time.sleep(700)
    store.tend()
    assert held(files, newer) == 0


def test_a_long_chain_is_pruned_with_one_look_at_the_index(
    files: CrashFiles, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(files, time)
    long, fork = chain(60), chain(20, salt=b"fork", after=chain(30)[-1])
    store.keep(long + fork)
    store.pin("a", keys(long)[4:5])
    looks = 0
    live = DiskIndex.live

    def look(index: DiskIndex) -> list[IndexEntry]:
        nonlocal looks
        looks += 1
        return live(index)

    monkeypatch.setattr(DiskIndex, "live", look)
    time.sleep(31 * 86400)
    assert store.prune() == 75 and held(files, long) == 5 and looks <= 2


def test_pruning_others_leaves_this_model(files: CrashFiles, time: Time) -> None:
    other = open_store(files, time, identity=b"other")
    other.keep(chain(3, salt=b"o"))
    other.close()
    store = open_store(files, time)
    store.keep(chain(2))
    assert store.prune() == 0
    assert store.prune(others=True) == 3
    assert (store.stats().chunks, store.match_prefix(keys(chain(2)))) == (2, 2)


def test_dropping_a_chunk_removes_its_descendants_and_their_bytes(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = chain(5)
    branch = chain(2, salt=b"b", after=chunks[1])
    store.keep(chunks + branch)
    store.pin("a", keys(chunks))
    assert store.drop([chunks[2].key]) == 3
    assert (store.match_prefix(keys(chunks)), store.match_prefix(keys(branch))) == (2, 2)
    assert store.drop([chunks[0].key, b"?" * 32]) == 4
    assert not [path for path in files.files(FOLDER) if path.name.count(".") == 4]
    store.close()
    after = open_store(files.crash(files.rng), time)
    assert after.stats().chunks == 0, "what was dropped came back after a power cut"


# ------------------------------------------------------------------------------------------------------------ damage


def test_damage_is_a_miss_and_removes_descendants(files: CrashFiles, time: Time) -> None:
    """A corrupt file must not crash the server, nor be trusted (known failure 30)."""
    store = open_store(files, time)
    chunks = chain(4)
    store.keep(chunks)
    path = chunk_path(files, chunks[1])
    data = files.files()[path]
    files.put(path, data[:-1] + bytes([data[-1] ^ 1]))
    assert store.fetch(chunks[1].key, chunks[1].tokens) is None
    assert (store.match_prefix(keys(chunks)), store.stats().damaged, store.stats().trouble) == (1, 3, "")
    assert store.keep(chunks) == 4
    assert store.fetch(chunks[1].key, chunks[1].tokens) == chunks[1]


def test_scrub_finds_all_damage_of_all_models(files: CrashFiles, time: Time) -> None:
    other = open_store(files, time, identity=b"other")
    other.keep(chain(3, salt=b"o"))
    other.close()
    store = open_store(files, time)
    store.keep(chain(3))
    for chunk in (chain(3)[2], chain(3, salt=b"o")[1]):
        path = chunk_path(files, chunk)
        files.put(path, files.files()[path].replace(chunk.key, bytes(32)))
    swept = store.scrub()
    assert (swept.damaged, swept.unreadable, store.stats().chunks) == (3, 0, 3)
    assert store.scrub().damaged == 0


def test_leftovers_orphans_and_twins_go_at_the_start(files: CrashFiles, time: Time) -> None:
    """Nothing stays for ever; foreign files are left alone but counted (known failure 31)."""
    store = open_store(files, time)
    chunks = chain(3)
    store.keep(chunks)
    store.close()
    path = chunk_path(files, chunks[1])
    data = files.files()[path]
    files.put(path.with_name("tmp-7"), b"x" * 9000)
    files.put(path.with_name(path.name.replace(".40.", ".41.")), data)
    files.put(FOLDER / ("0" if path.parent.name != "0" else "1") / path.name, data)
    files.put(path.with_name("notes.txt"), b"mine")
    files.vanish(chunk_path(files, chunks[0]))
    store = open_store(files, time)
    assert store.stats().chunks == 0
    left = [file.name for file in files.files(FOLDER) if file.parent != FOLDER]
    assert left == ["notes.txt"]
    assert store.stats().bytes == on_disk(files)


def test_damaged_pins_pin_nothing(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    store.keep(chain(2))
    store.pin("a", keys(chain(2)))
    store.close()
    [path] = files.files(FOLDER / "pins")
    files.put(path, files.files()[path][:-1] + b"?")
    store = open_store(files, time)
    assert store.stats().pinned == 0
    assert store.stats().bytes == on_disk(files)
    assert not files.files(FOLDER / "pins")


# ------------------------------------------------------------------------------------------------ the disk's failures


def test_a_disk_that_fails_is_reported_and_tried_again(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    a, b = chain(2)
    store.keep([a])
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    assert store.keep([a, b]) == 1
    assert store.stats().trouble == "the KV store cannot write /kv: Input/output error"
    assert store.fetch(a.key, a.tokens) is None
    files.heal()
    assert store.fetch(a.key, a.tokens) == a, "one failed read gives no chunk up"
    assert store.keep([a, b]) == 1, "it is too early to try again"
    time.sleep(5)
    store.tend()
    assert store.stats().trouble == ""
    assert store.keep([a, b]) == 2


def test_tries_get_rarer_and_end_with_a_write(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    files.fail(Fault(files.calls, errno.ENOSPC, sticky=True))
    store.keep(chain(1))
    tries = 0
    for _ in range(1000):
        before = files.fired
        time.sleep(1)
        store.tend()
        tries += files.fired > before
    assert 15 <= tries <= 25
    files.heal()
    time.sleep(60)
    assert store.keep(chain(1)) == 1
    assert store.stats().trouble == ""


def test_a_chunk_that_cannot_be_read_twice_is_given_up(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    [chunk] = chain(1)
    store.keep([chunk])
    for _ in range(2):
        assert store.match_prefix([chunk.key]) == 1
        files.fail(Fault(files.calls, only=frozenset({"read"})))
        assert store.fetch(chunk.key, chunk.tokens) is None
        for _ in range(10):  # the disk works otherwise
            time.sleep(1)
            store.tend()
        assert store.stats().trouble == ""
    assert store.match_prefix([chunk.key]) == 0


NO_ROOM = (
    r"cannot write /kv: [\d,]+ bytes of its disk are free, and [\d,]+ are left to others; "
    "name a folder on a larger disk with --kv-dir, or store none with --no-kv-disk"
)


def test_a_full_disk_is_reported_and_the_store_lives_on_its_own_bytes(time: Time) -> None:
    files = CrashFiles(now=time.now, capacity=40 * 4096)
    store = open_store(files, time, budget=1 << 30, reserve=8 * 4096)
    for number in range(16):
        assert store.keep(chain(3, salt=bytes([number]))) == 3
    assert (store.stats().bytes, store.stats().trouble) == (32 * 4096, "")
    files.put(Path("/others"), bytes(files.free(FOLDER)))
    assert store.keep(chain(1, salt=b"!")) == 1
    store.tend()
    assert files.free(FOLDER) >= 2 * 4096, "others' last bytes are theirs"
    for number in range(3):
        files.put(Path(f"/others{number}"), bytes(files.free(FOLDER)))
        store.tend()
    store.drop(keys([chunk for number in range(16) for chunk in chain(3, salt=bytes([number]))] + chain(1, salt=b"!")))
    files.put(Path("/others9"), bytes(files.free(FOLDER)))
    assert store.keep(chain(1)) == 0
    assert re.search(NO_ROOM, store.stats().trouble)
    for path in [path for path in files.files() if path.parent == Path("/")]:
        files.vanish(path)
    store.tend()
    assert store.stats().trouble == ""
    assert store.keep(chain(1)) == 1


class SharedFiles(CrashFiles):
    """A disk on which others write a block at every third removal of the store."""

    removed = wrote = refused = 0

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.removed += 1
        if self.removed % 3 == 0:
            self.others(1)

    def others(self, blocks: int) -> None:
        written = max(0, min(blocks, self.free(FOLDER) // 4096))
        self.refused += blocks - written
        self.wrote += 1
        self.put(Path(f"/other{self.wrote}"), bytes(written * 4096))


def test_the_store_keeps_giving_way_to_others_that_keep_writing(time: Time) -> None:
    """What others had written since looked like space that the disk had not freed yet, so the store did not shrink."""
    files = SharedFiles(now=time.now, capacity=600 * 4096)
    store = open_store(files, time, budget=1 << 30, reserve=40 * 4096)
    for number in range(300):
        assert store.keep(chain(1, salt=number.to_bytes(2, "big"))) == 1
    files.put(Path("/others"), bytes(files.free(FOLDER) - 12 * 4096))
    for _ in range(50):
        time.sleep(1)
        files.others(2)
        store.tend()
        assert files.free(FOLDER) >= 10 * 4096
    assert files.refused == 0


class LateFiles(CrashFiles):
    """A disk that shows removals only after some seconds of the clock, as ZFS and btrfs do."""

    late = 5.0

    def __init__(self, time: Time, capacity: int) -> None:
        super().__init__(now=time.now, capacity=capacity)
        self._removed: list[tuple[float, int]] = []

    def remove(self, path: Path) -> None:
        before = self.used()
        super().remove(path)
        self._removed.append((self.now() + self.late, before - self.used()))

    def free(self, path: Path) -> int:
        return super().free(path) - sum(size for shown, size in self._removed if self.now() < shown)


def test_a_disk_that_frees_space_late_evicts_only_what_is_needed(time: Time) -> None:
    """The store used to evict everything and then report a full disk."""
    files = LateFiles(time, 200 * 4096)
    store = open_store(files, time, budget=1 << 30, reserve=40 * 4096)
    for number in range(50):
        assert store.keep(chain(1, salt=bytes([number]))) == 1
    files.put(Path("/others"), bytes(files.free(FOLDER) - 8 * 4096))
    store.tend()
    assert (store.stats().chunks, store.stats().trouble) == (48, ""), "two blocks were lacking"
    for _ in range(3):
        time.sleep(1)
        store.tend()
    assert store.stats().chunks == 48, "they were given once more, before the disk showed them"
    files.put(Path("/more"), bytes(3 * 4096))
    store.tend()
    assert store.stats().chunks == 45, "others took more meanwhile"
    for _ in range(20):
        time.sleep(1)
        store.tend()
    assert (store.stats().chunks, store.stats().trouble, files.free(FOLDER)) == (45, "", 10 * 4096)
    files.put(Path("/most"), bytes(4096))
    store.tend()
    assert store.stats().chunks == 44, "what has shown is not counted twice"


def test_freed_space_that_has_shown_is_not_counted_twice(time: Time) -> None:
    """Everything the store has is less than others need: the disk is full, and that is reported."""
    files = CrashFiles(now=time.now, capacity=200 * 4096)
    store = open_store(files, time, budget=1 << 30, reserve=40 * 4096)
    for number in range(8):
        assert store.keep(chain(1, salt=bytes([number]))) == 1
    files.put(Path("/others"), bytes(files.free(FOLDER)))
    store.tend()
    assert (store.stats().chunks, files.free(FOLDER)) == (0, 8 * 4096)
    assert re.search(NO_ROOM, store.stats().trouble)


def test_a_disk_that_never_shows_freed_space_gets_a_little_each_minute(time: Time) -> None:
    """A snapshot of the file system holds it."""
    files = LateFiles(time, 200 * 4096)
    files.late = 1e9
    store = open_store(files, time, budget=1 << 30, reserve=40 * 4096)
    for number in range(50):
        assert store.keep(chain(1, salt=bytes([number]))) == 1
    files.put(Path("/others"), bytes(files.free(FOLDER) - 9 * 4096))
    for _ in range(130):
        time.sleep(1)
        store.tend()
    assert store.stats().chunks == 47


def test_a_disk_that_fails_at_the_start_is_opened_later(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks, gone = chain(3), chain(2, salt=b"gone")
    store.keep(chunks + gone)
    store.pin("a", keys(gone))
    store.close()
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    store = open_store(files, time)
    assert store.stats().trouble == "the KV store cannot open /kv: Input/output error"
    assert (store.match_prefix(keys(chunks)), store.keep(chunks)) == (0, 0)
    assert store.fetch(chunks[0].key, chunks[0].tokens) is None
    store.drop(keys(gone))
    store.pin("a", keys(chunks)[:1])
    files.heal()
    time.sleep(2)
    store.tend()
    assert (store.stats().trouble, store.stats().pinned) == ("", 1)
    assert (store.match_prefix(keys(chunks)), store.match_prefix(keys(gone))) == (3, 0)
    store.close()
    assert open_store(files, time).stats().pinned == 1


def test_a_renamed_chunk_that_was_never_indexed_lingers_too(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = chain(1)
    files.fail(Fault(files.calls, only=frozenset({"sync_folder", "remove"}), sticky=True))
    assert (store.keep(chunks), held(files, chunks)) == (0, 1)
    files.heal()
    assert store.drop(keys(chunks)) == 0
    assert store.lingers(keys(chunks)) and not store.lingers(keys(chain(1, salt=b"other")))
    time.sleep(2)
    store.tend()
    assert not store.lingers(keys(chunks)) and held(files, chunks) == 0


def back(files: CrashFiles, chunks: list[Chunk]) -> bool:
    """Return whether a power cut may bring any of the chunks back."""
    return any(held(files.crash(files.rng), chunks) for _ in range(40))


def test_dropped_chunks_linger_until_no_power_cut_can_restore_them(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = chain(3)
    store.keep(chunks)
    files.fail(Fault(files.calls, only=frozenset({"sync_folder"})))
    assert store.drop(keys(chunks)) == 3
    assert back(files, chunks) and store.lingers(keys(chunks))
    time.sleep(2)
    store.tend()
    assert not store.lingers(keys(chunks)) and not back(files, chunks)


def test_a_late_removal_holds_although_another_file_cannot_be_removed(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks, litter = chain(3), chain(1, salt=b"litter")
    store.keep(chunks)
    files.fail(Fault(files.calls, only=frozenset({"sync_folder", "remove"}), sticky=True))
    store.keep(litter)
    assert store.drop(keys(chunks)) == 0 and store.lingers(keys(chunks))
    files.heal()
    time.sleep(2)
    removed = 0

    def stop(kind: str) -> None:
        nonlocal removed
        removed += kind == "remove"
        if removed == 1 + len(chunks):  # the file of the probe, and these
            files.fail(Fault(files.calls, only=frozenset({"remove"}), sticky=True))

    files.after_change = stop
    store.tend()
    assert (held(files, chunks), held(files, litter)) == (0, 1)
    assert not store.lingers(keys(chunks)) and not back(files, chunks)
    assert store.lingers(keys(litter))


def said(identity: bytes) -> list[bytes]:
    """Return the keys of a context for an engine."""
    return keys(chain(30, salt=identity))


@pytest.mark.parametrize("kind", ["read", "remove", "sync_folder", "list"])
def test_failed_erasures_of_another_models_chunks_are_retried(files: CrashFiles, time: Time, kind: str) -> None:
    """`list`: the disk already fails when the store starts."""
    other, theirs = open_store(files, time, identity=b"other"), chain(30, salt=b"other")
    other.keep(theirs)
    other.close()
    fault = Fault(files.calls, only=frozenset({kind}), sticky=True)
    if kind == "list":
        files.fail(fault)
    store = open_store(files, time)
    files.fail(fault)
    files.log = []
    assert store.drop_of_other_engines(said) == (30 if kind == "sync_folder" else 0)
    assert [one for one, _ in files.log].count("read") <= 1, "a disk that fails was asked for each chunk"
    assert store.lingers(said(b"model"))
    assert kind == "sync_folder" or not store.lingers(keys(chain(1)))
    files.heal()
    time.sleep(2)
    store.tend()
    assert not store.lingers(said(b"model")) and not back(files, theirs)
    asked = [name for one, name in files.log if one == "read" and name.count(".") == 4]
    assert len(asked) == len(set(asked)), "the chunk that cannot be read was asked for again, not another"


def test_a_deletion_visits_no_chunk_of_another_known_model(files: CrashFiles, time: Time) -> None:
    """With 100,000 such chunks each deletion, and each eviction, used to block the store for 50 milliseconds."""
    for name in (b"other", b"third"):
        other = open_store(files, time, identity=name)
        for number in range(500):
            other.keep(chain(1, salt=name + number.to_bytes(2, "little")))
        other.close()
    store = open_store(files, time)
    state, visited = store._state, list[bytes]()

    class Entries(dict[bytes, IndexEntry]):
        def values(self) -> Any:
            return (visited.append(entry.id) or entry for entry in super().values())

    state.index._entries = Entries(state.index._entries)
    theirs = keys(chain(1, salt=b"other" + bytes(2)))
    wanted = {b"other": theirs, b"third": []}
    assert store.drop_of_other_engines(lambda identity: wanted.get(identity, [])) == 1 and len(visited) == 1000
    visited.clear()
    theirs[:] = keys(chain(1, salt=b"other" + bytes([1, 0])))
    assert store.drop_of_other_engines(lambda identity: wanted.get(identity, [])) == 1 and not visited


def test_a_disk_that_fails_for_good_can_be_closed(files: CrashFiles, time: Time) -> None:
    files.fail(Fault(0, errno.EROFS, sticky=True))
    store = open_store(files, time)
    assert "Read-only" in store.stats().trouble
    store.close()


# ------------------------------------------------------------------------------------------------- whose folder it is


def test_one_process_at_a_time(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    before = time.now()
    with pytest.raises(Conflict, match=r"kv_dir: /kv is in use by another process, which did not release it within"):
        open_store(files, time)
    assert 5 <= time.now() - before < 6
    store.close()
    open_store(files, time)


def test_waiting_for_a_process_that_goes(files: CrashFiles, time: Time) -> None:
    first = open_store(files, time)

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if time.now() > 1_000_002:
            first.close()

    open_store(files, time, sleep=sleep)


def strange_mode(files: CrashFiles) -> None:
    files.chmod(FOLDER, 0o755)


def stranger(files: CrashFiles) -> None:
    files.disown(FOLDER)


def not_ours(files: CrashFiles) -> None:
    files.vanish(FOLDER / "cairn-kv-store")


def newer(files: CrashFiles) -> None:
    files.put(FOLDER / "cairn-kv-store", b"cairn kv store 2\n")


def bent(files: CrashFiles) -> None:
    files.put(FOLDER / "cairn-kv-store", b"cairn kv store one\n")


REFUSED = {
    strange_mode: "kv_dir: /kv is open to others (mode 0755); it must have mode 0700",
    stranger: "kv_dir: /kv belongs to another user",
    not_ours: "kv_dir: /kv is not empty and not a KV store of Cairn",
    newer: "kv_dir: /kv has format 2 of a newer Cairn; this one reads up to 1",
    bent: "kv_dir: /kv/cairn-kv-store is not a marker of Cairn",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_folder_that_is_not_ours_is_refused_or_set_aside(files: CrashFiles, time: Time, change: object) -> None:
    store = open_store(files, time)
    store.keep(chain(2))
    store.close()
    assert callable(change)
    change(files)
    before = files.files()
    with pytest.raises(ConfigError) as caught:
        open_store(files, time)
    assert str(caught.value) == REFUSED[change]
    assert caught.value.field == "kv_dir"
    assert files.files() == before, "a folder that was refused was changed"
    if change is stranger:
        return  # the fake disk forgets the owner of a moved folder
    fresh = open_store(files, time, fresh=True)
    assert fresh.stats().chunks == 0
    aside = [path for path in files.files() if ".aside-" in str(path)]
    assert len(aside) == len(before)


def test_a_folder_that_a_process_has_is_not_set_aside(files: CrashFiles, time: Time) -> None:
    """The other process would go on by path, in the new folder, beside the process that made it."""
    store = open_store(files, time)
    store.keep(chain(2))
    strange_mode(files)
    before = files.files()
    with pytest.raises(Conflict, match="kv_dir: /kv is in use by another process"):
        open_store(files, time, fresh=True)
    assert files.files() == before
    store.close()
    assert open_store(files, time, fresh=True).stats().chunks == 0


# ---------------------------------------------------------------------------------------------------- many threads


def test_threads_keep_fetch_drop_pin_and_tend_at_once(files: CrashFiles, time: Time) -> None:
    """Whatever the threads do to each other, no wrong data is read, and in the end every byte is counted."""
    store = open_store(files, time, budget=30 * 4096)
    stop, errors = threading.Event(), list[BaseException]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not stop.is_set():
                time.sleep(0.01)
                chunks = chain(rng.randrange(1, 6), salt=bytes([rng.randrange(8)]))
                match rng.randrange(8):
                    case 0:
                        store.drop(keys(chunks)[-1:])
                    case 1:
                        store.pin(str(seed), keys(chunks)[: rng.randrange(3)])
                    case 2:
                        store.tend()
                    case 3 | 4:
                        for chunk in chunks:
                            assert store.fetch(chunk.key, chunk.tokens) in (None, chunk)
                    case _:
                        assert 0 <= store.keep(chunks) <= len(chunks)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not errors and not any(thread.is_alive() for thread in threads)
    store.tend()
    stats = store.stats()
    assert (stats.bytes, stats.damaged, stats.trouble) == (on_disk(files), 0, "")
    assert stats.bytes <= 30 * 4096
    for seed in range(4):
        store.pin(str(seed), [])
    assert store.prune(others=True) == 0
    store.drop([chain(1, salt=bytes([salt]))[0].key for salt in range(8)])
    assert (store.stats().chunks, store.stats().bytes) == (0, on_disk(files))


def test_dropping_waits_for_what_is_being_written(files: CrashFiles, time: Time) -> None:
    """When it returns, the bytes are gone, also those that another thread was about to write."""
    store = open_store(files, time)
    chunks = chain(3)
    dropping: list[threading.Thread] = []

    def drop(kind: str) -> None:
        if kind == "replace" and not dropping:
            dropping.append(threading.Thread(target=lambda: store.drop([chunks[0].key])))
            dropping[0].start()
            machine_time.sleep(0.05)

    files.after_change = drop
    assert store.keep(chunks) == 0
    dropping[0].join(10)
    assert not dropping[0].is_alive()
    files.after_change = lambda kind: None
    assert held(files, chunks) == 0
    assert open_store(files.crash(files.rng), time).stats().chunks == 0
    assert store.keep(chunks) == 3


# ------------------------------------------------------------------------------------------------------ a real disk


def test_on_a_real_disk(tmp_path: Path) -> None:
    """Modes are right, and every byte is counted."""
    folder = tmp_path / "kv"
    store = open_store(SystemFiles(), Time(), folder=folder)
    chunks = chain(20)
    assert store.keep(chunks) == 20
    store.pin("a", keys(chunks)[:3])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600) for path in folder.rglob("*"))
    taken = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    assert store.stats().bytes == taken
    with pytest.raises(Conflict):
        open_store(SystemFiles(), Time(), folder=folder)
    store.close()
    again = open_store(SystemFiles(), Time(), folder=folder)
    assert again.stats().bytes == taken
    assert [again.fetch(chunk.key, chunk.tokens) for chunk in chunks] == chunks


def test_many_chunks_are_indexed_by_names_and_sizes_alone(
    files: CrashFiles, time: Time, tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    """These files have no content, so a start that read them would find no chunk."""
    store = open_store(files, time)
    chunks: list[Chunk] = []
    for number in range(20):
        chunks += chain(100, salt=bytes([number]))
    store.keep(chunks[:1])
    [sample] = [path.name for path in files.files(FOLDER) if path.name.count(".") == 4]
    tag, size = sample.split(".")[2], int(sample.split(".")[4], 16)
    store.close()
    folder = tmp_path / "kv"
    open_store(SystemFiles(), Time(), folder=folder).close()
    for chunk in chunks:
        name = f"{chunk.key.hex()}.{chunk.parent.hex() or '-'}.{tag}.{chunk.depth:x}.{size:x}"
        with (folder / name[0] / name).open("wb") as file:
            file.truncate(size)
    start = machine_time.process_time()
    again = open_store(SystemFiles(), Time(), folder=folder)
    seconds = machine_time.process_time() - start
    assert again.stats().chunks == 2_000
    figure("disk store: 2,000 chunks indexed, CPU time", f"{seconds:.2f} s")


def test_a_small_free_disk_reports_the_room_left_to_others(time: Time) -> None:
    """It is not full: less is free than the store leaves to others."""
    store = open_store(CrashFiles(now=time.now, capacity=64 * 4096), time, budget=1 << 30, reserve=256 << 20)
    assert store.keep(chain(1)) == 0
    assert "258,048 bytes of its disk are free, and 268,435,456 are left to others" in store.stats().trouble
    assert "--kv-dir" in store.stats().trouble and "full" not in store.stats().trouble
