"""Kernel sets for the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cairn.kernels.base import Kernels
from cairn.kernels.choose import load_kernels
from tests.tiny_models import KERNELS


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Yield each kernel set that runs here."""
    made = load_kernels(request.param, 2)
    yield made
    made.close()
