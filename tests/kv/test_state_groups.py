"""Recurrent states in the cache: when they are found, which are kept, and how they come back from a store."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from cairn.engine.fake import STATE
from cairn.kv.disk.codec import Raw, state_groups
from cairn.kv.disk.index import DOUBLE_SECONDS
from cairn.kv.disk.store import DiskStore
from cairn.kv.pool.cache import Cache
from cairn.kv.ram import RamStore
from cairn.kv.tiers.write_behind import WriteLimits
from cairn.scheduler.step_budget import Limits
from cairn.types.outputs import FinishReason
from cairn.types.request import SamplingParams
from cairn.types.stats import Miss
from tests.files import CrashFiles
from tests.kv import stored
from tests.kv.tiered import SIZE, Rig

CHUNK = 4 * SIZE
HYBRID = (0, STATE)
EVERY = [(0, STATE), (STATE, 0), (STATE,), (0, 6, STATE), (STATE, 0, STATE)]
"""Groups in which states decide what is found, and a model without KV."""


def tokens(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(64) for _ in range(count)]


def answer(rig: Rig, prompt: Sequence[int], count: int) -> list[int]:
    return rig.engine.oracle(prompt, SamplingParams(max_tokens=count), count)


def snapshots(rig: Rig, prompt: Sequence[int], group: int = 1) -> list[int]:
    """Return the numbers of tokens after which the pool has a context's state."""
    context, pool = rig.cache.context(b""), rig.cache.pools[group]
    ends = range(SIZE, len(prompt) + 1, SIZE)
    keys = ((end, context.chains[group].key(end // SIZE - 1, prompt)) for end in ends)
    return [end for end, key in keys if pool.find(key, prompt[end - SIZE : end]) is not None]


@pytest.mark.parametrize("windows", EVERY)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65, 99])
def test_the_next_turn_begins_at_the_last_block_before_the_prompts_end(windows: tuple[int, ...], length: int) -> None:
    rig = Rig(None, windows=windows)
    prompt = tokens(length)
    assert rig.ask(prompt, count=1).computed == length
    longer = [*prompt, *tokens(9, 1)]
    assert rig.ask(longer).pool == length // SIZE * SIZE
    # The same again: only whole states are of use, so the tokens after the last one are computed.
    assert rig.ask(prompt, count=1).pool == (length - 1) // SIZE * SIZE


def test_a_state_is_kept_at_an_answers_end_but_not_before() -> None:
    rig = Rig(None, windows=HYBRID)
    prompt = tokens(20)
    said = answer(rig, prompt, 60)
    rig.ask(prompt, count=60)
    whole = prompt + said
    assert snapshots(rig, whole) == [16, 64, 76], "of 80 tokens, the last was never computed"
    assert rig.ask([*whole, *tokens(5, 1)]).pool == 76


def test_the_third_prompt_begins_where_the_first_two_part() -> None:
    rig = Rig(None, windows=HYBRID)
    shared = tokens(70)
    first, second, third = ([*shared, *tokens(30, seed)] for seed in (1, 2, 3))
    rig.ask(first)
    report = rig.ask(second)
    assert report.pool == 0 and report.miss == Miss(position=0, reason="no snapshot")
    assert 64 in snapshots(rig, second)
    report = rig.ask(third)
    assert report.pool == 64 and report.miss == Miss(position=64, reason="no snapshot")


def test_a_model_without_kv_finds_the_branch_point_too() -> None:
    rig = Rig(None, windows=(STATE,))
    shared = tokens(70)
    for seed, pool in ((1, 0), (2, 0), (3, 64)):
        assert rig.ask([*shared, *tokens(30, seed)]).pool == pool


@pytest.mark.parametrize("windows", EVERY)
def test_prompts_that_come_together_compute_their_beginning_once(windows: tuple[int, ...]) -> None:
    """The second asks the first to keep a snapshot where it needs one, before the first gets there."""
    rig = Rig(None, windows=windows, blocks=200)
    shared = tokens(70)
    prompts = [[*shared, *tokens(30, seed)] for seed in range(4)]
    ids = [rig.add(prompt) for prompt in prompts]
    rig.settle()
    reports = [rig.check(id, prompt, 3) for id, prompt in zip(ids, prompts, strict=True)]
    assert [report.pool for report in reports] == [0, 64, 64, 64]


def test_choices_of_one_prompt_share_it() -> None:
    rig = Rig(None, windows=HYBRID, blocks=200)
    prompt = tokens(50)
    ids = [rig.add(prompt) for _ in range(3)]
    rig.settle()
    assert [rig.check(id, prompt, 3).pool for id in ids] == [0, 48, 48]


def test_a_long_prompt_that_is_interrupted_begins_at_the_last_snapshot_on_its_way() -> None:
    rig = Rig(None, windows=HYBRID, blocks=200, scheduling=Limits(step_tokens=32))
    rig.cache = Cache(rig.engine.info, 2 * 4)
    rig.scheduler._cache = rig.cache
    prompt = tokens(300)
    id = rig.add(prompt)
    for _ in range(4):
        rig.step()
    computed = rig.scheduler._sequences[id].computed
    assert 64 <= computed < 300 - CHUNK
    rig.scheduler.drop(id, FinishReason.CANCELLED)
    assert rig.ask(prompt).pool == computed // 32 * 32
    assert len(snapshots(rig, prompt)) <= 9, "fewer the longer ago"


@pytest.mark.parametrize("windows", EVERY)
@pytest.mark.parametrize("length", [16, 17, 31, 33, 64, 65, 99])
def test_states_come_back_from_a_store(windows: tuple[int, ...], length: int) -> None:
    store, prompt = RamStore(1 << 30), tokens(length)
    Rig({"disk": store}, windows=windows).ask(prompt)
    report = Rig({"disk": store}, windows=windows).ask(prompt)
    assert report.disk == (length - 1) // CHUNK * CHUNK


def disk(files: CrashFiles, windows: Sequence[int] = HYBRID, budget: int | None = None) -> DiskStore:
    info = Rig(None, windows=windows).engine.info
    codec = Raw(info.block_bytes, state_groups(info.groups))
    return stored.open_store(files, stored.Time(), identity=info.identity, codec=codec, budget=budget)


@pytest.mark.parametrize("windows", EVERY)
def test_after_a_restart_a_turn_computes_its_new_tokens_and_those_since_the_last_snapshot(
    windows: tuple[int, ...],
) -> None:
    files, context = CrashFiles(), tokens(40)
    for turn in range(6):
        store = disk(files, windows)
        rig = Rig({"disk": store}, windows=windows, blocks=200)  # another worker, whose pools are empty
        new = tokens(11, turn)
        report = rig.ask([*context, *new], count=25)
        if turn:
            # The turn before left a snapshot at the last computed boundary: all but its last token.
            assert report.disk == (len(context) - 1) // CHUNK * CHUNK
            assert report.computed <= len(new) + CHUNK
        context = [*context, *new, *answer(rig, [*context, *new], 25)]
        rig.settle()
        store.close()


def test_only_a_turns_end_is_stored_of_what_an_answer_passes() -> None:
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=200)
    prompt = tokens(20)
    id = rig.add(prompt, 200)
    for _ in range(150):
        rig.step()
        rig.threads()
        rig.clock.time += 3.0  # chunks are copied although the loop is busy
    states = [chunk for chunk in store._chunks.values() if chunk.group == 1]
    assert [chunk.depth for chunk in states] == [16]
    assert sum(chunk.group == 0 for chunk in store._chunks.values()) > 8
    rig.settle()
    rig.check(id, prompt, 200)
    assert sorted(chunk.depth for chunk in store._chunks.values() if chunk.group == 1) == [16, 208]


def test_the_kv_is_in_the_pool_and_the_state_in_the_store() -> None:
    """States are evicted sooner, since their pool is small."""
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=(400, 3))
    prompt = tokens(100)
    rig.ask(prompt)
    for seed in range(1, 4):
        rig.ask(tokens(40, seed))
    assert snapshots(rig, prompt) == []
    assert rig.tiers is not None
    read = store.stats().read
    report = rig.ask(prompt)
    assert report.computed == 4 and report.pool == 96 and report.load > 0
    assert store.stats().read - read == 8 + 1024, "one state is read, and none of the KV"
    assert rig.tiers.stats().loaded == 0 and rig.tiers.stats().abandoned == 0


def test_evicted_kv_takes_its_states_along() -> None:
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=200)
    assert rig.tiers is not None
    prompt = tokens(100)
    said = answer(rig, prompt, 60)
    rig.ask(prompt, count=60)
    done: list[int] = []
    rig.tiers.evict([*prompt, *said[:4]], b"", 32, True, lambda: done.append(1))
    rig.settle()
    assert done and sorted((chunk.group, chunk.depth) for chunk in store._chunks.values()) == [(0, 0), (0, 16)]
    assert snapshots(rig, prompt + said) == [144, 156], (
        "the pool gives up what was named; the rest is found by nobody's key"
    )


def test_a_pin_holds_the_existing_states() -> None:
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=200)
    assert rig.tiers is not None
    prompt = tokens(105)
    rig.ask(prompt)
    rig.tiers.pin("ada", prompt, b"", lambda: None)
    rig.settle()
    states = [key for key, chunk in store._chunks.items() if chunk.group == 1]
    assert len(states) == 1 and states[0] in store._pins["ada"]
    assert len(store._pins["ada"]) == 7 + 2, "and the tail, with its state, that will be there"


def test_stored_tokens_are_counted_up_to_a_state() -> None:
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=200)
    assert rig.tiers is not None
    prompt = tokens(105)
    rig.ask(prompt)
    assert rig.tiers.where(prompt, b"").disk == 96
    (state,) = (key for key, chunk in store._chunks.items() if chunk.group == 1)
    store.drop([state])
    assert rig.tiers.where(prompt, b"").disk == 0


def test_a_store_that_lost_a_state_gives_up_to_an_earlier_one() -> None:
    store = RamStore(1 << 30)
    prompt = tokens(105)
    first = Rig({"disk": store}, windows=HYBRID, blocks=200)
    first.ask(prompt[:50])
    first.ask(prompt)
    last = max((chunk for chunk in store._chunks.values() if chunk.group == 1), key=lambda chunk: chunk.depth)
    assert last.depth == 96
    store.drop([last.key])
    assert Rig({"disk": store}, windows=HYBRID, blocks=200).ask(prompt).disk == 48


def test_a_state_is_copied_before_its_pool_needs_the_block() -> None:
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=(400, 3), limits=WriteLimits(queue_bytes=1 << 20))
    prompts = [tokens(40, seed) for seed in range(6)]
    for prompt in prompts:
        id = rig.add(prompt)
        while not rig.scheduler.idle:
            rig.step()  # no thread runs
        rig.check(id, prompt, 3)
    rig.settle()
    assert sum(chunk.group == 1 for chunk in store._chunks.values()) == 6


@pytest.mark.parametrize("windows", EVERY)
def test_sequences_that_run_need_two_states_each_and_no_more(windows: tuple[int, ...]) -> None:
    """Without room for snapshots none are made; nobody is preempted for one."""
    blocks = [2 if window == STATE else 200 for window in windows]
    rig = Rig(None, windows=windows, blocks=blocks)
    prompt = tokens(90)
    assert rig.ask(prompt, count=40).computed == 90
    rig = Rig(None, windows=windows, blocks=[8 if window == STATE else 200 for window in windows])
    prompts = [tokens(30 + seed, seed) for seed in range(3)]
    ids = [rig.add(prompt, 30) for prompt in prompts]
    rig.settle()
    for id, prompt in zip(ids, prompts, strict=True):
        rig.check(id, prompt, 30)
    assert rig.scheduler.stats().preemptions == 0


def test_sixty_tools_under_eviction_pressure_give_the_answers_of_an_empty_cache() -> None:
    """Sixty tools in the system part of many conversations, in pools and stores that hold a few of them."""
    chance = random.Random(60)
    tools = [token for number in range(60) for token in tokens(12, 1000 + number)]
    files = CrashFiles()
    store = disk(files, budget=250 * 4096)
    rig: Rig | None = None
    contexts = [[*tools, *tokens(chance.randint(5, 90), seed)] for seed in range(8)]
    computed = whole = loaded = 0
    for turn in range(60):
        if rig is None or turn % 20 == 0:
            ram = RamStore(80_000)
            rig = Rig({"ram": ram, "disk": store}, windows=HYBRID, blocks=(320, 12), context=4096)
        at = chance.randrange(len(contexts))
        prompt, count = contexts[at], chance.randint(2, 20)
        report = rig.ask(prompt, count=count)  # compares with an empty cache
        computed, whole, loaded = computed + report.computed, whole + len(prompt), loaded + report.ram + report.disk
        contexts[at] = [*prompt, *answer(rig, prompt, count), *tokens(chance.randint(1, 30), turn)]
        if chance.random() < 0.1:  # the tools change: nothing after them can be reused
            contexts[at] = [*tools[:300], *tokens(40, turn), *tools[300:], *contexts[at][-30:]]
        if chance.random() < 0.2:  # a rollback
            contexts[at] = contexts[at][: chance.randint(720, len(contexts[at]))]
    assert store.stats().evicted > 0 and loaded > whole / 20
    assert computed < whole / 3, "most of it was cached"


def test_kv_that_leaves_the_pool_while_the_state_is_read_ends_the_load() -> None:
    store = RamStore(1 << 30)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=(400, 3))
    assert rig.tiers is not None
    prompt = tokens(100)
    rig.ask(prompt)
    for seed in range(1, 4):
        rig.ask(tokens(40, seed))
    id = rig.add(prompt)
    rig.step()  # the load begins
    assert rig.tiers.loading
    rig.cache.forget(rig.cache.context(b""), prompt, 32)
    rig.settle()
    assert rig.check(id, prompt, 3).computed in (100, 68, 4)


def test_prefetched_kv_comes_with_its_state() -> None:
    store = RamStore(1 << 30)
    prompt = tokens(100)
    Rig({"disk": store}, windows=HYBRID, blocks=200).ask(prompt)
    rig = Rig({"disk": store}, windows=HYBRID, blocks=200)
    assert rig.tiers is not None
    done: list[int] = []
    rig.tiers.prefetch(prompt, b"", lambda: done.append(1))
    rig.settle()
    while rig.tiers.loading:
        rig.settle()
    rig.settle()
    assert done and rig.cache.found(rig.cache.context(b""), prompt) == 96
    assert rig.ask(prompt).pool == 96


def test_a_state_goes_when_its_kv_does_and_not_days_before() -> None:
    """On disk, with realistic proportions: a state is as large as the KV of thousands of tokens."""
    time, files = stored.Time(), CrashFiles()
    codec = Raw((1 << 14, 50 << 16), (1,))

    def open_it(budget: int) -> DiskStore:
        return stored.open_store(files, time, codec=codec, budget=budget)

    store = open_it(1 << 30)
    old = stored.chain(20, size=1 << 16)
    (state,) = stored.chain(1, salt=b"state", size=50 << 16, after=old[-1])
    state = dataclasses.replace(state, tokens=old[-1].tokens, group=1)
    assert store.keep([*old, state]) == 21
    for _ in range(2):  # as written, and as a start finds it
        worth = {one.name.key: one.worth - one.used for one in store._state.index.live()}
        assert abs(worth[state.key] - worth[old[-1].key]) <= DOUBLE_SECONDS
        store.close()
        store = open_it(1 << 30)
