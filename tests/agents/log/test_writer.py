"""The thread that writes the log: order, one sync for all waiters, honest failures, a clean end."""

from __future__ import annotations

import asyncio
import errno
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents.log import token_log as log_module
from cairn.agents.log import writer_thread as writer_module
from cairn.agents.log.index import RecordKind
from cairn.agents.log.token_log import TokenLog
from cairn.agents.log.writer_thread import Writer
from cairn.system.posix import SystemFiles, SystemRng
from cairn.types.errors import Unavailable
from tests.files import CrashFiles, Fault

FOLDER = Path("/agents")


class Note(msgspec.Struct):
    text: str


def start(files: CrashFiles) -> Writer:
    log = TokenLog.open(files, FOLDER, SystemRng())
    assert log is not None
    return Writer(log)


def texts(files: CrashFiles) -> list[str]:
    """Return the texts that the next start finds."""
    log = TokenLog.open(files, FOLDER, SystemRng())
    assert log is not None
    found = [msgspec.msgpack.decode(record.payload, type=Note).text for record in log.recovered]
    log.close()
    return found


async def test_synced_records_are_there_with_all_before_them() -> None:
    files = CrashFiles()
    writer = start(files)
    writer.append(writer.record(RecordKind.TURN, Note("first")))
    await writer.sync(writer.record(RecordKind.TURN, Note("second")))
    assert texts(files.crash(files.rng)) == ["first", "second"]
    await writer.close()


async def test_turns_that_end_together_share_a_sync() -> None:
    files = CrashFiles()
    writer = start(files)
    await writer.sync(writer.record(RecordKind.TURN, Note("begin")))
    syncs = 0

    def count(kind: str) -> None:
        nonlocal syncs
        syncs += kind == "sync"
        time.sleep(0.01 if kind == "sync" else 0)  # let the disk be slow, so that the others come to wait

    files.after_change = count
    await asyncio.gather(*(writer.sync(writer.record(RecordKind.TURN, Note(str(n)))) for n in range(50)))
    assert syncs <= 4
    await writer.close()
    assert sorted(texts(files)) == sorted(["begin", *map(str, range(50))])


async def test_written_records_outlive_the_process_without_a_sync() -> None:
    files = CrashFiles()
    writer = start(files)
    await writer.sync()
    changes: list[str] = []
    files.after_change = changes.append
    writer.append(writer.record(RecordKind.TURN, Note("sampled")))
    await writer.written(60)
    assert any(b"sampled" in data for data in files.files().values())
    assert changes[-1] == "append", "the file is new; its records are not synced"
    await writer.close()


async def test_nobody_waits_long_for_a_disk_that_hangs() -> None:
    files = CrashFiles()
    writer = start(files)
    goes_on = threading.Event()
    files.after_change = lambda kind: goes_on.wait(60) and None
    writer.append(writer.record(RecordKind.TURN, Note("stuck")))
    await writer.written(0.05)
    goes_on.set()
    await writer.close()
    await writer.written(60)
    assert texts(files) == ["stuck"]


async def test_the_event_loop_never_waits_for_the_disk() -> None:
    """Syncing on the event loop would stall everyone; the thread does it (known failure 35)."""
    files = CrashFiles()
    writer = start(files)
    files.after_change = lambda kind: time.sleep(0.2 if kind == "sync" else 0)
    task = asyncio.create_task(writer.sync(writer.record(RecordKind.TURN, Note("slow"))))
    worst, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        worst, last = max(worst, now - last), now
    await task
    assert worst < 0.15
    await writer.close()


async def test_a_refused_write_is_an_error_for_the_waiter_and_is_retried() -> None:
    files = CrashFiles()
    writer = start(files)
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    with pytest.raises(Unavailable, match="token log cannot be written") as caught:
        await writer.sync(writer.record(RecordKind.TURN, Note("lost")))
    assert caught.value.retry_after is not None
    assert writer.trouble and writer.dropped == 1
    files.heal()
    await writer.sync(writer.record(RecordKind.TURN, Note("after")))
    assert writer.trouble == ""
    await writer.close()
    assert "after" in texts(files)


async def test_trouble_ends_only_with_a_real_write() -> None:
    """A write of nothing would not notice a full disk, so a probe for recovery must write something."""
    files = CrashFiles()
    writer = start(files)
    await writer.sync(writer.record(RecordKind.TURN, Note("before")))
    files.fail(Fault(files.calls, errno.ENOSPC, sticky=True))
    with pytest.raises(Unavailable):
        await writer.sync(writer.record(RecordKind.TURN, Note("lost")))
    await writer.written(5.0)
    assert writer.trouble
    with pytest.raises(Unavailable):
        await writer.sync()
    assert writer.trouble
    files.heal()
    await writer.sync()
    assert writer.trouble == ""
    await writer.sync(writer.record(RecordKind.TURN, Note("after")))
    await writer.close()
    assert texts(files) == ["before", "after"]


async def test_an_erasure_returns_when_the_bytes_are_gone() -> None:
    files = CrashFiles()
    writer = start(files)
    record = writer.record(RecordKind.TURN, Note("a secret"))
    await writer.sync(record)
    await writer.erase([record.key], writer.record(RecordKind.TURN, Note("said at once")))
    assert not any(b"a secret" in data for data in files.files(FOLDER).values())
    await writer.close()
    assert texts(files) == ["said at once"]


async def test_turns_end_while_an_erasure_rewrites_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 1 << 10)
    files = CrashFiles()
    writer = start(files)
    key = writer.key()
    for _ in range(8):
        await writer.sync(writer.record(RecordKind.TURN, Note("a secret " * 200), key))
    loop, submitted, kinds, tasks = asyncio.get_running_loop(), threading.Event(), list[str](), list[Any]()

    def submit() -> None:
        tasks.append(asyncio.create_task(writer.sync(writer.record(RecordKind.TURN, Note("meanwhile")))))
        loop.call_soon(submitted.set)

    def changed(kind: str) -> None:
        kinds.append(kind)
        if kind == "remove" and not submitted.is_set():
            loop.call_soon_threadsafe(submit)
            submitted.wait(30)
            kinds.append("submitted")

    files.after_change = changed
    await writer.erase([key])
    await tasks[0]
    after = kinds[kinds.index("submitted") :]
    assert after.index("sync") < len(after) - 1 - after[::-1].index("remove") and after.count("remove") >= 7
    assert not any(b"a secret" in data for data in files.files(FOLDER).values())
    await writer.close()
    assert texts(files) == ["meanwhile"]


async def test_records_that_nobody_waits_for_are_synced_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FLUSH_SECONDS", 0.02)
    files = CrashFiles()
    writer = start(files)
    writer.append(writer.record(RecordKind.TURN, Note("quiet")))
    for _ in range(200):
        await asyncio.sleep(0.01)
        if texts(files.crash(files.rng)) == ["quiet"] and texts(files.crash(files.rng)) == ["quiet"]:
            break
    else:
        pytest.fail("it was never synced")
    await writer.close()


async def test_a_slow_disk_costs_records_that_nobody_waits_for_not_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BACKLOG_BYTES", 10_000)
    files = CrashFiles()
    writer = start(files)
    files.after_change = lambda _: time.sleep(0.05)
    for _ in range(100):
        writer.append(writer.record(RecordKind.TURN, Note("x" * 1000)))
    assert 80 < writer.dropped < 100
    files.after_change = lambda _: None
    await writer.close()
    assert len(texts(files)) == 100 - writer.dropped


async def test_a_close_writes_pending_records_and_accepts_no_more() -> None:
    files = CrashFiles()
    writer = start(files)
    for n in range(20):
        writer.append(writer.record(RecordKind.TURN, Note(str(n))))
    await writer.close()
    with pytest.raises(Unavailable, match="closed"):
        writer.append(writer.record(RecordKind.TURN, Note("late")))
    assert texts(files.crash(files.rng)) == list(map(str, range(20)))


async def test_closing_on_a_hanging_disk_can_be_abandoned() -> None:
    """The interpreter waits for non-daemon threads at its exit, so a stuck thread must not stop the shutdown.

    Known failure 3.
    """
    files, stuck, goes_on = CrashFiles(), threading.Event(), threading.Event()
    writer = start(files)

    def hang(kind: str) -> None:
        stuck.set()
        goes_on.wait()

    files.after_change = hang
    writer.append(writer.record(RecordKind.TURN, Note("never written")))
    others = set(threading.enumerate())
    closing = asyncio.create_task(writer.close())
    try:
        while not stuck.is_set():
            await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.wait({closing})
        assert [thread for thread in set(threading.enumerate()) - others if not thread.daemon] == []
    finally:
        goes_on.set()
    await writer.close()


async def test_a_waiter_that_gives_up_cancels_no_write() -> None:
    files = CrashFiles()
    writer = start(files)
    task = asyncio.create_task(writer.sync(writer.record(RecordKind.TURN, Note("cancelled"))))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await writer.sync(writer.record(RecordKind.TURN, Note("next")))
    await writer.close()
    assert texts(files) == ["cancelled", "next"]


async def test_the_end_of_a_turn_is_durable_within_milliseconds(tmp_path: Path, figure: Callable[..., None]) -> None:
    log = TokenLog.open(SystemFiles(), tmp_path / "log", SystemRng())
    assert log is not None
    writer = Writer(log)
    times = []
    for n in range(40):
        began = time.perf_counter()
        await writer.sync(writer.record(RecordKind.TURN, Note(str(n) * 400)))
        times.append(time.perf_counter() - began)
    await writer.close()
    middle = statistics.median(times)
    figure("token log: end of a turn until durable, p50", f"{middle * 1000:.1f} ms")
    assert middle < 0.1, "the law is 5 ms; a loaded machine gets twenty times that here"
