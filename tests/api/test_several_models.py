"""A server with several models, as clients see it: every dialect by name, and nothing of one model in another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.process import Served, served
from tests.service.several import make_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("several")
    places = make_models(folder, "alpha beta gamma")
    listed = [
        {"model": str(places[0]), "aliases": ["gpt-4o"]},
        {"model": str(places[1])},
        {"model": str(places[2]), "load": False},
    ]
    config = folder / "cairn.toml"
    lines = [
        f"[[models]]\n{''.join(f'{key} = {json.dumps(value)}' + chr(10) for key, value in one.items())}"
        for one in listed
    ]
    config.write_text("\n".join(lines))
    with served(config_file=str(config), kv_dir=str(folder / "kv"), kv_gb=0.02, max_loaded=2) as process:
        yield process


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, trust_env=False, verify=False, timeout=60)


def get(server: Served, path: str) -> Any:
    return httpx.get(server.url + path, trust_env=False, verify=False, timeout=60).json()


def test_a_server_starts_beside_a_broken_folder(tmp_path: Path) -> None:
    make_models(tmp_path, "gamma")
    (make_models(tmp_path, "beta")[0] / "config.json").write_text("{")
    (tmp_path / "alpha.gguf").symlink_to(tmp_path / "nowhere")
    with served(models_dir=str(tmp_path), kv_dir=str(tmp_path / "kv"), kv_gb=0.02) as process:
        results = {item["id"]: item["state"] for item in get(process, "/v1/models")["data"]}
        assert results == {"alpha": "failed", "beta": "failed", "gamma": "loaded"}
        assert post(process, "/v1/chat/completions", messages=HELLO, max_tokens=4).json()["model"] == "gamma"
        refused = post(process, "/v1/chat/completions", model="beta", messages=HELLO)
        assert refused.status_code == 503 and "beta cannot be loaded" in refused.text
        health = get(process, "/health")
        assert health["status"] == "degraded"
        assert health["troubles"] == ["alpha cannot be loaded", "beta cannot be loaded"]


HELLO = [{"role": "user", "content": "hello"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 4}},
    "/completion": {"prompt": "hello", "n_predict": 4},
}


@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_picks_its_model_by_name(server: Served, path: str) -> None:
    for name, answers in (("alpha", "alpha"), ("beta", "beta"), ("gpt-4o", "alpha")):
        answer = post(server, path, model=name, **DIALECTS[path])
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == answers
    unknown = post(server, path, model="gpt-5", **DIALECTS[path])
    assert unknown.status_code == 404
    assert "alpha, beta, gamma" in unknown.text


def test_a_streams_model_and_a_turns(server: Served) -> None:
    with httpx.stream(
        "POST",
        server.url + "/v1/chat/completions",
        json={"model": "beta", "messages": HELLO, "stream": True, "max_tokens": 4},
        trust_env=False,
        verify=False,
        timeout=60,
    ) as answer:
        models = {json.loads(line[6:])["model"] for line in answer.iter_lines() if line.startswith("data: {")}
    assert models == {"beta"}
    assert post(server, "/v1/agents", id="ada").status_code == 201
    for name in ("beta", "alpha"):
        answer = post(server, "/v1/agents/ada/turns", model=name, messages=HELLO, max_tokens=4)
        assert answer.status_code == 200 and answer.json()["model"] == name
    answer = post(server, "/v1/agents/ada/turns", messages=HELLO, max_tokens=4)  # the model of its last turn
    assert answer.json()["model"] == "alpha"
    response = post(server, "/v1/requests/" + answer.json()["id"] + "/cancel")
    assert response.status_code == 200 and response.json()["state"] == "finished"
    other = post(server, "/v1/chat/completions", model="beta", messages=HELLO, max_tokens=4).json()["id"]
    assert get(server, f"/v1/requests/{other}")["state"] == "finished"


def test_models_are_listed_with_their_state(server: Served) -> None:
    post(server, "/v1/chat/completions", model="alpha", messages=HELLO, max_tokens=4)
    post(server, "/v1/chat/completions", model="beta", messages=HELLO, max_tokens=4)
    listed = {item["id"]: item for item in get(server, "/v1/models")["data"]}
    assert list(listed) == ["alpha", "beta", "gamma"]
    assert [one["state"] for one in listed.values()] == ["loaded", "loaded", "on disk"]
    assert all(one["kind"] == "chat" and one["max_model_len"] == 2048 for one in listed.values())
    assert get(server, "/v1/models/beta")["id"] == "beta"
    assert httpx.get(server.url + "/v1/models/delta", trust_env=False, verify=False).status_code == 404
    assert [model["name"] for model in get(server, "/api/tags")["models"]] == ["alpha", "beta", "gamma"]
    assert [model["name"] for model in get(server, "/api/ps")["models"]] == ["alpha", "beta"]
    assert post(server, "/api/show", model="gamma").json()["model_info"]["general.basename"] == "gamma"
    assert get(server, "/props?model=beta")["model_alias"] == "beta"


def test_metrics_have_each_family_once_and_a_sample_of_each_model(server: Served) -> None:
    for name in ("alpha", "beta"):
        post(server, "/v1/chat/completions", model=name, messages=HELLO, max_tokens=4)
    text = httpx.get(server.url + "/metrics", trust_env=False, verify=False).text
    assert text.count("# TYPE cairn:num_requests_running gauge") == 1
    for name in ("alpha", "beta"):
        assert f'cairn:num_requests_running{{model_name="{name}"}}' in text
        assert f'cairn:model_loaded{{model_name="{name}"}} 1.0' in text
    assert text.count("\ncairn:agents{") == 1


def test_a_model_is_loaded_unloaded_and_swapped_over_http(server: Served) -> None:
    loaded = post(server, "/v1/admin/models/load", model="gamma").json()
    assert loaded["success"] and loaded["state"] == "loaded"
    states = {item["id"]: item["state"] for item in get(server, "/v1/admin/models")["data"]}
    assert sorted(states.values()) == ["loaded", "loaded", "on disk"]  # max_loaded is 2
    post(server, "/v1/models/unload", model="gamma", grace=5)
    assert post(server, "/v1/models/unload", model="gamma").status_code == 409
    assert post(server, "/v1/admin/models/load", model="delta").status_code == 404
    post(server, "/v1/admin/models/load", model="alpha")
    swapped = post(server, "/v1/admin/models/swap", model="alpha", to="gamma", grace=10).json()
    assert swapped["success"] and swapped["swaps"] == 1
    answer = post(server, "/v1/chat/completions", model="gpt-4o", messages=HELLO, max_tokens=4).json()
    assert answer["model"] == "alpha"
    failed = post(server, "/v1/admin/models/swap", model="alpha", to="/nowhere")
    assert failed.status_code >= 400 and "nowhere" in failed.text
    assert post(server, "/v1/admin/models/swap", model="alpha", to="x", grace=-1).status_code == 400
    assert post(server, "/v1/admin/models/swap", model="alpha", to=str(Path("x")), more=1).status_code == 400


def until_unloaded(server: Served, name: str) -> None:
    for _ in range(100):
        if name not in [model["name"] for model in get(server, "/api/ps")["models"]]:
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} stays loaded")


@pytest.mark.parametrize("path", ["/props", "/slots"])
def test_a_get_loads_no_model_and_keeps_none(server: Served, path: str) -> None:
    """Any web page can send it, and loading one model may unload another."""
    for name in ("alpha", "beta"):
        assert post(server, "/v1/admin/models/load", model=name).status_code == 200
    until_unloaded(server, "gamma")
    before = {item["id"]: item["state"] for item in get(server, "/v1/admin/models")["data"]}
    refused = httpx.get(f"{server.url}{path}?model=gamma", trust_env=False, verify=False, timeout=60)
    assert refused.status_code == 409 and refused.json()["error"]["param"] == "model"
    assert "gamma is not loaded" in refused.text and "/v1/admin/models/load" in refused.text
    assert {item["id"]: item["state"] for item in get(server, "/v1/admin/models")["data"]} == before
    assert httpx.get(f"{server.url}{path}?model=no", trust_env=False, verify=False, timeout=60).status_code == 404
    for query in ("", "?model=beta"):
        assert httpx.get(server.url + path + query, trust_env=False, verify=False, timeout=60).status_code == 200


def test_a_call_that_waits_for_its_model_says_how_long_that_took(server: Served) -> None:
    assert post(server, "/api/generate", model="gamma", keep_alive=0).status_code == 200
    until_unloaded(server, "gamma")
    asked = {"model": "Gamma", "stream": False, "keep_alive": "1h30m", "options": {"num_predict": 2}}
    answer = post(server, "/api/chat", messages=HELLO, **asked).json()
    assert answer["total_duration"] > answer["load_duration"] > 10**7
    again = post(server, "/api/chat", messages=HELLO, **asked).json()
    assert again["load_duration"] == 0


def test_keep_alive_0_unloads_the_model(server: Served) -> None:
    asked = {"model": "beta", "messages": HELLO, "stream": False, "options": {"num_predict": 2}}
    assert post(server, "/api/chat", **asked, keep_alive="10m").status_code == 200
    (beta,) = [model for model in get(server, "/api/ps")["models"] if model["name"] == "beta"]
    assert not beta["expires_at"].startswith("9999")
    assert post(server, "/api/chat", **asked, keep_alive="x").status_code == 400
    assert post(server, "/api/generate", model="beta", keep_alive=0).status_code == 200
    until_unloaded(server, "beta")


def test_an_agents_context_survives_its_models_absence(server: Served) -> None:
    """The agent talks to alpha, which is unloaded while beta answers.

    When alpha is loaded again, only the new message is computed.
    """
    long = [{"role": "user", "content": "tell me of the sea " * 40}]
    assert post(server, "/v1/agents", id="eve").status_code == 201
    first = post(server, "/v1/agents/eve/turns", model="alpha", messages=long, max_tokens=8, temperature=0)
    assert first.status_code == 200, first.text
    unloaded = post(server, "/v1/admin/models/unload", model="alpha")
    assert unloaded.json()["state"] == "on disk", unloaded.text
    other = post(server, "/v1/chat/completions", model="beta", messages=HELLO, max_tokens=4)
    assert other.json()["model"] == "beta"
    again = post(server, "/v1/agents/eve/turns", messages=HELLO, max_tokens=4, temperature=0).json()
    assert again["model"] == "alpha"
    cache, prompt = again["usage"]["cairn"], again["usage"]["prompt_tokens"]
    assert cache["disk"] >= first.json()["usage"]["prompt_tokens"] - 64, cache
    assert cache["computed"] + cache["disk"] + cache["pool"] == prompt and cache["computed"] < 160


def test_teams_and_workflows_are_answered_by_the_model_that_they_name(server: Served) -> None:
    team = {"id": "crew", "model": "beta", "members": [{"name": "ann"}, {"name": "ben"}]}
    made = post(server, "/v1/teams", **team)
    assert made.status_code == 201, made.text
    done = post(server, "/v1/teams/crew/rounds", content="Begin.")
    assert done.status_code == 200, done.text
    turns = get(server, "/v1/agents/crew.ann/turns")["data"]
    assert turns, turns
    response = get(server, "/v1/agents/crew.ann")
    assert response["model"] == "beta", response


def test_agents_and_routes_about_a_request_use_the_named_model(server: Served) -> None:
    """Agents, and OpenAI's routes about a request: compact and input_tokens."""
    for name in ("beta", "alpha"):
        made = post(server, "/v1/agents", id=f"of-{name}", model=name)
        assert made.status_code == 201 and made.json()["model"] == name, made.text
        turn = post(server, f"/v1/agents/of-{name}/turns", messages=HELLO, max_tokens=4)
        assert turn.json()["model"] == name, turn.text
    for path in ("/v1/responses/compact", "/v1/responses/input_tokens"):
        assert post(server, path, model="beta", input="hello").status_code == 200
        unknown = post(server, path, model="gpt-5", input="hello")
        assert unknown.status_code == 404 and "alpha, beta, gamma" in unknown.text


def test_a_web_page_cannot_have_models_loaded_or_unloaded(server: Served) -> None:
    """Browsers send such a body to any server without asking it first."""

    def states() -> dict[str, str]:
        return {item["id"]: item["state"] for item in get(server, "/v1/models")["data"]}

    for name in ("alpha", "beta"):
        assert post(server, "/v1/chat/completions", model=name, messages=HELLO, max_tokens=4).status_code == 200
    before = states()
    assert before["gamma"] == "on disk" and before["alpha"] == "loaded"
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    for path, body in (
        ("/v1/chat/completions", {"model": "gamma"}),
        ("/api/chat", {"model": "alpha", "keep_alive": 0}),
    ):
        answer = httpx.post(
            server.url + path, content=json.dumps(body), headers=headers, trust_env=False, verify=False, timeout=60
        )
        assert answer.status_code == 403, answer.text
    assert states() == before
