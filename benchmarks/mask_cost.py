"""What do grammars cost a step? Milliseconds until the masks of all rows are there, while nothing else is computed
(median, worst), by what the rows are held to. In a server that time runs beside the step's own arithmetic.

    .venv/bin/python benchmarks/mask_cost.py [MODEL] [--rows 32] [--steps 100]

MODEL is a model's folder or file, for its vocabulary alone; without one it is the bundled model's. The goal is 5 % of a
step of as many rows: give --step-ms what `cairn bench` says of one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from cairn.models.hub import locate
from cairn.service.grammars import GrammarMatcher, Vocabulary, compile_grammar, read_vocabulary
from cairn.service.masks import THREADS, Masks
from cairn.text.call_formats import BY_NAME
from cairn.text.call_grammar import callable_tools, lark_of_calls
from cairn.text.grammar import Shape, Structure, checked
from cairn.text.tokenizer import Tokenizer

TEXT = {"type": "string"}
EDIT = {"path": TEXT, "old": TEXT, "new": TEXT, "all": {"type": "boolean"}, "line": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": EDIT, "required": ["path", "old", "new"], "additionalProperties": False}


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"tool_{n}", "parameters": SCHEMA}} for n in range(count)]


def called(form: str, count: int, *, required: bool) -> str:
    offered = callable_tools(tools(count), None, None)
    return checked(Shape(calls=lark_of_calls(BY_NAME[form], offered, required=required, parallel=True)))


def grammars() -> dict[str, str]:
    return {
        "a JSON schema": checked(Shape(structure=Structure(kind="json", text=json.dumps(SCHEMA)))),
        "any JSON": checked(Shape(structure=Structure(kind="json", text="true"))),
        "a call of 60 tools (Hermes)": called("hermes", 60, required=True),
        "a call of 60 tools (XML)": called("qwen_xml", 60, required=True),
        "text, then such a call": called("hermes", 60, required=False),
    }


def allowed(mask: bytes, vocab: int, rng: random.Random) -> int | None:
    """A random token that may come."""
    start = rng.randrange(vocab)
    for at in range(vocab):
        token = (start + at) % vocab
        if mask[token >> 3] >> (token & 7) & 1:
            return token
    return None


def steps(vocabulary: Vocabulary, text: str, rows: int, count: int) -> list[float]:
    """Seconds of each step until every row has its mask. A row that has come to its end begins again."""
    rng, computing = random.Random(1), Masks()
    compiled = compile_grammar(vocabulary, text)
    ends = sorted(vocabulary.tokenizer.eos_tokens)

    def fresh() -> GrammarMatcher:
        return GrammarMatcher(compiled.deep_copy(), vocabulary, ends, computing)

    matchers, found = [fresh() for _ in range(rows)], []
    for _ in range(count):
        start = time.perf_counter()
        pending = [matcher.mask() for matcher in matchers]
        masks = [one.wait() for one in pending]
        found.append(time.perf_counter() - start)
        for row, mask in enumerate(masks):
            token = allowed(mask, vocabulary.tokenizer.vocab_size, rng) if mask else None
            if token is None or token in ends:
                matchers[row] = fresh()
            else:
                matchers[row].consume(token)
                matchers[row] = fresh() if matchers[row].over else matchers[row]
    computing.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, help="what a step of so many rows takes without grammars")
    asked = parser.parse_args()
    folder = locate(asked.model)
    tokenizer = Tokenizer.load(folder)
    vocab = tokenizer.largest_id + 1
    vocabulary = read_vocabulary(folder, None, vocab, sorted(tokenizer.end_ids))
    print(f"{asked.rows} rows, {vocab} tokens, {THREADS} threads; milliseconds a step")
    for name, text in grammars().items():
        times = [1e3 * one for one in steps(vocabulary, text, asked.rows, asked.steps)]
        typical = statistics.median(times)
        share = f", {100 * typical / asked.step_ms:.1f} % of a step" if asked.step_ms else ""
        print(f"{name:30} median {typical:7.2f}   mean {statistics.mean(times):7.2f}   worst {max(times):7.2f}{share}")


if __name__ == "__main__":
    main()
