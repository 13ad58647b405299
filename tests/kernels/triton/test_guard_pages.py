"""Reads beyond tensors: each tensor ends where an inaccessible page begins.

The interpreter reads any memory, and so does a GPU in many cases. Each check runs in a process of its own, since a
wrong read ends it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")
pytest.importorskip("triton", reason="triton is not installed: kernels for GPUs are not tested")

KERNELS = ("attention", "convolve", "project", "rope_write", "norm", "gate", "mamba2", "latent_attention")
"""Kernels that compute addresses from tables, or whose rows are no multiple of a tile."""
PAGE = mmap.PAGESIZE


def guarded(tensor: Any) -> Any:
    """Return a copy of a tensor that ends at the end of a mapping, before a page without any permission."""
    import torch

    size = tensor.numel() * tensor.element_size()
    if not size:
        return tensor
    whole = -(-size // PAGE) * PAGE
    mapping = mmap.mmap(-1, whole + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + whole), PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    kept.append(mapping)
    made = torch.frombuffer(mapping, dtype=tensor.dtype, offset=whole - size, count=tensor.numel())
    return made.reshape(tensor.shape).copy_(tensor)


kept: list[mmap.mmap] = []


def run(kernels: list[str]) -> None:
    """Call each kernel over guarded tensors, or read one number too many of one."""
    import torch

    from cairn.kernels.triton.triton_kernels import TritonKernels
    from tests.kernels.arguments import calls

    if kernels == ["planted"]:
        made = guarded(torch.zeros(3))
        ctypes.c_float.from_address(made.data_ptr() + 12).value  # noqa: B018
        return
    k = TritonKernels("cpu")
    seen = set()
    for call in calls():
        if call.kernel in kernels:
            guarded_arguments = [guarded(one) if isinstance(one, torch.Tensor) else one for one in call.given(k)]
            getattr(k, call.kernel)(*guarded_arguments)
            seen.add(call.kernel)
    assert seen == set(kernels)
    print("done")


def child(*kernels: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.triton.test_guard_pages", *kernels]
    root = Path(__file__).parents[3]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_no_kernel_reads_behind_a_tensor() -> None:
    done = child(*KERNELS)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-2000:]


def test_a_planted_read_is_caught() -> None:
    assert child("planted").returncode < 0


if __name__ == "__main__":
    run(sys.argv[1:])
    os._exit(0)  # tensors still point into the mappings
