"""Memory of KV pools, taken while weights are loaded."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest

from cairn.engine import cpu


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "cairn-kv-pages"]


def test_each_page_of_the_first_part_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each pool in proportion: two groups that hold 12 and 4 pages, of which half is wanted."""
    monkeypatch.setattr(cpu, "_SLICE", 2 * cpu.PAGE)
    pools = [
        np.ones((3, 2 * cpu.PAGE), ml_dtypes.bfloat16),
        np.ones((4, cpu.PAGE // 4), np.float32),
    ]
    with cpu.taken(pools, 8 * cpu.PAGE):
        while threads():
            time.sleep(0.001)
    first = [pool.reshape(-1).view(np.uint8)[:: cpu.PAGE] for pool in pools]
    ones = [np.ones(1, pool.dtype).view(np.uint8)[0] for pool in pools]
    assert first[0].tolist() == [0] * 6 + [ones[0]] * 6
    assert first[1].tolist() == [0] * 2 + [ones[1]] * 2


def test_it_ends_with_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written once the engine may be used, or after loading failed."""
    monkeypatch.setattr(cpu, "_SLICE", cpu.PAGE)
    pool = np.ones(1 << 26, np.uint8)
    with pytest.raises(ZeroDivisionError), cpu.taken([pool], len(pool)):
        1 / 0  # noqa: B018
    assert not threads()
    pool[:] = 1
    assert pool.all()


def test_nothing_is_written_where_nothing_is_expected() -> None:
    pool = np.ones(1 << 16, np.uint8)
    with cpu.taken([pool], 0):
        while threads():
            time.sleep(0.001)
    assert pool.all()
