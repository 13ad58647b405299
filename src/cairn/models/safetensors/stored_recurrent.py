"""How safetensors files name and fuse the tensors of layers that keep a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.elementary import exp
from cairn.models.spec.recurrent_spec import MIXER
from cairn.types.model_spec import Recurrence

_PREFIXES = {"delta": "linear_attn.", "mamba2": "mamba.", "conv": "conv."}


def own(facts: Recurrence, rest: str, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """A stored tensor of a layer, without the layer's name, as ours; others as they are."""
    prefix = _PREFIXES[facts.kind]
    if not rest.startswith(prefix):
        yield rest, array
        return
    name = MIXER + rest.removeprefix(prefix).replace("conv1d.", "conv.")
    if name == f"{MIXER}A_log":
        yield f"{MIXER}decay", -exp(array.astype(np.float32))
    elif name == f"{MIXER}conv.weight" and array.ndim == 3:  # [C, 1, reach]
        yield name, np.ascontiguousarray(array[:, 0].T).reshape(-1)
    elif name == f"{MIXER}in_proj_qkvz.weight":
        yield from _split(facts, array)
    elif name == f"{MIXER}in_proj_ba.weight":
        for number, rows in enumerate(_by_keys(facts, (facts.heads, facts.heads))):
            yield f"{MIXER}in_proj_{'ba'[number]}.weight", array[rows]
    else:
        yield name, array


def _split(facts: Recurrence, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Queries, keys, values and gates, which stand together for each head of keys."""
    keys = facts.key_heads * facts.key_size
    query, key, value, gate = _by_keys(facts, (keys, keys, facts.inner, facts.inner))
    yield f"{MIXER}in_proj_qkv.weight", array[np.concatenate([query, key, value])]
    yield f"{MIXER}in_proj_z.weight", array[gate]


def _by_keys(facts: Recurrence, sizes: tuple[int, ...]) -> list[NDArray[np.intp]]:
    """Which rows belong to each of several parts, of which every head of keys has its share beside those of others."""
    order = np.arange(sum(sizes)).reshape(facts.key_heads, -1)
    ends = np.cumsum([size // facts.key_heads for size in sizes])
    return [part.reshape(-1) for part in np.split(order, ends[:-1], axis=1)]
