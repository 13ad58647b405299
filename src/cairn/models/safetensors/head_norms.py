"""Norms of heads, in files that store each by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.types.errors import ModelFileError

_HEAD_NORM = re.compile(r"(.+\.self_attn\.[qk]_norm)\.(\d{1,4})\.weight")
"""The norm of one head, in files that store them one by one."""


def head_norm(name: str, expected: Mapping[str, tuple[int, ...]]) -> tuple[str, int] | None:
    """Return the tensor of ours that a norm of one head belongs to, and the head's number; None for other names."""
    match = _HEAD_NORM.fullmatch(name)
    whole = f"{match[1]}.weight" if match else ""
    return (whole, int(match[2])) if match and whole in expected else None


def join_heads(
    folder: Path, parts: Mapping[str, Mapping[int, NDArray[Any]]], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[Any]]:
    """Return the norms of all heads of a layer as one; raise `ModelFileError` if one is missing or misshapen."""
    found = {}
    for name, heads in parts.items():
        if len(heads) != max(heads) + 1 or len({array.dtype for array in heads.values()}) > 1:
            raise ModelFileError(f"{folder}: {name} needs a vector of one type for each head, numbered from 0")
        joined = np.concatenate([heads[head] for head in range(len(heads))])
        if joined.shape != expected[name] or joined.dtype.kind in "iub":
            raise ModelFileError(
                f"{folder}: {name} of all heads has the shape {list(joined.shape)} and the type {joined.dtype}, "
                f"expected floats of shape {list(expected[name])} from config.json"
            )
        found[name] = joined
    return found
