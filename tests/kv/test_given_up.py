"""The fate of chunks that cannot be stored when their turn comes, and who is told of the loss."""

from __future__ import annotations

import logging
from collections import OrderedDict

import pytest

from cairn.kv.ram import RamStore
from cairn.kv.tiers.tiers import Tiers
from cairn.kv.tiers.write_behind import COPY_SECONDS, WAIT_SECONDS, Flushes, WriteLimits
from cairn.scheduler.step_budget import Limits
from cairn.types.outputs import FinishReason
from cairn.types.request import SamplingParams
from tests.kv.tiered import Between, Rig

PROMPT = [(7 * n) % 61 for n in range(160)]
CHUNK = 16
PAGES = CHUNK * 8
"""Bytes of a chunk's pages."""


def rig_on(store: Between, **limits: int) -> tuple[Rig, Tiers]:
    rig = Rig({"disk": store}, blocks=200, limits=WriteLimits(**limits))
    assert rig.tiers is not None
    return rig, rig.tiers


def run(rig: Rig, prompt: list[int], count: int = 3) -> None:
    """Run a request to its end, without a turn in which there is nothing else to do."""
    id = rig.add(prompt, count)
    while not rig.outputs[id] or rig.outputs[id][-1].finish is None:
        rig.step()


@pytest.fixture
def store() -> Between:
    return Between(RamStore(1 << 30))


def flushed(rig: Rig, tiers: Tiers) -> int:
    """Return the loss that a flush reports."""
    answers = list[int]()
    tiers.flush(answers.append)
    rig.settle()
    (lost,) = answers
    return lost


def test_a_refused_chunk_is_stored_when_its_context_goes_on(store: Between) -> None:
    """A missing part would keep everything that extends it from ever being stored."""
    rig, tiers = rig_on(store)
    rig.add(PROMPT, 300)
    for _ in range(8):
        rig.step()
    store.keep = lambda chunks: 0
    tiers.turn(True)
    while rig.threads():
        pass
    store.keep = store.inner.keep
    for _ in range(3):
        rig.step()
    lost = tiers.stats().dropped
    assert lost >= 10 and tiers.where(PROMPT, b"").disk == 0
    rig.clock.time += WAIT_SECONDS
    rig.settle()
    assert tiers.stats().disk is not None and store.stats().chunks == (160 + 300 - 1) // CHUNK
    assert flushed(rig, tiers) == lost, "nobody was told of the refusal"
    assert flushed(rig, tiers) == 0


def test_a_loop_that_never_rests_writes_all_the_same(store: Between) -> None:
    """Agents whose turns follow one another would lose all of them in a crash."""
    rig, tiers = rig_on(store)
    run(rig, PROMPT)
    tiers.turn(False)
    assert tiers.where(PROMPT, b"").disk == 0
    rig.clock.time += COPY_SECONDS + 0.01
    tiers.turn(False)
    while rig.threads():
        pass
    assert store.stats().chunks == len(PROMPT) // CHUNK


def test_a_store_that_refuses_everything_is_not_asked_at_every_step(store: Between) -> None:
    rig, tiers = rig_on(store)
    store.keep = lambda chunks: 0
    rig.add(PROMPT, 300)
    for _ in range(200):
        rig.step()
        tiers.turn(True)
        while rig.threads():
            pass
    assert tiers.stats().dropped <= (160 + 200) // CHUNK


def test_a_flush_reports_losses_of_its_chunks_and_unreported_ones() -> None:
    flushes, losses = Flushes(), list[int]()
    flushes.add(5, losses.append, counts=True)
    flushes.lose(7)
    flushes.lose(3)
    flushes.answer(lambda: 4)
    assert flushes.waiting and losses == []
    flushes.answer(lambda: 5)
    flushes.add(9, losses.append, counts=False)
    flushes.add(9, losses.append, counts=True)
    flushes.answer(lambda: 9)
    assert not flushes.waiting and losses == [1, 0, 1]


def test_a_context_evicted_on_demand_is_stored_first_however_long_it_is(store: Between) -> None:
    """It is more than the queue holds, and was noted but not yet copied when the request came."""
    rig, tiers = rig_on(store, queue_bytes=4 * PAGES)
    run(rig, PROMPT)
    assert (tiers.write_behind.chunks, store.stats().chunks) == (10, 0)
    done = list[bool]()
    tiers.evict(PROMPT, b"", 0, False, lambda: done.append(True))
    rig.settle()
    placed = tiers.where(PROMPT, b"")
    assert done == [True] and (placed.pool, placed.disk) == (0, 160) and tiers.stats().dropped == 0


def test_refused_chunks_do_not_count_as_written_today(store: Between) -> None:
    rig, tiers = rig_on(store, day_bytes=16 * (PAGES + 1024))
    store.keep = lambda chunks: 0
    for _ in range(4):
        rig.ask(PROMPT)
    store.keep = store.inner.keep
    rig.ask([(11 * n) % 59 for n in range(160)])
    assert tiers.stats().deferred == 0 and store.stats().chunks == 10


def test_a_shutdown_reports_unstored_chunks(store: Between, caplog: pytest.LogCaptureFixture) -> None:
    rig, tiers = rig_on(store)
    run(rig, PROMPT)
    with caplog.at_level(logging.WARNING):
        tiers.close(0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "10 chunks of KV were not stored before the end, and will be computed again"
    ]


def stepped(rig: Rig, id: int, count: int) -> list[int]:
    """Step until a request has `count` tokens; return them."""
    while len(said := [token for output in rig.outputs[id] for token in output.tokens]) < count:
        rig.step()
    return said


@pytest.mark.parametrize(
    ("length", "heard", "keep"), [(24, 12, 0), (24, 16, 0), (24, 23, 0), (8, 6, 0), (1, 2, 0), (40, 6, 32), (33, 2, 32)]
)
@pytest.mark.parametrize("queued", [False, True])
def test_kv_computed_for_a_deleted_context_is_not_a_loss(
    store: Between, length: int, heard: int, keep: int, queued: bool
) -> None:
    """The client that deletes may not have all computed tokens: a chunk can begin within its text and end beyond it.

    If that is the first chunk to go, the client's text yields no key of it, nor of anything that extends it.
    """
    rig, tiers = rig_on(store)
    if keep:
        rig.ask(PROMPT[: keep + 1], 1)
    shared = store.stats().chunks
    prompt = PROMPT[:length]
    id = rig.add(prompt, 60)
    said = stepped(rig, id, 26)
    rig.scheduler.drop(id, FinishReason.CANCELLED)
    if queued:
        tiers.turn(True)
    assert tiers.write_behind.chunks
    tiers.evict([*prompt, *said][: length + heard], b"", keep, True, lambda: None)
    assert flushed(rig, tiers) == 0 and store.stats().chunks == shared == keep // CHUNK


@pytest.mark.parametrize("heard", [2, 6])
def test_deleting_a_context_keeps_other_beginnings_and_other_tenants(store: Between, heard: int) -> None:
    """The deleted context ends within a chunk; the same tokens under another salt are no part of it."""
    rig, tiers = rig_on(store)
    for salt, prompt in ((b"", PROMPT[:1]), (b"other", PROMPT[:1]), (b"", PROMPT[1:2])):
        id = rig.add(prompt, 20, salt=salt)
        stepped(rig, id, 20)
    assert tiers.write_behind.chunks == 3
    known = [*PROMPT[:1], *rig.engine.oracle(PROMPT[:1], SamplingParams(max_tokens=20), 20)][: 1 + heard]
    tiers.evict(known, b"", 0, True, lambda: None)
    rig.settle()
    assert store.stats().chunks == 2
    for salt, prompt in ((b"other", PROMPT[:1]), (b"", PROMPT[1:2])):
        whole = [*prompt, *rig.engine.oracle(prompt, SamplingParams(max_tokens=20), 20)]
        assert tiers.where(whole, salt).disk == CHUNK


def test_a_long_line_that_leaves_the_pool_costs_no_more_than_the_queue_holds(store: Between) -> None:
    """For each chunk all noted ones before it were searched: 4,096 of them stopped the loop for 5 seconds."""
    long = [(7 * n * n + n) % 61 for n in range(400 * CHUNK)]
    limits, scheduling = WriteLimits(queue_bytes=8 * PAGES), Limits(step_tokens=4096)
    rig = Rig({"disk": store}, blocks=len(long) // 4 + 8, context=8192, limits=limits, scheduling=scheduling)
    assert rig.tiers is not None
    behind, looked = rig.tiers.write_behind, list[object]()

    class Noted(OrderedDict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            looked.append(key)
            return super().__contains__(key)

    run(rig, long, 1)
    behind.waiting.noted = Noted(behind.waiting.noted)
    assert behind.chunks == 400
    rig.add([(5 * n + 1) % 59 for n in range(len(long) - 8)], 1, stored=False)
    rig.scheduler.plan()
    assert len(behind.waiting.noted) < 20 and behind.dropped > 300
    assert len(looked) < 400 * 16


def test_a_sequence_over_a_deleted_prefix_is_stored_from_there_on(store: Between) -> None:
    """Another sequence's deletion removed the beginning, without which nothing that extends it could be stored."""
    rig, tiers = rig_on(store)
    rig.ask(PROMPT[:24], 3)
    id = rig.add(PROMPT[:24], 300)
    stepped(rig, id, 4)
    tiers.evict(PROMPT[:16], b"", 0, True, lambda: None)
    rig.settle()
    assert flushed(rig, tiers) == 0 and store.stats().chunks == (24 + 300 - 1) // CHUNK


def test_a_sequence_over_a_prefix_being_deleted_is_stored_from_there_on(store: Between) -> None:
    """Also if its last token comes before the store has dropped anything."""
    rig, tiers = rig_on(store)
    rig.ask(PROMPT[:24], 3)
    tiers.evict(PROMPT[:16], b"", 0, True, lambda: None)
    id = rig.add(PROMPT[:24], 60)
    stepped(rig, id, 60)
    rig.settle()
    assert flushed(rig, tiers) == 0 and store.stats().chunks == (24 + 60 - 1) // CHUNK


@pytest.mark.parametrize("dropped", [False, True])
def test_descendants_of_a_deleted_chunk_are_no_loss_when_the_pool_needs_blocks(store: Between, dropped: bool) -> None:
    """Before or after the drop: what is computed in between cannot be stored, but no client lost it."""
    rig = Rig({"disk": store}, blocks=24)
    assert rig.tiers is not None
    rig.ask(PROMPT[:24], 3)
    id = rig.add(PROMPT[:24], 60)
    stepped(rig, id, 4)
    rig.tiers.evict(PROMPT[:16], b"", 0, True, lambda: None)
    stepped(rig, id, 12)
    if dropped:
        rig.tiers.writer.work()
    rig.scheduler.drop(id, FinishReason.CANCELLED)
    rig.add([(5 * n) % 59 for n in range(80)], 3, stored=False)
    rig.step()
    assert flushed(rig, rig.tiers) == 0


def test_a_chunk_noted_before_its_prefix_goes_with_a_deletion_and_is_not_a_loss(store: Between) -> None:
    rig, tiers = rig_on(store)
    long = PROMPT[:40]
    rig.ask(long[:34], 1)
    id = rig.add([*long, *[1] * 10], 300)
    stepped(rig, id, 3)
    last, *_ = tiers.write_behind.waiting.noted.values()
    store.drop([last.chunk.parent])
    rig.add(long, 1)
    rig.step()
    rig.step()
    depths = [noted.chunk.depth for noted in tiers.write_behind.waiting.noted.values()]
    assert depths.index(32) < depths.index(16), "the later chunk was not noted first"
    tiers.evict(long[:16], b"", 0, True, lambda: None)
    rig.scheduler.drop(id, FinishReason.CANCELLED)
    assert flushed(rig, tiers) == 0


def end(tiers: Tiers) -> None:
    """Let a worker end in order."""
    tiers.write_behind.finish(0.0)
    while tiers.writer.work():
        tiers.write_behind.finish(0.0)


@pytest.mark.parametrize("length", [12, 13, 16, 29])
@pytest.mark.parametrize("taken", [1, 2, 3])
@pytest.mark.parametrize("durable", [True, False])
def test_the_rest_of_a_partly_evicted_chunk_is_stored_at_the_end(
    store: Between, length: int, taken: int, durable: bool
) -> None:
    """A one-shot prompt, or a full queue: the blocks that leave are given up, and none before them."""
    rig, tiers = rig_on(store, queue_bytes=PAGES)
    tiers.write_behind.bytes += PAGES  # a full queue
    context, prompt = rig.cache.context(b"", durable=durable, once=not durable), PROMPT[:length]
    assert rig.cache.open(context, prompt) == 0
    rig.cache.publish(context, prompt, length)
    rig.cache.close(context, prompt, length // 4 * 4)
    pool = rig.cache.pools[0]
    pool.take(pool.free + taken)
    tiers.write_behind.bytes -= PAGES
    end(tiers)
    left = length // 4 * 4 - 4 * taken
    assert rig.cache.found(context, prompt) == tiers.where(prompt, b"").disk == left
    assert tiers.stats().dropped == (durable and length == 16)


def test_a_request_that_fails_keeps_what_its_steps_before_computed(store: Between) -> None:
    rig, tiers = rig_on(store)
    rig.add(PROMPT[:70], 40)
    for _ in range(8):
        rig.step()
    plan = rig.scheduler.plan()
    assert plan is not None
    (output,) = rig.scheduler.commit(plan, RuntimeError("injected"))
    assert output.finish is FinishReason.ERROR
    whole = [*PROMPT[:70], *rig.engine.oracle(PROMPT[:70], SamplingParams(max_tokens=40), 40)]
    end(tiers)
    assert rig.cache.found(rig.cache.context(b""), whole) == tiers.where(whole, b"").disk == 76
