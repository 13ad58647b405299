"""What MLX computes on here, and how much memory it may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from cairn.kernels.mlx.mlx_kernels import MlxKernels, device_name

VERSION: str = mx.__version__
"""MLX's version."""
_LEAST_RESERVE = 2 << 30
"""Bytes of unified memory that the system keeps at least."""
_SHARE = 8
"""One part in so many of unified memory is the system's."""


def has_metal() -> bool:
    """Tell whether an Apple GPU is here."""
    return bool(mx.metal.is_available())


def chosen(name: str) -> str:
    """Return MLX's device, gpu or cpu, for `mlx` (an Apple GPU if there is one) or `mlx-cpu`."""
    return "gpu" if name == "mlx" and has_metal() else "cpu"


def title(device: str) -> str:
    """Return the hardware's name."""
    return device_name(device)


def free_memory(device: str) -> int | None:
    """Return the bytes that models may still take of unified memory; None on a CPU: it has the machine's."""
    return free_unified(mx.device_info(mx.gpu), mx.get_active_memory()) if device == "gpu" else None


def free_unified(info: Mapping[str, Any], taken: int) -> int:
    """Return the bytes of unified memory that are left when this process has taken so many.

    The GPU may hold `max_recommended_working_set_size`, and an eighth of the memory is the system's, at least 2 GiB.
    """
    whole = int(info["memory_size"])
    reserved = max(_LEAST_RESERVE, whole // _SHARE)
    return max(0, min(int(info["max_recommended_working_set_size"]), whole - reserved) - taken)


def load(device: str, metal: bool = False) -> MlxKernels:
    """Return the kernels; on a GPU what they hold stays in memory (is wired), up to what the system recommends.

    `metal`: with the kernel in `kernels.mlx.metal`.
    """
    if device == "gpu":
        mx.set_wired_limit(int(mx.device_info(mx.gpu)["max_recommended_working_set_size"]))
    return MlxKernels(device, metal=metal)
