"""Routes beside generation."""

from __future__ import annotations

import asyncio
from typing import Any

from scripted import ScriptedService
from sockets import site

from cairn.config import Config
from cairn.types import Delta

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


async def test_models() -> None:
    async with site(ScriptedService(name="org/name")) as at, at.http() as http:
        listed = (await http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["org/name"]
        assert listed["object"] == "list" and listed["data"][0]["object"] == "model"
        assert (await http.get("/v1/models/org/name")).json() == listed["data"][0]
        unknown = await http.get("/v1/models/gpt-4")
        assert unknown.status_code == 404 and "org/name" in unknown.json()["error"]["message"]


async def test_tokenize_and_detokenize() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        found = (await http.post("/tokenize", json={"prompt": "h\u00e9"})).json()
        assert found == {"tokens": [0x68, 0xC3, 0xA9], "count": 3, "max_model_len": 128}
        assert (await http.post("/detokenize", json={"tokens": [*found["tokens"], 256]})).json() == {
            "prompt": "h\u00e9<256>"
        }
        chat = (await http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        assert chat["tokens"] == [104, 105]
        long = "x" * 16_384  # as much as is encoded without a closer look
        assert (await http.post("/tokenize", json={"prompt": long})).json()["count"] == 16_384
        for body in ({"prompt": long + "x"}, {"messages": [{"role": "user", "content": long}] * 2}):
            beyond = await http.post("/tokenize", json=body)
            assert beyond.json()["error"]["code"] == "context_length_exceeded" and "128" in beyond.text
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
            ("/tokenize", {"prompt": "a", "tools": []}),
            ("/tokenize", {"prompt": "a", "what": 1}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            assert (await http.post(path, json=body)).status_code == 400, body
        assert (await http.post("/tokenize", json={"prompt": "a", "model": "other"})).status_code == 404


async def test_control_tokens_in_a_raw_text_are_control_tokens_unless_told_otherwise() -> None:
    async with site(ScriptedService()) as at, at.http() as http:

        async def tokens(**body: Any) -> list[int]:
            return list((await http.post("/tokenize", json=body)).json()["tokens"])

        plain = [*b"a<256>"]
        assert await tokens(prompt="a<256>") == await tokens(prompt="a<256>", parse_special=True) == [*b"a", 256]
        assert await tokens(prompt="a<256>", parse_special=False) == plain
        assert await tokens(prompt="<256>" * 3000) == [256] * 3000
        text = (await http.post("/detokenize", json={"tokens": [97, 256, 98]})).json()["prompt"]
        assert await tokens(prompt=text) == [97, 256, 98]
        for value in (True, False):
            refused = await http.post("/tokenize", json={"messages": CHAT["messages"], "parse_special": value})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "parse_special"


async def test_a_request_can_be_seen_and_cancelled_by_either_id() -> None:
    service = ScriptedService(lambda request: [Delta(text="hi", tokens=(1,)), 60.0])
    async with site(service) as at, at.http() as http:
        for n in (1, 3):
            service.streams.clear()
            running = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"n": n}))
            while len(service.streams) < n:
                await asyncio.sleep(0.01)
            number = min(stream.request.id for stream in service.streams)
            for id in (f"{number:016x}", f"chatcmpl-{number:016x}"):
                report = (await http.get(f"/v1/requests/{id}")).json()
                assert report["state"] == "running" and len(report["choices"]) == n
                assert report["choices"][0]["text"] == "hi" and report["completion_tokens"] == 2 * n
            cancelled = await http.post(f"/v1/requests/chatcmpl-{number:016x}/cancel")
            assert cancelled.status_code == 200 and cancelled.json()["cancelled"] is True
            response = await running
            assert response.status_code == 499 and response.json()["error"]["code"] == "cancelled"
            assert response.headers["x-request-id"] == f"{number:016x}"
            again = await http.post(f"/v1/requests/{number:016x}/cancel")
            assert again.status_code == 200 and again.json()["cancelled"] is False
        for id in ("0000000000000bad", "1", "x" * 16, "chatcmpl-", "00000000000000001"):
            assert (await http.get(f"/v1/requests/{id}")).status_code == 404


async def test_a_cancellation_takes_no_body_and_none_from_a_foreign_page() -> None:
    """Any page may send a request without a body, and one that says what is not built must not be half obeyed."""
    service = ScriptedService(lambda request: [Delta(text="hi", tokens=(1,)), 60.0])
    async with site(service) as at, at.http() as http:
        running = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        while not service.streams:
            await asyncio.sleep(0.01)
        path = f"/v1/requests/{service.streams[0].request.id:016x}"
        json_type = {"content-type": "application/json"}
        for status, sent in (
            (403, {"headers": {"origin": "https://evil.example"}}),
            (400, {"json": {"choice": 0}}),
            (400, {"content": b"{{{", "headers": json_type}),
            (400, {"content": b"[]", "headers": json_type}),
        ):
            assert (await http.post(f"{path}/cancel", **sent)).status_code == status, sent
            assert (await http.get(path)).json()["state"] == "running"
        unknown = await http.post("/v1/requests/0000000000000bad/cancel", json={})
        assert unknown.status_code == 404
        assert (await http.post(f"{path}/cancel", json={})).json()["cancelled"] is True
        assert (await running).status_code == 499


async def test_a_report_counts_every_prompt_once_and_keeps_the_index_of_each_choice() -> None:
    service = ScriptedService()
    async with site(service) as at, at.http() as http:
        body = {"model": "scripted", "prompt": ["abc", "defgh"], "n": 2}
        response = await http.post("/v1/completions", json=body)
        path = f"/v1/requests/{response.headers['x-request-id']}"
        report = (await http.get(path)).json()
        assert report["prompt_tokens"] == 8 and report["completion_tokens"] == 8
        del service.streams[0]  # as one that ended long before the others
        report = (await http.get(path)).json()
        assert [choice["index"] for choice in report["choices"]] == [1, 2, 3]


async def test_health_and_metrics() -> None:
    """Known failure 46: readiness is not always 200, and the metrics are the service's."""
    service = ScriptedService()
    async with site(service) as at, at.http() as http:
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).json() == {"status": "ready", "reasons": [], "troubles": []}
        service.failing = ["the KV store cannot write"]
        limping = await http.get("/health/ready")
        assert limping.status_code == 200 and limping.json()["troubles"] == ["the KV store cannot write"]
        service.reasons = ["the KV pool is full"]
        busy = await http.get("/health/ready")
        assert busy.status_code == 503 and busy.json()["reasons"] == ["the KV pool is full"]
        metrics = await http.get("/metrics")
        assert metrics.status_code == 200 and metrics.headers["content-type"].startswith("text/plain")
        assert "cairn:" in metrics.text


async def test_before_the_model_is_loaded() -> None:
    """Known failures 1, 46: the port answers while the model loads, and says that it is not ready."""
    async with site(None) as at, at.http() as http:
        assert (await http.get("/health/live")).status_code == 200
        ready = await http.get("/health/ready")
        assert ready.status_code == 503 and ready.json()["reasons"] == ["the model is still being loaded"]
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "unavailable" and refused.headers["x-request-id"]
        at.app.service = ScriptedService()  # type: ignore[assignment]
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_while_draining() -> None:
    async with site(ScriptedService(), Config(shutdown_grace=7)) as at, at.http() as http:
        at.app.draining = True
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "7"
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200


async def test_unknown_routes_and_methods() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        for path in (
            "/",
            "/v1",
            "/v1/",
            "/v1/chat",
            "/v1/chat/completions/",
            "/v1/models/",
            "/v1/requests/",
            "/x\u00e9",
        ):
            missing = await http.get(path)
            assert missing.status_code == 404 and missing.json()["error"]["message"], path
        wrong = await http.get("/v1/chat/completions")
        assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
        assert wrong.json()["error"] == {
            "message": "/v1/chat/completions is not for GET",
            "type": "invalid_request_error",
            "param": None,
            "code": "method_not_allowed",
        }
        assert (await http.post("/health/live")).status_code == 405
        head = await http.head("/v1/models")
        assert head.status_code == 200 and head.content == b""
