"""The KV of sequences: open what is cached, grow, publish what was computed, close.

One `BlockPool` and one key chain a cache group, all behind four calls. A hit of length L needs every full-attention
block of [0, L) and, in a window group, the blocks of the W - 1 positions before L, which are all that position L may
still read; `open` takes the longest such L. L is less than the sequence: one token is left to compute, because its
logits are wanted. A shared block is never written to, so shared blocks end on a block boundary. Where a published block
goes on as the sequence does, at least with its first tokens, the sequence gets a copy of it (`kv.pool.partial_blocks`),
and computes what follows the last token in which they agree.

Of a state group, position L reads the state after L - 1 alone, which lies in block (L - 1) // block_tokens, and what it
leaves is written there or to the block after it. So its table is one of a window of two positions, but that few of its
blocks are ever published, the snapshots (`kv.snapshots`), and that all else of it is `NO_BLOCK` from the start. A hit
ends at a snapshot, so there are no copies. What the full groups have beyond it is computed again, and found to be there
when it is published.

Regions of one table (block_tokens = 4, window 6, computed = 18, reserved up to 24):

    window group   [  -1  |  -1  |  -1  | 12..15 | 16..19 ]            -1: passed, given back, still published
    full group     [ 0..3 | 4..7 | 8..11| 12..15 | 16..19 | 20..23 ]
                     published --------------------> private -------->
    state group    [  -1  |  -1  |  -1  |  -1  | ..17 | ..23 ]                ..17: what position 18 reads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cairn.kv.pool.attention_window import first_read, lead, longest, window_blocks
from cairn.kv.pool.blocks import BlockPool, Copy
from cairn.kv.pool.partial_blocks import PartialBlocks
from cairn.kv.pool.prefix import Chain, root
from cairn.kv.pool.seen_blocks import SeenBlocks
from cairn.kv.pool.sequence_kv import BlockedOn, LowerTiers, Match, SequenceKV
from cairn.kv.pool.snapshots import BOUNDARY, SPACING
from cairn.kv.pool.waiters import Waiters
from cairn.types.model_spec import CacheGroup
from cairn.types.stats import GroupUse, Miss
from cairn.types.step import NO_BLOCK, EngineInfo


class Cache:
    """All block pools of one engine. One thread."""

    def __init__(self, info: EngineInfo, spacing: int = SPACING) -> None:
        """`spacing`: see `Snapshots`."""
        self.info = info
        self._groups = info.groups
        self._windows = any(group.kind == "window" for group in info.groups)
        self._states = tuple(number for number, group in enumerate(info.groups) if group.kind == "state")
        self._lead = lead(info.groups)
        full = (number for number, group in enumerate(info.groups) if group.kind == "full")
        self._skipping = tuple(full) if self._states else ()
        """Groups of which a load does not read what their pools have: hits end before that for want of a state."""
        self._spacing = spacing
        self._block_tokens = info.block_tokens
        self._identity = info.identity
        self.pools = tuple(BlockPool(blocks) for blocks in info.blocks)
        self._computing: dict[bytes, SequenceKV] = {}
        """Who computes, or loads, the block with this key (of the first group's chain) now."""
        self._parts = PartialBlocks(info, self.pools)
        self._waiters = Waiters()
        self.seen = SeenBlocks()
        """Blocks of the leading group that were computed, to tell what is gone from what never was."""
        self.below: LowerTiers | None = None
        self.turns = (0, 1) if self._states else (0,)
        """How far into a block `publish` has something to do while single tokens are computed: at its beginning, and
        after the first token, from where on nothing reads the state at the end of the block before."""

    @property
    def longest(self) -> int:
        """The longest sequence that fits when it has every pool to itself, in tokens."""
        return longest(self._groups, [pool.size for pool in self.pools], self._block_tokens)

    def use(self) -> tuple[GroupUse, ...]:
        """Blocks free, cached and held, a group."""
        return tuple(GroupUse(pool.free, pool.cached, pool.held) for pool in self.pools)

    def context(self, salt: bytes, *, durable: bool = False, stored: bool = True, once: bool = False) -> SequenceKV:
        """A context that holds nothing yet. Contexts of different salts share nothing. See `StoreProgress`."""
        size = self._block_tokens
        chains = tuple(Chain(root(self._identity, salt, group, size), size) for group in self._groups)
        return SequenceKV(chains, durable, stored, self._spacing, once)

    @property
    def blocked(self) -> int:
        """How many contexts wait for a block that is on its way."""
        return self._waiters.blocked

    def match(self, context: SequenceKV, tokens: Sequence[int], spare: int = 0, most: int | None = None) -> Match:
        """What `open` would find now, and whether the first block that it would not find is on its way.

        Another sequence computes or loads it; or its load is begun here, once before an `open` that finds room with
        `spare` blocks left, where that would find it now and leave at most `most` tokens. The context then keeps the
        match until an event wakes it: all that the other brings of its blocks is published, or will not come from
        there, or its own load has ended. One that is not blocked keeps it until more of its tokens could be found.
        """
        self._waiters.wake(context)
        last = (len(tokens) - 1) // self._block_tokens
        hit = self._hit(context, tokens)
        blocked_on: BlockedOn | None = (
            "load" if context.progress.loading else self._on_its_way(context, tokens, hit, last)
        )
        if blocked_on is None and hit < last and self.below is not None and not context.claim.tried:
            context.claim.tried = self.below.load(context, tokens, hit, spare, most)
            blocked_on = "load" if context.claim.tried else None
        return self._remember(context, tokens, hit, blocked_on)

    def recheck(self, *, running: bool) -> None:
        """Verify that one of those that are blocked, each in turn, is so still; all of them where nobody is `running`.

        Every event wakes whom it concerns, so this finds nothing. It is there lest an event that a change to the code
        forgets keeps a request for ever: whoever is blocked is so on a claim or a load that exists, or is woken after
        as many calls as there are blocked, at once where nobody computes.
        """
        for _ in range(1 if running else self.blocked):
            context = self._waiters.next_blocked()
            if context is not None and not self._is_blocked(context, running):
                self._waiters.wake(context)

    def lapse(self, context: SequenceKV, tokens: Sequence[int]) -> None:
        """Claim nothing for a context any more: it makes no progress, and others may compute what it was to."""
        self._unclaim(context, tokens, context.claim.blocks.stop)

    def open(
        self,
        context: SequenceKV,
        tokens: Sequence[int],
        match: Match | None = None,
        *,
        reuse: bool = True,
        spare: int = 0,
        ahead: int = 0,
    ) -> int | None:
        """Hold the longest cached prefix of `tokens`, and blocks for all the rest of them in the full groups.

        Returns the tokens covered, once `copies` are made, or None with nothing held where that leaves fewer than
        `spare` blocks available in a pool, and what a sequence with `ahead` blocks still needs of it. Window and state
        groups grow as they are computed; here they only need room for one window. Without `reuse` nothing cached is
        used, and everything is computed. `match`: what was found just now.
        """
        size = self._block_tokens
        hit = (self._hit(context, tokens) if match is None else match.covered // size) if reuse else 0
        wanted = -(-len(tokens) // size) - hit
        if (short := self._hold_with_room(context, tokens, hit, spare, ahead)) is not None:
            self._remember(context, tokens, hit, short)
            return None  # nor is another load begun: what the last one brought was overtaken, and would be again
        context.claim.tried = False
        part = self._parts.find(context, tokens, hit, wanted) if reuse else None
        for group, pool, table in zip(self._groups, self.pools, context.table.groups, strict=True):
            if group.kind == "full":
                table.extend(pool.take(wanted))
        context.table.measure(self._block_tokens)
        self._claim(context, tokens, hit, len(tokens) // size)
        if self._states:
            context.table.snapshots.begin((len(tokens) - 1) // size, self._reach(context, tokens, hit))
        if self.below is not None and hit:
            self.below.findable(context, tokens)
        return hit * size + (self._parts.copy(context, part, hit) if part else 0)

    def put_beside(
        self,
        context: SequenceKV,
        tokens: Sequence[int],
        end: int,
        follow: tuple[int, ...],
        write: Callable[[int, int], None],
    ) -> int:
        """See `PartialBlocks.put`."""
        return self._parts.put(context, tokens, end, follow, write)

    def copies(self) -> list[Copy]:
        """What `open` has left to copy since the last call: in this order, before anything is computed or loaded."""
        return self._parts.copies()

    def prepare(self, context: SequenceKV, tokens: Sequence[int], hit: int, stop: int, spare: int) -> bool:
        """Hold the first `hit` blocks and claim those up to `stop`, which are to be loaded.

        False, with nothing held, where `open` would have no room; what `match` finds then holds until there is more.
        """
        if (short := self._hold_with_room(context, tokens, hit, spare)) is not None:
            self._waiters.short(context, short)
            return False
        self._claim(context, tokens, hit, stop)
        return True

    def extend(self, context: SequenceKV, tokens: Sequence[int], end: int, groups: Sequence[int]) -> bool:
        """Take blocks up to block `end` in the tables of `groups` and none in the others: all of it, or False.

        Of a state group it is the last block alone, which is a snapshot then. Where a load skips what the pool has
        (`has`), that is held.
        """
        begin = len(context.table.groups[0])
        more = end - begin
        skipped = [number for number in self._skipping if number not in groups]
        if not all(self.has(context, number, range(begin, end), tokens) for number in skipped):
            return False
        counts = [1 if number in self._states else more for number in range(len(self.pools))]
        if any(counts[number] > self.pools[number].available for number in groups):
            return False
        for number, table in enumerate(context.table.groups):
            if number in skipped:
                self._hold_found(context, number, range(begin, end), tokens)
                continue
            count = counts[number] if number in groups else 0
            table.extend([NO_BLOCK] * (more - count) + self.pools[number].take(count))
        context.table.snapshots.want(end)
        return True

    def grow(self, context: SequenceKV, end: int) -> bool:
        """Make every table cover `end` positions: all of them, or none and False."""
        blocks = -(-end // self._block_tokens)
        if self._states:
            return self._grow_with_states(context, blocks)
        pairs = tuple(zip(self.pools, context.table.groups, strict=True))
        if any(blocks - len(table) > pool.available for pool, table in pairs):
            return False
        for pool, table in pairs:
            if blocks > len(table):
                table.extend(pool.take(blocks - len(table)))
        context.table.measure(self._block_tokens)
        return True

    def publish(self, context: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        """Let others find the full blocks of the first `computed` positions, and give back what a window has passed.

        Call it after the step that computed them, never before. A partly filled block stays private, and so does a
        state that is no snapshot.
        """
        full, before = computed // self._block_tokens, context.table.published[0]
        for number, (group, pool, table) in enumerate(zip(self._groups, self.pools, context.table.groups, strict=True)):
            done = context.table.published[number]
            if group.kind == "state":
                self._publish_states(context, number, tokens, full)
                self._give_back_states(pool, table, done, first_read(group, computed, self._block_tokens))
                continue
            while done < full:
                if table[done] != NO_BLOCK:
                    part = tokens[done * self._block_tokens : (done + 1) * self._block_tokens]
                    key = context.chains[number].key(done, tokens)
                    block = pool.publish(table[done], key, part, context.chains[number].before(done, tokens))
                    if block is None:
                        break
                    table[done] = block
                    if number == self._lead:
                        self.seen.add(key, told=context.progress.stored)
                done += 1
            context.table.published[number] = done
            self._give_back_passed(group, pool, table, computed)
        self._unclaim(context, tokens, context.table.published[0])
        for index in range(before, context.table.published[0]):
            self._waiters.settled(context.chains[0].key(index, tokens))
        self._waiters.freed()
        if self.below is not None:
            self.below.findable(context, tokens)

    def close(self, context: SequenceKV, tokens: Sequence[int], computed: int = 0) -> None:
        """Give back everything. What was published stays findable until its blocks are needed.

        `computed`: how many positions' KV is right; the first tokens of a block that is not full are kept too.
        """
        self._parts.publish(context, tokens, computed)
        self._waiters.wake(context)
        self._unclaim(context, tokens, context.claim.blocks.stop)
        boundary = context.table.snapshots.settle()
        if (computed or boundary) and self.below is not None:
            self.below.ended(context, tokens, boundary, computed)
        for pool, table in zip(self.pools, context.table.groups, strict=True):
            pool.release(block for block in reversed(table) if block != NO_BLOCK)
        context.table.clear()
        self._waiters.freed()
        if context.progress.loading and self.below is not None:
            self.below.stop(context)

    def found(self, context: SequenceKV, tokens: Sequence[int], last: bool = True) -> int:
        """Leading tokens of a context whose blocks the pools have; without the `last` one, what `open` would use."""
        return self._hit(context, tokens, (len(tokens) - (not last)) // self._block_tokens) * self._block_tokens

    def forget(self, context: SequenceKV, tokens: Sequence[int], keep: int) -> None:
        """Give up the cached blocks of `tokens` beyond the first `keep` tokens, last to first, up to one in use."""
        self._parts.forget(context, tokens, keep)
        for number, pool in enumerate(self.pools):
            for index in range(len(tokens) // self._block_tokens - 1, -(-keep // self._block_tokens) - 1, -1):
                block = self._find(context, number, index, tokens)
                if block is not None and not pool.forget(block):
                    break

    def miss(self, context: SequenceKV, tokens: Sequence[int], covered: int) -> Miss | None:
        """Why the first block after `covered` tokens has to be computed; None where `open` could not have had it."""
        index = covered // self._block_tokens
        if index >= (len(tokens) - 1) // self._block_tokens:
            return None
        if context.progress.declined:
            return Miss(position=covered, reason="faster to compute")
        if self._states and self._reach(context, tokens, index) > index:
            return Miss(position=covered, reason="no snapshot")
        key = context.chains[self._lead].key(index, tokens)
        reason = self.below.lacks(key) if self.below is not None else None
        if reason is None and key in self.seen:
            reason = "not stored" if self.below is not None and not self.seen.was_stored(key) else "evicted"
        return Miss(position=covered, reason=reason or "never seen")

    def _hit(self, context: SequenceKV, tokens: Sequence[int], most: int | None = None) -> int:
        """Blocks in the longest usable prefix that every group has, `most` at most."""
        hit = (len(tokens) - 1) // self._block_tokens if most is None else most
        for number, group in enumerate(self._groups):
            if group.kind == "full":
                hit = next((i for i in range(hit) if self._find(context, number, i, tokens) is None), hit)
        while hit:
            gap = self._gap(context, tokens, hit)
            if gap is None:
                return hit
            hit = gap
        return 0

    def _gap(self, context: SequenceKV, tokens: Sequence[int], hit: int) -> int | None:
        """The last block that a window group lacks for a hit of `hit` blocks; any shorter hit must end before it. Where
        a state group has no snapshot, the end of the last block after which it has one."""
        for number in self._states:
            ends = (end for end in range(hit, 0, -1) if self._find(context, number, end - 1, tokens) is not None)
            if (found := next(ends, 0)) < hit:
                return found
        for number, group in enumerate(self._groups):
            if group.kind == "window":
                for index in range(hit - 1, first_read(group, hit * self._block_tokens, self._block_tokens) - 1, -1):
                    if self._find(context, number, index, tokens) is None:
                        return index
        return None

    def _reach(self, context: SequenceKV, tokens: Sequence[int], hit: int) -> int:
        """How many blocks the pools have but for states; in a model without KV, how many were computed before."""
        last, number = (len(tokens) - 1) // self._block_tokens, self._lead
        if self._groups[number].kind == "full":
            return next((i for i in range(hit, last) if self._find(context, number, i, tokens) is None), last)
        key = context.chains[number].key
        return next((i for i in range(hit, last) if key(i, tokens) not in self.seen), last)

    def has(self, context: SequenceKV, number: int, indices: range, tokens: Sequence[int]) -> bool:
        """Whether the pool of a group has all of these blocks."""
        return all(self._find(context, number, index, tokens) is not None for index in indices)

    def _find(self, context: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> int | None:
        key = context.chains[number].key(index, tokens)
        return self.pools[number].find(key, tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _on_its_way(self, context: SequenceKV, tokens: Sequence[int], hit: int, last: int) -> bytes | None:
        """The key of the last of the blocks from `hit` up to `last` that the one that brings the first of them brings.

        None where nobody does. It is published after all before it, so a waiter is woken once. With states it is the
        block after which the other leaves the last snapshot that is of use here.
        """
        key, covered = context.chains[0].key, hit
        if self._states:
            hit = self._reach(context, tokens, hit)
        owner = self._computing.get(key(hit, tokens)) if hit < last else None
        if owner is None:
            return None
        stop = min(last, owner.claim.blocks.stop)
        while hit + 1 < stop and self._computing.get(key(hit + 1, tokens)) is owner:
            hit += 1
        if self._states:
            hit = self._coming(owner, covered, hit + 1) - 1
            if hit < covered or self._computing.get(key(hit, tokens)) is not owner:
                return None
        if owner.progress.loading:
            owner.claim.wanted = True
        return key(hit, tokens)

    def _coming(self, owner: SequenceKV, low: int, high: int) -> int:
        """The last boundary beyond block `low`, up to `high`, at which `owner` will leave a snapshot; 0 for none.

        One that it has not come to is asked for. Those of a step that is planned are in its table.
        """
        table = owner.table.groups[self._states[0]]
        for boundary in range(high // BOUNDARY * BOUNDARY, max(low, owner.table.published[0]), -BOUNDARY):
            if boundary > len(table) and not owner.progress.loading:
                owner.table.snapshots.want(boundary)
            if owner.table.snapshots.wanted(boundary) if boundary > len(table) else table[boundary - 1] != NO_BLOCK:
                return boundary
        return 0

    def _is_blocked(self, context: SequenceKV, running: bool) -> bool:
        """Whether what a context is blocked on is still to come from a load, or from one that is `running`."""
        on = context.claim.match.blocked_on if context.claim.match is not None else None
        owner = context if on == "load" else self._computing.get(on) if isinstance(on, bytes) else None
        return owner is not None and (owner.progress.loading or (running and owner is not context))

    def _remember(self, context: SequenceKV, tokens: Sequence[int], hit: int, blocked_on: BlockedOn | None) -> Match:
        """Keep what was found for a context until something happens.

        What is found grows when its first missing block is published; with windows also when a later one is, by one
        that began when more was there; with states at the end of any block, whoever comes to it.
        """
        last = (len(tokens) - 1) // self._block_tokens
        match = Match(hit * self._block_tokens, len(tokens) - hit * self._block_tokens, blocked_on)
        keys: list[bytes] = []
        if isinstance(blocked_on, bytes):
            keys = [blocked_on]
        elif self._states and blocked_on != "load":
            keys = [context.chains[0].key(end - 1, tokens) for end in range(hit + 1, last + 1)]
        elif blocked_on != "load" and hit < last:
            key, more = context.chains[0].key, range(hit + 1, last) if self._windows else ()
            # What all groups but windows have may be computed once more for these, by one that claims nothing.
            reach = self._reach(context, tokens, hit) if self._windows else hit
            later = ((index, key(index, tokens)) for index in more)
            keys = [key(hit, tokens), *(one for index, one in later if index < reach or one in self._computing)]
        self._waiters.remember(context, match, keys)
        return match

    def _hold_with_room(
        self, context: SequenceKV, tokens: Sequence[int], hit: int, spare: int, ahead: int = 0
    ) -> BlockPool | None:
        """Hold the first `hit` blocks if the rest has room beside them; else hold nothing, and return who has none."""
        self._hold_prefix(context, tokens, hit)
        wanted = -(-len(tokens) // self._block_tokens) - hit
        for group, pool in zip(self._groups, self.pools, strict=True):
            held = hit - first_read(group, hit * self._block_tokens, self._block_tokens)
            span = window_blocks(group, self._block_tokens)
            need = min(wanted, span - held) + min(ahead, span) if span else wanted + ahead
            if need + spare > pool.available:
                self.close(context, tokens)
                return pool
        self._waiters.wake(context)
        self._waiters.taken()
        return None

    def _hold_prefix(self, context: SequenceKV, tokens: Sequence[int], hit: int) -> None:
        for number, (group, table) in enumerate(zip(self._groups, context.table.groups, strict=True)):
            first = first_read(group, hit * self._block_tokens, self._block_tokens)
            table.extend([NO_BLOCK] * first)
            self._hold_found(context, number, range(first, hit), tokens)

    def _hold_found(self, context: SequenceKV, number: int, indices: range, tokens: Sequence[int]) -> None:
        """Put blocks that were just found into a group's table, after which all of it is published."""
        pool, table = self.pools[number], context.table.groups[number]
        for index in indices:
            block = self._find(context, number, index, tokens)
            assert block is not None, "a block that was found is gone"
            pool.hold(block)
            table.append(block)
        context.table.published[number] = len(table)

    def _grow_with_states(self, context: SequenceKV, blocks: int) -> bool:
        """`grow`, where some tables have few blocks: the one of the last position, and the snapshots on the way there.

        No snapshot is worth a preemption: those for which a pool has no room beside what the running sequences may
        need are left out, the first ones first.
        """
        more: list[list[int]] = []
        for number, (pool, table) in enumerate(zip(self.pools, context.table.groups, strict=True)):
            places = list(range(len(table), blocks))
            if number in self._states and places:
                places = sorted({*context.table.snapshots.places(len(table), blocks), blocks - 1})
                others = pool.held - bool(table)  # about as many as other sequences run
                places = places[-max(1, pool.available - others) :]
            if len(places) > pool.available:
                return False
            more.append(places)
        for pool, table, places in zip(self.pools, context.table.groups, more, strict=True):
            table.extend([NO_BLOCK] * (blocks - len(table)))
            for place, block in zip(places, pool.take(len(places)), strict=True):
                table[place] = block
        context.table.measure(self._block_tokens)
        return True

    def _publish_states(self, context: SequenceKV, number: int, tokens: Sequence[int], full: int) -> None:
        """Let others find the snapshots among the first `full` blocks, and forget those whose place they take."""
        pool, table, chain = self.pools[number], context.table.groups[number], context.chains[number]
        size, snapshots = self._block_tokens, context.table.snapshots
        for index in range(context.table.published[number], full):
            if number == self._lead:
                self.seen.add(chain.key(index, tokens), told=context.progress.stored)
            if table[index] == NO_BLOCK or not snapshots.wanted(index + 1):
                continue
            block = pool.publish(table[index], chain.key(index, tokens), tokens[index * size : (index + 1) * size])
            if block is None:
                continue
            own, table[index] = block == table[index], block
            if number == self._states[0]:
                for boundary in snapshots.took(index + 1, own=own):
                    self._forget_snapshot(context, boundary, tokens)
        context.table.published[number] = full

    def _forget_snapshot(self, context: SequenceKV, boundary: int, tokens: Sequence[int]) -> None:
        """Give up the states after so many blocks, unless somebody holds them."""
        for number in self._states:
            block = self._find(context, number, boundary - 1, tokens)
            if block is not None and not self.pools[number].holders(block):
                if self.below is not None:
                    self.below.unwanted(context.chains[number].key(boundary - 1, tokens))
                self.pools[number].forget(block)

    def _give_back_states(self, pool: BlockPool, table: list[int], done: int, first: int) -> None:
        """Drop the blocks before `first`, which no position reads any more. All before `done` but the last are gone."""
        for index in range(max(0, done - 1), first):
            if table[index] != NO_BLOCK:
                pool.release((table[index],))
                table[index] = NO_BLOCK

    def _give_back_passed(self, group: CacheGroup, pool: BlockPool, table: list[int], computed: int) -> None:
        """Drop the blocks that no position from `computed` on reads. They stay findable."""
        index = first_read(group, computed, self._block_tokens) - 1
        while index >= 0 and table[index] != NO_BLOCK:
            pool.release((table[index],))
            table[index] = NO_BLOCK
            index -= 1

    def _claim(self, context: SequenceKV, tokens: Sequence[int], start: int, stop: int) -> None:
        """Say that this context brings blocks `start` to `stop`: others that need one of them may wait for it."""
        context.claim.blocks = range(start, stop)
        for index in context.claim.blocks:
            self._computing.setdefault(context.chains[0].key(index, tokens), context)

    def _unclaim(self, context: SequenceKV, tokens: Sequence[int], stop: int) -> None:
        """Stop computing blocks before `stop` for others: they are published, or the sequence ends."""
        claimed = context.claim.blocks
        for index in range(claimed.start, min(stop, claimed.stop)):
            key = context.chains[0].key(index, tokens)
            if self._computing.get(key) is context:
                del self._computing[key]
                self._waiters.settled(key)
        context.claim.blocks = range(max(claimed.start, min(stop, claimed.stop)), claimed.stop)
