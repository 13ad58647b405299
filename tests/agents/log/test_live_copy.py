"""A copy of a log shows one moment of it, although the log is written, compacted and erased meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from cairn.agents.log import live_copy
from cairn.agents.log import token_log as log_module
from cairn.agents.log.index import RecordKind
from cairn.agents.log.live_copy import copy_log, damage
from cairn.agents.log.segment import VERSION, Record, SegmentHeader, encode_header
from cairn.agents.log.token_log import TokenLog
from cairn.system.interfaces import File
from cairn.system.posix import SystemFiles
from cairn.types.errors import ConfigError, Unavailable
from tests.files import SeededRng


class Disturbed(SystemFiles):
    """A file system that calls a function before the nth file is read."""

    def __init__(self, turn: int, happen: Callable[[], None]) -> None:
        self.turn, self.happen = turn, happen

    def open(self, path: Path, mode: Literal["read", "append", "create"]) -> File:
        if mode == "read":
            self.turn -= 1
            if self.turn == 0:
                self.happen()
        return super().open(path, mode)


def opened(path: Path) -> TokenLog:
    log = TokenLog.open(SystemFiles(), path, SeededRng())
    assert log is not None
    return log


def put(log: TokenLog, key: int, *, size: int = 400) -> None:
    log.write([Record(log.next_lsn(), RecordKind.TURN, key, b"turn %06d " % key * (size // 12))], sync=True)


def keys(copy: Path) -> set[int]:
    """Return the keys of the turns that a start finds in a copy."""
    log = opened(copy)
    found = {record.key for record in log.recovered}
    assert not log.loss
    log.close()
    return found


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenLog:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 6000)
    monkeypatch.setattr(log_module, "SMALL_SEGMENTS", 2)
    return opened(tmp_path / "log")


@pytest.mark.parametrize("turn", range(1, 9))
def test_segments_may_be_rewritten_during_a_copy(log: TokenLog, tmp_path: Path, turn: int) -> None:
    """Moved records are found in their new place, and erased ones stay erased."""
    for key in range(1, 60):
        put(log, key)

    def happen() -> None:
        log.erase(range(1, 40, 2))
        while log.compact():
            pass
        put(log, 100)

    (copy := tmp_path / "copy").mkdir(mode=0o700)
    copy_log(Disturbed(turn, happen), tmp_path / "log", copy)
    assert keys(copy) == {*range(2, 40, 2), *range(40, 60), 100}


def test_a_log_under_load(log: TokenLog, tmp_path: Path) -> None:
    """One thread writes, erases and compacts as fast as it can; each copy has everything written before it began."""
    done, erased, stop = set[int](), set[int](), threading.Event()

    def work() -> None:
        rng, key = random.Random(2), 0
        while not stop.is_set():
            key += 1
            put(log, key, size=rng.choice((100, 900)))
            done.add(key)
            if key % 5 == 0:
                gone = rng.choice(sorted(done))
                done.discard(gone)
                log.erase([gone])
                erased.add(gone)
            if key % 20 == 0:
                while log.compact():
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        number = 0
        while number < 8 or len(erased) < 2:  # a busy machine may write little meanwhile
            number += 1
            (copy := tmp_path / f"copy{number}").mkdir(mode=0o700)
            was, gone = set(done), set(erased)
            while True:
                try:
                    copy_log(SystemFiles(), tmp_path / "log", copy)
                    break
                except Unavailable:  # a machine that copies slowly and writes quickly
                    for left in copy.iterdir():
                        left.unlink()
            later = set(erased)
            found = keys(copy)
            assert not found & gone
            # what was erased while the copy was made may be there or not
            assert was - found <= later | set(erased)
    finally:
        stop.set()
        thread.join()


def test_a_log_that_keeps_changing_is_reported(log: TokenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_copy, "PASSES", 2)
    put(log, 1)

    class Restless(Disturbed):
        def open(self, path: Path, mode: Literal["read", "append", "create"]) -> File:
            if mode == "read":
                for key in range(16):  # more than a segment holds
                    put(log, key + 100)
            return super().open(path, mode)

    (tmp_path / "copy").mkdir(mode=0o700)
    with pytest.raises(Unavailable, match="changed faster than it could be copied"):
        copy_log(Restless(0, lambda: None), tmp_path / "log", tmp_path / "copy")


def test_damage_is_copied_and_reported_and_a_newer_format_refused(log: TokenLog, tmp_path: Path) -> None:
    for key in range(1, 40):
        put(log, key)
    log.close()
    first = min((tmp_path / "log").glob("*.log"))
    data = bytearray(first.read_bytes())
    data[4700] ^= 1
    first.write_bytes(data)
    (copy := tmp_path / "copy").mkdir(mode=0o700)
    copy_log(SystemFiles(), tmp_path / "log", copy)
    assert "bytes between records are damaged" in damage(SystemFiles(), copy)
    (tmp_path / "log" / f"{999:016x}.log").write_bytes(encode_header(SegmentHeader(999, 1, VERSION + 1)))
    (other := tmp_path / "other").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="newer Cairn"):
        copy_log(SystemFiles(), tmp_path / "log", other)
