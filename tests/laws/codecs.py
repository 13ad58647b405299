"""The quality check of a codec (`compare`) against a model of a few lines, on one text from one seed.

The report must match an independent reading of the same text, whose pages are rounded by a formula of its own. Through
`raw`, the numbers are those of a reading that stores nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.engine.row_results import sample
from cairn.kv.disk.codec import Q8
from cairn.kv.disk.codec_comparison import compare
from cairn.types.model_spec import CacheGroup
from cairn.types.step import EngineInfo, Ready, Row, RowResult
from tests.laws.simulator import law

Floats = NDArray[np.float32]
VOCAB, WIDTH, BLOCK, CHUNK, WINDOW = 30, 8, 16, 64, 40


class Model:
    """Two attention groups that are plain means: over everything before, and over a window."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.embed = rng.standard_normal((2, VOCAB, WIDTH)).astype(np.float32)
        self.mix = rng.standard_normal((2, WIDTH, WIDTH)).astype(np.float32)
        self.head = 0.2 * rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)

    def row(self, group: int, token: int, before: Floats) -> Floats:
        """Return the KV of a token, given the rows `before` that it attends to."""
        seen = before.mean(axis=0) if len(before) else np.zeros(WIDTH, np.float32)
        made: Floats = self.embed[group, token] + np.tanh(self.mix[group] @ (4 * seen))
        return made

    def logits(self, seen: Sequence[Floats]) -> Floats:
        """Return the logits of one position from the rows that it attends to in each group, its own last."""
        made: Floats = self.head @ (seen[0][-1] + 3 * seen[0].mean(axis=0) + seen[1][-1] + 3 * seen[1].mean(axis=0))
        return made


class TinyEngine:
    """An `Engine` for `Model`, with KV in blocks and a ring of blocks for the window."""

    def __init__(self, seed: int, context: int, max_tokens: int) -> None:
        self._model = Model(seed)
        blocks = (-(-context // BLOCK), -(-(WINDOW + CHUNK) // BLOCK) + 1)
        self._kv = [np.full((count, BLOCK, WIDTH), np.nan, np.float32) for count in blocks]
        self.info = EngineInfo(
            groups=(CacheGroup(kind="full", layers=(0,)), CacheGroup(kind="window", layers=(1,), window=WINDOW)),
            blocks=blocks,
            block_tokens=BLOCK,
            block_bytes=(BLOCK * WIDTH * 4,) * 2,
            context=context,
            vocab=VOCAB,
            max_rows=1,
            max_tokens=max_tokens,
            identity=b"tiny",
            device="cpu",
        )

    def prefill(self, rows: Sequence[Row]) -> Ready[list[RowResult]]:
        """Compute the positions one after another."""
        (row,) = rows
        law(row.end - row.start <= self.info.max_tokens, "a step is longer than the engine takes")
        return Ready(sample(rows, np.stack([self._position(row, at) for at in range(row.start, row.end)])))

    decode = prefill

    def _position(self, row: Row, at: int) -> Floats:
        seen = []
        for group, (kv, table) in enumerate(zip(self._kv, row.tables, strict=True)):
            places = range(max(0, at - WINDOW + 1) if group else 0, at + 1)
            law(all(table[place // BLOCK] >= 0 for place in places), "what is read is not in the table")
            blocks, slots = [table[place // BLOCK] for place in places], [place % BLOCK for place in places]
            before = kv[blocks[:-1], slots[:-1]]
            kv[blocks[-1], slots[-1]] = self._model.row(group, row.tokens[at], before)
            seen.append(kv[blocks, slots])
        return self._model.logits(seen)

    def read_blocks(self, group: int, ids: Sequence[int]) -> Ready[list[memoryview]]:
        return Ready([memoryview(self._kv[group][one]).cast("B") for one in ids])

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> Ready[None]:
        for one, page in zip(ids, pages, strict=True):
            self._kv[group][one] = np.frombuffer(page, "<f4").reshape(BLOCK, WIDTH)
        return Ready(None)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> Ready[None]:
        for source, target in pairs:
            self._kv[group][target] = self._kv[group][source]
        return Ready(None)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def rounded(rows: Floats) -> Floats:
    """Quantize each row to 8 bits and back."""
    back = []
    for row in rows:
        step = np.float32(max(abs(float(number)) for number in row)) / np.float32(127)
        back.append([np.float32(round(float(number / step))) * step for number in row])
    return np.array(back, np.float32)


def read_independently(
    model: Model, tokens: Sequence[int], context: int, *, coded: bool
) -> tuple[list[int], float, NDArray[np.float64]]:
    """Return the likeliest token at each position, the perplexity and all log-probabilities.

    This is the same reading without engine, blocks and codec.
    """
    likeliest, lost, logs = [], 0.0, []
    for begin in range(0, len(tokens) - 1, context):
        piece = tokens[begin : begin + context + 1]
        kept = [np.zeros((0, WIDTH), np.float32)] * 2
        for at in range(len(piece) - 1):
            if coded and at and at % CHUNK == 0:
                kept = [np.concatenate([rows[: at - CHUNK], rounded(rows[at - CHUNK :])]) for rows in kept]
            seen = []
            for group in (0, 1):
                first = max(0, at - WINDOW + 1) if group else 0
                made = model.row(group, piece[at], kept[group][first:])
                kept[group] = np.concatenate([kept[group], made[None]])
                seen.append(kept[group][first:])
            logits = model.logits(seen).astype(np.float64)
            likeliest.append(int(logits.argmax()))
            logs.append(logits - math.log(np.exp(logits - logits.max()).sum()) - logits.max())
            lost -= logs[-1][piece[at + 1]]
    return likeliest, math.exp(lost / len(likeliest)), np.array(logs)


def run(seed: int) -> None:
    """Check one text. Raise `Broken` if a law breaks."""
    rng = np.random.default_rng(seed)
    context = int(rng.integers(70, 200))
    tokens = [int(token) for token in rng.integers(0, VOCAB, int(rng.integers(140, 260)))]
    engine = TinyEngine(seed, context, int(rng.integers(10, 100)))
    report = compare(engine, Q8(engine.info.block_bytes, WIDTH), tokens)
    plain, raw_perplexity, p = read_independently(Model(seed), tokens, context, coded=False)
    coded, perplexity, q = read_independently(Model(seed), tokens, context, coded=True)
    agreed = sum(one == other for one, other in zip(plain, coded, strict=True))
    apart = np.sort((np.exp(p) * (p - q)).sum(axis=1))
    said = f"{report}, but {agreed} of {len(plain)}, {raw_perplexity}, {perplexity}"
    law(report.positions == len(plain), f"not every position is counted: {said}")
    law(report.agreed == agreed, f"the agreement is wrong: {said}")
    law(math.isclose(report.raw_perplexity, raw_perplexity, rel_tol=1e-5), f"the perplexity of raw is wrong: {said}")
    law(math.isclose(report.perplexity, perplexity, rel_tol=1e-5), f"the perplexity is wrong: {said}")
    near = functools.partial(math.isclose, rel_tol=0.01, abs_tol=3e-7)
    law(near(report.divergence, apart.mean()), f"the divergence is not {apart.mean()}: {said}")
    worst = apart[-1 - len(apart) // 100]
    law(near(report.at_a_place, worst), f"the divergence at a place is not {worst}: {said}")
    law(agreed > 0, "a text on which nothing agrees shows little")
