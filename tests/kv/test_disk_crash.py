"""The disk store with crashes, faults, damage and a full disk, as often as docs/reliability.md says."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cairn.kv.tiers.store import Chunk
from tests.files import Crash, CrashFiles, Fault, corrupted
from tests.kv.stored import FOLDER, Time, chain, keys, open_store
from tests.laws import storage

Figure = Callable[[str, str], None]


def test_stored_chunks_survive_a_crash_at_any_moment(prove: bool, figure: Figure) -> None:
    """Crashes in the middle of writing, evicting, dropping and pinning, and again during the next start.

    Known failure 31.
    """
    states, seed = 0, 1_000
    while states < (50_000 if prove else 1_500):
        states += storage.crash_everywhere(seed, states=3)
        seed += 1
    figure("disk store: crash states, every kept chunk found whole", f"{states:,}")


def test_a_fault_at_every_call_costs_chunks_never_bytes_or_the_store(prove: bool, figure: Figure) -> None:
    """Once and permanently, with every kind of disk error; afterwards the store works again."""
    struck = 0
    for seed in range(2_000, 2_013 if prove else 2_001):
        time = Time()
        calls = CrashFiles(seed=seed, now=time.now)
        storage.Work(calls, time, seed).run()
        step = 1 if prove else 3
        for at in range(0, calls.calls, step):
            error = storage.ERRORS[(at // step + seed) % 4]
            struck += storage.fault_at(seed, Fault(at, error, sticky=at // step % 3 == 0, short=at // step % 2 == 0))
    figure("disk store: runs with a fault, store back afterwards", f"{struck:,}")


def test_the_oldest_goes_first_also_after_many_uses_and_restarts(prove: bool) -> None:
    for seed in range(40 if prove else 2):
        storage.long_use(seed)


def test_no_crash_brings_back_chunks_reported_gone_after_a_failed_sync(prove: bool) -> None:
    for seed in range(1_000 if prove else 60):
        storage.failed_erasure(seed)


def killed(files: CrashFiles, work: Callable[[], object], change: str, count: int) -> CrashFiles:
    """Return what the next process finds after so many changes of a kind; the folders were not synced."""
    seen, after = list[str](), list[CrashFiles]()

    def look(kind: str) -> None:
        seen.append(kind)
        if not after and seen.count(change) == count:
            after.append(files.kill())
            raise Crash

    files.after_change = look
    with contextlib.suppress(Crash):
        work()
    return after[0]


def test_files_of_a_killed_process_are_durable_once_the_next_one_reports_them() -> None:
    """Names that the killed process made and removed were visible, but not synced."""
    for seed in range(30):
        time, rng = Time(), random.Random(seed)
        files, chunks = CrashFiles(seed=seed, now=time.now), chain(2)
        files = killed(files, partial(open_store(files, time).keep, chunks), "replace", 2)
        store = open_store(files, time)
        assert store.keep(chunks) == 2
        again = open_store(files.crash(rng), time)
        assert all(again.fetch(chunk.key, chunk.tokens) for chunk in chunks), seed
        store.pin("ada", keys(chunks))
        files = killed(files, partial(store.pin, "ada", []), "remove", 1)
        store = open_store(files, time)
        store.pin("ada", [])
        assert not store.unsaved("ada")
        assert not open_store(files.crash(rng), time).stats().pinned, seed


def test_another_engines_chunk_that_was_evicted_before_it_was_dropped_does_not_come_back() -> None:
    theirs = chain(1)
    for seed in range(30):
        time = Time()
        files = CrashFiles(seed=seed, now=time.now)
        other = open_store(files, time, identity=b"other")
        assert other.keep(theirs) == 1
        other.close()
        store = open_store(files, time)
        assert store.prune(others=True) == 1
        store.drop_of_other_engines(lambda identity: keys(theirs) if identity == b"other" else [b"mine"])
        assert not store.lingers([b"mine"])
        again = open_store(files.crash(random.Random(seed)), time, identity=b"other")
        assert again.fetch(theirs[0].key, theirs[0].tokens) is None, seed


def test_damage_is_never_served(prove: bool, figure: Figure) -> None:
    """First one bit in every byte of every file; then sectors, cuts, joins, swaps and duplicates; then at random.

    In the last case the store is in use. Every read returns what was kept, or nothing (known failure 30).
    """
    time, rng = Time(), random.Random(1)
    files = CrashFiles(now=time.now)
    store = open_store(files, time)
    chunks = chain(4)
    store.keep(chunks)
    store.pin("a", keys(chunks))
    done = undamaged = 0
    whole = dict(files.files(FOLDER))
    for path, data in whole.items():
        here = [chunk for chunk in chunks if path.name.startswith(chunk.key.hex())]
        for at in range(0, len(data), 1 if prove else 9):
            files.put(path, data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
            done += 1
            for chunk in here:
                assert store.fetch(chunk.key, chunk.tokens) is None
                assert store.match_prefix(keys(chunks)) == chunks.index(chunk)
                assert store.keep(chunks) == 4
                undamaged += 1
            files.put(path, data)
    assert undamaged > (2_000 if prove else 300)
    store.close()
    target = 100_000 if prove else 1_500
    while done < target * 9 // 10:
        done += 1
        undamaged += not read_damaged(whole, chunks, done)
    seed = 3_000
    while done < target:
        storage.damage_at_random(seed)
        seed, done = seed + 1, done + storage.STEPS // 2
    figure("disk store: corruptions, wrong bytes served", f"{done:,}, 0")


def read_damaged(whole: dict[Path, bytes], chunks: Sequence[Chunk], seed: int) -> bool:
    """Read everything from a copy with one kind of damage; return whether all of it was still there."""
    time, rng = Time(), random.Random(seed)
    files = CrashFiles(seed=seed, now=time.now)
    files.make_folder(FOLDER)
    for path in {path.parent for path in whole}:
        files.make_folder(path)
    contents = dict(whole)
    path, other = rng.sample([path for path in sorted(whole) if path.name.count(".") == 4], 2)
    kind = rng.randrange(8)
    if kind == 0:
        contents[path], contents[other] = contents[other], contents[path]
    elif kind == 1:
        contents[other.parent / path.name] = contents[path]
    elif kind == 2:
        first, second = path.name.split("."), other.name.split(".")
        at = rng.randrange(5)
        contents[path.parent / ".".join([*first[:at], *second[at:]])] = contents.pop(path)
    else:
        contents[path] = corrupted(contents[path], rng)
    for one, data in contents.items():
        files.put(one, data)
    store = open_store(files, time)
    got = [store.fetch(chunk.key, chunk.tokens) for chunk in chunks]
    assert all(one in (None, chunk) for one, chunk in zip(got, chunks, strict=True)), seed
    assert store.stats().trouble == ""
    if rng.random() < 0.2:
        assert store.keep(chunks) == len(chunks), seed
        assert [store.fetch(chunk.key, chunk.tokens) for chunk in chunks] == list(chunks)
    return None not in got


def test_a_full_disk_is_refused_politely(prove: bool, figure: Figure) -> None:
    """Others fill the disk and clear it: only evicted chunks are lost, and the trouble is reported until it ends."""
    refused, seed = 0, 4_000
    while refused < (1_000 if prove else 30):
        refused += storage.full_disk(seed)
        seed += 1
    figure("disk store: chunks refused by a full disk, store back afterwards", f"{refused:,}")


def test_a_sync_that_fails_is_believed() -> None:
    """After a failed sync a file may read well and not be on the disk, so the chunk is not kept."""
    for seed in range(50):
        time = Time()
        files = CrashFiles(seed=seed, now=time.now)
        store = open_store(files, time)
        chunks = chain(3)
        files.fail(Fault(files.calls, errno.EIO, only=frozenset({"sync" if seed % 2 else "sync_folder"})))
        count = store.keep(chunks)
        assert count == 0
        assert files.fired == 1
        time.sleep(2)
        assert store.keep(chunks) == 3
        after = open_store(files.crash(files.rng), time)
        assert [after.fetch(chunk.key, chunk.tokens) for chunk in chunks] == chunks
