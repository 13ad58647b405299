"""Agents over a service on the fake engine, whose answers depend on every token before them."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from cairn.agents.agents import Agents
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turns import TurnParams
from cairn.config.config import Config
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.system.posix import SystemClock
from cairn.text.chat.replay import ReplayTable
from cairn.types.errors import CairnError
from cairn.types.outputs import Delta, Done
from tests.files import CrashFiles, SeededRng
from tests.service.tiny import config, make_model
from tests.text.text_models import QWEN_TEMPLATE

FOLDER = Path("/agents")
SALTS = {"default": b"default", "other": b"other"}
"""Salt of each tenant."""
GREEDY = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)


def talking_model(folder: Path) -> Path:
    """Write the service tests' model with a real chat template that has reasoning and tools; return its folder."""
    make_model(folder)
    details = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(details | {"chat_template": QWEN_TEMPLATE}))
    return folder


class Clock(SystemClock):
    """The system's clock, `ahead` by so many seconds."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def time_ns(self) -> int:
        return super().time_ns() + int(self.ahead * 1e9)


class Heard:
    """The events of a turn, collected."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.done: Done | None = None
        self.error: CairnError | None = None


async def hear(turn: RunningTurn, *, stop_after: int = 0) -> Heard:
    """Read a turn to its end, or until it has generated `stop_after` tokens, if that is set."""
    heard = Heard()
    try:
        async with contextlib.aclosing(turn.batches()) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Delta):
                        heard.text += event.text
                        heard.tokens += event.tokens
                    else:
                        heard.done = event
                if stop_after and len(heard.tokens) >= stop_after:
                    break
    except CairnError as error:
        heard.error = error
    return heard


async def file_of(house: House, tenant: str, id: str) -> bytes:
    """Export an agent as one file."""
    return b"".join([piece async for piece in house.agents.export(tenant, id)])


class House:
    """A service and its agents on a simulated disk; `again` reopens them after a clean shutdown or a crash."""

    def __init__(self, service: Service, files: CrashFiles, config: Config, salts: Mapping[str, bytes]) -> None:
        self.service, self.files, self.clock, self.config, self.salts = service, files, Clock(), config, salts
        self.agents: Agents

    async def open(self) -> None:
        draw = SeededRng(self.files.rng.getrandbits(30))
        self.service.chat.replays = ReplayTable()  # replay records as in a new process
        self.agents = await Agents.open(self.service, self.files, FOLDER, self.clock, draw, self.config, self.salts)

    async def again(self, seed: int = 1, *, clean: bool = False) -> None:
        """Restart, after a clean shutdown or after a power cut right now."""
        if clean:
            await self.agents.close()
            await self.open()
            return
        after = self.files.crash(random.Random(seed))
        await self.agents.close()
        self.files = after
        await self.open()

    async def say(self, id: str, text: str, tenant: str = "default", **more: Any) -> Heard:
        return await hear(await self.begin(id, text, tenant, **more))

    async def begin(self, id: str, text: str, tenant: str = "default", **more: Any) -> RunningTurn:
        of_turn = {name: more.pop(name) for name in ("fork_on_conflict", "once") if name in more}
        params = TurnParams(**{"request": self.service.next_id(), "options": GREEDY, **more})
        return await self.agents.turn(tenant, id, [{"role": "user", "content": text}], params, **of_turn)


@contextlib.asynccontextmanager
async def house(folder: Path, salts: Mapping[str, bytes] = SALTS, **options: Any) -> AsyncIterator[House]:
    chosen = config(folder, **options)
    service = await Service.start(chosen, in_process=True)
    made = House(service, CrashFiles(), chosen, salts)
    try:
        await made.open()
        yield made
        await made.agents.close()
    finally:
        await service.close()
