"""Notes kernel calls instead of making them."""

from __future__ import annotations

from typing import Any

from cairn.kernels.program import KernelCall


class Recorder:
    """Stands in for the kernels while a forward pass is recorded: it notes every call and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []

    def __getattr__(self, kernel: str) -> Any:
        def record(*arguments: Any) -> None:
            self.calls.append(KernelCall(kernel, arguments))

        return record
