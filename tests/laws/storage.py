"""The disk store on a disk that crashes, forgets, fails and lies: one workload from one seed, and its laws.

Whatever the disk does, `fetch` returns the chunk that was kept, bit for bit, or nothing. Chunks that `keep` reported
survive a crash at any moment unless they were evicted or dropped before; dropped chunks do not come back; pins hold;
the bytes on disk match the count and stay within the budget; and a store that stopped for a disk fault works again when
the disk does.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import random
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from cairn.kv.disk.codec import Raw
from cairn.kv.disk.folder import PINS
from cairn.kv.disk.store import DiskStore
from cairn.kv.tiers.store import HEAD_BYTES, Chunk
from tests.files import BLOCK, CrashFiles, Fault, corrupted
from tests.kv.stored import FOLDER, Time, chain, on_disk, open_store
from tests.laws.simulator import law

SIZES = (64, 5000, 5000)
"""Bytes of a chunk in each group: one disk block, or two. The last group holds states, of one page."""
STATE = 2
BUDGET = 22 * BLOCK
STEPS = 25
ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT)
TTL = 100_000.0


def start(files: CrashFiles, time: Time, budget: int = BUDGET) -> DiskStore:
    """Open a store as at a start of the server."""
    codec = Raw([size if group == STATE else size // 4 for group, size in enumerate(SIZES)], (STATE,))
    return open_store(files, time, codec=codec, budget=budget, ttl=TTL)


def chunk_files(files: CrashFiles) -> dict[bytes, Path]:
    """Return the file of each chunk, by key."""
    paths = {}
    for path in files.files(FOLDER):
        parts = path.name.split(".")
        if len(parts) in (5, 6) and path.parent.name == path.name[0]:
            paths[bytes.fromhex(parts[0])] = path
    return paths


class Work:
    """A store in use, and a model of what it was given."""

    def __init__(self, files: CrashFiles, time: Time, seed: int) -> None:
        self.files, self.time, self.rng = files, time, random.Random(seed)
        self.offered: dict[bytes, Chunk] = {}
        """Every chunk that was ever handed to the store."""
        self.whole: dict[bytes, tuple[bytes, int]] = {}
        """For each tail, the chunk that it begins and its number of blocks."""
        self.kept: set[bytes] = set()
        """Keys that `keep` reported and nobody dropped; one without a file was evicted."""
        self.erased: set[bytes] = set()
        """Keys that were dropped and not handed over again."""
        self.pins: dict[str, frozenset[bytes]] = {}
        self.pinning = ""
        """Owner whose pins are being changed."""
        self.used: dict[bytes, float] = {}
        self.sound = True
        """Whether the disk has not failed or lied yet."""
        self.lying = False
        """Whether files are damaged behind the store's back."""
        self.pins_known = True
        self.store = start(files, time)

    # --------------------------------------------------------------------------------------------------------- steps

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step()
            self.check()

    def step(self) -> None:
        """Make one random call."""
        self.time.sleep(self.rng.choice((0.5, 70.0)))
        calls: list[tuple[int, Callable[[], None]]] = [
            (12, self.keep),
            (5, self.fetch),
            (3, self.drop),
            (3, self.pin),
            (2, self.tend),
            (2, self.restart),
        ]
        [call] = self.rng.choices([call for _, call in calls], [weight for weight, _ in calls])
        call()

    def keep(self) -> None:
        rng = self.rng
        there = [self.offered[key] for key in chunk_files(self.files) if key in self.kept]
        after = rng.choice(there) if there and rng.random() < 0.7 else None
        goes_on = after is not None and after.key in self.whole
        chunks = [self.longer(after)] if after is not None and goes_on else self.more(after)
        for chunk in chunks:
            self.offered[chunk.key] = chunk
            self.erased.discard(chunk.key)
        before, evicted, pinned = chunk_files(self.files), self.store.stats().evicted, self.protected()
        count = self.store.keep(chunks)
        law(0 <= count <= len(chunks), "keep counts more than it was given")
        self.kept.update(chunk.key for chunk in chunks[:count])
        for chunk in chunks[:count]:
            self.used[chunk.key] = self.time.now()
            law(self.lying or self.is_there(chunk.key), "a chunk that keep reports has no file")
        if self.sound:
            there = chunk_files(self.files)
            for chunk in chunks[:count]:
                law(
                    self.store.fetch(chunk.key, chunk.tokens) == (chunk if chunk.key in there else None),
                    "a kept chunk is not returned",
                )
            law(not any(self.replaced(key, there) for key in there), "a tail beside a longer chunk")
            law(
                count == len(chunks) or self.crowded(after) or self.hangs(chunks[count]),
                "a chunk was refused without a reason",
            )
            gone = set(before) - set(there)
            taken = {one for key in gone if self.replaced(key, there) for one in self.family(key) & gone}
            law(not (gone - taken) & pinned, "a pinned chunk was evicted")
            counted = self.store.stats().evicted - evicted
            law(len(gone - taken) <= counted <= len(gone), "evictions are miscounted")
            gone -= taken
            self.check_order(gone, {chunk.key for chunk in chunks}, sum(self.disk(key) for key in taken))
            for chunk in chunks[:count]:
                self.keep_part(chunk)

    def keep_part(self, chunk: Chunk) -> None:
        """Hand over a part of a stored chunk: it counts as kept, and nothing new is written."""
        there = chunk_files(self.files)
        if chunk.group != STATE and chunk.key in there and chunk.key not in self.whole:
            law(self.store.keep([self.tail(chunk, 1)]) == 1, "a part of a stored chunk is refused")
            law(chunk_files(self.files) == there, "a part of a stored chunk is written beside it")

    def more(self, after: Chunk | None) -> list[Chunk]:
        """Return some chunks of one group after this one; the last may be a tail, perhaps with a state."""
        rng = self.rng
        group = after.group if after else rng.randrange(2)
        chunks = [
            with_heads(Chunk(one.key, one.parent, one.tokens, one.depth, one.pages, group))
            for one in chain(rng.randrange(1, 5), salt=rng.randbytes(4), size=SIZES[group], after=after)
        ]
        if group != STATE and rng.random() < 0.5:
            chunks[-1] = self.tail(chunks[-1], rng.randrange(1, 4))
        if group != STATE and rng.random() < 0.3:
            [state] = chain(1, salt=b"state", size=SIZES[STATE], after=chunks[-1])
            chunks.append(Chunk(state.key, state.parent, chunks[-1].tokens, state.depth, state.pages, STATE))
        return [after, *chunks] if after else chunks

    def tail(self, chunk: Chunk, count: int) -> Chunk:
        """Return a chunk's first blocks as a tail."""
        keys = blocks_of(chunk)
        tokens, pages = chunk.tokens[: 16 * count], chunk.pages[: len(chunk.pages) // 4 * count]
        heads = tuple(key[:HEAD_BYTES] for key in keys[: count - 1])
        self.offered[chunk.key], self.whole[keys[count - 1]] = chunk, (chunk.key, count)
        return Chunk(keys[count - 1], chunk.parent, tokens, chunk.depth, pages, chunk.group, heads)

    def longer(self, tail: Chunk) -> Chunk:
        """Return a longer tail of the same chunk, or the chunk."""
        key, count = self.whole[tail.key]
        more = self.rng.randrange(count + 1, 5)
        return self.offered[key] if more == 4 else self.tail(self.offered[key], more)

    def replaced(self, key: bytes, there: Collection[bytes]) -> bool:
        """Return whether something longer that begins with this tail is stored."""
        whole, count = self.whole.get(key, (b"", 4))
        longer = [one for one, (other, blocks) in self.whole.items() if other == whole and blocks > count]
        return count < 4 and any(one in there for one in (whole, *longer))

    def is_there(self, key: bytes, files: CrashFiles | None = None) -> bool:
        there = chunk_files(files or self.files)
        return key in there or self.replaced(key, there)

    def hangs(self, chunk: Chunk) -> bool:
        """Return whether it extends a tail that is not stored itself."""
        return chunk.parent in self.whole and chunk.parent not in chunk_files(self.files)

    def crowded(self, after: Chunk | None) -> bool:
        """Return whether too little is evictable: less than a batch takes, beside pins and this chain."""
        protected = self.protected() | {one.key for one in self.path_to(after)} if after else self.protected()
        spare = BUDGET - sum(self.disk(key) for key in protected) - 4 * BLOCK
        return spare < 12 * BLOCK

    def check_order(self, gone: set[bytes], fresh: set[bytes], replaced: int) -> None:
        """Check that evicted chunks were used before every remaining leaf of their size.

        `replaced`: bytes of tails that were removed afterwards because something longer took their place.
        """
        held = chunk_files(self.files)
        law(not gone or BUDGET - on_disk(self.files) - replaced <= 3 * BLOCK, "more was evicted than had to go")
        parents = {self.offered[key].parent for key in held}
        leaves = held.keys() - parents - self.protected() - fresh - {self.offered[key].parent for key in fresh}
        # A chunk with a state was no leaf while the state was there, and states have an eviction order of their own.
        states = [self.offered[key] for key in gone if self.offered[key].group == STATE]
        leaves -= {one.key for state in states for one in self.path_to(state)}
        for one in gone:
            for leaf in leaves:
                same = self.offered[one].group == self.offered[leaf].group
                same = same and len(self.offered[one].tokens) == len(self.offered[leaf].tokens)
                law(
                    not same or self.last_use(one) <= self.last_use(leaf) + 61, "a leaf was evicted before an older one"
                )

    def last_use(self, key: bytes) -> float:
        """Return the last use of a chunk and of everything that extended it."""
        below = [self.last_use(one.key) for one in self.offered.values() if one.parent == key and one.key in self.kept]
        return max([self.used.get(key, 0.0), *below])

    def fetch(self) -> None:
        if not self.offered:
            return
        chunk = self.offered[self.rng.choice(sorted(self.offered))]
        there = chunk.key in chunk_files(self.files)
        got = self.store.fetch(chunk.key, chunk.tokens)
        law(got is None or got == chunk, "fetched bytes differ from those kept")
        law(not self.sound or (got is not None) == there, "a stored chunk is not returned")
        if got is not None:
            self.used[chunk.key] = self.time.now()
        wrong = (chunk.tokens[0] + 1, *chunk.tokens[1:])
        law(self.store.fetch(chunk.key, wrong) is None, "a chunk is returned for other tokens")
        path = self.path_to(chunk)
        hole = self.rng.randrange(len(path))
        keys = [one.key for one in path]
        law(
            self.store.match_prefix([*keys[:hole], bytes(32), *keys[hole:]]) <= hole, "leading keys go on beyond a hole"
        )
        count = self.store.match_prefix(keys)
        held = chunk_files(self.files)
        law(not self.lying or got is not None or count < len(path), "a chunk that cannot be fetched is still counted")
        if self.sound:
            law(
                count == next((i for i, one in enumerate(path) if one.key not in held), len(path)),
                "leading keys are miscounted",
            )
            if count:
                self.used[path[count - 1].key] = self.time.now()

    def path_to(self, chunk: Chunk) -> list[Chunk]:
        path = [chunk]
        while path[0].parent:
            path.insert(0, self.offered[path[0].parent])
        return path

    def family(self, key: bytes) -> set[bytes]:
        """Return a chunk and everything that extends it."""
        descendants, waiting = set(), [key]
        while waiting:
            one = waiting.pop()
            descendants.add(one)
            waiting += [chunk.key for chunk in self.offered.values() if chunk.parent == one]
        return descendants

    def drop(self) -> None:
        if not self.offered:
            return
        key = self.rng.choice(sorted(self.offered))
        family, parent = self.family(key), self.offered[key].parent
        self.used[parent] = max(self.used.get(parent, 0.0), self.last_use(key))
        self.kept -= family
        count = self.store.drop([key])
        law(not self.sound or count <= len(family), "drop counts more than went")
        self.erased |= family

    def pin(self) -> None:
        owner = self.rng.choice("ab")
        some = sorted(self.kept)
        keys = self.rng.sample(some, min(len(some), self.rng.randrange(3)))
        self.pinning = owner
        self.store.pin(owner, keys)
        self.pins[owner] = frozenset(keys)
        self.pinning = ""

    def tend(self) -> None:
        self.time.sleep(self.rng.choice((1.0, 100.0)))
        self.store.tend()

    def restart(self) -> None:
        if self.files.fired:  # a failing disk cannot erase what it owes, and the debt is forgotten with the process
            self.erased -= chunk_files(self.files).keys()
            self.erased -= self.erased if self.store.stats().trouble else set()
        self.pins_known = self.pins_known and self.files.fault is None and not self.files.fired
        self.store.close()
        self.store = start(self.files, self.time)

    # ---------------------------------------------------------------------------------------------------------- laws

    def disk(self, key: bytes) -> int:
        return -(-(len(self.offered[key].pages) + 600) // BLOCK) * BLOCK if key in self.whole else self.whole_disk(key)

    def whole_disk(self, key: bytes) -> int:
        return -(-SIZES[self.offered[key].group] // BLOCK) * BLOCK

    def pins_alone(self, files: CrashFiles) -> bool:
        """Return whether only pin files exceed the budget, because all chunks are pinned."""
        pins = len([path for path in files.files(FOLDER) if path.parent.name == PINS])
        all_pinned = chunk_files(files).keys() == self.protected(files)
        return all_pinned and 0 < pins <= 2 and on_disk(files) - pins * BLOCK <= BUDGET

    def protected(self, files: CrashFiles | None = None) -> set[bytes]:
        """Return the pinned chunks that are stored, with their ancestors."""
        held, pinned = chunk_files(files or self.files), set[bytes]()
        for key in frozenset[bytes]().union(*self.pins.values()):
            pinned |= self.above(key, held)
        return pinned

    def check(self) -> None:
        """Check the laws after a call, while the disk is sound."""
        if not self.sound:
            return
        stats, held = self.store.stats(), chunk_files(self.files)
        law(stats.bytes == on_disk(self.files), f"{stats.bytes} bytes are counted, {on_disk(self.files)} are taken")
        law(stats.bytes <= BUDGET or self.pins_alone(self.files), "the budget is exceeded")
        law(
            stats.chunks == len(held) == len(held.keys() & self.offered.keys()),
            "the count of chunks differs from the files",
        )
        law(stats.pinned == len(self.protected()), "pinned chunks are miscounted")
        law(not held.keys() & self.erased, "a dropped chunk is left")
        law((stats.damaged, stats.trouble) == (0, ""), "damage or trouble is reported without cause")
        for key in held:
            law(not self.offered[key].parent or self.offered[key].parent in held, "a chunk without what it extends")
        law(not [path for path in self.files.files(FOLDER) if path.name.startswith("tmp-")], "a temporary file is left")

    def check_after(
        self,
        files: CrashFiles,
        must: set[bytes],
        *,
        tight: bool = True,
        evicted: int = 0,
        before: Collection[bytes] | None = None,
    ) -> None:
        """Check a start on the disk that a crash left.

        `before`: the chunks there before an interrupted start; `evicted`: how many that start would have evicted.
        """
        before = chunk_files(files) if before is None else before
        store = start(files, self.time)
        held, stats = chunk_files(files), store.stats()
        law(stats.trouble == "", "a store does not open after a crash")
        law(stats.bytes == on_disk(files), "bytes are miscounted after a crash")
        law(not tight or stats.bytes <= BUDGET or self.pins_alone(files), "the budget is exceeded after a crash")
        law(stats.chunks == len(held), "chunks are miscounted after a crash")
        law(
            not [path for path in files.files(FOLDER) if path.name.startswith("tmp-")],
            "a temporary file is left after a crash",
        )
        law(not any(self.replaced(key, held) for key in held), "a tail comes back beside a longer chunk")
        taken = {one for key in self.whole if self.replaced(key, before) for one in self.family(key)}
        lost = len(must - held.keys() - taken)
        law(lost <= stats.evicted + evicted, f"{lost} chunks that were kept do not survive a crash")
        law(not held.keys() & self.erased, "a dropped chunk comes back")
        for key in held:
            chunk = self.offered[key]
            law(store.fetch(key, chunk.tokens) == chunk, "a chunk is damaged after a crash")
            law(not chunk.parent or chunk.parent in held, "a chunk without its parent after a crash")
        if not self.pinning and self.pins_known:
            pinned = {one for key in frozenset().union(*self.pins.values()) for one in self.above(key, held)}
            law(store.stats().pinned == len(pinned), "pins are lost in a crash")
        store.close()

    def above(self, key: bytes, held: Collection[bytes]) -> set[bytes]:
        """Return a stored chunk (or the longer one that begins with this tail) and all its ancestors."""
        whole, count = self.whole.get(key, (b"", 4))
        longer = [one for one, (other, blocks) in self.whole.items() if other == whole and blocks > count]
        ancestors = set[bytes]()
        for one in (key, *([whole, *longer] if whole else [])):
            while one in held and one not in ancestors:
                ancestors.add(one)
                one = self.offered[one].parent
        return ancestors

    def must(self) -> set[bytes]:
        """Return the keys that must survive a crash now."""
        return self.kept & chunk_files(self.files).keys()


def blocks_of(chunk: Chunk) -> list[bytes]:
    """Return the keys of a whole chunk's blocks."""
    return [*(hashlib.sha256(chunk.key + bytes([number])).digest() for number in range(3)), chunk.key]


def with_heads(chunk: Chunk) -> Chunk:
    """Return the chunk with the heads of its blocks, which all have but states and chunks of earlier versions."""
    heads = tuple(key[:HEAD_BYTES] for key in blocks_of(chunk)[:-1])
    return chunk if chunk.group == STATE else dataclasses.replace(chunk, heads=heads)


# ------------------------------------------------------------------------------------------------------------ harnesses


def crash_everywhere(seed: int, states: int, steps: int = STEPS) -> int:
    """At every change of the disk, open `states` of the disks that a crash could leave; return how many were opened."""
    time = Time()
    files, rng, seen = CrashFiles(seed=seed, now=time.now), random.Random(seed), 0
    work = Work(files, time, seed)

    def look(_: str) -> None:
        nonlocal seen
        must = work.must()
        for _ in range(states):
            after, evicted = files.crash(rng), 0
            before = chunk_files(after)
            if rng.random() < 0.3:
                # Nothing reports what an interrupted start evicts; an uninterrupted one on the same disk does.
                evicted = start(after.crash(random.Random(0)), time).stats().evicted
                after = after.crash_while(rng, 6, partial(start, after, time))
            work.check_after(after, must, evicted=evicted, before=before)
            seen += 1

    files.after_change = look
    work.run(steps)
    return seen


def long_use(seed: int, steps: int = 300) -> None:
    """Run a long workload on a sound disk: the eviction order shows only after many uses and restarts."""
    time = Time()
    Work(CrashFiles(seed=seed, now=time.now), time, seed).run(steps)


def fault_at(seed: int, fault: Fault, steps: int = STEPS) -> bool:
    """Run a workload with one planned fault, then heal the disk; return whether the fault struck."""
    time = Time()
    files = CrashFiles(seed=seed, now=time.now)
    work = Work(files, time, seed)
    work.sound = False
    files.fail(fault)
    work.run(steps)
    struck, rng = files.fired > 0, random.Random(seed)
    files.heal()
    for _ in range(3):
        time.sleep(61)
        work.store.tend()
    stats = work.store.stats()
    law(stats.trouble == "", "a store stays in trouble although its disk works")
    law(stats.bytes == on_disk(files), f"{stats.bytes} bytes are counted after a fault, {on_disk(files)} are taken")
    law(stats.bytes <= BUDGET + 2 * BLOCK, "the budget is exceeded after a fault")
    law(stats.chunks == len(chunk_files(files)), "chunks are miscounted after a fault")
    law(not chunk_files(files).keys() & work.erased, "a dropped chunk is left when the disk is back")
    must = work.must()
    for _ in range(3):
        work.check_after(files.crash(rng), must, tight=False)
    for owner in "ab":
        work.store.pin(owner, [])
    more = chain(3, salt=b"more", size=SIZES[0])
    work.offered |= {chunk.key: chunk for chunk in more}
    law(work.store.keep(more) == 3, "a store refuses chunks although the disk works again")
    work.store.close()
    return struck


def failed_erasure(seed: int) -> None:
    """Drop a chunk whose folder cannot be synced. A crash must not bring back what the healed store reports as gone."""
    time = Time()
    files, rng = CrashFiles(seed=seed, now=time.now), random.Random(seed)
    work = Work(files, time, seed)
    work.run(rng.randrange(4, STEPS))
    roots = [key for key in chunk_files(files) if not work.offered[key].parent]
    if not roots:
        return
    family = sorted(work.family(rng.choice(roots)))
    work.sound, work.kept, work.erased = False, work.kept - set(family), work.erased | set(family)
    files.fail(Fault(files.calls, rng.choice(ERRORS), only=frozenset({"sync_folder"})))
    work.store.drop(family)
    files.heal()
    for _ in range(2):
        time.sleep(61)
        work.store.tend()
    law(not work.store.lingers(family), "a store that works again does not erase what it owes")
    for _ in range(4):
        work.check_after(files.crash(rng), work.must(), tight=False)
    work.store.close()


def damage(work: Work, rng: random.Random) -> None:
    """Damage one file, or put one in another's place or under another name."""
    files = work.files
    paths = sorted(path for path, data in files.files(FOLDER).items() if data and path.parent != FOLDER)
    if not paths:
        return
    path, other = rng.choice(paths), rng.choice(paths)
    kind, contents = rng.randrange(8), files.files(FOLDER)
    if kind == 0:
        files.put(path, contents[other])
    elif kind == 1:
        first, second = path.name.split("."), other.name.split(".")
        files.put(path.with_name(".".join([first[0], *second[1:]])), contents[other])
    elif kind == 2:
        files.put(other.parent / path.name, contents[path])
    elif kind == 3:
        files.vanish(path)
    else:
        files.put(path, corrupted(contents[path], rng))


def damage_at_random(seed: int, steps: int = STEPS) -> None:
    """Run a workload whose files are damaged meanwhile."""
    time = Time()
    files, rng = CrashFiles(seed=seed, now=time.now), random.Random(seed)
    work = Work(files, time, seed)
    work.run(steps // 2)
    work.sound, work.lying = False, True
    for _ in range(steps // 2):
        damage(work, rng)
        if rng.random() < 0.3:
            work.restart()
        work.step()
        law(work.store.stats().trouble == "", "damage is reported as a failure of the disk")
    work.restart()
    work.store.scrub()
    for key in chunk_files(files):
        chunk = work.offered[key]
        law(work.store.fetch(key, chunk.tokens) == chunk, "a scrub removed an undamaged chunk")
    swept = work.store.scrub()
    law((swept.damaged, swept.unreadable) == (0, 0), "a second scrub finds more damage")
    work.restart()
    law(work.store.stats().bytes == on_disk(files), "bytes are miscounted after damage")


def full_disk(seed: int) -> int:
    """Use a small disk that others fill and clear; return how many chunks were refused."""
    time = Time()
    files, rng = CrashFiles(seed=seed, now=time.now, capacity=30 * BLOCK), random.Random(seed)
    store = open_store(files, time, size=SIZES[0], reserve=4 * BLOCK, budget=1 << 30)
    offered: list[Chunk] = []
    for number in range(40):
        time.sleep(61)
        others = Path(f"/others{rng.randrange(3)}")
        if rng.random() < 0.5:
            files.put(others, bytes(rng.randrange(max(1, files.free(FOLDER)))))
        else:
            files.vanish(others)
        chunks = chain(rng.randrange(1, 4), salt=number.to_bytes(2, "little"), size=SIZES[0])
        offered += chunks
        free = files.free(FOLDER)
        count = store.keep(chunks)
        law(files.free(FOLDER) >= min(free, 4 * BLOCK), "the store grew into the reserve")
        law(count == len(chunks) or store.stats().trouble != "", "a full disk is not reported")
        for chunk in offered:
            got = store.fetch(chunk.key, chunk.tokens)
            law(got in (None, chunk), "fetched bytes differ from those kept")
        store.tend()
        law(store.stats().bytes == on_disk(files), "bytes are miscounted on a full disk")
    refused = store.stats().refused
    for number in range(3):
        files.vanish(Path(f"/others{number}"))
    time.sleep(61)
    store.tend()
    law(store.stats().trouble == "", "a store stays in trouble although the disk has room")
    law(store.keep(chain(2, salt=b"more", size=SIZES[0])) == 2, "a store refuses chunks although the disk has room")
    return refused


def fault_of(seed: int, rng: random.Random) -> Fault:
    """Return a fault that strikes one call of a kind that the workload makes.

    Rare kinds are as likely as common ones.
    """
    time = Time()
    files = CrashFiles(seed=seed, now=time.now)
    files.log = []
    Work(files, time, seed).run()
    kinds = {kind for kind, _ in files.log} - {"free", "mode", "owned", "size", "disk"}
    grave = kinds & {"append", "sync", "sync_folder", "remove", "replace"}
    kind = rng.choice(sorted(grave if grave and rng.random() < 0.7 else kinds))
    calls = [number for number, (one, _) in enumerate(files.log) if one == kind]
    erasing = [number for number in calls if kind == "sync_folder" and files.log[number - 1][0] == "remove"]
    at = rng.choice(erasing or calls)
    sticky = rng.random() < 0.4
    only = frozenset({kind, "remove"} if sticky and rng.random() < 0.5 else {kind})
    return Fault(at, rng.choice(ERRORS), sticky=sticky, short=rng.random() < 0.5, only=only)


def run(seed: int) -> None:
    """Run one harness, chosen by the seed, as the planted bugs need it."""
    kind, rng = seed % 5, random.Random(seed)
    if kind == 0:
        crash_everywhere(seed, states=1, steps=20)
        long_use(seed)
    elif kind in (1, 3):
        for _ in range(2):
            fault_at(seed, fault_of(seed, rng))
        failed_erasure(seed)
    elif kind == 2:
        damage_at_random(seed)
    else:
        full_disk(seed)


if __name__ == "__main__":
    run(int(sys.argv[1]))
