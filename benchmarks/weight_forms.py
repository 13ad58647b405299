"""What each form of `--weights` costs in memory and in quality: python benchmarks/weight_forms.py [MODEL]

Reads conversations as the demo model was trained on, from a seed that training never used, teacher-forced; what counts
are the tokens of answers, as in training. Prints a row a form: bytes as held, mean and largest relative error of a
tensor, perplexity, and how often the likeliest token is that of float32.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from cairn.config.config import Config
from cairn.engine.cpu import CpuEngine
from cairn.engine.memory import weight_memory
from cairn.models.hub import hub
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.block_size import BLOCK_TOKENS
from cairn.types.outputs import TokenLogprob
from cairn.types.sampling_params import SamplingParams
from cairn.types.step import Row

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo_data import conversations

FORMS = ("f32", "stored", "bf16", "int8", "int4")
TOKENS = 10_000
ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
SEED = 990_001
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True, top_logprobs=1)


@dataclass(frozen=True, slots=True)
class Text:
    """One conversation, and which of its tokens are an answer's."""

    tokens: list[int]
    answers: list[bool]


def texts_of(folder: Path, context: int) -> list[Text]:
    """Conversations with some `TOKENS` tokens in answers."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = folder / "chat_template.jinja"
    template = jinja2.Environment().from_string(named.read_text() if named.exists() else config["chat_template"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: list[Text] = []
    count = 0
    for talk in conversations(SEED):
        said = template.render(messages=talk.messages, tools=talk.tools or None, add_generation_prompt=False)
        spans = [match.span(1) for match in ANSWER.finditer(said)]
        coded = tokenizer.encode(said, add_special_tokens=False)
        if len(coded.ids) <= context:
            answers = [any(low <= begin < high for low, high in spans) for begin, _ in coded.offsets]
            found.append(Text(coded.ids, answers))
            count += sum(answers)
        if count >= TOKENS:
            return found
    raise AssertionError("conversations do not end")


def read(engine: CpuEngine, texts: list[Text]) -> list[TokenLogprob]:
    """What the model foretells of each answer."""
    said: list[TokenLogprob] = []
    for text in texts:
        tokens, found = text.tokens, list[TokenLogprob]()
        table = (list(range(-(-len(tokens) // BLOCK_TOKENS))),) * len(engine.info.groups)
        for start in range(0, len(tokens), engine.info.max_tokens):
            end = min(len(tokens), start + engine.info.max_tokens)
            row = Row(tokens, start, end, table, start, len(tokens), SCORED, 0)
            found += engine.prefill([row]).wait()[0].prompt_logprobs
        said += [one for one, counts in zip(found, text.answers[1:], strict=True) if counts]
    return said


def main() -> None:
    """Print the table."""
    folder = hub.locate(sys.argv[1] if len(sys.argv) > 1 else hub.DEMO)
    spec = load_spec(folder)
    texts = texts_of(folder, min(spec.context, 2048))
    base: list[Any] = []
    print("| weights | MB | error: mean | largest | perplexity | beside f32 | same likeliest token |")
    print("|---|---|---|---|---|---|---|")
    for form in FORMS:
        config = Config(weights=form, context=min(spec.context, 2048), max_running=1, kv_dtype="f32")  # type: ignore
        held = HeldWeights(open_weights(folder, spec), form_of(spec, form))
        size = weight_memory(spec, held, config.kernels).held
        engine = CpuEngine.load(spec, folder, config)
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
    print(f"\n{spec.name}, {len(said):,} tokens of answers in conversations that training did not see, KV in float32")


def _errors(held: HeldWeights) -> list[float]:
    for name in held:
        _ = held[name]
    return list(held.errors.values())


if __name__ == "__main__":
    main()
