"""The token log on a disk that crashes, forgets, garbles and fails: see `tests/laws/token_log.py`."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cairn.agents.log.index import RecordKind
from cairn.agents.log.segment import Record
from cairn.agents.log.token_log import TokenLog
from tests.files import Crash, CrashFiles, Fault, SeededRng
from tests.laws import token_log
from tests.laws.token_log import ERRORS, FOLDER, Model, Work, crash_everywhere, fault_at, reopen

Figure = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def small_segments() -> Iterator[None]:
    with token_log.small_segments():
        yield


def test_every_acknowledged_record_survives_a_crash_at_any_moment(prove: bool, figure: Figure) -> None:
    """Crashes in the middle of writing, compaction and erasure, and again during the next start (known failure 31)."""
    states = 0
    for seed in range(10_000):
        states += crash_everywhere(seed, states=3)
        if states >= (30_000 if prove else 600):
            break
    figure("token log: crash states, all acknowledged records found", f"{states:,}")


@pytest.mark.parametrize("sticky", [False, True])
def test_a_fault_at_every_call_loses_nothing_acknowledged(sticky: bool, prove: bool, figure: Figure) -> None:
    runs = 0
    for seed in range(20 if prove else 1):
        calls = CrashFiles(seed=seed)
        Work(calls, seed).run(25)
        for at in range(0, calls.calls, 1 if prove else 3):
            fault = Fault(at, ERRORS[(at + seed) % 4], sticky=sticky, short=(at // 4) % 2 == 0)
            fault_at(seed, fault)
            runs += 1
    figure(f"token log: runs with a {'lasting' if sticky else 'single'} fault", f"{runs:,}")


def test_a_sync_that_fails_keeps_what_was_accepted_before_it() -> None:
    """After a failed sync nothing unsynced in the segment can be relied on, so it is written again elsewhere."""
    files = CrashFiles()
    log = reopen(files, Model())
    first = Record(log.next_lsn(), RecordKind.TURN, 1, b"first")
    log.write([first], sync=True)
    second = Record(log.next_lsn(), RecordKind.TURN, 2, b"second")
    log.write([second], sync=False)
    files.fail(Fault(files.calls, errno.EIO, only=frozenset({"sync"})))
    third = Record(log.next_lsn(), RecordKind.TURN, 3, b"third")
    log.write([third], sync=True)
    assert files.fired == 1
    for seed in range(200):
        again = TokenLog.open(files.crash(random.Random(seed)), FOLDER, SeededRng(1))
        assert again is not None
        assert again.recovered == [first, second, third]


def test_records_that_a_start_could_not_sync_go_only_once_their_successors_are_durable() -> None:
    """The process was killed, the disk was full at the next start, and then there is room again."""
    old, new = b"version 1", b"version 2"
    for seed in range(40):
        files = CrashFiles(seed=seed)
        log = TokenLog.open(files, FOLDER, SeededRng(1))
        assert log is not None
        log.write([Record(log.next_lsn(), RecordKind.AGENT, 1000, old)], sync=True)
        files = files.kill()
        files.fail(Fault(files.calls, errno.ENOSPC, sticky=True, only=frozenset({"append"})))
        log = TokenLog.open(files, FOLDER, SeededRng(2))
        assert log is not None and log.trouble
        files.heal()
        log.write([Record(log.next_lsn(), RecordKind.AGENT, 1000, new)], sync=False)
        crashed = list[CrashFiles]()
        files.after_change = partial(_cut_power, files, crashed, random.Random(seed))
        log.write([Record(log.next_lsn(), RecordKind.REPLAY, 7, b"x")], sync=True)
        assert len(crashed) > 3
        for after in crashed:
            again = TokenLog.open(after, FOLDER, SeededRng(3))
            assert again is not None
            assert [record.payload for record in again.recovered if record.key == 1000] in ([old], [new]), seed


@pytest.mark.parametrize("refused", ["start", "write"])
def test_the_older_of_two_unsealed_segments_goes_only_once_its_successor_is_durable(refused: str) -> None:
    """`refused`: the call whose failure left the first segment without a seal.

    Then the process was killed, and the power fails during the next start.
    """
    old, new = b"version 1", b"version 2"
    for seed in range(40):
        files = CrashFiles(seed=seed)
        log = TokenLog.open(files, FOLDER, SeededRng(1))
        assert log is not None
        log.write([Record(log.next_lsn(), RecordKind.AGENT, 1000, old)], sync=True)
        if refused == "start":
            files = files.kill()
            files.fail(Fault(files.calls, errno.ENOSPC, sticky=True, only=frozenset({"append"})))
            log = TokenLog.open(files, FOLDER, SeededRng(2))
            assert log is not None and log.trouble
            files.heal()
        else:
            files.fail(Fault(files.calls, errno.EIO, only=frozenset({"append"})))
        log.write([Record(log.next_lsn(), RecordKind.AGENT, 1000, new)], sync=False)
        files = files.kill()
        crashed = list[CrashFiles]()
        files.after_change = partial(_cut_power, files, crashed, random.Random(seed))
        assert TokenLog.open(files, FOLDER, SeededRng(3)) is not None
        assert len(crashed) > 3
        for after in crashed:
            again = TokenLog.open(after, FOLDER, SeededRng(4))
            assert again is not None
            assert [record.payload for record in again.recovered if record.key == 1000] in ([old], [new]), seed


def test_a_segment_rewritten_by_a_killed_start_goes_only_once_the_new_file_is_durable() -> None:
    """The process was killed between the rename and the sync of the folder.

    The next start reads the new file, which supersedes all of the old one; the power fails during that start.
    """
    for seed in range(40):
        files = CrashFiles(seed=seed)
        log = TokenLog.open(files, FOLDER, SeededRng(1))
        assert log is not None
        log.write([Record(log.next_lsn(), RecordKind.AGENT, 1000, b"acknowledged")], sync=True)
        files, killed = files.kill(), list[CrashFiles]()
        files.after_change = partial(_kill_at_the_renaming, files, killed)
        with contextlib.suppress(Crash):
            TokenLog.open(files, FOLDER, SeededRng(2))
        files, crashed = killed[0], list[CrashFiles]()
        files.after_change = partial(_cut_power, files, crashed, random.Random(seed))
        assert TokenLog.open(files, FOLDER, SeededRng(3)) is not None
        assert crashed
        for after in crashed:
            again = TokenLog.open(after, FOLDER, SeededRng(4))
            assert again is not None
            assert [record.payload for record in again.recovered if record.key == 1000] == [b"acknowledged"], seed


def _kill_at_the_renaming(files: CrashFiles, killed: list[CrashFiles], change: str) -> None:
    if change == "replace" and not killed:
        killed.append(files.kill())
        raise Crash


def _cut_power(files: CrashFiles, crashed: list[CrashFiles], rng: random.Random, _: str) -> None:
    crashed.append(files.crash(rng))


def test_corruption_is_never_read_as_data(prove: bool, figure: Figure) -> None:
    """Records that damage does not hit are found. Erased text is in no file afterwards, even in an unreadable one."""
    segments, work = token_log.folder_of(5)
    assert len(segments) > 2
    rng, count = random.Random(1), 20_000 if prove else 500
    noticed = sum(token_log.damaged_once(segments, work, rng) for _ in range(count))
    for _ in range(count // 5):
        token_log.damage_costs_what_it_hits(segments, work, rng)
    figure("token log: corruptions, wrong records read", f"{count:,}, 0 ({noticed:,} noticed)")


def test_records_of_earlier_releases_are_read_correctly() -> None:
    token_log.read_format_1()
