"""The memory plan of a model: what its weights, buffers and KV pools take. Sizes are bytes; 1 GB is 10**9."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cairn.config.config import Config
from cairn.engine.machine import memory_available
from cairn.kernels import native
from cairn.kernels.base import BLOCK, GROUP
from cairn.kernels.choose import REFERENCE, chosen
from cairn.kernels.codebooks import ROW_FORMATS
from cairn.kernels.devices import MLX, ON_DEVICES, free_memory, kernel_set
from cairn.kernels.kv_codes import row_bytes
from cairn.kernels.storage import HostStorage
from cairn.models.forward import encoder
from cairn.models.forward.buffers import buffer_bytes
from cairn.models.forward.decoder import Ends, build
from cairn.models.forward.moe import Mixture
from cairn.models.forward.projection import projection_bytes
from cairn.models.quantization.tensor_meta import TensorMeta, outlines
from cairn.models.safetensors.weights import parameters, small
from cairn.types.errors import ModelError
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup, ModelSpec, RopeScaling

GB = 10**9

LEAST_CONTEXT = 512
"""Least tokens of context that the pool must hold; a model without room for them is not loaded."""
LEAST_STATES = 4
"""Least blocks of a state group's pool: two for a running sequence, and two snapshots."""
SNAPSHOT_TOKENS = 1024
"""The pool has room for one snapshot for each so many tokens of KV, if there is memory."""


_KV_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "q8": "int8"}
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_Q8_STEP = 4
"""Numbers of a head that the kernels read from q8 KV at once."""


def kernels_of(config: Config) -> str:
    """Return the name of the kernel set that computes: one of the CPU's, or another device's."""
    return kernel_set(config.device, config.kernels)


def device_memory(config: Config) -> int:
    """Return the bytes that are free where the model is to be computed: on the device, or on the machine."""
    own = free_memory(config.device)
    return memory_available() if own is None else own


def kv_dtype(spec: ModelSpec, config: Config) -> str:
    """Return numpy's name for the type of this model's KV; int8 stands for q8.

    Raise `ModelError` if its heads or the device cannot have that type.
    """
    if config.kv_dtype == "auto":
        return "float32" if small(spec) else "bfloat16"
    if config.kv_dtype == "q8":
        if kernels_of(config) in ON_DEVICES:
            raise ModelError(f"{spec.name}: kv_dtype q8 is for device cpu; use kv_dtype auto on {config.device}")
        kept = zip(spec.groups, spec.head_dims, strict=True)
        odd = [size for group, size in kept if group.kind != "state" and not group.once and size % _Q8_STEP]
        if odd:
            raise ModelError(
                f"{spec.name}: kv_dtype q8 holds heads of a multiple of {_Q8_STEP} numbers, and this model has heads "
                f"of {odd[0]}; use kv_dtype auto"
            )
    return _KV_DTYPES[config.kv_dtype]


def kv_page(spec: ModelSpec, group: int, dtype: str) -> tuple[int, ...]:
    """Return the shape of one layer's page of a block, in numbers of the pool's type.

    That is `ModelSpec.page`, with the scales behind the rows of int8.
    """
    page = spec.page(group)
    if dtype != "int8" or spec.groups[group].kind == "state":
        return page
    return *page[:-1], row_bytes(page[-1], spec.groups[group].once)


def block_bytes(spec: ModelSpec, dtype: str) -> tuple[int, ...]:
    """Return the bytes of one block of each group.

    A block holds keys and values of BLOCK_TOKENS tokens over the group's layers, or one state of each.
    """
    return tuple(
        len(group.layers) * math.prod(kv_page(spec, number, dtype)) * (4 if group.kind == "state" else _WIDTHS[dtype])
        for number, group in enumerate(spec.groups)
    )


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """The memory that a model's weights take, in bytes."""

    held: int
    """Packed weights, for as long as the model is loaded."""
    passing: int
    """Most that loading takes beside `held` for a while, because a matrix is made before it is packed."""
    streamed: int = 0
    """The part of `held` that every step reads: all matrices but the head and the experts."""
    head: int = 0
    """The output head, which only steps that want logits read."""
    experts: int = 0
    """All experts."""
    share: float = 0.0
    """Share of the experts that computes one token, 0 to 1."""
    largest: int = 0
    """Most that packing one matrix takes, if the packed matrix does not stay in memory."""
    mapped: int = 0
    """Experts that stay in a mapped file and are not part of `held`."""
    cpu_layers: tuple[int, ...] = ()
    """Layers whose routed experts the CPU computes beside a device."""
    on_cpu: int = 0
    """Those experts."""
    apart: int = 0
    """What they take of the machine's memory while they are packed, if the device has memory of its own; then they are
    not part of `held`."""

    @property
    def per_token(self) -> int:
        """Experts that compute one token."""
        return round(self.experts * self.share)

    def read(self, tokens: float) -> int:
        """Return the bytes that a step of so many tokens reads, head excluded, if tokens choose experts by chance."""
        idle: float = (1 - self.share) ** tokens
        return self.streamed + round(self.experts * (1 - idle))


def weight_bytes(spec: ModelSpec) -> int:
    """Return the most bytes that packed weights can take: those of float32."""
    return 4 * parameters(spec)


@dataclass(frozen=True, slots=True)
class CpuPart:
    """The routed experts that the CPU computes beside a device."""

    kernels: str
    """Name of the CPU's kernels."""
    layers: tuple[int, ...]
    apart: bool
    """Whether the device has memory of its own."""


def weight_memory(
    spec: ModelSpec, weights: Mapping[str, Any], kernels: str, cpu: CpuPart | None = None
) -> WeightMemory:
    """Return the memory that opened weights take in a kernel set, without reading them.

    `kernels`: a result of `kernels_of`, or a value of `config.kernels`. `cpu`: experts that the CPU's kernels hold
    instead.
    """
    held = _Held()
    tally: Any = _Tally(kernels if kernels in ON_DEVICES else chosen(kernels), held)
    more = projection_bytes(spec)
    if spec.encoder is not None:
        encoder.build(tally, spec, outlines(weights))
        return WeightMemory(held.bytes + more, held.peak - held.bytes, tally.streamed)
    beside = _Held() if cpu is not None and cpu.apart else held
    other: Any = tally if cpu is None else _Tally(chosen(cpu.kernels), beside)
    layers = () if cpu is None else cpu.layers
    nothing: Any = 0
    ends = Ends(nothing, nothing) if spec.ahead else None
    built = build(tally, spec, outlines(weights), lambda layer: other if layer in layers else tally, ends)
    head: Any = built.head
    mixtures: list[Any] = [layer.mlp for layer in built.layers if isinstance(layer.mlp, Mixture)]
    mixtures += [layer.beside.mixture for layer in built.layers if layer.beside is not None]
    experts = sum(sum((*one.gate_up, *one.down)) for one in mixtures)
    share = spec.experts.chosen / spec.experts.count if spec.experts else 0.0
    on_cpu = 0 if cpu is None else other.streamed
    return WeightMemory(
        held=held.bytes + more,
        passing=held.peak - held.bytes,
        streamed=tally.streamed + on_cpu - head - experts,
        head=head,
        experts=experts,
        share=share,
        largest=tally.largest,
        cpu_layers=layers,
        on_cpu=on_cpu,
        apart=beside.peak if beside is not held else 0,
    )


def placed(spec: ModelSpec, config: Config, weights: WeightMemory, free: int | None = None) -> WeightMemory:
    """Return the memory with experts in memory or in a mapped file, as `config.experts` says.

    `auto` maps them if the model does not fit otherwise. Raise ModelError if they are to be mapped and cannot be.
    """
    if config.experts == "memory" or not weights.experts:
        return weights
    if weights.cpu_layers:
        if config.experts == "mapped":
            raise ModelError(f"{spec.name}: experts that the CPU computes beside a device cannot be mapped")
        return weights
    own = kernels_of(config)
    never = f"the {own} kernels hold" if own in (REFERENCE, *ON_DEVICES) else ""
    never = never or ("without keep_packed there is" if not config.keep_packed else "")
    if config.experts == "auto":
        free = memory_available() if free is None else free
        if never or fits(spec, config, pool_blocks(spec, config, free, weights), free, weights):
            return weights
    elif never:
        raise ModelError(f"{spec.name}: experts cannot be mapped: {never} no packed copy of them")
    held = weights.held - weights.experts
    return replace(weights, held=held, mapped=weights.experts, passing=weights.largest)


def fits(spec: ModelSpec, config: Config, blocks: tuple[int, ...], free: int, weights: WeightMemory) -> bool:
    """Return whether a model fits the memory, as `check_memory` decides."""
    try:
        check_memory(spec, config, blocks, free, weights)
    except ModelError:
        return False
    return True


@dataclass(slots=True)
class _Held:
    """Bytes that one memory holds while a model is built, and the peak."""

    bytes: int = 0
    peak: int = 0


class _Tally:
    """Replaces the kernels while a model is built from the outlines of its tensors, and counts the bytes of each."""

    def __init__(self, kernels: str, held: _Held) -> None:
        self.streamed = self.largest = 0
        self._held, self._kernels = held, kernels

    def vector(self, source: TensorMeta) -> None:
        self._count(4 * math.prod(source.shape), source.made)

    def table(self, source: TensorMeta) -> None:
        if source.scale:
            self._count(self._packed([source]), source.made)
        else:
            self._count(math.prod(source.shape) * source.bits // 8, source.made)

    def matrix(self, weights: Sequence[TensorMeta], biases: Sequence[TensorMeta | None]) -> int:
        held = self._packed(weights)
        self._count(held, sum(one.made for one in weights))
        self.streamed += held
        return held

    def _packed(self, parts: Sequence[TensorMeta]) -> int:
        if self._kernels == REFERENCE:
            return sum(4 * math.prod(one.shape) for one in parts)
        if self._kernels in ON_DEVICES:
            bits = _mlx_bits if self._kernels == MLX else _torch_bits
            return sum(int(math.prod(one.shape) * bits(one)) // 8 for one in parts)
        return native.packed_bytes([(one.shape[0], one.shape[1], one.form) for one in parts])

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> None:
        self._count(4 * head_dim, 0)

    def _count(self, held: int, passing: int) -> None:
        self._held.bytes += held
        self._held.peak = max(self._held.peak, self._held.bytes + passing)
        self.largest = max(self.largest, held + passing)


def _torch_bits(one: TensorMeta) -> float:
    """Return the bits that a number of a matrix takes in torch's kernels, with its share of scales and minima."""
    if not one.scale:
        return one.bits
    codes = 4 if one.bits == 4 and not one.table else 8  # those of 5 and 6 bits, and of tables, take a byte each
    if one.table in ROW_FORMATS:
        return codes + 32 / ROW_FORMATS[one.table].group
    if one.block and one.table:
        return codes + 8 / GROUP + 16 / BLOCK
    if one.block:
        own = 8 / 16 if one.block == 6 else 2 * 8 / GROUP
        return codes + own + (16 if one.block == 6 else 32) / BLOCK
    widths = {"float16": 16, "float32": 32}
    return codes + (widths[one.scale] + widths.get(one.minimum, 0)) / GROUP


def _mlx_bits(one: TensorMeta) -> float:
    """Return the bits that a number of a matrix takes in mlx's kernels, at most, with scales and biases."""
    if not one.scale:
        return one.bits
    if one.block == 6 or (one.table in ROW_FORMATS and ROW_FORMATS[one.table].group % GROUP):
        return 16
    if one.table == "fp4":
        return 4 + 8 / GROUP
    codes = 8 if one.table else one.bits
    return codes + 2 * 32 / GROUP


def whole_context(spec: ModelSpec, config: Config) -> int:
    """Return the tokens of the longest text for a model that computes whole texts; its buffers grow with it."""
    return min(spec.longest_text, config.context or spec.longest_text)


def pool_blocks(
    spec: ModelSpec, config: Config, free: int | None = None, weights: WeightMemory | None = None
) -> tuple[int, ...]:
    """Return the number of blocks in each group's pool.

    The pools take `config.kv_gb`. Without that option they take a quarter of the memory that weights and buffers leave
    free, but not more than `max_running` full contexts need, nor less than one context of `LEAST_CONTEXT` tokens.
    Without `weights`, they are taken to have their largest possible size.

    The groups share these bytes so that each can hold the same number of contexts. If not even one whole context fits,
    they are shared so that one sequence can be as long as possible: a window pool smaller than its window would limit
    every sequence, and what it does not need goes to the full groups. For state groups see `_states`. Raise
    `ModelError`, with the figures, if `kv_gb` is less than the least.
    """
    context = min(spec.context, config.context or spec.context)
    if spec.whole:  # nothing is kept
        return ()
    needs = [_blocks_for(group, context, config) for group in spec.groups]
    least = [_blocks_for(group, min(context, LEAST_CONTEXT), config) for group in spec.groups]
    one, fewest = _bytes(spec, config, needs), _bytes(spec, config, least)
    if config.kv_gb is None:
        free = memory_available() if free is None else free
        rest = free - (weights.held if weights else weight_bytes(spec)) - _buffers(spec, config)
        budget = max(fewest, min(rest // 4, config.max_running * one))
    else:
        budget = int(config.kv_gb * GB)
        if budget < fewest:
            raise ModelError(
                f"{spec.name}: kv_gb is {config.kv_gb:g}, but {min(context, LEAST_CONTEXT)} tokens of context need "
                f"{fewest / GB:.4f} GB"
            )
    for number, group in enumerate(spec.groups):
        needs[number], least[number] = (0, 0) if group.kind == "state" else (needs[number], least[number])
    states = _states(spec, config, budget, budget - _bytes(spec, config, least))
    budget -= _bytes(spec, config, [states.get(number, 0) for number in range(len(needs))])
    found = _shared(spec, config, budget, needs, least)
    return tuple(states.get(number, count) for number, count in enumerate(found))


def _states(spec: ModelSpec, config: Config, budget: int, most: int) -> dict[int, int]:
    """Return the number of blocks of each state group, by the group's number, out of a `budget` for all groups.

    There are two for each sequence that may run (its present state and its next), two more, and one snapshot for each
    `SNAPSHOT_TOKENS` of KV. They take at most half of the budget and at most `most` bytes, but never fewer blocks than
    one sequence needs.
    """
    sizes = block_bytes(spec, kv_dtype(spec, config))
    token = sum(size for size, group in zip(sizes, spec.groups, strict=True) if group.kind == "full") / BLOCK_TOKENS
    found = {}
    for number, group in enumerate(spec.groups):
        if group.kind == "state":
            size, running = sizes[number], 2 * config.max_running + 2
            # For each SNAPSHOT_TOKENS of KV, one state.
            kept = (budget - running * size) / (token * SNAPSHOT_TOKENS + size)
            wanted = running + max(0, math.floor(kept))
            found[number] = max(LEAST_STATES, min(wanted, min(budget // 2, most) // size))
    return found


def running_rows(spec: ModelSpec, config: Config, blocks: Sequence[int]) -> int:
    """Return how many sequences a step can have: at most `max_running`, and half as many as the pool has states."""
    rows = min(config.max_running, config.step_tokens)
    for group, count in zip(spec.groups, blocks, strict=True):
        if group.kind == "state":
            rows = max(1, min(rows, (count - 2) // 2))
    return rows


def _shared(spec: ModelSpec, config: Config, budget: int, needs: list[int], least: list[int]) -> tuple[int, ...]:
    """Return the blocks of each group for a budget; `needs` and `least` are 0 for state groups."""
    context = min(spec.context, config.context or spec.context)
    one = _bytes(spec, config, needs)
    if budget < one:
        grow = [int(need > 0) for need in needs]

        def blocks(tokens: int) -> list[int]:
            return [one * _blocks_for(group, tokens, config) for one, group in zip(grow, spec.groups, strict=True)]

        def taken(tokens: int) -> int:
            return _bytes(spec, config, blocks(tokens))

        shortest = min(context, LEAST_CONTEXT)
        return tuple(blocks(shortest + bisect_right(range(shortest + 1, context), budget, key=taken)))
    return tuple(max(few, need * budget // one if one else 0) for few, need in zip(least, needs, strict=True))


def check_memory(
    spec: ModelSpec,
    config: Config,
    blocks: tuple[int, ...],
    free: int | None = None,
    weights: WeightMemory | None = None,
) -> None:
    """Raise `ModelError`, with the figures, if weights, pools and buffers do not fit the free memory.

    What loading takes for a while must fit beside the weights too, but not beside pools and buffers, which hold no
    memory yet when weights are packed. Without `weights`, they are taken to have their largest possible size.
    """
    free = memory_available() if free is None else free
    weights = weights or WeightMemory(weight_bytes(spec), 0)
    if weights.apart and weights.apart > (beside := memory_available()):
        raise ModelError(
            f"{spec.name}: the experts that the CPU computes need {_gb(weights.apart)} of the machine's memory, "
            f"{_gb(beside)} are free; use --cpu-experts N for those of fewer layers, or a smaller model"
        )
    pool, buffers = _bytes(spec, config, blocks), _buffers(spec, config)
    if weights.held + max(pool + buffers, weights.passing) > free:
        loading = f", {_gb(weights.passing)} while loading" if weights.passing > pool + buffers else ""
        mapped = f", {_gb(weights.mapped)} of experts mapped" if weights.mapped else ""
        raise ModelError(
            f"{spec.name}: needs {_gb(weights.held + max(pool + buffers, weights.passing))} of memory "
            f"({_gb(weights.held)} weights{mapped}{loading}, {_gb(pool)} KV pool, {_gb(buffers)} buffers), "
            f"{_gb(free)} are free{_where(config)}; {_remedy(config, weights, buffers, free)}"
        )


def context_note(spec: ModelSpec, config: Config, blocks: Sequence[int], free: int) -> str:
    """Return a sentence if the pool has no room for the context that was asked for; empty otherwise."""
    full = [count for count, group in zip(blocks, spec.groups, strict=False) if group.kind == "full"]
    holds = min(full, default=0) * BLOCK_TOKENS
    if config.context is None or not full or holds >= config.context:
        return ""
    needs = _bytes(spec, config, [_blocks_for(group, config.context, config) for group in spec.groups])
    return (
        f"{spec.name}: context is {config.context}, but the KV pool of {_gb(_bytes(spec, config, blocks))} holds "
        f"{holds} tokens; the whole context needs {_gb(needs)}, and {_gb(free)} were free{_where(config)} for weights "
        "and KV; use --kv-gb for a larger pool, or a shorter --context"
    )


def _where(config: Config) -> str:
    """Return " on DEVICE" if the device has memory of its own; else an empty text."""
    return "" if free_memory(config.device) is None else f" on {config.device}"


def _remedy(config: Config, weights: WeightMemory, buffers: int, free: int) -> str:
    """Return advice for a model that does not fit, depending on which part is too large."""
    if weights.held + max(buffers, weights.passing) < free:
        return "use --kv-gb for a smaller pool"
    if weights.held + weights.passing < free:
        return "use a shorter --context, or smaller --step-tokens and --max-running"
    elsewhere = "--device cpu, " if _where(config) else ""
    return f"use {elsewhere}a smaller model, or fewer bits (--weights int4)"


def beside_weights(spec: ModelSpec, config: Config, blocks: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of pools with so many blocks, and the bytes of the buffers of a step."""
    return _bytes(spec, config, blocks), _buffers(spec, config)


def _blocks_for(group: CacheGroup, context: int, config: Config) -> int:
    """Return the most blocks of a group that one sequence of `context` tokens holds at once."""
    if group.kind == "state":
        return LEAST_STATES
    tokens = min(context, group.window + config.step_tokens + BLOCK_TOKENS) if group.kind == "window" else context
    return -(-tokens // BLOCK_TOKENS) + 1


def _bytes(spec: ModelSpec, config: Config, blocks: Sequence[int]) -> int:
    sizes = () if spec.whole else block_bytes(spec, kv_dtype(spec, config))
    return sum(count * size for count, size in zip(blocks, sizes, strict=True))


def _buffers(spec: ModelSpec, config: Config) -> int:
    context = min(spec.context, config.context or spec.context)
    own = kernels_of(config)
    rows, scores = min(config.max_running, config.step_tokens), own in (REFERENCE, *ON_DEVICES)
    logits = 64 if own in ON_DEVICES else HostStorage.logits_rows
    if spec.whole:
        context = whole_context(spec, config)
        tokens = max(config.step_tokens, context)
        if spec.encoder is not None:
            return encoder.buffer_bytes(spec, tokens, rows, context, scores=scores)
        kept = 8 * BLOCK_TOKENS * encoder.kv_blocks(tokens, rows) * spec.kv_heads * spec.head_dim
        return buffer_bytes(spec, tokens, rows, context, logits_rows=logits, scores=scores) + kept
    return buffer_bytes(spec, config.step_tokens, rows, context, logits_rows=logits, scores=scores)


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
