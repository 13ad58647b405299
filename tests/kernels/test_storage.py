"""KV pools in host memory, and the threads that drive devices."""

import threading
import time
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels import storage
from cairn.kernels.storage import PAGE, HostStorage
from cairn.kernels.stream import ThreadStream


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "cairn-kv-pages"]


def test_each_page_of_the_first_part_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to each pool: two groups of 12 and 4 pages, half of which is wanted."""
    monkeypatch.setattr(storage, "_SLICE", 2 * PAGE)
    pools = [
        np.ones((3, 2 * PAGE), ml_dtypes.bfloat16),
        np.ones((4, PAGE // 4), np.float32),
    ]
    with HostStorage().touching(pools, 8 * PAGE):
        while threads():
            time.sleep(0.001)
    first = [pool.reshape(-1).view(np.uint8)[::PAGE] for pool in pools]
    ones = [np.ones(1, pool.dtype).view(np.uint8)[0] for pool in pools]
    assert first[0].tolist() == [0] * 6 + [ones[0]] * 6
    assert first[1].tolist() == [0] * 2 + [ones[1]] * 2


def test_writing_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be written once the engine can be used, or after loading failed."""
    monkeypatch.setattr(storage, "_SLICE", PAGE)
    pool = np.ones(1 << 26, np.uint8)
    with pytest.raises(ZeroDivisionError), HostStorage().touching([pool], len(pool)):
        1 / 0  # noqa: B018
    assert not threads()
    pool[:] = 1
    assert pool.all()


def test_no_page_is_written_if_none_is_expected() -> None:
    pool = np.ones(1 << 16, np.uint8)
    with HostStorage().touching([pool], 0):
        while threads():
            time.sleep(0.001)
    assert pool.all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_blocks_are_copied_in_order(dtype: type) -> None:
    """So that a chain of copies moves what the previous copy left."""
    pool = np.arange(24).reshape(4, 2, 3).astype(dtype)
    blocks = [pool[number].copy() for number in range(4)]
    HostStorage().copy_blocks(pool, [(0, 1), (1, 2), (3, 0)])
    for number, source in enumerate((3, 0, 0, 3)):
        assert (pool[number] == blocks[source]).all()


def test_work_on_a_thread_is_done_in_order_and_its_errors_come_when_waited_for() -> None:
    stream, done = ThreadStream("cairn-test-stream", lambda error: RuntimeError(f"device: {error}")), list[int]()
    calls = [stream.submit(partial(done.append, number)) for number in range(50)]
    failed = stream.submit(lambda: 1 // 0)
    last = stream.submit(lambda: len(done))
    assert last.wait() == 50 and done == list(range(50)) and all(call.done for call in calls)
    with pytest.raises(RuntimeError, match="device: integer division"):
        failed.wait()
    stream.close()
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(lambda: None)
    assert "cairn-test-stream" not in [thread.name for thread in threading.enumerate()]
