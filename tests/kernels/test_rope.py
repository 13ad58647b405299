"""The frequencies of rotary positions."""

import math

import numpy as np
import pytest

from cairn.kernels.rope import frequencies
from cairn.types.model_spec import RopeScaling


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("theta", [math.nextafter(1, 2), 1.5, 1e6])
def test_yarn_has_finite_frequencies_for_every_base(theta: float, truncate: bool) -> None:
    """Also for one hardly above 1, as a model file may have it."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=1 << 20, truncate=truncate)
    assert np.isfinite(frequencies(1024, theta, scaling).frequencies).all()
