"""Removal of downloads from the cache: a whole repository, or the GGUF files of one quantisation.

Only the download cache is touched. Other programs share it, so blobs that other files of a snapshot use stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cairn.models.hub.addresses import known
from cairn.models.hub.hub import DEMO, NoDownload, repository_of, select
from cairn.models.hub.install import locked
from cairn.models.hub.snapshots import parted
from cairn.models.hub.variants import Variant, gguf_names, variants
from cairn.types.errors import ModelError


@dataclass(frozen=True, slots=True)
class Removal:
    """What would be removed."""

    name: str
    repository: Path
    bytes: int
    """Bytes freed on the disk."""
    whole: bool = False
    """Whether the whole repository is removed, or only `links` and `blobs`."""
    links: tuple[Path, ...] = ()
    """Names of a tag's files in the snapshots; for a whole download without a tag none are listed."""
    blobs: tuple[Path, ...] = ()


def plan(model: str, env: Mapping[str, str] | None = None) -> Removal:
    """Return what removing a model would remove; raise ModelError if it is no download, or not downloaded."""
    if model == DEMO:
        raise ModelError(f"{DEMO} comes with Cairn and cannot be removed")
    if (one := known(model)) is not None:
        place = one.here(env)
        if place is None:
            raise ModelError(f"{model} is not downloaded; cairn list shows what is")
        return Removal(model, place.parent, _size(place.parent), whole=True)
    try:
        name, tag, repository = repository_of(model, env)
    except NoDownload:
        raise ModelError(f"{model} is no download; only models in the download cache are removed") from None
    try:
        if not repository.is_dir():
            raise ModelError(f"{model} is not downloaded; cairn list shows what is")
        return _planned(name, tag, repository)
    except OSError as error:
        raise _refused(model, error) from error


def _planned(name: str, tag: str, repository: Path) -> Removal:
    """Return what removing a tag, or with "" the whole download, would remove now."""
    if not tag:
        return Removal(name, repository, _size(repository), whole=True)
    chosen = select(f"{name}:{tag}", repository)
    model = f"{name}:{chosen.path}"
    links = tuple(_links(chosen, repository))
    if not links:
        raise ModelError(f"{model} is not downloaded; cairn list shows what is")
    rest = [path for path in _files(repository / "snapshots") if path not in links]
    blobs = tuple(_unnamed(repository / "blobs", links, rest))
    # A blob without a name may be a part of another model, whose download was interrupted.
    whole = not rest and len(blobs) == len(_files(repository / "blobs"))
    size = _size(repository) if whole else sum(blob.stat().st_size for blob in blobs)
    return Removal(model, repository, size, whole=whole, links=links, blobs=blobs)


def remove(removal: Removal) -> None:
    """Carry out the removal.

    Raise ModelError if the model is being downloaded, its files are no longer those of the plan, or the system refuses.
    """
    try:
        with locked(removal.repository, removal.name):
            # Another model may have been downloaded since the plan, or this one again.
            now = _planned(*parted(removal.name), removal.repository)
            if (set(now.links), set(now.blobs)) != (set(removal.links), set(removal.blobs)):
                raise ModelError(f"the files of {removal.name} have changed meanwhile; nothing was removed, try again")
            if now.whole:
                shutil.rmtree(now.repository)
                return
            for path in (*now.links, *now.blobs):
                path.unlink(missing_ok=True)
            for link in now.links:
                with suppress(OSError):  # other files are still in it
                    link.parent.rmdir()
    except OSError as error:
        raise _refused(removal.name, error) from error


def _links(chosen: Variant, repository: Path) -> Iterator[Path]:
    """Yield the names of a quantisation's files in all snapshots, including older commits."""
    for snapshot in sorted((repository / "snapshots").glob("*")):
        names = gguf_names(snapshot)
        for one in variants(names):
            if (one.path, one.type) == (chosen.path, chosen.type):
                yield from (snapshot / name for name in one.files if name in names)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def _unnamed(blobs: Path, links: tuple[Path, ...], rest: list[Path]) -> Iterator[Path]:
    """Yield the blobs that only these links use, symbolic or hard."""
    ours, others = ({_inode(path) for path in some} for some in (links, rest))
    return (blob for blob in _files(blobs) if (key := _inode(blob)) in ours and key not in others)


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:  # a dangling link
        return (0, 0)
    return found.st_dev, found.st_ino


def _size(folder: Path) -> int:
    seen = {(status.st_dev, status.st_ino): status.st_size for path in _files(folder) if (status := os.lstat(path))}
    return sum(seen.values())


def _refused(model: str, error: OSError) -> ModelError:
    return ModelError(f"{model} cannot be removed: {error.strerror or error}")
