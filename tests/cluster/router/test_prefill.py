"""Prefill on another replica: used where it pays by what was measured, and a failure costs only time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cairn.cluster.router.app import RouterApp
from cairn.cluster.router.prefill import PrefillGate, _for_one_token
from cairn.cluster.router.replicas import Replica, Replicas
from tests.cluster.router.stubs import Stub, as_json, ask, named, routed

LONG = {
    "prompt_cache_key": "one",
    "messages": [{"role": "user", "content": "word " * 2000}],
    "stream": False,
    "max_tokens": 90,
}


def with_roles(app: RouterApp, stubs: list[Stub], *roles: str) -> list[Replica]:
    """Return the router's replicas, with roles."""
    for replica, stub, role in zip(app.replicas.all, stubs, roles, strict=True):
        replica.role = stub.role = role
    return app.replicas.all


def gate(apart: Any = "auto") -> tuple[PrefillGate, Replica, Replica]:
    replicas = Replicas(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    return PrefillGate(replicas, apart), *replicas.all


def test_the_gate_weighs_moving_against_computing() -> None:
    own, prefill, decode = gate()
    own._sharing = 0.0
    prefill.computes, decode.computes, decode.loads = 10_000.0, 1_000.0, 50_000.0
    assert own.worth(4_000, prefill, decode), "0.48 s beside 4 s"
    decode.loads = 900.0
    assert not own.worth(4_000, prefill, decode), "moving takes longer than computing"
    prefill.computes, decode.loads = 1_000.0, 50_000.0
    assert not own.worth(4_000, prefill, decode), "no faster for the client, and nobody else is there"
    decode.busy = 3
    assert own.worth(4_000, prefill, decode), "others' answers would stand still for 4 s"
    assert not own.worth(200, prefill, decode), "three chunks"
    own._sharing = 5.0
    assert not own.worth(4_000, prefill, decode), "sharing alone takes longer"
    assert gate("always")[0].worth(300, prefill, decode)


def test_a_request_for_one_token_has_the_same_prompt() -> None:
    body = LONG | {"stream": True, "n": 4, "logprobs": True, "tools": [{"type": "function"}], "stream_options": {}}
    prefill = json.loads(_for_one_token(json.dumps(body).encode()) or b"")
    assert prefill == {
        "prompt_cache_key": "one",
        "messages": LONG["messages"],
        "tools": body["tools"],
        "stream": False,
        "max_tokens": 1,
    }
    newer = json.dumps({"messages": [], "max_completion_tokens": 7}).encode()
    assert json.loads(_for_one_token(newer) or b"")["max_completion_tokens"] == 1
    assert _for_one_token(b'{"store": false}') is None, "its KV may not go into a store"
    assert _for_one_token(b"[1]") is _for_one_token(b"{") is None


async def test_a_long_prompt_goes_to_the_prefill_replica_first_and_both_share() -> None:
    async with routed(named, named) as (app, stubs):
        prefill, decode = stubs
        with_roles(app, stubs, "prefill", "decode")
        app.gate._apart = "always"
        got = await ask(app, "POST", "/v1/chat/completions", LONG, [(b"x-api-key", b"k")])
        assert got.json()["by"] == "s1"
        assert [path for path, _, _ in prefill.asked] == ["/v1/chat/completions", "/v1/cache/share"]
        assert [path for path, _, _ in decode.asked] == ["/v1/cache/share", "/v1/chat/completions"]
        assert json.loads(prefill.asked[0][2])["max_tokens"] == 1 and json.loads(decode.asked[1][2]) == LONG
        assert all(headers[b"x-api-key"] == b"k" for _, headers, _ in (*prefill.asked, *decode.asked))
        more = LONG | {"messages": [*LONG["messages"], {"role": "user", "content": "and now?"}]}  # type: ignore[misc]
        await ask(app, "POST", "/v1/chat/completions", more, [(b"x-api-key", b"k")])
        assert app.gate.apart == 1 and len(prefill.asked) == 2, "of what goes on with it, little is new"
        await ask(app, "POST", "/v1/agents/a/turns", LONG)
        await ask(app, "POST", "/v1/embeddings", {"input": "word " * 2000})
        assert len(prefill.asked) == 2, "turns write to an agent's log, and embeddings keep no KV"


@pytest.mark.parametrize("how", ["dead", "error", "cut"])
async def test_a_prefill_replica_that_fails_costs_time_alone(how: str) -> None:
    async def fails(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if how == "error":
            await as_json(writer, {"error": {}}, 500)
        else:
            writer.transport.abort()

    async with routed(fails, named) as (app, stubs):
        prefill, decode = stubs
        replicas = with_roles(app, stubs, "prefill", "decode")
        app.gate._apart = "always"
        if how == "dead":
            await prefill.die()
        got = await ask(app, "POST", "/v1/chat/completions", LONG)
        assert got.status == 200 and got.json()["by"] == "s1" and app.gate.failed == 1
        assert [path for path, _, _ in decode.asked] == ["/v1/chat/completions"]
        await app.replicas.check(replicas[0])
        assert replicas[0].up is (how != "dead") and replicas[1].up, "what it drops does not take it away from others"


async def test_an_idle_connection_that_closes_as_a_prompt_comes_is_no_death() -> None:
    async def once(
        stub: Stub, path: str, headers: dict[bytes, bytes], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the first request of each connection, and close the connection at the second."""
        if writer in used:
            writer.transport.abort()
            return
        used.add(writer)
        await as_json(writer, {"by": stub.name})

    used: set[asyncio.StreamWriter] = set()
    async with routed(once, named) as (app, stubs):
        prefill, _ = with_roles(app, stubs, "prefill", "decode")
        app.gate._apart = "always"
        got = await ask(app, "POST", "/v1/chat/completions", LONG)
        assert got.json()["by"] == "s1" and len(used) == 2, "sharing took another connection than the prompt"
        assert prefill.up and (app.gate.apart, app.gate.failed) == (1, 0)


async def test_a_prefill_replica_answers_where_there_is_no_other() -> None:
    async with routed(named, named) as (app, stubs):
        decode = stubs[1]
        with_roles(app, stubs, "prefill", "decode")
        assert (await ask(app, "POST", "/v1/chat/completions", LONG)).json()["by"] == "s1"
        await decode.die()
        assert (await ask(app, "POST", "/v1/chat/completions", LONG)).json()["by"] == "s0"


async def test_routing_in_turn_and_by_load() -> None:
    async with routed(named, named, named) as (app, _):
        for how, seen in (("names", 1), ("round-robin", 3)):
            app.replicas._routing = how  # type: ignore[assignment]
            by = {(await ask(app, "GET", "/v1/agents/a")).json()["by"] for _ in range(6)}
            assert len(by) == seen, how
        app.replicas._routing = "least-load"
        app.replicas.all[0].busy = app.replicas.all[1].busy = 5
        assert (await ask(app, "GET", "/v1/agents/a")).json()["by"] == "s2"
