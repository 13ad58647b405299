"""A model's name -> its place on this machine: the bundled model, a folder, a GGUF file, or a download from the hub.

Downloads are kept in the cache layout that the hub's other tools use (`models--org--name/{blobs,refs,snapshots}` below
HF_HUB_CACHE or HF_HOME), so nothing is downloaded twice. A snapshot appears only after every file in it was verified.
Only data is fetched: safetensors, JSON and the chat template. Never pickles (.bin, .pt), never code.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.errors import ModelError, ModelFileError
from cairn.models.files import INDEX, WEIGHTS, is_gguf, stem

if TYPE_CHECKING:
    from cairn.models.download import Hub, RemoteFile

DEMO = "demo"
NEEDED = ("config.json", "tokenizer.json")
"""A model without these cannot be served."""
USEFUL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is, in bytes of all files; `file` is the one at hand."""

    file: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A complete model in the download cache."""

    name: str
    folder: Path
    bytes: int


def demo_folder() -> Path:
    """The folder of the bundled model."""
    return Path(__file__).resolve().parent.parent / "demo"


def is_hub_id(model: str) -> bool:
    """Whether a name has the form org/name."""
    return bool(_ID.fullmatch(model)) and ".." not in model


def model_name(folder: Path) -> str:
    """What a model is called: org/name in the download cache, elsewhere the folder's own name.

    A GGUF file is called by its own name without the ending, in the download cache org/name:FILE.
    """
    if is_gguf(folder):
        place = model_name(folder.parent)
        own = stem(folder)
        return f"{place}:{own}" if is_hub_id(place) else own
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """Where downloads are kept: HF_HUB_CACHE, else `hub` in HF_HOME, else ~/.cache/huggingface/hub."""
    env = os.environ if env is None else env
    return Path(env["HF_HUB_CACHE"]).expanduser() if env.get("HF_HUB_CACHE") else _home(env) / "hub"


def locate(model: str, env: Mapping[str, str] | None = None) -> Path:
    """A model's place: 'demo', a folder, a GGUF file, or a hub id that was downloaded. Never uses the network.

    Raises ModelError that says what to do: for a hub id that is not here, the `cairn pull` to run.
    """
    if model == DEMO:
        return demo_folder()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if is_gguf(path):
            return path
        raise ModelError(
            f"{model} is a file; a model is a .gguf file, or a folder with config.json, tokenizer.json and safetensors"
        )
    if is_gguf(path):
        raise ModelError(f"there is no file {model}")
    if not is_hub_id(model):
        raise ModelError(
            f"there is no folder {model}; a model is a folder, a GGUF file, a hub id (org/name) or '{DEMO}'"
        )
    snapshot = _snapshot(_repository(cache_folder(env), model))
    if snapshot is None:
        raise ModelError(f"{model} is neither a folder nor downloaded; get it with: cairn pull {model}")
    missing = _missing(snapshot)
    if missing:
        raise ModelError(f"the download of {model} is incomplete ({missing} is missing); run: cairn pull {model}")
    return snapshot


def downloaded(env: Mapping[str, str] | None = None) -> list[Downloaded]:
    """The complete models in the download cache, by name."""
    found = []
    for repository in sorted(cache_folder(env).glob("models--*--*")):
        snapshot = _snapshot(repository)
        if snapshot is not None and not _missing(snapshot):
            size = sum(file.stat().st_size for file in snapshot.iterdir() if file.is_file())
            found.append(Downloaded(model_name(snapshot), snapshot, size))
    return found


def pull(
    model: str, *, progress: Callable[[Progress], None] = lambda _: None, env: Mapping[str, str] | None = None
) -> Path:
    """Download what a model needs, or complete and verify what is here; returns its folder.

    An interrupted download goes on where it stopped. Every file is checked against the checksum that the hub states.
    `progress` is called on this thread. Raises ModelError (no such model, no access, no network, disk full) or
    ModelFileError (wrong checksum); the model is then as it was before the call.
    """
    env = os.environ if env is None else env
    if not is_hub_id(model):
        raise ModelError(f"{model} is not a hub id; it must look like org/name")
    if env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ModelError(f"{model} cannot be downloaded because HF_HUB_OFFLINE is set")
    from cairn.models.download import Hub

    repository = _repository(cache_folder(env), model)
    try:
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        with _locked(repository, model), Hub(model, env, _home(env)) as hub:
            return _install(hub, repository, progress)
    except OSError as error:
        raise ModelError(f"{model} cannot be written to {repository}: {error.strerror or error}") from error


def _install(hub: Hub, repository: Path, progress: Callable[[Progress], None]) -> Path:
    commit, listing = hub.listing()
    for name in NEEDED:
        if name not in listing:
            raise ModelFileError(f"{hub.model} has no {name} on the hub, so Cairn cannot serve it")
    blobs = repository / "blobs"
    small = [listing[name] for name in (*NEEDED, *USEFUL, INDEX) if name in listing]
    if INDEX in listing:
        hub.fetch(commit, listing[INDEX], blobs / listing[INDEX].digest, lambda _: None)
    files = small + _weights(hub.model, listing, blobs)
    _check_room(hub.model, blobs, files)
    total = sum(file.size for file in files)
    done = 0
    for file in files:

        def report(have: int, name: str = file.name, before: int = done) -> None:
            progress(Progress(name, before + have, total))

        hub.fetch(commit, file, blobs / file.digest, report)
        done += file.size
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in files:
        _link(blobs / file.digest, snapshot / file.name)
    # The reference comes last: until then nobody finds the snapshot.
    (repository / "refs").mkdir(exist_ok=True)
    fresh = repository / "refs" / "main.new"
    fresh.write_text(commit)
    fresh.replace(repository / "refs" / "main")
    return snapshot


def _weights(model: str, listing: Mapping[str, RemoteFile], blobs: Path) -> list[RemoteFile]:
    """The files that hold the weights: the index's shards, or one file."""
    if INDEX not in listing:
        if WEIGHTS in listing:
            return [listing[WEIGHTS]]
        kinds = {Path(name).suffix for name in listing}
        has = ", only pickles (.bin), which Cairn never opens" if kinds & {".bin", ".pt", ".pth"} else ""
        has = ", only GGUF: download one such file yourself and serve it by its path" if ".gguf" in kinds else has
        raise ModelFileError(f"{model} has no {WEIGHTS} on the hub{has}")
    names = _shards(blobs / listing[INDEX].digest)
    absent = [name for name in names if name not in listing]
    if not names or absent:
        raise ModelFileError(f"{INDEX} of {model} names {', '.join(absent) or 'no file'}, which the hub does not have")
    return [listing[name] for name in names]


def _shards(index: Path) -> list[str]:
    """The weight files that an index names. Names that are not plain file names make it broken."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if all(isinstance(name, str) and _NAME.fullmatch(name) and name.endswith(".safetensors") for name in names):
            return names
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        pass
    raise ModelFileError(f"{index} is not an index of safetensors files")


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


def _home(env: Mapping[str, str]) -> Path:
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface"


def _repository(cache: Path, model: str) -> Path:
    return cache / ("models--" + model.replace("/", "--"))


def _snapshot(repository: Path) -> Path | None:
    """The folder of the branch `main`, or None if nothing was downloaded."""
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = repository / "snapshots" / commit
    return folder if _NAME.fullmatch(commit) and folder.is_dir() else None


def _missing(snapshot: Path) -> str:
    """The first file that a complete model would have and this folder lacks, or an empty string."""
    weights = _shards(snapshot / INDEX) if (snapshot / INDEX).is_file() else [WEIGHTS]
    return next((name for name in (*NEEDED, *weights) if not (snapshot / name).is_file()), "")


@contextmanager
def _locked(repository: Path, model: str) -> Iterator[None]:
    """One pull of a model at a time; the lock goes with the process."""
    with (repository / ".cairn.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{model} is being downloaded by another process; wait for it") from None
        yield


def _link(blob: Path, name: Path) -> None:
    """Make `name` the blob, in one step."""
    fresh = name.with_name(name.name + ".new")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(os.path.relpath(blob, name.parent))
    except OSError:  # a file system without symbolic links
        os.link(blob, fresh)
    fresh.replace(name)
