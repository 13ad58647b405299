"""A stand-in for the kernels that records calls."""

from __future__ import annotations

from typing import Any

from cairn.kernels.program import KernelCall


class Recorder:
    """Records kernel calls while a forward pass is recorded; it computes nothing."""

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []

    def __getattr__(self, kernel: str) -> Any:
        def record(*arguments: Any) -> None:
            self.calls.append(KernelCall(kernel, arguments))

        return record
