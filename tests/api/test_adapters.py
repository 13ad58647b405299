"""Adapters as clients see them: named in every dialect, loaded and unloaded under load, with KV of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.config.config import Config
from cairn.config.values import AdapterOptions
from cairn.frontend import adapter_services
from cairn.frontend.service import Service
from tests.adapter_files import random_peft
from tests.api.process import served
from tests.api.sockets import site
from tests.service.tiny import config, make_model
from tests.tiny_models import write_model

HELLO = [{"role": "user", "content": "hello"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 6, "temperature": 0},
    "/v1/completions": {"prompt": "hello", "max_tokens": 6, "temperature": 0},
    "/v1/messages": {"messages": HELLO, "max_tokens": 6, "temperature": 0},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16, "temperature": 0},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 6, "temperature": 0}},
    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 6, "temperature": 0}},
    "/completion": {"prompt": "hello", "n_predict": 6, "temperature": 0},
}


def fake_adapters(folder: Path, names: str) -> tuple[AdapterOptions, ...]:
    """Make the fake engine accept any files as adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names.split():
        (folder / name).write_text(f"the adapter {name}")
    return tuple(AdapterOptions(name=name, path=str(folder / name)) for name in names.split())


@contextlib.asynccontextmanager
async def at(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server with the adapters `sql` and `poems`."""
    adapters = fake_adapters(folder / "adapters", "sql poems")
    settings = config(make_model(folder / "tiny"), adapters=adapters, kv_disk=False, **options)
    service = await Service.start(settings, in_process=True)
    try:
        async with site(service, settings) as web, web.http() as http:
            yield http
    finally:
        await service.close()


def said(answer: Any) -> str:
    """Return all text of an answer in any dialect: everything except ids, times and the model's name."""
    if isinstance(answer, dict):
        kept = ("choices", "message", "content", "text", "output", "response", "thinking", "reasoning_content")
        return "|".join(said(one) for name, one in sorted(answer.items()) if name in kept)
    return "|".join(map(said, answer)) if isinstance(answer, list) else str(answer)


@pytest.mark.parametrize("path", DIALECTS)
async def test_every_dialect_names_an_adapter_behind_the_model(tmp_path: Path, path: str) -> None:
    async with at(tmp_path) as http:
        results = {}
        for name in ("tiny", "tiny:sql", "tiny:poems", "sql", "tiny:sql"):
            answer = await http.post(path, json={**DIALECTS[path], "model": name})
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            if path != "/api/chat" and path != "/api/generate":
                assert whole["model"] == ("tiny" if name == "tiny" else f"tiny:{name.rpartition(':')[2]}")
            assert results.setdefault(name, said(whole)) == said(whole), "the same name gives the same answer"
        assert results["sql"] == results["tiny:sql"]
        assert len(set(results.values())) == 3, results
        unknown = await http.post(path, json={**DIALECTS[path], "model": "tiny:prose"})
        assert unknown.status_code == 404 and "poems, sql" in unknown.text


async def test_adapted_models_are_listed(tmp_path: Path) -> None:
    async with at(tmp_path) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["tiny", "tiny:poems", "tiny:sql"]
        assert [one.get("parent") for one in listed] == [None, "tiny", "tiny"]
        assert (await http.get("/v1/models/tiny:sql")).json()["id"] == "tiny:sql"
        tags = (await http.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["tiny", "tiny:poems", "tiny:sql"]
        answer = (await http.get("/lora-adapters")).json()
        assert [(one["id"], one["name"], one["scale"]) for one in answer] == [(0, "sql", 0.0), (1, "poems", 0.0)]
        assert answer[0]["path"] == str(tmp_path / "adapters" / "sql")


async def chat(http: httpx.AsyncClient, text: str = "hello there, how are you today?", **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": 4 * text}], "max_tokens": 8, "temperature": 0, **fields}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    cached_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached_tokens


async def test_kv_is_found_by_the_same_adapter_at_the_same_scale_alone(tmp_path: Path) -> None:
    uses: list[dict[str, Any]] = [
        *({"model": "tiny"}, {"model": "tiny:sql"}, {"model": "tiny:poems"}, {"model": "tiny:sql@0.5"}),
        *({"model": "tiny:sql+poems"}, {"model": "tiny:poems+sql@2"}),
    ]
    async with at(tmp_path) as http:
        cold = [await chat(http, **use) for use in uses]
        warm = [await chat(http, **use) for use in uses]
    assert [cached(one) for one in cold] == [0] * len(uses)
    assert all(cached(one) >= 64 for one in warm)
    texts = [one["choices"][0]["message"]["content"] for one in cold]
    assert texts == [one["choices"][0]["message"]["content"] for one in warm]
    assert len(set(texts)) == len(uses)


async def test_scales_apply_to_requests_that_name_the_model_alone(tmp_path: Path) -> None:
    async with at(tmp_path) as http:
        plain, sql = await chat(http, model="tiny"), await chat(http, model="tiny:sql")
        assert (await http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}])).json() == {"success": True}
        assert [one["scale"] for one in (await http.get("/lora-adapters")).json()] == [1.0, 0.0]
        set_for_all = await chat(http, model="tiny")
        assert said(set_for_all) == said(sql) != said(plain)
        assert cached(set_for_all) > 0, "it is the same adapter at the same scale"
        assert said(await chat(http, model="tiny", lora=[])) == said(plain)
        assert said(await chat(http, model="tiny", lora=[{"id": 0, "scale": 0}])) == said(plain)
        half = await chat(http, lora=[{"id": 0, "scale": 0.5}])
        assert said(half) == said(await chat(http, model="tiny:sql@0.5"))
        await http.post("/lora-adapters", json=[])
        assert said(await chat(http, model="tiny")) == said(plain)


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/lora-adapters", [{"id": 7, "scale": 1}], 400, "no adapter with the id 7; loaded are: 0, 1"),
    ("/lora-adapters", [{"id": 0, "scale": 1e9}], 400, "a scale is from -100 to 100"),
    ("/lora-adapters", [{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], 400, "listed twice"),
    ("/lora-adapters", {"id": 0}, 400, "adapters"),
    ("/lora-adapters", "no list", 400, "JSON object"),
    ("/lora-adapters", [{"id": 0}], 400, "scale"),
    ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "nowhere"}, 400, "nowhere: the file is missing"),
    ("/v1/load_lora_adapter", {"lora_name": "a b", "lora_path": "x"}, 400, "lora_name"),
    ("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "x"}, 400, "the model's own name"),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "x", "model": "no"}, 404, "there is no model"),
    ("/v1/unload_lora_adapter", {"lora_name": "prose"}, 404, "no adapter 'prose'; loaded are: sql, poems"),
    ("/v1/chat/completions", {"messages": HELLO, "lora": [{"id": 9, "scale": 1}]}, 400, "no adapter with the id 9"),
    ("/v1/chat/completions", {"messages": HELLO, "lora": [{"id": 0}]}, 400, "lora"),
    ("/v1/chat/completions", {"messages": HELLO, "lora": 3}, 400, "lora"),
    ("/v1/chat/completions", {"messages": HELLO, "model": "tiny:sql+nothing"}, 400, "nothing is no adapter"),
    ("/v1/chat/completions", {"messages": HELLO, "model": "tiny:sql+sql"}, 400, "sql is no adapter"),
    ("/v1/chat/completions", {"messages": HELLO, "model": "tiny:sql@x"}, 400, "sql is no adapter"),
]


async def test_what_cannot_be_is_refused_with_its_field(tmp_path: Path) -> None:
    async with at(tmp_path) as http:
        for path, body, status, text in REFUSED:
            answer = await http.post(path, json=body)
            assert (answer.status_code, text in answer.text) == (status, True), (path, body, answer.text)
    bare = config(make_model(tmp_path / "bare"), kv_disk=False)
    service = await Service.start(bare, in_process=True)
    try:
        async with site(service, bare) as web, web.http() as http:
            body = {"messages": HELLO, "lora": [{"id": 0, "scale": 1}]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400 and "has no adapters; load one first" in answer.text
            assert (await http.post("/v1/chat/completions", json=body | {"lora": []})).status_code == 200
            assert (await http.get("/lora-adapters")).json() == []
    finally:
        await service.close()


async def test_adapters_come_and_go_while_others_run(tmp_path: Path) -> None:
    (tmp_path / "prose").write_text("prose")
    (tmp_path / "other").write_text("other")
    place = {"lora_name": "prose", "lora_path": str(tmp_path / "prose")}
    async with at(tmp_path) as http:
        others = [asyncio.create_task(chat(http, f"{n} bottles", model="tiny:sql", max_tokens=200)) for n in range(4)]
        await asyncio.sleep(0.05)
        loaded = (await http.post("/v1/load_lora_adapter", json=place)).json()
        assert (loaded["model"], loaded["id"], loaded["success"]) == ("tiny:prose", 2, True)
        assert (await http.post("/v1/load_lora_adapter", json=place)).status_code == 200, "the same once more"
        taken = await http.post("/v1/load_lora_adapter", json=place | {"lora_path": str(tmp_path / "other")})
        assert taken.status_code == 409 and "prose is another adapter" in taken.text
        before = await chat(http, model="tiny:prose")
        going = asyncio.create_task(chat(http, "a long one", model="tiny:prose", max_tokens=100))
        await asyncio.sleep(0.02)
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "prose"})).status_code == 200
        assert (await going)["usage"]["completion_tokens"] == 100, "running requests may finish"
        gone = await http.post("/v1/chat/completions", json={"messages": HELLO, "model": "tiny:prose"})
        assert gone.status_code == 404
        assert [one["id"] for one in (await http.get("/lora-adapters")).json()] == [0, 1]
        assert (await http.post("/v1/load_lora_adapter", json=place)).json()["id"] == 3
        again = await chat(http, model="tiny:prose")
        assert said(again) == said(before) and cached(again) > 0
        texts = [said(one) for one in await asyncio.gather(*others)]
        alone = [said(await chat(http, f"{n} bottles", model="tiny:sql", max_tokens=200)) for n in range(4)]
        assert texts == alone


def test_a_new_worker_has_the_adapters_of_the_last(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", vocab_size=288)
    tokenizer = make_model(tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((tokenizer / name).read_bytes())
    first, second = (random_peft(tmp_path / name, base, seed) for seed, name in enumerate(("first", "second"), 1))
    options = {"model": str(base), "engine": "cpu", "kv_dir": str(tmp_path / "kv"), "kv_gb": 0.02, "threads": 1}
    with served(**options, adapters=[f"first={first}"]) as server:
        server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": str(second)})

        def ask(name: str) -> str:
            return said(server.post("/v1/chat/completions", DIALECTS["/v1/chat/completions"] | {"model": name}))

        names = ("base", "base:first", "base:second")
        before = [ask(name) for name in names]
        assert len(set(before)) == 3
        for pid in server.family() - {server.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                assert [ask(name) for name in names] == before
                break
            time.sleep(0.2)
        else:
            raise AssertionError("no worker came")


async def test_an_adapter_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    from cairn.types.errors import ModelFileError

    missing = (AdapterOptions(name="sql", path=str(tmp_path / "nowhere")),)
    with pytest.raises(ModelFileError, match="nowhere: the file is missing"):
        await Service.start(config(make_model(tmp_path / "tiny"), adapters=missing), in_process=True)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    from cairn.config.values import ModelOptions
    from cairn.served_models.served_model import served_models
    from cairn.types.errors import ConfigError

    models = (ModelOptions(model="a", name="a"), ModelOptions(model="b", name="b"))
    with pytest.raises(ConfigError, match="sql must say its model"):
        served_models(Config(models=models, adapters=(AdapterOptions(name="sql", path="x"),)))
    with pytest.raises(ConfigError, match="sql belongs to c, which is not served"):
        served_models(Config(models=models, adapters=(AdapterOptions(name="sql", path="x", model="c"),)))
    result = served_models(Config(models=models, adapters=(AdapterOptions(name="sql", path="x", model="b"),)))
    assert [len(one.config.adapters) for one in result] == [0, 1]


async def test_an_agent_goes_on_with_the_adapter_of_its_last_turn(tmp_path: Path) -> None:
    settings = {"kv_dir": str(tmp_path / "kv"), "agents_dir": str(tmp_path / "agents")}
    adapters = fake_adapters(tmp_path / "adapters", "sql poems")
    options = {"model": str(make_model(tmp_path / "tiny")), "kv_gb": 0.02, **settings}
    places = [f"{adapter.name}={adapter.path}" for adapter in adapters]

    def turn(server: Any, id: str, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "go on, please"}], "max_tokens": 40, "temperature": 0}
        return server.post(f"/v1/agents/{id}/turns", body | fields)

    with served(**options, adapters=places) as server:
        id = server.post("/v1/agents", {"model": "tiny:sql"})["id"]
        first = turn(server, id, model="tiny:sql")
        assert first["model"] == "tiny:sql"
        second = turn(server, id)
        assert second["model"] == "tiny:sql", "a turn that names no model"
        assert cached(second) > 16
        other = turn(server, id, model="tiny:poems")
        assert other["model"] == "tiny:poems" and cached(other) == 0, "KV of another adapter is not found"
        scaled = server.post("/v1/agents", {})["id"]
        assert turn(server, scaled, model="tiny:sql@0.123456789")["model"] == "tiny:sql@0.123457"
        assert cached(turn(server, scaled)) > 16, "the name does not tell the whole scale"
    with served(**options, adapters=places) as server:  # after a restart
        again = turn(server, id)
        assert again["model"] == "tiny:poems" and cached(again) > 16
        kv = httpx.get(f"{server.url}/v1/agents/{id}", trust_env=False, timeout=30).json()
        assert kv["model"] == "tiny:poems"
        assert cached(turn(server, scaled)) > 32


async def test_endless_combinations_of_scales_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_services, "MOST_VIEWS", 3)
    async with at(tmp_path) as http:
        first = said(await chat(http, model="tiny:sql"))
        for number in range(8):
            await chat(http, model=f"tiny:sql@0.{number}1")
        assert said(await chat(http, model="tiny:sql")) == first


async def test_an_adapted_model_is_found_by_its_identity_from_the_start(tmp_path: Path) -> None:
    """The KV of an agent from an earlier run is pinned, and can be erased, before any request names the adapter
    again.
    """
    from cairn.frontend.adapter_services import AdaptedService, ServedAdapters

    settings = config(make_model(tmp_path / "tiny"), adapters=fake_adapters(tmp_path, "sql"), kv_disk=False)
    service = await Service.start(settings, in_process=True)
    try:
        view = ServedAdapters(service).named("tiny:sql")
        assert isinstance(view, AdaptedService) and view.spec.identity != service.spec.identity
        result = ServedAdapters(service).of(view.spec.identity)
        assert isinstance(result, AdaptedService) and result.applied == view.applied
        assert result.salt(b"a") not in (b"a", result.salt(b"b"))
    finally:
        await service.close()
