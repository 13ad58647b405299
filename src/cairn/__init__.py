"""Cairn: an LLM inference server that never computes a context twice."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cairn.llm import LLM, Answer, AsyncLLM

try:
    __version__ = version("cairn-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["LLM", "Answer", "AsyncLLM", "__version__"]


def __getattr__(name: str) -> object:
    """Load the Python API when it is first used, so that `import cairn` stays cheap."""
    if name in ("LLM", "Answer", "AsyncLLM"):
        from cairn import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
