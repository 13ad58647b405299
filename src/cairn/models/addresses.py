"""What people paste for a model's name -> the name: addresses of the hub, and of files of this machine.

    hf.co/org/name, hf.co/org/name:Q4_K_M, hf://org/name         org/name, org/name:Q4_K_M
    https://huggingface.co/org/name, .../tree/main               org/name
    https://huggingface.co/org/name/blob/main/folder/M.gguf      org/name:M, and so .../resolve/main/M.gguf
    file:///home/ada/m.gguf, file:m.gguf                         /home/ada/m.gguf, m.gguf

Everything else is a name already. Nothing is looked up here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

from cairn.errors import ModelError
from cairn.models.files import stem

HUBS = ("huggingface.co", "hf.co", "www.huggingface.co")
ENDPOINT = "HF_ENDPOINT"
"""The variable that names a mirror of the hub, whose addresses are understood too."""
_VIEWS = ("blob", "resolve", "raw", "tree")
"""What stands in an address between the repository and the revision."""


def plain(model: str, env: Mapping[str, str] | None = None) -> str:
    """The name that an address means; a name as it is.

    Raises ModelError for the address of another site, of another revision than `main`, or of nothing that is a model.
    """
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
    except ValueError:  # half of an IPv6 address
        raise ModelError(f"{address} is not an address") from None


def _named(model: str, path: str) -> str:
    """org/name[:TAG] of the path of an address."""
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
        raise ModelError(f"{model} is one file of a model; give the whole of it: {name}")
    return f"{name}:{stem(gguf)}"


def _file(model: str, rest: str) -> str:
    """The path of a file: address; one of another machine is refused."""
    if not rest.startswith("//"):
        return unquote(rest)
    host, slash, path = rest[2:].partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise ModelError(f"{model} names the machine {host}; a file of this one looks like file:///folder/model.gguf")
    return unquote(slash + path)
