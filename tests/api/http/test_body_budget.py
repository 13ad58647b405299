"""Memory for request bodies: bounded for the server and for each tenant."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cairn.api.http.call import BodyBudget
from cairn.api.native.agents import MAX_IMPORTS
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from cairn.types.errors import Overloaded, Unavailable
from cairn.types.outputs import Delta
from tests.agents.house import talking_model
from tests.api.homes import open_house
from tests.api.scripted import ScriptedService, done
from tests.api.sockets import Site, site

TENANTS = tuple(TenantKeys(name, (Secret(name * 4),)) for name in ("ada", "bob", "eve"))
OCTETS = {"content-type": "application/octet-stream"}


def test_a_tenant_has_its_share_and_all_have_the_total() -> None:
    budget = BodyBudget(10, 6)
    budget.take("ada", 6)
    with pytest.raises(Overloaded, match=r"hold 6 bytes .* one tenant is 6"):
        budget.take("ada", 1)
    budget.take("bob", 4)
    with pytest.raises(Unavailable, match="as many bytes of request bodies as it may, 10") as refused:
        budget.take("eve", 1)
    assert refused.value.retry_after
    budget.give("ada", 6)
    budget.take("eve", 6)
    assert budget.held == 10


def chat(size: int) -> bytes:
    return json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "x" * size}]}).encode()


async def half_sent(at: Site, key: str, size: int) -> None:
    """Send a chat request without its last byte."""
    _, writer = await at.raw()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {size + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * size)
    await writer.drain()


async def held(at: Site, size: int) -> None:
    for _ in range(500):
        if at.app.bodies.held >= size:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{at.app.bodies.held} bytes are held, not {size}")


async def test_half_sent_bodies_of_one_tenant_leave_the_others_theirs() -> None:
    service: Any = ScriptedService()
    async with site(service, Config(tenants=TENANTS, max_bodies_mib=2, max_body_mib=1)) as at, at.http() as http:

        async def ask(name: str, size: int) -> Any:
            headers = {"authorization": f"Bearer {name * 4}", "content-type": "application/json"}
            return await http.post("/v1/chat/completions", content=chat(size), headers=headers)

        await half_sent(at, "adaadaadaada", 900_000)
        await held(at, 900_000)
        refused = await ask("ada", 200_000)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "2", refused.text
        assert "max_bodies_mib" in refused.json()["error"]["message"]
        assert (await ask("bob", 100)).status_code == 200
        await half_sent(at, "bobbobbobbob", 1_000_000)
        await held(at, 1_900_000)
        assert (await ask("eve", 300_000)).status_code == 503
        at.writers[0].transport.abort()  # ada's client disconnects, which frees its bytes
        for _ in range(500):
            if at.app.bodies.held < 1_900_000:
                break
            await asyncio.sleep(0.01)
        assert (await ask("eve", 100_000)).status_code != 503


async def test_a_body_is_held_until_its_answer_has_ended() -> None:
    events: list[Any] = [Delta(text="a", tokens=(1,)), 0.3, done()]
    service: Any = ScriptedService(lambda request: events)
    async with site(service, Config(max_bodies_mib=1)) as at, at.http() as http:
        body = json.dumps(
            {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "user": "x" * 90}
        ).encode()
        asked = asyncio.ensure_future(
            http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        )
        await held(at, len(body))
        assert (await asked).status_code == 200
        for _ in range(500):
            if not at.app.bodies.held:
                break
            await asyncio.sleep(0.01)
        assert at.app.bodies.held == 0


@pytest.mark.parametrize("agent", ["", "coder"])
async def test_a_compressed_body_gives_back_all_that_it_took(agent: str) -> None:
    """Without keys an agent has a share of its own, while its bodies count against the client's address."""
    service: Any = ScriptedService()
    async with site(service, Config(max_bodies_mib=2, max_body_mib=1)) as at, at.http() as http:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        headers |= {"x-cairn-agent": agent} if agent else {}
        packed = gzip.compress(chat(1) + b" " * 900_000)
        for _ in range(4):
            asked = await http.post("/v1/chat/completions", content=packed, headers=headers)
            # The scripted server keeps no agents, which it says once the body is read.
            assert asked.status_code == 200 or "keeps no agents" in asked.text, asked.text
        for _ in range(500):
            if not at.app.bodies.held:
                break
            await asyncio.sleep(0.01)
        assert at.app.bodies.held == 0 and not at.app.bodies._held, "no tenant keeps a count of 0"


@pytest.mark.parametrize("where", ["open", "write"])
async def test_an_import_refused_by_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class Full(io.BytesIO):
        def __init__(self, **_: Any) -> None:
            if where == "open":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().__init__()

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with open_house(talking_model(tmp_path / "tiny")) as (_, _, http):
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "TemporaryFile", Full)
            answer = await http.post("/v1/agents/import", content=b"x", headers=OCTETS)
        assert answer.status_code == 503, answer.text
        assert "the body cannot be kept in" in answer.text and "No space left on device" in answer.text
        again = await http.post("/v1/agents/import", content=b"x", headers=OCTETS)
        assert again.status_code == 400 and "not an exported agent" in again.text, "and frees its slot"


async def test_imports_go_to_the_disk_and_are_bounded_by_number(tmp_path: Path) -> None:
    folder = talking_model(tmp_path / "tiny")
    async with open_house(folder) as (_, web, http):
        for _ in range(MAX_IMPORTS):
            _, writer = await web.raw()
            head = "POST /v1/agents/import HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
            writer.write(f"{head}content-length: 3000001\r\n\r\n".encode() + bytes(3_000_000))
            await writer.drain()
        assert web.app.bodies.held == 0
        refused = await http.post("/v1/agents/import", content=b"x", headers=OCTETS)
        assert refused.status_code == 429 and f"{MAX_IMPORTS} imports" in refused.text
        web.writers[0].transport.abort()
        for _ in range(500):
            answer = await http.post("/v1/agents/import", content=b"x", headers=OCTETS)
            if answer.status_code != 429:
                break
            await asyncio.sleep(0.01)
        assert answer.status_code == 400 and "not an exported agent" in answer.text
