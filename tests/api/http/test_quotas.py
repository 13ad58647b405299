"""Quotas of tenants: agents and bytes on disk, independent of other tenants."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.app import build_app
from cairn.api.http import quotas
from cairn.config.config import Config, limits_of
from cairn.config.values import Secret, TenantKeys, TenantLimits
from tests.agents.house import talking_model
from tests.api.homes import home
from tests.api.sockets import Site
from tests.rag.document_files import docx
from tests.service.tiny import make_embedder

TURN = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
LIMITS = {
    "ada": TenantLimits(max_agents=2),
    "bob": TenantLimits(max_disk_mib=1, input_tokens_per_minute=100_000, output_tokens_per_minute=30),
}
TENANTS = tuple(TenantKeys(name, (Secret(f"key-of-{name}"),), one) for name, one in LIMITS.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = talking_model(tmp_path_factory.mktemp("quotas") / "tiny")
    make_embedder(made.parent / "embedder")
    return made


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def refused(answer: httpx.Response, limit: str) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error["code"], error["param"]) == (403, "quota_exceeded", limit)


async def test_two_tenants_have_their_own_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with home(folder, tenants=TENANTS) as (house, http):
        house.agents.bound(limits_of(Config(tenants=TENANTS)))

        async def post(name: str, path: str, **body: Any) -> httpx.Response:
            return await http.post(path, json=body, headers=key(name))

        # agents: ada may have two, however they are made; bob any number
        assert (await post("ada", "/v1/agents", id="one")).status_code == 201
        assert (await post("ada", "/v1/agents", id="two")).status_code == 201
        assert refused(await post("ada", "/v1/agents", id="three"), "max_agents")
        assert refused(await post("ada", "/v1/agents/one/fork", id="three"), "max_agents")
        for number in range(3):
            assert (await post("bob", "/v1/agents", id=f"b{number}")).status_code == 201
        assert (await http.delete("/v1/agents/one", headers=key("ada"))).status_code == 200
        assert (await post("ada", "/v1/agents", id="three")).status_code == 201
        chat = await http.post("/v1/chat/completions", json=TURN, headers={**key("ada"), "x-cairn-agent": "four"})
        assert chat.status_code == 200  # it is answered, but creates no agent

        # bytes on disk: bob may store one MiB
        assert 0 < await house.agents.bytes_of("bob") < 10_000
        monkeypatch.setattr(quotas, "FRESH_SECONDS", 0.0)
        monkeypatch.setattr(quotas, "MIB", 2000)
        long = {**TURN, "messages": [{"role": "user", "content": "many words " * 100}]}
        answers = [await post("bob", "/v1/agents/b0/turns", **long) for _ in range(3)]
        assert answers[0].status_code == 200 and refused(answers[-1], "max_disk_mib")
        assert refused(await post("bob", "/v1/teams", id="t", members=[{"name": "a"}]), "max_disk_mib")
        for path in ("/v1/conversations", "/v1/teams/t/tool_results", "/v1/workflows/runs/r/resume"):
            assert refused(await post("bob", path), "max_disk_mib")
        assert (await post("ada", "/v1/agents/two/turns", **long)).status_code == 200
        held = await house.agents.bytes_of("bob")
        assert held > 2000 > await house.agents.bytes_of("nobody") == 0
        assert (await post("bob", "/v1/chat/completions", **TURN)).status_code == 200  # which stores nothing of his
        assert (await http.get("/v1/agents/b0/turns", headers=key("bob"))).status_code == 200
        for number in range(3):
            assert (await http.delete(f"/v1/agents/b{number}", headers=key("bob"))).status_code == 200
        assert await house.agents.bytes_of("bob") == 0
        assert (await post("bob", "/v1/agents", id="again")).status_code == 201


FULL = {"max_disk_mib": 10}
HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {kind}\r\n{length}\r\n\r\n"
FORM = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
FORM += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.bin"\r\n\r\n%s\r\n--x--\r\n'


class Sent:
    """An upload of which half has been sent."""

    async def begin(self, web: Site, path: str, kind: str, body: bytes, chunked: bool) -> None:
        self.reader, self.writer = await web.raw()
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        half = len(body) // 2
        parts = body[:half], body[half:]
        if chunked:
            parts = tuple(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)  # type: ignore[assignment]
        self.rest = parts[1] + (b"0\r\n\r\n" if chunked else b"")
        self.writer.write(HEAD.format(path=path, kind=kind, length=length).encode() + parts[0])
        await self.writer.drain()

    async def end(self) -> bytes:
        """Send the other half and return the answer."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(self.rest)
            await self.writer.drain()
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


@pytest.mark.parametrize("chunked", [False, True])
async def test_uploads_at_once_do_not_pass_a_quota_together(folder: Path, tmp_path: Path, chunked: bool) -> None:
    """Each upload used to be admitted while the others were on their way, since none of their bytes was on the disk
    yet.
    """
    body = FORM % bytes(4 << 20)
    async with home(folder, agents_dir=str(tmp_path / "agents"), **FULL) as (house, http):
        sent = [Sent() for _ in range(4)]
        for one in sent:
            await one.begin(house.web, "/v1/files", "multipart/form-data; boundary=x", body, chunked)  # type: ignore[attr-defined]
        said = await asyncio.gather(*(one.end() for one in sent))
        taken = sum(b" 200 OK" in one[:20] for one in said)
        assert taken == 2 or (chunked and taken == 1)  # without lengths, all three may be well on their way at once
        assert any(b"MiB of yours are on their way, and this brings" in one and b"max_disk_mib" in one for one in said)
        files = (await http.get("/v1/files")).json()["data"]
        assert [file["bytes"] for file in files] == [4 << 20] * taken
        # deletion frees its bytes at once, and refused uploads hold none
        assert (await http.delete(f"/v1/files/{files[0]['id']}")).status_code == 200
        again = {"files": {"file": bytes((14 - 4 * taken) << 20)}, "data": {"purpose": "user_data"}}
        assert (await http.post("/v1/files", **again)).status_code == 200
        assert refused(await http.post("/v1/files", files={"file": b"x"}, data=again["data"]), "max_disk_mib")


async def test_documents_count_by_the_size_that_is_stored(folder: Path, tmp_path: Path) -> None:
    """A small file may contain a long text: what counts is the size that is stored, whichever route it comes by."""
    async with home(folder, folder.parent / "embedder", agents_dir=str(tmp_path / "agents"), max_disk_mib=1) as (
        _,
        http,
    ):
        await http.post("/v1/collections", json={"id": "c"})
        data = docx("<w:p><w:r><w:t>" + "many words " * 50_000 + "</w:t></w:r></w:p>")
        assert len(data) < 1 << 16
        form = {"files": {"file": ("a.docx", data)}, "data": {}}
        assert refused(await http.post("/v1/collections/c/documents", **form), "max_disk_mib")
        text = {"name": "a.txt", "text": "many words " * 10_000}
        paths = ["/v1/collections/c/documents"] * 8
        said = await asyncio.gather(*(http.post(path, json=text) for path in paths))
        assert {one.status_code for one in said} == {201, 403}
        kept = [one.json()["id"] for one in said if one.status_code == 201]
        assert refused(await http.post(paths[0], json=text), "max_disk_mib")
        assert (await http.delete(f"/v1/collections/c/documents/{kept[0]}")).status_code == 200
        assert (await http.post(paths[0], json=text)).status_code == 201

        file = await http.post("/v1/files", files={"file": ("a.docx", data)}, data={"purpose": "assistants"})
        store = (await http.post("/v1/vector_stores", json={})).json()["id"]
        put = (await http.post(f"/v1/vector_stores/{store}/files", json={"file_id": file.json()["id"]})).json()
        while put["status"] == "in_progress":
            put = (await http.get(f"/v1/vector_stores/{store}/files/{put['id']}")).json()
        assert put["status"] == "failed" and "max_disk_mib" in put["last_error"]["message"]


async def test_data_stored_before_a_start_counts(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"agents_dir": str(tmp_path / "agents"), **FULL}
    form = {"files": {"file": bytes(9 << 20)}, "data": {"purpose": "user_data"}}
    async with home(folder, **options) as (_, http):
        assert (await http.post("/v1/files", **form)).status_code == 200
    async with home(folder, **options) as (_, http):
        assert refused(await http.post("/v1/files", **form), "max_disk_mib")


async def test_an_imported_agent_counts_and_its_kv_does_not(folder: Path, tmp_path: Path) -> None:
    async with home(folder, agents_dir=str(tmp_path / "agents"), **FULL) as (house, http):
        await http.post("/v1/agents", json={"id": "a"})
        data = (await http.get("/v1/agents/a/export")).content
        kind = {"content-type": "application/octet-stream"}
        quotas_of = house.web.app.state.quotas  # type: ignore[attr-defined]
        async with quotas_of.room("default", 10 * quotas.MIB - len(data) - 2000):
            said = await http.post("/v1/agents/import?id=b", content=data, headers=kind)
            assert said.status_code == 201
        async with quotas_of.room("default", 10 * quotas.MIB - len(data) - 2000):
            said = await http.post("/v1/agents/import?id=d", content=data + bytes(3000), headers=kind)
            assert refused(said, "max_disk_mib")


KEEP_NOTHING = frozenset(
    (
        "/api/chat",
        "/api/copy",
        "/api/embed",
        "/api/embeddings",
        "/api/generate",
        "/api/pull",
        "/api/show",
        "/apply-template",
        "/v1/cache/share",
        "/completion",
        "/detokenize",
        "/embed",
        "/embedding",
        "/infill",
        "/lora-adapters",
        "/tokenize",
        "/v1/admin/drain",
        "/v1/admin/models/load",
        "/v1/admin/models/swap",
        "/v1/admin/models/unload",
        "/v1/admin/reload",
        "/v1/agents/x/evict",
        "/v1/agents/x/pin",
        "/v1/agents/x/prefetch",
        "/v1/agents/x/rollback",
        "/v1/agents/x/unpin",
        "/v1/cache/flush",
        "/v1/cache/prune",
        "/v1/cache/scrub",
        "/v1/chat/completions",
        "/v1/chat/completions/input_tokens",
        "/v1/collections/x/ask",
        "/v1/collections/x/search",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models/load",
        "/v1/models/unload",
        "/v1/requests/x/cancel",
        "/v1/rerank",
        "/v1/reranking",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/v1/responses/x/cancel",
        "/v1/score",
        "/v1/teams/x/interrupt",
        "/v1/teams/x/rollback",
        "/v1/vector_stores/x",
        "/v1/vector_stores/x/file_batches/x/cancel",
        "/v1/vector_stores/x/files/x",
        "/v1/vector_stores/x/search",
        "/v1/workflows/check",
        "/v1/workflows/runs/x/interrupt",
        "/v2/rerank",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    )
)
"""Routes whose POST stores nothing for a tenant, or only a mark, or a replacement for what was stored."""


def test_each_route_that_stores_something_has_a_quota() -> None:
    routes = [route for route in build_app(None, Config()).router.routes if route.method == "POST"]
    taken = {re.sub(r"{[a-z]+}", "x", route.public_path) for route in routes}
    bounded = {re.sub(r"{[a-z]+}", "x", route.public_path) for route in routes if route.keeps}
    assert not bounded & KEEP_NOTHING
    assert taken - bounded == KEEP_NOTHING


async def test_tokens_in_and_out_have_limits_of_their_own(folder: Path) -> None:
    async with home(folder, tenants=TENANTS) as (_, http):
        for _ in range(8):
            last = await http.post("/v1/chat/completions", json={**TURN, "max_tokens": 8}, headers=key("bob"))
        assert last.status_code == 429 and "output tokens of a minute (output_tokens_per_minute)" in last.text
        assert last.headers["x-ratelimit-remaining-output-tokens"] == "0"
        assert last.headers["x-ratelimit-limit-input-tokens"] == "100000" and int(last.headers["retry-after"]) >= 1
        message = {**TURN, "model": "m"}
        del message["ignore_eos"]
        other = await http.post("/v1/messages", json=message, headers=key("bob"))
        assert other.headers["anthropic-ratelimit-output-tokens-limit"] == "30"
        assert (await http.post("/v1/chat/completions", json=TURN, headers=key("ada"))).status_code == 200


class Still:
    """A clock that stands still, so that no bucket refills."""

    def now(self) -> float:
        return 1000.0


async def test_tokens_count_whatever_they_are_computed_for(folder: Path, tmp_path: Path) -> None:
    keys = (TenantKeys("bob", (Secret("key-of-bob"),), TenantLimits(tokens_per_minute=1_000_000)),)
    async with home(folder, folder.parent / "embedder", tenants=keys, agents_dir=str(tmp_path / "agents")) as (
        house,
        http,
    ):
        rates = house.web.app.state.rates  # type: ignore[attr-defined]
        rates._clock = Still()
        used = 0

        async def spent() -> int:
            nonlocal used
            before, used = used, 1_000_000 - int(rates._tenants["bob"].buckets["tokens"].left(1000.0))
            return used - before

        async def post(path: str, **body: Any) -> Any:
            answer = await http.post(path, json=body, headers=key("bob"))
            assert answer.status_code in (200, 201, 202), answer.text
            return answer.json()

        several = await post("/v1/chat/completions", **TURN, n=3)
        assert await spent() == several["usage"]["total_tokens"] and several["usage"]["completion_tokens"] == 12
        vectors = await post("/v1/embeddings", input=["one", "two words"])
        assert await spent() == vectors["usage"]["total_tokens"] > 0
        await post("/v1/agents", id="a")
        assert await spent() == 0
        assert await post("/v1/agents/a/turns", **TURN) and await spent() > 4
        await post("/v1/collections", id="c")
        await post("/v1/collections/c/documents", name="a.txt", text="A cairn is a heap of stones. " * 10)
        assert await spent() > 200
        await post("/v1/collections/c/ask", query="What is a cairn?", min_score=-1, max_tokens=4)
        assert await spent() > 200
        members = [{"name": name, "role": "Talk.", "max_tokens": 4} for name in ("ada", "cy")]
        await post("/v1/teams", id="t", members=members)
        assert await spent() == 0
        assert await post("/v1/teams/t/rounds", content="Begin.") and await spent() > 50
        await post("/v1/teams/t/votes", question="Which?", options=["one", "two"])
        assert await spent() > 50
        node = {"id": "n", "prompt": "Talk", "role": "planner", "sampling": {"max_tokens": 4}}
        await post("/v1/workflows/runs", workflow={"name": "w", "nodes": [node]})
        assert await spent() > 4
        made = await post("/v1/responses", input="hello", background=True, max_output_tokens=4)
        while made["status"] in ("queued", "in_progress"):
            made = (await http.get(f"/v1/responses/{made['id']}", headers=key("bob"))).json()
        assert await spent() == made["usage"]["total_tokens"] > 4
