from __future__ import annotations

from itertools import count

import pytest
from tests.tiny_models import KERNELS

from cairn.kernels.roofline import ROUNDS, measure


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_was_done_is_divided_by_the_best_time(kernels: str) -> None:
    """The clock is made up: all bytes are counted, once a round, whatever the instruction set."""
    ticks = count()
    found = measure(kernels, 2, lambda: float(next(ticks)), read_bytes=4 << 20)
    assert found.read == 4 << 20
    assert found.arithmetic > 1e6
    assert next(ticks) >= 4 * ROUNDS
