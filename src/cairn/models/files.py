"""A model's files: what they are called, and its small ones read: bounded, typed, and never executed.

Whatever is wrong becomes one `ModelFileError` sentence that names the file, the field and what was expected.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any

from cairn.types.errors import ModelFileError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Where a model's weights are: in one file, or in those that an index names."""

MAX_SPLITS = 1 << 10
"""Most parts of a split GGUF model."""
_SHARD = re.compile(r"(.+)-(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)

MAX_NAME_BYTES = 255
"""Longer file names exist nowhere: to look for one is an error of the system."""

MAX_JSON_BYTES = 32 << 20
"""Larger configs and indexes are refused: the index of the largest models has about 10 MB."""
MAX_JSON_VALUES = 1 << 20
"""Of a JSON file but for a vocabulary, and of a safetensors header: its commas and brackets, which are no fewer. The
largest models have some 100,000; a text of 32 MiB could hold 16 million empty lists, in 1 GB."""
MAX_TOKENIZER_BYTES = 128 << 20
"""The largest tokenizer.json; those of the largest vocabularies have some 35 MB."""
MAX_TEMPLATE_BYTES = 4 << 20
"""The largest chat template; the longest have some 30 KB."""


def is_gguf(path: Path) -> bool:
    """Whether a model's place is a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def stem(path: PurePath) -> str:
    """A GGUF file's name without its ending and without its number among the parts of a split model."""
    match = _SHARD.fullmatch(path.name)
    return match[1] if match else path.stem


def parts(name: str) -> tuple[str, ...]:
    """The names of all parts of the model that a file's name belongs to; its own where it is not split.

    Empty if its number is not one of those that its parts can have.
    """
    match = _SHARD.fullmatch(name)
    if match is None:
        return (name,)
    number, count = int(match[2]), int(match[4])
    if not 1 <= number <= count <= MAX_SPLITS:
        return ()
    return tuple(f"{match[1]}-{one:05}{match[3]}{count:05}{match[5]}" for one in range(1, count + 1))


def shards(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` names: all parts of a split one, whichever of them `path` is."""
    paths = tuple(path.with_name(name) for name in parts(path.name))
    if not paths:
        raise ModelFileError(f"{path}: the parts of a split model are numbered from 00001 to at most {MAX_SPLITS:05}")
    for one in paths:
        if len(paths) > 1 and not one.is_file():
            raise ModelFileError(f"{one}: the file is missing, and {path.name} is one of {len(paths)} parts")
    return paths


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system refuses inside becomes a `ModelFileError` about `path`."""
    try:
        yield
    except FileNotFoundError:
        raise ModelFileError(f"{path}: the file is missing") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A model's file, to be read. `ModelFileError` where it cannot be, and for what is no regular file: a pipe would be
    waited for, and a device may have no end."""
    with reading(path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without it, opening a pipe waits too
        with open(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(mode):
                raise ModelFileError(f"{path}: is a pipe, a device or a socket, not a file")
            yield file


def read_small(path: Path, limit: int, what: str) -> bytes:
    """A whole file of at most `limit` bytes; `what` it is, such as "JSON file", is for the message."""
    with opened(path) as file:
        data = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise ModelFileError(f"{path}: larger than {limit >> 20} MiB, which no model's {what} is")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelFileError` if it is missing, unreadable, too large or no object."""
    return parse_object(read_small(path, MAX_JSON_BYTES, "JSON file"), path)


def read_optional_json(path: Path) -> dict[str, Any]:
    """`read_json`, and {} where there is no such file."""
    return read_json(path) if path.exists() else {}


def parse_object(text: bytes, path: Path, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `text`; `path` is for the message only. `unique`: a key that stands twice is an error."""
    if most_values(text) > MAX_JSON_VALUES:
        raise ModelFileError(f"{path}: holds more than {MAX_JSON_VALUES} values, which no model's JSON does")
    try:
        value = json.loads(text, object_pairs_hook=_unique) if unique else json.loads(text, object_hook=_with_floats)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({type(error).__name__}: {str(error)[:120]})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def most_values(text: bytes) -> int:
    """How many values a JSON text may hold at most, told without building one of them."""
    return sum(map(text.count, (b",", b"[", b"{")))


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _with_floats(found: dict[str, Any]) -> Any:
    """Return the number that `{"__float__": "Infinity"}` stands for, as transformers writes it; else `found`."""
    named = found.get("__float__") if len(found) == 1 else None
    return _FLOATS.get(named, found) if isinstance(named, str) else found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


class Fields:
    """Typed access to the fields of a JSON object. A wrong type or range raises `ModelFileError`."""

    __slots__ = ("path", "prefix", "values")

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def error(self, name: str, expected: str) -> ModelFileError:
        """An error about one field: what it should be, and what it is."""
        found = " ".join(repr(self.values[name])[:80].split()) if self.has(name) else "nothing"
        return ModelFileError(f"{self.path}: {self.prefix}{name} must be {expected}, found {found}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; without a default the field is required."""
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; without a default the field is required."""
        value = self.values[name] if self.has(name) else default
        # NaN fails every comparison, and integers of any size compare exactly.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def number_or_zero(self, name: str, low: float, high: float, default: float) -> float:
        """A finite number in [low, high], where `low` is more than 0; a 0 says the same as no field."""
        value = self.values[name] if self.has(name) else 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or low <= value <= high):
            raise self.error(name, f"0, or a number from {low:g} to {high:g}")
        return float(value) or default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def ids(self, name: str, vocab: int, *, absent: bool = False) -> tuple[int, ...]:
        """One token id or a list of them, each below `vocab`; empty if the field is not there.

        With `absent`, numbers that are no token's are left out: so some files name a token that their model lacks.
        """
        value: Any = self.values.get(name)
        if hasattr(value, "tolist"):  # GGUF's arrays are numpy's
            value = value.tolist()
        found = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in found) or not (
            absent or all(0 <= one < vocab for one in found)
        ):
            raise self.error(name, f"a token id or a list of token ids below {vocab}")
        return tuple(one for one in dict.fromkeys(found) if 0 <= one < vocab)

    def object(self, name: str) -> Fields:
        """A nested object; empty if the field is not there."""
        value = self.values[name] if self.has(name) else {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.path, f"{self.prefix}{name}.")
