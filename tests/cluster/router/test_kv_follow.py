"""Following replicas: gaps, deaths, refusals and nonsense cost the index, never a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from cairn.api.http.router_access import RouterAccess
from cairn.cluster.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch, TextBlocks
from cairn.cluster.router import kv_follow
from cairn.cluster.router.app import RouterApp
from cairn.cluster.router.kv_follow import KvFollowers
from cairn.cluster.router.replicas import Replica, Replicas
from cairn.cluster.text_prefixes import text_prefixes
from cairn.config.config import Config
from tests.cluster.router.stubs import Stub, as_json, ask, head, piece
from tests.cluster.stores import Draws

CHATS = "/v1/chat/completions"
LONG = "The cairn stands on the ridge. " * 100


def body(task: str, system: str = LONG, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    return {"messages": messages, **fields}


def event(number: int, value: KVEventBatch | TextBlocks, epoch: str = "ab") -> bytes:
    name = "kv" if isinstance(value, KVEventBatch) else "texts"
    return f"id: {epoch}-{number}\nevent: {name}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"


def batch(*events: KVEvent) -> KVEventBatch:
    return KVEventBatch(0.0, list(events))


def stored(*blocks: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(list(blocks), None, [], 16, medium=medium)


def texts(task: str, first: int = 1, system: str = LONG) -> TextBlocks:
    """Block numbers from `first` on for the beginnings of a request's text, of 64 tokens each."""
    found = text_prefixes(CHATS, {}, json.dumps(body(task, system)).encode())
    return TextBlocks([(text, first + n, 64 * (n + 1)) for n, text in enumerate(found.digests)])


class Teller:
    """A stub that tells events, and answers everything else with its name."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.asked: list[str] = []
        self.stub = Stub("", self.answer)
        self.status, self.usage = 200, {}
        self._writers: list[asyncio.StreamWriter] = []

    async def answer(self, stub: Stub, path: str, headers: Any, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not path.startswith("/v1/cache/events"):
            await as_json(writer, {"by": stub.name, "usage": self.usage})
            return
        self.asked.append(path)
        if self.status != 200:
            await as_json(writer, {"error": {}}, self.status)
            return
        writer.write(head(200, "text/event-stream", None) + b"".join(map(piece, self.sent)))
        self._writers.append(writer)
        await writer.drain()

    def tell(self, data: bytes) -> None:
        self.sent.append(data)
        for writer in self._writers:
            writer.write(piece(data))

    def cut(self) -> None:
        """Cut the streams of events."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def followed(count: int = 3) -> AsyncIterator[tuple[RouterApp, list[Teller]]]:
    """A router that goes by KV, and replicas whose events it follows. Each is called s0, s1, ..."""
    tellers = [Teller() for _ in range(count)]
    for number, one in enumerate(tellers):
        one.stub.name = f"s{number}"
    replicas = Replicas([await one.stub.start() for one in tellers], "kv")
    for one in replicas.all:
        await replicas.check(one)
    followers = KvFollowers(replicas)
    followers.start()
    try:
        yield RouterApp(replicas, Draws(), RouterAccess(Config())), tellers
    finally:
        await followers.close()
        await replicas.close()
        for teller in tellers:
            await teller.stub.die()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_follow, "LOOK_SECONDS", 0.02)


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


def held(app: RouterApp, number: int) -> Replica:
    return app.replicas.all[number]


async def by(app: RouterApp, request: Any, headers: Any = ()) -> str:
    found = await ask(app, "POST", CHATS, request, headers)
    assert found.status == 200
    name: str = found.json()["by"]
    return name


async def give_blocks(app: RouterApp, tellers: Sequence[Teller], holder: int, medium: str = "GPU") -> None:
    """Let one replica hold the told text, and wait until the router knows."""
    tellers[holder].tell(event(1, batch(stored(*range(1, 13), medium=medium))))
    tellers[0].tell(event(2, texts("told")))
    await until(lambda: len(app.replicas.index) and held(app, holder).held.blocks)


@pytest.mark.parametrize("holder", [0, 1, 2])
async def test_a_request_goes_where_most_of_its_prompt_is(holder: int) -> None:
    async with followed() as (app, tellers):
        tellers[holder].tell(event(1, batch(AllBlocksCleared(), stored(*range(1, 13)))))
        tellers[(holder + 1) % 3].tell(event(1, batch(stored(1, 2, 3))))
        tellers[0].tell(event(2, texts("told")))
        has = [held(app, n).held for n in (holder, (holder + 1) % 3)]
        await until(lambda: len(app.replicas.index) and all(one.blocks for one in has))
        for task in range(12):
            assert await by(app, body(f"task {task}")) == f"s{holder}"
        assert app.replicas.index.hits == 12
        elsewhere = {await by(app, body("task", f"{n} other text " * 100)) for n in range(20)}
        assert len(elsewhere) == 3 and app.replicas.index.misses == 20, "what nobody holds is spread"


async def test_what_names_a_session_stays_where_the_name_is() -> None:
    async with followed() as (app, tellers):
        for n in range(3):
            tellers[n].tell(event(1, batch(stored(*range(1, 13)) if n == 1 else stored(99))))
        tellers[0].tell(event(2, texts("told")))
        await until(lambda: len(app.replicas.index) and len(held(app, 1).held.blocks) == 12)
        found = {await by(app, body("t", prompt_cache_key=f"session {n}")) for n in range(30)}
        assert found == {"s0", "s1", "s2"} and app.replicas.index.hits == 0


async def test_a_name_whose_replica_is_crowded_goes_where_its_prompt_is() -> None:
    async with followed() as (app, tellers):
        request = body("t", prompt_cache_key="s")
        first = int((await by(app, request))[1])
        holder, other = [n for n in range(3) if n != first]
        for n in (holder, other):
            tellers[n].tell(event(1, batch(stored(*(range(1, 13) if n == holder else [99])))))
        tellers[0].tell(event(2, texts("told")))
        await until(lambda: len(app.replicas.index) and len(held(app, holder).held.blocks) == 12)
        held(app, first).busy = 40
        assert await by(app, request) == f"s{holder}"


async def test_a_busy_holder_is_left_where_computing_elsewhere_is_sooner() -> None:
    async with followed(2) as (app, tellers):
        await give_blocks(app, tellers, 0)
        for one in app.replicas.all:
            one.computes = 1000.0
        assert await by(app, body("a")) == "s0"
        held(app, 0).busy, held(app, 0).queue, held(app, 0).reported_at = 1, 10.0, asyncio.get_running_loop().time()
        assert await by(app, body("b")) == "s1", "1.5 s of computing instead of 10 s of waiting"


async def test_of_replicas_about_as_soon_the_holder_is_taken() -> None:
    """A model may be so fast that computing the whole prompt takes no time that counts."""
    async with followed() as (app, tellers):
        await give_blocks(app, tellers, 1)
        for one in app.replicas.all:
            one.computes = 1_000_000.0
        assert {await by(app, body(f"task {n}")) for n in range(12)} == {"s1"}


async def test_nothing_waits_at_a_replica_without_a_request_in_hand() -> None:
    """It was faster than estimated."""
    async with followed(2) as (app, tellers):
        await give_blocks(app, tellers, 0)
        for one in app.replicas.all:
            one.computes = 1000.0
        held(app, 0).computing = asyncio.get_running_loop().time() + 10.0
        assert await by(app, body("a")) == "s0"
        held(app, 0).busy, held(app, 0).computing = 1, asyncio.get_running_loop().time() + 10.0
        assert await by(app, body("b")) == "s1"


async def test_a_replica_that_measured_nothing_yet_counts_as_the_others() -> None:
    """One that was started again has its KV on the disk, and no figures."""
    async with followed(2) as (app, tellers):
        await give_blocks(app, tellers, 0, "DISK")
        held(app, 1).computes = 10_000.0
        assert {await by(app, body(f"task {n}")) for n in range(4)} == {"s0"}


async def test_requests_at_once_go_where_the_first_of_them_went() -> None:
    async with followed() as (app, _):
        await until(lambda: all(one.held.follows for one in app.replicas.all))
        found = await asyncio.gather(*(by(app, body(f"task {n}")) for n in range(4)))
        assert len(set(found)) == 1, "before any server told anything"
        assert app.replicas.index.hits == 3 and app.replicas.index.misses == 1


async def test_a_stream_that_was_cut_goes_on_after_the_last_event() -> None:
    async with followed(1) as (app, (teller,)):
        teller.tell(event(7, batch(AllBlocksCleared(), stored(1, 2))))
        await until(lambda: held(app, 0).held.position == "ab-7")
        teller.sent = [event(8, batch(stored(3)))]
        teller.cut()
        await until(lambda: len(held(app, 0).held.blocks) == 3)
        assert teller.asked == ["/v1/cache/events", "/v1/cache/events?after=ab-7"]
        teller.sent = [event(1, batch(AllBlocksCleared(), stored(9)), epoch="cd")]
        teller.cut()  # the server was started again
        await until(lambda: list(held(app, 0).held.blocks) == [9])
        assert app.replicas.index.snapshots == 2


async def test_a_replica_that_dies_drops_out_and_comes_back() -> None:
    async with followed(2) as (app, tellers):
        for n in range(2):
            tellers[n].tell(event(1, batch(AllBlocksCleared(), stored(*range(1, 13)) if n == 0 else stored(99))))
        tellers[1].tell(event(2, texts("told")))
        await until(lambda: len(app.replicas.index) and len(held(app, 0).held.blocks) == 12)
        assert await by(app, body("a")) == "s0"
        port = held(app, 0).pool.port
        await tellers[0].stub.die()
        assert await by(app, body("b")) == "s1"
        assert not held(app, 0).up and not held(app, 0).held.blocks
        tellers[0].stub._server = await asyncio.start_server(tellers[0].stub._serve, "127.0.0.1", port)
        await app.replicas.check(held(app, 0))
        await until(lambda: len(held(app, 0).held.blocks) == 12)
        assert tellers[0].asked[-1] == "/v1/cache/events", "from the beginning"
        assert await by(app, body("c")) == "s0", "what its disk had"


@pytest.mark.parametrize(
    "nonsense",
    [
        b"event: kv\ndata: nonsense\n\n",
        b'event: kv\ndata: {"ts":1,"events":[{"type":"Other"}]}\n\n',
        b'event: texts\ndata: {"texts":[["a",1,2]]}\n\n',
        b'id: ab-1\nevent: texts\ndata: {"texts":[[1,2,0]]}\n\n',
        b"data\n\n\n\nevent: other\ndata: x\n\n",
        b"\xff\xfe\n\n",
        b"x" * (5 << 20),
    ],
)
async def test_nonsense_costs_no_request(nonsense: bytes) -> None:
    async with followed(2) as (app, tellers):
        tellers[0].tell(nonsense)
        await until(lambda: len(tellers[0].asked) > 1 or held(app, 0).held.follows)
        await asyncio.sleep(0.1)
        assert {await by(app, body(f"t{n}", f"{n} " + LONG)) for n in range(20)} == {"s0", "s1"}


async def test_texts_without_tokens_are_not_learned() -> None:
    async with followed(2) as (app, tellers):
        known = text_prefixes(CHATS, {}, json.dumps(body("told")).encode())
        bad = [(text, 1, tokens) for text, tokens in zip(known.digests, (0, -5, 0, -1, 0), strict=False)]
        tellers[0].tell(event(1, TextBlocks([*bad, (5, 5, 5)])))
        await until(lambda: len(app.replicas.index))
        assert len(app.replicas.index) == 1 and await by(app, body("told")) in ("s0", "s1")


async def test_prompts_of_tokens_go_by_kv_too() -> None:
    async with followed() as (app, _):
        await until(lambda: all(one.held.follows for one in app.replicas.all))
        found = set()
        for n in range(5):
            got = await ask(app, "POST", "/v1/completions", {"prompt": [*range(1000, 2000), n]})
            found.add(got.json()["by"])
        assert len(found) == 1 and app.replicas.index.hits == 4


async def test_a_stale_index_costs_time_alone_and_is_counted() -> None:
    async with followed(2) as (app, tellers):
        await give_blocks(app, tellers, 0)
        for teller in tellers:
            teller.usage = {"prompt_tokens": 800, "prompt_tokens_details": {"cached_tokens": 0}}
        assert await by(app, body("a")) == "s0" and app.replicas.index.stale == 1
        tellers[0].usage = {"prompt_tokens": 800, "prompt_tokens_details": {"cached_tokens": 750}}
        assert await by(app, body("b")) == "s0" and app.replicas.index.stale == 1


async def test_a_replica_that_refuses_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async with followed(2) as (app, tellers):
        for teller in tellers:
            teller.status = 401
            teller.cut()
        await until(lambda: "does not tell which KV" in caplog.text)
        assert not held(app, 0).held.follows
        found = {await by(app, body(f"task {n}")) for n in range(6)}
        assert len(found) == 1, "by what was sent there"


async def test_figures_are_shown() -> None:
    async with followed(1) as (app, (teller,)):
        teller.tell(event(1, batch(AllBlocksCleared(), stored(1, 2), BlockRemoved([2], "GPU"))))
        await until(lambda: held(app, 0).held.blocks)
        (listed,) = (await ask(app, "GET", "/router/replicas")).json()["data"]
        assert listed["kv_blocks"] == 1 and listed["kv_followed"] is True
        text = (await ask(app, "GET", "/metrics")).body.decode()
        for line in ("cairn_router_kv_snapshots_total 1", "cairn_router_kv_hits_total 0", "cairn_router_kv_texts 0"):
            assert line in text
        assert f'cairn_router_replica_kv_blocks{{replica="{listed["url"]}"}} 1' in text


async def test_what_a_replica_had_told_when_it_went_away_is_not_taken_afterwards() -> None:
    """Its last events may still be on their way when a request finds it gone."""
    replicas = Replicas(["http://127.0.0.1:1"], "kv")
    (replica,) = replicas.all
    replica.up = replica.held.follows = True
    events = [event(1, batch(stored(1))) + event(2, batch(stored(2))), event(3, batch(stored(3))), b""]

    class Late:
        async def read(self) -> bytes:
            if len(events) == 2:
                assert [*replica.held.blocks] == [1, 2]
                replicas.failed(replica)
            return events.pop(0)

    late: Any = Late()
    await KvFollowers(replicas)._read(replica, late)
    assert not replica.held.blocks and not replica.held.position
