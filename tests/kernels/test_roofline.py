from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from cairn.kernels import blas, roofline
from cairn.kernels.roofline import ROUNDS, measure
from tests.tiny_models import KERNELS


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_was_done_is_divided_by_the_best_time(kernels: str) -> None:
    """The clock is made up: all bytes are counted, once a round, whatever the instruction set."""
    ticks = count()
    found = measure(kernels, 2, lambda: float(next(ticks)), read_bytes=4 << 20)
    assert found.read == 4 << 20
    assert found.arithmetic > 1e6
    assert next(ticks) >= 4 * ROUNDS


def test_blas_uses_no_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would do more than the threads that were asked for."""
    seen: list[int] = []

    def watched(probe: Any, name: str, work: Any) -> None:
        def call(*arguments: Any) -> Any:
            seen.extend(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas")
            return work(*arguments)

        monkeypatch.setattr(probe, name, call)

    watched(roofline._Numpy, "read", lambda probe, numbers: int(numbers.nbytes))
    watched(roofline._Numpy, "multiply", lambda probe: 1)
    monkeypatch.setattr(roofline, "SECONDS", 0)
    # Kernels of another test may still hold the one of this process.
    monkeypatch.setattr(blas, "one_blas_thread", blas.OneBlasThread())
    ticks = count()
    with threadpool_limits(2, "blas"):
        measure("reference", 1, lambda: float(next(ticks)), read_bytes=4 << 20)
        assert seen and set(seen) == {1}
        assert {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"} == {2}
