"""`cairn serve`: checks before a server starts, and its start.

The first worker is started, and loads the model, before the rest of the server is imported: both take about as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

from cairn.api.data_folders import check_folders, usual_held
from cairn.api.http.auth import Origins, check_exposure, check_tls
from cairn.api.tracing import endpoint_of
from cairn.config.config import Config
from cairn.frontend.launch import ENDING
from cairn.served_models.served_model import first_worker, served_models
from cairn.system.posix import SystemClock, SystemFiles, log_to_stderr
from cairn.types.errors import ConfigError

log = logging.getLogger("cairn.api")

SPARE_FILES = 256
"""File descriptors beside those of the connections."""
MALLOC_OPTIONS = ((-1, 512 << 10), (-3, 256 << 10), (-8, 2))
"""M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc's malloc.h: bytes at the end of a heap, bytes of a block
that is mapped by itself, heaps."""
FOLDER_SECONDS = 10.0
"""Seconds for which a server that is ending may still hold the user's folders: it stores what waits to be stored."""


def serve(config: Config, again: Callable[[], Config] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then return; the exit code is then 0.

    The port answers at once, with 503 until the model is loaded. The first signal lets running requests finish within
    `config.shutdown_grace`; a second one ends them at once. `again` reads the options once more, for SIGHUP and
    /v1/admin/reload. Raises ConfigError (busy port, an address that needs a
    key, folders that are not apart or that another server has, an origin that no page can have, a certificate that
    cannot be used) or ModelError; both carry exit code 2.
    """
    check_exposure(config)
    check_folders(config, os.environ)
    Origins(config)
    check_tls(config)
    endpoint_of(config)
    log_to_stderr(config.log_level, config.log_format)
    raise_file_limit(config.max_connections)
    return_freed_memory()
    # A signal waits until the loop takes it (`lifetime.Signals`): what it raised now could leave a worker behind, or be
    # lost in the middle of an import.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with (
            bind(config.host, config.port) as sock,
            _admin_socket(config) as admin,
            usual_held(config, os.environ, SystemFiles(), SystemClock(), _pause, FOLDER_SECONDS),
        ):
            models = served_models(config)
            first = first_worker(config, models)
            try:
                from cairn.api.lifetime import run

                run(config, sock, models, first, admin, again)
            finally:
                first.end()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _admin_socket(config: Config) -> Iterator[socket.socket | None]:
    """Yield the socket of the listener for admin routes; None if there is none."""
    if config.admin_port is None:
        yield None
        return
    with bind(config.admin_host, config.admin_port, "admin_port") as sock:
        yield sock


def _pause() -> bool:
    """Wait a moment; False once a signal wants the end of all this."""
    time.sleep(0.1)
    return not signal.sigpending() & set(ENDING)


def bind(host: str, port: int, option: str = "port") -> socket.socket:
    """Return a socket that listens. Raises ConfigError, with the `option`, if that is not possible."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"host {host} is not an address of this machine", field="host") from None
    family, kind, proto, _, where = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen()  # until then another server could bind the same port, and clients would be refused
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is used by another program; choose one with --{option.replace('_', '-')}",
                field=option,
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}", field="host") from None
    return sock


def return_freed_memory() -> None:
    """Have glibc give back memory that is freed.

    By default it keeps as much as two of the largest blocks there ever were, and as many heaps as there were threads:
    one body of megabytes would cost them for good. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform == "linux":
        for option, value in MALLOC_OPTIONS:
            mallopt(option, value)


def raise_file_limit(connections: int) -> None:
    """Raise RLIMIT_NOFILE as far as possible; log a warning if the connections may need more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = 1 << 20
    wanted = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < connections + SPARE_FILES:
        log.warning("this system allows %d open files, too few for max_connections %d", soft, connections)
