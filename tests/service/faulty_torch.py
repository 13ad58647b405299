"""A worker whose torch fails in a chosen way, except in the CPU's own kernels: `faulty_torch.py MODE FD`.

`FAULTS` names a folder that gets one file for each failed step; `FAULTS_MOST` is how many steps may fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from cairn.engine.recorded import RecordedEngine
from cairn.kernels.torch import torch_kernels
from cairn.worker import worker

ANSWERED = 12
"""Number of tokens after which a request's step fails."""
LONG = 600
"""Number of prompt tokens that need too much memory."""

NORM, COMPUTE = torch_kernels.rms_norm, RecordedEngine._compute
armed: list[Exception] = []
"""Errors that the next norm raises, in the middle of a step."""


def norm(x: Any, weight: Any, eps: float) -> Any:
    """Raise the planned error, as torch does for a kernel that fails."""
    if armed:
        raise armed.pop()
    return NORM(x, weight, eps)


def wrong(x: Any, weight: Any, eps: float) -> Any:
    """Compute numbers that are off by a tenth."""
    return NORM(x, weight, eps) * 1.1


def fails(step: Any) -> None:
    """Make the device fail in a step of an answer with a given number of tokens."""
    faults = Path(os.environ["FAULTS"])
    due = any(len(row.tokens) >= row.prompt_len + ANSWERED for row in step.rows)
    if due and len(list(faults.iterdir())) < int(os.environ["FAULTS_MOST"]):
        (faults / str(os.getpid())).touch()
        armed.append(RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines"))


def short(step: Any) -> None:
    """Make a step with part of a long prompt need more memory than there is."""
    if any(row.prompt_len >= LONG for row in step.rows):
        armed.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore lines"))


def main() -> int:
    mode = sys.argv.pop(1)
    torch_kernels.rms_norm = wrong if mode == "wrong" else norm  # type: ignore[assignment]
    planned = {"fails": fails, "short": short}.get(mode)

    def compute(self: RecordedEngine, step: Any) -> Any:
        if planned is not None and self.info.device != "cpu":
            planned(step)
        return COMPUTE(self, step)

    RecordedEngine._compute = compute  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
