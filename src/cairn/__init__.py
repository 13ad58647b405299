"""Cairn: an LLM inference server that never computes a context twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cairn.entrypoints.llm import LLM, Answer, AsyncLLM

    __version__: str

__all__ = ["LLM", "Answer", "AsyncLLM", "__version__"]


_ELSEWHERE = {
    "SamplingParams": "give its fields to the call: llm.chat(messages, temperature=0, max_tokens=100)",
    "Llama": "it is called LLM: from cairn import LLM",
    "Client": "a server is asked with any OpenAI client; for a model in this process: from cairn import LLM",
    "AsyncLLMEngine": "it is called AsyncLLM: from cairn import AsyncLLM",
}
"""Names of other libraries -> what to use here."""


def __getattr__(name: str) -> object:
    """Load the Python API, or look the version up, when it is first used: `import cairn` stays cheap."""
    if name in ("LLM", "Answer", "AsyncLLM"):
        from cairn.entrypoints import llm

        return getattr(llm, name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("cairn-llm")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0.0.0"
    if name in _ELSEWHERE:
        raise ImportError(f"cairn has no {name}: {_ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
