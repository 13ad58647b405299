"""Which GGUF files of a repository belong together, and which quantisation each model among them has.

Repositories of GGUF files hold the same model many times, told apart by their names: NAME-Q4_K_M.gguf, or the parts
NAME-Q4_K_M-00001-of-0000N.gguf, at times in a folder of their own. All of this goes by names; no file is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cairn.models.files import parts, stem

_FILE = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*\.gguf")
"""At most one folder deep, and never outside the repository."""
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32))$", re.IGNORECASE)
_DYNAMIC = "UD-"
"""Before a type: some matrices have another one."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One model in one file or several."""

    stem: str
    """The file's name without its ending and number."""
    type: str
    """Such as Q4_K_M, in capitals; "" if the names do not say."""
    files: tuple[str, ...]
    """Names in the repository, with all parts that the model has."""
    missing: str
    """The first part that is not there, or ""."""


def variants(names: Iterable[str]) -> list[Variant]:
    """The models among a repository's file names, by name. Projectors of images (mmproj) are no models."""
    there = {name for name in names if _FILE.fullmatch(name) and "mmproj" not in name.lower()}
    found = {}
    for name in sorted(there):
        path = PurePosixPath(name)
        files = tuple(str(path.with_name(one)) for one in parts(path.name))
        if not files:
            continue
        missing = next((one for one in files if one not in there), "")
        found[files] = Variant(stem(path), _type(stem(path)) or _type(path.parent.name), files, missing)
    return list(found.values())


def choose(found: Sequence[Variant], tag: str) -> list[Variant]:
    """Those that a tag means: a whole name, or a quantisation, in any case. Several are for the user to choose from."""
    by_name = [one for one in found if one.stem.lower() == tag.lower()]
    wanted = tag.upper()
    chosen = (
        by_name
        or [one for one in found if one.type == wanted]
        or [one for one in found if one.type == _DYNAMIC + wanted]
    )
    if len({(one.stem, one.type) for one in chosen}) > 1:
        return chosen
    # The same model in one file and in parts: the one file.
    return sorted(chosen, key=lambda one: len(one.files))[:1]


def tags(found: Iterable[Variant]) -> str:
    """What can be asked for, as words: the types, and the names of those that have none."""
    return ", ".join(dict.fromkeys(one.type or one.stem for one in found))


def cached(repository: Path) -> list[tuple[Path, Variant]]:
    """The whole models among a repository's downloads with the snapshot that has each; the last one pulled if several.

    GGUF files of other commits stay where they are when one is pulled, so every snapshot is looked at.
    """
    newest: dict[tuple[str, str], tuple[int, Path, Variant]] = {}
    for snapshot in sorted((repository / "snapshots").glob("*")):
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.is_file()]
        for one in variants(names):
            if one.missing:
                continue
            # The time of the link, not of what it points at.
            pulled = (snapshot / one.files[-1]).lstat().st_mtime_ns
            key = one.stem, one.type
            if key not in newest or pulled > newest[key][0]:
                newest[key] = pulled, snapshot, one
    return [(snapshot, one) for _, (_, snapshot, one) in sorted(newest.items())]


def _type(name: str) -> str:
    match = _TYPE.search(name)
    return match[1].upper() if match else ""
