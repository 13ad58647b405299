"""Resumable streams: every event once and in order, whoever reads and from whatever event on."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from cairn.api.http.call import HTTPCall
from cairn.api.http.event_log import PAGE, EventLog, EventLogs
from cairn.api.http.sse import HEARTBEAT, error_event
from cairn.config.config import Config
from cairn.config.values import Secret
from cairn.frontend.waker import Waker
from cairn.types.errors import NotFound, Overloaded
from cairn.types.outputs import Delta
from cairn.types.request import Request
from tests.api.process import served
from tests.api.scripted import ScriptedService, ScriptedStream, done
from tests.api.sockets import Site, request_bytes, site

MARK = {"X-Cairn-Resumable": "1"}
GRACE = 0.15
LONG = 777.0
"""Grace period in seconds that no test waits for: `Graces` ends it."""


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}


def numbered(text: str) -> list[tuple[int, Any]]:
    """Return each event as (id, data)."""
    results = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        first, second = block.split("\n")
        data = second.removeprefix("data: ")
        results.append((int(first.removeprefix("id: ")), data if data == "[DONE]" else json.loads(data)))
    return results


def said(numbered_events: list[tuple[int, Any]]) -> str:
    texts = [event["choices"][0]["delta"].get("content", "") for _, event in numbered_events if event != "[DONE]"]
    return "".join(texts)


async def read(lines: AsyncIterator[str], events: int) -> list[tuple[int, Any]]:
    """Return the next events of a stream."""
    text = ""
    while text.count("\n\n") < events:
        line = await anext(lines)
        text += line + "\n"
    return numbered(text)


async def follow(at: Site, id: str, after: int | None = None, **headers: str) -> httpx.Response:
    async with at.http() as http:
        query = {} if after is None else {"after": after}
        return await http.get(f"/v1/requests/{id}/events", params=query, headers=headers)


async def begin(at: Site, service: ScriptedService, events: int) -> tuple[str, list[tuple[int, Any]]]:
    """Start a resumable chat, read some events and disconnect."""
    async with at.http() as http, http.stream("POST", "/v1/chat/completions", json=chat(), headers=MARK) as response:
        assert response.status_code == 200
        seen = await read(response.aiter_lines(), events)
    return response.headers["x-request-id"], seen


def endless(request: Request) -> list[Any]:
    return [Delta(text="a"), 60.0, done()]


async def until(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_every_event_has_an_id_and_an_ordinary_stream_has_none() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        marked = await http.post("/v1/chat/completions", json=chat(), headers=MARK)
        plain = await http.post("/v1/chat/completions", json=chat())
        off = await http.post("/v1/chat/completions", json=chat(), headers={"X-Cairn-Resumable": "0"})
    result = numbered(marked.text)
    assert [number for number, _ in result] == [1, 2, 3, 4] and result[-1][1] == "[DONE]" and said(result) == "hi"
    assert "id: " not in plain.text and "id: " not in off.text
    assert marked.headers["content-type"] == plain.headers["content-type"]


async def test_a_client_that_comes_back_gets_every_event_once() -> None:
    """Events from while nobody read, live events, and the end."""
    service = ScriptedService(lambda request: [Delta(text="a"), 0.05, Delta(text="b"), Delta(text="c"), 0.1, done()])
    async with site(service) as at:
        id, seen = await begin(at, service, 2)
        await asyncio.sleep(0.08)
        assert not service.streams[0].closed
        rest = await follow(at, id, after=seen[-1][0])
        assert rest.status_code == 200 and rest.headers["content-type"].startswith("text/event-stream")
        received = seen + numbered(rest.text)
        assert [number for number, _ in received] == list(range(1, len(received) + 1))
        assert said(received) == "abc" and received[-1][1] == "[DONE]"
        everything = numbered((await follow(at, id)).text)
        assert everything == received
        assert numbered((await follow(at, "chatcmpl-" + id, after=len(received) - 1)).text) == received[-1:]
        assert (await follow(at, id, after=len(received))).text == ""
        assert numbered((await follow(at, id, after=0, **{"Last-Event-ID": "2"})).text) == received[2:]
    assert service.remembered and len(service.streams) == 1


async def test_two_readers_at_once() -> None:
    service = ScriptedService(lambda request: [Delta(text="a"), 0.05, Delta(text="b"), 0.05, done()])
    async with site(service) as at:
        id, _ = await begin(at, service, 1)
        first, second = await asyncio.gather(follow(at, id), follow(at, id, after=2))
    assert numbered(first.text)[2:] == numbered(second.text) and said(numbered(first.text)) == "ab"


class Graces:
    """Grace periods that have begun: each ends when the test says so, not by the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        real = loop.call_later

        def call_later(delay: float, callback: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
            handle = real(3600.0 if delay == LONG else delay, callback, *args, **more)
            if delay == LONG:
                self.begun.append(handle)
            return handle

        monkeypatch.setattr(loop, "call_later", call_later)

    @property
    def running(self) -> list[asyncio.TimerHandle]:
        return [one for one in self.begun if not one.cancelled()]

    async def pass_by(self) -> None:
        """Wait for the current grace period to begin, and end it."""
        await until(lambda: self.running)
        (handle,) = self.running
        handle._run()
        handle.cancel()


async def test_after_the_grace_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known failure 42: the generation does not go on for a client that never comes back."""
    service = ScriptedService(endless)
    graces = Graces(monkeypatch)
    async with site(service, Config(reconnect_grace=LONG)) as at:
        id, seen = await begin(at, service, 2)
        await until(lambda: graces.running)
        assert not service.streams[0].over
        await graces.pass_by()
        await until(lambda: service.streams[0].over)
        late = numbered((await follow(at, id, after=seen[-1][0])).text)
        assert late[0][0] == 3 and late[0][1]["error"]["code"] == "cancelled" and len(late) == 1
        await graces.pass_by()
        gone = await follow(at, id)
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "id"


async def test_a_reader_that_comes_back_in_time_stops_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedService(endless)
    graces = Graces(monkeypatch)
    async with site(service, Config(reconnect_grace=LONG)) as at:
        id, seen = await begin(at, service, 2)
        await until(lambda: graces.running)
        rest = asyncio.create_task(follow(at, id, after=seen[-1][0]))
        await until(lambda: not graces.running)
        service.streams[0].push(Delta(text="b"))
        service.streams[0].push(done())
        assert said(numbered((await rest).text)) == "b"


async def test_any_other_request_ends_with_its_connection() -> None:
    """Known failure 42."""
    service = ScriptedService(endless)
    async with site(service) as at:
        async with at.http() as http, http.stream("POST", "/v1/chat/completions", json=chat()) as response:
            await anext(response.aiter_bytes())
        await until(lambda: service.streams[0].closed)
        assert (await follow(at, response.headers["x-request-id"])).status_code == 404


async def test_an_error_before_the_first_event_is_a_status() -> None:
    """Known failure 47: a later error is an event, which is replayed to a client that comes back."""

    def refuse(request: Request) -> Any:
        raise Overloaded("the queue is full", retry_after=3.0)

    async with site(ScriptedService(refuse)) as at, at.http() as http:
        response = await http.post("/v1/chat/completions", json=chat(), headers=MARK)
        assert response.status_code == 429 and response.headers["retry-after"] == "3"
        assert (await follow(at, response.headers["x-request-id"])).status_code == 404
    broken = ScriptedService(lambda request: [Delta(text="a"), Overloaded("no more")])
    async with site(broken) as at, at.http() as http:
        response = await http.post("/v1/chat/completions", json=chat(), headers=MARK)
        result = numbered(response.text)
        assert response.status_code == 200 and result[-1][1]["error"]["message"] == "no more"
        assert numbered((await follow(at, response.headers["x-request-id"], after=2)).text) == result[2:]


async def test_an_error_after_a_heartbeat_and_before_the_first_event_is_an_event() -> None:
    """The status has been sent by then, and ending without an event would look like an empty answer."""
    broken = ScriptedService(lambda request: [0.3, Overloaded("no more")])
    async with site(broken, Config(heartbeat=0.05)) as at, at.http() as http:
        response = await http.post("/v1/chat/completions", json=chat(), headers=MARK)
        assert response.status_code == 200 and response.text.startswith(":")
        assert json.loads(response.text.split("data: ")[-1])["error"]["message"] == "no more"


async def test_the_first_heartbeat_comes_after_one_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is sent with it: some proxies give up on a connection that is silent for twice as long."""
    times, real = iter([False]), Waker.sleep

    async def sleep(self: Waker, timeout: float | None = None) -> bool:
        for passed in times if timeout is not None else ():
            return passed
        return await real(self)

    monkeypatch.setattr(Waker, "sleep", sleep)
    async with site(ScriptedService(lambda request: [60.0, done()])) as at, asyncio.timeout(20):
        reader, writer = await at.raw()
        writer.write(request_bytes("POST", "/v1/chat/completions", json.dumps(chat()).encode(), "X-Cairn-Resumable: 1"))
        assert (await reader.readuntil(HEARTBEAT)).startswith(b"HTTP/1.1 200 ")


async def test_another_tenants_request_does_not_exist() -> None:
    config = Config(api_key=(Secret("alpha"), Secret("beta")))
    async with site(ScriptedService(), config) as at, at.http() as http:
        marked = await http.post("/v1/chat/completions", json=chat(), headers=MARK | {"x-api-key": "alpha"})
        id = marked.headers["x-request-id"]
        path = f"/v1/requests/{id}/events"
        assert (await http.get(path)).status_code == 401
        own, other = [await http.get(path, headers={"x-api-key": key}) for key in ("alpha", "beta")]
        never = await http.get("/v1/requests/00000000000000ff/events", headers={"x-api-key": "beta"})
    assert own.text == marked.text
    assert other.status_code == never.status_code == 404 and other.json() == never.json()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("after=-1", "after must be the id"),
        ("after=x", "after must be the id"),
        ("after=", "after must be the id"),
        ("after=1&b=2", "after must be the id"),
        ("before=1", "the only parameter"),
        ("after=9", "the last event so far is 4"),
    ],
)
async def test_bad_parameters(query: str, message: str) -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        marked = await http.post("/v1/chat/completions", json=chat(), headers=MARK)
        response = await http.get(f"/v1/requests/{marked.headers['x-request-id']}/events?{query}")
        assert response.status_code == 400 and message in response.json()["error"]["message"]
        assert (await http.get("/v1/requests/nothing/events")).status_code == 404
        assert (await http.post("/v1/requests/00000000000000ff/events", json={})).status_code == 405


async def test_only_a_stream_is_resumable() -> None:
    async with site(ScriptedService()) as at, at.http() as http:
        for header, body, message in (
            ("1", chat(stream=False), "needs stream to be true"),
            ("yes", chat(), "must be 1 or 0"),
        ):
            response = await http.post("/v1/chat/completions", json=body, headers={"X-Cairn-Resumable": header})
            assert response.status_code == 400 and message in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "X-Cairn-Resumable"


async def test_head_tells_whether_a_stream_exists() -> None:
    service = ScriptedService(endless)
    async with site(service, Config(reconnect_grace=GRACE)) as at, at.http() as http:
        id, _ = await begin(at, service, 1)
        response = await http.head(f"/v1/requests/{id}/events")
        assert response.status_code == 200 and response.text == ""
        await until(lambda: service.streams[0].over)


async def test_text_completions_and_choices_are_resumable_too() -> None:
    service = ScriptedService(lambda request: [Delta(text="a"), 0.05, Delta(text="b"), done()])
    body = {"model": "scripted", "prompt": "x", "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    async with site(service) as at, at.http() as http:
        whole = await http.post("/v1/completions", json=body, headers=MARK)
        result = numbered(whole.text)
        texts = ["", ""]
        for _, event in result[:-2]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == ["ab", "ab"] and result[-2][1]["usage"]["completion_tokens"] == 4
        assert numbered((await follow(at, whole.headers["x-request-id"])).text) == result


# ------------------------------------------------------------------------------------------------------------ logs


def event(number: int, size: int = 60) -> bytes:
    return b"data: %d %s\n\n" % (number, b"x" * size)


def rest(log: EventLog, after: int) -> list[bytes]:
    """Return all following events; fail if their numbers have a gap."""
    results = []
    while True:
        data, to = log.read(after)
        if to == after:
            return results
        for block in data.split(b"\n\n")[:-1]:
            first, second = block.split(b"\n")
            after += 1
            assert first == b"id: %d" % after
            results.append(second + b"\n\n")
        assert to == after


def test_a_tape_reads_from_any_event_on() -> None:
    rng = random.Random(5)
    log = EventLog(1, b"", lambda: None, error_event)
    written: list[bytes] = []
    while log.size < 6000 or len(written) < 3000:
        batch = [event(len(written) + n, rng.randrange(200)) for n in range(rng.randrange(4))]
        log.add(b"".join(batch))
        written += batch
    assert len(log._pages) > 2 and log.last == len(written) and log.first == 1
    for after in [0, 1, *(page.first - 2 + n for page in list(log._pages)[1:] for n in range(3)), log.last]:
        assert rest(log, after) == written[after:], after
    assert log.size < sum(map(len, written)) / 2
    assert log.shorten() and log.first > 1
    assert rest(log, log.first - 1) == written[log.first - 1 :]
    with pytest.raises(NotFound, match=f"events up to {log.first - 1} are no longer kept"):
        log.read(log.first - 2)


class Line:
    """The part of a call that an event log needs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = f"{number:016x}"
        self.salt = b""


async def noise(events: int, seed: int) -> AsyncGenerator[bytes, None]:
    rng = random.Random(seed)
    for _ in range(events):
        yield b"data: " + rng.randbytes(500).hex().encode() + b"\n\n"
        await asyncio.sleep(0)


async def test_tapes_keep_to_their_memory() -> None:
    """Known failure 43: logs that nobody reads are dropped, ended ones first, and the reported memory is exact."""
    limit = 8 * PAGE
    logs = EventLogs(60.0, limit)
    for number in range(1, 6):
        logs.start(Line(number), noise(200, number), lambda: None, 1.0)  # type: ignore[arg-type]
    largest = 0
    while logs._tasks:
        await asyncio.sleep(0)
        largest = max(largest, logs.size)
        assert logs.size == sum(log.size for log in logs._logs.values())
    assert limit / 2 < largest <= limit + 2 * PAGE
    assert 0 < len(logs._logs) < 6
    many = EventLogs(60.0, limit)
    for number in range(1, 1000):
        many.start(Line(number), noise(1, number), lambda: None, 1.0)  # type: ignore[arg-type]
        await asyncio.sleep(0)
    while many._tasks:
        await asyncio.sleep(0)
    assert many.size <= limit and 10 < len(many._logs) < 200


async def test_a_tenant_with_many_logs_pushes_out_its_own_alone() -> None:
    logs = EventLogs(60.0, 8 * PAGE)
    own = cast(HTTPCall, SimpleNamespace(number=1, salt=b"another"))
    logs.start(own, noise(1, 1), lambda: None, 1.0)
    for number in range(2, 200):
        logs.start(cast(HTTPCall, Line(number)), noise(1, number), lambda: None, 1.0)
        while logs._tasks:
            await asyncio.sleep(0)
    assert logs.state(1, b"another") == "finished"
    assert len(logs._logs) < 150 and logs.size == sum(logs._sizes.values())


async def test_a_tape_that_lost_its_beginning_says_so() -> None:
    service = ScriptedService(lambda request: [*(Delta(text="x" * 60) for _ in range(900)), 60.0, done()])
    async with site(service, Config(reconnect_grace=5.0)) as at:
        id, _ = await begin(at, service, 1)
        logs = at.app.state.logs
        await until(lambda: logs._logs[int(id, 16)].last > 900)
        assert logs._logs[int(id, 16)].shorten()
        lost = await follow(at, id, after=3)
        assert lost.status_code == 404 and lost.json()["error"]["param"] == "after"
        stream: ScriptedStream = service.streams[0]
        stream.push(done())
        later = await follow(at, id, after=900)
        assert numbered(later.text)[-1][1] == "[DONE]"


# ---------------------------------------------------------------------------------------------------- a real server


async def test_a_reader_that_is_slow_does_not_hold_up_the_answer() -> None:
    service = ScriptedService(lambda request: [*(Delta(text="x" * 2000) for _ in range(2000)), done()])
    async with site(service, Config(stream_buffer_kib=16)) as at:
        _, writer = await at.raw(limit=1024)
        writer.write(request_bytes("POST", "/v1/chat/completions", json.dumps(chat()).encode(), "X-Cairn-Resumable: 1"))
        await until(lambda: service.streams and service.streams[0].over, 20)
        (id,) = at.app.state.logs._logs
        result = numbered((await follow(at, f"{id:016x}")).text)
        assert len(said(result)) == 2000 * 2000 and result[-1][1] == "[DONE]"


def lines_of(url: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    return urllib.request.urlopen(request, timeout=30)


def test_a_broken_connection_costs_nothing_end_to_end() -> None:
    """A stream read over many connections equals the same stream read over one, event for event."""
    body = {"model": "demo", "prompt": [400, 401, 402], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with served(reconnect_grace=1.0) as server:
        pieces: list[tuple[int, Any]] = []
        response = lines_of(server.url + "/v1/completions", body, **MARK)
        id = response.headers["x-request-id"]
        rng = random.Random(3)
        while True:
            text = ""
            for _ in range(3 * rng.randrange(1, 60)):
                text += response.readline().decode()
            response.close()
            pieces += numbered(text[: text.rfind("\n\n") + 2])
            if pieces[-1][1] == "[DONE]":
                break
            response = lines_of(f"{server.url}/v1/requests/{id}/events?after={pieces[-1][0]}")
        with lines_of(f"{server.url}/v1/requests/{id}/events") as response:
            whole = numbered(response.read().decode())
        assert pieces == whole and [number for number, _ in whole] == list(range(1, len(whole) + 1))
        assert whole[-2][1]["usage"]["completion_tokens"] == 400
        with lines_of(server.url + "/v1/completions", body) as response:
            plain = response.read().decode()
        joined = "".join(event["choices"][0]["text"] for _, event in whole[:-2])
        chunks = [json.loads(line[6:]) for line in plain.splitlines() if line.startswith("data: {")]
        assert joined == "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        time.sleep(2.5)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            lines_of(f"{server.url}/v1/requests/{id}/events")


def test_after_the_grace_the_worker_is_free_end_to_end() -> None:
    """Known failure 42: the request is cancelled in the worker, and reported as cancelled."""
    body = {"model": "demo", "prompt": [400], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with served(reconnect_grace=0.05) as server:
        response = lines_of(server.url + "/v1/completions", body, **MARK)
        id = response.headers["x-request-id"]
        response.readline()
        response.close()
        end = time.monotonic() + 10
        while True:
            with lines_of(f"{server.url}/v1/requests/{id}") as status:
                state = json.load(status)["state"]
            if state != "running":
                break
            assert time.monotonic() < end
            time.sleep(0.05)
        assert state == "cancelled"


async def test_a_finished_event_log_holds_no_reference_to_its_source() -> None:
    """The log is kept for the grace period, and a request holds its whole prompt."""

    class Running:
        def cancel(self) -> None:
            raise AssertionError("it is over")

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    call = cast(HTTPCall, SimpleNamespace(number=1, salt=b""))
    logs, running = EventLogs(60.0, 1 << 20), Running()
    left = weakref.ref(running)
    logs.start(call, events(), running.cancel, 1.0)
    del running
    await asyncio.gather(*logs._tasks)
    assert left() is None and logs._logs[1].read(0)[1] == 1
