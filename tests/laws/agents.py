"""Agents on a disk that crashes and fails: random turns, forks, rollbacks and deletions from one seed, and their laws.

The real agents, token log and stores run over the fake engine, for two tenants, beside a plain model of every agent's
history. After every step and every power cut: the agents match the model; text that belongs to no agent is in no file;
KV of a live context is kept, KV of a dead one is gone. Many contexts share a beginning, also those of ordinary requests
in the agents' names, and one tenant may be unconfigured for a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cairn.agents.log.index import RecordKind
from cairn.frontend.request_options import SamplingOptions
from cairn.kv.pool.blocks import common_length
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity
from cairn.types.errors import Unavailable
from cairn.types.model_spec import BLOCK_TOKENS, CHUNK_TOKENS
from cairn.types.outputs import Delta
from tests.agents.house import FOLDER, House, hear, house, talking_model
from tests.files import Fault
from tests.laws.storage_world import law
from tests.service.tiny import collect, request

TENANTS = {"default": b"", "acme": b"acme"}
"""Salt of each tenant, as on a server with API keys."""
STEPS = 30
LONG = 1200
"""Tokens of a context beyond which an agent is rolled back."""
WEEK = 8 * 86_400.0
OPTIONS = SamplingOptions(temperature=0, max_tokens=12, ignore_eos=True)
FILL = " and so on, until a chunk of sixty-four tokens is more than full."
SYSTEM = {"role": "system", "content": "What many agents are told before anything else." + FILL}
FIRST = tuple(range(5, 133))
"""The common beginning of many ordinary requests."""


@dataclass
class Fact:
    """A turn as its client knows it."""

    parent: int
    text: str
    answer: str


@dataclass
class History:
    """What the client of one agent has sent and received."""

    tenant: str
    turns: dict[int, Fact] = field(default_factory=dict)
    head: int = 0
    base: int = 0
    pinned: bool = False
    spare: set[int] = field(default_factory=set)
    """Abandoned turns that are kept only because a fork has them; they go when it goes."""
    tied: list[str] = field(default_factory=list)
    """Texts of replay records that ordinary requests in its name left."""
    contexts: list[list[int]] = field(default_factory=list)
    """Contexts of those requests since the server started."""

    @property
    def salt(self) -> bytes:
        """The salt of its tenant."""
        return TENANTS[self.tenant]

    def path(self, number: int) -> list[int]:
        """Return the numbers of the turns from the first to this one."""
        numbers = []
        while number:
            numbers.append(number)
            number = self.turns[number].parent
        return numbers[::-1]


class Work:
    """Agents in use."""

    def __init__(self, at: House, seed: int) -> None:
        self.at, self.rng = at, random.Random(seed)
        self.agents: dict[str, History] = {}
        self.texts: list[str] = []
        """Every text that was ever sent to an agent, also in vain."""
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
        if len(await self.at.agents.context(self.agents[id].tenant, id)) > LONG:
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
            (1, self.unknown),
        ]
        [call] = rng.choices([call for _, call in calls], [weight for weight, _ in calls])
        await call(id)
        if rng.random() < 0.3:
            await self.again(clean=rng.random() < 0.2)

    async def again(self, *, clean: bool) -> None:
        """Restart, which forgets the contexts of ordinary requests."""
        await self.at.again(self.rng.getrandbits(32), clean=clean)
        for history in self.agents.values():
            history.contexts.clear()

    # --------------------------------------------------------------------------------------------------------- steps

    def text(self) -> str:
        """Return a text that was never used before."""
        self.texts.append(f"<<{len(self.texts)}>>")
        return self.texts[-1] + FILL

    def name(self) -> str:
        self.names += 1
        return f"a{self.names}"

    async def create(self) -> None:
        tenant = self.rng.choice(("default", "default", "acme"))
        await self.make(tenant, self.rng.choice(([], [SYSTEM])))

    async def make(self, tenant: str, messages: Sequence[dict[str, str]]) -> str:
        """Create an agent and run its first turn."""
        id = self.name()
        await self.at.agents.create(tenant, id=id, messages=messages)
        self.agents[id] = History(tenant)
        await self.say(id)
        return id

    async def say(self, id: str) -> None:
        """Run a turn and flush its KV to the disk."""
        text, history = self.text(), self.agents[id]
        heard = await self.at.say(id, text, history.tenant, options=OPTIONS)
        law(heard.done is not None and heard.error is None, f"a turn fails: {heard.error}")
        self.note(id, self.at.agents.get(history.tenant, id).head, Fact(history.head, text, heard.text))
        await self.at.service.flush()

    def note(self, id: str, number: int, fact: Fact) -> None:
        """Record a turn that has ended."""
        history = self.agents[id]
        law(number not in history.turns or number in history.spare, f"turn {number} of {id} is there twice")
        history.spare.discard(number)
        history.turns[number], history.head = fact, number

    async def cut(self, id: str) -> None:
        """Cut the power while an answer is generated; resume it afterwards."""
        text, history, said = self.text(), self.agents[id], ""
        running = await self.at.begin(id, text, history.tenant, options=OPTIONS)
        async with contextlib.aclosing(running.batches()) as shown:
            async for batch in shown:
                said += "".join(event.text for event in batch if isinstance(event, Delta))
                if any(isinstance(event, Delta) for event in batch):
                    break
            after = self.at.files.crash(self.rng)
        await self.at.agents.close()
        self.at.files = after
        await self.at.open()
        for agent in self.agents.values():
            agent.contexts.clear()
        shown = await self.at.agents.turns(history.tenant, id)
        turn = next((one for one in shown if one.messages[0]["content"] == text), None)
        law(turn is not None, "a message is lost whose answer was given out")
        assert turn is not None
        if turn.state == "interrupted":
            number = self.at.service.next_id()
            heard = await hear(await self.at.agents.resume(history.tenant, id, request=number))
            law(heard.done is not None and heard.text.startswith(said), "a resumed answer differs")
            said = heard.text
        else:
            said = str((turn.answer or {}).get("content"))
        self.note(id, turn.number, Fact(history.head, text, said))

    async def fork(self, id: str) -> None:
        history, other = self.agents[id], self.name()
        number = self.rng.choice([0, history.head, *await self.numbers(id)])
        await self.at.agents.fork(history.tenant, id, turn=number, new_id=other)
        self.agents[other] = History(
            history.tenant, {one: history.turns[one] for one in history.path(number)}, number, number
        )

    async def rollback(self, id: str) -> None:
        history = self.agents[id]
        history.head = self.rng.choice([0, *await self.numbers(id)])
        await self.at.agents.rollback(history.tenant, id, turn=history.head)
        await self.at.agents.tend()

    async def numbers(self, id: str) -> list[int]:
        return [turn.number for turn in await self.at.agents.turns(self.agents[id].tenant, id)]

    async def pin(self, id: str) -> None:
        history = self.agents[id]
        history.pinned = not history.pinned
        await self.at.agents.pin(history.tenant, id, history.pinned)

    async def tied(self, id: str) -> None:
        """Make ordinary requests in the names of two agents; log what they sampled and store their KV."""
        tenant = self.agents[id].tenant
        others = [one for one, history in self.agents.items() if history.tenant == tenant and one != id]
        begins = await self.at.agents.context(tenant, id)
        first = FIRST if self.rng.random() < 0.7 else begins[:128]
        for one in (id, *others[-1:]):
            history, text, named = self.agents[one], self.text(), self.at.agents.chats.named(tenant, one)
            sampled = Sampled(text.encode(), AnswerIdentity(b"v" * 32, "because"), [1, 2, 3], 0)
            self.at.agents.chats.keep(tenant, sampled, named)
            history.tied.append(text)
            ids = [*first, *self.at.service.tokenizer.encode(text)]
            asked = request(self.at.service, tuple(ids), 2, salt=history.salt, durable=True)
            answer = await collect(self.at.service.generate(asked))
            assert answer.done is not None
            history.contexts.append([*ids, *answer.tokens])
            self.at.agents.chats.account(tenant, named, history.contexts[-1], answer.done)
        await self.at.agents.writer.sync()
        await self.at.service.flush()
        law(self.on_disk(self.texts[-1]), "a request's replay record is not in the log")

    async def refused(self, id: str) -> None:
        """Let the disk refuse every write; no change may be acknowledged."""
        files, agents, tenant = self.at.files, self.at.agents, self.agents[id].tenant
        files.fail(Fault(files.calls, self.rng.choice((errno.EIO, errno.ENOSPC, errno.EROFS)), sticky=True))
        call = self.rng.choice(("say", "fork", "rollback"))
        with contextlib.suppress(Unavailable):
            if call == "say":
                await self.at.begin(id, self.text(), tenant, options=OPTIONS)
            elif call == "fork":
                await agents.fork(tenant, id, new_id=self.name())
            else:
                await agents.rollback(tenant, id, turn=0)
            law(False, f"a {call} that the disk refuses is acknowledged")
        files.heal()
        await agents.tend()

    async def week(self, id: str) -> None:
        """Let a week pass, so that upkeep collects abandoned branches that no fork shares."""
        if self.rng.random() < 0.6:
            await self.fork(id)
            await self.rollback(id)
        await self.collected()

    async def collected(self) -> None:
        """Let a week pass, and drop abandoned branches from the model."""
        self.at.clock.ahead += WEEK
        await self.at.agents.tend()
        held = {history.turns[number].text for history in self.agents.values() for number in history.path(history.base)}
        for history in self.agents.values():
            path = {*history.path(history.head), *history.path(history.base)}
            kept = {number: fact for number, fact in history.turns.items() if number in path or fact.text in held}
            history.turns, history.tied, history.spare = kept, [], kept.keys() - path

    async def unknown(self, id: str) -> None:
        """Leave a tenant unconfigured for a time: deleting its agents then must take no KV along."""
        _, gone = [await self.make(tenant, [SYSTEM]) for tenant in ("default", "acme")]
        self.at.salts = {"default": TENANTS["default"]}
        await self.again(clean=True)
        before = await self.places()
        await self.collected()
        await self.at.agents.delete("acme", gone)
        del self.agents[gone]
        self.at.salts = TENANTS
        await self.again(clean=True)
        await self.kept(before)

    async def delete(self, id: str) -> None:
        if self.rng.random() < 0.4:
            await self.tied(id)
        history, before = self.agents[id], await self.places()
        contexts = [*await self.contexts(id), *history.contexts]
        await self.at.agents.delete(history.tenant, id)
        del self.agents[id]
        left: list[list[int]] = []
        for other, one in self.agents.items():
            if one.tenant == history.tenant:
                left += [list(await self.at.agents.context(one.tenant, other)), *one.contexts]
        for ids in contexts:
            most = max((common_length(ids, one) // BLOCK_TOKENS * BLOCK_TOKENS for one in left), default=0)
            placed = await self.at.service.where(ids, history.salt)
            law(
                placed.disk <= most and placed.pool <= most + CHUNK_TOKENS,
                f"KV of a deleted context is left: {placed}, shared {most}",
            )
        await self.kept(before)

    async def kept(self, before: dict[tuple[str, int], int]) -> None:
        """Check that the other agents still have all whole chunks on disk that they had before.

        The blocks of a chunk's tail go with the deleted agent if that agent's context went on from there.
        """
        now = await self.places()
        for name, size in before.items():
            whole = size // CHUNK_TOKENS * CHUNK_TOKENS
            law(now.get(name, size) >= whole, "the KV of another agent goes with the one that is deleted")

    async def delete_running(self, id: str) -> None:
        """Delete an agent while it generates an answer."""
        tenant, options = self.agents[id].tenant, SamplingOptions(max_tokens=300, ignore_eos=True)
        running = await self.at.begin(id, self.text(), tenant, options=options)
        reading = asyncio.create_task(hear(running))
        for _ in range(self.rng.randrange(30)):
            await asyncio.sleep(0)
        await self.at.agents.delete(tenant, id)
        await reading
        await self.at.agents.writer.sync()
        [end] = self.at.agents._archive._log.read([(RecordKind.END, running.turn.key)])
        law(end is None, "the turn of a deleted agent goes on writing")
        del self.agents[id]

    async def contexts(self, id: str) -> list[list[int]]:
        """Return the contexts at the ends of all branches of the agent."""
        agent = self.at.agents._find(self.agents[id].tenant, id)
        return [list(await self.at.agents.kv.ids(turn)) for turn in {agent.head, *agent.leaves()}]

    async def places(self) -> dict[tuple[str, int], int]:
        """Count the leading tokens on disk, for each agent's context and those of ordinary requests in its name."""
        counts = {}
        for id, history in self.agents.items():
            contexts = [await self.at.agents.context(history.tenant, id), *history.contexts]
            for at, ids in enumerate(contexts):
                counts[id, at] = (await self.at.service.where(ids, history.salt)).disk
        return counts

    # ---------------------------------------------------------------------------------------------------------- laws

    async def check(self) -> None:
        agents = self.at.agents
        listed = sorted(info.id for tenant in TENANTS for info in agents.page(tenant, limit=100).agents)
        law(listed == sorted(self.agents), f"there are the agents {listed}, not {sorted(self.agents)}")
        for id, history in self.agents.items():
            info, path = agents.get(history.tenant, id), history.path(history.head)
            law(
                (info.head, info.turns, info.pinned) == (history.head, len(path), history.pinned),
                f"{id} stands elsewhere",
            )
            found = await agents.turns(history.tenant, id)
            there = {turn.number for turn in found}
            law(
                there <= history.turns.keys() <= there | history.spare,
                f"{id} has the turns {there}, not {[*history.turns]}",
            )
            for turn in found:
                fact = history.turns[turn.number]
                said = (turn.answer or {}).get("content")
                name = f"turn {turn.number} of {id}"
                law((turn.state, turn.parent) == ("finished", fact.parent), f"{name} is {turn.state}")
                law((turn.messages[0]["content"], said) == (fact.text, fact.answer), f"{name} says something else")
                law(turn.current == (turn.number in path), f"{name} is on the wrong branch")
        had = [fact.text for history in self.agents.values() for fact in history.turns.values()]
        had += [text for history in self.agents.values() for text in history.tied]
        for text in self.texts:
            held = any(one.startswith(text) for one in had)
            law(held or not self.on_disk(text), f"{text}, which no agent has, is on the disk")

    def on_disk(self, text: str) -> bool:
        return any(text.encode() in data for data in self.at.files.files(FOLDER).values())


async def schedule(seed: int) -> None:
    """Run a random schedule on a new server."""
    with tempfile.TemporaryDirectory() as place:
        async with house(talking_model(Path(place) / "model"), TENANTS, kv_dir=str(Path(place) / "kv")) as at:
            await Work(at, seed).run()


def run(seed: int) -> None:
    """Run one schedule. Raise `Broken` if a law breaks."""
    asyncio.run(schedule(seed))


def run_many(first: int, count: int) -> int:
    """Run schedules of consecutive seeds; return how many."""
    for seed in range(first, first + count):
        run(seed)
    return count


if __name__ == "__main__":
    run(int(sys.argv[1]))
