"""Files of YAML: plain values, whatever tags they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cairn.types.errors import ConfigError

MAX_YAML = 1 << 22
"""Bytes of a file."""


def load_yaml(path: Path) -> Any:
    """The plain values of a YAML file. ConfigError for one that cannot be read."""
    import yaml

    try:
        data = path.read_bytes()
        if len(data) > MAX_YAML:
            raise ConfigError(f"{path} has {len(data)} bytes; the limit is {MAX_YAML}")
        return yaml.safe_load(data.decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeError, RecursionError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} is no YAML: {said}") from None
