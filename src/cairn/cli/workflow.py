"""`cairn workflow`: run workflows on a running server, and draw their graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError

_SERVER = ("api_key",)
_Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the graph to this file.")]
_Format = Annotated[
    str, typer.Option("--format", metavar="mermaid|svg|png", help="Format; default: by the suffix of --output.")
]


def register(app: typer.Typer) -> None:
    """Add `cairn workflow` and its commands."""
    workflow = typer.Typer(help="Run workflows, and draw them.", no_args_is_help=True)
    app.add_typer(workflow, name="workflow", rich_help_panel="Running servers")
    _register_runs(workflow)
    _register_looks(workflow)


def _register_runs(workflow: typer.Typer) -> None:
    @workflow.command()
    @configured(_SERVER, model=False)
    def run(
        resolved: Resolved,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="A workflow: a YAML file.")],
        given: Annotated[
            list[str] | None, typer.Option("--input", "-i", metavar="NAME=TEXT", help="An input; @FILE reads a file.")
        ] = None,
        seed: Annotated[
            int | None, typer.Option(min=0, metavar="N", help="The same seed gives the same answers.")
        ] = None,
        host: Host = None,
    ) -> None:
        """Run a workflow and print its result as JSON; stderr shows its progress."""
        from cairn.cli.yaml_files import checking, load_yaml
        from cairn.workflows.checks import check_workflow
        from cairn.workflows.definition import workflow_of

        plain = load_yaml(file)
        with checking(file):
            check_workflow(workflow_of(plain))  # reports errors in the file even if no server runs
        body = {"workflow": plain, "inputs": _inputs(given or ()), "stream": True}
        body |= {} if seed is None else {"seed": seed}
        with server(resolved, host) as client:
            _follow(client.events("/v1/workflows/runs", body))

    @workflow.command()
    @configured(_SERVER, model=False)
    def resume(
        resolved: Resolved, id: Annotated[str, typer.Argument(metavar="ID", help="The run.")], host: Host = None
    ) -> None:
        """Continue a run that was interrupted or failed."""
        with server(resolved, host) as client:
            _follow(client.events(f"/v1/workflows/runs/{quote(id, safe='')}/resume", {"stream": True}))


def _register_looks(workflow: typer.Typer) -> None:
    @workflow.command(name="list")
    @configured(_SERVER, model=False)
    def list_(resolved: Resolved, host: Host = None) -> None:
        """List the runs, most recently created first."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            rows = [(run["id"], run["name"], run["state"]) for run in client.items("/v1/workflows/runs")]
        table(("run", "name", "state"), rows)

    @workflow.command()
    @configured(_SERVER, model=False)
    def show(
        resolved: Resolved,
        what: Annotated[str, typer.Argument(metavar="FILE|ID", help="A workflow's file, or a run on the server.")],
        form: _Format = "",
        output: _Output = None,
        host: Host = None,
    ) -> None:
        """Draw the graph of a workflow, or of a run with its state."""
        form = form or (output.suffix.removeprefix(".") if output is not None else "") or "mermaid"
        form = {"mmd": "mermaid", "md": "mermaid", "txt": "mermaid"}.get(form, form)
        if form not in ("mermaid", "svg", "png"):
            raise ConfigError("--format must be mermaid, svg or png")
        if form == "png" and output is None:
            raise ConfigError("a PNG cannot be printed: name a file with --output")
        if not Path(what).is_file():
            with server(resolved, host) as client:
                drawn = client.bytes(f"/v1/workflows/runs/{quote(what, safe='')}/graph?format={form}")
        else:
            from cairn.cli.yaml_files import checking, load_yaml
            from cairn.workflows.definition import workflow_of
            from cairn.workflows.drawing import mermaid, png, svg

            with checking(Path(what)):
                workflow = workflow_of(load_yaml(Path(what)))
            drawn = png(workflow) if form == "png" else (svg if form == "svg" else mermaid)(workflow).encode()
        _put(drawn, output)

    @workflow.command()
    @configured(_SERVER, model=False)
    def rm(
        resolved: Resolved, id: Annotated[str, typer.Argument(metavar="ID", help="The run.")], host: Host = None
    ) -> None:
        """Delete a run with its results."""
        with server(resolved, host) as client:
            client.delete(f"/v1/workflows/runs/{quote(id, safe='')}")


def _put(drawn: bytes, output: Path | None) -> None:
    """Write a drawing to a file, or print it."""
    if output is None:
        print(drawn.decode(), end="")
        return
    try:
        output.write_bytes(drawn)
    except OSError as error:
        raise CairnError(f"{output} cannot be written: {error.strerror or error}") from error


def _inputs(given: Sequence[str]) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for pair in given:
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise ConfigError(f"--input {pair[:64]!r} should look like NAME=TEXT")
        if value.startswith("@"):
            try:
                value = Path(value[1:]).read_text()
            except (OSError, UnicodeError) as error:
                raise ConfigError(f"{value[1:]} cannot be read: {error}") from None
        inputs[name] = value
    return inputs


def _follow(events: Any) -> None:
    """Show a run's progress on stderr and print its result. CairnError if it failed or was interrupted."""
    from cairn.cli.common.output import printable, talk

    console = talk()
    ended: Mapping[str, Any] = {}
    for event in events:
        line = _line(event)
        if line:
            console.print(printable(line), markup=False, soft_wrap=True)
        if event["type"] == "run.done":
            ended = event
    if not ended:
        raise CairnError("the run was interrupted; continue it with: cairn workflow resume ID")
    if ended["state"] == "failed":
        raise CairnError(f"the run has failed: {ended['why']}")
    for conflict in ended.get("conflicts", ()):
        won, lost = json.dumps(conflict["value"]), json.dumps(conflict["other"])
        values = f"conflict: {conflict['field']} is {won} by {conflict['won']}, not {lost} by {conflict['lost']}"
        console.print(printable(f"{values}: {conflict['why']}"), markup=False, soft_wrap=True)
    print(json.dumps(ended.get("result"), ensure_ascii=False, indent=1))


def _line(event: Mapping[str, Any]) -> str:
    match event["type"]:
        case "run.started":
            return f"run {event['run']}" + (" goes on" if event["resumed"] else "")
        case "node.started":
            return f"{event['key']} begins" + (f" ({event['role']})" if event["role"] else "")
        case "node.retry":
            return f"{event['key']} is asked again: {event['why']}"
        case "node.done":
            return f"{event['key']} is done"
        case "node.skipped" | "node.failed":
            return f"{event['key']} {'is skipped' if event['type'] == 'node.skipped' else 'has failed'}: {event['why']}"
    return ""
