"""Protocol between the front and the process that renders chat templates.

The process first sends an empty `Rendered`. The first frame to it is a `Setup`, every other a `Job`; each is answered
by one `Rendered`.
"""

from __future__ import annotations

import msgspec


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Templates and limits of one model."""

    templates: dict[str, str]
    """Name -> template text; "default" is among them."""
    variables: dict[str, str]
    """Special token name, as templates use it -> its text."""
    timeout: float
    """Seconds of processor time for one job; past that the process ends by SIGPROF."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations to render with one template and the same variables, each up to the assistant's turn."""

    template: str
    payload: bytes
    """JSON: {"messages": [conversation, ...], "variables": {...}}."""
    marks: str
    """Characters that must never be escaped in the output."""
    now: float
    """The current time for templates, in seconds since 1970."""


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """One text per conversation, or an error."""

    texts: list[str] = []
    error: str = ""
    last: bool = False
    """The process ends after this answer."""
    seconds: float = 0.0
    """Processor time used."""
