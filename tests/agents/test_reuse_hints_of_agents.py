"""Reuse hints that agents give the stores about their contexts, and their effect on eviction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.frontend.service import Service
from cairn.types.outputs import Done, FinishReason
from tests.agents.house import GREEDY, House, house
from tests.agents.test_agent_kv import LONG


def listening(at: House, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record standing, length and shared tokens of every hint that the stores get."""
    hints, mark = list[tuple[str, int, int]](), Service.mark

    async def noted(self: Service, tokens: Any, salt: bytes, standing: Any, *, keep: int = 0) -> None:
        hints.append((standing, len(tokens), keep))
        await mark(self, tokens, salt, standing, keep=keep)

    monkeypatch.setattr(Service, "mark", noted)
    return hints


def calling(monkeypatch: pytest.MonkeyPatch, calls: bool) -> None:
    """Let answers end in a tool call."""
    from cairn.text.output import stream

    finish = stream.TextStream.finish

    def ended(self: Any, reason: FinishReason) -> Any:
        deltas, why = finish(self, reason)
        return deltas, FinishReason.TOOL_CALLS if calls else why

    monkeypatch.setattr(stream.TextStream, "finish", ended)


async def size(at: House, id: str = "ada") -> int:
    return len(await at.agents.context("default", id))


async def test_the_stores_get_hints_of_waiting_and_abandoned_contexts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        hints = listening(at, monkeypatch)
        await at.agents.create("default", id="ada")
        await at.say("ada", LONG)
        await at.service.flush()
        await at.agents.kv.settled()
        assert hints == [], "it has ended, and waits for nothing"
        with monkeypatch.context() as patch:
            calling(patch, True)
            heard = await at.say("ada", "a call: " + LONG)
            assert heard.done is not None and heard.done.reason is FinishReason.TOOL_CALLS
        await at.agents.kv.settled()
        assert hints == [("waiting", await size(at), 0)]
        await at.say("ada", "its result: " + LONG)
        await at.agents.kv.settled()
        left = await size(at)
        assert hints[1:] == [("idle", left, 0)]
        await at.agents.fork("default", "ada", new_id="bob")
        await at.agents.rollback("default", "bob", turn=1)
        await at.agents.kv.settled()
        assert hints[2:] == [("superseded", left, left // 64 * 64)], "ada stands there still"
        await at.agents.rollback("default", "ada", turn=2)
        await at.agents.kv.settled()
        assert hints[3][:2] == ("superseded", left) and 0 < hints[3][2] <= await size(at)
        await at.agents.rollback("default", "ada", turn=3)
        await at.agents.kv.settled()
        assert sorted(hints[4:])[0] == ("idle", left, 0), "somebody has come back"


async def test_an_abandoned_branch_is_evicted_before_the_current_one(folder: Path, tmp_path: Path) -> None:
    """Through the frontend, the worker and its store, although the branch was used last."""
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        for id in ("old", "ada"):
            await at.agents.create("default", id=id)
            await at.say(id, f"{id}: " + LONG)
        await at.say("ada", "a dead end: " + 2 * LONG)
        await at.service.flush()
        dead = await at.agents.context("default", "ada")
        await at.agents.rollback("default", "ada", turn=1)
        await at.agents.kv.settled()
        kept = [(await at.agents.where("default", id)).disk for id in ("old", "ada")]
        assert min(kept) > 100 and (await at.service.where(dead, b"default")).disk > kept[1] + 100
    disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("kv/models/*/?/*"))
    # Hints are lost with the process; going back and forth sends the rollback once more.
    async with house(folder, kv_dir=str(tmp_path / "kv"), kv_disk_gb=(disk + 8192) / 1e9) as at:
        for id in ("old", "ada"):
            await at.agents.create("default", id=id)
        assert (await at.service.where(dead, b"default")).disk > kept[1] + 100
        await at.service.mark(dead, b"default", "superseded", keep=kept[1])
        await at.agents.create("default", id="new")
        await at.say("new", "new: " + LONG)
        await at.service.flush()
        assert (await at.agents.where("default", "new")).disk > 100
        assert (await at.service.where(dead, b"default")).disk < len(dead) // 64 * 64 - 64


async def test_an_ordinary_request_that_ends_in_a_call_waits_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder, kv_dir=str(tmp_path / "kv")) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", LONG)
        await at.service.flush()
        hints, ids = listening(at, monkeypatch), tuple(range(20, 220))
        for reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
            done = (await at.say("ada", "more", options=GREEDY)).done
            assert isinstance(done, Done)
            at.agents.chats.account("default", None, ids, Done(reason=reason, usage=done.usage, cache=done.cache))
        await at.agents.kv.settled()
        assert hints == [("waiting", 200, 0)]
