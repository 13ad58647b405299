"""Admission: the queue's limits among tenants, and the Retry-After of refused requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.config.config import Config
from cairn.frontend.admission import LONGEST_RETRY, Queue, QueuePace
from cairn.types.errors import Overloaded
from cairn.types.request import Request, SamplingParams
from cairn.worker import wire
from tests.service.tiny import collect, request, serving


def of(share: str, tokens: int = 1) -> Request:
    return Request(id=1, prompt=(7,) * tokens, sampling=SamplingParams(max_tokens=1), share=share)


def fill(queue: Queue, share: str, count: int, tokens: int = 1) -> int:
    """Admit up to `count` requests of a tenant, of this many tokens each; return how many were admitted."""
    for done in range(count):
        try:
            queue.check(of(share, tokens), 4, 4, 0.0)
        except Overloaded:
            return done
        queue.enter(of(share, tokens))
    return count


def test_one_tenant_fills_the_queue_and_another_finds_its_half() -> None:
    queue = Queue(Config(max_queue=10))
    assert fill(queue, "a", 330) == 10
    assert fill(queue, "b", 330) == 5
    assert fill(queue, "c", 330) == 0
    with pytest.raises(
        Overloaded, match=r"15 requests .* 10 of them with 10 yours \(limits: 10 .* half of that for one"
    ):
        queue.check(of("a"), 4, 4, 0.0)
    for _ in range(6):  # free places go to all tenants, but none to one that holds more than its half
        queue.leave(of("a"))
    assert fill(queue, "a", 9) == 1
    assert fill(queue, "c", 9) == 0 and fill(queue, "b", 9) == 0
    for _ in range(5):
        queue.leave(of("b"))
        queue.begin(of("a"))
    assert fill(queue, "c", 9) == 9 and queue.requests == 9


def test_the_same_holds_of_tokens_and_a_tenants_first_may_have_more() -> None:
    queue = Queue(Config(max_queue_tokens=100))
    assert fill(queue, "a", 330, 10) == 10
    assert fill(queue, "b", 330, 10) == 5
    assert fill(queue, "c", 1, 1) == 0
    alone = Queue(Config(max_queue_tokens=100))
    assert fill(alone, "a", 330, 10) == 10
    assert fill(alone, "b", 330, 80) == 1


def test_a_queue_of_one_place_takes_one_request() -> None:
    queue = Queue(Config(max_queue=1))
    assert fill(queue, "a", 3) == 1 and fill(queue, "b", 3) == 0


def test_retry_after_is_what_the_work_that_waits_will_take() -> None:
    queue = Queue(Config(max_queue=100, max_queue_tokens=1 << 30))
    assert fill(queue, "a", 330, 400) == 100
    queue.note(0.0, wire.Stats(running=4, waiting=100, token_seconds=0.01))
    assert 395 <= queue.retry_after(0.0) <= 410  # 40,000 tokens at 10 ms, and 4 s for a slot
    queue.note(0.0, wire.Stats(running=4, waiting=100, token_seconds=0.1))
    assert queue.retry_after(0.0) == LONGEST_RETRY


def test_departures_from_the_queue_beat_an_estimate_from_speed() -> None:
    """Prompts with a cached prefix are prefilled faster, and long answers hold their slots longer."""
    for seconds, tokens, least, most in ((0.1, 1000, 10, 12), (2.0, 1, 195, 210)):
        pace, now = QueuePace(), 0.0
        pace.token_seconds = 0.01
        pace.note(now, 0, True)
        for _ in range(200):
            now += seconds
            pace.note(now, 1, True, tokens)
        assert least <= pace.ahead(100, 100 * tokens) <= most


async def test_while_one_tenants_requests_wait_another_is_let_in_and_comes_next(folder: Path) -> None:
    async with serving(folder, max_running=1, max_queue=20) as service:
        asked = [request(service, f"a {n}", 30, share="a") for n in range(21)]
        streams = [service.generate(one) for one in asked]
        with pytest.raises(Overloaded):
            service.generate(request(service, "a", share="a"))
        other = service.generate(request(service, "b", 8, share="b"))
        await collect(other)
        states = [service.status(one.id) for one in asked]
        assert sum(state is not None and state.state == "waiting" for state in states) >= 15
        for stream in streams:
            stream.close()


def test_a_queue_larger_than_the_pool_is_refused_at_once() -> None:
    queue = Queue(Config(max_queue_pools=2.0))
    asked = [Request(id=n, prompt=(7,) * 100, sampling=SamplingParams(max_tokens=9000)) for n in range(9)]
    for _ in range(200):
        queue.answered(50)
    # Each is estimated at 150 tokens, as past answers suggest, not at the 9,100 that it may reach
    for one in asked[:6]:
        queue.check(one, 4, 4, 0.0, 500)
        queue.enter(one)
    assert queue.needed == 900
    with pytest.raises(Overloaded, match=r"about 900 tokens, and this one for 150; the pool holds 500, .* 2 times"):
        queue.check(asked[6], 4, 4, 0.0, 500)
    queue.check(asked[6], 4, 4, 0.0, 0)  # an encoder has no pool
    queue.begin(asked[0])
    assert queue.needed == 750
    queue.check(asked[6], 4, 4, 0.0, 500)
    empty = Queue(Config(max_queue_pools=0.1))
    # With an empty queue it is admitted; whether it fits the pool at all is checked elsewhere
    empty.check(asked[0], 4, 4, 0.0, 500)


def test_a_request_that_would_not_begin_in_time_is_refused_at_once() -> None:
    queue = Queue(Config(max_queue=1000))
    wait = Request(id=1, prompt=(7,) * 100, sampling=SamplingParams(max_tokens=1), share="a")
    for _ in range(100):
        queue.enter(wait)
    queue.note(0.0, wire.Stats(running=4, waiting=100, token_seconds=0.01))  # 100 s of prompts

    def asks(share: str, timeout: float) -> Request:
        return Request(id=2, prompt=(7,), sampling=SamplingParams(max_tokens=1), share=share, timeout=timeout)

    with pytest.raises(Overloaded, match="take about 100 s, and the timeout of this one is 30 s") as refused:
        queue.check(asks("a", 30.0), 4, 4, 0.0)
    assert refused.value.retry_after is not None and refused.value.retry_after > 90
    queue.check(asks("a", 200.0), 4, 4, 0.0)
    queue.check(asks("b", 30.0), 4, 4, 0.0)  # another tenant's turn comes soon
