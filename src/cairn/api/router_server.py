"""Serving the router: our HTTP listener in front of replicas, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from cairn.api.http.auth import check_exposure, check_tls
from cairn.api.http.listener import Listener
from cairn.api.http.router_access import RouterAccess
from cairn.api.lifetime import FLUSH_SECONDS, Signals, address
from cairn.api.server import bind, raise_file_limit, return_freed_memory
from cairn.cluster.router.app import RouterApp
from cairn.cluster.router.kv_follow import KvFollowers
from cairn.cluster.router.replicas import Replicas, Restart
from cairn.cluster.router.routing_options import Apart, Routing
from cairn.config.config import Config
from cairn.system.posix import SystemRng, log_to_stderr

log = logging.getLogger(__name__)

Beside = Callable[[asyncio.Event, Replicas, str], Awaitable[None]]
"""Runs beside the router, with its replicas and its URL; sets the event to end it, and is cancelled when it ends."""


def serve_router(
    config: Config,
    replicas: Sequence[str],
    beside: Beside | None = None,
    restart: Restart | None = None,
    *,
    routing: Routing = "kv",
    apart: Apart = "auto",
) -> None:
    """Serve until SIGTERM or SIGINT. Raise ConfigError for addresses, keys or certificates that cannot be used.

    `restart` ends a replica that `beside` then starts again.
    """
    check_exposure(config)
    check_tls(config)
    log_to_stderr(config.log_level, config.log_format)
    raise_file_limit(config.max_connections)
    return_freed_memory()
    known = Replicas(replicas, routing)
    with bind(config.host, config.port) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        admin_key = "" if config.admin_key is None else config.admin_key.reveal()
        app = RouterApp(known, SystemRng(), RouterAccess(config), admin_key, restart, apart)
        runner.run(_serve(config, sock, app, KvFollowers(known, admin_key), beside))


async def _serve(
    config: Config, sock: socket.socket, app: RouterApp, followers: KvFollowers, beside: Beside | None
) -> None:
    replicas = app.replicas
    stop, over = Signals(), asyncio.Event()
    listener = Listener(app, config, lambda path: "")
    replicas.start()
    followers.start()
    await listener.start(sock)
    url = address(config.host, sock, tls=config.tls_cert is not None)
    log.info("the router listens on %s, for %s", url, ", ".join(one.url for one in replicas.all))
    running = asyncio.ensure_future(beside(over, replicas, url)) if beside is not None else None
    signalled, ended = asyncio.ensure_future(stop.first.wait()), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait((signalled, ended), return_when=asyncio.FIRST_COMPLETED)
        await listener.close(0 if stop.second.is_set() else max(FLUSH_SECONDS, config.shutdown_grace))
    finally:
        for task in (signalled, ended, *((running,) if running is not None else ())):
            task.cancel()
        await asyncio.gather(signalled, ended, return_exceptions=True)
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)
        await followers.close()
        await replicas.close()
        stop.close()
