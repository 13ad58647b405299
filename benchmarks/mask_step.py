"""The cost of grammars for a whole step: the same step of an engine with masks and without, in turns.

    .venv/bin/python benchmarks/mask_step.py MODEL [--rows 32] [--pairs 100] [--depth 64]

Printed is the difference in wall time and in CPU time. MODEL is a model's folder or file. Rows sample with top-k 40,
top-p 0.95 and min-p 0.05, with and without a grammar. A step lasts from the request for the masks until every row has
its token and has consumed it, as in the scheduler; forced tokens are searched for, too, and then not used, so that both
sides have as many rows. The goal is at most 5 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.models.hub.hub import locate
from cairn.models.spec.config import check_decodes, load_spec
from cairn.text.chat.templates import load_text
from cairn.text.grammar.vocabulary import Vocabulary
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.request import Grammar, SamplingParams
from cairn.types.step import Row
from cairn.worker.grammar_matcher import CompiledGrammar, GrammarMatcher, Masks
from cairn.worker.grammars import read_vocabulary
from mask_cost import grammars

PARAMS = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1)


class Step(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float


class Held:
    """Rows that follow a grammar, each at another place in it; finished ones begin again."""

    def __init__(self, vocabulary: Vocabulary, text: str, ends: Sequence[int], computing: Masks, rows: int) -> None:
        self._compiled = CompiledGrammar(vocabulary, Grammar(text=text))
        self._made = (ends, computing)
        self._ends = frozenset(ends)
        self._rng = random.Random(1)
        self._over: set[int] = set()
        self.matchers = [self._fresh() for _ in range(rows)]

    def _fresh(self) -> GrammarMatcher:
        return GrammarMatcher(self._compiled, *self._made)

    def follow(self, tokens: Sequence[int | None]) -> None:
        """Advance the matchers by the sampled tokens."""
        for row, token in enumerate(tokens):
            if token is None or token in self._ends or self._rng.random() < 0.01:
                self._over.add(row)
                continue
            self.matchers[row].consume(token)
            if self.matchers[row].over:
                self._over.add(row)
            else:
                self.matchers[row].forced()

    def renew(self) -> None:
        """Restart finished rows outside the measured time, as a grammar is copied once per request, not per step."""
        for row in self._over:
            self.matchers[row] = self._fresh()
        self._over.clear()


def tables(engine: RecordedEngine, row: int, tokens: int) -> tuple[range, ...]:
    count = -(-tokens // BLOCK_TOKENS)
    return tuple(range(row * count, (row + 1) * count) for _ in engine.info.groups)


def timed(work: Callable[[], None]) -> Step:
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return Step(time.perf_counter() - start, time.process_time() - cpu)


def pairs(engine: RecordedEngine, held: Held, asked: Any) -> list[tuple[Step, Step]]:
    """Return steps without masks, and steps with them right after."""
    depth, vocab = asked.depth, engine.info.vocab
    known = [[(7919 * at + 104_729 * row) % vocab for at in range(depth + 1)] for row in range(asked.rows)]
    places = [tables(engine, row, depth + 1) for row in range(asked.rows)]

    def step(number: int, *, with_masks: bool) -> None:
        rows = []
        for row, (tokens, place) in enumerate(zip(known, places, strict=True)):
            mask = held.matchers[row].mask() if with_masks else None
            tokens[-1] = (number * 31 + row) % vocab
            rows.append(Row(tokens, depth, depth + 1, place, depth, 1, PARAMS, number, mask=mask))
        results = engine.decode(rows).wait()
        if with_masks:
            held.follow([result.token for result in results])

    measured = []
    for number in range(asked.pairs + 5):
        plain = timed(lambda: step(number, with_masks=False))  # noqa: B023  it runs before the next number
        measured.append((plain, timed(lambda: step(number, with_masks=True))))  # noqa: B023
        held.renew()
    return measured[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--depth", type=int, default=64, help="tokens of each row's context")
    args = parser.parse_args()
    folder = locate(args.model)
    spec = check_decodes(load_spec(folder))
    config = Config(max_running=args.rows, step_tokens=512, context=args.depth + BLOCK_TOKENS)
    blocks = args.rows * -(-(args.depth + 1) // BLOCK_TOKENS)
    engine = RecordedEngine.load(spec, folder, config, blocks=tuple(blocks for _ in spec.groups))
    tokenizer, _ = load_text(folder, None)
    ends = sorted(tokenizer.end_ids)
    vocabulary = read_vocabulary(folder, None, spec.vocab, ends)
    print(f"{args.rows} rows, {spec.vocab} tokens, {args.pairs} pairs of steps; medians, milliseconds")
    for name, text in grammars().items():
        computing = Masks()
        result = pairs(engine, Held(vocabulary, text, ends, computing, args.rows), args)
        computing.close()
        for clock in ("wall", "cpu"):
            plain = 1e3 * statistics.median(getattr(one, clock) for one, _ in result)
            more = 1e3 * statistics.median(getattr(two, clock) - getattr(one, clock) for one, two in result)
            print(f"{name:30} {clock:4} {plain:7.2f} without   {more:+6.2f} with masks   {100 * more / plain:+6.1f} %")
    engine.close()


if __name__ == "__main__":
    main()
