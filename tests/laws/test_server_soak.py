"""A minute of the soak, and proof that it would see leaks and slowdowns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.laws.server_soak import soak
from tests.laws.soak_figures import Sample, Use, pace_row, percentiles, use_rows


def test_a_minute_of_mixed_load(tmp_path: Path, prove: bool, figure: Callable[[str, str], None]) -> None:
    if not prove:
        pytest.skip("takes a minute: make prove, and make soak for half an hour")
    rows, faults = soak(1.0, tmp_path, seed=1)
    for row in rows:
        figure(f"soak: {row.what}", row.value)
    assert not faults, faults


LEAK = """
import os, threading
from cairn.frontend.request_table import RequestTable
enter, kept = RequestTable.enter, []
def leaking(self, flight):
    kept.append((b"x" * (1 << 20), os.open("/dev/null", os.O_RDONLY)))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    enter(self, flight)
RequestTable.enter = leaking
"""
"""Leaks a MiB, a descriptor and a thread for each request."""


def test_a_server_that_leaks_fails(tmp_path: Path, prove: bool) -> None:
    if not prove:
        pytest.skip("takes most of a minute: make prove")
    _, faults = soak(0.7, tmp_path, seed=1, plant=LEAK)
    grown = [fault.partition(":")[0] for fault in faults]
    assert {"memory of the front", "descriptors of the front", "threads of the front"} <= set(grown), faults


def run(seconds: int = 1800, *, leak: float = 0.0, fds: float = 0.0, threads: float = 0.0) -> list[Sample]:
    """Return samples of a server that leaks so many bytes, descriptors and threads a second.

    Its two workers are replaced every five minutes, and fill a pool of 30 MiB in 15 s.
    """
    samples = []
    for at in range(seconds):
        age = at % 300
        worker = Use(int(200e6 + 2e6 * min(age, 15)), 20, 8)
        front = Use(int(150e6 + leak * at + 1e5 * (at % 7)), int(30 + fds * at), int(8 + threads * at))
        samples.append(Sample(float(at), front, {at // 300 * 2: worker, at // 300 * 2 + 1: worker}))
    return samples


@pytest.mark.parametrize(
    ("leak", "what"),
    [
        ({}, ""),
        ({"leak": 1e3}, ""),
        ({"leak": 6e3}, "memory of the front"),
        ({"fds": 0.02}, "descriptors of the front"),
        ({"threads": 0.02}, "threads of the front"),
    ],
)
def test_growth_is_detected(leak: dict[str, float], what: str) -> None:
    """Of 150 MB, 1 kB/s is 2.4 % an hour and 6 kB/s is 14 %."""
    assert [row.what for row in use_rows(run(**leak)) if row.fault] == ([what] if what else [])


def test_a_leaking_worker_is_detected() -> None:
    samples = []
    for one in run(1500):
        workers = {1: Use(int(200e6 + 2e4 * one.at), int(20 + 0.01 * one.at), 8)}
        samples.append(one._replace(workers=workers))
    faults = [row.what for row in use_rows(samples) if row.fault]
    assert faults == ["memory of all, with 1 workers", "descriptors of a worker, most growth"]


def test_rising_latencies_are_detected() -> None:
    assert not pace_row("x", [(float(at), 0.1) for at in range(700)]).fault
    assert "rose from" in pace_row("x", [(float(at), 0.1 + 0.0005 * at**2) for at in range(700)]).fault
    assert pace_row("x", []).fault
    assert percentiles([0.1] * 99 + [1.0]) == "100 / 100 / 109 ms of 100"
