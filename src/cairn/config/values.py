"""Types of options that are more than a number or a text: keys, tenants, models and adapters."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

KEY = "printable ASCII characters without spaces, at least one"
"""Rule for API keys, for messages: other characters cannot be sent in a header."""


def is_key(text: str) -> bool:
    """Return whether a text can be an API key: see `KEY`."""
    return bool(text) and all("!" <= char <= "~" for char in text)


class Secret:
    """A string that does not print itself."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the secret's text, to compare or send it; never print it."""
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash(self._value)


class TenantLimits(msgspec.Struct, frozen=True):
    """Limits of one tenant; None means the server's option of the same name."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_agents: int | None = None
    max_disk_mib: int | None = None
    weight: float = 1.0
    """Weight in the scheduler's round robin between tenants."""
    priority: int = 0
    """Priority class in the scheduler; lower numbers are served first."""


class TenantTurns(msgspec.Struct, frozen=True):
    """The scheduler's settings of tenants that differ from the default, by tenant name."""

    weights: dict[str, float] = {}
    """Weight in the round robin between tenants; 1 for others."""
    priorities: dict[str, int] = {}
    """Priority class, lower numbers first; 0 for others."""


class TenantKeys(msgspec.Struct, frozen=True):
    """A tenant named in the configuration, with its API keys and limits."""

    name: str
    keys: tuple[Secret, ...]
    limits: TenantLimits = TenantLimits()

    def __str__(self) -> str:
        return f"{self.name} ({len(self.keys)} key{'s' if len(self.keys) != 1 else ''})"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a server: a table of [[models]] in cairn.toml, or a MODEL of the command line."""

    model: str
    name: str | None = None
    """Name for clients; None: the one in the model's files."""
    aliases: tuple[str, ...] = ()
    kv_share: float | None = None
    """Part of `kv_disk_gb`, 0 to 1; None: an equal part of what other models leave."""
    pin: bool = False
    """Whether it is loaded at the start and never evicted for another model."""
    ttl: float | None = None
    """Seconds without requests after which it is unloaded; None: the server's `model_ttl`."""
    load: bool = True
    """Whether it is loaded at the start if there is memory."""
    options: dict[str, Any] = {}
    """Fields of `Config` that differ from the server's."""

    def __str__(self) -> str:
        return self.name or self.model


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that is loaded with its model: a table of [[adapters]], or NAME=PATH."""

    name: str
    path: str
    """A PEFT folder or a .gguf file."""
    model: str | None = None
    """Name of the model that it belongs to; None: the server's only one."""

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "max_concurrent",
    "max_agents",
    "max_disk_mib",
)
"""The fields of `TenantLimits` that default to the server's option of the same name."""
