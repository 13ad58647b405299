"""Which GGUF files of a repository belong together, and which quantisation each model among them has.

Repositories of GGUF files hold the same model many times, told apart by their names: NAME-Q4_K_M.gguf, or the parts
NAME-Q4_K_M-00001-of-0000N.gguf, at times in a folder of their own. All of this goes by names; no file is opened.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cairn.models.files import MAX_NAME_BYTES, is_gguf, parts, stem

MAX_FOLDERS = 4
"""Deeper than this no repository keeps its models."""
_ROOM = len(".new")
"""Bytes that a name must have to spare: a file is made under a longer one."""
_KINDS = r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32)"
_TYPE = re.compile(rf"(?:^|[-._ +(\[])({_KINDS})[)\]]?\Z", re.IGNORECASE)
_IMATRIX = re.compile(r"(?:^|[-._ ])imatrix(?:\Z|[-._ ])", re.IGNORECASE)
_MADE_WITH = re.compile(rf"[-._ ]{_KINDS}[-_ ]imatrix\Z", re.IGNORECASE)
"""A model whose quantisation was guided by one."""
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

    @property
    def path(self) -> str:
        """The stem with the folders that the file is in."""
        return str(PurePosixPath(self.files[0]).with_name(self.stem))


def variants(names: Iterable[str]) -> list[Variant]:
    """The models among a repository's file names, by name. Projectors of images (mmproj) and the matrices that guide a
    quantisation (imatrix) are no models."""
    there = {name for name in names if is_place(name) and name.lower().endswith(".gguf") and not _is_aid(name)}
    found = {}
    for name in sorted(there):
        path = PurePosixPath(name)
        files = tuple(str(path.with_name(one)) for one in parts(path.name))
        if not files:
            continue
        missing = next((one for one in files if one not in there), "")
        kinds = map(_type, (stem(path), *(above.name for above in path.parents)))
        found[files] = Variant(stem(path), next(filter(None, kinds), ""), files, missing)
    return list(found.values())


def is_place(name: str) -> bool:
    """Whether a repository's name of a file can be one here: of a few folders, and never outside the repository."""
    steps = name.split("/")
    return (
        len(steps) <= MAX_FOLDERS + 1
        and name.isprintable()
        and "\\" not in name
        and all(one and one[0] != "." and len(one.encode()) <= MAX_NAME_BYTES - _ROOM for one in steps)
    )


def _is_aid(name: str) -> bool:
    """Whether a GGUF file helps with models and is none."""
    own = stem(PurePosixPath(name))
    guide = _IMATRIX.search(own) and not _type(own) and not _MADE_WITH.search(own)
    return "mmproj" in name.lower() or bool(guide)


def choose(found: Sequence[Variant], tag: str) -> list[Variant]:
    """Those that a tag means: a whole name, or a quantisation, in any case. Several are for the user to choose from."""
    said = _folded(tag[: -len(".gguf")] if tag.lower().endswith(".gguf") else tag)
    named = [one for one in found if _folded(one.path) == said] or [one for one in found if _folded(one.stem) == said]
    wanted = tag.upper()
    chosen = (
        named or [one for one in found if one.type == wanted] or [one for one in found if one.type == _DYNAMIC + wanted]
    )
    if len({(one.stem, one.type) if one.type else (one.path, "") for one in chosen}) > 1:
        return chosen
    # The same model in one file and in parts: the one file.
    return sorted(chosen, key=lambda one: len(one.files))[:1]


def _folded(name: str) -> str:
    """A name as it is compared: an accent may be a character of its own, or not."""
    return unicodedata.normalize("NFC", name).casefold()


def tags(found: Iterable[Variant]) -> str:
    """What can be asked for, as words: the types, and the names of those that have none."""
    return ", ".join(dict.fromkeys(one.type or one.stem for one in found))


def gguf_names(snapshot: Path) -> list[str]:
    """The names of the GGUF files in a snapshot, also of links that lead nowhere."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if is_gguf(path)]


def cached(repository: Path) -> list[tuple[Path, Variant]]:
    """The whole models among a repository's downloads with the snapshot that has each; of one path the last one pulled.

    GGUF files of other commits stay where they are when one is pulled, so every snapshot is looked at.
    """
    newest: dict[tuple[str, str], tuple[int, Path, Variant]] = {}  # by path and type
    for snapshot in sorted((repository / "snapshots").glob("*")):
        for one in variants(name for name in gguf_names(snapshot) if (snapshot / name).is_file()):
            if one.missing:
                continue
            # The time of the link, not of what it points at.
            pulled = (snapshot / one.files[-1]).lstat().st_mtime_ns
            key = one.path, one.type
            if key not in newest or pulled > newest[key][0]:
                newest[key] = pulled, snapshot, one
    # Of two that a tag takes for the same, in folders of different commits, the last one comes first.
    order = sorted(newest.values(), key=lambda at: (at[2].stem if at[2].type else at[2].path, at[2].type, -at[0]))
    return [(snapshot, one) for _, snapshot, one in order]


def _type(name: str) -> str:
    match = _TYPE.search(name)
    return match[1].upper() if match else ""
