"""Bodies as Ollama's own client writes them: Go omits few fields, so most of them are empty."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cairn.api.chat.model_choice import seconds_of
from cairn.types.errors import InvalidRequest
from tests.api.ollama.test_chat import lines, post, pulls, service
from tests.api.sockets import site
from tests.service.tiny import make_model, serving

__all__ = ["pulls"]

HI = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}],
}
RESULT = {"role": "tool", "content": "7 degrees", "tool_name": "weather", "tool_call_id": "call_1"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}},
    },
}
DEFAULTS = {
    **{"num_keep": 4, "seed": -1, "num_predict": -1, "top_k": 40, "top_p": 0.9, "tfs_z": 1, "typical_p": 1},
    **{"repeat_last_n": 64, "temperature": 0.8, "repeat_penalty": 1.1, "mirostat_tau": 5, "mirostat_eta": 0.1},
    **{"penalize_newline": True, "num_ctx": 64, "num_batch": 512, "num_gpu": -1, "f16_kv": True, "use_mmap": None},
}
GENERATE: dict[str, Any] = {"model": "scripted", "prompt": "hi", "suffix": "", "system": "", "template": ""}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"model": "scripted", "messages": [HI], "options": None}),
    ("/api/chat", {"model": "scripted", "messages": [HI], "format": "", "options": DEFAULTS}),
    ("/api/chat", {"model": "scripted", "messages": [HI], "format": None, "tools": [TOOL], "keep_alive": "5m0s"}),
    ("/api/chat", {"model": "scripted", "messages": [HI, CALLED, RESULT], "tools": [TOOL], "options": {}}),
    ("/api/chat", {"model": "scripted", "messages": [HI], "think": False, "keep_alive": -1, "truncate": True}),
    ("/api/chat", {"model": "scripted", "messages": [HI], "_debug_render_only": False, "options": None}),
    ("/api/generate", GENERATE | {"options": None}),
    ("/api/generate", GENERATE | {"format": "", "options": DEFAULTS, "context": [104, 105], "raw": False}),
    ("/api/generate", GENERATE | {"options": None, "images": None, "keep_alive": "1h0m0s"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[str(n) for n in range(len(BODIES))])
async def test_empty_fields_count_as_absent(path: str, body: dict[str, Any]) -> None:
    async with site(service()) as at:
        assert lines(await post(at, path, body))[-1]["done"]
        whole = await post(at, path, body | {"stream": False})
        assert whole.status_code == 200 and whole.json()["done"], whole.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_load_request_reports_its_duration(path: str) -> None:
    """`ollama run` begins with such a request."""
    empty = {"messages": None} if path == "/api/chat" else {"prompt": "", "suffix": "", "system": "", "template": ""}
    async with site(service()) as at:
        answer = (await post(at, path, {"model": "scripted", "options": None} | empty)).json()
    assert answer["done"] and answer["done_reason"] == "load"
    assert isinstance(answer["load_duration"], int) and isinstance(answer["total_duration"], int)


@pytest.mark.parametrize(
    "names", [("scripted", ""), ("", "scripted"), ("scripted", "scripted"), ("Scripted:latest", "")]
)
async def test_one_of_two_names_is_empty(names: tuple[str, str], pulls: list[str], tmp_path: Path) -> None:
    both = dict(zip(("model", "name"), names, strict=True))
    more = {"system": "", "template": "", "verbose": False, "options": None}
    async with serving(make_model(tmp_path / "tiny"), served_name="scripted") as served, site(served) as at:
        shown = await post(at, "/api/show", both | more)
        assert shown.status_code == 200 and shown.json()["model_info"], shown.text
        pulled = await post(at, "/api/pull", both | {"insecure": False, "username": "", "password": ""})
        assert lines(pulled)[-1] == {"status": "success"}
        gone = await post(at, "/api/delete", both, "DELETE")
        assert gone.status_code == 409 and "being served" in gone.json()["error"]
        for path, method in (("/api/show", "POST"), ("/api/pull", "POST"), ("/api/delete", "DELETE")):
            none = await post(at, path, {"model": "", "name": ""}, method)
            assert none.status_code == 400 and "model is missing" in none.json()["error"]
    assert not pulls


async def test_a_pull_uses_the_name_that_is_not_empty(pulls: list[str]) -> None:
    async with site(service()) as at:
        for names in (("org/model", ""), ("", "org/model")):
            body = dict(zip(("model", "name"), names, strict=True))
            assert lines(await post(at, "/api/pull", body))[-1] == {"status": "success"}
        different = await post(at, "/api/pull", {"model": "org/one", "name": "org/two"})
        assert different.status_code == 400 and "mean the same" in different.json()["error"]
    assert pulls == ["org/model"] * 2


async def test_a_model_is_shown_by_any_name_that_it_is_asked_by(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    for options, status in (({}, 200), ({"strict_model": True}, 404)):
        async with serving(folder, served_name="mine", **options) as served, site(served) as at:
            for path, body in (
                ("/api/show", {"model": "llama3.2"}),
                ("/api/chat", {"model": "llama3.2", "messages": [HI], "stream": False, "options": {"num_predict": 2}}),
                ("/api/embed", {"model": "llama3.2", "input": ""}),
            ):
                assert (await post(at, path, body)).status_code == status, (path, options)


async def test_names_have_no_case(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with serving(folder, served_name="Qwen3-0.6B", strict_model=True) as served, site(served) as at:
        for name in ("qwen3-0.6b", "QWEN3-0.6B:latest", "Qwen3-0.6B"):
            for path, body in (
                ("/api/show", {"model": name}),
                ("/api/chat", {"model": name, "messages": [HI], "stream": False, "options": {"num_predict": 2}}),
                ("/api/embed", {"model": name, "input": "hi"}),
                ("/api/copy", {"source": name, "destination": name}),
            ):
                assert (await post(at, path, body)).status_code == 200, (path, name)
        other = {"model": "qwen3-0.6b", "messages": [HI], "max_tokens": 2}
        async with at.http() as http:
            assert (await http.post("/v1/chat/completions", json=other)).status_code == 404, "Ollama's names alone"


async def test_a_text_that_is_empty_loads_the_model(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path / "tiny")) as served, site(served) as at:
        for body in ({"input": ""}, {"input": None}, {"input": []}, {}):
            response = await post(at, "/api/embed", {"model": "m", "options": None} | body)
            assert response.status_code == 200, response.text
            assert response.json()["embeddings"] == [] and response.json()["load_duration"] == 0
        older = await post(at, "/api/embeddings", {"model": "m", "prompt": "", "options": None})
        assert older.json() == {"embedding": []}


async def test_capabilities_stand_in_the_list_too(tmp_path: Path) -> None:
    async with serving(make_model(tmp_path / "tiny")) as served, site(served) as at, at.http() as http:
        (listed,) = (await http.get("/api/tags")).json()["models"]
        shown = (await post(at, "/api/show", {"model": listed["name"]})).json()
        assert listed["capabilities"] == shown["capabilities"] == ["completion"]


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        *(("5m0s", 300), ("1h30m", 5400), ("1h30m0s", 5400), ("1.5h", 5400), ("300ms", 0.3), ("2h45m30.5s", 9930.5)),
        *(("0", 0), ("0s", 0), ("-1", math.inf), ("-1s", math.inf), ("-1h30m", math.inf), ("+2s", 2), ("300", 300)),
        *((".5s", 0.5), ("1\u00b5s", 1e-6), ("1\u03bcs", 1e-6), ("10us", 1e-5), ("5ns", 5e-9)),
        *((300, 300), (0, 0), (-1, math.inf), (1.5, 1.5), (-0.5, math.inf)),
    ],
)
def test_durations_as_go_writes_them(duration: Any, seconds: float) -> None:
    assert seconds_of(duration) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "duration", ["", "x", "5 m", "5m x", "1d", "m", "1.2.3", "--1s", "1h" * 9, "9" * 19, True, [], {}, 10**350]
)
def test_invalid_durations(duration: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive must be"):
        seconds_of(duration)
