"""Profiles of `cairn tune` as a source of options: below flags, variables and files, above the defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cairn.config.paths import expanded
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError, ModelError

NONE = "none"


def profiled(resolved: Resolved) -> Resolved:
    """Return the options with those of the model's profile on this machine.

    Only a server or program with one model on the CPU, in one process, has a profile. Raise ConfigError for a named
    profile that is missing, broken, of another model or machine, or given for another device.
    """
    config = resolved.config
    if config.profile == NONE or config.models or config.models_dir is not None or config.engine == "fake":
        return resolved
    if config.device not in ("auto", "cpu") or config.tp > 1:
        if config.profile is None:
            return resolved
        raise ConfigError(
            f"profile {config.profile}: profiles are of one model on the CPU, without tp; here device is "
            f"{config.device} and tp {config.tp}; use --profile none",
            field="profile",
        )
    path = _kept(config.model) if config.profile is None else _named(config.profile, config.model)
    if path is None:
        return resolved
    from cairn.engine import profile

    given = profile.read(path).options.given()
    own = {name: value for name, value in given.items() if name not in resolved.sources}
    return Resolved(
        msgspec.structs.replace(config, **own),
        lambda: profiled(resolved.again()),
        resolved.sources | dict.fromkeys(own, f"profile {path}"),
        resolved.file,
    )


def _kept(model: str) -> Path | None:
    """Return the file of a model's own profile, if there is one.

    Without any profile nothing of the model is read: most starts have none.
    """
    from cairn.engine import profile

    try:
        if not any(profile.folder().glob("*.json")):
            return None
        path = profile.path_of(_identity(model))
    except (CairnError, OSError):  # a model that cannot be found or read is told where it is loaded
        return None
    return path if path.is_file() else None


def _named(place: str, model: str) -> Path:
    from cairn.engine import profile

    path = expanded(place)
    found = profile.read(path)
    try:
        identity = _identity(model)
    except ModelError:
        return path
    if found.identity != identity.hex():
        raise ConfigError(f"{path} is the profile of {found.model}; tune {model} to a file of its own", field="profile")
    if found.machine != profile.machine():
        raise ConfigError(f"{path} was made on another machine ({found.machine}); tune again here", field="profile")
    return path


def _identity(model: str) -> bytes:
    """Return the digest of a model that is on this machine. Raise ModelError."""
    from cairn.models.hub import hub
    from cairn.models.spec.config import load_spec

    return load_spec(hub.locate(model)).identity
