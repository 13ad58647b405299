"""Which chunks of a context the stores have, and which of them a load has to read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from cairn.kv.disk.layout import Layout
from cairn.kv.pool.attention_window import first_read, lead
from cairn.kv.pool.cache import Cache
from cairn.kv.pool.sequence_kv import SequenceKV, TierName
from cairn.kv.tiers.reader import Want
from cairn.kv.tiers.store import Chunk, Store
from cairn.types.block_size import CHUNK_BLOCKS


class Tail(NamedTuple):
    """The beginning of a chunk of which no more is known."""

    before: bytes
    """The key that its first block extends."""
    tokens: tuple[int, ...]


class ChunkLookup:
    """Questions about contexts, answered by the stores' indexes. Numbers of chunks count from 0 in every group."""

    def __init__(self, cache: Cache, stores: Mapping[TierName, Store]) -> None:
        self._cache = cache
        self._stores = stores
        self._groups = cache.info.groups
        self._states = [number for number, group in enumerate(self._groups) if group.kind == "state"]
        self._block_tokens = cache.info.block_tokens
        self.chunk_tokens = CHUNK_BLOCKS * cache.info.block_tokens

    def wants(self, context: SequenceKV, tokens: Sequence[int], hit: int) -> tuple[tuple[Want, ...], ...]:
        """What to read, a stretch of one chunk each, for the longest context that the stores can give.

        It begins with the chunk in which the pools' `hit` blocks end. Of a window group only what the token after the
        last stretch still reads is wanted, of a state group the state that it ends with, before the last token.
        """
        first, stop = hit // CHUNK_BLOCKS, (len(tokens) - bool(self._states)) // self.chunk_tokens
        for number, group in enumerate(self._groups):
            if group.kind == "full":
                stop = first + self._match_prefix(self.keys(context, number, tokens, first, stop))
        while stop > first and (gap := self._gap(context, tokens, first, stop)) is not None:
            stop = gap
        parts = []
        for index in range(first, stop):
            part = tuple(tokens[index * self.chunk_tokens : (index + 1) * self.chunk_tokens])
            groups = [
                number
                for number in range(len(self._groups))
                if index >= self._begin(number, tokens, first, stop) and not self._skips(context, number, index, tokens)
            ]
            parts.append(
                tuple(Want(number, self.keys(context, number, tokens, index, index + 1)[0], part) for number in groups)
            )
        return tuple(parts)

    def usable(self, tokens: Sequence[int], stop: int) -> int:
        """Blocks that `Cache.open` could use of the first `stop` chunks: one token is left to compute."""
        return min(stop * CHUNK_BLOCKS, (len(tokens) - 1) // self._block_tokens)

    def keys(self, context: SequenceKV, number: int, tokens: Sequence[int], first: int, stop: int) -> list[bytes]:
        """Keys of chunks `first` to `stop` of a group."""
        return [context.chains[number].key((one + 1) * CHUNK_BLOCKS - 1, tokens) for one in range(first, stop)]

    def all_keys(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Keys of all whole chunks from number `first` on, of every group, and of all states that there might be."""
        return self.kv_keys(context, tokens, first) + self.states(context, tokens, first)

    def kv_keys(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Keys of all whole chunks from number `first` on, of every group that has KV."""
        stop = len(tokens) // self.chunk_tokens
        kept = (number for number in range(len(self._groups)) if number not in self._states)
        return [key for number in kept for key in self.keys(context, number, tokens, first, stop)]

    def states(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Keys of the states at the ends of all whole chunks from number `first` on; there are few of them."""
        stop = len(tokens) // self.chunk_tokens
        return [key for number in self._states for key in self.keys(context, number, tokens, first, stop)]

    def tails(self, context: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[Tail]:
        """What follows the last whole chunk in every group, where that is known at all from number `first` on."""
        index = max(first, len(tokens) // self.chunk_tokens)
        if not (rest := tuple(tokens[index * self.chunk_tokens :])):
            return []
        return [Tail(chain.before(index * CHUNK_BLOCKS, tokens), rest) for chain in context.chains]

    def chunk(
        self,
        context: SequenceKV,
        tokens: Sequence[int],
        number: int,
        depth: int,
        part: Sequence[int],
        pages: memoryview,
    ) -> Chunk | None:
        """A chunk of a context, made of pages that came from elsewhere; None where they are not of its tokens.

        Of a model that has states alone what a state extends is not known from these, so none is made.
        """
        state, width = number in self._states, self.chunk_tokens
        end = depth if state else depth + width
        leads = lead(self._groups)
        fits = 0 <= number < len(self._groups) and end % width == 0 and width <= end <= len(tokens)
        if not fits or tuple(tokens[end - width : end]) != tuple(part) or leads in self._states:
            return None
        index = end // width - 1
        (key,) = self.keys(context, number, tokens, index, index + 1)
        above = self.keys(context, leads, tokens, index, index + 1) if state else []
        before = above or self.keys(context, number, tokens, max(0, index - 1), index)
        return Chunk(key, before[0] if before else b"", tuple(part), depth, pages, number)

    def drop(self, store: Store, keys: Sequence[bytes], salt: bytes, tokens: Sequence[int], first: int) -> None:
        """Drop what `all_keys` said from a store; from the disk also what other kernels, or another codec, left of it.

        Their engines have the same cache groups, so only the identity in the keys differs.
        """
        store.drop(keys)
        if (durable := store.durable()) is not None:
            layout = Layout(self._block_tokens, self._groups)
            durable.drop_of_other_engines(lambda identity: layout.keys(identity, salt, tokens, first))

    def counts(self, context: SequenceKV, tokens: Sequence[int]) -> dict[TierName, int]:
        """Leading tokens of a context in each store."""
        number, stop = lead(self._groups), len(tokens) // self.chunk_tokens
        keys = self.keys(context, number, tokens, 0, stop)
        found: dict[TierName, int] = {}
        for tier, store in self._stores.items():
            count = stop if number in self._states else store.match_prefix(keys)
            for state in self._states:
                count = self._last_state((store,), self.keys(context, state, tokens, 0, count))
            found[tier] = count * self.chunk_tokens
        return found

    def _last_state(self, stores: Collection[Store], keys: Sequence[bytes]) -> int:
        """How many of these chunks end with the last that one of the stores has."""
        for count in range(len(keys), 0, -1):
            if any(store.match_prefix(keys[count - 1 : count]) for store in stores):
                return count
        return 0

    def _gap(self, context: SequenceKV, tokens: Sequence[int], first: int, stop: int) -> int | None:
        """The chunk that a window group lacks for `stop` chunks: fewer, up to there, may do. Where there is no state at
        their end, up to the last that there is."""
        for number in self._states:
            found = first + self._last_state(self._stores.values(), self.keys(context, number, tokens, first, stop))
            if found < stop:
                return found
        for number, group in enumerate(self._groups):
            if group.kind == "window":
                begin = self._begin(number, tokens, first, stop)
                found = begin + self._match_prefix(self.keys(context, number, tokens, begin, stop))
                if found < stop:
                    return found
        return None

    def _skips(self, context: SequenceKV, number: int, index: int, tokens: Sequence[int]) -> bool:
        """Whether a chunk need not be read, since the pool has it: with states hits may end before it all the same."""
        blocks = range(index * CHUNK_BLOCKS, (index + 1) * CHUNK_BLOCKS)
        skippable = bool(self._states) and self._groups[number].kind == "full"
        return skippable and self._cache.has(context, number, blocks, tokens)

    def _begin(self, number: int, tokens: Sequence[int], first: int, stop: int) -> int:
        """The first chunk of a group that the token after `stop` chunks (or the last one) still reads."""
        position = self.usable(tokens, stop) * self._block_tokens
        return max(first, first_read(self._groups[number], position, self._block_tokens) // CHUNK_BLOCKS)

    def _match_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are in one store or another."""
        count = 0
        while count < len(keys) and (more := max(store.match_prefix(keys[count:]) for store in self._stores.values())):
            count += more
        return count
