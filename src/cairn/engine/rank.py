"""The process of a rank but the first: `python -m cairn.engine.rank FD`.

It loads its part, does what rank 0 says, and ends when rank 0 is gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import msgspec

from cairn.config.config import Config
from cairn.engine.rank_group import RankGroup, ShardKernels
from cairn.engine.rank_protocol import (
    Compute,
    CopyBlocks,
    Loaded,
    Pages,
    ReadPages,
    StartRank,
    WritePages,
    receive_command,
    row_of,
    send,
)
from cairn.engine.recorded import RecordedEngine
from cairn.engine.shards import ShardedWeights, kv_parts, shard_spec
from cairn.kernels.base import Kernels
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.models.spec.judge import with_judge
from cairn.types.errors import CairnError, DeviceError
from cairn.types.model_spec import ModelSpec


def load_shard(
    spec: ModelSpec, folder: Path, config: Config, group: RankGroup, blocks: tuple[int, ...]
) -> RecordedEngine:
    """Return one rank's engine over its part of the model."""
    held = HeldWeights(open_weights(folder, spec), form_of(spec, config.weights))
    part = shard_spec(spec, group.ranks)
    weights = ShardedWeights(held, group.rank, group.ranks, part.heads, kv_parts(spec, group.ranks))

    def summed(kernels: Kernels) -> Kernels:
        return cast(Kernels, ShardKernels(kernels, weights, group))

    return RecordedEngine(part, weights, config, blocks, held.form, through=summed)


def serve(connection: Connection) -> None:
    """Load what rank 0 says, then follow it until it is gone."""
    start = receive_command(connection)
    assert isinstance(start, StartRank)
    config = msgspec.convert(start.config, Config)
    folder = Path(start.folder)
    try:
        group = RankGroup(start.rank, start.ranks, Path(start.meeting), config.device)
        spec = with_judge(load_spec(folder, identify=False), folder, config.kind)
        engine = load_shard(spec, folder, config, group, start.blocks)
    except CairnError as error:
        send(connection, Loaded(str(error)))
        return
    send(connection, Loaded())
    done = 0
    while True:
        command = receive_command(connection)
        if isinstance(command, Compute):
            if command.number != done:
                raise DeviceError(f"rank {group.rank} was given step {command.number} after {done} steps")
            done += 1
            engine.prefill([row_of(part) for part in command.rows]).wait()
        elif isinstance(command, ReadPages):
            pages = engine.read_blocks(command.group, command.ids).wait()
            send(connection, Pages([bytes(page) for page in pages]))
        elif isinstance(command, WritePages):
            engine.write_blocks(command.group, command.ids, [memoryview(page) for page in command.pages]).wait()
        elif isinstance(command, CopyBlocks):
            engine.copy_blocks(command.group, command.pairs).wait()


def main() -> None:
    """Serve the connection whose descriptor is the only argument."""
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError, DeviceError):
        pass
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)  # a collective that waits for a dead rank would keep the process


if __name__ == "__main__":
    main()
