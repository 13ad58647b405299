"""`cairn backup` and `cairn restore`: what a server keeps, copied while it runs, and put back where none runs.

    DIR/cairn.toml                      the file of options, where there is one
    DIR/agents/*.log                    the token log: agents, teams, runs, kept answers
    DIR/collections/*.sqlite            collections and files
    DIR/manifest.json                   written last: sizes and SHA-256 of all of them

KV is left out: it is computed again where it is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cairn.cli.options import configured
from cairn.config.resolve import Resolved, resolve, usual_file
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from cairn.system.interfaces import FileSystem, Lock

FORMAT = 1
"""The form of a backup. A newer one is refused."""
MANIFEST, OPTIONS, AGENTS, COLLECTIONS = "manifest.json", "cairn.toml", "agents", "collections"
_FOLDERS = ("agents_dir",)
_READ = 1 << 20
_WAIT = 20.0
"""Seconds for which a restore waits for a server that is about to end."""


class BackupFile(msgspec.Struct, frozen=True):
    """One file of a backup."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds."""

    format: int
    cairn: str
    """The version that wrote it."""
    made: str
    files: dict[str, BackupFile]
    """By their paths in the backup."""


def register(app: typer.Typer) -> None:
    """Add `cairn backup` and `cairn restore`."""

    @app.command(rich_help_panel="This machine")
    @configured(_FOLDERS, model=False)
    def backup(
        resolved: Resolved, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]
    ) -> None:
        """Copy agents, collections, files and options into a folder; a server may run meanwhile. KV is left out: it is
        computed again where it is missing."""
        from cairn.cli.output import amount

        made = make_backup(resolved, folder)
        print(f"{folder}: {len(made.files)} files, {amount(sum(one.size for one in made.files.values()))}")

    @app.command(rich_help_panel="This machine")
    @configured(_FOLDERS, model=False)
    def restore(
        resolved: Resolved, folder: Annotated[Path, typer.Argument(metavar="DIR", help="What cairn backup made.")]
    ) -> None:
        """Check a backup and put it where the options say that agents are. No server may run there, and nothing may be
        there yet."""
        for line in restore_backup(resolved, folder):
            print(line)


# ------------------------------------------------------------------------------------------------------------ backup


def make_backup(resolved: Resolved, folder: Path) -> Manifest:
    """Copy what the options name into a folder. Raises ConfigError where it holds something, or nothing is to copy."""
    from cairn import __version__
    from cairn.api.native.folders import agents_folder
    from cairn.system.posix import SystemFiles

    files = SystemFiles()
    agents = agents_folder(resolved.config, os.environ)
    collections = agents.with_name(agents.name + "-collections")
    if not agents.is_dir():
        raise ConfigError(f"there is nothing to copy: no agents in {agents}; --agents-dir names another folder")
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
        _write(files, target, b"")  # for its owner alone from its first byte on
        copy_database(store, target)
        made.append(target)
        _sync(files, target)
    if stores:
        files.sync_folder(folder / COLLECTIONS)
    return made


# ----------------------------------------------------------------------------------------------------------- restore


def restore_backup(resolved: Resolved, folder: Path) -> list[str]:
    """Put a backup where the options name, and return what was put where. Raises ConfigError; changes nothing then."""
    from cairn.api.native.folders import agents_folder
    from cairn.system.posix import SystemFiles

    files = SystemFiles()
    manifest = _checked(folder)
    options = folder / OPTIONS if OPTIONS in manifest.files else None
    if options is not None and resolved.file is None:  # it says where agents are to be
        flags = {name: getattr(resolved.config, name) for name in _FOLDERS if resolved.source(name).startswith("--")}
        resolved = resolve(flags, file=options)
    agents = agents_folder(resolved.config, os.environ)
    collections = agents.with_name(agents.name + "-collections")
    try:
        said = _put_back(files, manifest, folder, agents, collections)
        if options is not None:
            said.append(_put_options(files, options, resolved))
    except OSError as error:
        raise CairnError(f"{folder} could not be restored: {error}") from error
    return said


def _checked(folder: Path) -> Manifest:
    """Read a backup's manifest, and every file of it against its digest."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError:
        raise ConfigError(f"{folder}: is no whole backup: it has no {MANIFEST}, which is written last") from None
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
            raise ConfigError(f"{folder}: {MANIFEST} names {name!r}, which is no part of a backup")
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise ConfigError(f"{folder}: {name} cannot be read: {error.strerror or error}") from None
        if found != wanted:
            raise ConfigError(f"{folder}: {name} is not what was copied: its size or SHA-256 differs")
    return manifest


def _put_back(files: FileSystem, manifest: Manifest, folder: Path, agents: Path, collections: Path) -> list[str]:
    from cairn.agents.log.recovery import Folder

    Folder(files, agents).check()  # makes it
    lock = _locked(files, agents)
    try:
        if any(agents.glob("*.log")) or any(collections.glob("*.sqlite")):
            held = agents if any(agents.glob("*.log")) else collections
            raise ConfigError(f"{held}: is in use already; move it away, or name another place with --agents-dir")
        databases = _of(manifest, COLLECTIONS)
        if databases:
            files.make_folder(collections)
        # Segments get their names last: until then a server would find no agents here, and none by halves.
        copies = [(folder / COLLECTIONS / name, collections / name, collections / name) for name in databases]
        copies += [
            (folder / AGENTS / name, agents / f"{name[:-4]}.new", agents / name) for name in _of(manifest, AGENTS)
        ]
        made: list[Path] = []
        for left in agents.glob("*.new"):  # of a restore that was killed
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
    said = [f"agents: {agents}"]
    return [*said, f"collections and files: {collections}"] if databases else said


def _locked(files: FileSystem, agents: Path) -> Lock:
    """Hold the folder, once a server that is ending has let go of it."""
    end = time.monotonic() + _WAIT
    while (lock := files.lock(agents)) is None:
        if time.monotonic() >= end:
            raise ConfigError(f"{agents}: a server keeps its agents there; end it first, or name another --agents-dir")
        time.sleep(0.2)
    return lock


def _put_options(files: FileSystem, options: Path, resolved: Resolved) -> str:
    target = usual_file(os.environ) if resolved.file in (None, options) else resolved.file
    assert target is not None
    data = options.read_bytes()
    if target.exists():
        same = target.read_bytes() == data
        return f"options: {target}" + ("" if same else f" was left as it is; those of the backup are in {options}")
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
    file = files.open(path, "create")
    try:
        file.append(data)
        file.sync()
    finally:
        file.close()


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
    file = files.open(path, "append")
    try:
        file.sync()
    finally:
        file.close()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
