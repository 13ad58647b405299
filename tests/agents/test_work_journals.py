"""Journals beside a failing disk, and their limits."""

from __future__ import annotations

import asyncio
import errno

import pytest

from cairn.agents import work_journals
from cairn.agents.log.index import RecordKind
from cairn.teams.entries import Poll, Posted, RoundBegan, Stated, StepOpened
from cairn.types.errors import Conflict, Overloaded, Unavailable
from tests.files import Fault
from tests.teams.floor import Floor, team
from tests.teams.scripted_voice import ScriptedVoice


async def floor() -> Floor:
    made = Floor(team("ada"), ScriptedVoice({}))
    await made.begin()
    return made


async def test_a_note_that_the_disk_refused_is_there_with_a_later_entry() -> None:
    at = await floor()
    await at.journals.append(at.journal, RoundBegan(round=1))
    at.files.fail(Fault(at.files.calls, errno.ENOSPC, sticky=True))
    at.journals.note(at.journal, StepOpened(round=1, step=1, told=1))
    await at.writer.written(5.0)
    at.files.heal()
    await at.journals.append(at.journal, Stated(round=1, step=1, member="ada", turn=1, content="x"))
    await at.again()
    assert [type(value) for value in at.values()] == [RoundBegan, StepOpened, Stated]
    await at.close()


@pytest.mark.parametrize("damaged", [True, False])
async def test_entries_are_kept_where_their_head_may_be_what_was_damaged(damaged: bool) -> None:
    at = await floor()
    await at.post("a precious post")
    log = at.writer._log
    place = log._index.locate(RecordKind.JOURNAL, at.journal.key)
    assert place is not None
    path = log._folder.name(place.header.number)
    await at.close()
    node = at.files._names[path]
    if damaged:
        node.live[place.offset + place.size - 3] ^= 1
        node.durable = bytes(node.live)
    at._open()
    await at.pending.erase(at.pending.to_erase())
    assert bool(at.journals.of("team", "me")) is not damaged
    assert any(b"a precious post" in data for data in at.files.files().values())
    await at.close()


async def test_a_full_journal_takes_no_more_and_a_full_tenant_makes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    at = await floor()
    monkeypatch.setattr(work_journals, "MAX_JOURNAL_BYTES", 3000)
    for _ in range(3):
        at.journals.check_room(at.journal)
        await at.post("x" * 1000)
    with pytest.raises(Conflict, match="team t takes more than 0 MiB"):
        at.journals.check_room(at.journal)
    with pytest.raises(Conflict, match="takes more than"):
        await at.play()
    await at.journals.cut(at.journal, at.journal.entries[0].number)
    at.journals.check_room(at.journal)
    await at.again()
    assert 1000 < at.journal.bytes - len(at.journal.record.body) < 2000
    monkeypatch.setattr(work_journals, "MAX_TENANT_BYTES", 1000)
    with pytest.raises(Conflict, match="your teams and runs take"):
        at.journals.check_room(at.journal)
    with pytest.raises(Overloaded, match="delete some"):
        await at.journals.create("team", "me", "another", at.team)
    await at.journals.create("team", "you", "another", at.team)
    await at.close()


async def test_heads_count_against_a_tenants_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    at = await floor()
    head = len(at.journal.record.body)
    monkeypatch.setattr(work_journals, "MAX_TENANT_BYTES", 3 * head)
    for number in range(2):
        await at.journals.create("team", "me", f"more{number}", at.team)
    with pytest.raises(Overloaded, match="delete some"):
        await at.journals.create("team", "me", "another", at.team)
    await at.close()


async def test_a_full_journal_takes_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    at = await floor()
    monkeypatch.setattr(work_journals, "MAX_JOURNAL_BYTES", at.journal.bytes - 1)
    with pytest.raises(Conflict, match="team t takes more than"):
        await at.round(0).hold_beside(Poll(question="?", options=("yes", "no")))
    assert not at.journal.entries
    await at.close()


async def test_posts_while_a_round_runs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    at = await floor()
    await asyncio.gather(*(at.post("y" * 500) for _ in range(3)))
    assert at.journal.bytes - len(at.journal.record.body) == sum(at.journal._sizes.values()) > 1500
    assert len(at.values(Posted)) == 3
    await at.close()


async def test_a_note_stays_with_the_next_entry_if_that_one_is_refused() -> None:
    at = await floor()
    await at.journals.append(at.journal, RoundBegan(round=1))
    at.journals.note(at.journal, StepOpened(round=1, step=1, told=1))
    stated = Stated(round=1, step=1, member="ada", turn=1, content="x")
    at.files.fail(Fault(at.files.calls, errno.ENOSPC, sticky=True))
    with pytest.raises(Unavailable):
        await at.journals.append(at.journal, stated)
    at.files.heal()
    await at.journals.append(at.journal, stated)
    await at.again()
    assert [type(value) for value in at.values()] == [RoundBegan, StepOpened, Stated]
    await at.close()


async def test_a_note_that_was_rolled_back_does_not_return() -> None:
    at = await floor()
    await at.journals.append(at.journal, RoundBegan(round=1))
    at.journals.note(at.journal, StepOpened(round=1, step=1, told=1))
    await at.journals.cut(at.journal, at.journal.entries[0].number)
    await at.post("after")
    await at.again()
    assert [type(value) for value in at.values()] == [RoundBegan, Posted]
    await at.close()
