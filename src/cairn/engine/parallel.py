"""The engine of several ranks: rank 0 here, which plans and samples; the others in processes of their own.

All ranks take the same steps in the same order. A page has all ranks' parts in order; what several ranks hold alike
(shared key heads, latents) is in it once. If a call fails in one rank, for whatever reason, the others may still be
within it, and from then on all would add up parts of different layers. So that is a `DeviceError`: the worker ends, and
the supervisor starts all ranks anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from cairn.config.config import Config
from cairn.engine.machine import cpu_count
from cairn.engine.memory import check_memory, device_memory, kernels_of, pool_blocks, weight_memory
from cairn.engine.mtp_head import parallel_note
from cairn.engine.rank import load_shard
from cairn.engine.rank_group import RankGroup
from cairn.engine.rank_protocol import (
    Compute,
    CopyBlocks,
    Loaded,
    Pages,
    ReadPages,
    StartRank,
    ToRank,
    WritePages,
    part_of,
    receive_answer,
    send,
)
from cairn.engine.recorded import RecordedEngine
from cairn.engine.shards import ShardedWeights, check_parallel, kv_parts, shard_spec
from cairn.kernels import devices
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.types.errors import DeviceError, ModelError
from cairn.types.model_spec import ModelSpec
from cairn.types.step import AdapterData, AdapterFacts, EngineCall, Ready, Row, RowResult

_GPUS = ("cuda", "rocm")
CLOSE_SECONDS = 5.0
"""How long a rank may take to end."""


class RankProcess:
    """Another rank, seen from rank 0."""

    def __init__(self, number: int) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        self.number = number
        self.connection = Connection(ours.detach())
        with theirs:
            command = [sys.executable, "-P", "-m", "cairn.engine.rank", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def send(self, message: ToRank) -> None:
        """Send a command. Raises `DeviceError` if the rank is gone."""
        try:
            send(self.connection, message)
        except OSError as error:
            raise DeviceError(f"rank {self.number} is gone") from error

    def loaded(self) -> None:
        """Wait until the rank is loaded. Raises `ModelError` with its reason if it is not."""
        try:
            answer = receive_answer(self.connection)
        except (EOFError, OSError) as error:
            raise ModelError(f"rank {self.number} ended while it was loading") from error
        if isinstance(answer, Loaded) and answer.error:
            raise ModelError(f"rank {self.number}: {answer.error}")

    def pages(self) -> list[bytes]:
        """Return the pages that were asked for. Raises `DeviceError` if the rank is gone."""
        try:
            answer = receive_answer(self.connection)
        except (EOFError, OSError) as error:
            raise DeviceError(f"rank {self.number} is gone") from error
        assert isinstance(answer, Pages)
        return answer.pages

    def close(self, *, failed: bool = False) -> None:
        """End the process, by force if it does not go, or at once if it `failed` and may wait for another rank."""
        self.connection.close()
        if failed:
            self.process.kill()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ParallelEngine:
    """A `types.step.Engine` over several ranks."""

    def __init__(self, own: RecordedEngine, group: RankGroup, others: Sequence[RankProcess], parts: int) -> None:
        """Combine the ranks' engines. `parts`: how many parts a page is cut into."""
        self._own, self._group, self._others = own, group, list(others)
        self._sizes = own.info.block_bytes
        self._parts = parts
        self._steps = 0
        self._failed = ""
        """What the first call that failed met; every later one is refused."""
        self.info = dataclasses.replace(
            own.info,
            block_bytes=tuple(size * parts for size in self._sizes),
            device_text=f"{own.info.device_text}, {group.ranks} ranks",
            overlaps=False,
        )

    @classmethod
    def load(cls, spec: ModelSpec, folder: Path, config: Config, blocks: tuple[int, ...] = ()) -> ParallelEngine:
        """Start all ranks and load each one's part, or raise `ModelError`."""
        ranks, device = config.tp, devices.resolved(config.device)
        if device.startswith(devices.MLX) or device == "mps":
            raise ModelError(f"tp is {ranks}, but {device} has no ranks: use --device cpu, cuda or rocm")
        check_parallel(spec, ranks)
        part = shard_spec(spec, ranks)
        shared = not device.startswith(_GPUS)
        free = device_memory(config) // (ranks if shared else 1)
        if shared and not config.threads:
            config = msgspec.structs.replace(config, threads=max(1, cpu_count() // ranks))
        held = HeldWeights(open_weights(folder, spec), form_of(spec, config.weights))
        sharded = ShardedWeights(held, 0, ranks, part.heads, kv_parts(spec, ranks))
        weights = weight_memory(part, sharded, kernels_of(config))
        blocks = blocks or pool_blocks(part, config, free, weights)
        check_memory(part, config, blocks, free, weights)
        others = [RankProcess(number) for number in range(1, ranks)]
        meeting = Path(tempfile.mkdtemp(prefix="cairn-ranks-")) / "meeting"
        group: RankGroup | None = None
        own: RecordedEngine | None = None
        try:
            for other in others:
                options = msgspec.to_builtins(_of_rank(config, other.number))
                other.send(StartRank(str(folder), options, other.number, ranks, str(meeting), blocks))
            group = RankGroup(0, ranks, meeting, config.device)
            own = load_shard(spec, folder, config, group, blocks)
            for other in others:
                other.loaded()
        except BaseException:
            for other in others:
                other.process.kill()
                other.close()
            for one in (own, group):
                if one is not None:
                    one.close()
            raise
        finally:
            meeting.unlink(missing_ok=True)
            meeting.parent.rmdir()
        engine = cls(own, group, others, kv_parts(spec, ranks))
        engine.info = dataclasses.replace(engine.info, note=parallel_note(spec, folder, config))
        return engine

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute one step on all ranks."""
        if not rows:
            return Ready([])
        with self._together():
            self._tell(Compute(self._steps, [part_of(row) for row in rows]))
            self._steps += 1
            return Ready(self._own.prefill(rows).wait())

    def decode(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows of one token each."""
        return self.prefill(rows)

    def embed(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows whose hidden states are wanted."""
        return self.prefill(rows)

    def read_blocks(self, group: int, ids: Sequence[int]) -> EngineCall[list[memoryview]]:
        """Return pages with the parts of all ranks."""
        owners = [self._others[part * self._group.ranks // self._parts - 1] for part in range(1, self._parts)]
        with self._together():
            for other in owners:
                other.send(ReadPages(group, list(ids)))
            parts = [self._own.read_blocks(group, ids).wait(), *(other.pages() for other in owners)]
            return Ready([memoryview(b"".join(page)) for page in zip(*parts, strict=True)])

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> EngineCall[None]:
        """Hand each rank its part of the pages; a page of another size is a `ValueError` and writes nothing."""
        size, count = self._sizes[group], self._parts
        if any(memoryview(page).nbytes != size * count for page in pages):
            raise ValueError(f"a page of group {group} has {size * count} bytes")
        with self._together():
            for rank, other in enumerate(self._others, 1):
                number = rank * count // self._group.ranks
                other.send(WritePages(group, list(ids), [bytes(_part(page, size, number)) for page in pages]))
            return Ready(self._own.write_blocks(group, ids, [_part(page, size, 0) for page in pages]).wait())

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        """Copy blocks on all ranks."""
        with self._together():
            self._tell(CopyBlocks(group, list(pairs)))
            return Ready(self._own.copy_blocks(group, pairs).wait())

    def read_adapter(self, place: Path) -> AdapterData:
        """Raise ModelError: the parts of adapters are not shared among ranks."""
        raise ModelError(f"{place}: adapters need tp 1; the model runs on {self._group.ranks} ranks")

    def attach(self, adapter: AdapterData) -> AdapterFacts:
        """Raise ModelError, as `read_adapter` does."""
        raise ModelError("adapters need tp 1")

    def detach(self, digest: bytes) -> None:
        """Do nothing: no adapter is attached."""

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        for other in self._others:
            other.close(failed=bool(self._failed))
        self._others.clear()
        self._own.close()
        self._group.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Turn every exception of a call on all ranks into a plain `DeviceError`, and refuse the calls after it."""
        if self._failed:
            raise DeviceError(f"the ranks failed before and no longer agree: {self._failed}")
        try:
            yield
        except Exception as error:
            self._failed = f"{type(error).__name__}: {error}"[:300]
            if type(error) is DeviceError:
                raise
            # Neither a `DeviceMemoryError`, after which the rows would be run again, nor a mere error of these rows.
            raise DeviceError(f"rank 0 failed where the other ranks did not: {self._failed}") from error

    def _tell(self, message: ToRank) -> None:
        for other in self._others:
            other.send(message)


def _part(page: memoryview, size: int, number: int) -> memoryview:
    """Return a part of a page, in bytes."""
    return memoryview(page).cast("B")[number * size : (number + 1) * size]


def _of_rank(config: Config, number: int) -> Config:
    """Return the configuration of another rank, which computes on the GPU with its number."""
    kind, _, index = config.device.partition(":")
    if kind not in _GPUS:
        return config
    return msgspec.structs.replace(config, device=f"{kind}:{int(index or 0) + number}")
