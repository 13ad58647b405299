"""The file seam: real and simulated files behave alike, and a crash loses only unsynced changes."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.system.interfaces import LOCK_FILE, FileSystem
from cairn.system.posix import SystemFiles
from tests.files import Crash, CrashFiles, Fault

SEEDS = 300


@pytest.fixture(params=["system", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileSystem, Path]:
    if request.param == "system":
        return SystemFiles(), tmp_path / "a"
    return CrashFiles(), Path("/a")


def test_files_are_written_read_and_listed(place: tuple[FileSystem, Path]) -> None:
    files, root = place
    files.make_folder(root / "b")
    files.make_folder(root / "b")
    file = files.open(root / "one", "create")
    file.append(b"hello ")
    file.append(memoryview(b"world"))
    assert file.read(0, 100) == b"hello world"
    assert file.read(6, 3) == b"wor"
    assert file.read(50, 3) == b""
    buffer = memoryview(bytearray(20))
    assert file.read_into(6, buffer[:3]) == 3 and file.read_into(2, buffer[3:]) == 9
    assert bytes(buffer) == b"worllo world" + bytes(8)
    assert file.read_into(50, buffer) == 0
    file.truncate(5)
    assert file.size() == 5
    file.append(b"!")
    file.sync()
    assert file.disk() == 4096
    file.close()
    with pytest.raises(FileExistsError):
        files.open(root / "one", "create")
    again = files.open(root / "one", "append")
    again.append(b"?")
    again.close()
    reader = files.open(root / "one", "read")
    assert reader.read(0, 100) == b"hello!?"
    with pytest.raises(OSError):
        reader.append(b"x")
    reader.close()
    files.touch(root / "one", 1000.0)
    assert sorted((e.name, e.size, e.folder) for e in files.list(root)) == [("b", 0, True), ("one", 7, False)]
    entry = next(e for e in files.list(root) if e.name == "one")
    assert (entry.modified, entry.disk) == (1000.0, 4096)
    assert (files.mode(root), files.mode(root / "one")) == (0o700, 0o600)
    assert files.owned(root) and files.owned(root / "one")
    assert files.free(root) > 0
    files.sync_folder(root)


def test_files_that_will_be_read_are_announced(place: tuple[FileSystem, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files, root = place
    files.make_folder(root)
    files.open(root / "one", "create").close()
    files.announce(root / "one")
    files.announce(root / "nothing")
    monkeypatch.delattr("os.posix_fadvise", raising=False)
    files.announce(root / "one")


def test_names_are_replaced_and_removed(place: tuple[FileSystem, Path]) -> None:
    files, root = place
    files.make_folder(root / "b")
    for name, text in (("x", b"old"), ("y", b"new")):
        file = files.open(root / name, "create")
        file.append(text)
        file.close()
    files.replace(root / "y", root / "x")
    assert files.open(root / "x", "read").read(0, 9) == b"new"
    for action in (lambda: files.remove(root / "y"), lambda: files.open(root / "y", "read")):
        with pytest.raises(FileNotFoundError):
            action()
    with pytest.raises(FileNotFoundError):
        files.list(root / "nowhere")
    with pytest.raises(FileNotFoundError):
        files.open(root / "y", "append")
    files.replace(root / "b", root / "c")
    files.replace(root / "x", root / "c" / "x")
    assert [entry.name for entry in files.list(root)] == ["c"]
    files.remove(root / "c" / "x")
    assert files.list(root / "c") == []


def test_a_folder_is_held_once(place: tuple[FileSystem, Path]) -> None:
    files, root = place
    files.make_folder(root)
    lock = files.lock(root)
    assert lock is not None
    assert files.lock(root) is None
    assert [entry.name for entry in files.list(root)] == [LOCK_FILE]
    lock.release()
    again = files.lock(root)
    assert again is not None
    again.release()
    again.release()


def test_a_lock_tells_whether_its_folder_is_still_where_it_was(place: tuple[FileSystem, Path]) -> None:
    files, root = place
    files.make_folder(root / "b")
    lock = files.lock(root / "b")
    assert lock is not None and lock.held()
    files.replace(root / "b", root / "c")
    assert not lock.held()
    files.make_folder(root / "b")
    other = files.lock(root / "b")
    assert other is not None and other.held() and not lock.held()
    files.remove(root / "b" / LOCK_FILE)
    assert not other.held()


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    files = SystemFiles()
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "link").symlink_to("secret")
    for mode in ("read", "append", "create"):
        with pytest.raises(OSError):
            files.open(tmp_path / "link", mode)
    with pytest.raises(OSError):
        files.open(tmp_path, "read")
    assert files.list(tmp_path)[0].size in (1, 6)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, cairn.system.posix as s; l = s.SystemFiles().lock(pathlib.Path(sys.argv[1])); "
        "print(l is not None, flush=True); sys.stdin.read()"
    )
    files = SystemFiles()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"True\n"
        assert files.lock(tmp_path) is None
        child.kill()
        child.wait()
        lock = files.lock(tmp_path)
        assert lock is not None
        lock.release()


@pytest.mark.parametrize("code", [0, errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.EIO])
def test_a_drive_that_cannot_be_flushed_to_the_end_is_synced_as_far_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """macOS: network volumes and some drives refuse the F_FULLFSYNC call."""
    called: list[str] = []

    def full(handle: int, order: int) -> int:
        called.append(f"full {order}")
        if code:
            raise OSError(code, "no")
        return 0

    file = SystemFiles().open(tmp_path / "x", "create")
    with monkeypatch.context() as patch:
        patch.setattr("cairn.system.posix.fcntl.F_FULLFSYNC", 51, raising=False)
        patch.setattr("cairn.system.posix.fcntl.fcntl", full)
        patch.setattr("cairn.system.posix.os.fsync", lambda handle: called.append("fsync"))
        if code == errno.EIO:
            with pytest.raises(OSError, match="no"):
                file.sync()
        else:
            file.sync()
    assert called == (["full 51"] if code in (0, errno.EIO) else ["full 51", "fsync"])
    file.close()


def test_a_sync_that_failed_fails_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SystemFiles().open(tmp_path / "x", "create")
    file.append(b"x")

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr("cairn.system.posix._sync", fail)
        with pytest.raises(OSError):
            file.sync()
    with pytest.raises(OSError, match="earlier"):
        file.sync()
    file.close()


# ------------------------------------------------------------------------------------------- the one in memory


def written() -> CrashFiles:
    files = CrashFiles()
    files.make_folder(Path("/a"))
    file = files.open(Path("/a/x"), "create")
    file.append(b"safe")
    file.sync()
    files.sync_folder(Path("/a"))
    return files


def test_synced_files_survive_every_crash() -> None:
    files = written()
    file = files.open(Path("/a/x"), "append")
    file.append(b" maybe")
    file.append(b" later")
    files.open(Path("/a/y"), "create").append(b"new")
    seen, there = set(), set()
    for seed in range(SEEDS):
        after = files.crash(random.Random(seed)).files()
        assert after[Path("/a/x")].startswith(b"safe")
        seen.add(after[Path("/a/x")])
        there.add(after.get(Path("/a/y")))
    assert {b"safe", b"safe maybe", b"safe maybe later", b"safe mayb"} <= seen
    assert any(one.startswith(b"safe\0\0\0\0\0\0 l") for one in seen)
    assert {None, b"", b"new", b"n", b"\0\0\0"} <= there


def test_a_name_changes_wholly_or_not_at_all_and_later_ones_need_earlier_ones() -> None:
    files = written()
    other = files.open(Path("/a/y"), "create")
    other.append(b"other")
    other.sync()
    files.replace(Path("/a/y"), Path("/a/x"))
    files.open(Path("/a/z"), "create")
    seen = set()
    for seed in range(SEEDS):
        after = files.crash(random.Random(seed)).files()
        assert after[Path("/a/x")] in (b"safe", b"other")
        seen.add((after[Path("/a/x")], Path("/a/y") in after, Path("/a/z") in after))
    assert {(b"safe", True, False), (b"other", False, False), (b"safe", False, True), (b"other", True, True)} <= seen
    files.sync_folder(Path("/a"))
    for seed in range(SEEDS):
        assert files.crash(random.Random(seed)).files() == {
            Path("/a/x"): b"other",
            Path("/a/z"): b"",
        }


def test_after_a_failed_sync_the_data_may_be_lost_even_when_the_next_one_succeeds() -> None:
    outcomes = set()
    for seed in range(SEEDS):
        files = written()
        files.rng.seed(seed)
        file = files.open(Path("/a/x"), "append")
        file.append(b"!")
        files.fail(Fault(0, errno.EIO, only=frozenset({"sync"})))
        with pytest.raises(OSError):
            file.sync()
        file.sync()
        assert files.files()[Path("/a/x")] == b"safe!"
        outcomes.add(files.crash(random.Random(seed)).files()[Path("/a/x")])
    assert {b"safe", b"safe!", b"safe\0"} <= outcomes


@pytest.mark.parametrize("sticky", [False, True])
def test_a_fault_hits_the_call_that_was_named(sticky: bool) -> None:
    files = written()
    files.fail(Fault(files.calls + 1, errno.ENOSPC, sticky=sticky, short=True))
    file = files.open(Path("/a/x"), "append")
    with pytest.raises(OSError, match="No space"):
        file.append(b"0123456789")
    assert file.size() < 14
    if sticky:
        with pytest.raises(OSError, match="No space"):
            file.append(b"")
        assert file.read(0, 4) == b"safe"
        files.heal()
    file.append(b"")
    assert files.fired == (2 if sticky else 1)


def test_a_full_disk_takes_what_fits_and_says_so() -> None:
    files = CrashFiles(capacity=3 * 4096)
    files.make_folder(Path("/a"))
    file = files.open(Path("/a/x"), "create")
    with pytest.raises(OSError, match="No space"):
        file.append(bytes(20000))
    assert file.size() == 3 * 4096 and files.free(Path("/a")) == 0
    files.remove(Path("/a/x"))
    assert files.free(Path("/a")) == 3 * 4096


def test_a_dead_process_does_nothing_more() -> None:
    files = written()
    file = files.open(Path("/a/x"), "append")
    file.append(b"!")
    assert files.lock(Path("/a")) is not None
    after = files.kill()
    for action in (lambda: file.append(b"?"), lambda: files.list(Path("/a"))):
        with pytest.raises(Crash):
            action()
    assert after.lock(Path("/a")) is not None
    assert after.files()[Path("/a/x")] == b"safe!"


def test_a_folder_that_is_there_is_synced_into_its_parent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that created it may have been killed before it synced the parent."""
    synced = list[Path]()
    monkeypatch.setattr(SystemFiles, "sync_folder", lambda self, path: synced.append(path))
    SystemFiles().make_folder(tmp_path / "a")
    synced.clear()
    SystemFiles().make_folder(tmp_path / "a")
    assert synced == [tmp_path]
