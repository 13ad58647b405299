"""One folder for all models of a user: stores elsewhere in it are found, and all share one byte budget.

Here a chunk takes one disk block, and so does the marker of a store.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from cairn.kv.disk.codec import Raw
from cairn.kv.disk.model_folders import places
from cairn.kv.disk.store import DiskStore
from cairn.kv.pool.prefix import Layout
from cairn.kv.tiers.store import Chunk
from cairn.types.errors import ConfigError, Conflict
from cairn.types.model_spec import CacheGroup
from tests.files import CrashFiles, Fault
from tests.kv.stored import FOLDER, SIZE, Time, chain, keys, open_store

USUAL, TWIN, *_ = places(FOLDER, b"weights" * 4)
OTHER, *_ = places(FOLDER, b"other" * 4)
DAY = 86_400.0


def opened(files: CrashFiles, time: Time, place: Path = USUAL, **how: Any) -> DiskStore:
    return open_store(files, time, folder=place, home=FOLDER, **how)


def found(store: DiskStore, chunks: list[Chunk]) -> int:
    count = store.match_prefix(keys(chunks))
    assert [store.fetch(chunk.key, chunk.tokens) for chunk in chunks[:count]] == chunks[:count]
    return count


def stored_before(files: CrashFiles, time: Time, chunks: list[Chunk], **how: Any) -> None:
    """Store chunks as a server with one model did before models had folders of their own."""
    store = open_store(files, time, **how)
    assert store.keep(chunks) == len(chunks)
    store.close()


def test_kv_stored_before_model_folders_is_found_with_its_pins() -> None:
    time = Time()
    files, mine, theirs = CrashFiles(now=time.now), chain(3), chain(2, salt=b"other")
    stored_before(files, time, theirs, identity=b"another", model="another")
    store = open_store(files, time)
    store.keep(mine)
    store.pin("ada", keys(mine))
    store.close()
    store = opened(files, time)
    assert found(store, mine) == 3 and store.stats().pinned == 3
    assert not [path for path in files.files(FOLDER / "pins")]
    store.close()
    other = opened(files, time, OTHER, identity=b"another", model="another")
    assert found(other, theirs) == 2, "it has waited for its model"
    other.close()
    assert all("/models/" in str(path) for path in files.files(FOLDER) if path.name.count(".") == 4)


def test_chunks_of_other_kernels_move_along_so_that_they_can_be_erased() -> None:
    time = Time()
    files, chunks = CrashFiles(now=time.now), chain(2)
    stored_before(files, time, chunks, identity=b"other kernels")
    store = opened(files, time)
    store.drop_of_other_engines(lambda identity: keys(chunks) if identity == b"other kernels" else [])
    assert not [path for path in files.files(FOLDER) if path.name.count(".") == 4]


def test_a_second_process_chunks_are_merged_once_it_has_ended() -> None:
    time = Time()
    files, one, two = CrashFiles(now=time.now), chain(2), chain(3, salt=b"two")
    first = opened(files, time)
    with pytest.raises(Conflict):
        opened(files, time)
    second = opened(files, time, TWIN)
    first.keep(one)
    second.keep([*one, *two])
    first.close()
    first = opened(files, time)
    assert (found(first, one), found(first, two)) == (2, 0), "it is in use"
    assert found(second, two) == 3
    first.close()
    second.close()
    first = opened(files, time)
    assert (found(first, one), found(first, two)) == (2, 3)
    assert len(files.files(TWIN)) == 2, "only its marker and the lock are left"


def test_a_crash_during_the_merge_loses_nothing() -> None:
    for seed in range(60):
        time, rng = Time(), random.Random(seed)
        files = CrashFiles(seed=seed, now=time.now)
        mine, more = chain(3), chain(3, salt=b"more")
        stored_before(files, time, mine)
        twin = opened(files, time, TWIN)
        twin.keep(more)
        twin.pin("ada", keys(more))
        twin.close()
        after = files.crash_while(rng, 40, lambda: opened(files, time))  # noqa: B023
        store = opened(after, time)
        assert (found(store, mine), found(store, more)) == (3, 3), seed
        assert store.stats().pinned == 3, seed
        store.close()
        again = opened(after.crash(rng), time)
        assert (found(again, mine), found(again, more)) == (3, 3), seed


def test_all_stores_share_one_budget_and_unused_ones_give_way() -> None:
    """The least recently used goes first, and never a pinned one."""
    time, budget, other_model = Time(), 13 * 4096, {"identity": b"another", "model": "another"}
    files = CrashFiles(now=time.now)
    old, recent, new = chain(4, salt=b"old"), chain(4, salt=b"recent"), chain(10, salt=b"new")
    stored_before(files, time, old)
    time.sleep(DAY)
    other = opened(files, time, OTHER, budget=budget, **other_model)
    other.keep(recent)
    other.pin("ada", keys(recent[:2]))
    other.close()
    time.sleep(DAY)
    store = opened(files, time, places(FOLDER, b"third" * 4)[0], budget=budget, identity=b"third", model="third")
    store.keep(new[:6])
    store.tend()
    assert len([path for path in files.files(FOLDER) if path.name.count(".") == 4]) == 12
    store.keep(new)
    store.tend()
    store.close()
    assert found(opened(files, time, budget=budget), old) == 0
    assert found(opened(files, time, OTHER, budget=budget, **other_model), recent) == 2, "so much is pinned"


def test_stores_that_are_in_use_together_keep_to_the_budget() -> None:
    time, budget = Time(), 17 * 4096
    files, one, two = CrashFiles(now=time.now), chain(10, salt=b"one"), chain(10, salt=b"two")
    first = opened(files, time, budget=budget)
    first.keep(one)
    second = opened(files, time, OTHER, budget=budget, identity=b"another")
    second.tend()
    second.keep(two)
    first.tend()
    assert found(first, one) == 10 and found(second, two) == 6


def test_unused_kv_of_any_model_ages_but_not_during_a_long_rest() -> None:
    time, ttl, third = Time(), 10 * DAY, places(FOLDER, b"third" * 4)[0]
    files, old, recent = CrashFiles(now=time.now), chain(2, salt=b"old"), chain(2, salt=b"recent")
    stored_before(files, time, old)
    time.sleep(4 * DAY)
    other = opened(files, time, OTHER, identity=b"another", model="another", ttl=ttl)
    other.keep(recent)
    other.close()
    time.sleep(40 * DAY)
    store = opened(files, time, third, identity=b"third", model="third", ttl=ttl)
    store.tend()
    left = [path.name.partition(".")[0] for path in files.files(FOLDER) if path.name.count(".") == 4]
    assert {key.hex() for key in keys([*old, *recent])} == set(left), "nothing was used meanwhile"
    time.sleep(7 * DAY)
    store.tend()
    left = [path.name.partition(".")[0] for path in files.files(FOLDER) if path.name.count(".") == 4]
    assert {key.hex() for key in keys(recent)} == set(left)


def test_a_folder_that_is_no_store_is_refused_or_set_aside_but_not_from_under_a_store() -> None:
    time = Time()
    files = CrashFiles(now=time.now)
    files.make_folder(FOLDER)
    files.put(FOLDER / "letter", b"not a store")
    with pytest.raises(ConfigError, match="kv_dir: /kv is not empty and not a KV store"):
        opened(files, time)
    store = opened(files, time, fresh=True)
    files.chmod(FOLDER, 0o755)
    with pytest.raises(Conflict, match="in use by other processes"):
        opened(files, time, OTHER, fresh=True)
    assert store.keep(chain(1)) == 1


THIRD = b"third" * 7
LAYOUT = Layout(16, (CacheGroup(kind="full", layers=(0, 1)),))


def context(count: int) -> tuple[tuple[int, ...], list[Chunk]]:
    """Return token ids, and the chunks that an engine makes of them."""
    ids = tuple(range(64 * count))
    chunks, before = list[Chunk](), b""
    for number, key in enumerate(LAYOUT.keys(b"engine", b"salt", ids, 0)[3::4]):
        chunks.append(Chunk(key, before, ids[64 * number : 64 * number + 64], 64 * number, bytes(400)))
        before = key
    return ids, chunks


def test_a_context_of_a_model_that_is_not_served_is_erased_beside_another_but_for_what_others_need() -> None:
    time = Time()
    for seed in range(8):
        files, (ids, chunks), rng = CrashFiles(seed=seed, now=time.now), context(4), random.Random(seed)
        place, twin, *_ = places(FOLDER, THIRD)
        for where, part in ((place, chunks), (twin, chunks[:3])):
            store = opened(files, time, where, identity=b"engine", layout=LAYOUT)
            store.keep(part)
            store.pin("ada", keys(part))
            store.close()
        other = opened(files, time, OTHER)
        assert other.erase_of_model(THIRD, b"another tenant", ids, 0)
        assert len([path for path in files.files(FOLDER) if path.name.count(".") == 4]) == 7
        other.pin("ada", ())
        assert not other.unsaved("ada") and not list(files.files(place / "pins")) + list(files.files(twin / "pins"))
        assert other.erase_of_model(THIRD, b"salt", ids, 130)
        after = files.crash(rng)
        left = [path.name.partition(".")[0] for path in after.files(FOLDER) if path.name.count(".") == 4]
        assert {bytes.fromhex(name) for name in left} == set(keys(chunks[:3])), seed
        assert found(opened(after, time, place, identity=b"engine", layout=LAYOUT), chunks) == 3
        assert other.erase_of_model(b"never served" * 3, b"salt", ids, 0)


def test_a_store_in_use_is_erased_by_its_owner() -> None:
    time = Time()
    files, (ids, chunks) = CrashFiles(now=time.now), context(2)
    store = opened(files, time, places(FOLDER, THIRD)[0], identity=b"engine", layout=LAYOUT)
    store.keep(chunks)
    store.pin("ada", keys(chunks))
    other = opened(files, time, OTHER)
    assert not other.erase_of_model(THIRD, b"salt", ids, 0) and found(store, chunks) == 2
    other.pin("ada", ())
    assert other.unsaved("ada")
    store.pin("ada", ())
    other.tend()
    assert not other.unsaved("ada")


def test_a_disk_that_refuses_has_erased_nothing() -> None:
    time = Time()
    files, (ids, chunks) = CrashFiles(now=time.now), context(2)
    store = opened(files, time, places(FOLDER, THIRD)[0], identity=b"engine", layout=LAYOUT)
    store.keep(chunks)
    store.close()
    other = opened(files, time, OTHER)
    files.fail(Fault(files.calls + 60, errno.EIO, sticky=True))
    assert not other.erase_of_model(THIRD, b"salt", ids, 0)
    files.heal()
    time.sleep(100)
    other.tend()
    assert other.erase_of_model(THIRD, b"salt", ids, 0)
    assert not [path for path in files.files(FOLDER) if path.name.count(".") == 4]


def test_a_context_is_found_by_its_tokens_if_no_store_has_the_models_name() -> None:
    """It was stored with unknown adapters, so nobody knows its salt."""
    time = Time()
    for seed in range(6):
        files, (ids, chunks), rng = CrashFiles(seed=seed, now=time.now), context(5), random.Random(seed)
        own = opened(files, time, OTHER, identity=b"engine", layout=LAYOUT)
        store = opened(files, time, places(FOLDER, THIRD)[0], identity=b"engine", layout=LAYOUT)
        for one in (own, store):
            one.keep([*chunks, *chain(2)])
        own.pin("ada", keys(chunks))
        assert own.erase_of_model(b"adapted" * 5, b"salt", ids, 0, None), "nothing is looked for"
        assert found(own, chunks) == 5
        assert own.erase_of_model(b"adapted" * 5, b"salt", ids, 130, [b"other" * 4, THIRD]), "the rest is another's"
        assert found(own, chunks) == 3 and found(store, chunks) == 5
        assert not own.erase_of_model(b"adapted" * 5, b"salt", ids, 0, [b"other" * 4]), "the other store is in use"
        assert found(own, chunks) == 0 and found(store, chunks) == 5
        store.close()
        assert own.erase_of_model(b"adapted" * 5, b"salt", ids, 0, [b"other" * 4])
        assert own.erase_of_model(THIRD, b"another tenant", tuple(chain(1)[0].tokens), 0, []), "its store has its name"
        after = files.crash(rng)
        left = [path.name.partition(".")[0] for path in after.files(FOLDER) if path.name.count(".") == 4]
        assert sorted(left) == sorted(key.hex() for key in 2 * keys(chain(2))), seed


def test_what_a_context_does_not_begin_with_is_not_found_by_its_tokens() -> None:
    time = Time()
    files, (ids, chunks) = CrashFiles(now=time.now), context(3)
    store = open_store(files, time, identity=b"engine", layout=LAYOUT)
    store.keep(chunks)
    for other in ((*ids[:63], 7, *ids[64:]), ids[64:], ids[:48], ()):
        assert store.erase_of_model(b"adapted" * 5, b"salt", other, 0, []) and found(store, chunks) == 3
    assert store.erase_of_model(b"adapted" * 5, b"salt", (*ids[:128], *ids[:64]), 0, [])
    assert found(store, chunks) == 0, "the third extends what is erased"


def test_states_are_found_by_their_tokens_through_the_kv_that_they_extend() -> None:
    time = Time()
    files, (ids, chunks) = CrashFiles(now=time.now), context(2)
    store = open_store(files, time, identity=b"engine", codec=Raw([SIZE // 4, SIZE // 4]))
    state = Chunk(b"s" * 32, chunks[1].key, ids[64:128], 128, bytes(SIZE), 1)
    alone = Chunk(b"a" * 32, b"", ids[64:128], 128, bytes(SIZE), 1)
    assert store.keep([*chunks, state, alone]) == 4
    assert store.erase_of_model(b"adapted" * 5, b"salt", ids, 64, [])
    assert [store.has(one.key) for one in (*chunks, state, alone)] == [True, False, False, False]


def test_a_search_that_the_disk_refuses_has_erased_nothing() -> None:
    time = Time()
    files, (ids, chunks) = CrashFiles(now=time.now), context(2)
    store = open_store(files, time, identity=b"engine", layout=LAYOUT)
    store.keep(chunks)
    files.fail(Fault(files.calls, errno.EIO, sticky=True))
    assert not store.erase_of_model(b"adapted" * 5, b"salt", ids, 0, [])
    files.heal()
    time.sleep(100)
    store.tend()
    assert store.erase_of_model(b"adapted" * 5, b"salt", ids, 0, [])
    assert not [path for path in files.files(FOLDER) if path.name.count(".") == 4]
