"""`cairn status`, `ps` and `cancel`: a look at a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cairn.cli.options import Host, configured, server
from cairn.errors import CairnError, ConfigError
from cairn.resolve import Resolved

if TYPE_CHECKING:
    from cairn.cli.client import Client

_SERVER = ("api_key", "admin_key")


def register(app: typer.Typer) -> None:
    """Add `cairn status`, `ps`, `stop` and `cancel`."""

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def status(
        resolved: Resolved,
        request: Annotated[str | None, typer.Argument(metavar="ID", help="A request, by the id of its answer.")] = None,
        host: Host = None,
    ) -> None:
        """Show how a running server is doing, or how far one of its requests is."""
        with server(resolved, host) as client:
            rows = _request(client.get(_path(request))) if request else _server(client)
        _print(rows)

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def ps(resolved: Resolved, host: Host = None) -> None:
        """List the models that a running server has, with the requests that run and wait."""
        from cairn.cli.output import table

        with server(resolved, host) as client:
            rows = _models(client)
        table(("model", "context", "running", "waiting", "server"), rows)

    @app.command(hidden=True)
    @configured(_SERVER, model=False)
    def stop(
        resolved: Resolved,
        model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Not unloaded: a server keeps it.")] = None,
        host: Host = None,
    ) -> None:
        """Say how a running server is ended: it keeps its model for as long as it runs."""
        with server(resolved, host) as client:
            client.get("/health/ready")
            what = model or "its model"
            raise ConfigError(
                f"the server at {client.url} keeps {what} for as long as it runs; end it with Ctrl-C in its terminal "
                "or SIGTERM to its process. One request is ended by: cairn cancel ID"
            )

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def cancel(
        resolved: Resolved,
        request: Annotated[str, typer.Argument(metavar="ID", help="A request, by the id of its answer.")],
        host: Host = None,
    ) -> None:
        """Cancel a request of a running server."""
        with server(resolved, host) as client:
            report = client.post(_path(request) + "/cancel", {})
            if not report["cancelled"]:
                raise CairnError(f"request {report['id']} had already ended ({report['state']})")
            rows = _request(report)
        _print(rows)


Rows = list[tuple[str, str]]


def _path(request: str) -> str:
    return f"/v1/requests/{quote(request, safe='', errors='replace')}"


def _print(rows: Rows) -> None:
    from cairn.cli.output import table

    table(("", ""), rows)


def _server(client: Client) -> Rows:
    """Health is open to all; what is running needs the (admin) key on a server with keys."""
    health = client.get("/health/ready")
    rows = [("server", client.url), ("status", health["status"])]
    rows += [("because", reason) for reason in health["reasons"]]
    if health["status"] != "ready":
        return rows
    rows += [("trouble", one) for one in health.get("troubles", ())]
    try:
        for model in client.get("/v1/models")["data"]:
            rows.append(("model", f"{model['id']}, context {model['max_model_len']} tokens"))
        values = _metrics(client.text("/metrics", admin=True))
    except CairnError as error:
        return [*rows, ("load", f"not shown: {error}")]
    rows.append(("running", f"{values.get('num_requests_running', 0):.0f} requests"))
    rows.append(("waiting", f"{values.get('num_requests_waiting', 0):.0f} requests"))
    rows.append(("KV pool", f"{values.get('kv_cache_usage_perc', 0):.1%} held by requests"))
    asked, hits = values.get("prefix_cache_queries_total", 0), values.get("prefix_cache_hits_total", 0)
    if asked:
        rows.append(("cache", f"{hits:.0f} of {asked:.0f} prompt tokens were not computed again ({hits / asked:.0%})"))
    return rows


def _models(client: Client) -> list[tuple[str, ...]]:
    """The models, each with the load of the server; "-" for what only the admin key shows."""
    models = client.get("/v1/models")["data"]
    try:
        values = _metrics(client.text("/metrics", admin=True))
        load = tuple(f"{values.get(f'num_requests_{state}', 0):.0f}" for state in ("running", "waiting"))
    except CairnError:
        load = ("-", "-")
    return [(str(one["id"]), str(one["max_model_len"]), *load, client.url) for one in models]


def _metrics(text: str) -> dict[str, float]:
    """Plain samples of Prometheus' text format, by name without prefix and labels."""
    found = {}
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head and not line.startswith("#"):
            found[head.partition("{")[0].partition(":")[2]] = float(value)
    return found


def _request(report: dict[str, Any]) -> Rows:
    rows = [
        ("request", report["id"]),
        ("state", report["state"]),
        ("prompt", f"{report['prompt_tokens']} tokens"),
        ("answer", f"{report['completion_tokens']} tokens"),
    ]
    for choice in report["choices"]:
        name = "text" if len(report["choices"]) == 1 else f"text {choice['index']}"
        rows += [(name, choice["text"])] if choice["text"] else []
        rows += [("error", choice["error"])] if choice["error"] else []
    return rows
