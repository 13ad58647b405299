"""Cairn's side of the benchmarks: a process that does what lines of JSON on its standard input ask for.

It calls the engine as the worker does, rows in and sampled tokens out, with the default options of `cairn serve`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from both_sides import STEP, Timed, answer_lines, peak, tokens_of
from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.kernels import roofline
from cairn.kernels.choose import chosen
from cairn.models.spec.config import load_spec
from cairn.system.posix import SystemClock
from cairn.types.model_spec import BLOCK_TOKENS, ModelSpec
from cairn.types.request import SamplingParams
from cairn.types.step import Row, RowResult

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0)


def kv_gb(spec: ModelSpec, tokens: int) -> float:
    """Return the GB of a float32 pool for this many tokens, and for the states of 8 sequences, two each."""
    size = 0
    for number, group in enumerate(spec.groups):
        numbers = len(group.layers) * math.prod(spec.page(number))
        size += 4 * numbers * (40 if group.kind == "state" else -(-tokens // BLOCK_TOKENS))
    return size / 1e9


class Side(Timed):
    """One engine, and the blocks of the row that is being measured."""

    sizes: tuple[int, int, int] | None = None

    def machine(self, threads: int) -> dict[str, Any]:
        """Return the kernels in use, and the machine's limits."""
        kernels = chosen("auto")
        limits = roofline.measure(kernels, threads, SystemClock().now)
        return {"kernels": kernels, "read": limits.read, "arithmetic": limits.arithmetic}

    def load(self, path: str, threads: int, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load an engine whose pool holds `tokens` tokens."""
        began = time.perf_counter()
        spec = load_spec(Path(path), identify=False)
        context = min(spec.context, 8192)
        whole = {"keep_packed": False, **options}  # measure the load time of a first start
        config = Config(model=path, threads=threads, context=context, kv_gb=max(kv_gb(spec, tokens), 0.3), **whole)
        self.engine = RecordedEngine.load(spec, Path(path), config)
        self.vocab = spec.vocab
        return {"seconds": time.perf_counter() - began, "vocab": spec.vocab}

    def begin(self, batch: int, depth: int, room: int) -> dict[str, Any]:
        """Make blocks for `batch` sequences of `depth` tokens with `room` for more, or keep those that are there."""
        if self.sizes == (batch, depth, room):
            return {}
        self.sizes = (batch, depth, room)
        each = -(-(depth + room) // BLOCK_TOKENS)
        self.tables = [range(number * each, (number + 1) * each) for number in range(batch)]
        for group, blocks in zip(self.engine.info.groups, self.engine.info.blocks, strict=True):
            if (2 * batch if group.kind == "state" else batch * each) > blocks:
                raise RuntimeError(f"{batch} sequences of {depth + room} tokens do not fit the pool")
        if depth and any(group.kind == "state" for group in self.engine.info.groups):
            raise RuntimeError("a state cannot be put back to the depth")
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
        """Compute a prompt of `tokens` behind the depth, and choose the next token."""
        whole = self.context + tokens_of(tokens, self.vocab, 1)
        began = self.now()
        for start in range(self.depth, len(whole), STEP):
            end = min(start + STEP, len(whole))
            result = self.step([self.row(0, whole, start, end, wanted=end == len(whole))])
        chosen_of(result)
        return {"seconds": [self.now() - began], "tokens": tokens}

    def decode(self, steps: int) -> dict[str, Any]:
        """Run `steps` steps of all sequences, each with the greedy choice of the step before."""
        texts = [[*self.context, (31 * number + 7) % self.vocab] for number in range(self.batch)]
        times = []
        for _ in range(steps):
            began = self.now()
            rows = [self.row(number, text, len(text) - 1, len(text)) for number, text in enumerate(texts)]
            for text, token in zip(texts, chosen_of(self.engine.decode(rows).wait()), strict=True):
                text.append(token)
            times.append(self.now() - began)
        return {"seconds": times, "tokens": self.batch}

    def answers(self, prompts: list[list[int]], steps: int, top: int) -> dict[str, Any]:
        """Return greedy answers, with the `top` log-probabilities of each step."""
        sampling = SamplingParams(max_tokens=1 << 20, temperature=0, logprobs=True, top_logprobs=top)
        results = []
        for prompt in prompts:
            self.sizes = None
            self.begin(1, 0, len(prompt) + steps)
            text, said, start = list(prompt), [], 0
            for _ in range(steps):
                row = Row(text, start, len(text), self.tables_of(0), len(text) - 1, len(prompt), sampling, 0)
                result = self.step([row])[0]
                start = len(text)
                text += chosen_of([result])
                assert result.logprob is not None
                said.append([list(one) for one in result.logprob.top])
            results.append(said)
        return {"answers": results}

    def row(self, number: int, tokens: Sequence[int], start: int, end: int, wanted: bool = True) -> Row:
        return Row(tokens, start, end, self.tables_of(number), end - 1 if wanted else None, self.depth + 1, GREEDY, 0)

    def tables_of(self, number: int) -> tuple[Sequence[int], ...]:
        """Return the blocks of a sequence in every group; of states two, in turns."""
        own = self.tables[number]
        turns = [2 * number + place % 2 for place in range(len(own))]
        return tuple(turns if group.kind == "state" else own for group in self.engine.info.groups)

    def step(self, rows: list[Row]) -> list[RowResult]:
        return self.engine.prefill(rows).wait()

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak()}


def chosen_of(results: Sequence[RowResult]) -> list[int]:
    """Return the sampled tokens; end the run if a row has none."""
    for result in results:
        if result.token is None:
            raise RuntimeError(result.error or "a row without a token")
    return [result.token for result in results if result.token is not None]


if __name__ == "__main__":
    answer_lines(Side(), {})
