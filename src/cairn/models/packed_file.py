"""Packed matrices kept in a file, so that the next start reads them instead of packing the model again.

One file for what was packed, in the user's cache folder beside stored KV: derived data, safe to delete. It is written
under a temporary name while the model is loaded, and renamed when it is whole. It is called by the key of what is in
it: the model's identity (with its files' digests), the form of its weights, the kernels, and the versions of all that
packs; so a model that was moved or is there twice finds it, and one that was replaced does not. Another key in it, a
description that does not fit the model, a wrong size or checksum: the file is not used, and written again. Beyond a
budget those that no start has used for longest go.

    magic [8], the matrices' memory without holes, a description as JSON, its SHA-256 [32], its length as uint32 [4]

The description: {"key", "errors" (of rounded tensors), "matrices": [{"parts": [[out, in, form]], "bytes", "check"}]},
`check` the XXH3-64 of the memory. It stands at the end because checks are known when all is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from numpy.typing import NDArray

from cairn.errors import CairnError, ConfigError
from cairn.kernels.native import NativeKernels, form_of
from cairn.models import decoder, quantize
from cairn.models.digests import memory_path, tell
from cairn.models.spec import identity_of
from cairn.models.tensor_meta import TensorMeta
from cairn.models.weight_format import HeldWeights
from cairn.types import ModelSpec

MAGIC = b"CAIRNPK1"
VERSION = 2
"""The version of the file; the order that kernels stream is of their own version."""
KEPT_FROM = 64 << 20
"""Bytes of packed weights from which a file is worth its room: smaller models are packed in some 100 ms."""
SPARE = 1 << 30
"""Bytes that must stay free on the disk."""
LARGEST_BUDGET = 50 * 10**9
UNUSED_DAYS = 30
_MOST_DESCRIPTION = 16 << 20
_END = 36
_READ = 64 << 20
_PART = ".part"
_WHOLE = ".packed"
_NAME = 32
"""Digits of the key in a file's name."""


class Kept(msgspec.Struct, frozen=True):
    """One matrix in the file."""

    parts: tuple[tuple[int, int, str], ...]
    """(out, in, `native.form_of`)"""
    bytes: int
    check: int


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds, in the order that `decoder.build` asks for it."""

    key: str
    errors: dict[str, float]
    matrices: list[Kept]


class _Damaged(Exception):
    """The file is not what its description or its key says."""


def folder() -> Path:
    """Where the files are kept."""
    return memory_path().parent / "packed"


def build(
    kernels: Any, spec: ModelSpec, weights: HeldWeights, place: Path, size: int, budget: int | None = None
) -> decoder.Decoder:
    """`decoder.build`, through the file of the model at `place` where its `size` in bytes, as it is held, is worth it.

    `budget`: bytes of all files together, `default_budget` without. A disk that cannot be read or written costs packing
    and nothing else.
    """
    if size < KEPT_FROM or not spec.identity or not isinstance(kernels, NativeKernels):
        return decoder.build(kernels, spec, weights)
    key = _key(spec, weights, kernels)
    try:
        path = folder() / f"{key[:_NAME]}{_WHOLE}"
        with contextlib.suppress(_Damaged, FileNotFoundError, msgspec.DecodeError), path.open("rb", 0) as file:
            return _read(file, key, kernels, spec, weights)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        prune()
        if not make_room(size, budget):
            return decoder.build(kernels, spec, weights)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=_PART)
    except (OSError, ConfigError):
        return decoder.build(kernels, spec, weights)
    try:
        with os.fdopen(handle, "wb", 0) as file:
            _hold(file.fileno())
            writing = _Writing(kernels, weights, file)
            built = decoder.build(_kernels(writing), spec, _names(weights))
            writing.finish(key)
        if writing.whole and _unchanged(spec, place):
            with contextlib.suppress(OSError):
                os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return built


def default_budget(free: int, held: int) -> int:
    """A fifth of what the disk has free or the files hold."""
    return min(LARGEST_BUDGET, (free + held) // 5)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the files take. Bytes."""

    files: int
    bytes: int
    budget: int


def usage(budget: int | None = None) -> Usage:
    """What there is now, and what there may be: `budget`, or what it is where none is given."""
    sizes, free = [], 0
    with contextlib.suppress(OSError, ConfigError):
        sizes = [size for _, size, _ in _whole()]
        place = folder()
        free = shutil.disk_usage(next(one for one in (place, *place.parents) if one.is_dir())).free
    return Usage(len(sizes), sum(sizes), default_budget(free, sum(sizes)) if budget is None else budget)


def make_room(size: int, budget: int | None = None) -> bool:
    """Remove the files that no start has used for longest, until `size` bytes more are within the budget.

    False, and nothing is removed, where they could not be: they exceed it alone, or the disk has no room for them.
    """
    found = sorted(_whole())
    free, held = shutil.disk_usage(folder()).free, sum(one for _, one, _ in found)
    budget = default_budget(free, held) if budget is None else budget
    if size > budget or free + max(0, held + size - budget) < size + SPARE:
        return False
    for _, one, path in found:
        if held + size <= budget:
            break
        path.unlink(missing_ok=True)
        held -= one
    return True


def _whole() -> list[tuple[float, int, Path]]:
    """When each file was last used, its bytes and its path."""
    found = []
    for path in folder().glob(f"*{_WHOLE}"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    return found


def prune() -> tuple[int, int]:
    """Remove files that no start has used for `UNUSED_DAYS`, and what an ended write left; (files, bytes) removed."""
    files = size = 0
    now = time.time()
    with contextlib.suppress(OSError, ConfigError):
        for path in folder().iterdir():
            with contextlib.suppress(OSError):
                stat = path.stat()
                ended = path.suffix == _PART and _ended(path)
                if ended or stat.st_mtime < now - UNUSED_DAYS * 86400:
                    path.unlink()
                    files, size = files + 1, size + stat.st_size
    return files, size


def _unchanged(spec: ModelSpec, place: Path) -> bool:
    """Whether what was packed is what the key says: a model may be replaced while it is loaded."""
    with contextlib.suppress(CairnError):
        return identity_of(spec, place) == spec.identity
    return False


def _hold(handle: int) -> bool:
    """Lock a file for as long as it is open; False where another process has it, or the disk knows no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ended(path: Path) -> bool:
    """Whether nobody writes a file any more: a process that was killed left it, and a few would fill the disk."""
    with path.open("rb") as file:
        return _hold(file.fileno())


def _key(spec: ModelSpec, weights: HeldWeights, kernels: NativeKernels) -> str:
    facts = (VERSION, quantize.VERSION, weights.form, kernels.numerics)
    return hashlib.sha256(spec.identity + repr(facts).encode()).hexdigest()


class _Names(Mapping[str, str]):
    """Stands in for the weights: a tensor is its name, so that only what is needed is made."""

    def __init__(self, weights: HeldWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> str:
        if name not in self._weights:
            raise KeyError(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Through(ABC):
    """Stands in for the kernels while a model is built from names; what is no matrix is made from the weights."""

    def __init__(self, kernels: NativeKernels, weights: HeldWeights) -> None:
        self._kernels, self._weights = kernels, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def vector(self, name: str) -> Any:
        return self._kernels.vector(self._array(name))

    def table(self, name: str) -> Any:
        if self._weights.outline(name).scale:
            return self.matrix([name], [None])
        return self._kernels.table(self._array(name))

    @abstractmethod
    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        """The matrix as the kernels would make it."""

    def _array(self, name: str) -> Any:
        return self._weights[name]

    def _biases(self, names: Sequence[str | None]) -> list[NDArray[Any] | None]:
        return [None if name is None else self._array(name) for name in names]


class _Writing(_Through):
    """Packs each matrix and appends its memory to a file."""

    def __init__(self, kernels: NativeKernels, weights: HeldWeights, file: Any) -> None:
        super().__init__(kernels, weights)
        self.whole = True
        """Whether everything could be written."""
        self._file = file
        self._matrices: list[Kept] = []
        self._write(MAGIC)

    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        parts = [self._weights[name] for name in names]
        made = self._kernels.matrix(parts, self._biases(biases))
        shapes = tuple((one.shape[0], one.shape[1], form_of(one)) for one in parts)
        memory = made.memory()
        self._matrices.append(Kept(shapes, memory.nbytes, xxhash.xxh3_64_intdigest(memory)))
        self._write(memory)
        return made

    def finish(self, key: str) -> None:
        """Describe what was written."""
        text = msgspec.json.encode(Described(key, self._weights.errors, self._matrices))
        self._write(text + hashlib.sha256(text).digest() + len(text).to_bytes(4, "little"))

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        try:
            while self.whole and view.nbytes:
                view = view[self._file.write(view) :]
        except OSError:
            self.whole = False  # a full disk: the model is loaded all the same


class _Reading(_Through):
    """Fills each matrix from a file."""

    def __init__(self, kernels: NativeKernels, weights: HeldWeights, file: Any, matrices: list[Kept]) -> None:
        super().__init__(kernels, weights)
        self._file, self._matrices = file, iter(matrices)
        self._done, self._total = 0, sum(one.bytes for one in matrices)

    def matrix(self, names: Sequence[str], biases: Sequence[str | None]) -> Any:
        kept = next(self._matrices, None)
        if kept is None or not _fits(kept.parts, [self._weights.outline(name) for name in names]):
            raise _Damaged
        made = self._kernels.blank(kept.parts, self._biases(biases))
        memory = made.memory()
        if memory.nbytes != kept.bytes:
            raise _Damaged
        at, view = 0, memoryview(memory)
        while at < kept.bytes:
            tell("reading the packed weights", self._done + at, self._total)
            count = self._file.readinto(view[at : at + _READ])
            if not count:
                raise _Damaged
            at += count
        self._done += kept.bytes
        if xxhash.xxh3_64_intdigest(memory) != kept.check:
            raise _Damaged
        return made


def _fits(parts: Sequence[tuple[int, int, str]], wanted: Sequence[TensorMeta]) -> bool:
    """Whether the parts are what the model has; whether scales are halves is known only when they are made."""
    return len(parts) == len(wanted) and all(
        (out, inner) == one.shape and form.split()[0] == one.form.split()[0]
        for (out, inner, form), one in zip(parts, wanted, strict=True)
    )


def _read(file: Any, key: str, kernels: NativeKernels, spec: ModelSpec, weights: HeldWeights) -> decoder.Decoder:
    described = _described(file)
    if described.key != key:
        raise _Damaged
    file.seek(len(MAGIC))
    reading = _Reading(kernels, weights, file, described.matrices)
    built = decoder.build(_kernels(reading), spec, _names(weights))
    weights.errors.update(described.errors)
    with contextlib.suppress(OSError):
        os.utime(file.fileno())  # this start used it
    return built


def _described(file: Any) -> Described:
    size = os.fstat(file.fileno()).st_size
    if size < len(MAGIC) + _END or file.read(len(MAGIC)) != MAGIC:
        raise _Damaged
    file.seek(size - _END)
    end = file.read(_END)
    length = int.from_bytes(end[32:], "little")
    if length > min(_MOST_DESCRIPTION, size - len(MAGIC) - _END):
        raise _Damaged
    file.seek(size - _END - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != end[:32]:
        raise _Damaged
    found = msgspec.json.decode(text, type=Described)
    if len(MAGIC) + sum(one.bytes for one in found.matrices) + length + _END != size:
        raise _Damaged
    return found


def _kernels(through: _Through) -> Any:
    return through


def _names(weights: HeldWeights) -> Any:
    return _Names(weights)
