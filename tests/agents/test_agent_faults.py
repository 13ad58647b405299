"""Agents on a disk that fails, fills and crashes, and of a server that is killed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.agents.agents import Agents
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, Savings, SavingsRecord, TokensRecord
from cairn.agents.log.segment import Record
from cairn.agents.log.token_log import TokenLog
from cairn.agents.savings import LINES
from cairn.agents.turns import TurnParams
from cairn.agents.types import TurnInfo
from cairn.frontend.service import Service
from cairn.text.chat.messages import MessageBuilder
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity
from cairn.types.errors import (
    CairnError,
    ConfigError,
    Conflict,
    GenerationFailed,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from tests.agents.house import FOLDER, House, file_of, hear, house
from tests.api.process import Served
from tests.files import CrashFiles, Fault, SeededRng
from tests.service.tiny import collect, request

Figure = Callable[[str, str], None]


def facts(turn: TurnInfo) -> tuple[Any, ...]:
    return turn.number, turn.messages, turn.answer, turn.completion_tokens


async def test_a_refused_write_is_a_503_and_changes_nothing(folder: Path) -> None:
    """The server goes on, reports the trouble, and recovers by itself."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        before = at.agents.get("default", "ada")
        for error in (errno.ENOSPC, errno.EIO, errno.EROFS):
            at.files.fail(Fault(at.files.calls, error, sticky=True))
            with pytest.raises(Unavailable, match=r"token log cannot be (written|read)"):
                await at.begin("ada", "two")
            with pytest.raises(Unavailable):
                await at.agents.create("default", id="bob")
            with pytest.raises(Unavailable):
                await at.agents.fork("default", "ada", new_id="bob")
            with pytest.raises(Unavailable):
                await at.agents.rollback("default", "ada", turn=0)
            assert at.agents.get("default", "ada") == before and at.agents.troubles
            assert [info.id for info in at.agents.page("default").agents] == ["ada"]
            assert at.service.stats().running == 0, "no generation goes on behind a refusal"
            at.files.heal()
            heard = await at.say("ada", "two")
            assert heard.done is not None and at.agents.troubles == []
            before = at.agents.get("default", "ada")
        # A refused write may be on the disk all the same; it is erased when the disk works.
        await at.agents.tend()
        turns = await at.agents.turns("default", "ada")
        await at.again()
        assert (await at.agents.turns("default", "ada")) == turns
        assert [info.id for info in at.agents.page("default").agents] == ["ada"]


async def test_room_on_the_disk_is_noticed_without_a_turn(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        at.files.fail(Fault(at.files.calls, errno.ENOSPC, sticky=True))
        with pytest.raises(Unavailable):
            await at.begin("ada", "one")
        with pytest.raises(Unavailable):
            await at.agents.tend()
        assert at.agents.refuses and at.agents.troubles
        at.files.heal()
        await at.agents.tend()
        assert not at.agents.refuses and at.agents.troubles == []
        await at.again()
        assert [info.id for info in at.agents.page("default").agents] == ["ada"]


async def test_an_end_that_the_disk_refuses_is_an_error_and_is_written_later(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        running = await at.begin("ada", "one")
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        heard = await hear(running)
        assert isinstance(heard.error, Unavailable) and heard.done is None
        at.files.heal()
        await at.agents.tend()
        await at.agents.writer.sync()
        turns = await at.agents.turns("default", "ada")
        assert [turn.state for turn in turns] == ["finished"]
        await at.again()
        assert list(map(facts, (await at.agents.turns("default", "ada")))) == list(map(facts, turns))


async def test_an_answer_that_no_record_can_hold_is_an_error_and_breaks_no_agent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call holds half a surrogate pair. The turn is interrupted with its tokens each time, and can be abandoned."""
    function = {"name": "f\ud83d", "arguments": "{}"}
    half = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        with monkeypatch.context() as broken:
            broken.setattr(MessageBuilder, "message", lambda _: half)
            heard = await at.say("ada", "one")
            assert isinstance(heard.error, GenerationFailed) and "turn 1 of agent ada" in str(heard.error)
            for restart in (False, True):
                (turn,) = await at.agents.turns("default", "ada")
                assert (turn.state, turn.answer, turn.completion_tokens) == ("interrupted", None, 12)
                assert at.agents.get("default", "ada").state == "interrupted"
                again = await hear(await at.agents.resume("default", "ada", request=at.service.next_id()))
                assert isinstance(again.error, GenerationFailed)
                await at.agents.writer.sync()
                if not restart:
                    await at.again()
            cut = await at.agents.resume("default", "ada", request=at.service.next_id())
            await cut.close()
        resumed = await hear(await at.agents.resume("default", "ada", request=at.service.next_id()))
        assert resumed.done is not None and len(resumed.tokens) == 12
        assert (await at.say("ada", "two")).done is not None


async def test_values_that_no_record_can_hold_are_refused_before_anything_is_written(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        odd: list[dict[str, Any]] = [{"role": "user", "content": "x", "name": value} for value in (1 << 64, "\ud83d")]
        for message in odd:
            with pytest.raises(InvalidRequest) as caught:
                await at.agents.create("default", id="bob", messages=[message])
            assert caught.value.field == "messages"
            with pytest.raises(InvalidRequest) as caught:
                await at.agents.turn("default", "ada", [message], TurnParams(request=at.service.next_id()))
            assert caught.value.field == "messages"
        assert [info.id for info in at.agents.page("default").agents] == ["ada"]
        assert (await at.agents.turns("default", "ada")) == () and not at.agents._find("default", "ada").busy


@pytest.mark.parametrize("calls", range(7))
async def test_an_agent_whose_erasure_the_disk_refused_never_comes_back(folder: Path, calls: int) -> None:
    """Wherever the refusal strikes: a new agent of that name is kept, and the old bytes go when the disk works."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "a secret")
        at.files.fail(Fault(at.files.calls + calls, errno.EIO, sticky=True))
        refused = False
        try:
            await at.agents.delete("default", "ada")
        except Unavailable as error:
            refused = True
            assert "agent ada is deleted, but" in str(error)
        assert refused or calls == 6, "the erasure takes so many calls"
        with pytest.raises(NotFound):
            at.agents.get("default", "ada")
        at.files.heal()
        await at.agents.create("default", id="ada")
        await at.say("ada", "kept")
        turns = await at.agents.turns("default", "ada")
        await at.agents.tend()
        assert not any(b"a secret" in data for data in at.files.files().values())
        await at.again()
        assert (await at.agents.turns("default", "ada")) == turns


async def test_failed_erasures_are_retried_at_the_end(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "a secret")
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        with pytest.raises(Unavailable):
            await at.agents.delete("default", "ada")
        with pytest.raises(Unavailable):
            await at.agents.tend()
        at.files.heal()
        await at.again(clean=True)
        assert not any(b"a secret" in data for data in at.files.files().values())
        assert at.agents.page("default").agents == ()


async def test_deletions_of_one_agent_at_once_are_one(folder: Path) -> None:
    """The other deletions find no agent, and must not delete a new one of the same name."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "a secret")
        tasks = [asyncio.create_task(at.agents.delete("default", "ada")) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            await at.begin("ada", "too late")
        made = await at.agents.create("default", id="ada")
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends].count(type(None)) == 1
        assert [type(end) for end in ends].count(NotFound) == 5
        assert at.agents.get("default", "ada") == made
        await at.say("ada", "kept")
        turns = await at.agents.turns("default", "ada")
        await at.again()
        assert (await at.agents.turns("default", "ada")) == turns


@pytest.mark.parametrize("when", ["running", "ending", "pinning"])
async def test_nothing_of_an_agent_is_written_after_its_erasure(folder: Path, when: str) -> None:
    """Neither by a turn that still runs, nor by a write that the disk refused and that is retried."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "a secret")
        running = await at.begin("ada", "another secret") if when != "pinning" else None
        if when != "running":
            at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        if when == "pinning":
            with pytest.raises(Unavailable):
                await at.agents.pin("default", "ada", True)
        if when == "ending":
            assert running is not None and isinstance((await hear(running)).error, Unavailable)
        at.files.heal()
        task = asyncio.create_task(at.agents.delete("default", "ada"))
        if when == "running":
            assert running is not None
            await hear(running)
        await task
        await at.agents.tend()
        await at.agents.writer.sync()
        await at.agents.close()
        on_disk = b"".join(at.files.files().values())
        assert not [word for word in (b"finished", b"interrupted", b"\xa3ada", b"secret") if word in on_disk]


def kept(files: CrashFiles) -> list[Record]:
    """Return the records that the log holds."""
    log = TokenLog.open(files, FOLDER, SeededRng())
    assert log is not None
    log.close()
    return log.recovered


async def test_answers_and_records_without_an_owner_are_erased(folder: Path) -> None:
    """An end, a piece or a savings record whose turn or agent is not in the log."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "hello")
        writer, turns = at.agents.writer, (await at.agents.turns("default", "ada"))
        end = EndRecord(state="finished", ids=b"", message={"role": "assistant", "content": "a secret"})
        await writer.sync(
            writer.record(RecordKind.END, end, writer.key()),
            writer.record(RecordKind.TOKENS, TokensRecord(ids=b"", text="a secret"), writer.key()),
            writer.record(RecordKind.SAVINGS, SavingsRecord(savings=Savings(requests=77)), writer.key()),
        )
        before, totals = len(kept(at.files.crash(random.Random(1)))), at.agents.savings("default")
        await at.again()
        while any(b"a secret" in data for data in at.files.files().values()):
            await asyncio.sleep(0.01)
        assert (await at.agents.turns("default", "ada")) == turns and at.agents.savings("default") == totals
        await at.agents.close()
        assert len(kept(at.files)) == before - 3


async def test_an_agent_that_ends_while_it_is_deleted_is_only_deleted(folder: Path) -> None:
    async with house(folder) as at:
        for id in ("ada", "bob"):
            await at.agents.create("default", id=id, ttl=10)
        at.clock.ahead = 20
        ends = await asyncio.gather(
            at.agents.tend(), at.agents.delete("default", "bob"), at.agents.tend(), return_exceptions=True
        )
        assert ends[0] is None and ends[2] is None
        assert at.agents.page("default").agents == ()


async def test_a_turn_on_an_end_that_the_disk_refused_is_durable_only_with_that_end(folder: Path) -> None:
    """Also if nothing was written between them, and the server is lost right after."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        running = await at.begin("ada", "one")
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        assert isinstance((await hear(running)).error, Unavailable)
        at.files.heal()
        assert (await at.say("ada", "two")).done is not None
        turns = await at.agents.turns("default", "ada")
        await at.again()
        assert list(map(facts, (await at.agents.turns("default", "ada")))) == list(map(facts, turns))
        assert [turn.state for turn in (await at.agents.turns("default", "ada"))] == ["finished", "finished"]


async def test_nothing_is_forked_off_an_agent_before_it_is_durable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the agent but would take the fork, which would then be acknowledged without its history."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        data, sync = await file_of(at, "default", "ada"), at.agents.writer.sync
        refused = asyncio.Event()

        async def refuse(*records: Record) -> None:
            await refused.wait()
            raise Unavailable("no space left on device")

        monkeypatch.setattr(at.agents.writer, "sync", refuse)
        making = asyncio.create_task(at.agents.import_agent("default", data, "new"))
        while at.agents._agents.registry.find("default", "new") is None:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(at.agents.writer, "sync", sync)
        with pytest.raises(Conflict, match="agent new is being created"):
            await at.agents.fork("default", "new", new_id="eve")
        with pytest.raises(Conflict, match="agent new is being created"):
            await at.begin("new", "two", fork_on_conflict=True)
        refused.set()
        with pytest.raises(Unavailable):
            await making
        assert [agent.id for agent in at.agents.page("default").agents] == ["ada"]


async def test_pending_records_stay_pending_while_the_disk_refuses_them(folder: Path) -> None:
    """However often they are retried: an end, a pin that did not happen, and the tenants' totals."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        running = await at.begin("ada", "one")
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        assert isinstance((await hear(running)).error, Unavailable)
        with pytest.raises(Unavailable):
            await at.agents.pin("default", "ada", True)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await at.agents.tend()
        turns, savings = (await at.agents.turns("default", "ada")), at.agents.savings("default")
        assert savings.requests == 1
        at.files.heal()
        await at.agents.tend()
        await at.again()
        assert list(map(facts, (await at.agents.turns("default", "ada")))) == list(map(facts, turns))
        assert (await at.agents.turns("default", "ada"))[0].state == "finished"
        assert not at.agents.get("default", "ada").pinned and at.agents.savings("default") == savings


async def test_a_refused_rollback_undoes_nothing_that_began_meanwhile(folder: Path) -> None:
    """While the rollback is being written no turn begins, and a refused pin moves no head."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        task = asyncio.create_task(at.agents.rollback("default", "ada", turn=0))
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="agent ada is starting, or its head is being moved"):
            await at.begin("ada", "two")
        with pytest.raises(Conflict):
            await at.agents.rollback("default", "ada", turn=0)
        with pytest.raises(Unavailable):
            await task
        assert (at.agents.get("default", "ada").head, at.agents.get("default", "ada").state) == (1, "idle")
        at.files.heal()
        agent = at.agents._find("default", "ada")

        async def refuse(*_: object) -> None:
            began.set()
            await gate.wait()
            raise Unavailable("refused")

        began, gate, sync = asyncio.Event(), asyncio.Event(), at.agents._agents.pending.sync
        at.agents._agents.pending.sync = refuse  # type: ignore[method-assign]
        task = asyncio.create_task(at.agents.pin("default", "ada", True))  # type: ignore[arg-type]
        await began.wait()
        at.agents._agents.pending.sync = sync  # type: ignore[method-assign]
        await at.say("ada", "two")
        gate.set()
        with pytest.raises(Unavailable):
            await task
        assert agent.head.number == 2 and not agent.record.pinned
        await at.again()
        assert at.agents.get("default", "ada").head == 2 and not at.agents.get("default", "ada").pinned


async def open_on(at: House, files: CrashFiles) -> Agents:
    """Open the agents of another disk, to inspect it."""
    kept, at.files, old = at.files, files, at.agents
    try:
        await at.open()
        return at.agents
    finally:
        at.files, at.agents = kept, old


async def test_every_acknowledged_turn_survives_a_crash_at_any_moment(
    folder: Path, prove: bool, figure: Figure
) -> None:
    """Every finished turn that a client was told of is complete, on every disk that a power cut could leave."""
    async with house(folder) as at:
        rng = random.Random(1)
        acknowledged: list[tuple[Any, ...]] = []
        disks: list[tuple[int, CrashFiles]] = []

        def look(_: str) -> None:
            disks.extend((len(acknowledged), at.files.crash(rng)) for _ in range(20 if prove else 2))

        await at.agents.create("default", id="ada")
        at.files.after_change = look
        for n in range(8):
            await at.say("ada", f"message {n}")
            acknowledged.append(facts((await at.agents.turns("default", "ada"))[-1]))
            if n % 3 == 2:
                await at.agents.fork("default", "ada", new_id=f"fork{n}")
        at.files.after_change = lambda _: None
        for count, files in disks:
            agents = await open_on(at, files)
            turns = list(map(facts, (await agents.turns("default", "ada"))))
            assert turns[:count] == acknowledged[:count] and len(turns) <= count + 2
            await agents.close()
        figure("agents: crash states, every acknowledged turn found", f"{len(disks):,}")


async def test_a_folder_that_another_holds_or_that_is_not_ours_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cairn.agents import agents as module

    monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)
    async with house(folder) as at:
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another process holds the token log"):
            await open_on(at, at.files)
        assert time.monotonic() - began >= 0.2
        strange = CrashFiles()
        strange.make_folder(Path("/agents"))
        strange.put(Path("/agents/thesis.txt"), b"mine")
        with pytest.raises(ConfigError, match=r"thesis\.txt"):
            await open_on(at, strange)
        broken = CrashFiles()
        broken.fail(Fault(0, errno.EIO, sticky=True))
        with pytest.raises(ConfigError, match="cannot be read"):
            await open_on(at, broken)


def killed_once(server: Served, rng: random.Random) -> list[dict[str, Any]]:
    """Kill the server during a turn; return the turns acknowledged before, at least one."""

    def talk() -> None:
        for _ in range(50):
            body = {"messages": [{"role": "user", "content": "more"}], "ignore_eos": True}
            body["max_tokens"] = 300 if acknowledged else 20
            try:
                answer = server.post("/v1/agents/ada/turns", body)
            except (OSError, CairnError):
                return
            acknowledged.append(answer["choices"][0]["message"])

    acknowledged: list[dict[str, Any]] = []
    thread = threading.Thread(target=talk)
    thread.start()
    end = time.monotonic() + 30
    while not acknowledged and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.3))
    os.killpg(server.pid, signal.SIGKILL)
    server.process.wait()
    thread.join()
    server.stderr()
    assert acknowledged
    return acknowledged


def test_every_acknowledged_turn_survives_kill_9(tmp_path: Path, prove: bool, figure: Figure) -> None:
    """The whole server with all its processes, again and again, on one folder."""
    rng, acknowledged, kills = random.Random(1), [], 200 if prove else 3
    options: dict[str, Any] = {"agents_dir": str(tmp_path / "agents"), "kv_dir": str(tmp_path / "kv")}
    for kill in range(kills):
        server = Served(**options)
        try:
            server.wait_ready()
            if not kill:
                server.post("/v1/agents", {"id": "ada"})
            turns = get(server, "/v1/agents/ada/turns")
            finished = [turn["answer"] for turn in turns if turn["current"] and turn["state"] == "finished"]
            assert len(finished) >= len(acknowledged), "a turn that was acknowledged is gone"
            for answer, acknowledged_answer in zip(finished, acknowledged, strict=False):
                assert answer["content"] == acknowledged_answer["content"]
            acknowledged = finished
            if turns and turns[-1]["state"] == "interrupted":
                whole = server.post("/v1/agents/ada/resume", {})["choices"][0]["message"]
                said = (turns[-1]["answer"] or {}).get("content") or ""
                assert whole["content"].startswith(said)
                acknowledged.append(whole)
            if len(acknowledged) > 3:  # the context is small
                server.post("/v1/agents/ada/rollback", {"turn": 0})
                acknowledged = []
            acknowledged += killed_once(server, rng)
        finally:
            server.end()
    figure("agents: kill -9 of the server during turns, every acknowledged turn intact", f"{kills}")


def get(server: Served, path: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(server.url + path, timeout=30) as response:
        data: list[dict[str, Any]] = json.load(response)["data"]
        return data


async def test_a_message_is_durable_before_its_answer(folder: Path) -> None:
    """No part of an answer is sent before its message is durable, however slow the disk."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        at.files.after_change = lambda kind: time.sleep(0.1 if kind == "sync" else 0)
        task = asyncio.create_task(at.begin("ada", "a message that must be on the disk"))
        while not task.done():
            await asyncio.sleep(0.005)
        at.files.after_change = lambda _: None
        assert any(b"a message that must be on" in data for data in at.files.crash(random.Random(3)).files().values())
        assert (await hear(task.result())).done is not None
        assert isinstance(at.service, Service)


def test_a_shutdown_interrupts_turns_that_outlast_its_grace(tmp_path: Path) -> None:
    options: dict[str, Any] = {"agents_dir": str(tmp_path / "agents"), "shutdown_grace": 0.1, "kv_disk": False}
    body = {"messages": [{"role": "user", "content": "more"}], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    server = Served(**options)
    try:
        server.wait_ready()
        server.post("/v1/agents", {"id": "ada"})
        asked = urllib.request.Request(
            server.url + "/v1/agents/ada/turns", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            response.readline()
            server.signal(signal.SIGTERM)
            rest = response.read()
        assert server.wait() == 0
    finally:
        server.end()
    again = Served(**options)
    try:
        again.wait_ready()
        (turn,) = get(again, "/v1/agents/ada/turns")
        if b"[DONE]" not in rest:  # the turn still ran, however fast the machine
            assert turn["state"] == "interrupted" and 0 < turn["completion_tokens"] < 1900
            whole = again.post("/v1/agents/ada/resume", {})
            assert whole["usage"]["completion_tokens"] == 1900
        else:
            assert turn["state"] == "finished"
    finally:
        again.end()


@pytest.mark.parametrize("settled", [False, True])
async def test_a_note_written_while_a_turn_was_refused_costs_no_earlier_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    """The record of a note names a head that the log never had."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        real, came, go = at.agents.writer.sync, asyncio.Event(), asyncio.Event()

        async def sync(*records: Record) -> None:
            if any(record.kind == RecordKind.TURN for record in records):
                came.set()
                await go.wait()
                raise Unavailable("the disk is full")
            await real(*records)

        with monkeypatch.context() as patch:
            patch.setattr(at.agents.writer, "sync", sync)
            beginning = asyncio.create_task(at.begin("ada", "two"))
            await came.wait()
            await at.agents.pin("default", "ada", True)
            go.set()
            with pytest.raises(Unavailable):
                await beginning
        if settled:
            await at.agents.tend()
            assert at.agents.get("default", "ada").head == 1
        await at.again()
        info = at.agents.get("default", "ada")
        assert (info.head, info.turns, info.pinned, info.state) == (1, 1, True, "idle")


async def test_interrupted_upkeep_remembers_refused_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that was answered with 503 is not there after the next start."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        book = at.agents._agents
        book.pending._to_erase.append(4711)
        stuck = asyncio.Event()

        async def erase(keys: object) -> None:
            stuck.set()
            await asyncio.sleep(3600)

        with monkeypatch.context() as patch:
            patch.setattr(at.agents.writer, "erase", erase)
            tending = asyncio.create_task(at.agents.tend())
            await stuck.wait()
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
        assert book.pending.to_erase() == [4711]


async def test_refused_writes_that_nobody_awaited_are_written_when_the_disk_works(folder: Path) -> None:
    """Savings of ordinary requests, and the time of the agent's last use."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", ttl=60)
        done = await collect(at.service.generate(request(at.service, tuple(range(5, 105)), 2, salt=b"default")))
        at.clock.ahead = 50
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        at.agents.chats.account("default", at.agents.chats.named("default", "ada"), range(5, 105), done.done)
        with pytest.raises(Unavailable):
            await at.agents.writer.sync(
                at.agents.writer.record(RecordKind.SAVINGS, SavingsRecord(savings=Savings()), LINES)
            )
        at.files.heal()
        await at.again(clean=True)
        at.clock.ahead = 100
        await at.agents.tend()
        assert at.agents.get("default", "ada").savings.requests == at.agents.savings("default").requests == 1


async def test_an_agent_that_is_deleted_while_a_branch_is_collected_takes_that_along(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "left behind")
        await at.agents.rollback("default", "ada", turn=0)
        await at.say("ada", "kept")
        collecting, go_on = asyncio.Event(), asyncio.Event()

        async def collect(*_: object) -> None:
            collecting.set()
            await go_on.wait()

        monkeypatch.setattr(at.agents.kv, "collect", collect)
        at.clock.ahead = 8 * 86_400
        tending = asyncio.create_task(at.agents.tend())
        await collecting.wait()
        assert b"left behind" in b"".join(at.files.files().values())
        await at.agents.delete("default", "ada")
        assert b"left behind" not in b"".join(at.files.files().values())
        go_on.set()
        await tending


async def test_a_request_in_the_name_of_an_agent_that_is_deleted_meanwhile_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """It is not counted for a new agent of the same name either."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="ada")
        owner = at.agents.chats.named("default", "ada")
        ids = tuple(range(5, 205))
        done = await collect(at.service.generate(request(at.service, ids, 2, salt=b"default", durable=True)))
        await at.service.flush()
        assert (await at.service.where(ids, b"default")).disk > 0
        await at.agents.delete("default", "ada")
        await at.agents.create("default", id="ada")
        at.agents.chats.keep("default", Sampled(b"b" * 32, AnswerIdentity(b"v" * 32, "because"), [1, 2, 3], 1), owner)
        at.agents.chats.account("default", owner, ids, done.done)
        await at.agents.kv.settled()
        await at.agents.writer.sync()
        assert b"because" not in b"".join(at.files.files().values())
        assert (await at.service.where(ids, b"default")).disk == 0
        assert at.agents.get("default", "ada").savings.requests == 0
        assert at.agents.savings("default").requests == 1
