"""Speculation on real kernels: answers and KV with guesses equal those without, bit for bit.

A schedule is a few requests to one tiny model: greedy and sampled, with penalties, grammars, stops and
log-probabilities. First each is answered alone, from nothing and without guesses. Then all are answered together with
guesses, some right and some wrong, from a pool too small for all, over what the cache has; once or twice the worker
dies in the middle. Tokens, log-probabilities and finish reasons must be the same, and so must every block that a key
finds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.kv.pool import prefix
from cairn.kv.pool.cache import Cache
from cairn.models.spec.config import load_spec
from cairn.scheduler.drafts.drafter import Drafter, States
from cairn.scheduler.drafts.mtp_head import MtpHead
from cairn.scheduler.drafts.policy import MeasuredPolicy
from cairn.scheduler.scheduler import Scheduler
from cairn.scheduler.sequence import Matcher
from cairn.scheduler.step_budget import Limits
from cairn.system.posix import SystemClock
from cairn.types.model_spec import CacheGroup
from cairn.types.outputs import FinishReason, Output
from cairn.types.request import Grammar, OutputFormat, Request, SamplingExtras, SamplingParams
from cairn.types.step import Row
from cairn.worker.grammar_matcher import BudgetMatcher, CompiledGrammar, GrammarMatcher, Masks
from tests.laws.storage_world import Broken, law
from tests.mtp_models import write_with_head
from tests.real_models import smollm2
from tests.recurrent_models import RECURRENT
from tests.text.walks import END, byte_vocabulary
from tests.tiny_models import write_model

VOCAB = 257
"""Vocabulary size of `byte_vocabulary`."""
MODELS: dict[str, dict[str, Any]] = {
    "full": {"architecture": "Qwen3ForCausalLM"},
    "windows": {
        **{"architecture": "Gemma3ForCausalLM", "head_dim": 16, "query_pre_attn_scalar": 12, "num_hidden_layers": 3},
        **{"sliding_window": 17, "sliding_window_pattern": 3},
    },
    "states": RECURRENT["qwen 3.5"],
    "states alone": RECURRENT["mamba 2"],
}
AHEAD = {"its own head": "glm 4.5", "its own head, states": "qwen 3.5", "its own head, latents": "glm 4.7 flash"}
"""Models whose own head (MTP) makes the guesses."""
REAL = "smollm2"
"""A real model, without grammars, used if it is installed."""
GRAMMARS = (
    "%llguidance {}\nstart: /(ab|cd|[0-9]x)+/",
    '%llguidance {}\nstart: "[" /[0-9]{1,3}/ ("," /[0-9]{1,3}/)* "]"',
    '%llguidance {}\nstart: /[a-z ]{3,40}/ "."',
)


class Guesser:
    """A `Drafter` that knows the answer: its guesses are right up to a random position."""

    bytes = 0
    asks_model = False

    def __init__(self, chance: random.Random, tokens: Sequence[int], answer: Sequence[int]) -> None:
        self.chance, self.tokens, self.answer = chance, [*tokens], [*answer]

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def expect(self, tokens: Sequence[int]) -> None:
        """Do nothing: guesses come from the answer anyway."""

    def take_states(self, first: int, states: States, count: int) -> None:
        """Do nothing: it needs no states."""

    def propose(self, width: int) -> list[int]:
        known = len(self.tokens)
        right = self.answer[known : known + self.chance.choice((0, 1, 3, width, width))]
        return right + [self.chance.randrange(VOCAB) for _ in range(width - len(right))]


class Guessing:
    """A `DraftPolicy` of `Guesser`s."""

    def __init__(self, chance: random.Random, answers: dict[int, list[int]]) -> None:
        self.chance, self.answers = chance, answers
        self.counts: Counter[str] = Counter()

    def open(self, request: Request, prompt: Sequence[int]) -> Drafter:
        return Guesser(self.chance, prompt, [*request.prompt, *self.answers[request.id]])

    def states_from(self, request: Request, length: int) -> int | None:
        return None

    def close(self, drafter: Drafter) -> None:
        """Do nothing: a drafter keeps nothing."""

    def width(self, drafter: Drafter, rows: int) -> int:
        return self.chance.choice((0, 3, 7, 7))

    def record(self, drafter: Drafter, offered: int, accepted: int) -> None:
        self.counts.update(offered=offered, accepted=accepted)

    def step_took(self, rows: int, tokens: int, seconds: float) -> None:
        self.counts.update(steps=1)

    def ended(self) -> None:
        """Do nothing: nothing can be in use."""


class Ahead(MeasuredPolicy):
    """A policy that asks the model's own head, or looks the tokens up, in drafts of any width."""

    def __init__(self, chance: random.Random, engine: RecordedEngine) -> None:
        assert engine.ahead is not None
        self.head = MtpHead(engine.ahead)
        super().__init__(fixed=1, model=self.head)
        self.chance = chance
        self.counts: Counter[str] = Counter()

    def width(self, drafter: Drafter, rows: int) -> int:
        return self.chance.choice((0, 1, 3, 7)) if super().width(drafter, rows) else 0

    def record(self, drafter: Drafter, offered: int, accepted: int) -> None:
        self.counts.update(offered=offered, accepted=accepted)
        if drafter.asks_model:
            self.counts.update(asked=offered, said=accepted)

    def step_took(self, rows: int, tokens: int, seconds: float) -> None:
        self.counts.update(steps=1)

    def ended(self) -> None:
        """Check that nothing of the head is in use, and that it never failed."""
        law(not self.head.broken, "the head failed")
        law(self.head.waiting == 0, "states of the head are left")
        law(self.head.free == self.head.blocks, "blocks of the head are left")


class Answer(msgspec.Struct):
    """What a request has received."""

    tokens: list[int]
    logprobs: list[Any]
    scores: list[Any]
    finish: FinishReason | None = None


class Site:
    """One tiny model, and the answers to its requests."""

    def __init__(self, engine: RecordedEngine) -> None:
        self.engine = engine
        self.masks = Masks()
        vocabulary = byte_vocabulary()
        self.vocabulary = vocabulary._replace(closes={"": tuple(b"</think>")})
        texts = GRAMMARS if engine.info.vocab == VOCAB else ()
        self.grammars = [CompiledGrammar(vocabulary, Grammar(text=text)) for text in texts]
        self.pages: dict[bytes, bytes] = {}
        """Pages of the blocks that were computed without guesses, by key."""
        self.parents: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        """For each key, the key before it and the tokens of its block."""

    def close(self) -> None:
        self.masks.close()
        self.engine.close()

    def matcher(self, request: Request) -> Matcher | None:
        """Return the matcher that `Grammars` makes for a request."""
        made: Matcher | None = None
        if request.grammar is not None:
            number = [grammar.grammar for grammar in self.grammars].index(request.grammar)
            made = GrammarMatcher(self.grammars[number], request.sampling.stop_token_ids, self.masks)
        if request.reasoning_budget is not None:
            made = BudgetMatcher(made, self.vocabulary, request.reasoning_budget, request.output)
        for token in request.generated if made is not None else ():
            made.consume(token)
        return made

    def requests(self, chance: random.Random) -> list[Request]:
        base = [chance.randrange(VOCAB - 1) for _ in range(90)]
        made = []
        for number in range(1, chance.randint(3, 7)):
            prompt = base[: chance.choice((5, 16, 33, 64, 90))] + [chance.randrange(256)] * chance.randint(0, 2)
            extras = None
            if chance.random() < 0.3:
                extras = SamplingExtras(
                    dry_multiplier=0.8, dry_allowed_length=1, xtc_probability=chance.choice((0, 0.4))
                )
            sampling = SamplingParams(
                max_tokens=chance.choice((1, 9, 30, 40)),
                temperature=chance.choice((0.0, 0.0, 0.7, 1.3)),
                seed=chance.randrange(5),
                top_k=chance.choice((0, 0, 12)),
                min_p=chance.choice((0.0, 0.05)),
                repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
                presence_penalty=chance.choice((0.0, 0.0, 0.5)),
                logprobs=chance.random() < 0.4,
                top_logprobs=chance.choice((0, 2)),
                prompt_logprobs=chance.random() < 0.2,
                stop_token_ids=(END, *chance.sample(range(256), chance.choice((0, 5, 20)))),
                min_tokens=chance.choice((0, 0, 4)),
                extras=extras,
            )
            held = bool(self.grammars)
            grammar = chance.choice(self.grammars).grammar if held and chance.random() < 0.4 else None
            if grammar is not None:
                sampling = msgspec.structs.replace(sampling, stop_token_ids=(END,), min_tokens=0)
            budget = chance.choice((0, 4, 9)) if held and chance.random() < 0.2 and grammar is None else None
            made.append(
                Request(
                    id=number,
                    prompt=tuple(prompt),
                    sampling=sampling,
                    grammar=grammar,
                    reasoning_budget=budget,
                    output=OutputFormat(reasoning=True, reasoning_open=True) if budget is not None else OutputFormat(),
                    choice=chance.choice((0, 0, 1)),
                )
            )
        return made

    def alone(self, request: Request) -> Answer:
        """Return the answer computed from nothing and without guesses; keep its KV in `pages`."""
        cache = Cache(self.engine.info)
        scheduler = Scheduler(cache, Limits(step_tokens=64), SystemClock())
        answers = {request.id: Answer([], [], [])}
        self.add(scheduler, request)
        while self.step(scheduler, answers):
            pass
        for key, page in self.kept(cache):
            law(self.pages.setdefault(key, page) == page, "one key, two pages")
        return answers[request.id]

    def add(self, scheduler: Scheduler, request: Request) -> None:
        scheduler.add(request, self.matcher(request))

    def step(self, scheduler: Scheduler, answers: dict[int, Answer]) -> bool:
        plan = scheduler.plan()
        if plan is None:
            return False
        results = plan.run(self.engine)
        if isinstance(results, Exception):
            raise results
        for output in scheduler.commit(plan, results, 0.01):
            take(answers[output.id], output)
        return True

    def kept(self, cache: Cache) -> Iterator[tuple[bytes, bytes]]:
        """Yield the key and page of every whole block in the pools."""
        for group, pool in enumerate(cache.pools):
            for key, block in pool._index.items():
                published = pool.published(block)
                if published is not None and len(published.tokens) == self.engine.info.block_tokens:
                    (page,) = self.engine.read_blocks(group, [block]).wait()
                    yield key, bytes(page)

    def state(self, key: bytes) -> bytes | None:
        """Compute the state after a key's tokens; None if the key is not a state's."""
        tokens: list[int] = []
        while key in self.parents:
            key, part = self.parents[key]
            tokens = [*part, *tokens]
        info = self.engine.info
        number = next((n for n, group in enumerate(info.groups) if self.root(group) == key), -1)
        if number < 0 or info.groups[number].kind != "state":
            return None
        tables = tuple(list(range(-(-len(tokens) // info.block_tokens))) for _ in info.groups)
        sampling = SamplingParams(max_tokens=1)
        for first in range(0, len(tokens), info.max_tokens):
            end = min(len(tokens), first + info.max_tokens)
            self.engine.prefill([Row(tokens, first, end, tables, None, len(tokens), sampling, 0)]).wait()
        (page,) = self.engine.read_blocks(number, [tables[number][-1]]).wait()
        return bytes(page)

    def root(self, group: CacheGroup) -> bytes:
        """Return the root key of a group."""
        return prefix.root(self.engine.info.identity, b"", group, self.engine.info.block_tokens)

    def policy(self, chance: random.Random, right: dict[int, Answer]) -> Guessing | Ahead:
        """Return a new worker's draft policy."""
        if self.engine.ahead is not None:
            return Ahead(chance, self.engine)
        return Guessing(chance, {id: answer.tokens for id, answer in right.items()})

    def schedule(self, seed: int) -> Counter[str]:
        """Run one schedule; raise `Broken` if a law breaks. Return what it did."""
        chance = random.Random(seed)
        self.pages.clear()
        self.parents.clear()
        requests, right = list[Request](), dict[int, Answer]()
        for request in self.requests(chance):
            try:
                right[request.id] = self.alone(request)
            except Broken as error:  # its stops and min_tokens together allow no token, with or without guesses
                law("left no token" in str(error), str(error))
                continue
            requests.append(request)
        policies = [self.policy(chance, right)]
        answers = {request.id: Answer([], [], []) for request in requests}
        deaths, waiting, cache = chance.choice((0, 0, 1, 2)), list(requests), Cache(self.engine.info)
        limits = Limits(step_tokens=chance.choice((40, 64)), max_running=chance.choice((2, 8)))
        scheduler = Scheduler(cache, limits, SystemClock(), policies[-1])
        preemptions = 0
        while True:
            while waiting and chance.random() < 0.7:
                self.add(scheduler, waiting.pop())
            if deaths and chance.random() < 0.1:
                deaths -= 1
                preemptions += scheduler.stats().preemptions
                cache = Cache(self.engine.info)
                policies.append(self.policy(chance, right))
                scheduler = Scheduler(cache, limits, SystemClock(), policies[-1])
                begun = [
                    request for request in requests if request not in waiting and answers[request.id].finish is None
                ]
                for request in begun:
                    answers[request.id].scores.clear()
                    known = tuple(answers[request.id].tokens)
                    self.add(scheduler, msgspec.structs.replace(request, generated=known))
            if not self.step(scheduler, answers) and not waiting:
                break
        for request in requests:
            got, expected = answers[request.id], right[request.id]
            law(got.finish is expected.finish, f"request {request.id} ends as {got.finish}, not {expected.finish}")
            law(got.tokens == expected.tokens, f"request {request.id} has other tokens")
            law(got.logprobs == expected.logprobs, f"request {request.id} has other log-probabilities")
            law(not got.scores or got.scores == expected.scores, f"request {request.id} has other scores")
        for key, page in tuple(self.kept(cache)):
            if key not in self.pages:
                law(key in self.parents and self.state(key) == page, "a key of tokens that no answer has")
            law(self.pages.get(key, page) == page, "a key finds other KV")
        stats = scheduler.stats()
        law(all(use.held == 0 for use in stats.groups), "blocks are held at the end")
        policy = policies[-1]
        policy.ended()
        for other in policies[:-1]:
            policy.counts.update(other.counts)
        policy.counts.update(schedules=1, requests=len(requests), preemptions=preemptions + stats.preemptions)
        policy.counts.update(tokens=sum(len(answer.tokens) for answer in answers.values()))
        return policy.counts


def opened(folder: Path) -> RecordedEngine:
    """Load a tiny model into an engine with few blocks."""
    config = Config(step_tokens=64, max_running=8, threads=1)
    spec = load_spec(folder)
    return RecordedEngine.load(spec, folder, config, blocks=(10,) * len(spec.groups))


def take(answer: Answer, output: Output) -> None:
    """Add an output to an answer."""
    law(answer.finish is None, "an output behind the end")
    answer.tokens += output.tokens
    answer.logprobs += output.logprobs
    answer.scores += output.prompt_logprobs
    answer.finish = output.finish
    law(not output.error, f"an error: {output.error}")


@contextmanager
def site(name: str) -> Iterator[Site]:
    """Yield a tiny model (or `REAL`) whose pool is too small for all of a schedule."""
    with tempfile.TemporaryDirectory() as folder:
        if name in AHEAD:
            written = write_with_head(Path(folder), AHEAD[name], vocab_size=VOCAB)
        else:
            written = smollm2() if name == REAL else write_model(Path(folder), vocab_size=VOCAB, **MODELS[name])
        made = Site(opened(written))
        try:
            yield made
        finally:
            made.close()


def run_many(name: str, first: int, count: int) -> Counter[str]:
    """Run `count` schedules of one model from seed `first` on; return what they did in total."""
    total: Counter[str] = Counter()
    original: Callable[..., bytes] = prefix.extend
    with site(name) as made:

        def recording(parent: bytes, tokens: Sequence[int]) -> bytes:
            key = original(parent, tokens)
            made.parents[key] = (parent, tuple(tokens))
            return key

        prefix.extend = recording
        try:
            for seed in range(first, first + count):
                try:
                    total.update(made.schedule(seed))
                except Exception as error:
                    raise Broken(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            prefix.extend = original
    return total


if __name__ == "__main__":
    first, count = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 20)
    for name in (*MODELS, *AHEAD):
        print(name, dict(run_many(name, first, count)))
