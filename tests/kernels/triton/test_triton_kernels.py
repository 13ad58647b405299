"""Every kernel in Triton compared with the reference, in Triton's interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")
pytest.importorskip("triton", reason="triton is not installed: kernels for GPUs are not tested")

from cairn.kernels.base import EFFECTS
from cairn.kernels.reference import ReferenceKernels
from cairn.kernels.triton.triton_kernels import TritonKernels
from tests.kernels.arguments import Call, Weights, calls
from tests.kernels.test_torch_kernels import results

NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


def is_narrow(call: Call) -> bool:
    """Return whether a call reads 16-bit weights or KV, whose other operand is rounded to their type."""
    parts = [part for argument in call.arguments for part in (argument if isinstance(argument, list) else [argument])]
    arrays = [array for part in parts for array in (part.parts if isinstance(part, Weights) else [part])]
    return any(getattr(array, "dtype", None) in NARROW for array in arrays)


@pytest.mark.parametrize("kernel", sorted(EFFECTS))
def test_a_kernel_equals_the_reference(kernel: str) -> None:
    for call in (call for call in calls() if call.kernel == kernel):
        bound = 8e-3 if is_narrow(call) else 2e-4
        for ours, theirs in zip(results(call, TritonKernels("cpu")), results(call, ReferenceKernels()), strict=True):
            largest = np.abs(theirs).max(initial=1e-9)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * largest, err_msg=str(call.arguments)[:300])
