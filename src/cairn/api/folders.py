"""Where a server keeps what is durable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cairn.config import Config
from cairn.errors import ConfigError
from cairn.paths import expanded, home


def agents_folder(config: Config, env: Mapping[str, str]) -> Path:
    """Where agents are kept."""
    if config.agents_dir:
        return expanded(config.agents_dir)
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else home() / ".local" / "share") / "cairn" / "agents"


def check_folders(config: Config, env: Mapping[str, str]) -> None:
    """ConfigError unless KV and agents are kept apart: each takes a folder for its own, and sees to what lies in it."""
    if config.kv_dir is None or not config.kv_disk:
        return
    try:
        kv = expanded(config.kv_dir).resolve()
        agents = agents_folder(config, env).resolve()
    except (OSError, RuntimeError):
        return  # whoever uses such a path says what is wrong with it
    if kv == agents or kv in agents.parents or agents in kv.parents:
        raise ConfigError(
            f"agents_dir {agents} and kv_dir {kv} must be two folders, neither of them in the other", field="agents_dir"
        )


def named(config: Config, env: Mapping[str, str]) -> Sequence[str]:
    """The folders as sentences about trouble name them, the longest first."""
    found = [agents_folder(config, env)]
    if config.kv_dir is not None:
        found.append(expanded(config.kv_dir))
    return sorted({str(path) for folder in found for path in (folder, folder.absolute())}, key=len, reverse=True)
