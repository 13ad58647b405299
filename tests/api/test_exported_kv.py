"""KV that travels with an exported agent: none of its context is computed again, and every byte is checked."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from cairn.api.http.auth import salts
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from cairn.kv.disk.portable_kv import MAGIC
from cairn.kv.disk.store import DiskStore
from tests.agents.house import house, talking_model
from tests.api.sockets import site

OCTETS = {"content-type": "application/octet-stream"}
KEY = {"authorization": "Bearer " + "eve" * 4}
LONG = "You remember what was said. " * 20


@contextlib.asynccontextmanager
async def server(folder: Path, store: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server that stores KV in this folder; `options` are fields of its configuration."""
    config = Config(**options)
    kept = {"kv_dir": str(store), "kv_load": "always"}
    async with house(folder, salts(config), **kept) as at, site(at.service, config) as web, web.http() as http:
        web.app.state.attribution.agents = at.agents
        yield http


def ask(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def exported(http: httpx.AsyncClient, query: str = "?kv=true") -> bytes:
    """Return an agent with two turns as a file."""
    await http.post("/v1/agents", json={"id": "ada", "system": LONG})
    for text in ("one " * 40, "two " * 40):
        assert (await http.post("/v1/agents/ada/turns", json=ask(text))).status_code == 200
    file = await http.get("/v1/agents/ada/export" + query)
    assert file.status_code == 200, file.text
    return file.content


async def imported(http: httpx.AsyncClient, file: bytes, query: str = "?kv=true", **headers: str) -> dict[str, Any]:
    made = await http.post("/v1/agents/import" + query, content=file, headers=OCTETS | headers)
    assert made.status_code == 201, made.text
    kv: dict[str, Any] = made.json().get("kv", {})
    return kv


async def next_turn(http: httpx.AsyncClient, **headers: str) -> tuple[Any, dict[str, Any]]:
    """Return the agent's next answer and where the KV of its context came from."""
    answer = await http.post("/v1/agents/ada/turns", json=ask("three"), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"], answer.json()["usage"]["cairn"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("model"))


async def test_an_agents_kv_goes_along_and_only_new_tokens_are_computed(folder: Path, tmp_path: Path) -> None:
    """A tenant of another server has other keys, and its KV is found nevertheless."""
    async with server(folder, tmp_path / "a") as http:
        file = await exported(http)
        said, _ = await next_turn(http)
    tenants = (TenantKeys("eve", (Secret("eve" * 4),)),)
    async with server(folder, tmp_path / "b", tenants=tenants) as http:
        kv = await imported(http, file, **KEY)
        assert kv["why"] == "" and kv["chunks"] > 4 and kv["bytes"] > 0
        again, cache = await next_turn(http, **KEY)
    assert again == said
    assert (kv["chunks"] - 1) * 64 < cache["disk"] <= kv["chunks"] * 64 and cache["computed"] < 64 + 16
    async with server(folder, tmp_path / "c") as http:
        assert "kv=true was not said" in (await imported(http, file, ""))["why"]
        again, cache = await next_turn(http)
    assert again == said and cache["disk"] == 0


async def test_kv_of_another_model_is_ignored_and_reported(folder: Path, tmp_path: Path) -> None:
    other = talking_model(tmp_path / "other")
    save_file({"model.norm.weight": np.full(16, 3.0, dtype=np.float32)}, other / "model.safetensors")
    async with server(folder, tmp_path / "a") as http:
        file = await exported(http)
    async with server(other, tmp_path / "b") as http:
        kv = await imported(http, file)
        assert kv == {"chunks": 0, "bytes": 0, "why": "the KV is of a model that is not loaded here"}
        _, cache = await next_turn(http)
        assert cache["disk"] == 0


async def test_damage_costs_only_the_damaged_chunks(folder: Path, tmp_path: Path) -> None:
    async with server(folder, tmp_path / "a") as http:
        file = await exported(http)
        said, _ = await next_turn(http)
    whole = []
    at = len(MAGIC)
    while length := struct.unpack_from("<I", file, at)[0]:
        whole.append((at + 4, length))
        at += 4 + length
    place, length = whole[2]
    for number, spot in enumerate((place + 10, place + length // 2, place + length - 1)):
        bent = bytearray(file)
        bent[spot] ^= 1
        async with server(folder, tmp_path / f"b{number}") as http:
            kv = await imported(http, bytes(bent))
            assert kv["chunks"] == 2 and "damaged" in kv["why"], "nor are its extensions"
            again, cache = await next_turn(http)
            assert again == said and cache["disk"] == 128
    async with server(folder, tmp_path / "swapped") as http:
        pieces = [file[start - 4 : start + size] for start, size in whole]
        swapped = b"".join([MAGIC, pieces[0], pieces[2], pieces[1], *pieces[3:], file[at:]])
        kv = await imported(http, swapped)
        again, _ = await next_turn(http)
        assert again == said and kv["chunks"] == 2
        assert kv["why"], "a chunk that comes before its prefix is refused, and so are its extensions"
        for cut in (len(MAGIC) + 2, place + 5):
            bad = await http.post("/v1/agents/import?kv=true&id=x", content=file[:cut], headers=OCTETS)
            assert bad.status_code == 400 and "damaged or cut off" in bad.text
        for query in ("?kv=1", "?id=", "?name=x"):
            assert (await http.post("/v1/agents/import" + query, content=file, headers=OCTETS)).status_code == 400
        assert (await http.get("/v1/agents/ada/export?kv=perhaps")).status_code == 400


async def test_chunks_of_impossible_sizes_are_refused_before_they_are_read(folder: Path, tmp_path: Path) -> None:
    """Millions of small chunks would hold up all imports, and a large one the worker that decompresses it."""
    async with server(folder, tmp_path / "a") as http:
        file = await exported(http)
    small = MAGIC + (struct.pack("<I", 1) + b"x") * 1000 + file[len(MAGIC) :]
    large = MAGIC + struct.pack("<I", 2 << 20) + bytes(2 << 20) + file[len(MAGIC) :]
    async with server(folder, tmp_path / "b") as http:
        for query in ("?kv=true", ""):
            bad = await http.post("/v1/agents/import" + query, content=small, headers=OCTETS)
            assert bad.status_code == 400 and "damaged or cut off" in bad.text
        read: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiskStore, "_checked", lambda self, data, keyed: read.append(len(data)))
            assert (await imported(http, large))["chunks"] == 0
        assert read and max(read) < 2 << 20


async def test_exported_kv_is_bounded_in_bytes(folder: Path, tmp_path: Path) -> None:
    """The beginning of the context is exported. An agent of a server without stored KV is exported without any."""
    async with house(folder, kv_dir=str(tmp_path / "a")) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", LONG)
        most = 4000
        file = b"".join([piece async for piece in at.agents.export("default", "ada", kv_bytes=most)])
        rest = b"".join([piece async for piece in at.agents.export("default", "ada")])
        assert 1000 < len(file) - len(rest) < most + 100 and file.startswith(MAGIC)
    async with server(folder, tmp_path / "c") as http:
        plain = await exported(http, "?kv=false")
        assert not plain.startswith(MAGIC) and await imported(http, plain, "?id=eve") == {}
        assert "the file has none" in (await imported(http, plain, "?id=bob&kv=true"))["why"]
