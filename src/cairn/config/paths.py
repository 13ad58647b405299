"""Paths in options: expansion of `~`, and the user's own folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cairn.config.config import Config
from cairn.types.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """Return the path with `~` expanded. Raise ConfigError if that home is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no home folder of that user; write the path in full") from None


def home() -> Path:
    """Return the user's home folder. Raise ConfigError if there is none."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError("this user has no home folder; set HOME, or name the folders with options") from None


def with_folder(config: Config, env: Mapping[str, str]) -> Config:
    """Return the configuration with the user's own KV folder if it names none."""
    if config.kv_dir is not None or not config.kv_disk:
        return config
    return msgspec.structs.replace(config, kv_dir=str(users_folder(env)))


def users_folder(env: Mapping[str, str]) -> Path:
    """Return the user's KV folder by the XDG base directory specification."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "cairn" / "kv"
