"""Limits of a workflow's sizes, checked first so that the other checks take bounded time."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from cairn.types.errors import InvalidRequest
from cairn.workflows.definition import MAX_NAME, MAX_NAMES, MAX_NODES, MAX_TEXT, Node, Workflow

MAX_TITLE = 1_000
"""Characters of a workflow's name."""
_TOLD = 8
"""Names listed in an error message."""


def check_bounds(workflow: Workflow) -> None:
    """Raise InvalidRequest, naming the limit, for the first size above one."""
    _check_characters(workflow.name, "name", MAX_TITLE)
    _check_characters(workflow.system, "system", MAX_TEXT)
    _check_names(workflow.roles, "roles")
    _check_names(workflow.inputs, "inputs")
    for role, text in workflow.roles.items():
        _check_characters(text, f"roles.{role}", MAX_TEXT)
    if workflow.merge is not None:
        _check_count(workflow.merge.precedence, "merge.precedence", MAX_NODES)
    count = 0
    waiting = [workflow.nodes]
    while waiting:
        nodes = waiting.pop()
        count += len(nodes)
        if not 1 <= count <= MAX_NODES:
            raise InvalidRequest(
                f"nodes holds {count} nodes; a workflow has 1 to {MAX_NODES}, the limit", field="nodes"
            )
        for node in nodes:
            _check_node(node)
            if node.loop is not None:
                waiting.append(node.loop.nodes)


def _check_node(node: Node) -> None:
    where = f"nodes.{node.id}"
    _check_characters(node.role, f"{where}.role", MAX_NAME)
    _check_characters(node.prompt, f"{where}.prompt", MAX_TEXT)
    _check_count(node.needs, f"{where}.needs", MAX_NAMES)
    _check_count(node.takes, f"{where}.takes", MAX_NAMES)


def _check_names(names: Iterable[str], field: str) -> None:
    names = list(names)
    _check_count(names, field, MAX_NAMES)
    for name in names:
        if len(name) > MAX_NAME:
            raise InvalidRequest(
                f"{field}: the name {name[:32]!r} has {len(name)} characters; the limit is {MAX_NAME}", field=field
            )


def _check_count(given: Sized, field: str, most: int) -> None:
    if len(given) > most:
        raise InvalidRequest(f"{field} holds {len(given)} entries; the limit is {most}", field=field)


def _check_characters(text: str, field: str, most: int) -> None:
    if len(text) > most:
        raise InvalidRequest(f"{field} has {len(text)} characters; the limit is {most}", field=field)


def listed(names: Iterable[str]) -> str:
    """Return names joined for an error message, shortened if there are many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _TOLD} more" if len(ordered) > _TOLD else ""
    return (", ".join(ordered[:_TOLD]) or "none") + more
