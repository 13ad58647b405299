"""A simulator of agents' chains: replicas are stopped, killed and cut off from the store, and their clocks are wrong.

Nothing runs by itself: a seed picks one random step after another. Every call of the store takes effect at one moment,
at most once; its answer may be late, or an error although it took effect. Each replica has a clock of its own, which
runs fast or slow, and may pause with its process (SIGSTOP).

Clients run turns. What each turn saw, and when it was acknowledged, is a history. `check` tests that its turns happened
one after another: each saw exactly those before it, none is missing or duplicated, and none is ordered before one that
had ended when it began.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.cluster.beats import BEAT_SECONDS, Beats
from cairn.cluster.chain import AgentChain, Moved
from cairn.types.errors import CairnError, Damaged, Unavailable
from tests.cluster.stores import MemoryBlobs, keys

AGENT = "ada"
INTERRUPTED = b""


class Point:
    """A point at which another task may run."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __await__(self) -> Generator[Point, None, None]:
        yield self


@dataclass(slots=True)
class Clock:
    """A replica's clock."""

    rate: float
    skew: float
    real: Callable[[], float]
    paused: float = 0.0
    """Seconds for which it stood still."""

    def now(self) -> float:
        return self.skew + self.rate * (self.real() - self.paused)

    def time_ns(self) -> int:
        return round(self.now() * 1e9)


class SimulatedBlobs:
    """The `AsyncBlobs` of one replica, over a store that all replicas share."""

    def __init__(self, world: World, replica: SimulatedReplica) -> None:
        self._world, self._replica = world, replica

    async def _call(self, work: Callable[[], Any], *, changes: bool) -> Any:
        rng, replica = self._world.rng, self._replica
        await Point(rng.choice((0.0, 0.0, 0.01, 0.2)))
        if replica.cut:
            effect = changes and rng.random() < 0.3
            if effect:
                work()
            await Point(rng.random())
            raise OSError("cut off")
        result = work()
        await Point(rng.choice((0.0, 0.0, 0.0, 0.05, 1.0)))
        return result

    async def create(self, name: str, data: bytes) -> bool:
        store = self._world.store
        return bool(await self._call(lambda: store.create(name, data) or store.read(name) == data, changes=True))

    async def replace(self, name: str, data: bytes) -> None:
        await self._call(lambda: self._world.store.replace(name, data), changes=True)

    async def read(self, name: str) -> bytes | None:
        data: bytes | None = await self._call(lambda: self._world.store.read(name), changes=False)
        return data

    async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
        """Read in any order: of reads at once a later one may be answered first."""
        found: dict[str, bytes | OSError | None] = {}
        for name in self._world.rng.sample(names, len(names)):
            try:
                found[name] = await self.read(name)
            except OSError as error:
                found[name] = error
        return [found[name] for name in names]

    async def list(self, folder: str, after: str = "") -> Sequence[str]:
        names: Sequence[str] = await self._call(lambda: self._world.store.list(folder, after), changes=False)
        return names

    async def delete(self, names: Sequence[str]) -> None:
        await self._call(lambda: self._world.store.delete(names), changes=True)


@dataclass
class Acknowledged:
    """One turn of a client."""

    value: bytes
    saw: tuple[bytes, ...]
    asked: float
    answered: float | None = None
    """When it was acknowledged; None if the client does not know the outcome."""
    tried: bool = False
    """Whether its beginning may be in the chain."""


class SimulatedReplica:
    """A server: its chain, its heartbeats, and its view of the agent."""

    def __init__(self, world: World, number: int) -> None:
        rng = world.rng
        self.world, self.number = world, number
        self.cut = False
        self.stopped_until = 0.0
        self.clock = Clock(rng.choice((1.0, 1.0, 0.5, 2.0)), rng.uniform(-1e5, 1e5), lambda: world.now)
        blobs = SimulatedBlobs(world, self)
        self.holder = f"{number:016x}"
        self._new = lambda: world.chains(blobs, keys(number * 100_000 + 1), "default", AGENT, self.holder)
        self.chain = self._new()
        self.known = True
        """Whether `ended` matches the chain up to its tail; if not, all of it is read again, as servers do."""
        self.beats = Beats(blobs, keys(number * 100_000 + 50_000), self.clock, self.holder)
        self.ended: list[bytes] = []
        """Turns of the agent that this replica knows."""
        self.busy = False

    async def beat(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.beats.step()
            await Point(BEAT_SECONDS / self.clock.rate)

    async def bring(self) -> None:
        if not self.known:
            self.chain, self.ended = self._new(), []
        records = await self.chain.news()
        self.known = True
        for record in records:
            if record.kind in ("made", "gone"):
                self.ended = [record.body] if record.body else []
            if record.kind == "made":
                self.world.made[record.body] = record.number
            if record.kind in ("ended", "changed") and record.body != INTERRUPTED:
                self.ended.append(record.body)

    async def settle(self, since: int) -> None:
        """Interrupt the own turn that this record began, if it still counts as running.

        Retry until the store answers.
        """
        while True:
            await Point(1.0)
            if self.busy:
                continue
            self.busy = True  # calls of a server on one chain are serialized, too
            try:
                self.known = False
                await self.chain.settle(since, INTERRUPTED)
                return
            except Moved:
                return
            except Unavailable:
                continue
            finally:
                self.busy = False

    async def turn(self, value: bytes) -> None:
        """Run one turn, as `SharedAgents` does."""
        if self.busy:
            return
        self.busy = True
        turn = Acknowledged(value, (), self.world.now)
        try:
            await self.world.run_turn(self, turn)
        except CairnError as error:
            self.known = False
            if isinstance(error, Damaged):
                raise
            if not isinstance(error, Moved) and turn.tried:
                tail = self.chain.tail
                self.world.spawn(self, self.settle(tail.since if tail.running else tail.number + 1))
        finally:
            self.busy = False


async def run_turn(replica: SimulatedReplica, turn: Acknowledged) -> None:
    """Make the calls that `SharedAgents` makes for a turn, in the same order."""
    world = replica.world
    await replica.bring()
    chain = replica.chain
    if chain.tail.kind == "gone":
        raise chain.moved()
    await chain.hold(replica.beats.alive)
    turn.saw, turn.tried = tuple(replica.ended), True
    world.history.append(turn)
    number = len(replica.ended) + 1
    await chain.append("began", turn.value, number)
    await Point(world.rng.choice((0.0, 0.1, 1.0, 4.0)))
    await chain.end(number, turn.value)
    replica.ended.append(turn.value)
    turn.answered = world.now


async def run_or_delete(replica: SimulatedReplica, turn: Acknowledged) -> None:
    """Run a turn, now and then of an agent that is deleted first and made anew, as `SharedAgents` does both."""
    world = replica.world
    await replica.bring()
    chain = replica.chain
    if world.rng.random() < 0.3 and chain.tail.kind != "gone":
        saw = tuple(replica.ended)
        await chain.append("gone")
        world.deleted.append((maker(saw), world.now))
    if chain.tail.kind == "gone":
        await chain.forget()
        body = b"made for " + turn.value
        await chain.append("made", body)
        replica.ended = [body]
        world.made[body] = chain.tail.number
    await run_turn(replica, turn)


def maker(saw: Sequence[bytes]) -> bytes:
    """Return the body of the record that made the agent of a turn which saw this; empty for the first agent."""
    return saw[0] if saw and saw[0].startswith(b"made for ") else b""


ENTRIES = 3
"""Entries that work adds to a journal."""


async def add_entry(replica: SimulatedReplica, entry: Acknowledged) -> None:
    """Write an entry to the chain, as `SharedJournals` does while it works."""
    chain = replica.chain
    if not (chain.mine and chain.tail.running):
        await chain.hold(replica.beats.alive)
    await chain.append("changed", entry.value, chain.tail.running)


async def run_work(
    replica: SimulatedReplica,
    work: Acknowledged,
    add: Callable[[SimulatedReplica, Acknowledged], Coroutine[Any, Any, None]] = add_entry,
) -> None:
    """The order of calls that `SharedJournals` makes for work on a journal, which adds entries.

    Each entry is one of the history: it is built on all before it, those of others too, and is told once it is there.
    """
    world = replica.world
    await replica.bring()
    chain = replica.chain
    await chain.hold(replica.beats.alive)
    work.tried = True
    await chain.append("began", b"", 1)
    for number in range(ENTRIES):
        await Point(world.rng.choice((0.0, 0.1, 1.0, 4.0)))
        entry = Acknowledged(b"%b.%d" % (work.value, number), tuple(replica.ended), world.now)
        world.history.append(entry)
        await add(replica, entry)
        replica.ended.append(entry.value)
        entry.answered = world.now
    await chain.settle(chain.tail.since, INTERRUPTED)


@dataclass
class World:
    """Replicas, store and history of one simulation."""

    seed: int
    chains: type[AgentChain] = AgentChain
    run_turn: Callable[[SimulatedReplica, Acknowledged], Coroutine[Any, Any, None]] = run_turn
    now: float = 0.0
    store: MemoryBlobs = field(default_factory=MemoryBlobs)
    history: list[Acknowledged] = field(default_factory=list)
    made: dict[bytes, int] = field(default_factory=lambda: {b"": 0})
    """Numbers of records that made an agent anew, by their bodies."""
    deleted: list[tuple[bytes, float]] = field(default_factory=list)
    """What had made a deleted agent, and when the deletion was acknowledged."""
    kills: int = 0
    stops: int = 0
    cuts: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._ready: list[tuple[float, SimulatedReplica, Coroutine[Any, Any, None]]] = []
        self._numbers = 0
        self.replicas: list[SimulatedReplica] = []
        for _ in range(3):
            self._start()

    def _start(self) -> None:
        self._numbers += 1
        replica = SimulatedReplica(self, self._numbers)
        self.replicas.append(replica)
        self.spawn(replica, replica.beat())

    def spawn(self, replica: SimulatedReplica, work: Coroutine[Any, Any, None]) -> None:
        self._ready.append((self.now, replica, work))

    def run(self, steps: int) -> None:
        """Create the agent, make random steps, then let everything heal and run one last turn."""
        first = self.replicas[0]
        self._finish(first, first.chain.append("made"))
        turns = 0
        for _ in range(steps):
            draw = self.rng.random()
            if draw < 0.03:
                turns += 1
                replica = self.rng.choice(self.replicas)
                self.spawn(replica, replica.turn(b"turn %d" % turns))
            elif draw < 0.04:
                self._break()
            else:
                self._step()
        for replica in self.replicas:
            replica.cut, replica.stopped_until = False, 0.0
        for _ in range(3000):
            self._step()
        last = self.replicas[-1]
        for number in range(60):
            self._finish(last, last.turn(b"last %d" % number))
            for _ in range(300):
                self._step()
            if any(turn.value.startswith(b"last") and turn.answered is not None for turn in self.history):
                return
        raise AssertionError(f"seed {self.seed}: no turn could be run after everything had healed")

    def _break(self) -> None:
        replica = self.rng.choice(self.replicas)
        match self.rng.randrange(4):
            case 0:
                replica.cut = not replica.cut
                self.cuts += 1
            case 1:  # SIGSTOP; some clocks go on meanwhile
                seconds = self.rng.choice((0.5, 3.0, 10.0))
                replica.stopped_until = self.now + seconds
                replica.clock.paused += seconds if self.rng.random() < 0.5 else 0.0
                self.stops += 1
            case 2:
                replica.clock.skew += self.rng.uniform(-100, 100)
            case 3:
                self.kills += 1
                self.replicas.remove(replica)
                for _, _, work in (entry for entry in self._ready if entry[1] is replica):
                    work.close()
                self._ready = [entry for entry in self._ready if entry[1] is not replica]
                self._start()

    def _step(self) -> None:
        """Continue a random piece of work that is due."""
        due = [at for at, entry in enumerate(self._ready) if max(entry[0], entry[1].stopped_until) <= self.now]
        if not due:
            self.now = min(max(entry[0], entry[1].stopped_until) for entry in self._ready)
            return
        at = self.rng.choice(due)
        _, replica, work = self._ready.pop(at)
        try:
            point = work.send(None)
        except StopIteration:
            return
        self._ready.append((self.now + point.seconds, replica, work))

    def _finish(self, replica: SimulatedReplica, work: Coroutine[Any, Any, None]) -> None:
        over: list[bool] = []

        async def both() -> None:
            try:
                await work
            finally:
                over.append(True)

        self.spawn(replica, both())
        for _ in range(100_000):
            if over:
                return
            self._step()
        raise AssertionError(f"seed {self.seed}: a call never ended")

    def close(self) -> None:
        for _, _, work in self._ready:
            work.close()


def check(world: World) -> None:
    """Raise AssertionError unless the turns of a history happened one after another."""
    reader = SimulatedReplica(world, 99_999)
    reader.cut = False
    order: list[bytes] = []

    async def read() -> None:
        await reader.bring()
        order.extend(reader.ended)

    world._finish(reader, read())
    where = f"seed {world.seed}"
    assert len(set(order)) == len(order), f"{where}: a turn is there twice"
    places = {value: at for at, value in enumerate(order)}
    for turn in world.history:
        at = places.get(turn.value)
        assert at is not None or turn.answered is None, f"{where}: {turn.value!r} was acknowledged and is lost"
        if at is not None:
            assert turn.saw == tuple(order[:at]), f"{where}: {turn.value!r} was not built on all turns before it"
    known = [turn for turn in world.history if turn.answered is not None]
    for one in known:
        for other in known:
            if one.answered is not None and one.answered < other.asked:
                assert places[one.value] < places[other.value], f"{where}: {other.value!r} came before {one.value!r}"


def check_deletions(world: World) -> None:
    """Raise AssertionError unless the turns and deletions of a history of `run_or_delete` happened one after another.

    Turns of a deleted agent are not in the chain any more: what each of them saw must fit what the others saw.
    """
    reader = SimulatedReplica(world, 99_999)
    world._finish(reader, reader.bring())
    last, where = maker(reader.ended), f"seed {world.seed}"
    known = [turn for turn in world.history if turn.answered is not None]
    for body in world.made:
        line = sorted((turn for turn in known if maker(turn.saw) == body), key=lambda turn: len(turn.saw))
        ends = [(*turn.saw, turn.value) for turn in line]
        for before, after in itertools.pairwise([*ends, tuple(reader.ended)] if body == last else ends):
            assert after[: len(before)] == before, f"{where}: {before[-1]!r} was acknowledged and is lost"
    for one in known:
        for other in known:
            if one.answered is not None and one.answered < other.asked:
                places = [(world.made[maker(turn.saw)], len(turn.saw)) for turn in (one, other)]
                assert places[0] < places[1], f"{where}: {other.value!r} came before {one.value!r}"
    for body, at in world.deleted:
        late = [turn for turn in known if turn.asked > at and world.made[maker(turn.saw)] <= world.made[body]]
        assert not late, f"{where}: {late[0].value!r} was a turn of a deleted agent"


def simulate(seed: int, steps: int = 1500, checked: Callable[[World], None] = check, **changed: Any) -> World:
    """Run one history and check it."""
    world = World(seed, **changed)
    try:
        world.run(steps)
        checked(world)
    finally:
        world.close()
    return world
