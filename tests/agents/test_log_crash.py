"""The token log against a disk that crashes, forgets, garbles and fails.

A workload writes, erases, compacts and opens again. A record counts as acknowledged when `write(sync=True)` returned
after it. Whatever happens then, every later start finds every acknowledged record that was not erased, nothing else
but what was written, and not one byte of what was erased.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.files import Crash, CrashFiles, Fault, corrupted

from cairn.agents import log as log_module
from cairn.agents.index import FOUND, NEWEST, Kind
from cairn.agents.log import Log
from cairn.agents.segment import Record

FOLDER = Path("/agents")
KINDS = (Kind.TURN, Kind.REPLAY, Kind.TOKENS, Kind.END, Kind.AGENT)
Figure = Callable[[str, str], None]


class Draw:
    """An `Rng` that repeats itself."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def bits64(self) -> int:
        return self._rng.getrandbits(63)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 6000)
    monkeypatch.setattr(log_module, "SMALL_SEGMENTS", 2)


class Model:
    """What the log was told, and what it must therefore hold."""

    def __init__(self) -> None:
        self.written: dict[int, list[Record]] = {}
        """By lsn: everything that was ever handed over. What was lost for ever may lend its lsn to another."""
        self.accepted: dict[int, Record] = {}
        self.synced: dict[int, Record] = {}
        self.erased: set[int] = set()
        """Keys whose erasure returned."""
        self.erasing: set[int] = set()
        """Keys whose erasure was begun."""

    def must(self) -> dict[int, Record]:
        """What no crash may take: acknowledged, not erased, and not replaced by anything that may be there."""
        kept = {}
        for record in self.synced.values():
            newer = [r for many in self.written.values() for r in many if r.key == record.key and r.lsn > record.lsn]
            replaced = record.kind in NEWEST and any(r.kind == record.kind for r in newer)
            replaced |= record.kind == Kind.TOKENS and any(r.kind == Kind.END for r in newer)
            if record.key not in self.erasing and not replaced:
                kept[record.lsn] = record
        return kept

    def check(self, log: Log, files: CrashFiles) -> None:
        """Compare with a log that was just opened."""
        found = {record.lsn: record for record in log.recovered}
        for lsn, record in self.must().items():
            assert found.get(lsn) == record, f"lost {lsn}"
        for record in found.values():
            assert record in self.written[record.lsn], "never written"
            assert record.key not in self.erased
        newest = [(r.kind, r.key) for r in found.values() if r.kind in NEWEST]
        assert len(newest) == len(set(newest))
        self.check_gone(files)
        self.check_read(log, list(found.values()))

    def check_read(self, log: Log, records: list[Record]) -> None:
        """Those of them that are looked up by kind and key are found where the log says that they lie."""
        wanted = {(record.kind, record.key): record for record in records if record.kind in FOUND}
        for record, found in zip(wanted.values(), log.read(list(wanted)), strict=True):
            newer = found is not None and found in self.written[found.lsn] and found.lsn > record.lsn
            assert newer or found == record, f"{record.lsn} cannot be read"
        assert log.read([(kind, key) for key in self.erased for kind in FOUND]) == [None] * (4 * len(self.erased))

    def check_gone(self, files: CrashFiles) -> None:
        for data in files.files(FOLDER).values():
            for key in self.erased:
                assert text(key) not in data, "erased text is on the disk"


def text(key: int) -> bytes:
    """What every record with that key says."""
    return b"<secret %d>" % key


class Work:
    """A log in use. What the disk refuses is refused, and the work goes on."""

    def __init__(self, files: CrashFiles, seed: int) -> None:
        self.files, self.rng, self.model = files, random.Random(seed), Model()
        self.keys: list[int] = []
        self.log: Log | None = None

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.step()
            except OSError:
                continue

    def step(self) -> None:
        rng, model = self.rng, self.model
        if self.log is None:
            log = Log.open(self.files, FOLDER, Draw(rng.getrandbits(32)))
            assert log is not None
            self.log = log
            model.check(log, self.files)
            # What is there now is durable, whether it was acknowledged or not.
            model.accepted = {record.lsn: record for record in log.recovered}
            log.write((), sync=True)
        log = self.log
        action = rng.random()
        if action < 0.7 or not self.keys:
            self.write(log)
        elif action < 0.83:
            gone = rng.sample(self.keys, min(len(self.keys), rng.randrange(1, 3)))
            self.keys = [key for key in self.keys if key not in gone]
            model.erasing |= set(gone)
            log.erase(gone)
            model.erased |= set(gone)
            model.check_gone(self.files)
        elif action < 0.96:
            log.compact()
        else:
            self.log = None
            log.close()
            return
        if action >= 0.7:
            model.check_read(log, list(model.must().values()))

    def write(self, log: Log) -> None:
        rng, model = self.rng, self.model
        records = []
        for _ in range(rng.randrange(1, 4)):
            kind, lsn = rng.choice(KINDS), log.next_lsn()
            key = lsn if kind == Kind.TURN or not self.keys else rng.choice(self.keys)
            record = Record(lsn, kind, key, b"%d" % lsn + text(key) * rng.randrange(1, 60))
            model.written.setdefault(lsn, []).append(record)
            records.append(record)
        sync = rng.random() < 0.6
        log.write(records, sync=sync)
        model.accepted |= {record.lsn: record for record in records}
        if sync:
            model.synced = dict(model.accepted)
        self.keys += [record.key for record in records if record.kind == Kind.TURN]


def reopen(files: CrashFiles, model: Model) -> Log:
    log = Log.open(files, FOLDER, Draw(files.rng.getrandbits(32)))
    assert log is not None
    model.check(log, files)
    return log


def crash_everywhere(seed: int, states: int, steps: int = 25) -> int:
    """Run one workload; at every change of the disk, open `states` of the disks that a crash could leave."""
    files, rng, seen = CrashFiles(seed=seed), random.Random(seed), 0
    work = Work(files, seed)

    def look(_: str) -> None:
        nonlocal seen
        for _ in range(states):
            after = files.crash(rng)
            if rng.random() < 0.4:
                after = crash_once(after, rng)
            log = reopen(after, work.model)
            seen += 1
            if rng.random() < 0.2:
                log.write([Record(log.next_lsn(), Kind.REPLAY, 0, b"")], sync=True)
                log.close()

    files.after_change = look
    work.run(steps)
    return seen


def crash_once(files: CrashFiles, rng: random.Random) -> CrashFiles:
    """Crash again while the log is being opened."""
    left = rng.randrange(8)

    def stop(_: str) -> None:
        nonlocal left, after
        left -= 1
        if left < 0 and after is files:
            after = files.crash(rng)
            files.dead = True
            raise Crash

    after = files
    files.after_change = stop
    try:
        Log.open(files, FOLDER, Draw(1))
    except Crash:
        return after
    files.after_change = lambda _: None
    return files.crash(rng)


def test_every_acknowledged_record_survives_a_crash_at_any_moment(prove: bool, figure: Figure) -> None:
    """Known failure 31. Crashes in the middle of writing, compaction and erasure, and again during the next start."""
    states = 0
    for seed in range(10_000):
        states += crash_everywhere(seed, states=3)
        if states >= (30_000 if prove else 3_000):
            break
    figure("token log: crash states, all acknowledged records found", f"{states:,}")


ERRORS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT]


@pytest.mark.parametrize("sticky", [False, True])
def test_a_fault_at_every_call_loses_nothing_acknowledged(sticky: bool, prove: bool, figure: Figure) -> None:
    runs = 0
    for seed in range(20 if prove else 2):
        calls = CrashFiles(seed=seed)
        Work(calls, seed).run(25)
        for at in range(0, calls.calls, 1 if prove else 2):
            fault = Fault(at, ERRORS[(at + seed) % 4], sticky=sticky, short=(at // 4) % 2 == 0)
            fault_at(seed, fault)
            runs += 1
    figure(f"token log: runs with a {'lasting' if sticky else 'single'} fault", f"{runs:,}")


def fault_at(seed: int, fault: Fault) -> None:
    files = CrashFiles(seed=seed)
    files.fail(fault)
    work = Work(files, seed)
    work.run(25)
    files.heal()
    rng = random.Random(seed)
    reopen(files.crash(rng), work.model)
    # It comes back by itself.
    while work.log is None:
        work.step()
    work.write(work.log)
    work.log.write((), sync=True)
    assert work.log.trouble == ""
    work.model.synced = dict(work.model.accepted)
    while work.log.compact():
        pass
    work.model.check_gone(files)
    reopen(files.crash(rng), work.model)


def test_a_sync_that_fails_keeps_what_was_accepted_before_it() -> None:
    """What a segment held unsynced is written again elsewhere, for after the failure nothing of it can be relied on."""
    files = CrashFiles()
    log = reopen(files, Model())
    first = Record(log.next_lsn(), Kind.TURN, 1, b"first")
    log.write([first], sync=True)
    second = Record(log.next_lsn(), Kind.TURN, 2, b"second")
    log.write([second], sync=False)
    files.fail(Fault(files.calls, errno.EIO, only=frozenset({"sync"})))
    third = Record(log.next_lsn(), Kind.TURN, 3, b"third")
    log.write([third], sync=True)
    assert files.fired == 1
    for seed in range(200):
        again = Log.open(files.crash(random.Random(seed)), FOLDER, Draw(1))
        assert again is not None
        assert again.recovered == [first, second, third]


def test_corruption_is_never_read_as_data(prove: bool, figure: Figure) -> None:
    files = CrashFiles(seed=5)
    work = Work(files, 5)
    work.run(40)
    if work.log is not None:
        work.log.close()
    paths = {path: data for path, data in files.files(FOLDER).items() if path.suffix == ".log"}
    assert len(paths) > 2
    rng = random.Random(1)
    done = found = 0
    while done < (20_000 if prove else 1_500):
        hurt = CrashFiles(seed=done)
        hurt.make_folder(FOLDER)
        contents = dict(paths)
        path = rng.choice(list(contents))
        if rng.random() < 0.06:
            other = rng.choice(list(contents))
            contents[path], contents[other] = contents[other], contents[path]
        elif rng.random() < 0.06:
            contents[FOLDER / f"{99:016x}.log"] = contents[path]
        else:
            contents[path] = corrupted(contents[path], rng)
        for one, data in contents.items():
            hurt.put(one, data)
        log = Log.open(hurt, FOLDER, Draw(2))
        assert log is not None
        for record in log.recovered:
            assert record in work.model.written[record.lsn], "damage was read as data"
        found += log.damaged > 0
        log.write([Record(log.next_lsn(), Kind.TURN, 1, b"more")], sync=True)
        log.close()
        done += 1
    figure("token log: corruptions, wrong records read", f"{done:,}, 0 ({found:,} noticed)")
