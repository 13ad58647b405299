"""Queries about where a context's KV is."""

from __future__ import annotations

from pathlib import Path

from tests.service.tiny import collect, request, serving, until


async def test_the_stores_answer_what_is_asked_about_a_context(folder: Path, tmp_path: Path) -> None:
    stored = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    prompt = "a context " * 30
    async with serving(folder, **stored) as service:
        tokens = service.tokenizer.encode(prompt)
        whole, blocks, chunks = len(tokens) // 64 * 64, len(tokens) // 16 * 16, -(-(len(tokens) // 16) // 4)
        await collect(service.generate(request(service, prompt, 2)))
        await service.flush()
        assert service.kv().disk is not None and service.kv().disk.chunks == chunks, "figures of after the flush"
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
