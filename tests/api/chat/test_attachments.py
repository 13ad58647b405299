"""Images and files in histories, in every dialect: a placeholder text stands for them, equal for equal bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.chat import attachments
from cairn.api.chat.schemas import ChatBody
from cairn.config.config import Config
from tests.api.openai.test_responses import keeping
from tests.api.scripted import ScriptedService
from tests.api.sockets import post, site
from tests.service.tiny import make_model, serving

PIXELS = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
DATA = base64.b64encode(PIXELS).decode()
URL = f"data:image/png;base64,{DATA}"
SHORT = hashlib.sha256(PIXELS).hexdigest()[:8]
TEXT = f"[image {SHORT} left out: this model reads text]"
ASK, SAY = {"role": "user", "content": "look"}, {"role": "assistant", "content": "I see"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": "{}"}}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {}}]}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}


def of_openai(*parts: Any) -> list[Any]:
    return [{"type": "text", "text": "see"}, *parts]


IMAGE_URL = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
BLOCK = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}


def responses(*items: Any) -> dict[str, Any]:
    return {"input": list(items), "store": False}


def messages(*given: Any) -> dict[str, Any]:
    return {"messages": list(given), "max_tokens": 8}


OLDER = [
    (CHAT, messages({"role": "user", "content": of_openai(IMAGE_URL)}, SAY, ASK)),
    (CHAT, messages(ASK, CALLED, {"role": "tool", "tool_call_id": "c", "content": of_openai(IMAGE_URL)})),
    (CHAT, messages({"role": "user", "content": of_openai(IMAGE_URL)}, ASK)),
    (MESSAGES, messages({"role": "user", "content": of_openai(BLOCK)}, SAY, ASK)),
    (
        MESSAGES,
        messages(ASK, USED, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": of_openai(BLOCK)}]}),
    ),
    (
        MESSAGES,
        messages(ASK, USED, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "done"}, BLOCK]}),
    ),
    (
        RESPONSES,
        responses(ASK, CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}),
    ),
    (RESPONSES, responses({"role": "user", "content": [INPUT_IMAGE]}, SAY, ASK)),
    (
        RESPONSES,
        responses(ASK, CALL_ITEM, {"type": "function_call_output", "call_id": "c", "output": "done"},
                  {"role": "user", "content": [INPUT_IMAGE]}),
    ),
    (OLLAMA, {"messages": [ASK | {"images": [DATA]}, SAY, ASK], "stream": False}),
    (
        OLLAMA,
        {"messages": [ASK, CALLED, {"role": "tool", "tool_name": "read", "content": "", "images": [DATA]}],
         "stream": False},
    ),
]  # fmt: skip
"""Bodies with an image in their history, which must not end the session."""
NEWEST = [
    (CHAT, messages(SAY, {"role": "user", "content": of_openai(IMAGE_URL)}), "messages[1].content[1]"),
    (MESSAGES, messages({"role": "user", "content": of_openai(BLOCK)}), "messages[0].content[1]"),
    (RESPONSES, responses(SAY, {"role": "user", "content": [INPUT_IMAGE]}), "input[1].content[0]"),
    (OLLAMA, {"messages": [ASK | {"images": [DATA]}], "stream": False}, "messages[0].images[0]"),
    ("/api/generate", {"prompt": "look", "images": [DATA], "stream": False}, "images[0]"),
    ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE_URL]}]}, "messages[0].content[0]"),
    ("/apply-template", {"messages": [{"role": "user", "content": [IMAGE_URL]}]}, "messages[0].content[0]"),
]
"""Bodies with an image in the newest message, and the field that holds it."""


def said(service: ScriptedService) -> str:
    """Return all texts that the template received."""
    return json.dumps(service.prompts[-1][0])


def told(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(("path", "body"), OLDER, ids=[f"{n}-{path}" for n, (path, _) in enumerate(OLDER)])
async def test_an_image_in_the_history_becomes_a_text(path: str, body: Any) -> None:
    service = ScriptedService()
    async with site(service) as at:
        answer = await post(at, path, body)
    assert answer.status_code == 200, answer.text
    assert said(service).count(TEXT) == 1 and DATA not in said(service)
    (warning,) = [one for one in answer.headers.get_list("x-cairn-warning") if "left out" in one]
    assert "images[0] is left out" in warning or "] is left out" in warning
    assert TEXT in warning


@pytest.mark.parametrize(("path", "body", "where"), NEWEST, ids=[path for path, _, _ in NEWEST])
async def test_a_new_image_is_refused_by_default(path: str, body: Any, where: str) -> None:
    refusing, taking = ScriptedService(), ScriptedService()
    async with site(refusing) as at, site(taking, Config(images="text")) as other:
        answer = await post(at, path, body)
        assert answer.status_code == 400 and where in told(answer) and "--images text" in told(answer), answer.text
        if path != "/apply-template":  # the scripted service's /apply-template does not render
            assert (await post(other, path, body)).status_code == 200
            assert TEXT in said(taking)
    assert not refusing.prompts


def test_the_text_depends_on_the_bytes_alone() -> None:
    broken = "\n".join(DATA[at : at + 64] for at in range(0, len(DATA), 64))
    url_safe = base64.urlsafe_b64encode(PIXELS).decode().rstrip("=")
    alike: list[Any] = [
        DATA,
        broken,
        url_safe,
        IMAGE_URL,
        INPUT_IMAGE,
        BLOCK,
        {"type": "image_url", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": DATA}},
        {"type": "input_file", "filename": "a.png", "file_data": URL},
        {"type": "file", "file": {"file_data": DATA, "filename": "b"}},
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
    ]
    assert {attachments.digest(one) for one in alike} == {SHORT}
    url = "https://example.com/a.png"
    addresses: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
    ]
    assert {attachments.digest(address) for address in addresses} == {hashlib.sha256(url.encode()).hexdigest()[:8]}
    assert attachments.digest({"type": "input_image", "file_id": "file_1"}) != SHORT
    assert attachments.digest({"type": "image"}) == attachments.digest({"type": "image"})
    assert attachments.digest("nothing of base64!") != SHORT


async def test_a_turn_after_an_image_computes_nothing_again(tmp_path: Path) -> None:
    """The same image in two dialects, and with base64 wrapped differently, becomes the same tokens, so its KV is
    reused.
    """
    ask, more = "Look at this picture. " * 8, {"role": "user", "content": "and now?"}
    first = [{"role": "user", "content": [{"type": "text", "text": ask}, IMAGE_URL]}, SAY, more]
    other = [{"role": "user", "content": [{"type": "text", "text": ask}, BLOCK]}, SAY, more]
    async with serving(make_model(tmp_path / "tiny")) as service, site(service) as at:
        usage = (await post(at, CHAT, messages(*first))).json()["usage"]
        again = (await post(at, MESSAGES, messages(*other))).json()["usage"]
    assert again["cache_read_input_tokens"] >= usage["prompt_tokens"] // 16 * 16 - 16 > 200


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, "sound"),
        ({"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}}, "file"),
        ({"type": "video_url", "video_url": {"url": "https://example.com/v"}}, "video"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": DATA}}, "file"),
    ],
)
async def test_audio_video_and_files_are_replaced_alike(part: Any, kind: str) -> None:
    service = ScriptedService()
    dialect = MESSAGES if part["type"] == "document" else CHAT
    async with site(service) as at:
        body = messages({"role": "user", "content": [part]}, SAY, ASK)
        assert (await post(at, dialect, body)).status_code == 200
        assert f"[{kind} " in said(service)
        answer = await post(at, dialect, messages({"role": "user", "content": [part]}))
        assert answer.status_code == 400 and "this model reads text" in told(answer)


async def test_documents_of_text_are_read() -> None:
    """Text documents are content, not attachments without text."""
    service = ScriptedService()
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the words"}}
    within = {
        "type": "document",
        "title": "T",
        "source": {"type": "content", "content": [{"type": "text", "text": "a"}]},
    }
    search = {
        "type": "search_result",
        "source": "https://x",
        "title": "found",
        "content": [{"type": "text", "text": "it"}],
    }
    result = {"type": "tool_result", "tool_use_id": "c", "content": [plain, within, search]}
    async with site(service) as at:
        answer = await post(at, MESSAGES, messages(ASK, USED, {"role": "user", "content": [result]}))
        assert answer.status_code == 200, answer.text
    assert "left out" not in said(service) and "x-cairn-warning" not in answer.headers
    assert "the words" in said(service) and "found" in said(service) and "https://x" in said(service)


async def test_a_conversation_and_an_agent_keep_the_text(tmp_path: Path) -> None:
    async with keeping(tmp_path / "agents", make_model(tmp_path / "tiny")) as at, at.http() as http:
        items = [{"role": "user", "content": [INPUT_IMAGE]}, {"role": "assistant", "content": "ok"}]
        made = (await http.post("/v1/conversations", json={"items": items})).json()
        entries = (await http.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()["data"]
        assert entries[0]["content"][0]["text"] == TEXT
        await http.post("/v1/agents", json={"id": "a", "messages": [{"role": "user", "content": [IMAGE_URL]}, SAY]})
        turn = {"messages": [ASK], "max_tokens": 2}
        assert (await http.post("/v1/agents/a/turns", json=turn)).status_code == 200
        new = {"messages": [{"role": "user", "content": [IMAGE_URL]}]}
        assert (await http.post("/v1/agents/a/turns", json=new)).status_code == 400


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("user", {"type": "input_text", "text": "words"}),
        ("assistant", {"type": "output_text", "text": "words", "annotations": []}),
        ("assistant", {"type": "refusal", "refusal": "words"}),
    ],
)
async def test_parts_of_the_other_dialect_become_texts(role: str, part: Any) -> None:
    service = ScriptedService()
    async with site(service) as at:
        answer = await post(at, CHAT, messages({"role": role, "content": [part]}, ASK))
        assert answer.status_code == 200, answer.text
        assert service.prompts[0][0][0]["content"] == [{"type": "text", "text": "words"}]
        wrong = await post(at, CHAT, messages({"role": role, "content": [{"type": part["type"], "refusal": 1}]}))
        assert wrong.status_code == 400


async def test_unsupported_ollama_features_are_reported() -> None:
    async with site(ScriptedService()) as at:
        for more, field in (
            ({"template": "{{ .Prompt }}"}, "template"),
            ({"images": [DATA]}, "images"),
            ({"images": [1]}, "images"),
            ({"images": DATA}, "images"),
        ):
            answer = await post(at, "/api/generate", {"prompt": "hi", "stream": False} | more)
            assert answer.status_code == 400 and field in told(answer), more
        body = {"prompt": "hi", "stream": False, "template": "", "images": []}
        assert (await post(at, "/api/generate", body)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/scripted", "/api/tags", "/api/show"])
async def test_models_say_what_they_read(path: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with serving(folder, served_name="scripted") as service, site(service) as at, at.http() as http:
        if path == "/api/show":
            answer = (await http.post(path, json={"model": "scripted"})).json()
        else:
            answer = (await http.get(path)).json()
            (answer,) = answer.get("data") or answer.get("models") or [answer]
    assert answer["input_modalities"] == ["text"]


@pytest.mark.parametrize(
    ("path", "body", "pick"),
    [
        (CHAT, messages({"role": "user", "content": "cut \ud83d"}), lambda prompts: prompts[-1][0][0]["content"]),
        (MESSAGES, messages({"role": "user", "content": "cut \ud83d"}), lambda prompts: prompts[-1][0][0]["content"]),
        (RESPONSES, responses({"role": "user", "content": "cut \ud83d"}), lambda prompts: prompts[-1][0][0]["content"]),
        (OLLAMA, {"messages": [{"role": "user", "content": "cut \ud83d"}], "stream": False},
         lambda prompts: prompts[-1][0][0]["content"]),
    ],
)  # fmt: skip
async def test_half_a_surrogate_is_replaced_with_a_warning(path: str, body: Any, pick: Callable[[Any], str]) -> None:
    service = ScriptedService()
    async with site(service) as at, at.http() as http:
        raw = json.dumps(body).encode()
        assert b"\\ud83d" in raw
        answer = await http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert pick(service.prompts) == "cut \ufffd" and "surrogate" in answer.headers["x-cairn-warning"]


async def test_large_images_are_digested_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * attachments.INLINE}}
    body = {"messages": [{"role": "user", "content": [part]}, SAY, {"role": "user", "content": [IMAGE_URL]}, SAY]}
    digest, threads = attachments.digest, set()

    def noted(given: Any) -> str:
        threads.add(threading.get_ident())
        return digest(given)

    monkeypatch.setattr(attachments, "digest", noted)
    await attachments.leave_out(None, ChatBody, body, Config())
    assert threads and threading.get_ident() not in threads
    assert TEXT in json.dumps(body)


@pytest.mark.parametrize("kind", [{}, [], 1, None])
async def test_types_that_are_no_texts_are_refused_beside_an_image(kind: Any) -> None:
    async with site(ScriptedService()) as at:
        for message in (
            {"role": "user", "type": kind, "content": of_openai(IMAGE_URL)},
            {"role": "user", "content": of_openai(IMAGE_URL, {"type": kind})},
        ):
            assert (await post(at, CHAT, messages(message))).status_code == 400


@pytest.mark.parametrize("prompt", [5, ["a"], {}])
async def test_a_prompt_that_is_no_text_is_refused_beside_an_image(prompt: Any) -> None:
    async with site(ScriptedService(), Config(images="text")) as at:
        answer = await post(at, "/api/generate", {"prompt": prompt, "images": [DATA]})
        assert answer.status_code == 400, answer.text
