"""What a worker tells of the blocks that it holds: all at first, then what changed, and nothing while nobody asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.cluster.kv_events import block_hash
from cairn.frontend.service import Service
from cairn.kv.pool.prefix import Chain, root
from cairn.types.stats import BlockChanges, Medium
from cairn.worker import block_journal
from tests.service.tiny import collect, request, serving

PROMPT = "a context " * 30


def held(told: BlockChanges, before: dict[Medium, set[int]] | None = None) -> dict[Medium, set[int]]:
    """Apply changes as a reader does."""
    found: dict[Medium, set[int]] = {} if before is None or told.whole else before
    for one in told.changes:
        mine = found.setdefault(one.medium, set())
        mine |= set(one.blocks) if one.stored else set()
        mine -= set() if one.stored else set(one.blocks)
    return found


def blocks_of(service: Service, prompt: str, salt: bytes = b"") -> list[int]:
    """The hashes of a prompt's full blocks, from their keys."""
    layout, tokens = service.info.layout, service.tokenizer.encode(prompt)
    chain = Chain(root(service.info.identity, salt, layout.groups[0], layout.block_tokens), layout.block_tokens)
    return [block_hash(chain.key(n, tokens)) for n in range(len(tokens) // layout.block_tokens)]


async def test_it_tells_all_blocks_first_and_then_what_changed(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, kv_dir=str(tmp_path / "kv"), kv_load="always") as service:
        await collect(service.generate(request(service, PROMPT, 2)))
        told = await service.block_changes()
        assert told.whole
        found, blocks = held(told), blocks_of(service, PROMPT)
        assert set(blocks) <= found["GPU"]
        first = next(one for one in told.changes if one.medium == "GPU")
        assert first.parent is None and list(first.blocks[: len(blocks)]) == blocks, "in order, from the beginning"
        assert (await service.block_changes()) == BlockChanges()
        other = "another context " * 20
        await collect(service.generate(request(service, other, 2)))
        told = await service.block_changes()
        assert not told.whole and set(blocks_of(service, other)) <= held(told)["GPU"]
        await service.flush()
        found = held(await service.block_changes(), found)
        assert set(blocks) <= found["DISK"], "stored by the disk"
        await service.evict(service.tokenizer.encode(PROMPT))
        found = held(await service.block_changes(), found)
        assert not set(blocks) & found["GPU"] and set(blocks) <= found["DISK"]
        await service.evict(service.tokenizer.encode(PROMPT), disk=True)
        assert not set(blocks) & held(await service.block_changes(), found)["DISK"]


async def test_a_worker_that_starts_tells_what_the_disk_has(folder: Path, tmp_path: Path) -> None:
    options = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    async with serving(folder, **options) as service:
        await collect(service.generate(request(service, PROMPT, 2)))
        await service.flush()
        blocks = blocks_of(service, PROMPT)
    async with serving(folder, **options) as service:
        found = held(await service.block_changes())
        assert set(blocks) <= found["DISK"] and not found.get("GPU")


async def test_nothing_is_noted_while_nobody_follows(folder: Path) -> None:
    async with serving(folder) as service:
        await service.block_changes()
        await service.unfollow_blocks()
        await collect(service.generate(request(service, PROMPT, 2)))
        told = await service.block_changes()
        assert told.whole and set(blocks_of(service, PROMPT)) <= held(told)["GPU"]


async def test_lost_changes_make_the_next_answer_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder) as service:
        assert (await service.block_changes()).whole
        monkeypatch.setattr(block_journal, "MOST_BLOCKS", 4)
        await collect(service.generate(request(service, PROMPT, 2)))
        told = await service.block_changes()
        assert told.whole, "a reader must not think that it knows all"


async def test_of_many_blocks_no_more_are_told_than_a_reader_remembers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_journal, "MOST_BLOCKS", 8)
    async with serving(folder, kv_dir=str(tmp_path / "kv")) as service:
        await collect(service.generate(request(service, PROMPT, 2)))
        await service.flush()
        assert len(blocks_of(service, PROMPT)) > 8
        told = await service.block_changes(whole=True)
        assert 0 < sum(len(one.blocks) for one in told.changes) <= 8


async def test_tenants_have_no_block_in_common(folder: Path) -> None:
    async with serving(folder) as service:
        await collect(service.generate(request(service, PROMPT, 2, salt=b"one")))
        first = held(await service.block_changes())["GPU"]
        await collect(service.generate(request(service, PROMPT, 2, salt=b"two")))
        second = held(await service.block_changes())["GPU"]
        assert first and second and not first & second
        assert set(blocks_of(service, PROMPT, b"one")) <= first and set(blocks_of(service, PROMPT, b"two")) <= second
