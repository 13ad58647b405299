from __future__ import annotations

import pytest

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.errors import Overloaded
from cairn.kv.cache import Cache
from cairn.sequence import Sequence
from cairn.types import Request, SamplingParams
from cairn.waiting import WaitingQueue


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
