"""Adapters' low-rank products: their definition, and that each row's bits do not depend on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cairn.kernels.base import LowRank
from tests.kernels.arguments import Adapter, random

INNER, OUT = 96, 150


def adapters(count: int = 4) -> list[Adapter]:
    """Return adapters of different ranks; each writes two ranges of columns but the last, which writes one."""
    made = []
    for number in range(count):
        rank, own = 3 + 7 * number, 100 * number
        downs = [random(rank, INNER, seed=own), random(rank + 1, INNER, seed=own + 1)]
        ups = [(0, random(64, rank, seed=own + 2)), (70, random(80, rank + 1, seed=own + 3))]
        cut = 1 if number == count - 1 else 2
        made.append(Adapter(number, downs[:cut], ups[:cut]))
    return made


def run(kernels: Any, rows: list[tuple[int, list[tuple[int, float]]]], x: Any, start: Any) -> Any:
    """Apply adapters to the leading rows of `x` and `start`; rows are token counts and (slot, scale) pairs."""
    made: tuple[LowRank, ...] = tuple(adapter.made(kernels) for adapter in adapters())
    spans, at = [], 0
    slots, scales = np.full((len(rows), 4), -1, np.int32), np.zeros((len(rows), 4), np.float32)
    for number, (count, own) in enumerate(rows):
        spans.append((at, count, 0))
        at += count
        for place, (slot, scale) in enumerate(own):
            slots[number, place], scales[number, place] = slot, scale
    out = start[:at].copy()
    kernels.adapt(x[:at].copy(), np.array(spans, np.int32), slots, scales, made, out)
    return out


ROWS: list[tuple[int, list[tuple[int, float]]]] = [
    *((1, [(0, 1.0)]), (1, []), (19, [(1, 0.5)]), (1, [(1, 0.5)]), (2, [(2, 1.0), (0, -2.0)]), (40, [])),
    *((1, [(3, 1.0)]), (1, [(9, 1.0)]), (8, [(3, 1.0)]), (1, [(0, 1.0), (0, 1.0)])),
]


def test_an_adapter_adds_the_low_rank_product(kernels: Any) -> None:
    tokens = sum(count for count, _ in ROWS)
    x, start = random(tokens, INNER, seed=7), random(tokens, OUT, seed=8)
    got, at = run(kernels, ROWS, x, start), 0
    known = {adapter.slot: adapter for adapter in adapters()}
    for count, own in ROWS:
        want = start[at : at + count].astype(np.float64)
        for slot, scale in own:
            for down, (column, up) in zip(known[slot].downs, known[slot].ups, strict=True) if slot in known else ():
                low = x[at : at + count].astype(np.float64) @ down.T
                want[:, column : column + len(up)] += scale * low @ up.T
        np.testing.assert_allclose(got[at : at + count], want, rtol=1e-4, atol=2e-3)
        at += count


def test_a_row_has_the_same_bits_alone_and_in_any_company(kernels: Any) -> None:
    tokens = sum(count for count, _ in ROWS)
    x, start = random(tokens, INNER, seed=7), random(tokens, OUT, seed=8)
    whole, at = run(kernels, ROWS, x, start), 0
    for row in ROWS:
        count, own = row
        alone = run(kernels, [row], x[at:], start[at:])
        assert alone.tobytes() == whole[at : at + count].tobytes()
        for token in range(0, count, 7):
            single = run(kernels, [(1, own)], x[at + token :], start[at + token :])
            assert single.tobytes() == whole[at + token : at + token + 1].tobytes()
        if not own or own == [(9, 1.0)]:
            assert whole[at : at + count].tobytes() == start[at : at + count].tobytes()
        at += count


def test_the_order_of_a_row_s_adapters_is_kept(kernels: Any) -> None:
    x, start = random(1, INNER, seed=7), 1e6 * random(1, OUT, seed=8)
    first = run(kernels, [(1, [(1, 1.0), (2, 1.0)])], x, start)
    step = run(kernels, [(1, [(2, 1.0)])], x, run(kernels, [(1, [(1, 1.0)])], x, start))
    assert first.tobytes() == step.tobytes()
