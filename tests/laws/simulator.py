"""The scheduler simulator: the real scheduler and cache over the fake engine, from one seed, on a virtual clock.

A schedule is a small world (block size, cache groups, pools, limits) and a script of arrivals, cancels, deadlines,
engine failures, worker deaths and drops in the middle of a step. The laws are checked after every step; the first that
breaks raises `Broken` with the seed in its message. `run(seed)` runs one schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from cairn.engine.fake import STATE, FakeEngine, fake_spec
from cairn.engine.row_results import sample
from cairn.kv.pool import prefix
from cairn.kv.pool.blocks import BlockPool
from cairn.kv.pool.cache import Cache, first_read, window_blocks
from cairn.kv.pool.sequence_kv import Match, SequenceKV
from cairn.kv.pool.snapshots import SPACING
from cairn.scheduler.drafts.combined import CombinedDrafter
from cairn.scheduler.drafts.drafter import Drafter, States
from cairn.scheduler.drafts.mtp_head import MtpHead
from cairn.scheduler.drafts.suffix import SuffixDrafter
from cairn.scheduler.planned_step import Plan
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.sequence import AGE_SECONDS, Sequence, State
from cairn.scheduler.step_budget import Limits, PrefillPace
from cairn.types.errors import ContextTooLong, InvalidRequest
from cairn.types.model_spec import CHUNK_BLOCKS
from cairn.types.outputs import FinishReason, Output, TokenLogprob
from cairn.types.request import Grammar, Request, SamplingExtras, SamplingParams
from cairn.types.step import NO_BLOCK, Ready, Row, RowResult
from tests.laws.fake_head import FakeHead, WatchedEngine
from tests.laws.storage_world import Broken, Storage, law

VOCAB = 24
HEADED = frozenset((50, 53, 57, 62, 63))
"""Schedules, by their number modulo 64, in which a draft head guesses if sequences speculate."""
WINDOWS = ((0,), (0,), (0,), (0, 5), (0, 8), (0, 3), (7, 0, 4), (6,))
STATES = ((0, STATE), (STATE, 0), (STATE,), (0, 5, STATE), (STATE, 0, STATE))
"""Group layouts with recurrent states; every fourth schedule has one."""

ONCE_BROKEN = {
    "a chunk about to leave the pool took all it extends along into an empty queue": (3061, 9838, 15103),
    "a chunk whose parent left the store was queued before it": (16069, 16639, 17068),
    "what came before a block that left the pool was forgotten": (6106, 7879, 8221, 13207, 19885),
    "what was computed before a step that failed was forgotten": (19498,),
    "what was given up of a preempted sequence was not noted again": (9925, 12571, 25234),
}
"""Seeds that once found a bug, by what the bug was."""
AGAIN = tuple(seed for seeds in ONCE_BROKEN.values() for seed in seeds)


class VirtualClock:
    """A clock that moves when the schedule says so."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def time_ns(self) -> int:
        return int(self.time * 1e9)


class Machine:
    """Step times of a shared machine: steady for a while, then slower or faster."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.step, self.row, self.token = (chance.uniform(0.001, most) for most in (0.01, 0.002, 0.01))
        self.slow = 1.0
        self.steady = 0
        """Steps with prompts beside single tokens since the speed or the worker changed."""

    def alone(self, rows: int) -> float:
        """Return the seconds that so many single-token rows take."""
        return self.slow * (self.step + self.row * rows) if rows else 0.0

    def run(self, plan: Plan) -> float:
        """Return the seconds that a step takes."""
        if self.chance.random() < 0.05:
            self.slow, self.steady = self.chance.choice((0.2, 0.5, 1.0, 2.0, 8.0)), 0
        return self.slow * (self.step + self.row * plan.singles + self.token * (plan.chunked + plan.extra))


class Recorded(PrefillPace):
    """A pace that records the token budget it gave the scheduler."""

    last = float("inf")

    def tokens(self, rows: int, guesses: int = 0) -> float:
        self.last = super().tokens(rows, guesses)
        return self.last


class Guesser:
    """A `Drafter` that knows the answer: its guesses are right up to a random position."""

    def __init__(self, chance: random.Random, tokens: list[int], answer: list[int]) -> None:
        self.chance, self.tokens, self.answer = chance, list(tokens), answer
        self.bytes = 0
        self.asks_model = False

    def extend(self, tokens: Tokens[int]) -> None:
        self.tokens += tokens
        law(self.tokens == self.answer[: len(self.tokens)], "a drafter was told of tokens that the answer lacks")

    def expect(self, tokens: Tokens[int]) -> None:
        """Do nothing: guesses come from the answer anyway."""

    def take_states(self, first: int, states: States, count: int) -> None:
        """Do nothing: it needs no states."""

    def propose(self, width: int) -> list[int]:
        chance, known = self.chance, len(self.tokens)
        right = self.answer[known : known + chance.choice((0, 0, 1, 2, width))]
        wrong = [chance.randrange(-1, VOCAB + 1) for _ in range(chance.choice((0, 0, 0, 1, 3, width)))]
        return right + wrong


class Guessing:
    """A `DraftPolicy` whose sequences may get wide drafts at any time."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.open_now = set[int]()
        self.offered = self.accepted = 0
        self.head: MtpHead | None = None
        """The draft head for some sequences, in schedules that have one."""
        if world.headed is not None:
            assert isinstance(world.engine.inner, WatchedEngine)
            blocks, most = world.headed.choice((5, 40, 200)), world.headed.choice((3, 64))
            engine: Any = FakeHead(world.engine.inner, blocks, most)
            self.head = MtpHead(engine)

    def open(self, request: Request, prompt: Tokens[int]) -> Drafter | None:
        law(request.sampling.extras is None or not request.sampling.extras.mirostat, "guesses beside mirostat")
        kind = self.chance.random()
        if kind < 0.1:
            return None
        oracle = self.world.oracle(request)
        if self.head is not None and self.world.headed is not None and self.world.headed.random() < 0.7:
            guesses = self.head.open(request.salt, prompt)
            law(guesses is not None, "the head failed")
            self.open_now.add(id(twice := CombinedDrafter(SuffixDrafter(prompt), guesses, self.head)))
            return twice
        law([*prompt] == [*request.prompt, *oracle][: len(prompt)], "a drafter begins with other tokens")
        drafter: Drafter
        if kind < 0.4:
            predicted = [token if self.chance.random() < 0.9 else self.chance.randrange(VOCAB) for token in oracle]
            before = len(request.prompt)
            drafter = SuffixDrafter(prompt[:before], predicted if self.chance.random() < 0.7 else ())
            drafter.extend(prompt[before:])
        else:
            drafter = Guesser(self.chance, [*prompt], [*request.prompt, *oracle])
        self.open_now.add(id(drafter))
        return drafter

    def close(self, drafter: Drafter) -> None:
        law(id(drafter) in self.open_now, "a drafter was closed twice")
        self.open_now.remove(id(drafter))
        if isinstance(drafter, CombinedDrafter) and self.head is not None:
            law(not self.head.broken, "the head failed")
            drafter.close()

    def states_from(self, request: Request, length: int) -> int | None:
        return None if self.head is None else self.head.states_from(length)

    def width(self, drafter: Drafter, rows: int) -> int:
        if isinstance(drafter, CombinedDrafter):
            drafter.chances(7)
        law(0 < rows <= self.world.max_rows, "more sequences decode than there are rows")
        return self.chance.choice((0, 1, 3, 3, 7))

    def record(self, drafter: Drafter, offered: int, accepted: int) -> None:
        law(0 <= accepted <= offered > 0, "more guesses were right than were made")
        self.offered += offered
        self.accepted += accepted

    def step_took(self, rows: int, tokens: int, seconds: float) -> None:
        law(0 < rows <= tokens, "a step without rows")


class Rule:
    """A `sequence.Matcher` in place of a grammar: the allowed tokens are a function of the answer so far.

    Often that is one token, now and then without the scheduler knowing; now and then no token is allowed.
    """

    def __init__(self, request: Request) -> None:
        assert request.grammar is not None
        self.key, self.said = request.grammar.text, [*request.generated]
        self.stops = set(request.sampling.stop_token_ids) if request.sampling.min_tokens else set()

    def draw(self, said: list[int]) -> random.Random:
        return random.Random(f"{self.key} {len(said)} {said[-1:]}")

    def allowed(self, said: list[int]) -> list[int] | None:
        """Return the tokens that may come after so much of the answer; None for all."""
        chance = self.draw(said)
        kind = chance.random()
        if kind < 0.2:
            return None
        tokens = [token for token in range(VOCAB) if token not in self.stops]
        return chance.sample(tokens, 1 if kind < 0.8 else 8)

    def mask_after(self, said: list[int]) -> bytes | None:
        allowed = self.allowed(said)
        return None if allowed is None else sum(1 << token for token in allowed).to_bytes(4, "little")

    def over_after(self, said: list[int]) -> bool:
        return len(said) > 0 and self.draw([*said, 0]).random() < 0.03

    @property
    def over(self) -> bool:
        return self.over_after(self.said)

    def mask(self) -> Ready[bytes] | None:
        mask = self.mask_after(self.said)
        return None if mask is None else Ready(mask)

    def accepts(self, draft: Tokens[int]) -> int:
        said = list(self.said)
        for count, token in enumerate(draft):
            allowed = self.allowed(said)
            if allowed is not None and token not in allowed:
                return count
            said.append(token)
        return len(draft)

    def masks(self, draft: Tokens[int]) -> tuple[Ready[bytes] | None, ...]:
        law(self.accepts(draft) == len(draft), "masks behind a guess that is not allowed")
        said = [[*self.said, *draft[:count]] for count in range(len(draft) + 1)]
        return tuple(None if mask is None else Ready(mask) for mask in map(self.mask_after, said))

    def consume(self, token: int) -> None:
        self.said.append(token)

    def forced(self) -> int | None:
        allowed = self.allowed(self.said)
        known = self.draw([*self.said, 1]).random() < 0.9
        return allowed[0] if allowed is not None and len(allowed) == 1 and known else None

    def likely(self) -> list[int]:
        return self.allowed(self.said) or []


class FaultyEngine:
    """The fake engine, with calls that raise and rows that fail, whose KV is then garbage."""

    def __init__(self, inner: FakeEngine, chance: random.Random) -> None:
        self.inner = inner
        self.chance = chance
        self.raising = 0.0
        self.failing = 0.0
        self.failed_rows: set[int] = set()
        """Failed rows of the last step."""

    def run(self, plan: Plan) -> list[RowResult] | Exception:
        self.failed_rows = set()
        if plan.rows and self.chance.random() < self.raising:
            for row in plan.rows:
                self._garble(row)
            self.inner._sampled = []
            return RuntimeError("injected")
        results = plan.run(self.inner)
        if isinstance(results, Exception):
            raise Broken(f"the engine refused a row: {results}") from results
        for index, row in enumerate(plan.rows):
            if self.chance.random() < self.failing:
                self._garble(row)
                self.failed_rows.add(index)
                results[index] = RowResult(error="injected")
        return results

    def _garble(self, row: Row) -> None:
        size = self.inner.info.block_tokens
        for kv, table in zip(self.inner._kv, row.tables, strict=True):
            for position in range(row.start, row.end):
                if table[position // size] != NO_BLOCK:
                    kv[table[position // size], position % size % kv.shape[1]] = self.chance.getrandbits(64)


@dataclass
class Flight:
    """A step given to the engine, and its results once it has run."""

    plan: Plan
    planned_at: float
    results: list[RowResult] | Exception | None = None
    failed: set[int] = field(default_factory=set)
    """Rows with an injected failure."""
    given: Plan | None = None
    """The scheduler's own plan, if `plan` is a copy."""

    def run(self, engine: FaultyEngine) -> list[RowResult] | Exception:
        if self.results is None:
            self.results, self.failed = engine.run(self.plan), engine.failed_rows
        return self.results

    def filled(self) -> Flight:
        """Return a copy with block tables as filled when the step was given to the engine."""
        rows = [
            msgspec.structs.replace(row, tables=tuple(list(table) for table in row.tables)) for row in self.plan.rows
        ]
        return dataclasses.replace(self, plan=msgspec.structs.replace(self.plan, rows=rows), given=self.plan)


@dataclass
class Client:
    """What the receiver of one request knows and expects."""

    request: Request
    order: int
    arrival: float
    expected: list[int]
    reason: FinishReason
    scores: tuple[TokenLogprob, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the whole answer, if they are wanted."""
    got: list[int] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    reports: int = 0
    start: int | None = None
    mu: float | None = None
    known: int = 0
    """Number of its tokens when it first ran."""
    overtaken: int = 0
    awaited: int = 0
    turn: int = 0
    """Its place in the order of first runs, from 1; 0 before it runs."""

    @property
    def deadline(self) -> float:
        return self.arrival + self.request.timeout if self.request.timeout is not None else float("inf")

    @property
    def share(self) -> str:
        return self.request.share

    @property
    def rank(self) -> tuple[float, int]:
        """Its place among its tenant's requests that never ran."""
        return self.arrival - AGE_SECONDS * self.request.priority, self.order


class World:
    """One schedule: the world, its clients and the laws."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.tiered = seed % 3 == 1
        """Whether KV is stored below the pools, in chunks so small that a context has several."""
        self.calm = seed % 6 == 0
        """Whether there are no faults and room for everything: then the prefix must be computed once."""
        self.clock = VirtualClock()
        self.size = chance.choice((2, 3, 4, 4))
        self.windows = chance.choice(WINDOWS)
        self.context = chance.randint(16, 48)
        if self.tiered:
            self.size, self.context = chance.choice((1, 2, 2, 3)), chance.randint(24, 72)
        self.spacing = SPACING
        if seed % 8 in (1, 3):
            states = random.Random(seed + (1 << 43))
            self.windows, self.size = states.choice(STATES), states.choice((1, 1, 2, 3))
            self.spacing = CHUNK_BLOCKS * states.choice((1, 2, 1000))
            self.context = states.randint(24, 96)
        self.scarce = random.Random(seed + (1 << 48)) if seed % 27 == 16 else None
        """Random source of a pool too small for its requests, over a store that keeps everything.

        The scheduler is not told that those requests' contexts go on: what leaves the pool is given up, and comes back
        from the store.
        """
        if self.scarce is not None:
            self.windows, self.spacing = (0,), SPACING
        self.talkative = not self.calm and chance.random() < 0.5
        """Short prompts, long answers and small pools, which cause preemption."""
        full = 400 if self.calm else chance.choice((chance.randint(3, 8), chance.randint(8, 24), 60))
        full = chance.randint(6, 14) if self.talkative else full
        full = full if self.scarce is None else self.scarce.randint(4, 12)
        self.groups = fake_spec(windows=self.windows).groups
        spans = [window_blocks(group, self.size) for group in self.groups]
        self.blocks = tuple(
            400 if self.calm else chance.randint(max(2, span - 1), span * 3 + 4) if span else full for span in spans
        )
        limited = [b * self.size for b, span in zip(self.blocks, spans, strict=True) if not span or b < span]
        self.longest = min([self.context, *limited])
        running = chance.randint(3 if self.talkative else 1, 8)
        self.limits = Limits(
            max_running=running,
            step_tokens=chance.randint(16, 40) if self.calm else chance.randint(running, 24),
        )
        unequal = random.Random(seed + (1 << 43)) if seed % 4 == 3 else None
        if unequal is not None:
            self.limits = dataclasses.replace(self.limits, weights={unequal.choice("abc"): unequal.choice((0.5, 2, 3))})
        classed, self.slow = random.Random(seed + (1 << 45)) if seed % 16 == 10 else None, 1.0
        if classed is not None:
            priorities = {share: classed.choice((-1, 1, 2)) for share in classed.sample("abc", 2)}
            self.slow = classed.choice((1.0, 5.0, 10.0))
            self.limits = dataclasses.replace(self.limits, priorities=priorities)
        self.machine = Machine(random.Random(seed + (1 << 41))) if seed % 5 in (0, 2) else None
        """A machine with step times, or None if steps take no time."""
        if self.machine is not None:
            seconds, least = self.machine.chance.choice((0.02, 0.1, 0.25)), self.machine.chance.randint(2, 3)
            self.limits = dataclasses.replace(self.limits, step_seconds=seconds, least_tokens=least)
        spec = fake_spec(VOCAB, self.context, self.windows)
        self.model = FakeEngine(spec, blocks=self.blocks, block_tokens=self.size)
        self.crowd = random.Random(seed + (1 << 42))
        """Random source of each request's tenant: all of one, or of several with one that asks for much."""
        self.tenants = self.crowd.choice(("a", "aaab", "aab", "abc", "aaaabcde"))
        self.ruled = random.Random(seed + (1 << 44)) if seed % 19 == 17 else None
        """Random source of the rules on answers, in schedules that have some."""
        speculates = seed % 16 in (2, 5, 9, 14, 15) or self.ruled is not None
        self.guessing = random.Random(seed + (1 << 46)) if speculates else None
        """Random source of guesses, in schedules that speculate."""
        self.headed = random.Random(seed + (1 << 48)) if speculates and seed % 64 in HEADED else None
        """Random source of the draft head's guesses, in schedules that have one."""
        self.overlaps = random.Random(seed + (1 << 47)) if seed % 16 in (0, 4, 7, 9, 11) else None
        """Random source of when a step planned ahead runs, if the engine takes such steps."""
        self.ahead: Flight | None = None
        self.planned_ahead = 0
        self.offered = self.accepted = 0
        """Guesses that dead workers checked, and those of them that were right."""
        self.forced = 0
        """Tokens of answers that needed no step of their own."""
        self.truth: dict[tuple[object, ...], list[int]] = {}
        self.parents: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self.salts: dict[bytes, bytes] = {}
        self.live: dict[int, Client] = {}
        self.computed_once: Counter[tuple[bytes, tuple[int, ...]]] = Counter()
        self.steps = self.finished = 0
        self.ended: list[tuple[bytes, list[int]]] = []
        """Salts and tokens of contexts that ended since the last death of a worker."""
        self.within = 0
        """Sequences whose cached prefix ended within a block."""
        self.orders = self.turns = 0
        self.ring: list[str] = []
        """Tenants with a waiting request that never ran, in the order of their turns."""
        self.had: dict[str, int] = {}
        """Turns of its current round that each waiting tenant has had."""
        self.class_served: dict[int, float] = {}
        """When a tenant of each class last began a request."""
        self.passes: dict[str, Counter[str]] = {}
        """For each waiting tenant, how many requests of each other tenant began since its last turn."""
        self.shared_turns = 0
        """Requests that began while another tenant waited."""
        self.waits = 0
        self.plans = 0
        """Plans that started waiting requests."""
        self.beside = 0
        """How often a request was overtaken beside a long prompt."""
        self.decodes = 0
        """Rows of the last step that computed their next token."""
        self.slowed = 0
        """Steps limited by time, not by tokens."""
        self.deaths = 0 if self.calm else chance.choice((0, 0, 0, 1, 2))
        self.cancels = 0.0 if self.calm else chance.choice((0.0, 0.05, 0.2))
        if self.ruled is not None and not self.calm:
            self.deaths += self.ruled.choice((1, 3))
        self.storage: Storage | None = None
        self.start_worker(self.limits)
        if self.tiered:
            self.storage = Storage(self, random.Random(seed + (1 << 40)), sure=seed % 9 == 4 or self.scarce is not None)
            self.deaths = chance.choice((0, 2, 5, 8))
        if not self.calm:
            self.engine.raising = chance.choice((0.0, 0.0, 0.02, 0.1))
            self.engine.failing = chance.choice((0.0, 0.0, 0.02))
        if self.scarce is not None:
            self.engine.raising = self.scarce.choice((0.0, 0.1))
        self.bases = bases = [
            [chance.randrange(VOCAB) for _ in range(self.context)] for _ in range(chance.randint(1, 3))
        ]
        self.arrivals = sorted(
            ((self.arrival_time(), self.request(bases, number)) for number in range(1, chance.randint(3, 12))),
            key=lambda pair: pair[0],
        )

    # ------------------------------------------------------------------------------------------------- the script

    def arrival_time(self) -> float:
        spread = (0.0, 0.0, 2.0) if self.talkative else (0.0, 0.0, 5.0, 30.0)
        spread = (2.0, 10.0, 30.0) if self.tiered else spread
        return self.clock.now() + self.chance.uniform(0, self.chance.choice(spread))

    def request(self, bases: list[list[int]], number: int) -> Request:
        """Return a new request, which often shares a prefix with others."""
        chance = self.chance
        longest = self.context + 2 if chance.random() < 0.05 else max(1, min(self.context, self.longest) - 1)
        base = chance.choice(bases)
        shared = base[: chance.choice((chance.randint(0, longest), longest * 3 // 4, longest // 2))]
        tail = [chance.randrange(VOCAB) for _ in range(chance.choice((0, 0, 1, 3, chance.randint(0, 12))))]
        prompt = tuple((shared + tail)[:longest]) or (chance.randrange(VOCAB),)
        scoring = not self.calm and chance.random() < 0.1
        most = chance.choice((0, 1, chance.randint(1, 6), chance.randint(1, 20)))
        if self.tiered and chance.random() < 0.6:
            prompt = tuple(base[: max(1, longest - chance.choice((0, 1, 5)))])
            if self.talkative:
                prompt, most = prompt[: chance.randint(1, longest * 2 // 3 + 1)], chance.randint(8, 30)
        elif self.talkative:
            prompt, most = prompt[: chance.randint(1, 10)], chance.randint(8, 30)
        sampling = SamplingParams(
            max_tokens=most,
            temperature=chance.choice((0.0, 0.0, 1.0)),
            repetition_penalty=chance.choice((1.0, 1.0, 1.0, 1.5)),
            seed=chance.randrange(4),
            logprobs=chance.random() < 0.1,
            prompt_logprobs=scoring,
            stop_token_ids=tuple(chance.sample(range(VOCAB), chance.choice((0, 0, 1, 3)))),
            min_tokens=chance.choice((0, 0, 0, chance.randint(0, 4))),
        )
        choice = chance.choice((0, 0, 1, 2))
        if self.ruled is not None and self.ruled.random() < 0.6:
            extras = SamplingExtras(mirostat=self.ruled.choice((1, 2)), mirostat_tau=1.0, mirostat_eta=1.0)
            sampling = msgspec.structs.replace(sampling, extras=extras, temperature=1.0)
        grammar = None
        if self.ruled is not None and self.ruled.random() < 0.8:
            grammar = Grammar(text=str(self.ruled.randrange(3)))
        plain = Request(id=number, prompt=prompt, sampling=sampling, choice=choice, grammar=grammar)
        generated: tuple[int, ...] = ()
        if most and not scoring and sampling.extras is None and len(prompt) < self.longest and chance.random() < 0.15:
            known = self.oracle(plain)
            generated = tuple(known[: chance.randint(0, len(known))])
        return Request(
            id=number * 1_000_003,
            prompt=prompt,
            sampling=sampling,
            generated=generated,
            choice=choice,
            grammar=grammar,
            salt=chance.choice((b"", b"", b"", b"tenant")),
            share=self.crowd.choice(self.tenants),
            timeout=None if self.calm or chance.random() < 0.8 else chance.uniform(0.5, 20),
            priority=chance.choice((0, 0, 0, -1, 1, 3)) * self.crowd.choice((1, 1, 30)),
            durable=self.tiered and chance.random() < (0.7 if self.scarce is None else 0.2),
        )

    def oracle(self, request: Request) -> list[int]:
        """Return the whole answer, part of which the client may already have."""
        prompt, sampling, choice = request.prompt, request.sampling, request.choice
        key = (prompt, sampling, choice, request.grammar)
        if key not in self.truth:
            most = min(sampling.max_tokens, self.longest - len(prompt))
            if not request.grammar:
                self.truth[key] = self.model.oracle(prompt, sampling, most, choice)
                return self.truth[key]
            rule = Rule(request)
            answer = self.model.oracle(prompt, sampling, most, choice, lambda said: rule.mask_after(list(said)))
            over = (end for end in range(1, len(answer)) if rule.over_after(answer[:end]))
            self.truth[key] = answer[: next(over, len(answer))]
        return self.truth[key]

    def start_worker(self, limits: Limits) -> None:
        """Create a scheduler, a cache and a pool full of garbage, as after a start or a death of the worker."""
        spec = fake_spec(VOCAB, self.context, self.windows)
        kind = FakeEngine if self.headed is None else WatchedEngine
        inner = kind(spec, blocks=self.blocks, block_tokens=self.size)
        faults = (self.engine.raising, self.engine.failing) if hasattr(self, "engine") else (0.0, 0.0)
        self.engine = FaultyEngine(inner, self.chance)
        self.engine.raising, self.engine.failing = faults
        self.cache = Cache(inner.info, self.spacing)
        self.open_cache, self.cache.open = self.cache.open, self.open  # type: ignore[method-assign]
        if hasattr(self, "policy") and self.policy is not None:
            self.offered += self.policy.offered
            self.accepted += self.policy.accepted
        self.policy = None if self.guessing is None else Guessing(self, self.guessing)
        self.scheduler = Scheduler(self.cache, limits, self.clock, self.policy)
        self.pace = self.scheduler._pace = Recorded(limits.step_seconds, limits.least_tokens)
        if self.machine is not None:
            self.machine.steady = 0
        if self.storage is not None:
            self.storage.start()
        self.max_rows = min(limits.max_running, limits.step_tokens)
        self.ring, self.passes, self.turns, self.had, self.class_served = [], {}, 0, {}, {}

    def open(self, context: SequenceKV, tokens: list[int], match: Match | None = None, **how: Any) -> int | None:
        """Wrap `Cache.open`: it must find the longest cached prefix, to the token, and no more."""
        hit = (self.cache.found(context, tokens, False) if match is None else match.covered) // self.size
        rest = tokens[hit * self.size : min((hit + 1) * self.size, len(tokens) - 1)]
        agreed = len(rest) * (how.get("reuse", True) and STATE not in self.windows)
        for chain, pool in zip(context.chains, self.cache.pools, strict=True):
            parent = chain.before(hit, tokens)
            after = [part for before, part in (self.parents[key] for key in pool._index) if before == parent]
            agreed = min(agreed, max((common(part, rest) for part in after), default=0))
        covered = self.open_cache(context, tokens, match, **how)
        if covered is not None and how.get("reuse", True):
            law(covered in (hit * self.size, hit * self.size + agreed), "more is covered than a block agrees in")
            law(not self.calm or covered == hit * self.size + agreed, "tokens are computed that a block has")
            self.within += covered > hit * self.size
        return covered

    # ------------------------------------------------------------------------------------------------- actions

    def add(self, request: Request) -> None:
        chance = self.chance
        needed = len(request.prompt) + (request.sampling.max_tokens > 0)
        try:
            self.scheduler.add(request, Rule(request) if request.grammar else None)
        except ContextTooLong:
            law(needed > self.context, "a prompt that fits the context was refused")
        except InvalidRequest:
            law(needed > self.longest, "a prompt that fits the pool was refused")
        else:
            law(needed <= self.longest, "a prompt that can never fit was taken")
            expected = self.oracle(request)
            sampling = request.sampling
            stopped = len(expected) > sampling.min_tokens and expected[-1] in sampling.stop_token_ids
            stopped |= bool(request.grammar) and Rule(request).over_after(expected)
            scores: tuple[TokenLogprob, ...] = ()
            if sampling.prompt_logprobs:
                row = Row(request.prompt, 0, len(request.prompt), (), 0, len(request.prompt), sampling, 0)
                scores = sample([row], self.model.oracle_logits(request.prompt))[0].prompt_logprobs
            logprobs = self.logprobs(request, expected) if sampling.logprobs else ()
            self.orders += 1
            self.live[request.id] = Client(
                request,
                self.orders,
                self.clock.now(),
                expected,
                FinishReason.STOP if stopped else FinishReason.LENGTH,
                scores,
                logprobs,
                got=list(request.generated),
                mu=request.mu,
            )
            law(request.id in self.scheduler._sequences, "an accepted request is not there")
            if request.share not in self.ring:
                self.ring.append(request.share)
            if chance.random() < 0.02:
                self.drop(request.id)

    def logprobs(self, request: Request, answer: list[int]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of an answer's tokens, as those of a prompt that ends with it."""
        tokens = [*request.prompt, *answer]
        row = Row(tokens, 0, len(tokens), (), 0, len(tokens), SamplingParams(max_tokens=0, prompt_logprobs=True), 0)
        found = sample([row], self.model.oracle_logits(tokens))[0].prompt_logprobs
        return found[len(request.prompt) - 1 :]

    def drop(self, id: int) -> None:
        """End a request from the front: a cancel, a disconnect or a stop string."""
        reason = self.chance.choice((FinishReason.CANCELLED, FinishReason.STOP))
        output = self.scheduler.drop(id, reason)
        law(output is not None and output.id == id and output.finish is reason, "drop did not end the request")
        law(output is not None and not output.tokens and output.timing is not None, "drop sent tokens or no timing")
        self.ended.append((self.live[id].request.salt, [*self.live[id].request.prompt, *self.live[id].got]))
        del self.live[id]
        self.leave_ring()
        law(self.scheduler.drop(id, reason) is None, "a request was dropped twice")

    def die(self) -> None:
        """Let the worker die; in the next one every request goes on after the tokens that were sent."""
        clients = sorted(self.live.values(), key=lambda client: client.order)
        if self.storage is not None and (self.storage.chance.random() < 0.5 or self.scarce is not None):
            self.storage.end()
        self.live.clear()
        self.ended.clear()
        self.ahead = None
        self.start_worker(self.limits)
        for client in clients:
            left = None if client.request.timeout is None else max(0.001, client.deadline - self.clock.now())
            old = client.request
            again = Request(
                id=old.id,
                prompt=old.prompt,
                sampling=old.sampling,
                generated=tuple(client.got),
                choice=old.choice,
                grammar=old.grammar,
                mu=client.mu,
                salt=old.salt,
                share=old.share,
                timeout=left,
                priority=old.priority,
                durable=old.durable,
            )
            self.add(again)

    # ------------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        chance = self.chance
        calm_from = None
        if self.storage is not None:
            self.storage.warm()
        while True:
            while self.arrivals and self.arrivals[0][0] <= self.clock.now():
                self.add(self.arrivals.pop(0)[1])
            if self.live and chance.random() < self.cancels:
                self.drop(chance.choice(list(self.live)))
            if self.live and self.deaths and chance.random() < (0.2 if self.tiered or self.ruled else 0.05):
                self.deaths -= 1
                self.die()
            if not self.arrivals and calm_from is None:
                calm_from = self.steps
                self.engine.raising = self.engine.failing = self.cancels = 0.0
                if self.storage is not None:
                    self.storage.calm()
                self.deaths = 0
                work = sum(2 * len(c.request.prompt) + 2 * len(c.expected) + 4 for c in self.live.values())
                bound = self.steps + 4 * work + 1  # a step of requests that have gone may be in flight
            if calm_from is not None:
                law(self.steps <= bound, "requests do not finish although faults and arrivals have stopped")
            if not self.step():
                if not self.arrivals:
                    break
                self.clock.time = max(self.clock.time, self.arrivals[0][0])
        self.at_rest()

    def step(self) -> bool:
        """Plan, run and commit, checking the laws in between; return False if there was nothing to do."""
        if self.ahead is not None:
            flight, self.ahead = self.ahead, None
            return self.land(flight)
        before = {sequence.request.id: sequence.state for sequence in self.scheduler._sequences.values()}
        preemptions = self.scheduler.stats().preemptions
        planned_at = self.clock.now()
        self.leave_ring()  # late requests end before any begins
        line = self.line()
        plan = self.scheduler.plan()
        if plan is None:
            loading = self.storage is not None and self.storage.tiers.loading
            law(loading or (self.scheduler.idle and not self.live), "nothing was planned although requests are there")
            if self.storage is not None:
                self.waits += 1
                law(self.waits < 5000, "requests wait for a load for ever")
                self.clock.time += 0.05
                self.storage.turn(True)
                self.audit()
            return not self.scheduler.idle
        ended = {output.id for output in plan.ended}
        self.after_plan(plan, before, ended, line, preempted=self.scheduler.stats().preemptions > preemptions)
        return self.land(Flight(plan, planned_at))

    def follow(self, flight: Flight) -> None:
        """Plan the next step while one runs, if the engine takes steps ahead."""
        if self.overlaps is None or (plan := self.scheduler.follow(flight.plan)) is None:
            return
        law(not plan.ended and not plan.copies and not plan.chunked, "more than single tokens was planned ahead")
        law(len({sequence.request.id for sequence in plan.sequences}) == len(plan.rows) > 0, "two rows of one sequence")
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            law(row.pending is not None and flight.plan.sequences[row.pending] is sequence, "another row's token")
            law(row.start == len(sequence.tokens) and row.end == row.start + 1, "a row of another token than the next")
        self.planned_ahead += 1
        flight.run(self.engine)
        self.ahead = Flight(plan, self.clock.now()).filled()
        if self.overlaps.random() < 0.5:
            self.ahead.run(self.engine)

    def land(self, flight: Flight) -> bool:
        """Run a step, unless it already ran, and commit it; the next one may be planned meanwhile."""
        plan, planned_at = flight.plan, flight.planned_at
        self.steps += 1
        ended = {output.id for output in plan.ended}
        self.follow(flight)
        victims = {id for id in self.live if id not in ended and self.chance.random() < self.cancels / 4}
        results = flight.run(self.engine)
        for id in victims:
            self.drop(id)
        passed = self.chance.choice((0.01, 0.1, self.chance.uniform(0, 0.3 if self.tiered else 1)))
        passed, seconds = passed * self.slow, 0.0
        if self.machine is not None:
            passed = seconds = self.machine.run(plan)
            self.in_time(plan, self.machine, seconds, results)
        self.clock.time += passed
        outputs = self.scheduler.commit(flight.given or plan, results, seconds)
        self.receive(flight, outputs, planned_at)
        if self.storage is not None:
            self.storage.tiers.load_policy.computed(sum(row.end - row.start for row in plan.rows), 0.1)
            self.storage.turn(self.storage.chance.random() < 0.5)
        self.audit()
        return True

    def in_time(self, plan: Plan, machine: Machine, seconds: float, results: list[RowResult] | Exception) -> None:
        """Check that prompts beside single-token rows keep within the time limit, once the machine's speed is known."""
        if not plan.chunked or not self.decodes:
            return
        alone, limits = machine.alone(plan.singles), self.limits
        token = machine.slow * machine.token
        most = max(limits.step_seconds, 2.5 * alone, alone + plan.extra * token) + limits.least_tokens * token
        law(machine.steady < 1 or seconds <= most + 1e-9, "a stream waits too long for its next token")
        machine.steady += not isinstance(results, Exception)

    def waiting(self, *, new: bool = False) -> list[Client]:
        """Return the waiting requests that are not late; with `new`, only those that never ran."""
        sequences, now = self.scheduler._sequences, self.clock.now()
        waits = [self.live[id] for id, one in sequences.items() if one.state is State.WAITING and id in self.live]
        return [client for client in waits if client.deadline > now and not (new and client.turn)]

    def leave_ring(self) -> None:
        """Remove tenants from the round robin that have no waiting request which never ran."""
        left = {client.share for client in self.waiting(new=True)}
        self.ring = [share for share in self.ring if share in left]
        self.passes = {share: passes for share, passes in self.passes.items() if share in left}
        self.had = {share: had for share, had in self.had.items() if share in left}

    def turns_of(self, share: str) -> int:
        """Return how many turns a tenant has in a round."""
        weights = self.limits.weights
        return round(weights.get(share, 1) / min(1, *weights.values())) if weights else 1

    def line(self) -> list[Client]:
        """Return the waiting requests in the order of their turns.

        First those that ran before. Then, class by class, one request of each tenant, a second of each, and so on, or
        as many at a time as a tenant's weight says. Within a tenant, priority and age decide.
        """
        waits = self.waiting()
        line = sorted((client for client in waits if client.turn), key=lambda client: client.turn)
        own = {
            share: sorted((c for c in waits if not c.turn and c.share == share), key=lambda client: client.rank)
            for share in self.ring
        }
        stands = {number: self.stands(number, own) for number in {self.class_of(share) for share in self.ring}}
        for level in sorted(set(stands.values())):
            here = [share for share in self.ring if stands[self.class_of(share)] == level]
            for around in range(len(waits)):
                for share in here:
                    turns, had = self.turns_of(share), self.had.get(share, 0)
                    line += own[share][max(0, around * turns - had) : (around + 1) * turns - had]
        return line

    def class_of(self, share: str) -> int:
        """Return a tenant's class; lower is sooner."""
        return self.limits.priorities.get(share, 0)

    def stands(self, number: int, own: dict[str, list[Client]]) -> int:
        """Return the current rank of a class.

        It moves one rank to the front for each `AGE_SECONDS` in which none of its waiting requests was served.
        """
        came = min(line[0].arrival for share, line in own.items() if self.class_of(share) == number)
        waited = self.clock.now() - max(came, self.class_served.get(number, came))
        return max(min((0, *self.limits.priorities.values())), number - int(waited / AGE_SECONDS))

    def took_turns(self, plan: Plan, barred: set[str]) -> None:
        """Check that every other waiting tenant that is not `barred` has a turn between two of one tenant.

        With a weight a tenant has as many turns in a row, and no more.
        """
        for id in plan.started:
            client = self.live[id]
            self.turns += 1
            client.turn = self.turns
            share = client.share
            self.passes.pop(share, None)
            self.class_served[self.class_of(share)] = self.clock.now()
            waits = {other.share for other in self.waiting(new=True)} - barred - {share}
            waits = {other for other in waits if self.class_of(other) == self.class_of(share)}
            self.shared_turns += bool(waits)
            for other in waits:
                passes = self.passes.setdefault(other, Counter())
                passes[share] += 1
                law(passes[share] <= self.turns_of(share), "a tenant had two turns while another waited")
            self.had[share] = self.had.get(share, 0) + 1
            if self.had[share] >= self.turns_of(share):
                self.had[share] = 0
                self.ring.remove(share)
                self.ring.append(share)
        self.leave_ring()

    def after_plan(
        self, plan: Plan, before: dict[int, State], ended: set[int], line: list[Client], *, preempted: bool
    ) -> None:
        """Check the laws of one plan: budget, decode first, nobody starves, nothing is computed twice."""
        law(bool(plan.rows) or bool(plan.ended), "an empty plan")
        used = sum(row.end - row.start for row in plan.rows)
        law(len(plan.rows) <= self.max_rows, "more rows than max_running")
        law(used <= self.limits.step_tokens, "more tokens than step_tokens")
        law(len({id(row.tokens) for row in plan.rows}) == len(plan.rows), "a sequence has two rows in a step")
        rows = {sequence.request.id: row for sequence, row in zip(plan.sequences, plan.rows, strict=True)}
        self.decodes, prompts = self.parts(plan, before)
        taken = sum(row.end - row.start for _, row in prompts)
        law(self.pace.last == float("inf") or self.decodes > 0 or preempted, "time is short where nobody waits")
        law(self.pace.last >= self.limits.least_tokens, "a slow machine reads no prompt")
        again = sum(sequence.again for sequence in plan.sequences)
        law(plan.extra == sum(row.draft for row in plan.rows) + again, "guesses are miscounted")
        law(not again or STATE in self.windows, "tokens are computed again although there is no state")
        law(all(not row.draft or row.end - row.start == row.draft + 1 for row in plan.rows), "guesses behind a prompt")
        law(taken <= self.pace.last, "more of prompts than there is time for")
        full = used >= self.limits.step_tokens or taken >= self.pace.last
        self.slowed += full and used < self.limits.step_tokens
        running = [s for s in self.scheduler._sequences.values() if s.state is State.RUNNING]
        law(len(running) <= self.max_rows, "more requests run than rows fit")
        for sequence in running:
            left = sequence.target - sequence.computed
            if left == 1 + sequence.again or not full:
                law(sequence.request.id in rows, "a running sequence was left out of the step")
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            law(sequence.state is State.RUNNING and row.start == sequence.computed, "a row of something else")
            law(row.choice == sequence.request.choice and row.sampling == sequence.request.sampling, "other options")
            client = self.live[sequence.request.id]
            if client.start is None:
                client.start, client.known = row.start, len(row.tokens)
            if self.calm:
                self.count_blocks(sequence, row)
        law({c.request.id for c in self.live.values() if c.deadline <= self.clock.now()} <= ended, "a deadline passed")
        law(all(self.cache.use()[g].held <= n for g, n in enumerate(self.blocks)), "more held than there is")
        law(not preempted or self.storage is None or not self.storage.tiers.loading, "preempted to keep a load")
        barred = self.fairness(plan, before, line, preempted=preempted, running=len(running), full=full)
        self.took_turns(plan, barred)
        self.victims(before)

    def victims(self, before: dict[int, State]) -> None:
        """Check that preempted sequences started later than all that still run."""
        sequences = self.scheduler._sequences
        was = {id: sequences[id].state for id, state in before.items() if state is State.RUNNING and id in sequences}
        gone = [self.live[id].turn for id, state in was.items() if state is State.WAITING]
        kept = [self.live[id].turn for id, state in was.items() if state is State.RUNNING]
        law(not gone or not kept or max(kept) < min(gone), "the wrong sequence was preempted")

    def fairness(
        self, plan: Plan, before: dict[int, State], line: list[Client], *, preempted: bool, running: int, full: bool
    ) -> set[str]:
        """Check that no request is overtaken by one behind it in `line`.

        Returns the tenants that have a request which may be overtaken. Exceptions: while waiting for a prefix, which is
        bounded; and a long prompt, which gets half of the step, may be overtaken by short ones that fit in the other
        half. A request behind one of its tenant's that is passed and has a higher priority is passed too.
        """
        sequences = self.scheduler._sequences
        self.plans += not preempted
        places = {client.request.id: place for place, client in enumerate(line)}
        waits = [self.live[id] for id, s in sequences.items() if s.state is State.WAITING]
        known = [client for client in waits if client.request.id in places]
        preempted_now = sorted((client for client in waits if client.request.id not in places), key=lambda c: c.turn)
        waiting = preempted_now + sorted(known, key=lambda client: places[client.request.id])
        admitted = [
            self.live[id] for id, s in sequences.items() if s.state is State.RUNNING and before[id] is State.WAITING
        ]
        passed: dict[str, int] = {}
        barred: set[str] = set()
        kept = 0
        """Blocks reserved for the first request that is passed."""
        short = not admitted
        """Whether the next request that may not be passed is the first such."""
        half, long = self.half(plan, before)
        rows = {sequence.request.id: row for sequence, row in zip(plan.sequences, plan.rows, strict=True)}
        room = not preempted and running < self.max_rows
        for place, client in enumerate(waiting):
            own = places.get(client.request.id, -1)
            past = [rows.get(other.request.id) for other in admitted if places[other.request.id] > own]
            awaiting, missing = self.awaits(sequences[client.request.id]), self.missing(sequences[client.request.id])
            is_long = missing > half
            outranked = passed.get(client.share, -1000) > client.request.priority
            whole = all(row is None or row.end - row.start <= half for row in past)
            beside = long and (is_long or outranked) and whole
            if awaiting or is_long or outranked:
                barred.add(client.share)
                passed[client.share] = max(passed.get(client.share, -1000), client.request.priority)
            law(awaiting or beside or not past, "a waiting request was overtaken")
            self.beside += beside and bool(past)
            client.overtaken += bool(past) and not beside
            client.awaited = client.awaited + 1 if awaiting else 0
            law(client.overtaken <= 12 * 48, "a request was overtaken too often")
            if awaiting or is_long or outranked:
                kept = kept or self.need(client)
            elif short and long and room and running + (place > 0) < self.max_rows and not self.shared(plan):
                late = missing > half - self.finishing(plan, before)
                law(late or not self.fits(client, running, kept), "a short prompt waits for a long one")
                short = False
            else:
                short = False
        head = next((c for c in waiting if not self.awaits(sequences[c.request.id])), None)
        if head is not None and room and not full:
            law(not self.fits(head, running), "a request waits although there is room")
        return barred

    def fits(self, client: Client, running: int, kept: int = 0) -> bool:
        """Return whether the pools have room for a whole request.

        Of a window or a state, for what one position needs.
        """
        need, spans = self.need(client), (window_blocks(group, self.size) for group in self.groups)
        wanted = (min(need, span) + min(kept, span) if span else need + kept for span in spans)
        return all(pool.available >= count + running for pool, count in zip(self.cache.pools, wanted, strict=True))

    def need(self, client: Client) -> int:
        """Return the blocks that the whole request needs."""
        return -(-len(self.scheduler._sequences[client.request.id].tokens) // self.size)

    def missing(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting request's prompt the pools lack."""
        reuse = sequence.scored >= sequence.to_score
        return sequence.target - (self.cache.found(sequence.kv, sequence.tokens, False) if reuse else 0)

    def parts(self, plan: Plan, before: dict[int, State]) -> tuple[int, list[tuple[Sequence, Row]]]:
        """Return the number of rows that decode their next token, and the rows of prompts."""
        rows = [
            (sequence, row, before.get(sequence.request.id) is State.RUNNING)
            for sequence, row in zip(plan.sequences, plan.rows, strict=True)
        ]
        prompts = [(one, row) for one, row, ran in rows if one.target - row.start > 1 + one.again or not ran]
        return len(rows) - len(prompts), prompts

    def shared(self, plan: Plan) -> bool:
        """Return whether a step that is short of time has more than one partial prompt."""
        parts = [one for one, row in zip(plan.sequences, plan.rows, strict=True) if row.end < one.target]
        return self.pace.last < self.limits.step_tokens and len(parts) > 1

    def finishing(self, plan: Plan, before: dict[int, State]) -> int:
        """Count the tokens of prompts that ran before and end in this step.

        The half for short prompts pays for them.
        """
        return sum(
            row.end - row.start
            for one, row in self.parts(plan, before)[1]
            if before.get(one.request.id) is State.RUNNING and row.end == one.target
        )

    def half(self, plan: Plan, before: dict[int, State]) -> tuple[int, bool]:
        """Return half of the step's room for prompts, and whether one prompt was too long for all of it."""
        decodes, prompts = self.parts(plan, before)
        room = self.limits.step_tokens - decodes - plan.extra
        most, taken = int(min(room, self.pace.last)), 0
        for sequence, row in prompts:
            count = row.end - row.start
            if sequence.target - row.start > room:
                wanted = most - most // 2 - taken
                # Blocks that a load held until then were freed too late for it.
                late = self.storage is not None and sequence.kv.table.capacity < row.start + wanted
                blocks = min(pool.available for pool in self.cache.pools)
                enough = count >= wanted or blocks <= -(-room // self.size) or late
                law(enough, "a long prompt got less than half of the step")
                return room // 2, True
            taken += count
        return room // 2, False

    def awaits(self, sequence: Sequence) -> bool:
        match = sequence.kv.claim.match
        return match is not None and isinstance(match.blocked_on, bytes | str)

    def count_blocks(self, sequence: Sequence, row: Row) -> None:
        """Check that, in a calm schedule, no full block that another prompt could have reused is computed twice."""
        request, size = sequence.request, self.size
        for end in range(size, row.end + 1, size):
            if row.start < end <= (len(request.prompt) - 1) // size * size:
                self.computed_once[request.salt, request.prompt[:end]] += 1
                once = self.computed_once[request.salt, request.prompt[:end]]
                law(once == 1, "a prefix that another sequence was computing was computed twice")

    def receive(self, flight: Flight, outputs: list[Output], planned_at: float) -> None:
        """Check the stream law: the oracle's answer arrives once, in order, and nothing after the end."""
        owners = [sequence.request.id for sequence in flight.plan.sequences]
        broken = {id for index, id in enumerate(owners) if index in flight.failed}
        broken |= set(owners) if isinstance(flight.results, Exception) else set()
        law(len({output.id for output in outputs}) == len(outputs), "two outputs of one request in a step")
        for output in outputs:
            client = self.live.get(output.id)
            if client is None:
                raise Broken("output of a request that has ended")
            client.got.extend(output.tokens)
            client.mu = client.mu if output.mu is None else output.mu
            self.forced += max(0, len(output.tokens) - 1) if client.request.grammar else 0
            client.scored.extend(output.prompt_logprobs)
            law(client.got == client.expected[: len(client.got)], "tokens are not the oracle's")
            if client.request.sampling.logprobs:
                law(tuple(lp.token for lp in output.logprobs) == output.tokens, "logprobs of other tokens")
                first = len(client.got) - len(output.tokens)
                law(output.logprobs == client.logprobs[first : len(client.got)], "logprobs are not the oracle's")
            law(tuple(client.scored) == client.scores[: len(client.scored)], "prompt logprobs are not the oracle's")
            if output.cache is not None:
                self.check_report(client, output)
            if output.finish is not None:
                self.check_end(client, output, broken, planned_at)
                self.ended.append((client.request.salt, [*client.request.prompt, *client.got]))
                del self.live[output.id]
                self.finished += 1
            else:
                law(output.id not in broken, "a failed row went on")
                law(bool(output.tokens or output.prompt_logprobs), "an empty output")
                law(len(client.got) < len(client.expected) or not output.tokens, "the last token without an end")
        law(not broken & set(self.live), "a request outlived the failure of its row")

    def check_report(self, client: Client, output: Output) -> None:
        report, prompt = output.cache, len(client.request.prompt)
        law(report is not None and report.computed + report.cached == prompt, "the cache report does not add up")
        law(report is not None and min(report.pool, report.ram, report.disk, report.load) >= 0, "a negative count")
        law(client.reports == 0, "two cache reports")
        client.reports += 1
        if client.start is not None and report is not None:
            law(report.cached == min(client.start, prompt), "the cache report is not what happened")
            request = client.request
            known = client.known
            whole = client.start // self.size >= (known - 1) // self.size
            scoring = bool(client.scores) and not request.generated
            law((report.miss is None) == (whole or scoring), "a miss without a reason, or the other way round")
            law(report.miss is None or report.miss.position == client.start, "the miss is somewhere else")

    def check_end(self, client: Client, output: Output, broken: set[int], planned_at: float) -> None:
        timing = output.timing
        law(
            timing is not None and min(timing.queue, timing.prefill, timing.decode) >= 0, "no timing, or a negative one"
        )
        total = timing.queue + timing.prefill + timing.decode if timing else 0.0
        late = {planned_at, self.clock.now()}
        law(any(abs(client.arrival + total - end) < 1e-6 for end in late), "the timing does not add up")
        if output.finish is FinishReason.ERROR:
            law(output.id in broken and bool(output.error), "an error without an injected fault")
        elif output.finish is FinishReason.DEADLINE:
            law(client.deadline <= planned_at, "ended before its deadline")
        else:
            law(output.id not in broken, "a failed row finished well")
            law(output.finish is client.reason and client.got == client.expected, "ended early or for another reason")
            law(client.reports == 1, "no cache report")
            if client.request.sampling.prompt_logprobs and not client.request.generated:
                law(len(client.scored) == len(client.scores), "prompt logprobs are missing")

    # ------------------------------------------------------------------------------------------------- the state

    def audit(self) -> None:
        """Check the laws of the state after a step, from the tables alone."""
        sequences = self.scheduler._sequences
        law(set(sequences) == set(self.live), "the scheduler holds other requests than there are")
        listed = [*self.scheduler._waiting, *self.scheduler._running]
        law(len(listed) == len(sequences) and {id(s) for s in listed} == {id(s) for s in sequences.values()}, "lists")
        for sequence in self.scheduler._waiting:
            law(sequence.state is State.WAITING and sequence.computed == 0, "a waiting sequence with progress")
            law(sequence.kv.progress.loading or not any(sequence.kv.table.groups), "a waiting sequence holds blocks")
            self.woken(sequence)
        self.loaded_once()
        for sequence in self.scheduler._running:
            law(sequence.state is State.RUNNING, "a running sequence in another state")
            law(sequence.tokens[: sequence.prompt_len] == list(sequence.request.prompt), "the prompt changed")
            blocks = -(-len(sequence.tokens) // self.size)
            law(all(len(table) <= blocks for table in sequence.kv.table.groups), "blocks of guesses were kept")
        running = self.scheduler._running
        contexts = [sequence.kv for sequence in running]
        if self.storage is not None:
            contexts += self.storage.tiers._loads
        for number, pool in enumerate(self.cache.pools):
            named = Counter(block for kv in contexts for block in kv.table.groups[number] if block != NO_BLOCK)
            use = self.cache.use()[number]
            law(use.free + use.cached + use.held == pool.size == self.blocks[number], "blocks do not add up")
            law(use.held == len(named), "held blocks are not those in tables")
            law(all(pool.holders(block) == named[block] for block in range(pool.size)), "wrong count of holders")
            free = set(pool._free)
            law(len(free) == use.free and not free & set(named), "a block is free and in a table, or free twice")
            law(all(pool.published(block) is None for block in free), "a free block has a key")
            law(all(pool.published(b) is not None for b, users in named.items() if users > 1), "a private block shared")
            law(len(pool._index) == sum(pool.published(b) is not None for b in range(pool.size)), "an index of its own")
            self.parts_of(number, pool)
            if self.windows[number] == STATE:
                law(all(len(self.tokens_of(key)) % self.size == 0 for key in pool._index), "a state within a block")
            # Evicting a context on demand may leave another one's blocks beyond their common prefix.
            if not self.windows[number] and not (self.storage is not None and self.storage.evicted):
                law(
                    all(self.parents[key][0] in pool._index or self.first(key) for key in pool._index),
                    "a block that nothing refers to",
                )
        self.window_blocks()
        for sequence in running:
            for pool, table in zip(self.cache.pools, sequence.kv.table.groups, strict=True):
                for published in (pool.published(block) for block in table if block != NO_BLOCK):
                    if published is not None:
                        salt = self.salts.setdefault(published.key, sequence.request.salt)
                        law(salt == sequence.request.salt, "tenants share a block")
        for key, owner in self.cache._computing.items():
            index = len(self.tokens_of(key)) // self.size - 1
            law(owner.table.published[0] <= index, "a published block is still claimed")
        waiting = {sequence.kv for sequence in self.scheduler._waiting}
        waiters = self.cache._waiters
        blocked = {
            kv for kv in waiting if kv.claim.match is not None and isinstance(kv.claim.match.blocked_on, bytes | str)
        }
        law(set(waiters._blocked) == blocked, "the blocked are miscounted")
        law(
            set(waiters._short).union(*waiters._watched.values()) <= waiting,
            "somebody is to be woken who waits for nothing",
        )

    def loaded_once(self) -> None:
        """Check that no token counts as loaded twice."""
        for sequence in self.scheduler._sequences.values():
            apart = itertools.pairwise(sequence.kv.progress.brought)
            law(all(one.end <= two.begin for one, two in apart), "loaded tokens count twice")

    def woken(self, sequence: Sequence) -> None:
        """Check that a waiting sequence would still wait; whatever could change that must have woken it."""
        kv, match = sequence.kv, sequence.kv.claim.match
        blocked_on = match.blocked_on if match is not None else None
        law(not kv.progress.loading or blocked_on == "load", "a sequence does not wait for its own load")
        if match is None:
            return
        if blocked_on == "load":
            law(kv.progress.loading, "a sequence waits for a load that has ended")
        elif isinstance(blocked_on, bytes):
            law(blocked_on in self.cache._computing, "a sequence waits for a block that nobody computes")
            there = blocked_on in self.cache.pools[0]._index  # a window group may need its beginning, which may be gone
            law(not there or any(self.windows), "a sequence waits for something that is there")
        else:
            cached = self.cache.found(kv, sequence.tokens, False) if sequence.scored >= sequence.to_score else 0
            law(cached <= match.covered, "more is cached than a waiting sequence knows")
            long = sequence.target - match.covered > sequence.long_beside or not sequence.long_beside
            law(long, "a short prompt is passed as a long one")
        if isinstance(blocked_on, BlockPool):
            law(blocked_on.available <= self.cache._waiters._short[kv][1], "a sequence does not know of free blocks")

    def parts_of(self, number: int, pool: BlockPool) -> None:
        """Check the index of partial blocks: it lists what is published, in order.

        No part begins another block or is held.
        """
        state = self.windows[number] == STATE
        blocks = {b: published for b in range(pool.size) if (published := pool.published(b)) is not None}
        listed = [block for after in pool._after.values() for _, block in after]
        law(state or sorted(listed) == sorted(blocks), "blocks are found by their first tokens that are not there")
        law(not state or not listed, "a state is found by its first tokens")
        for parent, after in pool._after.items():
            tokens = [blocks[block].tokens for _, block in after]
            law(tokens == [own for own, _ in after], "a block is listed with other tokens than its own")
            law(all(blocks[block].parent == parent for _, block in after), "a block follows another key")
            law(tokens == sorted(set(tokens)), "blocks after a key are not in order")
            begun = any(two[: len(one)] == one for one, two in itertools.pairwise(tokens))
            law(not begun, "a partial block outlives a longer one that begins with it")
        parts = [block for block, published in blocks.items() if len(published.tokens) < self.size]
        law(all(not pool.holders(block) for block in parts), "a partial block is held")

    def first_key(self, key: bytes) -> bytes:
        """Return the key of a chain's first block."""
        while not self.first(key):
            key = self.parents[key][0]
        return key

    def first(self, key: bytes) -> bool:
        """Return whether a key is that of a first block (its parent is a root)."""
        return self.parents[key][0] not in self.parents

    def window_blocks(self) -> None:
        """Check that a window group keeps at most one window, and everything that is still read."""
        for sequence in self.scheduler._running:
            for group, table in zip(self.groups, sequence.kv.table.groups, strict=True):
                first = first_read(group, sequence.computed, self.size)
                ends = -(-sequence.computed // self.size)
                law(NO_BLOCK not in table[first:ends], "a block that is still read was given back")
                boundary = sequence.computed // self.size * self.size
                passed = first_read(group, boundary, self.size)
                law(all(b == NO_BLOCK for b in table[:passed]), "a block that the window has passed is held")

    def at_rest(self) -> None:
        """Check that nothing is left of any request, and that every published block holds what its key says."""
        law(not self.live and self.scheduler.idle, "requests are left")
        law(self.policy is None or not self.policy.open_now, "drafters are left")
        if self.policy is not None and (head := self.policy.head) is not None:
            law(not head.waiting and head.free == head.blocks, "the head keeps blocks or states")
        if self.storage is not None:
            self.storage.at_rest()
        law(not self.cache._computing, "somebody still claims to compute a block")
        stats = self.scheduler.stats()
        law(stats.running == stats.waiting == stats.waiting_tokens == 0, "the statistics see requests")
        law(stats.prefix_hits <= stats.prefix_queries, "more hits than queries")
        if self.policy is not None:
            counts = self.policy.accepted, self.policy.offered - self.policy.accepted
            law(counts == (stats.accepted, stats.rejected), "the statistics miscount guesses")
            self.offered += self.policy.offered
            self.accepted += self.policy.accepted
        for number, pool in enumerate(self.cache.pools):
            law(pool.held == 0, "blocks are held at the end")
            for key, block in pool._index.items():
                tokens = self.tokens_of(key)
                held = pool.published(block).tokens
                digests = self.digests(number, tokens)[-1 if self.windows[number] == STATE else -len(held) :]
                law(tokens[-len(held) :] == held, "a key over other tokens")
                stored = self.engine.inner._kv[number][block].tolist()
                law(stored[: len(digests)] == digests, "a published block does not hold what its key says")

    def tokens_of(self, key: bytes) -> tuple[int, ...]:
        parts: list[tuple[int, ...]] = []
        while key in self.parents:
            key, tokens = self.parents[key]
            parts.insert(0, tokens)
        return sum(parts, ())

    def digests(self, number: int, tokens: tuple[int, ...]) -> list[int]:
        """Return what a group's slots must hold for a prefix, by the fake engine's definition."""
        engine = self.model
        words = np.array(tokens, dtype=np.uint64) + engine._salt[: len(tokens)] + engine._seeds[number]
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words = words ^ (words >> np.uint64(31))
        digest, out = int(engine._seeds[number]), []
        for word in words.tolist():
            digest = (digest * 0xD1342543DE82EF95 + word) % (1 << 64)
            out.append(digest)
        return out


def common(one: tuple[int, ...], other: list[int]) -> int:
    """Return the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def run(seed: int) -> World:
    """Run one schedule; raise `Broken` (or what the code under test raised) with the seed in the message."""
    world = World(seed)
    original: Callable[..., bytes] = prefix.extend

    def recording(parent: bytes, tokens: list[int]) -> bytes:
        key = original(parent, tokens)
        world.parents[key] = (parent, tuple(tokens))
        return key

    prefix.extend = recording
    try:
        world.run()
    except Exception as error:
        raise Broken(f"seed {seed}, step {world.steps}: {type(error).__name__}: {error}") from error
    finally:
        prefix.extend = original
    return world


def run_many(first: int, count: int) -> Counter[str]:
    """Run `count` schedules from seed `first` on; return what they did in total."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        world = run(seed)
        stats = world.scheduler.stats()
        total.update(
            schedules=1,
            steps=world.steps,
            finished=world.finished,
            preemptions=stats.preemptions,
            beside=world.beside,
            shared_turns=world.shared_turns,
            slowed=world.slowed,
            forced=world.forced,
            hits=stats.prefix_hits,
            within=world.within,
            ahead=world.planned_ahead,
            offered=world.offered,
            accepted=world.accepted,
            loaded=world.storage.loaded if world.storage is not None else 0,
            tails=world.storage.tails if world.storage is not None else 0,
            whole=world.storage.whole if world.storage is not None else 0,
        )
    return total


if __name__ == "__main__":
    first, count = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 2000)
    print(dict(run_many(first, count)))
