"""How much memory a model takes and how large its KV pool is. Sizes are bytes; 1 GB is 10**9."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.config import Config
from cairn.engine.machine import memory_available
from cairn.errors import ModelError
from cairn.models.decoder import buffer_bytes
from cairn.models.weights import parameters
from cairn.types import BLOCK_TOKENS, CacheGroup, ModelSpec

GB = 10**9

LEAST_CONTEXT = 512
"""Tokens of context that the pool must hold at least, or loading makes no sense."""


def block_bytes(spec: ModelSpec) -> tuple[int, ...]:
    """Bytes of one block of each group: keys and values of BLOCK_TOKENS tokens over the group's layers in float32."""
    token = 2 * spec.kv_heads * spec.head_dim * 4
    return tuple(len(group.layers) * BLOCK_TOKENS * token for group in spec.groups)


def weight_bytes(spec: ModelSpec) -> int:
    """Memory that the packed weights take at most: float32, and a tied embedding twice (as table and as head).

    The native kernels hold 16-bit weights of a file as they are, in half of that.
    """
    return 4 * (parameters(spec) + (spec.vocab * spec.hidden if spec.tied else 0))


def pool_blocks(spec: ModelSpec, config: Config, free: int | None = None) -> tuple[int, ...]:
    """Blocks of each group's pool.

    `config.kv_gb`, or a quarter of the memory that is free beside the weights, at most what `max_running` full contexts
    need and at least one context of `LEAST_CONTEXT` tokens. Groups share the bytes so that each can hold the same
    number of contexts. Raises `ModelError` with the figures for a `kv_gb` below that least.
    """
    context = min(spec.context, config.context or spec.context)
    needs = [_blocks_for(group, context, config) for group in spec.groups]
    least = [_blocks_for(group, min(context, LEAST_CONTEXT), config) for group in spec.groups]
    one, fewest = _bytes(spec, needs), _bytes(spec, least)
    if config.kv_gb is None:
        free = memory_available() if free is None else free
        rest = free - weight_bytes(spec) - _buffers(spec, config)
        budget = max(fewest, min(rest // 4, config.max_running * one))
    else:
        budget = int(config.kv_gb * GB)
        if budget < fewest:
            raise ModelError(
                f"{spec.name}: kv_gb is {config.kv_gb:g}, but {min(context, LEAST_CONTEXT)} tokens of context need "
                f"{fewest / GB:.4f} GB"
            )
    return tuple(max(few, need * budget // one) for few, need in zip(least, needs, strict=True))


def check_memory(spec: ModelSpec, config: Config, blocks: tuple[int, ...], free: int | None = None) -> None:
    """Raise `ModelError` with the figures if weights, pools and buffers do not fit the free memory."""
    free = memory_available() if free is None else free
    weights, pool, buffers = weight_bytes(spec), _bytes(spec, blocks), _buffers(spec, config)
    if weights + buffers + pool > free:
        raise ModelError(
            f"{spec.name}: needs {_gb(weights + buffers + pool)} of memory ({_gb(weights)} weights, {_gb(pool)} KV "
            f"pool, {_gb(buffers)} buffers), {_gb(free)} are free"
        )


def _blocks_for(group: CacheGroup, context: int, config: Config) -> int:
    """Blocks of a group that one sequence of `context` tokens holds at once."""
    tokens = min(context, group.window + config.step_tokens + BLOCK_TOKENS) if group.kind == "window" else context
    return -(-tokens // BLOCK_TOKENS) + 1


def _bytes(spec: ModelSpec, blocks: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(blocks, block_bytes(spec), strict=True))


def _buffers(spec: ModelSpec, config: Config) -> int:
    context = min(spec.context, config.context or spec.context)
    return buffer_bytes(spec, config.step_tokens, min(config.max_running, config.step_tokens), context)


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
