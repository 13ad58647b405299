"""Embeddings beside transformers, with the same weights: python benchmarks/embed.py FOLDER [--threads N] [--rounds N]

Both sides get the same texts of mixed lengths in one process, in turns, and return normalised means of the last hidden
states in float32. transformers pads: it gets the texts sorted by length in batches of 32, which suits it best, and one
by one. Printed are tokens and texts per second (without padding), the best of the rounds, and the largest distance
between the vectors.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from cairn import LLM
from cairn.engine.machine import cpu_count, cpu_name

BATCH = 32
LENGTHS = {"short (5 to 20 words)": (5, 20), "mixed (5 to 180 words)": (5, 180), "long (150 to 180 words)": (150, 180)}
TEXT = "a server that keeps what it has computed never reads the same words twice and so it is fast"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    model = transformers.AutoModel.from_pretrained(args.folder, dtype=torch.float32).eval()

    def theirs(texts: list[str], batch: int) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        result = np.empty((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for first in range(0, len(order), batch):
                some = order[first : first + batch]
                given = tokenizer([texts[at] for at in some], padding=True, truncation=True, return_tensors="pt")
                states, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
                mean = (states * mask).sum(1) / mask.sum(1)
                result[some] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return result

    print(f"{cpu_name()}, {args.threads} threads, {args.texts} texts, best of {args.rounds} rounds\n")
    print("| texts | tokens | Cairn, tokens/s | texts/s | transformers by 32 | one by one | largest difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with LLM(str(args.folder), threads=args.threads) as llm:
        for name, (low, high) in LENGTHS.items():
            draw = random.Random(name)
            texts = [" ".join(draw.choices(TEXT.split(), k=draw.randint(low, high))) for _ in range(args.texts)]
            tokens = sum(len(ids) for ids in tokenizer(texts)["input_ids"])
            sides: list[Callable[[], np.ndarray]] = [
                lambda texts=texts: llm.embed(texts),
                lambda texts=texts: theirs(texts, BATCH),
                lambda texts=texts: theirs(texts, 1),
            ]
            ours, padded, alone = _best(sides, args.rounds)
            apart = float(np.abs(sides[0]() - sides[1]()).max())
            rates = f"{tokens / ours:,.0f} | {len(texts) / ours:,.0f} | {tokens / padded:,.0f} | {tokens / alone:,.0f}"
            print(f"| {name} | {tokens:,} | {rates} | {apart:.1e} |", flush=True)


def _best(sides: list[Callable[[], np.ndarray]], rounds: int) -> list[float]:
    """Return the least seconds of each side; the sides take turns."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for number, side in enumerate(sides):
            began = time.perf_counter()
            side()
            best[number] = min(best[number], time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
