"""The cost of grammars for a step: milliseconds for the masks of all rows, forced tokens and sampling.

    .venv/bin/python benchmarks/mask_cost.py [MODEL] [--rows 32] [--steps 100] [--step-ms 22]

For masks, wall time (while nothing else is computed) and CPU time are printed; for runs of forced tokens and for the
sampler, CPU time. MODEL is a model's folder or file, of which only the vocabulary is used; by default it is the bundled
model. The goal is 5 % of a step of as many rows: give --step-ms the figure of `cairn bench`. In a server, masks are
computed beside the step's own arithmetic, so they delay it by less; forced tokens and sampling are not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cairn.kernels.choose import load_kernels
from cairn.kernels.sampling import Line
from cairn.models.hub.hub import locate
from cairn.text.chat.templates import load_text
from cairn.text.grammar.call_grammar import callable_tools, lark_of_calls
from cairn.text.grammar.grammar import Shape, Structure, grammar_text
from cairn.text.grammar.vocabulary import Vocabulary
from cairn.text.output.call_formats import BY_NAME
from cairn.types.request import Grammar, SamplingParams
from cairn.types.step import Row
from cairn.worker.grammar_matcher import CompiledGrammar, GrammarMatcher, Masks
from cairn.worker.grammars import read_vocabulary

TEXT = {"type": "string"}
EDIT = {"path": TEXT, "old": TEXT, "new": TEXT, "all": {"type": "boolean"}, "line": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": EDIT, "required": ["path", "old", "new"], "additionalProperties": False}


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"tool_{n}", "parameters": SCHEMA}} for n in range(count)]


def called(form: str, count: int, *, required: bool) -> str:
    offered = callable_tools(tools(count), None, None)
    return grammar_text(Shape(calls=lark_of_calls(BY_NAME[form], offered, required=required, parallel=True)))


def grammars() -> dict[str, str]:
    return {
        "a JSON schema": grammar_text(Shape(structure=Structure(kind="json", text=json.dumps(SCHEMA)))),
        "any JSON": grammar_text(Shape(structure=Structure(kind="json", text="true"))),
        "a call of 60 tools (Hermes)": called("hermes", 60, required=True),
        "a call of 60 tools (XML)": called("qwen_xml", 60, required=True),
        "text, then such a call": called("hermes", 60, required=False),
    }


def allowed(mask: bytes, vocab: int, rng: random.Random) -> int | None:
    """Return a random allowed token."""
    start = rng.randrange(vocab)
    for at in range(vocab):
        token = (start + at) % vocab
        if mask[token >> 3] >> (token & 7) & 1:
            return token
    return None


class Spent(NamedTuple):
    """Seconds spent on a step."""

    masks: float
    """Seconds until every row has its mask."""
    masks_cpu: float
    forced: float
    """Seconds to find forced tokens, on the step's own thread."""


def steps(vocabulary: Vocabulary, text: str, rows: int, count: int) -> tuple[list[Spent], list[bytes]]:
    """Return the seconds of each step, and the masks of the last; finished rows begin again."""
    rng, computing = random.Random(1), Masks()
    compiled = CompiledGrammar(vocabulary, Grammar(text=text))
    ends = sorted(vocabulary.tokenizer.eos_tokens)

    def fresh() -> GrammarMatcher:
        return GrammarMatcher(compiled, ends, computing)

    def advance(row: int, token: int | None) -> None:
        if token is None or token in ends:
            matchers[row] = fresh()
        else:
            matchers[row].consume(token)
            matchers[row] = fresh() if matchers[row].over else matchers[row]

    matchers, spent, masks = [fresh() for _ in range(rows)], list[Spent](), list[bytes]()
    for _ in range(count):
        start, cpu = time.perf_counter(), time.process_time()
        pending = [matcher.mask() for matcher in matchers]
        masks = [one.wait() for one in pending]
        masks_took, masks_cpu = time.perf_counter() - start, time.process_time() - cpu
        for row, mask in enumerate(masks):
            advance(row, allowed(mask, vocabulary.tokenizer.vocab_size, rng) if mask else None)
        cpu = time.process_time()
        runs = [matcher.forced() for matcher in matchers]
        spent.append(Spent(masks_took, masks_cpu, time.process_time() - cpu))
        for row, token in enumerate(runs):
            if token is not None:
                advance(row, token)
    computing.close()
    return spent, masks


def applied(masks: Sequence[bytes], vocab: int, count: int) -> tuple[float, float]:
    """Return CPU milliseconds of the native sampler per step, without masks and with."""
    kernels = load_kernels("auto", 1)
    sampler = kernels.sampler(vocab)
    logits = np.random.default_rng(1).normal(size=(len(masks), vocab)).astype(np.float32) * 3
    params = SamplingParams(max_tokens=9, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1)
    row = Row([1], 0, 1, (), 0, 1, params, 0)
    results = []
    for lines in ([Line(row)] * len(masks), [Line(row, None, mask) for mask in masks]):
        sampler.choose(lines, logits)
        cpu = time.process_time()
        for _ in range(count):
            sampler.choose(lines, logits)
        results.append(1e3 * (time.process_time() - cpu) / count)
    kernels.close()
    return results[0], results[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, help="what a step of so many rows takes without grammars")
    args = parser.parse_args()
    folder = Path(locate(args.model))
    tokenizer, _ = load_text(folder, None)
    vocab = tokenizer.largest_id + 1
    vocabulary = read_vocabulary(folder, None, vocab, sorted(tokenizer.end_ids))
    print(f"{args.rows} rows, {vocab} tokens; milliseconds a step: median until the masks are there,")
    print("and processor time of the masks (mean), of finding what is forced, and of the sampler for the masks")
    for name, text in grammars().items():
        spent, masks = steps(vocabulary, text, args.rows, args.steps)
        cpu, forced = (1e3 * statistics.mean(values) for values in list(zip(*spent, strict=True))[1:])
        without, with_masks = applied(masks, vocab, 20)
        wall, sampled = 1e3 * statistics.median(one.masks for one in spent), with_masks - without
        share = f"   {100 * (cpu + forced + sampled) / args.step_ms:.1f} % of a step" if args.step_ms else ""
        figures = f"{wall:7.2f}   masks {cpu:6.2f}   forced {forced:6.2f}   sampler {sampled:6.2f} of {with_masks:.2f}"
        print(f"{name:30} {figures}{share}")


if __name__ == "__main__":
    main()
