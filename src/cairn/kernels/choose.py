"""Choice of the CPU kernels: the fastest that run here, or the ones named in the options."""

from __future__ import annotations

from cairn.kernels import amx, native
from cairn.kernels.base import Kernels
from cairn.kernels.vocabulary import NUMPY, Sampler
from cairn.types.errors import ModelError

REFERENCE = "reference"


def chosen(wanted: str) -> str:
    """Return the name of the kernels that `wanted` ("auto" or a name) selects. Raises `ModelError` if unusable here."""
    variants = native.variants()
    if wanted == "auto":
        other = next((name for name, runs in variants.items() if runs and name != amx.AMX), REFERENCE)
        return amx.AMX if other != REFERENCE and amx.preferred(other) else other
    if wanted != REFERENCE and not variants.get(wanted, False) and not native.models().get(wanted, False):
        if wanted == "metal":
            why = "they are for device mlx"
        elif wanted == amx.AMX and variants:
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
        without = amx.unused() if wanted == "auto" else ""
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
            amx.warn(name)
        return native.NativeKernels(name, threads)
    # Imported here: it pins BLAS, which the native kernels never call.
    from cairn.kernels.reference import ReferenceKernels

    return ReferenceKernels(threads)


def load_sampler(wanted: str, threads: int, vocab: int) -> Sampler:
    """Return the sampler of the kernels that `chosen` selects, for engines that need only that."""
    name = chosen(wanted)
    return NUMPY if name == REFERENCE else native.NativeKernels(name, threads).sampler(vocab)
