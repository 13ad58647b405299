"""An engine without a model, whose output shows every mistake of the layers above it.

Each KV slot holds a 64-bit digest of the whole prefix up to its position, chained from the digest that is *read* from
the slot before it. The logits of a position come from all digests that it may attend to, read back through the block
table: the whole prefix in a full-attention group, the window in a window group. So a wrong table, position, window,
stale block or page changes the tokens. Of a state group a block holds one digest alone: that of the prefix up to the
position after which it was written, and the logits come from the digest of their own position. The real sampler picks
the tokens. `FakeEngine.oracle` knows the right answer without any KV: tests compare.

Arithmetic is modulo 2**64:

    digest[p]   = MULTIPLIER * digest[p - 1] + mix(token[p], p, group, adapters)
    state[p]    = mix(sum over groups of mix(sum over readable q <= p of weight[q] * digest[q]))
                  of a state group only of weight[p] * digest[p]
    logits[p]   = a slice of fixed noise and a few peaks, both chosen by state[p]

Hidden states that a row wants beside its token are these states, 8 bytes each.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.engine.row_results import sample
from cairn.kernels.sampling import NUMPY, Sampler
from cairn.models.files import reading
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup, ModelSpec
from cairn.types.request import Adapters, SamplingParams
from cairn.types.step import (
    NO_ADAPTER,
    NO_BLOCK,
    NO_TOKEN,
    AdapterData,
    AdapterFacts,
    EngineCall,
    EngineInfo,
    Ready,
    Row,
    RowResult,
    check_guesses,
)

_MULTIPLIER = 0xD1342543DE82EF95
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(_MULTIPLIER)
_NOISE = 4096
_PEAKS = 8
_HIDDEN = 8
"""Numbers of a hidden state, as `fake_spec` says."""
STATE = -1
"""In the place of a window: a group of recurrent states."""

Words = NDArray[np.uint64]
Floats = NDArray[np.float32]


def fake_spec(vocab: int = 256, context: int = 2048, windows: Sequence[int] = (0,)) -> ModelSpec:
    """Return a model spec for tests: one cache group for each of `windows`, 0 for full attention, or `STATE`."""
    groups = tuple(
        CacheGroup(kind="state", layers=(layer,), numbers=2)
        if window == STATE
        else CacheGroup(kind="window" if window else "full", layers=(layer,), window=window)
        for layer, window in enumerate(windows)
    )
    return ModelSpec(
        name="fake",
        architecture="fake",
        layers=len(groups),
        hidden=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        ffn=8,
        vocab=vocab,
        context=context,
        norm_eps=1e-6,
        rope_theta=10000.0,
        groups=groups,
        identity=b"fake",
    )


class FakeEngine:
    """An `Engine` over digests. Broken rows raise `ValueError` before anything is written."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        blocks: int | Sequence[int],
        block_tokens: int = BLOCK_TOKENS,
        context: int | None = None,
        max_rows: int = 4096,
        max_tokens: int = 1 << 16,
        step_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        sampler: Sampler = NUMPY,
    ) -> None:
        """`blocks`: the pool of each group, or one size for all. `step_seconds`: how long a call pretends to take."""
        sizes = (blocks,) * len(spec.groups) if isinstance(blocks, int) else tuple(blocks)
        if len(sizes) != len(spec.groups):
            raise ValueError(f"{len(sizes)} pool sizes for {len(spec.groups)} cache groups")
        if any(group.kind == "window" and group.window < 2 for group in spec.groups):
            raise ValueError("a window of one position cannot chain digests")
        self._step_seconds = step_seconds
        self._sampler = sampler
        self._sleep = sleep
        self._block_tokens = block_tokens
        length = min(context or spec.context, spec.context)
        self._info = EngineInfo(
            groups=spec.groups,
            blocks=sizes,
            block_tokens=block_tokens,
            block_bytes=tuple(8 if group.kind == "state" else 8 * block_tokens for group in spec.groups),
            context=length,
            vocab=spec.vocab,
            max_rows=max_rows,
            max_tokens=max_tokens,
            identity=hashlib.sha256(
                b"fake engine 2" + spec.identity + repr((spec.vocab, spec.groups)).encode()
            ).digest(),
            device="fake",
            device_text="no device: tokens are made up",
        )
        # A generator for each, so that neither the pools nor the context change what the identity stands for.
        kinds = ("kv", "seeds", "salt", "weights", "noise")
        random = {kind: np.random.Generator(np.random.PCG64((20, n))) for n, kind in enumerate(kinds)}
        padded = -(-length // block_tokens)
        widths = [1 if group.kind == "state" else block_tokens for group in spec.groups]
        self._kv = [
            random["kv"].integers(0, 1 << 64, shape, dtype=np.uint64) for shape in zip(sizes, widths, strict=True)
        ]
        self._attached: set[bytes] = set()
        self._sampled: list[int | None] = []
        """The tokens that the rows of the last step sampled."""
        self._passed: dict[tuple[int, int], Words] = {}
        """Digests of state groups that the rows of a call went through, by group and row."""
        self._seeds = random["seeds"].integers(0, 1 << 64, len(sizes), dtype=np.uint64)
        self._salt = random["salt"].integers(0, 1 << 64, padded * block_tokens, dtype=np.uint64)
        self._weights = random["weights"].integers(0, 1 << 64, (padded, block_tokens), dtype=np.uint64) | np.uint64(1)
        self._noise = random["noise"].random(spec.vocab + _NOISE, dtype=np.float32)
        ones = np.full((block_tokens, block_tokens), _MASK, dtype=np.uint64)
        self._masks_up_to, self._masks_from = np.tril(ones), np.triu(ones)
        """Masks of one block's slots: up to one of them, and from one of them on."""
        self._peaks = np.arange(1, _PEAKS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._heights = np.linspace(8, 3, _PEAKS, dtype=np.float32)

    @property
    def info(self) -> EngineInfo:
        """Groups, pools and limits."""
        return self._info

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Implement `Engine.prefill`."""
        if self._step_seconds:
            self._sleep(self._step_seconds)
        rows, missing = self._with_tokens(rows)
        self._check(rows)
        self._passed.clear()
        for number, group in enumerate(self._info.groups):
            self._advance(number, rows) if group.kind == "state" else self._write(number, rows)
        plain = [row for row in rows if row.want == "token"]
        wanted = [(row, p) for row in plain if row.logits_from is not None for p in range(row.logits_from, row.end)]
        if not wanted:
            found = [RowResult() for _ in plain]
        else:
            found = sample(plain, self._logits(self._states(wanted)), self._sampler)
        results = found
        if len(plain) < len(rows):
            sampled = iter(found)
            results = [next(sampled) if row.want == "token" else self._hidden(row) for row in rows]
        for number in missing:
            results[number] = RowResult(error=NO_TOKEN)
        for number, row in enumerate(rows):
            if row.states_from is not None and not results[number].error:
                places = [(row, place) for place in range(row.states_from, row.end)]
                results[number] = msgspec.structs.replace(results[number], states=self._states(places).tobytes())
            if row.adapters and not self._attached.issuperset(digest for digest, _ in row.adapters):
                results[number] = RowResult(error=NO_ADAPTER)
        self._sampled = [result.token for result in results]
        return Ready(results)

    def _with_tokens(self, rows: Sequence[Row]) -> tuple[Sequence[Row], list[int]]:
        """Return the rows with their pending tokens, and the numbers of those whose token never came."""
        if not [row for row in rows if row.pending is not None]:
            return rows, []
        known, missing = list(rows), list[int]()
        for number, row in enumerate(rows):
            check_guesses(row)
            if row.pending is None:
                continue
            token = self._sampled[row.pending] if row.pending < len(self._sampled) else None
            if token is None:
                missing.append(number)
            tokens = [*row.tokens[: row.start], 0 if token is None else token]
            known[number] = msgspec.structs.replace(row, tokens=tokens, pending=None)
        return known, missing

    def embed(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows as `prefill` does: a hidden state is noise derived from the row's digests."""
        return self.prefill(rows)

    def _hidden(self, row: Row) -> RowResult:
        if row.logits_from is None:
            return RowResult()
        return RowResult(hidden=self._vector(self._states([(row, row.end - 1)])))

    def _vector(self, state: Words) -> bytes:
        (start,) = (state % np.uint64(_NOISE)).tolist()
        return np.ascontiguousarray(self._noise[start : start + _HIDDEN]).tobytes()

    def decode(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Implement `Engine.decode`."""
        if [row for row in rows if row.end - row.start != 1]:
            raise ValueError("decode takes rows of exactly one token")
        return self.prefill(rows)

    def read_blocks(self, group: int, ids: Sequence[int]) -> EngineCall[list[memoryview]]:
        """Return pages of digests."""
        return Ready([memoryview(self._kv[group][block]).cast("B") for block in ids])

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> EngineCall[None]:
        """Put pages of digests into blocks."""
        for block, page in zip(ids, pages, strict=True):
            self._kv[group][block] = np.frombuffer(page, dtype=np.uint64)
        return Ready(None)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        """Copy digests from block to block."""
        for source, target in pairs:
            self._kv[group][target] = self._kv[group][source]
        return Ready(None)

    def read_adapter(self, place: Path) -> FakeAdapter:
        """Read an adapter, which is any file: its content is its digest."""
        with reading(place):
            return FakeAdapter(hashlib.sha256(place.read_bytes()).digest())

    def attach(self, adapter: AdapterData) -> AdapterFacts:
        """Let rows use an adapter: it changes every digest."""
        self._attached.add(adapter.digest)
        return AdapterFacts(adapter.digest, 1, 1, 0)

    def detach(self, digest: bytes) -> None:
        """Forget an adapter."""
        self._attached.discard(digest)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    # ------------------------------------------------------------------------------------------------- the truth

    def oracle(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        n: int,
        choice: int = 0,
        mask: Callable[[Sequence[int]], bytes | None] | None = None,
        adapters: Adapters = (),
    ) -> list[int]:
        """Return the first `n` tokens after `prompt`, fewer if a stop token ends them (it is the last one then).

        `mask` returns the allowed tokens after a part of the answer, as `Row.mask`. `adapters`: as `Row.adapters`.
        """
        tokens, out = list(prompt), list[int]()
        mu = 2 * sampling.extras.mirostat_tau if sampling.extras is not None else 0.0
        truth = _Truth(self, adapters)
        while len(out) < n:
            state = truth.state(tokens)
            allowed = None if mask is None else mask(out)
            held = None if allowed is None else Ready(allowed)
            last = len(tokens) - 1
            row = Row(tokens, last, last + 1, (), last, len(prompt), sampling, choice, mu=mu, mask=held)
            result = sample([row], self._logits(np.array([state], dtype=np.uint64)))[0]
            if result.token is None:
                raise ValueError(f"the sampler refused: {result.error}")
            mu = mu if result.mu is None else result.mu
            tokens.append(result.token)
            out.append(result.token)
            if result.token in sampling.stop_token_ids and len(out) > sampling.min_tokens:
                break
        return out

    def oracle_logits(self, tokens: Sequence[int]) -> Floats:
        """Return the logits after each of `tokens`, float32 [len(tokens), vocab]."""
        truth = _Truth(self)
        states = [truth.state(tokens[: end + 1]) for end in range(len(tokens))]
        return self._logits(np.array(states, dtype=np.uint64))

    def oracle_vector(self, tokens: Sequence[int]) -> bytes:
        """Return the hidden state of a whole text."""
        return self._vector(np.array([_Truth(self).state(tokens)], dtype=np.uint64))

    # ------------------------------------------------------------------------------------------------- arithmetic

    def _check(self, rows: Sequence[Row]) -> None:
        """Refuse rows that break the contract of `Row`, or that write one block from two rows."""
        size, info = self._block_tokens, self._info
        if len(rows) > info.max_rows or sum([row.end - row.start for row in rows]) > info.max_tokens:
            raise ValueError("more rows or tokens in one call than the engine takes")
        written: list[tuple[int, int]] = []
        begun = set[tuple[int, int]]()
        for row in rows:
            if not 0 <= row.start < row.end <= len(row.tokens) or row.end > info.context:
                raise ValueError(f"a row of {len(row.tokens)} tokens cannot compute [{row.start}, {row.end})")
            if row.logits_from is not None and not row.start <= row.logits_from < row.end:
                raise ValueError("logits are wanted outside the row")
            if row.states_from is not None and not row.start <= row.states_from < row.end:
                raise ValueError("states are wanted outside the row")
            check_guesses(row)
            for number, (group, table) in enumerate(zip(info.groups, row.tables, strict=True)):
                if group.kind == "state":
                    written += self._check_state(number, row)
                    if row.start and row.start % size == 0:
                        begun.add((number, table[row.start // size - 1]))
                    continue
                first = max(0, row.start - group.window + 1) // size if group.window else 0
                blocks = table[first : (row.end - 1) // size + 1]
                if len(blocks) != (row.end - 1) // size + 1 - first or min(blocks) <= NO_BLOCK:
                    raise ValueError("a block table lacks blocks that the row reads or writes")
                written += [(number, block) for block in table[row.start // size : (row.end - 1) // size + 1]]
        if len(set(written)) != len(written):
            raise ValueError("two rows of one step write the same block")
        if not begun.isdisjoint(written):
            raise ValueError("a row writes over a state that is read")

    def _check_state(self, number: int, row: Row) -> list[tuple[int, int]]:
        """Return the blocks that a row writes in a state group; raise ValueError if it lacks one it needs."""
        size, table = self._block_tokens, row.tables[number]
        first, last = row.start // size, (row.end - 1) // size
        before = (row.start - 1) // size if row.start else last
        if len(table) <= last or min(table[before], table[last]) <= NO_BLOCK:
            raise ValueError("a block table lacks the state that the row reads or leaves")
        return [(number, block) for block in table[first : last + 1] if block != NO_BLOCK]

    def _advance(self, number: int, rows: Sequence[Row]) -> None:
        """Carry the rows' states on from what their tables lead to, and leave them where the tables have a block."""
        size, kv = self._block_tokens, self._kv[number].reshape(-1)
        begun = [int(kv[row.tables[number][(row.start - 1) // size]]) for row in rows]
        for row, digest in zip(rows, begun, strict=True):
            table, parts = row.tables[number], self._parts(number, row, row.start)
            digests = self._chained(digest if row.start else int(self._seeds[number]), parts)
            self._passed[number, id(row)] = digests
            for position in range(row.start, row.end):
                if (position + 1) % size == 0 and table[position // size] != NO_BLOCK:
                    kv[table[position // size]] = digests[position - row.start]
            kv[table[(row.end - 1) // size]] = digests[-1]

    def _parts(self, number: int, row: Row, first: int) -> Words:
        """Return what each position of a row from `first` on adds to the digest before it."""
        tokens = np.array(row.tokens[first : row.end], dtype=np.uint64)
        return _mix(tokens + self._salt[first : row.end] + self._seeds[number] + np.uint64(_word_of(row.adapters)))

    def _chained(self, digest: int, parts: Words) -> Words:
        """Return the digests that follow this one."""
        digests = []
        for part in parts.tolist():
            digest = (digest * _MULTIPLIER + part) & _MASK
            digests.append(digest)
        return np.array(digests, dtype=np.uint64)

    def _write(self, number: int, rows: Sequence[Row]) -> None:
        """Compute and store the digests of the rows' positions in one group."""
        size, kv = self._block_tokens, self._kv[number]
        before = [row.tables[number][(row.start - 1) // size] * size + (row.start - 1) % size for row in rows]
        digests = kv.reshape(-1)[before]
        starts = np.array([row.start for row in rows])
        digests[starts == 0] = self._seeds[number]
        tokens = np.array([row.tokens[row.start] for row in rows], dtype=np.uint64)
        parts = tokens + self._salt[starts] + self._seeds[number]
        if [row for row in rows if row.adapters]:
            parts += np.array([_word_of(row.adapters) for row in rows], dtype=np.uint64)
        digests = digests * _STEP + _mix(parts)
        slots = [row.tables[number][row.start // size] * size + row.start % size for row in rows]
        kv.reshape(-1)[slots] = digests
        for row, digest in zip(rows, digests, strict=True):
            if row.end - row.start > 1:
                self._write_rest(number, row, int(digest))

    def _write_rest(self, number: int, row: Row, digest: int) -> None:
        """Write a row's positions after its first, each digest from the one before."""
        size, first, table = self._block_tokens, row.start + 1, row.tables[number]
        digests = self._chained(digest, self._parts(number, row, first))
        positions = np.arange(first, row.end)
        self._kv[number][np.array(table)[positions // size], positions % size] = digests

    def _states(self, wanted: Sequence[tuple[Row, int]]) -> Words:
        """Return the state of each wanted position, from the digests that its table leads to."""
        size, total = self._block_tokens, np.zeros(len(wanted), dtype=np.uint64)
        for number, group in enumerate(self._info.groups):
            if group.kind == "state":
                passed = [self._passed[number, id(row)][position - row.start] for row, position in wanted]
                weights = self._weights.reshape(-1)[[position for _, position in wanted]]
                total += _mix(np.array(passed, dtype=np.uint64) * weights + self._seeds[number])
                continue
            blocks, index, starts, ends = list[int](), list[int](), list[int](), list[int]()
            for row, position in wanted:
                head = max(0, position - group.window + 1) // size if group.window else 0
                tail = position // size + 1
                starts.append(len(blocks))
                blocks += row.tables[number][head:tail]
                index += range(head, tail)
                ends.append(len(blocks) - 1)
            values = self._kv[number][blocks] * self._weights[index]
            values[ends] &= self._masks_up_to[[position % size for _, position in wanted]]
            if group.window:
                values[starts] &= self._masks_from[
                    [max(0, position - group.window + 1) % size for _, position in wanted]
                ]
            sums = np.add.reduceat(values, starts, axis=0).sum(axis=1, dtype=np.uint64)
            total += _mix(sums + self._seeds[number])
        return _mix(total)

    def _logits(self, states: Words) -> Floats:
        """Return logits, float32 [n, vocab]: noise and peaks, both chosen by the states."""
        vocab = self._info.vocab
        out = np.empty((len(states), vocab), dtype=np.float32)
        for line, start in zip(out, (states % np.uint64(_NOISE)).tolist(), strict=True):
            line[:] = self._noise[start : start + vocab]
        peaks = (_mix(states[:, None] + self._peaks) % np.uint64(vocab)).astype(np.int64)
        out[np.arange(len(states))[:, None], peaks[:, ::-1]] = self._heights[::-1]
        return out


class FakeAdapter(NamedTuple):
    """An adapter of a `FakeEngine`."""

    digest: bytes


class _Truth:
    """Digests of a growing list of tokens, straight from the definition: no blocks, no tables."""

    def __init__(self, engine: FakeEngine, adapters: Adapters = ()) -> None:
        self._engine, self._adapters = engine, _word_of(adapters)
        self._groups: tuple[CacheGroup, ...] = engine.info.groups
        self._digests = [int(seed) for seed in engine._seeds]
        self._sums: list[list[int]] = [[0] for _ in self._groups]

    def state(self, tokens: Sequence[int]) -> int:
        engine = self._engine
        weights, salt = engine._weights.reshape(-1), engine._salt
        for position in range(len(self._sums[0]) - 1, len(tokens)):
            for number, sums in enumerate(self._sums):
                seed = int(engine._seeds[number])
                part = _mix_int(tokens[position] + int(salt[position]) + seed + self._adapters)
                digest = (self._digests[number] * _MULTIPLIER + part) & _MASK
                self._digests[number] = digest
                sums.append(sums[-1] + int(weights[position]) * digest)
        total = 0
        for number, (group, sums) in enumerate(zip(self._groups, self._sums, strict=True)):
            first = max(0, len(tokens) - group.window) if group.window else 0
            first = len(tokens) - 1 if group.kind == "state" else first
            total += _mix_int(sums[len(tokens)] - sums[first] + int(engine._seeds[number]))
        return _mix_int(total)


def _word_of(adapters: Adapters) -> int:
    """Return what a row's adapters add to each of its digests: 0 for none."""
    if not adapters:
        return 0
    return int.from_bytes(hashlib.sha256(repr(adapters).encode()).digest()[:8], "little")


def _mix(words: Words) -> Words:
    """Apply the finaliser of splitmix64: every bit of the input changes half of the output's."""
    mixed: Words = words >> _SHIFTS[0]
    mixed ^= words
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def _mix_int(word: int) -> int:
    """Return `_mix` of one number."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
