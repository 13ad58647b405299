"""The stores below a worker's pool, as its options say."""

from __future__ import annotations

from pathlib import Path

from cairn.config import Config
from cairn.engine.base import EngineInfo
from cairn.errors import ConfigError
from cairn.kv.codec import open_codec
from cairn.kv.context import TierName
from cairn.kv.disk import DiskStore
from cairn.kv.ram import RamStore
from cairn.kv.store import Store
from cairn.seams import Clock, FileSystem
from cairn.types import ModelSpec

GB = 10**9


def open_stores(
    config: Config, spec: ModelSpec, info: EngineInfo, clock: Clock, files: FileSystem
) -> dict[TierName, Store]:
    """The fastest first; none where no option asks for one.

    Raises `ConfigError` for a folder that is no store of ours and for options that make no sense together, and
    `Conflict` where another process holds the folder. A disk that does not work is no error: see `DiskStore`.
    """
    stores: dict[TierName, Store] = {}
    if config.kv_ram_gb is not None:
        if info.device == "cpu":
            raise ConfigError(
                "kv_ram_gb is for engines whose pool is not in host memory; on the CPU a larger kv_gb does the same",
                field="kv_ram_gb",
            )
        stores["ram"] = RamStore(int(config.kv_ram_gb * GB))
    if config.kv_dir is not None and config.kv_disk:
        stores["disk"] = DiskStore(
            files,
            Path(config.kv_dir).expanduser().absolute(),
            identity=info.identity,
            model=config.served_name or spec.name,
            codec=open_codec("raw", info.block_bytes, spec.head_dim),
            clock=clock,
            budget=None if config.kv_disk_gb is None else int(config.kv_disk_gb * GB),
            fresh=config.kv_fresh,
        )
    return stores
