"""Stored contexts are loaded rather than recomputed, although others overtake, load, delete or evict meanwhile."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from typing import Literal

import pytest

from cairn.kv.disk.codec import Raw
from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import Chunk, Store
from cairn.scheduler.step_budget import Limits
from tests.files import CrashFiles, Fault
from tests.kv import stored
from tests.kv.stored import chain, keys
from tests.kv.tiered import Between, Rig


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(60) for _ in range(count)]


def known(*prompts: list[int], **how: int) -> Store:
    """Return a store that has these contexts."""
    store = RamStore(1 << 30)
    first = Rig({"disk": store}, **how)
    for prompt in prompts:
        first.ask(prompt)
    return store


def slowly(rig: Rig, slow: Between, seconds: float) -> None:
    """Let each chunk take so many seconds from now on."""
    real = slow.inner.fetch

    def fetch(key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        rig.clock.time += seconds
        return real(key, tokens, buffer)

    slow.fetch = fetch


@pytest.mark.parametrize("mode", ["never", "auto", "always"])
def test_a_known_context_is_not_overtaken_for_ever_in_a_busy_pool(mode: Literal["never", "auto", "always"]) -> None:
    """Its load reserved no room for the tokens left to compute, so others took it, again and again."""
    rng = random.Random(3)
    prompt = tokens(rng, 320)
    limits = Limits(step_tokens=64, max_running=16)
    rig = Rig({"disk": known(prompt, blocks=400, context=1024)}, blocks=120, load=mode, context=1024, scheduling=limits)
    if mode == "auto":
        rig.tiers.load_policy.computed(1, 1.0)
    asked = 0
    for step in range(1200):
        if step % 16 == 0:
            rig.add(tokens(rng, 40), 60, durable=False, stored=False)
        if step == 200:
            asked = rig.add(prompt, 3)
        rig.step()
        rig.tiers.reader.work()
        rig.tiers.writer.work()
        if asked and rig.outputs[asked] and rig.outputs[asked][-1].finish:
            return
    raise AssertionError("it has not begun after 1,000 steps")


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_loads_that_wait_for_each_other_are_not_late(mode: Literal["auto", "always"]) -> None:
    """Four contexts after a restart: reading one takes a tenth of computing it, and the last waits for three."""
    rng = random.Random(1)
    prompts = [tokens(rng, 400) for _ in range(4)]
    slow = Between(known(*prompts, blocks=2000))
    rig = Rig({"disk": slow}, blocks=2000, load=mode)
    slowly(rig, slow, 0.16 if mode == "auto" else 0.5)
    rig.tiers.load_policy.computed(10, 1.0)
    rig.tiers.load_policy.read(16 * 8, 0.16)
    ids = [rig.add(prompt) for prompt in prompts]
    rig.settle()
    for id, prompt in zip(ids, prompts, strict=True):
        assert rig.check(id, prompt, 3).disk >= 384
    assert rig.tiers.stats().abandoned == 0


@pytest.mark.parametrize("queue", [1, 2])
def test_a_request_does_not_wait_for_a_prefetch_slower_than_computing(queue: int) -> None:
    """Also if it is read after something else: before the request nothing had compared the two."""
    rng = random.Random(1)
    prompts = [tokens(rng, 400) for _ in range(queue)]
    store = known(*prompts, blocks=800)
    slow = Between(store)
    rig = Rig({"disk": slow}, blocks=800, load="auto")
    assert rig.tiers is not None

    def fetch(key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        for _ in range(10):  # the loop goes on meanwhile
            rig.clock.time += 0.1
            rig.step()
        return store.fetch(key, tokens, buffer)

    slow.fetch = fetch
    rig.tiers.load_policy.computed(1000, 1.0)
    ended = list[int]()
    for number, prompt in enumerate(prompts):
        rig.tiers.prefetch(prompt, b"", lambda number=number: ended.append(number))
    rig.threads()
    assert not ended
    id = rig.add(prompts[-1])
    while not rig.outputs[id]:
        rig.step()
        rig.threads()
    rig.settle()
    assert rig.check(id, prompts[-1], 3).computed > 300
    timing = rig.outputs[id][-1].timing
    assert timing is not None and timing.queue < 3, timing
    assert sorted(ended) == list(range(queue)) and rig.tiers.stats().abandoned == 1


def test_a_request_waits_for_a_prefetch_faster_than_computing() -> None:
    """And the prefetch is read to its end, however long that takes, if nobody waits."""
    rng = random.Random(1)
    prompts = [tokens(rng, 400) for _ in range(2)]
    slow = Between(known(*prompts, blocks=800))
    rig = Rig({"disk": slow}, blocks=800, load="auto")
    assert rig.tiers is not None
    rig.tiers.load_policy.computed(100, 1.0)
    slowly(rig, slow, 1.0)
    rig.tiers.prefetch(prompts[0], b"", lambda: None)
    rig.settle()
    slowly(rig, slow, 0.1)
    rig.tiers.prefetch(prompts[1], b"", lambda: None)
    rig.threads()
    id = rig.add(prompts[1])
    rig.settle()
    assert rig.check(id, prompts[1], 3).pool == 399 and rig.tiers.where(prompts[0], b"").pool == 400
    assert rig.tiers.stats().abandoned == 0


@pytest.mark.parametrize(("mode", "most"), [("auto", 40), ("always", 80)])
def test_a_request_does_not_wait_for_a_prefetch_of_something_else(mode: Literal["auto", "always"], most: int) -> None:
    """The disk is slow, which is not measured yet, and reads 500 seconds of something nobody waits for."""
    rng = random.Random(1)
    prompts = [tokens(rng, 1600), tokens(rng, 160)]
    how = {"blocks": 1000, "context": 2000}
    slow = Between(known(*prompts, **how))
    rig = Rig({"disk": slow}, load=mode, **how)
    assert rig.tiers is not None
    rig.tiers.load_policy.computed(1000, 1.0)
    ended = list[str]()
    rig.tiers.prefetch(prompts[0], b"", lambda: ended.append("prefetch"))
    rig.threads()
    slowly(rig, slow, 5.0)
    id, began = rig.add(prompts[1]), rig.clock.now()
    while not (rig.outputs[id] and rig.outputs[id][-1].finish):
        rig.step()
        rig.threads()
        rig.tiers.turn(False)
    assert rig.clock.now() - began < most and not ended
    rig.settle()
    report = rig.check(id, prompts[1], 3)
    assert ended and (0 < report.disk < 64 if mode == "auto" else report.disk > 140)
    assert rig.tiers.where(prompts[0], b"").pool == 1600


def test_a_load_waits_for_its_turn_no_longer_than_computing_takes() -> None:
    """An unmeasured disk made both look fast; it only keeps up with computing, and the first load is long."""
    rng = random.Random(1)
    prompts = [tokens(rng, 1600), tokens(rng, 160)]
    how = {"blocks": 1000, "context": 2000}
    slow = Between(known(*prompts, **how))
    rig = Rig({"disk": slow}, load="auto", **how)
    assert rig.tiers is not None
    rig.tiers.load_policy.computed(1000, 1.0)
    slowly(rig, slow, 0.005)
    long, short = (rig.add(prompt) for prompt in prompts)
    rig.settle()
    assert rig.check(short, prompts[1], 3).computed == 160 and rig.check(long, prompts[0], 3).disk >= 1584
    timing = rig.outputs[short][-1].timing
    assert timing is not None and timing.queue < 0.5, timing


def test_a_started_load_is_finished_although_a_prefetch_is_awaited() -> None:
    """The load would be late through no fault of its own."""
    rng = random.Random(1)
    prompts = [tokens(rng, 160) for _ in range(2)]
    slow, fetched = Between(known(*prompts, blocks=200)), list[tuple[int, ...]]()
    rig = Rig({"disk": slow}, blocks=200)
    assert rig.tiers is not None
    slow.fetch = lambda key, tokens, buffer=None: fetched.append(tuple(tokens)) or slow.inner.fetch(key, tokens, buffer)
    rig.tiers.prefetch(prompts[0], b"", lambda: None)
    for prompt in reversed(prompts):
        rig.add(prompt)
        for _ in range(3):
            rig.step()
            rig.threads()
    rig.settle()
    chunks = [tuple(prompt[at : at + 16]) for prompt in reversed(prompts) for at in range(0, 160, 16)]
    assert fetched == chunks


@pytest.mark.parametrize("fetched", [1, 4])
def test_a_context_that_is_deleted_while_it_is_loaded_does_not_come_back(fetched: int) -> None:
    prompt = [(7 * n) % 61 for n in range(160)]
    files = CrashFiles()
    info = Rig(None).engine.info
    store = stored.open_store(files, stored.Time(), identity=info.identity, codec=Raw(info.block_bytes))
    rig = Rig({"disk": store})
    rig.ask(prompt)
    rig.tiers.evict(prompt, b"", 0, False, lambda: None)
    rig.settle()
    assert rig.tiers.where(prompt, b"").disk
    ended = []
    rig.tiers.prefetch(prompt, b"", lambda: ended.append("prefetch"))
    for _ in range(fetched):
        rig.tiers.reader.work()
    rig.tiers.evict(prompt, b"", 0, True, lambda: ended.append("evict"))
    rig.tiers.prefetch(prompt, b"", lambda: ended.append("again"))
    rig.settle()
    where = rig.tiers.where(prompt, b"")
    assert (where.pool, where.disk) == (0, 0) and sorted(ended) == ["again", "evict", "prefetch"]
    assert not [path for path in files.files(stored.FOLDER) if len(path.parent.name) == 1]


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_a_disk_that_fails_for_a_moment_costs_no_chunk(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests with one system prompt come in that second; every agent's context extends its chunk."""
    time = stored.Time()
    files = CrashFiles(now=lambda: time.seconds)
    store = stored.open_store(files, time, budget=1 << 30)
    system = chain(1, salt=b"system prompt")
    store.keep(system)
    for number in range(5):
        agent = chain(4, salt=b"agent%d" % number, after=system[0])
        store.keep(agent)
        store.pin(f"agent{number}", keys(system + agent))

    def refuse(*_: object) -> None:
        raise OSError(error, errno.errorcode[error])

    real = files.open
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", lambda path, mode: refuse() if mode == "read" else real(path, mode))
        patch.setattr(files, "remove", refuse)
        for _ in range(4):
            time.seconds += 0.25
            assert store.fetch(system[0].key, system[0].tokens) is None
    for _ in range(120):
        time.seconds += 1
        store.tend()
    stats = store.stats()
    assert (stats.chunks, stats.damaged, stats.trouble) == (21, 0, "")


def test_expensive_contexts_do_not_stay_for_ever() -> None:
    """A store full of long contexts that were unused for a week makes room for today's short ones."""
    time = stored.Time()
    files = CrashFiles(now=lambda: time.seconds)
    store = stored.open_store(files, time, budget=1000 * 4096)
    for number in range(10):
        store.keep(chain(100, salt=b"old%d" % number))
    assert store.stats().chunks >= 990
    time.seconds += 7 * 86_400
    today = [chain(30, salt=b"new%d" % number) for number in range(10)]
    for turn in range(1, 6):
        for chunks in today:
            time.seconds += 60
            assert store.match_prefix(keys(chunks[: 6 * (turn - 1)])) == 6 * (turn - 1)
            store.keep(chunks[: 6 * turn])


def test_chunks_that_cannot_be_erased_are_reported_until_they_are() -> None:
    """While their files exist the deletion is not reported as done, since a restart would find them."""
    prompt = [(7 * n) % 61 for n in range(160)]
    time, ended = stored.Time(), list[bool]()
    files = CrashFiles(now=lambda: time.seconds)
    info = Rig(None).engine.info
    store = stored.open_store(files, time, identity=info.identity, codec=Raw(info.block_bytes))
    rig = Rig({"disk": store})
    rig.ask(prompt)
    files.fail(Fault(files.calls, only=frozenset({"remove"}), sticky=True))
    rig.tiers.evict(prompt, b"", 0, True, lambda: ended.append(rig.tiers.lingers(prompt, b"", 0)))
    rig.settle()
    assert ended == [True] and rig.tiers.where(prompt, b"").disk == 0
    files.heal()
    for _ in range(120):
        time.seconds += 1
        store.tend()
    assert not rig.tiers.lingers(prompt, b"", 0)
    assert not [path for path in files.files(stored.FOLDER) if len(path.parent.name) == 1]


def test_kv_stored_again_after_a_deletion_is_not_reported_as_lingering() -> None:
    """It extended that context before the writer reached the drop.

    A healthy disk was then reported as failing to erase.
    """
    prompt = [(7 * n) % 61 for n in range(100)]
    ended, files, info = list[bool](), CrashFiles(), Rig(None).engine.info
    store = stored.open_store(files, stored.Time(), identity=info.identity, codec=Raw(info.block_bytes))
    rig = Rig({"disk": store}, blocks=40)
    assert rig.tiers is not None
    rig.ask(prompt)
    rig.tiers.evict(prompt, b"", 0, True, lambda: ended.append(rig.tiers.lingers(prompt, b"", 0)))
    again = rig.add(prompt, 3)
    while not rig.outputs[again] or rig.outputs[again][-1].finish is None:
        rig.step()
    rig.add([(5 * n) % 59 for n in range(120)], 3, stored=False)  # needs its blocks
    rig.step()
    while rig.tiers.writer.work():
        pass
    assert store.stats().chunks and not ended, "nothing was stored between the drop and its answer"
    rig.tiers.turn(False)
    assert ended == [False]


def reading(long: list[int], stored: list[int]) -> tuple[Rig, int]:
    """Return a rig that reads a long prompt in steps of 32 tokens, over a store with another context."""
    how = {"blocks": 800, "context": 2000}
    rig = Rig({"disk": known(stored, **how)}, **how, scheduling=Limits(step_tokens=32))
    slow = rig.add(long)
    rig.step()
    return rig, slow


def test_a_stored_context_does_not_wait_until_a_long_prompt_is_read() -> None:
    """Nearly all of it is stored: it is loaded beside the other's steps, and its few new tokens take part of one."""
    rng = random.Random(5)
    prompt, long = tokens(rng, 320), tokens(rng, 1200)
    rig, slow = reading(long, prompt)
    asked = rig.add([*prompt, 1, 2, 3])
    while not (rig.outputs[slow] or (rig.outputs[asked] and rig.outputs[asked][-1].finish)):
        rig.step()
        rig.threads()
    assert not rig.outputs[slow] and rig.check(asked, [*prompt, 1, 2, 3], 3).disk >= 304
    rig.settle()
    rig.check(slow, long, 3)


def test_a_prompt_that_stays_long_is_loaded_when_its_turn_comes() -> None:
    """Loaded earlier, it would occupy the pool for nobody and might be evicted again."""
    rng = random.Random(6)
    prompt, long = tokens(rng, 320), tokens(rng, 600)
    rig, slow = reading(long, prompt[:80])
    asked = rig.add(prompt)
    while not rig.outputs[slow]:
        assert not rig.tiers.loading
        rig.step()
        rig.threads()
    rig.settle()
    assert rig.check(asked, prompt, 3).disk >= 64


def test_loaded_chunks_are_held_however_long() -> None:
    """The prompt came while it was loaded; short ones took its blocks before its turn, and it was recomputed."""
    rng = random.Random(7)
    prompt, long = tokens(rng, 360), tokens(rng, 1200)
    how = {"blocks": 480, "context": 2000}
    rig = Rig({"disk": known(prompt[:320], **how)}, **how, scheduling=Limits(step_tokens=64))
    asked = rig.add(prompt)
    rig.step()
    assert rig.tiers is not None and rig.tiers.loading
    slow = rig.add(long)
    while not rig.outputs[asked]:
        rig.add(tokens(rng, 20), 12, stored=False)
        rig.step()
        rig.threads()
    rig.settle()
    assert rig.check(asked, prompt, 3).disk == 320
    rig.check(slow, long, 3)
