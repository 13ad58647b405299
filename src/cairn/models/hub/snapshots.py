"""Snapshots in the download cache: whether one is complete, and which of its models a name means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.models.files import INDEX, MAX_NAME_BYTES, WEIGHTS, read_json
from cairn.models.hub.variants import Variant, choose, is_place, tags
from cairn.types.errors import ModelError, ModelFileError

NEEDED = ("config.json", "tokenizer.json")
"""Files required to serve a model."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_BYTES - 1}}}")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a pull, in bytes of all files; `file` is the current one."""

    file: str
    done: int
    total: int


def is_hub_id(model: str) -> bool:
    """Return whether a name has the form org/name."""
    return bool(_ID.fullmatch(model)) and ".." not in model


def parted(model: str) -> tuple[str, str]:
    """Split org/name:TAG into org/name and TAG; TAG is "" if there is none."""
    name, _, tag = model.partition(":")
    return (name, tag) if is_hub_id(name) and is_place(tag) else (model, "")


def choose_one(model: str, found: Sequence[Variant], where: str, hint: str = "") -> Variant:
    """Return the single GGUF model that org/name:TAG means; raise ModelError that lists the choices."""
    name, tag = parted(model)
    chosen = choose(found, tag)
    if len(chosen) > 1:
        alike = len({one.stem for one in chosen}) == 1 and len({one.type for one in chosen}) == len(chosen)
        apart = len({one.stem for one in chosen}) == len(chosen)
        names = tags(chosen) if alike else ", ".join(one.stem if apart else one.path for one in chosen)
        raise ModelError(f"{model} may be one of {names}; put its {'type' if alike else 'name'} after the colon")
    if not chosen:
        has = f"only {tags(found)}" if found else "no GGUF file at all"
        raise ModelError(f"{tag} of {name} is not {where}, {has}{hint}")
    return chosen[0]


def snapshot_of(repository: Path) -> Path | None:
    """Return the snapshot of the branch `main`, or None if nothing was downloaded."""
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = repository / "snapshots" / commit
    return folder if _NAME.fullmatch(commit) and folder.is_dir() else None


def is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot is a complete model for Cairn; other programs cache other kinds of models."""
    try:
        return not missing_from(snapshot)
    except (ModelFileError, OSError):
        return False


def missing_from(snapshot: Path) -> str:
    """Return the first file that a complete model would have and this folder lacks, or ""."""
    weights = index_shards(snapshot / INDEX) if (snapshot / INDEX).is_file() else [WEIGHTS]
    return next((name for name in (*NEEDED, *weights) if not (snapshot / name).is_file()), "")


def index_shards(index: Path) -> list[str]:
    """Return the weight files that an index names; raise ModelFileError if they are not plain file names."""
    found = read_json(index)
    try:
        names = sorted(set(found["weight_map"].values()))
        if all(isinstance(name, str) and _NAME.fullmatch(name) and name.endswith(".safetensors") for name in names):
            return names
    except (KeyError, TypeError, AttributeError):
        pass
    raise ModelFileError(f"{index} is not an index of safetensors files")
