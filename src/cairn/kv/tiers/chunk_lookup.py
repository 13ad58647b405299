"""Which chunks of a context the stores have, and which of them a load has to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cairn.kv.disk.layout import Layout
from cairn.kv.pool.attention_window import first_read, lead
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import SequenceKV, TierName
from cairn.kv.tiers.reader import Stretch, Want
from cairn.kv.tiers.store import HEAD_BYTES, Chunk, Store
from cairn.types.model_spec import CHUNK_BLOCKS


class Beginning(NamedTuple):
    """The first tokens of a chunk of which no more is known."""

    before: bytes
    """The key that its first block extends."""
    tokens: tuple[int, ...]


class ChunkLookup:
    """Questions about contexts, answered by the stores' indexes. Blocks and chunks count from 0 in every group."""

    def __init__(self, cache: Cache, stores: Mapping[TierName, Store]) -> None:
        self._cache = cache
        self._stores = stores
        self._groups = cache.info.groups
        self._states = [number for number, group in enumerate(self._groups) if group.kind == "state"]
        self._block_tokens = cache.info.block_tokens
        self.chunk_tokens = CHUNK_BLOCKS * cache.info.block_tokens

    # ----------------------------------------------------------------------------------------------- what to load

    def wants(self, context: SequenceKV, tokens: Sequence[int], hit: int) -> tuple[Stretch, ...]:
        """What to read for the longest context that the stores can give, chunk by chunk.

        It begins with the chunk in which the pools' `hit` blocks end. The last chunk may be a tail, or one that goes on
        with other tokens: of it the blocks are read that are the context's. Of a window group only what the token after
        the last stretch still reads is wanted, of a state group the state that it ends with, before the last token.
        """
        first = hit // CHUNK_BLOCKS
        stop = self._stop(tuple(self._stores.values()), context, tokens, first)
        stretches = []
        for index in range(first, -(-stop // CHUNK_BLOCKS)):
            end = min(stop, (index + 1) * CHUNK_BLOCKS)
            part = tuple(tokens[index * self.chunk_tokens : end * self._block_tokens])
            groups = [
                number
                for number in range(len(self._groups))
                if self._begin(number, tokens, first, stop) <= index
                and not self._skips(context, number, range(index * CHUNK_BLOCKS, end), tokens)
            ]
            wants = (Want(number, self._key(context, number, tokens, end), part) for number in groups)
            stretches.append(Stretch(end, tuple(wants)))
        return tuple(stretches)

    def usable(self, tokens: Sequence[int], stop: int) -> int:
        """Blocks that `Cache.open` could use of the first `stop`: one token is left to compute."""
        return min(stop, (len(tokens) - 1) // self._block_tokens)

    def counts(self, context: SequenceKV, tokens: Sequence[int]) -> dict[TierName, int]:
        """Leading tokens of a context in each store; windows are not looked at."""
        kept = [number for number in (lead(self._groups),) if number not in self._states]
        most = len(tokens) // self._block_tokens
        found: dict[TierName, int] = {}
        for tier, store in self._stores.items():
            count = self._kv_stop((store,), context, tokens, 0, most, kept)
            found[tier] = self._last_state((store,), context, tokens, 0, count) * self._block_tokens
        return found

    def _stop(self, stores: Sequence[Store], context: SequenceKV, tokens: Sequence[int], first: int) -> int:
        """How many blocks of a context the pools and these stores have together, of which chunk `first` is the first
        to be read."""
        most = (len(tokens) - bool(self._states)) // self._block_tokens
        full = [number for number, group in enumerate(self._groups) if group.kind == "full"]
        stop = self._kv_stop(stores, context, tokens, first, most, full)
        while stop > first * CHUNK_BLOCKS and (gap := self._gap(stores, context, tokens, first, stop)) is not None:
            stop = gap
        return stop

    def _kv_stop(
        self,
        stores: Sequence[Store],
        context: SequenceKV,
        tokens: Sequence[int],
        first: int,
        most: int,
        groups: Sequence[int],
    ) -> int:
        """Up to which block, `most` at most, stores have all chunks of these groups from chunk `first` on."""
        stop = most
        for number in groups:
            keys = self.keys(context, number, tokens, first, stop // CHUNK_BLOCKS)
            whole = (first + _match_prefix(stores, keys)) * CHUNK_BLOCKS
            rest = self._blocks(context, number, tokens, whole, min(stop, whole + CHUNK_BLOCKS - 1))
            found = _match_within(stores, rest)
            stop = min(stop, whole + (found[0] if found is not None else 0))
        return stop

    def _gap(
        self, stores: Sequence[Store], context: SequenceKV, tokens: Sequence[int], first: int, stop: int
    ) -> int | None:
        """The block that a window group lacks for `stop` blocks: fewer, up to there, may do. Where there is no state at
        their end, up to the last that there is."""
        if (found := self._last_state(stores, context, tokens, first, stop)) < stop:
            return found
        for number, group in enumerate(self._groups):
            if group.kind == "window":
                begin = self._begin(number, tokens, first, stop)
                if (found := self._kv_stop(stores, context, tokens, begin, stop, [number])) < stop:
                    return found
        return None

    def _last_state(
        self, stores: Sequence[Store], context: SequenceKV, tokens: Sequence[int], first: int, stop: int
    ) -> int:
        """The last block, `stop` at most, after which each state group has a state in a store; `first` chunks of blocks
        where there is none. Without such groups `stop`."""
        low = first * CHUNK_BLOCKS
        for number in self._states:
            key = context.chains[number].key
            has = (end for end in range(stop, low, -1) if _match_prefix(stores, (key(end - 1, tokens),)))
            stop = next(has, low)
        return stop

    def _key(self, context: SequenceKV, number: int, tokens: Sequence[int], end: int) -> bytes:
        """The key of the stored chunk that has the blocks of its chunk up to block `end` of a context."""
        if end % CHUNK_BLOCKS and number not in self._states:
            begun = self._blocks(context, number, tokens, end // CHUNK_BLOCKS * CHUNK_BLOCKS, end)
            found = _match_within(tuple(self._stores.values()), begun)
            if found is not None and found[0] == len(begun):
                return found[1]
        return context.chains[number].key(end - 1, tokens)

    def _skips(self, context: SequenceKV, number: int, blocks: range, tokens: Sequence[int]) -> bool:
        """Whether a chunk need not be read, since the pool has it: with states hits may end before it all the same."""
        skippable = bool(self._states) and self._groups[number].kind == "full"
        return skippable and self._cache.has(context, number, blocks, tokens)

    def _begin(self, number: int, tokens: Sequence[int], first: int, stop: int) -> int:
        """The first chunk of a group that the token after `stop` blocks (or the last one) still reads."""
        position = self.usable(tokens, stop) * self._block_tokens
        return max(first, first_read(self._groups[number], position, self._block_tokens) // CHUNK_BLOCKS)

    # --------------------------------------------------------------------------------------------------- keys

    def keys(self, context: SequenceKV, number: int, tokens: Sequence[int], first: int, stop: int) -> list[bytes]:
        """Keys of chunks `first` to `stop` of a group."""
        return [context.chains[number].key((one + 1) * CHUNK_BLOCKS - 1, tokens) for one in range(first, stop)]

    def _blocks(self, context: SequenceKV, number: int, tokens: Sequence[int], first: int, stop: int) -> list[bytes]:
        """Keys of blocks `first` to `stop` of a group."""
        return [context.chains[number].key(one, tokens) for one in range(first, stop)]

    def all_keys(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Keys of all that stores might have of a context from chunk `first` on: of chunks, tails and states of every
        group."""
        low, high = first * CHUNK_BLOCKS, len(tokens) // self._block_tokens
        return [key for number in range(len(self._groups)) for key in self._blocks(context, number, tokens, low, high)]

    def kv_keys(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Keys of all whole chunks from number `first` on, of every group that has KV, and of what a tail ends with
        once all but the last token were computed."""
        stop, last = len(tokens) // self.chunk_tokens, (len(tokens) - 1) // self._block_tokens
        kept = [number for number in range(len(self._groups)) if number not in self._states]
        found = [key for number in kept for key in self.keys(context, number, tokens, first, stop)]
        if last > max(first, stop) * CHUNK_BLOCKS:
            found += [context.chains[number].key(last - 1, tokens) for number in kept]
        return found

    def states(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Keys of the states at the ends of all blocks from chunk `first` on; there are few of them."""
        low, high = first * CHUNK_BLOCKS, len(tokens) // self._block_tokens
        return [key for number in self._states for key in self._blocks(context, number, tokens, low, high)]

    def beginnings(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[Beginning]:
        """What follows the last whole chunk in every group, where that is known at all from number `first` on."""
        index = max(first, len(tokens) // self.chunk_tokens)
        if not (rest := tuple(tokens[index * self.chunk_tokens :])):
            return []
        return [Beginning(chain.before(index * CHUNK_BLOCKS, tokens), rest) for chain in context.chains]

    def chunk(
        self,
        context: SequenceKV,
        tokens: Sequence[int],
        number: int,
        depth: int,
        part: Sequence[int],
        pages: memoryview,
    ) -> Chunk | None:
        """A chunk or a tail of a context, made of pages from elsewhere; None where they are not of its tokens.

        Of a model that has states alone what a state extends is not known from these, so none is made.
        """
        state, width, size = number in self._states, self.chunk_tokens, self._block_tokens
        leads = lead(self._groups)
        end = depth if state else depth + len(part)
        begin = end - len(part)
        fits = 0 <= number < len(self._groups) and begin % width == 0 and 0 < len(part) <= width
        if (
            not fits
            or end % size
            or end > len(tokens)
            or tuple(tokens[begin:end]) != tuple(part)
            or leads in self._states
        ):
            return None
        first, last = begin // size, end // size - 1
        heads = tuple(key[:HEAD_BYTES] for key in self._blocks(context, number, tokens, first, last))
        if state:
            parent = context.chains[leads].key(last, tokens)
        else:
            parent = context.chains[number].key(first - 1, tokens) if first else b""
        key = context.chains[number].key(last, tokens)
        return Chunk(key, parent, tuple(part), depth, pages, number, () if state else heads)

    def drop(self, store: Store, keys: Sequence[bytes], salt: bytes, tokens: Sequence[int], first: int) -> None:
        """Drop what `all_keys` said from a store; from the disk also what other kernels, or another codec, left of it.

        Their engines have the same cache groups, so only the identity in the keys differs.
        """
        store.drop(keys)
        if (durable := store.durable()) is not None:
            layout = Layout(self._block_tokens, self._groups)
            durable.drop_of_other_engines(lambda identity: layout.keys(identity, salt, tokens, first))


def _match_prefix(stores: Sequence[Store], keys: Sequence[bytes]) -> int:
    """Return how many of the first keys are in one store or another."""
    count = 0
    while count < len(keys) and (more := max(store.match_prefix(keys[count:]) for store in stores)):
        count += more
    return count


def _match_within(stores: Sequence[Store], keys: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return what `Store.match_within` gives of the store that has most."""
    found = [one for store in stores if (one := store.match_within(keys)) is not None] if keys else []
    return max(found, key=lambda one: one[0], default=None)
