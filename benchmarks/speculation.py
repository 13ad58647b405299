"""Speed of answers with drafted tokens.  `python benchmarks/speculation.py [--model M] [--kernels K ...]`

Sessions in the shape of public agent traces (`speculation_traces.py`) are replayed on a real engine: it computes and
samples every step as for a client, and then the session's own token replaces the sampled one. So a draft is accepted
where the session continues with it, and costs what it costs. Each answer is replayed without drafts and with them, one
after the other and in changing order. The measured time is from the first token to the last.

For each kind of session: tokens per second both ways and their ratio; steps saved, and the saving that a replay without
an engine predicts from the costs measured meanwhile; the share of steps that offered a draft; and the additional
microseconds of the scheduler per step (medians; the engine has flushed the CPU's caches before).

Goals: 1.35 times as fast over all sessions but chats with AVX-512, 1.7 times where files are rewritten; 1.05 and 1.15
times with AVX2; at most 2 % of the steps of chats offer a draft.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cairn.config.config import Config
from cairn.engine.load_engine import load_engine
from cairn.kernels.choose import chosen
from cairn.kv.pool.cache import Cache
from cairn.models.hub.hub import locate
from cairn.scheduler.drafts.drafter import Drafter
from cairn.scheduler.drafts.policy import MeasuredPolicy
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.step_budget import Limits
from cairn.system.posix import SystemClock
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.request import Request, SamplingParams
from cairn.types.step import Engine, Ready, Row, RowResult
from speculation_traces import KINDS, Part, sessions


class Replaying:
    """An `Engine` that computes everything, and returns a script's tokens in place of the sampled ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.script: Sequence[int] = ()
        """The whole sequence, prompt included."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, rows: Sequence[Row]) -> Ready[list[RowResult]]:
        return Ready(self._replaced(rows, self._engine.prefill(rows).wait()))

    def decode(self, rows: Sequence[Row]) -> Ready[list[RowResult]]:
        return Ready(self._replaced(rows, self._engine.decode(rows).wait()))

    def _replaced(self, rows: Sequence[Row], results: list[RowResult]) -> list[RowResult]:
        found = []
        for row, result in zip(rows, results, strict=True):
            if not row.samples:
                found.append(result)
                continue
            place = row.end - row.draft
            more = tuple(
                msgspec.structs.replace(one, token=self._token(place + number))
                for number, one in enumerate(result.more, 1)
            )
            found.append(msgspec.structs.replace(result, token=self._token(place), more=more))
        return found

    def _token(self, place: int) -> int:
        return self.script[min(place, len(self.script) - 1)]


class Switched(MeasuredPolicy):
    """A draft policy that can be switched off, and counts its drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.offers = 0

    def open(self, request: Request, prompt: Sequence[int]) -> Drafter | None:
        return super().open(request, prompt) if self.on else None

    def width(self, drafter: Drafter, rows: int) -> int:
        width = super().width(drafter, rows)
        self.offers += width > 0
        return width


@dataclass
class Score:
    """Sums over answers, replayed one way."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    planning: list[float] = field(default_factory=list)
    """Seconds of the scheduler alone, by step."""

    def add(self, other: Score) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.planning += other.planning


def replay(engine: Replaying, scheduler: Scheduler, number: int, prompt: Sequence[int], answer: Sequence[int]) -> Score:
    """Generate an answer; return its figures after the first token."""
    engine.script = [*prompt, *answer]
    sampling = SamplingParams(max_tokens=len(answer), temperature=0.0)
    scheduler.add(Request(id=number, prompt=tuple(prompt), sampling=sampling))
    score, began, got = Score(), 0.0, list[int]()
    while not scheduler.idle:
        start = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        planned = time.perf_counter()
        results = plan.run(engine)
        if isinstance(results, Exception):
            raise results
        ran = time.perf_counter()
        outputs = scheduler.commit(plan, results, ran - planned)
        if got:
            score.steps += 1
            score.planning.append(planned - start + time.perf_counter() - ran)
        for output in outputs:
            if output.tokens and not got:
                began = time.perf_counter()
            got += output.tokens
    score.seconds, score.tokens = time.perf_counter() - began, len(answer) - 1
    assert got == list(answer), "an answer differs from its script"
    return score


def expected_steps(measured: MeasuredPolicy, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many steps after the first token a replay without an engine takes, at the costs measured so far."""
    policy = MeasuredPolicy()
    policy._cost = measured._cost
    request = Request(id=0, prompt=tuple(prompt), sampling=SamplingParams(max_tokens=len(answer)))
    drafter = policy.open(request, [*prompt, answer[0]])
    assert drafter is not None
    place, steps = 1, 0
    while place < len(answer):
        guesses = list(drafter.propose(min(policy.width(drafter, 1), len(answer) - place - 1)))
        right = 0
        while right < len(guesses) and guesses[right] == answer[place + right]:
            right += 1
        drafter.extend(answer[place : place + right + 1])
        place, steps = place + right + 1, steps + 1
        policy.record(drafter, len(guesses), right)
    policy.close(drafter)
    return steps


def measure(engine: Replaying, tokenizer: Tokenizer, kinds: Sequence[str], count: int) -> None:
    """Replay sessions of each kind and print their figures."""
    policy = Switched()
    scheduler = Scheduler(Cache(engine.info), Limits(max_running=1), SystemClock(), policy)
    numbers, total = itertools.count(), (Score(), Score())
    for kind in kinds:
        plain, guessing, ratios, expected, offers = Score(), Score(), list[float](), 0, policy.offers
        for parts in sessions(kind, count):
            for prompt, answer in turns(parts, tokenizer, engine.info.context):
                pair = [Score(), Score()]
                for policy.on in (False, True) if len(ratios) % 2 else (True, False):
                    pair[policy.on] = replay(engine, scheduler, next(numbers), prompt, answer)
                plain.add(pair[False])
                guessing.add(pair[True])
                ratios.append(pair[False].seconds / pair[True].seconds)
                expected += expected_steps(policy, prompt, answer)
        if kind != "chat":
            total[False].add(plain)
            total[True].add(guessing)
        columns = (
            kind,
            f"{plain.tokens}",
            f"{plain.tokens / plain.seconds:.0f}",
            f"{guessing.tokens / guessing.seconds:.0f}",
            f"{plain.seconds / guessing.seconds:.2f} (median of answers {statistics.median(ratios):.2f})",
            f"{1 - guessing.steps / plain.steps:.1%}",
            f"{1 - expected / plain.steps:.1%}",
            f"{(policy.offers - offers) / guessing.steps:.1%}",
            f"{1e6 * (statistics.median(guessing.planning) - statistics.median(plain.planning)):.0f}",
        )
        print("| " + " | ".join(columns) + " |", flush=True)
    if total[True].seconds:
        print(f"\nall but chats: {total[False].seconds / total[True].seconds:.2f} times as fast")
    cost = policy._cost
    print("relative cost of a step: " + ", ".join(f"{n} tokens {cost.of(n) / cost.of(1):.2f}" for n in range(2, 9)))


def turns(parts: Sequence[Part], tokenizer: Tokenizer, context: int) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of each piece that the model said, as far as the context has room."""
    pairs, tokens = [], list[int]()
    for part in parts:
        ids = tokenizer.encode(part.text)
        if part.said and len(ids) > 8 and len(tokens) + len(ids) < context:
            pairs.append((list(tokens), ids))
        tokens += ids
    return pairs


def main() -> None:
    """Measure each kind of kernels in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name, a folder or a .gguf file; a context of 4,096")
    parser.add_argument("--kernels", nargs="+", default=["auto", "avx2"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sessions", type=int, default=6, help="sessions of each kind")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    model = locate(options.model)
    tokenizer = Tokenizer.load(model)
    for kernels in options.kernels:
        config = Config(model=str(model), kernels=kernels, threads=options.threads, kv_gb=0.5)
        _, engine = load_engine(config, model)
        print(f"\n{model.name}, {chosen(kernels)}, {options.threads} thread(s)\n")
        print("| kind | tokens | plain tok/s | guessing tok/s | times as fast | steps saved | expected | offers | us |")
        print("|---|---|---|---|---|---|---|---|---|")
        try:
            measure(Replaying(engine), tokenizer, options.kinds, options.sessions)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
