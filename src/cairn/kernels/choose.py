"""Which kernels compute: the fastest that run here, or the ones that were asked for."""

from __future__ import annotations

from cairn.kernels import native
from cairn.kernels.base import Kernels
from cairn.kernels.vocabulary import NUMPY, Sampler
from cairn.types.errors import ModelError

REFERENCE = "reference"


def chosen(wanted: str) -> str:
    """The kernels that `wanted` ("auto" or a name) means here; `ModelError` where they cannot run."""
    found = native.variants()
    if wanted == "auto":
        return next((name for name, runs in found.items() if runs), REFERENCE)
    if wanted != REFERENCE and not found.get(wanted, False):
        if wanted in found:
            why = "this CPU lacks their instructions"
        elif trouble := native.trouble():
            why = f"they cannot be loaded ({trouble})"
        else:
            why = "they were not compiled when Cairn was installed"
        usable = ", ".join([*(name for name, runs in found.items() if runs), REFERENCE])
        raise ModelError(f"kernels is {wanted}, but {why}; here run {usable}")
    return wanted


def described(wanted: str) -> str:
    """`chosen` in words, with the reason where it is not the fast one; `ModelError` as there."""
    name = chosen(wanted)
    if name != REFERENCE:
        return f"native kernels ({name})"
    if wanted == REFERENCE:
        why = "as asked"
    elif trouble := native.trouble():
        why = f"the native kernels cannot be loaded: {trouble}"
    else:
        why = "the native kernels were not compiled; install again with a C++ compiler and Python's headers"
    return f"reference kernels (numpy, slow: {why})"


def load_kernels(wanted: str, threads: int) -> Kernels:
    """The kernels that `chosen` names, on so many threads."""
    name = chosen(wanted)
    if name != REFERENCE:
        return native.NativeKernels(name, threads)
    # Imported here: it pins BLAS, which the native kernels never call.
    from cairn.kernels.reference import ReferenceKernels

    return ReferenceKernels(threads)


def load_sampler(wanted: str, threads: int, vocab: int) -> Sampler:
    """What decides logits where the kernels that `chosen` names do, for an engine that has no other use for them."""
    name = chosen(wanted)
    return NUMPY if name == REFERENCE else native.NativeKernels(name, threads).sampler(vocab)
