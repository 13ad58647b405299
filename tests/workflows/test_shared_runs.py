"""Runs of workflows on servers that share a store: what one server did is not done again at another."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.agents import shared_journals
from cairn.agents.shared_journals import SharedJournals
from cairn.agents.work_journals import Journal
from cairn.cluster.chain import Moved, Running
from cairn.cluster.guard import Guarded
from cairn.cluster.shared import SharedStore
from cairn.system.posix import SystemClock
from cairn.types.errors import Conflict, Damaged, NotFound, Unavailable
from cairn.workflows.definition import workflow_of
from cairn.workflows.runner import NodeEnded
from tests.cluster.stores import MemoryBlobs, keys
from tests.cluster.test_keys import tampered
from tests.workflows.scripted_answerer import ASKER, Bench, run
from tests.workflows.test_checks import node
from tests.workflows.test_runs import REPAIR, answers

NAMES = ("one", "two", "three")


class Line:
    """`MemoryBlobs` as one server reaches them; `cut`: not at all."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self._blobs, self.cut = blobs, False
        self.cut_after = 0
        """Cut after this many more objects are made, with no answer to the last; 0 for never."""

    def _through(self) -> MemoryBlobs:
        if self.cut:
            raise OSError("the store is away")
        return self._blobs

    def create(self, name: str, data: bytes) -> bool:
        made = self._through().create(name, data)
        if self.cut_after:
            self.cut_after -= 1
            self.cut = not self.cut_after
        return self._through() is not None and made

    def replace(self, name: str, data: bytes) -> None:
        self._through().replace(name, data)

    def read(self, name: str) -> bytes | None:
        return self._through().read(name)

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        return self._through().list(folder, after)

    def delete(self, names: Sequence[str]) -> None:
        self._through().delete(names)


class Benches:
    """Three servers with logs of their own and one store."""

    def __init__(self) -> None:
        self.blobs = MemoryBlobs()
        self.dead: set[str] = set()
        """Servers that the others take for dead."""
        self.lines = {name: Line(self.blobs) for name in NAMES}
        self.benches = {name: Bench(answers) for name in NAMES}
        for number, name in enumerate(NAMES, 1):
            self.share(name, number)

    def share(self, name: str, number: int, holder: str = "") -> None:
        """Let a server share the store, as a process that has just begun."""
        bench = self.benches[name]
        store = SharedStore(Guarded(self.lines[name], SystemClock()), keys(number * 1_000_000))
        bench.journals.shared = SharedJournals(store, holder or name, lambda other: other not in self.dead)

    @property
    def asked(self) -> list[tuple[str, int | None]]:
        """What all servers asked their models."""
        return [one for bench in self.benches.values() for one in bench.answerer.asked]

    async def at(self, name: str) -> Bench:
        """Return a server that has read the run, as a request that names it makes it do."""
        await self.benches[name].journals.refresh("run", "me", "r")
        return self.benches[name]

    async def begin(self) -> Bench:
        """Make the run at the first server."""
        await self.benches["one"].begin(REPAIR, task="build it")
        return self.benches["one"]

    async def cut_off(self, at: int) -> None:
        """Begin the run at the first server and kill that when it has been asked `at` times."""
        first = await self.begin()
        stop = asyncio.Event()

        def script(prompt: str) -> Any:
            if len(first.answerer.asked) > at:
                self.lines["one"].cut = True  # as a process that is gone: it writes nothing more
                self.dead.add("one")
                stop.set()
            return answers(prompt)

        first.answerer.script = script
        with pytest.raises(Unavailable):
            await first.work()
        assert stop.is_set()
        first.answerer.script = answers


@pytest.fixture
async def benches(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Benches]:
    monkeypatch.setattr(shared_journals, "END_SECONDS", 0.1)
    monkeypatch.setattr(shared_journals, "RETRY_SECONDS", 0.05)
    made = Benches()
    yield made
    made.dead.clear()
    for line in made.lines.values():
        line.cut = False
    for bench in made.benches.values():
        if bench.journals.shared is not None:
            await bench.journals.shared.close()
        await bench.close()


@pytest.mark.parametrize("at", range(9))
async def test_a_run_goes_on_at_another_server_and_asks_only_what_was_not_done(benches: Benches, at: int) -> None:
    alone = await run(REPAIR, answers, task="build it")
    await benches.cut_off(at)
    second = await benches.at("two")
    assert second.state.state == "interrupted"
    ended = await second.work()
    assert ended == alone.state.ended
    assert second.state.nodes == alone.state.nodes
    again = [one for one in benches.asked if benches.asked.count(one) > 1]
    assert len(set(again)) <= 2, "only what was being asked at the kill: two at most, which run at once"
    assert set(benches.asked) == set(alone.answerer.asked)
    third = await benches.at("three")
    assert third.state.nodes == alone.state.nodes and third.state.state == "finished"


async def test_a_run_at_work_is_not_taken_from_a_server_that_is_alive(benches: Benches) -> None:
    first = await benches.begin()
    second = benches.benches["two"]
    tried: list[str] = []

    async def try_it() -> None:
        await second.journals.refresh("run", "me", "r")
        tried.append(second.state.state)
        for call in (lambda: second.runs.work(ASKER, "r", print), _later(lambda: second.runs.interrupt("me", "r"))):
            with pytest.raises(Running):
                await call()
        with pytest.raises(Running):
            await second.journals.append(second.journals.find("run", "me", "r"), NodeEnded(key="x", state="done"))

    answer = first.answerer.answer

    async def slow(*given: Any) -> Any:
        if not tried:
            await try_it()
        return await answer(*given)

    first.answerer.answer = slow  # type: ignore[method-assign]
    await first.work()
    assert tried == ["running"] and second.answerer.asked == []
    await second.journals.refresh("run", "me", "r")
    assert second.state.state == "finished"
    with pytest.raises(Conflict, match="finished"):
        await second.work()


def _later(work: Callable[[], object]) -> Callable[[], Any]:
    async def call() -> None:
        work()

    return call


async def test_a_server_that_was_stopped_cannot_add_to_a_run_that_was_taken_over(benches: Benches) -> None:
    """As after SIGSTOP: the others took it for dead, it goes on later."""
    first = await benches.begin()
    asked = asyncio.Event()
    goes_on = asyncio.Event()
    answer = first.answerer.answer

    async def stopped(*given: Any) -> Any:
        found = await answer(*given)
        if len(first.answerer.asked) >= 2 and not goes_on.is_set():
            asked.set()
            await goes_on.wait()
        return found

    first.answerer.answer = stopped  # type: ignore[method-assign]
    working = asyncio.create_task(first.work())
    await asked.wait()
    benches.dead.add("one")
    second = await benches.at("two")
    ended = await second.work()
    benches.dead.clear()
    goes_on.set()
    with pytest.raises(Moved):
        await working
    done = {event["key"] for event in first.events if event["type"] == "node.done"}
    assert done == {"plan"}, "nothing is told that is not in the chain"
    first = await benches.at("one")
    assert first.state.ended == ended and first.state.nodes == second.state.nodes


async def test_an_entry_whose_writing_had_no_answer_is_looked_for_before_the_run_goes_on(benches: Benches) -> None:
    first, line = await benches.begin(), benches.lines["one"]
    line.cut_after = 2  # the beginning of the work, and the end of the first node
    with pytest.raises(Unavailable):
        await first.work()
    assert line.cut and not first.state.nodes
    line.cut = False
    shared = first.journals.shared
    assert shared is not None
    shared._store.blobs._breaker.worked()
    await asyncio.gather(*shared._ending)  # it is known where the chain ends, but not what is in it
    with pytest.raises(Moved):
        await first.work()
    first = await benches.at("one")
    assert [*first.state.nodes] == ["plan"]
    alone = await run(REPAIR, answers, task="build it")
    assert await first.work() == alone.state.ended
    assert first.answerer.asked == alone.answerer.asked


async def test_entries_that_come_at_once_are_one_record(benches: Benches) -> None:
    first = benches.benches["one"]
    many = {"nodes": [node(f"n{number}") for number in range(40)]}
    await first.runs.create("me", workflow_of(many), {}, id="r", seed=3)
    await first.work()
    records = [name for name in benches.blobs.objects if name.startswith("runs/")]
    assert len(records) < 20, "made, began, a few with forty ends, ended"
    second = await benches.at("two")
    assert len(second.state.nodes) == 40 and second.state.state == "finished"


@pytest.mark.parametrize("harm", ["changed", "cut out", "swapped", "of another run", "of another tenant"])
async def test_a_chain_that_was_harmed_is_refused(benches: Benches, harm: str) -> None:
    await benches.cut_off(4)
    records = sorted(name for name in benches.blobs.objects if name.startswith("runs/"))
    objects, at = benches.blobs.objects, len(records) // 2
    if harm == "changed":
        objects[records[at]] = tampered(random.Random(1), objects[records[at]], objects[records[0]])
    elif harm == "cut out":
        for number in range(at, len(records) - 1):
            objects[records[number]] = objects[records[number + 1]]
        del objects[records[-1]]
    elif harm == "swapped":
        objects[records[at]], objects[records[at + 1]] = objects[records[at + 1]], objects[records[at]]
    else:
        other = benches.benches["three"]
        tenant = "me" if harm == "of another run" else "you"
        await other.runs.create(tenant, workflow_of(REPAIR), {"task": "x"}, id="other", seed=3)
        (name,) = (name for name in objects if name.startswith("runs/") and name not in records)
        objects[records[0]] = objects[name]
    second = benches.benches["two"]
    with pytest.raises(Damaged, match="run r"):
        await second.journals.refresh("run", "me", "r")
    with pytest.raises(NotFound):
        second.runs.get("me", "r")


async def test_a_run_is_its_tenants_alone(benches: Benches) -> None:
    await benches.begin()
    second = benches.benches["two"]
    await second.journals.refresh("run", "you", "r")
    with pytest.raises(NotFound):
        second.runs.get("you", "r")
    await second.runs.create("you", workflow_of(REPAIR), {"task": "x"}, id="r")
    with pytest.raises(Conflict, match="already"):
        await second.runs.create("me", workflow_of(REPAIR), {"task": "x"}, id="r")


async def test_a_store_that_is_away_makes_a_run_unavailable_and_it_goes_on_when_it_is_back(benches: Benches) -> None:
    first = await benches.begin()
    line = benches.lines["one"]
    line.cut = True
    with pytest.raises(Unavailable) as refused:
        await first.work()
    assert refused.value.retry_after
    with pytest.raises(Unavailable):
        await first.runs.create("me", workflow_of(REPAIR), {"task": "x"}, id="s")
    line.cut = False
    benches.share("one", 4, "one again")  # and not 5 s later, when the breaker lets a call through
    benches.dead.add("one")
    first = await benches.at("one")
    alone = await run(REPAIR, answers, task="build it")
    assert await first.work() == alone.state.ended


async def test_a_server_that_starts_again_goes_on_with_its_own_log_and_the_chain(benches: Benches) -> None:
    await benches.cut_off(5)
    first = benches.benches["one"]
    await first.again()
    benches.lines["one"].cut = False
    benches.share("one", 5, "one again")
    known = first.state.nodes
    first = await benches.at("one")
    assert first.state.nodes == known and known
    alone = await run(REPAIR, answers, task="build it")
    assert await first.work() == alone.state.ended


async def test_a_store_that_lost_an_acknowledged_entry_is_refused(benches: Benches) -> None:
    first = await benches.begin()
    await first.work()
    records = sorted(name for name in benches.blobs.objects if name.startswith("runs/"))
    for name in records[-3:]:
        del benches.blobs.objects[name]
    benches.share("one", 6, "one again")
    benches.dead.add("one")
    with pytest.raises(Damaged, match="lost entry"):
        await first.journals.refresh("run", "me", "r")
    assert first.state.state == "finished", "its own copy stays"


async def test_a_deleted_run_is_gone_everywhere_and_leaves_two_objects(benches: Benches) -> None:
    first = await benches.begin()
    second = await benches.at("two")
    await first.runs.delete("me", "r")
    await second.journals.refresh("run", "me", "r")
    with pytest.raises(NotFound):
        second.runs.get("me", "r")
    assert len([name for name in benches.blobs.objects if name.startswith("runs/")]) == 2


async def test_a_run_that_went_on_and_was_deleted_elsewhere_is_gone(benches: Benches) -> None:
    first, second = await benches.begin(), await benches.at("two")
    await first.work()
    await first.runs.delete("me", "r")
    with pytest.raises(Moved):
        await second.journals.append(second.journals.find("run", "me", "r"), NodeEnded(key="x", state="done"))
    await second.journals.refresh("run", "me", "r")
    with pytest.raises(NotFound):
        second.runs.get("me", "r")


async def test_runs_of_all_servers_are_listed_at_each_for_their_tenant(benches: Benches) -> None:
    await benches.begin()
    await benches.benches["two"].runs.create("me", workflow_of(REPAIR), {"task": "x"}, id="s")
    await benches.benches["two"].runs.create("you", workflow_of(REPAIR), {"task": "x"}, id="t")
    third = benches.benches["three"]
    assert sorted(await third.runs.created("me")) == ["r", "s"] and list(await third.runs.created("you")) == ["t"]
    await third.runs.refresh("me", ["r", "s"])
    assert third.runs.get("me", "s").state == "interrupted"
    await third.runs.delete("me", "s")
    for bench in benches.benches.values():
        ids = list(await bench.runs.created("me"))
        await bench.runs.refresh("me", ids)
        assert list(await bench.runs.created("me")) == ["r"]
    (name,) = (name for name in benches.blobs.objects if name.startswith("run-ids/") and name not in before_of(benches))
    benches.blobs.objects[name] = b"something else"
    benches.share("two", 7, "two again")
    assert list(await benches.benches["two"].runs.created("you")) == ["t"], "its own is listed all the same"
    benches.lines["three"].cut = True
    assert list(await third.runs.created("me")) == ["r"], "what it has itself"


def before_of(benches: Benches) -> set[str]:
    """Return the names in the list of the tenant `me`."""
    shared = benches.benches["one"].journals.shared
    assert shared is not None
    return {name for name in benches.blobs.objects if name.startswith(shared._list_folder("run", "me"))}


async def test_a_run_that_was_made_before_the_store_was_shared_is_put_there(benches: Benches) -> None:
    first = benches.benches["one"]
    shared, first.journals.shared = first.journals.shared, None
    await first.begin(REPAIR, task="build it")
    first.answerer.die_at = 3
    with contextlib.suppress(Exception):
        await first.work()
    known, first.journals.shared, first.answerer.die_at = first.state.nodes, shared, None
    first = await benches.at("one")
    assert first.state.nodes == known and known
    ended = await first.work()
    second = await benches.at("two")
    assert second.state.ended == ended and second.state.nodes == first.state.nodes


def numbers(bench: Bench) -> list[int]:
    """Return the numbers of the run's entries at a server."""
    return [entry.number for entry in bench.journals.find("run", "me", "r").entries]


async def while_news_are_read(benches: Benches) -> tuple[Bench, Bench, Journal, asyncio.Task[None]]:
    """Return two servers, the second one's copy of a run that lacks an entry of the first, and the reading of it."""
    first, second = await benches.begin(), await benches.at("two")
    await first.journals.append(first.journals.find("run", "me", "r"), NodeEnded(key="x", state="done"))
    stale = second.journals.find("run", "me", "r")
    reading = asyncio.create_task(second.journals.refresh("run", "me", "r"))
    await asyncio.sleep(0)
    return first, second, stale, reading


async def test_work_does_not_begin_on_a_copy_to_which_news_are_being_added(benches: Benches) -> None:
    first, second, stale, reading = await while_news_are_read(benches)
    with pytest.raises(Moved):
        async with second.journals.working(stale):
            pass
    await reading
    second = await benches.at("two")
    assert numbers(second) == numbers(first) == [1]


async def test_an_entry_that_is_added_while_news_are_read_gets_no_number_twice(benches: Benches) -> None:
    first, second, stale, reading = await while_news_are_read(benches)
    with pytest.raises(Moved):
        await second.journals.append(stale, NodeEnded(key="y", state="done"))
    await reading
    second = await benches.at("two")
    await second.journals.append(second.journals.find("run", "me", "r"), NodeEnded(key="y", state="done"))
    first = await benches.at("one")
    assert numbers(first) == numbers(second) == [1, 2]


async def test_a_run_at_work_stays_known_however_many_others_are_looked_at(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_journals, "MOST_CHAINS", 2)
    first = await benches.begin()
    answer = first.answerer.answer

    async def looking(*given: Any) -> Any:
        for number in range(4):
            await first.journals.refresh("run", "me", f"other-{number}")
        return await answer(*given)

    first.answerer.answer = looking  # type: ignore[method-assign]
    ended = await first.work()
    shared = first.journals.shared
    assert shared is not None and len(shared._followed) <= 3
    second = await benches.at("two")
    assert second.state.ended == ended and second.state.state == "finished"


async def test_a_copy_that_was_read_again_meanwhile_is_no_missing_run(benches: Benches) -> None:
    first, second = await benches.begin(), await benches.at("two")
    await first.journals.append(first.journals.find("run", "me", "r"), NodeEnded(key="x", state="done"))
    old, shared = second.journals.find("run", "me", "r"), second.journals.shared
    assert shared is not None
    shared.doubt(old.name)
    await benches.at("two")
    with pytest.raises(Moved):
        await second.journals.append(old, NodeEnded(key="y", state="done"))
    await first.runs.delete("me", "r")
    await benches.at("two")
    with pytest.raises(NotFound):
        await second.journals.append(old, NodeEnded(key="y", state="done"))
