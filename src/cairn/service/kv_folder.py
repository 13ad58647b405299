"""Where a server keeps its KV; apart from `stores`, which imports all that KV needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cairn.config import Config
from cairn.paths import home


def with_folder(config: Config, env: Mapping[str, str]) -> Config:
    """The configuration of a server: where no folder for KV is named, it has the user's own."""
    if config.kv_dir is not None or not config.kv_disk:
        return config
    return msgspec.structs.replace(config, kv_dir=str(users_folder(env)))


def users_folder(env: Mapping[str, str]) -> Path:
    """The user's own, as the XDG base directory specification has it."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "cairn" / "kv"
