"""The shared store below a worker's other tiers: one worker loads what another computed; failures stay its own."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.cluster import shared_kv
from cairn.cluster.feed import Feed
from cairn.cluster.shared_kv import SharedChunks
from cairn.kv.ram import RamStore
from cairn.kv.tiers.write_behind import WriteLimits
from tests.cluster.stores import Draws, MemoryBlobs, keys
from tests.kv.stored import Time
from tests.kv.tiered import Rig

PROMPT = [(7 * n) % 61 for n in range(100)]
SOON = WriteLimits(copy_seconds=0.2, idle_seconds=0.2)


def shared(blobs: MemoryBlobs, number: int) -> SharedChunks:
    sealed, time = keys(number * 10_000), Time()
    return SharedChunks(blobs, sealed, Feed(blobs, sealed, "kv-x", time, Draws(number)), time)


def finish(rig: Rig, store: SharedChunks) -> None:
    """Let the worker be idle for a second, then let the store's thread work."""
    for _ in range(100):
        rig.step()
        rig.threads()
    store.work()


def test_another_worker_loads_all_but_the_last_block() -> None:
    blobs = MemoryBlobs()
    one, two = shared(blobs, 1), shared(blobs, 2)
    first = Rig({"shared": one}, limits=SOON)
    assert first.ask(PROMPT).computed == len(PROMPT)
    finish(first, one)
    two.work()
    report = Rig({"shared": two}, limits=SOON).ask(PROMPT)
    assert report.shared >= 96 and report.computed <= 4, report
    assert first.ask(PROMPT).pool >= 96


def test_a_dead_store_costs_the_other_tiers_nothing() -> None:
    blobs = MemoryBlobs()
    blobs.dead = True
    one, disk = shared(blobs, 1), RamStore(1 << 30)
    rig = Rig({"disk": disk, "shared": one}, limits=SOON)
    assert rig.ask(PROMPT).computed == len(PROMPT)
    finish(rig, one)
    assert disk.stats().chunks > 0 and rig.tiers is not None and not rig.tiers.write_behind.dropped
    again = Rig({"disk": disk, "shared": shared(blobs, 2)}, limits=SOON).ask(PROMPT)
    assert again.disk >= 96 and not again.shared
    blobs.dead = False
    finish(rig, one)
    two = shared(blobs, 3)
    two.work()
    assert Rig({"shared": two}, limits=SOON).ask(PROMPT).shared >= 96, "it was written once the store was back"


def test_a_changed_object_is_computed_again_and_the_answer_is_the_same() -> None:
    blobs = MemoryBlobs()
    one, two = shared(blobs, 1), shared(blobs, 2)
    first = Rig({"shared": one}, limits=SOON)
    first.ask(PROMPT)
    finish(first, one)
    two.work()
    for name, data in blobs.objects.items():
        if name.startswith("kv/"):
            blobs.objects[name] = data[:-1] + bytes([data[-1] ^ 1])
    report = Rig({"shared": two}, limits=SOON).ask(PROMPT)
    assert report.computed == len(PROMPT) and two.stats().damaged > 0


def test_evicting_from_memory_keeps_the_store_and_evicting_from_disk_does_not() -> None:
    blobs = MemoryBlobs()
    one = shared(blobs, 1)
    rig = Rig({"disk": RamStore(1 << 30), "shared": one}, limits=SOON)
    rig.ask(PROMPT)
    finish(rig, one)
    assert rig.tiers is not None
    stored = [name for name in blobs.objects if name.startswith("kv/")]
    done: list[bool] = []
    rig.tiers.evict(PROMPT, b"", 0, False, lambda: done.append(True))
    finish(rig, one)
    assert done and [name for name in blobs.objects if name.startswith("kv/")] == stored
    rig.tiers.evict(PROMPT, b"", 0, True, lambda: done.append(True))
    finish(rig, one)
    one.work()
    assert len(done) == 2 and not [name for name in blobs.objects if name.startswith("kv/")]


def test_a_shared_store_that_takes_nothing_more_keeps_nothing_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_kv, "QUEUE_BYTES", 0)
    blobs = MemoryBlobs()
    blobs.dead = True
    one, disk = shared(blobs, 1), RamStore(1 << 30)
    rig = Rig({"disk": disk, "shared": one}, limits=SOON)
    rig.ask(PROMPT)
    finish(rig, one)
    assert rig.tiers is not None and not rig.tiers.write_behind.dropped and one.stats().refused
    assert Rig({"disk": disk}, limits=SOON).ask(PROMPT).disk >= 96
