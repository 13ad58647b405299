"""Tools of team members: a round waits for their results, tells nobody else, and survives crashes unchanged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.agents.work_journals import JournalEntry
from cairn.teams import prompts
from cairn.teams.definition import MAX_CALLS, SPEAKS, MemberTool, Team, Topology, check_team
from cairn.teams.entries import Item, RoundDone, Stated, ToolAnswered, ToolCalled
from cairn.teams.scenario import play, scenario_of
from cairn.teams.tool_calls import ToolsWaitError, open_calls
from cairn.types.errors import InvalidRequest
from tests.teams.floor import Floor, team
from tests.teams.scripted_voice import KilledError, ScriptedVoice

LOOK = MemberTool(name="look", description="Looks something up.", parameters='{"type": "object"}')
ADD = MemberTool(name="add", parameters='{"type": "object", "properties": {"n": {"type": "integer"}}}')


def armed(*tools: MemberTool, **more: Any) -> Team:
    """Return a team of three, of whom bob has tools."""
    made = team("ada", "bob", "cy", **more)
    members = tuple(
        msgspec.structs.replace(member, tools=tools if member.name == "bob" else ()) for member in made.members
    )
    return msgspec.structs.replace(made, members=members)


def script(member: str, told: str, choices: Sequence[str]) -> str:
    """Let bob look twice, then speak; with arguments that are cut he calls nothing."""
    if "with its arguments as JSON" in told:
        return json.dumps({"what": told.count("It returned")})
    if "Do you call a tool" in told:
        return "look" if told.count("It returned") < 2 else SPEAKS
    return choices[0] if choices else f"{member} says {told.count('It returned')}"


async def answer(at: Floor, content: str) -> list[str]:
    """Answer all open calls; return their ids."""
    ids = []
    for open_call in open_calls(at.journal.read(Item)):
        result = ToolAnswered(
            round=open_call.round,
            step=open_call.step,
            member=open_call.member,
            number=open_call.number,
            content=content,
        )
        await at.journals.append(at.journal, result)
        ids.append(open_call.id)
    return ids


async def test_a_round_waits_for_what_a_tool_returns() -> None:
    at = Floor(armed(LOOK, ADD, topology=Topology(kind="broadcast")), ScriptedVoice(script))
    await at.begin()
    try:
        with pytest.raises(ToolsWaitError):
            await at.play()
        assert {one.member for one in at.values(Stated)} == {"ada", "cy"}, "nobody else waits"
        calls = [event for event in at.events if event["type"] == "tool.call"]
        assert [(call["member"], call["tool"], call["arguments"]) for call in calls] == [("bob", "look", '{"what": 0}')]
        assert await answer(at, "a secret!") == [calls[0]["call_id"]] == ["call-1-1-bob-0"]
        at.events.clear()
        with pytest.raises(ToolsWaitError):
            await at.play()
        kinds = [event["type"] for event in at.events if event.get("member") == "bob"]
        assert kinds == ["turn.started", "tool.call", "tool.result", "tool.call"]
        await answer(at, "another secret!")
        await at.play()
        assert [one.content for one in at.values(Stated) if one.member == "bob"] == ["bob says 2"]
        assert len(at.values(RoundDone)) == 1
        with pytest.raises(ToolsWaitError):
            await at.play()
        results = [text for member, text, _ in at.voice.asked if member == "bob"]
        assert results[0].startswith("You are bob.") and "look: Looks something up." in results[0]
        assert 'You called look with {"what": 0}. It returned: a secret!' in results[4]
        assert "a secret!" not in results[-1], "a known result is not sent again"
    finally:
        await at.close()


def leaks(at: Floor) -> list[str]:
    results = [(member, text) for member, text, _ in at.voice.asked]
    results += [(name, prompts.markdown(at.team, at.journal.read(Item), name)) for name in at.team.names]
    return [member for member, text in results if "secret!" in text and member != "bob"]


async def played(deaths: Sequence[int] = ()) -> tuple[list[Any], int, list[str]]:
    """Play two rounds with restarts; return what was said, the number of questions, and who else saw a result."""
    at = Floor(armed(LOOK, ADD), ScriptedVoice(script))
    await at.begin()
    todo = list(deaths)
    try:
        while len(at.values(RoundDone)) < 2:
            at.voice.die_at = todo.pop(0) if todo else None
            try:
                await at.play()
            except KilledError:
                await at.again()
            except ToolsWaitError:
                await answer(at, f"secret! {len(at.values(ToolCalled))}")
        said = [one for one in at.values() if isinstance(one, Stated | ToolCalled | ToolAnswered)]
        assert "secret!" in prompts.markdown(at.team, at.journal.read(Item), "bob")
        return said, len(at.voice.asked), leaks(at)
    finally:
        await at.close()


async def test_a_round_with_tools_resumes_after_a_crash_privately(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, asked, leaked = await played()
    assert not leaked and sum(isinstance(one, ToolCalled) and bool(one.tool) for one in expected) == 4
    for death in random.Random(1).sample(range(asked), 6):
        said, again, leaked = await played([death])
        assert said == expected and not leaked
        assert again <= asked + 1, "only the question for arguments may be asked twice"

    visible = prompts.visible

    def told(entry: JournalEntry, member: str) -> str | None:
        return entry.value.content if isinstance(entry.value, ToolAnswered) else visible(entry, member)

    monkeypatch.setattr(prompts, "visible", told)
    assert (await played())[2], "the planted bug is not found"


async def test_calls_are_bounded_and_broken_ones_are_not_made() -> None:
    def always(member: str, told: str, choices: Sequence[str]) -> str:
        return "{}" if "with its arguments" in told else choices[0] if choices else "said"

    def broken(member: str, told: str, choices: Sequence[str]) -> str:
        return '{"n": 1' if "with its arguments" in told else choices[0] if choices else "said"

    for say, calls in ((always, MAX_CALLS), (broken, 0)):
        at = Floor(armed(LOOK), ScriptedVoice(say))
        await at.begin()
        try:
            while not at.values(RoundDone):
                try:
                    await at.play()
                except ToolsWaitError:
                    await answer(at, "x")
            assert len([one for one in at.values(ToolCalled) if one.tool]) == calls
        finally:
            await at.close()


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([LOOK] * 2, "look occurs twice"),
        ([MemberTool(name=SPEAKS)], "calls no tool"),
        ([MemberTool(name=f"t{at}") for at in range(17)], "17 tools; the limit is 16"),
        ([MemberTool(name="a", description="x" * 5000)], "the limit is 4096"),
    ],
)
def test_invalid_tools_are_named_in_the_error(tools: list[MemberTool], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as wrong:
        check_team(armed(*tools))
    assert "members[1].tools" in str(wrong.value)


class Stage:
    """A round that waits for a result once, and then starts again from its beginning."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def make(self, team: Mapping[str, Any]) -> str:
        return "t"

    def post(self, id: str, body: Mapping[str, Any]) -> None:
        raise AssertionError

    def answer(self, id: str, body: Mapping[str, Any]) -> None:
        self.given.append(body)

    def show(self, id: str) -> dict[str, Any]:
        return {"decision": None, "report": {"shared_tokens": 0, "computed_tokens": 0, "prompt_tokens": 0}}

    def round(self, id: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        call = {"call_id": "c", "member": "bob", "tool": "look", "arguments": "{}"}
        yield {"type": "round.started", "round": 1}
        yield {"type": "tool.call", "step": 1, **call}
        if not self.given:
            yield {"type": "round.waiting", "round": 1, "calls": [call]}
            return
        yield {"type": "turn.done", "step": 1, "member": "bob", "content": "found"}
        yield {"type": "round.done", "round": 1, "decision": None}


def test_a_scenario_says_what_tools_return() -> None:
    results = {"name": "n", "team": {"members": [{"name": "bob"}]}, "results": {"look": "a stone"}, "expect": []}
    scenario = scenario_of(results | {"expect": [{"speakers": ["bob"]}]}, Path("x.yaml"))
    stage, events = Stage(), list[dict[str, Any]]()
    outcome = play(scenario, stage, events.append)
    assert stage.given == [{"results": [{"call_id": "c", "content": "a stone"}]}]
    assert [event["type"] for event in events] == [
        "round.started",
        "tool.call",
        "round.waiting",
        "turn.done",
        "round.done",
    ]
    assert all(one.met for one in outcome.met)
