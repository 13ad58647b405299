"""`cairn route` and `cairn cluster`: several servers that share a store, behind one address."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.cli.common.output import counted, talk
from cairn.cluster.router.routing_options import APART, ROUTING
from cairn.config.paths import expanded
from cairn.config.paths import home as users_home
from cairn.config.resolve import Resolved, resolve
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    import asyncio

    from cairn.cluster.router.replicas import Replicas

log = logging.getLogger(__name__)

_ROUTER = (
    *("host", "port", "api_key", "admin_key", "unsafe_no_auth", "tls_cert", "tls_key", "log_level", "log_format"),
    *("shutdown_grace", "max_connections", "max_body_mib", "allowed_hosts", "cors_origins"),
)
_CHOICES = {"routing": ROUTING, "apart": APART}
_Routing = Annotated[str, typer.Option(metavar="|".join(ROUTING), help="How requests are shared out among servers.")]
_Apart = Annotated[
    str,
    typer.Option(metavar="|".join(APART), help="When servers of role prefill compute prompts; auto: where it pays."),
]
AGAIN_SECONDS = 1.0
"""Pause before a server that ended is started again."""
_LOOK = 0.2
"""Seconds between two looks at whether all servers are ready."""
DAY = 86400


def register(app: typer.Typer) -> None:
    """Add `cairn route` and the commands of `cairn cluster`."""
    cluster = typer.Typer(help="Run several servers that share their agents and KV.", no_args_is_help=True)
    app.add_typer(cluster, name="cluster", rich_help_panel="Running servers")
    _add_up(cluster)
    _add_ray(cluster)

    @app.command(rich_help_panel="Running servers")
    @configured(_ROUTER, model=False)
    def route(
        resolved: Resolved,
        replica: Annotated[
            list[str] | None,
            typer.Option(
                metavar="URL", help="A server, such as http://10.0.0.5:8000; repeat for all. More can be added."
            ),
        ] = None,
        routing: _Routing = "kv",
        apart: _Apart = "auto",
    ) -> None:
        """Pass requests on to servers that share a store; agents and sessions stay with a server while it is up."""
        from cairn.api.router_server import serve_router

        serve_router(resolved.config, replica or (), routing=_one_of("routing", routing), apart=_one_of("apart", apart))

    @cluster.command()
    @configured(("api_key", "admin_key"), model=False)
    def restart(resolved: Resolved, host: Host = None) -> None:
        """Restart the servers of `cairn cluster up`, one after another; running requests finish first."""
        with server(resolved, host) as client:
            for done in client.events("/router/restart", {}, admin=True):
                if not done["ready"]:
                    raise CairnError(f"{done['replica']} is not ready again; the servers after it run as before")
                print(f"{done['replica']}: restarted")

    @cluster.command()
    def key(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="The key file of a cluster.")],
        rotate: Annotated[bool, typer.Option("--rotate", help="Add a new key to it, which seals from now on.")] = False,
    ) -> None:
        """Make a key file, or add a key to one. Every server needs the same file before any of them starts with it."""
        if file.exists() != rotate:
            raise ConfigError(f"{file} {'exists; add a key with --rotate' if not rotate else 'does not exist'}")
        _write_key(file, file.read_text() if rotate else "")
        print(file)

    @cluster.command()
    @configured(("shared_store",), model=False)
    def prune(
        resolved: Resolved,
        days: Annotated[int, typer.Option(min=1, help="Age in days, of KV and replayed answers.")] = 30,
    ) -> None:
        """Remove KV and replayed answers from a shared folder that are older than so many days. Agents stay.

        Of an object store a rule of the bucket does this: for names that begin with kv/, feed/ and replays/.
        """
        print(f"{_prune(resolved.config.shared_store, days):,} files removed")


def _add_up(cluster: typer.Typer) -> None:
    """Add `cairn cluster up`."""

    @cluster.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def up(
        context: typer.Context,
        model: Annotated[str, typer.Argument(metavar="MODEL", help="The model that all of them serve.")] = "demo",
        replicas: Annotated[int, typer.Option(min=1, max=64, help="Number of servers.")] = 3,
        shared_store: Annotated[
            str | None, typer.Option(metavar="STORE", help="Folder or object store; default: a folder of the cluster.")
        ] = None,
        cluster_key_file: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Keys of the store; made where there are none.")
        ] = None,
        folder: Annotated[
            Path | None, typer.Option(metavar="FOLDER", help="The servers' own folders; default: in the data folder.")
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address of the router.")] = None,
        port: Annotated[int | None, typer.Option(help="Port of the router; the servers have those after it.")] = None,
        allowed_hosts: Annotated[
            list[str] | None, typer.Option(metavar="HOST", help="Host header to accept besides local ones; repeat.")
        ] = None,
        cors_origins: Annotated[
            list[str] | None, typer.Option(metavar="ORIGIN", help="Web origin that may call; repeat for all.")
        ] = None,
        api_key: Annotated[
            list[str] | None, typer.Option(metavar="KEY", help="Key that callers need, or @FILE; repeat for more.")
        ] = None,
        admin_key: Annotated[
            str | None, typer.Option(metavar="KEY", help="Key of admin routes, or @FILE.", show_default=False)
        ] = None,
        unsafe_no_auth: Annotated[
            bool, typer.Option("--unsafe-no-auth", help="Serve other machines without a key.")
        ] = False,
        tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="The router's certificate chain.")] = None,
        tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's private key.")] = None,
        config_file: Annotated[
            Path | None, typer.Option("--config", metavar="FILE", help="File of options, for all of them.")
        ] = None,
        prefill: Annotated[
            int, typer.Option(min=0, max=63, help="How many of them compute long prompts for the others.")
        ] = 0,
        routing: _Routing = "kv",
        apart: _Apart = "auto",
    ) -> None:
        """Start servers, a router and their shared store on this machine, and keep them running.

        Further options go to every server. Ctrl-C finishes running requests and stops all of them.
        """
        from cairn.api.router_server import serve_router
        from cairn.cli.models import fetched

        if prefill >= replicas:
            raise ConfigError(f"prefill is {prefill} of {replicas} servers; leave at least one", field="prefill")
        how, when = _one_of("routing", routing), _one_of("apart", apart)
        fetched(model)
        both = {"allowed_hosts": allowed_hosts, "cors_origins": cors_origins, "api_key": api_key}
        own = {"host": host, "port": port, "tls_cert": tls_cert, "tls_key": tls_key}
        flags = {**both, **own, "admin_key": admin_key, "unsafe_no_auth": unsafe_no_auth or None}
        config = resolve(flags, file=config_file).config
        _check_listener(config_file)
        home = expanded(folder or _home()).absolute()
        keys = cluster_key_file or home / "cluster.key"
        if not keys.exists():
            _write_key(keys, "")
        store = shared_store or str(home / "store")
        ports = [config.port + number for number in range(1, replicas + 1)]
        threads = max(1, (os.cpu_count() or 1) // replicas)
        shared = ["--shared-store", store, "--cluster-key-file", str(keys), "--threads", str(threads)]
        shared += [] if config_file is None else ["--config", str(config_file)]
        shared += [] if admin_key is None else [f"--admin-key={admin_key}"]
        shared += [f"--{name.replace('_', '-')}={one}" for name, given in both.items() for one in given or ()]
        commands = []
        for number, its_port in enumerate(ports, 1):
            mine = ["--agents-dir", str(home / f"agents-{number}"), "--kv-dir", str(home / f"kv-{number}")]
            serve = [sys.executable, "-m", "cairn", "serve", model, "--host", "127.0.0.1", "--port", str(its_port)]
            role = [] if not prefill else ["--role", "prefill" if number <= prefill else "decode"]
            commands.append([*serve, *shared, *mine, *role, *_quiet(context.args)])
        servers = _Servers(model, commands)
        urls = [f"http://127.0.0.1:{its_port}" for its_port in ports]
        serve_router(config, urls, servers.run, servers.restart, routing=how, apart=when)
        if servers.refused:
            raise ConfigError("a server cannot start; its message is above")


def _add_ray(cluster: typer.Typer) -> None:
    """Add `cairn cluster ray`."""

    @cluster.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def ray(
        context: typer.Context,
        model: Annotated[str, typer.Argument(metavar="MODEL", help="The model that all servers serve.")],
        router: Annotated[str, typer.Option(metavar="URL", help="The router, which knows the servers then.")],
        replicas: Annotated[int, typer.Option(min=1, max=10_000, help="Number of servers at the beginning.")] = 1,
        least: Annotated[int, typer.Option(min=1, max=10_000, help="Fewest servers.")] = 1,
        most: Annotated[
            int | None, typer.Option(min=1, max=10_000, help="Most servers; default: as many as at the beginning.")
        ] = None,
        high: Annotated[float, typer.Option(min=0, help="Seconds of queue above which one more is started.")] = 2.0,
        cpus: Annotated[float, typer.Option(min=0, help="CPUs of a server, for Ray.")] = 1.0,
        gpus: Annotated[float, typer.Option(min=0, help="GPUs of a server, for Ray.")] = 0.0,
        folder: Annotated[
            Path | None, typer.Option(metavar="FOLDER", help="Where servers keep their own files, on each machine.")
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address of servers; default: their machine's own.")] = None,
        admin_key: Annotated[
            str | None,
            typer.Option(metavar="KEY", help="The admin key of router and servers, or @FILE.", show_default=False),
        ] = None,
    ) -> None:
        """Run servers on a cluster of Ray, which places them, starts dead ones again and changes their number.

        Further options go to every server, --shared-store and --cluster-key-file among them. Needs the extra ray.
        """
        from cairn.cluster.ray_serve import RayPlan, Scaling, keep_scaled, parsed

        secret = resolve({"admin_key": admin_key}).config.admin_key
        keys = [] if admin_key is None else [f"--admin-key={admin_key}"]
        plan = RayPlan(
            router=router.rstrip("/"),
            options=parsed([model, *keys, *context.args]),
            host=host or "",
            folder="" if folder is None else str(expanded(folder).absolute()),
            admin_key="" if secret is None else secret.reveal(),
            cpus=cpus,
            gpus=gpus,
        )
        most = most or max(replicas, least)
        if least > most:
            raise ConfigError(f"least is {least}, and most is {most}; least must not be above most", field="least")
        keep_scaled(plan, Scaling(least=least, most=most, high=high), min(max(replicas, least), most))


def _one_of(name: str, value: str) -> Any:
    """Return the value of an option, or raise ConfigError with what it may be."""
    if value not in _CHOICES[name]:
        raise ConfigError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value[:60]!r}", field=name)
    return value


def _check_listener(file: Path | None) -> None:
    """Raise ConfigError for options of a listener that the servers would take from where the router has them."""
    resolved = resolve(env=_server_env(), file=file)
    for name in ("tls_cert", "tls_key", "admin_port"):
        if getattr(resolved.config, name) is not None:
            instead = "serve them one by one" if name == "admin_port" else "use --tls-cert and --tls-key"
            raise ConfigError(
                f"{resolved.source(name)}: all servers behind the router would use it too, and cannot; take it out "
                f"and {instead}",
                field=name,
            )


def _server_env() -> dict[str, str]:
    """Return the environment for the servers. The router has the certificate, and speaks plain HTTP to them."""
    return {name: value for name, value in os.environ.items() if name not in ("CAIRN_TLS_CERT", "CAIRN_TLS_KEY")}


def _quiet(arguments: Sequence[str]) -> list[str]:
    """Return the servers' options, with log level warning by default: the router says how to use them."""
    said = any(one.partition("=")[0] == "--log-level" for one in arguments)
    return [*arguments, *(() if said else ("--log-level", "warning"))]


def _home() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else users_home() / ".local" / "share") / "cairn" / "cluster"


def _write_key(file: Path, old: str) -> None:
    """Write a key file, whole or not at all, for its owner alone."""
    from cairn.cluster.keys import new_key_file, parse_keys
    from cairn.system.posix import SystemRng

    if old:
        parse_keys(old, str(file))
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f"{file.name}.new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(new_key_file(SystemRng(), old))
    os.replace(fresh, file)


def _prune(store: str | None, days: int) -> int:
    """Remove old files of KV and of replayed answers from a shared folder; return how many."""
    import time

    if store is None or "://" in store:
        raise ConfigError("shared_store must be a folder here; give --shared-store FOLDER", field="shared_store")
    end, count = time.time() - days * DAY, 0
    for part in ("kv", "feed", "replays"):
        for path in (expanded(store) / part).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_mtime < end:
                    path.unlink()
                    count += 1
    return count


class _Servers:
    """The servers of `cairn cluster up`, as child processes that are started again if they end."""

    def __init__(self, model: str, commands: Sequence[Sequence[str]]) -> None:
        self._model, self._commands = model, commands
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self.refused = False
        """Whether a server ended because of its options."""

    async def restart(self, number: int) -> None:
        """Let a server finish and end; it is started again."""
        process = self._running.get(number)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()

    async def run(self, over: asyncio.Event, replicas: Replicas, url: str) -> None:
        """Keep them running until this is cancelled; then let them finish. Set `over` if none of them can start."""
        import asyncio

        keeping = [self._keep(number, command, over) for number, command in enumerate(self._commands)]
        await asyncio.gather(self._say_ready(replicas, url), *keeping)

    async def _say_ready(self, replicas: Replicas, url: str) -> None:
        """Say how to use the cluster, once all servers are ready for the first time."""
        import asyncio

        while not all(one.up for one in replicas.all):
            await asyncio.sleep(_LOOK)
        count = counted(len(replicas.all), "server")
        lines = f"{count} serve {self._model} at {url}/v1. Ctrl-C ends all.", f"In a browser: {url}/"
        talk().print(*lines, sep="\n", markup=False, soft_wrap=True)

    async def _keep(self, number: int, command: Sequence[str], over: asyncio.Event) -> None:
        import asyncio

        while True:
            try:
                process = await asyncio.create_subprocess_exec(*command, env=_server_env(), start_new_session=True)
            except OSError as error:  # the machine has no memory or processes left: that passes
                log.error("a server cannot be started, and is tried again: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            self._running[number] = process
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await process.wait()
                raise
            if code == ConfigError.exit_code:  # it would end so again
                self.refused = True
                over.set()
                return
            await asyncio.sleep(AGAIN_SECONDS)
