"""Turn order by topology: every event of a round, with scripted members."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cairn.teams.definition import Team, Topology
from cairn.teams.entries import Poll
from tests.teams.floor import Floor, team
from tests.teams.scripted_voice import Script, ScriptedVoice


@asynccontextmanager
async def floor(made: Team, script: Script | None = None) -> AsyncIterator[Floor]:
    at = Floor(made, ScriptedVoice(script))
    await at.begin()
    try:
        yield at
    finally:
        await at.close()


def shape(events: Sequence[dict[str, object]]) -> list[str]:
    """Return the events in short form, without deltas."""
    results = []
    for event in events:
        match event["type"]:
            case "turn.started" | "turn.delta":
                continue
            case "turn.done":
                results.append(f"{event['member']}: {event['content']}")
            case "choice":
                results.append(f"{event['member']} {event['about']} {event['choice']}")
            case "vote.ballot":
                results.append(f"{event['member']} votes {' > '.join(event['ballot'])}")  # type: ignore[arg-type]
            case "vote.decided":
                results.append(f"decided {event['decision']}")
            case other:
                results.append(str(other))
    return results


async def test_round_robin_begins_each_round_with_the_next_member() -> None:
    async with floor(team("ada", "bob", "cy")) as at:
        await at.play()
        assert at.events == [
            {"type": "round.started", "round": 1, "topology": "round_robin", "resumed": False},
            *(
                event
                for step, name in enumerate(("ada", "bob", "cy"), 1)
                for event in (
                    {"type": "turn.started", "round": 1, "step": step, "member": name, "agent": f"t.{name}"},
                    {"type": "turn.delta", "round": 1, "step": step, "member": name, "content": f"{name} speaks"},
                    {
                        "type": "turn.done",
                        "round": 1,
                        "step": step,
                        "member": name,
                        "turn": 1,
                        "content": f"{name} speaks",
                        "finish_reason": "stop",
                        "prompt_tokens": 10,
                        "cached_tokens": 4,
                        "completion_tokens": 2,
                        "agent": f"t.{name}",
                    },
                )
            ),
            {"type": "round.done", "round": 1, "decision": None},
        ]
        at.events.clear()
        await at.play()
        assert shape(at.events)[1:-1] == ["bob: bob speaks", "cy: cy speaks", "ada: ada speaks"]


async def test_turn_by_turn_keeps_its_order() -> None:
    order = ("bob", "ada", "bob")
    async with floor(team("ada", "bob", topology=Topology(kind="turn_by_turn", order=order))) as at:
        for _ in range(2):
            at.events.clear()
            await at.play()
            assert [line.partition(":")[0] for line in shape(at.events)[1:-1]] == list(order)


async def test_a_broadcast_is_one_batch_in_which_no_member_hears_the_others() -> None:
    async with floor(team("ada", "bob", "cy", topology=Topology(kind="broadcast"))) as at:
        await at.post("What now?")
        await at.play()
        assert at.voice.most_at_once == 3
        for name, told, _ in at.voice.asked:
            assert (
                told
                == f"You are {name}. You are the {name}.\n\nuser: What now?\n\nSay what you have to say, as {name}."
            )
        at.voice.asked.clear()
        await at.play()
        first = at.voice.asked[0][1]
        assert first == "bob: bob speaks\n\ncy: cy speaks\n\nSay what you have to say, as ada."


async def test_a_coordinator_gives_the_floor_until_it_gives_it_to_nobody() -> None:
    plan = iter(["cy", "ada", "nobody"])

    def script(member: str, told: str, choices: Sequence[str]) -> str:
        return next(plan) if choices else f"{member} speaks"

    made = team("ada", "bob", "cy", topology=Topology(kind="coordinator", coordinator="bob", turns=9))
    async with floor(made, script) as at:
        await at.play()
        assert shape(at.events) == [
            "round.started",
            "bob next cy",
            "cy: cy speaks",
            "bob next ada",
            "ada: ada speaks",
            "bob next nobody",
            "round.done",
        ]


async def test_a_speaker_names_the_next_and_never_itself() -> None:
    def script(member: str, told: str, choices: Sequence[str]) -> str:
        assert member not in choices
        return choices[-2] if choices else f"{member} speaks"

    made = team("ada", "bob", "cy", topology=Topology(kind="free", first="bob", turns=3))
    async with floor(made, script) as at:
        await at.play()
        assert shape(at.events)[1:-1] == [
            "bob: bob speaks",
            "bob next cy",
            "cy: cy speaks",
            "cy next bob",
            "bob: bob speaks",
        ]


async def test_a_debate_has_two_sides_and_a_judge() -> None:
    def script(member: str, told: str, choices: Sequence[str]) -> str:
        return "con" if choices else f"{member} speaks"

    topology = Topology(kind="debate", sides=("pro", "con"), judge="judge", turns=2)
    async with floor(team("pro", "con", "judge", topology=topology), script) as at:
        assert await at.play() == "con"
        assert shape(at.events)[1:-1] == [
            *["pro: pro speaks", "con: con speaks"] * 2,
            "judge: judge speaks",
            "judge verdict con",
        ]
        assert at.events[-1] == {"type": "round.done", "round": 1, "decision": "con"}


async def test_a_parliament_moves_amends_and_votes() -> None:
    def script(member: str, told: str, choices: Sequence[str]) -> str:
        if not choices:
            return f"{member} moves"
        if "Do you move to amend" in told:
            return "yes" if member == "bob" else "no"
        if "amendment of bob" in told.rpartition("\n\n")[2]:
            return "yes"
        return "no" if member == "cy" else "yes"

    async with floor(team("ada", "bob", "cy", topology=Topology(kind="parliamentary")), script) as at:
        assert await at.play() == "yes"
        assert shape(at.events) == [
            "round.started",
            "ada: ada moves",
            "bob amend yes",
            "cy amend no",
            "bob: bob moves",
            "vote.started",
            *[f"{name} votes yes" for name in ("ada", "bob", "cy")],
            "decided yes",
            "ada: ada moves",
            "vote.started",
            "ada votes yes",
            "bob votes yes",
            "cy votes no",
            "decided yes",
            "round.done",
        ]


async def test_a_vote_at_the_end_of_a_round_is_ranked() -> None:
    def script(member: str, told: str, choices: Sequence[str]) -> str:
        if not choices:
            return "well"
        assert len(choices) == 6
        return "x > y > z" if member == "ada" else "z > y > x"

    async with floor(team("ada", "bob", "cy"), script) as at:
        ask = Poll(question="Which?", options=("x", "y", "z"), rule="ranked")
        assert await at.play(ask) == "z"
        assert shape(at.events)[-5:-1] == [
            "ada votes x > y > z",
            "bob votes z > y > x",
            "cy votes z > y > x",
            "decided z",
        ]
        await at.play()
        assert "Vote: Which? Decision: z (x 1, y 0, z 2; 2 of 3 ballots in count 1)." in at.voice.asked[-3][1]


async def test_statements_may_be_one_of_a_few() -> None:
    seen: list[list[str]] = []

    def script(member: str, told: str, choices: Sequence[str]) -> str:
        seen.append(list(choices))
        return choices[1]

    made = team("ada", "bob", topology=Topology(kind="broadcast", choices=("cooperate", "defect")))
    async with floor(made, script) as at:
        await at.play()
        assert seen == [["cooperate", "defect"]] * 2
        assert shape(at.events)[1:3] == ["ada: defect", "bob: defect"]
