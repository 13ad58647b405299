"""The folders with a server's durable data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cairn.config.config import Config
from cairn.config.paths import expanded, home, users_folder
from cairn.system.interfaces import Clock, FileSystem, Lock
from cairn.types.errors import ConfigError

log = logging.getLogger("cairn.api")

_HELD = ".held"
"""Suffix of the folders beside the user's own that mark them as held by a server. They hold nothing else."""
_USUAL_PORT = 8000


def agents_folder(config: Config, env: Mapping[str, str]) -> Path:
    """Return the folder of the agents."""
    if config.agents_dir:
        return expanded(config.agents_dir)
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else home() / ".local" / "share") / "cairn" / "agents"


def check_folders(config: Config, env: Mapping[str, str]) -> None:
    """Raise ConfigError unless KV and agents have folders apart: each owns its folder and cleans it."""
    if config.kv_dir is None or not config.kv_disk:
        return
    try:
        kv = expanded(config.kv_dir).resolve()
        agents = agents_folder(config, env).resolve()
    except (OSError, RuntimeError):
        return  # using such a path raises a better error
    if kv == agents or kv in agents.parents or agents in kv.parents:
        raise ConfigError(
            f"agents_dir {agents} and kv_dir {kv} must be two folders, neither of them in the other", field="agents_dir"
        )


@contextlib.contextmanager
def usual_held(
    config: Config, env: Mapping[str, str], files: FileSystem, clock: Clock, pause: Callable[[], bool], patience: float
) -> Iterator[None]:
    """Hold the user's own folders that this server uses because no option names others.

    Agents outlive a change of the model, and KV of all models shares one budget: there is one folder for each, and one
    server that has it. If another server holds one for `patience` seconds more, or until `pause` returns False,
    ConfigError names the options. If no lock can be had at all, opening the folder will say why.
    """
    usual = {}
    with contextlib.suppress(ConfigError):
        if not config.agents_dir:
            usual["--agents-dir"] = agents_folder(config, env)
        if config.kv_dir is not None and config.kv_disk and expanded(config.kv_dir) == users_folder(env):
            usual["--kv-dir"] = users_folder(env)
    until = clock.now() + patience
    with contextlib.ExitStack() as held:
        taken = {}
        for option, folder in usual.items():
            with contextlib.suppress(OSError):
                place = folder.with_name(folder.name + _HELD)
                files.make_folder(place)
                if (lock := _wait(files, place, clock, pause, until)) is None:
                    taken[option] = folder
                else:
                    held.callback(lock.release)
        if taken:
            raise ConfigError(_refusal(config, taken))
        yield


def _wait(files: FileSystem, place: Path, clock: Clock, pause: Callable[[], bool], until: float) -> Lock | None:
    told = False
    while (lock := files.lock(place)) is None:
        if clock.now() >= until:
            return None
        if not told:
            log.info("another server has %s; waiting for it, at most %.0f s", place.stem, until - clock.now())
            told = True
        if not pause():
            return None
    return lock


def _refusal(config: Config, taken: Mapping[str, Path]) -> str:
    kept = {"--agents-dir": "agents", "--kv-dir": "KV"}
    what = " and ".join(f"{kept[option]} in {folder}" for option, folder in taken.items())
    own = config.port if config.port not in (0, _USUAL_PORT) else 2
    options = " ".join(f"{option} {folder}-{own}" for option, folder in taken.items())
    return f"another server keeps its {what}; end it, or give this one a place of its own: {options}"


def named(config: Config, env: Mapping[str, str]) -> Sequence[str]:
    """Return the folders as messages name them, the longest first."""
    found = [agents_folder(config, env)]
    if config.kv_dir is not None:
        found.append(expanded(config.kv_dir))
    return sorted({str(path) for folder in found for path in (folder, folder.absolute())}, key=len, reverse=True)
