"""A copy of a token log that another process may be writing meanwhile.

A segment grows only at its end, and what supersedes others is a new one, made before they go. So a copy of all segments
that were there at one moment is what a crash at that moment would have left, wherever the growing one is cut.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from cairn.agents.log.recovery import LOG, Folder, look
from cairn.agents.log.segment import VERSION, decode_header
from cairn.system.interfaces import FileSystem
from cairn.types.errors import ConfigError, Unavailable

PASSES = 100
"""How often the folder is looked at for segments that came or went while others were copied."""


def copy_log(files: FileSystem, source: Path, target: Path) -> list[Path]:
    """Copy the log in `source` into the empty folder `target`; return the files made.

    Their content is durable, their names are not yet. Raise ConfigError for a format newer than this version reads,
    OSError, and Unavailable if segments came and went faster than they could be copied.
    """
    folder, copy = Folder(files, source), Folder(files, target)
    copied: dict[int, int] = {}
    for _ in range(PASSES):
        there = _sizes(files, folder)
        for number in copied.keys() - there.keys():
            copy.remove(number)
            del copied[number]
        for number, size in there.items():
            if copied.get(number) == size:
                continue
            try:
                data = folder.read(number)
            except FileNotFoundError:  # compacted meanwhile: the next look finds what took its place
                break
            _put(files, copy, number, data)
            copied[number] = len(data)
        if folder.numbers(LOG) == sorted(copied):
            return [copy.name(number) for number in sorted(copied)]
    raise Unavailable(f"the token log in {source} changed faster than it could be copied; try again", retry_after=1.0)


def damage(files: FileSystem, copy: Path) -> str:
    """Return what a copied log has lost, as a sentence; empty for nothing."""
    return look(Folder(files, copy))


def _sizes(files: FileSystem, folder: Folder) -> dict[int, int]:
    sizes = {entry.name: entry.size for entry in files.list(folder.path)}
    return {number: size for number in folder.numbers(LOG) if (size := sizes.get(folder.name(number).name)) is not None}


def _put(files: FileSystem, copy: Folder, number: int, data: bytes) -> None:
    """Write a segment's copy, in the place of an earlier one that was shorter."""
    header = decode_header(data)
    if header is not None and header.version > VERSION:
        raise ConfigError(
            f"{copy.name(number).name}: written by a newer Cairn (format {header.version}); this one copies formats up "
            f"to {VERSION}"
        )
    temporary = copy.name(number, "new")
    with contextlib.closing(files.open(temporary, "create")) as file:
        file.append(data)
        file.sync()
    files.replace(temporary, copy.name(number))
