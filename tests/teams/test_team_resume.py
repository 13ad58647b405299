"""Rounds after a crash: acknowledged turns are kept, and the rest is as it would have been."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cairn.teams.definition import TopologyKind
from cairn.teams.entries import Poll, RoundDone, Stated, Voted
from cairn.teams.team_round import TeamRound
from tests.teams.floor import Floor, team
from tests.teams.scripted_voice import KilledError, ScriptedVoice
from tests.teams.test_whispers import KINDS, NAMES

VOTE = Poll(question="Which?", options=("x", "y", "z"), rule="ranked")


def script(member: str, told: str, choices: Sequence[str]) -> str:
    """Return an answer that depends on everything the member was told."""
    rng = random.Random(f"{member} {told}")
    return rng.choice(choices) if choices else f"{member} says {rng.randrange(1000)}"


def said(at: Floor) -> list[Any]:
    return sorted(
        (one for one in at.values() if isinstance(one, Stated | Voted | RoundDone)),
        key=lambda one: (one.round, getattr(one, "step", 99), getattr(one, "member", "")),
    )


async def whole(kind: TopologyKind, deaths: Sequence[int] = ()) -> tuple[list[Any], int]:
    """Play two rounds, with the process killed at these questions; return what was said and the number of questions."""
    voice = ScriptedVoice(script)
    at = Floor(team(*NAMES, topology=KINDS[kind]), voice)
    await at.begin()
    todo = list(deaths)
    try:
        await at.post("Begin.")
        while len(at.values(RoundDone)) < 2:
            voice.die_at = todo.pop(0) if todo else None
            try:
                await at.play(VOTE)
            except KilledError:
                before = said(at)
                await at.again()
                assert [one for one in said(at) if one in before] == before, "what was acknowledged is lost"
        return said(at), len(voice.asked)
    finally:
        await at.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_round_goes_on_after_a_crash_at_any_question(kind: TopologyKind) -> None:
    expected, asked = await whole(kind)
    for death in range(asked):
        assert await whole(kind, [death]) == (expected, asked), death  # nobody is asked twice


async def test_a_round_goes_on_after_many_crashes() -> None:
    expected, _ = await whole("debate")
    assert (await whole("debate", [1, 2, 3, 5, 8]))[0] == expected


async def test_a_step_that_forgets_an_event_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a replayed step sees events that came after it."""
    opened = TeamRound._open

    def forgetful(self: TeamRound) -> tuple[int, int]:
        step, _ = opened(self)
        return step, self._journal.complete_to

    monkeypatch.setattr(TeamRound, "_open", forgetful)
    expected, asked = await whole("broadcast")
    results = [(await whole("broadcast", [death]))[0] for death in range(asked)]
    assert any(result != expected for result in results)


async def test_a_message_during_a_round_is_heard_once_by_the_next_speaker() -> None:
    voice = ScriptedVoice()
    at = Floor(team("ada", "bob", "cy"), voice)
    await at.begin()
    try:
        voice.die_at = 1
        with pytest.raises(KilledError):
            await at.play()
        await at.post("News.")
        voice.die_at = None
        await at.play()
        await at.play()
        heard = [member for member, told, _ in voice.asked if "user: News." in told]
        assert sorted(heard) == ["ada", "bob", "cy"] and heard[0] == "cy"
    finally:
        await at.close()
