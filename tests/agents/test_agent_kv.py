"""The KV of agents in the tiers: pinned, prefetched, evicted, and gone with the agent unless others share it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents import kv, request_contexts
from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.content import Branch, Content
from cairn.agents.log.records import AgentRecord, TurnRecord
from cairn.agents.request_contexts import RequestContexts
from cairn.agents.turn_tree import Agent, Turn
from cairn.kv.disk.chunk_file import parse_name
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity
from cairn.types.errors import Conflict, Unavailable
from cairn.types.stats import Placed
from tests.agents.house import Clock, House, house
from tests.files import Fault
from tests.service.tiny import collect, request, until

LONG = "A context that is long enough to fill some chunks of sixty-four tokens each. " * 4


async def grown(at: House, *ids: str) -> None:
    """Create agents with a turn each, whose KV is on disk."""
    for id in ids:
        await at.agents.create("default", id=id)
        await at.say(id, f"{id}: {LONG}")
    with contextlib.suppress(Unavailable):  # the disk may be too small for all of it
        await at.service.flush()


async def where(at: House, id: str) -> tuple[int, int]:
    """Return how many leading tokens are in the pool and on disk."""
    placed = await at.agents.where("default", id)
    return placed.pool, placed.disk


async def test_kv_that_nobody_used_for_kv_ttl_goes_and_pinned_kv_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the `--kv-ttl` option down to the files."""
    clock, store = Clock(), tmp_path / "kv"
    monkeypatch.setattr("cairn.worker.loading.SystemClock", lambda: clock)

    def chunks() -> int:
        return sum(parse_name(path.name) is not None for path in store.rglob("*"))

    async with house(folder, kv_dir=str(store), kv_ttl=3600.0) as at:
        await grown(at, "bob")
        await at.agents.pin("default", "bob", True)
        pinned = chunks()
        await grown(at, "ada")
        both = [(await where(at, id))[1] for id in ("bob", "ada")]
        assert 0 < pinned < chunks() and min(both) > 200
        clock.ahead = 3700.0
        await until(lambda: chunks() == pinned)
        assert [(await where(at, id))[1] for id in ("bob", "ada")] == [both[0], 0]


async def test_kv_is_given_up_brought_up_and_shown(folder: Path, tmp_path: Path) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        size = len(await at.agents.context("default", "ada"))
        pool, disk = await where(at, "ada")
        assert pool >= size // 16 * 16 - 16 and disk >= size // 64 * 64 - 64 > 200
        await at.agents.evict("default", "ada")
        assert await where(at, "ada") == (0, disk)
        placed = await at.agents.prefetch("default", "ada")
        assert placed.pool == disk
        await at.agents.evict("default", "ada", disk=True)
        assert await where(at, "ada") == (0, 0)


async def test_deleting_an_agent_takes_its_kv_along_but_not_what_others_share(folder: Path, tmp_path: Path) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada", "bob")
        await at.agents.fork("default", "ada", new_id="eve")
        await at.say("ada", "only ada's: " + LONG)
        await at.service.flush()
        ids = await at.agents.context("default", "ada")
        shared = (await where(at, "eve"))[1]
        before = await at.service.where(ids, b"default")
        assert before.disk > shared + 100
        await at.agents.delete("default", "ada")
        left = await at.service.where(ids, b"default")
        assert left.disk == shared // 64 * 64, "of what is shared whole chunks stay, the rest is gone"
        assert (await where(at, "bob"))[1] > 200
        await at.agents.delete("default", "eve")
        assert (await at.service.where(ids, b"default")).disk == 0


async def test_a_deleted_forks_kv_includes_turns_of_its_deleted_origin(folder: Path, tmp_path: Path) -> None:
    """Neither its head nor a branch of its own leads there, only the turn at which it was forked."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        await at.say("ada", "more: " + LONG)
        await at.service.flush()
        ids = await at.agents.context("default", "ada")
        await at.agents.fork("default", "ada", new_id="bob")
        await at.agents.delete("default", "ada")
        await at.agents.rollback("default", "bob", turn=0)
        assert (await at.service.where(ids, b"default")).disk > 400
        await at.agents.delete("default", "bob")
        left = await at.service.where(ids, b"default")
        assert (left.pool, left.disk) == (0, 0)


async def test_an_expired_agent_unused_since_the_start_takes_its_kv_along(folder: Path, tmp_path: Path) -> None:
    """No request brought the tenant's salt since the start: it is derived from the tenant's name."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="ada", ttl=60)
        await at.say("ada", LONG)
        await at.service.flush()
        ids = await at.agents.context("default", "ada")
        assert (await at.service.where(ids, b"default")).disk > 200
        await at.again(clean=True)
        at.clock.ahead = 61
        await at.agents.tend()
        assert (await at.service.where(ids, b"default")).disk == 0


async def test_an_agent_that_is_rolled_back_first_thing_after_a_start_stays_pinned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", pinned=True)
        for text in ("one", "two"):
            await at.say("ada", text)
        await at.again(clean=True)
        pinned, real = list[bytes](), at.service.pin

        async def pin(owner: str, tokens: Sequence[int], salt: bytes = b"") -> None:
            pinned.append(salt)
            await real(owner, tokens, salt)

        monkeypatch.setattr(at.service, "pin", pin)
        await at.agents.rollback("default", "ada", turn=1)
        await at.agents.kv.settled()
        assert pinned == [b"default"]


async def test_deleting_agents_without_turns_does_not_visit_all_of_the_tenant(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When many expired at once, each deletion used to look at every agent of the tenant."""
    looked = 0
    of = AgentRegistry.of

    def counted(registry: AgentRegistry, tenant: str) -> list[Agent]:
        nonlocal looked
        looked += 1
        return of(registry, tenant)

    async with house(folder) as at:
        for n in range(5):
            await at.agents.create("default", id=f"a{n}", ttl=10)
        at.clock.ahead = 60
        monkeypatch.setattr(AgentRegistry, "of", counted)
        await at.agents.tend()
        assert looked == 0
        assert not at.agents.page("default").agents


async def test_an_abandoned_branch_takes_along_its_kv_but_not_what_the_agent_still_has(
    folder: Path, tmp_path: Path
) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        await at.say("ada", "left: " + LONG)
        await at.say("ada", "left, too: " + LONG)
        left = await at.agents.context("default", "ada")
        await at.agents.rollback("default", "ada", turn=1)
        await at.say("ada", "kept: " + LONG)
        await at.service.flush()
        ids = await at.agents.context("default", "ada")
        kept, all_of_it = await at.service.where(ids, b"default"), await at.service.where(left, b"default")
        same = next(n for n, (one, two) in enumerate(zip(ids, left, strict=False)) if one != two)
        assert kept.disk > 400 and all_of_it.disk > 600
        at.clock.ahead = 8 * 86_400
        await at.agents.tend()
        assert (await at.service.where(left, b"default")).disk == same // 16 * 16, (
            "what is kept has the rest of a chunk"
        )
        assert (await at.service.where(ids, b"default")).disk == kept.disk


@pytest.mark.parametrize("pinned", [True, False])
async def test_pinned_contexts_stay_when_the_disk_is_full(folder: Path, tmp_path: Path, pinned: bool) -> None:
    """From its creation on, and with what a later turn adds."""
    async with house(folder, kv_dir=str(tmp_path / "kv"), kv_disk_gb=200e-6) as at:
        await at.agents.create("default", id="ada", pinned=pinned)
        for text in (LONG, "And more."):
            await at.say("ada", text)
            await at.agents.kv.settled()
        await at.service.flush()
        mine = (await where(at, "ada"))[1]
        assert mine > 200
        await grown(at, *(f"other{n}" for n in range(14)))
        assert ((await where(at, "ada"))[1] == mine) is pinned


async def test_requests_in_the_name_of_a_pinned_agent_are_pinned_beside_its_context(
    folder: Path, tmp_path: Path
) -> None:
    """Only the latest of them; both are unpinned when the agent is."""
    async with house(folder, kv_dir=str(tmp_path / "kv"), kv_disk_gb=250e-6) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.say("ada", LONG)
        await at.agents.create("default", id="bob")
        done = (await at.say("bob", "bob: " + LONG)).done
        assert done is not None
        at.agents.chats.account(
            "default", at.agents.chats.named("default", "ada"), await at.agents.context("default", "bob"), done
        )
        await at.agents.kv.settled()
        await at.service.flush()
        mine, tied = (await where(at, "ada"))[1], (await where(at, "bob"))[1]
        assert mine > 200 and tied > 200
        await grown(at, *(f"other{n}" for n in range(14)))
        assert ((await where(at, "ada"))[1], (await where(at, "bob"))[1]) == (mine, tied)
        await at.agents.pin("default", "ada", False)
        await grown(at, *(f"more{n}" for n in range(14)))
        assert (await where(at, "ada"))[1] < mine and (await where(at, "bob"))[1] < tied


async def test_a_pin_follows_a_rollback(folder: Path, tmp_path: Path) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv"), kv_disk_gb=250e-6) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.say("ada", "First: " + LONG)
        first = await at.agents.context("default", "ada")
        await at.agents.rollback("default", "ada", turn=0)
        await at.say("ada", "Second: " + LONG)
        await at.agents.kv.settled()
        await at.agents.rollback("default", "ada", turn=1)
        assert (await at.agents.context("default", "ada")) == first
        await at.agents.kv.settled()
        await at.service.flush()
        mine = (await where(at, "ada"))[1]
        assert mine > 200
        await grown(at, *(f"other{n}" for n in range(14)))
        assert (await where(at, "ada"))[1] == mine


@pytest.mark.parametrize("what", ["delete", "unpin", "rollback"])
async def test_a_pin_whose_context_is_read_slowly_does_not_outlive_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The agent is deleted, unpinned or moved while the pin waits for the log."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        for text in ("first", "second"):
            await at.say("ada", text)
        pins: dict[str, list[int]] = {}

        async def pin(owner: str, tokens: Sequence[int], salt: bytes = b"") -> None:
            pins[owner] = list(tokens)

        async def unpin(owner: str) -> None:
            pins.pop(owner, None)

        monkeypatch.setattr(at.service, "pin", pin)
        monkeypatch.setattr(at.service, "unpin", unpin)
        reading, go = asyncio.Event(), asyncio.Event()
        branch = at.agents._archive.branch

        async def slow(turn: Turn) -> Branch:
            context = await branch(turn)
            if not reading.is_set():
                reading.set()
                await go.wait()
            return context

        monkeypatch.setattr(at.agents._archive, "branch", slow)
        pinning = asyncio.create_task(at.agents.pin("default", "ada", True))
        await reading.wait()
        if what == "delete":
            await at.agents.delete("default", "ada")
        elif what == "unpin":
            await at.agents.pin("default", "ada", False)
        else:
            await at.agents.rollback("default", "ada", turn=1)
        await at.agents.kv.settled()
        go.set()
        await pinning
        left = [list(await at.agents.context("default", "ada"))] if what == "rollback" else []
        assert list(pins.values()) == left


async def test_a_context_pinned_meanwhile_is_not_evicted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding out what other agents share takes long, so a pin may come in between."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        before = await where(at, "ada")
        waiting, go = asyncio.Event(), asyncio.Event()
        shared = at.agents.kv._shared

        async def slow(*args: Any, **how: Any) -> list[int]:
            waiting.set()
            await go.wait()
            return await shared(*args, **how)

        monkeypatch.setattr(at.agents.kv, "_shared", slow)
        evicting = asyncio.create_task(at.agents.evict("default", "ada", disk=True))
        await waiting.wait()
        assert (await at.agents.pin("default", "ada", True)).pinned
        go.set()
        with pytest.raises(Conflict, match="unpin it first"):
            await evicting
        assert await where(at, "ada") == before
        await at.agents.evict("default", "ada")
        assert await where(at, "ada") == (0, before[1])


async def test_the_kv_of_an_agent_deleted_without_a_worker_goes_when_there_is_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV holds the agent's tokens, and nobody asks for its deletion a second time."""
    monkeypatch.setattr(kv, "RETRY_SECONDS", 0.01)
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        ids = await at.agents.context("default", "ada")
        assert (await at.service.where(ids, b"default")).disk > 200
        asked: list[str] = []

        async def gone(what: str, **fields: object) -> None:
            asked.append(what)
            raise Unavailable("the worker is being replaced", retry_after=1.0)

        with monkeypatch.context() as without:
            without.setattr(at.service._supervisor, "ask", gone)
            await at.agents.delete("default", "ada")
            await asyncio.sleep(0.05)
            assert len(asked) > 1
        await asyncio.wait_for(at.agents.kv.settled(), 10)
        assert (await at.service.where(ids, b"default")).disk == 0


async def test_turns_of_the_served_model_go_though_another_model_answered_the_last(
    folder: Path, tmp_path: Path
) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        mine, ids = at.service.spec, await at.agents.context("default", "ada")
        at.service.spec = msgspec.structs.replace(mine, identity=b"another model's")
        await at.say("ada", "To another.")
        at.service.spec = mine
        await at.service.flush()
        assert (await at.service.where(ids, b"default")).disk > 200
        await at.agents.delete("default", "ada")
        assert (await at.service.where(ids, b"default")).disk == 0


async def test_a_context_that_does_not_go_keeps_no_other_from_going(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "RETRY_SECONDS", 0.01)
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        await at.agents.rollback("default", "ada", turn=0)
        await at.say("ada", "Otherwise. " + LONG)
        evicted: list[Sequence[int]] = []
        evict = at.service.evict

        async def refuse_first(ids: Sequence[int], *args: Any, **how: Any) -> Placed:
            evicted.append(ids)
            if len(evicted) == 1:
                raise Unavailable("the disk does not let it go")
            return await evict(ids, *args, **how)

        monkeypatch.setattr(at.service, "evict", refuse_first)
        await at.agents.delete("default", "ada")
        await at.agents.kv.settled()
        first, second, *again = map(list, evicted)
        assert first != second and again == [first], "only that one is tried again"


async def test_a_pin_waits_for_the_worker_and_leaves_alone_what_another_model_pinned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "RETRY_SECONDS", 0.01)
    async with house(folder) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.say("ada", LONG)
        await at.agents.kv.settled()
        calls: list[Sequence[int]] = []

        async def pin(owner: str, tokens: Sequence[int], salt: bytes = b"") -> None:
            calls.append(tokens)
            if len(calls) == 1:
                raise Unavailable("the worker is being replaced")

        monkeypatch.setattr(at.service, "pin", pin)
        ids = await at.agents.context("default", "ada")
        for _ in range(2):  # the second replaces the first
            at.agents.kv.pin_later(at.agents.chats.named("default", "ada"))
        await at.agents.kv.settled()
        assert [tuple(call) for call in calls] == [ids, ids] and not at.agents.kv._pinning
        at.service.spec = msgspec.structs.replace(at.service.spec, identity=b"another model's")
        await at.agents.pin("default", "ada", True)
        assert len(calls) == 2


async def test_kv_of_requests_in_an_agents_name_goes_with_it(folder: Path, tmp_path: Path) -> None:
    """Their KV and replay records go, but not what other agents share."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada", "bob")
        tied = [*(await at.agents.context("default", "bob"))[:192], *range(5, 105)]
        done = (await at.say("bob", "more")).done
        assert done is not None
        await collect(at.service.generate(request(at.service, tuple(tied), 2, salt=b"default", durable=True)))
        await at.service.flush()
        assert (await at.service.where(tied, b"default")).disk == 288
        sampled = Sampled(b"b" * 32, AnswerIdentity(b"v" * 32, "because"), [1, 2, 3], 1)
        for name in ("ada", None):
            owner = at.agents.chats.named("default", name) if name else None
            at.agents.chats.keep("default", sampled._replace(before=str(name).encode() * 10), owner)
            at.agents.chats.account("default", owner, tied, done)
        await at.agents.writer.sync()
        await at.agents.delete("default", "ada")
        assert (await at.service.where(tied, b"default")).disk == 192, "what bob shares stays"
        held = b"".join(at.files.files().values())
        assert b"ada" * 10 not in held and b"None" * 10 in held
        await at.again(clean=True)
        held = b"".join(at.files.files().values())
        assert b"ada" * 10 not in held and b"None" * 10 in held


async def test_an_agent_of_a_tenant_that_is_no_longer_configured_takes_no_kv_along(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its salt is unknown, and the empty one is the default tenant's: only pins go."""
    async with house(folder, {"default": b"", "acme": b"acme"}, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.agents.create("acme", id="ada", ttl=60)
        await at.agents.create("acme", id="bob")
        for tenant, id in (("default", "ada"), ("acme", "ada"), ("acme", "bob")):
            await at.say(id, LONG, tenant)
        await at.agents.rollback("acme", "bob", turn=0)
        await at.agents.kv.settled()
        await at.service.flush()
        before = await where(at, "ada")
        assert before[1] > 200
        at.salts = {"default": b""}
        await at.again(clean=True)
        unpinned: list[str] = []

        async def unpin(owner: str) -> None:
            unpinned.append(owner)

        monkeypatch.setattr(at.service, "unpin", unpin)
        at.clock.ahead = 8 * 86_400
        await at.agents.tend()
        assert [agent.id for agent in at.agents._agents.registry.of("acme")] == ["bob"]
        assert await where(at, "ada") == before
        assert {salt for salt, _ in at.service.recent._tenants} == {b"", b"acme"}, (
            "and what says why a prompt is missed stays"
        )
        await at.agents.delete("acme", "bob")
        assert await where(at, "ada") == before and len(unpinned) == 4


async def test_a_deleted_agent_leaves_kv_shared_by_requests_of_others(folder: Path, tmp_path: Path) -> None:
    """Both agents are used by ordinary requests only; what an agent's requests need is not collected."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="eve")
        done = (await at.say("eve", LONG)).done
        assert done is not None
        contexts = {"ada": [*range(5, 261), *[7] * 100], "bob": [*range(5, 261), *[8] * 100]}
        contexts["eve"] = [*(await at.agents.context("default", "eve"))[:192], *[9] * 100]
        for id, ids in contexts.items():
            if id != "eve":
                await at.agents.create("default", id=id, pinned=id == "bob")
            await collect(at.service.generate(request(at.service, tuple(ids), 2, salt=b"default", durable=True)))
            at.agents.chats.account("default", at.agents.chats.named("default", id), ids, done)
        await at.agents.kv.settled()
        await at.service.flush()

        async def disk(id: str) -> int:
            return (await at.service.where(contexts[id], b"default")).disk

        assert [await disk(id) for id in contexts] == [352, 352, 288]
        await at.agents.delete("default", "ada")
        assert [await disk(id) for id in contexts] == [256, 352, 288]
        await at.agents.delete("default", "bob")
        assert [await disk(id) for id in contexts] == [0, 0, 288]
        await at.agents.rollback("default", "eve", turn=0)
        at.clock.ahead = 8 * 86_400
        await at.agents.tend()
        assert await disk("eve") == 288


def without_worker(at: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no worker answer from here on."""

    async def gone(what: str, **fields: object) -> None:
        raise Unavailable("the worker is being replaced", retry_after=1.0)

    monkeypatch.setattr(at.service._supervisor, "ask", gone)


@pytest.mark.parametrize("clean", [True, False])
async def test_the_pins_of_an_agent_deleted_without_a_worker_go_at_the_next_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    """Nobody can name their owner any more, so the log does until they are gone."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.say("ada", LONG)
        await at.agents.kv.settled()
        (pins,) = (tmp_path / "kv" / "models").glob("*/pins")
        assert len(list(pins.iterdir())) == 1
        with monkeypatch.context() as without:
            without_worker(at, without)
            await at.agents.delete("default", "ada")
            await at.again(clean=clean)  # the next start finds no worker either
            await at.agents.tend()
            await at.agents.close()
        await at.open()
        await asyncio.wait_for(at.agents.kv.settled(), 10)
        assert list(pins.iterdir()) == []
        await at.agents.tend()
        asked: list[str] = []

        async def unpin(owner: str) -> None:
            asked.append(owner)

        monkeypatch.setattr(at.service, "unpin", unpin)
        await at.again(clean=clean)
        await at.agents.kv.settled()
        assert asked == [], "the log has forgotten it"


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
async def test_changes_that_did_not_reach_the_stores_reach_them_at_the_next_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool, clean: bool
) -> None:
    """A pinned agent gets its pin, and one that is not pinned leaves no pin behind for ever."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await grown(at, "ada")
        await at.agents.pin("default", "ada", not pinned)
        (pins,) = (tmp_path / "kv" / "models").glob("*/pins")
        assert len(list(pins.glob("*"))) == (not pinned)
        with monkeypatch.context() as without:
            without_worker(at, without)
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await at.agents.pin("default", "ada", pinned)
            await at.agents.tend()
            await at.again(clean=clean)  # the next start finds no worker either
            await at.agents.close()
        at.salts, before = {}, at.salts  # nor does the one after it find the tenant
        await at.open()
        await at.agents.kv.settled()
        await at.agents.close()
        at.salts = before
        await at.open()
        await asyncio.wait_for(at.agents.kv.settled(), 10)
        assert at.agents.get("default", "ada").pinned is pinned
        pin_files = {path.name: path.read_bytes() for path in pins.glob("*")}
        assert len(pin_files) == pinned
        await at.agents.pin("default", "ada", pinned)
        assert {path.name: path.read_bytes() for path in pins.glob("*")} == pin_files
        await at.agents.tend()
        reported: list[str] = []

        async def tell(owner: str, *context: object) -> None:
            reported.append(owner)

        monkeypatch.setattr(at.service, "pin", tell)
        monkeypatch.setattr(at.service, "unpin", tell)
        await at.again(clean=clean)
        await at.agents.kv.settled()
        assert reported == [], "the log has forgotten it"


@pytest.mark.parametrize("calls", range(10))
async def test_an_agent_is_unpinned_or_back_after_a_refused_deletion_and_a_power_cut(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Without a worker; an agent that is back is pinned as before."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="ada", pinned=True)
        await at.say("ada", LONG)
        await at.agents.kv.settled()
        with monkeypatch.context() as without:
            without_worker(at, without)
            at.files.fail(Fault(at.files.calls + calls, errno.EIO, sticky=True))
            with contextlib.suppress(Unavailable):
                await at.agents.delete("default", "ada")
            at.files.heal()
            after = at.files.crash(random.Random(calls))
            await at.agents.close()
        at.files = after
        await at.open()
        await asyncio.wait_for(at.agents.kv.settled(), 10)
        back = len(at.agents.page("default").agents)
        assert len(list((tmp_path / "kv").glob("models/*/pins/*"))) == back


async def test_deletions_read_no_other_agent_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many deletions begin at once."""
    async with house(folder) as at:
        for n in range(6):
            await at.agents.create("default", id=f"a{n}", messages=[{"role": "system", "content": LONG}])
            await at.say(f"a{n}", f"{n}: {LONG}")
        read: list[int] = []
        real = at.agents._archive.readable

        async def readable(turns: Sequence[Turn]) -> list[Content | None]:
            read.append(turns[-1].key)
            return await real(turns)

        monkeypatch.setattr(at.agents._archive, "readable", readable)
        for n in range(3):
            await at.agents.delete("default", f"a{n}")
        assert len(read) == 3 + 5 and len(set(read)) == 6
        await at.say("a4", "More.")
        read.clear()
        await at.agents.delete("default", "a3")
        assert len(read) == 2, "its own, and that whose head is another now"


async def test_branches_are_evicted_one_after_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may have a thousand of them, each as long as the model's context."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        for n in range(4):
            await at.agents.rollback("default", "ada", turn=0)
            await at.say("ada", f"{n}: {LONG}")
        done: list[str] = []
        read, evict = at.agents._archive.readable, at.service.evict

        async def readable(turns: Sequence[Turn]) -> list[Content | None]:
            done.append("read")
            return await read(turns)

        async def given_up(*args: Any, **how: Any) -> Placed:
            done.append("given up")
            return await evict(*args, **how)

        monkeypatch.setattr(at.agents._archive, "readable", readable)
        monkeypatch.setattr(at.service, "evict", given_up)
        await at.agents.delete("default", "ada")
        assert done == ["read", "given up"] * 4


def named(key: int, tenant: str = "default", *, pinned: bool = False) -> Agent:
    root = Turn(key + 1000, TurnRecord(agent=0, number=0), None)
    record = AgentRecord(
        id=f"a{key}", tenant=tenant, created=1.0, used=1.0, root=root.key, base=root.key, head=root.key, pinned=pinned
    )
    return Agent(key, record, root, root)


def test_contexts_of_requests_are_remembered_within_a_bound_over_all_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent whose last request is oldest loses contexts first, and within an agent the oldest context goes."""
    monkeypatch.setattr(request_contexts, "MOST_IDS", 1000)
    kept, one, other = RequestContexts(), named(1), named(2)
    for n in range(3):
        kept.add(one, [n] * 200)
    kept.add(other, [7] * 300)
    kept.add(other, [7] * 400)  # it begins with the one before it
    assert kept._size == 1000
    kept.add(other, [8] * 250)  # two of the first agent's contexts go
    kept.add(one, [9] * 300)  # the older one of the other agent goes
    assert [[one.ids[0] for one in kept.take(agent)] for agent in (one, other, one)] == [[2, 9], [8], []]
    assert kept._size == 0


def test_pinned_and_newest_contexts_are_remembered_whatever_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_contexts, "MOST_IDS", 100)
    kept, pinned, other = RequestContexts(), named(1, pinned=True), named(2)
    kept.add(pinned, [1] * 90)
    kept.add(pinned, [2] * 90)
    kept.add(other, [3] * 500)
    assert [one.ids[0] for one in kept.take(pinned)] == [2]
    kept.add(named(3), [4] * 5)
    assert kept.take(other) == [] and kept._size == 5
