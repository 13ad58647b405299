"""Signs of life: one replica's beat that cannot be read hides the silence of no other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cluster import beats
from cairn.cluster.beats import BEAT_SECONDS, FOLDER, LEASE_SECONDS, Beats
from cairn.cluster.folder import FolderBlobs
from cairn.system.posix import SystemFiles
from tests.cluster.stores import Awaited, Draws, MemoryBlobs, keys
from tests.kv.stored import Time

LOOKS = round(LEASE_SECONDS / BEAT_SECONDS) + 2


class Refusing(MemoryBlobs):
    """A store that fails at reading objects of some names."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: set[str] = set()

    def read(self, name: str) -> bytes | None:
        if name in self.unreadable:
            raise OSError("bad sector")
        return super().read(name)


def beats_of(blobs: Awaited, clock: Time, *names: str) -> list[Beats]:
    return [Beats(blobs, keys(number), clock, name) for number, name in enumerate(names, 1)]


async def test_a_silent_replica_is_seen_beside_a_beat_that_cannot_be_read(tmp_path: Path) -> None:
    clock = Time()
    one, two = beats_of(Awaited(FolderBlobs(SystemFiles(), tmp_path, Draws())), clock, "one", "two")
    await two.step()
    os.mkfifo(tmp_path / FOLDER / "aaa")  # no regular file, so that reading it fails for everybody
    await one.step()
    assert one.alive("two")
    for _ in range(LOOKS):
        clock.seconds += BEAT_SECONDS
        await one.step()
    assert not one.alive("two") and one.alive("one")


async def test_a_replica_whose_beat_cannot_be_read_is_silent_and_the_others_are_not() -> None:
    blobs, clock = Refusing(), Time()
    one, two, three = beats_of(Awaited(blobs), clock, "one", "two", "three")
    for count in range(2 * LOOKS):
        for each in (one, two, three):
            await each.step()
        clock.seconds += BEAT_SECONDS
        if count == LOOKS:
            assert one.alive("two")
            blobs.unreadable = {f"{FOLDER}/two"}
    assert not one.alive("two") and one.alive("three")
    blobs.unreadable.clear()
    await two.step()
    await one.step()
    assert one.alive("two")


async def test_a_look_that_takes_long_holds_up_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_SECONDS", 0.001)
    blobs, clock, entered = MemoryBlobs(), Time(), asyncio.Event()

    class Hanging(Awaited):
        async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
            entered.set()
            await asyncio.Event().wait()
            return []

    (one,) = beats_of(Hanging(blobs), clock, "one")
    one.start()
    await entered.wait()
    seen: set[bytes] = set()
    for _ in range(10_000):
        seen.add(blobs.objects[f"{FOLDER}/one"])
        if len(seen) > 3:
            break
        await asyncio.sleep(0.001)
    await one.close()
    assert len(seen) > 3 and not blobs.objects


async def test_looks_at_which_nothing_can_be_read_count_as_silence_of_nobody() -> None:
    blobs, clock = Refusing(), Time()
    one, two = beats_of(Awaited(blobs), clock, "one", "two")
    await two.step()
    await one.step()
    blobs.unreadable = {f"{FOLDER}/one", f"{FOLDER}/two"}
    for _ in range(2 * LOOKS):
        clock.seconds += BEAT_SECONDS
        with pytest.raises(OSError, match="bad sector"):
            await one.step()
    assert one.alive("two")
