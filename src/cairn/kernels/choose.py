"""Choice of the CPU kernels: the fastest that run here, or the ones named in the options.

Where the CPU has AMX's tiles, `auto` means the kernels that use them if these were faster on the first start on this
machine. Other kernels give answers other last bits, and find none of the KV that these stored. So a machine must keep
its kernels from one start to the next: what was measured first stands in a file, by the CPU, and holds until that is
removed. Where nothing can be written, AMX is not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cairn.config.paths import home
from cairn.kernels import native
from cairn.kernels.base import Kernels
from cairn.kernels.sampling import NUMPY, Sampler
from cairn.system.interfaces import Clock, FileSystem, Rng
from cairn.system.posix import SystemClock, SystemFiles, SystemRng
from cairn.types.errors import ConfigError, ModelError

REFERENCE, AMX = "reference", "amx"
GAIN, LOSS = 1.25, 1.15
"""A prompt must be faster by this factor at least, and one token slower by that one at most."""
PROMPT, INNER, OUT, LONG = 256, 1024, 1024, 16384
"""Rows of a prompt, and sizes of its matrix; the outputs of one that no cache holds, for one row."""
_ROUNDS = 7
_MAX_BYTES = 1 << 16

log = logging.getLogger(__name__)


def chosen(wanted: str) -> str:
    """Return the name of the kernels that `wanted` ("auto" or a name) selects. Raises `ModelError` if unusable here."""
    variants = native.variants()
    if wanted == "auto":
        other = _without_amx()
        found = tile_speed(other) if other != REFERENCE else None
        return AMX if found is not None and found.chosen else other
    if wanted != REFERENCE and not variants.get(wanted, False) and not native.models().get(wanted, False):
        if wanted == "metal":
            why = "they are for device mlx"
        elif wanted == AMX and variants:
            why = native.tile_trouble()
        elif wanted in variants:
            why = "this CPU lacks their instructions"
        elif trouble := native.trouble():
            why = f"they cannot be loaded ({trouble})"
        else:
            why = "they were not compiled when Cairn was installed"
        usable = ", ".join([*(name for name, runs in variants.items() if runs), REFERENCE])
        raise ModelError(f"kernels is {wanted}, but {why}; use one of {usable}")
    return wanted


def described(wanted: str) -> str:
    """Describe the chosen kernels in words, with the reason if they are the slow ones. Raises as `chosen` does."""
    name = chosen(wanted)
    if name != REFERENCE:
        without = amx_unused() if wanted == "auto" else ""
        return f"native kernels ({name}{f'; without AMX: {without}' if without else ''})"
    if wanted == REFERENCE:
        why = "as configured"
    elif trouble := native.trouble():
        why = f"the native kernels cannot be loaded: {trouble}"
    else:
        why = "the native kernels were not compiled; install again with a C++ compiler and Python's headers"
    return f"reference kernels (numpy, slow: {why})"


def load_kernels(wanted: str, threads: int) -> Kernels:
    """Load the kernels that `chosen` selects, on so many threads."""
    name = chosen(wanted)
    if name != REFERENCE:
        if wanted == "auto":
            _tell_of_amx()
        return native.NativeKernels(name, threads)
    # Imported here: it pins BLAS, which the native kernels never call.
    from cairn.kernels.reference import ReferenceKernels

    return ReferenceKernels(threads)


def load_sampler(wanted: str, threads: int, vocab: int) -> Sampler:
    """Return the sampler of the kernels that `chosen` selects, for engines that need only that."""
    name = chosen(wanted)
    return NUMPY if name == REFERENCE else native.NativeKernels(name, threads).sampler(vocab)


Seconds = Annotated[float, Meta(gt=0)]


class TileSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a prompt's product and of one token's, with tiles and with the kernels that are fastest without."""

    cpu: str
    other: str
    prompt: Seconds
    other_prompt: Seconds
    token: Seconds
    other_token: Seconds
    chosen: bool
    """Whether `auto` means tiles: what was decided then, whatever a later version would decide."""

    def sentence(self) -> str:
        """Say what was found, for a log."""
        prompt, token = self.other_prompt / self.prompt, self.other_token / self.token
        what = f"bf16 prompts at {prompt:.1f} times the speed of {self.other}, tokens at {token:.1f}"
        if not self.chosen:
            return f"kernels auto stays with {self.other}: with {AMX} it measured {what} on this machine, once"
        return (
            f"kernels auto means {AMX}: it measured {what} on this machine, once. Contexts that other kernels stored "
            f"are not found, and computed anew"
        )


def decided(cpu: str, other: str, prompt: float, other_prompt: float, token: float, other_token: float) -> TileSpeed:
    """Return what was measured, with the choice that follows from it."""
    pays = prompt * GAIN <= other_prompt and token <= LOSS * other_token
    return TileSpeed(cpu, other, prompt, other_prompt, token, other_token, pays)


@functools.cache
def tile_speed(other: str) -> TileSpeed | None:
    """Return what AMX was measured to give here beside `other`; None if it is not to be used, whatever it gives."""
    if not native.has_tiles() or native.tile_trouble():
        return None
    return TileChoice(other, SystemFiles(), SystemClock(), SystemRng()).found()


def amx_unused() -> str:
    """Return why a CPU with AMX computes without it; "" if it does not, or if the CPU has none."""
    return native.tile_trouble() if native.has_tiles() else ""


def _without_amx() -> str:
    """Return the fastest kernels that run here but for those with AMX's tiles."""
    return next((name for name, runs in native.variants().items() if runs and name != AMX), REFERENCE)


@functools.cache
def _tell_of_amx() -> None:
    """Log, once in a process and where the CPU has AMX, whether it is used and why."""
    other = _without_amx()
    if why := amx_unused():
        log.warning("this CPU has AMX, but the kernels %s do not run: %s; %s run", AMX, why, other)
    elif (found := tile_speed(other)) is not None:
        log.info("%s", found.sentence())


class TileChoice:
    """The choice between `amx` and another variant on this machine."""

    def __init__(self, other: str, files: FileSystem, clock: Clock, rng: Rng, folder: Path | None = None) -> None:
        """Choose between `amx` and `other`. `folder`: where choices are kept; the user's own if it is None."""
        self._other, self._files, self._clock, self._rng = other, files, clock, rng
        self._folder = folder

    def found(self) -> TileSpeed | None:
        """Return what a file says, or what is measured now; None if that cannot be kept, which is logged."""
        cpu = native.cpu()
        try:
            folder = self._folder or choices_folder()
        except ConfigError as error:
            log.warning("%s; without it no choice of kernels can be kept, and %s run", error, self._other)
            return None
        own = hashlib.sha256(f"{cpu} {self._other} {native.VERSION}".encode()).hexdigest()[:16]
        path = folder / f"{AMX}-{own}.json"
        if (known := self._read(path)) is not None:
            return known
        try:
            return self._keep(path, measure(self._other, self._clock.now, cpu))
        except OSError as error:
            why = error.strerror or error
            log.warning("%s cannot be written: %s; kernels auto stays with %s", path, why, self._other)
            return None

    def _read(self, path: Path) -> TileSpeed | None:
        """Return what a file says; None if there is none, or it is damaged."""
        try:
            file = self._files.open(path, "read")
        except OSError:
            return None
        try:
            return msgspec.json.decode(file.read(0, _MAX_BYTES), type=TileSpeed)
        except (OSError, msgspec.MsgspecError):
            return None
        finally:
            file.close()

    def _keep(self, path: Path, found: TileSpeed) -> TileSpeed:
        """Write what was found, unless another process was first; return what holds. Raise OSError if it cannot."""
        self._files.make_folder(path.parent)
        temporary = path.with_name(f"{path.name}.{self._rng.bits64():x}")
        file = self._files.open(temporary, "create")
        try:
            with contextlib.closing(file):
                file.append(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
                file.sync()
            self._files.link(temporary, path)
        except FileExistsError:
            if (first := self._read(path)) is not None:
                return first
            self._files.replace(temporary, path)  # what lay there was damaged
            return found
        finally:
            self._remove(temporary)
        self._files.sync_folder(path.parent)
        return found

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(path)


def choices_folder() -> Path:
    """Return the folder of choices by the XDG base directory specification. Raise ConfigError if there is no home."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else home() / ".local" / "share") / "cairn" / "kernels"


def measure(other: str, now: Callable[[], float], cpu: str, tiles: str = AMX) -> TileSpeed:
    """Time products with bfloat16 weights on one thread; the best of some rounds counts, taken in turns."""
    seconds: dict[tuple[str, int], float] = {}
    weights = {rows: _numbers(out, INNER).astype(ml_dtypes.bfloat16) for rows, out in ((PROMPT, OUT), (1, LONG))}
    made = {name: native.NativeKernels(name) for name in (tiles, other)}
    try:
        matrices = {(name, rows): made[name].matrix([one], [None]) for name in made for rows, one in weights.items()}
        for _ in range(1 + _ROUNDS):  # the first touches the memory, and is the slowest
            for (name, rows), matrix in matrices.items():
                x, out = _numbers(rows, INNER), np.empty((rows, len(weights[rows])), np.float32)
                began = now()
                made[name].project(x, matrix, out)
                took = max(now() - began, 1e-9)
                seconds[name, rows] = min(took, seconds.get((name, rows), took))
    finally:
        for kernels in made.values():
            kernels.close()
    return decided(cpu, other, seconds[tiles, PROMPT], seconds[other, PROMPT], seconds[tiles, 1], seconds[other, 1])


def _numbers(rows: int, size: int) -> NDArray[np.float32]:
    numbers: NDArray[np.float32] = np.arange(rows * size, dtype=np.float32).reshape(rows, size)
    return (numbers % np.float32(61) - np.float32(30)) / np.float32(64)
