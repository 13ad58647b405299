"""What was sampled for ordinary chats at one server is found at another, by its tenant alone, or not at all."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.agents import shared_replays
from cairn.agents.shared_replays import AT_ONCE, SharedReplays
from cairn.cluster.guard import Guarded
from cairn.cluster.shared import SharedStore
from cairn.system.posix import SystemClock
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity, answer_of, conversation_digests, digest_after
from cairn.types.errors import Unavailable
from tests.cluster.stores import MemoryBlobs, keys
from tests.cluster.test_keys import tampered

MODEL = b"model"


def server(blobs: MemoryBlobs, number: int) -> SharedReplays:
    return SharedReplays(SharedStore(Guarded(blobs, SystemClock()), keys(number * 1000)))


def sampled(digest: bytes, *ids: int) -> Sampled:
    return Sampled(b"b" * 32, AnswerIdentity(b"v" * 32, "because"), list(ids), 1, digest)


def listed(found: Iterable[Sampled]) -> list[tuple[bytes, list[int]]]:
    return [(one.conversation_digest, [*one.ids]) for one in found]


async def kept(blobs: MemoryBlobs, *records: Sampled, agent: str = "") -> SharedReplays:
    one = server(blobs, 1)
    for record in records:
        one.keep("default", agent, MODEL, record)
        await one.written(10)
    return one


async def test_another_server_finds_what_was_sampled_by_tenant_agent_and_model() -> None:
    blobs = MemoryBlobs()
    await kept(blobs, sampled(b"a", 1, 2, 3), agent="ada")
    (found,) = await server(blobs, 2).find("default", ["eve", "ada"], MODEL, [b"a"])
    assert (found.before, found.answer, [*found.ids]) == (b"b" * 32, AnswerIdentity(b"v" * 32, "because"), [1, 2, 3])
    for tenant, agent, model in (("other", "ada", MODEL), ("default", "eve", MODEL), ("default", "ada", b"another")):
        assert await server(blobs, 2).find(tenant, [agent], model, [b"a"]) == []
    assert all(b"default" not in data and b"\1\0\0\0\2" not in data for data in blobs.objects.values())


async def test_the_newest_answer_counts() -> None:
    blobs = MemoryBlobs()
    await kept(blobs, sampled(b"a", 1), sampled(b"a", 2))
    assert listed(await server(blobs, 2).find("default", [], MODEL, [b"a"])) == [(b"a", [2])]


async def test_what_was_changed_or_moved_is_not_there() -> None:
    blobs, rng = MemoryBlobs(), random.Random(3)
    await kept(blobs, sampled(b"a", 1), sampled(b"b", 2))
    names = sorted(blobs.objects)
    first, second = (blobs.objects[name] for name in names)
    for _ in range(50):
        blobs.objects[names[0]] = tampered(rng, first, second)
        assert len(await server(blobs, 2).find("default", [], MODEL, [b"a", b"b"])) <= 1
    blobs.objects[names[0]] = second
    assert len(await server(blobs, 2).find("default", [], MODEL, [b"a", b"b"])) == 1


async def test_an_answer_that_cannot_be_read_hides_no_other() -> None:
    class Refusing(MemoryBlobs):
        def read(self, name: str) -> bytes | None:
            if name == bad:
                raise OSError("bad sector")
            return super().read(name)

    blobs = Refusing()
    bad = ""
    one = await kept(blobs, sampled(b"a", 1), sampled(b"b", 2))
    bad = one._name("default", "", MODEL, b"a")
    assert listed(await server(blobs, 2).find("default", [], MODEL, [b"a", b"b"])) == [(b"b", [2])]


async def test_a_conversation_that_no_server_knows_is_asked_for_once_and_not_to_its_beginning() -> None:
    blobs = MemoryBlobs()
    one = server(blobs, 1)
    digests = [b"%d" % number for number in range(100)]
    assert await one.find("default", [], MODEL, digests) == []
    assert blobs.calls == AT_ONCE
    assert await one.find("default", [], MODEL, digests) == []
    assert blobs.calls == AT_ONCE


async def test_a_whole_conversation_is_found_and_what_was_kept_here_is_not_asked_for() -> None:
    blobs = MemoryBlobs()
    digests = [b"%d" % number for number in range(20)]
    one = await kept(blobs, *(sampled(digest, number) for number, digest in enumerate(digests)))
    before = blobs.calls
    assert await one.find("default", [], MODEL, digests) == [] and blobs.calls == before
    found = await server(blobs, 2).find("default", [], MODEL, digests)
    assert sorted(listed(found)) == sorted((digest, [number]) for number, digest in enumerate(digests))


async def test_a_store_that_is_dead_or_slow_costs_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_replays, "READ_SECONDS", 0.2)
    blobs = MemoryBlobs()
    await kept(blobs, sampled(b"a", 1))
    one = server(blobs, 2)
    blobs.dead = True
    assert await one.find("default", [], MODEL, [b"a"]) == []
    one.keep("default", "", MODEL, sampled(b"b", 1))
    await one.written(10)
    with pytest.raises(Unavailable):
        await one.forget("default", "ada")
    blobs.dead, blobs.slow = False, 4.0
    slow, began = server(blobs, 3), time.monotonic()
    assert await slow.find("default", [], MODEL, [b"a"]) == []
    slow.keep("default", "", MODEL, sampled(b"c", 1))
    await slow.written(0.2)
    assert time.monotonic() - began < 3.5, "less than one call of the store"
    blobs.slow = 0.0
    monkeypatch.setattr(shared_replays, "READ_SECONDS", 60.0)
    assert listed(await slow.find("default", [], MODEL, [b"a"])) == [(b"a", [1])], "asked for again"
    await slow.close()


async def test_no_more_wait_to_be_written_than_the_limit() -> None:
    blobs = MemoryBlobs()
    blobs.slow = 0.05
    one = server(blobs, 1)
    for number in range(3 * shared_replays.MOST_WAITING):
        one.keep("default", "", MODEL, sampled(b"%d" % number, 1))
    await one.written(30)
    assert len(blobs.objects) == shared_replays.MOST_WAITING


async def test_what_was_kept_in_no_agents_name_is_found_beside_what_was_in_one() -> None:
    blobs = MemoryBlobs()
    await kept(blobs, sampled(b"a", 1))  # before the session had an account
    await kept(blobs, sampled(b"b", 2), agent="old")
    await kept(blobs, sampled(b"c", 3), agent="ada")
    found = await server(blobs, 2).find("default", ["ada", "old"], MODEL, [b"a", b"b", b"c"])
    assert sorted(listed(found)) == [(b"a", [1]), (b"b", [2]), (b"c", [3])]


async def test_a_conversation_that_another_tenant_has_too_is_looked_up() -> None:
    blobs = MemoryBlobs()
    first = server(blobs, 1)
    first.keep("me", "", MODEL, sampled(b"a", 1))
    await first.written(10)
    second = await kept(blobs, sampled(b"a", 2))
    assert await second.find("you", [], MODEL, [b"a"]) == []
    assert listed(await second.find("me", [], MODEL, [b"a"])) == [(b"a", [1])]


async def test_they_go_with_their_agent() -> None:
    blobs = MemoryBlobs()
    one = await kept(blobs, sampled(b"a", 1), sampled(b"b", 2), agent="ada")
    await kept(blobs, sampled(b"c", 3), agent="eve")
    await one.forget("default", "ada")
    assert len(blobs.objects) == 1
    assert await server(blobs, 2).find("default", ["ada"], MODEL, [b"a"]) == []


def test_a_conversation_is_recognised_by_what_its_client_sees() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1, "b": 2}'}}
    same = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"b":2,"a":1}'}}
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    answer = {"role": "assistant", "content": "This.", "reasoning_content": "Hm.", "tool_calls": [call]}
    again = {"role": "assistant", "content": "This.", "tool_calls": [same]}
    assert conversation_digests([*before, answer]) == conversation_digests([*before, again])
    assert conversation_digests([*before, answer])[-1] != conversation_digests([before[1], answer])[-1]
    assert (
        conversation_digests([*before, {"role": "assistant", "content": "That."}])[-1]
        != conversation_digests([*before, again])[-1]
    )
    bare = {"role": "assistant", "content": "This."}
    visible = AnswerIdentity(visible_of(bare), "")
    assert digest_after(conversation_digests(before)[-1], visible) == conversation_digests([*before, bare])[-1]


def visible_of(message: dict[str, str]) -> bytes:
    found = answer_of(message)
    assert found is not None
    return found.visible
