"""The token log as its callers see it: written records are found, erased ones are gone, foreign folders are refused."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from cairn.agents.log import token_log as log_module
from cairn.agents.log.index import TIDY, Index, OffsetTable, RecordKind, Segment, decode_keys, encode_keys
from cairn.agents.log.recovery import Folder, look
from cairn.agents.log.segment import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    RECORD_BYTES,
    VERSION,
    Record,
    SegmentHeader,
    decode_header,
    encode_header,
    encode_record,
    scan,
)
from cairn.agents.log.token_log import TokenLog
from cairn.system.posix import SystemFiles
from cairn.types.errors import ConfigError
from tests.files import CrashFile, CrashFiles, Fault, SeededRng

FOLDER = Path("/agents")


def opened(files: CrashFiles, path: Path = FOLDER) -> TokenLog:
    log = TokenLog.open(files, path, SeededRng())
    assert log is not None
    return log


def put(log: TokenLog, kind: RecordKind, key: int, text: bytes = b"x", *, sync: bool = True) -> Record:
    record = Record(log.next_lsn(), kind, key, text)
    log.write([record], sync=sync)
    return record


# --------------------------------------------------------------------------------------------------------- bytes


def test_a_segment_gives_back_its_records() -> None:
    header = SegmentHeader(3, 12345)
    data = bytearray(encode_header(header))
    records = [Record(lsn, RecordKind.TURN, lsn * 7, b"p" * lsn) for lsn in range(5)]
    for record in records:
        data += encode_record(header, len(data), record)
    assert decode_header(bytes(data)) == header
    assert scan(header, bytes(data)) == (records, 0)


def test_a_header_survives_the_loss_of_its_first_sector() -> None:
    header = SegmentHeader(3, 12345)
    data = encode_header(header)
    assert decode_header(bytes(512) + data[512:]) == header
    assert decode_header(data[:512] + bytes(len(data) - 512)) == header
    assert decode_header(bytes(len(data))) is None


def test_damage_costs_the_record_it_hits_and_no_other() -> None:
    """A torn end counts as damage too (known failure 30)."""
    header = SegmentHeader(1, 99)
    data = bytearray(encode_header(header))
    places = []
    for lsn in range(4):
        places.append(len(data))
        data += encode_record(header, len(data), Record(lsn, RecordKind.TURN, lsn, b"payload"))
    data[places[1] + 45] ^= 1
    records = scan(header, bytes(data[:-1]))
    assert [record.lsn for record in records.records] == [0, 2] and records.damaged > 0


def test_a_record_is_valid_only_at_its_place_in_its_segment() -> None:
    """A text that holds the bytes of a record, or of another segment's record, is no record."""
    header, other = SegmentHeader(1, 99), SegmentHeader(2, 98)
    record = Record(1, RecordKind.TURN, 1, b"payload")
    bytes_of_it = encode_record(header, HEADER_BYTES, record)
    outer = Record(2, RecordKind.TURN, 2, bytes_of_it)
    body = encode_record(header, HEADER_BYTES, outer)
    damaged = bytearray(encode_header(header) + body)
    damaged[HEADER_BYTES + 20] ^= 1  # break the outer record's head, so that the scan looks for the next
    assert scan(header, bytes(damaged)).records == []
    assert scan(other, encode_header(other) + bytes_of_it).records == []


def test_a_payload_beyond_the_limit_is_refused_before_anything_is_written() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MAX_PAYLOAD + 1

    with pytest.raises(ValueError, match=str(MAX_PAYLOAD)):
        encode_record(SegmentHeader(1, 1), HEADER_BYTES, Record(1, RecordKind.TURN, 1, Long()))


# --------------------------------------------------------------------------------------------------------- index


def counting(*records: Record) -> tuple[Index, list[int]]:
    """Return an index of records in one segment, and the numbers of those that still count."""
    segment = Segment(SegmentHeader(1, 1))
    index, offset = Index({1: segment}), HEADER_BYTES
    for record in records:
        index.add(record, segment, offset)
        offset += record.size
    return index, [lsn for lsn, _ in segment.counting()]


def test_only_the_newest_of_a_kind_and_key_counts_whatever_the_order() -> None:
    for order in itertools.permutations(range(1, 4)):
        index, left = counting(*(Record(lsn, RecordKind.AGENT, 7, bytes(lsn)) for lsn in order))
        assert left == [3]
        place = index.locate(RecordKind.AGENT, 7)
        assert place is not None and place.size == RECORD_BYTES + 3


def test_an_end_supersedes_the_pieces_of_its_turn_only() -> None:
    pieces = [Record(lsn, RecordKind.TOKENS, key, b"") for lsn, key in ((1, 5), (2, 5), (3, 6))]
    assert counting(*pieces, Record(4, RecordKind.END, 5, b""))[1] == [3, 4]


def test_a_table_of_places_does_what_a_dict_does() -> None:
    table, known, rng = OffsetTable(), {}, random.Random(1)
    for _ in range(20_000):
        key = rng.choice((rng.randrange(1, 3000), 2**63 + rng.randrange(300)))
        if rng.random() < 0.3:
            table.drop(key)
            known.pop(key, None)
        else:
            known[key] = rng.randrange(1, 1 << 30), rng.randrange(1 << 34)
            table.put(key, *known[key])
        probe = rng.randrange(1, 3000)
        assert table.get(probe) == known.get(probe, (0, 0))
    assert all(table.get(key) == place for key, place in known.items())


def test_superseded_records_leave_the_index_and_are_erased_all_the_same() -> None:
    """Otherwise a log in which one agent's record is replaced at every turn would keep each version in memory."""
    files = CrashFiles()
    log = opened(files)
    for line in range(10 * TIDY):
        put(log, RecordKind.SAVINGS, 7, b"secret %d" % line)
        put(log, RecordKind.AGENT, 8, b"open")
    (segment,) = log._index.segments.values()
    assert len(segment) <= 2 * TIDY + 2
    log.close()
    again = opened(files)
    assert [record.key for record in again.recovered] == [7, 8]
    put(again, RecordKind.SAVINGS, 7, b"in another file")
    again.close()
    last = opened(files)
    assert [len(segment) for segment in last._index.segments.values()] == [1, 1]
    last.erase([7])
    assert not any(b"secret" in data for data in files.files(FOLDER).values())
    assert [record.key for record in opened(files.crash(random.Random(1))).recovered] == [8]


def test_keys_of_an_erasure_are_read_back() -> None:
    keys = [1, 2**63, 77]
    assert decode_keys(encode_keys(keys)) == keys and decode_keys(b"") == []


def test_a_segment_is_wasteful_when_less_than_half_of_it_counts() -> None:
    segment = Segment(SegmentHeader(1, 1))
    assert segment.wasteful
    record = Record(1, RecordKind.TURN, 1, b"x" * 100)
    for place in range(4):
        segment.add(record, segment.size)
        segment.size += record.size
        assert segment.live == (place + 1) * record.size
    assert not segment.wasteful
    for place in range(3):
        segment.drop(HEADER_BYTES + place * record.size)
        segment.drop(HEADER_BYTES)
    assert segment.wasteful and segment.live == record.size


# ----------------------------------------------------------------------------------------------------------- log


def test_synced_records_are_found_in_order_by_the_next_start() -> None:
    files = CrashFiles()
    log = opened(files)
    written = [put(log, RecordKind.TURN, key) for key in (5, 9, 1)]
    again = opened(files.crash(random.Random(1)))
    assert again.recovered == written
    assert again.next_lsn() > written[-1].lsn


def test_a_file_in_the_place_of_the_folder_is_named_as_such(tmp_path: Path) -> None:
    place = tmp_path / "agents"
    place.write_bytes(b"")
    with pytest.raises(ConfigError, match="agents: is a file; the token log needs a folder of its own"):
        TokenLog.open(SystemFiles(), place, SeededRng())
    assert place.read_bytes() == b""


def test_a_second_process_is_refused_while_the_first_lives() -> None:
    files = CrashFiles()
    log = opened(files)
    assert TokenLog.open(files, FOLDER, SeededRng()) is None
    log.close()
    assert TokenLog.open(files, FOLDER, SeededRng()) is not None


def test_an_end_leaves_the_tokens_of_its_turn_behind() -> None:
    files = CrashFiles()
    log = opened(files)
    put(log, RecordKind.TOKENS, 5, b"piece", sync=False)
    end = put(log, RecordKind.END, 5, b"all")
    log.close()
    assert opened(files).recovered == [end]


def test_erased_bytes_are_nowhere_and_what_is_left_stays() -> None:
    files = CrashFiles()
    log = opened(files)
    stays = put(log, RecordKind.TURN, 1, b"stays")
    put(log, RecordKind.TURN, 2, b"secret text")
    log.erase([2])
    assert not any(b"secret text" in data for data in files.files(FOLDER).values())
    after = put(log, RecordKind.TURN, 3, b"after")
    log.close()
    assert opened(files).recovered == [stays, after]


def test_an_erasure_that_a_crash_cuts_is_finished_by_the_next_start() -> None:
    files = CrashFiles()
    log = opened(files)
    put(log, RecordKind.TURN, 2, b"secret text")
    log.write([Record(log.next_lsn(), RecordKind.ERASE, 0, encode_keys([2]))], sync=True)
    after = files.crash(random.Random(1))
    assert opened(after).recovered == []
    assert not any(b"secret text" in data for data in after.files(FOLDER).values())


def test_compaction_ends_and_keeps_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 6000)
    monkeypatch.setattr(log_module, "SMALL_SEGMENTS", 2)
    files = CrashFiles()
    log = opened(files)
    for turn in range(200):
        put(log, RecordKind.AGENT, 1, b"%d" % turn + b"x" * 300, sync=turn % 7 == 0)
    rounds = 0
    while log.compact():
        rounds += 1
        assert rounds < 500, "it does not end"
    assert log.bytes < 40_000, "199 of 200 records are superseded"
    log.close()
    (left,) = opened(files).recovered
    assert left.payload.startswith(b"199x")


def test_a_record_is_readable_while_its_segment_is_rewritten() -> None:
    """A reader takes no lock: a record that moves between the look at the index and the read is looked up again."""
    moves = 3

    class Moving(CrashFiles):
        def open(self, path: Path, mode: Literal["read", "append", "create"]) -> CrashFile:
            nonlocal moves
            if mode == "read" and moves and threading.current_thread() is reader:
                moves -= 1
                log.erase([gone[moves].key])
            return super().open(path, mode)

    files, results = Moving(), []
    log = opened(files)
    reader = threading.Thread(
        target=lambda: results.extend(
            log.read([(RecordKind.TURN, 1), (RecordKind.END, 1), (RecordKind.TURN, 9), (RecordKind.TURN, 100)])
        )
    )
    kept = [put(log, RecordKind.TURN, 1, b"what was said"), put(log, RecordKind.END, 1, b"what was answered")]
    gone = [put(log, RecordKind.TURN, key, b"secret text") for key in (100, 101, 102)]
    reader.start()
    reader.join()
    assert moves == 0 and results == [*kept, None, None]


def test_a_segment_that_cannot_be_removed_returns_nothing_old() -> None:
    """Its records have moved already.

    A record that supersedes one of them meanwhile still counts when the segment goes.
    """
    files = CrashFiles()
    log = opened(files)
    put(log, RecordKind.END, 7, b"interrupted" * 50)
    put(log, RecordKind.TURN, 8, b"gone" * 500)
    files.fail(Fault(files.calls, errno.EIO, only=frozenset({"remove"})))
    with pytest.raises(OSError, match="Input/output error"):
        log.erase([8])
    end = put(log, RecordKind.END, 7, b"finished")
    while log.compact():
        assert log.read([(RecordKind.END, 7)]) == [end]
    assert log.read([(RecordKind.END, 7)]) == [end]
    assert not any(b"gone" in data for data in files.files(FOLDER).values())


def test_an_erasure_goes_on_behind_a_segment_that_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 4 << 10)
    files = CrashFiles()
    log = opened(files)
    for number in range(6):
        put(log, RecordKind.TURN, 8, b"gone %d " % number * 500)
    kept = put(log, RecordKind.TURN, 9, b"kept")
    first = log._folder.name(min(log._index.segments))
    removed = files.remove

    def remove(path: Path) -> None:
        if path == first:
            raise OSError(errno.EIO, "Input/output error")
        removed(path)

    monkeypatch.setattr(files, "remove", remove)
    with pytest.raises(OSError, match="Input/output error"):
        log.erase([8])
    assert [path for path, data in files.files(FOLDER).items() if b"gone" in data] == [first]
    put(log, RecordKind.TURN, 10, b"another")
    with pytest.raises(OSError, match="Input/output error"):
        log.erase([10])
    assert not log.erased([8]) and not log.erased([10])
    monkeypatch.setattr(files, "remove", removed)

    while not (log.erased([8]) and log.erased([10])):
        log.erase_some()
    assert not any(b"gone" in data or b"another" in data for data in files.files(FOLDER).values())
    assert log.read([(RecordKind.TURN, 9)]) == [kept]


@pytest.mark.parametrize("all_of_it", [False, True])
def test_an_unreadable_sector_costs_what_it_holds(monkeypatch: pytest.MonkeyPatch, all_of_it: bool) -> None:
    files = CrashFiles()
    log = opened(files)
    for key in (1, 2, 3):
        put(log, RecordKind.TURN, key, b"%d" % key * 9000)
    log.close()
    read = CrashFile.read

    def broken(self: CrashFile, offset: int, size: int) -> bytes:
        if all_of_it or offset < 20_000 < offset + size:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, offset, size)

    monkeypatch.setattr(CrashFile, "read", broken)
    if all_of_it:  # the disk is away, maybe for a moment: nothing counts as damaged
        with pytest.raises(OSError, match="Input/output error"):
            TokenLog.open(files, FOLDER, SeededRng())
        monkeypatch.undo()
        assert [record.key for record in opened(files).recovered] == [1, 2, 3]
        return
    log = opened(files)
    assert [record.key for record in log.recovered] == [1, 3] and log.damaged > 9000
    monkeypatch.undo()
    log.erase([1])
    assert [record.key for record in log.read([(RecordKind.TURN, 3)]) if record is not None] == [3]


def test_a_damaged_record_is_read_as_nothing() -> None:
    files = CrashFiles()
    log = opened(files)
    hurt, whole = put(log, RecordKind.TURN, 1, b"what was said"), put(log, RecordKind.TURN, 2, b"and this")
    (path,) = (path for path in files.files(FOLDER) if path.suffix == ".log")
    files.put(path, files.files()[path].replace(b"was", b"is "))
    assert log.read([(RecordKind.TURN, 1), (RecordKind.TURN, 2)]) == [None, whole]
    assert hurt.key == 1


def test_a_folder_that_is_not_ours_alone_is_refused_and_left_alone() -> None:
    spoilt: list[tuple[Callable[[CrashFiles], None], str]] = [
        (lambda files: files.chmod(FOLDER, 0o755), "others may read it"),
        (lambda files: files.disown(FOLDER), "belongs to another user"),
        (lambda files: files.put(FOLDER / "thesis.txt", b"mine"), "thesis.txt"),
    ]
    for spoil, what in spoilt:
        files = CrashFiles()
        files.make_folder(FOLDER)
        spoil(files)
        before = files.files()
        with pytest.raises(ConfigError, match=what):
            TokenLog.open(files, FOLDER, SeededRng())
        assert files.files() == before


def test_uploads_that_a_killed_server_left_are_removed() -> None:
    files = CrashFiles()
    log = opened(files)
    files.put(FOLDER / "kv-of-import-ab12cd34", b"half of an upload")
    assert TokenLog.open(files, FOLDER, SeededRng()) is None, "another server imports, and holds the lock"
    assert FOLDER / "kv-of-import-ab12cd34" in files.files()
    log.close()
    opened(files).close()
    assert FOLDER / "kv-of-import-ab12cd34" not in files.files()


def test_a_newer_format_is_refused_and_left_alone() -> None:
    files = CrashFiles()
    files.make_folder(FOLDER)
    files.put(FOLDER / f"{7:016x}.log", encode_header(SegmentHeader(7, 5, VERSION + 1)))
    before = files.files()
    with pytest.raises(ConfigError, match=f"format {VERSION + 1}"):
        TokenLog.open(files, FOLDER, SeededRng())
    assert {path: data for path, data in files.files().items() if path.suffix == ".log"} == before


def test_a_segment_without_a_header_is_set_aside_and_goes_with_the_next_erasure() -> None:
    """Nothing says what it holds, so an erasure must not leave it there."""
    files = CrashFiles()
    log = opened(files)
    kept = put(log, RecordKind.TURN, 1)
    log.close()
    files.put(FOLDER / f"{99:016x}.log", b"secret" * 2000)
    again = opened(files)
    assert again.recovered == [kept] and again.damaged == 12_000
    assert "1 of its files had no readable header and were set aside as *.damaged" in again.loss
    again.erase([12345])
    assert not any(b"secret" in data for data in files.files(FOLDER).values())


def test_the_same_holds_on_a_real_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = TokenLog.open(SystemFiles(), path, SeededRng())
    assert log is not None and TokenLog.open(SystemFiles(), path, SeededRng()) is None
    kept = put(log, RecordKind.TURN, 1, b"kept")
    put(log, RecordKind.TURN, 2, b"secret text")
    log.erase([2])
    log.close()
    assert path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in path.iterdir())
    assert not any(b"secret text" in file.read_bytes() for file in path.iterdir())
    again = TokenLog.open(SystemFiles(), path, SeededRng())
    assert again is not None and again.recovered == [kept]
    again.close()


def test_a_loss_is_reported_and_a_torn_write_is_not_one(tmp_path: Path) -> None:
    """Both the log itself and a check of its folder report it, also while the log is open; zeroed bytes count too."""
    folder = Folder(SystemFiles(), tmp_path / "log")

    def reopened() -> str:
        log = TokenLog.open(SystemFiles(), folder.path, SeededRng())
        assert log is not None
        try:
            assert look(folder) == log.loss or "between records" in log.loss  # bytes lost while the log is open
            return log.loss
        finally:
            log.close()

    log = TokenLog.open(SystemFiles(), folder.path, SeededRng())
    assert log is not None
    for key in (1, 2, 3):
        put(log, RecordKind.TURN, key, b"payload")
    log.close()
    (number,) = folder.numbers("log")
    path = folder.name(number)
    whole = path.read_bytes()
    assert reopened() == look(folder) == ""
    path.write_bytes(whole[:-3])
    assert look(folder) == ""
    assert reopened() == ""
    (number,) = folder.numbers("log")
    path = folder.name(number)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 50] ^= 1
    path.write_bytes(data)
    assert "bytes between records are damaged" in look(folder)
    assert "bytes between records are damaged" in reopened()
    (number,) = folder.numbers("log")
    path = folder.name(number)
    path.write_bytes(bytes(path.stat().st_size))
    assert "1 of its files had no readable header" in look(folder)
    assert "1 of its files had no readable header" in reopened()
    assert "1 of its files had no readable header" in reopened(), "it lies there until the next erasure"
