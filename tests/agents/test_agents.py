"""Agents: turns over the log, forks and rollbacks, restarts, and which tenant sees what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents.agent_service import check_id
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, TokensRecord, decode
from cairn.agents.log.token_log import TokenLog
from cairn.frontend.request_options import SamplingOptions
from cairn.types.errors import Conflict, ContextTooLong, Damaged, InvalidRequest, NotFound
from cairn.types.stats import Miss
from tests.agents.house import FOLDER, GREEDY, Heard, House, file_of, hear, house
from tests.files import CrashFiles, SeededRng

SYSTEM = [{"role": "system", "content": "You remember."}]


async def stateless(at: House, messages: list[dict[str, Any]], options: SamplingOptions = GREEDY) -> Heard:
    """Return the answer that a client gets which resends its conversation."""
    from cairn.frontend.request_options import RequestParams, requests
    from cairn.types.outputs import Delta

    service = at.service
    prompt = await service.chat.prompt(messages)
    (request,) = requests(
        service.spec, prompt.tokens, options, RequestParams(output=prompt.output), ids=service.next_id
    )
    heard = Heard()
    async for event in service.generate(request):
        if isinstance(event, Delta):
            heard.text += event.text
            heard.tokens += event.tokens
        else:
            heard.done = event
    return heard


async def test_turns_extend_one_context_and_only_the_new_message_is_computed(folder: Path) -> None:
    """The answer is that of a client that resends the whole conversation, token for token."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        messages = list(SYSTEM)
        for text in ("My name is Ada and this is rather a long first message.", "What is my name?", "And now?"):
            messages.append({"role": "user", "content": text})
            heard = await at.say("ada", text)
            assert heard.tokens and heard.tokens == (await stateless(at, messages)).tokens
            messages.append((await at.agents.turns("default", "ada"))[-1].answer)  # type: ignore[arg-type]
        assert heard.done is not None and heard.done.cache.computed < 80
        info = at.agents.get("default", "ada")
        assert (info.turns, info.head, info.state) == (3, 3, "idle")
        assert info.tokens == len(await at.agents.context("default", "ada"))
        assert info.savings.requests == 3 and info.savings.pool > 0


async def test_text_cut_off_by_a_stop_is_not_in_the_next_context(folder: Path) -> None:
    """Neither the end token nor text after a stop string, as for a client that resends what it saw."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        whole = await at.say("ada", "one")
        options = [SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[whole.tokens[5]])]
        options += [SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True, stop=[c]) for c in whole.text[2:6]]
        for n, option in enumerate(options):
            id = f"cut{n}"
            await at.agents.create("default", id=id)
            cut = await at.say(id, "one", options=option)
            assert cut.done is not None and cut.done.reason == "stop" and len(cut.tokens) < 12
            answer = (await at.agents.turns("default", id))[0].answer
            assert answer is not None
            messages = [{"role": "user", "content": "one"}, answer, {"role": "user", "content": "two"}]
            assert (await at.say(id, "two")).tokens == (await stateless(at, messages)).tokens


async def test_damage_that_cost_an_answer_is_reported_and_blocks_further_turns(folder: Path) -> None:
    """Another history would give another answer. The agent goes on from the last whole turn (known failure 38)."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for text in ("one", "two"):
            await at.say("ada", text)
        await at.agents.close()
        at.files = without_ends(at.files, only=1)
        await at.open()
        assert [turn.state for turn in await at.agents.turns("default", "ada")] == ["damaged", "finished"]
        with pytest.raises(Damaged, match="turn 1 of agent ada cannot be read"):
            await at.say("ada", "three")
        await at.agents.rollback("default", "ada", turn=0)
        assert (await at.say("ada", "three")).done is not None


@pytest.mark.parametrize("clean", [True, False])
async def test_a_restart_finds_every_finished_turn_and_goes_on_the_same(folder: Path, clean: bool) -> None:
    async with house(folder) as at, house(folder) as undisturbed:
        for server in (at, undisturbed):
            await server.agents.create("default", id="ada", messages=SYSTEM, metadata={"a": "b"}, ttl=1e6)
            await server.say("ada", "My name is Ada.")
            await server.say("ada", "What is my name?")
        before = await at.agents.turns("default", "ada")
        info = at.agents.get("default", "ada")
        await at.again(clean=clean)
        assert (await at.agents.turns("default", "ada")) == before
        assert at.agents.get("default", "ada") == info
        last = [await server.say("ada", "And where do I live?") for server in (at, undisturbed)]
        assert last[0].tokens == last[1].tokens != []


async def test_a_turn_cut_by_a_crash_keeps_its_tokens_and_is_resumed_the_same(folder: Path) -> None:
    options = SamplingOptions(temperature=0.8, seed=7, max_tokens=900, ignore_eos=True)
    async with house(folder) as at, house(folder) as undisturbed:
        for server in (at, undisturbed):
            await server.agents.create("default", id="ada")
        whole = await undisturbed.say("ada", "Tell me a story.", options=options)
        running = await at.begin("ada", "Tell me a story.", options=options)
        said = await hear(running, stop_after=33)
        await asyncio.sleep(0.05)
        at.files.heal()
        await at.again(clean=True)
        (turn,) = await at.agents.turns("default", "ada")
        assert turn.state == "interrupted" and 32 <= turn.completion_tokens < 900
        assert at.agents.get("default", "ada").state == "interrupted"
        with pytest.raises(Conflict, match="turn 1 of agent ada was interrupted"):
            await at.begin("ada", "hello?")
        resumed = await hear(await at.agents.resume("default", "ada", request=at.service.next_id()))
        assert resumed.tokens == whole.tokens and resumed.text == whole.text
        assert resumed.tokens[: len(said.tokens)] == said.tokens
        assert resumed.done is not None and resumed.done.usage.completion_tokens == 900
        (turn,) = await at.agents.turns("default", "ada")
        assert turn.state == "finished" and turn.completion_tokens == 900
        more = [await server.say("ada", "And then?") for server in (at, undisturbed)]
        assert more[0].tokens == more[1].tokens
        with pytest.raises(Conflict, match="only an interrupted one"):
            await at.agents.resume("default", "ada", request=1)


@pytest.mark.parametrize(
    ("other", "why"), [("engine", "other kernels, weights, kv_dtype or kv_codec"), ("spec", "another model")]
)
async def test_a_turn_is_resumed_only_by_the_model_and_engine_that_began_it(folder: Path, other: str, why: str) -> None:
    """Otherwise the rest would differ from the uninterrupted answer, and nobody could tell."""
    options = SamplingOptions(temperature=0, max_tokens=1900, ignore_eos=True)
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await hear(await at.begin("ada", "Tell me a story.", options=options), stop_after=20)
        await at.again(clean=True)
        service, mine = at.service, (at.service.info, at.service.spec)
        if other == "engine":
            service.info = msgspec.structs.replace(service.info, identity=b"another variant's")
        else:
            service.spec = msgspec.structs.replace(service.spec, identity=b"another model's")
        with pytest.raises(Conflict, match=f"begun with {why}.*roll back to turn 0"):
            await at.agents.resume("default", "ada", request=service.next_id())
        service.info, service.spec = mine
        assert mine[0].identity not in (b"", mine[1].identity)
        resumed = await hear(await at.agents.resume("default", "ada", request=service.next_id()))
        assert resumed.done is not None


@pytest.mark.parametrize(("bound", "more"), [("context", 100), ("context", 0), ("pool_tokens", 100)])
async def test_a_turn_resumed_with_less_room_goes_on_as_far_as_possible(folder: Path, bound: str, more: int) -> None:
    """It began without `max_tokens`, so it asked for the whole context; a resume cannot ask for less."""
    options = SamplingOptions(temperature=0, ignore_eos=True)
    async with house(folder) as at, house(folder) as undisturbed:
        for server in (at, undisturbed):
            await server.agents.create("default", id="ada")
        whole = (await undisturbed.say("ada", "Tell me a story.", options=options)).tokens
        await hear(await at.begin("ada", "Tell me a story.", options=options), stop_after=20)
        await at.again(clean=True)
        service, mine = at.service, at.service.info
        said = (await at.agents.turns("default", "ada"))[0].completion_tokens
        least = mine.context - len(whole) + said
        service.info = msgspec.structs.replace(mine, **{bound: least - 1})
        with pytest.raises(Conflict, match=f"needs {least} tokens.* room for {least - 1}; roll back to turn 0"):
            await at.agents.resume("default", "ada", request=service.next_id())
        service.info = msgspec.structs.replace(mine, **{bound: least + more})
        resumed = await hear(await at.agents.resume("default", "ada", request=service.next_id()))
        assert resumed.tokens == whole[: said + more]
        assert resumed.done is not None and resumed.done.reason == "length"
        assert resumed.done.usage.completion_tokens == said + more


async def test_a_turn_complete_at_the_kill_is_only_concluded(folder: Path) -> None:
    """All tokens were on disk, but not the record of the end."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        heard = await at.say("ada", "Hello")
        assert heard.done is not None
        await at.agents.close()
        at.files = without_ends(at.files)
        await at.open()
        assert (await at.agents.turns("default", "ada"))[0].state == "interrupted"
        before = at.service.next_id()
        resumed = await hear(await at.agents.resume("default", "ada", request=before + 1))
        assert resumed.tokens == heard.tokens and resumed.text == heard.text
        assert resumed.done is not None and resumed.done.reason == "length"
        assert at.service.status(before + 1) is None, "nothing was generated"
        assert (await at.agents.turns("default", "ada"))[0].state == "finished"


def without_ends(files: CrashFiles, only: int = 0) -> CrashFiles:
    """Return the same log with every end replaced by a piece, or only the first so many."""
    old = TokenLog.open(files, FOLDER, SeededRng())
    assert old is not None
    made = CrashFiles()
    new = TokenLog.open(made, FOLDER, SeededRng())
    assert new is not None
    cut = 0
    for record in old.recovered:
        if record.kind == RecordKind.END and (not only or cut < only):
            cut += 1
            end = decode(record.payload, EndRecord)
            assert end is not None
            piece = msgspec.msgpack.encode(TokensRecord(ids=end.ids))
            record = record._replace(kind=RecordKind.TOKENS, payload=piece)
        new.write([record], sync=True)
    new.close()
    old.close()
    return made


async def test_two_turns_at_once_conflict_unless_the_second_forks(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        await at.say("ada", "one")
        first = await at.begin("ada", "two")
        with pytest.raises(Conflict, match="turn 2 of agent ada is running") as caught:
            await at.begin("ada", "three")
        assert caught.value.status == 409
        second = await at.begin("ada", "three", fork_on_conflict=True)
        assert second.agent.id != "ada" and second.agent.record.origin == "ada" and second.turn.number == 2
        heard = await asyncio.gather(hear(first), hear(second))
        assert all(outcome.done for outcome in heard) and heard[0].tokens != heard[1].tokens
        assert [turn.messages[0]["content"] for turn in (await at.agents.turns("default", "ada"))] == ["one", "two"]
        forked = await at.agents.turns("default", second.agent.id)
        assert [turn.messages[0]["content"] for turn in forked] == ["one", "three"]


async def test_a_turn_that_cannot_begin_leaves_no_fork_behind(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        first = await at.begin("ada", "one")
        with pytest.raises(ContextTooLong):
            await at.begin("ada", "word " * 2000, fork_on_conflict=True)
        await hear(first)
        assert [info.id for info in at.agents.page("default").agents] == ["ada"]


async def test_two_turns_that_begin_in_the_same_moment_conflict(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        begun = await asyncio.gather(*(at.begin("ada", str(n)) for n in range(5)), return_exceptions=True)
        turns = [outcome for outcome in begun if not isinstance(outcome, BaseException)]
        assert len(turns) == 1 and sum(isinstance(outcome, Conflict) for outcome in begun) == 4
        await hear(turns[0])
        assert len(await at.agents.turns("default", "ada")) == 1


async def test_forks_share_history_and_part_ways(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for text in ("one", "two", "three"):
            await at.say("ada", text)
        size = len(b"".join(at.files.files().values()))
        info = await at.agents.fork("default", "ada", turn=2, new_id="bob")
        assert (info.head, info.turns, info.origin, info.origin_turn) == (2, 2, "ada", 2)
        assert len(b"".join(at.files.files().values())) - size < 300, "a fork copies nothing"
        assert (await at.agents.turns("default", "bob")) == (await at.agents.turns("default", "ada"))[:2]
        again = await at.say("bob", "three")
        assert again.tokens == list(
            (await at.agents._archive.branch(at.agents._find("default", "ada").head)).last.tokens
        )
        other = await at.say("bob", "four")
        assert other.done is not None
        await at.again()
        assert [turn.number for turn in (await at.agents.turns("default", "bob"))] == [1, 2, 3, 4]
        with pytest.raises(NotFound, match="no turn 9"):
            await at.agents.fork("default", "ada", turn=9)
        with pytest.raises(Conflict, match="there is an agent bob already"):
            await at.agents.fork("default", "ada", new_id="bob")


async def test_a_rollback_leaves_the_abandoned_branch_listed_until_it_is_collected(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for text in ("one", "two secret", "three"):
            await at.say("ada", text)
        info = await at.agents.rollback("default", "ada", turn=1)
        assert (info.head, info.turns) == (1, 1)
        await at.say("ada", "other")
        await at.again()
        turns = await at.agents.turns("default", "ada")
        assert [(turn.number, turn.parent, turn.current) for turn in turns] == [
            (1, 0, True),
            (2, 1, False),
            (3, 2, False),
            (4, 1, True),
        ]
        await at.agents.tend()
        assert len(await at.agents.turns("default", "ada")) == 4
        at.clock.ahead = 8 * 86_400
        await at.agents.tend()
        assert [turn.number for turn in (await at.agents.turns("default", "ada"))] == [1, 4]
        assert not any(b"two secret" in data for data in at.files.files().values())
        await at.again()
        assert [turn.number for turn in (await at.agents.turns("default", "ada"))] == [1, 4]


async def test_an_abandoned_branch_that_a_fork_has_keeps_its_numbers(folder: Path) -> None:
    """Otherwise a restart would find the branch again, and two turns of one number."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for text in ("one", "two"):
            await at.say("ada", text)
        await at.agents.fork("default", "ada", new_id="bob")
        await at.agents.rollback("default", "ada", turn=1)
        at.clock.ahead = 8 * 86_400
        await at.agents.tend()
        await at.say("ada", "other")
        turns = await at.agents.turns("default", "ada")
        assert [(turn.number, turn.parent, turn.current) for turn in turns] == [
            (1, 0, True),
            (2, 1, False),
            (3, 1, True),
        ]
        await at.again()
        assert await at.agents.turns("default", "ada") == turns
        await at.agents.delete("default", "bob")
        await at.agents.tend()
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [1, 3]
        assert not any(b"two" in data for data in at.files.files().values())


async def test_turns_after_a_rollback_stay_for_a_week_however_old_they_are(folder: Path) -> None:
    """Also after a restart, and in an imported agent."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for text in ("one", "two"):
            await at.say("ada", text)
        at.clock.ahead = 30 * 86_400
        await at.agents.rollback("default", "ada", turn=1)
        data = await file_of(at, "default", "ada")
        await at.agents.tend()
        await at.again()
        at.clock.ahead += 6 * 86_400
        await at.agents.tend()
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [1, 2]
        await at.agents.import_agent("default", data, "bob")
        at.clock.ahead += 2 * 86_400
        await at.agents.tend()
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [1]
        assert [turn.number for turn in await at.agents.turns("default", "bob")] == [1, 2]


async def test_branches_are_collected_though_the_agent_is_rolled_back_again_and_again(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for round in range(6):
            await at.say("ada", f"day {6 * round}")
            at.clock.ahead += 6 * 86_400
            await at.agents.rollback("default", "ada", turn=0)
            await at.agents.tend()
            await at.again()
        assert [turn.number for turn in await at.agents.turns("default", "ada")] == [5, 6]


async def test_deleting_erases_what_no_fork_shares(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        await at.say("ada", "shared secret")
        await at.say("ada", "private secret")
        await at.agents.fork("default", "ada", turn=1, new_id="bob")
        await at.agents.delete("default", "ada")

        def on_disk(text: bytes) -> bool:
            return any(text in data for data in at.files.files().values())

        assert on_disk(b"shared secret") and not on_disk(b"private secret")
        with pytest.raises(NotFound):
            at.agents.get("default", "ada")
        await at.again()
        assert [turn.number for turn in (await at.agents.turns("default", "bob"))] == [1]
        await at.say("bob", "still here")
        await at.agents.delete("default", "bob")
        assert not on_disk(b"shared secret") and not on_disk(b"You remember.")
        await at.again()
        assert at.agents.page("default").agents == ()


async def test_deleting_ends_the_turn_that_runs(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        running = await at.begin("ada", "a secret story", options=SamplingOptions(max_tokens=1500, ignore_eos=True))
        reading = asyncio.create_task(hear(running))
        await asyncio.sleep(0.05)
        await at.agents.delete("default", "ada")
        assert (await reading).error is not None
        await at.agents.writer.sync()
        assert not any(b"a secret story" in data for data in at.files.files().values())
        await at.again()
        assert at.agents.page("default").agents == ()


async def test_an_agent_ends_after_its_time_without_use(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="brief", ttl=60)
        await at.agents.create("default", id="long")
        at.clock.ahead = 59
        await at.agents.tend()
        await at.say("brief", "still used")
        at.clock.ahead = 100
        await at.agents.tend()
        assert len(at.agents.page("default").agents) == 2
        at.clock.ahead = 200
        await at.agents.tend()
        assert [info.id for info in at.agents.page("default").agents] == ["long"]


async def test_another_tenants_agent_is_not_there(folder: Path) -> None:
    """An agent is found by tenant and id only; ids derived from content once made strangers share a cache.

    Known failure 29.
    """
    async with house(folder) as at:
        await at.agents.create("ada", id="same")
        await at.agents.create("bob", id="same")
        await at.say("same", "one", "ada")
        assert (await at.agents.turns("bob", "same")) == ()
        with pytest.raises(NotFound):
            await at.agents.turns("eve", "same")
        for call in (at.agents.get, at.agents.export):
            with pytest.raises(NotFound):
                call("eve", "same")
        for change in (at.agents.delete("eve", "same"), at.agents.fork("eve", "same"), at.begin("same", "x", "eve")):
            with pytest.raises(NotFound):
                await change
        assert [info.id for info in at.agents.page("eve").agents] == []


@pytest.mark.parametrize("id", ["", "../etc", "a/b", "a b", ".hidden", "x" * 65, "ä", "import", "a\n"])
def test_ids_must_be_words(id: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 64 letters"):
        check_id(id)


async def test_a_too_long_message_is_refused_with_figures_and_leaves_nothing(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        await at.say("ada", "one")
        size = len(await at.agents.turns("default", "ada"))
        with pytest.raises(ContextTooLong, match=r"the prompt has \d+ tokens"):
            await at.begin("ada", "word " * 2000)
        assert len(await at.agents.turns("default", "ada")) == size and at.agents.get("default", "ada").state == "idle"
        assert (await at.say("ada", "two")).done is not None


async def test_agents_are_listed_in_pages_newest_first(folder: Path) -> None:
    async with house(folder) as at:
        for n in range(5):
            at.clock.ahead = n
            await at.agents.create("default", id=f"a{n}")
        page = at.agents.page("default", limit=2)
        assert [info.id for info in page.agents] == ["a4", "a3"] and page.more
        page = at.agents.page("default", limit=3, after="a3")
        assert [info.id for info in page.agents] == ["a2", "a1", "a0"] and not page.more
        assert page.next is None
        for wrong in ("zzz", "x:a1", ":a1", "nan:a1", "inf:a1", "-inf:a1", "1e999:a1"):
            with pytest.raises(InvalidRequest, match="after"):
                at.agents.page("default", after=wrong)


async def test_a_page_follows_also_when_the_last_agent_of_the_one_before_is_deleted(folder: Path) -> None:
    async with house(folder) as at:
        for n in range(5):
            at.clock.ahead = n // 2  # two of each time
            await at.agents.create("default", id=f"a{n}")
        whole = [info.id for info in at.agents.page("default").agents]
        for size in range(1, 5):
            page = at.agents.page("default", limit=size)
            assert page.more and page.next
            assert [i.id for i in at.agents.page("default", after=page.next).agents] == whole[size:]
        await at.agents.delete("default", whole[3])
        assert [i.id for i in at.agents.page("default", after=page.next).agents] == whole[4:]


async def test_a_turn_reports_where_it_departs_from_the_cached_context(folder: Path) -> None:
    """Compared with contexts of the same tenant only.

    The text is in the report, not in the log, and gone with the agent.
    """
    async with house(folder) as at:
        for tenant, id in (("acme", "ada"), ("acme", "bob"), ("other", "cy"), ("acme", "dan")):
            await at.agents.create(tenant, id=id, messages=SYSTEM)
        first = await at.say("ada", "Call me Ada, please.", "acme")
        assert first.done is not None and first.done.cache.miss == Miss(position=0, reason="never seen")
        second = await at.say("bob", "Call me Bob, please.", "acme")
        assert second.done is not None and second.done.cache.miss is not None
        miss = second.done.cache.miss
        assert miss.reason == "different tokens" and miss.differs is not None
        assert miss.differs.known.startswith("Ada, please.") and miss.differs.given.startswith("Bob, please.")
        turn = (await at.agents._archive.branch(at.agents._agents.find("acme", "bob").head)).last
        assert turn.ended is not None and turn.ended.cache.miss == Miss(
            position=miss.position, reason="different tokens"
        )
        theirs = await at.say("cy", "Call me Cy, please.", "other")
        assert theirs.done is not None and theirs.done.cache.miss == Miss(position=0, reason="never seen")
        await at.agents.delete("acme", "ada")
        third = await at.say("dan", "Call me Dan, please.", "acme")
        assert third.done is not None and third.done.cache.miss is not None and third.done.cache.miss.differs is None


@pytest.mark.parametrize(("identity", "reason"), [(b"another", "model changed"), (None, "evicted")])
async def test_a_turn_reports_why_its_kv_is_gone(folder: Path, identity: bytes | None, reason: str) -> None:
    """In a worker that has never seen its context: either it was another model's, or nothing kept it."""
    async with house(folder, kv_disk=False) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        await at.say("ada", "My name is Ada and this is rather a long first message.")
        files = at.files
    async with house(folder, kv_disk=False) as at:
        await at.agents.close()
        at.files = files
        if identity is not None:
            at.service.spec = msgspec.structs.replace(at.service.spec, identity=identity)
        await at.open()
        heard = await at.say("ada", "What is my name?")
        assert heard.done is not None and heard.done.cache.miss == Miss(position=0, reason=reason)  # type: ignore[arg-type]
        again = await at.say("ada", "And now?")
        assert again.done is not None and again.done.cache.pool > 64


async def test_the_metrics_count_agents_their_turns_their_log_and_what_was_saved(folder: Path) -> None:
    """Also after a restart."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        for text in ("My name is Ada and this is rather a long first message.", "What is my name?"):
            await at.say("ada", text)
        await hear(await at.begin("ada", "Tell me more."), stop_after=1)
        await at.again(clean=True)
        values = {}
        for line in at.service.metrics.render().decode().splitlines():
            name, _, value = line.rpartition(" ")
            values[name.replace(f'model_name="{at.service.name}"', "").replace("{}", "").replace("{,", "{")] = value
        turns = await at.agents.turns("default", "ada")
        cut = sum(turn.state == "interrupted" for turn in turns)
        assert float(values["cairn:agents"]) == 1 and float(values['cairn:agent_turns{state="interrupted"}']) == cut
        assert float(values['cairn:agent_turns{state="finished"}']) == 3 - cut
        savings = at.agents.savings("default")
        assert float(values["cairn:ledger_requests_total"]) == savings.requests >= 2
        assert float(values["cairn:ledger_saved_tokens_total"]) == savings.pool > 0
        assert float(values["cairn:ledger_computed_tokens_total"]) == savings.computed > 0
        assert float(values["cairn:ledger_saved_prefill_seconds_total"]) == savings.seconds_avoided
        assert float(values["cairn:agent_log_bytes"]) == at.agents.writer.bytes > 500
        assert float(values["cairn:agent_log_dropped_records_total"]) == 0


async def test_the_ledger_of_bytes_goes_on_after_a_restart(folder: Path) -> None:
    """Bytes that a worker counted are added once, to the totals of earlier processes."""
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=SYSTEM)
        at.service.metrics.worker_replaced()
        began = at.agents.figures()
        at.service.metrics._ended = [value + 1000 for value in at.service.metrics._ended]
        await at.say("ada", "Hello")
        counted = at.agents.figures()
        assert (counted.read, counted.written) >= (began.read + 1000, began.written + 1000)
        await at.again()
        figures = at.agents.figures()
        assert (figures.read, figures.written) == (counted.read, counted.written)
        at.service.metrics._ended = [value + 7 for value in at.service.metrics._ended]
        assert at.agents.figures().read == figures.read + 7


async def test_a_turn_uses_the_fairness_key_of_its_caller(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        first = await at.begin("ada", "hello", share="10.0.0.7", options=SamplingOptions(max_tokens=400))
        assert first.request.share == "10.0.0.7"
        await first.close()
        again = await at.agents.resume("default", "ada", request=at.service.next_id(), share="10.0.0.8")
        assert again.request.share == "10.0.0.8"
        await again.close()


async def test_room_is_made_by_the_agent_that_was_used_least_recently(folder: Path) -> None:
    async with house(folder) as at:
        for id in ("resp_a", "resp_b", "other", "resp_c"):
            await at.agents.create("default", id=id)
            at.clock.ahead += 60
        await at.say("resp_a", "hi")
        assert await at.agents.make_room("default", "resp_")
        assert sorted(one.id for one in at.agents.page("default", limit=10).agents) == ["other", "resp_a", "resp_c"]
        assert await at.agents.make_room("default", "resp_") and await at.agents.make_room("default", "resp_")
        assert not await at.agents.make_room("default", "resp_")
