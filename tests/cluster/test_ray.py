"""Servers under Ray Serve: their number changes and one dies, and no stream is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cairn.cluster import ray_serve
from cairn.cluster.ray_serve import RayPlan, Scaling, parsed
from cairn.types.errors import ConfigError
from tests.api.process import Served
from tests.cluster.machines import Cluster, events

DRIVER = """
import json, sys, time
began = time.monotonic()
import ray
from cairn.cluster.ray_serve import RayPlan, deploy

ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2])
plan = RayPlan(**json.loads(sys.argv[1]))
for line in sys.stdin:
    deploy(plan, int(line))
    print(time.monotonic() - began, flush=True)
ray.serve.shutdown()
ray.shutdown()
"""


def test_the_number_of_servers_follows_the_queue_within_bounds_and_not_at_once() -> None:
    scaling = Scaling(least=1, most=3, high=2.0, low=0.2, up_after=10.0, down_after=120.0)
    assert scaling.wanted(1, 5.0, 0.0) == 1 and scaling.wanted(1, 5.0, 9.0) == 1
    assert scaling.wanted(1, 5.0, 10.0) == 2, "long enough"
    assert scaling.wanted(2, 5.0, 19.0) == 2, "the new one is still loading"
    assert scaling.wanted(2, 5.0, 20.0) == 3 and scaling.wanted(3, 9.0, 40.0) == 3, "the bound"
    assert scaling.wanted(3, 1.0, 50.0) == 3 and scaling.wanted(3, 0.0, 51.0) == 3
    assert scaling.wanted(3, 0.0, 171.0) == 2 and scaling.wanted(2, 0.0, 172.0) == 2
    assert scaling.wanted(2, 0.0, 291.0) == 1 and scaling.wanted(1, 0.0, 999.0) == 1


def test_a_look_that_fails_does_not_end_the_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    looks = iter(range(6))

    def deploy(plan: RayPlan, count: int) -> None:
        asked.append(count)
        if len(asked) == 2:
            raise RuntimeError("Ray's head is away")

    def pause(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    plan = RayPlan(router="http://127.0.0.1:1", options=("demo",))
    monkeypatch.setattr(ray_serve, "deploy", deploy)
    monkeypatch.setattr(ray_serve.time, "sleep", pause)
    monkeypatch.setattr(ray_serve, "longest_queue", lambda plan: 9.0)
    with pytest.raises(KeyboardInterrupt):
        ray_serve.keep_scaled(plan, Scaling(most=2, up_after=0.0), 1)
    assert asked == [1, 2, 2], "the second time it is asked again, and no further"


def test_servers_under_ray_want_a_shared_store() -> None:
    with pytest.raises(ConfigError, match="need --shared-store"):
        parsed(["demo"])


class Streams:
    """Clients that ask for one stream after another, until they are told to stop."""

    def __init__(self, made: Cluster, expected: list[str]) -> None:
        self.good, self.bad = 0, list[str]()
        self._made, self._expected, self._over = made, expected, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(expected))]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                with self._made.open("POST", "/v1/chat/completions", chat(number) | {"stream": True}) as response:
                    deltas = [event["choices"][0]["delta"] for event in events(response) if event.get("choices")]
                text = "".join(delta.get("content") or "" for delta in deltas)
                if text != self._expected[number]:
                    self.bad.append(f"another text: {text[:80]!r}")
                self.good += 1
            except (AssertionError, OSError) as error:
                self.bad.append(str(error))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def chat(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Story {number}. " + "Once upon a time. " * 20}]
    return {"messages": messages, "seed": number, "temperature": 0.8, "max_tokens": 300, "ignore_eos": True}


@pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: servers under Ray are not tried (pip install .[ray])"
)
def test_no_stream_is_lost_while_servers_come_go_and_die(
    tmp_path: Path, figure: Callable[[str, str], None], prove: bool
) -> None:
    if not prove:
        pytest.skip("only with --prove")
    alone = Served()
    made = Cluster(tmp_path, 0)
    options = ("demo", "--engine", "fake", "--kv-gb", "0.2", "--threads", "1", "--log-level", "error")
    shared = ("--shared-store", str(tmp_path / "store"), "--cluster-key-file", str(made.key))
    plan = {"router": f"http://127.0.0.1:{made.port}", "host": "127.0.0.1", "options": (*options, *shared)}
    short = Path(f"/tmp/cairn-ray-{os.getpid()}")  # its sockets need short paths
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(plan | {"folder": str(tmp_path), "cpus": 0.5}), str(short)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert driver.stdin is not None and driver.stdout is not None

    def servers(count: int) -> str:
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write(f"{count}\n".encode())
        driver.stdin.flush()
        return driver.stdout.readline().decode().strip()

    def settled(count: int) -> list[dict[str, Any]]:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            replicas: list[dict[str, Any]] = made.call("GET", "/router/replicas")["data"]
            if len(replicas) == count and all(replica["up"] and not replica["draining"] for replica in replicas):
                return replicas
            time.sleep(0.2)
        raise AssertionError(f"not {count} servers: {replicas}")

    streams = None
    try:
        alone.wait_ready()
        answers = [alone.post("/v1/chat/completions", chat(number)) for number in range(3)]
        began = servers(2)
        settled(2)
        streams = Streams(made, [answer["choices"][0]["message"]["content"] for answer in answers])
        servers(3)
        replicas = settled(3)
        pid = process_at(int(replicas[0]["url"].rpartition(":")[2]))
        os.killpg(pid, signal.SIGKILL)
        killed = time.monotonic()
        while any(replica["url"] == replicas[0]["url"] for replica in made.call("GET", "/router/replicas")["data"]):
            assert time.monotonic() < killed + 240
            time.sleep(0.2)
        settled(3)
        healed = time.monotonic() - killed
        servers(2)
        settled(2)
        time.sleep(1)
        streams.stop()
        assert not streams.bad and streams.good >= 10, streams.bad
        pids = [process_at(int(replica["url"].rpartition(":")[2])) for replica in settled(2)]
        figure("streams while Ray had 2, 3 and 2 servers and one was killed: whole, lost", f"{streams.good}, 0")
        figure("Ray: seconds to its start, to another server after kill -9", f"{float(began):.0f}, {healed:.0f}")
        figure("Ray: processes, resident GiB", beside(driver.pid))
    finally:
        if streams is not None:
            streams.stop()
        driver.stdin.close()
        driver.wait(180)
        driver.stdout.close()
        shutil.rmtree(short, ignore_errors=True)
        made.close()
        alone.end()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "Ray has ended, and servers have not"
        time.sleep(0.2)


def process_at(port: int) -> int:
    """Return the server whose command line has this port."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"serve" in words and b"-c" not in words and str(port).encode() in words:
                return int(entry.name)
    raise AssertionError(f"no server at {port}")


def beside(driver: int) -> str:
    """Describe Ray's own processes below a driver, with their private memory."""
    processes, todo = list[int](), [driver]
    while todo:
        pid = todo.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        todo += [int(child) for child in children]
        if b"cairn\0serve" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            processes.append(pid)
    size = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes) * os.sysconf("SC_PAGE_SIZE")
    return f"{len(processes)}, {size / 2**30:.2f}"
