"""Installs the files of a pull: fetched, verified, and only then put in place.

Only data: safetensors, JSON and the chat templates, or GGUF. Never pickles (.bin, .pt), never code.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.models.files import INDEX, MAX_JSON_BYTES, MODULES, NESTED, WEIGHTS
from cairn.models.hub.snapshots import NEEDED, Progress, choose_one, index_shards, is_complete, snapshot_of
from cairn.models.hub.variants import tags, variants
from cairn.types.errors import ModelError, ModelFileError

if TYPE_CHECKING:
    from cairn.models.hub.download import (
        Hub,
        Listing,
        RemoteFile,
    )  # imports httpx, which a server does not need otherwise

USEFUL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    MODULES,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)

Allow = Callable[[int], None]
"""Gets the bytes of a model before any of them is fetched, and may raise."""


def install(hub: Hub, model: str, repository: Path, progress: Callable[[Progress], None], allow: Allow) -> Path:
    """Download org/name and return its snapshot. Raise as `hub.pull` does."""
    listed = hub.listing()
    commit, listing = listed.commit, listed.files
    found = variants(listed.names)
    if found and not any(name.endswith(".safetensors") for name in listed.names):
        raise ModelError(f"{model} has only GGUF on the hub: add one of {tags(found)}, as in {model}:{tags(found[:1])}")
    nested = [name for name in listed.names if NESTED.fullmatch(name)]
    hub.check_stated(listed, (*NEEDED, *USEFUL, INDEX, *nested))
    for name in NEEDED:
        if name not in listing:
            raise ModelFileError(f"{model} has no {name} on the hub, so Cairn cannot serve it")
    for name in ("config.json", INDEX):
        if name in listing and listing[name].size > MAX_JSON_BYTES:
            most = MAX_JSON_BYTES >> 20
            raise ModelFileError(f"{name} of {model}: larger than {most} MiB, the limit for a JSON file")
    blobs = repository / "blobs"
    small = [listing[name] for name in (*NEEDED, *USEFUL, INDEX, *nested) if name in listing]
    if INDEX in listing:
        hub.fetch(commit, listing[INDEX], blobs / listing[INDEX].digest, lambda _: None)
    snapshot = _fetch(hub, commit, repository, small + _weights(hub, listed, blobs), progress, allow)
    _refer(repository, commit)
    return snapshot


def install_gguf(hub: Hub, model: str, repository: Path, progress: Callable[[Progress], None], allow: Allow) -> Path:
    """Download org/name:TAG and return its file in the snapshot, or the first part. Raise as `hub.pull` does."""
    listed = hub.listing()
    commit, listing = listed.commit, listed.files
    chosen = choose_one(model, variants(listed.names), "on the hub")
    hub.check_stated(listed, chosen.files)
    if chosen.missing:
        raise ModelFileError(f"{chosen.missing}, a part of {model}, is not on the hub")
    snapshot = _fetch(hub, commit, repository, [listing[name] for name in chosen.files], progress, allow)
    current = snapshot_of(repository)
    # GGUF files are found in any snapshot, other models only where the reference points.
    if current is None or not is_complete(current):
        _refer(repository, commit)
    return snapshot / chosen.files[0]


def _fetch(
    hub: Hub,
    commit: str,
    repository: Path,
    files: list[RemoteFile],
    progress: Callable[[Progress], None],
    allow: Allow,
) -> Path:
    """Fetch and verify all files, then link them into the commit's snapshot; return the snapshot."""
    blobs = repository / "blobs"
    _check_room(hub.model, blobs, files)
    total = sum(file.size for file in files)
    allow(total)
    done = 0
    for file in files:

        def report(have: int, name: str = file.name, before: int = done) -> None:
            progress(Progress(name, before + have, total))

        hub.fetch(commit, file, blobs / file.digest, report)
        done += file.size
    snapshot = repository / "snapshots" / commit
    for file in files:
        (snapshot / file.name).parent.mkdir(parents=True, exist_ok=True)
        _link(blobs / file.digest, snapshot / file.name)
    return snapshot


def _refer(repository: Path, commit: str) -> None:
    """Make a commit the current one. This comes last: until then its snapshot is not found."""
    (repository / "refs").mkdir(exist_ok=True)
    fresh = repository / "refs" / "main.new"
    fresh.write_text(commit)
    fresh.replace(repository / "refs" / "main")


def _weights(hub: Hub, listed: Listing, blobs: Path) -> list[RemoteFile]:
    """Return the files of the weights: the index's shards, or one file."""
    model, listing = hub.model, listed.files
    if INDEX not in listing:
        if WEIGHTS in listing:
            return [listing[WEIGHTS]]
        hub.check_stated(listed, [WEIGHTS])
        kinds = {Path(name).suffix for name in listed.names}
        has = ", only pickles (.bin), which Cairn never opens" if kinds & {".bin", ".pt", ".pth"} else ""
        raise ModelFileError(f"{model} has no {WEIGHTS} on the hub{has}")
    names = index_shards(blobs / listing[INDEX].digest)
    hub.check_stated(listed, names)
    absent = [name for name in names if name not in listing]
    if not names or absent:
        raise ModelFileError(f"{INDEX} of {model} names {', '.join(absent) or 'no file'}, which the hub does not have")
    return [listing[name] for name in names]


def _check_room(model: str, blobs: Path, files: list[RemoteFile]) -> None:
    missing = 0
    for file in files:
        blob = blobs / file.digest
        part = blob.with_name(blob.name + ".incomplete")
        have = file.size if blob.is_file() else part.stat().st_size if part.is_file() else 0
        missing += max(file.size - have, 0)
    free = shutil.disk_usage(blobs).free
    if missing > free:
        raise ModelError(f"{model} needs {missing / 1e9:.2f} GB more, but {blobs} has only {free / 1e9:.2f} GB free")


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of file systems without locks, such as some network file systems."""


@contextmanager
def locked(repository: Path, model: str) -> Iterator[None]:
    """Allow one pull of a model at a time, if the file system has locks; the lock ends with the process."""
    with (repository / ".cairn.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{model} is being downloaded by another process; wait for it") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def _link(blob: Path, name: Path) -> None:
    """Make `name` a link to the blob, atomically."""
    fresh = name.with_name(name.name + ".new")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(os.path.relpath(blob, name.parent))
    except OSError:  # a file system without symbolic links
        try:
            os.link(blob, fresh)
        except OSError:  # nor hard links, such as exFAT
            _copy(blob, fresh)
    fresh.replace(name)
    fresh.unlink(missing_ok=True)  # replace() does nothing if both are hard links to the same file


def _copy(blob: Path, fresh: Path) -> None:
    """Copy the blob, so that the next pull still finds it; an incomplete copy is removed."""
    try:
        shutil.copyfile(blob, fresh)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
