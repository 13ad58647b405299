"""Worker processes that die, stall, spin or misreport, and requests in flight, which must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cairn.engine.fake import fake_spec
from cairn.frontend import launch, supervisor
from cairn.frontend import worker_connection as link_module
from cairn.frontend.service import Service
from cairn.frontend.stream import RequestStream
from cairn.frontend.worker_connection import Patience
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.types.errors import GenerationFailed, ModelError, Unavailable
from cairn.types.outputs import Event, FinishReason
from cairn.worker import wire
from tests.laws.simulator import VirtualClock
from tests.service.tiny import VOCAB, Answer, collect, config, make_model, oracle, request, until
from tests.tiny_models import MODELS, write_model

FAULTY = Path(__file__).parents[1] / "service" / "faulty_worker.py"
FRONT = Path(__file__).parents[1] / "service" / "front.py"
KILLER = 13
QUICK = Patience(silence=1.5, backoff=(0.0, 0.01))

Figure = Callable[[str, str], None]


@contextlib.asynccontextmanager
async def serving(folder: Path, patience: Patience = QUICK, **options: Any) -> AsyncIterator[Service]:
    service = await Service.start(config(folder, **options), patience=patience)
    try:
        yield service
    finally:
        pid = service.stats().worker_pid
        await service.close()
        assert pid is None or not os.path.exists(f"/proc/{pid}")


def faulty(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(launch, "WORKER", (sys.executable, str(FAULTY), mode))


def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make workers exit at once."""
    monkeypatch.setattr(launch, "WORKER", (sys.executable, "-c", "raise SystemExit(3)"))


def pid_of(service: Service) -> int:
    pid = service.stats().worker_pid
    assert pid is not None
    return pid


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------ in flight go on


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_requests_in_flight_survive_a_killed_worker(
    folder: Path, figure: Figure, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals, prove: bool
) -> None:
    """Known failures 2, 17: greedy and sampled streams with stops and log-probabilities get the same tokens."""
    faulty(monkeypatch, "paced")
    many = 50 if prove or kind is signal.SIGKILL else 12
    async with serving(folder) as service:
        asked = []
        for n in range(many):
            extra: dict[str, Any] = [{}, {"temperature": 1.0}, {"logprobs": True}, {"stop": ("qqq",)}][n % 4]
            asked.append(request(service, f"stream {n} " * (1 + n % 9), 60 + n, seed=n, **extra))
        readers = [asyncio.create_task(collect(service.generate(one))) for one in asked]
        await until(lambda: service.metrics.generation_tokens > 300)
        first = pid_of(service)
        started = time.monotonic()
        os.kill(first, kind)
        answers = await asyncio.gather(*readers)
        truth = oracle(service)
        for one, answer in zip(asked, answers, strict=True):
            assert list(answer.tokens) == truth(one)
            assert answer.text == service.tokenizer.decode(answer.tokens)
            logprobs = [p.token for delta in answer.deltas for p in delta.logprobs]
            assert logprobs == (list(answer.tokens) if one.sampling.logprobs else [])
        assert pid_of(service) != first
        assert service.stats().worker_restarts == service.metrics.worker_restarts == 1
        figure(
            f"{many} streams, worker ended by {kind.name}",
            f"same tokens; all done in {time.monotonic() - started:.1f} s",
        )


async def test_streams_survive_death_after_death(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "paced")
    async with serving(folder) as service:
        asked = [request(service, f"again {n} " * 8, 150, temperature=0.7) for n in range(8)]
        readers = [asyncio.create_task(collect(service.generate(one))) for one in asked]
        for _ in range(3):
            tokens = service.metrics.generation_tokens
            await until(lambda tokens=tokens: service.metrics.generation_tokens > tokens + 80)
            os.kill(pid_of(service), signal.SIGKILL)
        truth = oracle(service)
        for one, reader in zip(asked, readers, strict=True):
            assert list((await reader).tokens) == truth(one)
        assert service.stats().worker_restarts == 3


async def test_the_next_worker_has_the_same_pool_whatever_memory_is_free_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests were admitted for the first worker's pool: a smaller one would cut some and refuse others."""
    faulty(monkeypatch, "paced")
    async with serving(folder, kv_gb=None, max_running=8) as service:
        info, truth = service.info, oracle(service)
        asked = [request(service, (7,) * 50, 1500, stop_token_ids=()), request(service, (9,) * 1500, 200)]
        readers = [asyncio.create_task(collect(service.generate(one))) for one in asked]
        await until(lambda: service.metrics.generation_tokens > 60)
        faulty(monkeypatch, "short")
        os.kill(pid_of(service), signal.SIGKILL)
        for one, reader in zip(asked, readers, strict=True):
            assert list((await reader).tokens) == truth(one)
        assert service.info == info
        assert service.stats().worker_restarts == 1


async def test_where_there_is_no_memory_for_as_large_a_pool_a_worker_with_a_smaller_one_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "paced")
    async with serving(folder, kv_gb=None, max_running=8) as service:
        truth, one = oracle(service), request(service, (7,) * 50, 300, stop_token_ids=())
        reader = asyncio.create_task(collect(service.generate(one)))
        await until(lambda: service.metrics.generation_tokens > 20)
        faulty(monkeypatch, "tight")
        os.kill(pid_of(service), signal.SIGKILL)
        assert list((await reader).tokens) == truth(one)
        assert service.stats().worker_restarts == 2


async def test_an_answer_that_has_no_room_in_a_smaller_pool_is_an_error_and_no_short_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 15: the answer was admitted for more tokens than the next worker can hold."""
    faulty(monkeypatch, "paced")
    async with serving(folder, kv_gb=None, max_running=8) as service:
        truth = oracle(service)
        fits = request(service, (7,) * 50, 300, stop_token_ids=())
        grows = request(service, (8,) * 50, 1900, stop_token_ids=())
        large = request(service, (9,) * 700, 100, stop_token_ids=())
        readers = [asyncio.create_task(collect(service.generate(one), Answer())) for one in (fits, grows, large)]
        stream = service.generate(full := request(service, (7,) * 620, 20, stop_token_ids=()))
        await until(lambda: all(flight.tokens for flight in service._flights.values()))
        faulty(monkeypatch, "small")
        os.kill(pid_of(service), signal.SIGKILL)
        answer, *lost = await asyncio.gather(*readers, return_exceptions=True)
        assert isinstance(answer, Answer) and list(answer.tokens) == truth(fits)
        assert service.info.pool_tokens == 640
        for error in lost:
            assert isinstance(error, GenerationFailed) and "less memory for KV" in str(error)
        assert service.status(large.id).completion_tokens < 100
        seen = service.status(grows.id)
        assert seen is not None and seen.reason is FinishReason.ERROR and seen.completion_tokens == 640 - 50
        whole = await collect(stream)
        assert list(whole.tokens) == truth(full) and whole.done is not None
        assert whole.done.reason is FinishReason.LENGTH
        again = await collect(service.generate(request(service, (8,) * 50, 1900, stop_token_ids=())))
        assert again.done is not None and again.done.reason is FinishReason.LENGTH, "it sees the current pool"


async def test_an_answer_that_stops_with_the_last_token_of_a_smaller_pool_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one prompt the last token ends its text.

    After the other it ends within a character, whose bytes are shown at the end: one more token might have completed
    it, so that answer has not stopped.
    """
    faulty(monkeypatch, "paced")
    async with serving(folder, kv_gb=None, max_running=8) as service:
        truth, streams, seen = oracle(service), list[RequestStream](), list[list[int]]()
        for first in (31, 15):
            seen.append(truth(request(service, (first,) * 50, 640 - 50, stop_token_ids=())))
            text = service.tokenizer.decode(seen[-1])
            stop = next(text[-n:] for n in range(1, 9) if text.index(text[-n:]) == len(text) - n)
            streams.append(service.generate(request(service, (first,) * 50, 1900, stop_token_ids=(), stop=(stop,))))
        await until(lambda: all(flight.tokens for flight in service._flights.values()))
        faulty(monkeypatch, "small")
        os.kill(pid_of(service), signal.SIGKILL)
        whole, cut = Answer(), Answer()
        await collect(streams[0], whole)
        assert whole.done is not None and whole.done.reason is FinishReason.STOP
        with pytest.raises(GenerationFailed, match="less memory for KV"):
            await collect(streams[1], cut)
        assert [list(answer.tokens) for answer in (whole, cut)] == seen
        assert service.info.pool_tokens == 640


async def test_prompt_logprobs_are_sent_once_though_the_worker_dies_between_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "paced")
    async with serving(folder, step_tokens=16, max_running=16) as service:
        prompt = tuple(random.Random(1).randrange(256) for _ in range(1200))
        whole = await collect(service.generate(request(service, prompt, 5, prompt_logprobs=True)))
        stream = service.generate(request(service, prompt, 5, prompt_logprobs=True))
        answer = Answer()
        answer.add(await anext(stream))
        os.kill(pid_of(service), signal.SIGKILL)
        await collect(stream, answer)
        scores = [[p for delta in one.deltas for p in delta.prompt_logprobs] for one in (whole, answer)]
        assert len(scores[0]) == 1199
        assert scores[0] == scores[1]
        assert answer.tokens == whole.tokens


async def test_a_new_request_waits_while_the_worker_is_replaced(folder: Path) -> None:
    async with serving(folder) as service:
        os.kill(pid_of(service), signal.SIGKILL)
        await until(lambda: not service._supervisor.up)
        assert service.unready() == ["the worker is being replaced"]
        asked = request(service, "during")
        assert list((await collect(service.generate(asked))).tokens) == oracle(service)(asked)
        assert service.unready() == []


async def test_a_new_worker_has_its_experts_where_the_first_one_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much memory is free then: on another device, answers in flight would go on with other numbers."""
    pytest.importorskip("torch", reason="torch is not installed: there is no other device")
    loads: list[wire.LoadModel] = []
    real = supervisor.launch
    monkeypatch.setattr(supervisor, "launch", lambda load, *more: loads.append(load) or real(load, *more))
    folder = write_model(tmp_path / "mixture", **MODELS["qwen 3 moe"] | {"vocab_size": VOCAB})
    shutil.copy(make_model(tmp_path / "text") / "tokenizer.json", folder)
    more = {"device": "torch-cpu", "engine": "auto", "kv_gb": 0.01}
    async with serving(folder, Patience(backoff=(0.0, 0.01)), **more) as service:
        assert (service.info.device, service.info.cpu_experts) == ("torch-cpu", "off")
        os.kill(pid_of(service), signal.SIGKILL)
        await until(lambda: service._supervisor.restarts == 1 and not service.unready())
    assert [load.config.cpu_experts for load in loads] == ["off"], "the option itself is auto"


async def test_a_cancel_while_the_worker_is_replaced_is_not_sent_again(folder: Path) -> None:
    async with serving(folder) as service:
        streams = [service.generate(request(service, f"r{n}", 1900)) for n in range(4)]
        await anext(streams[0])
        os.kill(pid_of(service), signal.SIGKILL)
        await until(lambda: not service._supervisor.up)
        streams[0].close()
        await until(lambda: service._stats.running == 3)
        for stream in streams:
            stream.close()
        await until(lambda: (service._stats.running, service._stats.kv_usage) == (0, 0))


# --------------------------------------------------------------------------------------------------- the watchdog


async def test_a_stopped_worker_is_replaced_and_its_streams_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 16: a watchdog that missed a stalled worker."""
    faulty(monkeypatch, "paced")
    async with serving(folder) as service:
        asked = request(service, "stopped", 120)
        reader = asyncio.create_task(collect(service.generate(asked)))
        await until(lambda: service.metrics.generation_tokens > 20)
        first = pid_of(service)
        os.kill(first, signal.SIGSTOP)
        assert list((await reader).tokens) == oracle(service)(asked)
        assert pid_of(service) != first
        assert not os.path.exists(f"/proc/{first}")


async def test_a_stuck_step_is_detected_although_the_process_lives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known failure 16."""
    faulty(monkeypatch, "stops")
    patience = Patience(silence=30, stall=1.0, backoff=(0.0,))
    async with serving(folder, patience) as service:
        good = request(service, "good", 1500)
        reader = asyncio.create_task(collect(service.generate(good)))
        await until(lambda: service.metrics.generation_tokens > 20)
        stuck = service.generate(request(service, (KILLER, 1, 2), 5))
        assert list((await reader).tokens) == oracle(service)(good)
        with pytest.raises(GenerationFailed, match="each time"):
            await collect(stuck)


async def test_a_stopped_worker_that_owes_only_an_answer_is_replaced(folder: Path) -> None:
    """Known failure 16: it had no running request, so nothing watched it, and callers waited for ever."""
    async with serving(folder) as service:
        first = pid_of(service)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="ended before it answered"):
            await asyncio.wait_for(service.where((1, 2, 3)), 30)
        await until(lambda: service._supervisor.up)
        assert pid_of(service) != first
        assert (await service.where((1, 2, 3))).pool == 0


def watching(clock: Clock) -> supervisor.Supervisor:
    """Return a supervisor whose callbacks do nothing."""
    return supervisor.Supervisor(
        patience=Patience(),
        clock=clock,
        on_ready=lambda ready: None,
        on_end=lambda: None,
        on_step=lambda step: None,
        on_refused=lambda refused: None,
        on_lost=lambda flight, error: None,
    )


async def test_a_worker_that_owes_an_answer_is_left_alone_while_its_loop_lives() -> None:
    """Known failure 16: like a step, a reply may take as long as it computes or waits for a disk, provided
    heartbeats arrive.
    """
    clock, (worker, theirs) = VirtualClock(), undying()
    process: Any = worker.process
    load: Any = None
    watch = watching(clock)
    watch.start(launch.First(load, b"", worker))

    async def say(message: wire.ToFront) -> None:
        clock.time += 0.001  # so that the time of the heartbeat advances
        theirs.sendall(wire.encode(message))
        link: Any = watch._link
        async with asyncio.timeout(20):
            while link.watchdog.heard_at != clock.time:
                await asyncio.sleep(0)

    def passes(seconds: float) -> int:
        for _ in range(int(4 * seconds)):
            clock.time += 0.25
            watch.look()
        return process.kills

    with theirs:
        await say(wire.ModelReady(fake_spec(), wire.Info(context=1, pool_tokens=1, vocab=1, max_rows=1)))
        assert passes(3600) == 0, "it has nothing to do"
        asked = asyncio.create_task(watch.ask("scrub"))
        await asyncio.sleep(0)
        for _ in range(600):
            await say(wire.Beat(cpu=0.0))
            await say(wire.StepOutputs(stats=wire.Stats()))
            assert passes(5) == 0, "the disk is slow"
        assert passes(1.25) == 1, "no heartbeat arrives"
        process.returncode, process.poll = -9, lambda: -9
        with pytest.raises(Unavailable, match="ended before it answered"):
            await asked
        await watch.close()


@pytest.mark.parametrize("mode", ["takes_long", "computes_long"])
async def test_a_long_step_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Known failure 16: no false alarm while a step runs, whether it waits a little or computes."""
    faulty(monkeypatch, mode)
    stall = 60.0 if mode == "takes_long" else 2.0
    async with serving(folder, Patience(silence=2.4, stall=stall)) as service:
        first = pid_of(service)
        assert (await collect(service.generate(request(service, (KILLER, 1), 1)))).done is not None
        assert pid_of(service) == first
        assert service.stats().worker_restarts == 0


async def test_an_idle_worker_is_left_alone(folder: Path) -> None:
    """Known failure 16: a watchdog that fired on an idle server."""
    async with serving(folder, Patience(silence=0.4, stall=0.4, step=0.4)) as service:
        first = pid_of(service)
        await asyncio.sleep(0.9)
        assert (await collect(service.generate(request(service)))).done is not None
        await asyncio.sleep(0.6)
        assert pid_of(service) == first


async def test_a_suspended_front_does_not_blame_its_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 16: after a laptop's suspend, the worker is not dead."""
    faulty(monkeypatch, "paced")
    async with serving(folder, Patience(silence=1.2)) as service:
        first = pid_of(service)
        asked = request(service, "sleep", 120)
        reader = asyncio.create_task(collect(service.generate(asked)))
        await until(lambda: service.metrics.generation_tokens > 10)
        os.kill(first, signal.SIGSTOP)
        time.sleep(1.5)  # the whole process stands still
        os.kill(first, signal.SIGCONT)
        assert list((await reader).tokens) == oracle(service)(asked)
        assert pid_of(service) == first


# -------------------------------------------------------------------------------------- requests that kill workers


async def test_a_request_that_kills_the_worker_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others finish with the right tokens, and the server continues."""
    faulty(monkeypatch, "dies")
    async with serving(folder) as service:
        good = [request(service, f"good {n}", 100) for n in range(6)]
        bad = request(service, (KILLER, 5, 5), 5)
        readers = [asyncio.create_task(collect(service.generate(one))) for one in (*good[:3], bad, *good[3:])]
        killer = readers.pop(3)
        with pytest.raises(GenerationFailed, match="each time it computed this request"):
            await killer
        truth = oracle(service)
        for one, reader in zip(good, readers, strict=True):
            assert list((await reader).tokens) == truth(one)
        after = request(service, "after")
        assert list((await collect(service.generate(after))).tokens) == truth(after)
        assert service.stats().worker_restarts <= 4


async def test_several_killers_are_all_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "dies")
    async with serving(folder) as service:
        asked = [request(service, (KILLER if n % 3 == 0 else 1, n), 20) for n in range(6)]
        results = await asyncio.gather(*(collect(service.generate(one)) for one in asked), return_exceptions=True)
        truth = oracle(service)
        for n, (one, answer) in enumerate(zip(asked, results, strict=True)):
            if n % 3 == 0:
                assert isinstance(answer, GenerationFailed)
            else:
                assert isinstance(answer, Answer)
                assert list(answer.tokens) == truth(one)


async def test_after_many_deaths_in_a_row_requests_fail_and_restarts_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a minute without memory left the server without a worker for ever."""
    async with serving(folder, Patience(restarts=3, backoff=(0.0, 0.01, 0.01, 0.01, 0.5))) as service:
        exits(monkeypatch)
        streams = [service.generate(request(service, f"r{n}", 1900)) for n in range(3)]
        await anext(streams[0])
        os.kill(pid_of(service), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(GenerationFailed, match="in a row"):
                await collect(stream)
        assert service.stats().worker_restarts >= 4  # the first worker had served
        with pytest.raises(Unavailable, match="in a row") as caught:
            service.generate(request(service))
        assert caught.value.retry_after
        assert "in a row" in service.unready()[0]
        failures = metric(service, "worker_failures")
        assert failures >= 4 and "times in a row" in caplog.text
        await until(lambda: metric(service, "worker_failures") > failures)
        monkeypatch.undo()  # there is memory again
        await until(lambda: service._supervisor.up)
        assert not service.unready() and metric(service, "worker_failures") == 0
        asked = request(service, "after")
        assert list((await collect(service.generate(asked))).tokens) == oracle(service)(asked)


def metric(service: Service, name: str) -> float:
    """Return a gauge's value as it is scraped."""
    lines = service.metrics.render().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"cairn:{name}{{"))


def test_the_pause_between_workers_grows_to_a_minute() -> None:
    steps = Patience().backoff
    assert steps[0] == 0 and list(steps) == sorted(steps) and steps[-1] == 60


async def test_deaths_far_apart_of_a_worker_that_answers_are_not_in_a_row(folder: Path) -> None:
    """Known failure 2: otherwise an idle server whose worker is killed now and then would give up one night."""
    async with serving(folder, Patience(restarts=2, backoff=(0.0,))) as service:
        for _ in range(3):
            await until(lambda: service._supervisor.up)
            await service.where((1, 2, 3))
            os.kill(pid_of(service), signal.SIGKILL)
            await until(lambda: not service._supervisor.up)
        asked = request(service, "after")
        assert list((await collect(service.generate(asked))).tokens) == oracle(service)(asked)
        assert service._supervisor.gave_up == ""


async def test_telling_which_blocks_it_has_is_no_progress_of_a_worker(folder: Path) -> None:
    """A router asks all the while: a worker that dies of every request would count as well for ever."""
    async with serving(folder) as service:
        link = service._supervisor._link
        assert link is not None
        await service.block_changes()
        assert not link.progressed
        await service.where((1, 2, 3))
        assert link.progressed


@pytest.mark.parametrize(("seconds", "failures"), [(300, 0), (5, 1)])
async def test_a_worker_that_was_idle_for_long_dies_for_the_first_time(seconds: int, failures: int) -> None:
    """Known failure 2."""
    clock, (worker, theirs) = VirtualClock(), undying()
    process: Any = worker.process
    load: Any = None
    watch = watching(clock)
    watch.start(launch.First(load, b"", worker))
    with theirs:
        theirs.sendall(
            wire.encode(wire.ModelReady(fake_spec(), wire.Info(context=1, pool_tokens=1, vocab=1, max_rows=1)))
        )
        await until(lambda: watch.up)
        for _ in range(4 * seconds):
            clock.time += 0.25
            watch.look()
        process.returncode, process.poll = -6, lambda: -6
    await until(lambda: watch.gave_up)  # there is nothing to load
    assert watch._failures == failures
    await watch.close()


async def test_a_worker_that_could_not_be_started_is_no_restart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = supervisor.launch, []

    def third(*given: Any) -> launch.Worker:
        tries.append(given)
        if len(tries) < 3:
            raise OSError(errno.EAGAIN, "no process")
        return real(*given)

    async with serving(folder) as service:
        monkeypatch.setattr(supervisor, "launch", third)
        os.kill(pid_of(service), signal.SIGKILL)
        await until(lambda: len(tries) == 3 and service._supervisor.up)
        assert service.stats().worker_restarts == service.metrics.worker_restarts == 1


async def test_an_idle_worker_that_others_kill_is_replaced_at_once(folder: Path) -> None:
    """However often: the pause had grown to 20 s after seven times.

    Only workers that crash by themselves are delayed.
    """
    async with serving(folder, Patience(backoff=(0.0, 3600.0))) as service:
        for _ in range(4):
            dead = pid_of(service)
            os.kill(dead, signal.SIGKILL)
            await until(lambda dead=dead: service.stats().worker_pid != dead and not service.unready())
            assert metric(service, "worker_failures") == 0
        assert (await collect(service.generate(request(service, "after it", 5)))).done
        dead = pid_of(service)
        service._supervisor._link.progressed = False  # type: ignore[union-attr]
        os.kill(dead, signal.SIGABRT)
        await until(lambda: metric(service, "worker_failures") == 1)
        await asyncio.sleep(0.3)
        assert not service._supervisor.up


async def test_a_failing_worker_sends_new_requests_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder, Patience(backoff=(0.0, 0.0, 30.0))) as service:
        exits(monkeypatch)
        os.kill(pid_of(service), signal.SIGKILL)
        await until(lambda: service._supervisor.trouble)
        with pytest.raises(
            Unavailable, match=r"2 times in a row \(.*; another is tried, at the latest in 30 s"
        ) as caught:
            service.generate(request(service))
        assert caught.value.retry_after == 30


def none(*_: object) -> launch.Worker:
    raise OSError("no process")


async def test_gauges_fall_when_the_worker_ends_for_good(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs any more, and ended requests stay counted once."""
    monkeypatch.setattr(supervisor, "launch", none)
    options, patience = config(folder, kv_dir=str(tmp_path / "kv")), Patience(restarts=0, backoff=(0.0,))
    service = await Service.start(options, in_process=True, patience=patience)
    try:
        await collect(service.generate(request(service, "a context " * 30, 20)))
        await service.flush()
        metrics, written = service.metrics, service.metrics.disk_bytes[1]
        assert written > 0 and metrics.kv.disk is not None
        stream = service.generate(request(service, "long", 1900))
        await until(lambda: metrics.running == 1 and metrics.kv_usage > 0)
        link: Any = service._supervisor._link
        link.end("cut off")
        with pytest.raises(GenerationFailed, match="in a row"):
            await collect(stream)
        assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0)
        assert metrics.kv.disk is None and service.stats().kv_usage == 0
        assert metrics.disk_bytes[1] >= written
        written = metrics.disk_bytes[1]
        metrics.worker_replaced()
        assert metrics.disk_bytes[1] == written
    finally:
        await service.close()


async def test_gauges_fall_while_the_worker_is_replaced(folder: Path) -> None:
    service = await Service.start(config(folder), in_process=True, patience=Patience(backoff=(3600.0,)))
    try:
        stream = service.generate(request(service, "long", 1900))
        await until(lambda: service.metrics.running == 1)
        link: Any = service._supervisor._link
        link.end("cut off")
        await until(lambda: (service.metrics.running, service.metrics.kv_usage) == (0, 0))
        assert service.stats().running == 1, "it goes on with the next worker"
        stream.close()
    finally:
        await service.close()


async def test_an_engine_that_keeps_raising_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its requests fails with an error, and the third such step ends the process."""
    faulty(monkeypatch, "raises")
    async with serving(folder) as service:
        first = pid_of(service)
        for _ in range(2):
            with pytest.raises(GenerationFailed, match="engine"):
                await collect(service.generate(request(service, (KILLER, 1))))
        assert pid_of(service) == first
        with pytest.raises(GenerationFailed):
            await collect(service.generate(request(service, (KILLER, 1))))
        assert service.stats().worker_restarts >= 1
        assert (await collect(service.generate(request(service)))).done is not None


async def test_after_a_second_failure_of_its_device_a_model_goes_on_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams in flight go on, also one that was alone both times: it is not to blame."""
    faulty(monkeypatch, "device_fails")
    monkeypatch.setenv("FAIL_AT", "20")
    for count in (1, 6):
        async with serving(folder, device="cuda:0") as service:
            asked = [request(service, f"device {n}", 60, temperature=0.7, seed=n) for n in range(count)]
            answers = await asyncio.gather(*[collect(service.generate(one)) for one in asked])
            truth = oracle(service)
            assert [list(answer.tokens) for answer in answers] == [truth(one) for one in asked]
            assert service.stats().worker_restarts == 2
            moved = "the device cuda:0 failed twice; the CPU computed the rest of this answer"
            assert [answer.done and answer.done.moved for answer in answers] == [moved] * count
            later = (await collect(service.generate(request(service, "later", 30)))).done
            assert later is not None and not later.moved
            (trouble,) = service.troubles()
            assert trouble.startswith("the device cuda:0 failed twice (the device failed: an illegal address); the CPU")


async def test_after_one_failure_the_next_worker_is_on_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "device_fails")
    monkeypatch.setenv("FAIL_AT", "20")
    async with serving(folder, device="cuda:0") as service:
        reader = asyncio.create_task(collect(service.generate(request(service, "one", 60))))
        await until(lambda: service.stats().worker_restarts == 1)
        reader.cancel()
        await until(lambda: service.stats().worker_pid is not None)
        assert not service.troubles()
        assert (await collect(service.generate(request(service, "two", 10)))).done is not None
        assert service.stats().worker_restarts == 1


async def test_a_device_that_is_gone_when_a_worker_is_replaced_gives_way_to_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faulty(monkeypatch, "device_fails")
    monkeypatch.setenv("FAIL_AT", "1000")
    monkeypatch.setenv("GONE", str(tmp_path / "gone"))
    async with serving(folder, device="cuda:0") as service:
        one = request(service, "gone", 150, temperature=0.7)
        reader = asyncio.create_task(collect(service.generate(one)))
        await until(lambda: service.metrics.generation_tokens > 20)
        (tmp_path / "gone").touch()
        os.kill(pid_of(service), signal.SIGKILL)
        assert list((await reader).tokens) == oracle(service)(one)
        assert service.troubles()[0].startswith("the device cuda:0 failed twice (device cuda:0 cannot be used")


async def test_a_worker_that_sends_nonsense_is_replaced_and_nothing_of_it_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "nonsense")
    with pytest.raises(ModelError, match="frame is broken"):
        await Service.start(config(folder))


async def test_a_worker_that_ends_while_loading_is_a_model_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exits(monkeypatch)
    with pytest.raises(ModelError, match="exit code 3") as caught:
        await Service.start(config(folder))
    assert caught.value.exit_code == 2


# ------------------------------------------------------------------------------------------------- no orphan, no leak


@pytest.mark.parametrize("state", ["running", "front stopped", "in a step"])
async def test_no_worker_outlives_a_killed_front(folder: Path, state: str) -> None:
    """Known failure 3: also a worker that waits for a front that does not read, or is in the middle of a long step."""
    mode = "stops" if state == "in a step" else "paced"
    front = await asyncio.create_subprocess_exec(
        sys.executable, str(FRONT), str(folder), mode, stdout=asyncio.subprocess.PIPE
    )
    assert front.stdout is not None
    pid = int(await asyncio.wait_for(front.stdout.readline(), 60))
    if state == "front stopped":
        os.kill(front.pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
    front.kill()
    await front.wait()
    await until(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


async def test_the_worker_leaves_signals_to_the_front(folder: Path) -> None:
    """Known failure 3: Ctrl-C reaches every process of the terminal, but the worker must run on during the drain."""
    async with serving(folder) as service:
        first = pid_of(service)
        asked = request(service, "x", 300)
        reader = asyncio.create_task(collect(service.generate(asked)))
        await until(lambda: service.metrics.generation_tokens > 5)
        os.kill(first, signal.SIGINT)
        os.kill(first, signal.SIGTERM)
        assert list((await reader).tokens) == oracle(service)(asked)
        assert pid_of(service) == first


async def test_an_idle_service_closes_at_once(folder: Path) -> None:
    """Known failure 3."""
    service = await Service.start(config(folder))
    pid, started = pid_of(service), time.monotonic()
    await service.close()
    assert not os.path.exists(f"/proc/{pid}")
    assert time.monotonic() - started < supervisor.CLOSE_SECONDS


class Undying:
    """A process that waits for a device and does not react to SIGKILL yet."""

    pid, returncode, kills = 1, None, 0

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.kills += 1

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            raise AssertionError("waits for ever, on a thread that the end of the program waits for")
        raise subprocess.TimeoutExpired("worker", timeout)


def undying() -> tuple[launch.Worker, socket.socket]:
    ours, theirs = socket.socketpair()
    process: Any = Undying()
    return launch.Worker(ours, process), theirs


async def test_a_close_that_is_cut_off_kills_the_worker() -> None:
    """Known failure 3: nothing else kills a replacement worker, which would keep its folder locked."""
    worker, theirs = undying()
    process: Any = worker.process
    load: Any = None
    with theirs:
        watch = watching(SystemClock())
        watch.start(launch.First(load, b"", worker))
        link: Any = watch._link
        closing = asyncio.create_task(watch.close())
        await until(link.ended.done)
        await asyncio.sleep(0)
        assert process.kills == 0, "it may store pending KV first"
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert process.kills == 1


async def test_the_end_does_not_wait_for_ever_for_a_worker_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "KILL_SECONDS", 0.05)
    worker, theirs = undying()
    with theirs:
        link = link_module.WorkerConnection(worker, SystemClock(), lambda message: None)
        link.end("closed")
        assert "does not end" in await asyncio.wait_for(link.reap(0.01), 20)
        caplog.clear()
        # Two models might not fit into memory: the replacement starts only once this worker is gone.
        replacing = asyncio.create_task(link.reap(0.01, surely=True))
        process: Any = worker.process
        await until(lambda: "does not end" in caplog.text)
        assert not replacing.done() and process.kills == 2
        process.returncode, process.poll = -9, lambda: -9
        assert "SIGKILL" in await asyncio.wait_for(replacing, 20)


def test_a_first_worker_that_cannot_be_killed_does_not_hold_up_the_end() -> None:
    worker, theirs = undying()
    load: Any = None
    with theirs:
        launch.First(load, b"", worker).end()
    process: Any = worker.process
    assert process.kills == 1


async def test_sixteen_equal_prompts_at_once_compute_the_prefix_once(folder: Path, figure: Figure) -> None:
    async with serving(folder, max_running=16, context=1100) as service:
        prompt = tuple(random.Random(3).randrange(256) for _ in range(1000))
        asked = [request(service, prompt, 8, temperature=1.0, seed=n) for n in range(16)]
        answers = await asyncio.gather(*(collect(service.generate(one)) for one in asked))
        truth = oracle(service)
        for one, answer in zip(asked, answers, strict=True):
            assert list(answer.tokens) == truth(one)
        computed = [answer.cache.computed for answer in answers]
        blocks = 1000 // 16 * 16
        assert sorted(computed) == [1000 - blocks] * 15 + [1000]
        assert sum(answer.cache.pool for answer in answers) == 15 * blocks == service.metrics.prefix_hits
        figure("16 equal prompts of 1,000 tokens at once", f"{sum(computed)} tokens computed of {16 * 1000}")


async def cancel_at_random(service: Service, stream: RequestStream, after: int, how: int) -> None:
    """End a request in one of four ways after a number of events."""
    reader = aiter(stream)
    events: list[Event] = []
    with contextlib.suppress(StopAsyncIteration):
        for _ in range(after):
            events.append(await anext(reader))
    if how == 0:
        await stream.aclose()
    elif how == 1:
        service.abort(stream.id)
    elif how == 2:
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    del stream


async def test_cancels_at_random_points_leave_nothing_held(folder: Path, figure: Figure, prove: bool) -> None:
    """Known failures 12, 42: blocks and slots are free within one step and 100 ms, and none is held at the end."""
    count, dice = 2000 if prove else 200, random.Random(11)
    async with serving(folder, max_running=8, max_queue=3000, kv_gb=0.0006) as service:
        common = tuple(dice.randrange(256) for _ in range(300))

        async def one(n: int) -> None:
            await asyncio.sleep(dice.random() * count / 400)
            prompt = (*common[: dice.choice([0, 100, 300])], n % 256, n // 256)
            stop = ("never said",) if n % 5 == 0 else ()
            stream = service.generate(request(service, prompt, dice.randrange(1, 1500), stop=stop, temperature=1.0))
            await cancel_at_random(service, stream, dice.choice([0, 0, 1, 2, 5, 40]), dice.randrange(4))

        await asyncio.gather(*map(one, range(count)))
        started = time.monotonic()
        await until(lambda: (service._stats.running, service._stats.waiting, service._stats.kv_usage) == (0, 0, 0))
        freed = time.monotonic() - started
        assert not service._flights
        assert service._queue.requests == service._queue.tokens == 0
        assert not service._supervisor._sent
        assert sum(service.metrics.finished.values()) == count
        unread = service.metrics.generation_tokens - service.metrics.generation_length.sum
        assert unread < 100 * count  # tokens that were in flight at the cancel, not all that were asked for
        asked = request(service, "after", 20)
        assert list((await collect(service.generate(asked))).tokens) == oracle(service)(asked)
        assert service.stats().worker_restarts == 0
        figure(
            f"{count} cancels at random points",
            f"nothing held, freed after {freed * 1000:.0f} ms, {unread / count:.1f} tokens each for nothing",
        )


async def test_the_workers_memory_does_not_grow_with_requests(folder: Path, figure: Figure, prove: bool) -> None:
    """Known failure 11."""
    warm, rounds = (70, 20) if prove else (2, 4)  # the keys that a worker remembers are bounded, and fill up first
    async with serving(folder, kv_gb=0.0005) as service:

        async def load(number: int) -> None:
            asked = [request(service, f"{number} {n} " * 20, 10) for n in range(200)]
            await asyncio.gather(*(collect(service.generate(one)) for one in asked))

        for number in range(warm):
            await load(number)
        before = resident(pid_of(service))
        for number in range(warm, warm + rounds):
            await load(number)
        grown = resident(pid_of(service)) - before
        assert grown < (1 << 20 if prove else 4 << 20)
        figure(f"worker memory after {200 * rounds} more requests", f"{grown / 1024:+.0f} KiB")


async def test_a_package_that_was_changed_on_the_disk_gets_no_second_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new files may not understand the old front: a typed error says at once what to do."""
    async with serving(folder) as service:
        monkeypatch.setattr(launch, "code_digest", lambda: b"other files")
        pid = service.stats().worker_pid
        assert pid is not None
        stream = service.generate(request(service, "a long answer", 1000))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GenerationFailed, match="were changed since this server started"):
            await collect(stream)
        with pytest.raises(Unavailable, match="restart it"):
            service.generate(request(service))
        assert service.unready() == [launch.CODE_CHANGED]


async def test_a_model_that_was_changed_on_the_disk_is_not_served(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an answer from one model and half from another would be an answer of neither."""
    faulty(monkeypatch, "paced")
    model = shutil.copytree(folder, tmp_path / "model")
    async with serving(model) as service:
        spec, info = service.spec, service.info
        stream = service.generate(request(service, "a long answer", 1000))
        await anext(stream)
        save_file({"model.norm.weight": np.zeros(16, dtype=np.float32)}, model / "model.safetensors")
        os.kill(pid := pid_of(service), signal.SIGKILL)
        with pytest.raises(GenerationFailed, match="the model's files were changed"):
            await collect(stream)
        with pytest.raises(Unavailable, match="restart it"):
            service.generate(request(service))
        assert service.unready() == [supervisor.CHANGED]
        assert (service.spec, service.info) == (spec, info)
        await until(lambda: pid_of(service) != pid and not os.path.exists(f"/proc/{pid_of(service)}"))
        assert service.stats().worker_restarts == 1  # and no third one


async def test_a_package_that_cannot_be_read_now_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 2: when file descriptors run out for a moment, that does not mean that files have changed."""
    digest, looks = launch.code_digest, []

    def fails_once() -> bytes:
        looks.append(None)
        if len(looks) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return digest()

    async with serving(folder) as service:
        monkeypatch.setattr(launch, "code_digest", fails_once)
        asked = request(service, "a long answer", 1000)
        stream = service.generate(asked)
        os.kill(pid_of(service), signal.SIGKILL)
        assert list((await collect(stream)).tokens) == oracle(service)(asked)
        assert len(looks) == 2 and not service._supervisor.gave_up
        assert service.stats().worker_restarts == 1


@pytest.mark.parametrize(("level", "told"), [("warning", True), ("error", False)])
async def test_the_worker_logs_as_the_server_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], level: str, told: bool
) -> None:
    faulty(monkeypatch, "warns")
    async with serving(folder, log_level=level) as service:
        await collect(service.generate(request(service)))
    seen = capfd.readouterr().err
    assert (
        bool(re.search(r"^\d{4}-\d\d-\d\d [\d:,]+ WARNING cairn\.kv\.tiers\.tiers: a slow disk$", seen, re.M)) == told
    )
    assert ("a slow disk" in seen) == told


async def test_a_signal_without_a_name_is_a_death_like_any_other(folder: Path) -> None:
    async with serving(folder) as service:
        asked = request(service, "a long answer", 1000)
        stream = service.generate(asked)
        await until(lambda: service.stats().running == 1)
        os.kill(pid_of(service), 40)
        assert list((await collect(stream)).tokens) == oracle(service)(asked)
        assert service.stats().worker_restarts == 1


async def test_the_reason_a_worker_is_not_replaced_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing awaits the task that replaces it: without a report every request would wait for its deadline."""

    def none() -> bytes:
        raise RuntimeError("can't start new thread")

    async with serving(folder) as service:
        monkeypatch.setattr(launch, "code_digest", none)
        stream = service.generate(request(service, "a long answer", 1000))
        os.kill(pid_of(service), signal.SIGKILL)
        with pytest.raises(GenerationFailed, match=r"the worker cannot be replaced \(RuntimeError\)"):
            await collect(stream)
        assert "cannot be replaced" in service.unready()[0]


def test_the_digest_of_the_package_changes_with_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__.py", "a/b.py", "a/native.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(launch, "PACKAGE", tmp_path)
    seen = {launch.code_digest()}
    (tmp_path / "a/b.py").write_text("2")
    seen.add(launch.code_digest())
    (tmp_path / "a/native.so").write_text("2")
    seen.add(launch.code_digest())
    (tmp_path / "a/b.py").rename(tmp_path / "a/c.py")
    seen.add(launch.code_digest())
    assert len(seen) == 4 and launch.code_digest() in seen


def test_a_package_that_cannot_be_read_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its digest would differ, as if the files had been changed."""
    monkeypatch.setattr(launch, "PACKAGE", tmp_path)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        launch.code_digest()

    def no_more(path: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "scandir", no_more)
    with pytest.raises(OSError, match="Too many open files"):
        launch.code_digest()
