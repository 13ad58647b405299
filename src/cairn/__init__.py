"""Cairn: an LLM inference server that never computes a context twice."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("cairn-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
