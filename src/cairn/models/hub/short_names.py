"""Short names of models on the hub: the table in short_names.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path

import msgspec

LATEST = ":latest"
"""Suffix that other programs add to a name without a size."""
_TABLE = Path(__file__).with_name("short_names.toml")


class ShortName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the table."""

    names: tuple[str, ...]
    """The first is the one listed."""
    hub: str
    """org/name, or org/name:TAG for GGUF."""
    file: str
    """File of its weights."""
    gb: float
    """Approximate size of the file."""
    noted: date
    """Date of the entry."""
    experts: bool = False
    """Whether it is a mixture of experts, which may be larger than memory."""

    @property
    def page(self) -> str:
        """Hub page of the file."""
        return f"https://huggingface.co/{self.hub.partition(':')[0]}/blob/main/{self.file}"


class _Table(msgspec.Struct, frozen=True):
    model: tuple[ShortName, ...]


@cache
def table() -> tuple[ShortName, ...]:
    """Return every model of the table."""
    return msgspec.convert(tomllib.loads(_TABLE.read_text("utf-8")), _Table).model


@cache
def by_name() -> Mapping[str, ShortName]:
    """Return the models by each of their names."""
    return {name: one for one in table() for name in one.names}


def meant_by(model: str) -> ShortName | None:
    """Return the model of a short name, with or without `:latest`; None for any other name."""
    return by_name().get(model.removesuffix(LATEST))
