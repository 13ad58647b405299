"""What the front and the process that renders chat templates say to each other.

The process says that it is there by an empty `Rendered`. The first frame to it is a `Setup`, every other a `Job`; each
is answered by one `Rendered`.
"""

from __future__ import annotations

import msgspec


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same for one model."""

    templates: dict[str, str]
    """Name -> template text; "default" is among them."""
    variables: dict[str, str]
    """The special tokens' texts by their names in templates."""
    timeout: float
    """Seconds of processor time for one job; past that the process ends by SIGPROF."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations to render, all with the same template and variables, each up to the assistant's turn."""

    template: str
    payload: bytes
    """JSON: {"messages": [conversation, ...], "variables": {...}}."""
    marks: str
    """Characters that must come out as they are wherever a template puts them."""
    now: float
    """Seconds since 1970: the time that a template is told."""


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """One text a conversation, or why there is none."""

    texts: list[str] = []
    error: str = ""
    last: bool = False
    """The process ends after this answer."""
    seconds: float = 0.0
    """Processor time that it took."""
