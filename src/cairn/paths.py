"""Paths as a person writes them."""

from __future__ import annotations

from pathlib import Path

from cairn.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """The path with `~` put in full. ConfigError where nobody knows whose home that is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no home folder of that user; write the path in full") from None


def home() -> Path:
    """The user's home folder. ConfigError where there is none."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError("this user has no home folder; set HOME, or name the folders with options") from None
