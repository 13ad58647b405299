"""What a run's journal holds. From its head and these entries alone a run goes on after a crash."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cairn.workflows.definition import Workflow

RunStatus = Literal["running", "interrupted", "finished", "failed"]


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run as it was asked for."""

    id: str
    workflow: Workflow
    inputs: dict[str, Any] = {}
    seed: int = 0


class NodeEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="node"):
    """A node, one item of a fan-out, or a node of one run of a loop, is over."""

    key: str
    """`plan`, `code.3` for an item, `repair#2/fix` for the second run of a loop."""
    state: Literal["done", "skipped", "failed"]
    output: Any = None
    why: str = ""
    """Why it was skipped or failed."""
    lost: bool = False
    """It was skipped because something that it needs has failed."""
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="run"):
    """The run is over."""

    state: Literal["finished", "failed"]
    result: Any = None
    sources: dict[str, str] = {}
    """Whose value each field of a merged result has."""
    conflicts: tuple[dict[str, Any], ...] = ()
    why: str = ""


RunItem = NodeEnded | RunEnded
