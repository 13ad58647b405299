"""Memory and quality of each form of `--weights`: python benchmarks/weight_forms.py [MODEL]

Scores the pages of docs/ token by token and prints a row per form: bytes in memory, mean and largest relative error of
a tensor, perplexity, and how often the likeliest token is that of float32.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from cairn.config.config import Config
from cairn.engine.memory import weight_memory
from cairn.engine.recorded import RecordedEngine
from cairn.models.hub import hub
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.outputs import TokenLogprob
from cairn.types.request import SamplingParams
from cairn.types.step import Row

FORMS = ("f32", "stored", "bf16", "int8", "int4")
TOKENS = 10_000
WINDOW = 1_024
PAGES = Path(__file__).parent.parent / "docs"
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True, top_logprobs=1)


def texts_of(folder: Path, context: int) -> list[list[int]]:
    """Return windows of the pages in docs/ that fit the context, some `TOKENS` tokens in all."""
    ids = Tokenizer.load(folder).encode("\n".join(page.read_text() for page in sorted(PAGES.glob("*.md"))))
    size = min(context, WINDOW)
    return [list(ids[at : at + size]) for at in range(0, TOKENS, size)]


def read(engine: RecordedEngine, texts: list[list[int]]) -> list[TokenLogprob]:
    """Return the log-probability of each token of the texts except their first."""
    said: list[TokenLogprob] = []
    for tokens in texts:
        table = (list(range(-(-len(tokens) // BLOCK_TOKENS))),) * len(engine.info.groups)
        for start in range(0, len(tokens), engine.info.max_tokens):
            end = min(len(tokens), start + engine.info.max_tokens)
            row = Row(tokens, start, end, table, start, len(tokens), SCORED, 0)
            said += engine.prefill([row]).wait()[0].prompt_logprobs
    return said


def main() -> None:
    """Print the table."""
    folder = hub.locate(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    spec = load_spec(folder)
    texts = texts_of(folder, min(spec.context, WINDOW))
    base: list[Any] = []
    print("| weights | MB | error: mean | largest | perplexity | beside f32 | same likeliest token |")
    print("|---|---|---|---|---|---|---|")
    for form in FORMS:
        config = Config(weights=form, context=min(spec.context, WINDOW), max_running=1, kv_dtype="f32")  # type: ignore
        held = HeldWeights(open_weights(folder, spec), form_of(spec, form))
        size = weight_memory(spec, held, config.kernels).held
        engine = RecordedEngine.load(spec, folder, config)
        said = read(engine, texts)
        engine.close()
        errors = [*_errors(held)] or [0.0]
        perplexity = math.exp(-sum(one.logprob for one in said) / len(said))
        base = base or [perplexity, [one.top[0][0] for one in said]]
        same = sum(one.top[0][0] == other for one, other in zip(said, base[1], strict=True)) / len(said)
        print(
            f"| {form} | {size / 1e6:.1f} | {sum(errors) / len(errors):.2%} | {max(errors):.2%} | {perplexity:.4f} | "
            f"{perplexity / base[0] - 1:+.2%} | {same:.2%} |"
        )
    print(f"\n{spec.name}, {len(said):,} tokens of docs/, KV in float32")


def _errors(held: HeldWeights) -> list[float]:
    for name in held:
        _ = held[name]
    return list(held.errors.values())


if __name__ == "__main__":
    main()
