"""`cairn serve` as a process of its own, on the fake engine with the bundled model's tokenizer and template."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KV_GB = 0.2
FAULTY = Path(__file__).parents[1] / "service" / "faulty_worker.py"
FOLDERS = tempfile.mkdtemp(prefix="cairn-agents-")
"""Each server stores its agents in a folder of its own below; all are removed at the end."""
atexit.register(shutil.rmtree, FOLDERS, ignore_errors=True)
_numbers = itertools.count()
MAIN = """
import gc, json, sys
gc.disable()  # until it serves, as the command does: modules are no garbage
from pathlib import Path
from cairn.api.server import serve
from cairn.config.resolve import resolve
from cairn.types.errors import CairnError
from cairn.frontend import launch
try:
    options = json.loads(sys.argv[1])
    launch.WORKER = tuple(options.pop("worker", launch.WORKER))
    file = options.pop("config_file", None)
    resolved = resolve(options, {}, None if file is None else Path(file))
    serve(resolved.config, lambda: resolved.again().config)
except CairnError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Served:
    """A `cairn serve` process.

    `options` are fields of Config, `config_file` is a file of more options, and `plant` is Python source that runs
    first. With `holds`, answers stop at their 100th token while the file `hold` exists, however fast the machine is.
    """

    def __init__(self, plant: str = "", *, holds: bool = False, **options: Any) -> None:
        self.port = options.setdefault("port", free_port())
        options.setdefault("engine", "fake")
        options.setdefault("kv_gb", KV_GB)
        number = next(_numbers)
        options.setdefault("agents_dir", f"{FOLDERS}/{number}")
        self.hold = Path(FOLDERS, f"{number}.hold")
        if holds:
            options["worker"] = (sys.executable, str(FAULTY), "held")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", plant + MAIN, json.dumps(options)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1", "HOLD": str(self.hold)},
            start_new_session=True,
        )
        self.errors = b""
        # Read at all times: a server that writes into a full pipe would block.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            for line in pipe:
                self.errors += line

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until /health/ready answers 200."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.stderr()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health/ready", timeout=5):
                return
            time.sleep(0.05)
        raise AssertionError("the server did not become ready")

    def wait_live(self, timeout: float = 30.0) -> None:
        """Wait until the port answers."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health/live", timeout=5):
                return
            time.sleep(0.01)
        raise AssertionError("the server did not listen")

    def post(self, path: str, body: Any, timeout: float = 60.0) -> Any:
        """Send a POST that must succeed; return the parsed answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def family(self) -> set[int]:
        """Return the process ids of the server and all its descendants."""
        pids, todo = set(), [self.pid]
        while todo:
            pid = todo.pop()
            pids.add(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    todo += [int(child) for child in children.read_text().split()]
        return pids

    def rss(self) -> int:
        """Return the resident bytes of the front process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process at once, as a terminal does for Ctrl-C."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(timeout)
        self.stderr()
        return code

    def stderr(self) -> str:
        """Return what was written to stderr, once all processes have ended."""
        self._reader.join()
        return self.errors.decode()

    def end(self) -> None:
        """Kill the server if it still runs."""
        family = self.family()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.stderr()
        for pid in family - {self.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Served]:
    """Yield a ready server; kill it at the end if the test has not ended it."""
    server = Served(**options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


def alive(pids: set[int]) -> set[int]:
    """Return those of the processes that still exist; zombies do not count."""
    result = set()
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                result.add(pid)
    return result
