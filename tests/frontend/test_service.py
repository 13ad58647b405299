"""The service on the fake engine, with the worker on a thread; the code is the same as with a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import shutil
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.config.config import Config
from cairn.engine.fake import FakeEngine
from cairn.engine.load_engine import load_engine
from cairn.frontend import admission, request_table
from cairn.frontend.launch import launch_first
from cairn.frontend.service import Service
from cairn.frontend.stream import merge
from cairn.frontend.waker import Waker
from cairn.types.errors import (
    Cancelled,
    Conflict,
    ContextTooLong,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
)
from cairn.types.outputs import Delta, Done, Event, FinishReason, Usage
from cairn.types.request import OutputFormat, Request, SamplingParams
from cairn.types.stats import CacheReport
from cairn.worker import wire
from cairn.worker.worker import serve
from tests.service.tiny import Answer, collect, config, request, serving, until


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[Service]:
    async with serving(folder) as service:
        yield service


@pytest.fixture
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every step take 3 ms, as if something were computed."""
    prefill = FakeEngine.prefill

    def slow(self: FakeEngine, rows: Any) -> Any:
        time.sleep(0.003)
        return prefill(self, rows)

    monkeypatch.setattr(FakeEngine, "prefill", slow)


def oracle(folder: Path, request: Request) -> list[int]:
    _, engine = load_engine(config(folder), folder)
    assert isinstance(engine, FakeEngine)
    return engine.oracle(request.prompt, request.sampling, request.sampling.max_tokens, request.choice)


async def test_a_request_gives_the_engines_tokens_their_text_and_the_figures(service: Service, folder: Path) -> None:
    asked = request(service, "hello " * 20, 50)
    answer = await collect(service.generate(asked))
    assert list(answer.tokens) == oracle(folder, asked)
    assert answer.text == service.tokenizer.decode(answer.tokens)
    assert answer.done is not None
    assert answer.done.reason is FinishReason.LENGTH
    assert answer.done.usage.prompt_tokens == len(asked.prompt)
    assert answer.done.usage.completion_tokens == 50
    assert answer.done.cache.computed == len(asked.prompt)
    again = await collect(service.generate(request(service, "hello " * 20, 50)))
    assert again.tokens == answer.tokens
    assert again.cache.pool == len(asked.prompt) - 1
    assert again.done is not None
    assert again.done.usage.cached_tokens == len(asked.prompt) - 1


async def test_many_requests_at_once_each_get_their_own_answer(service: Service, folder: Path) -> None:
    """Known failures 8, 9, 13: nobody stalls after the first token, nobody waits, nothing is mixed up."""
    asked = [request(service, f"request {n} " * (n % 5 + 1), 10 + n % 7, temperature=1.0, seed=n) for n in range(40)]
    answers = await asyncio.gather(*(collect(service.generate(one)) for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        assert list(answer.tokens) == oracle(folder, one)


async def test_a_late_request_starts_while_others_run(folder: Path) -> None:
    """Known failure 13."""
    async with serving(folder, max_running=4) as service:
        long = service.generate(request(service, "long", 1500))
        assert isinstance(await anext(long), Delta)
        answer = await collect(service.generate(request(service, "short", 4)))
        assert len(answer.tokens) == 4
        status = service.status(long.id)
        assert status is not None and status.state == "running"
        long.close()


async def test_nothing_waits_for_a_poll(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 5: arrivals wake consumers; the one periodic check only looks for stuck requests."""
    assert service._ticker is not None
    service._ticker.cancel()
    monkeypatch.setattr(asyncio, "sleep", None)
    answer = await collect(service.generate(request(service, "hello", 50)))
    assert len(answer.tokens) == 50
    stream = service.generate(request(service, "stop", 1900, stop=("x",)))
    async with contextlib.aclosing(stream):
        await anext(stream)


# ------------------------------------------------------------------------------------------------------- limits


async def test_what_does_not_fit_the_context_is_refused_with_the_figures(service: Service) -> None:
    context = service.info.context
    prompt = (5,) * (context - 10)
    fits = service.generate(request(service, prompt, 10))
    assert (await collect(fits)).done is not None
    with pytest.raises(ContextTooLong, match=f"{context}.*{context - 10}.*11") as caught:
        service.generate(request(service, prompt, 11))
    assert caught.value.field == "max_tokens"
    with pytest.raises(ContextTooLong) as caught:
        service.generate(request(service, (5,) * context, 1))
    assert caught.value.field == "prompt"


async def test_what_could_never_fit_the_pool_is_refused(folder: Path) -> None:
    async with serving(folder, kv_gb=0.0001) as service:
        pool = service.info.pool_tokens
        assert pool < service.info.context
        with pytest.raises(InvalidRequest, match=f"{pool}.*kv-gb"):
            service.generate(request(service, (5,) * pool, 1))
        answer = await collect(service.generate(request(service, (5,) * (pool - 1), 5)))
        assert answer.tokens


@pytest.mark.parametrize("token", [-1, 288, 1 << 40])
async def test_tokens_outside_the_models_vocabulary_are_refused(service: Service, token: int) -> None:
    assert service.info.vocab == 288
    with pytest.raises(InvalidRequest, match="0 to 287") as caught:
        service.generate(request(service, (1, token, 2)))
    assert caught.value.field == "prompt"


async def test_what_the_worker_refuses_is_raised_with_its_type_and_field(service: Service) -> None:
    stream = service.generate(request(service, "x", priority=1_000_000))
    with pytest.raises(InvalidRequest, match="priority") as caught:
        await collect(stream)
    assert caught.value.field == "priority"
    assert service.status(stream.id).state == "failed"  # type: ignore[union-attr]
    assert not service._flights
    assert service.stats().waiting == 0


async def test_an_id_that_runs_is_refused(service: Service) -> None:
    asked = request(service, "x", 500)
    stream = service.generate(asked)
    with pytest.raises(Conflict):
        service.generate(asked)
    stream.close()


async def test_a_full_queue_refuses_before_anything_is_computed(folder: Path) -> None:
    """Known failure 41: the queue is bounded, and the refusal is immediate, with a measured Retry-After."""
    async with serving(folder, max_running=2, max_queue=3) as service:
        streams = [service.generate(request(service, f"r{n}", 300)) for n in range(5)]
        with pytest.raises(Overloaded, match="limits: 3") as caught:
            service.generate(request(service, "one more"))
        assert caught.value.retry_after is not None and caught.value.retry_after >= 1
        later = [refusal(service) for _ in range(3)]
        assert later == sorted(later)
        assert service.stats().waiting <= 5
        answers = await asyncio.gather(*map(collect, streams))
        assert all(len(answer.tokens) == 300 for answer in answers)
        assert (await collect(service.generate(request(service, "one more")))).done is not None


def refusal(service: Service) -> float:
    with pytest.raises(Overloaded) as caught:
        service.generate(request(service, "x"))
    assert caught.value.retry_after is not None
    return caught.value.retry_after


async def test_the_queue_is_bounded_in_tokens_too(folder: Path) -> None:
    async with serving(folder, max_running=1, max_queue_tokens=1000) as service:
        first = service.generate(request(service, "run", 1000))
        await anext(first)
        waiting = service.generate(request(service, (7,) * 1900))
        with pytest.raises(Overloaded):
            service.generate(request(service, (7,) * 10))
        first.close()
        waiting.close()


def test_a_call_is_refused_for_good_exactly_where_an_empty_server_has_no_place_for_it() -> None:
    for running, most, tokens, rows, size in itertools.product((1, 3), (1, 4), (5, 20, 60), (2, 8), (1, 7, 30)):
        limits = Config(max_running=running, max_queue=most, max_queue_tokens=tokens)
        for count in range(1, 10):
            asked = [Request(id=n, prompt=(7,) * size, sampling=SamplingParams(max_tokens=1)) for n in range(count)]
            queue, places = admission.Queue(limits), True
            for one in asked:
                try:
                    queue.check(one, 0, rows, 0.0)
                except Overloaded:
                    places = False
                    break
                queue.enter(one)
            with contextlib.nullcontext() if places else pytest.raises(InvalidRequest):
                admission.check_together(asked, limits, rows)


async def test_retry_after_follows_the_pace_of_the_queue() -> None:
    """Known failure 41."""
    pace, now = admission.QueuePace(), 0.0
    pace.note(now, 0, True)
    for _ in range(400):
        now += 0.5
        pace.note(now, 1, True)
    assert 9 <= max(pace.book(now, 100) for _ in range(20)) <= 11
    assert pace.book(now + 60, 100) == 1.0
    assert 49 <= max(pace.book(now, 100) for _ in range(1000)) <= 51
    assert 9 <= max(pace.book(now + 60, 3) for _ in range(1000)) <= 11


# ---------------------------------------------------------------------------------------------------- ways to end


async def test_a_stop_string_ends_in_the_worker_and_what_follows_is_not_counted(service: Service) -> None:
    whole = await collect(service.generate(request(service, "stop here", 400)))
    cut = whole.text[40:43]
    at = whole.text.index(cut)
    answer = await collect(service.generate(request(service, "stop here", 400, stop=(cut,))))
    assert answer.text == whole.text[:at]
    assert answer.done is not None
    assert answer.done.reason is FinishReason.STOP
    assert answer.done.usage.completion_tokens == len(answer.tokens) < 60
    assert answer.done.timing.prefill > 0, "the start and the first token are reported at once, with different times"
    await until(lambda: service._stats.running == 0)


@pytest.mark.usefixtures("slow_engine")
async def test_a_stop_string_ends_a_request_that_nobody_reads(service: Service) -> None:
    whole = await collect(service.generate(request(service, "nobody", 100)))
    stream = service.generate(request(service, "nobody", 1000, stop=(whole.text[40:43],)))
    await until(lambda: service.status(stream.id).state == "finished")  # type: ignore[union-attr]
    assert (await collect(stream)).text == whole.text[: whole.text.index(whole.text[40:43])]
    assert service.metrics.generation_tokens < 600


async def test_closing_the_iterator_cancels(service: Service) -> None:
    """Known failure 42."""
    stream = service.generate(request(service, "x", 1900))
    async with contextlib.aclosing(stream):
        await anext(stream)
    status = service.status(stream.id)
    assert status is not None and status.state == "cancelled"
    await until(lambda: (service._stats.running, service._stats.kv_usage) == (0, 0))


async def test_leaving_the_loop_or_cancelling_the_task_cancels(service: Service) -> None:
    """Known failure 42."""

    async def leave() -> int:
        stream = service.generate(request(service, "x", 1900))
        async for _ in stream:
            break
        return stream.id

    left = await leave()
    gc.collect()
    await until(lambda: service.status(left).state == "cancelled")  # type: ignore[union-attr]
    stream = service.generate(request(service, "y", 1900))
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.status(stream.id).state == "cancelled"  # type: ignore[union-attr]
    await until(lambda: service._stats.running == 0)


async def test_a_stream_that_is_being_read_refuses_a_second_reader(service: Service, folder: Path) -> None:
    """Only one of two readers could be woken, and the other would wait for ever."""
    asked = request(service, "two readers", 30, stop_token_ids=())
    stream = service.generate(asked)
    first, second = await asyncio.wait_for(
        asyncio.gather(anext(stream), anext(stream), return_exceptions=True), timeout=60
    )
    assert isinstance(second, RuntimeError) and "is being read already" in str(second)
    assert isinstance(first, Delta)
    answer = Answer()
    answer.add(first)
    assert len((await collect(stream, answer)).tokens) == 30


async def test_abort_raises_after_the_events_before_it(service: Service) -> None:
    stream = service.generate(request(service, "x", 1900))
    answer = Answer()
    answer.add(await anext(stream))
    assert service.abort(stream.id)
    assert not service.abort(stream.id)
    with pytest.raises(Cancelled):
        await collect(stream, answer)
    assert answer.done is None
    status = service.status(stream.id)
    assert status is not None
    assert (status.state, status.completion_tokens, status.text) == ("cancelled", len(answer.tokens), answer.text)


async def test_a_deadline_is_an_error_never_a_success(service: Service) -> None:
    """Known failure 15."""
    stream = service.generate(request(service, "x", 1900, timeout=0.05))
    answer = Answer()
    with pytest.raises(DeadlineExceeded):
        await collect(stream, answer)
    assert answer.done is None
    status = service.status(stream.id)
    assert status is not None
    assert (status.state, status.reason) == ("failed", FinishReason.DEADLINE)


async def test_a_request_without_a_timeout_gets_the_configured_one(folder: Path) -> None:
    async with serving(folder, request_timeout=0.05) as service:
        with pytest.raises(DeadlineExceeded):
            await collect(service.generate(request(service, "x", 1900)))


async def test_an_engine_that_raises_fails_its_rows_and_the_worker_goes_on(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 12."""
    decode, broken = FakeEngine.prefill, []

    def prefill(self: FakeEngine, rows: Any) -> Any:
        if any(row.tokens[0] == 13 for row in rows):
            broken.append(len(rows))
            raise RuntimeError("the engine broke")
        return decode(self, rows)

    monkeypatch.setattr(FakeEngine, "prefill", prefill)
    with pytest.raises(GenerationFailed):
        await collect(service.generate(request(service, (13, 14))))
    assert broken
    asked = request(service, "still here")
    assert list((await collect(service.generate(asked))).tokens) == oracle(folder, asked)
    assert service.stats().worker_restarts == 0
    await until(lambda: service._stats.kv_usage == 0)


async def test_a_text_that_cannot_be_built_fails_that_request_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known failure 19. The error's text may quote the answer, so it is not logged."""
    bad = service.generate(request(service, "bad", 500, stop=("never",)))
    good = service.generate(request(service, "good", 100))

    said = "the moon is made of cheese"

    def broken(*_: Any) -> list[Delta]:
        raise RuntimeError(said)

    monkeypatch.setattr(bad._flight.text, "push", broken, raising=False)
    with pytest.raises(GenerationFailed, match="text"):
        await collect(bad)
    assert len((await collect(good)).tokens) == 100
    assert service.status(bad.id).state == "failed"  # type: ignore[union-attr]
    assert "RuntimeError" in caplog.text and said not in caplog.text


# ------------------------------------------------------------------------------------------------- slow consumers


async def test_a_lagging_consumer_gets_missed_tokens_as_one_event(service: Service) -> None:
    """Known failure 43: one merged event instead of a growing queue, and nothing is lost."""
    asked = request(service, "lag", 400)
    stream = service.generate(asked)
    await until(lambda: service.status(stream.id).state == "finished")  # type: ignore[union-attr]
    events = stream.take()
    assert [type(event) for event in events] == [Delta, Done]
    assert len(events[0].tokens) == 400  # type: ignore[union-attr]
    assert stream.take() == []


async def test_a_consumer_that_lags_misses_no_logprob(service: Service) -> None:
    """Known failure 43: log-probabilities are packed while nobody reads, and all come out in order."""
    asked = request(service, "lag", 200, logprobs=True, top_logprobs=2)
    stream = service.generate(asked)
    await until(lambda: service.status(stream.id).state == "finished")  # type: ignore[union-attr]
    delta = stream.take()[0]
    assert isinstance(delta, Delta)
    assert [entry.token for entry in delta.logprobs] == list(delta.tokens)
    assert all(len(entry.top) == 2 for entry in delta.logprobs)


@pytest.mark.parametrize("stop", [(), ("never said",)])
async def test_a_consumer_that_never_reads_is_bounded_and_cut(folder: Path, stop: tuple[str, ...]) -> None:
    """Known failure 43."""
    async with serving(folder, stream_buffer_kib=1, stream_stall=0.03) as service:
        fields: dict[str, Any] = {"stop": stop, "logprobs": True, "top_logprobs": 5}
        stream = service.generate(request(service, "x", 2000, **fields))
        await until(lambda: service.status(stream.id).state != "running" and stream._flight.done)  # type: ignore[union-attr]
        assert len(stream._flight._events) <= 34
        with pytest.raises(Cancelled, match="nobody read"):
            await collect(stream)


@pytest.mark.usefixtures("slow_engine")
async def test_a_slow_reader_below_the_bound_is_left_alone(folder: Path) -> None:
    async with serving(folder, stream_stall=0.01) as service:
        stream = service.generate(request(service, "x", 300))
        await asyncio.sleep(0.6)
        assert len((await collect(stream)).tokens) == 300


# ---------------------------------------------------------------------------------------------------------- merge


async def test_merge_gives_all_choices_as_they_come(service: Service, folder: Path) -> None:
    asked = [request(service, "choices", 30, temperature=1.0, choice=n) for n in range(4)]
    answers = [Answer() for _ in asked]
    async for batch in merge(service.generate, asked):
        assert batch
        for index, event in batch:
            answers[index].add(event)
    for one, answer in zip(asked, answers, strict=True):
        assert list(answer.tokens) == oracle(folder, one)
    assert len({answer.tokens for answer in answers}) == 4


def states(service: Service, asked: list[Request]) -> list[str]:
    results = [service.status(one.id) for one in asked]
    return [status.state for status in results if status]


async def test_closing_merge_cancels_every_choice(service: Service) -> None:
    """Known failure 42."""
    asked = [request(service, "choices", 1900, choice=n) for n in range(3)]
    async with contextlib.aclosing(merge(service.generate, asked)) as events:
        await anext(events)
    assert states(service, asked) == ["cancelled"] * 3
    asked = [request(service, "choices", 1900, choice=n) for n in range(3)]
    with pytest.raises(Cancelled):
        async for _ in merge(service.generate, asked):
            service.abort(asked[1].id)
    assert states(service, asked) == ["cancelled"] * 3


async def test_a_choice_that_is_refused_takes_the_others_with_it(service: Service) -> None:
    asked = [request(service, "fits", 1900), request(service, "does not", 5000)]
    with pytest.raises(ContextTooLong):
        await anext(merge(service.generate, asked))
    assert states(service, asked) == ["cancelled"]


@pytest.mark.parametrize("failing", [0, 1])
async def test_what_the_other_choices_have_said_comes_before_the_error(service: Service, failing: int) -> None:
    """The text and the error are there in one round, whichever choice is read first."""
    said: list[Event] = [
        Delta(text="text"),
        Done(reason=FinishReason.STOP, usage=Usage(prompt_tokens=1, completion_tokens=1), cache=CacheReport()),
    ]

    class Scripted:
        over = closed = False

        def __init__(self, choice: int) -> None:
            self.choice = choice

        def wake_with(self, waker: Waker) -> None:
            pass

        def take(self) -> list[Event]:
            self.over = True
            if self.choice == failing:
                raise GenerationFailed("this choice failed")
            return said

        def close(self) -> None:
            self.closed = True

    streams: list[Any] = [Scripted(choice) for choice in range(2)]
    asked = [request(service, "x", 1, choice=choice) for choice in range(2)]
    events = merge(lambda one: streams[one.choice], asked)
    assert await anext(events) == [(1 - failing, event) for event in said]
    with pytest.raises(GenerationFailed, match="this choice failed"):
        await anext(events)
    assert all(stream.closed for stream in streams)


@pytest.mark.usefixtures("slow_engine")
async def test_merge_says_so_while_nothing_comes(folder: Path) -> None:
    async with serving(folder, max_running=1) as service:
        first = service.generate(request(service, "first", 1900))
        beats = 0
        async with contextlib.aclosing(
            merge(service.generate, [request(service, "x", 2)], heartbeat=lambda: 0.01)
        ) as events:
            async for batch in events:
                beats += not batch
                if beats == 2:
                    first.close()
        assert beats >= 2


async def test_an_empty_completion_scores_the_prompt(service: Service) -> None:
    answer = await collect(service.generate(request(service, "score this", 0, prompt_logprobs=True)))
    assert sum(len(delta.prompt_logprobs) for delta in answer.deltas) == 9
    assert answer.done is not None
    assert (answer.done.reason, answer.done.usage.completion_tokens) == (FinishReason.LENGTH, 0)


# -------------------------------------------------------------------------------------------- status and the end


async def test_status_follows_a_request(folder: Path) -> None:
    """Known failure 6."""
    async with serving(folder, max_running=1) as service:
        first, second = (service.generate(request(service, name, 200, salt=b"s")) for name in ("one", "two"))
        await anext(first)
        states = [service.status(stream.id) for stream in (first, second)]
        assert [status.state for status in states if status] == ["running", "waiting"]
        assert [status.salt for status in states if status] == [b"s", b"s"]
        answer = await collect(second)
        status = service.status(second.id)
        assert status is not None
        assert (status.state, status.reason, status.text) == ("finished", FinishReason.LENGTH, answer.text)
        assert service.status(12345) is None
        assert not service.abort(second.id)
        assert service.status(second.id) == status
        first.close()


async def test_finished_requests_are_forgotten_by_number_age_and_size(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 11."""
    monkeypatch.setattr(request_table, "KEEP_REQUESTS", 5)
    ids = []
    for n in range(8):
        stream = service.generate(request(service, f"r{n}", 20))
        await collect(stream)
        ids.append(stream.id)
    assert [service.status(id) is not None for id in ids] == [False] * 3 + [True] * 5
    assert not service._flights
    monkeypatch.setattr(request_table, "KEEP_SECONDS", 0.0)
    await until(lambda: service.status(ids[-1]) is None)
    assert service._history._characters == 0
    monkeypatch.setattr(request_table, "KEEP_SECONDS", 600.0)
    monkeypatch.setattr(request_table, "KEEP_CHARACTERS", 50)
    for n in range(4):
        await collect(service.generate(request(service, f"r{n}", 20)))
    assert service._history._characters <= 50


def test_ids_are_unique_and_survive_restarts(folder: Path) -> None:
    """Known failure 4."""

    class Clock:
        ns = 1_800_000_000_000_000_000

        def now(self) -> float:
            return 0.0

        def time_ns(self) -> int:
            return self.ns

    async def ids(clock: Clock, count: int) -> list[int]:
        service = Service(config(folder), clock=clock)
        return [service.next_id() for _ in range(count)]

    clock = Clock()
    first = asyncio.run(ids(clock, 1000))
    clock.ns += 2000
    second = asyncio.run(ids(clock, 1000))
    both = first + second
    assert both == sorted(set(both))
    assert all(0 < id < 1 << 63 for id in both)


async def test_drain_finishes_what_runs_and_takes_nothing_new(folder: Path) -> None:
    """Known failure 3: a drain waits for the requests, not for a fixed time."""
    async with serving(folder) as service:
        streams = [service.generate(request(service, f"r{n}", 200)) for n in range(5)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        drain = asyncio.create_task(service.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as caught:
            service.generate(request(service, "late"))
        assert caught.value.retry_after
        assert "the server is shutting down" in service.unready()
        await drain
        assert [len((await reader).tokens) for reader in readers] == [200] * 5


async def test_drain_ends_the_rest_with_a_typed_error(folder: Path) -> None:
    """Known failures 3, 15."""
    async with serving(folder) as service:
        stream = service.generate(request(service, "long", 2000))
        answer = Answer()
        answer.add(await anext(stream))
        await service.drain(0.02)
        with pytest.raises(Unavailable):
            await collect(stream, answer)
        assert answer.done is None


async def test_close_leaves_nothing_and_may_be_repeated(folder: Path) -> None:
    service = await Service.start(config(folder), in_process=True)
    stream = service.generate(request(service, "x", 1900))
    await service.close()
    with pytest.raises(Unavailable):
        await collect(stream)
    await service.close()
    with pytest.raises(Unavailable):
        service.generate(request(service, "x"))
    assert service._supervisor.pid is None


async def test_a_model_that_cannot_be_loaded_is_a_model_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for in_process in (True, False):
        with pytest.raises(ModelError) as caught:
            await Service.start(config(tmp_path), in_process=in_process)
        assert caught.value.exit_code == 2
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        await Service.start(config(tmp_path), in_process=True)


@pytest.mark.usefixtures("slow_engine")
async def test_a_queued_request_is_cancelled_and_one_without_a_token_in_time_ends(folder: Path) -> None:
    async with serving(folder, max_running=1) as service:
        running = service.generate(request(service, "long", 1500))
        await anext(running)
        waiting = service.generate(request(service, "waits"))
        late = service.generate(request(service, "too late", first_token_timeout=0.001))
        begun = service.status(running.id)
        assert begun is not None and begun.state == "running"
        with pytest.raises(DeadlineExceeded, match=r"first_token_timeout, 0\.001 s"):
            await collect(late)
        assert service.abort(waiting.id)
        with pytest.raises(Cancelled):
            await collect(waiting)
        running.close()
        # A token in time satisfies the deadline; the rest may take as long as it takes.
        slow = request(service, "x", 40, first_token_timeout=20.0)
        flight = service.generate(slow)
        first = await anext(flight)
        assert isinstance(first, Delta)
        service._flights[slow.id].arrived -= 100
        service._traffic.end_late()
        assert len(first.tokens) + len((await collect(flight)).tokens) == 40


@pytest.mark.usefixtures("slow_engine")
async def test_a_service_is_ready_once_it_has_loaded_and_while_the_pool_has_room(service: Service) -> None:
    """Known failure 46: a health check that always says yes."""
    assert service.unready() == []
    stream = service.generate(request(service, (7,) * 1900, 100))
    await until(lambda: service._stats.kv_usage > 0)
    service._stats = type(service._stats)(kv_usage=0.95)
    assert service.unready() == ["requests hold 95% of the KV pool"]
    stream.close()


# -------------------------------------------------------------------------------------------------------- metrics


async def test_requests_are_in_the_metrics(service: Service) -> None:
    """Known failure 46."""
    for n in range(3):
        await collect(service.generate(request(service, "the same prompt, longer than one block", 20, stop=("nope",))))
        stream = service.generate(request(service, f"cancelled {n}", 1900))
        await anext(stream)
        stream.close()
    results = {}
    for family in text_string_to_metric_families(service.metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == service.name
            results[sample.name, sample.labels.get("finished_reason", "")] = sample.value
    assert results["cairn:request_success_total", "length"] == 3
    assert results["cairn:request_success_total", "cancelled"] == 3
    assert results["cairn:prompt_tokens_total", ""] == 3 * 38 + 3 * 11
    assert results["cairn:prefix_cache_queries_total", ""] == 3 * 38 + 3 * 11
    cached = 2 * 37 + 2 * len("cancelled ")
    assert results["cairn:prefix_cache_hits_total", ""] == cached
    assert results["cairn:prompt_tokens_cached_total", ""] == cached
    assert results["cairn:generation_tokens_total", ""] >= 63
    assert results["cairn:time_to_first_token_seconds_count", ""] == 6
    assert results["cairn:inter_token_latency_seconds_count", ""] >= 57
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert results[f"cairn:{name}_seconds_count", ""] == 6
        assert results[f"cairn:{name}_seconds_sum", ""] > 0
    assert results["cairn:request_generation_tokens_sum", ""] >= 63


async def test_reasoning_is_separate_in_the_status(service: Service) -> None:
    output = OutputFormat(reasoning=True, reasoning_open=True)
    stream = service.generate(request(service, "x", 20, output=output))
    await collect(stream)
    status = service.status(stream.id)
    assert status is not None
    assert status.reasoning and not status.text


async def test_a_waker_sleeps_until_woken_or_until_the_last_deadline() -> None:
    waker = Waker()
    loop = asyncio.get_running_loop()
    assert not await waker.sleep(0.01)
    loop.call_later(0.005, waker.wake)
    assert await waker.sleep(10)
    started = loop.time()
    for _ in range(5):
        loop.call_soon(waker.wake)
        assert await waker.sleep(0.05)
    assert not await waker.sleep(0.1)  # the timer of the first sleep fires earlier, and must not wake this one
    assert loop.time() - started >= 0.1
    loop.call_later(0.02, waker.wake)
    assert await waker.sleep()
    assert waker._timer is None or waker._timer.when() > 0
    reference = weakref.ref(waker)
    del waker
    assert reference() is None


async def test_a_context_is_where_it_was_put_and_gone_when_evicted(service: Service) -> None:
    first = await collect(service.generate(request(service, "a context " * 10, 30)))
    context = tuple(service.tokenizer.encode("a context " * 10)) + first.tokens
    whole = (len(context) - 1) // 16 * 16  # the last token's KV was never computed
    assert (await service.where(context)).pool == whole
    assert (await service.where(context, b"another tenant")).pool == 0
    assert (await service.where((1, *context))).pool == 0
    assert (await service.evict(context, keep=40)).pool == 48
    again = await collect(service.generate(request(service, "a context " * 10, 30)))
    assert again.cache.pool == 48 and again.tokens == first.tokens


async def test_a_question_to_a_worker_that_ends_is_unavailable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder) as service:
        monkeypatch.setattr("cairn.frontend.worker_connection.WorkerConnection.send", lambda *_: None)
        asked = asyncio.create_task(service.flush())
        await asyncio.sleep(0)
        await service.close()
        with pytest.raises(Unavailable):
            await asked


async def test_a_start_that_is_given_up_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    """In the user's own process: threads, and the lock of the store, which a second start needs."""
    settings = config(folder, kv_dir=str(tmp_path / "kv"))
    ours, theirs = socket.socketpair()
    ours.sendall(wire.encode(wire.LoadModel(settings, str(folder))))
    ours.close()
    serve(theirs)
    assert not [one for one in threading.enumerate() if one.name.startswith("cairn-kv")]
    await (await Service.start(settings, in_process=True)).close()


@pytest.mark.usefixtures("slow_engine")
async def test_generated_tokens_are_counted_as_requests_report_them(service: Service) -> None:
    """A worker runs some steps until it hears that a request has ended, and nobody gets those tokens."""
    whole = await collect(service.generate(request(service, "whole", 40)))
    await collect(service.generate(request(service, "whole", 400, stop=(whole.text[20:23],))))
    for _ in range(5):
        stream = service.generate(request(service, "left early", 1900))
        await anext(stream)
        stream.close()
    unread = service.generate(request(service, "cut", 1900, stop=("nope",)))
    await until(lambda: service.status(unread.id).completion_tokens > 3)  # type: ignore[union-attr]
    service.abort(unread.id)
    await collect(service.generate(request(service, "behind all of them", 40)))
    await until(lambda: service._stats.running == 0)
    assert service.metrics.generation_tokens == service.metrics.generation_length.sum > 80


async def test_a_start_that_fails_twice_leaves_no_unretrieved_error(folder: Path, tmp_path: Path) -> None:
    """The tokenizer cannot be read and the worker cannot load: whichever fails first, the other error must be
    consumed.
    """
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    unseen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unseen.append(context["message"]))
    for order in ("worker first", "tokenizer first"):
        service = Service(config(tmp_path))
        supervisor = service._supervisor
        supervisor.start(launch_first(config(tmp_path), in_process=True, folder=tmp_path))
        assert supervisor._loaded is not None
        if order == "worker first":
            await until(supervisor._loaded.done)
        else:
            waiting = asyncio.create_task(supervisor.loaded())
            await asyncio.sleep(0)
            waiting.cancel()
            await until(supervisor._loaded.done)
        await service.close()
        del supervisor, service
        gc.collect()
        await asyncio.sleep(0)
    with pytest.raises(ModelError):
        await Service.start(config(tmp_path), in_process=True)
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def test_bytes_that_the_vocabulary_lacks_are_no_warning_at_every_start(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = text["model"]["vocab"]
    vocab["unused"] = vocab.pop("\u0104")  # byte 4
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(text), "utf-8")
    async with serving(tmp_path / "m") as service:
        assert not any("lacks" in message for message in caplog.messages)  # `cairn pull` and `cairn show` report it
        with pytest.raises(InvalidRequest, match="only bytes that the vocabulary lacks: 0x04"):
            service.tokenizer.encode_raw("\x04", "")


async def test_too_little_memory_for_the_pool_is_an_error_with_the_option(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The system promised more memory than it gives: under `ulimit -v`, or if other processes took it meanwhile."""

    def load(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("cairn.engine.load_engine.load_engine", load)
    with pytest.raises(ModelError, match=r"lower --kv-gb, .* \(ulimit -v\)"):
        await Service.start(config(folder), in_process=True)
    assert "Traceback" not in capfd.readouterr().err
