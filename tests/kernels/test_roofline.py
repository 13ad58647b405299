"""Measured limits of the machine: memory bandwidth and arithmetic."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from cairn.kernels import blas, roofline
from cairn.kernels.roofline import READ_BYTES, ROUNDS, Roofline, measure, share
from tests.tiny_models import KERNELS


@pytest.mark.parametrize("kernels", KERNELS)
def test_work_is_divided_by_the_best_time(kernels: str) -> None:
    """With a fake clock: all bytes are counted, once a round, whatever the instruction set."""
    ticks = count()
    measured = measure(kernels, 2, lambda: float(next(ticks)), read_bytes=4 << 20)
    assert measured.read == 4 << 20
    assert measured.arithmetic > 1e6
    assert next(ticks) >= 4 * ROUNDS


def test_no_part_of_a_limit_is_more_than_all_of_it() -> None:
    limits = Roofline(10.0, 4.0, pairs=8.0, integers=16.0, cached=lambda size: 30.0 if size < 1000 else 9.0)
    assert [limits.reading(size) for size in (10, 5000, READ_BYTES)] == [30.0, 10.0, 10.0]
    assert [limits.computing(bits) for bits in (32.0, 16.1, 8.5, 4.5)] == [4.0, 8.0, 16.0, 16.0]
    assert Roofline(10.0, 4.0).reading(10) == 10.0 and Roofline(10.0, 4.0).computing(4.5) == 4.0
    assert (share(5.0, 10.0), share(10.0, 10.0), share(25.0, 10.0)) == (0.5, 1.0, 1.0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_caches_and_bytes_have_limits_of_their_own(kernels: str) -> None:
    """With a fake clock: a round takes a second, however much is read in it."""
    ticks = count()
    limits = measure(kernels, 1, lambda: float(next(ticks)), read_bytes=4 << 20)
    assert (limits.integers > 0) is (kernels != "reference")
    assert limits.cached is not None
    assert limits.cached(3 << 20) == 3 * (32 // 3) << 20  # repeated until it is some 32 MiB
    before = next(ticks)
    assert limits.cached((3 << 20) + 5) == limits.cached(3 << 20) and next(ticks) == before + 1  # already known


def test_blas_uses_no_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would exceed the number of threads that was asked for."""
    seen: list[int] = []

    def watched(probe: Any, name: str, work: Any) -> None:
        def call(*arguments: Any) -> Any:
            seen.extend(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas")
            return work(*arguments)

        monkeypatch.setattr(probe, name, call)

    watched(roofline._Numpy, "read", lambda probe, numbers: int(numbers.nbytes))
    watched(roofline._Numpy, "multiply", lambda probe: 1)
    monkeypatch.setattr(roofline, "SECONDS", 0)
    # kernels of another test may still hold this process's one
    monkeypatch.setattr(blas, "one_blas_thread", blas.OneBlasThread())
    ticks = count()
    with threadpool_limits(2, "blas"):
        measure("reference", 1, lambda: float(next(ticks)), read_bytes=4 << 20)
        assert seen and set(seen) == {1}
        assert {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"} == {2}
