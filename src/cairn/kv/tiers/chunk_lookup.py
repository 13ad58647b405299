"""The chunks of a sequence that the stores have, and those of them that a load has to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cairn.kv.pool.cache import Cache, first_read, lead
from cairn.kv.pool.prefix import Layout
from cairn.kv.pool.sequence_kv import SequenceKV, TierName
from cairn.kv.tiers.reader import Stretch, Want
from cairn.kv.tiers.store import HEAD_BYTES, Chunk, Store
from cairn.types.model_spec import CHUNK_BLOCKS


class Beginning(NamedTuple):
    """The first tokens of a chunk whose other tokens are unknown."""

    before: bytes
    """Key that its first block extends."""
    tokens: tuple[int, ...]


class ChunkLookup:
    """Looks up sequences in the stores' indexes. Blocks and chunks count from 0 in every group."""

    def __init__(self, cache: Cache, stores: Mapping[TierName, Store]) -> None:
        self._cache = cache
        self._stores = stores
        self._groups = cache.info.groups
        self._states = [number for number, group in enumerate(self._groups) if group.kind == "state"]
        self._block_tokens = cache.info.block_tokens
        self.chunk_tokens = CHUNK_BLOCKS * cache.info.block_tokens

    # ----------------------------------------------------------------------------------------------- what to load

    def wants(self, seq_kv: SequenceKV, tokens: Sequence[int], hit: int) -> tuple[Stretch, ...]:
        """Return what to read for the longest prefix that the stores can give, chunk by chunk.

        It begins with the chunk in which the pools' `hit` blocks end. The last chunk may be a tail, or one that goes on
        with other tokens, of which only the sequence's blocks are read. A window group wants only the blocks that the
        token after the last stretch still reads; a state group only the state at the end, before the last token.
        """
        first = hit // CHUNK_BLOCKS
        stop = self._stop(tuple(self._stores.values()), seq_kv, tokens, first)
        stretches = []
        for index in range(first, -(-stop // CHUNK_BLOCKS)):
            end = min(stop, (index + 1) * CHUNK_BLOCKS)
            part = tuple(tokens[index * self.chunk_tokens : end * self._block_tokens])
            groups = [
                number
                for number in range(len(self._groups))
                if self._begin(number, tokens, first, stop) <= index
                and not self._skips(seq_kv, number, range(index * CHUNK_BLOCKS, end), tokens)
            ]
            wants = (Want(number, self._key(seq_kv, number, tokens, end), part) for number in groups)
            stretches.append(Stretch(end, tuple(wants)))
        return tuple(stretches)

    def usable(self, tokens: Sequence[int], stop: int) -> int:
        """Return how many of the first `stop` blocks `Cache.open` could use: one token is left to compute."""
        return min(stop, (len(tokens) - 1) // self._block_tokens)

    def counts(self, seq_kv: SequenceKV, tokens: Sequence[int]) -> dict[TierName, int]:
        """Return the leading tokens of a sequence in each store, ignoring windows."""
        kept = [number for number in (lead(self._groups),) if number not in self._states]
        most = len(tokens) // self._block_tokens
        counts: dict[TierName, int] = {}
        for tier, store in self._stores.items():
            count = self._kv_stop((store,), seq_kv, tokens, 0, most, kept)
            counts[tier] = self._last_state((store,), seq_kv, tokens, 0, count) * self._block_tokens
        return counts

    def _stop(self, stores: Sequence[Store], seq_kv: SequenceKV, tokens: Sequence[int], first: int) -> int:
        """Return how many leading blocks the pools and these stores have together.

        `first`: the first chunk to be read from the stores.
        """
        most = (len(tokens) - bool(self._states)) // self._block_tokens
        full = [number for number, group in enumerate(self._groups) if group.kind == "full"]
        stop = self._kv_stop(stores, seq_kv, tokens, first, most, full)
        while stop > first * CHUNK_BLOCKS and (gap := self._gap(stores, seq_kv, tokens, first, stop)) is not None:
            stop = gap
        return stop

    def _kv_stop(
        self,
        stores: Sequence[Store],
        seq_kv: SequenceKV,
        tokens: Sequence[int],
        first: int,
        most: int,
        groups: Sequence[int],
    ) -> int:
        """Return the block, at most `most`, up to which the stores have all chunks of these groups.

        `first`: the chunk to begin with.
        """
        stop = most
        for number in groups:
            keys = self.keys(seq_kv, number, tokens, first, stop // CHUNK_BLOCKS)
            whole = (first + _match_prefix(stores, keys)) * CHUNK_BLOCKS
            rest = self._blocks(seq_kv, number, tokens, whole, min(stop, whole + CHUNK_BLOCKS - 1))
            found = _match_within(stores, rest)
            stop = min(stop, whole + (found[0] if found is not None else 0))
        return stop

    def _gap(
        self, stores: Sequence[Store], seq_kv: SequenceKV, tokens: Sequence[int], first: int, stop: int
    ) -> int | None:
        """Return a shorter stop if a window or state group lacks something for `stop` blocks; else None."""
        if (found := self._last_state(stores, seq_kv, tokens, first, stop)) < stop:
            return found
        for number, group in enumerate(self._groups):
            if group.kind == "window":
                begin = self._begin(number, tokens, first, stop)
                if (found := self._kv_stop(stores, seq_kv, tokens, begin, stop, [number])) < stop:
                    return found
        return None

    def _last_state(
        self, stores: Sequence[Store], seq_kv: SequenceKV, tokens: Sequence[int], first: int, stop: int
    ) -> int:
        """Return the last block, at most `stop`, after which a store has a state of each state group.

        Return the beginning of chunk `first` if there is none, and `stop` without such groups.
        """
        low = first * CHUNK_BLOCKS
        for number in self._states:
            key = seq_kv.chains[number].key
            has = (end for end in range(stop, low, -1) if _match_prefix(stores, (key(end - 1, tokens),)))
            stop = next(has, low)
        return stop

    def _key(self, seq_kv: SequenceKV, number: int, tokens: Sequence[int], end: int) -> bytes:
        """Return the key of the stored chunk that has the last chunk's blocks up to block `end`."""
        if end % CHUNK_BLOCKS and number not in self._states:
            begun = self._blocks(seq_kv, number, tokens, end // CHUNK_BLOCKS * CHUNK_BLOCKS, end)
            found = _match_within(tuple(self._stores.values()), begun)
            if found is not None and found[0] == len(begun):
                return found[1]
        return seq_kv.chains[number].key(end - 1, tokens)

    def _skips(self, seq_kv: SequenceKV, number: int, blocks: range, tokens: Sequence[int]) -> bool:
        """Return whether the pool has a chunk, so that it need not be read: with states the hit may end before it."""
        skippable = bool(self._states) and self._groups[number].kind == "full"
        return skippable and self._cache.has(seq_kv, number, blocks, tokens)

    def _begin(self, number: int, tokens: Sequence[int], first: int, stop: int) -> int:
        """Return the first chunk of a group that the token after `stop` blocks (or the last one) still reads."""
        position = self.usable(tokens, stop) * self._block_tokens
        return max(first, first_read(self._groups[number], position, self._block_tokens) // CHUNK_BLOCKS)

    # --------------------------------------------------------------------------------------------------- keys

    def keys(self, seq_kv: SequenceKV, number: int, tokens: Sequence[int], first: int, stop: int) -> list[bytes]:
        """Return the keys of chunks `first` to `stop` of a group."""
        return [seq_kv.chains[number].key((one + 1) * CHUNK_BLOCKS - 1, tokens) for one in range(first, stop)]

    def _blocks(self, seq_kv: SequenceKV, number: int, tokens: Sequence[int], first: int, stop: int) -> list[bytes]:
        """Return the keys of blocks `first` to `stop` of a group."""
        return [seq_kv.chains[number].key(one, tokens) for one in range(first, stop)]

    def all_keys(self, seq_kv: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Return every key from chunk `first` on under which stores may have something of a sequence.

        These are the keys of chunks, tails and states of every group.
        """
        low, high = first * CHUNK_BLOCKS, len(tokens) // self._block_tokens
        return [key for number in range(len(self._groups)) for key in self._blocks(seq_kv, number, tokens, low, high)]

    def kv_keys(self, seq_kv: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Return the keys of all whole chunks from number `first` on of every group that has KV, and of their tails.

        A tail ends where all but the last token were computed.
        """
        stop, last = len(tokens) // self.chunk_tokens, (len(tokens) - 1) // self._block_tokens
        kept = [number for number in range(len(self._groups)) if number not in self._states]
        found = [key for number in kept for key in self.keys(seq_kv, number, tokens, first, stop)]
        if last > max(first, stop) * CHUNK_BLOCKS:
            found += [seq_kv.chains[number].key(last - 1, tokens) for number in kept]
        return found

    def states(self, seq_kv: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Return the keys of states at the ends of all blocks from chunk `first` on; few of them exist."""
        low, high = first * CHUNK_BLOCKS, len(tokens) // self._block_tokens
        return [key for number in self._states for key in self._blocks(seq_kv, number, tokens, low, high)]

    def beginnings(self, seq_kv: SequenceKV, tokens: Sequence[int], first: int = 0) -> list[Beginning]:
        """Return the tokens after the last whole chunk, for every group, from chunk `first` on."""
        index = max(first, len(tokens) // self.chunk_tokens)
        if not (rest := tuple(tokens[index * self.chunk_tokens :])):
            return []
        return [Beginning(chain.before(index * CHUNK_BLOCKS, tokens), rest) for chain in seq_kv.chains]

    def chunk(
        self,
        seq_kv: SequenceKV,
        tokens: Sequence[int],
        number: int,
        depth: int,
        part: Sequence[int],
        pages: memoryview,
    ) -> Chunk | None:
        """Return a chunk or tail of a sequence made of pages from elsewhere; None if they do not fit its tokens.

        For a model with states only, return None: the key that a state extends cannot be known from these.
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
        heads = tuple(key[:HEAD_BYTES] for key in self._blocks(seq_kv, number, tokens, first, last))
        if state:
            parent = seq_kv.chains[leads].key(last, tokens)
        else:
            parent = seq_kv.chains[number].key(first - 1, tokens) if first else b""
        key = seq_kv.chains[number].key(last, tokens)
        return Chunk(key, parent, tuple(part), depth, pages, number, () if state else heads)

    def drop(self, store: Store, keys: Sequence[bytes], salt: bytes, tokens: Sequence[int], first: int) -> None:
        """Drop the keys of `all_keys` from a store, and those of other kernels or codecs from the disk.

        Their engines have the same cache groups, so only the identity in the keys differs.
        """
        store.drop(keys)
        if (durable := store.durable()) is not None:
            layout = Layout(self._block_tokens, self._groups)
            durable.drop_of_other_engines(lambda identity: layout.keys(identity, salt, tokens, first))


def _match_prefix(stores: Sequence[Store], keys: Sequence[bytes]) -> int:
    """Return how many leading keys one store or another has."""
    count = 0
    while count < len(keys) and (more := max(store.match_prefix(keys[count:]) for store in stores)):
        count += more
    return count


def _match_within(stores: Sequence[Store], keys: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return the longest `Store.match_within` of all stores."""
    found = [one for store in stores if (one := store.match_within(keys)) is not None] if keys else []
    return max(found, key=lambda one: one[0], default=None)
