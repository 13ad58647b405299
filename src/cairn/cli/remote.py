"""`cairn status`, `ps`, `cancel` and `reload` of a server; `load`, `unload`, `swap` and `stop` of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.config.paths import expanded
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client

_SERVER = ("api_key", "admin_key")
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the server, by any of its names.")]
Grace = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="How long its requests may run on; default: shutdown_grace.")
]
SwapGrace = Annotated[
    float | None, typer.Option("--grace", metavar="SECONDS", help="How long its requests may run on; default: 20.")
]


def register(app: typer.Typer) -> None:
    """Add `cairn status`, `ps`, `load`, `unload`, `swap`, `reload`, `stop` and `cancel`."""

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def status(
        resolved: Resolved,
        request: Annotated[str | None, typer.Argument(metavar="ID", help="A request, by the id of its answer.")] = None,
        host: Host = None,
    ) -> None:
        """Show the state of a running server, or the progress of one of its requests."""
        with server(resolved, host) as client:
            rows = _request(client.get(_path(request))) if request else _server(client)
        _print(rows)

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def ps(resolved: Resolved, host: Host = None) -> None:
        """List the models of a running server: state, running and waiting requests, memory."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            rows = _models(client)
        table(("model", "state", "kind", "context", "running", "waiting", "memory", "server"), rows)

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def load(resolved: Resolved, model: Model, host: Host = None) -> None:
        """Load a model of a running server; others are unloaded if it needs their memory."""
        _change(resolved, host, "load", {"model": model})

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def unload(resolved: Resolved, model: Model, grace: Grace = None, host: Host = None) -> None:
        """Unload a model of a running server once its requests end; a new request loads it again."""
        _change(resolved, host, "unload", {"model": model, "grace": grace})

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def swap(
        resolved: Resolved,
        model: Model,
        to: Annotated[
            str, typer.Argument(metavar="TO", help="The new model: as for serve, or the name of another of the server.")
        ],
        grace: SwapGrace = None,
        host: Host = None,
    ) -> None:
        """Replace a model of a running server by another, under the same names; its requests may finish."""
        from cairn.cli.models import fetched

        fetched(to)
        _change(resolved, host, "swap", {"model": model, "to": _absolute(to), "grace": grace})

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def reload(resolved: Resolved, host: Host = None) -> None:
        """Make a running server read its options again: keys, tenants, limits, aliases, log level."""
        with server(resolved, host) as client:
            found = client.post("/v1/admin/reload", {}, admin=True)
            rows = [("changed", str(one)) for one in found["changed"]] or [("changed", "nothing")]
            rows += [("unchanged", f"{one['option']}: {one['why']}") for one in found["unchanged"]]
        _print(rows)

    @app.command(rich_help_panel="Running servers")
    @configured(_SERVER, model=False)
    def stop(
        resolved: Resolved,
        model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model of the server.")] = None,
        grace: Grace = None,
        host: Host = None,
    ) -> None:
        """Unload a model of a running server, like `unload`; without MODEL, say how to stop the server."""
        if model is not None:
            _change(resolved, host, "unload", {"model": model, "grace": grace})
            return
        with server(resolved, host) as client:
            client.get("/health/ready")
            raise ConfigError(
                f"to stop the server at {client.url}, press Ctrl-C in its terminal or send its process SIGTERM. To "
                "unload a model: cairn stop MODEL; to end one request: cairn cancel ID"
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


def _absolute(place: str) -> str:
    """Return an existing path as absolute, because the server has another working folder; other names as they are."""
    path = expanded(place)
    return str(path.absolute()) if path.exists() else place


def _change(resolved: Resolved, host: str | None, what: str, body: dict[str, Any]) -> None:
    """Load, unload or swap a model of a server, and print its new state."""
    fields = {name: value for name, value in body.items() if value is not None}
    with server(resolved, host) as client:
        found = client.post(f"/v1/admin/models/{what}", fields, admin=True, patient=True)
        seconds = f"{found['load_seconds']:.1f} s" if what != "unload" else ""
        rows = [("model", str(found["id"])), ("state", str(found["state"])), ("from", str(found["model"]))]
        rows += [("loaded in", seconds)] if seconds else []
    _print(rows)


def _path(request: str) -> str:
    return f"/v1/requests/{quote(request, safe='', errors='replace')}"


def _print(rows: Rows) -> None:
    from cairn.cli.common.output import table

    table(("", ""), rows)


def _server(client: Client) -> Rows:
    """Return a server's state as rows. Health is open to all; on a server with keys, the load needs the admin key."""
    health = client.get("/health/ready")
    rows = [("server", client.url), ("status", health["status"])]
    rows += [("because", reason) for reason in health["reasons"]]
    if health["status"] != "ready":
        return rows
    rows += [("trouble", one) for one in health.get("troubles", ())]
    if health.get("role") == "router":
        return rows + _replicas(client)
    try:
        for model in client.get("/v1/models")["data"]:
            state = "" if model.get("state", "loaded") == "loaded" else f", {model['state']}"
            rows.append(("model", f"{model['id']}, context {model['max_model_len']} tokens{state}"))
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


def _replicas(client: Client) -> Rows:
    """Return the servers behind a router as rows; they need the admin key where the router has one."""
    try:
        found = client.get("/router/replicas", admin=True)["data"]
    except CairnError as error:
        return [("servers", f"not shown: {error}")]
    return [
        (
            "server behind it",
            f"{one['url']}: {'draining' if one['draining'] else one['state']}, {one['running']} running",
        )
        for one in found
    ]


def _models(client: Client) -> list[tuple[str, ...]]:
    """Return a row per model with its load; "-" for figures that only the admin key shows."""
    from cairn.cli.common.output import amount

    models = client.get("/v1/models")["data"]
    try:
        samples = _samples(client.text("/metrics", admin=True))
    except CairnError:
        samples = []
    rows = []
    for one in models:
        of = f'model_name="{one["id"]}"' if len(models) > 1 else ""
        load = tuple(
            "-"
            if not any(n == name for n, _, _ in samples)
            else f"{sum(v for n, labels, v in samples if n == name and of in labels):.0f}"
            for name in ("num_requests_running", "num_requests_waiting")
        )
        memory = amount(one["memory_bytes"]) if one.get("memory_bytes") else "-"
        state, kind = str(one.get("state", "loaded")), str(one.get("kind") or "-")
        rows.append((str(one["id"]), state, kind, str(one["max_model_len"] or "-"), *load, memory, client.url))
    return rows


def _samples(text: str) -> list[tuple[str, str, float]]:
    """Parse Prometheus' text format; return each sample's name without prefix, labels and value."""
    found = []
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head and not line.startswith("#"):
            name, _, labels = head.partition("{")
            found.append((name.partition(":")[2], labels, float(value)))
    return found


def _metrics(text: str) -> dict[str, float]:
    """Return samples by name, summed over all models; for the share of the pool, the largest."""
    found: dict[str, float] = {}
    for name, _, value in _samples(text):
        largest = name == "kv_cache_usage_perc"
        found[name] = max(found.get(name, 0.0), value) if largest else found.get(name, 0.0) + value
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
