"""A worker's process (or thread) from nothing to where it loads a model, and how a server comes to its first one.

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

import cairn
from cairn.config.config import Config, TenantTurns
from cairn.models.hub.hub import locate
from cairn.system.posix import without_secrets
from cairn.types.errors import ConfigError, NoWorker
from cairn.worker import wire

WORKER = (sys.executable, "-P", "-m", "cairn.worker.worker")
"""The worker's command line; the socket's number is added to it. Without -P it would import the Python files of the
working directory, which may be a model's folder."""
KILL_SECONDS = 2.0
"""How long a worker that was killed may take to be gone, where nobody can wait for longer."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""What ends a server: a terminal sends it to every process at once, and only the front heeds it."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that was told what to load: our end of the socket to it, and its process or thread."""

    sock: socket.socket
    process: subprocess.Popen[bytes] | None
    thread: threading.Thread | None = None


@dataclass(frozen=True, slots=True)
class First:
    """A server's first worker, and what the later ones need to be like it."""

    load: wire.LoadModel
    code: bytes
    """`code_digest` of the package when it was started; empty in-process, and where the package could not be read:
    then later workers are not held against it."""
    worker: Worker

    def end(self) -> None:
        """Kill the worker, if it is a process that still runs."""
        self.worker.sock.close()
        if self.worker.process is not None:
            self.worker.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk or a device holds it: nobody else need wait
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
    """Start a worker that loads the model, which is in `folder` where that is known already.

    `blocks`, `kv_part`, `turns`, `wait`: as of `wire.LoadModel`.

    Raises ModelError where the model cannot be had, NoWorker where a worker cannot, ConfigError for an option that
    cannot be told to it.
    """
    found = folder or locate(config.model)
    load = wire.LoadModel(plain(config), str(found), blocks, kv_part, turns or TenantTurns(), wait)
    seen = b""
    if not in_process:
        with contextlib.suppress(OSError):  # one file that cannot be read is no reason not to serve
            seen = code_digest()
    try:
        return First(load, seen, launch(load, in_process))
    except OSError as error:
        raise NoWorker(f"the process that loads the model could not be started: {error}") from error
    except UnicodeEncodeError as error:  # a folder of the options or HOME, made with another encoding
        raise ConfigError(f"{error.object!a} is not UTF-8, as folders and other options must be") from None


def plain(config: Config) -> Config:
    """The options without what other processes must not know, or need not."""
    return msgspec.structs.replace(config, api_key=(), tenants=(), admin_key=None, models=())


def launch(load: wire.LoadModel, in_process: bool = False) -> Worker:
    """Start a worker and send it its first frame. Raises OSError, or before that UnicodeEncodeError."""
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
    with contextlib.suppress(OSError):  # one that is gone already is noticed by who reads
        ours.sendall(first)  # some hundred bytes: it need not read yet
    return worker


def _import_all(load: wire.LoadModel) -> None:
    """Import what the worker's thread and the one that reads the tokenizer need, before there is either. numpy's parts
    import each other, and of two threads in the middle of that one sees a part that is not whole."""
    import cairn.text.tokens.gguf
    import cairn.worker.worker  # noqa: F401
    from cairn.engine.device import import_engine

    import_engine(load.config)


def _process(sock: socket.socket) -> subprocess.Popen[bytes]:
    # A Ctrl-C in a terminal goes to all its processes; this one ignores it, but only once it has come to that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        command = [*WORKER, str(sock.fileno())]
        return subprocess.Popen(
            command, pass_fds=(sock.fileno(),), stdin=subprocess.DEVNULL, stdout=2, env=without_secrets()
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve_quietly(sock: socket.socket) -> None:
    """The worker of in-process use: an unforeseen error is shown, and the front sees the connection close."""
    from cairn.worker.worker import serve

    try:
        serve(sock)
    except Exception:
        traceback.print_exc(file=sys.stderr)


CODE_CHANGED = "Cairn's own files were changed since this server started, so it cannot start another worker; restart it"


def code_digest() -> bytes:
    """Which code is on the disk: a digest of the names and contents of the package's modules as they are now. Raises
    OSError where one cannot be read."""
    folder = Path(cairn.__file__).parent
    found = xxhash.xxh3_128()
    walk = os.walk(folder, onerror=_refuse)  # `rglob` leaves out what it cannot read
    for path in sorted(Path(place, name) for place, _, names in walk for name in names):
        if path.suffix in (".py", ".so"):
            found.update(str(path.relative_to(folder)).encode() + b"\0")
            found.update(path.read_bytes())
    return found.digest()


def _refuse(error: OSError) -> NoReturn:
    raise error
