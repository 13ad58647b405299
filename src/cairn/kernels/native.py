"""The kernels in C++, compiled once for each instruction set: sources in `csrc`, module `_native`.

Arrays are numpy's, so that pages stay views. Without a compiler the module is missing; then `variants` is empty. A
single kernel call runs as a program of one call, so there is only one path.
"""

# The methods of NativeKernels are documented where their meaning is declared, in kernels.base.
# ruff: noqa: D102

from __future__ import annotations

import importlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import BLOCK, GROUP, MEMBERS, LowRank, Packed, Quantized
from cairn.kernels.codebooks import ROW_FORMATS, RowBlocks
from cairn.kernels.fusion import fuse
from cairn.kernels.native_sampler import NativeSampler
from cairn.kernels.program import KernelCall, Size, Slot, slots
from cairn.kernels.rope import Rope, frequencies
from cairn.kernels.storage import HostStorage
from cairn.types.errors import ModelError
from cairn.types.model_spec import RopeScaling

VERSION = "native-7"
"""Version of the order of operations, of the KV layout and of packed matrices. Change it here and in `csrc/module.cpp`
with every change that can move a bit."""

INTERFACE = 12
"""Version of the module's interface. Change it in both places with changes of signatures that move no bit."""

_MODULE = "cairn.kernels._native"
_ALIGN = 64
_LANES = 16
_BLOCK_BYTES = {"q4_k": 192 + 8 * 256, "q5_k": 192 + 8 * 320, "q6_k": 256 + 8 * 384, "iq4_xs": 8 * 256}
"""Bytes of a super-block of 16 outputs in a panel, without its part of the panel's front."""
_FRONT_BYTES = {"q4_k": 64, "q5_k": 64, "q6_k": 32, "iq4_xs": 128}
"""Bytes of a super-block of 16 outputs at the front of a panel: its float scales, for iq4_xs the integer ones, too."""


def _module() -> Any:
    """Return the compiled module; None if there is none.

    Raises `ModelError` if it was compiled from another version: its KV would be stored under a wrong identity.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    if getattr(module, "VERSION", None) != VERSION or getattr(module, "INTERFACE", None) != INTERFACE:
        raise ModelError("the compiled kernels are of another version of Cairn; install it again (`make -B install`)")
    return module


def trouble() -> str:
    """Return why the compiled module cannot be loaded; "" if it can, or if none was compiled."""
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        return "" if isinstance(error, ModuleNotFoundError) and error.name == _MODULE else str(error)
    return ""


def variants() -> dict[str, bool]:
    """Return the compiled variants, fastest first, and whether this CPU runs each; empty if none were compiled.

    Raises `ModelError` if they were compiled from another version.
    """
    module = _module()
    return dict(module.variants()) if module is not None else {}


def models() -> dict[str, bool]:
    """Return the variants for tests and whether this CPU runs each; no option names them, and wheels have none."""
    module = _module()
    return dict(module.models()) if module is not None else {}


def has_tiles() -> bool:
    """Return whether this CPU has AMX's tiles of bfloat16, whatever was compiled."""
    module = _module()
    return module is not None and bool(module.has_tiles())


def tile_trouble() -> str:
    """Return why the variant `amx` does not run here; "" if it does.

    The first call asks the system for the right to use the tiles, and compares what they compute with a model of them.
    """
    module = _module()
    return str(module.tile_trouble()) if module is not None else "they were not compiled when Cairn was installed"


def cpu() -> str:
    """Return the name of this CPU with its family, model and stepping; "" if it does not say."""
    module = _module()
    return str(module.cpu()) if module is not None else ""


def form_of(weight: NDArray[Any] | Packed) -> str:
    """Return the name of a matrix part's storage format.

    For floats numpy's name of the type. For groups with scales the words `int4` or `int8` (`fp4` or `iq4` if the codes
    are from such a table), `half` or `float` (the type of scales and minima), and `minimum` if there are minima. For
    super-blocks `q4_k`, `q5_k`, `q6_k` or `iq4_xs`. For codebook rows a key of `ROW_FORMATS`.
    """
    if isinstance(weight, RowBlocks):
        return weight.kind
    if not isinstance(weight, Quantized):
        return str(weight.dtype)
    if weight.block_scale is not None:
        return "iq4_xs" if weight.table else f"q{weight.bits}_k"
    numbers = [one for one in (weight.scale, weight.minimum) if one is not None]
    half = all(one.dtype == np.float16 for one in numbers)
    return f"{weight.table or f'int{weight.bits}'} {'half' if half else 'float'}{' minimum' * (len(numbers) > 1)}"


def packed_bytes(parts: Sequence[tuple[int, int, str]]) -> int:
    """Return the bytes of a packed matrix with parts (out, in, `form_of`), without its bias.

    Neighbouring parts of one format are packed together in whole panels, as `csrc/matrix.cpp` does.
    """
    size = 0
    for (form, inner), run in groupby(parts, key=lambda part: (part[2], part[1])):
        panels = -(-sum(out for out, _, _ in run) // _LANES)
        size += -(-panels * _panel_bytes(inner, form) // _ALIGN) * _ALIGN
    return size


def _panel_bytes(inner: int, form: str) -> int:
    if form in ROW_FORMATS:
        return inner // BLOCK * _LANES * ROW_FORMATS[form].bytes
    if form in _BLOCK_BYTES:
        front = inner // BLOCK * _FRONT_BYTES[form]
        return -(-front // _ALIGN) * _ALIGN + inner // BLOCK * _BLOCK_BYTES[form]
    kind, *beside = form.split()
    if beside:
        number, *minimum = beside
        group = (32 if kind == "int8" else 16) + (2 if number == "half" else 4) * (1 + len(minimum))
        return -(-inner // (2 * GROUP)) * 2 * group * _LANES
    return _LANES * {"float32": 4 * inner, "float16": 2 * inner, "bfloat16": (inner + 1) // 2 * 4}[form]


class Probe:
    """Measures what the machine can do with a variant's instructions; see `kernels.roofline`."""

    def __init__(self, variant: str, threads: int) -> None:
        self._native, self._variant = _module(), variant
        self._team = self._native.Team(threads)

    def read(self, numbers: NDArray[np.float32]) -> int:
        """Read the numbers, a whole number of MiB, on all threads; return the bytes read."""
        return int(self._native.probe_read(self._variant, self._team, numbers))

    def multiply(self, turns: int = 1 << 16) -> int:
        """Multiply and add in registers, `turns` times in every chain; return the number of operations."""
        return int(self._native.probe_multiply(self._variant, self._team, turns))

    def multiply_bytes(self, turns: int = 1 << 13) -> int:
        """Do the same with bytes, as for matrices of 4 to 8 bits; return the number of operations."""
        return int(self._native.probe_multiply_bytes(self._variant, self._team, turns))

    def multiply_pairs(self, turns: int = 1 << 16) -> int:
        """Do the same with pairs of bfloat16; return the number of operations, 0 if no instruction does that."""
        return int(self._native.probe_multiply_pairs(self._variant, self._team, turns))


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table [V, H]; bfloat16 is held as 16-bit integers, which nanobind can pass."""

    array: NDArray[Any]
    dtype: str


class NativeKernels(HostStorage):
    """`kernels.base.Kernels` in C++ for one instruction set. The methods are documented there."""

    def __init__(self, variant: str, threads: int = 1) -> None:
        """Start the threads. `variant` must be one that runs here, according to `variants`."""
        self._native = _module()
        self._variant = variant
        self._team = self._native.Team(threads)
        for name, form in ROW_FORMATS.items():
            self._native.set_codebook(name, form.rows.view(np.uint8).reshape(-1))

    @property
    def numerics(self) -> tuple[str, ...]:
        return (VERSION, self._variant, platform.machine())

    def allocate(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = np.zeros(size + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        return raw[start : start + size].view(dtype).reshape(shape)

    def vector(self, source: NDArray[Any]) -> NDArray[np.float32]:
        return np.array(source, np.float32)

    def table(self, source: NDArray[Any] | Packed) -> Any:
        if isinstance(source, Packed):
            return self.matrix([source], [None])
        # Copied: a mapped file that shrinks while the engine runs would kill the process.
        return Table(_carried(np.array(source)), str(source.dtype))

    def matrix(self, weights: Sequence[NDArray[Any] | Packed], biases: Sequence[NDArray[Any] | None]) -> Any:
        bias = _bias([len(one) for one in weights], biases)
        return self._native.Matrix([_matrix_part(one) for one in weights], bias)

    def blank(self, parts: Sequence[tuple[int, int, str]], biases: Sequence[NDArray[Any] | None]) -> Any:
        """Return an empty matrix with parts (out, in, `form_of`), to fill its `memory()` from a packed one's.

        The packed one must have the same parts.
        """
        shapes = [(form.split()[0], *_numbers(form), out, inner) for out, inner, form in parts]
        return self._native.blank(shapes, _bias([out for out, _, _ in parts], biases))

    def mapped(
        self, parts: Sequence[tuple[int, int, str]], biases: Sequence[NDArray[Any] | None], memory: NDArray[np.uint8]
    ) -> Any:
        """Return a matrix like that of `blank` over `memory`, which may be mapped from a file and is not copied.

        Pages of a file are read when a product needs them. The memory must be aligned to 64 bytes.
        """
        shapes = [(form.split()[0], *_numbers(form), out, inner) for out, inner, form in parts]
        return self._native.mapped(shapes, _bias([out for out, _, _ in parts], biases), memory)

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
        return frequencies(head_dim, theta, scaling)

    def embed(self, table: Any, tokens: Any, hidden: Any) -> None:
        self._run("embed", (table, tokens, hidden), tokens=len(tokens))

    def rope_angles(self, rope: Any, positions: Any, angles: Any) -> None:
        self._run("rope_angles", (rope, positions, angles), tokens=len(positions))

    def scale(self, hidden: Any, factor: float) -> None:
        self._run("scale", (hidden, factor), tokens=len(hidden))

    def norm(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        self._run("norm", (x, weight, eps, out), tokens=len(x))

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
        self._run("layer_norm", (x, weight, bias, eps, out), tokens=len(x))

    def project(self, x: Any, matrix: Any, out: Any) -> None:
        self._run("project", (x, matrix, out), tokens=len(x))

    def adapt(self, x: Any, rows: Any, slots: Any, scales: Any, adapters: Sequence[LowRank], out: Any) -> None:
        self._run("adapt", (x, rows, slots, scales, adapters, out), tokens=len(x), rows=len(rows))

    def activate(self, x: Any, activation: str, out: Any) -> None:
        self._run("activate", (x, activation, out), tokens=len(x))

    def gate(self, gates: Any, activation: str, out: Any) -> None:
        self._run("gate", (gates, activation, out), tokens=len(gates))

    def add(self, x: Any, hidden: Any) -> None:
        self._run("add", (x, hidden), tokens=len(x))

    def norm_project(self, hidden: Any, norm: Any, eps: float, matrix: Any, out: Any) -> None:
        self._run("norm_project", (hidden, norm, eps, matrix, out), tokens=len(hidden))

    def rope_write(
        self,
        qkv: Any,
        angles: Any,
        q_norm: Any,
        k_norm: Any,
        eps: float,
        kv: Any,
        layer: int,
        slots: Any,
        query: Any,
        late: bool = False,
    ) -> None:
        """Do as `kernels.base` says. Keys of a block and head are laid out [D, block_tokens].

        bfloat16 in pairs: keys [D / 2, block_tokens, 2], values [block_tokens / 2, D, 2].
        """
        arguments = (qkv, angles, q_norm, k_norm, eps, kv, layer, slots, query, late)
        self._run("rope_write", arguments, tokens=len(qkv))

    def attention(
        self,
        query: Any,
        kv: Any,
        layer: int,
        rows: Any,
        tables: Any,
        window: int,
        scale: float,
        out: Any,
        softcap: float = 0.0,
        both: bool = False,
        sinks: Any = None,
        members: Any = None,
    ) -> None:
        arguments = (query, kv, layer, rows, tables, window, scale, out, softcap, both, sinks)
        self._run("attention", arguments, tokens=len(query), rows=len(rows))

    def gate_heads(self, x: Any, qkv: Any, size: int) -> None:
        self._run("gate_heads", (x, qkv, size), tokens=len(x))

    def convolve(
        self,
        x: Any,
        first: int,
        weight: Any,
        bias: Any,
        silu: bool,
        gated: bool,
        states: Any,
        layer: int,
        rows: Any,
        tables: Any,
        out: Any,
        members: Any = None,
    ) -> None:
        arguments = (x, first, weight, bias, silu, gated, states, layer, rows, tables, out)
        self._run("convolve", arguments, tokens=len(x), rows=len(rows))

    def delta(
        self,
        x: Any,
        gates: Any,
        first: int,
        decay: Any,
        time_bias: Any,
        key_heads: int,
        tiled: bool,
        states: Any,
        layer: int,
        rows: Any,
        tables: Any,
        out: Any,
        members: Any = None,
    ) -> None:
        arguments = (x, gates, first, decay, time_bias, key_heads, tiled, states, layer, rows, tables, out)
        self._run("delta", arguments, tokens=len(x), rows=len(rows))

    def mamba2(
        self,
        x: Any,
        gates: Any,
        first: int,
        decay: Any,
        time_bias: Any,
        skip: Any,
        low: float,
        high: float,
        groups: int,
        states: Any,
        layer: int,
        rows: Any,
        tables: Any,
        out: Any,
        members: Any = None,
    ) -> None:
        arguments = (x, gates, first, decay, time_bias, skip, low, high, groups, states, layer, rows, tables, out)
        self._run("mamba2", arguments, tokens=len(x), rows=len(rows))

    def gated_norm(
        self, x: Any, gates: Any, first: int, weight: Any, size: int, eps: float, gate_first: bool, out: Any
    ) -> None:
        self._run("gated_norm", (x, gates, first, weight, size, eps, gate_first, out), tokens=len(x))

    def project_add(self, x: Any, matrix: Any, hidden: Any) -> None:
        self._run("project_add", (x, matrix, hidden), tokens=len(hidden))

    def norm_add(self, x: Any, norm: Any, eps: float, hidden: Any) -> None:
        self._run("norm_add", (x, norm, eps, hidden), tokens=len(x))

    def gated_project(
        self, hidden: Any, norm: Any, eps: float, gate_up: Any, activation: str, down: Any, out: Any
    ) -> None:
        self._run("gated_project", (hidden, norm, eps, gate_up, activation, down, out), tokens=len(hidden))

    def gated_mlp(self, hidden: Any, norm: Any, eps: float, gate_up: Any, activation: str, down: Any) -> None:
        self._run("gated_mlp", (hidden, norm, eps, gate_up, activation, down), tokens=len(hidden))

    def logits(self, hidden: Any, wanted: Any, norm: Any, eps: float, head: Any, out: Any) -> None:
        self._run("logits", (hidden, wanted, norm, eps, head, out), logits=len(wanted))

    def layer_logits(self, hidden: Any, wanted: Any, norm: Any, bias: Any, eps: float, head: Any, out: Any) -> None:
        self._run("layer_logits", (hidden, wanted, norm, bias, eps, head, out), logits=len(wanted))

    def softcap(self, logits: Any, cap: float) -> None:
        self._run("softcap", (logits, cap), logits=len(logits))

    def scale_logits(self, logits: Any, factor: float) -> None:
        self._run("scale_logits", (logits, factor), logits=len(logits))

    def scale_queries(self, query: Any, positions: Any, beta: float, original: float, ahead: int = 0) -> None:
        self._run("scale_queries", (query, positions, beta, original, ahead), tokens=len(query))

    def norm_heads(self, x: Any, first: int, heads: int, size: int, weight: Any, eps: float) -> None:
        self._run("norm_heads", (x, first, heads, size, weight, eps), tokens=len(x))

    def layer_norm_heads(self, x: Any, first: int, heads: int, size: int, weight: Any, bias: Any, eps: float) -> None:
        self._run("layer_norm_heads", (x, first, heads, size, weight, bias, eps), tokens=len(x))

    def turn_heads(self, x: Any, angles: Any, query: Any) -> None:
        self._run("turn_heads", (x, angles, query), tokens=len(x))

    def scale_by(self, hidden: Any, factor: Any) -> None:
        self._run("scale_by", (hidden, factor), tokens=len(hidden))

    def xielu(self, x: Any, positive: Any, negative: Any, out: Any) -> None:
        self._run("xielu", (x, positive, negative, out), tokens=len(x))

    def gate_with(self, x: Any, activation: str, by: Any, first: int, out: Any) -> None:
        self._run("gate_with", (x, activation, by, first, out), tokens=len(x))

    def latent_write(
        self, x: Any, angles: Any, neighbours: bool, norm: Any, eps: float, kv: Any, layer: int, slots: Any
    ) -> None:
        self._run("latent_write", (x, angles, neighbours, norm, eps, kv, layer, slots), tokens=len(x))

    def latent_queries(self, x: Any, keys: Sequence[Any], angles: Any, neighbours: bool, query: Any) -> None:
        self._run("latent_queries", (x, keys, angles, neighbours, query), tokens=len(x))

    def latent_attention(
        self, query: Any, kv: Any, layer: int, rows: Any, tables: Any, scale: float, out: Any, members: Any = None
    ) -> None:
        self._run("latent_attention", (query, kv, layer, rows, tables, scale, out), tokens=len(query), rows=len(rows))

    def latent_values(self, x: Any, values: Sequence[Any], out: Any) -> None:
        self._run("latent_values", (x, values, out), tokens=len(x))

    def route(
        self,
        scores: Any,
        bias: Any,
        kind: str,
        normed: bool,
        scale: float,
        groups: int,
        chosen_groups: int,
        chosen: Any,
        shares: Any,
    ) -> None:
        arguments = (scores, bias, kind, normed, scale, groups, chosen_groups, chosen, shares)
        self._run("route", arguments, tokens=len(scores))

    def experts(
        self,
        x: Any,
        chosen: Any,
        shares: Any,
        gate_up: Sequence[Any],
        activation: str,
        down: Sequence[Any],
        out: Any,
    ) -> None:
        self._run("experts", (x, chosen, shares, gate_up, activation, down, out), tokens=len(x))

    def scale_shares(self, shares: Any, chosen: Any, factors: Any) -> None:
        self._run("scale_shares", (shares, chosen, factors), tokens=len(shares))

    def scale_tokens(self, x: Any, shares: Any, out: Any) -> None:
        self._run("scale_tokens", (x, shares, out), tokens=len(x))

    def mix_streams(self, x: Any, parts: Any, out: Any) -> None:
        self._run("mix_streams", (x, parts, out), tokens=len(x))

    def correct_streams(self, given: Any, parts: Any, active: int, x: Any) -> None:
        self._run("correct_streams", (given, parts, active, x), tokens=len(x))

    def take_stream(self, x: Any, place: int, out: Any) -> None:
        self._run("take_stream", (x, place, out), tokens=len(x))

    def put_stream(self, x: Any, place: int, out: Any) -> None:
        self._run("put_stream", (x, place, out), tokens=len(x))

    def add_streams(self, x: Any, first: int, out: Any) -> None:
        self._run("add_streams", (x, first, out), tokens=len(x))

    def match_magnitude(self, like: Any, x: Any) -> None:
        self._run("match_magnitude", (like, x), tokens=len(x))

    def sparsify(self, gates: Any, factor: float) -> None:
        self._run("sparsify", (gates, factor), tokens=len(gates))

    def scale_columns(self, x: Any, weight: Any, out: Any) -> None:
        self._run("scale_columns", (x, weight, out), tokens=len(x))

    def add_gated(self, x: Any, gate: Any, hidden: Any) -> None:
        self._run("add_gated", (x, gate, hidden), tokens=len(x))

    def sampler(self, vocab: int) -> NativeSampler:
        return NativeSampler(self._native.Sampler(self._variant, self._team, vocab))

    def program(self, calls: Sequence[KernelCall]) -> NativeProgram:
        return NativeProgram(self._native.Program(self._variant, self._team), fuse(calls))

    def close(self) -> None:
        # Programs share the threads, which end with the last of them.
        self._team = None

    def _run(self, kernel: str, arguments: tuple[Any, ...], *, tokens: int = 0, rows: int = 0, logits: int = 0) -> None:
        self.program([KernelCall(kernel, arguments)]).replay({"tokens": tokens, "rows": rows, "logits": logits})


class NativeProgram:
    """A `kernels.program.Program` that runs in one call of the module, without the interpreter lock."""

    def __init__(self, native: Any, calls: Sequence[KernelCall]) -> None:
        self._native = native
        # Also keeps the arrays alive that the module points to.
        self.calls = tuple(calls)
        self._most: dict[Size, int] = {}
        for slot in slots(calls):
            self._most[slot.size] = min(len(slot.array), self._most.get(slot.size, len(slot.array)))
        for call in calls:
            # Native kernels work row by row and need no row of each token.
            arguments = [one for place, one in enumerate(call.arguments) if place != MEMBERS.get(call.kernel)]
            getattr(native, call.kernel)(*(part for one in arguments for part in _parts(one)))

    def replay(self, sizes: Mapping[Size, int]) -> None:
        """`Program.replay`. Raises `ValueError` for a size beyond a buffer."""
        for size, most in self._most.items():
            if not 0 <= sizes[size] <= most:
                raise ValueError(f"{sizes[size]} {size}; the program's buffers hold {most}")
        self._native.run(sizes.get("tokens", 0), sizes.get("rows", 0), sizes.get("logits", 0))


def _parts(argument: Any) -> tuple[Any, ...]:
    """Convert an argument to those that the module takes."""
    if isinstance(argument, Slot):
        return (argument.array,)
    if isinstance(argument, Table):
        return argument.array, argument.dtype
    if isinstance(argument, Rope):
        return argument.frequencies, float(argument.factor)
    if isinstance(argument, np.ndarray) and argument.dtype == ml_dtypes.bfloat16:
        return (argument.view(np.uint16),)
    if isinstance(argument, tuple) and argument and isinstance(argument[0], LowRank):
        return ([(one.slot, one.down, [(up.first, up.column, up.matrix) for up in one.ups]) for one in argument],)
    return (argument,)


def _bias(sizes: Sequence[int], biases: Sequence[NDArray[Any] | None]) -> NDArray[np.float32] | None:
    """Join the parts' biases, with zeros for those without; None if no part has one."""
    if all(one is None for one in biases):
        return None
    parts = [np.zeros(size) if one is None else one for size, one in zip(sizes, biases, strict=True)]
    return np.concatenate([np.asarray(part, np.float32) for part in parts])


def _numbers(form: str) -> tuple[bool, bool]:
    """Return whether a quantised part's scales are float16, and whether it has minima."""
    if form in _BLOCK_BYTES:
        return True, form in ("q4_k", "q5_k")
    if form in ROW_FORMATS:
        return True, False
    return "half" in form, "minimum" in form


def _matrix_part(weight: NDArray[Any] | Packed) -> tuple[Any, ...]:
    """Convert a matrix part to the module's arguments: format, codes, scales, minima, and the super-blocks' own."""
    if isinstance(weight, RowBlocks):
        return weight.kind, _carried(weight.blocks), None, None, None, None
    if not isinstance(weight, Quantized):
        return str(weight.dtype), _carried(weight), None, None, None, None
    scale, minimum = weight.scale, weight.minimum
    if weight.block_scale is not None:
        beside = (scale, minimum, weight.block_scale, weight.block_minimum)
        codes = _carried(weight.codes).view(np.uint8)
        return form_of(weight), codes, *(None if one is None else _carried(one) for one in beside)
    if minimum is not None and minimum.dtype != scale.dtype:
        scale, minimum = scale.astype(np.float32), minimum.astype(np.float32)
    codes = _carried(weight.codes).view(np.uint8)
    return (
        form_of(weight).split()[0],
        codes,
        _carried(scale),
        None if minimum is None else _carried(minimum),
        None,
        None,
    )


def _carried(source: NDArray[Any]) -> NDArray[Any]:
    """Return the array, contiguous and aligned, with 16-bit floats as integers."""
    whole = np.require(source, requirements=["C", "A"])
    return whole.view(np.uint16) if whole.dtype.itemsize == 2 else whole
