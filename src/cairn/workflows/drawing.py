"""Drawings of a workflow: Mermaid, SVG and PNG, with nodes coloured by a run's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import NamedTuple

from cairn.types.errors import Unsupported
from cairn.workflows.checks import Graph, check_workflow
from cairn.workflows.definition import Node, Workflow
from cairn.workflows.runner import NodeEnded

COLOURS = {"done": "#b7e1c0", "skipped": "#e4e4e4", "failed": "#f3b8b8", "running": "#cfe2ff", "waiting": "#ffffff"}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _PAD = 168, 48, 56, 20, 16


_FONTS = "Helvetica, Arial, DejaVu Sans, Liberation Sans, Noto Sans, sans-serif"
"""Named fonts come first: resvg does not resolve the generic sans-serif."""
_ZOOM = 2.0
"""Pixels of the PNG for one unit of the SVG; 2 is sharp on any screen."""


class _Box(NamedTuple):
    node: Node
    column: int
    row: int
    loop: str
    """The loop that it is in, or empty."""


def states_of(workflow: Workflow, ended: Mapping[str, NodeEnded], *, running: bool = False) -> dict[str, str]:
    """Return each node's state by its id; for a loop's nodes that of the last iteration."""
    found: dict[str, str] = {}
    for key, one in ended.items():
        name = key.rpartition("/")[2].partition(".")[0]
        found[name] = one.state if key.rpartition("/")[2] == name else found.get(name, "running")
    last = "running" if running else "waiting"
    graph = check_workflow(workflow)
    for node in graph.nodes:
        waits = any(found.get(name) not in ("done", "skipped", "failed") for name in graph.needs[node.id])
        found.setdefault(node.id, "waiting" if waits else last)
    return found


def mermaid(workflow: Workflow, states: Mapping[str, str] | None = None) -> str:
    """Return the graph as a Mermaid flowchart."""
    graph = check_workflow(workflow)
    lines = ["flowchart LR"]
    lines += list(_mermaid_nodes(graph, "  "))
    for node in graph.nodes:
        lines += [f"  {_id(name)} --> {_id(node.id)}" for name in sorted(graph.needs[node.id])]
    for name, state in sorted((states or {}).items()):
        lines.append(f"  style {_id(name)} fill:{COLOURS.get(state, COLOURS['waiting'])}")
    return "\n".join(lines) + "\n"


def _mermaid_nodes(graph: Graph, indent: str) -> Iterator[str]:
    for node in graph.nodes:
        if node.loop is None:
            yield f'{indent}{_id(node.id)}["{_label(node)}"]'
            continue
        body = graph.bodies[node.id]
        yield f'{indent}subgraph {_id(node.id)}["{node.id}: at most {node.loop.limit} times"]'
        yield from _mermaid_nodes(body, indent + "  ")
        for one in body.nodes:
            yield from (f"{indent}  {_id(name)} --> {_id(one.id)}" for name in sorted(body.needs[one.id]))
        yield f"{indent}end"


def _id(name: str) -> str:
    """Return an id that is not a Mermaid keyword such as `end`."""
    return "n_" + name.replace("-", "_h")


def _label(node: Node) -> str:
    role = f"<br/>{escape(node.role)}" if node.role else ""
    more = [word for word, there in (("each", node.each), ("when", node.when)) if there is not None]
    return node.id + role + (f"<br/>({', '.join(more)})" if more else "")


def svg(workflow: Workflow, states: Mapping[str, str] | None = None) -> str:
    """Return the graph as SVG; nodes that can run in parallel share a column."""
    graph, states = check_workflow(workflow), states or {}
    boxes = {box.node.id: box for box in _boxes(graph)}
    columns = 1 + max(box.column for box in boxes.values())
    rows = 1 + max(box.row for box in boxes.values())
    width, height = _PAD * 2 + columns * (_WIDTH + _GAP_X) - _GAP_X, _PAD * 2 + rows * (_HEIGHT + _GAP_Y) - _GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONTS}" font-size="13">',
        '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f"<title>{escape(workflow.name or 'workflow')}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for source, target in _arrows(graph):
        parts.append(_arrow(boxes[source], boxes[target]))
    parts += [_drawn(box, states.get(box.node.id, "waiting")) for box in boxes.values()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def png(workflow: Workflow, states: Mapping[str, str] | None = None) -> bytes:
    """Return the SVG rendered as PNG. Raise Unsupported, naming the package, if resvg is not installed."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise Unsupported(
            "format png needs the package resvg-py, which is not installed: pip install 'cairn-llm[drawing]'; svg and "
            "mermaid need none",
            field="format",
        ) from None
    return bytes(svg_to_bytes(svg_string=svg(workflow, states), zoom=_ZOOM))


def _boxes(graph: Graph, first: int = 0, top: int = 0, loop: str = "") -> list[_Box]:
    """Return the grid place of every node: right of all its dependencies; a loop's nodes below the loop."""
    column: dict[str, int] = {}
    filled: dict[int, int] = {}
    found = []
    for node in graph.nodes:
        at = max((column[name] + 1 for name in graph.needs[node.id]), default=first)
        inner = _boxes(graph.bodies[node.id], at, 0, node.id) if node.loop is not None else []
        span = range(at, 1 + max([at, *(box.column for box in inner)]))
        row = max(filled.get(one, top) for one in span)
        found.append(_Box(node, at, row, loop))
        found += [box._replace(row=box.row + row + 1) for box in inner]
        low = max([row, *(box.row + row + 1 for box in inner)]) + 1
        filled |= dict.fromkeys(span, low)
        column[node.id] = span[-1]
    return found


def _arrows(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        yield from ((name, node.id) for name in sorted(graph.needs[node.id]))
        if node.loop is not None:
            yield from _arrows(graph.bodies[node.id])


def _place(box: _Box) -> tuple[int, int]:
    return _PAD + box.column * (_WIDTH + _GAP_X), _PAD + box.row * (_HEIGHT + _GAP_Y)


def _arrow(source: _Box, target: _Box) -> str:
    (x, y), (to_x, to_y) = _place(source), _place(target)
    x, y, to_y = x + _WIDTH, y + _HEIGHT // 2, to_y + _HEIGHT // 2
    bend = _GAP_X // 2
    curve = f"M{x},{y} C{x + bend},{y} {to_x - bend},{to_y} {to_x},{to_y}"
    return f'<path d="{curve}" fill="none" stroke="#555" marker-end="url(#to)"/>'


def _drawn(box: _Box, state: str) -> str:
    x, y = _place(box)
    colour = COLOURS.get(state, COLOURS["waiting"])
    dash = ' stroke-dasharray="5 3"' if box.node.loop is not None else ""
    under = f"at most {box.node.loop.limit} times" if box.node.loop is not None else box.node.role
    under = f"{under}, in {box.loop}" if box.loop else under
    middle = x + _WIDTH // 2
    return (
        f"<g><title>{escape(box.node.id)}: {state}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{colour}" stroke="#555"{dash}/>'
        f'<text x="{middle}" y="{y + 20}" text-anchor="middle" font-weight="bold">{escape(_short(box.node.id))}</text>'
        f'<text x="{middle}" y="{y + 37}" text-anchor="middle" fill="#555">{escape(_short(under))}</text></g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:22] + ".."
