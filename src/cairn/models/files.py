"""Names of a model's files, and bounded readers of the small ones.

Anything wrong becomes a `ModelFileError` that names the file, the field and what was expected.
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
from cairn.types.model_spec import MAX_BY_LAYER

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Weights in one file, or an index of several."""
MODULES = "modules.json"
"""File that marks a folder as an embedding model."""
NESTED = re.compile(
    r"\d_[A-Za-z]{1,32}/(config\.json|model\.safetensors)|additional_chat_templates/[A-Za-z0-9._-]{1,128}\.jinja"
)
"""Files in subfolders that belong to a model: modules after a transformer (1_Pooling, 2_Dense), and chat templates."""

MAX_SPLITS = 1 << 10
"""Most parts of a split GGUF model."""
_SHARD = re.compile(r"(.+)-(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)

MAX_NAME_BYTES = 255
"""Longest file name; opening a longer one is a system error."""

MAX_JSON_BYTES = 32 << 20
"""Largest config or index; the index of the largest models has about 10 MB."""
MAX_JSON_VALUES = 1 << 20
"""Most values in a JSON file other than a vocabulary, and in a safetensors header, counted by commas and brackets. The
largest models have some 100,000; a text of 32 MiB could hold 16 million empty lists, in 1 GB."""
MAX_TOKENIZER_BYTES = 128 << 20
"""Largest tokenizer.json; those of the largest vocabularies have some 35 MB."""
MAX_TEMPLATE_BYTES = 4 << 20
"""Largest chat template; the longest have some 30 KB."""


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file; only its name is looked at."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def stem(path: PurePath) -> str:
    """Return a GGUF file's name without its ending and its part number."""
    match = _SHARD.fullmatch(path.name)
    return match[1] if match else path.stem


def parts(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the model that a file belongs to; only its own if it is not split.

    Empty if its part number is out of range.
    """
    match = _SHARD.fullmatch(name)
    if match is None:
        return (name,)
    number, count = int(match[2]), int(match[4])
    if not 1 <= number <= count <= MAX_SPLITS:
        return ()
    return tuple(f"{match[1]}-{one:05}{match[3]}{count:05}{match[5]}" for one in range(1, count + 1))


def shards(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that `path` names: all parts of a split one.

    Raise `ModelFileError` if a part is missing or the part number is out of range.
    """
    paths = tuple(path.with_name(name) for name in parts(path.name))
    if not paths:
        raise ModelFileError(f"{path}: the parts of a split model are numbered from 00001 to at most {MAX_SPLITS:05}")
    for one in paths:
        if len(paths) > 1 and not one.is_file():
            raise ModelFileError(f"{one}: the file is missing, and {path.name} is one of {len(paths)} parts")
    return paths


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn system errors inside into a `ModelFileError` about `path`."""
    try:
        yield
    except FileNotFoundError:
        raise ModelFileError(f"{path}: the file is missing") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a model's file for reading; raise `ModelFileError` if that fails or it is no regular file.

    Opening a pipe would block, and a device may have no end.
    """
    with reading(path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: opening a pipe must not block
        with open(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(mode):
                raise ModelFileError(f"{path}: is a pipe, a device or a socket, not a file")
            yield file


def read_small(path: Path, limit: int, what: str) -> bytes:
    """Read a whole file of at most `limit` bytes; `what` names it in the message, such as "JSON file"."""
    with opened(path) as file:
        data = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise ModelFileError(f"{path}: larger than {limit >> 20} MiB, the limit for a {what}")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise `ModelFileError` if it is missing, unreadable, too large or no object."""
    return parse_object(read_small(path, MAX_JSON_BYTES, "JSON file"), path)


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return `read_json(path)`, or {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def parse_object(text: bytes, path: Path, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in `text`; `path` is for the message only. `unique`: duplicate keys are an error."""
    if most_values(text) > MAX_JSON_VALUES:
        raise ModelFileError(f"{path}: holds more than {MAX_JSON_VALUES} values, the limit for a JSON file")
    try:
        value = json.loads(text, object_pairs_hook=_unique) if unique else json.loads(text, object_hook=_with_floats)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({type(error).__name__}: {str(error)[:120]})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def most_values(text: bytes) -> int:
    """Return an upper bound of the number of values in a JSON text, without parsing it."""
    return sum(map(text.count, (b",", b"[", b"{")))


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _with_floats(found: dict[str, Any]) -> Any:
    """Return the number that `{"__float__": "Infinity"}` stands for, as transformers writes it; else `found`."""
    named = found.get("__float__") if len(found) == 1 else None
    return _FLOATS.get(named, found) if isinstance(named, str) else found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


class Fields:
    """Typed access to the fields of a JSON object; a wrong type or range raises `ModelFileError`."""

    __slots__ = ("path", "prefix", "values")

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def error(self, name: str, expected: str) -> ModelFileError:
        """Return an error about one field that states the expected and the found value."""
        found = " ".join(repr(self.values[name])[:80].split()) if self.has(name) else "nothing"
        return ModelFileError(f"{self.path}: {self.prefix}{name} must be {expected}, found {found}")

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in [low, high]; without a default the field is required."""
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in [low, high]; without a default the field is required."""
        value = self.values[name] if self.has(name) else default
        # NaN fails every comparison, and integers of any size compare exactly.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def number_or_zero(self, name: str, low: float, high: float, default: float) -> float:
        """Return a finite number in [low, high], where `low` is above 0; 0 means the default."""
        value = self.values[name] if self.has(name) else 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value == 0 or low <= value <= high):
            raise self.error(name, f"0, or a number from {low:g} to {high:g}")
        return float(value) or default

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def ids(self, name: str, vocab: int, *, absent: bool = False) -> tuple[int, ...]:
        """Return one token id or a list of them, each below `vocab`; empty if the field is absent.

        With `absent`, ids out of range are dropped: some files name a token that their model lacks.
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

    def check_by_layer(self, what: str, name: str, count: int, layers_name: str, layers: int) -> None:
        """Raise `ModelFileError` if `count` (the field `name`) of something in each of so many layers are too many.

        Each field alone may be in range: what takes memory is their product.
        """
        if count * layers > MAX_BY_LAYER:
            raise ModelFileError(
                f"{self.path}: {self.prefix}{name} ({count}) in {layers} layers ({self.prefix}{layers_name}) are "
                f"{count * layers} {what}; the most is {MAX_BY_LAYER}"
            )

    def object(self, name: str) -> Fields:
        """Return a nested object; empty if the field is absent."""
        value = self.values[name] if self.has(name) else {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.path, f"{self.prefix}{name}.")
