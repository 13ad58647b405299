"""Cairn's side of the benchmarks: a process that does what lines of JSON on its standard input ask for.

It calls the engine as the worker does, rows in and sampled tokens out, with the options that `cairn serve` has unless
told otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from both_sides import STEP, answer_lines, peak, tokens_of
from cairn.block_size import BLOCK_TOKENS
from cairn.config import Config
from cairn.engine.base import Row, RowResult
from cairn.engine.cpu import CpuEngine
from cairn.kernels import roofline
from cairn.kernels.choose import chosen
from cairn.models.spec import load_spec
from cairn.sampling_params import SamplingParams
from cairn.system import SystemClock

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0)


class Side:
    """One engine, and the blocks of the row that is being measured."""

    sizes: tuple[int, int, int] | None = None

    def machine(self, threads: int) -> dict[str, Any]:
        """The kernels that run here, and what the machine can do at most."""
        kernels = chosen("auto")
        return {"kernels": kernels, **asdict(roofline.measure(kernels, threads, SystemClock().now))}

    def load(self, path: str, threads: int, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        """An engine whose pool holds `tokens` tokens."""
        began = time.perf_counter()
        spec = load_spec(Path(path), identify=False)
        kv = 2 * 4 * spec.layers * spec.kv_heads * spec.head_dim * tokens / 1e9
        context = min(spec.context, 8192)
        whole = {"keep_packed": False, **options}  # the time to load is that of a first start
        config = Config(model=path, threads=threads, context=context, kv_gb=max(kv, 0.3), **whole)
        self.engine = CpuEngine.load(spec, Path(path), config)
        self.vocab = spec.vocab
        return {"seconds": time.perf_counter() - began, "vocab": spec.vocab}

    def begin(self, batch: int, depth: int, room: int) -> dict[str, Any]:
        """Blocks for `batch` sequences with `depth` tokens each and `room` for more; kept where it is there."""
        if self.sizes == (batch, depth, room):
            return {}
        self.sizes = (batch, depth, room)
        each = -(-(depth + room) // BLOCK_TOKENS)
        self.tables = [range(number * each, (number + 1) * each) for number in range(batch)]
        if batch * each > min(self.engine.info.blocks):
            raise RuntimeError(f"{batch * each} blocks do not fit the pool")
        self.batch, self.depth = batch, depth
        self.context = tokens_of(depth, self.vocab)
        for start in range(0, depth, STEP):
            self.step([self.row(0, self.context, start, min(start + STEP, depth), wanted=False)])
        filled = -(-depth // BLOCK_TOKENS)
        for table in self.tables[1:] if filled else ():
            for group in range(len(self.engine.info.groups)):
                pages = self.engine.read_blocks(group, self.tables[0][:filled]).wait()
                self.engine.write_blocks(group, table[:filled], pages).wait()
        return {}

    def prefill(self, tokens: int) -> dict[str, Any]:
        """A prompt of `tokens` after the depth, and the choice of the token after it."""
        whole = self.context + tokens_of(tokens, self.vocab, 1)
        began = time.perf_counter()
        for start in range(self.depth, len(whole), STEP):
            end = min(start + STEP, len(whole))
            found = self.step([self.row(0, whole, start, end, wanted=end == len(whole))])
        chosen_of(found)
        return {"seconds": [time.perf_counter() - began], "tokens": tokens}

    def decode(self, steps: int) -> dict[str, Any]:
        """`steps` steps of all sequences, each token the greedy choice of the step before."""
        texts = [[*self.context, (31 * number + 7) % self.vocab] for number in range(self.batch)]
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            rows = [self.row(number, text, len(text) - 1, len(text)) for number, text in enumerate(texts)]
            for text, token in zip(texts, chosen_of(self.engine.decode(rows).wait()), strict=True):
                text.append(token)
            times.append(time.perf_counter() - began)
        return {"seconds": times, "tokens": self.batch}

    def answers(self, prompts: list[list[int]], steps: int, top: int) -> dict[str, Any]:
        """Greedy answers, with the `top` log-probabilities of each step."""
        sampling = SamplingParams(max_tokens=1 << 20, temperature=0, logprobs=True, top_logprobs=top)
        found = []
        for prompt in prompts:
            self.sizes = None
            self.begin(1, 0, len(prompt) + steps)
            text, said, start = list(prompt), [], 0
            for _ in range(steps):
                row = Row(text, start, len(text), (self.tables[0],), len(text) - 1, len(prompt), sampling, 0)
                result = self.step([row])[0]
                start = len(text)
                text += chosen_of([result])
                assert result.logprob is not None
                said.append([list(one) for one in result.logprob.top])
            found.append(said)
        return {"answers": found}

    def row(self, number: int, tokens: Sequence[int], start: int, end: int, wanted: bool = True) -> Row:
        tables = (self.tables[number],) * len(self.engine.info.groups)
        return Row(tokens, start, end, tables, end - 1 if wanted else None, self.depth + 1, GREEDY, 0)

    def step(self, rows: list[Row]) -> list[RowResult]:
        return self.engine.prefill(rows).wait()

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak()}


def chosen_of(results: Sequence[RowResult]) -> list[int]:
    """The sampled tokens; a row without one ends the run."""
    for one in results:
        if one.token is None:
            raise RuntimeError(one.error or "a row without a token")
    return [one.token for one in results if one.token is not None]


if __name__ == "__main__":
    answer_lines(Side(), {})
