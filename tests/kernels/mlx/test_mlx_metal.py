"""The Metal kernel's body, compiled as C++, compared with the plain operations that it replaces."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its kernels are not tested")

import mlx.core as mx

from cairn.kernels import devices
from cairn.kernels.mlx import metal, program
from cairn.kernels.mlx.cells import from_numpy
from cairn.kernels.mlx.mlx_kernels import MlxKernels
from cairn.kernels.mlx.recurrent import scan
from cairn.types.errors import NoDevice
from tests.kernels.arguments import calls
from tests.kernels.mlx.test_mlx_kernels import results

KEYS, VALUES, HEADS, TOKENS, ROWS = 6, 5, 3, 4, 2
NAMES = (*metal.INPUTS, *metal.OUTPUTS)
CODE = """
#define device
#define constant
typedef unsigned uint;
struct uint3 { uint x, y, z; };
template <int KEYS, bool CORRECTED>
void body(PARAMETERS, const int* value_shape, uint3 thread_position_in_grid) { SOURCE }
extern "C" void run(PARAMETERS, const int* value_shape, int corrected) {
    for (uint z = 0; z < (uint)value_shape[0]; ++z)
        for (uint y = 0; y < (uint)value_shape[2]; ++y)
            for (uint x = 0; x < (uint)value_shape[3]; ++x)
                if (corrected) body<KEYS_, true>(ARGUMENTS, value_shape, {x, y, z});
                else body<KEYS_, false>(ARGUMENTS, value_shape, {x, y, z});
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    parameters = ", ".join([f"const float* {name}" for name in metal.INPUTS] + [f"float* {n}" for n in metal.OUTPUTS])
    text = CODE.replace("PARAMETERS", parameters).replace("ARGUMENTS", ", ".join(NAMES))
    folder: Path = tmp_path_factory.mktemp("metal")
    (folder / "scan.cpp").write_text(text.replace("KEYS_", str(KEYS)).replace("SOURCE", metal.SOURCE))
    library = folder / "scan.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, folder / "scan.cpp"], check=True)
    return ctypes.CDLL(str(library)).run


@pytest.mark.parametrize("corrected", [True, False])
def test_the_body_computes_what_the_operations_do(compiled: Any, corrected: bool) -> None:
    rng = np.random.default_rng(4)
    shapes = {
        **{name: (ROWS, TOKENS, HEADS, KEYS) for name in ("key", "query")},
        **{name: (ROWS, TOKENS, HEADS) for name in ("decay", "share")},
        **{"value": (ROWS, TOKENS, HEADS, VALUES), "state": (ROWS, HEADS, KEYS, VALUES)},
    }
    inputs = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in metal.INPUTS}
    made, after = np.zeros(shapes["value"], np.float32), np.zeros(shapes["state"], np.float32)
    arrays = [np.ascontiguousarray(one) for one in (*inputs.values(), made, after)]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    shape = (ctypes.c_int * 4)(*shapes["value"])
    compiled(*pointers, shape, int(corrected))
    wanted = scan(*(from_numpy(inputs[name]) for name in metal.INPUTS), corrected)
    for ours, theirs in zip(arrays[-2:], wanted, strict=True):
        np.testing.assert_allclose(ours, np.array(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["delta", "mamba2"])
def test_a_program_hands_it_what_the_operations_would_get(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def instead(*arguments: Any) -> Any:
        asked.append([argument.shape for argument in arguments[:-1]])
        return scan(*arguments)

    monkeypatch.setattr(metal, "scan", instead)
    for call in (call for call in calls() if call.kernel == kernel):
        ours = results(call, MlxKernels("cpu", metal=True))
        for one, other in zip(ours, results(call, MlxKernels("cpu")), strict=True):
            np.testing.assert_array_equal(one, other)
    assert asked and program.OPERATIONS[kernel] is not None


@pytest.mark.skipif(mx.metal.is_available(), reason="an Apple GPU is here")
def test_it_is_refused_where_no_metal_is() -> None:
    assert MlxKernels("cpu").numerics != MlxKernels("cpu", metal=True).numerics
    with pytest.raises(NoDevice, match="kernels is metal, but mlx finds no Apple GPU here; leave kernels out"):
        devices.load("mlx", "metal", 1)
