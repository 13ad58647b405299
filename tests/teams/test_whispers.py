"""Whispers: what is whispered to some members is in no other member's context, whatever is said, asked and voted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cairn.agents.work_journals import JournalEntry
from cairn.teams import prompts
from cairn.teams.definition import Topology, TopologyKind
from cairn.teams.entries import Item, Poll, Posted
from tests.teams.floor import Floor, team
from tests.teams.scripted_voice import ScriptedVoice

NAMES = ("ada", "bob", "cy", "dan")
KINDS: dict[TopologyKind, Topology] = {
    "round_robin": Topology(),
    "turn_by_turn": Topology(kind="turn_by_turn", order=("cy", "ada", "cy")),
    "broadcast": Topology(kind="broadcast"),
    "coordinator": Topology(kind="coordinator", coordinator="dan"),
    "free": Topology(kind="free"),
    "debate": Topology(kind="debate", sides=("ada", "bob"), judge="cy"),
    "parliamentary": Topology(kind="parliamentary"),
}


async def leaks(topology: Topology, seed: int) -> list[str]:
    """Return whispers that reached somebody else, in rounds with random messages, votes and restarts."""
    rng = random.Random(seed)
    whispers: dict[str, set[str]] = {}

    def script(member: str, told: str, choices: Sequence[str]) -> str:
        return rng.choice(choices) if choices else f"word of {member}"

    at = Floor(team(*NAMES, topology=topology), ScriptedVoice(script))
    await at.begin()
    try:
        for _ in range(3):
            for _ in range(rng.randint(1, 4)):
                to = rng.sample(NAMES, rng.randint(1, 3))
                sender = rng.choice(["user", *NAMES])
                secret = f"secret{len(whispers)}!"
                whispers[secret] = {*to, sender}
                await at.post(secret, *to, sender=sender)
            vote = Poll(question="Well?", options=("a", "b"), rule="majority") if rng.random() < 0.5 else None
            await at.play(vote)
            if rng.random() < 0.3:
                await at.again()
        results = [(member, text) for member, text, _ in at.voice.asked]
        results += [(name, prompts.markdown(at.team, at.journal.read(Item), name)) for name in NAMES]
    finally:
        await at.close()
    for name in NAMES:
        mine = "".join(text for member, text in results if member == name)
        reached = {secret for secret, known in whispers.items() if name in known}
        assert all(secret in mine for secret in reached), name
    return [
        f"{member}: {secret}"
        for member, text in results
        for secret, known in whispers.items()
        if secret in text and member not in known
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_whisper_is_never_in_another_members_context(kind: TopologyKind) -> None:
    for seed in range(8):
        assert await leaks(KINDS[kind], seed) == []


async def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: whoever is told of messages is told of whispers."""
    visible = prompts.visible

    def leaky(entry: JournalEntry, member: str) -> str | None:
        value = entry.value
        return (
            visible(entry._replace(value=Posted(round=0, sender="x", content=value.content)), member)
            if isinstance(value, Posted)
            else visible(entry, member)
        )

    monkeypatch.setattr(prompts, "visible", leaky)
    assert await leaks(KINDS["round_robin"], 0)
