"""Agents on a disk that crashes and fails: turns, forks, rollbacks and deletions from one seed, and their laws.

The real agents, token log and stores over the fake engine. Beside them a plain model of what every agent was told and
has said. After every step and every loss of power the agents are what the model says; no text that nobody has any more
is in a file; the KV of a context that somebody has stays, and that of one that nobody has is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.agents.house import FOLDER, House, hear, house, talking_model
from tests.files import Fault
from tests.laws.storage_world import law

from cairn.agents.content import shared
from cairn.agents.index import Kind
from cairn.agents.tree import CHUNK_TOKENS
from cairn.errors import Unavailable
from cairn.service.requests import SamplingOptions
from cairn.text.chat import Sampled
from cairn.text.replay import Answer
from cairn.types import Delta

TENANT = "default"
STEPS = 30
LONG = 1200
"""Tokens of a context beyond which an agent is rolled back."""
WEEK = 8 * 86_400.0
OPTIONS = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)
FILL = " and so on, until a chunk of sixty-four tokens is more than full."


@dataclass
class Fact:
    """A turn as its client knows it."""

    parent: int
    text: str
    answer: str


@dataclass
class Told:
    """What one agent was told and has said."""

    turns: dict[int, Fact] = field(default_factory=dict)
    head: int = 0
    base: int = 0
    pinned: bool = False
    spare: set[int] = field(default_factory=set)
    """Abandoned turns that are there only because a fork had them; they go when it goes."""
    tied: list[str] = field(default_factory=list)
    """What ordinary requests in its name left."""

    def path(self, number: int) -> list[int]:
        """The turns up to this one."""
        found = []
        while number:
            found.append(number)
            number = self.turns[number].parent
        return found[::-1]


class Work:
    """Agents in use."""

    def __init__(self, at: House, seed: int) -> None:
        self.at, self.rng = at, random.Random(seed)
        self.agents: dict[str, Told] = {}
        self.texts: list[str] = []
        """All that was ever said to an agent, also to no avail."""
        self.names = 0

    async def run(self, steps: int = STEPS) -> None:
        await self.create()
        for _ in range(steps):
            await self.step()
            await self.check()

    async def step(self) -> None:
        rng = self.rng
        id = rng.choice(list(self.agents)) if self.agents else ""
        if not id or (len(self.agents) < 2 and rng.random() < 0.5):
            return await self.create()
        if len(await self.at.agents.context(TENANT, id)) > LONG:
            return await self.rollback(id)
        calls = [
            (7, self.say),
            (3, self.fork),
            (3, self.rollback),
            (2, self.delete),
            (1, self.delete_running),
            (2, self.cut),
            (2, self.refused),
            (1, self.pin),
            (1, self.tied),
            (2, self.week),
        ]
        [call] = rng.choices([call for _, call in calls], [weight for weight, _ in calls])
        await call(id)
        if rng.random() < 0.3:
            await self.at.again(rng.getrandbits(32), clean=rng.random() < 0.2)

    # --------------------------------------------------------------------------------------------------------- steps

    def text(self) -> str:
        """Something that nobody ever said."""
        self.texts.append(f"<<{len(self.texts)}>>")
        return self.texts[-1] + FILL

    def name(self) -> str:
        self.names += 1
        return f"a{self.names}"

    async def create(self) -> None:
        id = self.name()
        await self.at.agents.create(TENANT, id=id)
        self.agents[id] = Told()
        await self.say(id)

    async def say(self, id: str) -> None:
        """A turn, and its KV on the disk."""
        text, told = self.text(), self.agents[id]
        heard = await self.at.say(id, text, TENANT, options=OPTIONS)
        law(heard.done is not None and heard.error is None, f"a turn fails: {heard.error}")
        self.note(id, self.at.agents.get(TENANT, id).head, Fact(told.head, text, heard.text))
        await self.at.service.flush()

    def note(self, id: str, number: int, fact: Fact) -> None:
        """A turn that was said."""
        told = self.agents[id]
        law(number not in told.turns or number in told.spare, f"turn {number} of {id} is there twice")
        told.spare.discard(number)
        told.turns[number], told.head = fact, number

    async def cut(self, id: str) -> None:
        """The power goes while an answer is given out; the rest of it comes after that."""
        text, told, said = self.text(), self.agents[id], ""
        running = await self.at.begin(id, text, TENANT, options=OPTIONS)
        async with contextlib.aclosing(running.batches()) as found:
            async for batch in found:
                said += "".join(event.text for event in batch if isinstance(event, Delta))
                if any(isinstance(event, Delta) for event in batch):
                    break
            after = self.at.files.crash(self.rng)
        await self.at.agents.close()
        self.at.files = after
        await self.at.open()
        found = await self.at.agents.turns(TENANT, id)
        turn = next((one for one in found if one.messages[0]["content"] == text), None)
        law(turn is not None, "a message is lost whose answer was given out")
        assert turn is not None
        if turn.state == "interrupted":
            number = self.at.service.next_id()
            heard = await hear(await self.at.agents.resume(TENANT, id, request=number))
            law(heard.done is not None and heard.text.startswith(said), "a resumed answer is another one")
            said = heard.text
        else:
            said = str((turn.answer or {}).get("content"))
        self.note(id, turn.number, Fact(told.head, text, said))

    async def fork(self, id: str) -> None:
        told, other = self.agents[id], self.name()
        number = self.rng.choice([0, told.head, *await self.numbers(id)])
        await self.at.agents.fork(TENANT, id, turn=number, new_id=other)
        self.agents[other] = Told({one: told.turns[one] for one in told.path(number)}, number, number)

    async def rollback(self, id: str) -> None:
        told = self.agents[id]
        told.head = self.rng.choice([0, *await self.numbers(id)])
        await self.at.agents.rollback(TENANT, id, turn=told.head)
        await self.at.agents.tend()

    async def numbers(self, id: str) -> list[int]:
        return [turn.number for turn in await self.at.agents.turns(TENANT, id)]

    async def pin(self, id: str) -> None:
        told = self.agents[id]
        told.pinned = not told.pinned
        await self.at.agents.pin(TENANT, id, told.pinned)

    async def tied(self, id: str) -> None:
        """An ordinary request in the agent's name, which leaves what it sampled in the log."""
        text = self.text().encode()
        self.at.agents.keep(
            TENANT, Sampled(text, Answer(b"v" * 32, "because"), [1, 2, 3], 0), self.at.agents.named(TENANT, id)
        )
        await self.at.agents.writer.sync()
        law(self.on_disk(self.texts[-1]), "what was sampled for a request is not in the log")
        self.agents[id].tied.append(text.decode())

    async def refused(self, id: str) -> None:
        """The disk takes nothing: nothing has happened, also after a restart."""
        files, agents = self.at.files, self.at.agents
        files.fail(Fault(files.calls, self.rng.choice((errno.EIO, errno.ENOSPC, errno.EROFS)), sticky=True))
        what = self.rng.choice(("say", "fork", "rollback"))
        with contextlib.suppress(Unavailable):
            if what == "say":
                await self.at.begin(id, self.text(), TENANT, options=OPTIONS)
            elif what == "fork":
                await agents.fork(TENANT, id, new_id=self.name())
            else:
                await agents.rollback(TENANT, id, turn=0)
            law(False, f"a {what} that the disk refuses is acknowledged")
        files.heal()
        await agents.tend()

    async def week(self, id: str) -> None:
        """What was abandoned is collected, but what a fork has of it."""
        if self.rng.random() < 0.6:
            await self.fork(id)
            await self.rollback(id)
        self.at.clock.ahead += WEEK
        await self.at.agents.tend()
        held = {told.turns[number].text for told in self.agents.values() for number in told.path(told.base)}
        for told in self.agents.values():
            path = {*told.path(told.head), *told.path(told.base)}
            kept = {number: fact for number, fact in told.turns.items() if number in path or fact.text in held}
            told.turns, told.tied, told.spare = kept, [], kept.keys() - path

    async def delete(self, id: str) -> None:
        contexts = await self.contexts(id)
        others = {other: await self.place(other) for other in self.agents if other != id}
        await self.at.agents.delete(TENANT, id)
        del self.agents[id]
        left = [list(await self.at.agents.context(TENANT, other)) for other in self.agents]
        for ids in contexts:
            most = max((shared(ids, one) // CHUNK_TOKENS * CHUNK_TOKENS for one in left), default=0)
            placed = await self.at.service.where(ids, TENANT.encode())
            law(placed.disk <= most and placed.pool <= most + CHUNK_TOKENS, f"KV of nobody: {placed}, shared {most}")
        for other, before in others.items():
            law(await self.place(other) >= before, "the KV of another agent goes with the one that is deleted")

    async def delete_running(self, id: str) -> None:
        """While it answers."""
        running = await self.at.begin(id, self.text(), TENANT, options=SamplingOptions(max_tokens=300, ignore_eos=True))
        reading = asyncio.create_task(hear(running))
        for _ in range(self.rng.randrange(30)):
            await asyncio.sleep(0)
        await self.at.agents.delete(TENANT, id)
        await reading
        await self.at.agents.writer.sync()
        [end] = self.at.agents._archive._log.read([(Kind.END, running.turn.key)])
        law(end is None, "the turn of a deleted agent goes on writing")
        del self.agents[id]

    async def contexts(self, id: str) -> list[list[int]]:
        """Of the ends of all branches that the agent made."""
        agent = self.at.agents._find(TENANT, id)
        return [list(await self.at.agents.kv.ids(turn)) for turn in {agent.head, *agent.leaves()}]

    async def place(self, id: str) -> int:
        """Leading tokens of its context on the disk."""
        return (await self.at.agents.where(TENANT, id)).disk

    # ---------------------------------------------------------------------------------------------------------- laws

    async def check(self) -> None:
        agents = self.at.agents
        listed = sorted(info.id for info in agents.page(TENANT, limit=100).agents)
        law(listed == sorted(self.agents), f"there are the agents {listed}, not {sorted(self.agents)}")
        for id, told in self.agents.items():
            info, path = agents.get(TENANT, id), told.path(told.head)
            law((info.head, info.turns, info.pinned) == (told.head, len(path), told.pinned), f"{id} stands elsewhere")
            found = await agents.turns(TENANT, id)
            there = {turn.number for turn in found}
            law(there <= told.turns.keys() <= there | told.spare, f"{id} has the turns {there}, not {[*told.turns]}")
            for turn in found:
                fact = told.turns[turn.number]
                said = (turn.answer or {}).get("content")
                what = f"turn {turn.number} of {id}"
                law((turn.state, turn.parent) == ("finished", fact.parent), f"{what} is {turn.state}")
                law((turn.messages[0]["content"], said) == (fact.text, fact.answer), f"{what} says something else")
                law(turn.current == (turn.number in path), f"{what} is on the wrong branch")
        had = [fact.text for told in self.agents.values() for fact in told.turns.values()]
        had += [text for told in self.agents.values() for text in told.tied]
        for text in self.texts:
            held = any(one.startswith(text) for one in had)
            law(held or not self.on_disk(text), f"{text}, which nobody has, is on the disk")

    def on_disk(self, text: str) -> bool:
        return any(text.encode() in data for data in self.at.files.files(FOLDER).values())


async def schedule(seed: int) -> None:
    """One house, its agents and what becomes of them."""
    with tempfile.TemporaryDirectory() as place:
        async with house(talking_model(Path(place) / "model"), kv_dir=str(Path(place) / "kv")) as at:
            await Work(at, seed).run()


def run(seed: int) -> None:
    """One schedule. Raises `Broken` where a law breaks."""
    asyncio.run(schedule(seed))


def run_many(first: int, count: int) -> int:
    """Schedules of seeds that follow each other; how many there were."""
    for seed in range(first, first + count):
        run(seed)
    return count


if __name__ == "__main__":
    run(int(sys.argv[1]))
