"""Packed matrices cached in a file, so that the next start reads them instead of packing the model again.

The files are in the user's cache folder beside stored KV: derived data, safe to delete. A file is written under a
temporary name while the model is loaded, and renamed when it is complete. Its name is the key of its content: the
model's identity (with its files' digests), the form of its weights, the kernels, and the versions of the packing code.
So a model that was moved or copied finds it, and a replaced one does not. A file with another key, a description that
does not fit the model, or a wrong size or checksum is ignored and written again. Above the budget the least recently
used files are removed.

    magic [8], zeros to 4096, the matrices' memory without holes, a description as JSON, its SHA-256 [32], its length as
    uint32 [4]

The description: {"key", "errors" (of rounded tensors), "matrices": [{"parts": [[out, in, form]], "bytes", "check"}]},
`check` the XXH3-64 of the memory. It is at the end because checksums are known only then.

Experts that are larger than memory are mapped instead of read: the system loads their pages on use and evicts them
under memory pressure. They are checked once, which takes as long as reading them; the file is then trusted until it is
modified.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.native import NativeKernels
from cairn.models.forward import decoder
from cairn.models.hub.digests import memory_path, vouch, vouched
from cairn.models.packing.packed_matrices import (
    MAGIC,
    START,
    DamagedMatrices,
    DiscardingKernels,
    FileDescription,
    ReadingKernels,
    WritingKernels,
    as_kernels,
    as_weights,
)
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.quantization import quantize
from cairn.models.spec.config import identity_of
from cairn.types.errors import CairnError, ConfigError, ModelError
from cairn.types.model_spec import ModelSpec

VERSION = 3
"""Version of the file format; the layout that kernels stream has its own."""
KEPT_FROM = 64 << 20
"""Least bytes of packed weights for a file; smaller models are packed in some 100 ms."""
SPARE = 1 << 30
"""Bytes that must stay free on the disk."""
LARGEST_BUDGET = 50 * 10**9
UNUSED_DAYS = 30
_MOST_DESCRIPTION = 16 << 20
_END = 36
_PART = ".part"
_WHOLE = ".packed"
_NAME = 32
"""Digits of the key in a file's name."""


def folder() -> Path:
    """Return the folder of the files."""
    return memory_path().parent / "packed"


def build(
    kernels: Any, spec: ModelSpec, weights: HeldWeights, place: Path, size: int, budget: int | None = None
) -> decoder.Decoder:
    """Return `decoder.build`'s decoder, through the cached file of the model at `place`.

    There is a file only if `size`, the bytes of the weights as held, makes it worth its room. `budget`: most bytes of
    all files together; `default_budget` if None. If the disk cannot be read or written, the model is packed without a
    file.
    """
    if size < KEPT_FROM or not spec.identity or not isinstance(kernels, NativeKernels):
        return decoder.build(kernels, spec, weights)
    key = _key(spec, weights, kernels)
    try:
        path = _path(key)
        with contextlib.suppress(DamagedMatrices, FileNotFoundError, msgspec.DecodeError), path.open("rb", 0) as file:
            return _read(path, file, key, kernels, spec, weights)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        prune()
        if not make_room(size, budget):
            return decoder.build(kernels, spec, weights)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=_PART)
    except (OSError, ConfigError):
        return decoder.build(kernels, spec, weights)
    return _written(WritingKernels, handle, temporary, path, key, kernels, spec, weights, place)[0]


def build_mapped(
    kernels: NativeKernels, spec: ModelSpec, weights: HeldWeights, place: Path, size: int, budget: int | None = None
) -> decoder.Decoder:
    """Return a decoder with experts mapped from the file.

    The file is packed one matrix at a time, none of which is kept in memory. Without a `budget` it may fill the disk's
    free room. Raise `ModelError` if it cannot be written or read.
    """
    key = _key(spec, weights, kernels)
    wants = f"{spec.name}: mapped experts need a packed copy of {size / 1e9:.2f} GB"
    try:
        path = _path(key)
        with contextlib.suppress(DamagedMatrices, FileNotFoundError, msgspec.DecodeError), path.open("rb", 0) as file:
            return _read(path, file, key, kernels, spec, weights, mapped=True)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        prune()
        if not make_room(size, max(size, usage().budget) if budget is None else budget):
            raise ModelError(f"{wants}; there is no room for it in {path.parent} or within keep_packed_gb")
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=_PART)
        if not _written(DiscardingKernels, handle, temporary, path, key, kernels, spec, weights, place)[1]:
            raise ModelError(f"{wants}, which could not be written to {path.parent}")
        with path.open("rb", 0) as file:
            return _read(path, file, key, kernels, spec, weights, mapped=True)
    except (OSError, ConfigError, DamagedMatrices) as error:
        raise ModelError(f"{wants}, which cannot be written or read: {error}") from error


def _path(key: str) -> Path:
    return folder() / f"{key[:_NAME]}{_WHOLE}"


def _written(
    how: Callable[[NativeKernels, HeldWeights, Any], WritingKernels],
    handle: int,
    temporary: str,
    path: Path,
    key: str,
    kernels: NativeKernels,
    spec: ModelSpec,
    weights: HeldWeights,
    place: Path,
) -> tuple[decoder.Decoder, bool]:
    """Pack a model into a temporary file and rename it; return the decoder and whether the file was kept."""
    kept = False
    try:
        with os.fdopen(handle, "wb", 0) as file:
            _hold(file.fileno())
            writing = how(kernels, weights, file)
            try:
                built = decoder.build(as_kernels(writing), spec, as_weights(weights))
                writing.finish(key)
            finally:
                writing.close()
        if writing.whole and _unchanged(spec, place):
            with contextlib.suppress(OSError):
                os.replace(temporary, path)
                kept = True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return built, kept


def default_budget(free: int, held: int) -> int:
    """Return a fifth of the disk space that is free or used by the files."""
    return min(LARGEST_BUDGET, (free + held) // 5)


@dataclass(frozen=True, slots=True)
class PackUsage:
    """Disk usage of the files, in bytes."""

    files: int
    bytes: int
    budget: int


def usage(budget: int | None = None) -> PackUsage:
    """Return the current usage; the budget is `budget`, or the default if None."""
    sizes, free = [], 0
    with contextlib.suppress(OSError, ConfigError):
        sizes = [size for _, size, _ in _whole()]
        place = folder()
        free = shutil.disk_usage(next(one for one in (place, *place.parents) if one.is_dir())).free
    return PackUsage(len(sizes), sum(sizes), default_budget(free, sum(sizes)) if budget is None else budget)


def make_room(size: int, budget: int | None = None) -> bool:
    """Remove the least recently used files until `size` more bytes fit the budget.

    Return False and remove nothing if that is impossible: `size` alone exceeds the budget, or the disk has no room.
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
    """Return time of last use, bytes and path of each file."""
    found = []
    for path in folder().glob(f"*{_WHOLE}"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    return found


def prune() -> tuple[int, int]:
    """Remove files unused for `UNUSED_DAYS` and leftovers of interrupted writes; return (files, bytes) removed."""
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
    """Return whether the model still has the identity in the key: it may be replaced while it is loaded."""
    with contextlib.suppress(CairnError):
        return identity_of(spec, place) == spec.identity
    return False


def _hold(handle: int) -> bool:
    """Lock a file while it is open; False if another process holds it or the disk has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ended(path: Path) -> bool:
    """Return whether no process writes the file any more: one that was killed left it."""
    with path.open("rb") as file:
        return _hold(file.fileno())


def _key(spec: ModelSpec, weights: HeldWeights, kernels: NativeKernels) -> str:
    facts = (VERSION, quantize.VERSION, weights.form, kernels.numerics)
    return hashlib.sha256(spec.identity + repr(facts).encode()).hexdigest()


def _read(
    path: Path,
    file: Any,
    key: str,
    kernels: NativeKernels,
    spec: ModelSpec,
    weights: HeldWeights,
    mapped: bool = False,
) -> decoder.Decoder:
    described = _described(file)
    if described.key != key:
        raise DamagedMatrices
    file.seek(START)
    whole = _mapped(file) if mapped else None
    checked = mapped and vouched(path, file, bytes.fromhex(key))
    reading = ReadingKernels(kernels, weights, file, described.matrices, whole, checked)
    built = decoder.build(as_kernels(reading), spec, as_weights(weights))
    weights.errors.update(described.errors)
    with contextlib.suppress(OSError):
        os.utime(file.fileno())  # mark as recently used
        if mapped:
            vouch(path, file, bytes.fromhex(key))
    return built


def _mapped(file: Any) -> NDArray[np.uint8]:
    """Return a file's bytes, mapped; the system reads only what is used."""
    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        found.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(found, np.uint8)


def _described(file: Any) -> FileDescription:
    size = os.fstat(file.fileno()).st_size
    if size < START + _END or file.read(len(MAGIC)) != MAGIC:
        raise DamagedMatrices
    file.seek(size - _END)
    end = file.read(_END)
    length = int.from_bytes(end[32:], "little")
    if length > min(_MOST_DESCRIPTION, size - START - _END):
        raise DamagedMatrices
    file.seek(size - _END - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != end[:32]:
        raise DamagedMatrices
    found = msgspec.json.decode(text, type=FileDescription)
    if START + sum(one.bytes for one in found.matrices) + length + _END != size:
        raise DamagedMatrices
    return found
