"""Tensor-parallel ranks as threads of one process: all of `--tp` but gloo and the processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cairn.config.config import Config
from cairn.engine.memory import pool_blocks
from cairn.engine.rank import load_shard
from cairn.engine.recorded import RecordedEngine
from cairn.engine.shards import shard_spec
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import ModelSpec
from cairn.types.step import EngineCall, Ready, Row, RowResult

SECONDS = 60.0


class ThreadGroup:
    """A stand-in for `RankGroup` among threads."""

    def __init__(self, rank: int, ranks: int, barrier: threading.Barrier, parts: list[Any]) -> None:
        self.rank, self.ranks = rank, ranks
        self._barrier, self._parts = barrier, parts

    def add_up(self, part: np.ndarray) -> None:
        """Replace the parts of sums by their totals, added in the order of ranks."""
        self._parts[self.rank] = part.copy()
        self._barrier.wait(SECONDS)
        total = self._parts[0].copy()
        for one in self._parts[1:]:
            total += one
        self._barrier.wait(SECONDS)
        part[:] = total


class ThreadedRanks:
    """An engine of several ranks, with the methods that `Driver` needs."""

    def __init__(self, folder: Path, ranks: int, **options: Any) -> None:
        config = Config(model=str(folder), **{"tp": ranks, "kv_dtype": "f32", "kv_gb": 0.01, "threads": 1, **options})
        spec = load_spec(folder)
        blocks = pool_blocks(shard_spec(spec, ranks), config)
        barrier, parts = threading.Barrier(ranks), [None] * ranks
        self._threads = ThreadPoolExecutor(ranks)

        def load(rank: int) -> RecordedEngine:
            group: Any = ThreadGroup(rank, ranks, barrier, parts)
            return load_shard(spec, folder, config, group, blocks)

        self.ranks = [load(rank) for rank in range(ranks)]
        self.info = self.ranks[0].info

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute a step on all ranks; return the first one's logits."""
        quiet = [msgspec.structs.replace(row, logits_from=None) for row in rows]
        return Ready(self._all(lambda rank: self.ranks[rank].prefill(quiet if rank else rows).wait())[0])

    decode = prefill

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        """Copy blocks on all ranks."""
        self._all(lambda rank: self.ranks[rank].copy_blocks(group, pairs).wait())
        return Ready(None)

    def close(self) -> None:
        """End all ranks."""
        for engine in self.ranks:
            engine.close()
        self._threads.shutdown()

    def _all(self, run: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(run, range(len(self.ranks))))


def dividing(fields: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a model's fields with numbers of heads and widths that four ranks divide."""
    heads = 8 if spec.heads % 4 else spec.heads
    keys = heads if spec.latent is not None else {1: 1, 2: 2}.get(spec.kv_heads, 4)
    wide = {"intermediate_size": 80} if spec.ffn % 4 else {}
    return {**fields, "num_attention_heads": heads, "num_key_value_heads": keys, **wide}
