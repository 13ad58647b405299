"""Simulation of a million agents on a thousand servers: what routing computes, moves and costs, and what breaks first.

    python benchmarks/cluster_simulation.py [--agents N] [--replicas N] [--svg FILE] [--real]

Agents follow published traces of coding agents: a median of 43 turns, with 3,300 new tokens and an answer of 444 tokens
per turn, so that more than 96 % of a prompt's tokens were in the one before. Time advances in slots. In each slot, the
due turns choose a server by a routing rule; a server works off its turns in order. Servers fail, and one region is down
for a while. `--real` runs three real servers with `cairn cluster up` and compares them with the prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TURNS, ANSWER, QUESTION = 43, 444, 3300
BLOCK, CHUNK = 16, 64
VISITS = 4
"""Servers whose KV of an agent is tracked: earlier ones have mostly evicted it."""
RANKS = 6
"""Servers that are tried for a name before its first one is taken after all."""
CROWDED, SLACK = 1.5, 4
"""As in `cairn.cluster.router.replicas`."""
SILENCE = 3.0
"""Seconds after which a turn's server counts as dead."""
PUT, GET = 5e-6, 0.4e-6
"""Dollars per request to an object store: to write or list, to read."""
ACROSS = 0.02
"""Dollars per GB between regions."""
GROUP_LIMIT = 5500
"""Reads per second of one prefix of an object store."""
ROUTER_REQUEST, ROUTER_EVENT = 0.3e-3, 20e-6
"""CPU seconds in the router, as measured by `benchmarks/router.py`."""


@dataclass(frozen=True)
class Fleet:
    """The servers, and the speed of each: about that of an 8B model in 16 bits on one large GPU."""

    replicas: int = 1000
    regions: int = 4
    prefill: float = 20_000.0
    """Prompt tokens per second."""
    decode: float = 3_000.0
    """Tokens per second of all answers together."""
    stream: float = 60.0
    """Tokens per second of one answer."""
    token_bytes: int = 131_072
    """Bytes of KV per token."""
    load: float = 5e9
    """Bytes per second from the region's store."""
    load_across: float = 1e9
    """Bytes per second from another region's store."""
    latency: float = 0.05
    """Seconds before the first bytes."""
    pool: float = 16e6
    """Tokens of KV that a server keeps, in memory and on disk."""
    lag: float = 2.0
    """Seconds until KV is in the store."""
    lifetime: float = 100 * 3600.0
    """Mean seconds between two failures of a server."""
    repair: float = 180.0
    outage: tuple[float, float] = (0.6, 600.0)
    """Start of the first region's outage, as a share of the run, and its seconds."""


@dataclass(frozen=True)
class Load:
    """The agents' requests."""

    agents: int = 1_000_000
    seconds: float = 19_600.0
    """Seconds in which agents arrive; each stays as long as its turns take."""
    turns: int = TURNS
    question: float = QUESTION
    answer: float = ANSWER
    think: float = 30.0
    """Mean seconds between an answer and the next turn."""
    context: int = 1_000_000
    """Tokens of context at which an agent ends."""
    slot: float = 1.0


@dataclass(frozen=True)
class Rule:
    """A routing rule."""

    title: str
    choose: str
    store: bool
    """Whether servers share a store."""


RULES = (
    Rule("round robin, no store", "turns", False),
    Rule("round robin, shared store", "turns", True),
    Rule("least load, shared store", "load", True),
    Rule("rendezvous alone", "names", False),
    Rule("Cairn: names, load and store", "cairn", True),
)


@dataclass
class Found:
    """Counters of a run."""

    turns: int = 0
    offered: int = 0
    prompt: float = 0.0
    computed: float = 0.0
    loaded: float = 0.0
    """Tokens of KV from the store."""
    stored: float = 0.0
    across: float = 0.0
    """Tokens of KV from another region."""
    puts: float = 0.0
    gets: float = 0.0
    waits: list[Floats] = field(default_factory=list)
    failovers: list[Floats] = field(default_factory=list)
    seconds: float = 0.0

    def first(self, share: float) -> float:
        """Return the time to first token, in seconds, at this quantile of turns."""
        return float(np.quantile(np.concatenate(self.waits), share)) if self.waits else 0.0

    def failover(self, share: float) -> float:
        """Return the same for turns whose server died: seconds until the answer goes on."""
        return float(np.quantile(np.concatenate(self.failovers), share)) if self.failovers else 0.0

    def dollars(self, fleet: Fleet) -> float:
        """Return dollars per million turns for requests to the store and for bytes between regions."""
        whole = self.puts * PUT + self.gets * GET + self.across * fleet.token_bytes / 1e9 * ACROSS
        return 1e6 * whole / max(1, self.turns)


def mixed(names: Ints, salt: Ints | int) -> Ints:
    """Return non-negative hashes of names (splitmix64)."""
    x = names.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.asarray(salt, np.uint64) * np.uint64(
        0xD1B54A32D192ED03
    )
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(1)).astype(np.int64)


class Servers:
    """The servers' state, and the rules by which turns choose among them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.each = fleet.replicas // fleet.regions
        count = self.each * fleet.regions
        self.backlog = np.zeros(count)
        """Seconds of queued work."""
        self.busy = np.zeros(count, np.int64)
        self.up_at = np.zeros(count)
        """Time from which the server is up."""
        self.written = np.zeros(count)
        """Tokens of KV written so far: anything written `pool` tokens ago is evicted."""
        self._turn = np.zeros(fleet.regions, np.int64)

    def choose(self, rule: str, agents: Ints, regions: Ints, now: float) -> Ints:
        """Return a server for each agent in its region."""
        up = self.up_at <= now
        if rule in ("names", "cairn"):
            return self._by_name(agents, regions, up, crowded=rule == "cairn")
        result = np.empty(len(agents), np.int64)
        for region in np.unique(regions):
            here = np.flatnonzero(regions == region)
            able = np.flatnonzero(up[region * self.each : (region + 1) * self.each]) + region * self.each
            if rule == "turns":
                result[here] = able[(self._turn[region] + np.arange(len(here))) % len(able)]
                self._turn[region] += len(here)
            else:
                result[here] = self._least(able, len(here))
        return result

    def _least(self, able: Ints, count: int) -> Ints:
        """Deal turns to the servers with the fewest, one after another."""
        busy = self.busy[able].astype(float)
        order = np.argsort(busy, kind="stable")
        have = busy[order]
        # Turns that raise all servers before it to its level
        filled = have * np.arange(1, len(have) + 1) - np.cumsum(have)
        level = int(np.searchsorted(filled, count, side="right"))
        return able[order[np.arange(count) % max(1, level)]]

    def _by_name(self, agents: Ints, regions: Ints, up: NDArray[np.bool_], *, crowded: bool) -> Ints:
        ranked = np.stack([mixed(agents, rank) % self.each for rank in range(RANKS)], axis=1)
        ranked += regions[:, None] * self.each
        able = up[ranked]
        if crowded:
            means = self.busy.reshape(-1, self.each).mean(axis=1)
            room = self.busy[ranked] < (CROWDED * means + SLACK)[regions][:, None]
            free = able & room
            able = np.where(free.any(axis=1)[:, None], free, able)
        return ranked[np.arange(len(agents)), able.argmax(axis=1)]

    def fail(self, server: int, until: float) -> None:
        """End a server; its KV is lost."""
        self.up_at[server] = until
        self.backlog[server] = self.busy[server] = 0
        self.written[server] += 2 * self.fleet.pool


class Agents:
    """The state of every agent."""

    def __init__(self, load: Load, fleet: Fleet, rng: np.random.Generator) -> None:
        count = load.agents
        self.left = np.maximum(1, np.rint(rng.lognormal(0, 0.5, count) * load.turns)).astype(np.int64)
        self.context = np.zeros(count, np.int64)
        self.stored = np.zeros(count, np.int64)
        """Tokens in the store up to the turn before the last one."""
        self.ended = np.full(count, -np.inf)
        """Time at which the last answer ended."""
        self.region = rng.integers(0, fleet.regions, count)
        self.server = np.full((count, VISITS), -1, np.int64)
        self.kept = np.zeros((count, VISITS), np.int64)
        """Tokens of KV that each of the visited servers had of the agent."""
        self.stamp = np.zeros((count, VISITS))
        """`Servers.written` at that visit."""
        self.visits = np.zeros(count, np.int64)

    def had(self, who: Ints, chosen: Ints, servers: Servers) -> Ints:
        """Return the tokens of KV that the chosen servers have."""
        match = self.server[who] == chosen[:, None]
        fresh = servers.written[chosen][:, None] - self.stamp[who] <= servers.fleet.pool
        return np.where(match & fresh, self.kept[who], 0).max(axis=1)

    def visit(self, who: Ints, chosen: Ints, kept: Ints, servers: Servers) -> None:
        """Record the KV that the chosen servers have now."""
        match = self.server[who] == chosen[:, None]
        place = np.where(match.any(axis=1), match.argmax(axis=1), self.visits[who] % VISITS)
        self.visits[who] += ~match.any(axis=1)
        self.server[who, place], self.kept[who, place] = chosen, kept
        self.stamp[who, place] = servers.written[chosen]


class Calendar:
    """Agents by the slot in which their next turn is due."""

    def __init__(self, slot: float) -> None:
        self._slot = slot
        self._due: dict[int, list[Ints]] = {}

    def add(self, who: Ints, at: Floats) -> None:
        """Add agents."""
        places = (at / self._slot).astype(np.int64)
        order = np.argsort(places, kind="stable")
        cuts = np.flatnonzero(np.diff(places[order])) + 1
        for part in np.split(order, cuts):
            if len(part):
                self._due.setdefault(int(places[part[0]]), []).append(who[part])

    def take(self, place: int) -> Ints:
        """Remove and return the agents of a slot."""
        result = self._due.pop(place, [])
        return np.concatenate(result) if result else np.empty(0, np.int64)


class Simulation:
    """One run of one rule."""

    def __init__(self, fleet: Fleet, load: Load, rule: Rule, seed: int = 0) -> None:
        self.fleet, self.load, self.rule = fleet, load, rule
        self.rng = np.random.default_rng(seed)
        self.agents, self.servers = Agents(load, fleet, self.rng), Servers(fleet)
        self.calendar, self.found = Calendar(load.slot), Found(seconds=load.seconds)
        self.ending: dict[int, list[Ints]] = {}
        self.finish = np.full(load.agents, -np.inf)
        begin = self.rng.uniform(0, load.seconds, load.agents)
        self.found.offered = int(self.agents.left.sum())
        self.calendar.add(np.arange(load.agents), begin)

    def run(self) -> Found:
        """Run all slots."""
        slot = self.load.slot
        for place in range(int(self.load.seconds / slot)):
            now = place * slot
            for chosen in self.ending.pop(place, ()):
                np.subtract.at(self.servers.busy, chosen, 1)
            np.maximum(self.servers.busy, 0, out=self.servers.busy)
            self._fail(now)
            who = self.calendar.take(place)
            if len(who):
                self._turns(who, now)
            self.servers.backlog = np.maximum(0, self.servers.backlog - slot)
        return self.found

    def _fail(self, now: float) -> None:
        rate = self.servers.each * self.fleet.regions * self.load.slot / self.fleet.lifetime
        for _ in range(int(self.rng.poisson(rate))):
            server = int(self.rng.integers(len(self.servers.backlog)))
            if self.servers.up_at[server] <= now and (self.servers.up_at <= now).sum() > self.fleet.regions:
                self._take_over(server, now)
                self.servers.fail(server, now + self.fleet.repair)
                for parts in self.ending.values():
                    parts[:] = [part[part != server] for part in parts]

    def _take_over(self, server: int, now: float) -> None:
        """Move turns of dead servers to others, which load or compute the prompts."""
        last = (self.agents.visits - 1) % VISITS
        mine = self.agents.server[np.arange(self.load.agents), last] == server
        cut = np.flatnonzero(mine & (self.finish > now))
        if not len(cut):
            return
        context = self.agents.context[cut]
        from_store = self.agents.stored[cut] if self.rule.store else np.zeros(len(cut), np.int64)
        seconds, computed, loaded = self._bring(context, np.zeros(len(cut), np.int64), from_store, self.fleet.load)
        self.found.computed += computed.sum()
        self.found.loaded += loaded.sum()
        self.found.failovers.append(SILENCE + seconds)

    def _bring(self, prompt: Ints, had: Ints, stored: Ints, rate: float | Floats) -> tuple[Floats, Ints, Ints]:
        """Return seconds to the first token, and tokens computed and loaded; the store is read where that is faster."""
        more = np.maximum(0, np.minimum(stored, prompt - 1) // BLOCK * BLOCK - had)
        seconds = self.fleet.latency + more * self.fleet.token_bytes / rate
        loaded = np.where(seconds < more / self.fleet.prefill, more, 0)
        computed = prompt - had - loaded
        return np.where(loaded > 0, seconds, 0) + computed / self.fleet.prefill, computed, loaded

    def _turns(self, who: Ints, now: float) -> None:
        fleet, agents, servers, found = self.fleet, self.agents, self.servers, self.found
        new = np.maximum(1, np.rint(self.rng.exponential(self.load.question, len(who)))).astype(np.int64)
        answer = np.maximum(1, np.rint(self.rng.exponential(self.load.answer, len(who)))).astype(np.int64)
        prompt = agents.context[who] + new
        home = agents.region[who]
        region = self._serving(home, who, now)
        chosen = servers.choose(self.rule.choose, who, region, now)
        had = np.minimum(agents.had(who, chosen, servers), prompt - 1)
        stored = np.zeros(len(who), np.int64)
        if self.rule.store:
            there = now - agents.ended[who] > fleet.lag
            stored = np.where(there, agents.context[who], agents.stored[who])
        rate = np.where(region == home, fleet.load, fleet.load_across)
        seconds, computed, loaded = self._bring(prompt, had, stored, rate)
        self._count(prompt, computed, loaded, new + answer, region != home)
        work = computed / fleet.prefill + answer / fleet.decode
        wait = self._queue(chosen, work)
        first = wait + seconds + 1 / fleet.stream
        found.waits.append(first.astype(np.float32))
        end = now + first + answer / fleet.stream
        places = (end / self.load.slot).astype(np.int64)
        np.add.at(servers.busy, chosen, 1)
        for place in np.unique(places):
            self.ending.setdefault(int(place), []).append(chosen[places == place])
        np.add.at(servers.written, chosen, prompt + answer - had)
        agents.visit(who, chosen, prompt + answer, servers)
        agents.stored[who], agents.context[who] = agents.context[who], prompt + answer
        agents.ended[who] = self.finish[who] = end
        agents.left[who] -= 1
        more = (agents.left[who] > 0) & (agents.context[who] < self.load.context)
        self.calendar.add(who[more], (end + self.rng.exponential(self.load.think, len(who)))[more] + self.load.slot)

    def _serving(self, home: Ints, who: Ints, now: float) -> Ints:
        """Return the regions that serve agents: their own, or others while it is down."""
        began, length = self.fleet.outage[0] * self.load.seconds, self.fleet.outage[1]
        if self.fleet.regions == 1 or not began <= now < began + length:
            return home
        return np.where(home == 0, 1 + mixed(who, 99) % (self.fleet.regions - 1), home)

    def _queue(self, chosen: Ints, work: Floats) -> Floats:
        """Add work to the servers' backlogs; return how long each turn waits for what was there before it."""
        at = self.rng.uniform(0, self.load.slot, len(work))
        order = np.lexsort((at, chosen))
        place, mine = chosen[order], work[order]
        total = np.cumsum(mine) - mine
        firsts = np.flatnonzero(np.r_[True, np.diff(place) != 0])
        before = total - np.repeat(total[firsts], np.diff(np.r_[firsts, len(place)]))
        wait = np.empty(len(work))
        wait[order] = np.maximum(0, self.servers.backlog[place] + before - at[order])
        np.add.at(self.servers.backlog, chosen, work)
        return wait

    def _count(self, prompt: Ints, computed: Ints, loaded: Ints, fresh: Ints, away: NDArray[np.bool_]) -> None:
        found = self.found
        found.turns += len(prompt)
        found.prompt += prompt.sum()
        found.computed += computed.sum()
        found.loaded += loaded.sum()
        found.across += loaded[away].sum()
        if self.rule.store:
            chunks = np.ceil(fresh / CHUNK)
            found.stored += fresh.sum()
            found.puts += chunks.sum() + 4 * len(prompt)  # chunks, their announcement, and three records of the turn
            found.gets += (loaded / CHUNK).sum()


# ------------------------------------------------------------------------------------------------------- what breaks


def limits(rate: float, replicas: int) -> list[tuple[str, str, str]]:
    """Return what breaks with more servers: where, at how many, and how;

    `rate` is in turns per second of one server.
    """
    a_turn = ROUTER_REQUEST + ANSWER * ROUTER_EVENT
    routers = rate * replicas * a_turn
    beats = int((GROUP_LIMIT / 2) ** 0.5)
    feed = int((GROUP_LIMIT / rate) ** 0.5)
    return [
        (
            "leases: each server reads the beats of all, twice a second",
            f"{beats} servers ({GROUP_LIMIT:,} reads a second of one prefix; {replicas:,} would read "
            f"{2 * replicas**2 / 1e6:.1f} M)",
            "a store for each group of servers, as far as agents move at once; or beats by gossip",
        ),
        (
            "the index: each server reads what all others announce",
            f"{feed} servers ({replicas:,} would read {rate * replicas**2 / 1e6:.1f} M a second, and keep "
            "the 262,144 newest chunks)",
            "the same groups; or an index by gossip, of which each server keeps the names that it ranks first for",
        ),
        (
            "the router: CPU a turn",
            f"{1 / a_turn:.0f} turns a second and core, so {1 / (rate * a_turn):.0f} servers; {replicas:,} need "
            f"{routers:.0f} cores",
            "routers beside each other behind one address: names rank alike on all, and they share no state",
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ output


def table(fleet: Fleet, runs: list[tuple[Rule, Found]]) -> list[str]:
    """Return the figures in Markdown."""
    lines = [
        "| | computed a turn | of prompts, cached | GB moved a turn | first token p50, p99 | failover p50, p99 | "
        "store requests a turn | dollars a million turns | turns done |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rule, one in runs:
        turns = max(1, one.turns)
        moved = (one.loaded + one.stored) * fleet.token_bytes / 1e9 / turns
        over = f"{one.failover(0.5):.1f}, {one.failover(0.99):.1f} s" if one.failovers else "none"
        lines.append(
            f"| {rule.title} | {one.computed / turns:,.0f} | {1 - one.computed / max(1, one.prompt):.1%} | {moved:.2f} "
            f"| {one.first(0.5):.2f}, {one.first(0.99):.1f} s | {over} | {(one.puts + one.gets) / turns:.0f} | "
            f"{one.dollars(fleet):,.0f} | {turns / 1e6:.2f} M |"
        )
    return lines


def picture(runs: list[tuple[Rule, Found]]) -> str:
    """Return bars of the tokens computed per turn, and the median time to first token, as SVG."""
    most = max(one.computed / max(1, one.turns) for _, one in runs)
    rows = []
    for number, (rule, one) in enumerate(runs):
        top, each = 34 + 34 * number, one.computed / max(1, one.turns)
        wide, colour = 330 * each / most, "#2a7" if rule.choose == "cairn" else "#89a"
        rows += [
            f'<text x="218" y="{top + 15}" text-anchor="end">{rule.title}</text>',
            f'<rect x="226" y="{top}" width="{wide:.1f}" height="20" fill="{colour}"/>',
            f'<text x="{232 + wide:.1f}" y="{top + 15}">{each:,.0f}; {one.first(0.5):.1f} s</text>',
        ]
    height = 44 + 34 * len(runs)
    head = '<text x="226" y="20">prompt tokens computed a turn; first token, median</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" font-family="sans-serif" font-size="13">'
        f'<rect width="700" height="{height}" fill="white"/>{head}{"".join(rows)}</svg>\n'
    )


def simulate(fleet: Fleet, load: Load, tell: Callable[[str], Any] = lambda line: None) -> list[tuple[Rule, Found]]:
    """Run every rule."""
    runs = []
    for rule in RULES:
        runs.append((rule, Simulation(fleet, load, rule).run()))
        tell(f"{rule.title}: {runs[-1][1].turns:,} turns")
    return runs


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=Load.agents)
    parser.add_argument("--replicas", type=int, default=Fleet.replicas)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--real", action="store_true", help="three real servers instead, beside what is foretold")
    args = parser.parse_args()
    if args.real:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from cluster_real import compare

        print(*compare(), sep="\n")
        return
    fleet = replace(Fleet(), replicas=args.replicas)
    load = replace(Load(), agents=args.agents)
    runs = simulate(fleet, load, lambda line: print(line, file=sys.stderr))
    print(*table(fleet, runs), sep="\n")
    best = runs[-1][1]
    print("\n| what breaks first | at | what then |\n|---|---|---|")
    for line in limits(best.turns / best.seconds / args.replicas, args.replicas):
        print(f"| {' | '.join(line)} |")
    if args.svg:
        args.svg.write_text(picture(runs))


if __name__ == "__main__":
    main()
