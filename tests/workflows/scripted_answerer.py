"""Workflow nodes with scripted answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.log.token_log import TokenLog
from cairn.agents.log.writer_thread import Writer
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.work_journals import Journals
from cairn.frontend.request_options import SamplingOptions
from cairn.text.grammar.grammar import Wanted
from cairn.types.outputs import Delta
from cairn.workflows.answerer import Answered, Asker, Heard
from cairn.workflows.definition import workflow_of
from cairn.workflows.runner import RunEnded
from cairn.workflows.runs import Runs, RunState
from tests.agents.bare_agents import FOLDER, Time
from tests.files import CrashFiles, SeededRng

ASKER = Asker(tenant="me")


class KilledError(Exception):
    """Stands for the death of the process."""


class ScriptedAnswerer:
    """An answerer: `script(prompt)` returns a text, or a value that is answered as JSON."""

    def __init__(self, script: Callable[[str], Any]) -> None:
        self.script = script
        self.asked: list[tuple[str, int | None]] = []
        """(last message, seed) in order."""
        self.chats: list[list[dict[str, Any]]] = []
        self.rng: random.Random | None = None
        """Draws how long each answer takes."""
        self.at_once = self.most_at_once = 0
        self.die_at: int | None = None

    async def answer(
        self, asker: Asker, messages: Sequence[dict[str, Any]], options: SamplingOptions, wanted: Wanted, heard: Heard
    ) -> Answered:
        prompt = messages[-1]["content"]
        if self.die_at is not None and len(self.asked) >= self.die_at:
            raise KilledError
        self.asked.append((prompt, options.seed))
        self.chats.append(list(messages))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(self.rng.randint(1, 20) if self.rng else 1):
            await asyncio.sleep(0.0005 if self.rng else 0)
        self.at_once -= 1
        said = self.script(prompt)
        text = said if isinstance(said, str) else json.dumps(said)
        heard(Delta(text=text))
        return Answered(text=text, prompt_tokens=10, cached_tokens=4, completion_tokens=2)


class Bench:
    """Runs over a token log; `again` reopens the log as a restart after a power failure does."""

    def __init__(self, script: Callable[[str], Any]) -> None:
        self.answerer, self.files = ScriptedAnswerer(script), CrashFiles()
        self.events: list[dict[str, Any]] = []
        self._open()

    def _open(self) -> None:
        log = TokenLog.open(self.files, FOLDER, SeededRng())
        assert log is not None
        self.writer = Writer(log)
        pending = PendingWrites(AgentRegistry(), self.writer, Time(), ReplayRecords())
        self.journals = Journals(self.writer, pending, SeededRng(), log.recovered)
        self.runs = Runs(self.journals, self.answerer)

    async def begin(self, workflow: dict[str, Any], **inputs: Any) -> None:
        await self.runs.create("me", workflow_of(workflow), inputs, id="r", seed=3)

    async def work(self) -> RunEnded:
        return await self.runs.work(ASKER, "r", self.events.append)

    @property
    def state(self) -> RunState:
        return self.runs.get("me", "r")

    async def again(self) -> None:
        after = self.files.crash(random.Random(1))
        await self.close()
        self.files = after
        self._open()

    async def close(self) -> None:
        await self.writer.close()


async def run(workflow: dict[str, Any], script: Callable[[str], Any], **inputs: Any) -> Bench:
    """Play a run to its end, and close the bench."""
    bench = Bench(script)
    try:
        await bench.begin(workflow, **inputs)
        await bench.work()
        return bench
    finally:
        await bench.close()
