"""Security headers of every kind of answer: a browser neither sniffs nor runs what stands in it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cairn.api.http.call import SAFE
from tests.agents.house import talking_model
from tests.api.homes import home
from tests.workflows.test_checks import node

SAMPLING = {"temperature": 0, "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "model": "m", **SAMPLING}
POLICY = dict(SAFE)[b"content-security-policy"].decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("browser") / "tiny")


def safe(answer: httpx.Response) -> bool:
    policies = answer.headers.get_list("content-security-policy")
    return answer.headers.get_list("x-content-type-options") == ["nosniff"] and policies == [POLICY]


async def test_every_answer_has_its_own_content_type(folder: Path, tmp_path: Path) -> None:
    options = {"agents_dir": str(tmp_path / "agents"), "cors_origins": ("https://page.example",)}
    async with home(folder, **options) as (house, http):
        flow = {"name": "<script>", "nodes": [node("a", "Talk", sampling=SAMPLING)]}
        run = (await http.post("/v1/workflows/runs", json={"workflow": flow})).json()["id"]
        await http.post("/v1/agents", json={"id": "ada"})
        await http.post("/v1/teams", json={"id": "t", "members": [{"name": "ada"}]})
        html = {"file": ("x.html", b"<script>alert(1)</script>")}
        file = (await http.post("/v1/files", files=html, data={"purpose": "user_data"})).json()["id"]
        kinds = set()
        for path in (
            "/",
            "/health",
            "/metrics",
            "/v1/models",
            "/openapi.json",
            f"/v1/files/{file}/content",
            "/v1/agents/ada/export",
            "/v1/teams/t/transcript?format=markdown",
            *(f"/v1/workflows/runs/{run}/graph?format={form}" for form in ("svg", "mermaid", "png")),
        ):
            answer = await http.get(path)
            assert answer.status_code in (200, 400) and safe(answer), (path, answer.headers)  # png may be missing
            kinds.add(answer.headers["content-type"].partition(";")[0])
        for path in ("/v1/chat/completions", "/api/chat", "/v1/messages"):
            answer = await http.post(path, json=CHAT | {"stream": True})
            assert answer.status_code == 200 and safe(answer), (path, answer.text)
            kinds.add(answer.headers["content-type"].partition(";")[0])
        assert {"image/svg+xml", "text/markdown", "application/octet-stream", "text/event-stream"} <= kinds
        assert "application/x-ndjson" in kinds and "text/plain" in kinds
        for path in ("/nothing", "/v1/agents/nobody"):
            assert safe(await http.get(path))
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        preflight = await http.options("/v1/models", headers=asked)
        assert preflight.status_code == 200 and safe(preflight)

        # an error of the parser, which never reaches the application
        reader, writer = await house.web.raw()  # type: ignore[attr-defined]
        writer.write(b"GET /<script> nonsense\r\n\r\n")
        said = (await reader.read()).lower()
        assert b" 400 " in said and all(name + b": " + value.lower() in said for name, value in SAFE)
        writer.close()
