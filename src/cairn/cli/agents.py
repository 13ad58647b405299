"""`cairn agents`: the agents of a running server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cairn.cli.common.agent_path import agent_path
from cairn.cli.common.options import Host, configured, server
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from cairn.cli.connection.client import Client

_SERVER = ("api_key",)
_Id = Annotated[str, typer.Argument(metavar="ID", help="The agent.")]
_SHOWN = 60
"""Characters of a message in the tree."""


def register(app: typer.Typer) -> None:
    """Add `cairn agents` and its commands."""
    agents = typer.Typer(help="Look at and change the agents of a running server.", no_args_is_help=True)
    app.add_typer(agents, name="agents", rich_help_panel="Running servers")
    _register_looks(agents)
    _register_changes(agents)
    _register_kv(agents)
    _register_files(agents)


def _register_looks(agents: typer.Typer) -> None:
    @agents.command(name="list")
    @configured(_SERVER, model=False)
    def list_(resolved: Resolved, host: Host = None) -> None:
        """List the agents, most recently created first."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            rows = [_row(agent) for agent in client.items("/v1/agents")]
        table(("agent", "turns", "tokens", "state", "last used", "pinned", "from"), rows)

    @agents.command()
    @configured(_SERVER, model=False)
    def show(resolved: Resolved, id: _Id, host: Host = None) -> None:
        """Show an agent and the tree of its turns; the path to its head is marked."""
        from rich.console import Console

        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            agent = client.get(agent_path(id))
            turns = client.get(agent_path(id, "turns"))["data"]
        if not sys.stdout.isatty():
            table((), _facts(agent))
            table((), [("turn", *_cells(turn)) for turn in turns])
            return
        table(("", ""), _facts(agent))
        Console(highlight=False, markup=False).print(tree(agent, turns))


def _register_changes(agents: typer.Typer) -> None:
    @agents.command()
    @configured(_SERVER, model=False)
    def fork(
        resolved: Resolved,
        id: _Id,
        turn: Annotated[int | None, typer.Option(metavar="N", help="Fork after this turn; default: the last.")] = None,
        name: Annotated[
            str | None, typer.Option(metavar="ID", help="Id of the new agent; default: a generated one.")
        ] = None,
        host: Host = None,
    ) -> None:
        """Create a new agent that shares the history of this one, and print its id."""
        with server(resolved, host) as client:
            print(client.post(agent_path(id, "fork"), {"turn": turn, "id": name})["id"])

    @agents.command()
    @configured(_SERVER, model=False)
    def rollback(
        resolved: Resolved,
        id: _Id,
        turn: Annotated[int, typer.Argument(metavar="TURN", help="The turn to go back to; 0 is the beginning.")],
        host: Host = None,
    ) -> None:
        """Go back to a turn; the turns after it stay in the tree for a week."""
        with server(resolved, host) as client:
            client.post(agent_path(id, "rollback"), {"turn": turn})

    @agents.command()
    @configured(_SERVER, model=False)
    def pin(
        resolved: Resolved,
        id: _Id,
        off: Annotated[bool, typer.Option("--off", help="Unpin it.")] = False,
        host: Host = None,
    ) -> None:
        """Protect an agent's KV on the server's disk from eviction."""
        with server(resolved, host) as client:
            client.post(agent_path(id, "unpin" if off else "pin"), {})

    @agents.command()
    @configured(_SERVER, model=False)
    def resume(
        resolved: Resolved,
        id: _Id,
        stream: Annotated[bool, typer.Option("--stream", help="Write the answer as it is generated.")] = False,
        host: Host = None,
    ) -> None:
        """Resume an interrupted turn, and print its whole answer."""
        from cairn.cli.generate import write

        with server(resolved, host) as client:
            agent_path(id)  # raises if the id is not valid
            write(client.resume(id), stream)

    @agents.command()
    @configured(_SERVER, model=False)
    def rm(resolved: Resolved, id: _Id, host: Host = None) -> None:
        """Delete an agent with everything that no fork shares. This cannot be undone."""
        with server(resolved, host) as client:
            client.delete(agent_path(id))


def _register_kv(agents: typer.Typer) -> None:
    @agents.command()
    @configured(_SERVER, model=False)
    def prefetch(resolved: Resolved, id: _Id, host: Host = None) -> None:
        """Load an agent's KV into memory before it is needed, and show where it is then."""
        with server(resolved, host) as client:
            _print_places(client.post(agent_path(id, "prefetch"), {}, patient=True)["kv"])

    @agents.command()
    @configured(_SERVER, model=False)
    def evict(
        resolved: Resolved,
        id: _Id,
        disk: Annotated[bool, typer.Option("--disk", help="Also on disk: it is computed again when needed.")] = False,
        host: Host = None,
    ) -> None:
        """Evict an agent's KV from memory, and show where it is then. Its text stays."""
        with server(resolved, host) as client:
            _print_places(client.post(agent_path(id, "evict"), {"disk": disk}, patient=True)["kv"])


def _register_files(agents: typer.Typer) -> None:
    @agents.command()
    @configured(_SERVER, model=False)
    def export(
        resolved: Resolved,
        id: Annotated[
            str | None, typer.Argument(metavar="ID", help="The agent; with --all a folder, default: the current one.")
        ] = None,
        file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A new file; default: ID.cairn.")] = None,
        every: Annotated[bool, typer.Option("--all", help="Every agent, each to ID.cairn in a folder.")] = False,
        kv: Annotated[bool, typer.Option("--kv", help="Include the KV of its context that is stored.")] = False,
        host: Host = None,
    ) -> None:
        """Export an agent to a file, or with --all every agent to a folder."""
        if every and file is not None:
            raise ConfigError("--all takes only a folder: cairn agents export --all FOLDER")
        if not every and id is None:
            raise ConfigError("name an agent, or give --all: cairn agents list shows them")
        folder = Path(id or ".") if every else Path()
        if every:
            folder.mkdir(parents=True, exist_ok=True)
        with server(resolved, host) as client:
            targets = {name: file or folder / f"{name}.cairn" for name in (_ids(client) if every else [id or ""])}
            there = next((one for one in targets.values() if every and one.exists()), None)
            if there is not None:
                raise CairnError(f"{there} exists already, so nothing was exported; give another folder")
            for name, target in targets.items():
                client.download(agent_path(name, "export") + ("?kv=true" if kv else ""), target)
                print(target)

    @agents.command(name="import")
    @configured(_SERVER, model=False)
    def import_(
        resolved: Resolved,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="An exported agent.")],
        name: Annotated[
            str | None, typer.Option(metavar="ID", help="Id of the new agent; default: its old one.")
        ] = None,
        kv: Annotated[
            bool, typer.Option("--kv", help="Import the file's KV too; only if you trust who wrote the file.")
        ] = False,
        host: Host = None,
    ) -> None:
        """Create an agent from an exported file, and print its id."""
        query = f"?kv={str(kv).lower()}" + (f"&id={quote(name, safe='')}" if name is not None else "")
        with server(resolved, host) as client:
            made = client.upload("/v1/agents/import" + query, file)
        print(made["id"])
        if kv and made["kv"]["why"]:
            print(f"{made['kv']['chunks']} chunks of KV were imported: {made['kv']['why']}", file=sys.stderr)


def _ids(client: Client) -> list[str]:
    return [agent["id"] for agent in client.items("/v1/agents")]


def _row(agent: dict[str, Any]) -> tuple[str, ...]:
    return (
        agent["id"],
        str(agent["turns"]),
        str(agent["tokens"]),
        agent["state"],
        _when(agent["last_used"]),
        "yes" if agent["pinned"] else "",
        f"{agent['origin']} at turn {agent['origin_turn']}" if agent["origin"] else "",
    )


def _facts(agent: dict[str, Any]) -> list[tuple[str, str]]:
    saved, kv = agent["savings"], agent["kv"]
    cached = saved["pool"] + saved["ram"] + saved["disk"] + saved.get("shared", 0)
    rows = [("agent", agent["id"]), ("state", agent["state"]), ("context", f"{agent['tokens']} tokens")]
    rows += [("damage", agent["damage"])] if agent["damage"] else []
    if kv is not None:
        rows.append(("KV", _places(kv)))
    rows.append(("saved", f"{cached} tokens not computed again, {saved['seconds_avoided']:.1f} s of prefill"))
    rows += [("last used", _when(agent["last_used"]))]
    rows += [("pinned", "yes")] if agent["pinned"] else []
    rows += [("ends after", f"{agent['ttl']:g} s without use")] if agent["ttl"] else []
    rows += [("forked from", f"{agent['origin']} at turn {agent['origin_turn']}")] if agent["origin"] else []
    return rows


def _places(kv: dict[str, Any]) -> str:
    """Return where an agent's KV is: tokens in the pool, in RAM and on disk."""
    return ", ".join(f"{name} {kv[name]} tokens" for name in ("pool", "ram", "disk", "shared") if kv.get(name)) or "-"


def _print_places(kv: dict[str, Any]) -> None:
    from cairn.cli.common.output import table

    table((), [("KV", _places(kv))])


def _cells(turn: dict[str, Any]) -> tuple[str, ...]:
    tokens = f"{turn['prompt_tokens']}+{turn['completion_tokens']}"
    mark = "current" if turn["current"] else "abandoned"
    return (str(turn["number"]), str(turn["parent"]), mark, turn["state"], tokens, *_texts(turn))


def tree(agent: dict[str, Any], turns: list[dict[str, Any]]) -> Tree:
    """Return the tree of an agent's turns, each below its parent; turns off the path to the head are dim.

    Only turns with siblings are indented further: a conversation is long, a line is not.
    """
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(agent["id"], style="bold"))
    following: dict[int, list[dict[str, Any]]] = {0: []}
    following.update((turn["number"], []) for turn in turns)
    for turn in turns:
        following.get(turn["parent"], following[0]).append(turn)
    for several in following.values():  # the last is shown first: it is the one on the path to the head
        several.sort(key=lambda turn: (turn["current"], turn["number"]), reverse=True)
    todo = [(turn, root) for turn in following[0]]
    while todo:
        turn, level = todo.pop()
        before, after = following.get(turn["parent"], following[0]), following[turn["number"]]
        label = _label(turn, head=turn["number"] == agent["head"])
        if turn is not before[-1]:  # otherwise its parent is right above it
            label.append(f"  (follows {turn['parent'] or 'the beginning'})", style="dim")
        node = level.add(label)
        inside = len(after) > 1 or turn is not before[0]
        todo += [(child, node if inside else level) for child in after]
    return root


def _label(turn: dict[str, Any], *, head: bool) -> Text:
    from rich.text import Text

    asked, said = _texts(turn)
    style = "" if turn["current"] else "dim"
    label = Text(f"{turn['number']} ", style="cyan" if turn["current"] else "dim")
    label.append(asked, style=style)
    label.append(f"\n  {said}", style=style or "green")
    if turn["state"] != "finished":
        label.append(f"  ({turn['state']})", style="red")
    if head:
        label.append("  <- head", style="bold")
    return label


def _texts(turn: dict[str, Any]) -> tuple[str, str]:
    said = turn["answer"] or {}
    calls = [call["function"]["name"] for call in said.get("tool_calls") or ()]
    answer = said.get("content") or (f"calls {', '.join(calls)}" if calls else "")
    return _short(_content(turn["messages"][-1]) if turn["messages"] else ""), _short(answer)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def _short(text: str) -> str:
    from cairn.cli.common.output import printable

    line = " ".join(printable(text).split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
