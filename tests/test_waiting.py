from __future__ import annotations

import weakref

import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.errors import Overloaded
from cairn.kv.cache import Cache
from cairn.sequence import Sequence
from cairn.types import Request, SamplingParams
from cairn.waiting import AGAIN, Passed, WaitingQueue


def sequence(serial: int, tokens: int = 5, arrival: float = 0.0, priority: int = 0) -> Sequence:
    context = Cache(FakeEngine(fake_spec(), blocks=4).info).context(b"")
    request = Request(id=serial, prompt=(1,) * tokens, sampling=SamplingParams(max_tokens=1), priority=priority)
    return Sequence(request, context, 100, serial, arrival)


def test_the_order_is_priority_then_arrival() -> None:
    queue = WaitingQueue(10, 1000)
    for it in (sequence(1), sequence(2, arrival=1), sequence(3, arrival=1, priority=1), sequence(4)):
        queue.push(it)
    assert [it.request.id for it in queue] == [3, 1, 4, 2]
    assert (len(queue), queue.tokens) == (4, 20)


def test_both_bounds_hold_at_the_limit_and_one_beyond() -> None:
    """Known failure 41."""
    queue = WaitingQueue(2, 10)
    queue.push(sequence(1, tokens=5))
    queue.check(5)
    with pytest.raises(Overloaded, match="max_queue_tokens"):
        queue.check(6)
    queue.push(sequence(2, tokens=1))
    with pytest.raises(Overloaded, match="2 requests"):
        queue.check(1)


def test_a_request_alone_may_exceed_the_tokens() -> None:
    WaitingQueue(2, 10).check(1000)


def test_a_preempted_sequence_is_never_refused() -> None:
    queue = WaitingQueue(1, 1)
    queue.push(sequence(1))
    queue.push(sequence(2))
    assert len(queue) == 2


@pytest.mark.parametrize(
    "change",
    ["none", "room", "fewer run", "a long prompt", "one is passed", "later", "nobody runs", "it loads", "another pool"],
)
def test_what_did_not_fit_is_looked_at_again_when_something_has_changed(change: str) -> None:
    cache = Cache(FakeEngine(fake_spec(), blocks=4).info)
    waits = sequence(1)
    pool = waits.kv.short = cache.pools[0]
    taken = pool.take(2)
    queue, now, later = WaitingQueue(10, 1000), Passed(5), Passed(5 + (AGAIN if change == "later" else AGAIN - 1))
    queue.opened(waits, 0, now, 2, 0)
    assert not queue.full(waits, later, 2, 0)
    running = 0 if change == "nobody runs" else 2
    queue.opened(waits, None, now, running, 0)
    if change == "room":
        pool.release(taken[1:])
    if change == "it loads":
        waits.kv.loading = True
    if change == "another pool":
        waits.kv.short = Cache(FakeEngine(fake_spec(), blocks=4).info).pools[0]
    if change == "one is passed":
        later.add(sequence(2))
    kept, running = 8 * (change == "a long prompt"), running - (change == "fewer run")
    assert queue.full(waits, later, running, kept) == (change == "none")
    assert not queue.full(sequence(3), later, running, kept)


def test_nothing_is_kept_of_what_did_not_fit_and_has_ended() -> None:
    queue, waits = WaitingQueue(10, 1000), sequence(1)
    waits.kv.short = Cache(FakeEngine(fake_spec(), blocks=4).info).pools[0]
    queue.push(waits)
    queue.opened(waits, None, Passed(1), 1, 0)
    ended = weakref.ref(waits.kv.short)  # which nobody else holds
    queue.discard(waits)
    del waits
    assert ended() is None
