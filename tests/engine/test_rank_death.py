"""A rank that is killed in the middle of an answer: the worker ends, all ranks start anew, and the text is the same."""

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


async def test_an_answer_survives_a_killed_rank() -> None:
    options = {"device": "torch-cpu", "tp": 2, "kv_gb": 0.01, "context": 512, "threads": 1, "step_tokens": 64}
    service = await Service.start(Config(model=str(hub.locate("demo")), **options))
    try:
        asked = request(service, "Once upon a time", 60)
        whole = await collect(service.generate(asked))
        again = asyncio.create_task(collect(service.generate(request(service, "Once upon a time", 60))))
        seen = service.metrics.generation_tokens
        await until(lambda: service.metrics.generation_tokens > seen + 10)
        worker = service.stats().worker_pid
        (rank,) = ranks_below(worker)
        os.kill(rank, signal.SIGKILL)
        assert (await again).text == whole.text
        assert service.stats().worker_pid != worker and len(ranks_below(service.stats().worker_pid)) == 1
    finally:
        await service.close()
