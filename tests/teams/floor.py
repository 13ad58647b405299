"""A team's rounds over a token log, without a model."""

from __future__ import annotations

import random
from typing import Any

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.log.token_log import TokenLog
from cairn.agents.log.writer_thread import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.work_journals import Journal, Journals
from cairn.teams.definition import Member, Team, Topology, check_team
from cairn.teams.entries import Item, Poll, Posted, RoundDone
from cairn.teams.team_round import TeamRound
from cairn.teams.voice import Caller
from tests.agents.bare_agents import FOLDER, Time
from tests.files import CrashFiles, SeededRng
from tests.teams.scripted_voice import ScriptedVoice

CALLER = Caller(tenant="me")


def team(*names: str, **more: Any) -> Team:
    topology = more.pop("topology", Topology())
    made = Team(
        id="t",
        system="Be brief.",
        members=tuple(Member(name=name, role=f"You are the {name}.") for name in names),
        topology=topology,
        seed=7,
        **more,
    )
    check_team(made)
    return made


class Floor:
    """A team over a token log; `again` reopens the log as a restart after a power failure does."""

    def __init__(self, made: Team, voice: ScriptedVoice) -> None:
        self.team, self.voice, self.files = made, voice, CrashFiles()
        self.events: list[dict[str, Any]] = []
        self._open()

    def _open(self) -> None:
        log = TokenLog.open(self.files, FOLDER, SeededRng())
        assert log is not None
        self.writer = Writer(log)
        registry, clock = AgentRegistry(), Time()
        self.pending = PendingWrites(registry, self.writer, clock, ReplayRecords())
        self.journals = Journals(self.writer, self.pending, SeededRng(), log.recovered)

    @property
    def journal(self) -> Journal:
        return self.journals.find("team", "me", "t")

    async def begin(self) -> None:
        await self.journals.create("team", "me", "t", self.team)
        self.voice.settled = lambda: not self.journal.pending

    async def close(self) -> None:
        await self.writer.close()

    async def again(self, seed: int = 1) -> None:
        after = self.files.crash(random.Random(seed))
        await self.close()
        self.files = after
        self._open()

    def values(self, kind: type[Any] = object) -> list[Any]:
        return [entry.value for entry in self.journal.read(Item) if isinstance(entry.value, kind)]

    def round(self, number: int | None = None) -> TeamRound:
        number = 1 + len(self.values(RoundDone)) if number is None else number
        return TeamRound(
            self.team, self.journals, self.journal, self.voice, CALLER, number, lambda event: self.events.append(event)
        )

    async def play(self, vote: Poll | None = None) -> str | None:
        return await self.round().run(vote)

    async def post(self, content: str, *to: str, sender: str = "user") -> None:
        number = len(self.values(RoundDone))
        await self.journals.append(self.journal, Posted(round=number, sender=sender, content=content, to=to))
