"""Members that say what a test scripts, and records of what they were told."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from cairn.agents.turns import Gate
from cairn.frontend.request_options import SamplingOptions
from cairn.teams.voice import Caller, Heard, Spoken
from cairn.text.grammar.grammar import Wanted
from cairn.types.outputs import Delta

Script = Callable[[str, str, Sequence[str]], str]
"""(member, what it was told, choices) -> what it says."""


def choices_of(wanted: Wanted) -> list[str]:
    return [] if wanted.structure is None else list(json.loads(wanted.structure.text))


class ScriptedVoice:
    """A voice with scripted answers; `contexts` has what each agent was told and has said, as its context would."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or (lambda member, told, choices: choices[0] if choices else f"{member} speaks")
        self.contexts: dict[str, list[str]] = defaultdict(list)
        self.asked: list[tuple[str, str, int | None]] = []
        """(member, what it was asked, seed) in order."""
        self.at_once = self.most_at_once = 0
        self.die_at: int | None = None
        """Number of the turn or question at which to fail like a crash, once everything running beside it is done."""
        self.settled: Callable[[], bool] = lambda: True
        self.turns: dict[str, int] = defaultdict(int)

    async def speak(
        self,
        caller: Caller,
        agent: str,
        before: int,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        gate: Gate,
        heard: Heard,
    ) -> Spoken:
        await gate()
        text = await self._say(agent, messages, options, wanted)
        self.contexts[agent] += [messages[0]["content"], text]
        heard(Delta(text=text))
        self.turns[agent] = before + 1
        return Spoken(content=text, turn=before + 1, prompt_tokens=10, cached_tokens=4, completion_tokens=2)

    async def ask(
        self,
        caller: Caller,
        agent: str,
        before: int,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        gate: Gate,
    ) -> Spoken:
        await gate()
        return Spoken(content=await self._say(agent, messages, options, wanted), prompt_tokens=10, cached_tokens=8)

    async def _say(
        self, agent: str, messages: Sequence[dict[str, Any]], options: SamplingOptions, wanted: Wanted
    ) -> str:
        member, content = agent.rpartition(".")[2], messages[0]["content"]
        if self.die_at is not None and len(self.asked) >= self.die_at:
            self.die_at = None
            await asyncio.sleep(0)
            while self.at_once or not self.settled():
                await asyncio.sleep(0.001)
            raise KilledError
        self.asked.append((member, content, options.seed))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return self.script(member, content, choices_of(wanted))


class KilledError(Exception):
    """Stands for the death of the process."""
