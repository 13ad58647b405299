"""The order of waiting requests: round robin over tenants, weights, classes and priorities."""

from __future__ import annotations

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kv.pool.cache import Cache
from cairn.scheduler.fairness import AGE_SECONDS, Classes, RoundRobin
from cairn.scheduler.queue import WaitingQueue
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.sequence import Sequence
from cairn.scheduler.step_budget import Limits
from cairn.system.posix import SystemClock
from cairn.types.request import Request, SamplingParams


def test_tenants_alternate_and_a_served_tenant_moves_to_the_end() -> None:
    rounds: RoundRobin[str] = RoundRobin()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        rounds.add(item[0], item)
    assert list(rounds) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert list(rounds.tagged())[:2] == [("a", "a1"), ("b", "b1")]
    rounds.remove("a", "a1")
    rounds.served("a")
    assert list(rounds) == ["b1", "c1", "a2", "b2", "a3"]
    rounds.remove("c", "c1")
    rounds.served("c")  # nothing of it waits any more
    rounds.add("d", "d1")
    assert list(rounds) == ["b1", "a2", "d1", "b2", "a3"]
    rounds.add("a", "a0", key=str)
    assert rounds.line("a") == ["a0", "a2", "a3"] and rounds.line("nobody") == []


def begun(asked: list[tuple[str, int]], running: int = 1, **priorities: int) -> list[str]:
    """Return the order in which requests of these tenants and priorities begin; `priorities` are the tenants'."""
    engine = FakeEngine(fake_spec(), blocks=200)
    scheduler = Scheduler(Cache(engine.info), Limits(max_running=running, priorities=priorities), SystemClock())
    for id, (share, priority) in enumerate(asked):
        sampling = SamplingParams(max_tokens=3, temperature=0.0)
        request = Request(id=id, prompt=(id % 8, 2, 3), sampling=sampling, share=share, priority=priority)
        scheduler.add(request)
    order: list[str] = []
    while (plan := scheduler.plan()) is not None:
        order += [asked[id][0] + (f" {id}" if asked[id][1] else "") for id in plan.started]
        scheduler.commit(plan, plan.run(engine))
    return order


def test_one_request_of_a_tenant_does_not_wait_behind_another_tenants_hundred() -> None:
    assert begun([("a", 0)] * 120 + [("b", 0)]).index("b") == 1
    assert begun([("a", 0)] * 5 + [("b", 0)] * 2 + [("c", 0)]) == ["a", "b", "c", "a", "b", "a", "a", "a"]


def test_priority_orders_a_tenants_own_requests_and_takes_nothing_from_others() -> None:
    order = begun([("b", 0)] * 3 + [("a", -100), ("a", 100), ("a", 50)])
    assert order == ["b", "a 4", "b", "a 5", "b", "a 3"]


def test_a_tenant_with_more_weight_has_more_turns_of_a_round() -> None:
    rounds: RoundRobin[str] = RoundRobin({"a": 2.0, "c": 0.5})
    for item in ("a1", "a2", "a3", "a4", "a5", "b1", "b2", "b3", "c1", "c2"):
        rounds.add(item[0], item)
    order = []
    while waiting := list(rounds):
        order.append(waiting[0])
        rounds.remove(waiting[0][0], waiting[0])
        rounds.served(waiting[0][0])
    assert order == ["a1", "a2", "a3", "a4", "b1", "b2", "c1", "a5", "b3", "c2"]
    rounds.add("b", "b4")
    rounds.add("a", "a6")
    assert list(rounds) == ["b4", "a6"]


def test_waiting_items_are_listed_in_serving_order() -> None:
    """The first of the iteration is the next to be served, and weights do not change the order within a tenant."""
    rounds: RoundRobin[tuple[str, int]] = RoundRobin({"a": 3.0})
    for number in range(6):
        for tenant in "ab":
            rounds.add(tenant, (tenant, number))
    order = list(rounds)
    served = []
    while line := list(rounds):
        assert line == [item for item in order if item in line]
        served.append(line[0])
        rounds.remove(line[0][0], line[0])
        rounds.served(line[0][0])
    assert served == order


def test_tenants_of_a_class_come_before_those_of_later_ones_and_take_turns_among_themselves() -> None:
    asked = [("b", 0)] * 3 + [("a", 0)] * 3 + [("x", 0)] + [("c", 0)] * 2
    assert begun(asked, b=1, x=-1) == ["x", "a", "c", "a", "c", "a", "b", "b", "b"]
    assert begun([("b", -100), ("a", 100)], b=1) == ["a 1", "b 0"], "what a request asks for is its tenant's own affair"


def test_a_class_that_waits_gets_on_however_much_others_ask_for() -> None:
    classes = Classes({"b": 2, "c": 2, "d": 5})
    came = [("a", 0.0), ("b", 0.0), ("c", 1.0), ("d", 0.0)]
    assert classes.levels(came, 0.0) == {"a": 0, "b": 2, "c": 2, "d": 5}
    assert classes.levels(came, 2 * AGE_SECONDS) == {"a": 0, "b": 0, "c": 0, "d": 3}, "nobody comes before the first"
    classes.served("c", 2 * AGE_SECONDS)
    assert classes.levels(came, 3 * AGE_SECONDS) == {"a": 0, "b": 1, "c": 1, "d": 2}
    assert classes.levels([("d", 99.0)], 99.0) == {"d": 5}


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
