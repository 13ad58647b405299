"""Addresses and bodies of the workflows' routes."""

from __future__ import annotations

from typing import Any

import msgspec

from cairn.api.http.body import Body, Count
from cairn.types.errors import InvalidRequest
from cairn.workflows.runs import RunState

PATH = "/v1/workflows"
RUNS = f"{PATH}/runs"


class WorkflowRunBody(Body):
    """POST /v1/workflows/runs."""

    workflow: dict[str, Any]
    inputs: dict[str, Any] | None = None
    model: str | None = None
    seed: Count = None
    stream: bool | None = None

    def check(self) -> None:
        """InvalidRequest for a seed that JSON's numbers cannot hold."""
        if self.seed is not None and not 0 <= self.seed < 1 << 53:
            raise InvalidRequest("seed must be 0 to 9007199254740991", field="seed")


class RunResumeBody(Body):
    """POST /v1/workflows/runs/{id}/resume."""

    model: str | None = None
    """Another than the run was begun with."""
    stream: bool | None = None


class WorkflowBody(Body):
    """POST /v1/workflows/check."""

    workflow: dict[str, Any]


def run_object(state: RunState, *, whole: bool = True) -> dict[str, Any]:
    """A run on the wire; in a list without its workflow and outputs."""
    found: dict[str, Any] = {
        "id": state.run.id,
        "object": "workflow.run",
        "name": state.run.workflow.name,
        "model": state.model,
        "created": state.created,
        "state": state.state,
        "report": state.report,
    }
    if not whole:
        return found
    ended = state.ended
    return found | {
        "inputs": state.run.inputs,
        "seed": state.run.seed,
        "workflow": msgspec.to_builtins(state.run.workflow),
        "nodes": {key: {**msgspec.to_builtins(one), "type": "node"} for key, one in state.nodes.items()},
        "result": None if ended is None else ended.result,
        "sources": {} if ended is None else ended.sources,
        "conflicts": [] if ended is None else list(ended.conflicts),
        "why": None if ended is None else ended.why or None,
    }
