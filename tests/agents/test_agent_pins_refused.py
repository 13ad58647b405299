"""Pins while the disk of the KV store refuses them: the caller gets an error, and the pin is retried."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from typing import Literal

import pytest

from cairn.agents import kv
from cairn.kv.disk import budget as disk_state
from cairn.system.posix import SystemFile, SystemFiles
from cairn.types.errors import Unavailable
from tests.agents.house import house

LONG = "A context that is long enough to fill some chunks of sixty-four tokens each. " * 4


class Broken:
    """A file system in whose folder nothing can be created or removed while it is `bad`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bad = folder, False
        self._open, self._remove = SystemFiles.open, SystemFiles.remove
        monkeypatch.setattr(SystemFiles, "open", lambda files, path, mode: self.open(files, path, mode))
        monkeypatch.setattr(SystemFiles, "remove", lambda files, path: self.remove(files, path))

    def refuse(self, path: Path) -> None:
        if self.bad and path.is_relative_to(self.folder):
            raise OSError(errno.EIO, "Input/output error")

    def open(self, files: SystemFiles, path: Path, mode: Literal["read", "append", "create"]) -> SystemFile:
        if mode == "create":
            self.refuse(path)
        return self._open(files, path, mode)

    def remove(self, files: SystemFiles, path: Path) -> None:
        self.refuse(path)
        self._remove(files, path)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broken:
    monkeypatch.setattr(kv, "MOST_RETRY_SECONDS", 1.0)
    monkeypatch.setattr(disk_state, "_BACKOFF", (0.2, 0.5))
    return Broken(tmp_path / "kv", monkeypatch)


async def pins(disk: Broken, count: int) -> None:
    """Wait until there are so many pin files."""
    end = time.monotonic() + 60
    while len(list(disk.folder.glob("models/*/pins/*"))) != count:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def test_a_refused_pin_is_an_error_and_is_retried(folder: Path, disk: Broken) -> None:
    """It used to be reported as done, and was lost if worker or server ended before the disk was back."""
    async with house(folder, kv_dir=str(disk.folder)) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", LONG)
        await at.service.flush()
        for pinned in (True, False):
            disk.bad = True
            with pytest.raises(Unavailable, match="the disk does not accept the record of what is"):
                await at.agents.pin("default", "ada", pinned)
            assert at.agents.get("default", "ada").pinned is pinned
            disk.bad = False
            await pins(disk, int(pinned))
            await asyncio.wait_for(at.agents.kv.settled(), 60)


async def test_the_pins_of_an_agent_deleted_while_the_disk_refuses_are_in_the_log(
    folder: Path, disk: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can name their owner any more; if the server ends now, the next start removes them."""
    async with house(folder, kv_dir=str(disk.folder)) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.say("ada", LONG)
        await at.agents.kv.settled()
        await at.service.flush()
        await pins(disk, 1)
        disk.bad = True
        await at.agents.delete("default", "ada")
        await at.agents.tend()
        with monkeypatch.context() as listening:
            asked = list[str]()

            async def unpin(owner: str) -> None:
                asked.append(owner)
                raise Unavailable("not now")

            listening.setattr(at.service, "unpin", unpin)
            await at.again()
            await asyncio.sleep(0.1)
            assert len(asked) > 0
            await at.agents.close()
        disk.bad = False
        await at.open()
        await asyncio.wait_for(at.agents.kv.settled(), 60)
        assert list(disk.folder.glob("models/*/pins/*")) == []
