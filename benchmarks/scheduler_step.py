"""The scheduler's own cost per step: median microseconds to plan and to commit a decode step.

    .venv/bin/python benchmarks/scheduler_step.py

Also measured are steps beside a queue, and the lookup of a long prompt. The goal is plan + commit <= 100 us at 32 rows.
"""

from __future__ import annotations

import statistics
import time

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.kv.pool.cache import Cache
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.system.posix import SystemClock
from cairn.types.request import Request, SamplingParams

VOCAB = 3000


def steps(rows: int, context: int) -> tuple[float, float, float, int]:
    """Return the median microseconds to plan, run (on the fake engine) and commit a step of `rows` decoding
    requests.
    """
    engine = FakeEngine(fake_spec(VOCAB, 8192), blocks=40_000)
    scheduler = Scheduler(Cache(engine.info), Limits(max_running=rows), SystemClock())
    for number in range(rows):
        prompt = tuple((number * 31 + place * 7) % VOCAB for place in range(context))
        scheduler.add(
            Request(id=number, prompt=prompt, sampling=SamplingParams(max_tokens=200 + 2 * rows, temperature=0.0))
        )
    times: list[tuple[float, float, float]] = []
    while not scheduler.idle:
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        results = plan.run(engine)
        ran = time.perf_counter()
        outputs = scheduler.commit(plan, results)
        end = time.perf_counter()
        if isinstance(results, Exception):
            raise results
        if len(outputs) == rows == len(plan.rows) and all(row.end - row.start == 1 for row in plan.rows):
            times.append((planned - start, ran - planned, end - ran))
    plan_time, run_time, commit_time = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    return plan_time, run_time, commit_time, len(times)


def beside_queue(waiting: str, rows: int = 32, queue: int = 300, count: int = 200) -> float:
    """Return the least microseconds to plan a decode step of `rows` requests while `queue` others wait.

    They wait for a prefix that one computes (`shared`), for a turn at prefill (`long`), or for `blocks`.
    """
    blocks = 32 * rows + 200 if waiting == "blocks" else 200_000
    engine = FakeEngine(fake_spec(VOCAB, 1 << 17), blocks=blocks)
    limits = Limits(max_running=rows + 64)
    scheduler = Scheduler(Cache(engine.info), limits, SystemClock())

    def step() -> float:
        start = time.perf_counter()
        plan = scheduler.plan()
        took = time.perf_counter() - start
        assert plan is not None
        scheduler.commit(plan, plan.run(engine))
        return took * 1e6

    def add(number: int, prompt: tuple[int, ...], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        scheduler.add(Request(id=number, prompt=prompt, sampling=sampling))

    for number in range(rows):
        add(number, tuple((number * 31 + place * 7) % VOCAB for place in range(100)), count + 100)
    for _ in range(20):
        step()
    long = tuple(place * 11 % VOCAB for place in range(2000 if waiting == "blocks" else 128 * count + 5000))
    for number in range(rows, rows + queue + 1):
        add(number, long if waiting == "shared" else (number, *long), 1)
    return min(step() for _ in range(count))


def lookup(tokens: int) -> tuple[float, float]:
    """Return milliseconds to open an uncached prompt, for which keys are computed, and a cached one."""
    engine = FakeEngine(fake_spec(VOCAB, 1 << 17), blocks=20_000)
    cache = Cache(engine.info)
    prompt = [place * 7 % VOCAB for place in range(tokens)]
    took = []
    for _ in range(2):
        context = cache.context(b"")
        start = time.perf_counter()
        covered = cache.open(context, prompt)
        took.append((time.perf_counter() - start) * 1e3)
        assert covered is not None
        cache.grow(context, tokens)
        cache.publish(context, prompt, tokens)
        cache.close(context, prompt)
    return took[0], took[1]


def main() -> None:
    print("rows  context   plan us  commit us  together  (fake engine us)  steps")
    for rows, context in ((1, 100), (4, 100), (32, 100), (32, 1000), (256, 100)):
        plan, run, commit, count = steps(rows, context)
        print(f"{rows:4}  {context:7}  {plan:8.1f}  {commit:9.1f}  {plan + commit:8.1f}  {run:16.0f}  {count:5}")
    print()
    for waiting in ("shared", "long", "blocks"):
        print(f"32 rows, 300 more wait ({waiting}): plan {beside_queue(waiting):8.1f} us")
    print()
    print("prompt tokens   open, cold ms   open, cached ms")
    for tokens in (1000, 4000, 32_000):
        cold, cached = lookup(tokens)
        print(f"{tokens:13}  {cold:13.2f}  {cached:15.2f}")


if __name__ == "__main__":
    main()
