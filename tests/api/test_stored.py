"""Stored KV over HTTP and on the command line."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cairn.cli import main
from cairn.config.config import Config
from cairn.config.values import Secret
from cairn.frontend.service import Service
from cairn.types.errors import Unavailable
from cairn.types.stats import KvStats, Swept, TierStats
from tests.api.scripted import ScriptedService
from tests.api.sockets import site

PATHS = ("/v1/cache/flush", "/v1/cache/scrub", "/v1/cache/prune")


class Stored(ScriptedService):
    """A service with fixed figures of its stores."""

    given_up = False

    def kv(self) -> KvStats:
        disk = TierStats(chunks=1200, bytes=9_600_000, budget=10**9, pinned=7, damaged=2, trouble="the disk sulks")
        return KvStats(disk=disk, queued=3, loaded=640, load_seconds=0.25)

    async def flush(self) -> None:
        if self.given_up:
            raise Unavailable("12 chunks of KV were given up before they were stored", retry_after=1.0)

    async def scrub(self) -> Swept:
        return Swept(checked=1200, removed=2, bytes=16_000, unreadable=3)

    async def prune(self) -> Swept:
        return Swept(checked=1200, removed=1000, bytes=8_000_000)


async def test_stored_kv_can_be_listed_flushed_scrubbed_and_pruned() -> None:
    service = Stored()
    async with site(service) as at, at.http() as http:
        answer = (await http.get("/v1/cache")).json()
        assert answer["disk"]["chunks"] == 1200 and answer["disk"]["trouble"] == "the disk sulks"
        assert answer["ram"] is None and answer["queued"] == 3
        assert (await http.post("/v1/cache/flush")).json() == answer
        assert (await http.post("/v1/cache/scrub")).json() == {
            "object": "scrub",
            "checked": 1200,
            "removed": 2,
            "removed_bytes": 16_000,
            "unreadable": 3,
        }
        assert (await http.post("/v1/cache/prune")).json()["removed"] == 1000
        assert (await http.get("/v1/cache/flush")).status_code == 405
        for path in PATHS:
            assert (await http.post(path, json={})).status_code == 200
            refused = await http.post(path, json={"disk": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "disk"
            assert (await http.post(path, content=b"{")).status_code == 415
            assert (await http.post(path, json=[])).status_code == 400
        service.given_up = True
        late = await http.post("/v1/cache/flush")
        assert late.status_code == 503 and "12 chunks" in late.json()["error"]["message"]


async def test_a_foreign_page_cannot_send_an_order_without_a_body() -> None:
    """A request without a body needs no preflight, so its Origin decides."""
    config = Config(cors_origins=("https://app.example",))
    async with site(Stored(), config) as at, at.http() as http:
        for origin, status in (
            ("https://evil.example", 403),
            ("null", 403),
            ("https://app.example", 200),
            (f"http://{http.base_url.netloc.decode()}", 200),
            (None, 200),
        ):
            response = await http.post("/v1/cache/flush", headers={"origin": origin} if origin else {})
            assert response.status_code == status, origin
        behind_a_proxy = {"origin": "https://cairn.example", "sec-fetch-site": "same-origin"}
        assert (await http.post("/v1/cache/flush", headers=behind_a_proxy)).status_code == 200


async def test_cache_routes_need_the_admin_key() -> None:
    config = Config(api_key=(Secret("user"),), admin_key=Secret("admin"))
    async with site(Stored(), config) as at, at.http() as http:
        for key, status in (("user", 401), ("none", 401), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await http.get("/v1/cache", headers=headers)).status_code == status
            for path in PATHS:
                assert (await http.post(path, headers=headers)).status_code == status


async def test_the_command_line_says_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with site(Stored()) as at:

        async def run(order: str) -> dict[str, str]:
            with pytest.raises(SystemExit) as left:
                await asyncio.to_thread(main, ["cache", order, "--host", at.url])
            assert not left.value.code
            lines = capsys.readouterr().out.splitlines()
            return {name.strip(): value for name, _, value in (line.partition("\t") for line in lines)}

        for order in ("stats", "flush"):
            shown = await run(order)
            assert shown["disk"] == "1,200 chunks, 9.6 MB of 1.0 GB"
            assert shown["damaged"] == "2 chunks" and shown["trouble"] == "the disk sulks"
            assert shown["host memory"] == "not used"
            assert shown["loaded"] == "640 tokens in 0.25 s"
        (tmp_path / "cairn" / "packed").mkdir(parents=True)
        (tmp_path / "cairn" / "packed" / "one.packed").write_bytes(bytes(2000))
        monkeypatch.setenv("CAIRN_KEEP_PACKED_GB", "3")
        assert (await run("stats"))["packed weights"] == "1 files here, 2.0 kB of 3.0 GB"
        (tmp_path / "cairn" / "packed" / "one.packed").unlink()
        scrubbed = await run("scrub")
        assert (scrubbed["removed"], scrubbed["not readable now"]) == ("2 chunks, 16.0 kB", "3 chunks")
        shown = await run("prune")
        assert shown["removed"] == "1,000 chunks, 8.0 MB" and shown["packed weights"] == "0 files removed here, 0 bytes"


def test_packed_weights_removed_by_prune_are_reported_without_a_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old = tmp_path / "cairn" / "packed" / "old.packed"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(2000))
    os.utime(old, (1, 1))
    with pytest.raises(SystemExit) as left:
        main(["cache", "prune", "--host", "http://127.0.0.1:9"])
    assert left.value.code and not old.exists()
    assert capsys.readouterr().out == "packed weights\t1 files removed here, 2.0 kB\n"


async def test_a_real_server_stores_flushes_and_finds_damage(tmp_path: Path) -> None:
    """Through the worker: an answer's KV is flushed, corrupted on disk, found by a scrub, and removed."""
    config = Config(model="demo", engine="fake", kv_dir=str(tmp_path / "kv"))
    service = await Service.start(config, in_process=True)
    try:
        async with site(service, config) as at, at.http() as http:
            body = {"model": service.name, "prompt": "remember this " * 100, "max_tokens": 4}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            disk = (await http.post("/v1/cache/flush")).json()["disk"]
            files = [path for path in (tmp_path / "kv").glob("models/*/?/*") if path.name.count(".") in (4, 5)]
            assert disk["budget"] > 0 and files
            deepest = max(files, key=lambda path: int(path.name.split(".")[3], 16))
            data = bytearray(deepest.read_bytes())
            data[-1] ^= 1
            deepest.write_bytes(data)
            answer = (await http.post("/v1/cache/scrub")).json()
            assert (answer["checked"], answer["removed"]) == (len(files), 1)
            assert not deepest.exists()
            assert (await http.post("/v1/cache/prune")).json()["removed"] == 0
    finally:
        await service.close()
