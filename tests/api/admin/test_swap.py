"""Swaps of a server's only model on the real engine: how long they take, who waits for them, and who does not.

Some take more than five seconds: each swap starts a process that loads a real model while streams go on.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.api.app import build_app
from cairn.config.config import Config
from cairn.models.hub.hub import locate
from tests.api.process import Served
from tests.api.sockets import request_bytes
from tests.laws.swap_bounds import LONG, SPARE_SECONDS, TELLING, Swaps, one_model, other_demo


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Requests sent during a swap wait for the swap itself, so `load_timeout` must not cut them off.
    server = one_model(tmp_path_factory.mktemp("only"), load_timeout=0.05)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.fixture
def swaps(server: Served, tmp_path: Path) -> Iterator[Swaps]:
    """Yield a helper that swaps the bundled model, and swap back to it at the end."""
    result = Swaps(server, other_demo(tmp_path / "other"))
    yield result
    if shown(result)["model"] != "demo":
        assert result.swap("demo")[1].status_code == 200
    result.http.close()


def said(swaps: Swaps) -> str:
    """Return the model's answer to a question that the swapped-in variant answers differently."""
    answer = swaps.http.post("/v1/chat/completions", json=TELLING)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def shown(swaps: Swaps) -> dict[str, Any]:
    """Return the model's entry in the admin list."""
    model: dict[str, Any] = swaps.http.get("/v1/admin/models").json()["data"][0]
    return model


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


def test_an_idle_swap_takes_the_load_and_a_second(swaps: Swaps, figure: Callable[[str, str], None]) -> None:
    before = said(swaps)
    excess = [swaps.excess() for _ in range(3)]
    assert said(swaps) != before
    excess.append(swaps.excess())
    assert said(swaps) == before
    assert statistics.median(excess) < SPARE_SECONDS, excess
    figure("swap of the only model, idle", f"load + {statistics.median(excess):.2f} s")


def test_calls_without_a_model_do_not_delay_a_swap(swaps: Swaps, server: Served) -> None:
    """An open stream of /v1/events and a body that never ends, on a route without a model."""
    half = request_bytes("POST", "/v1/agents/import", b"x" * 100)
    with (
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
        http.stream("GET", "/v1/events") as feed,
        socket.create_connection(("127.0.0.1", server.port)) as slow,
    ):
        assert feed.status_code == 200
        slow.sendall(half[:-50])
        assert min(swaps.excess(grace=20), swaps.excess(grace=20)) < -19


def test_a_swap_under_streams_takes_the_grace_and_the_load_and_a_second(
    swaps: Swaps, figure: Callable[[str, str], None]
) -> None:
    """Ten requests sent during the swap wait for the new model, even where `load_timeout` is short."""
    with swaps.streams(), swaps.asking():
        excess = swaps.excess(grace=1)
    assert excess < SPARE_SECONDS
    assert [answer.status_code for answer in swaps.answers] == [200] * 10
    assert swaps.told and set(swaps.told) == {"demo is being swapped for another model; ask again"}
    figure(
        "swap of the only model under 12 streams", f"grace + load + {excess:.2f} s; 10 of 10 sent meanwhile answered"
    )


def test_a_call_waits_for_a_swap_no_longer_than_its_deadline(swaps: Swaps) -> None:
    with swaps.streams(), swaps.asking(**{"X-Request-Timeout": "300ms"}):
        swaps.excess(grace=2)
    assert [answer.status_code for answer in swaps.answers] == [504] * 10
    assert "while it waited for demo to be loaded" in swaps.answers[0].json()["error"]["message"]


def test_a_disconnected_caller_ends_the_swap(swaps: Swaps, server: Served) -> None:
    """The client disconnects while the old model's requests are drained, and later at several moments of the swap.

    Either the old or the new model answers afterwards.
    """
    asked = {"model": "demo", "to": swaps.places[0], "grace": 60}
    with swaps.streams():
        with socket.create_connection(("127.0.0.1", server.port)) as caller:
            caller.sendall(request_bytes("POST", "/v1/admin/models/swap", json.dumps(asked).encode()))
            wait_for(lambda: shown(swaps)["state"] == "unloading")
        wait_for(lambda: shown(swaps)["state"] == "loaded")
        assert said(swaps)
        result = shown(swaps)
        assert result["running"] and result["model"] == "demo"  # streams that are not at their end go on
    assert not swaps.told
    for after in (0.02, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8):
        with contextlib.suppress(httpx.ReadTimeout):
            swaps.http.post("/v1/admin/models/swap", json={"model": "demo", "to": swaps.places[0]}, timeout=after)
        assert said(swaps)
        result = shown(swaps)
        assert result["state"] == "loaded" and not result["error"]
        if result["model"] != "demo":
            assert swaps.swap("demo")[1].status_code == 200
    assert swaps.http.get("/health").json()["status"] == "ok"


def test_broken_files_are_refused_while_the_old_model_answers(swaps: Swaps, tmp_path: Path) -> None:
    broken = shutil.copytree(locate("demo"), tmp_path / "broken")
    spoiled: dict[str, Callable[[bytes], bytes]] = {
        "model.safetensors": lambda data: data[:-1000],
        "config.json": lambda data: data.replace(b"ForCausalLM", b"ForNobody"),
        "tokenizer.json": lambda data: data[:-1000],
    }
    with swaps.streams(2):
        for name, spoil in spoiled.items():
            data = (broken / name).read_bytes()
            (broken / name).write_bytes(spoil(data))
            seconds, answer = swaps.swap(str(broken), grace=60)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "to" and "broken" in answer.json()["error"]["message"]
            assert seconds < 30  # far less than the grace of 60 s: a broken model is refused at once
            (broken / name).write_bytes(data)
    assert not swaps.told and said(swaps)
    (broken / "model.safetensors").write_bytes(b"no weights")
    usual = swaps.swap()[1].json()["load_seconds"]
    assert min(swaps.swap(str(broken))[0] for _ in range(3)) < usual + SPARE_SECONDS


def test_a_load_that_fails_brings_the_old_model_back_as_fast(swaps: Swaps, tmp_path: Path) -> None:
    """The new model's files break after they were checked and before they are loaded, while the old model still
    streams.
    """
    before, broken = said(swaps), shutil.copytree(locate("demo"), tmp_path / "broken")
    with swaps.streams():
        usual, answer = swaps.swap(grace=1)
        assert answer.status_code == 200
    assert swaps.swap()[1].status_code == 200
    answers: list[tuple[float, httpx.Response]] = []
    with swaps.streams(), swaps.asking():
        swapping = threading.Thread(target=lambda: answers.append(swaps.swap(str(broken), grace=1)))
        swapping.start()
        wait_for(lambda: httpx.get(f"{swaps.server.url}/health/ready").status_code == 503)
        (broken / "model.safetensors").write_bytes(b"no weights")
        swapping.join()
    ((seconds, answer),) = answers
    assert answer.status_code == 400 and "model.safetensors" in answer.json()["error"]["message"], answer.text
    assert seconds < 2 * usual + SPARE_SECONDS  # the grace, the failed load and the reload of the old model
    assert [one.status_code for one in swaps.answers] == [200] * 10
    assert said(swaps) == before


MISTAKES: dict[str, tuple[str, int, str]] = {
    "nowhere": ("/nope", 404, "to"),
    "nothing": ("", 400, "to"),
    "spaces": ("  ", 400, "to"),
    "a file": (__file__, 404, "to"),
    "a folder without a model": (str(Path(__file__).parent), 400, "to"),
    "far too long": ("n" * 70_000, 400, "to"),
    "a part too long": ("/" + "n" * 300, 404, "to"),
    "no bytes of a path": ("a\0b", 400, "to"),
    "not downloaded": ("nobody/nothing", 404, "to"),
    "itself": ("demo", 400, "to"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_swap_to_what_is_no_model_is_a_4xx(swaps: Swaps, mistake: str) -> None:
    to, status, field = MISTAKES[mistake]
    _, answer = swaps.swap(to)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == field and len(answer.text) < 2000
    for path in ("/v1/admin/models/load", "/v1/models/load", "/v1/admin/models/unload"):
        if to != "demo":
            answer = swaps.http.post(path, json={"model": to})
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["param"] == "model" and len(answer.text) < 2000


def test_agents_go_on_after_a_swap(swaps: Swaps) -> None:
    """Their KV is looked up for the model that is served now, also for one that was away."""

    def turn(text: str) -> Any:
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        answer = swaps.http.post("/v1/agents/ada/turns", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["cairn"]

    assert swaps.http.post("/v1/agents", json={"id": "ada"}).status_code == 201
    first = turn("Tell me of the sea and of the stones. " * 20)
    swaps.excess()
    turn("And then?")
    assert swaps.http.get("/v1/agents/ada").json()["kv"]["pool"] > first["computed"]
    assert swaps.http.post("/v1/agents/ada/prefetch").status_code == 200
    swaps.excess()
    assert swaps.http.post("/v1/agents/ada/rollback", json={"turn": 1}).status_code == 200
    assert turn("And then?")["disk"] >= first["computed"] - 64
    assert swaps.http.get("/v1/agents/ada").json()["kv"]["pool"] > first["computed"]
    team = {"id": "crew", "members": [{"name": "ann"}, {"name": "ben"}]}
    assert swaps.http.post("/v1/teams", json=team).status_code == 201
    assert swaps.http.post("/v1/teams/crew/rounds", json={"content": "Begin."}).status_code == 200
    assert swaps.http.delete("/v1/agents/ada").status_code == 200


USE_A_MODEL = """
POST /v1/chat/completions, POST /v1/completions, POST /v1/messages, POST /v1/messages/count_tokens, POST /api/chat
POST /api/generate, POST /api/embed, POST /v1/embeddings, POST /v1/rerank, POST /tokenize, POST /completion
POST /infill, POST /v1/responses, POST /v1/responses/compact, POST /v1/responses/input_tokens, POST /v1/agents
POST /v1/teams, POST /v1/agents/a/turns, POST /v1/agents/a/resume, POST /v1/agents/a/prefetch, POST /v1/teams/t/rounds
POST /v1/teams/t/votes, POST /v1/workflows/runs, POST /v1/workflows/runs/r/resume, POST /v1/collections/c/ask
GET /props, GET /slots, HEAD /props
"""
USE_NONE = """
POST /v1/admin/models/swap, POST /v1/admin/models/load, POST /v1/admin/models/unload, POST /v1/models/load
POST /v1/admin/drain, POST /v1/admin/reload, POST /v1/cache/flush, POST /v1/agents/import, POST /v1/agents/a/fork
POST /v1/agents/a/rollback, POST /v1/agents/a/pin, POST /v1/agents/a/evict, DELETE /v1/agents/a, GET /v1/agents
POST /v1/requests/0123456789abcdef/cancel, POST /v1/responses/resp_0123456789abcdef/cancel, POST /v1/files
POST /v1/collections, POST /v1/collections/c/documents, POST /v1/collections/c/search, POST /v1/vector_stores/v/search
POST /v1/vector_stores, POST /v1/conversations, POST /v1/conversations/conv_c/items, POST /v1/teams/t/messages
POST /v1/teams/t/interrupt, POST /v1/workflows/check, POST /v1/workflows/runs/r/interrupt, POST /api/show
POST /api/pull, POST /api/copy, DELETE /api/delete, GET /v1/events, GET /v1/models, GET /metrics, GET /v1/cache
GET /v1/requests/0123456789abcdef/events, GET /v1/responses/resp_0123456789abcdef, GET /v1/workflows/runs/r
"""


@pytest.mark.parametrize(("routes", "uses"), [(USE_A_MODEL, True), (USE_NONE, False)], ids=["a model", "none"])
def test_which_routes_use_a_model(routes: str, uses: bool) -> None:
    router = build_app(None, Config()).router
    for route in routes.replace(",", "\n").split("\n"):
        if route := route.strip():
            method, path = route.split()
            methods = router.find(path) or {}
            assert bool(methods["GET" if method == "HEAD" else method].model) == uses, route


def test_a_drain_does_not_say_that_the_server_shuts_down(tmp_path: Path) -> None:
    server = one_model(tmp_path)
    try:
        server.wait_ready()
        swaps = Swaps(server, tmp_path)
        with contextlib.closing(swaps.http), swaps.streams(2):
            assert swaps.http.post("/v1/admin/drain", json={"grace": 0}).json()["draining"]
            refused = swaps.http.post("/v1/chat/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            ready = swaps.http.get("/health/ready").json()
            wait_for(lambda: len(swaps.told) == 2)
        drained = "the server's owner has drained it: it takes no new requests"
        assert ready["reasons"] == [drained]
        assert refused.json()["error"]["message"] == drained and swaps.told == [drained] * 2
    finally:
        server.end()
