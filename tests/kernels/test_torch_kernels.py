"""Every kernel in plain torch on the CPU, beside the reference."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")

from cairn.kernels.base import EFFECTS, Packed
from cairn.kernels.codebooks import ROW_FORMATS
from cairn.kernels.quantized import dequantized
from cairn.kernels.reference import ReferenceKernels
from cairn.kernels.torch.torch_kernels import TorchKernels
from tests.kernels.arguments import Call, calls
from tests.kernels.test_quantized import in_rows, in_table_blocks


def results(call: Call, kernels: ReferenceKernels | TorchKernels) -> list[np.ndarray]:
    arguments = call.given(kernels)
    with np.errstate(all="ignore"):
        getattr(kernels, call.kernel)(*arguments)
    changed = [np.asarray(kernels.fetch(arguments[place]), np.float64) for place in EFFECTS[call.kernel].changes]
    kernels.close()
    return changed


@pytest.mark.parametrize("kernel", sorted(EFFECTS))
def test_a_kernel_equals_the_reference(kernel: str) -> None:
    """Within the noise of another order of sums; codes of activations may fall on the other side of a half."""
    for call in (call for call in calls() if call.kernel == kernel):
        for ours, theirs in zip(results(call, TorchKernels("cpu")), results(call, ReferenceKernels()), strict=True):
            largest = np.abs(theirs).max(initial=1e-9)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * largest, err_msg=str(call.arguments)[:300])


@pytest.mark.parametrize("part", [in_table_blocks(20, 512), *(in_rows(kind, 20, 512) for kind in ROW_FORMATS)])
def test_iq_weights_are_the_numbers_of_their_file(part: Packed) -> None:
    """A device holds them as 8-bit codes with their own scales."""
    kernels = TorchKernels("cpu")
    made = kernels.matrix([part], [None])
    np.testing.assert_array_equal(kernels.fetch(made.rows(kernels.tensor(np.arange(20)))), dequantized(part))
