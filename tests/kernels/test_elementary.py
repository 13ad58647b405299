"""Elementary functions: their accuracy, the same bits in numpy and C++, and no use of the C library's."""

from __future__ import annotations

import ast
import hashlib
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cairn
from cairn.kernels import elementary, native
from cairn.kernels.choose import load_kernels
from cairn.types.model_spec import RopeScaling
from tests.tiny_models import KERNELS

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": elementary.exp,
    "expm1": elementary.expm1,
    "log": elementary.log,
    "log1p": elementary.log1p,
    "tanh": elementary.tanh,
    "cos": lambda x: elementary.cos_sin(x)[0].astype(np.float32),
    "sin": lambda x: elementary.cos_sin(x)[1].astype(np.float32),
}
COMPILED = [name for name in FUNCTIONS if name != "tanh"]
INF = math.inf

EDGES: dict[str, list[tuple[float, float]]] = {
    "exp": [(0, 1), (-0.0, 1), (1e-45, 1), (INF, INF), (-INF, 0), (88.72284, INF), (-104, 0), (-103.97, 1e-45)],
    "expm1": [(0, 0), (-0.0, -0.0), (1e-45, 1e-45), (-1e-45, -1e-45), (INF, INF), (-INF, -1), (-40, -1), (100, INF)],
    "log": [(0, -INF), (-0.0, -INF), (1, 0), (INF, INF), (-1e-45, math.nan), (-INF, math.nan)],
    "log1p": [(0, 0), (-0.0, -0.0), (1e-45, 1e-45), (-1, -INF), (INF, INF), (-1.0000001, math.nan), (-INF, math.nan)],
    "tanh": [(0, 0), (-0.0, -0.0), (1e-45, 1e-45), (INF, 1), (-INF, -1), (50, 1), (-50, -1)],
    "cos": [(0, 1), (-0.0, 1), (1e-45, 1), (INF, math.nan), (-INF, math.nan)],
    "sin": [(0, 0), (-0.0, -0.0), (1e-45, 1e-45), (-1e-45, -1e-45), (INF, math.nan), (-INF, math.nan)],
}

DIGESTS = {
    "exp": "11d19707e15d737e",
    "expm1": "28086e6f72145ad8",
    "log": "b464ff6b1f772632",
    "log1p": "2c5f86cf2aab5ea0",
    "tanh": "d219cc1e731212a4",
    "cos": "0516e10cc10c126b",
    "sin": "719ab48c57ae51ee",
}


def samples() -> Any:
    """Return float32 numbers of every size, many near 0 and 1, and angles from none to many turns."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    # The nearest floats to multiples of a quarter turn lose most digits in the reduction.
    turns = (rng.integers(1, 1 << 40, 100_000) >> rng.integers(0, 40, 100_000)) * (np.longdouble(math.pi) / 2)
    parts = [
        anything[np.isfinite(anything)],
        rng.uniform(-2, 2, 100_000),
        1 + rng.uniform(-1, 1, 100_000) * 2.0 ** -rng.integers(1, 24, 100_000),
        rng.uniform(-110, 100, 100_000),
        rng.uniform(-(2**27), 2**27, 100_000),
        turns,
    ]
    return np.concatenate([np.asarray(part, np.float32) for part in parts])


SAMPLES = samples()


def compiled(name: str, x: Any) -> Any:
    out = np.empty_like(x)
    native._module().elementary(name, x, out)
    return out


def inside(name: str) -> Any:
    least = {"log": 0, "log1p": -1}.get(name, -INF)
    return SAMPLES[least < SAMPLES]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_within_0_51_units_in_the_last_place(name: str) -> None:
    """The reference is the machine's own function in a wider type."""
    x = inside(name)
    got = FUNCTIONS[name](x)
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x.astype(np.longdouble))
        rounded = want.astype(np.float32)
    whole = np.isfinite(rounded)
    assert got[~whole].tobytes() == rounded[~whole].tobytes()
    unit = np.spacing(np.maximum(np.abs(rounded[whole]), np.float32(2.0**-126)))
    assert np.max(np.abs(got[whole] - want[whole]) / unit) < 0.51


@pytest.mark.parametrize("name", FUNCTIONS)
def test_edges(name: str) -> None:
    x, want = (np.array(part, np.float32) for part in zip(*EDGES[name], (math.nan, math.nan), strict=True))
    both = name in COMPILED and bool(native.variants())
    for got in (FUNCTIONS[name](x), compiled(name, x)) if both else (FUNCTIONS[name](x),):
        np.testing.assert_array_equal(got, want)
        numbers = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 7)])
def test_arrays_of_every_shape_and_order(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    for result in (elementary.exp(x), elementary.exp(x.T).T, elementary.cos_sin(np.asarray(x))[0]):
        assert result.shape == shape
    wide = np.random.default_rng(1).standard_normal((40_000, 2), dtype=np.float32)
    assert elementary.tanh(wide[:, 1]).tobytes() == elementary.tanh(wide[:, 1].copy()).tobytes()


@pytest.mark.skipif(not native.variants(), reason="the native kernels were not compiled")
@pytest.mark.parametrize("name", COMPILED)
def test_numpy_and_the_module_give_the_same_bits(name: str) -> None:
    """The module is compiled once for all machines of its kind, so no instruction set may decide about the bits."""
    x = inside(name)
    assert compiled(name, x).tobytes() == FUNCTIONS[name](x).tobytes()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_are_the_same_on_every_machine(name: str) -> None:
    """Recorded on one machine. Whoever changes these bits must change the kernels' versions too."""
    x = np.arange(0, 1 << 32, 65_521).astype(np.uint32).view(np.float32)
    bits = FUNCTIONS[name](x)
    assert hashlib.sha256(bits[~np.isnan(bits)].tobytes()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.skipif(not native.variants(), reason="the native kernels were not compiled")
def test_the_module_rounds_down_as_numpy_does() -> None:
    x = np.concatenate([SAMPLES, np.array([-0.5, 0.5, -1, 8388607.5, -8388607.5, INF, -INF], np.float32)])
    np.testing.assert_array_equal(compiled("floor", x), np.floor(x))


def test_positions_are_turned_by_the_same_bits_with_every_kind_of_kernels() -> None:
    scaling = RopeScaling(kind="yarn", factor=8.0, original_context=4096)
    positions = np.array([0, 1, 1000, 131_071, 16_777_215, 2**31 - 1], np.int32)
    results = set()
    for kind in KERNELS:
        kernels = load_kernels(kind, 1)
        angles = np.empty((len(positions), 2, 64), np.float32)
        kernels.rope_angles(kernels.rope(128, 1e6, scaling), positions, angles)
        kernels.close()
        assert np.isfinite(angles).all()
        results.add(angles.tobytes())
    assert len(results) == 1


def test_single_numbers_are_rounded_once() -> None:
    """Within half a unit in the last place of the wider type's result."""
    rng = np.random.default_rng(0)
    for base, exponent in zip(np.exp(rng.uniform(-9, 30, 200)).tolist(), rng.uniform(-2, 2, 200).tolist(), strict=True):
        log = np.log(np.longdouble(base))
        assert abs(elementary.log_of(base) - log) <= 0.51 * np.spacing(abs(float(log)))
        power = np.exp(exponent * log)
        assert abs(elementary.power_of(base, exponent) - power) <= 0.51 * np.spacing(float(power))
    assert elementary.power_of(10000.0, 0.5) == 100 and elementary.power_of(7.0, 0.0) == 1
    for nothing in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="no logarithm"):
            elementary.log_of(nothing)
        with pytest.raises(ValueError, match="must be above 0"):
            elementary.power_of(nothing, 2.0)


def dynamic(path: Path) -> tuple[set[str], set[str], set[str]]:
    """Return (needed libraries, undefined symbols, defined symbols) of a 64-bit shared object."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", path
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count = struct.unpack_from("<HH", data, 58)
    # type, offset, size and linked section of each section
    sections = [struct.unpack_from("<4xI16xQQI", data, table + i * entry) for i in range(count)]

    def text(section: int, at: int) -> str:
        start = sections[section][1] + at
        return data[start : data.index(b"\0", start)].decode()

    needed, lacking, having = set[str](), set[str](), set[str]()
    for kind, offset, size, linked in sections:
        if kind == 6:  # SHT_DYNAMIC
            pairs = [struct.unpack_from("<qQ", data, offset + at) for at in range(0, size, 16)]
            needed = {text(linked, value) for tag, value in pairs if tag == 1}
        elif kind == 11:  # SHT_DYNSYM
            for at in range(24, size, 24):
                name, defined = struct.unpack_from("<IxxH", data, offset + at)
                (having if defined else lacking).add(text(linked, name))
    return needed, lacking, having


def mapped(*names: str) -> Path | None:
    """Return the path of a loaded library whose file name starts with one of these."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next((Path(line.split()[-1]) for line in maps if Path(line.split()[-1]).name.startswith(names)), None)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system has no ELF files")
@pytest.mark.skipif(not native.variants(), reason="the native kernels were not compiled")
def test_the_module_uses_no_function_of_libm() -> None:
    """Otherwise a system upgrade could change bits."""
    needed, lacking, _ = dynamic(Path(native._module().__file__))
    assert "memcpy" in lacking and any(name.startswith("libstdc++") for name in needed), "the file was read"
    assert not [name for name in needed if name.startswith("libm.")]
    library = mapped("libm.", "libm-")
    if library is None:
        pytest.skip("the C library is one file here")
    _, _, functions = dynamic(library)
    assert {"expf", "sincos", "log1pf", "ceil"} <= functions
    assert not lacking & functions


NAMES = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logaddexp", "power", "float_power", "pow", "cbrt"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "arctan2", "arcsinh", "arccosh"),
    *("arctanh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "hypot", "erf", "erfc", "gamma", "lgamma"),
    *("sinc", "i0", "geomspace", "logspace", "inv_cdf"),
}
ALLOWED = {
    # Reported to clients, or used to draw a token; neither KV nor logits depend on it.
    ("engine/row_results.py", "log"),
    ("kernels/extras.py", "log"),
    ("kernels/extras.py", "log2"),
    ("kernels/extras.py", "**"),
    ("engine/profile.py", "**"),  # a mean of speeds
    ("kv/disk/codec_comparison.py", "exp"),
    ("kv/disk/codec_comparison.py", "log"),
    # rounded to float32 at once
    ("models/families/uneven_spec.py", "inv_cdf"),
}


def inexact(power: ast.BinOp) -> bool:
    """Return whether the C library may round this power: not powers of 2, nor whole powers of whole numbers."""
    if isinstance(power.left, ast.Constant) and power.left.value == 2:
        return False
    broken = any(
        isinstance(part, ast.Div | ast.USub) or (isinstance(part, ast.Constant) and isinstance(part.value, float))
        for part in ast.walk(power.right)
    )
    return broken or (isinstance(power.left, ast.Constant) and isinstance(power.left.value, float))


def borrowed(tree: ast.AST) -> set[str]:
    """Return the functions that a module uses of numpy, `math` and the C library and that differ by machine."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            library = isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy", "math", "cmath")
            names |= {node.attr} if library or node.attr == "inv_cdf" else set()
        elif isinstance(node, ast.ImportFrom) and node.module in ("math", "cmath", "numpy"):
            names |= {one.name for one in node.names} & NAMES
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and inexact(node):
            names.add("**")
    return names


def test_code_that_computes_or_loads_models_uses_no_foreign_math_functions() -> None:
    """What numpy and Python return for these depends on the C library or on the CPU's instructions."""
    root = Path(cairn.__file__).parent
    borrowers = {
        (path.relative_to(root).as_posix(), name)
        for room in ("kernels", "models", "engine", "kv")
        for path in (root / room).rglob("*.py")
        for name in borrowed(ast.parse(path.read_text()))
    }
    assert borrowers == ALLOWED


@pytest.mark.parametrize(
    ("source", "name"),
    [("np.exp(x)", "exp"), ("from math import log", "log"), ("x**-0.5", "**"), ("x ** (1 / y)", "**"), ("2**n", "")],
)
def test_borrowed_functions_are_found(source: str, name: str) -> None:
    assert borrowed(ast.parse(source)) == ({name} if name else set())
