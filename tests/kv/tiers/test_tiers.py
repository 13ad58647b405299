"""KV below the pools: written behind, loaded on demand, evicted, flushed and accounted for."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.kv.disk.codec import Raw
from cairn.kv.disk.portable_kv import END, MAGIC, framed
from cairn.kv.disk.store import DiskStore
from cairn.kv.pool.prefix import numerics
from cairn.kv.pool.sequence_kv import TierName
from cairn.kv.ram import RamStore
from cairn.kv.tiers.day_budget import DAY_SECONDS
from cairn.kv.tiers.reader import LoadPolicy
from cairn.kv.tiers.store import Chunk, Store
from cairn.kv.tiers.write_behind import IDLE_SECONDS, WriteLimits
from cairn.types.errors import DeviceMemoryError
from cairn.types.model_spec import CacheGroup
from cairn.types.outputs import FinishReason
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import ImportedKv, Miss, Placed, Swept
from cairn.worker import wire
from cairn.worker.worker import REST_SECONDS, WorkerLoop
from tests.files import CrashFiles
from tests.kv import stored
from tests.kv.tiered import SIZE, Between, Rig
from tests.laws.simulator import VirtualClock

PROMPT = [(7 * n) % 61 for n in range(100)]
CHUNK = 16
PAGES = CHUNK * 8
"""Bytes of a chunk's pages."""
FULL = CacheGroup(kind="full", layers=(0,))


def disk() -> RamStore:
    """Return a store that stands for a disk: it outlives the workers of a test."""
    return RamStore(1 << 30)


def test_a_worker_loads_what_the_previous_one_computed() -> None:
    """Written behind, found by the next worker, with the same answer (known failures 27, 39)."""
    store = disk()
    first = Rig({"disk": store}).ask(PROMPT)
    assert first.computed == 100 and first.miss == Miss(position=0, reason="never seen")
    again = Rig({"disk": store})
    report = again.ask(PROMPT)
    assert (report.disk, report.computed, report.pool) == (96, 4, 0)
    assert report.load > 0 and report.miss is None
    assert again.ask(PROMPT).pool == 99


@pytest.mark.parametrize("windows", [(0,), (0, 5), (0, 24), (40, 0), (7, 0, 50), (6,)])
@pytest.mark.parametrize("length", [16, 17, 31, 64, 65, 99])
def test_every_kind_of_group_comes_back(windows: tuple[int, ...], length: int) -> None:
    store = disk()
    prompt = PROMPT[:length]
    Rig({"disk": store}, windows=windows).ask(prompt)
    report = Rig({"disk": store}, windows=windows).ask(prompt)
    assert report.disk == min(length - 1, (length + 2) // CHUNK * CHUNK)  # two tokens of the answer were computed


@pytest.mark.parametrize("windows", [(0,), (0, 5), (0, 24), (40, 0), (7, 0, 50), (6,)])
@pytest.mark.parametrize("length", [3, 4, 7, 16, 17, 20, 27, 31, 64, 65, 99])
@pytest.mark.parametrize("how", ["ended", "idle"])
@pytest.mark.parametrize("durable", [True, False])
def test_after_a_restart_less_than_a_block_is_computed_again(
    windows: tuple[int, ...], length: int, how: str, durable: bool
) -> None:
    """An ended or idle context also stores the whole blocks behind its last whole chunk."""
    store, prompt = disk(), PROMPT[:length]
    rig = Rig({"disk": store}, windows=windows)
    rig.ask(prompt, durable=durable)
    end_of(rig, how)
    report = Rig({"disk": store}, windows=windows).ask(prompt)
    assert report.disk >= min(length - 1, length + 2) // SIZE * SIZE and report.computed <= SIZE
    longer = [*prompt, *rig.engine.oracle(prompt, SamplingParams(max_tokens=3), 3), *range(7)]
    assert Rig({"disk": store}, windows=windows).ask(longer).computed <= 7 + 1 + SIZE - 1


def end_of(rig: Rig, how: str) -> None:
    """Let a worker end in order, or its contexts be idle for long enough."""
    assert rig.tiers is not None
    if how == "idle":
        rig.clock.time += IDLE_SECONDS
        rig.settle()
        return
    rig.tiers.write_behind.finish(0.0)
    while rig.tiers.writer.work():
        rig.tiers.write_behind.finish(0.0)
    rig.tiers.write_behind.left()


def test_a_tail_gives_way_to_a_longer_one_and_to_its_whole_chunk() -> None:
    store = disk()

    def kept() -> list[int]:
        return sorted(len(chunk.tokens) for chunk in store._chunks.values())

    rig = Rig({"disk": store}, blocks=200)
    for length, lengths in ((5, [4]), (8, [8]), (13, [12]), (8, [12]), (16, [16]), (21, [4, 16]), (13, [4, 16])):
        rig.ask(PROMPT[:length])
        end_of(rig, "idle")
        assert kept() == lengths
    assert rig.tiers is not None and rig.tiers.stats().dropped == 0
    assert store.stats().bytes == sum(8 * one + 1024 for one in kept())


def test_a_tail_is_not_stored_while_its_context_goes_on() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=400, context=2048)
    rig.ask(PROMPT)
    said = rig.engine.oracle(PROMPT, SamplingParams(max_tokens=3), 3)
    rig.add([*PROMPT, *said], 67)
    for _ in range(3):
        rig.step()
    rig.clock.time += IDLE_SECONDS
    rig.step()
    assert rig.tiers is not None and rig.tiers.write_behind.waiting.tails
    rig.settle()
    end_of(rig, "idle")
    assert [len(chunk.tokens) for chunk in store._chunks.values() if len(chunk.tokens) < CHUNK] == [8]


def test_one_shot_contexts_are_stored_last_and_evicted_first() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=200, limits=WriteLimits(turn_bytes=PAGES))
    assert rig.tiers is not None
    once, other = PROMPT[:40], [(11 * n) % 59 for n in range(40)]
    for prompt, durable in ((once, False), (other, True)):
        rig.add(prompt, durable=durable)
        while not rig.scheduler.idle:
            rig.step()
    rig.tiers.write_behind.finish(0.0)
    rig.tiers.writer.work()
    assert [chunk.once for chunk in store._chunks.values()] == [False] * 3 + [True] * 3
    small = RamStore(9 * (PAGES + 1024))
    assert small.keep(list(store._chunks.values())) == 6
    assert small.keep([chunk for chunk in stored.chain(5, size=PAGES)]) == 5
    assert [small.has(chunk.key) for chunk in store._chunks.values()] == [True] * 4 + [False] * 2


def test_a_returning_context_is_no_longer_evicted_first() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=200)
    for _ in range(2):
        rig.add(PROMPT[:40], durable=False)
        while not rig.scheduler.idle:
            rig.step()
    end_of(rig, "ended")
    assert [chunk.once for chunk in store._chunks.values()] == [False, False, True], "of the tail that is not known"


def test_evicting_a_one_shot_context_is_no_loss() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=40)
    assert rig.tiers is not None
    for seed in range(4):
        rig.add([(seed + 7 * n) % 61 for n in range(90)], durable=False)
        while not rig.scheduler.idle:
            rig.step()
    end_of(rig, "ended")
    stats = rig.tiers.stats()
    assert stats.dropped == 0 and 0 < store.stats().chunks < 24


def test_a_context_comes_from_memory_where_there_is_a_store_for_it() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    ram = RamStore(1 << 20)
    second = Rig({"ram": ram, "disk": store}, blocks=40)
    assert second.ask(PROMPT).disk == 96
    second.cache.forget(second.cache.context(b""), PROMPT, 0)
    report = second.ask(PROMPT)
    assert (report.ram, report.disk) == (96, 0)


def test_two_stores_complement_each_other() -> None:
    ram, store = RamStore(1 << 20), disk()
    Rig({"disk": store}).ask(PROMPT)
    Rig({"ram": ram}).ask(PROMPT[:40])
    report = Rig({"ram": ram, "disk": store}).ask(PROMPT)
    assert (report.ram, report.disk) == (32, 64)


COVERED = ["token", "salt", "identity", "codec", "window", "block size", "nothing"]
"""The parts of a key, and `nothing`, which shows that the test can hit at all."""


def unlike(field: str, stores: dict[TierName, Store] | None) -> tuple[Rig, list[int], bytes]:
    """Return a worker, a prompt and a salt that differ from `Rig(stores)`, `PROMPT` and no salt in this part alone."""
    identities = {"identity": b"other weights", "codec": numerics(b"fake", "q8")}
    rig = Rig(
        stores,
        identity=identities.get(field, b"fake"),
        windows=(200,) if field == "window" else (0,),
        size=8 if field == "block size" else SIZE,
    )
    prompt = [PROMPT[0] + 1, *PROMPT[1:]] if field == "token" else PROMPT
    return rig, prompt, b"another tenant" if field == "salt" else b""


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("field", COVERED)
def test_no_store_hits_if_any_part_of_the_key_differs(tier: TierName, field: str) -> None:
    """Each part of the key alone (known failures 26, 28, 40)."""
    stores: dict[TierName, Store] = {tier: RamStore(1 << 30)}
    Rig(stores).ask(PROMPT)
    second, prompt, salt = unlike(field, stores)
    assert (second.ask(prompt, salt=salt).cached > 0) == (field == "nothing")


@pytest.mark.parametrize("field", COVERED)
def test_no_pool_hits_if_any_part_of_the_key_differs(field: str) -> None:
    """With the pools of a worker that differs, although no two workers ever share pools (known failures 26, 28, 40)."""
    first = Rig(None)
    first.ask(PROMPT)
    second, prompt, salt = unlike(field, None)
    cache = second.cache
    cache.pools = cache.parts._pools = first.cache.pools
    context = cache.context(salt)
    assert (cache.open(context, prompt) or 0) == (len(PROMPT) - 1 if field == "nothing" else 0)
    # Blocks of another size hold other numbers of tokens, which alone is a miss: their keys begin elsewhere too.
    begins = [one.chains[0]._root for one in (first.cache.context(b""), context)]
    assert (begins[0] == begins[1]) == (field in ("nothing", "token"))


def test_a_context_is_loaded_up_to_a_changed_token() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    changed = [*PROMPT[:50], 63, *PROMPT[51:]]
    again = Rig({"disk": store})
    assert again.ask(changed).disk == 48
    assert again.tiers is not None and again.tiers.stats().abandoned == 0


def test_a_long_context_is_stored_before_others_and_a_short_one_when_it_comes_again() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=200)
    assert rig.tiers is not None
    for prompt, waiting in ((PROMPT, 0), (PROMPT, 6), ([(11 * n) % 59 for n in range(256)], 6 + 16)):
        rig.add(prompt, durable=False)
        while not rig.scheduler.idle:
            rig.step()
        assert len(rig.tiers.write_behind.waiting.noted) == waiting
    rig.settle()
    assert store.stats().chunks == 6 + 16


def test_unstored_prompts_are_never_written_nor_counted_as_seen() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=200)
    for _ in range(3):
        rig.ask(PROMPT, stored=False)
    assert rig.tiers is not None and rig.tiers.stats().queued == 0 and store.stats().chunks == 0
    rig.add(PROMPT, durable=False)
    while not rig.scheduler.idle:
        rig.step()
    behind = rig.tiers.write_behind
    assert not behind.waiting.noted and len(behind.waiting.spare) == 6, (
        "the first that may be stored is the first touch"
    )
    rig.settle()
    assert store.stats().chunks == 6


@pytest.mark.parametrize("chunks", [0, 1, 4, 9])
def test_the_days_bytes_bound_all_that_is_written_to_one_chunk(chunks: int) -> None:
    """For any reason: repeated chunks, tails, and what a shutdown stores."""
    store = disk()
    size = PAGES + 1024
    rig = Rig({"disk": store}, blocks=400, limits=WriteLimits(day_bytes=chunks * size))
    assert rig.tiers is not None
    for seed in range(3):
        for _ in range(2):
            rig.ask([(seed + 11 * n) % 59 for n in range(60)])
            end_of(rig, "idle")
    end_of(rig, "ended")
    assert (chunks - 1) * size < store.stats().written <= (chunks + 1) * size
    assert rig.tiers.stats().deferred > 0
    rig.clock.time += DAY_SECONDS - 1000
    rig.ask([(13 * n) % 57 for n in range(100)])
    assert store.stats().written <= (chunks + 1) * size
    rig.clock.time += 1000 + 900
    rig.ask([(13 * n) % 57 for n in range(100)])
    assert not chunks or store.stats().written > chunks * size


def test_of_the_days_bytes_half_is_kept_for_those_that_somebody_goes_on_with() -> None:
    store = disk()
    size = PAGES + 1024
    rig = Rig({"disk": store}, blocks=400, limits=WriteLimits(day_bytes=10 * size))
    rig.ask(PROMPT, durable=False)
    rig.ask([(11 * n) % 59 for n in range(100)], durable=False)
    assert store.stats().chunks == 5
    rig.ask([(13 * n) % 57 for n in range(100)])
    assert store.stats().chunks == 10


def test_the_queue_bounds_what_is_copied_and_not_what_waits_in_the_pool() -> None:
    store = disk()
    rig = Rig({"disk": store}, limits=WriteLimits(queue_bytes=2 * PAGES))
    assert rig.tiers is not None
    behind = rig.tiers.write_behind
    id = rig.add(PROMPT)
    while rig.step():  # no thread runs: nothing leaves the queue
        pass
    rig.check(id, PROMPT, 3)
    assert (behind.chunks, behind.bytes, behind.dropped) == (6, 2 * PAGES, 0)
    assert not rig.tiers.turn(True), "there is nothing to do until the writer has written"
    answers: list[int] = []
    rig.tiers.flush(answers.append)
    rig.settle()
    assert answers == [0] and store.stats().chunks == 7 and behind.bytes == 0


def test_the_loop_stores_once_it_has_rested_and_not_before_the_next_turn_may_come() -> None:
    rig = Rig({"disk": disk()})
    assert rig.tiers is not None
    behind, waits = rig.tiers.write_behind, list[tuple[float | None, int]]()

    class Channel:
        """A frontend that sends one request; time passes only while it is waited for."""

        def receive(self, wait: float | None) -> list[wire.ToWorker]:
            waits.append((wait, behind.bytes))
            rig.clock.time += wait or 0
            if len(waits) == 1:
                sampling = SamplingParams(max_tokens=3)
                return [wire.Add(Request(id=1, prompt=tuple(PROMPT), sampling=sampling, durable=True))]
            if wait is None:
                raise EOFError
            return []

        def send(self, message: object) -> None:
            pass

    loaded: Any = SimpleNamespace(
        engine=rig.engine,
        scheduler=rig.scheduler,
        cache=rig.cache,
        tiers=rig.tiers,
        clock=rig.clock,
        grammars=SimpleNamespace(pending=False),
    )
    channel: Any = Channel()
    pulse: Any = SimpleNamespace()
    with pytest.raises(EOFError):
        WorkerLoop(channel, loaded, pulse).run()
    rested, idle, ended = waits[-3:]
    assert REST_SECONDS > 0 and rested == (REST_SECONDS, 0) and ended == (None, 6 * PAGES + PAGES // 4)
    assert idle == (pytest.approx(IDLE_SECONDS, abs=1), 6 * PAGES), "the tail is stored once its context is idle"
    assert {wait for wait, _ in waits[1:-3]} == {0}


@pytest.mark.parametrize("late", [False, True])
def test_noted_chunks_with_a_dropped_prefix_are_forgotten_without_loss(late: bool) -> None:
    """An agent that is deleted while its turn runs."""
    store = disk()
    rig = Rig({"disk": store})
    assert rig.tiers is not None
    rig.ask(PROMPT)
    rig.add([*PROMPT, *range(40)])
    while not rig.scheduler.idle:
        rig.step()
    behind = rig.tiers.write_behind
    assert behind.chunks >= 2 and not behind.bytes
    answers: list[int] = []
    rig.tiers.evict(PROMPT, b"", 0, True, lambda: None)
    while late and rig.tiers.writer.work():
        pass
    assert not late or not store.stats().chunks
    rig.tiers.flush(answers.append)
    rig.settle()
    assert answers == [0] and (behind.chunks, behind.dropped) == (0, 0) and not store.stats().chunks


def test_a_full_queue_drops_needed_blocks_with_their_descendants_and_blocks_nobody() -> None:
    """Known failure 35."""
    store = disk()
    rig = Rig({"disk": store}, blocks=30, limits=WriteLimits(queue_bytes=2 * PAGES))
    assert rig.tiers is not None
    others = [(11 * n) % 59 for n in range(100)]
    for prompt in (PROMPT, others):
        id = rig.add(prompt)
        while rig.step():  # no thread runs: nothing leaves the queue
            pass
        rig.check(id, prompt, 3)
    queued = rig.tiers.stats().queued
    assert rig.tiers.write_behind.bytes == 2 * PAGES and 2 < queued < 12
    rig.settle()
    stats = rig.tiers.stats()
    assert store.stats().chunks == queued and stats.queued == 0
    assert stats.dropped == 12 - queued
    assert Rig({"disk": store}).ask(others).disk == 96


def test_chunks_whose_blocks_the_pool_needs_are_copied_first() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=40)
    assert rig.tiers is not None
    context = rig.cache.context(b"", durable=True)
    rig.cache.open(context, PROMPT)
    rig.cache.publish(context, PROMPT, 100)
    rig.cache.close(context, PROMPT)
    assert rig.tiers.write_behind.chunks == 6 and rig.tiers.write_behind.bytes == 0
    rig.cache.pools[0].take(40)
    assert rig.tiers.write_behind.bytes == 6 * PAGES
    rig.settle()
    assert store.stats().chunks == 6 and rig.tiers.stats().dropped == 0


def test_long_waiting_chunks_are_copied_although_requests_run() -> None:
    rig = Rig({"disk": disk()}, blocks=400, context=2048)
    assert rig.tiers is not None
    behind = rig.tiers.write_behind
    rig.add(PROMPT, 1600)
    for _ in range(20):
        rig.step()
    assert behind.chunks >= 6 and behind.bytes == 0
    rig.clock.time += 30.0
    rig.step()
    assert behind.bytes >= 6 * PAGES


def test_the_end_copies_as_the_writer_makes_room() -> None:
    store = disk()
    rig = Rig({"disk": store}, limits=WriteLimits(queue_bytes=PAGES))
    assert rig.tiers is not None
    rig.add(PROMPT)
    while rig.step():
        pass
    assert rig.tiers.write_behind.bytes == PAGES
    rig.tiers.start()
    rig.tiers.close(20)
    assert store.stats().chunks == 7


def test_a_flush_reports_given_up_chunks() -> None:
    refusing = Between(disk())
    refusing.keep = lambda chunks: 0
    rig = Rig({"disk": refusing})
    assert rig.tiers is not None
    rig.add(PROMPT)
    answers: list[int] = []
    while rig.step():
        pass
    rig.tiers.flush(answers.append)
    assert answers == []
    rig.settle()
    assert answers == [7]


def test_a_store_that_fails_in_no_known_way_costs_its_chunks_and_ends_no_flush() -> None:
    """The chunks it was given count as lost, and the room in the queue is free again."""
    broken = Between(disk())

    def keep(chunks: Sequence[Chunk]) -> int:
        raise RuntimeError("a bug")

    broken.keep = keep
    rig = Rig({"disk": broken}, limits=WriteLimits(queue_bytes=PAGES))
    assert rig.tiers is not None
    rig.add(PROMPT)
    answers: list[int] = []
    while rig.step():
        pass
    rig.tiers.flush(answers.append)
    for _ in range(7):
        with contextlib.suppress(RuntimeError):  # the thread logs it and goes on
            rig.tiers.writer.work()
        rig.step()
    assert answers == [7] and not rig.tiers.write_behind.bytes
    broken.keep = broken.inner.keep
    assert rig.ask(PROMPT[::-1]).computed == 100 and broken.inner.stats().chunks == 6


def short(*given: Any) -> Any:
    raise DeviceMemoryError("the device has no memory left")


@pytest.mark.parametrize("error", [DeviceMemoryError("short"), MemoryError("short")], ids=repr)
def test_a_chunk_that_there_is_no_memory_to_copy_is_given_up(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that extend it, and no others; nothing is left behind in the queue, and no flush waits for it."""
    store = disk()
    rig = Rig({"disk": store})
    assert rig.tiers is not None
    real, calls = rig.engine.read_blocks, [0]

    def read(group: int, ids: Sequence[int]) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise error
        return real(group, ids)

    monkeypatch.setattr(rig.engine, "read_blocks", read)
    rig.add(PROMPT)
    answers: list[int] = []
    while rig.step():
        pass
    rig.tiers.flush(answers.append)
    rig.settle()
    assert store.stats().chunks == 2 and answers == [4] and rig.tiers.write_behind.dropped == 4
    assert not rig.tiers.write_behind.bytes and not rig.tiers.write_behind.chunks
    assert Rig({"disk": store}).ask(PROMPT).disk == 32


def test_a_block_that_there_is_no_memory_to_copy_is_evicted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig({"disk": disk()}, blocks=30)
    monkeypatch.setattr(rig.engine, "read_blocks", short)
    for first in range(4):
        prompt = [first, *PROMPT]
        rig.add(prompt)
        rig.settle()
        expected = rig.engine.oracle(prompt, SamplingParams(max_tokens=3), 3)
        assert [token for output in rig.outputs[first + 1] for token in output.tokens] == expected
    assert rig.tiers is not None and rig.tiers.write_behind.dropped and not rig.tiers.write_behind.bytes


@pytest.mark.parametrize("at", [1, 3, 7])
def test_loaded_kv_that_there_is_no_memory_for_is_computed(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`at`: the write that fails. The last one puts a block into the pool that agrees only in its first tokens."""
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    other = [*PROMPT[:94], 1, 2, 3, 4, 5, 6]
    rig = Rig({"disk": store})
    real, calls = rig.engine.write_blocks, [0]

    def write(group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> Any:
        calls[0] += 1
        return short() if calls[0] == at else real(group, ids, pages)

    monkeypatch.setattr(rig.engine, "write_blocks", write)
    assert rig.ask(other).computed == {1: 100, 3: 68, 7: 8}[at] and calls[0] == at
    assert rig.tiers is not None and rig.tiers.stats().abandoned == 1 and not rig.tiers.loading
    assert all(use.held == 0 for use in rig.cache.use())


def test_after_a_failure_of_the_device_only_what_was_copied_before_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk()
    rig = Rig({"disk": store}, limits=WriteLimits(queue_bytes=PAGES))
    assert rig.tiers is not None
    rig.add(PROMPT)
    while rig.step():
        pass
    monkeypatch.setattr(rig.engine, "read_blocks", short)
    rig.tiers.start()
    rig.tiers.close(20, intact=False)
    assert store.stats().chunks == 1 and rig.tiers.write_behind.dropped == 0


def test_a_store_that_loses_a_chunk_costs_time_only() -> None:
    """A chunk that the index lists is gone when read; the chunks before it are used (known failures 17, 32, 38)."""
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    losing = Between(store)
    fetched: list[bytes] = []

    def fetch(key: bytes, tokens: Sequence[int], buffer: memoryview | None) -> Chunk | None:
        fetched.append(key)
        return store.fetch(key, tokens, buffer) if len(fetched) != 4 else None

    losing.fetch = fetch
    rig = Rig({"disk": losing})
    report = rig.ask(PROMPT)
    assert (report.disk, report.computed) == (48, 52) and len(fetched) == 4
    assert rig.tiers is not None and rig.tiers.stats().abandoned == 1


def test_pages_of_a_wrong_size_are_not_used() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    short = Between(store)

    def fetch(key: bytes, tokens: Sequence[int], buffer: memoryview | None) -> Chunk | None:
        chunk = store.fetch(key, tokens, buffer)
        return None if chunk is None else dataclasses.replace(chunk, pages=bytes(chunk.pages)[8:])

    short.fetch = fetch
    assert Rig({"disk": short}).ask(PROMPT).computed == 100


def test_a_store_that_hangs_holds_nobody_up_for_long() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig = Rig({"disk": store})
    id = rig.add(PROMPT)
    others = rig.add(PROMPT[50:], 5)
    began = rig.clock.time
    for _ in range(3000):
        rig.step()  # the reader never gets anywhere
    rig.check(id, PROMPT, 3)
    rig.check(others, PROMPT[50:], 5)
    assert rig.tiers is not None and not rig.tiers.loading
    assert rig.outputs[id][-1].timing is not None
    assert rig.outputs[id][-1].timing.queue < 11 and rig.clock.time > began


def test_nobody_queues_behind_a_reader_that_hangs() -> None:
    store = disk()
    prompts = [PROMPT, PROMPT[50:], PROMPT[::-1]]
    for prompt in prompts:
        Rig({"disk": store}).ask(prompt)
    hanging, asked, goes = Between(store), threading.Event(), threading.Event()

    def fetch(key: bytes, tokens: Sequence[int], buffer: memoryview | None) -> Chunk | None:
        asked.set()
        assert goes.wait(60)
        return store.fetch(key, tokens, buffer)

    hanging.fetch = fetch
    rig = Rig({"disk": hanging}, blocks=200)
    assert rig.tiers is not None
    reader = threading.Thread(target=rig.tiers.reader.work, daemon=True)
    for prompt, seconds in zip(prompts, (11, 1), strict=False):
        id, began = rig.add(prompt), rig.clock.time
        rig.step()
        if not asked.is_set():
            reader.start()
            assert asked.wait(60)
        while not rig.scheduler.idle:
            rig.step()
        rig.check(id, prompt, 3)
        assert rig.clock.time - began < seconds
    goes.set()
    reader.join(60)
    assert rig.ask(prompts[2]).disk == 96, "a reader that is back is asked again"


def test_equal_prompts_wait_for_one_load() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    counting = Between(store)
    fetched: list[bytes] = []
    counting.fetch = lambda key, tokens, buffer: fetched.append(key) or store.fetch(key, tokens, buffer)
    rig = Rig({"disk": counting}, blocks=200)
    ids = [rig.add(PROMPT) for _ in range(5)]
    rig.settle()
    reports = [rig.check(id, PROMPT, 3) for id in ids]
    assert len(fetched) == 6
    assert sorted(report.pool for report in reports) == [0, 96, 96, 96, 96]


def test_a_load_gives_way_to_those_that_run() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig = Rig({"disk": store}, blocks=40)
    running = rig.add(PROMPT[::-1][:40], 60)
    rig.step()
    loading = rig.add(PROMPT)
    assert rig.tiers is not None
    rig.step()
    assert rig.tiers.loading
    for _ in range(5):  # of six: then the store hangs while the load holds 20 of the 40 blocks
        rig.tiers.reader.work()
        rig.step()
    assert rig.cache.use()[0].held > 30
    while rig.tiers.loading:
        rig.step()
        assert rig.scheduler.stats().running == 1
    assert rig.tiers.stats().abandoned == 1
    rig.settle()
    rig.check(running, PROMPT[::-1][:40], 60)
    rig.check(loading, PROMPT, 3)
    assert rig.scheduler.stats().preemptions == 0


def test_a_context_dropped_during_its_load_leaves_nothing() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig = Rig({"disk": store})
    assert rig.tiers is not None
    id = rig.add(PROMPT)
    rig.step()
    assert rig.tiers.loading
    rig.tiers.reader.work()
    assert rig.scheduler.drop(id, FinishReason.CANCELLED) is not None
    assert not rig.tiers.loading
    assert all(use.held == 0 for use in rig.cache.use())
    assert not rig.tiers.reader.work()
    assert rig.ask(PROMPT).disk == 96


def test_a_chunk_dropped_while_it_is_read_goes_to_no_other_store() -> None:
    """It was read from the disk for the pool and for memory, where the drop had already been."""
    disk = RamStore(1 << 30)
    Rig({"disk": disk}, blocks=200).ask(PROMPT)
    slow = Between(disk)
    rig = Rig({"ram": RamStore(1 << 30), "disk": slow}, blocks=200)
    tiers = rig.tiers
    assert tiers is not None
    answers = list[str]()

    def fetch(key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        fetched = disk.fetch(key, tokens, buffer)
        slow.fetch = disk.fetch
        tiers.evict(PROMPT, b"", 0, True, lambda: answers.append("dropped"))
        while tiers.writer.work():
            pass
        return fetched

    slow.fetch = fetch
    tiers.prefetch(PROMPT, b"", lambda: answers.append("loaded"))
    tiers.reader.work()
    rig.settle()
    assert sorted(answers) == ["dropped", "loaded"] and tiers.where(PROMPT, b"") == Placed()


def test_the_gate_loads_where_that_is_faster_as_measured() -> None:
    """Known failure 37."""
    clock = VirtualClock()
    gate = LoadPolicy("auto", clock)
    assert gate.worth(100, 1_000_000, 0)  # never measured: try
    gate.computed(1000, 1.0)
    gate.read(1_000_000, 1.0)
    assert gate.worth(1000, 900_000, 0)
    assert not gate.worth(1000, 900_000, 200_000)
    assert not gate.worth(1000, 1_100_000, 0)
    clock.time += 61
    assert gate.worth(1000, 1_100_000, 0)  # a slow disk gets another chance
    assert LoadPolicy("always", clock).worth(1, 1 << 40, 0) and not LoadPolicy("never", clock).worth(1000, 1, 0)


def test_a_load_that_falls_behind_computing_is_given_up() -> None:
    """What it has brought is used, the rest is computed (known failure 37)."""
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig = Rig({"disk": store}, load="auto")
    assert rig.tiers is not None
    rig.tiers.load_policy.computed(1000, 1.0)
    id = rig.add(PROMPT)
    rig.step()
    for _ in range(2):
        rig.tiers.reader.work()
        rig.step()
    rig.clock.time += 1.0
    while not rig.scheduler.idle:
        rig.step()
    report = rig.check(id, PROMPT, 3)
    assert report.disk == 32 and report.miss == Miss(position=32, reason="faster to compute")


OTHER = [(11 * n + 1) % 59 for n in range(155)]


def why(rig: Rig, prompt: Sequence[int] = PROMPT, *, stored: bool = True) -> str | None:
    """Return the reason why the first computed token of a prompt has to be computed."""
    miss = rig.ask(prompt, stored=stored).miss
    return None if miss is None else miss.reason


def test_a_miss_says_why() -> None:
    store = disk()
    rig = Rig({"disk": store}, blocks=40, load="never")
    assert [why(rig), why(rig)] == ["never seen", None]
    rig.ask(OTHER)
    assert why(rig) == "faster to compute"
    store.drop([key for key in store._chunks])
    rig.ask(OTHER)
    assert [why(rig), why(rig)] == ["evicted", None]


@pytest.mark.parametrize("stores", [True, False])
def test_the_miss_reason_of_unstorable_kv_is_not_stored_or_evicted(stores: bool) -> None:
    rig = Rig({"disk": disk()} if stores else None, blocks=40)
    for prompt in (PROMPT, OTHER):
        rig.ask(prompt, stored=False)
    assert why(rig, stored=False) == ("not stored" if stores else "evicted")


def test_the_miss_reason_of_queued_kv_is_not_stored_yet_and_of_late_kv_never_stored() -> None:
    rig = Rig({"disk": disk()}, blocks=40)
    for prompt in (PROMPT, OTHER):
        rig.add(prompt)
        while not rig.scheduler.idle:
            rig.step()  # no thread runs: what the pool evicts waits in the queue
    assert rig.tiers is not None and rig.tiers.write_behind.bytes >= 6 * PAGES
    id = rig.add(PROMPT)
    while not rig.scheduler.idle:
        rig.step()
    assert rig.check(id, PROMPT, 3).miss == Miss(position=0, reason="not stored yet")
    full = Rig({"disk": disk()}, blocks=40, limits=WriteLimits(day_bytes=0.0))
    full.ask(PROMPT)
    full.ask(OTHER)
    assert why(full) == "not stored"


def life(files: CrashFiles, **how: Any) -> Rig:
    """Make a worker over the store on a disk."""
    info = Rig(None).engine.info
    store = stored.open_store(files, stored.Time(), identity=info.identity, codec=Raw(info.block_bytes))
    return Rig({"disk": store}, **how)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_tokens_seen_before_a_restart_are_not_reported_as_new(how: str) -> None:
    """Whether a store had them or not. Nothing is written down for requests that must not be stored."""
    files, private = CrashFiles(), [(13 * n + 2) % 57 for n in range(50)]
    rig = life(files, limits=WriteLimits(day_bytes=3 * (PAGES + 1024)))
    rig.ask(PROMPT)
    rig.ask(private, stored=False)
    rig.clock.time += 1
    rig.settle()
    if how == "ended":
        assert rig.tiers is not None
        rig.tiers.start()
        rig.tiers.close(20)
    after = files if how == "ended" else files.kill()
    rig = life(after, load="always")
    report = rig.ask(PROMPT)
    assert (report.disk, report.miss) == (48, Miss(position=48, reason="not stored"))
    assert why(rig, private) == "never seen" and why(rig, OTHER) == "never seen"
    assert rig.tiers is not None
    rig.tiers.close(0)
    for path in [path for path in after.files(stored.FOLDER) if path.name.count(".") >= 4]:
        after.vanish(path)
    assert why(life(after)) == "evicted"


def chunks_in(files: CrashFiles) -> int:
    """Return how many chunks there are on a disk."""
    return sum(path.name.count(".") >= 4 for path in files.files(stored.FOLDER))


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_the_days_bytes_count_over_restarts(how: str) -> None:
    files, limits = CrashFiles(), WriteLimits(day_bytes=3 * (PAGES + 1024))
    rig = life(files, limits=limits)
    rig.ask(PROMPT)
    assert rig.tiers is not None and chunks_in(files) == 3
    if how == "ended":
        rig.tiers.start()
        rig.tiers.close(20)
    after = files if how == "ended" else files.kill()
    for days, chunks in ((0, 3), (1, 6)):
        rig = life(after, limits=limits)
        rig.clock.time += days * (DAY_SECONDS + 900)
        rig.ask(OTHER)
        assert rig.tiers is not None and chunks_in(after) == chunks
        rig.tiers.close(0)


def exported(files: CrashFiles, rig: Rig) -> bytes:
    """Return the file of a prompt's KV."""
    assert rig.tiers is not None
    found = files.files()
    chunks = [found[path] for path in rig.tiers.paths(PROMPT, b"")]
    return MAGIC + b"".join(framed(len(chunk)) + chunk for chunk in chunks) + END


def imported(rig: Rig, path: Path) -> tuple[ImportedKv, int]:
    """Import a file's KV of the prompt; return what was taken, and by how many bytes the day's budget fell."""
    assert rig.tiers is not None
    before = sum(size for _, size in rig.tiers.write_behind.budget.record())
    answers: list[ImportedKv] = []
    rig.tiers.import_kv(path, PROMPT, b"", answers.append)
    while not answers:
        rig.tiers.turn(False)
        time.sleep(0.001)
    return answers[0], sum(size for _, size in rig.tiers.write_behind.budget.record()) - before


def test_an_import_costs_the_days_bytes_of_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chunks that the store refuses nor those that it has already."""
    first = CrashFiles()
    rig = life(first)
    rig.ask(PROMPT)
    files, path = CrashFiles(), stored.FOLDER.with_name("kv.file")
    files.put(path, exported(first, rig))
    rig = life(files)
    assert rig.tiers is not None
    store = rig.tiers._durable
    assert isinstance(store, DiskStore)
    with monkeypatch.context() as refusing:
        refusing.setattr(store, "keep", lambda chunks: 0)
        taken, cost = imported(rig, path)
    assert (taken.chunks, taken.refused, cost) == (0, 6, 0)
    taken, cost = imported(rig, path)
    assert taken.chunks == 6 and cost == 6 * store.kept_bytes(0, PAGES)
    taken, cost = imported(rig, path)
    assert (taken.chunks, cost) == (6, 0)


def test_damaged_chunks_are_reported() -> None:
    files = CrashFiles()
    life(files).ask(PROMPT)
    after = files.kill()
    path = next(path for path in after.files(stored.FOLDER) if path.name.count(".") >= 4 and ".30." in path.name)
    after.put(path, after.files(stored.FOLDER)[path][:-1] + b"?")
    rig = life(after, load="always")
    report = rig.ask(PROMPT)
    assert (report.disk, report.miss) == (48, Miss(position=48, reason="damaged"))
    cut = files.kill()
    cut.put(path, cut.files(stored.FOLDER)[path][:-1])
    assert life(cut, load="always").ask(PROMPT).miss == Miss(position=48, reason="damaged")


def test_erased_contexts_leave_no_trace_of_having_been_seen() -> None:
    files = CrashFiles()
    rig = life(files)
    rig.ask(PROMPT)
    rig.clock.time += 1
    rig.settle()
    assert rig.tiers is not None
    rig.tiers.evict(PROMPT, b"", 0, True, lambda: None)
    rig.settle()
    assert not rig.cache.seen.records() and not files.files(stored.FOLDER)[stored.FOLDER / "seen"]
    assert why(rig) == "never seen"


def test_a_load_declined_first_and_made_later_is_no_miss_reason() -> None:
    """Tokens that it finds nothing of were never seen."""
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig = Rig({"disk": store}, blocks=40, load="auto")
    assert rig.tiers is not None
    gate, prompt = rig.tiers.load_policy, [*PROMPT[:96], *[1] * 30]
    gate.computed(1000, 1.0)
    gate.read(1, 1.0)
    rig.add([(11 * n) % 59 for n in range(60)], 30)  # has the blocks meanwhile
    rig.step()
    id = rig.add(prompt)
    rig.step()
    assert not rig.tiers.loading and not rig.outputs[id]
    rig.clock.time += 61
    rig.settle()
    report = rig.check(id, prompt, 3)
    assert report.disk == 96 and report.miss == Miss(position=96, reason="never seen")


def test_a_context_can_be_prefetched() -> None:
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig = Rig({"disk": store}, load="never")
    assert rig.tiers is not None
    answers: list[Placed] = []
    rig.tiers.prefetch(PROMPT, b"", lambda: answers.append(rig.tiers.where(PROMPT, b"")))  # type: ignore[union-attr]
    rig.settle()
    assert answers == [Placed(pool=96, disk=96)]
    assert rig.ask(PROMPT).pool == 96


@pytest.mark.parametrize(
    ("windows", "lengths"),
    [*(((0,), lengths) for lengths in ([100] * 10, [64, 100, 100, 48], [100, 64, 30], [100, 8])), ((0, 5), [100] * 10)],
)
def test_a_second_request_waits_for_a_running_load(windows: tuple[int, ...], lengths: list[int]) -> None:
    """Ten requests for one context used to read it ten times."""
    store = disk()
    Rig({"disk": store}, windows=windows).ask(PROMPT)
    counting, fetched, answers = Between(store), list[bytes](), list[int]()
    counting.fetch = lambda key, tokens, buffer: fetched.append(key) or store.fetch(key, tokens, buffer)
    rig = Rig({"disk": counting}, windows=windows)
    assert rig.tiers is not None
    for number, length in enumerate(lengths):
        rig.tiers.prefetch(PROMPT[:length], b"", lambda number=number: answers.append(number))
        if number == 1:  # part of it has been loaded when the next one asks
            rig.threads()
            rig.step()
    rig.settle()
    assert sorted(answers) == list(range(len(lengths))) and len(fetched) == len(set(fetched)) >= 6
    assert rig.tiers.where(PROMPT, b"").pool == 96


def test_a_waiter_hears_of_a_load_that_was_given_up() -> None:
    """And the load is not retried for each waiter."""
    store = disk()
    Rig({"disk": store}).ask(PROMPT)
    rig, answers = Rig({"disk": store}), list[int]()
    assert rig.tiers is not None
    for number in range(3):
        rig.tiers.prefetch(PROMPT, b"", lambda number=number: answers.append(number))
    assert rig.tiers.yield_blocks()
    rig.step()
    assert answers == [0, 1, 2] and not rig.tiers.loading


def test_a_second_sweep_shares_the_running_one() -> None:
    """Each scrub is a thread that reads the whole store; fifty requests used to start fifty."""
    info = Rig(None).engine.info
    store = stored.open_store(CrashFiles(), stored.Time(), identity=info.identity, codec=Raw(info.block_bytes))
    rig, said, blocked, began = Rig({"disk": store}), list[Swept | None](), threading.Event(), list[str]()
    tiers = rig.tiers
    assert tiers is not None

    def scrub(store: DiskStore) -> Swept:
        began.append("scrub")
        assert blocked.wait(60)
        return Swept(checked=began.count("scrub"))

    def prune(store: DiskStore) -> Swept:
        began.append("prune")
        raise ValueError

    def answered(count: int) -> list[Swept | None]:
        """Return the answers to so many sweep requests."""
        until = time.monotonic() + 60
        while len(said) < count and time.monotonic() < until:
            tiers.turn(False)
            time.sleep(0.001)
        return said

    assert all(tiers.sweep(scrub, said.append) for _ in range(3))
    assert tiers.sweep(prune, said.append)
    assert answered(1) == [None], "another kind of sweep waits for it"
    blocked.set()
    assert answered(4) == [None, *3 * [Swept(checked=1)]] and sorted(began) == ["prune", "scrub"]
    assert tiers.sweep(scrub, said.append)
    assert answered(5)[4:] == [Swept(checked=2)]


def test_eviction_on_demand_reaches_chunks_of_other_kernels() -> None:
    """Their chunks hold the same token ids. What others need of it stays, and so does everything else in the folder."""
    files, other = CrashFiles(), [(11 * n) % 59 for n in range(80)]

    def life(identity: bytes) -> Rig:
        info = Rig(None, identity=identity).engine.info
        store = stored.open_store(files, stored.Time(), identity=info.identity, codec=Raw(info.block_bytes))
        return Rig({"disk": store}, identity=identity)

    def on_disk(rig: Rig) -> tuple[int, ...]:
        assert rig.tiers is not None
        places = rig.tiers.where(PROMPT, b""), rig.tiers.where(PROMPT, b"theirs"), rig.tiers.where(other, b"")
        return tuple(placed.disk // CHUNK * CHUNK for placed in places)

    for identity in (b"narrow", b"wide", b"given up by"):
        rig = life(identity)
        assert rig.tiers is not None
        for salt, prompt in ((b"", PROMPT), (b"theirs", PROMPT), (b"", other)):
            rig.ask(prompt, salt=salt)
        assert on_disk(rig) == (96, 96, 80)
        if identity == b"given up by":
            rig.tiers.evict(PROMPT, b"", 32, True, lambda: None)
            rig.settle()
            assert on_disk(rig) == (32, 96, 80) and rig.tiers.where(PROMPT, b"").disk == 32
        rig.tiers.close(1)
    for identity in (b"narrow", b"wide"):
        rig = life(identity)
        assert on_disk(rig) == (32, 96, 80)
        assert rig.tiers is not None
        rig.tiers.close(1)


def test_threads_do_the_same_and_end() -> None:
    store = disk()
    for expected in (0, 99):
        rig = Rig({"disk": store})
        assert rig.tiers is not None
        before = threading.active_count()
        rig.tiers.start()
        assert threading.active_count() == before + 2
        id = rig.add(PROMPT)
        end = time.monotonic() + 20
        while not rig.scheduler.idle and time.monotonic() < end:
            if not rig.step():
                time.sleep(0.001)
        assert rig.check(id, PROMPT, 3).disk == expected
        rig.tiers.writer.push(lambda: None)
        rig.tiers.write_behind.finish(20)
        assert rig.tiers.writer.close(20) and rig.tiers.reader.close()
        assert threading.active_count() == before
    assert store.stats().chunks == 7
