"""Opening the KV stores below a worker's pool according to its options."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from cairn.cluster.shared import open_chunks
from cairn.config.config import Config
from cairn.config.paths import expanded, users_folder
from cairn.engine.machine import memory_available
from cairn.kernels.devices import has_own_memory
from cairn.kv.disk.codec import Codec, open_codec, state_groups
from cairn.kv.disk.codec_comparison import POOL_Q8, Comparison, recall
from cairn.kv.disk.folder import OF_MODELS, held
from cairn.kv.disk.model_folders import places
from cairn.kv.disk.store import DiskStore
from cairn.kv.pool.prefix import Layout, numerics
from cairn.kv.pool.sequence_kv import TierName
from cairn.kv.ram import RamStore
from cairn.kv.tiers.store import Store
from cairn.kv.tiers.write_behind import WriteLimits
from cairn.system.interfaces import Clock, FileSystem
from cairn.system.posix import SystemRng
from cairn.types.errors import ConfigError, Conflict
from cairn.types.model_spec import ModelSpec
from cairn.types.step import EngineInfo

GB = 10**9
PATIENCE = 5.0
"""Seconds to wait for an exiting process to release a folder."""
MOST_AHEAD = 1 << 30
"""Most bytes of the KV pool whose memory is allocated while the model loads."""


def stored_bytes(config: Config, files: FileSystem) -> int:
    """Return the bytes of stored KV, of any model, that may be loaded into the pool; at most `MOST_AHEAD`.

    0 if stored KV is off or the folder cannot be read.
    """
    if config.kv_dir is None or not config.kv_disk or config.kv_load == "never":
        return 0
    home, size = expanded(config.kv_dir).absolute(), 0
    stores = [home]
    try:
        with contextlib.suppress(FileNotFoundError):
            stores += [home / OF_MODELS / entry.name for entry in files.list(home / OF_MODELS)]
        for store in stores:
            with contextlib.suppress(FileNotFoundError):
                size += held(files, store, MOST_AHEAD - size)
    except OSError:
        return 0
    return size


def ram_bytes(config: Config, info: EngineInfo, elsewhere: bool, free: int) -> int:
    """Return the bytes of host memory that keep KV which left the pool; 0 for none.

    `elsewhere`: whether the pool is in a device's own memory; then a quarter of the `free` host memory is used unless
    `kv_ram_gb` says otherwise. A pool in host memory counts as not yet used. Raises `ConfigError` if it does not fit.
    """
    pool = 0 if elsewhere else sum(count * size for count, size in zip(info.blocks, info.block_bytes, strict=True))
    if config.kv_ram_gb is None:
        return free // 4 if elsewhere else 0
    wanted = int(config.kv_ram_gb * GB)
    if wanted > free - pool:
        beside = f" beside the KV pool of {pool / GB:.2f} GB" if pool else ""
        raise ConfigError(
            f"kv_ram_gb is {config.kv_ram_gb:g}, but {max(0, free - pool) / GB:.2f} GB of memory are free{beside}; "
            "lower kv_ram_gb" + (" or kv_gb" if pool else ""),
            field="kv_ram_gb",
        )
    return wanted


def keyed(info: EngineInfo, codec: str) -> EngineInfo:
    """Return the engine's description with the codec made part of every KV key: see `prefix.numerics`."""
    return dataclasses.replace(info, identity=numerics(info.identity, codec))


def open_stores(
    config: Config,
    spec: ModelSpec,
    info: EngineInfo,
    clock: Clock,
    files: FileSystem,
    env: Mapping[str, str],
    part: float = 0.0,
) -> tuple[dict[TierName, Store], str]:
    """Open the configured stores; return them, fastest first, and why the disk store is missing ("" if it is not).

    `info` as `keyed` returns it; `part` as in `wire.LoadModel`. Raises `ConfigError` for a folder that is not a KV
    store, for contradictory options, and for a lossy codec that was not compared with `raw` on this model or differs
    too much. Raises `Conflict` if another process holds the folder. The user's default folder is left out instead of
    raising. A disk that does not work is no error: see `DiskStore`.
    """
    stores: dict[TierName, Store] = {}
    trouble = ""
    if room := ram_bytes(config, info, has_own_memory(info.device), memory_available()):
        stores["ram"] = RamStore(room)
    if config.kv_dir is not None and config.kv_disk:
        folder = expanded(config.kv_dir).absolute()
        try:
            codec = _codec(config, spec, info, files, folder)
        except OSError as error:
            return stores, f"no KV is kept on the disk: the result of check-codec cannot be read: {error}"
        try:
            stores["disk"] = _open_disk(config, spec, info, clock, files, folder, codec, part)
        except (ConfigError, Conflict) as error:
            if folder != users_folder(env).absolute():
                raise
            trouble = f"no KV is kept on the disk: {error}"
    if (shared := open_chunks(config, info.identity, clock, files, SystemRng())) is not None:
        stores["shared"] = shared
    return stores, trouble


def _open_disk(
    config: Config,
    spec: ModelSpec,
    info: EngineInfo,
    clock: Clock,
    files: FileSystem,
    home: Path,
    codec: Codec,
    part: float,
) -> DiskStore:
    """Open the model's store in the folder of all models, or one of the places beside it if the model is served twice.

    Whoever opens the usual place next takes in the other places. Raise `Conflict` if all are in use.
    """
    possible = places(home, spec.identity)
    for place in possible:
        try:
            return DiskStore(
                files,
                place,
                identity=info.identity,
                model=config.served_name or spec.name,
                codec=codec,
                clock=clock,
                budget=None if config.kv_disk_gb is None else int(config.kv_disk_gb * GB),
                share=part or 1.0,
                ttl=config.kv_ttl or math.inf,
                fresh=config.kv_fresh,
                home=home,
                layout=Layout(info.block_tokens, info.groups),
                patience=PATIENCE if place == possible[0] else 0.0,
            )
        except Conflict:
            if place == possible[-1]:
                raise
    raise AssertionError("a model has no place for its store")


def write_limits(config: Config) -> WriteLimits:
    """Return the limits on what is stored. With a shared store, chunks and tails are copied well within its lag."""
    limits = WriteLimits(day_bytes=config.kv_write_gb * GB)
    if config.shared_store is None:
        return limits
    wait = min(limits.copy_seconds, config.shared_lag / 4)
    return dataclasses.replace(limits, copy_seconds=wait, idle_seconds=wait)


def _codec(config: Config, spec: ModelSpec, info: EngineInfo, files: FileSystem, folder: Path) -> Codec:
    try:
        codec = open_codec(config.kv_codec, info.block_bytes, spec.head_dims, info.kv_dtype, state_groups(info.groups))
    except ValueError as error:
        raise ConfigError(f"kv_codec: q8 cannot hold the KV of {spec.name}: {error}", field="kv_codec") from error
    if codec.lossless:
        return codec
    _check_compared(config, recall(files, folder, info.identity, codec.name), folder, "kv_codec", "raw")
    return codec


def check_pool(config: Config, info: EngineInfo, files: FileSystem, env: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a q8 pool unless check-codec found it close enough on this model.

    `info` is the engine's own: the codec of stored KV does not matter here.
    """
    if info.kv_dtype != "int8":
        return
    folder = expanded(config.kv_dir).absolute() if config.kv_dir is not None else users_folder(env).absolute()
    try:
        found = recall(files, folder, info.identity, POOL_Q8)
    except OSError as error:
        raise ConfigError(
            f"kv_dtype: the result of check-codec for q8 cannot be read: {error}", field="kv_dtype"
        ) from error
    _check_compared(config, found, folder, "kv_dtype", "the usual type")


def _check_compared(config: Config, found: Comparison | None, folder: Path, option: str, beside: str) -> None:
    """Raise `ConfigError` if q8 as the value of an option was not compared with `beside`, or differs too much."""
    if found is None:
        # Options that are part of the keys: with others, different numbers would be compared.
        named = {
            "device": config.device,
            "kernels": config.kernels,
            "weights": config.weights,
            "kv-dtype": config.kv_dtype,
        }
        flags = "".join(f" --{name} {value}" for name, value in named.items() if value != "auto")
        raise ConfigError(
            f"{option}: q8 was not compared with {beside} on this model; run: cairn cache check-codec "
            f"{shlex.quote(config.model)} --kv-dir {shlex.quote(str(folder))}{flags}",
            field=option,
        )
    if found.refusal:
        raise ConfigError(f"{option}: {found.refusal}", field=option)
