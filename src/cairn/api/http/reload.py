"""Reloading of options, on SIGHUP and at POST /v1/admin/reload.

Options are read from where they were read at the start: flags and the environment are as they were, files may have
changed, those of options as well as those of keys and certificates. `CHANGED` lists what can change; any other option
that differs is named with what it needs. If the new options cannot be used, or a server with keys would have none,
nothing changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from cairn.api.http.auth import Access, check_exposure, check_tls, has_keys
from cairn.config.config import Config
from cairn.config.values import LIMITS, TenantLimits
from cairn.served_models.loaded_models import Models
from cairn.types.errors import ConfigError, InvalidRequest

log = logging.getLogger("cairn.api")

CHANGED = frozenset(
    {"api_key", "tenants", "admin_key", "allowed_hosts", "cors_origins", "log_level", "alias", *LIMITS}
    | {"max_loaded", "memory_gb", "load_timeout", "model_ttl", "shutdown_grace", "models"}
)
"""The options that a running server takes anew."""
RESTART = "it takes a restart of the server"


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a reload."""

    changed: tuple[str, ...]
    """Options that hold from now on."""
    unchanged: dict[str, str]
    """Options that differ and keep their old value, with what they need."""


class Reload:
    """The options of one server, as they are now. Whoever uses one that can change gives `watch` a function."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.again: Callable[[], Config] | None = None
        """Reads all options; None if their source is unknown."""
        self._watchers: list[Callable[[Config], None]] = []

    def watch(self, watcher: Callable[[Config], None]) -> None:
        """Call `watcher` with the new options after every change."""
        self._watchers.append(watcher)

    def __call__(self, models: Models | None) -> Reloaded:
        """Read the options again and apply those that can change.

        Raises InvalidRequest if they cannot be used: then nothing has changed.
        """
        if self.again is None:
            raise InvalidRequest("this server's options came from no file, flag or variable that could be read again")
        try:
            read = self.again()
            wanted, unchanged = _possible(self.config, read)
            _check_keys(self.config, wanted)
            check_exposure(wanted)
            Access(wanted)  # raises before anything is replaced
            check_tls(wanted)
            if models is not None:
                unchanged |= models.configure(wanted)
        except ConfigError as error:
            why = f"the options cannot be used, and nothing is changed: {error}"
            raise InvalidRequest(why, field=error.field) from None
        changed = tuple(name for name in sorted(CHANGED) if getattr(wanted, name) != getattr(self.config, name))
        self.config = wanted
        logging.getLogger("cairn").setLevel(wanted.log_level.upper())
        for watcher in self._watchers:
            watcher(wanted)
        log.info("the options were read again; changed: %s", ", ".join(changed) or "none")
        for name, why in unchanged.items():
            log.warning("%s has changed, but %s", name, why)
        return Reloaded(changed=changed, unchanged=unchanged)


def _check_keys(now: Config, wanted: Config) -> None:
    """Raise ConfigError if a server that has keys would have none.

    A file of options may be cut off while an editor writes it, and would let everybody in.
    """
    for name, what, lost in (
        ("admin_key", "admin key", now.admin_key is not None and wanted.admin_key is None),
        ("tenants", "tenants", bool(now.tenants) and not wanted.tenants),
        ("api_key", "API key", has_keys(now) and not has_keys(wanted)),
    ):
        if lost:
            raise ConfigError(
                f"the new options have no {what} any more; write it back, or restart the server to run it without",
                field=name,
            )


def _possible(now: Config, read: Config) -> tuple[Config, dict[str, str]]:
    """Return the options that can hold from now on, and those that changed and cannot."""
    differing = {name for name in Config.__struct_fields__ if getattr(now, name) != getattr(read, name)}
    unchanged = dict.fromkeys(sorted(differing - CHANGED), RESTART)
    taken: dict[str, Any] = {name: getattr(read, name) for name in differing & CHANGED}
    before = {one.name: one.limits for one in now.tenants}
    for one in read.tenants:
        for name in ("weight", "priority"):
            if getattr(one.limits, name) != getattr(before.get(one.name, TenantLimits()), name):
                unchanged[f"tenants.{one.name}.{name}"] = RESTART
    return msgspec.structs.replace(now, **taken), unchanged
