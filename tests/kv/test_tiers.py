from __future__ import annotations

import pytest
from tiered import Rig

from cairn.kv.ram import RamStore
from cairn.types import Miss

PROMPT = [(7 * n) % 61 for n in range(100)]
CHUNK = 16


def disk() -> RamStore:
    """A store that stands for a disk: it outlives the workers of a test."""
    return RamStore(1 << 30)


def test_what_one_worker_computed_the_next_one_loads() -> None:
    """Known failures 27, 39: written behind, found by the next worker, and the answer is the same."""
    store = disk()
    first = Rig({"disk": store}).ask(PROMPT)
    assert first.computed == 100 and first.miss == Miss(position=0, reason="never seen")
    again = Rig({"disk": store})
    report = again.ask(PROMPT)
    assert (report.disk, report.computed, report.pool) == (96, 4, 0)
    assert report.load > 0 and report.miss is None
    assert again.ask(PROMPT).pool == 96


@pytest.mark.parametrize("windows", [(0,), (0, 5), (0, 24), (40, 0), (7, 0, 50), (6,)])
@pytest.mark.parametrize("length", [16, 17, 31, 64, 65, 99])
def test_every_kind_of_group_comes_back(windows: tuple[int, ...], length: int) -> None:
    store = disk()
    prompt = PROMPT[:length]
    Rig({"disk": store}, windows=windows).ask(prompt)
    report = Rig({"disk": store}, windows=windows).ask(prompt)
    assert report.disk == min((length - 1) // 4 * 4, length // CHUNK * CHUNK)
