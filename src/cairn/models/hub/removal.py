"""Downloads that are removed from the cache: a whole repository, or of one the GGUF files of a quantisation.

Nothing outside the download cache is ever touched. Other programs share the cache, so what is still named by another
file of a snapshot stays.
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
from cairn.models.hub.variants import Variant, gguf_names, variants
from cairn.types.errors import ModelError


@dataclass(frozen=True, slots=True)
class Removal:
    """What would go."""

    name: str
    repository: Path
    bytes: int
    """That the disk gets back."""
    whole: bool = False
    """Whether all of the repository goes, or only what follows."""
    links: tuple[Path, ...] = ()
    """The names in the snapshots."""
    blobs: tuple[Path, ...] = ()


def plan(model: str, env: Mapping[str, str] | None = None) -> Removal:
    """What removing a model means. Raises ModelError for what is no download, or not here."""
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
        if not tag:
            return Removal(name, repository, _size(repository), whole=True)
        chosen = select(f"{name}:{tag}", repository)
        model = f"{name}:{chosen.path}"
        links = tuple(_links(chosen, repository))
        if not links:
            raise ModelError(f"{model} is not downloaded; cairn list shows what is")
        rest = [path for path in _files(repository / "snapshots") if path not in links]
        if not rest:
            return Removal(model, repository, _size(repository), whole=True)
        blobs = tuple(_unnamed(repository / "blobs", links, rest))
        size = sum(blob.stat().st_size for blob in blobs)
        return Removal(model, repository, size, links=links, blobs=blobs)
    except OSError as error:
        raise _refused(model, error) from error


def remove(removal: Removal) -> None:
    """Remove it. Raises ModelError if it is being downloaded, or the system refuses."""
    try:
        with locked(removal.repository, removal.name):
            if removal.whole:
                shutil.rmtree(removal.repository)
                return
            for path in (*removal.links, *removal.blobs):
                path.unlink(missing_ok=True)
            for link in removal.links:
                with suppress(OSError):  # others are in it still
                    link.parent.rmdir()
    except OSError as error:
        raise _refused(removal.name, error) from error


def _links(chosen: Variant, repository: Path) -> Iterator[Path]:
    """The names of a quantisation's files in all snapshots, also those of older commits."""
    for snapshot in sorted((repository / "snapshots").glob("*")):
        names = gguf_names(snapshot)
        for one in variants(names):
            if (one.path, one.type) == (chosen.path, chosen.type):
                yield from (snapshot / name for name in one.files if name in names)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def _unnamed(blobs: Path, links: tuple[Path, ...], rest: list[Path]) -> Iterator[Path]:
    """The blobs that only these links name, whether as symbolic links or as hard ones."""
    ours, others = ({_inode(path) for path in some} for some in (links, rest))
    return (blob for blob in _files(blobs) if (key := _inode(blob)) in ours and key not in others)


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:  # a link to nothing
        return (0, 0)
    return found.st_dev, found.st_ino


def _size(folder: Path) -> int:
    seen = {(status.st_dev, status.st_ino): status.st_size for path in _files(folder) if (status := os.lstat(path))}
    return sum(seen.values())


def _refused(model: str, error: OSError) -> ModelError:
    return ModelError(f"{model} cannot be removed: {error.strerror or error}")
