"""Recurrent layers as GGUF files describe and store them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cairn.models.families.recurrent_spec import MAX_HEADS, MIXER, MOST_REACH
from cairn.models.files import Fields
from cairn.types.errors import ModelError
from cairn.types.model_spec import MAX_HEAD_DIM, Recurrence

Change = Callable[[NDArray[Any]], NDArray[Any]]
Rule = Literal["", "delta", "mamba2", "conv"]
"""Kind of the recurrent layers; "": there are none."""

_SCANS = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
KEYS: dict[str, tuple[str, ...]] = {
    "": (),
    "delta": (*_SCANS, "full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers"),
    "mamba2": _SCANS,
    "conv": ("shortconv.l_cache",),
}
"""Metadata keys understood, without the architecture's prefix."""
_BY_HEADS = ("mamba2", "conv")
"""Rules whose files mark recurrent layers by a KV head count of 0."""

DELTA = {
    "attn_qkv": f"{MIXER}in_proj_qkv",
    "attn_gate": f"{MIXER}in_proj_z",
    "ssm_alpha": f"{MIXER}in_proj_a",
    "ssm_beta": f"{MIXER}in_proj_b",
    "ssm_ba": f"{MIXER}in_proj_ba",
    "ssm_conv1d": f"{MIXER}conv",
    "ssm_norm": f"{MIXER}norm",
    "ssm_out": f"{MIXER}out_proj",
}
"""Tensors of a recurrent layer: GGUF's name -> ours."""
MAMBA2 = {
    "ssm_in": f"{MIXER}in_proj",
    "ssm_conv1d": f"{MIXER}conv",
    "ssm_norm": f"{MIXER}norm",
    "ssm_out": f"{MIXER}out_proj",
}
CONV = {f"shortconv.{name}": f"{MIXER}{name}" for name in ("conv", "in_proj", "out_proj")}
WHOLE = {"ssm_a": f"{MIXER}decay", "ssm_dt.bias": f"{MIXER}dt_bias", "ssm_d": f"{MIXER}D"}
"""Tensors whose suffix differs too: GGUF's name -> ours."""


MLP = "mlp_layers"
"""Internal key: which layers are only an MLP."""


def by_heads(found: dict[str, Any], rule: Rule) -> None:
    """Translate per-layer lists into internal keys: which layers are recurrent and which are only an MLP."""
    counts, widths = found.get("attention.head_count_kv"), found.get("feed_forward_length")
    if rule not in _BY_HEADS or not isinstance(counts, np.ndarray):
        return
    recurrent = counts == 0
    if isinstance(widths, np.ndarray) and len(widths) == len(counts):
        found[MLP] = widths > 0
        recurrent = recurrent & (widths == 0)
        _set_if_uniform(found, "feed_forward_length", widths)
    _set_if_uniform(found, "attention.head_count_kv", counts)
    found["attention.recurrent_layers"] = recurrent


def only_states(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model of recurrent layers only, with placeholder attention and MLP sizes."""
    layers = found.get("block_count")
    idle = np.zeros(layers, np.bool_) if isinstance(layers, int) and 0 < layers < 1 << 12 else None
    plain = {"attention.head_count": 1, "attention.head_count_kv": 1, "feed_forward_length": 1}
    plain |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 64)
    return plain | {"attention.recurrent_layers": True} | ({} if idle is None else {MLP: idle})


def _set_if_uniform(found: dict[str, Any], name: str, counts: NDArray[Any]) -> None:
    nonzero = {count for count in counts.tolist() if count}
    if len(nonzero) == 1:
        found[name] = nonzero.pop()


def mlp_layers(keys: Fields, layers: int) -> tuple[int, ...] | None:
    """Return the layers that are only an MLP; None if layers are not split that way."""
    listed = keys.values.get(MLP)
    return None if listed is None else tuple(layer for layer in range(layers) if listed[layer])


def recurrence(
    keys: Fields, rule: Rule, layers: int, hidden: int, tensors: Container[str], *, tiled: bool
) -> Recurrence | None:
    """Return the recurrent layers of a file, or None. `tiled`: as `Recurrence.tiled`."""
    limited = _limited(keys, rule, layers) if rule else []
    if not limited or not rule:
        return None
    if rule == "conv":
        reach = keys.integer("shortconv.l_cache", 2, MOST_REACH)
        return Recurrence(kind=rule, layers=tuple(limited), reach=reach, value_size=hidden)
    heads = keys.integer("ssm.time_step_rank", 1, MAX_HEADS)
    key_heads = keys.integer("ssm.group_count", 1, MAX_HEADS)
    inner = keys.integer("ssm.inner_size", 1, MAX_HEADS * MAX_HEAD_DIM)
    if inner % heads or heads % key_heads:
        raise ModelError(
            f"{keys.path}: {heads} recurrent heads do not divide {inner} values, or are no multiple of "
            f"{key_heads} key heads"
        )
    return Recurrence(
        kind=rule,
        layers=tuple(limited),
        reach=keys.integer("ssm.conv_kernel", 2, MOST_REACH),
        heads=heads,
        value_size=inner // heads,
        key_heads=key_heads,
        key_size=keys.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        tiled=tiled and heads != key_heads,
        conv_bias=f"blk.{limited[0]}.ssm_conv1d.bias" in tensors,
    )


def _limited(keys: Fields, rule: Rule, layers: int) -> list[int]:
    """Return the layers without attention: from a list, or all but every `full_attention_interval`-th."""
    listed = keys.values.get("attention.recurrent_layers")
    if isinstance(listed, np.ndarray):
        if len(listed) < layers:
            raise keys.error("attention.recurrent_layers", f"a list of {layers}")
        return [layer for layer in range(layers) if listed[layer]]
    if listed is not None:  # one value for all
        return list(range(layers)) if listed else []
    if rule in _BY_HEADS:
        return []
    period = keys.integer("full_attention_interval", 1, 1 << 12, 4)
    return [layer for layer in range(layers) if (layer + 1) % period]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of ours made from a stored tensor of another order or shape."""

    name: str
    stored: tuple[int, ...]
    """The tensor's shape in the file."""
    change: Change


def parts(name: str, facts: Recurrence, hidden: int) -> Iterator[Part]:
    """Yield how to build our tensor `name` from the stored one; nothing if it is stored as is."""
    before, mixer, rest = name.partition(f".{MIXER}")
    if not mixer:
        return
    own = before + mixer
    if rest == "conv.weight":
        yield Part(name, (facts.channels, facts.reach), _turned)
    if facts.kind == "mamba2" and rest in ("decay", "D"):
        yield Part(name, (facts.heads, 1), _flat)
    if facts.kind == "mamba2" and rest == "norm.weight":
        yield Part(name, (facts.key_heads, facts.inner // facts.key_heads), _flat)
    if rest == "in_proj_ba.weight":
        # Stored per key head: first beta, then alpha of its value heads.
        fan = facts.heads // facts.key_heads
        order = np.arange(2 * facts.heads).reshape(facts.key_heads, 2, fan)
        for number, one in enumerate("ba"):
            rows = order[:, number].reshape(-1)
            yield Part(f"{own}in_proj_{one}.weight", (2 * facts.heads, hidden), partial(_rows, rows))


def _rows(rows: NDArray[np.intp], array: NDArray[Any]) -> NDArray[Any]:
    return array[rows]


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1)


def _turned(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.T).reshape(-1)
