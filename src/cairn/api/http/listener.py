"""A bound socket and its guarded connections: accepts, sweeps, closes."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from cairn.api.http.auth import load_certificate, tls_context
from cairn.api.http.connection import ConnectionContext, Guard
from cairn.config.config import Config
from cairn.system.interfaces import Rng
from cairn.system.posix import SystemRng


class Listener:
    """A bound socket and its connections."""

    def __init__(self, app: Any, config: Config, upload: Callable[[str], str], rng: Rng | None = None) -> None:
        """Prepare to serve `app`.

        `upload(path)` returns whether a path takes a `file` as the body, or in a `form`, or neither.
        """
        self.config = config
        self.loop = asyncio.get_running_loop()
        self.state = ServerState()
        served = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        served.load()
        self._context = ConnectionContext(config, rng or SystemRng(), self.loop, served, self.state, upload)
        shortest = min(config.header_timeout, config.body_timeout, config.stream_stall, config.idle_timeout)
        self._tick = min(1.0, shortest / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None

    async def start(self, sock: socket.socket) -> None:
        """Begin to accept."""
        # Connections inherit it: it bounds the kernel's buffer for a client that does not read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.config.stream_buffer_kib << 10)
        tls = self._tls = tls_context(self.config)
        # A client that does not finish its handshake has as long as for its headers.
        patience = None if tls is None else self.config.header_timeout
        self._server = await self.loop.create_server(
            lambda: Guard(self._context), sock=sock, backlog=4096, ssl=tls, ssl_handshake_timeout=patience
        )
        self._sweep()

    def renew(self, config: Config) -> None:
        """Use the certificate that the files hold now for later connections."""
        if self._tls is not None:
            load_certificate(self._tls, config)

    def _sweep(self) -> None:
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        now = self.loop.time()
        for guard in self.guards():
            guard.sweep(now)
        self._timer = self.loop.call_later(self._tick, self._sweep)

    def guards(self) -> list[Guard]:
        """Return the open connections."""
        return [guard for guard in self.state.connections if isinstance(guard, Guard)]

    async def close(self, patience: float) -> None:
        """Accept no more, close idle connections, wait up to `patience` seconds for the others, then cut them."""
        if self._server is not None:
            self._server.close()
        for guard in self.guards():
            guard.shutdown()
        deadline = self.loop.time() + patience
        while any(guard.busy for guard in self.guards()) and self.loop.time() < deadline:
            await asyncio.sleep(0.01)
        for guard in self.guards():
            guard.abort()
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self.state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
