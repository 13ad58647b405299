"""The adapters of one model: names that share a file, and what routers are told of adapted requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cairn.cluster.text_prefixes import TextPrefixes
from cairn.config.values import AdapterOptions
from cairn.frontend.adapter_services import ServedAdapters
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.frontend.text_blocks import text_blocks
from cairn.types.errors import NotFound, Unavailable
from tests.service.tiny import collect, config, make_model


@contextlib.asynccontextmanager
async def adapted(folder: Path, **places: str) -> AsyncIterator[tuple[Service, ServedAdapters]]:
    """Serve a model with adapters of these names, in these files of the folder."""
    for place in places.values():
        (folder / place).write_text(f"the adapter {place}")
    adapters = tuple(AdapterOptions(name=name, path=str(folder / place)) for name, place in places.items())
    settings = config(make_model(folder / "tiny"), adapters=adapters, kv_disk=False)
    service = await Service.start(settings, in_process=True)
    try:
        yield service, ServedAdapters(service)
    finally:
        await service.close()


def options(tokens: int) -> SamplingOptions:
    return SamplingOptions(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def test_requests_go_on_under_another_name_of_an_unloaded_adapter(tmp_path: Path) -> None:
    """Nothing is waited for: steady requests would outlast any grace."""
    async with adapted(tmp_path, old="a", new="a", other="b") as (_, adapters):
        view = adapters.named("tiny:new")
        assert view is not None
        (request,) = view.make_requests(list(range(3, 40)), options(200))
        going = asyncio.create_task(collect(view.generate(request)))
        await asyncio.sleep(0)
        await adapters.unload("old", grace=0.0)
        answer = await going
        assert answer.done is not None and answer.done.usage.completion_tokens == 200
        assert adapters.named("tiny:old") is None and adapters.known == {"new", "other"}
        again = adapters.named("tiny:new")
        assert again is not None and again.spec.identity == view.spec.identity
        (request,) = again.make_requests(list(range(3, 40)), options(4))
        assert (await collect(again.generate(request))).done, "the file is still attached"
        await adapters.unload("new", grace=0.0)
        with pytest.raises(Unavailable, match="an adapter of tiny:new was unloaded"):
            again.make_requests([3], options(1))
        with pytest.raises(NotFound):
            await adapters.unload("new")


async def test_an_adapter_has_a_name_that_finds_it_after_another_name_was_unloaded(tmp_path: Path) -> None:
    async with adapted(tmp_path, old="a", new="a") as (_, adapters):
        view = adapters.named("tiny:old@0.5")
        assert view is not None
        await adapters.unload("new", grace=0.0)
        found = adapters.of(view.spec.identity)
        assert found is not None and found.name == "tiny:old@0.5" and adapters.named(found.name) is found


@pytest.mark.parametrize("name", ["tiny", "tiny:sql", "tiny:sql@0.5"])
async def test_routers_are_told_of_blocks_that_the_worker_holds(tmp_path: Path, name: str) -> None:
    async with adapted(tmp_path, sql="sql") as (service, adapters):
        view = adapters.named(name) or service
        (request,) = view.make_requests(list(range(3, 67)), options(4))
        await collect(view.generate(request))
        held = {block for one in (await service.block_changes(whole=True)).changes for block in one.blocks}
        (text, block, tokens) = text_blocks(view, request, TextPrefixes((7,), (64,)))[0]
        assert (text, tokens) == (7, 64) and block in held
