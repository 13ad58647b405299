"""What the front and the process that renders chat templates say to each other.

Frames are a 4-byte little-endian length and msgpack. The process says that it is there by an empty `Rendered`. The
first frame to it is a `Setup`, every other a `Job` or a `Compile`; each is answered by one `Rendered`.
"""

from __future__ import annotations

import msgspec

from cairn.text.grammar.grammar import Shape

MAX_FRAME = 128 << 20
"""Longest frame in bytes, either way."""
GRAMMAR_MEMORY = 256 << 20
"""Bytes of address space that compiling a grammar may add."""
GRAMMAR_SECONDS = 2.0
"""Most seconds of processor time to compile a grammar; past that the process ends by SIGPROF."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same for one model."""

    templates: dict[str, str]
    """Name -> template text; "default" is among them."""
    variables: dict[str, str]
    """The special tokens' texts by their names in templates."""
    timeout: float
    """Seconds of processor time for one job; past that the process ends by SIGPROF."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Conversations to render, all with the same template and variables, each up to the assistant's turn."""

    template: str
    payload: bytes
    """JSON: {"messages": [conversation, ...], "variables": {...}}."""
    marks: str
    """Characters that must come out as they are wherever a template puts them."""
    now: float
    """Seconds since 1970: the time that a template is told."""


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """What an answer has to be; the answer's text is its grammar, which compiles."""

    shape: Shape


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """One text a conversation, or why there is none."""

    texts: list[str] = []
    error: str = ""
    warnings: tuple[str, ...] = ()
    """What a grammar does not hold answers to."""
    last: bool = False
    """The process ends after this answer."""
    seconds: float = 0.0
    """Processor time that it took."""


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire. Raises ValueError if it is too long."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"a frame of {len(data)} bytes is longer than {MAX_FRAME}")
    return len(data).to_bytes(4, "little") + data
