"""The engine of every device: a decoder recorded once over a kernel set, and replayed each step over the KV pools.

KV of a group is one array [blocks, layers, 2, kv_heads, BLOCK_TOKENS, head_dim] of float32, bfloat16 or float16, or of
int8 with the bytes of scales beside each head's numbers. Where layers keep latents, the 2 is a 1. A state group has
[blocks, layers, numbers] of float32. A block is contiguous over its group's layers, so in host memory a page is a view.

The engine holds weights, pools and step buffers, and nothing about requests. The arrays belong to the kernels: inputs
are filled through `StepInputs`; tokens and hidden states are read through a sampler and `Pooled`. Everything that
concerns the kernels runs on their stream.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cairn.config.config import Config
from cairn.engine.attached_adapters import AdapterBank
from cairn.engine.cpu_experts import divided, sentence, settled
from cairn.engine.machine import cpu_count
from cairn.engine.memory import (
    WeightMemory,
    beside_weights,
    block_bytes,
    check_memory,
    context_note,
    device_memory,
    kernels_of,
    kv_dtype,
    kv_page,
    placed,
    pool_blocks,
    running_rows,
)
from cairn.engine.mtp_head import FittedHead, fit_head
from cairn.engine.row_results import LogitsQuestion
from cairn.engine.step_inputs import FilledStep, InputArrays, StepInputs
from cairn.kernels import devices
from cairn.kernels.base import Kernels
from cairn.kernels.choose import REFERENCE, described
from cairn.kernels.program import Interpreted, Program, Slot
from cairn.kernels.sampling import NUMPY, Sampler
from cairn.models.adapters.adapter import AdapterWeights
from cairn.models.families.families import FAMILIES
from cairn.models.families.value_range import fits_half, reach
from cairn.models.files import is_gguf
from cairn.models.forward import decoder
from cairn.models.forward.buffers import allocate
from cairn.models.forward.norms import run_norm
from cairn.models.forward.projection import Pooled, ProjectionStep, open_projection, record_projection
from cairn.models.forward.row_table import RowTable, open_table
from cairn.models.packing import packed_file
from cairn.models.packing.weight_format import Form, HeldWeights, error_line, form_of
from cairn.models.quantization import quantize
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.generation_config import generation_fault
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup, ModelSpec
from cairn.types.step import (
    NO_ADAPTER,
    NO_TOKEN,
    NOT_FINITE,
    AdapterData,
    AdapterFacts,
    EngineCall,
    EngineInfo,
    Ready,
    Row,
    RowResult,
)

LAYOUT = "blocks-2"
"""Version of the KV layout above."""

_STATES = 64
"""Most hidden states that the last norm is applied to at once."""
NOTHING = RowResult()
"""The result of a row that wants no logits."""


class FittedModel(NamedTuple):
    """A model that fits the memory, before anything of it is built."""

    weights: HeldWeights
    memory: WeightMemory
    blocks: tuple[int, ...]
    """How many blocks the pool of each group has."""
    config: Config
    """The configuration; its `kv_dtype` is replaced if the model's numbers do not fit that type."""
    notes: tuple[str, ...]
    """Sentences for the log."""
    head: FittedHead | None
    """Its MTP head, if that is to be loaded."""


class RecordedEngine:
    """A `types.step.Engine` over the kernels of one device."""

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
        through: Callable[[Kernels], Kernels] = lambda kernels: kernels,
        memory: WeightMemory | None = None,
        model: RecordedEngine | None = None,
    ) -> None:
        """Pack the weights and record the model's programs over pools of `blocks` blocks for each group.

        `form`: the form of the weights (`weight_format.Form`). `expected`: bytes of stored KV that may be loaded soon;
        the pool's memory for them is allocated now. `steps`: projections of hidden states that rows want. `rows`: the
        table of inputs for the model's layers, if it has one. `through`: wraps the device's kernels for packing and
        recording. `memory`: the plan that says which experts the CPU computes beside a device; None for none.
        `model`: for an MTP head, the engine of its model, whose kernels, embedding and output head it shares; close the
        head first.
        """
        if (rows is None) != (spec.uneven is None or not spec.uneven.inputs):
            raise ValueError("a table of layers' inputs belongs to a model that has them")
        self._rows = rows
        context = min(spec.context, config.context or spec.context)
        spec = spec.served(context)
        max_rows = running_rows(spec, config, blocks)
        layers = () if memory is None else memory.cpu_layers
        self._model = model
        self.ahead: RecordedEngine | None = None
        """The engine of its MTP head, if that is loaded. Its rows have `Row.before`."""
        if model is None:
            self._kernels = devices.load(config.device, config.kernels, config.threads or cpu_count(), layers)
            self._stream = self._kernels.stream()
        else:
            self._kernels, self._stream = model._kernels, model._stream
            build = partial(decoder.build, ends=model._ends)
        self._buffers = allocate(self._kernels, spec, config.step_tokens, max_rows, context)
        dtype = kv_dtype(spec, config)
        self._kv: list[Any] = [
            self._kernels.allocate((count, len(group.layers), *kv_page(spec, number, dtype)), _number(group, dtype))
            for number, (count, group) in enumerate(zip(blocks, spec.groups, strict=True))
        ]
        packing = through(self._kernels)
        if layers:
            build = partial(decoder.build, experts=self._kernels.kernels_of)  # type: ignore[attr-defined]
        with self._kernels.touching(self._kv, expected):
            built = build(packing, spec, weights)
        self._ends: decoder.Ends | None = decoder.Ends(built.embedding, built.head)
        self._normed: Callable[[], Pooled] | None = partial(self._pool_states, built)
        self._states: Pooled | None = None
        """Applies the last norm to states that rows want beside their tokens; made when a row first wants them."""
        self._body: Program
        self._head: Program
        self._body, self._head = decoder.record(packing, built, self._kv, self._buffers)
        self._adapters = AdapterBank(self._kernels, spec, built, self._kv, self._buffers)
        self._sampler: Sampler = self._kernels.sampler(spec.vocab)
        self._pooled = Pooled(self._kernels, max_rows, spec.hidden, self._record_pooled(built, steps, max_rows))
        self._inputs = StepInputs(
            self._kernels,
            input_arrays(self._buffers, rows),
            spec.groups,
            blocks,
            context,
            spec.vocab,
            sets=1 + self._stream.depth,
            table=rows,
        )
        self._sampled: list[int | None] = []
        """The tokens that the rows of the last step sampled."""
        self._queued: list[EngineCall[list[RowResult]]] = []
        """Submitted steps that may still run, at most as many as there are sets of mirrors."""
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
            device=devices.resolved(config.device),
            device_text=_device_text(config, memory),
            cpu_experts="" if memory is None else settled(config, memory),
            overlaps=self._stream.depth > 0,
        )

    @classmethod
    def fit(cls, spec: ModelSpec, folder: Path, config: Config, blocks: tuple[int, ...] = ()) -> FittedModel:
        """Return the memory plan of a model, reading only headers; raise `ModelError` if it does not fit.

        `blocks`: size of each group's pool; if empty, `pool_blocks` chooses it.
        """
        source, notes = open_weights(folder, spec), list[str]()
        if spec.architecture in FAMILIES and FAMILIES[spec.architecture].nested:
            notes.append(f"{spec.name}: only its text part is loaded; it is served without images")
        if fault := "" if is_gguf(folder) else generation_fault(folder, spec.vocab):
            notes.append(f"{fault}; the file is passed over")
        if kv_dtype(spec, config) == "float16" and not fits_half(reached := reach(spec, source)):
            config = msgspec.structs.replace(config, kv_dtype="bf16")
            notes.append(
                f"{spec.name}: KV is held in bf16: keys or values may reach {reached:,.0f}, and f16 ends at 65,504"
            )
        weights = HeldWeights(source, form_of(spec, config.weights))
        free = device_memory(config)
        taken = placed(spec, config, divided(spec, config, weights, free), free)
        if taken.mapped:
            notes.append(
                f"{spec.name}: {taken.mapped / 1e9:.2f} GB of experts are mapped from the disk, "
                f"{taken.per_token / 1e9:.2f} GB of which a token goes through"
            )
        head, head_notes = _beside(spec, folder, config, weights.form, free, taken)
        free -= 0 if head is None else head.bytes
        blocks = blocks or pool_blocks(spec, config, free, taken)
        check_memory(spec, config, blocks, free, taken)
        if line := context_note(spec, config, blocks, free):
            notes.append(line)
        return FittedModel(weights, taken, blocks, config, (*notes, *head_notes), head)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        folder: Path,
        config: Config,
        expected: int = 0,
        blocks: tuple[int, ...] = (),
        fit: FittedModel | None = None,
    ) -> RecordedEngine:
        """Load the whole model, or raise: memory and files are checked before anything is built.

        `fit`: the result of `fit` if it was called before; otherwise it is called here, with `blocks`.
        """
        weights, taken, blocks, config, fit_notes, head = fit or cls.fit(spec, folder, config, blocks)
        notes = list(fit_notes)
        budget = None if config.keep_packed_gb is None else int(config.keep_packed_gb * 10**9)
        through = packed_file.build_mapped if taken.mapped else packed_file.build
        keep: Any = partial(through, place=folder, size=taken.held + taken.mapped, budget=budget)
        build = keep if config.keep_packed else decoder.build
        steps = open_projection(spec, folder, weights.source)
        rows = open_table(folder, spec)
        engine = cls(spec, weights, config, blocks, weights.form, expected, build, steps, rows, memory=taken)
        if head is not None:
            own = (head.spec, head.weights, head.config, head.blocks, weights.form)
            engine.ahead = cls(*own, model=engine)
        if config.kernels != REFERENCE and kernels_of(config) == REFERENCE:
            notes.append(described(config.kernels))
        if line := error_line(weights.errors, len(weights)):
            notes.append(f"{spec.name}: weights are held in the form {weights.form}; {line}")
        engine.info = dataclasses.replace(engine.info, note="; ".join(notes))
        return engine

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute the rows' tokens in one step. Positions whose logits are wanted are sampled or scored."""
        if not rows:
            return Ready([])
        if self._stream.depth:
            self._queued = [step for step in self._queued if not step.done]
            if len(self._queued) > self._stream.depth:
                raise RuntimeError("a step was submitted before the one before the last was done")
        step = self._inputs.fill(rows)
        call = self._stream.submit(partial(self._compute, step))
        if self._stream.depth:
            self._queued.append(call)
        return call

    def embed(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows whose hidden states are wanted: the same program, so the same bits."""
        return self.prefill(rows)

    def decode(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows of one token each: the same program, so the same bits."""
        return self.prefill(rows)

    def read_blocks(self, group: int, ids: Sequence[int]) -> EngineCall[list[memoryview]]:
        """Read pages; in host memory they are views."""
        return self._stream.submit(partial(self._kernels.read_pages, self._kv[group], tuple(ids)))

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> EngineCall[None]:
        """Copy pages into blocks; a page of another size is a `ValueError` and writes nothing."""
        size = self.info.block_bytes[group]
        if len(ids) != len(pages):
            raise ValueError(f"{len(pages)} pages for {len(ids)} blocks")
        if any(len(memoryview(page).cast("B")) != size for page in pages):
            raise ValueError(f"a page of group {group} has {size} bytes")
        return self._stream.submit(partial(self._kernels.write_pages, self._kv[group], tuple(ids), pages))

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        """Copy blocks within a group's pool."""
        return self._stream.submit(partial(self._kernels.copy_blocks, self._kv[group], tuple(pairs)))

    def read_adapter(self, place: Path) -> AdapterWeights:
        """Read an adapter and check that this model's programs can apply it."""
        return self._adapters.read(place)

    def attach(self, adapter: AdapterData) -> AdapterFacts:
        """Pack an adapter and record the programs with it, between two steps."""
        assert isinstance(adapter, AdapterWeights)
        facts = self._stream.submit(partial(self._adapters.attach, adapter)).wait()
        self._inputs.attached = self._adapters.slots
        return facts

    def detach(self, digest: bytes) -> None:
        """Free an adapter, between two steps."""
        self._stream.submit(partial(self._adapters.detach, digest)).wait()
        self._inputs.attached = self._adapters.slots

    def close(self) -> None:
        """Free memory and threads; the engine cannot be used afterwards. A second call does nothing."""
        if self.ahead is not None:
            self.ahead.close()
        own = self._model is None
        if own:
            self._stream.close()
        if self._rows is not None:
            self._rows.close()
        self._kv.clear()
        # Programs hold the weights and the pools.
        self._body = self._head = Interpreted(self._kernels, ())
        # The sampler holds their threads, and `_pooled` and `_states` their memory.
        self._sampler = NUMPY
        self._ends = self._normed = self._model = None
        if self._states is not None:
            self._states.close()
        self._pooled.close()
        self._adapters.close()
        if own:  # last: a device's memory goes back only when nothing holds it
            self._kernels.close()

    def _compute(self, step: FilledStep) -> list[RowResult]:
        """Run a step, on the stream."""
        sampled, self._sampled = self._sampled, []  # after a step that raises, pending tokens are unknown
        missing = self._inputs.upload(step, sampled)
        rows = _known(step, sampled)
        with np.errstate(all="ignore"):
            body = self._adapters.program if step.adapted else None
            (body or self._body).replay(step.sizes)
            results = [NOTHING] * len(rows)
            self._read_hidden(step, results)
            states = self._read_states(step)
            self._sample(step, rows, results)
        for number in missing:
            results[number] = RowResult(error=NO_TOKEN)
        for number in step.strange:
            results[number] = RowResult(error=NO_ADAPTER)
        for number, found in states:
            if not results[number].error:
                results[number] = msgspec.structs.replace(results[number], states=found)
        self._sampled = [result.token for result in results]
        return results

    def _read_hidden(self, step: FilledStep, results: list[RowResult]) -> None:
        """Read the normed states of the rows that want one, before the head overwrites their buffer."""
        wanted = step.hidden
        if not wanted:
            return
        rows, firsts = step.rows, step.firsts
        places = [firsts[number] + rows[number].end - rows[number].start - 1 for number in wanted]
        for number, state in zip(wanted, self._pooled.gather(self._buffers.hidden, places), strict=True):
            finite = bool(np.isfinite(state).all())
            results[number] = RowResult(hidden=state.tobytes()) if finite else RowResult(error=NOT_FINITE)

    def _read_states(self, step: FilledStep) -> list[tuple[int, bytes]]:
        """Return the number of each row with `states_from`, and those states after the last norm."""
        asking = [number for number, row in enumerate(step.rows) if row.states_from is not None]
        if not asking:
            return []
        if self._states is None:
            assert self._normed is not None
            self._states = self._normed()
        found = list[tuple[int, bytes]]()
        for number in asking:
            row, first = step.rows[number], step.firsts[number]
            assert row.states_from is not None
            places = range(first + row.states_from - row.start, first + row.end - row.start)
            parts = [places[at : at + _STATES] for at in range(0, len(places), _STATES)]
            states = [self._states.gather(self._buffers.hidden, part).tobytes() for part in parts]
            found.append((number, b"".join(states)))
        return found

    def _pool_states(self, built: decoder.Decoder) -> Pooled:
        """Return a reader of a step's hidden states that applies the model's last norm to a copy of them."""
        record = self._record_pooled(built, (), _STATES)
        return Pooled(self._kernels, _STATES, self._buffers.hidden.shape[1], record)

    def _sample(self, step: FilledStep, rows: Sequence[Row], results: list[RowResult]) -> None:
        """Run the head over the wanted positions, in slices, and sample or score them."""
        most, total = self._kernels.logits_rows, len(step.wanted)
        if not total:
            return
        # Rows that want hidden states have no logits.
        asking = rows if not step.hidden else [row for row in rows if row.want == "token"]
        question = LogitsQuestion(asking)
        for first in range(0, total, most):
            count = min(most, total - first)
            if first:
                self._inputs.want(step, first)
            self._head.replay({"tokens": step.tokens, "logits": count})
            question.answer(self._sampler, self._kernels.first(self._buffers.logits, count), count)
        found = question.results()
        if not step.hidden:
            results[:] = found
            return
        numbers = [number for number, row in enumerate(rows) if row.want == "token"]
        for number, result in zip(numbers, found, strict=True):
            results[number] = result

    def _record_pooled(
        self, built: decoder.Decoder, steps: tuple[ProjectionStep, ...], rows: int
    ) -> Callable[[Any, Slot], Slot]:
        """Return a function that records the model's last norm over hidden states, then the projections `steps`."""
        project = record_projection(self._kernels, rows, steps)

        def record(k: Any, states: Slot) -> Slot:
            run_norm(k, built.norm, built.eps, states, states)
            return project(k, states)

        return record


def _beside(
    spec: ModelSpec, folder: Path, config: Config, form: Form, free: int, taken: WeightMemory
) -> tuple[FittedHead | None, list[str]]:
    """Return a model's MTP head if it fits beside the model, and sentences about it for the log."""
    head = fit_head(spec, folder, config, form)
    if head is None or isinstance(head, str):
        return None, [head] if head else []
    size = f"{head.bytes / 1e9:.2f} GB"
    least = taken.held + sum(beside_weights(spec, config, pool_blocks(spec, config, 0, taken)))
    if taken.mapped or least + head.bytes > free:
        return None, [f"{spec.name}: its head for further tokens (MTP) is set aside: there is no memory for {size}"]
    return head, [f"{spec.name}: its head for further tokens (MTP) guesses where that pays; it takes {size}"]


def input_arrays(buffers: Any, rows: RowTable | None = None) -> InputArrays:
    """Return the arrays of a decoder's buffers that hold a step's inputs."""
    return InputArrays(
        tokens=buffers.tokens,
        positions=buffers.positions,
        members=buffers.members,
        rows=buffers.rows,
        tables=buffers.tables,
        slots=buffers.slots,
        wanted=buffers.wanted,
        adapters=buffers.adapters,
        scales=buffers.scales,
        table_rows=None if rows is None else buffers.uneven.rows,
        before=buffers.join.before if buffers.join.before.shape[1] else None,
    )


def _known(step: FilledStep, sampled: Sequence[int | None]) -> Sequence[Row]:
    """Return the rows for the sampler, with pending tokens filled in where sampling needs the history."""
    if not step.pending:
        return step.rows
    rows = list(step.rows)
    for number, source in step.pending:
        row = rows[number]
        if row.sampling.needs_history or row.sampling.extras is not None:
            token = sampled[source] if source < len(sampled) else None
            known = [*row.tokens[: row.start], 0 if token is None else token]
            rows[number] = msgspec.structs.replace(row, tokens=known, pending=None)
    return rows


def _device_text(config: Config, memory: WeightMemory | None) -> str:
    """Describe for a person what computes: the device, and the CPU if it computes experts."""
    text = devices.report(config.device, config.kernels).sentence
    experts = "" if memory is None else sentence(config, memory)
    return f"{text}; {experts}" if experts else text


def _number(group: CacheGroup, dtype: str) -> str:
    """Return numpy's name for the type of a group's pool, if KV has `dtype`: states are always float32."""
    return "float32" if group.kind == "state" else dtype


def identity(spec: ModelSpec, kernels: Kernels, form: str, kv_dtype: str) -> bytes:
    """Return the root of the KV keys.

    It is a digest of the model, the form of its weights, the KV's type and layout, and everything about the kernels and
    their device that can change a bit.
    """
    facts = (LAYOUT, kv_dtype, BLOCK_TOKENS, kernels.numerics, quantize.VERSION, form)
    own = repr(facts) + ("long rope" if spec.long else "")
    return hashlib.sha256(spec.identity + own.encode()).digest()
