"""The contract of shared stores, for a folder and for the object stores that can run here."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cairn.cluster.blobs import Blobs
from cairn.cluster.shared import open_blobs
from cairn.system.posix import SystemFiles
from cairn.types.errors import ConfigError
from tests.cluster.stores import Draws, MemoryBlobs


@pytest.fixture(params=["memory", "folder", "moto", "seaweedfs"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "memory":
        return MemoryBlobs()
    address = str(tmp_path / "shared") if request.param == "folder" else request.getfixturevalue(request.param)
    return open_blobs(address, SystemFiles(), Draws())


def test_an_object_is_made_once_and_read_as_it_was_made(blobs: Blobs) -> None:
    assert blobs.read("a/b/1") is None and blobs.list("a") == []
    assert blobs.create("a/b/1", b"one") and not blobs.create("a/b/1", b"two")
    assert blobs.read("a/b/1") == b"one"
    blobs.create("a/b/2", b"x" * (20 << 20))
    assert blobs.read("a/b/2") == b"x" * (20 << 20), "large objects are read in pieces"
    blobs.create("a/c/3", b"")
    blobs.create("ab/4", b"")
    assert blobs.list("a") == ["a/b/1", "a/b/2", "a/c/3"]
    assert blobs.list("a", "a/b/1") == ["a/b/2", "a/c/3"] and blobs.list("a/c") == ["a/c/3"]
    blobs.replace("a/b/1", b"three")
    blobs.replace("a/d", b"new")
    assert (blobs.read("a/b/1"), blobs.read("a/d")) == (b"three", b"new")
    blobs.delete(["a/b/1", "a/b/none"])
    assert blobs.read("a/b/1") is None and blobs.create("a/b/1", b"again")


def test_of_many_writers_of_one_name_one_wins(blobs: Blobs) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        if blobs.create("race/1", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and blobs.read("race/1") == b"%d" % won[0]


def test_a_folder_keeps_no_half_written_object(tmp_path: Path) -> None:
    blobs = open_blobs(str(tmp_path), SystemFiles(), Draws())
    blobs.create("a/1", b"one")
    blobs.create("a/1", b"two")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]
    assert (tmp_path / "a" / "1").stat().st_mode & 0o777 == 0o600


def test_an_invalid_address_is_refused() -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: object stores are not tried")
    with pytest.raises(ConfigError, match="shared_store"):
        open_blobs("nonsense://bucket", SystemFiles(), Draws())
