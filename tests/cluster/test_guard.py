"""The circuit breaker of a shared store: it opens for a store that fails, and not for one object that does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from pathlib import Path

import pytest

from cairn.cluster.folder import FolderBlobs
from cairn.cluster.guard import AHEAD, FAILURES, PAUSE, PROBE, THREADS, Breaker, Guarded, ObjectFailed
from cairn.system.posix import SystemClock, SystemFiles
from tests.cluster.stores import Draws, MemoryBlobs
from tests.kv.stored import Time


async def test_objects_that_cannot_be_read_close_the_store_to_nobody(tmp_path: Path) -> None:
    guarded = Guarded(FolderBlobs(SystemFiles(), tmp_path, Draws()), SystemClock())
    store = guarded.soon
    await store.create("agents/aa/0000000000", b"good")
    await store.replace(f"{PROBE}/me", b"1")
    bad = [f"agents/b{number}/0000000000" for number in range(2 * FAILURES)]
    for name in bad:
        (tmp_path / name).mkdir(parents=True)
    for failed in await store.read_several([*bad, *bad]):
        assert isinstance(failed, ObjectFailed) and "0000000000 cannot be used" in str(failed)
    for name in bad:
        with pytest.raises(ObjectFailed):
            await store.create(name, b"new")
        with pytest.raises(ObjectFailed):
            guarded.replace(name, b"new")
        with pytest.raises(ObjectFailed):
            guarded.delete([name])
    assert await store.read("agents/aa/0000000000") == b"good" and not guarded.trouble
    await store.replace(f"{PROBE}/me", b"2")


async def test_a_folder_that_cannot_be_listed_closes_the_store_to_nobody() -> None:
    class Closed(MemoryBlobs):
        def list(self, folder: str, after: str = "") -> list[str]:
            if folder == "agents/aa":
                raise OSError(errno.EACCES, "no right")
            return list(super().list(folder, after))

    guarded = Guarded(Closed(), SystemClock())
    for _ in range(2 * FAILURES):
        with pytest.raises(ObjectFailed, match="agents/aa cannot be used"):
            await guarded.soon.list("agents/aa")
    assert await guarded.soon.list(PROBE) == [] and not guarded.trouble


@pytest.mark.parametrize("call", ["read", "list", "delete", "create", "replace"])
async def test_a_store_that_fails_at_everything_is_left_alone(call: str) -> None:
    blobs = MemoryBlobs()
    guarded = Guarded(blobs, SystemClock())
    blobs.dead = True
    calls = {
        "read": lambda: guarded.soon.read("x"),
        "list": lambda: guarded.soon.list("x"),
        "delete": lambda: guarded.soon.delete(["x"]),
        "create": lambda: guarded.soon.create("x", b""),
        "replace": lambda: guarded.soon.replace("x", b""),
    }
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="the store is dead"):
            await calls[call]()
    made = blobs.calls
    with pytest.raises(OSError, match="does not work"):
        await calls[call]()
    assert blobs.calls == made and "dead" in guarded.trouble


async def test_a_full_disk_is_an_error_of_the_store() -> None:
    class Full(MemoryBlobs):
        def create(self, name: str, data: bytes) -> bool:
            raise OSError(errno.ENOSPC, "no space")

    guarded = Guarded(Full(), SystemClock())
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="no space"):
            await guarded.soon.create("agents/aa/0000000000", b"")
    with pytest.raises(OSError, match="does not work: no space"):
        await guarded.soon.create("agents/bb/0000000000", b"")


def test_after_a_pause_an_object_that_fails_does_not_prolong_it() -> None:
    clock = Time()
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        breaker.failed(OSError("dead"))
    with pytest.raises(OSError, match="dead"):
        breaker.enter()
    clock.seconds += PAUSE
    breaker.enter()  # the one call that tries, at an object that cannot be read
    with pytest.raises(OSError, match="dead"):
        breaker.enter()
    breaker.passed_over()
    breaker.enter()
    breaker.worked()
    breaker.enter()
    assert not breaker.trouble


async def test_reads_of_one_object_that_hang_do_not_take_all_threads() -> None:
    ended = threading.Event()

    class Hanging(MemoryBlobs):
        def read(self, name: str) -> bytes | None:
            if name == "hangs":
                self.calls += 1
                ended.wait(60)
            return self.objects.get(name)

    blobs, clock = Hanging(), Time()
    blobs.objects["sound"] = b"data"
    guarded = Guarded(blobs, clock, deadline=0.5)
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="did not answer within"):
            await guarded.soon.read("hangs")
        assert await guarded.soon.read("sound") == b"data"
    clock.seconds += 1.0
    for _ in range(2 * THREADS):
        with pytest.raises(ObjectFailed, match="earlier reads of it still hang"):
            await guarded.soon.read("hangs")
    assert blobs.calls == FAILURES
    ended.set()
    for _ in range(600):
        with contextlib.suppress(ObjectFailed):
            assert await guarded.soon.read("hangs") is None
            break
        await asyncio.sleep(0.01)
    assert blobs.calls > FAILURES and await guarded.soon.read("sound") == b"data"


async def test_those_who_read_many_objects_leave_threads_to_the_others() -> None:
    running = most = 0

    class Counting(MemoryBlobs):
        def read(self, name: str) -> bytes | None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return super().read(name)
            finally:
                running -= 1

    blobs = Counting()
    blobs.objects = {f"x/{number}": b"%d" % number for number in range(100)}
    blobs.slow = 0.002
    guarded = Guarded(blobs, SystemClock())
    names = [*blobs.objects, "x/none"]
    found = await asyncio.gather(*(guarded.soon.read_several(names) for _ in range(3)))
    assert found == [[*(b"%d" % number for number in range(100)), None]] * 3
    assert 1 < most <= AHEAD < THREADS
