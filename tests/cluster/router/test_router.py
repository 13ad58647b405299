"""The router sends requests that share a context to one replica, repeats what is safe to repeat, and relays streams."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from cairn.cluster.router.replicas import FORGET_SECONDS, Replicas
from cairn.types.errors import ConfigError
from tests.cluster.router.stubs import Stub, as_json, ask, event, head, named, piece, routed, text_of

TEXT = "The answer is forty-two, as everybody knows, and so it stays."


async def stream(writer: asyncio.StreamWriter, size: int, id: str, stop: int | None = None) -> None:
    """Send TEXT in pieces of `size`, or only `stop` of them."""
    writer.write(head(200, "text/event-stream", None) + piece(event("", id, role="assistant")))
    for number, at in enumerate(range(0, len(TEXT), size)):
        if number == stop:
            await writer.drain()
            return
        writer.write(piece(event(TEXT[at : at + size], id)))
        await asyncio.sleep(0)
    writer.write(piece(event(id=id, finish="stop")) + piece(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


async def test_an_agent_stays_with_its_replica_and_agents_are_spread() -> None:
    async with routed(named, named, named) as (app, stubs):
        answered_by = [[(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for _ in range(3)] for n in range(60)]
        assert all(len(set(names)) == 1 for names in answered_by)
        spread = Counter(names[0] for names in answered_by)
        assert len(spread) == 3 and min(spread.values()) >= 8
        before = {f"a{n}": names[0] for n, names in enumerate(answered_by)}
        await stubs[1].die()
        for n in range(60):
            now = (await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"]
            assert now != "s1" and (before[f"a{n}"] == "s1" or now == before[f"a{n}"]), "only what was there moves"


async def test_a_session_goes_where_its_agent_goes_by_whatever_names_it() -> None:
    async with routed(named, named, named) as (app, _):
        for n in range(20):
            by = {
                (await ask(app, "POST", f"/v1/agents/x{n}/turns", {})).json()["by"],
                (await ask(app, "POST", "/v1/agents", {"id": f"x{n}"})).json()["by"],
                (await ask(app, "POST", "/v1/chat/completions", {}, [(b"x-cairn-agent", b"x%d" % n)])).json()["by"],
                (await ask(app, "POST", "/v1/chat/completions", {"prompt_cache_key": f"x{n}"})).json()["by"],
                (await ask(app, "POST", "/v1/messages", {"metadata": {"session_id": f"x{n}"}})).json()["by"],
            }
            assert len(by) == 1


async def test_a_conversation_that_is_sent_again_goes_where_it_began() -> None:
    async with routed(named, named, named) as (app, _):
        for n in range(20):
            messages = [{"role": "system", "content": f"s{n}"}, {"role": "user", "content": "u"}]
            first = (await ask(app, "POST", "/v1/chat/completions", {"messages": messages})).json()["by"]
            longer = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
            assert (await ask(app, "POST", "/v1/chat/completions", {"messages": longer})).json()["by"] == first


async def test_keys_pass_and_are_part_of_what_is_named() -> None:
    async with routed(named, named, named) as (app, stubs):
        key = [(b"authorization", b"Bearer secret"), (b"connection", b"close"), (b"host", b"localhost")]
        await ask(app, "GET", "/v1/agents/a?x=1", None, key)
        (path, headers, _), *rest = [one for stub in stubs for one in stub.asked]
        assert not rest and path == "/v1/agents/a?x=1"
        assert headers[b"authorization"] == b"Bearer secret" and headers[b"host"].startswith(b"127.0.0.1:")


async def test_a_turn_gets_a_key_and_is_sent_again_with_the_same_one() -> None:
    async def dies(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not any(len(one.asked) for one in stubs if one is not stub):
            await stub.die()
        else:
            await as_json(writer, {"by": stub.name})

    async with routed(dies, dies) as (app, stubs):
        got = await ask(app, "POST", "/v1/agents/a/turns", {"messages": []})
        assert got.status == 200
        asked = [headers[b"idempotency-key"] for stub in stubs for _, headers, _ in stub.asked]
        assert len(asked) >= 2 and len(set(asked)) == 1
        await ask(app, "POST", "/v1/agents/a/turns", {"messages": []}, [(b"idempotency-key", b"mine")])
        assert [h[b"idempotency-key"] for s in stubs for _, h, _ in s.asked if h[b"idempotency-key"] == b"mine"]


async def test_requests_that_may_have_run_are_not_sent_again() -> None:
    async def dies(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stub.die()

    async with routed(dies, dies) as (app, stubs):
        got = await ask(app, "POST", "/v1/agents/a/fork", {})
        assert got.status == 503 and "look whether" in got.json()["error"]["message"]
        assert sum(len(stub.asked) for stub in stubs) == 1


async def test_a_turn_waits_while_its_last_server_may_be_alive() -> None:
    tries = []

    async def busy(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        tries.append(stub.name)
        if len(tries) == 1:
            await stub.die()
        elif len(tries) < 4:
            await as_json(writer, {"error": {"code": "turn_running"}}, 409)
        else:
            await as_json(writer, {"by": stub.name})

    async with routed(busy, busy) as (app, _):
        assert (await ask(app, "POST", "/v1/agents/a/turns", {})).status == 200
        assert len(tries) == 4


async def test_a_conflict_is_passed_on_where_nobody_died() -> None:
    async def busy(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await as_json(writer, {"error": {"code": "turn_running"}}, 409)

    async with routed(busy, busy) as (app, _):
        assert (await ask(app, "POST", "/v1/agents/a/turns", {})).status == 409


@pytest.mark.parametrize("sizes", [(4, 4), (4, 7), (9, 1), (20, 3)])
async def test_a_stream_goes_on_from_another_replica_without_a_gap_or_a_repetition(sizes: tuple[int, int]) -> None:
    first: list[Stub] = []

    async def answers(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not first:
            first.append(stub)
            await stream(writer, sizes[0], "first", stop=3)
            await asyncio.sleep(0.05)
            await stub.die()
        else:
            await stream(writer, sizes[1], "second")

    async with routed(answers, answers) as (app, _):
        got = await ask(app, "POST", "/v1/agents/a/turns", {"messages": [], "stream": True})
        assert got.status == 200 and text_of(got) == TEXT
        assert b'"second"' not in got.body, "the answer keeps its id"
        assert got.body.count(b"assistant") == 1 and got.body.endswith(b"data: [DONE]\n\n")
        assert got.body.count(b'"stop"') == 1 and app.counts.followed == 1


async def test_a_stream_that_another_replica_could_answer_otherwise_ends_with_an_error() -> None:
    async def answers(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await stream(writer, 4, "a", stop=3)
        await asyncio.sleep(0.05)
        await stub.die()

    async with routed(answers, answers) as (app, _):
        got = await ask(app, "POST", "/v1/chat/completions", {"messages": [], "stream": True, "temperature": 1})
        assert b'"code":"unavailable"' in got.body and app.counts.lost == 1


async def test_tool_calls_are_followed_too() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": ""}}
    parts = [b'{"a', b'": 1', b"}"]

    def pieces(count: int) -> bytes:
        stream_text = piece(event(role="assistant")) + piece(event(tool_calls=[call]))
        for part in parts[:count]:
            stream_text += piece(event(tool_calls=[{"index": 0, "function": {"arguments": part.decode()}}]))
        return stream_text

    first: list[Stub] = []

    async def answers(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "text/event-stream", None))
        if not first:
            first.append(stub)
            writer.write(pieces(2))
            await writer.drain()
            await asyncio.sleep(0.05)
            await stub.die()
        else:
            writer.write(pieces(3) + piece(event(finish="tool_calls")) + b"0\r\n\r\n")
            await writer.drain()

    async with routed(answers, answers) as (app, _):
        got = await ask(app, "POST", "/v1/agents/a/turns", {"messages": [], "stream": True})
        bodies = [json.loads(line[6:]) for line in got.body.decode().split("\n\n") if line.startswith("data: {")]
        calls = [c for body in bodies for c in body["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(c["function"].get("arguments", "") for c in calls) == '{"a": 1}'
        assert sum("name" in c["function"] for c in calls) == 1


async def test_replicas_are_added_and_removed_while_the_router_runs() -> None:
    async with routed(named) as (app, _):
        new = Stub("new", named)
        url = await new.start()
        try:
            got = await ask(app, "POST", f"/router/add?replica={url}")
            assert got.status == 200 and got.json()["up"] and len(app.replicas.all) == 2
            assert (await ask(app, "POST", f"/router/add?replica={url}/")).status == 200
            assert len(app.replicas.all) == 2, "it is known"
            assert {(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for n in range(20)} == {"s0", "new"}
            assert (await ask(app, "POST", f"/router/remove?replica={url}")).json()["drained"]
            assert {(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for n in range(20)} == {"s0"}
            assert (await ask(app, "POST", f"/router/remove?replica={url}")).status == 404
            wrong = await ask(app, "POST", "/router/add?replica=ftp://x")
            assert wrong.status == 400 and "no replica's address" in wrong.json()["error"]["message"]
            await ask(app, "POST", f"/router/add?replica={url}")
            await new.die()
            added = app.replicas.all[1]
            app.replicas.failed(added)
            seen = app.replicas._added[added]
            app.replicas._forget(seen + FORGET_SECONDS - 1)
            assert len(app.replicas.all) == 2
            app.replicas.all[0].up = False
            app.replicas._forget(seen + FORGET_SECONDS + 1)
            assert [replica.url for replica in app.replicas.all] != [url] and len(app.replicas.all) == 1, (
                "the first one stays"
            )
        finally:
            await new.die()


async def test_a_replica_that_drains_gets_nothing_new_and_one_that_is_down_neither() -> None:
    async with routed(named, named) as (app, stubs):
        url = app.replicas.all[0].url
        assert (await ask(app, "POST", f"/router/drain?replica={url}")).json()["drained"]
        assert {(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for n in range(20)} == {"s1"}
        assert (await ask(app, "POST", f"/router/undrain?replica={url}")).status == 200
        assert {(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for n in range(20)} == {"s0", "s1"}
        stubs[1].ready = 503
        await app.replicas.check(app.replicas.all[1])
        assert {(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for n in range(20)} == {"s0"}
        replicas = (await ask(app, "GET", "/router/replicas")).json()["data"]
        assert [replica["up"] for replica in replicas] == [True, False]
        assert b'replica_up{replica="' in (await ask(app, "GET", "/metrics")).body
        health = await ask(app, "GET", "/health/ready")
        assert health.status == 200
        assert health.json() == {
            "status": "ready",
            "role": "router",
            "reasons": [],
            "troubles": [f"{app.replicas.all[1].url} is down: answers 503"],
        }


async def test_replicas_are_restarted_one_after_another() -> None:
    async with routed(named, named) as (app, _):
        ended = []

        async def end(number: int) -> None:
            assert [replica.draining for replica in app.replicas.all] == [number == 0, number == 1]
            ended.append(number)
            checks.append(asyncio.create_task(again(number)))

        async def again(number: int) -> None:
            await asyncio.sleep(0.01)
            assert {(await ask(app, "GET", f"/v1/agents/a{n}")).json()["by"] for n in range(9)} == {f"s{1 - number}"}
            await app.replicas.check(app.replicas.all[number])

        checks: list[asyncio.Task[None]] = []
        app._restart = end
        got = await ask(app, "POST", "/router/restart", {})
        await asyncio.gather(*checks)
        lines = [json.loads(line[6:]) for line in got.body.decode().split("\n\n")[:-2]]
        assert lines == [{"replica": replica.url, "ready": True} for replica in app.replicas.all] and ended == [0, 1]
        assert not any(replica.draining for replica in app.replicas.all)


async def test_after_a_removal_each_replica_is_still_restarted_as_itself() -> None:
    async with routed(*[named] * 3) as (app, _):
        assert [one.number for one in app.replicas.all] == [0, 1, 2]
        assert await app.replicas.remove(app.replicas.all[1], 1.0)
        restarted = list[int]()

        async def end(number: int) -> None:
            restarted.append(number)
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: [setattr(one, "up", True) for one in app.replicas.all])

        seen = [replica.number async for replica, _ in app.replicas.restart(end)]
        assert seen == restarted == [0, 2]


async def test_a_replica_that_does_not_come_back_ends_the_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed(named, named) as (app, stubs):

        async def end(number: int) -> None:
            await stubs[number].die()

        monkeypatch.setattr("cairn.cluster.router.replicas.START_SECONDS", 0.1)
        app._restart = end
        got = await ask(app, "POST", "/router/restart", {})
        assert json.loads(got.body[6:].partition(b"\n")[0]) == {"replica": app.replicas.all[0].url, "ready": False}
        assert (await ask(app, "GET", "/v1/agents/a")).json()["by"] == "s1"


async def test_a_router_that_did_not_start_its_replicas_restarts_none() -> None:
    async with routed(named) as (app, _):
        assert (await ask(app, "POST", "/router/restart", {})).status == 409


async def test_without_a_replica_the_client_gets_an_error_at_once() -> None:
    async with routed(named) as (app, stubs):
        stubs[0].ready = 503
        await app.replicas.check(app.replicas.all[0])
        got = await ask(app, "POST", "/v1/chat/completions", {})
        assert got.status == 503 and got.headers[b"retry-after"] == b"2"
        health = await ask(app, "GET", "/health/ready")
        assert (health.status, health.json()["reasons"]) == (503, ["no replica is up"])


async def test_a_resource_of_one_replica_is_looked_up_on_all() -> None:
    async def mine(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        await as_json(writer, {"by": stub.name}, 200 if stub.name == "s2" else 404)

    async with routed(mine, mine, mine) as (app, _):
        for n in range(6):
            assert (await ask(app, "GET", f"/v1/responses/resp_{n}")).json() == {"by": "s2"}
            assert (await ask(app, "POST", f"/v1/workflows/runs/{n}/resume", {})).json() == {"by": "s2"}
            assert (await ask(app, "DELETE", f"/v1/teams/{n}")).json() == {"by": "s2"}
        assert (await ask(app, "GET", "/v1/nothing")).status in (200, 404)


async def test_work_is_asked_for_where_it_is_done() -> None:
    async def busy(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        here = stub.name == "s2"
        await as_json(writer, {"by": stub.name} if here else {"error": {"code": "turn_running"}}, 200 if here else 409)

    async with routed(busy, busy, busy) as (app, _):
        for n in range(6):
            assert (await ask(app, "POST", f"/v1/workflows/runs/{n}/interrupt", {})).json() == {"by": "s2"}
            assert (await ask(app, "POST", f"/v1/teams/{n}/messages", {})).json() == {"by": "s2"}
    async with routed(busy, busy) as (app, stubs):
        assert (await ask(app, "POST", "/v1/teams/n/rounds", {})).status == 409
        assert [len(stub.asked) for stub in stubs] == [1, 1]


async def test_a_team_and_a_run_stay_with_a_replica() -> None:
    async with routed(named, named, named) as (app, _):
        for path in ("/v1/teams/a", "/v1/workflows/runs/run-1"):
            assert len({(await ask(app, "GET", path)).json()["by"] for _ in range(6)}) == 1
        found = [(await ask(app, "GET", f"/v1/teams/team-{n}")).json()["by"] for n in range(40)]
        assert len(set(found)) == 3


def told(*kinds: str) -> bytes:
    """Return the events of a run."""
    return b"".join(b"data: " + json.dumps({"type": kind}).encode() + b"\n\n" for kind in kinds)


RUN_HEAD = head(200, "text/event-stream", None).replace(b"\r\n\r\n", b"\r\nx-cairn-run: run-7\r\n\r\n")


@pytest.mark.parametrize("path", ["/v1/workflows/runs", "/v1/workflows/runs/run-7/resume"])
@pytest.mark.parametrize("over", [False, True])
async def test_a_run_whose_replica_dies_goes_on_at_another(path: str, over: bool) -> None:
    tries: list[tuple[str, bytes]] = []

    async def answers(stub: Stub, path: str, headers: object, body: bytes, writer: asyncio.StreamWriter) -> None:
        tries.append((path, body))
        if len(tries) == 1:
            writer.write(RUN_HEAD + piece(told("run.started", "node.done")) + piece(b'data: {"type": "no'))
            await writer.drain()
            await asyncio.sleep(0.05)
            await stub.die()
        elif len(tries) == 2:
            await as_json(writer, {"error": {"code": "turn_running"}}, 409)
        elif not over:
            writer.write(RUN_HEAD + piece(told("run.started", "node.done", "run.done")) + b"0\r\n\r\n")
            await writer.drain()
        elif path.endswith("/resume"):
            await as_json(writer, {"error": {"code": "conflict"}}, 409)
        else:
            state = {"state": "finished", "result": {"a": 1}, "sources": {}, "conflicts": [], "why": None}
            await as_json(writer, state | {"nodes": {}})

    async with routed(answers, answers) as (app, _):
        got = await ask(app, "POST", path, {"stream": True})
        events = [json.loads(line[6:]) for line in got.body.decode().split("\n\n") if line.startswith("data: {")]
        begun = ["run.started", "node.done"]
        assert [one["type"] for one in events] == [*begun, *([] if over else begun), "run.done"]
        assert tries[1] == ("/v1/workflows/runs/run-7/resume", b'{"stream":true}') and app.counts.followed == 1
        if over:
            assert events[-1] == {"type": "run.done", "state": "finished", "result": {"a": 1}} | {
                "sources": {},
                "conflicts": [],
                "why": "",
            }
            assert tries[-1] == ("/v1/workflows/runs/run-7", b"") and got.body.endswith(b"data: [DONE]\n\n")


async def test_follow_ups_of_a_response_go_to_the_replica_that_keeps_it() -> None:
    async with routed(named, named, named) as (app, _):
        for n in range(6):
            first = (await ask(app, "POST", "/v1/responses", {"input": [{"n": n}]})).json()["by"]
            after = {"previous_response_id": "resp_00aa", "input": "more"}
            assert (await ask(app, "POST", "/v1/responses", after)).json()["by"] == first
            assert (await ask(app, "GET", "/v1/requests/chatcmpl-00aa/events")).json()["by"] == first
            assert (await ask(app, "POST", "/v1/requests/00aa/cancel", {})).json()["by"] == first


async def test_admin_routes_want_the_admin_key() -> None:
    async with routed(named) as (app, _):
        app._admin_key = b"k"
        assert (await ask(app, "GET", "/metrics")).status == 401
        assert (await ask(app, "GET", "/metrics", None, [(b"x-cairn-admin-key", b"k")])).status == 200
        assert (await ask(app, "GET", "/health/live")).status == 200


@pytest.mark.parametrize("url", ["https://a:1", "http://a", "a:1", "http://a:1/path", "http://a:x"])
def test_an_address_that_is_no_replicas_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="replica"):
        Replicas([url])
    with pytest.raises(ConfigError, match="twice"):
        Replicas(["http://a:1", "http://a:1"])
