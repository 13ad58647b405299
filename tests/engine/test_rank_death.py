"""A rank killed in the middle of an answer: the worker ends, all ranks start anew, and the text is the same."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: no device but the CPU is tested")

from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.models.hub import hub
from tests.service.tiny import collect, request, until


def ranks_below(worker: int | None) -> list[int]:
    """Return the processes of ranks that a worker started."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    return [int(one) for one in children if b"cairn.engine.rank" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("cpu", 4), ("torch-cpu", 2)])
async def test_an_answer_survives_a_killed_rank(device: str, ranks: int, prove: bool) -> None:
    """Also a second time within the hour, which would make the server give a device up."""
    if not prove and (device, ranks) != ("cpu", 2):
        pytest.skip("only with --prove")
    options = {"device": device, "tp": ranks, "kv_gb": 0.01, "context": 512, "threads": 1, "step_tokens": 64}
    service = await Service.start(Config(model=str(hub.locate("demo")), **options))
    try:
        whole = await collect(service.generate(request(service, "Once upon a time", 300)))
        for _ in range(2 if prove and device == "cpu" else 1):
            again = asyncio.create_task(collect(service.generate(request(service, "Once upon a time", 300))))
            seen = service.metrics.generation_tokens
            await until(lambda seen=seen: service.metrics.generation_tokens > seen + 10)
            worker = service.stats().worker_pid
            rank, *others = ranks_below(worker)
            assert len(others) == ranks - 2 and not again.done()
            os.kill(rank, signal.SIGKILL)
            assert (await again).text == whole.text
            assert service.stats().worker_pid != worker
            assert len(ranks_below(service.stats().worker_pid)) == ranks - 1
    finally:
        await service.close()
