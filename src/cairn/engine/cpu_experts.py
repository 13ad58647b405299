"""Which layers' routed experts the CPU computes while all else is on a device (`cpu_experts`).

A mixture of experts may be larger than a GPU's memory while all but its experts, which a token reads the least of, fits
it with the KV. The experts then stay packed in the machine's memory, and the CPU's kernels compute them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.config.config import Config
from cairn.engine.memory import (
    CpuPart,
    WeightMemory,
    device_memory,
    fits,
    kernels_of,
    pool_blocks,
    weight_memory,
)
from cairn.kernels.choose import described
from cairn.kernels.devices import MLX, ON_DEVICES, free_memory
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec

CHOOSE, NONE, ALL = "auto", "off", "all"
"""Values of the option `cpu_experts`; the others are numbers of layers."""


def asked_layers(spec: ModelSpec, config: Config) -> tuple[int, ...]:
    """Return the layers that the option `cpu_experts` names; () for `auto` and `off`.

    Raise `ModelError` if it names layers, but the model has no experts or the device cannot leave them to the CPU.
    """
    wanted = config.cpu_experts
    if wanted in (CHOOSE, NONE):
        return ()
    said = f"{spec.name}: cpu_experts is {wanted}, but"
    own = kernels_of(config)
    if own not in ON_DEVICES:
        raise ModelError(f"{said} the device is the CPU, which computes all of the model; leave cpu_experts out")
    if own == MLX:
        raise ModelError(f"{said} device {config.device} has the machine's own memory; leave cpu_experts out")
    if spec.experts is None:
        raise ModelError(f"{said} the model has no experts; leave cpu_experts out")
    if spec.whole:
        raise ModelError(f"{said} a model that makes embeddings is computed on one device; leave cpu_experts out")
    if config.tp > 1:
        raise ModelError(
            f"{said} tp is {config.tp}, and each rank holds a part of all experts; leave one of the two out"
        )
    if wanted == ALL:
        return spec.experts.layers
    count = int(wanted)
    if count > spec.layers:
        raise ModelError(f"{said} the model has {spec.layers} layers; use a number up to that, or all")
    layers = tuple(layer for layer in spec.experts.layers if layer < count)
    if not layers:
        raise ModelError(
            f"{said} experts begin in layer {spec.experts.layers[0] + 1}; use a number from there to {spec.layers}, or "
            "all"
        )
    return layers


def divided(spec: ModelSpec, config: Config, weights: Mapping[str, Any], free: int | None = None) -> WeightMemory:
    """Return the memory plan of opened weights, with the experts that `cpu_experts` leaves to the CPU.

    `auto` moves all experts or none: if their number followed the free memory, the arithmetic, and with it the keys of
    stored KV, would change from start to start. `free`: free bytes of the memory that holds the model and its pool.
    """
    own = kernels_of(config)
    whole = weight_memory(spec, weights, own)
    if layers := asked_layers(spec, config):
        return weight_memory(spec, weights, own, _part(config, layers))
    if not _may_move(spec, config, own):
        return whole
    assert spec.experts is not None
    free = device_memory(config) if free is None else free
    if fits(spec, config, pool_blocks(spec, config, free, whole), free, whole):
        return whole
    moved = weight_memory(spec, weights, own, _part(config, spec.experts.layers))
    blocks = pool_blocks(spec, config, free, moved)
    without = WeightMemory(moved.held, moved.passing)  # whether the machine's memory suffices is the caller's to check
    return moved if fits(spec, config, blocks, free, without) else whole


def _may_move(spec: ModelSpec, config: Config, own: str) -> bool:
    """Return whether `auto` may move experts: only from a torch device that has memory of its own."""
    suits = config.cpu_experts == CHOOSE and own in ON_DEVICES and own != MLX and config.tp == 1
    return suits and spec.experts is not None and not spec.whole and free_memory(config.device) is not None


def _part(config: Config, layers: tuple[int, ...]) -> CpuPart:
    return CpuPart(config.kernels, layers, apart=free_memory(config.device) is not None)


def sentence(config: Config, weights: WeightMemory) -> str:
    """Return which experts the CPU computes and with what, for people; "" if it computes none."""
    if not weights.cpu_layers:
        return ""
    layers = f"{len(weights.cpu_layers)} layer{'s' * (len(weights.cpu_layers) > 1)}"
    kernels = described(config.kernels)
    return f"the CPU computes the experts of {layers}, {weights.on_cpu / 1e9:.2f} GB, with {kernels}"


def settled(config: Config, weights: WeightMemory) -> str:
    """Return the value of `cpu_experts` that chooses the same layers again; "" if the device is the CPU."""
    if kernels_of(config) not in ON_DEVICES:
        return ""
    if not weights.cpu_layers:
        return NONE
    return ALL if config.cpu_experts == CHOOSE else config.cpu_experts
