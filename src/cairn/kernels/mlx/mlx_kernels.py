"""The kernels in MLX: every operation as a function of values, replayed step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Packed
from cairn.kernels.mlx import attention as attentions
from cairn.kernels.mlx import metal as metal_kernels
from cairn.kernels.mlx import recurrent
from cairn.kernels.mlx.cells import from_numpy
from cairn.kernels.mlx.program import MlxProgram
from cairn.kernels.mlx.sampler import MlxSampler
from cairn.kernels.mlx.storage import MlxStorage
from cairn.kernels.mlx.weights import MlxMatrix, pack
from cairn.kernels.program import KernelCall
from cairn.kernels.rope import frequencies
from cairn.types.model_spec import RopeScaling

VERSION = "mlx-1"
"""Version of these kernels. Change it with every change that can move a bit."""

_CACHE = 256 << 20
"""Most bytes of freed memory that MLX keeps for its next arrays."""

Array = Any


class DirectKernel:
    """A kernel that is called by itself: a program of one call."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, kernels: MlxKernels, owner: type) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            kernels.program([KernelCall(self._name, arguments)]).replay({})

        return run


class MlxKernels(MlxStorage):
    """`kernels.base.Kernels` on a device of MLX. The methods are documented there."""

    def __init__(
        self, device: str, *, narrow: bool | None = None, compiled: bool | None = None, metal: bool = False
    ) -> None:
        """Use `device`, gpu or cpu. `metal`: scan states by the kernel in `kernels.mlx.metal`.

        `narrow`: products in the type of weights and KV, as GPUs are fast at; else in float32. `compiled`: steps of
        single tokens are compiled, which on a CPU calls a C++ compiler. None: both on a GPU, neither on a CPU.
        """
        super().__init__(mx.gpu if device == "gpu" else mx.cpu)
        self._device = device
        self._narrow = device == "gpu" if narrow is None else narrow
        self._compiled = device == "gpu" if compiled is None else compiled
        self._metal, self._instead = metal, dict[str, Callable[..., Any]]()
        if metal:
            self._instead |= {name: _by_metal(name) for name in ("delta", "mamba2")}
        if self._narrow:
            self._instead |= {
                name: partial(getattr(attentions, name), narrow=True) for name in ("attention", "latent_attention")
            }
        mx.set_cache_limit(_CACHE)

    @property
    def numerics(self) -> tuple[object, ...]:
        """`Kernels.numerics`."""
        name = device_name(self._device)
        return (VERSION, mx.__version__, self._device, name, self._narrow, self._compiled, self._metal)

    def vector(self, source: NDArray[Any]) -> Array:
        """`Kernels.vector`."""
        with self.active():
            return _computed(mx.array(np.array(source, np.float32)))

    def table(self, source: NDArray[Any] | Packed) -> Array | MlxMatrix:
        """`Kernels.table`."""
        if isinstance(source, Packed):
            return self.matrix([source], [None])
        with self.active():
            return _computed(from_numpy(source))

    def matrix(self, weights: Sequence[NDArray[Any] | Packed], biases: Sequence[NDArray[Any] | None]) -> MlxMatrix:
        """`Kernels.matrix`."""
        with self.active():
            return pack(weights, biases, self._narrow)

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Array, float]:
        """`Kernels.rope`."""
        made = frequencies(head_dim, theta, scaling)
        return self.vector(made.frequencies), made.factor

    embed = DirectKernel()
    rope_angles = DirectKernel()
    scale = DirectKernel()
    norm = DirectKernel()
    layer_norm = DirectKernel()
    project = DirectKernel()
    adapt = DirectKernel()
    activate = DirectKernel()
    gate = DirectKernel()
    add = DirectKernel()
    norm_project = DirectKernel()
    rope_write = DirectKernel()
    attention = DirectKernel()
    gate_heads = DirectKernel()
    convolve = DirectKernel()
    delta = DirectKernel()
    mamba2 = DirectKernel()
    gated_norm = DirectKernel()
    project_add = DirectKernel()
    norm_add = DirectKernel()
    gated_project = DirectKernel()
    gated_mlp = DirectKernel()
    logits = DirectKernel()
    layer_logits = DirectKernel()
    softcap = DirectKernel()
    scale_logits = DirectKernel()
    scale_queries = DirectKernel()
    norm_heads = DirectKernel()
    layer_norm_heads = DirectKernel()
    turn_heads = DirectKernel()
    scale_by = DirectKernel()
    xielu = DirectKernel()
    gate_with = DirectKernel()
    latent_write = DirectKernel()
    latent_queries = DirectKernel()
    latent_attention = DirectKernel()
    latent_values = DirectKernel()
    route = DirectKernel()
    experts = DirectKernel()
    scale_shares = DirectKernel()
    scale_tokens = DirectKernel()
    mix_streams = DirectKernel()
    correct_streams = DirectKernel()
    take_stream = DirectKernel()
    put_stream = DirectKernel()
    add_streams = DirectKernel()
    match_magnitude = DirectKernel()
    sparsify = DirectKernel()
    scale_columns = DirectKernel()
    add_gated = DirectKernel()

    def sampler(self, vocab: int) -> MlxSampler:
        """`Kernels.sampler`."""
        return MlxSampler(self.active)

    def program(self, calls: Sequence[KernelCall]) -> MlxProgram:
        """`Kernels.program`."""
        return MlxProgram(self.active, calls, self._compiled, self._instead)

    def close(self) -> None:
        """`Kernels.close`."""
        mx.clear_cache()


def device_name(device: str) -> str:
    """Return the hardware's name of MLX's device, gpu or cpu."""
    found = mx.device_info(mx.gpu if device == "gpu" else mx.cpu)
    return str(found.get("device_name", device))


def _by_metal(kernel: str) -> Callable[..., Any]:
    """Return a kernel of `kernels.mlx.recurrent` that scans by `kernels.mlx.metal`."""
    return partial(getattr(recurrent, kernel), run=lambda *arguments: metal_kernels.scan(*arguments))


def _computed(array: Array) -> Array:
    mx.eval(array)
    return array
