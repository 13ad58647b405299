"""Checks of a workflow before it runs: missing dependencies, cycles, unknown outputs, contracts that do not fit.

Also nodes that can never run, and limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cairn.config.option import closest
from cairn.types.errors import InvalidRequest
from cairn.workflows.bounds import check_bounds, listed
from cairn.workflows.contracts import TEXT, TYPES, ValueChecker, at, check_contract, kind_of
from cairn.workflows.definition import (
    MAX_ITEMS,
    MAX_LOOP,
    MAX_RETRIES,
    SAMPLING,
    Condition,
    Loop,
    Node,
    Workflow,
)
from cairn.workflows.paths import INDEX, INPUTS, ITEM, MISSING, PREVIOUS, check_condition, check_path, paths_of
from cairn.workflows.templates import EMPTY, read

RESERVED = frozenset({INPUTS, ITEM, INDEX, PREVIOUS})
_INTEGER: Mapping[str, Any] = {"type": "integer"}


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes in topological order, with the nodes that each depends on."""

    nodes: tuple[Node, ...]
    needs: dict[str, frozenset[str]]
    bodies: dict[str, Graph]
    """The graphs of loops."""


def check_workflow(workflow: Workflow) -> Graph:
    """Return the graph of a valid workflow. Slow: up to a second for a workflow at all limits.

    Raise InvalidRequest for the first mistake, naming the node and the limit.
    """
    check_bounds(workflow)
    _check_ids(workflow)
    if not 1 <= workflow.at_once <= 64:
        raise InvalidRequest("at_once must be 1 to 64", field="at_once")
    scope = _Scope(workflow.nodes, frozenset(workflow.inputs), {}, loop=False)
    graph = scope.graph("workflow")
    if workflow.merge is not None:
        _check_merge(workflow, scope)
    return graph


def every_node(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield all nodes, loops' nodes included."""
    waiting = list(nodes)[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if node.loop is not None:
            waiting += node.loop.nodes[::-1]


def _check_ids(workflow: Workflow) -> None:
    seen: set[str] = set()
    for node in every_node(workflow.nodes):
        if node.id in RESERVED or node.id in seen:
            why = "is reserved for templates" if node.id in RESERVED else "names two nodes"
            raise InvalidRequest(f"nodes: {node.id} {why}", field=f"nodes.{node.id}")
        seen.add(node.id)
        _check_node(node)


def _check_node(node: Node) -> None:
    where = f"nodes.{node.id}"
    if node.loop is not None:
        if node.prompt or node.output is not None or node.each is not None or node.role or node.takes:
            raise InvalidRequest(f"{where}: a loop has nodes, and no prompt, output, each, role or takes", field=where)
        _check_loop(node.loop, where)
    elif not node.prompt.strip():
        raise InvalidRequest(f"{where}.prompt is missing", field=f"{where}.prompt")
    if not 0 <= node.retries <= MAX_RETRIES:
        raise InvalidRequest(f"{where}.retries must be 0 to {MAX_RETRIES}, the limit", field=f"{where}.retries")
    if node.each is not None and not 1 <= node.each.limit <= MAX_ITEMS:
        raise InvalidRequest(f"{where}.each.limit must be 1 to {MAX_ITEMS}, the limit", field=f"{where}.each.limit")
    unknown = sorted(node.sampling.keys() - SAMPLING)
    if unknown:
        known = ", ".join(sorted(SAMPLING))
        raise InvalidRequest(f"{where}.sampling has no {unknown[0][:64]}; there are {known}", field=f"{where}.sampling")
    if node.each is not None and node.each.items.partition(".")[0] in (ITEM, INDEX):
        raise InvalidRequest(f"{where}.each.in reads {node.each.items[:64]}, which it makes itself", field=where)
    if node.output is not None:
        check_contract(node.output, f"{where}.output")
    if node.when is not None:
        check_condition(node.when, f"{where}.when")
    for path, kind in node.takes.items():
        check_path(path, f"{where}.takes")
        if kind not in TYPES:
            raise InvalidRequest(f"{where}.takes.{path} must be one of {', '.join(TYPES)}", field=f"{where}.takes")


def _check_loop(loop: Loop, where: str) -> None:
    if not 1 <= loop.limit <= MAX_LOOP:
        raise InvalidRequest(f"{where}.loop.limit must be 1 to {MAX_LOOP}, the limit", field=f"{where}.loop.limit")
    if not loop.nodes:
        raise InvalidRequest(f"{where}.loop.nodes is empty; it must hold at least one", field=f"{where}.loop.nodes")
    inner = next((one for one in loop.nodes if one.loop is not None), None)
    if inner is not None:
        raise InvalidRequest(f"{where}.loop holds the loop {inner.id}; loops are not nested", field=f"{where}.loop")
    if loop.until is not None:
        check_condition(loop.until, f"{where}.loop.until")


class _Scope:
    """Nodes that can refer to each other: the workflow's, or a loop's, which can refer to outer nodes too."""

    def __init__(
        self, nodes: Sequence[Node], inputs: frozenset[str], outer: Mapping[str, Mapping[str, Any]], *, loop: bool
    ) -> None:
        self._nodes, self._inputs, self._outer, self._loop = nodes, inputs, outer, loop
        self.contracts = {node.id: contract_of(node) for node in nodes}
        self._values = ValueChecker()

    def graph(self, where: str) -> Graph:
        """Check all nodes; return them in topological order."""
        needs = {node.id: frozenset(self._needs(node)) for node in self._nodes}
        ordered = _ordered(self._nodes, needs, where)
        known = {**self._outer, **self.contracts}
        bodies = {}
        for node in ordered:
            self._check_reachable(node, known)
            if node.loop is not None:
                outer = {name: known[name] for name in known if name != node.id}
                body = _Scope(node.loop.nodes, self._inputs, outer, loop=True)
                bodies[node.id] = body.graph(f"the loop {node.id}")
                if node.loop.until is not None:
                    body.check_until(node)
        return Graph(nodes=tuple(ordered), needs=needs, bodies=bodies)

    def check_until(self, node: Node) -> None:
        """Check that the end condition of a loop reads its nodes or outer ones."""
        assert node.loop is not None and node.loop.until is not None
        for path in paths_of(node.loop.until):
            self._find(check_path(path, f"{node.id}.loop.until"), f"{node.id}.loop.until", node)

    def _needs(self, node: Node) -> Iterator[str]:
        """Yield the nodes of this scope that a node depends on, checking each path that it reads."""
        for paths, field in _reads(node):
            for index, path in enumerate(paths):
                if path == EMPTY:
                    continue
                root = path.partition(".")[0]
                schema, optional = self._find(path, field, node)
                if root in self.contracts:
                    yield root
                if root == PREVIOUS and index == len(paths) - 1 and field.endswith(".prompt"):
                    raise InvalidRequest(
                        f"{field} reads {path}, which is not there when the loop runs first: give another, as in "
                        f'{{{{ {path} or ... }}}}, or nothing: {{{{ {path} or "" }}}}',
                        field=field,
                    )
                if optional and len(paths) == 1 and not field.endswith(".when"):
                    raise InvalidRequest(
                        f"{field} reads {path}, which its contract does not require: require it, or give another, as "
                        f'in {{{{ {path} or ... }}}}, or nothing: {{{{ {path} or "" }}}}',
                        field=field,
                    )
                self._check_kind(node, path, field, schema)
        for name in node.needs:
            if name not in self.contracts:
                raise self._unknown(name, f"{node.id}.needs")
            yield name

    def _check_kind(self, node: Node, path: str, field: str, schema: Mapping[str, Any] | None) -> None:
        if schema is None:
            return
        if field.endswith(".each.in") and kind_of(schema) != "array":
            raise InvalidRequest(
                f"{field} must be a list; by its contract {path} is of type {kind_of(schema)}", field=field
            )
        wanted = node.takes.get(path)
        found = kind_of(schema)
        if wanted is not None and found != wanted and (wanted, found) != ("number", "integer"):
            raise InvalidRequest(
                f"contract mismatch: {node.id} takes {path} as {wanted}, and its contract says {found}",
                field=f"{node.id}.takes",
            )

    def _find(self, path: str, field: str, node: Node) -> tuple[Mapping[str, Any] | None, bool]:
        """Return the contract of the value at a path (None if unknown) and whether the value may be missing."""
        root, *rest = path.split(".")
        if root == INPUTS:
            if not rest or rest[0] not in self._inputs:
                raise InvalidRequest(
                    f"{field} reads {path}, which is no input; inputs are: {listed(self._inputs)}", field=field
                )
            return None, False
        if root in (ITEM, INDEX):
            if node.each is None:
                raise InvalidRequest(f"{field} reads {path}, and {node.id} fans out over nothing", field=field)
            return self._item(path, field, node) if root == ITEM else _INTEGER, False
        if root == PREVIOUS:
            if not self._loop or not rest or rest[0] not in self.contracts:
                raise InvalidRequest(f"{field} reads {path}, and is in no loop with such a node", field=field)
            return self._of(rest[0], rest[1:], path, field)
        if root not in self.contracts and root not in self._outer:
            raise self._unknown(root, field)
        return self._of(root, rest, path, field)

    def _item(self, path: str, field: str, node: Node) -> Mapping[str, Any] | None:
        """Return the contract of the items that a node fans out over."""
        assert node.each is not None
        schema, _ = self._find(check_path(node.each.items, f"{node.id}.each.in"), f"{node.id}.each.in", node)
        if schema is None or "items" not in schema:
            return None
        found = at(schema["items"], path.split(".")[1:])
        if found is None:
            raise InvalidRequest(f"{field} reads {path}, which the contract of the items has not", field=field)
        return found

    def _of(self, name: str, rest: Sequence[str], path: str, field: str) -> tuple[Mapping[str, Any], bool]:
        schema = self.contracts.get(name) or self._outer[name]
        found = at(schema, rest)
        if found is None:
            why = (
                "whose output is a text: it has no contract" if schema is TEXT else "whose contract has no such output"
            )
            raise InvalidRequest(f"missing output: {field} reads {path} of {name}, {why}", field=field)
        return found, _may_miss(schema, rest)

    def _unknown(self, name: str, field: str) -> InvalidRequest:
        near = closest(name, [*self.contracts, *self._outer])
        return InvalidRequest(
            f"unknown dependency: {field} names {name[:64]}, and there is no such node{near}", field=field
        )

    def _check_reachable(self, node: Node, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise InvalidRequest if no value that fits the contracts can satisfy the node's condition."""
        if node.when is not None and not _can_hold(node.when, known, self._values):
            raise InvalidRequest(
                f"unreachable node: {node.id} never runs, for by the contracts its condition never holds",
                field=f"{node.id}.when",
            )


def _reads(node: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    yield from read(node)
    if node.loop is None:
        return
    inside = {*RESERVED, *(one.id for one in node.loop.nodes)}
    for one in node.loop.nodes:  # a loop waits for what its nodes read of others
        for paths, field in read(one):
            for path in paths:
                if path != EMPTY and path.partition(".")[0] not in inside:
                    yield (path, path), field


def contract_of(node: Node) -> Mapping[str, Any]:
    """Return the contract of a node's output: a list for a fan-out, its nodes' last outputs for a loop."""
    if node.loop is not None:
        properties = {one.id: contract_of(one) for one in node.loop.nodes}
        always = [one.id for one in node.loop.nodes if one.when is None]
        more = {"runs": _INTEGER, "done": {"type": "boolean"}}
        return {"type": "object", "properties": properties | more, "required": [*always, *more]}
    one = TEXT if node.output is None else node.output
    return one if node.each is None else {"type": "array", "items": one}


def _may_miss(schema: Mapping[str, Any], rest: Sequence[str]) -> bool:
    """Return whether the value at a path may be missing in a value that fits."""
    for part in rest:
        if part in schema.get("properties", {}):
            if part not in schema.get("required", ()):
                return True
            schema = schema["properties"][part]
        else:
            return True  # an item of a list of any length
    return False


def _can_hold(condition: Condition, known: Mapping[str, Mapping[str, Any]], values: ValueChecker) -> bool:
    if condition.every is not MISSING:
        return all(_can_hold(one, known, values) for one in condition.every or ())
    if condition.some is not MISSING:
        return any(_can_hold(one, known, values) for one in condition.some or ())
    root, *rest = condition.output.split(".")
    schema = at(known[root], rest) if root in known else None
    if schema is None:
        return True
    if condition.above is not MISSING or condition.below is not MISSING:
        return _may_be_number(schema)
    if condition.equals is not MISSING:
        return values.fits(schema, condition.equals)
    if condition.one_of is not MISSING:
        return any(values.fits(schema, one) for one in condition.one_of or ())
    return True


def _may_be_number(schema: Mapping[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] in ("number", "integer")
    return any(map(TYPES["number"], [schema["const"]] if "const" in schema else schema["enum"]))


def _ordered(nodes: Sequence[Node], needs: Mapping[str, frozenset[str]], where: str) -> list[Node]:
    """Sort nodes topologically, otherwise in the given order. Raise InvalidRequest that names a cycle in full."""
    done: dict[str, Node] = {}
    left = list(nodes)
    while left:
        ready = [node for node in left if needs[node.id] <= done.keys()]
        if not ready:
            cycle = " -> ".join(_cycle(left[0].id, needs, done.keys()))
            raise InvalidRequest(f"{where} has a cycle: {cycle}", field="nodes")
        done |= {node.id: node for node in ready}
        left = [node for node in left if node.id not in done]
    return list(done.values())


def _cycle(start: str, needs: Mapping[str, frozenset[str]], done: Iterable[str]) -> list[str]:
    """Return a cycle among nodes that all wait for others, starting at its alphabetically first name."""
    gone, path = set(done), [start]
    while path[-1] not in path[:-1]:
        path.append(min(needs[path[-1]] - gone))
    ring = path[path.index(path[-1]) : -1]
    at = ring.index(min(ring))
    return [*ring[at:], *ring[:at], ring[at]]


def _check_merge(workflow: Workflow, scope: _Scope) -> None:
    assert workflow.merge is not None
    for name in workflow.merge.precedence:
        contract = scope.contracts.get(name)
        if contract is None:
            raise InvalidRequest(
                f"unknown dependency: merge names {name[:64]}, and there is no such node", field="merge"
            )
        inner = contract["items"] if contract.get("type") == "array" else contract
        if inner.get("type") != "object":
            raise InvalidRequest(f"merge: the output of {name} has no fields; its contract is no object", field="merge")
    if len(set(workflow.merge.precedence)) != len(workflow.merge.precedence) or not workflow.merge.precedence:
        raise InvalidRequest("merge.precedence names nodes, each once", field="merge.precedence")
