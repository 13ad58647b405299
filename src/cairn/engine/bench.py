"""How fast an engine computes: medians of prefill and decode steps, and what part of the machine's limits that is.

A step is timed as the scheduler would call it, sampling included. KV before `depth` is zeros: its values do not change
the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cairn.config.config import Config
from cairn.engine.cpu_experts import divided
from cairn.engine.memory import WeightMemory, check_memory, device_memory
from cairn.engine.recorded import RecordedEngine
from cairn.kernels.roofline import Roofline, share
from cairn.models.safetensors.weights import parameters
from cairn.types.errors import ConfigError
from cairn.types.model_spec import BLOCK_TOKENS, ModelSpec
from cairn.types.request import SamplingParams
from cairn.types.step import Row

STEP_TOKENS = 512
"""Most tokens of a prompt in one step."""
WRITTEN_AT_ONCE = 64 << 20
"""Bytes of the pool that are filled at once."""
ROUNDS = 3
"""Timed prompts, after one to warm up."""

_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed, in tokens."""

    prompt: int = 512
    decode: int = 128
    batch: tuple[int, ...] = (1, 8, 16)
    """Sequences that are decoded together, one measurement each."""
    depth: tuple[int, ...] = (0,)
    """Tokens of context before the first that is computed, one measurement each."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    work: str
    """prefill or decode"""
    batch: int
    depth: int
    tokens_per_second: float
    seconds: float
    """Median of one prompt (prefill) or one step (decode)."""
    bytes: int
    """Read from memory in that time at least: packed matrices once a step, and the KV of the context."""
    read_fraction: float
    """Share of the machine's peak read rate for this many bytes, from memory or caches."""
    operations: int
    """How many operations it did in that time, those of matrices and of attention."""
    arithmetic_fraction: float
    """The share of the most that the machine does with numbers as the weights are held."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What was done in the time that was measured."""

    name: str
    batch: int
    depth: int
    tokens: int
    steps: int
    logits: int
    spans: list[tuple[int, int]]
    """Of each sequence in each step, the positions of its queries: from, to."""


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine with random or real weights, and what is needed to judge its times."""

    spec: ModelSpec
    engine: RecordedEngine
    load: Workload
    weights: WeightMemory
    now: Callable[[], float]
    roofline: Roofline

    def prefill(self, depth: int) -> Figure:
        """One prompt of `load.prompt` tokens in steps of at most `STEP_TOKENS`."""
        load, most = self.load, self.engine.info.max_tokens
        end = depth + load.prompt
        tokens, tables = _tokens(end, self.spec.vocab), self._tables(0, end)
        starts = range(depth, end, most)

        def once() -> None:
            for start in starts:
                stop = min(end, start + most)
                wanted = end - 1 if stop == end else None
                self.engine.prefill([Row(tokens, start, stop, tables, wanted, end, _GREEDY, 0)]).wait()

        once()
        seconds = statistics.median(self._timed(once) for _ in range(ROUNDS))
        spans = [(start, min(end, start + most)) for start in starts]
        work = _Work("prefill", 1, depth, load.prompt, len(starts), 1, spans)
        return self._figure(work, seconds)

    def decode(self, batch: int, depth: int) -> Figure:
        """`load.decode` steps of `batch` sequences, each one token longer every step."""
        load = self.load
        first = max(1, depth)
        end = first + load.decode
        tokens = [_tokens(end, self.spec.vocab, number) for number in range(batch)]
        tables = [self._tables(number * _blocks(end), end) for number in range(batch)]
        times = []
        for at in range(first, end):
            rows = [
                Row(known[:at], at - 1, at, table, at - 1, first, _GREEDY, 0)
                for known, table in zip(tokens, tables, strict=True)
            ]
            times.append(self._timed(partial(self._step, rows)))
        middle = first + load.decode // 2
        work = _Work("decode", batch, depth, batch, 1, batch, [(middle - 1, middle)] * batch)
        return self._figure(work, statistics.median(times))

    @property
    def _bits(self) -> float:
        """Bits that a number of the weights takes, on the whole."""
        apart = self.weights.on_cpu if self.weights.apart else 0
        return 8 * (self.weights.held + apart) / parameters(self.spec)

    def _step(self, rows: list[Row]) -> None:
        self.engine.decode(rows).wait()

    def _timed(self, work: Callable[[], object]) -> float:
        start = self.now()
        work()
        return max(self.now() - start, 1e-9)

    def _tables(self, first: int, tokens: int) -> tuple[Sequence[int], ...]:
        count = _blocks(tokens)
        own = 2 * (first // count)  # of the two states that each sequence has in turns
        return tuple(
            [own + place % 2 for place in range(count)] if group.kind == "state" else range(first, first + count)
            for group in self.spec.groups
        )

    def _figure(self, work: _Work, seconds: float) -> Figure:
        spec = self.spec
        # One of the steps wants logits.
        read, context = work.steps * self.weights.read(work.tokens / work.steps) + self.weights.head, 0
        for group, size in zip(spec.groups, self.engine.info.block_bytes, strict=True):
            if group.kind == "state":
                read += 2 * size * len(work.spans)  # read and written once
                continue
            window = group.window or spec.context
            read += size // BLOCK_TOKENS * sum(stop - max(0, start + 1 - window) for start, stop in work.spans)
            pairs = sum(min(at + 1, window) for start, stop in work.spans for at in range(start, stop))
            context += len(group.layers) * pairs
        table = spec.vocab * spec.hidden
        inside = parameters(spec) - (table if spec.tied else 2 * table)
        if spec.experts is not None:
            one = 3 * spec.hidden * spec.experts.ffn * len(spec.experts.layers)
            inside -= one * (spec.experts.count - spec.experts.chosen)
        pair = 4 * spec.head_dim if spec.latent is None else 2 * (2 * spec.latent.rank + spec.turned)
        attention = spec.heads * pair * context
        operations = 2 * inside * work.tokens + 2 * table * work.logits + attention + _scanned(spec) * work.tokens
        return Figure(
            work=work.name,
            batch=work.batch,
            depth=work.depth,
            tokens_per_second=work.tokens / seconds,
            seconds=seconds,
            bytes=read,
            read_fraction=share(read / seconds, self.roofline.reading(read // work.steps)),
            operations=operations,
            arithmetic_fraction=share(operations / seconds, self.roofline.computing(self._bits)),
        )


def open_bench(
    spec: ModelSpec,
    weights: Mapping[str, Any],
    config: Config,
    load: Workload,
    roofline: Roofline,
    now: Callable[[], float],
) -> Bench:
    """Return an engine with a pool that just holds `load`.

    Raise ConfigError for a load longer than the model's context, ModelError if there is no memory for it.
    """
    depth = max(load.depth)
    longest = depth + max(load.prompt, load.decode + 1)
    if longest > spec.context:
        raise ConfigError(f"depth, prompt and decode need {longest} tokens; {spec.name} takes at most {spec.context}")
    step = max(*load.batch, min(load.prompt, STEP_TOKENS))
    config = msgspec.structs.replace(config, context=longest, max_running=max(load.batch), step_tokens=step)
    sequences = max(load.batch) * _blocks(max(1, depth) + load.decode)
    most = max(sequences, _blocks(depth + load.prompt))
    blocks = tuple(2 * max(load.batch) + 2 if group.kind == "state" else most for group in spec.groups)
    taken = divided(spec, config, weights)
    check_memory(spec, config, blocks, device_memory(config), taken)
    engine = RecordedEngine(spec, weights, config, blocks, memory=taken)
    for group, size in enumerate(engine.info.block_bytes):
        # Memory that was never written reads as one page of zeros, again and again, which costs next to nothing.
        page, some = memoryview(bytes(size)), max(1, WRITTEN_AT_ONCE // max(1, size))
        for at in range(0, blocks[group], some):
            ids = range(at, min(at + some, blocks[group]))
            engine.write_blocks(group, ids, [page] * len(ids)).wait()
    return Bench(spec, engine, load, taken, now, roofline)


def _scanned(spec: ModelSpec) -> int:
    """Operations of a token in recurrent layers: 7 for each number of a state."""
    kept = spec.recurrence
    return 0 if kept is None else 7 * len(kept.layers) * kept.inner * kept.key_size


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Tokens that differ from each other."""
    return [(7919 * (at + 1) + 104_729 * seed) % vocab for at in range(count)]
