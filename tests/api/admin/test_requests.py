"""Requests that run: the list, cancellation, and the routes of health, metrics and models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cairn.config.config import Config
from cairn.types.outputs import Delta
from cairn.types.stats import KvStats
from tests.api.scripted import ScriptedService
from tests.api.sockets import answer, request_bytes, site

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


async def test_models() -> None:
    async with site(ScriptedService(name="org/name")) as at, at.http() as http:
        listed = (await http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["org/name"]
        assert listed["object"] == "list" and listed["data"][0]["object"] == "model"
        one = (await http.get("/v1/models/org/name")).json()
        assert one == listed["data"][0] and one["device"] == {"name": "cpu", "description": "the CPU: kernels"}
        unknown = await http.get("/v1/models/gpt-4")
        assert unknown.status_code == 404 and "org/name" in unknown.json()["error"]["message"]


async def test_tokenize_and_detokenize() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        reply = (await http.post("/tokenize", json={"prompt": "h\u00e9"})).json()
        assert reply == {"tokens": [0x68, 0xC3, 0xA9], "count": 3, "max_model_len": 128}
        assert (await http.post("/detokenize", json={"tokens": [*reply["tokens"], 256]})).json() == {
            "prompt": "h\u00e9<256>",
            "content": "h\u00e9<256>",
        }
        chat = (await http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        assert chat["tokens"] == [104, 105]
        long = "x" * 16_384  # the most text that is tokenized without a check of its length first
        assert (await http.post("/tokenize", json={"prompt": long})).json()["count"] == 16_384
        for body in ({"prompt": long + "x"}, {"messages": [{"role": "user", "content": long}] * 2}):
            beyond = await http.post("/tokenize", json=body)
            assert beyond.json()["error"]["code"] == "context_length_exceeded" and "128" in beyond.text
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
            ("/tokenize", {"prompt": "a", "tools": []}),
            ("/tokenize", {"prompt": "a", "promt": 1}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            assert (await http.post(path, json=body)).status_code == 400, body
        assert (await http.post("/tokenize", json={"prompt": "a", "model": "other"})).status_code == 200


async def test_tokenize_takes_llama_servers_fields() -> None:
    service = ScriptedService()
    service.tokenizer.encode_prompt = lambda text, special=True: [257, *text.encode()]  # type: ignore[method-assign]
    async with site(service) as at, at.http() as http:

        async def tokens(**body: Any) -> Any:
            response = await http.post("/tokenize", json=body)
            return response.json()["tokens"] if response.status_code == 200 else response.status_code

        assert await tokens(content="hi") == [104, 105]
        assert await tokens(content="hi", add_special=True) == [257, 104, 105]
        assert await tokens(content="<256>", add_special=True, parse_special=False) == [257, *b"<256>"]
        assert await tokens(content="a<256>b") == [97, 256, 98]
        assert await tokens(content="<256>", parse_special=False) == list(b"<256>")
        pieces = await tokens(content="h\u00e9", with_pieces=True)
        assert pieces == [{"id": 104, "piece": "h"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
        pair = [{"id": 257, "piece": "<257>"}, {"id": 104, "piece": "h"}]
        assert await tokens(content="h", add_special=True, with_pieces=True) == pair
        assert (await tokens(messages=CHAT["messages"], with_pieces=True))[0] == {"id": 104, "piece": "h"}
        long = await http.post("/tokenize", json={"content": "x" * 16_385})
        assert long.json()["error"]["code"] == "context_length_exceeded" and long.json()["error"]["param"] == "content"
        for wrong in ({"content": "a", "prompt": "a"}, {"prompt": "a", "add_special": True}, {"content": 1}):
            assert await tokens(**wrong) == 400, wrong


async def test_tokenize_takes_vllms_fields() -> None:
    service = ScriptedService()
    service.tokenizer.encode_raw = lambda text, suffix, special=True: [257, *text.encode()]  # type: ignore
    async with site(service) as at, at.http() as http:

        async def asked(**body: Any) -> Any:
            return await http.post("/tokenize", json=body)

        assert (await asked(prompt="hi", add_special_tokens=True)).json()["tokens"] == [257, 104, 105]
        assert (await asked(prompt="hi", add_special_tokens=False)).json()["tokens"] == [104, 105]
        chat = {"messages": CHAT["messages"], "add_generation_prompt": True, "add_special_tokens": False}
        assert (await asked(**chat, reasoning_effort="none", return_token_strs=False)).status_code == 200
        assert service.prompts[-1][-1] == {"enable_thinking": False}
        assert (await asked(content="hi", add_special_tokens=True)).status_code == 400
        assert (await asked(**chat | {"add_generation_prompt": False})).status_code == 400


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
    """Any web page may send a POST without a body; a body that asks for something unsupported must not be half
    obeyed.
    """
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
        del service.streams[0]  # as if this request had ended long before the others
        report = (await http.get(path)).json()
        assert [choice["index"] for choice in report["choices"]] == [1, 2, 3]


async def test_health_and_metrics() -> None:
    """Known failure 46: readiness answers 503 where it should, and the metrics are the service's own."""
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
    """Known failures 1, 46: the port answers while the model loads, and /health/ready says so with a 503."""
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
        at.app.state.draining = True
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "7"
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200


async def test_health_answers_as_llama_servers_does() -> None:
    async with site(None) as at, at.http() as http:
        for path in ("/health", "/health/startup"):
            assert (await http.get(path)).status_code == 503
        loading = (await http.get("/health")).json()
        assert loading["status"] == "loading model" and loading["error"]["message"] == "Loading model"
        assert (await http.get("/version")).json()["version"]
        service = at.app.service = ScriptedService()  # type: ignore[assignment]
        assert (await http.get("/health")).json() == {"status": "ok", "reasons": [], "troubles": [], "devices": ["cpu"]}
        assert (await http.head("/health")).status_code == 200
        service.info.cpu_experts = "all"
        assert (await http.get("/health")).json()["cpu_experts"] == ["scripted"]
        service.reasons = ["requests hold 95% of the KV pool"]
        full = await http.get("/health")
        assert full.status_code == 503 and full.json()["status"] == "degraded" and full.headers["retry-after"]
        assert full.json()["error"]["message"] == "requests hold 95% of the KV pool"
        assert (await http.get("/health/startup")).json() == {"status": "started"}


async def test_a_router_learns_the_role_the_speeds_and_the_queue() -> None:
    async with site(None, Config(role="decode")) as at, at.http() as http:
        unknown = {"role": "decode", "computes": None, "loads": None, "queue_seconds": 0.0, "shares": False}
        assert (await http.get("/health/role")).json() == unknown, "while it loads"
        service = at.app.service = ScriptedService()  # type: ignore[assignment]
        assert (await http.get("/health/role")).json() == unknown | {"queue_seconds": 0.5}
        service.metrics.token_seconds = 0.002
        service.metrics.kv = KvStats(loaded=3000, load_seconds=1.5)
        body = (await http.get("/health/role")).json()
        assert (body["computes"], body["loads"]) == (500.0, 2000.0)


async def test_props() -> None:
    async with site(ScriptedService(), Config(max_running=7, model="org/name:Q4_1")) as at, at.http() as http:
        props = (await http.get("/props")).json()
        assert (props["total_slots"], props["model_path"], props["model_alias"]) == (7, "org/name:Q4_1", "scripted")
        assert props["chat_template"] == "enable_thinking" and props["build_info"].startswith("cairn ")
        assert (props["bos_token"], props["eos_token"]) == ("<257>", "<256>")
        defaults = props["default_generation_settings"]
        assert defaults["n_ctx"] == 128 and defaults["params"]["temperature"] == 0.7
        assert (defaults["sources"]["temperature"], defaults["sources"]["top_k"]) == ("model", "default")
        assert (await http.post("/props", json={})).status_code == 405


async def test_routes_without_v1() -> None:
    async with site(ScriptedService(name="org/name")) as at, at.http() as http:
        assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
        assert (await http.get("/models/org/name")).json()["id"] == "org/name"
        chat = await http.post("/chat/completions", json=CHAT | {"model": "org/name"})
        assert chat.json()["choices"][0]["message"]["content"] == "hi"
        text = await http.post("/completions", json={"model": "org/name", "prompt": "a"})
        assert text.json()["choices"][0]["text"] == "hi"
        assert (await http.get("/chat/completions")).status_code == 405


async def test_a_wrong_base_url_gets_a_hint() -> None:
    async with site(ScriptedService()) as at:
        for path, meant in (
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
            ("//v1/chat/completions", "/v1/chat/completions"),
            ("/v1//models", "/v1/models"),
            ("/openai/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions//", "/v1/chat/completions"),
            ("/v1/tokenize", "/tokenize"),
            ("/v1/health/live", "/health/live"),
            ("/agents", "/v1/agents"),
            ("/metrics//", "/metrics"),
        ):
            # Over a raw socket: httpx reads a path that begins with two slashes as a host.
            reader, writer = await at.raw()
            writer.write(request_bytes("GET", path))
            status, _, body = await answer(reader)
            message = json.loads(body)["error"]["message"]
            assert status == 404 and f"it is {meant}" in message, (path, message)
            assert ("the base URL is http://localhost/v1" in message) == meant.startswith("/v1")


async def test_a_404_speaks_the_dialect_of_its_path() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        for path in ("/v1/messages/batches", "/v1/complete"):
            response = await http.post(path, json={})
            body = response.json()
            assert response.status_code == 404 and body["type"] == "error"
            assert body["error"]["type"] == "not_found_error" and "/v1/messages" in body["error"]["message"]
            assert body["request_id"] == response.headers["x-request-id"]
        for path in ("/api/create", "/api/blobs/sha256:0", "/api/anything"):
            response = await http.post(path, json={})
            assert response.status_code == 404 and isinstance(response.json()["error"], str), path


async def test_routes_of_other_servers_get_a_sentence() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        for path, said in (
            ("/embed_all", "/v1/embeddings makes vectors"),
            ("/v1/images/generations", "images are neither made nor edited here"),
            ("/v1/audio/transcriptions", "speech"),
            ("/v1/responses/x", "/v1/responses"),
            ("/pooling", "/v1/rerank"),
            ("/v1/batches/batch-1", "runs no batches"),
            ("/slots/0", "kept without being asked"),
        ):
            message = (await http.post(path, json={})).json()["error"]["message"]
            assert message.startswith(f"there is no route {path}: ") and said in message, message
        assert (await http.get("/v1/nothing")).json()["error"]["message"] == "there is no route /v1/nothing"


async def test_unknown_routes_and_methods() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        for path in (
            "/v1",
            "/v1/",
            "/v1/chat",
            "/v1/chat/completions//",
            "/v1/models//",
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
