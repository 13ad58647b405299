"""`cairn backup` and `cairn restore`: copy a server's data while it runs, and put it back where none runs.

    DIR/cairn.toml                      the file of options, if there is one
    DIR/agents/*.log                    the token log: agents, teams, runs, stored answers
    DIR/collections/*.sqlite            collections and files
    DIR/manifest.json                   written last: sizes and SHA-256 of all other files

KV is not copied: missing KV is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cairn.cli.common.options import configured
from cairn.config.resolve import Resolved, resolve, usual_file
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from cairn.system.interfaces import FileSystem, Lock

FORMAT = 1
"""The format version of a backup; newer ones are refused."""
MANIFEST, OPTIONS, AGENTS, COLLECTIONS = "manifest.json", "cairn.toml", "agents", "collections"
_FOLDERS = ("agents_dir",)
_READ = 1 << 20
_WAIT = 20.0
"""Seconds that a restore waits for a server that is stopping."""


class BackupFile(msgspec.Struct, frozen=True):
    """One file of a backup."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The list of a backup's files."""

    format: int
    cairn: str
    """The version that wrote it."""
    made: str
    files: dict[str, BackupFile]
    """Files by their paths in the backup."""


def register(app: typer.Typer) -> None:
    """Add `cairn backup` and `cairn restore`."""

    @app.command(rich_help_panel="This machine")
    @configured(_FOLDERS, model=False)
    def backup(
        resolved: Resolved, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]
    ) -> None:
        """Copy agents, collections, files and options to a folder; a server may be running.

        KV is not copied: missing KV is computed again.
        """
        from cairn.cli.common.output import amount, counted

        made = make_backup(resolved, folder)
        print(f"{folder}: {counted(len(made.files), 'file')}, {amount(sum(one.size for one in made.files.values()))}")

    @app.command(rich_help_panel="This machine")
    @configured(_FOLDERS, model=False)
    def restore(
        resolved: Resolved, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of cairn backup.")]
    ) -> None:
        """Check a backup and restore it to the configured folder of agents.

        That folder must be empty, and no server may be using it.
        """
        for line in restore_backup(resolved, folder):
            print(line)


# ------------------------------------------------------------------------------------------------------------ backup


def make_backup(resolved: Resolved, folder: Path) -> Manifest:
    """Copy the configured server's data to a folder. ConfigError if the folder is not empty or there is no data."""
    from cairn import __version__
    from cairn.api.data_folders import agents_folder
    from cairn.system.posix import SystemFiles

    files = SystemFiles()
    agents = agents_folder(resolved.config, os.environ)
    collections = agents.with_name(agents.name + "-collections")
    if not agents.is_dir():
        raise ConfigError(f"there is nothing to copy: no agents in {agents}; give another folder with --agents-dir")
    try:
        files.make_folder(folder)
        if files.list(folder):
            raise ConfigError(f"{folder}: is not empty; a backup needs a new folder")
        made = _copy(files, resolved, agents, collections, folder)
        listed = {path.relative_to(folder).as_posix(): _digest(path) for path in made}
        manifest = Manifest(format=FORMAT, cairn=__version__, made=_now(), files=listed)
        _write(files, folder / MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())
        files.sync_folder(folder)
    except OSError as error:
        raise CairnError(f"the backup in {folder} could not be made: {error}") from error
    return manifest


def _copy(files: FileSystem, resolved: Resolved, agents: Path, collections: Path, folder: Path) -> list[Path]:
    from cairn.agents.log.live_copy import copy_log, damage
    from cairn.rag.copy_database import copy_database

    made = []
    if resolved.file is not None:
        _write(files, folder / OPTIONS, resolved.file.read_bytes())
        made.append(folder / OPTIONS)
    files.make_folder(folder / AGENTS)
    made += copy_log(files, agents, folder / AGENTS)
    if lost := damage(files, folder / AGENTS):
        typer.echo(f"Copied as it is: {lost}", err=True)
    files.sync_folder(folder / AGENTS)
    stores = sorted(collections.glob("*.sqlite")) if collections.is_dir() else []
    if stores:
        files.make_folder(folder / COLLECTIONS)
    for store in stores:
        target = folder / COLLECTIONS / store.name
        _write(files, target, b"")  # creates it readable by its owner alone
        copy_database(store, target)
        made.append(target)
        _sync(files, target)
    if stores:
        files.sync_folder(folder / COLLECTIONS)
    return made


# ----------------------------------------------------------------------------------------------------------- restore


def restore_backup(resolved: Resolved, folder: Path) -> list[str]:
    """Restore a backup to the configured folders, and return lines that name them. ConfigError changes nothing."""
    from cairn.api.data_folders import agents_folder
    from cairn.system.posix import SystemFiles

    files = SystemFiles()
    manifest = _checked(folder)
    options = folder / OPTIONS if OPTIONS in manifest.files else None
    if options is not None and resolved.file is None:  # the backup's options say where agents belong
        flags = {name: getattr(resolved.config, name) for name in _FOLDERS if resolved.source(name).startswith("--")}
        resolved = resolve(flags, file=options)
    agents = agents_folder(resolved.config, os.environ)
    collections = agents.with_name(agents.name + "-collections")
    try:
        lines = _put_back(files, manifest, folder, agents, collections)
        if options is not None:
            lines.append(_put_options(files, options, resolved))
    except OSError as error:
        raise CairnError(f"{folder} could not be restored: {error}") from error
    return lines


def _checked(folder: Path) -> Manifest:
    """Return a backup's manifest, after checking every file against its size and digest. Raises ConfigError."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError:
        raise ConfigError(f"{folder}: is not a complete backup: it lacks {MANIFEST}, which is written last") from None
    try:
        form = json.loads(data).get("format")
        if isinstance(form, int) and form > FORMAT:
            raise ConfigError(f"{folder}: was made by a newer Cairn (format {form}); this one reads up to {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder}: {MANIFEST} cannot be read: {error}") from None
    for name, wanted in manifest.files.items():
        parts = Path(name).parts
        if name != OPTIONS and (len(parts) != 2 or parts[0] not in (AGENTS, COLLECTIONS) or parts[1] == ".."):
            raise ConfigError(f"{folder}: {MANIFEST} names {name!r}, which is not part of a backup")
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder}: {name} cannot be read: {error.strerror or error}") from None
        if found != wanted:
            raise ConfigError(f"{folder}: {name} has changed since the backup: its size or SHA-256 differs")
    return manifest


def _put_back(files: FileSystem, manifest: Manifest, folder: Path, agents: Path, collections: Path) -> list[str]:
    from cairn.agents.log.recovery import Folder

    Folder(files, agents).check()  # creates it
    lock = _locked(files, agents)
    try:
        if any(agents.glob("*.log")) or any(collections.glob("*.sqlite")):
            held = agents if any(agents.glob("*.log")) else collections
            raise ConfigError(f"{held}: is not empty; move it away, or give another folder with --agents-dir")
        databases = _of(manifest, COLLECTIONS)
        if databases:
            files.make_folder(collections)
        # Segments get their final names last: until then a server finds no agents here, rather than half of them.
        copies = [(folder / COLLECTIONS / name, collections / name, collections / name) for name in databases]
        copies += [
            (folder / AGENTS / name, agents / f"{name[:-4]}.new", agents / name) for name in _of(manifest, AGENTS)
        ]
        made: list[Path] = []
        for left in agents.glob("*.new"):  # left by a restore that was killed
            files.remove(left)
        try:
            for source, target, _ in copies:
                made.append(target)
                _copy_file(files, source, target)
            for _, target, final in copies:
                if final != target:
                    files.replace(target, final)
                    made.append(final)
            for place in {final.parent for *_, final in copies}:
                files.sync_folder(place)
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise
    finally:
        lock.release()
    lines = [f"agents: {agents}"]
    return [*lines, f"collections and files: {collections}"] if databases else lines


def _locked(files: FileSystem, agents: Path) -> Lock:
    """Lock the folder, waiting for a server that is stopping. ConfigError if it stays locked."""
    end = time.monotonic() + _WAIT
    while (lock := files.lock(agents)) is None:
        if time.monotonic() >= end:
            raise ConfigError(f"{agents}: a server is using it; stop it first, or give another --agents-dir")
        time.sleep(0.2)
    return lock


def _put_options(files: FileSystem, options: Path, resolved: Resolved) -> str:
    target = usual_file(os.environ) if resolved.file in (None, options) else resolved.file
    assert target is not None
    data = options.read_bytes()
    if target.exists():
        same = target.read_bytes() == data
        return f"options: {target}" + ("" if same else f" was not changed; those of the backup are in {options}")
    files.make_folder(target.parent)
    _write(files, target, data)
    files.sync_folder(target.parent)
    return f"options: {target}"


def _of(manifest: Manifest, part: str) -> list[str]:
    return sorted(Path(name).name for name in manifest.files if Path(name).parts[0] == part)


# ------------------------------------------------------------------------------------------------------------- files


def _digest(path: Path) -> BackupFile:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
        return BackupFile(file.tell(), found.hexdigest())


def _write(files: FileSystem, path: Path, data: bytes) -> None:
    with contextlib.closing(files.open(path, "create")) as file:
        file.append(data)
        file.sync()


def _copy_file(files: FileSystem, source: Path, target: Path) -> None:
    there, made = files.open(source, "read"), files.open(target, "create")
    try:
        at = 0
        while data := there.read(at, _READ):
            made.append(data)
            at += len(data)
        made.sync()
    finally:
        made.close()
        there.close()


def _sync(files: FileSystem, path: Path) -> None:
    with contextlib.closing(files.open(path, "append")) as file:
        file.sync()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
