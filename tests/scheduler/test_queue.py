from __future__ import annotations

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kv.pool.cache import Cache
from cairn.scheduler.queue import WaitingQueue
from cairn.scheduler.sequence import Sequence
from cairn.types.request import Request, SamplingParams


def sequence(serial: int, tokens: int = 5, arrival: float = 0.0, priority: int = 0) -> Sequence:
    context = Cache(FakeEngine(fake_spec(), blocks=4).info).context(b"")
    request = Request(id=serial, prompt=(1,) * tokens, sampling=SamplingParams(max_tokens=1), priority=priority)
    return Sequence(request, context, 100, serial, arrival)


def test_the_order_is_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for it in (sequence(1), sequence(2, arrival=1), sequence(3, arrival=1, priority=1), sequence(4)):
        queue.push(it)
    assert [it.request.id for it in queue] == [3, 1, 4, 2]
    assert (len(queue), queue.tokens) == (4, 20)
