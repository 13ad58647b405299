"""Starting a worker's process or thread up to its loading a model, and a server's first worker.

This imports little: a server starts its first worker before it imports the rest of itself, so that both go on at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import xxhash

from cairn.config.config import Config
from cairn.config.paths import expanded
from cairn.config.values import TenantTurns
from cairn.models.hub.hub import locate
from cairn.system.posix import without_secrets
from cairn.types.errors import ConfigError, NoWorker
from cairn.worker import wire

PACKAGE = Path(__file__).parents[1]
"""Folder of the package, whose files a worker is started from."""
WORKER = (sys.executable, "-P", "-m", "cairn.worker.worker")
"""The worker's command line; the socket's number is appended. Without -P it would import Python files from the working
directory, which may be a model's folder."""
KILL_SECONDS = 2.0
"""Seconds that a killed worker may take to end before the caller goes on without waiting."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a server: a terminal sends them to every process at once, and only the front acts on them."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker with its load order sent: our end of the socket to it, and its process or thread."""

    sock: socket.socket
    process: subprocess.Popen[bytes] | None
    thread: threading.Thread | None = None


@dataclass(frozen=True, slots=True)
class First:
    """A server's first worker, and what later ones need to be like it."""

    load: wire.LoadModel
    code: bytes
    """`code_digest` of the package at its start; empty in-process, or if the package could not be read: then later
    workers are not compared with it."""
    worker: Worker

    def end(self) -> None:
        """Kill the worker if it is a process that still runs."""
        self.worker.sock.close()
        if self.worker.process is not None:
            self.worker.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk or a device holds it; do not wait for it
                self.worker.process.wait(KILL_SECONDS)


def launch_first(
    config: Config,
    in_process: bool = False,
    folder: Path | None = None,
    blocks: tuple[int, ...] = (),
    kv_part: float = 0.0,
    turns: TenantTurns | None = None,
    wait: bool = False,
) -> First:
    """Start a worker that loads the model, from `folder` if that is known already.

    `blocks`, `kv_part`, `turns`, `wait`: as in `wire.LoadModel`.

    Raise ModelError if the model cannot be found or fetched, NoWorker if no worker can be started, ConfigError for an
    option that cannot be sent to it.
    """
    path = folder or locate(config.model)
    draft = "" if config.draft_model is None or config.speculate == "off" else str(locate(config.draft_model))
    adapters = tuple(wire.AdapterPlace(one.name, str(expanded(one.path).absolute())) for one in config.adapters)
    load = wire.LoadModel(plain(config), str(path), blocks, kv_part, turns or TenantTurns(), adapters, draft, wait)
    seen = b""
    if not in_process:
        with contextlib.suppress(OSError):  # serve even if a file cannot be read
            seen = code_digest()
    try:
        return First(load, seen, launch(load, in_process))
    except OSError as error:
        raise NoWorker(f"the process that loads the model could not be started: {error}") from error
    except UnicodeEncodeError as error:  # a folder in the options or HOME whose name has another encoding
        raise ConfigError(f"{error.object!a} is not UTF-8, as folders and other options must be") from None


def plain(config: Config) -> Config:
    """Return the options without secrets, and without those that other processes do not need."""
    return msgspec.structs.replace(config, api_key=(), tenants=(), admin_key=None, models=(), adapters=())


def launch(load: wire.LoadModel, in_process: bool = False) -> Worker:
    """Start a worker and send it its first frame. Raise OSError, or before that UnicodeEncodeError."""
    first = wire.encode(load)
    if in_process:
        _import_all(load)
    ours, theirs = socket.socketpair()
    if in_process:
        thread = threading.Thread(target=_serve_quietly, args=(theirs,), name="cairn-worker", daemon=True)
        thread.start()
        worker = Worker(ours, None, thread)
    else:
        try:
            with theirs:
                worker = Worker(ours, _process(theirs))
        except BaseException:
            ours.close()
            raise
    with contextlib.suppress(OSError):  # the reader notices a worker that is gone already
        ours.sendall(first)  # a few hundred bytes fit the socket's buffer, so this does not wait
    return worker


def _import_all(load: wire.LoadModel) -> None:
    """Import the modules that the worker's thread and the thread that reads the tokenizer need.

    This is done before either starts: numpy's parts import each other, so of two threads that import them at once, one
    could see a half-imported part.
    """
    import cairn.text.tokens.gguf
    import cairn.worker.worker  # noqa: F401
    from cairn.engine.load_engine import import_engine

    import_engine(load.config)


def _process(sock: socket.socket) -> subprocess.Popen[bytes]:
    # A Ctrl-C in a terminal goes to all its processes. The worker ignores it, but only once it has set that up.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        command = [*WORKER, str(sock.fileno())]
        return subprocess.Popen(
            command, pass_fds=(sock.fileno(),), stdin=subprocess.DEVNULL, stdout=2, env=without_secrets()
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve_quietly(sock: socket.socket) -> None:
    """Serve in-process: print an unforeseen error; the front sees the connection close."""
    from cairn.worker.worker import serve

    try:
        serve(sock)
    except Exception:
        traceback.print_exc(file=sys.stderr)


CODE_CHANGED = "Cairn's own files were changed since this server started, so it cannot start another worker; restart it"


def code_digest() -> bytes:
    """Return a digest of the names and contents of the package's modules on the disk.

    Raise OSError if one cannot be read.
    """
    digest = xxhash.xxh3_128()
    walk = os.walk(PACKAGE, onerror=_refuse)  # `rglob` leaves out what it cannot read
    for path in sorted(Path(place, name) for place, _, names in walk for name in names):
        if path.suffix in (".py", ".so"):
            digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.digest()


def _refuse(error: OSError) -> NoReturn:
    raise error
