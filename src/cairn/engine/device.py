"""From a configuration and a folder to a loaded engine: which engine computes, on what, and with how much memory."""

from __future__ import annotations

from pathlib import Path

from cairn.config import Config
from cairn.engine.base import Engine
from cairn.engine.machine import Gpu, cpu_count, cpu_name, gpus, instruction_sets, memory_available
from cairn.engine.pool import block_bytes, check_memory, pool_blocks, weight_bytes
from cairn.models.spec import load_spec
from cairn.types import ModelSpec

__all__ = [
    "Gpu",
    "block_bytes",
    "check_memory",
    "cpu_count",
    "cpu_name",
    "gpus",
    "instruction_sets",
    "load_engine",
    "memory_available",
    "pool_blocks",
    "weight_bytes",
]


def load_engine(config: Config, folder: Path) -> tuple[ModelSpec, Engine]:
    """The model in `folder`, loaded into the engine that `config.engine` names: whole, or a `ModelError`."""
    spec = load_spec(folder)
    if config.engine == "fake":
        # Imported here so that a server never loads the code of an engine that it does not run.
        from cairn.engine.fake import FakeEngine

        engine = FakeEngine(
            spec,
            blocks=pool_blocks(spec, config),
            context=config.context,
            max_rows=min(config.max_running, config.step_tokens),
            max_tokens=config.step_tokens,
        )
        return spec, engine
    from cairn.engine.cpu import CpuEngine

    return spec, CpuEngine.load(spec, folder, config)
