"""The disk store when the disk refuses, when its folder is taken away, and when the wall clock was wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import pytest

from cairn.kv.disk.chunk_file import Name
from cairn.kv.disk.folder import MARKER
from cairn.kv.disk.index import DiskIndex, IndexEntry
from cairn.system.interfaces import LOCK_FILE
from cairn.system.posix import SystemFiles
from tests.files import CrashFile, CrashFiles, Fault
from tests.kv.stored import FOLDER, Time, chain, chunk_path, held, keys, on_disk, open_store

DAY = 86_400.0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def files(time: Time) -> CrashFiles:
    return CrashFiles(now=lambda: time.time_ns() / 1e9)


# --------------------------------------------------------------------------------------------------------------- pins


def test_a_pin_that_the_disk_refuses_is_reported_until_it_is_durable(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    store.keep(chain(3))
    store.pin("agent", keys(chain(3)))
    assert not store.unsaved("agent")
    for there in (keys(chain(2)), []):
        files.fail(Fault(files.calls, errno.EIO, sticky=True))
        store.pin("agent", there)
        assert store.unsaved("agent") and not store.unsaved("else")
        files.heal()
        assert store.unsaved("agent"), "nobody tried it again"
        time.sleep(70)
        store.tend()
        assert not store.unsaved("agent")
        assert store.stats().pinned == len(there)
    assert not files.files(FOLDER / "pins")


def test_an_unpin_that_finds_no_pin_needs_no_disk(files: CrashFiles, time: Time) -> None:
    """Every deleted agent is unpinned, but few were ever pinned."""
    store = open_store(files, time)
    store.pin("else", keys(chain(1)))
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    assert store.keep(chain(1)) == 0
    store.pin("agent", [])
    assert not store.unsaved("agent")
    store.pin("else", [])
    assert store.unsaved("else")


def test_an_unpin_before_the_disk_works_is_reported_until_it_is_durable(files: CrashFiles, time: Time) -> None:
    first = open_store(files, time, identity=b"first")
    first.keep(chain(3))
    first.pin("agent", keys(chain(3)))
    first.close()
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    store = open_store(files, time)
    store.pin("agent", [])
    assert store.unsaved("agent") and not store.unsaved("else")
    files.heal()
    time.sleep(70)
    store.tend()
    assert not store.unsaved("agent")
    store.close()
    assert open_store(files, time).stats().pinned == 0


def test_failed_pins_are_retried_at_the_end(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    store.keep(chain(3))
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    store.pin("agent", keys(chain(3)))
    files.heal()
    time.sleep(500)
    store.close()
    assert open_store(files, time).stats().pinned == 3


def test_a_pin_while_the_disk_fails_repeats_no_other(
    files: CrashFiles, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every waiting pin used to be written again, under the lock that every step needs."""
    store = open_store(files, time)
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    store.keep(chain(1))
    handed, pin = 0, DiskIndex.pin

    def count(index: DiskIndex, owner: str, ids: Collection[bytes]) -> None:
        nonlocal handed
        handed += len(ids)
        pin(index, owner, ids)

    monkeypatch.setattr(DiskIndex, "pin", count)
    for number in range(200):
        store.pin(f"agent {number}", keys(chain(10, salt=b"%d" % number)))
    assert handed == 200 * 10


# --------------------------------------------------------------------------------------------- a folder taken away


def empty(folder: Path) -> None:
    """Empty a folder as `rm -rf folder/*` does: the lock stays, since its name starts with a dot."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("."):
            path.unlink()


def lose_one(folder: Path) -> None:
    for path in folder.glob("[0-9a-f]"):
        shutil.rmtree(path)


@pytest.mark.parametrize("harm", [empty, shutil.rmtree, lose_one])
def test_an_emptied_or_removed_folder_is_created_again(
    tmp_path: Path, time: Time, harm: Callable[[Path], None]
) -> None:
    """The store used to refuse everything from then on, while each look at the disk reported no problem."""
    folder = tmp_path / "kv"
    store = open_store(SystemFiles(), time, folder=folder)
    chunks, more = chain(3), chain(2, salt=b"more")
    store.keep(chunks)
    store.pin("agent", keys(chunks))
    harm(folder)
    store.keep(more)
    for chunk in chunks:
        assert store.fetch(chunk.key, chunk.tokens) is None
    time.sleep(100)
    store.tend()
    assert store.stats().trouble == ""
    assert store.keep(more) == 2
    assert store.stats().chunks == 2 and store.match_prefix(keys(chunks)) == 0
    assert store.keep(chunks) == 3
    assert store.stats().pinned == 3, "what is pinned stays pinned"
    store.close()
    store = open_store(SystemFiles(), time, folder=folder)
    assert (store.stats().chunks, store.stats().pinned) == (5, 3)
    store.pin("agent", [])
    store.close()
    assert open_store(SystemFiles(), time, folder=folder).stats().pinned == 0


@pytest.mark.parametrize("nfs", [False, True])
def test_a_store_does_not_write_into_anothers_folder_in_its_place(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, nfs: bool
) -> None:
    """`nfs`: another machine made it, and the holder of the first lock gets a stale-handle error."""
    folder, files = tmp_path / "kv", SystemFiles()
    first = open_store(files, time, folder=folder)
    facts, lock = os.fstat, os.stat(folder / LOCK_FILE)

    def stale(handle: int) -> os.stat_result:
        status = facts(handle)
        if os.path.samestat(status, lock) and not status.st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return status

    if nfs:
        monkeypatch.setattr(os, "fstat", stale)
    first.keep(chain(3))
    shutil.rmtree(folder)
    second = open_store(files, time, folder=folder)
    chunks = chain(2, salt=b"first")
    assert first.keep(chunks) == 0
    assert "in use by another process" in first.stats().trouble
    first.pin("agent", keys(chunks))
    assert first.unsaved("agent") and list((folder / "pins").iterdir()) == []
    assert second.keep(chunks) == 2
    assert first.drop(keys(chunks)) == 0 and second.fetch(chunks[0].key, chunks[0].tokens) == chunks[0]
    second.close()
    time.sleep(100)
    first.tend()
    assert first.stats().trouble == ""
    assert first.match_prefix(keys(chunks)) == 0, "it was told to drop them"
    assert first.keep(chunks) == 2 and first.stats().pinned == 2


def test_an_unpin_without_a_folder_reaches_the_pins_that_move_along(tmp_path: Path, time: Time) -> None:
    """Those of other models too."""
    folder, files = tmp_path / "kv", SystemFiles()
    other = open_store(files, time, folder=folder, identity=b"other")
    other.pin("agent", keys(chain(3)))
    other.close()
    store = open_store(files, time, folder=folder)
    store.pin("else", keys(chain(1)))
    shutil.rmtree(folder)
    second = open_store(files, time, folder=folder)
    store.tend()
    store.pin("agent", [])
    second.close()
    time.sleep(100)
    store.tend()
    assert not store.unsaved("agent") and len(list((folder / "pins").iterdir())) == 1


@pytest.mark.parametrize("identity", [b"model", b"other"])
def test_dropped_chunks_stay_dropped_when_the_folder_is_reopened(
    files: CrashFiles, time: Time, identity: bytes
) -> None:
    """The disk refused to erase them, and then the folder looked like another one."""
    chunks = chain(3, salt=identity)
    with contextlib.closing(open_store(files, time, identity=identity)) as store:
        store.keep(chunks)
    store = open_store(files, time)

    def theirs(engine: bytes) -> list[bytes]:
        return keys(chain(3, salt=engine))

    files.fail(Fault(files.calls, errno.EIO, sticky=True, only=frozenset({"remove"})))
    assert (store.drop(keys(chunks)) if identity == b"model" else store.drop_of_other_engines(theirs)) == 0
    assert store.lingers(theirs(b"model"))
    files.vanish(FOLDER / LOCK_FILE)
    assert store.fetch(chunks[0].key, chunks[0].tokens) is None
    assert store.stats().chunks == 0 and store.lingers(theirs(b"model"))
    assert held(files, chunks) == 3
    files.heal()
    time.sleep(100)
    store.tend()
    assert store.stats().trouble == "" and not store.lingers(theirs(b"model"))
    assert held(files, chunks) == 0 and store.stats().chunks == 0


# ------------------------------------------------------------------------------------------------------------- quotas


class Quota(CrashFiles):
    """A disk with a quota for this user that it does not report."""

    quota = 100 * 4096
    full = errno.EDQUOT

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> CrashFile:
        if mode == "create" and on_disk(self) >= self.quota:
            raise OSError(self.full, "quota")
        return super().open(path, mode)


@pytest.mark.parametrize("full", [errno.EDQUOT, errno.ENOSPC])
def test_where_a_quota_ends_the_store_lives_on_its_own_bytes(time: Time, full: int) -> None:
    files = Quota(now=time.now)
    files.full = full
    store = open_store(files, time, budget=1 << 30, reserve=40 * 4096)
    for number in range(300):
        assert store.keep(chain(2, salt=number.to_bytes(2, "big"))) == 2
    stats = store.stats()
    assert (stats.trouble, stats.bytes) == ("", on_disk(files))
    assert stats.evicted >= 500 and stats.chunks > 80
    files.quota = on_disk(files)
    store.pin("agent", keys(chain(2, salt=b"x")))
    assert not store.unsaved("agent")


def test_where_a_quota_shrinks_the_store_comes_back(time: Time) -> None:
    """Pinned chunks cannot be evicted; once they are unpinned, a look at the disk makes room."""
    files = Quota(now=time.now)
    store = open_store(files, time, budget=1 << 30)
    chunks = chain(90)
    assert store.keep(chunks) == 90
    store.pin("agent", keys(chunks))
    files.quota = 50 * 4096
    more = chain(1, salt=b"more")
    assert store.keep(more) == 0
    assert store.stats().trouble == "the KV store cannot write /kv: quota"
    store.pin("agent", [])
    for _ in range(200):
        time.sleep(61)
        store.tend()
    assert (store.stats().trouble, store.keep(more)) == ("", 1)


# ------------------------------------------------------------------------------------------------ folders that go away


class Removing(CrashFiles):
    """A file system that calls a function when a chunk was just removed."""

    then: Callable[[], None] | None = None

    def remove(self, path: Path) -> None:
        super().remove(path)
        if self.then is not None and not path.name.startswith("tmp-"):
            then, self.then = self.then, None
            then()


def test_a_prune_beside_a_folder_that_goes_away_ends(time: Time) -> None:
    files = Removing(now=time.now)
    store = open_store(files, time)
    chunks = chain(4)
    store.keep(chunks)
    time.sleep(40 * DAY)

    def away() -> None:
        for path in files.files(FOLDER):
            if path.name != MARKER:
                files.vanish(path)
        assert store.fetch(chunks[0].key, chunks[0].tokens) is None  # and the caller noticed

    files.then = away
    assert store.prune() == 1
    assert (store.stats().chunks, store.stats().trouble) == (0, "")
    assert store.keep(chunks) == 4


def test_removing_a_chunk_of_a_replaced_folder_forgets_none_of_the_new_one() -> None:
    [one] = chain(1)
    name = Name(one.key, b"", b"tag", 0, 400)
    old, new = (IndexEntry(one.key, b"", name, 4096, 0.0, 0.0) for _ in range(2))
    index = DiskIndex()
    index.add(old)
    index.mark_deleted(old)
    index = index.emptied()
    index.add(new)
    index.mark_deleted(new)
    index.forget(old)
    new.going = False
    assert index.deleted() == [new] and index.bytes == 4096


# ------------------------------------------------------------------------------------------------------ the wall clock


def test_chunks_used_while_the_wall_clock_was_wrong_are_young_at_the_next_start(files: CrashFiles, time: Time) -> None:
    """The machine thinks it is 1970 until it has the network's time."""
    time.wall = -900_000.0
    store = open_store(files, time)
    used, idle = chain(3), chain(2, salt=b"idle")
    store.keep(used + idle)
    time.wall = 1e9
    time.sleep(120)
    for chunk in used:
        assert store.fetch(chunk.key, chunk.tokens) == chunk
    store.keep(chain(1, salt=b"newer"))
    store.tend()
    store.close()
    time.sleep(300)
    store = open_store(files, time)
    store.tend()
    assert (held(files, used), held(files, idle)) == (3, 2)


def test_a_touch_that_fails_while_all_times_are_put_right_costs_no_chunk_its_age(files: CrashFiles, time: Time) -> None:
    """The store was opened in the past by more than the time to live: untouched chunks are old at the next start."""
    time.wall = -9e6
    store = open_store(files, time)
    idle = chain(20, salt=b"idle")
    store.keep(idle)
    time.wall = 0.0
    time.sleep(1)
    store.keep(chain(1, salt=b"newer"))
    files.fail(Fault(files.calls, errno.EIO, only=frozenset({"touch"})))
    store.tend()
    assert files.fired == 1
    time.sleep(1)
    store.tend()
    store.close()
    time.sleep(300)
    store = open_store(files, time)
    store.tend()
    assert held(files, idle) == 20


def test_a_file_that_cannot_be_touched_keeps_no_other_from_it(files: CrashFiles, time: Time) -> None:
    time.wall = -9e6
    store = open_store(files, time)
    idle = [one for n in range(20) for one in chain(1, salt=bytes([n]))]
    for one in idle:
        store.keep([one])
    time.wall = 0.0
    time.sleep(1)
    store.keep(chain(1, salt=b"newer"))
    refused, touch = chunk_path(files, idle[10]), files.touch

    def touched(path: Path, modified: float) -> None:
        if path == refused:
            raise PermissionError(errno.EPERM, "not permitted", str(path))
        touch(path, modified)

    files.touch = touched  # type: ignore[method-assign]
    for _ in range(3):
        time.sleep(1)
        store.tend()
    store.close()
    time.sleep(300)
    store = open_store(files, time)
    store.tend()
    assert held(files, idle) == 19


def test_a_store_opened_while_the_wall_clock_is_behind_keeps_the_ages_it_had(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = chain(3)
    store.keep(chunks)
    store.close()
    time.wall = -900_000.0
    store = open_store(files, time)
    store.tend()
    time.wall = 600.0
    time.sleep(10)
    store.keep(chain(1, salt=b"newer"))
    store.tend()
    store.close()
    store = open_store(files, time)
    store.tend()
    assert held(files, chunks) == 3


def test_chunks_dated_in_the_future_age_from_the_next_start_on(files: CrashFiles, time: Time) -> None:
    store = open_store(files, time)
    chunks = chain(2)
    store.keep(chunks)
    store.close()
    for chunk in chunks:
        files.touch(chunk_path(files, chunk), time.now() + 20 * 365 * DAY)
    store = open_store(files, time)
    store.tend()
    store.close()
    time.sleep(31 * DAY)
    store = open_store(files, time)
    store.keep(chain(1, salt=b"newer"))
    store.close()
    store = open_store(files, time)
    store.tend()
    assert held(files, chunks) == 0


# -------------------------------------------------------------------------------------------------------------- scrubs


class Meanwhile(CrashFiles):
    """A file system that calls a function when a chunk is about to be read."""

    then: Callable[[Path], None] | None = None

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> CrashFile:
        if mode == "read" and self.then is not None:
            then, self.then = self.then, None
            then(path)
        return super().open(path, mode)


def test_a_scrub_does_not_report_chunks_dropped_meanwhile(time: Time) -> None:
    files = Meanwhile(now=time.now)
    store = open_store(files, time)
    store.keep(chain(3))

    def drop(path: Path) -> None:
        assert store.drop([bytes.fromhex(path.name[:64])]) > 0

    files.then = drop
    swept = store.scrub()
    assert (swept.damaged, swept.unreadable) == (0, 0)
