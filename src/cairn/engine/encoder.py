"""The engine of whole texts: texts in, one vector or some scores a text out; nothing is kept between steps.

It serves encoders, and decoders whose vectors need more than the last token's state.

Texts of all lengths are packed behind each other, each into blocks of its own, so a step costs what its tokens cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cairn.config.config import Config
from cairn.engine.machine import cpu_count
from cairn.engine.memory import check_memory, device_memory, kernels_of, weight_memory, whole_context
from cairn.kernels import devices
from cairn.kernels.base import Kernels
from cairn.kernels.choose import REFERENCE, described
from cairn.kernels.program import Interpreted, Program, Slot
from cairn.models.forward import decoder, encoder
from cairn.models.forward.buffers import allocate
from cairn.models.forward.projection import Pooled, ProjectionStep, open_projection, record_projection
from cairn.models.packing.weight_format import HeldWeights, error_line, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.types.errors import ModelError
from cairn.types.model_spec import BLOCK_TOKENS, EncoderSpec, ModelSpec
from cairn.types.step import (
    NO_BLOCK,
    NOT_FINITE,
    AdapterData,
    AdapterFacts,
    EngineCall,
    EngineInfo,
    Ready,
    Row,
    RowResult,
)

Floats = NDArray[np.float32]


class EncoderEngine:
    """A `types.step.Engine` for texts that are computed whole."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Any],
        config: Config,
        identity: bytes,
        steps: tuple[ProjectionStep, ...] = (),
    ) -> None:
        """Pack the weights and record the encoder. `steps`: projections of a pooled state."""
        self._first, self._types = (spec.encoder.first_position, spec.encoder.type_rows) if spec.encoder else (0, 0)
        self._pooling = spec.embedding.pooling
        context = whole_context(spec, config)
        rows, tokens = min(config.max_running, config.step_tokens), max(config.step_tokens, context)
        self._kernels = devices.load(config.device, config.kernels, config.threads or cpu_count())
        self._stream = self._kernels.stream()
        page = (1, 2, spec.kv_heads, BLOCK_TOKENS, spec.head_dim)
        kv = self._kernels.allocate((encoder.kv_blocks(tokens, rows), *page), "float32")
        behind = record_projection(self._kernels, rows, steps)
        if spec.encoder is None:
            self._record_decoder(spec, weights, kv, (tokens, rows, context))
        else:
            behind = self._record_encoder(spec, spec.encoder, weights, kv, (tokens, rows, context)) or behind
        self._pooled = Pooled(self._kernels, rows, spec.hidden, behind)
        self._mirrors = _Mirrors(self._kernels, self._buffers, self._table, self._slots)
        self.info = EngineInfo(
            groups=(),
            blocks=(),
            block_tokens=BLOCK_TOKENS,
            block_bytes=(),
            context=context,
            vocab=spec.vocab,
            max_rows=rows,
            max_tokens=tokens,
            identity=identity,
            device=devices.resolved(config.device),
            device_text=devices.report(config.device, config.kernels).sentence,
            generates=False,
        )

    def _record_encoder(
        self, spec: ModelSpec, own: EncoderSpec, weights: Mapping[str, Any], kv: Any, sizes: tuple[int, int, int]
    ) -> Callable[[Any, Slot], Slot] | None:
        """Record the body; return what records a head of labels, if the model has one."""
        self._buffers: Any = encoder.allocate(self._kernels, spec, *sizes)
        if own.positions == "learned":  # nothing is turned: cosines are 1, sines 0
            angles = self._buffers.angles[0]
            plain = self._kernels.mirror(angles)
            plain[:, 0], plain[:, 1] = 1, 0
            self._kernels.upload([(angles, plain)])
        model = encoder.build(self._kernels, spec, weights)
        self._body: Program = encoder.record(self._kernels, model, kv, self._buffers)
        self._table, self._slots = self._buffers.tables, self._buffers.slots
        if not own.labels:
            return None
        shapes = (spec.hidden, spec.hidden, own.labels)
        return encoder.record_head(
            model, encoder.HeadBuffers(*(self._kernels.allocate((sizes[1], size), "float32") for size in shapes))
        )

    def _record_decoder(
        self, spec: ModelSpec, weights: Mapping[str, Any], kv: Any, sizes: tuple[int, int, int]
    ) -> None:
        buffers = allocate(self._kernels, spec, *sizes)
        # Every group has the same blocks: each layer writes them anew.
        self._table, self._slots = buffers.tables[0], buffers.slots[0]
        groups = len(spec.groups)
        self._buffers = dataclasses.replace(buffers, tables=(self._table,) * groups, slots=(self._slots,) * groups)
        model = decoder.build(self._kernels, spec, weights)
        layers = tuple(dataclasses.replace(layer, index=0) for layer in model.layers)
        model = dataclasses.replace(model, layers=layers)
        self._body = decoder.record_states(self._kernels, model, (kv,) * groups, self._buffers)

    @classmethod
    def load(cls, spec: ModelSpec, folder: Path, config: Config) -> EncoderEngine:
        """Load the whole model or raise ModelError; memory and files are checked before anything is built."""
        source = open_weights(folder, spec)
        weights = HeldWeights(source, form_of(spec, config.weights))
        taken = weight_memory(spec, weights, kernels_of(config))
        check_memory(spec, config, (), device_memory(config), taken)
        engine = cls(spec, weights, config, spec.identity, open_projection(spec, folder, source))
        notes = []
        if config.kernels != REFERENCE and kernels_of(config) == REFERENCE:
            notes.append(described(config.kernels))
        if line := error_line(weights.errors, len(weights)):
            notes.append(f"{spec.name}: weights are held in the form {weights.form}; {line}")
        engine.info = dataclasses.replace(engine.info, note="; ".join(notes))
        return engine

    def embed(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute whole texts in one step."""
        if not rows:
            return Ready([])
        self._check(rows)
        return self._stream.submit(partial(self._compute, rows))

    def _compute(self, rows: Sequence[Row]) -> list[RowResult]:
        """Run a step, on the stream."""
        with np.errstate(all="ignore"):
            firsts = self._write_inputs(rows)
            blocks = max(-(-row.end // BLOCK_TOKENS) for row in rows)
            self._body.replay({"tokens": firsts[-1] + rows[-1].end, "rows": len(rows), "blocks": blocks})
            return [_result(one) for one in self._pool(rows, firsts)]

    def _pool(self, rows: Sequence[Row], firsts: Sequence[int]) -> Floats:
        """Return the pooled state of each text. A mean is summed in float64, position by position."""
        if self._pooling == "mean":
            states = self._kernels.fetch(self._kernels.first(self._buffers.hidden, firsts[-1] + rows[-1].end))
            sums = [
                states[first : first + row.end].sum(axis=0, dtype=np.float64) / row.end
                for first, row in zip(firsts, rows, strict=True)
            ]
            return self._pooled.of(np.stack(sums).astype(np.float32))
        ends = [0 if self._pooling == "cls" else row.end - 1 for row in rows]
        return self._pooled.gather(self._buffers.hidden, [first + end for first, end in zip(firsts, ends, strict=True)])

    def _write_inputs(self, rows: Sequence[Row]) -> list[int]:
        """Fill and upload the step's inputs; return each text's first token in the step."""
        b = self._mirrors
        first, block, firsts = 0, 0, list[int]()
        b.tables[: len(rows)] = NO_BLOCK
        for number, row in enumerate(rows):
            firsts.append(first)
            part, places = slice(first, first + row.end), np.arange(row.end, dtype=np.int32)
            b.tokens[part] = row.tokens[: row.end]
            b.positions[part] = places + self._first
            b.members[part] = number
            if self._types and b.types is not None:
                b.types[part] = (places >= row.second) if row.second and self._types > 1 else 0
            b.rows[number] = first, row.end, 0
            b.slots[part] = block * BLOCK_TOKENS + places
            blocks = -(-row.end // BLOCK_TOKENS)
            b.tables[number, :blocks] = np.arange(block, block + blocks)
            first, block = first + row.end, block + blocks
        b.upload(first, len(rows))
        return firsts

    def _check(self, rows: Sequence[Row]) -> None:
        if len(rows) > self.info.max_rows or sum(row.end for row in rows) > self.info.max_tokens:
            raise ValueError("more texts or tokens in one step than the engine takes")
        for row in rows:
            if row.start or row.want != "hidden" or not 0 < row.end == len(row.tokens) <= self.info.context:
                raise ValueError("the row must be a whole text of which the hidden state is wanted")

    def prefill(self, rows: Sequence[Row]) -> NoReturn:
        """Raise ValueError: an encoder generates nothing."""
        raise ValueError("an encoder generates nothing")

    def decode(self, rows: Sequence[Row]) -> NoReturn:
        """Raise ValueError: an encoder generates nothing."""
        raise ValueError("an encoder generates nothing")

    def read_blocks(self, group: int, ids: Sequence[int]) -> NoReturn:
        """Raise ValueError: an encoder has no cache groups."""
        raise ValueError("an encoder keeps nothing")

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> NoReturn:
        """Raise ValueError: an encoder has no cache groups."""
        raise ValueError("an encoder keeps nothing")

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> NoReturn:
        """Raise ValueError: an encoder has no cache groups."""
        raise ValueError("an encoder keeps nothing")

    def read_adapter(self, place: Path) -> AdapterData:
        """Raise ModelError: adapters are for models that generate text."""
        raise ModelError(f"{place}: an adapter cannot be attached to an encoder")

    def attach(self, adapter: AdapterData) -> AdapterFacts:
        """Raise ModelError, as `read_adapter` does."""
        raise ModelError("an adapter cannot be attached to an encoder")

    def detach(self, digest: bytes) -> None:
        """Do nothing: no adapter is attached."""

    def close(self) -> None:
        """Free memory and threads. A second call does nothing."""
        self._stream.close()
        self._body = Interpreted(self._kernels, ())
        self._pooled.close()
        self._kernels.close()


class _Mirrors:
    """The inputs of a step as numpy arrays to fill, and the kernels' arrays that they go to."""

    def __init__(self, kernels: Kernels, buffers: Any, tables: Any, slots: Any) -> None:
        """Mirror the buffers of an encoder or a decoder; only an encoder's have token types."""
        types = getattr(buffers, "types", None)
        self._kernels = kernels
        self._by_token = [buffers.tokens, buffers.positions, buffers.members, slots]
        self._by_token += [] if types is None else [types]
        self._by_row = [buffers.rows, tables]
        self.tokens, self.positions, self.members, self.slots, *more = map(kernels.mirror, self._by_token)
        self.types = more[0] if more else None
        self.rows, self.tables = map(kernels.mirror, self._by_row)

    def upload(self, tokens: int, rows: int) -> None:
        """Copy the first `tokens` and `rows` entries."""
        filled = (self.tokens, self.positions, self.members, self.slots, *(() if self.types is None else (self.types,)))
        pairs = [(array, one[:tokens]) for array, one in zip(self._by_token, filled, strict=True)]
        self._kernels.upload([*pairs, (self._by_row[0], self.rows[:rows]), (self._by_row[1], self.tables[:rows])])


def _result(vector: Floats) -> RowResult:
    if not np.isfinite(vector).all():
        return RowResult(error=NOT_FINITE)
    return RowResult(hidden=np.ascontiguousarray(vector, np.float32).tobytes())
