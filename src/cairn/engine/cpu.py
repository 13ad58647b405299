"""The engine that runs everywhere: the recorded decoder over the CPU's kernels, KV in main memory.

KV of a group is one array [blocks, layers, 2, kv_heads, BLOCK_TOKENS, head_dim] of float32, bfloat16 or float16, or of
int8 with the bytes of scales beside each head's numbers; with 1 in the place of 2 where layers keep latents. That of a
state group is [blocks, layers, numbers] of float32. A block is contiguous over its group's layers, so a page is a view.
The engine holds weights, pools and step buffers, and nothing about requests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.config.config import Config
from cairn.engine.machine import cpu_count
from cairn.engine.memory import (
    WeightMemory,
    block_bytes,
    check_memory,
    kv_dtype,
    kv_page,
    placed,
    pool_blocks,
    running_rows,
    weight_memory,
)
from cairn.engine.sampling import sample
from cairn.kernels.base import Kernels
from cairn.kernels.choose import REFERENCE, chosen, described, load_kernels
from cairn.kernels.program import Interpreted, Program
from cairn.kernels.vocabulary import NUMPY, Sampler
from cairn.models.forward import decoder
from cairn.models.forward.buffers import LOGITS_ROWS, allocate
from cairn.models.forward.projection import Projection, ProjectionStep, open_projection
from cairn.models.forward.row_table import RowTable, open_table
from cairn.models.packing import packed_file, quantize
from cairn.models.packing.weight_format import HeldWeights, error_line, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.families import FAMILIES
from cairn.models.spec.value_range import fits_half, reach
from cairn.types.block_size import BLOCK_TOKENS
from cairn.types.layer_spec import CacheGroup
from cairn.types.model_spec import ModelSpec
from cairn.types.step import NO_BLOCK, NOT_FINITE, EngineInfo, Ready, Row, RowResult

LAYOUT = "blocks-2"
"""Version of the KV layout above."""

NOTHING = RowResult()
"""The result of a row that no logits were wanted of."""


class FittedModel(NamedTuple):
    """A model that fits the memory."""

    weights: HeldWeights
    memory: WeightMemory
    blocks: tuple[int, ...]
    """How many blocks the pool of each group has."""
    config: Config
    """The configuration as it was given, but for a type of KV that does not hold the model's numbers."""
    notes: tuple[str, ...]
    """What is to be told of that."""


class CpuEngine:
    """`engine.base.Engine` on the CPU."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Any],
        config: Config,
        blocks: tuple[int, ...],
        form: str = "stored",
        expected: int = 0,
        build: Callable[[Kernels, ModelSpec, Any], decoder.Decoder] = decoder.build,
        steps: tuple[ProjectionStep, ...] = (),
        rows: RowTable | None = None,
    ) -> None:
        """`weights` as they are to be held, in the `form` of `models.held`; `blocks` in the pool of each group.

        `expected`: bytes of stored KV that may be brought up soon, whose memory is taken now. `steps`: what a hidden
        state that is wanted goes through. `rows`: the table that a model's layers get inputs of, if they do.
        """
        if (rows is None) != (spec.uneven is None or not spec.uneven.inputs):
            raise ValueError("a table of layers' inputs belongs to a model that has them")
        self._rows = rows
        context = min(spec.context, config.context or spec.context)
        spec = spec.served(context)
        max_rows = running_rows(spec, config, blocks)
        self._kernels = load_kernels(config.kernels, config.threads or cpu_count())
        self._buffers = allocate(self._kernels, spec, config.step_tokens, max_rows, context)
        dtype = kv_dtype(spec, config)
        self._kv: list[NDArray[Any]] = [
            self._kernels.allocate((count, len(group.layers), *kv_page(spec, number, dtype)), _number(group, dtype))
            for number, (count, group) in enumerate(zip(blocks, spec.groups, strict=True))
        ]
        with taken(self._kv, expected):
            built = build(self._kernels, spec, weights)
        self._body: Program
        self._head: Program
        self._body, self._head = decoder.record(self._kernels, built, self._kv, self._buffers)
        self._sampler: Sampler = self._kernels.sampler(spec.vocab)
        self._norm = built.norm, built.eps
        self._projection = Projection(self._kernels, steps)
        self.info = EngineInfo(
            groups=spec.groups,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            block_bytes=block_bytes(spec, dtype),
            kv_dtype=dtype,
            context=context,
            vocab=spec.vocab,
            max_rows=max_rows,
            max_tokens=config.step_tokens,
            identity=identity(spec, self._kernels, form, dtype),
            device="cpu",
        )

    @classmethod
    def fit(cls, spec: ModelSpec, folder: Path, config: Config, blocks: tuple[int, ...] = ()) -> FittedModel:
        """The weights as they are to be held, if all of it fits the memory; `ModelError` otherwise.

        Only headers are read. `blocks`: of the pool of each group; none: as many as `pool_blocks` says.
        """
        source, notes = open_weights(folder, spec), list[str]()
        if spec.architecture in FAMILIES and FAMILIES[spec.architecture].nested:
            notes.append(f"{spec.name}: only its text part is loaded; it is served without images")
        if kv_dtype(spec, config) == "float16" and not fits_half(reached := reach(spec, source)):
            config = msgspec.structs.replace(config, kv_dtype="bf16")
            notes.append(
                f"{spec.name}: KV is held in bf16: keys or values may reach {reached:,.0f}, and f16 ends at 65,504"
            )
        weights = HeldWeights(source, form_of(spec, config.weights))
        taken = placed(spec, config, weight_memory(spec, weights, config.kernels))
        if taken.mapped:
            notes.append(
                f"{spec.name}: {taken.mapped / 1e9:.2f} GB of experts are mapped from the disk, "
                f"{taken.per_token / 1e9:.2f} GB of which a token goes through"
            )
        blocks = blocks or pool_blocks(spec, config, weights=taken)
        check_memory(spec, config, blocks, weights=taken)
        return FittedModel(weights, taken, blocks, config, tuple(notes))

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        folder: Path,
        config: Config,
        expected: int = 0,
        blocks: tuple[int, ...] = (),
        fit: FittedModel | None = None,
    ) -> CpuEngine:
        """The whole model, or an exception: memory and files are checked before anything is built.

        `fit`: what `fit` gave, where it was asked before; otherwise `blocks` are as there.
        """
        weights, taken, blocks, config, told = fit or cls.fit(spec, folder, config, blocks)
        notes = list(told)
        budget = None if config.keep_packed_gb is None else int(config.keep_packed_gb * 10**9)
        through = packed_file.build_mapped if taken.mapped else packed_file.build
        keep: Any = partial(through, place=folder, size=taken.held + taken.mapped, budget=budget)
        build = keep if config.keep_packed else decoder.build
        steps = open_projection(spec, folder, weights.source)
        rows = open_table(folder, spec)
        engine = cls(spec, weights, config, blocks, weights.form, expected, build, steps, rows)
        if config.kernels != REFERENCE and chosen(config.kernels) == REFERENCE:
            notes.append(described(config.kernels))
        if line := error_line(weights.errors, len(weights)):
            notes.append(f"{spec.name}: weights are held in the form {weights.form}; {line}")
        engine.info = dataclasses.replace(engine.info, note="; ".join(notes))
        return engine

    def prefill(self, rows: Sequence[Row]) -> Ready[list[RowResult]]:
        """Compute the rows' tokens in one step. Positions whose logits are wanted are sampled or scored."""
        if not rows:
            return Ready([])
        with np.errstate(all="ignore"):
            firsts = self._write_inputs(rows)
            tokens = firsts[-1] + rows[-1].end - rows[-1].start
            self._body.replay({"tokens": tokens, "rows": len(rows)})
            results = [NOTHING] * len(rows)
            self._read_hidden(rows, firsts, results)
            for slice_ in _slices(rows):
                self._sample(rows, firsts, slice_, results, tokens)
        return Ready(results)

    def embed(self, rows: Sequence[Row]) -> Ready[list[RowResult]]:
        """Rows of which hidden states are wanted: the same program, so the same bits."""
        return self.prefill(rows)

    def decode(self, rows: Sequence[Row]) -> Ready[list[RowResult]]:
        """Rows of one token each: the same program, so the same bits."""
        return self.prefill(rows)

    def read_blocks(self, group: int, ids: Sequence[int]) -> Ready[list[memoryview]]:
        """Views of the blocks: no copy."""
        return Ready([_bytes(self._kv[group][one]) for one in ids])

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> Ready[None]:
        """Copy pages into blocks; a page of another size is a `ValueError` and writes nothing."""
        size = self.info.block_bytes[group]
        if len(ids) != len(pages):
            raise ValueError(f"{len(pages)} pages for {len(ids)} blocks")
        if any(len(memoryview(page).cast("B")) != size for page in pages):
            raise ValueError(f"a page of group {group} has {size} bytes")
        for one, page in zip(ids, pages, strict=True):
            # Not memoryview's copy, which keeps other threads from running.
            np.copyto(_numbers(self._kv[group][one]), np.frombuffer(page, np.uint8))
        return Ready(None)

    def close(self) -> None:
        """Give the memory and the threads back; the engine cannot be used afterwards. A second call does nothing."""
        self._kernels.close()
        if self._rows is not None:
            self._rows.close()
        self._kv.clear()
        # Programs hold the weights and the pools.
        self._body = self._head = Interpreted(self._kernels, ())
        # And so does a sampler of their threads.
        self._sampler = NUMPY
        self._norm = None, 0.0
        self._projection = Projection(self._kernels, ())

    def _read_hidden(self, rows: Sequence[Row], firsts: list[int], results: list[RowResult]) -> None:
        """The normed states of the rows that want them, before the head reads what they stand in."""
        wanted = [number for number, row in enumerate(rows) if row.want == "hidden" and row.logits_from is not None]
        if not wanted:
            return
        states = self._buffers.hidden[[firsts[number] + rows[number].end - rows[number].start - 1 for number in wanted]]
        weight, eps = self._norm
        self._kernels.norm(states, weight, eps, states)
        for number, state in zip(wanted, self._projection(states), strict=True):
            finite = bool(np.isfinite(state).all())
            results[number] = RowResult(hidden=state.tobytes()) if finite else RowResult(error=NOT_FINITE)

    def _write_inputs(self, rows: Sequence[Row]) -> list[int]:
        """Fill the step's input buffers, each in one go; returns each row's first token in the step."""
        self._check(rows)
        buffers = self._buffers
        tokens, positions, firsts = list[int](), list[int](), list[int]()
        for row in rows:
            firsts.append(len(tokens))
            tokens += row.tokens[row.start : row.end]
            positions += range(row.start, row.end)
        count, counts = len(tokens), [row.end - row.start for row in rows]
        buffers.tokens[:count] = tokens
        if self._rows is not None:
            self._rows.read(tokens, buffers.uneven.rows[:count])
        buffers.positions[:count] = positions
        buffers.rows[: len(rows)] = [*zip(firsts, counts, [row.start for row in rows], strict=True)]
        numbers = np.repeat(np.arange(len(rows)), counts)
        blocks, offsets = np.divmod(buffers.positions[:count], BLOCK_TOKENS)
        for group, (table, slots) in enumerate(zip(buffers.tables, buffers.slots, strict=True)):
            for line, row in zip(table, rows, strict=False):
                filled = -(-row.end // BLOCK_TOKENS)
                line[:filled] = row.tables[group][:filled]
                line[filled:] = NO_BLOCK
            if self.info.groups[group].kind == "state":
                _check_states(rows, table)
                continue
            found = table[numbers, blocks]
            if found.min() < 0:
                raise ValueError("a row has a token without a block")
            slots[:count] = found * BLOCK_TOKENS + offsets
        if not 0 <= min(tokens) <= max(tokens) < self.info.vocab:
            raise ValueError("a row has a token outside the vocabulary")
        return firsts

    def _check(self, rows: Sequence[Row]) -> None:
        """Broken rows are our own bug; they are refused before anything is written."""
        tokens = sum(row.end - row.start for row in rows)
        if len(rows) > self.info.max_rows or tokens > self.info.max_tokens:
            raise ValueError(f"{len(rows)} rows with {tokens} tokens are more than the engine takes in one step")
        for row in rows:
            if not 0 <= row.start < row.end <= min(self.info.context, len(row.tokens)):
                raise ValueError(f"a row cannot compute [{row.start}, {row.end}) of {len(row.tokens)} tokens")
            if len(row.tables) != len(self.info.groups) or min(map(len, row.tables)) * BLOCK_TOKENS < row.end:
                raise ValueError("a row needs a table of all its blocks in each group")

    def _sample(
        self,
        rows: Sequence[Row],
        firsts: list[int],
        slice_: list[tuple[int, int, int]],
        results: list[RowResult],
        tokens: int,
    ) -> None:
        """Run the head for one slice of wanted positions and fold what it gives into `results`."""
        wanted = [
            firsts[row] + position - rows[row].start for row, low, high in slice_ for position in range(low, high)
        ]
        self._buffers.wanted[: len(wanted)] = wanted
        self._head.replay({"tokens": tokens, "logits": len(wanted)})
        # A row that wants more positions than a slice holds is seen by the sampler as several shorter rows.
        pieces = [
            rows[row]
            if (low, high) == (rows[row].logits_from, rows[row].end)
            else msgspec.structs.replace(rows[row], logits_from=low, end=high)
            for row, low, high in slice_
        ]
        sampled = sample(pieces, self._buffers.logits[: len(wanted)], self._sampler)
        for (row, _, _), result in zip(slice_, sampled, strict=True):
            results[row] = result if results[row] is NOTHING else _joined(results[row], result)


def _number(group: CacheGroup, dtype: str) -> str:
    """numpy's name of the type of what a group keeps, where KV has `dtype`."""
    return "float32" if group.kind == "state" else dtype


def _check_states(rows: Sequence[Row], table: NDArray[np.int32]) -> None:
    """A row begins with a state and leaves one; others of its table may be missing."""
    for line, row in zip(table, rows, strict=False):
        if line[(row.end - 1) // BLOCK_TOKENS] < 0 or (row.start and line[(row.start - 1) // BLOCK_TOKENS] < 0):
            raise ValueError("a row has no block for its state")


def _joined(before: RowResult, result: RowResult) -> RowResult:
    """What two runs of a row's positions gave, in order."""
    return msgspec.structs.replace(
        result,
        token=None if before.error else result.token,
        error=before.error or result.error,
        prompt_logprobs=before.prompt_logprobs + result.prompt_logprobs,
    )


def _slices(rows: Sequence[Row]) -> Iterator[list[tuple[int, int, int]]]:
    """The wanted positions as (row, low, high), in slices of at most `LOGITS_ROWS` positions."""
    slice_: list[tuple[int, int, int]] = []
    room = LOGITS_ROWS
    for number, row in enumerate(rows):
        low = row.end if row.logits_from is None or row.want == "hidden" else row.logits_from
        while low < row.end:
            high = min(row.end, low + room)
            slice_.append((number, low, high))
            room -= high - low
            low = high
            if not room:
                yield slice_
                slice_, room = [], LOGITS_ROWS
    if slice_:
        yield slice_


def _bytes(block: NDArray[Any]) -> memoryview:
    """A block's page: not every type of number has a memoryview of its own."""
    return _numbers(block).data


def _numbers(block: NDArray[Any]) -> NDArray[np.uint8]:
    """A view of a block's bytes."""
    return block.reshape(-1).view(np.uint8)


def identity(spec: ModelSpec, kernels: Kernels, form: str, kv_dtype: str) -> bytes:
    """Root of the KV keys: the model, the form of its weights, the KV's type and layout, and all about these kernels
    that can move a bit."""
    facts = (LAYOUT, kv_dtype, BLOCK_TOKENS, kernels.numerics, quantize.VERSION, form)
    own = repr(facts) + ("long rope" if spec.long else "")
    return hashlib.sha256(spec.identity + own.encode()).digest()


PAGE = 4096
_SLICE = 4 << 20


@contextmanager
def taken(pools: Sequence[NDArray[Any]], size: int) -> Iterator[None]:
    """Write zeros into each page of the first `size` bytes of the pools, of each in proportion, beside the body.

    The system gives out memory page by page, when each is first written to, which takes as long as it does to read as
    much stored KV. A context that is asked for right after a restart should not wait for both, so the blocks that will
    be used first are taken while weights are loaded.

    Nobody else may write to them meanwhile. What is not done at the end of the body is left undone.
    """
    over = threading.Event()
    whole = sum(pool.nbytes for pool in pools)

    def write() -> None:
        for pool in pools:
            numbers = pool.reshape(-1).view(np.uint8)
            numbers = numbers[: len(numbers) * min(size, whole) // whole]
            for at in range(0, len(numbers), _SLICE):
                if over.is_set():
                    return
                numbers[at : at + _SLICE : PAGE] = 0

    thread = threading.Thread(target=write, name="cairn-kv-pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
