"""The view of a running team: statements as they are generated, votes, decisions and points."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cairn.cli.common.output import printable

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@contextmanager
def team_view(pause: float = 0.0) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that shows events: a live view on a terminal, else one line per event.

    `pause`: seconds to wait after each statement.
    """
    if sys.stdout.isatty():
        with _live(pause) as show:
            yield show
        return

    def plain(event: Mapping[str, Any]) -> None:
        line = line_of(event)
        if line is not None:
            print(line, flush=True)
            if pause and event["type"] in ("turn", "turn.done"):
                time.sleep(pause)

    yield plain


def line_of(event: Mapping[str, Any]) -> str | None:
    """Return an event in one line; None for events that are not shown."""
    match event["type"]:
        case "round.started":
            return f"== round {event['round']}"
        case "message":
            to = f" whispers to {_one(', '.join(event['to']))}" if event.get("to") else ""
            return f"{_one(event['sender'])}{to}: {_one(event['content'])}"
        case "turn" | "turn.done":
            return f"{_one(event['member'])}: {_one(event['content'])}"
        case "tool.call":
            return f"({_one(event['member'])} calls {_one(event['tool'])} with {_one(event['arguments'])})"
        case "tool.result":
            return f"(returned to {_one(event['member'])}: {_one(event['content'])})"
        case "round.waiting":
            waits = ", ".join(f"{_one(one['call_id'])} ({_one(one['tool'])})" for one in event["calls"])
            return f"waits for results: {waits}"
        case "choice":
            return f"({_one(event['member'])}, {_one(event['about'])}: {_one(event['choice'])})"
        case "vote" | "vote.decided":
            ballots = ", ".join(f"{name} {' > '.join(ranking)}" for name, ranking in event["ballots"].items())
            decided = event.get("decision") or "none"
            return f"vote: {_one(event['question'])} {_one(ballots)}; decision: {_one(decided)} ({_one(event['why'])})"
        case "points":
            return "points: " + ", ".join(f"{_one(name)} {number:g}" for name, number in event["points"].items())
        case "interrupted":
            return "interrupted"
    return None


def _one(text: str) -> str:
    return " ".join(printable(text).split())


@contextmanager
def _live(pause: float) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    speaking: dict[str, str] = {}
    colours: dict[str, str] = {}

    def panel(member: str, text: str, *, live: bool) -> Panel:
        colour = colours.setdefault(member, _COLOURS[len(colours) % len(_COLOURS)])
        title = Text(printable(member), style=f"bold {colour}")
        return Panel(Text(printable(text)), title=title, title_align="left", border_style="dim" if live else colour)

    with Live(console=console, refresh_per_second=12, transient=True) as live:

        def show(event: Mapping[str, Any]) -> None:
            kind = event["type"]
            if kind == "turn.started":
                speaking[event["member"]] = ""
            elif kind == "turn.delta":
                speaking[event["member"]] = speaking.get(event["member"], "") + event.get("content", "")
            elif kind in ("turn.done", "turn"):
                speaking.pop(event["member"], None)
                live.console.print(panel(event["member"], event["content"], live=False))
                time.sleep(pause)
            elif (line := line_of(event)) is not None:
                live.console.print(Text(line, style="bold" if kind.startswith(("round", "vote", "points")) else "dim"))
            live.update(Group(*(panel(name, text[-600:], live=True) for name, text in speaking.items())))

        yield show
