"""KV stores as a service's options configure them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from cairn.config.config import Config
from cairn.config.paths import with_folder
from cairn.engine.fake import FakeEngine, fake_spec
from cairn.engine.recorded import RecordedEngine
from cairn.frontend.service import Service
from cairn.frontend.worker_connection import Patience
from cairn.kv.disk.store import DiskStore
from cairn.kv.pool.cache import Cache
from cairn.kv.tiers.tiers import Tiers
from cairn.models.spec.config import load_spec
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.system.posix import SystemClock, SystemFiles
from cairn.types.errors import ConfigError, Conflict
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport
from cairn.worker.stores import open_stores, ram_bytes, stored_bytes
from tests.service.tiny import collect, config, request, serving, until
from tests.tiny_models import random_tensors, write_model


async def test_kv_survives_the_service(folder: Path, tmp_path: Path) -> None:
    """Known failures 27, 31, 39: stored by one worker, found and loaded by the next, and the answer is the same."""
    stored = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    prompt = "a context " * 30
    async with serving(folder, **stored) as service:
        first = await collect(service.generate(request(service, prompt, 20)))
        await service.flush()
        context = tuple(service.tokenizer.encode(prompt)) + first.tokens
        placed = await service.where(context)
        assert placed.disk == (len(context) - 1) // 16 * 16 > 0
    async with serving(folder, **stored) as service:
        again = await collect(service.generate(request(service, prompt, 20)))
        assert again.tokens == first.tokens
        assert again.cache.disk == len(service.tokenizer.encode(prompt)) - 1
        assert again.cache.pool == 0 and again.cache.load > 0


async def test_stored_kv_is_counted_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = config(folder, kv_dir=str(tmp_path / "kv"))
    assert stored_bytes(stored, SystemFiles()) == 0, "there is no such folder yet"
    async with serving(folder, kv_dir=str(tmp_path / "kv")) as service:
        await collect(service.generate(request(service, "a context " * 30, 20)))
        await service.flush()
    chunks = sum(path.stat().st_size for path in tmp_path.glob("kv/models/*/?/*"))
    next(tmp_path.glob("kv/models/*/0/")).joinpath("tmp-1").write_bytes(b"left over")
    assert stored_bytes(stored, SystemFiles()) == chunks > 1000
    for off in ({"kv_disk": False}, {"kv_load": "never"}):
        assert stored_bytes(config(folder, kv_dir=str(tmp_path / "kv"), **off), SystemFiles()) == 0
    monkeypatch.setattr("cairn.worker.stores.MOST_AHEAD", 1000)
    assert stored_bytes(stored, SystemFiles()) == 1000


@pytest.mark.parametrize(
    ("settings", "kept"), [({}, 30 * 86400.0), ({"kv_ttl": 90.0}, 90.0), ({"kv_ttl": 0}, math.inf)]
)
async def test_the_option_says_how_long_unused_kv_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, float], kept: float
) -> None:
    made: list[float] = []

    class Watched(DiskStore):
        def __init__(self, *args: Any, **how: Any) -> None:
            made.append(how["ttl"])
            super().__init__(*args, **how)

    monkeypatch.setattr("cairn.worker.stores.DiskStore", Watched)
    async with serving(folder, kv_dir=str(tmp_path / "kv"), **settings):
        assert made == [kept]


async def test_two_servers_of_one_model_store_its_kv_and_the_next_one_finds_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a folder of its own meanwhile; a fifth server is refused one."""
    monkeypatch.setattr("cairn.worker.stores.PATIENCE", 0.0)
    stored = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    prompts = ["a context " * 30, "another one " * 30]
    async with contextlib.AsyncExitStack() as stack:
        for prompt in prompts:
            service = await stack.enter_async_context(serving(folder, **stored))
            await collect(service.generate(request(service, prompt, 5)))
            await service.flush()
        assert len(list(tmp_path.glob("kv/models/*"))) == 2
        for _ in range(2):
            await stack.enter_async_context(serving(folder, **stored))
        with pytest.raises(Conflict, match=r"kv_dir: .* is in use by another process"):
            await Service.start(config(folder, **stored), in_process=True)
    async with serving(folder, **stored) as service:
        for prompt in prompts:
            assert (await collect(service.generate(request(service, prompt, 5)))).cache.disk > 0
    assert len({path.parent.parent for path in tmp_path.glob("kv/models/*/?/*")}) == 1


def test_a_start_waits_for_one_folder_of_its_model_and_no_longer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is about to end holds the usual folder. Waiting for each of four took 20 s."""
    waited: list[float] = []

    class Taken(DiskStore):
        def __init__(self, *args: Any, patience: float, **how: Any) -> None:
            waited.append(patience)
            raise Conflict("kv_dir: is in use by another process")

    monkeypatch.setattr("cairn.worker.stores.DiskStore", Taken)
    stored = config(folder, kv_dir=str(tmp_path / "kv"))
    with pytest.raises(Conflict):
        open_stores(stored, fake_spec(), FakeEngine(fake_spec(), blocks=4).info, SystemClock(), SystemFiles(), {})
    assert waited == [5.0, 0.0, 0.0, 0.0]


async def test_an_unusable_default_folder_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tmp_path / "cairn" / "kv"
    own.mkdir(parents=True)
    (own / "letter").write_text("not a store")
    own.chmod(0o700)
    with_store = with_folder(config(folder), os.environ)
    assert with_store.kv_dir == str(own)
    service = await Service.start(with_store, in_process=True)
    try:
        (trouble,) = service.troubles()
        assert trouble.startswith("no KV is kept on the disk: kv_dir: ") and service.unready() == []
        await collect(service.generate(request(service, "still here", 4)))
    finally:
        await service.close()
    with pytest.raises(ConfigError, match="kv_dir"):
        await Service.start(config(folder, kv_dir=str(tmp_path)), in_process=True)
    assert with_folder(config(folder, kv_disk=False), os.environ).kv_dir is None


async def test_a_folder_that_cannot_be_used_is_logged_once_and_so_is_that_it_works_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the start, before there was any request."""
    caplog.set_level(logging.INFO, "cairn.frontend")
    (tmp_path / "in the way").write_text("")
    async with serving(folder, kv_dir=str(tmp_path / "in the way" / "kv")) as service:

        def logged() -> list[tuple[str, str]]:
            return [(record.levelname, record.message) for record in caplog.records if "the KV store" in record.message]

        await until(lambda: bool(service.troubles()), 20)
        (trouble,) = service.troubles()
        assert logged() == [("WARNING", trouble)] and str(tmp_path / "in the way" / "kv") in trouble
        for _ in range(3):  # the same figures again each time
            await service.flush()
        assert logged() == [("WARNING", trouble)]
        (tmp_path / "in the way").unlink()
        await until(lambda: not service.troubles(), 20)
        assert logged() == [("WARNING", trouble), ("INFO", "the KV store on the disk works again")]


async def test_kv_that_leaves_the_pool_is_found_in_memory(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, kv_gb=0.0001, kv_ram_gb=0.1, kv_load="always") as service:
        prompt = "a context " * 30
        tokens = service.tokenizer.encode(prompt)
        first = await collect(service.generate(request(service, prompt, 5)))
        await service.flush()
        stored = len(tokens) // 16 * 16
        for number in range(30):
            if (await service.where(tokens)).pool == 0:
                break
            await collect(service.generate(request(service, f"{number} others " * 30, 5)))
        placed = await service.where(tokens)
        assert (placed.pool, placed.ram) == (0, stored), "others have pushed it out of the pool"
        again = await collect(service.generate(request(service, prompt, 5)))
        assert again.tokens == first.tokens
        assert (again.cache.pool, again.cache.ram) == (0, len(tokens) - 1)


@pytest.mark.parametrize(
    ("given", "elsewhere", "kept"),
    [
        ({}, False, 0),
        ({}, True, 2 * 10**9),
        ({"kv_ram_gb": 0}, True, 0),
        ({"kv_ram_gb": 3}, True, 3 * 10**9),
        ({"kv_ram_gb": 8}, True, 8 * 10**9),
        ({"kv_ram_gb": 8.5}, True, "8.00 GB of memory are free; lower kv_ram_gb"),
        ({"kv_ram_gb": 7}, False, 7 * 10**9),
        ({"kv_ram_gb": 7.1}, False, "7.00 GB of memory are free beside the KV pool of 1.00 GB; lower kv_ram_gb or"),
    ],
)
def test_host_memory_for_kv_is_what_is_asked_and_free(
    folder: Path, given: dict[str, Any], elsewhere: bool, kept: int | str
) -> None:
    """With 8 GB free and a pool of 1 GB, which is in the same memory on the CPU."""
    info = dataclasses.replace(FakeEngine(fake_spec(), blocks=4).info, blocks=(1000,), block_bytes=(10**6,))
    if isinstance(kept, int):
        assert ram_bytes(config(folder, **given), info, elsewhere, 8 * 10**9) == kept
        return
    with pytest.raises(ConfigError, match=kept) as caught:
        ram_bytes(config(folder, **given), info, elsewhere, 8 * 10**9)
    assert caught.value.field == "kv_ram_gb"


def test_the_cpu_keeps_kv_beside_a_small_pool(tmp_path: Path) -> None:
    """With real kernels: the pool holds little, host memory holds more."""
    written = write_model(tmp_path / "model", max_position_embeddings=256)
    engine = RecordedEngine.load(load_spec(written), written, Config(step_tokens=64, threads=1), blocks=(12,))
    stores, trouble = open_stores(
        Config(kv_ram_gb=0.01, kv_disk=False), load_spec(written), engine.info, SystemClock(), SystemFiles(), {}
    )
    assert list(stores) == ["ram"] and not trouble
    cache = Cache(engine.info)
    tiers = Tiers(cache, engine, SystemClock(), stores, load="always")
    tiers.start()
    scheduler = Scheduler(cache, Limits(step_tokens=64), SystemClock())
    answers = list[tuple[list[int], CacheReport]]()
    sampling = SamplingParams(max_tokens=5, temperature=0)
    for number in (1, 2, 3, 1):
        tokens = tuple(number * 7 + place % 90 for place in range(100))
        scheduler.add(Request(id=10 * len(answers) + 1, prompt=tokens, durable=True, sampling=sampling))
        got, report = list[int](), CacheReport()
        while not scheduler.idle:
            if (plan := scheduler.plan()) is not None:
                for output in scheduler.commit(plan, plan.run(engine)):
                    got += output.tokens
                    report = output.cache or report
            tiers.turn(True)
        for _ in range(50):  # the writer's thread may not be scheduled for a while
            tiers.turn(True)
            time.sleep(0.01)
        answers.append((got, report))
    first, again = answers[0], answers[-1]
    assert again[0] == first[0]
    assert first[1].computed == 100 and again[1].pool == 0 and again[1].ram == again[1].cached >= 64
    tiers.close(1.0)
    engine.close()


async def test_a_worker_that_was_killed_leaves_its_store_to_the_next(folder: Path, tmp_path: Path) -> None:
    """Known failures 27, 31: nothing was closed, and the lock is free for the next worker."""
    options = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    service = await Service.start(config(folder, **options), patience=Patience(backoff=(0.0, 0.01)))
    try:
        prompt = "a context " * 30
        first = await collect(service.generate(request(service, prompt, 20)))
        await service.flush()
        worker = service.stats().worker_pid
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        await until(lambda: service.stats().worker_restarts == 1 and not service.unready(), 60)
        again = await collect(service.generate(request(service, prompt, 20)))
        assert again.tokens == first.tokens
        assert again.cache.disk == len(service.tokenizer.encode(prompt)) - 1
        assert service.troubles() == []
    finally:
        await service.close()


async def test_a_foreign_folder_is_set_aside_if_configured(folder: Path, tmp_path: Path) -> None:
    """Known failure 50: the option has an effect."""
    own = tmp_path / "kv"
    own.mkdir(mode=0o700)
    (own / "letter").write_text("not a store")
    with pytest.raises(ConfigError, match="kv_dir"):
        await Service.start(config(folder, kv_dir=str(own)), in_process=True)
    async with serving(folder, kv_dir=str(own), kv_fresh=True) as service:
        assert service.troubles() == []
    (aside,) = tmp_path.glob("kv.aside-*")
    assert (aside / "letter").read_text() == "not a store"


async def test_a_folder_of_another_kv_type_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """None of it is loaded, the answer is that of an empty folder, and its owner finds it unchanged."""
    prompt = "a context " * 30
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    save_file(random_tensors(folder), folder / "model.safetensors")

    async def ask(kv_dtype: str, where: str) -> tuple[tuple[int, ...], int]:
        options = {"engine": "cpu", "kv_load": "always", "kv_dtype": kv_dtype, "kv_dir": str(tmp_path / where)}
        async with serving(folder, **options) as service:
            got = await collect(service.generate(request(service, prompt, 8)))
            await service.flush()
            return tuple(got.tokens), got.cache.disk

    before, cached = await ask("bf16", "shared")
    assert cached == 0
    assert await ask("f16", "shared") == await ask("f16", "alone")
    again, cached = await ask("bf16", "shared")
    assert again == before and cached > 0


async def test_the_stores_answer_what_is_asked_about_a_context(folder: Path, tmp_path: Path) -> None:
    stored = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    prompt = "a context " * 30
    async with serving(folder, **stored) as service:
        tokens = service.tokenizer.encode(prompt)
        whole, blocks, chunks = len(tokens) // 64 * 64, len(tokens) // 16 * 16, -(-(len(tokens) // 16) // 4)
        await collect(service.generate(request(service, prompt, 2)))
        await service.flush()
        assert service.kv().disk is not None and service.kv().disk.chunks == chunks, "figures from after the flush"
        assert service.kv().queued == 0
        await service.pin("agent", tokens)
        await until(lambda: service.kv().disk is not None and service.kv().disk.pinned == chunks)
        assert (await service.evict(tokens)).disk == blocks
        assert (await service.where(tokens)).pool == 0
        assert (await service.prefetch(tokens)).pool == blocks
        again = await collect(service.generate(request(service, prompt, 2)))
        assert again.cache.pool >= whole - 64 and again.cache.disk == 0
        swept = await service.scrub()
        assert swept.checked == chunks and swept.removed == 0
        assert (await service.prune()).removed == 0
        placed = await service.evict(tokens, keep=64, disk=True)
        assert (placed.disk, placed.pool) == (64, 64)
        await service.unpin("agent")
        await until(lambda: service.kv().disk is not None and service.kv().disk.pinned == 0)
        assert service.troubles() == []
