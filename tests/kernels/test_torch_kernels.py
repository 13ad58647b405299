"""Every kernel in plain torch beside the reference, on torch's CPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")

from cairn.kernels.base import EFFECTS
from cairn.kernels.reference import ReferenceKernels
from cairn.kernels.torch.torch_kernels import TorchKernels
from tests.kernels.arguments import Call, calls


def results(call: Call, kernels: ReferenceKernels | TorchKernels) -> list[np.ndarray]:
    given = call.given(kernels)
    with np.errstate(all="ignore"):
        getattr(kernels, call.kernel)(*given)
    found = [np.asarray(kernels.fetch(given[place]), np.float64) for place in EFFECTS[call.kernel].changes]
    kernels.close()
    return found


@pytest.mark.parametrize("kernel", sorted(EFFECTS))
def test_a_kernel_gives_what_the_reference_gives(kernel: str) -> None:
    """Within the noise of another order of sums; codes of activations may fall on the other side of a half."""
    for call in (call for call in calls() if call.kernel == kernel):
        for ours, theirs in zip(results(call, TorchKernels("cpu")), results(call, ReferenceKernels()), strict=True):
            largest = np.abs(theirs).max(initial=1e-9)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * largest, err_msg=str(call.arguments)[:300])
