"""An object store for tests of the shared store."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.api.process import free_port


@pytest.fixture
def s3() -> Iterator[str]:
    """The address of a bucket on moto's S3 server."""
    if importlib.util.find_spec("obstore") is None or importlib.util.find_spec("moto") is None:
        pytest.skip(
            "obstore or moto[server] is not installed: object stores are not tried (pip install .[cluster-test])"
        )
    port = free_port()
    code = "import sys; sys.argv = ['moto_server', '-p', sys.argv[1]]; from moto.server import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    access = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    access |= {"AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
    before = {name: os.environ.get(name) for name in access}
    os.environ.update(access)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                break
            except urllib.error.URLError:
                assert time.monotonic() < end, "moto's server did not start"
                time.sleep(0.1)
        yield "s3://bucket/some/prefix"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.kill()
        server.wait()
