"""GGUF models of a repository: which files belong together, and the quantisation of each.

Repositories hold the same model many times, distinguished by name: NAME-Q4_K_M.gguf, or the parts
NAME-Q4_K_M-00001-of-0000N.gguf, sometimes in a separate folder. Only names are used; no file is opened.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cairn.models.files import MAX_NAME_BYTES, is_gguf, parts, stem

MAX_FOLDERS = 4
"""Deepest folder level of a model in a repository."""
_ROOM = len(".new")
"""Bytes that a name must leave free: files are created under a longer name."""
_KINDS = r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32)"
_TYPE = re.compile(rf"(?:^|[-._ +(\[])({_KINDS})[)\]]?\Z", re.IGNORECASE)
_IMATRIX = re.compile(r"(?:^|[-._ ])imatrix(?:\Z|[-._ ])", re.IGNORECASE)
_MADE_WITH = re.compile(rf"[-._ ]{_KINDS}[-_ ]imatrix\Z", re.IGNORECASE)
"""A model quantised with the help of an imatrix."""
_DYNAMIC = "UD-"
"""Prefix of a type in which some matrices have another type."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A model in one or several files."""

    stem: str
    """File name without ending and part number."""
    type: str
    """Such as Q4_K_M, in capitals; "" if the names do not state it."""
    files: tuple[str, ...]
    """Names in the repository, all parts included."""
    missing: str
    """First missing part, or ""."""

    @property
    def path(self) -> str:
        """The stem with the file's folders."""
        return str(PurePosixPath(self.files[0]).with_name(self.stem))


def variants(names: Iterable[str]) -> list[Variant]:
    """Return the models among a repository's file names, sorted by name.

    Image projectors (mmproj) and importance matrices (imatrix) are not models.
    """
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
    """Return whether a repository's file name can be used here: few folders, and never outside the repository."""
    steps = name.split("/")
    return (
        len(steps) <= MAX_FOLDERS + 1
        and name.isprintable()
        and "\\" not in name
        and all(one and one[0] != "." and len(one.encode()) <= MAX_NAME_BYTES - _ROOM for one in steps)
    )


def _is_aid(name: str) -> bool:
    """Return whether a GGUF file is an mmproj or imatrix file and no model."""
    own = stem(PurePosixPath(name))
    guide = _IMATRIX.search(own) and not _type(own) and not _MADE_WITH.search(own)
    return "mmproj" in name.lower() or bool(guide)


def choose(found: Sequence[Variant], tag: str) -> list[Variant]:
    """Return the variants that a tag names: a whole name or a quantisation, ignoring case. Several are ambiguous."""
    folded = _folded(tag[: -len(".gguf")] if tag.lower().endswith(".gguf") else tag)
    named = [one for one in found if _folded(one.path) == folded] or [
        one for one in found if _folded(one.stem) == folded
    ]
    wanted = tag.upper()
    chosen = (
        named or [one for one in found if one.type == wanted] or [one for one in found if one.type == _DYNAMIC + wanted]
    )
    if len({(one.stem, one.type) if one.type else (one.path, "") for one in chosen}) > 1:
        return chosen
    # The same model in one file and in parts: prefer the one file.
    return sorted(chosen, key=lambda one: len(one.files))[:1]


def _folded(name: str) -> str:
    """Return a name for comparison: Unicode-normalised and case-folded."""
    return unicodedata.normalize("NFC", name).casefold()


def tags(found: Iterable[Variant]) -> str:
    """Return the valid tags as text: the types, and the names of models without one."""
    return ", ".join(dict.fromkeys(one.type or one.stem for one in found))


def gguf_names(snapshot: Path) -> list[str]:
    """Return the names of the GGUF files in a snapshot, including dangling links."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if is_gguf(path)]


def cached(repository: Path) -> list[tuple[Path, Variant]]:
    """Return the complete downloaded GGUF models of a repository with their snapshots; of duplicates the newest.

    GGUF files of other commits stay when one is pulled, so every snapshot is searched.
    """
    newest: dict[tuple[str, str], tuple[int, Path, Variant]] = {}  # by path and type
    for snapshot in sorted((repository / "snapshots").glob("*")):
        for one in variants(name for name in gguf_names(snapshot) if (snapshot / name).is_file()):
            if one.missing:
                continue
            # The link's own time, not its target's.
            pulled = (snapshot / one.files[-1]).lstat().st_mtime_ns
            key = one.path, one.type
            if key not in newest or pulled > newest[key][0]:
                newest[key] = pulled, snapshot, one
    # Of two with the same tag in different commits, the newest comes first.
    order = sorted(newest.values(), key=lambda at: (at[2].stem if at[2].type else at[2].path, at[2].type, -at[0]))
    return [(snapshot, one) for _, snapshot, one in order]


def _type(name: str) -> str:
    match = _TYPE.search(name)
    return match[1].upper() if match else ""
