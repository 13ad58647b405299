"""The KV of sequences: open what is cached, grow, publish what was computed, close.

One `BlockPool` and one key chain a cache group, behind four calls. A hit of length L needs every full-attention block
of [0, L) and, in a window group, the blocks of the W - 1 positions before L, which are all that position L still
reads; `open` takes the longest such L. L is less than the sequence's length: one token is left to compute, because its
logits are needed. A shared block is never written to, so shared blocks end on a block boundary. If a published block
agrees with at least the sequence's next tokens, the sequence gets a copy of it (`kv.pool.partial_blocks`) and computes
from the last token on which they agree.

In a state group, position L reads only the state after L - 1, which lies in block (L - 1) // block_tokens, and writes
its own state there or to the block after it. So its table is like that of a window of two positions, except that only
few of its blocks are ever published, the snapshots (`kv.pool.snapshots`), and that all others are `NO_BLOCK` from the
start. A hit ends at a snapshot, so there are no copies. KV that the full groups have beyond it is computed again and
recognized as a duplicate when it is published.

Regions of one table (block_tokens = 4, window 6, computed = 18, reserved up to 24):

    window group   [  -1  |  -1  |  -1  | 12..15 | 16..19 ]            -1: passed, released, still published
    full group     [ 0..3 | 4..7 | 8..11| 12..15 | 16..19 | 20..23 ]
                     published --------------------> private -------->
    state group    [  -1  |  -1  |  -1  |  -1  | ..17 | ..23 ]                ..17: the state that position 18 reads
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.kv.pool.blocks import BlockPool, Copy
from cairn.kv.pool.partial_blocks import PartialBlocks
from cairn.kv.pool.prefix import Chain, root
from cairn.kv.pool.seen_blocks import SeenBlocks
from cairn.kv.pool.sequence_kv import BlockedOn, LowerTiers, Match, SequenceKV
from cairn.kv.pool.snapshots import BOUNDARY, SPACING
from cairn.kv.pool.spare_states import SpareStates
from cairn.kv.pool.waiters import Waiters
from cairn.types.model_spec import CacheGroup
from cairn.types.stats import GroupUse, Miss
from cairn.types.step import NO_BLOCK, EngineInfo

ANY = 1 << 62
"""The result of `longest` for pools that limit no sequence."""
MOST_SALTS = 256
"""Salts whose first keys are kept. Beyond them all are computed anew, in a few microseconds each."""


def window_blocks(group: CacheGroup, block_tokens: int) -> int:
    """Return the most blocks that one position of a window or state group reads or writes; 0 for full attention."""
    if group.kind == "state":
        return 2
    return -(-(group.window - 1) // block_tokens) + 1 if group.kind == "window" else 0


def first_read(group: CacheGroup, position: int, block_tokens: int) -> int:
    """Return the first block that `position` and those after it still read."""
    if group.kind == "state":
        return max(0, position - 1) // block_tokens
    return max(0, position - group.window + 1) // block_tokens if group.kind == "window" else 0


def lead(groups: Sequence[CacheGroup]) -> int:
    """Return the number of the leading group, whose blocks tell what was computed: the first of full attention."""
    return next((number for number, group in enumerate(groups) if group.kind == "full"), 0)


def longest(groups: Sequence[CacheGroup], sizes: Sequence[int], block_tokens: int) -> int:
    """Return the longest sequence, in tokens, that pools of so many blocks hold; `ANY` if none limits it.

    The pool of a window or state group limits it only if it has no room for the blocks that one position needs.
    """
    spans = (window_blocks(group, block_tokens) for group in groups)
    limits = [size * block_tokens for size, span in zip(sizes, spans, strict=True) if not span or size < span]
    return min(limits, default=ANY)


class Cache:
    """All block pools of one engine. One thread."""

    def __init__(self, info: EngineInfo, spacing: int = SPACING) -> None:
        """Make the empty pools of an engine. `spacing`: see `Snapshots`."""
        self.info = info
        self._groups = info.groups
        self._windows = any(group.kind == "window" for group in info.groups)
        self._states = tuple(number for number, group in enumerate(info.groups) if group.kind == "state")
        self._lead = lead(info.groups)
        full = (number for number, group in enumerate(info.groups) if group.kind == "full")
        self._skipping = tuple(full) if self._states else ()
        """Groups that a load does not read where their pools have the blocks: the hit ended earlier for want of a
        state."""
        self._spacing = spacing
        self._block_tokens = info.block_tokens
        self._identity = info.identity
        self._roots: dict[bytes, tuple[bytes, ...]] = {}
        """Keys before the first block of each group, by the salts of the latest sequences."""
        self.pools = tuple(BlockPool(blocks) for blocks in info.blocks)
        self._computing: dict[bytes, SequenceKV] = {}
        """The sequence that computes or loads the block with this key (of the first group's chain) now."""
        self.parts = PartialBlocks(info, self.pools)
        self._spares = SpareStates(info, self.pools)
        self._waiters = Waiters()
        self.seen = SeenBlocks()
        """Blocks of the leading group that were computed, to tell what was evicted from what never was."""
        self.below: LowerTiers | None = None
        self.publish_offsets = (0, 1) if self._states else (0,)
        """Offsets in a block at which `publish` has work while single tokens are computed: at its beginning and, with
        states, after the first token, from where on nothing reads the state at the end of the block before."""

    @property
    def leading_pool(self) -> BlockPool | None:
        """The pool of the leading group; None for a model that keeps no KV."""
        return self.pools[self._lead] if self.pools else None

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens, that fits when it has every pool to itself."""
        return longest(self._groups, [pool.size for pool in self.pools], self._block_tokens)

    def use(self) -> tuple[GroupUse, ...]:
        """Return the numbers of free, cached and held blocks of each group."""
        return tuple([pool.use() for pool in self.pools])

    def context(self, salt: bytes, *, durable: bool = False, stored: bool = True, once: bool = False) -> SequenceKV:
        """Return the KV of a new sequence, which holds nothing yet.

        Sequences with different salts share nothing. `durable`, `stored`, `once`: see `StoreProgress`.
        """
        size = self._block_tokens
        if (roots := self._roots.get(salt)) is None:
            if len(self._roots) >= MOST_SALTS:
                self._roots.clear()
            roots = self._roots[salt] = tuple([root(self._identity, salt, group, size) for group in self._groups])
        chains = tuple([Chain(start, size) for start in roots])
        return SequenceKV(chains, durable, stored, self._spacing, once)

    @property
    def blocked(self) -> int:
        """Number of sequences that wait for a block that is being computed or loaded."""
        return self._waiters.blocked

    def match(self, seq_kv: SequenceKV, tokens: Sequence[int], spare: int = 0, most: int | None = None) -> Match:
        """Return what `open` would find now, and what to wait for if its first missing block is being brought.

        Another sequence computes or loads that block; or its load is begun here, once before an `open` that finds room
        with `spare` blocks left, if the load leaves at most `most` tokens to compute. A blocked sequence keeps the
        match until an event wakes it: the last block that the other brings is published or given up, or its own load
        has ended. A sequence that is not blocked keeps it until more of its tokens could be found.
        """
        self._waiters.wake(seq_kv)
        last = (len(tokens) - 1) // self._block_tokens
        hit = self._hit(seq_kv, tokens)
        blocked_on: BlockedOn | None = (
            "load" if seq_kv.progress.loading else self._on_its_way(seq_kv, tokens, hit, last)
        )
        if blocked_on is None and hit < last and self.below is not None and not seq_kv.claim.tried:
            seq_kv.claim.tried = self.below.load(seq_kv, tokens, hit, spare, most)
            blocked_on = "load" if seq_kv.claim.tried else None
        return self._remember(seq_kv, tokens, hit, blocked_on)

    def recheck(self, *, running: bool) -> None:
        """Verify that the next blocked sequence is still blocked, each in turn; all of them if none is `running`.

        Every event wakes the sequences that it concerns, so this should find nothing. It guards against a code change
        that forgets an event, which would keep a request waiting for ever: after as many calls as there are blocked
        sequences, at once if nobody computes, each is blocked on a claim or load that exists, or woken.
        """
        for _ in range(1 if running else self.blocked):
            seq_kv = self._waiters.next_blocked()
            if seq_kv is not None and not self._is_blocked(seq_kv, running):
                self._waiters.wake(seq_kv)

    def release_claims(self, seq_kv: SequenceKV, tokens: Sequence[int]) -> None:
        """Release all claims of a sequence that makes no progress, so that others may compute its blocks."""
        self._unclaim(seq_kv, tokens, seq_kv.claim.blocks.stop)

    def open(
        self,
        seq_kv: SequenceKV,
        tokens: Sequence[int],
        match: Match | None = None,
        *,
        reuse: bool = True,
        spare: int = 0,
        ahead: int = 0,
    ) -> int | None:
        """Hold the longest cached prefix of `tokens`, and blocks for all the rest of them in the full groups.

        Return the tokens covered, once `copies` are made. Return None and hold nothing if that leaves fewer than
        `spare` blocks available in a pool, plus those that a sequence with `ahead` more blocks needs of it. Window and
        state groups grow as they are computed; here they only need room for one window. Without `reuse` nothing cached
        is used and everything is computed. `match`: the result of a `match` just now.
        """
        size = self._block_tokens
        hit = (self._hit(seq_kv, tokens) if match is None else match.covered // size) if reuse else 0
        wanted = -(-len(tokens) // size) - hit
        if (short := self._hold_with_room(seq_kv, tokens, hit, spare, ahead)) is not None:
            self._remember(seq_kv, tokens, hit, short)
            # No other load is begun: the blocks that the last one brought were evicted, and would be again.
            return None
        seq_kv.claim.tried = False
        part = self.parts.find(seq_kv, tokens, hit, wanted) if reuse else None
        for group, pool, table in zip(self._groups, self.pools, seq_kv.table.groups, strict=True):
            if group.kind == "full":
                table.extend(pool.take(wanted))
        seq_kv.table.measure(self._block_tokens)
        self._claim(seq_kv, tokens, hit, len(tokens) // size)
        if self._states:
            seq_kv.table.snapshots.begin((len(tokens) - 1) // size, self._reach(seq_kv, tokens, hit))
        if self.below is not None and hit:
            self.below.findable(seq_kv, tokens)
        return hit * size + (self.parts.copy(seq_kv, part, hit) if part else 0)

    def copies(self) -> list[Copy]:
        """Return the copies ordered since the last call, to be made in order before anything else.

        `open` and `grow_for_guesses` order them.
        """
        return self.parts.copies() + self._spares.copies() if self._states else self.parts.copies()

    def prepare(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, stop: int, spare: int) -> bool:
        """Hold the first `hit` blocks and claim those up to `stop`, which are to be loaded.

        Return False and hold nothing if `open` would have no room; the last match then stays valid until there is more.
        """
        if (short := self._hold_with_room(seq_kv, tokens, hit, spare)) is not None:
            self._waiters.short(seq_kv, short)
            return False
        self._claim(seq_kv, tokens, hit, stop)
        return True

    def extend(self, seq_kv: SequenceKV, tokens: Sequence[int], end: int, groups: Sequence[int]) -> bool:
        """Take blocks up to block `end` in the tables of `groups` and none in the others.

        Return False and change nothing if a block is missing. A state group gets only the last block, which becomes a
        snapshot. Where a load skips blocks that the pool has (`has`), those are held.
        """
        begin = len(seq_kv.table.groups[0])
        more = end - begin
        skipped = [number for number in self._skipping if number not in groups]
        if not all(self.has(seq_kv, number, range(begin, end), tokens) for number in skipped):
            return False
        counts = [1 if number in self._states else more for number in range(len(self.pools))]
        if any(counts[number] > self.pools[number].available for number in groups):
            return False
        for number, table in enumerate(seq_kv.table.groups):
            if number in skipped:
                self._hold_found(seq_kv, number, range(begin, end), tokens)
                continue
            count = counts[number] if number in groups else 0
            table.extend([NO_BLOCK] * (more - count) + self.pools[number].take(count))
        seq_kv.table.snapshots.want(end)
        return True

    def grow(self, seq_kv: SequenceKV, end: int) -> bool:
        """Make every table cover `end` positions; return False and change nothing if a pool has too few blocks."""
        blocks = -(-end // self._block_tokens)
        if self._states:
            return self._grow_with_states(seq_kv, blocks)
        pairs = tuple(zip(self.pools, seq_kv.table.groups, strict=True))
        if any(blocks - len(table) > pool.available for pool, table in pairs):
            return False
        for pool, table in pairs:
            if blocks > len(table):
                table.extend(pool.take(blocks - len(table)))
        seq_kv.table.measure(self._block_tokens)
        return True

    def grow_for_guesses(self, seq_kv: SequenceKV, computed: int, guesses: int) -> bool:
        """Grow, as `grow` does, for a row of one token and guesses after `computed` positions; then `settle_guesses`.

        With recurrent states, a copy of each state before the row is kept for the case that a guess is wrong.
        """
        if not self.grow(seq_kv, computed + 1 + guesses):
            return False
        if self._states and not self._spares.keep(seq_kv, computed):
            self.shrink(seq_kv, computed + 1)
            return False
        return True

    def settle_guesses(self, seq_kv: SequenceKV, start: int, right: int, end: int) -> int:
        """Return how many positions are computed after a row from `start` to `end` whose guesses were checked.

        Guesses before position `right` were right. If a later one was wrong, recurrent states are restored to those
        after `start` positions, so that nothing of the row counts as computed.
        """
        if self._states and right < end:
            self._spares.restore(seq_kv, start)
            return start
        self._spares.drop(seq_kv)
        return right

    def shrink(self, seq_kv: SequenceKV, end: int) -> None:
        """Release the blocks after those of the first `end` positions, which were taken for guesses."""
        blocks = -(-end // self._block_tokens)
        if seq_kv.table.capacity <= blocks * self._block_tokens:
            return
        for pool, table in zip(self.pools, seq_kv.table.groups, strict=True):
            pool.release(block for block in reversed(table[blocks:]) if block != NO_BLOCK)
            del table[blocks:]
        for number in self._states:
            table = seq_kv.table.groups[number]
            while table and table[-1] == NO_BLOCK:  # `grow` left it out between the ends of a row; now it is an end
                table.pop()
        seq_kv.table.measure(self._block_tokens)
        self._waiters.freed()

    def publish(self, seq_kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        """Publish the full blocks of the first `computed` positions, and release those that a window has passed.

        Call it after the step that computed them, never before. A partly filled block stays private, and so does a
        state that is not a snapshot.
        """
        full, before = computed // self._block_tokens, seq_kv.table.published[0]
        for number, (group, pool, table) in enumerate(zip(self._groups, self.pools, seq_kv.table.groups, strict=True)):
            done = seq_kv.table.published[number]
            if group.kind == "state":
                self._publish_states(seq_kv, number, tokens, full)
                self._give_back_states(pool, table, done, first_read(group, computed, self._block_tokens))
                continue
            while done < full:
                if table[done] != NO_BLOCK:
                    part = tokens[done * self._block_tokens : (done + 1) * self._block_tokens]
                    key = seq_kv.chains[number].key(done, tokens)
                    block = pool.publish(table[done], key, part, seq_kv.chains[number].before(done, tokens))
                    if block is None:
                        break
                    table[done] = block
                    if number == self._lead:
                        self.seen.add(key, saved=seq_kv.progress.stored)
                done += 1
            seq_kv.table.published[number] = done
            self._give_back_passed(group, pool, table, computed)
        self._unclaim(seq_kv, tokens, seq_kv.table.published[0])
        for index in range(before, seq_kv.table.published[0]):
            self._waiters.settled(seq_kv.chains[0].key(index, tokens))
        self._waiters.freed()
        if self.below is not None:
            self.below.findable(seq_kv, tokens)

    def close(self, seq_kv: SequenceKV, tokens: Sequence[int], computed: int = 0) -> None:
        """Release all blocks. Published blocks stay findable until they are evicted.

        `computed`: positions whose KV is valid; the computed tokens of an unfinished block are published too.
        """
        self.parts.publish(seq_kv, tokens, computed)
        self._waiters.wake(seq_kv)
        self._unclaim(seq_kv, tokens, seq_kv.claim.blocks.stop)
        self._spares.drop(seq_kv)
        boundary = seq_kv.table.snapshots.settle()
        if (computed or boundary) and self.below is not None:
            self.below.ended(seq_kv, tokens, boundary, computed)
        for pool, table in zip(self.pools, seq_kv.table.groups, strict=True):
            pool.release(block for block in reversed(table) if block != NO_BLOCK)
        seq_kv.table.clear()
        self._waiters.freed()
        if seq_kv.progress.loading and self.below is not None:
            self.below.stop(seq_kv)

    def found(self, seq_kv: SequenceKV, tokens: Sequence[int], last: bool = True) -> int:
        """Return the leading tokens whose blocks the pools have; without the `last` token, what `open` would use."""
        return self._hit(seq_kv, tokens, (len(tokens) - (not last)) // self._block_tokens) * self._block_tokens

    def forget(self, seq_kv: SequenceKV, tokens: Sequence[int], keep: int) -> None:
        """Evict the cached blocks of `tokens` beyond the first `keep` tokens, last to first, up to one in use."""
        self.parts.forget(seq_kv, tokens, keep)
        for number, pool in enumerate(self.pools):
            for index in range(len(tokens) // self._block_tokens - 1, -(-keep // self._block_tokens) - 1, -1):
                block = self._find(seq_kv, number, index, tokens)
                if block is not None and not pool.forget(block):
                    break

    def miss(self, seq_kv: SequenceKV, tokens: Sequence[int], covered: int) -> Miss | None:
        """Return why the first block after `covered` tokens has to be computed; None if `open` could not use it."""
        index = covered // self._block_tokens
        if index >= (len(tokens) - 1) // self._block_tokens:
            return None
        if seq_kv.progress.declined:
            return Miss(position=covered, reason="faster to compute")
        if self._states and self._reach(seq_kv, tokens, index) > index:
            return Miss(position=covered, reason="no snapshot")
        key = seq_kv.chains[self._lead].key(index, tokens)
        reason = self.below.lacks(key) if self.below is not None else None
        if reason is None and key in self.seen:
            reason = "not stored" if self.below is not None and not self.seen.was_stored(key) else "evicted"
        return Miss(position=covered, reason=reason or "never seen")

    def _hit(self, seq_kv: SequenceKV, tokens: Sequence[int], most: int | None = None) -> int:
        """Return the number of blocks, at most `most`, in the longest usable prefix that every group has."""
        hit = (len(tokens) - 1) // self._block_tokens if most is None else most
        for number, group in enumerate(self._groups):
            if group.kind == "full":
                hit = next((i for i in range(hit) if self._find(seq_kv, number, i, tokens) is None), hit)
        while hit:
            gap = self._gap(seq_kv, tokens, hit)
            if gap is None:
                return hit
            hit = gap
        return 0

    def _gap(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int) -> int | None:
        """Return where a shorter hit must end: None if every window and state group has its blocks for `hit`.

        For a window group it is the last block that is missing, for a state group the end of the last block with a
        snapshot.
        """
        for number in self._states:
            ends = (end for end in range(hit, 0, -1) if self._find(seq_kv, number, end - 1, tokens) is not None)
            if (found := next(ends, 0)) < hit:
                return found
        for number, group in enumerate(self._groups):
            if group.kind == "window":
                for index in range(hit - 1, first_read(group, hit * self._block_tokens, self._block_tokens) - 1, -1):
                    if self._find(seq_kv, number, index, tokens) is None:
                        return index
        return None

    def _reach(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int) -> int:
        """Return how many leading blocks the pools have, ignoring states.

        For a model without KV, return how many blocks were computed before.
        """
        last, number = (len(tokens) - 1) // self._block_tokens, self._lead
        if self._groups[number].kind == "full":
            return next((i for i in range(hit, last) if self._find(seq_kv, number, i, tokens) is None), last)
        key = seq_kv.chains[number].key
        return next((i for i in range(hit, last) if key(i, tokens) not in self.seen), last)

    def has(self, seq_kv: SequenceKV, number: int, indices: range, tokens: Sequence[int]) -> bool:
        """Return whether a group's pool has all of these blocks."""
        return all(self._find(seq_kv, number, index, tokens) is not None for index in indices)

    def _find(self, seq_kv: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> int | None:
        key = seq_kv.chains[number].key(index, tokens)
        return self.pools[number].find(key, tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _on_its_way(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, last: int) -> bytes | None:
        """Return the key of the last block up to `last` that the owner of block `hit` brings; None without an owner.

        That block is published after all before it, so a waiter is woken once. With states it is the block after which
        the owner leaves the last snapshot that is of use here.
        """
        key, covered = seq_kv.chains[0].key, hit
        if self._states:
            hit = self._reach(seq_kv, tokens, hit)
        owner = self._computing.get(key(hit, tokens)) if hit < last else None
        if owner is None:
            return None
        stop = min(last, owner.claim.blocks.stop)
        while hit + 1 < stop and self._computing.get(key(hit + 1, tokens)) is owner:
            hit += 1
        if self._states:
            hit = self._next_snapshot_of(owner, covered, hit + 1) - 1
            if hit < covered or self._computing.get(key(hit, tokens)) is not owner:
                return None
        if owner.progress.loading:
            owner.claim.wanted = True
        return key(hit, tokens)

    def _next_snapshot_of(self, owner: SequenceKV, low: int, high: int) -> int:
        """Return the last boundary in (low, high] at which `owner` will leave a snapshot; 0 if there is none.

        If it has not reached the boundary yet, the snapshot is requested. Snapshots of a planned step are in its table.
        """
        table = owner.table.groups[self._states[0]]
        for boundary in range(high // BOUNDARY * BOUNDARY, max(low, owner.table.published[0]), -BOUNDARY):
            if boundary > len(table) and not owner.progress.loading:
                owner.table.snapshots.want(boundary)
            if owner.table.snapshots.wanted(boundary) if boundary > len(table) else table[boundary - 1] != NO_BLOCK:
                return boundary
        return 0

    def _is_blocked(self, seq_kv: SequenceKV, running: bool) -> bool:
        """Return whether a load, or another sequence that is `running`, still brings what this one is blocked on."""
        on = seq_kv.claim.match.blocked_on if seq_kv.claim.match is not None else None
        owner = seq_kv if on == "load" else self._computing.get(on) if isinstance(on, bytes) else None
        return owner is not None and (owner.progress.loading or (running and owner is not seq_kv))

    def _remember(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, blocked_on: BlockedOn | None) -> Match:
        """Keep a match until an event could change it; return it.

        It grows when its first missing block is published; with windows also when a later block is published by a
        sequence that began when more was cached; with states at the end of any block, whichever sequence computes it.
        """
        last = (len(tokens) - 1) // self._block_tokens
        match = Match(hit * self._block_tokens, len(tokens) - hit * self._block_tokens, blocked_on)
        keys: list[bytes] = []
        if isinstance(blocked_on, bytes):
            keys = [blocked_on]
        elif self._states and blocked_on != "load":
            keys = [seq_kv.chains[0].key(end - 1, tokens) for end in range(hit + 1, last + 1)]
        elif blocked_on != "load" and hit < last:
            key, more = seq_kv.chains[0].key, range(hit + 1, last) if self._windows else ()
            # Blocks that only the window groups lack may be computed again by a sequence that claims nothing.
            reach = self._reach(seq_kv, tokens, hit) if self._windows else hit
            later = ((index, key(index, tokens)) for index in more)
            keys = [key(hit, tokens), *(one for index, one in later if index < reach or one in self._computing)]
        self._waiters.remember(seq_kv, match, keys)
        return match

    def _hold_with_room(
        self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int, spare: int, ahead: int = 0
    ) -> BlockPool | None:
        """Hold the first `hit` blocks and return None if the rest fits.

        Otherwise hold nothing and return the pool that is short.
        """
        self._hold_prefix(seq_kv, tokens, hit)
        wanted = -(-len(tokens) // self._block_tokens) - hit
        for group, pool in zip(self._groups, self.pools, strict=True):
            held = hit - first_read(group, hit * self._block_tokens, self._block_tokens)
            span = window_blocks(group, self._block_tokens)
            need = min(wanted, span - held) + min(ahead, span) if span else wanted + ahead
            if need + spare > pool.available:
                self.close(seq_kv, tokens)
                return pool
        self._waiters.wake(seq_kv)
        self._waiters.taken()
        return None

    def _hold_prefix(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int) -> None:
        for number, (group, table) in enumerate(zip(self._groups, seq_kv.table.groups, strict=True)):
            first = first_read(group, hit * self._block_tokens, self._block_tokens)
            table.extend([NO_BLOCK] * first)
            self._hold_found(seq_kv, number, range(first, hit), tokens)

    def _hold_found(self, seq_kv: SequenceKV, number: int, indices: range, tokens: Sequence[int]) -> None:
        """Append published blocks to a group's table, all of which is published then."""
        pool, table = self.pools[number], seq_kv.table.groups[number]
        for index in indices:
            block = self._find(seq_kv, number, index, tokens)
            assert block is not None, "a block that was found before is gone"
            pool.hold(block)
            table.append(block)
        seq_kv.table.published[number] = len(table)

    def _grow_with_states(self, seq_kv: SequenceKV, blocks: int) -> bool:
        """Do what `grow` does where state tables have few blocks: that of the last position, and snapshots on the way.

        No snapshot is worth a preemption: if a pool lacks room beside the blocks that running sequences may need, the
        first snapshots are left out.
        """
        more: list[list[int]] = []
        for number, (pool, table) in enumerate(zip(self.pools, seq_kv.table.groups, strict=True)):
            places = list(range(len(table), blocks))
            if number in self._states and places:
                places = sorted({*seq_kv.table.snapshots.places(len(table), blocks), blocks - 1})
                others = pool.held - bool(table)  # about one for each other running sequence
                places = places[-max(1, pool.available - others) :]
            if len(places) > pool.available:
                return False
            more.append(places)
        for pool, table, places in zip(self.pools, seq_kv.table.groups, more, strict=True):
            table.extend([NO_BLOCK] * (blocks - len(table)))
            for place, block in zip(places, pool.take(len(places)), strict=True):
                table[place] = block
        seq_kv.table.measure(self._block_tokens)
        return True

    def _publish_states(self, seq_kv: SequenceKV, number: int, tokens: Sequence[int], full: int) -> None:
        """Publish the snapshots among the first `full` blocks, and evict those that they replace."""
        pool, table, chain = self.pools[number], seq_kv.table.groups[number], seq_kv.chains[number]
        size, snapshots = self._block_tokens, seq_kv.table.snapshots
        for index in range(seq_kv.table.published[number], full):
            if number == self._lead:
                self.seen.add(chain.key(index, tokens), saved=seq_kv.progress.stored)
            if table[index] == NO_BLOCK or not snapshots.wanted(index + 1):
                continue
            block = pool.publish(table[index], chain.key(index, tokens), tokens[index * size : (index + 1) * size])
            if block is None:
                continue
            own, table[index] = block == table[index], block
            if number == self._states[0]:
                for boundary in snapshots.took(index + 1, own=own):
                    self._forget_snapshot(seq_kv, boundary, tokens)
        seq_kv.table.published[number] = full

    def _forget_snapshot(self, seq_kv: SequenceKV, boundary: int, tokens: Sequence[int]) -> None:
        """Evict the states after so many blocks, unless a sequence holds them."""
        for number in self._states:
            block = self._find(seq_kv, number, boundary - 1, tokens)
            if block is not None and not self.pools[number].holders(block):
                if self.below is not None:
                    self.below.unwanted(seq_kv.chains[number].key(boundary - 1, tokens))
                self.pools[number].forget(block)

    def _give_back_states(self, pool: BlockPool, table: list[int], done: int, first: int) -> None:
        """Release the blocks from `done - 1` up to `first`, which no position reads any more.

        Those before `done - 1` were released earlier.
        """
        for index in range(max(0, done - 1), first):
            if table[index] != NO_BLOCK:
                pool.release((table[index],))
                table[index] = NO_BLOCK

    def _give_back_passed(self, group: CacheGroup, pool: BlockPool, table: list[int], computed: int) -> None:
        """Release the blocks that no position from `computed` on reads. They stay findable."""
        index = first_read(group, computed, self._block_tokens) - 1
        while index >= 0 and table[index] != NO_BLOCK:
            pool.release((table[index],))
            table[index] = NO_BLOCK
            index -= 1

    def _claim(self, seq_kv: SequenceKV, tokens: Sequence[int], start: int, stop: int) -> None:
        """Claim blocks `start` to `stop`: others that need one of them may wait for this sequence."""
        seq_kv.claim.blocks = range(start, stop)
        for index in seq_kv.claim.blocks:
            self._computing.setdefault(seq_kv.chains[0].key(index, tokens), seq_kv)

    def _unclaim(self, seq_kv: SequenceKV, tokens: Sequence[int], stop: int) -> None:
        """Release the claims on blocks before `stop`: they are published, or the sequence ends."""
        claimed = seq_kv.claim.blocks
        for index in range(claimed.start, min(stop, claimed.stop)):
            key = seq_kv.chains[0].key(index, tokens)
            if self._computing.get(key) is seq_kv:
                del self._computing[key]
                self._waiters.settled(key)
        seq_kv.claim.blocks = range(max(claimed.start, min(stop, claimed.stop)), claimed.stop)
