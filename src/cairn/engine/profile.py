"""Profiles: the options that were measured to be fastest for a model on one machine, kept in the user's data folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cairn.config.paths import home
from cairn.engine.machine import cpu_count, cpu_name, instruction_sets
from cairn.models.files import read_small
from cairn.types.errors import ConfigError, ModelFileError

MAX_BYTES = 1 << 20
_NAME = 16
"""Hexadecimal digits of each digest in a file's name."""


class TunedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of `Config` that a profile sets; None for those that it does not."""

    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    step_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    kernels: Literal["portable", "avx2", "avxvnni", "avx512vnni", "avx512", "amx", "neon", "neoni8mm"] | None = None
    kv_dtype: Literal["f32", "bf16", "f16"] | None = None

    def given(self) -> dict[str, int | str]:
        """Return the options that it sets."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class Speed(msgspec.Struct, frozen=True):
    """Tokens per second."""

    prefill: float
    """Of one prompt."""
    decode: float
    """Of one sequence."""
    decode_8: float
    """Of eight sequences together."""

    @property
    def score(self) -> float:
        """Geometric mean of the three."""
        return float((self.prefill * self.decode * self.decode_8) ** (1 / 3))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of `cairn tune` for one model on one machine."""

    model: str
    """Its name, for people."""
    identity: str
    """Hexadecimal digest of the model's files."""
    machine: str
    options: TunedOptions
    before: Speed
    after: Speed


def machine() -> str:
    """Describe for a person what decides this machine's speed: its CPU, cores and instruction sets."""
    return f"{cpu_name()}, {cpu_count()} cores, {' '.join(instruction_sets())}"


def folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of profiles. Raise ConfigError if this user has no home folder."""
    base = (os.environ if env is None else env).get("XDG_DATA_HOME")
    return (Path(base) if base else home() / ".local" / "share") / "cairn" / "profiles"


def path_of(identity: bytes) -> Path:
    """Return the file of a model's profile on this machine."""
    own = hashlib.sha256(machine().encode()).hexdigest()
    return folder() / f"{identity.hex()[:_NAME]}-{own[:_NAME]}.json"


def read(path: Path) -> Profile:
    """Return the profile in a file. Raise ConfigError if it is missing, or no profile."""
    try:
        return msgspec.json.decode(read_small(path, MAX_BYTES, "profile"), type=Profile)
    except ModelFileError as error:
        raise ConfigError(str(error), field="profile") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no profile: {error}; write it again with cairn tune", field="profile") from None


def write(path: Path, profile: Profile) -> None:
    """Write a profile, whole or not at all. Raise ConfigError if that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}", field="profile") from None
