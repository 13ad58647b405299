"""Errors of an agent whose turn the log lost, and of one that is deleted while it is read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.content import Content
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import TurnRecord, pack
from cairn.agents.log.segment import Record
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turn_tree import Turn
from cairn.frontend.request_options import SamplingOptions
from cairn.types.errors import Conflict, Damaged, NotFound, Unavailable
from cairn.types.outputs import Delta
from tests.agents.house import FOLDER, House, file_of, hear, house
from tests.agents.test_portable import forged, with_agent
from tests.files import Fault

SYSTEM = [{"role": "system", "content": "You remember."}]
TEXTS = ("the first message", "the second message", "the third message")
SEEDED = SamplingOptions(temperature=0.9, max_tokens=12, ignore_eos=True, seed=1)


async def spoken(at: House) -> None:
    """Create an agent with three turns, and another one beside it."""
    for id in ("ada", "bob"):
        await at.agents.create("default", id=id, messages=SYSTEM)
        for text in TEXTS:
            await at.say(id, f"{id}: {text}", options=SEEDED)
    await at.agents.writer.sync()


def hurt(at: House, what: bytes) -> tuple[Path, int]:
    """Damage the record that contains a text; return where it is."""
    (path,) = [path for path, data in at.files.files(FOLDER).items() if what in data]
    data = at.files.files()[path]
    assert data.count(what) == 1
    at.files.damage(path, data.index(what))
    return path, data.index(what)


async def answer_of(at: House, id: str, number: int) -> tuple[bytes, dict[str, Any]]:
    """Return the tokens of an answer as the log has them, and its message."""
    agent = at.agents._find("default", id)
    turn = agent.turn(number)
    assert turn is not None
    (content,) = await at.agents._archive.contents([turn])
    assert content.ended is not None and content.answer is not None
    return content.ended.ids, content.answer


async def crash_at(at: House, turn: RunningTurn, tokens: int) -> list[int]:
    """Crash once so many tokens of a turn are on the disk; return the tokens so far."""
    said: list[int] = []
    async with contextlib.aclosing(turn.batches()) as batches:
        while len(said) < tokens:
            said += [token for event in await anext(batches) if isinstance(event, Delta) for token in event.tokens]
        await at.agents.writer.sync()
        after = at.files.crash(random.Random(1))
    await at.agents.close()
    at.files = after
    return said


async def refuse(*records: Record) -> None:
    """Let the log refuse every write."""
    raise Unavailable("the disk is full")


async def told(what: Awaitable[object]) -> str:
    """Return the message that reports a damaged turn."""
    with pytest.raises(Damaged) as caught:
        await what
    assert (caught.value.status, caught.value.code) == (409, "damaged")
    return str(caught.value)


async def test_a_damaged_turn_is_named_with_what_can_be_done_and_costs_no_other(folder: Path) -> None:
    """It is listed as damaged beside the others; a rollback to the turn before it, or a fork there, works."""
    async with house(folder) as at:
        await spoken(at)
        turns, whole = await at.agents.turns("default", "ada"), await file_of(at, "default", "bob")
        hurt(at, b"ada: the second message")
        sentence = "turn 2 of agent ada cannot be read: the token log is damaged there; "
        sentence += "roll back to turn 1, or delete the agent"
        for call in (
            at.begin("ada", "more"),
            at.agents.context("default", "ada"),
            at.agents.where("default", "ada"),
            at.agents.prefetch("default", "ada"),
            at.agents.evict("default", "ada"),
            file_of(at, "default", "ada"),
        ):
            assert await told(call) == sentence
        assert at.agents.get("default", "ada").state == "idle" and len(at.agents.page("default").agents) == 2
        assert (await at.agents.beginning("default", "ada"))[0][0]["content"] == "You remember."
        listed = await at.agents.turns("default", "ada")
        assert [turn.state for turn in listed] == ["finished", "damaged", "finished"]
        assert (listed[0], listed[2]) == (turns[0], turns[2])
        assert (listed[1].number, listed[1].parent, listed[1].current, listed[1].began) == (2, 1, True, turns[1].began)
        assert await file_of(at, "default", "bob") != b"" and len(whole) == len(await file_of(at, "default", "bob"))
        await at.agents.fork("default", "ada", turn=1, new_id="eve")
        assert (await at.say("eve", "more")).done is not None
        await at.agents.rollback("default", "ada", turn=1)
        assert (await at.say("ada", "more")).done is not None
        await at.agents.pin("default", "ada", True)
        left = await at.agents.turns("default", "ada")
        assert [(turn.number, turn.state, turn.current) for turn in left] == [
            (1, "finished", True),
            (2, "damaged", False),
            (3, "finished", False),
            (4, "finished", True),
        ]
        await at.agents.import_agent("default", await file_of(at, "default", "ada"), "copy")
        assert await at.agents.turns("default", "copy") == (left[0], left[3])
        await at.again(clean=True)
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [1, 4]
        await at.agents.delete("default", "ada")


async def test_an_answer_that_the_log_lost_stays_damaged_after_a_restart_if_it_was_followed(
    folder: Path,
) -> None:
    async with house(folder) as at:
        await spoken(at)
        hurt(at, (await answer_of(at, "ada", 2))[0])
        listed = await at.agents.turns("default", "ada")
        await at.again(clean=True)
        assert await at.agents.turns("default", "ada") == listed
        assert [turn.state for turn in listed] == ["finished", "damaged", "finished"]
        assert (await told(at.begin("ada", "more"))).startswith("turn 2 of agent ada cannot be read")
        await at.agents.rollback("default", "ada", turn=1)
        assert (await at.say("ada", "more")).done is not None


async def test_an_answer_that_the_log_lost_is_computed_again_where_nothing_follows_it(folder: Path) -> None:
    async with house(folder) as at:
        await spoken(at)
        for id in ("ada", "bob"):
            ids, answer = await answer_of(at, id, 3)
            hurt(at, ids)
            turn = (await at.agents.turns("default", id))[2]
            assert turn.state == "damaged" and turn.answer is None
            assert turn.messages == ({"role": "user", "content": f"{id}: the third message"},)
            if id == "bob":
                await at.agents.fork("default", "bob", new_id="eve")
                assert "; roll back to turn 2, or" in await told(at.begin("bob", "more"))
                assert "resume" not in await told(at.agents.resume("default", "bob", request=at.service.next_id()))
                continue
            assert "; resume it to have it answered again, roll back to turn 2, or" in await told(at.begin(id, "more"))
            heard = await hear(await at.agents.resume("default", id, request=at.service.next_id()))
            assert heard.text == answer["content"] and heard.done is not None
            assert await answer_of(at, id, 3) == (ids, answer)
            await at.again()
            assert await answer_of(at, id, 3) == (ids, answer)
            assert (await at.say(id, "more")).done is not None


async def test_an_answer_computed_again_and_cut_by_a_crash_does_not_follow_pieces_of_the_lost_one(folder: Path) -> None:
    """The log may still have pieces of the lost answer, written while it was generated; they must not count."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        whole = await at.say("ada", "one", options=SamplingOptions(temperature=0.9, max_tokens=900, ignore_eos=True))
        hurt(at, (await answer_of(at, "ada", 1))[0])
        turn = await at.agents.resume("default", "ada", request=at.service.next_id())
        said = await crash_at(at, turn, 200)
        await at.open()
        (cut,) = await at.agents.turns("default", "ada")
        assert cut.state == "interrupted" and 0 < cut.completion_tokens <= len(said)
        again = await hear(await at.agents.resume("default", "ada", request=at.service.next_id()))
        assert again.tokens == whole.tokens and again.text == whole.text


async def test_tokens_after_a_lost_piece_of_an_answer_are_dropped(folder: Path) -> None:
    """An answer with a hole would be another answer, so the turn is resumed from the tokens before it."""
    options = SamplingOptions(temperature=0.9, seed=3, max_tokens=1900, ignore_eos=True)
    async with house(folder) as at, house(folder) as undisturbed:
        for server in (at, undisturbed):
            await server.agents.create("default", id="ada", messages=SYSTEM)
        whole = await undisturbed.say("ada", "one", options=options)
        await crash_at(at, await at.begin("ada", "one", options=options), 200)
        log = b"".join(at.files.files(FOLDER).values())
        # The reader's speed decides the size of pieces. Tokens from both sides of the hole must not meet.
        first = next(n for n in range(1, 200) if pack(whole.tokens[n - 1 : n + 1]) not in log)
        lost = next(n for n in range(max(64, first), 190) if log.count(pack(whole.tokens[n : n + 2])) == 1)
        hurt(at, pack(whole.tokens[lost : lost + 2]))
        await at.open()
        (cut,) = await at.agents.turns("default", "ada")
        assert cut.state == "interrupted" and 0 < cut.completion_tokens <= lost
        for _ in range(2):
            turn = await at.agents.resume("default", "ada", request=at.service.next_id())
            await hear(turn, stop_after=lost + 100)
            await at.agents.writer.sync()
            await at.again(clean=True)
        turn = await at.agents.resume("default", "ada", request=at.service.next_id())
        again = await hear(turn)
        assert again.tokens == whole.tokens and again.text == whole.text


async def test_an_answer_that_cannot_be_computed_again_stays_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model is served, or the log is full: nothing is given up that the disk may return later."""
    async with house(folder) as at:
        await spoken(at)
        where = hurt(at, (await answer_of(at, "ada", 3))[0])
        request = at.service.next_id()
        with monkeypatch.context() as patch:
            patch.setattr(at.service, "info", msgspec.structs.replace(at.service.info, identity=b"other"))
            with pytest.raises(Conflict, match="other kernels, weights, kv_dtype or kv_codec"):
                await at.agents.resume("default", "ada", request=request)
        assert (await at.agents.turns("default", "ada"))[2].state == "damaged"
        with monkeypatch.context() as patch:
            patch.setattr(at.agents._turns, "sync", refuse)
            with pytest.raises(Unavailable, match="full"):
                await at.agents.resume("default", "ada", request=request)
        assert (await at.agents.turns("default", "ada"))[2].state == "damaged"
        at.files.damage(*where)
        assert (await at.agents.turns("default", "ada"))[2].state == "finished"
        assert (await at.say("ada", "more")).done is not None


async def test_a_start_drops_a_turn_with_only_its_answer_left_and_logs_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(folder) as at:
        await spoken(at)
        hurt(at, b"ada: the second message")
        await at.again(clean=True)
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [1]
        assert "1 turns cannot be reached: damage to the log has lost their agents or earlier turns" in caplog.text
        assert (await at.say("ada", "more")).done is not None


async def test_the_kv_of_a_damaged_agent_goes_as_far_as_it_can_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder) as at:
        await spoken(at)
        second = at.agents._find("default", "ada").turn(2)
        assert second is not None
        ids, gone = list(await at.agents.kv.ids(second)), []

        async def evict(tokens: Sequence[int], salt: bytes, **_: Any) -> None:
            gone.append(list(tokens))

        monkeypatch.setattr(at.service, "evict", evict)
        hurt(at, b"ada: the third message")
        await at.agents.delete("default", "ada")
        await at.agents.kv.settled()
        assert gone == [ids]


async def test_an_agent_whose_beginning_is_damaged_can_be_looked_at_and_deleted(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        await at.say("ada", "one")
        hurt(at, b"You remember.")
        assert (await told(at.begin("ada", "two"))).endswith("the token log is damaged there; delete the agent")
        await told(at.agents.beginning("default", "ada"))
        assert [turn.state for turn in await at.agents.turns("default", "ada")] == ["finished"]
        await at.agents.delete("default", "ada")
        assert at.agents.page("default").agents == ()


@pytest.mark.parametrize("before", [False, True])
async def test_a_pin_that_is_refused_for_damage_changes_nothing(folder: Path, before: bool) -> None:
    """Two at once change nothing either; an agent that was pinned before stays pinned, and can be unpinned."""
    async with house(folder) as at:
        await spoken(at)
        await at.agents.pin("default", "ada", before)
        hurt(at, b"ada: the second message")
        pins = (at.agents.pin("default", "ada", True) for _ in range(2))
        assert [type(error) for error in await asyncio.gather(*pins, return_exceptions=True)] == [Damaged, Damaged]
        assert at.agents.get("default", "ada").pinned is before
        await at.again(clean=True)
        assert at.agents.get("default", "ada").pinned is before
        assert not (await at.agents.pin("default", "ada", False)).pinned


async def test_a_turn_that_the_disk_returns_again_is_no_longer_damaged(folder: Path) -> None:
    async with house(folder) as at:
        await spoken(at)
        turns = await at.agents.turns("default", "ada")
        where = hurt(at, b"ada: the second message")
        await told(at.begin("ada", "more"))
        at.files.damage(*where)
        assert await at.agents.turns("default", "ada") == turns
        assert (await at.say("ada", "more")).done is not None


Look = Callable[[House], Awaitable[object]]
LOOKS: dict[str, Look] = {
    "turns": lambda at: at.agents.turns("default", "ada"),
    "beginning": lambda at: at.agents.beginning("default", "ada"),
    "context": lambda at: at.agents.context("default", "ada"),
    "where": lambda at: at.agents.where("default", "ada"),
    "prefetch": lambda at: at.agents.prefetch("default", "ada"),
    "evict": lambda at: at.agents.evict("default", "ada"),
    "pin": lambda at: at.agents.pin("default", "ada", True),
    "export": lambda at: file_of(at, "default", "ada"),
}


@pytest.mark.parametrize("look", LOOKS)
async def test_an_agent_that_is_deleted_while_it_is_read_is_not_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """An "unavailable" would ask the client to come again."""
    async with house(folder) as at:
        await spoken(at)
        archive, mine = at.agents._archive, at.agents._find("default", "ada")
        read, reading, gone = archive._read, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow(turns: list[Turn]) -> dict[int, Content | None]:
            loop.call_soon_threadsafe(reading.set)
            assert gone.wait(20)
            return read(turns)

        with monkeypatch.context() as patch:
            patch.setattr(archive, "_read", slow)
            task = asyncio.create_task(LOOKS[look](at))  # type: ignore[arg-type]
            await asyncio.wait_for(reading.wait(), 20)
        await at.agents.delete("default", "ada")
        await at.agents.create("default", id="ada")  # a new agent of the same name is a different one
        gone.set()
        with pytest.raises(NotFound, match="there is no agent ada"):
            await task
        assert mine not in at.agents._agents.registry


async def test_turns_that_are_collected_while_they_are_listed_are_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder) as at:
        await spoken(at)
        await at.agents.rollback("default", "ada", turn=1)
        archive, tended = at.agents._archive, False
        readable = archive.readable

        async def late(turns: list[Turn]) -> list[Content | None]:
            nonlocal tended
            if not tended:
                tended = True
                at.clock.ahead = 8 * 86_400
                await at.agents.tend()
            return await readable(turns)

        monkeypatch.setattr(archive, "readable", late)
        listed = await at.agents.turns("default", "ada")
        assert tended and [(turn.number, turn.state) for turn in listed] == [(1, "finished")]


async def test_a_damaged_turn_is_a_conflict_and_an_unreadable_disk_is_unavailable(folder: Path) -> None:
    """Damage lasts; the other is over when the disk works again."""
    async with house(folder) as at:
        await spoken(at)
        hurt(at, b"ada: the second message")
        with pytest.raises(Conflict, match="damaged") as caught:
            await at.agents.context("default", "ada")
        lasting = caught.value
        assert isinstance(lasting, Damaged) and not isinstance(lasting, Unavailable)
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True, only=frozenset({"open", "read"})))
        for id in ("ada", "bob"):
            with pytest.raises(Unavailable) as refused:
                await at.agents.context("default", id)
            assert not isinstance(refused.value, Conflict)
        at.files.heal()
        assert await at.agents.context("default", "bob")
        with pytest.raises(Damaged) as again:
            await at.agents.context("default", "ada")
        assert str(again.value) == str(lasting)


async def test_a_damaged_head_costs_no_earlier_turn(folder: Path) -> None:
    """A pin names the head. If the head's record is lost, the agent stands at the turn before.

    Upkeep must not take the agent's history for an abandoned branch then.
    """
    async with house(folder) as at:
        await spoken(at)
        await at.agents.pin("default", "ada", True)
        hurt(at, b"ada: the third message")
        await at.again(clean=True)
        assert at.agents.get("default", "ada").head == 2
        at.clock.ahead = 8 * 86_400
        await at.agents.tend()
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [1, 2]
        assert await at.say("ada", "more")
        await at.again(clean=True)
        assert at.agents.get("default", "ada").head == 3


async def test_an_agent_whose_head_is_lost_never_stands_at_anothers_turn(folder: Path) -> None:
    """Keys of another log mean nothing here: imports drop them, and a record's keys are checked."""
    async with house(folder) as at:
        await spoken(at)
        theirs = at.agents._find("default", "bob").head
        data = await file_of(at, "default", "ada")
        await at.agents.import_agent("other", forged(data, with_agent(under=theirs.key, pinned=True)), "eve")
        await at.agents.fork("default", "ada", turn=2, new_id="fay")
        for tenant, id, head in (("other", "eve", 3), ("default", "fay", 2)):
            agent = at.agents._find(tenant, id)
            assert (agent.record.under, agent.record.pinned, agent.head.number) == (agent.head.parent_key, False, head)
        eve = at.agents._find("other", "eve")
        lost = msgspec.structs.replace(eve.record, head=1 << 40, under=theirs.key)
        await at.agents.writer.sync(at.agents.writer.record(RecordKind.AGENT, lost, eve.key))
        await at.again(clean=True)
        assert at.agents.get("other", "eve").head == 0


async def test_a_lost_agents_turns_stay_in_the_log_and_a_deleted_ones_do_not(folder: Path) -> None:
    async with house(folder) as at:
        await spoken(at)
        agent = at.agents._find("default", "ada")
        record = msgspec.msgpack.encode(agent.record)
        hurt(at, record)
        await at.again(clean=True)
        with pytest.raises(NotFound):
            at.agents.get("default", "ada")
        for _ in range(2):
            await at.agents.tend()
            held = b"".join(at.files.files().values())
            assert all(f"ada: {text}".encode() in held for text in TEXTS), "nobody said that it may go"
            await at.again(clean=True)
        hurt(at, b"bob: the first message")
        await at.again(clean=True)
        assert at.agents.get("default", "bob").head == 0
        await at.agents.delete("default", "bob")
        assert b"bob: the second message" not in b"".join(at.files.files().values())


async def test_turns_behind_a_lost_one_are_looked_at_once(folder: Path) -> None:
    """A start with a long history whose beginning is lost looks that turn up a few times, not once per turn."""
    looked = 0

    class Counted(dict[int, TurnRecord]):
        def get(self, key: int, default: Any = None) -> Any:
            nonlocal looked
            looked += 1
            return super().get(key, default)

    turns, missing = 300, set[int]()
    began = Counted({key: TurnRecord(agent=1, number=key, parent=key - 1) for key in range(2, turns)})
    registry = AgentRegistry()
    for _ in range(2):
        assert all(registry._build_turn(key, began, missing) is None for key in began)
    assert looked < 5 * turns
