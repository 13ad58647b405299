"""Measuring a model's options on this machine, one after another, and keeping those that pay.

The arithmetic of an answer stays what it is, but for its last bits where the kernels or the type of KV change: KV that
was stored before is then not found, and the result says so.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.config import Config
from cairn.engine.machine import cpu_count
from cairn.engine.memory import kv_dtype
from cairn.engine.profile import Speed, TunedOptions
from cairn.engine.recorded import RecordedEngine
from cairn.kernels.choose import REFERENCE, chosen
from cairn.kernels.native import variants
from cairn.types.model_spec import BLOCK_TOKENS, ModelSpec
from cairn.types.request import SamplingParams
from cairn.types.step import Row

PAYS = 0.03
"""Least gain for which an option is changed: less is noise."""
DEPTH, ROWS, DECODED = 256, 8, 12
PROMPT = 1024
STEPS = (128, 256, 512, 1024)
_ROUNDS = 2
_SPARE = 64
_GREEDY = SamplingParams(max_tokens=1, temperature=0)

Tell = Callable[[str], None]


class Tuner:
    """Measures options of one model until time is up."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        config: Config,
        fixed: frozenset[str],
        *,
        now: Callable[[], float],
        seconds: float,
        tell: Tell,
    ) -> None:
        """Prepare for at most so many seconds.

        `fixed`: options that somebody has set, which stay. `tell` gets a line for each measurement.
        """
        self._spec, self._folder, self._config, self._fixed = spec, folder, config, fixed
        self._now, self._tell = now, tell
        self._end = now() + seconds
        self._longest = 0.0
        """Seconds of the longest measurement so far."""

    def run(self) -> tuple[TunedOptions, Speed, Speed]:
        """Return the options that pay, and the speed without and with them, measured in turns at the end."""
        best, found = self._config, self._measure(self._config, "as it is")
        for name, value in self._candidates():
            if name in self._fixed or value == self._effective(best, name):
                continue
            if self._now() + 4 * self._longest > self._end:  # the comparison at the end takes three
                self._tell("time is up: the rest is left as it is")
                break
            tried = msgspec.structs.replace(best, **{name: value})
            speed = self._measure(tried, f"{name} {value}")
            if speed.score > found.score * (1 + PAYS):
                best, found = tried, speed
        # A value equal to the option's effective default (noise) is no change.
        changed = {
            name: getattr(best, name)
            for name in TunedOptions.__struct_fields__
            if self._effective(best, name) != self._effective(self._config, name)
        }
        if not changed:
            return TunedOptions(), found, found
        before, after = self._compare(msgspec.structs.replace(self._config, **changed))
        if after.score < before.score * (1 + PAYS):
            self._tell("beside each other they are equally fast: nothing is changed")
            return TunedOptions(), before, before
        return TunedOptions(**changed), before, after

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        cores = cpu_count()
        yield from (("threads", count) for count in sorted({cores, cores - 1, cores // 2} - {0}, reverse=True))
        usable = [name for name, runs in variants().items() if runs and name != "portable"]
        yield from (("kernels", name) for name in usable[:3])
        yield from (("kv_dtype", name) for name in ("f16", "bf16"))
        yield from (("step_tokens", size) for size in STEPS)

    def _effective(self, config: Config, name: str) -> Any:
        """Return the value that an option means, where it is left to the program."""
        value = getattr(config, name)
        if name == "threads":
            return value or cpu_count()
        if name == "kernels":
            return chosen(value)
        if name == "kv_dtype":
            return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(kv_dtype(self._spec, config), value)
        return value

    def _compare(self, best: Config) -> tuple[Speed, Speed]:
        """Measure both in turns."""
        pairs = [(self._measure(self._config, "as it is, again"), self._measure(best, "tuned, again"))]
        if self._now() + 2 * self._longest < self._end:
            after, before = self._measure(best, "tuned, again"), self._measure(self._config, "as it is, again")
            pairs.append((before, after))
        return _middle([before for before, _ in pairs]), _middle([after for _, after in pairs])

    def _measure(self, config: Config, what: str) -> Speed:
        began = self._now()
        prompt = min(PROMPT, self._spec.context - _SPARE)
        depth = min(DEPTH, prompt // 2)
        blocks = -(-max(prompt, ROWS * (depth + DECODED + BLOCK_TOKENS)) // BLOCK_TOKENS) + ROWS
        counts = tuple(2 * ROWS + 2 if one.kind == "state" else blocks for one in self._spec.groups)
        config = msgspec.structs.replace(config, context=prompt + _SPARE, max_running=ROWS)
        engine = RecordedEngine.load(self._spec, self._folder, config, blocks=counts)
        try:
            work = _TuneWork(engine, self._now)
            work.prefill(prompt // 4)  # the first touches the memory
            speed = Speed(
                prefill=statistics.median(work.prefill(prompt) for _ in range(_ROUNDS)),
                decode=work.decode(1, depth),
                decode_8=work.decode(ROWS, depth),
            )
        finally:
            engine.close()
        self._longest = max(self._longest, self._now() - began)
        self._tell(
            f"{what}: prefill {speed.prefill:.0f}, one sequence {speed.decode:.1f}, eight {speed.decode_8:.1f} tokens/s"
        )
        return speed


class _TuneWork:
    """Steps of one engine, timed."""

    def __init__(self, engine: RecordedEngine, now: Callable[[], float]) -> None:
        self._engine, self._now = engine, now
        self._vocab = engine.info.vocab

    def prefill(self, tokens: int) -> float:
        """Return the tokens per second of one prompt, in steps as long as the engine takes."""
        known, most, tables = self._tokens(tokens, 0), self._engine.info.max_tokens, self._tables(0, tokens)
        began = self._now()
        for start in range(0, tokens, most):
            end = min(tokens, start + most)
            wanted = end - 1 if end == tokens else None
            self._engine.prefill([Row(known, start, end, tables, wanted, tokens, _GREEDY, 0)]).wait()
        return tokens / max(1e-9, self._now() - began)

    def decode(self, count: int, depth: int) -> float:
        """Return the tokens per second of `count` sequences at a depth: the median of some steps."""
        end = depth + DECODED
        known = [self._tokens(end, number) for number in range(count)]
        tables = [self._tables(number, end) for number in range(count)]
        times = []
        for at in range(depth, end):
            rows = [
                Row(tokens[:at], at - 1, at, table, at - 1, depth, _GREEDY, 0)
                for tokens, table in zip(known, tables, strict=True)
            ]
            began = self._now()
            self._engine.decode(rows).wait()
            times.append(self._now() - began)
        return count / max(1e-9, statistics.median(times))

    def _tokens(self, count: int, seed: int) -> list[int]:
        return [(7919 * (at + 1) + 104_729 * seed) % self._vocab for at in range(count)]

    def _tables(self, number: int, tokens: int) -> tuple[list[int], ...]:
        count = -(-tokens // BLOCK_TOKENS)
        return tuple(
            [2 * number + place % 2 for place in range(count)]
            if group.kind == "state"
            else list(range(number * count, (number + 1) * count))
            for group in self._engine.info.groups
        )


def check_tunable(spec: ModelSpec, config: Config) -> None:
    """Raise ConfigError for what has nothing to tune."""
    from cairn.kernels import devices
    from cairn.types.errors import ConfigError

    if spec.whole or devices.resolved(config.device) != devices.CPU or chosen(config.kernels) == REFERENCE:
        raise ConfigError(f"{spec.name}: only models that generate text on the CPU, with compiled kernels, are tuned")


def _middle(speeds: list[Speed]) -> Speed:
    parts = zip(*((one.prefill, one.decode, one.decode_8) for one in speeds), strict=True)
    return Speed(*itertools.starmap(lambda *values: statistics.fmean(values), parts))
