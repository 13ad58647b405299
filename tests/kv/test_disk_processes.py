"""The disk store with real processes on a real disk: killed at any moment, two at a time, on a full disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time as machine_time
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.kv.disk.store import DiskStore
from cairn.system.posix import SystemFiles
from cairn.types.errors import Conflict
from tests.kv.stored import Time, chain, keys, open_store

Figure = Callable[[str, str], None]
ROOT = Path(__file__).parents[2]
LENGTH = 6
APART = 30 * 86_400.0
"""Seconds between two chains, so many that age outweighs the cost of computing in the order of eviction."""


def child(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work` in a forked process with a pipe to write to; return its id and the pipe to read from."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            work(writer)
        finally:
            os._exit(1)
    os.close(writer)
    return pid, reader


def keeper(folder: Path, start: int, budget: int) -> Callable[[int], None]:
    """Return work that keeps one chain after another and reports each, until it is killed."""

    def work(pipe: int) -> None:
        time = Time()
        store = open_store(SystemFiles(), time, folder=folder, size=6_000, budget=budget)
        number = start
        while True:
            time.sleep(APART)
            store.keep(chain(LENGTH, salt=number.to_bytes(4, "little"), size=6_000))
            os.write(pipe, number.to_bytes(4, "little"))
            number += 1

    return work


def reap(pid: int, pipe: int) -> list[int]:
    """Kill the process; return the numbers that it reported."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(pipe, "rb") as file:
        data = file.read()
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data) - 3, 4)]


def verify(store: DiskStore, numbers: list[int], *, whole: int) -> None:
    """Check that every reported chain is stored, or evicted from its end on.

    The last `whole` chains must be complete, and nothing else may ever be read.
    """
    last = numbers[-whole:]
    for number in numbers:
        chunks = chain(LENGTH, salt=number.to_bytes(4, "little"), size=6_000)
        count = store.match_prefix(keys(chunks))
        assert count == LENGTH or number not in last
        assert [store.fetch(chunk.key, chunk.tokens) for chunk in chunks[:count]] == chunks[:count]
    assert store.stats().damaged == 0


def test_kill_9_takes_nothing_that_was_reported(tmp_path: Path, prove: bool, figure: Figure) -> None:
    """Half of the kills hit a store that evicts all the time (known failure 31)."""
    rng, kills = random.Random(1), 200 if prove else 20
    known: list[int] = []
    crowded = 0
    for number in range(kills):
        roomy = number % 2 == 0
        folder = tmp_path / ("roomy" if roomy else "tight")
        pid, pipe = child(keeper(folder, number * 10_000, 1 << 40 if roomy else 40 * 8192))
        # One in five is killed while it starts, the others once they have kept something.
        first = [] if number % 5 == 4 else [int.from_bytes(os.read(pipe, 4), "little")]
        machine_time.sleep(rng.uniform(0.0, 0.06))
        said = first + reap(pid, pipe)
        known = (known + said)[-60:] if roomy else known
        crowded += 0 if roomy else len(said)
        store = open_store(SystemFiles(), Time(), folder=folder, size=6_000, budget=1 << 40)
        # The small store has room for six chains, some of which the unfinished chain may have displaced.
        verify(store, known if roomy else said, whole=len(known) if roomy else 3)
        taken = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        assert store.stats().bytes == taken
        assert not [path for path in folder.rglob("tmp-*")]
        store.close()
    assert len(known) > kills // 4
    assert crowded > 7, "nothing had to be evicted"
    figure("disk store: real kill -9 during puts and evictions, every kept chunk found", f"{kills}")


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, prove: bool, figure: Figure) -> None:
    rounds = 50 if prove else 5
    for number in range(rounds):
        pid, pipe = child(keeper(tmp_path / "kv", number * 10_000, 1 << 40))
        first = os.read(pipe, 4)
        assert first
        with pytest.raises(Conflict):
            open_store(SystemFiles(), Time(), folder=tmp_path / "kv", size=6_000)
        said = [int.from_bytes(first, "little"), *reap(pid, pipe)]
        store = open_store(SystemFiles(), Time(), folder=tmp_path / "kv", size=6_000, patience=0, budget=1 << 40)
        verify(store, said, whole=len(said))
        store.close()
    figure("disk store: two processes, one killed", f"{rounds}")


FULL = """
import sys
from pathlib import Path
from tests.kv.stored import Time, chain, keys, open_store
from cairn.system.posix import SystemFiles

folder, wanted = Path(sys.argv[1]), int(sys.argv[2])
others, refused = folder / "others", 0
time = Time()
store = open_store(SystemFiles(), time, folder=folder / "kv", size=6_000, budget=1 << 40)

def fill():
    with others.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

for number in range(wanted):
    chunks = chain(4, salt=number.to_bytes(4, "little"), size=6_000)
    assert store.keep(chunks) == 4, store.stats().trouble
    fill()
    assert [store.fetch(chunk.key, chunk.tokens) for chunk in chunks] == chunks
    more = chain(2, salt=b"more", size=6_000)
    assert store.keep(more) == 2, "the store lives on its own bytes"
    store.drop(keys(more) + [chain(1, salt=n.to_bytes(4, "little"), size=6_000)[0].key for n in range(number + 1)])
    fill()
    count = store.keep(chunks)
    refused += 4 - count
    assert count < 4 and store.stats().trouble, "a full disk is said"
    for chunk in chunks:
        assert store.fetch(chunk.key, chunk.tokens) in (None, chunk)
    others.unlink()
    time.sleep(61)
    store.tend()
    assert not store.stats().trouble, store.stats().trouble
print(refused)
"""


def test_a_real_file_system_that_is_full(tmp_path: Path, prove: bool, figure: Figure) -> None:
    """On a tmpfs of one megabyte that only this test sees."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && chmod 700 {tmp_path} && "
    if unshare is None or subprocess.run([unshare, "-rm", "sh", "-c", mount + "true"], capture_output=True).returncode:
        figure("disk store: refusals on a full tmpfs", "not run: this machine forbids user namespaces; see the fake's")
        pytest.skip("no user namespaces here")
    rounds = 250 if prove else 25
    command = mount + f'exec {sys.executable} -c "$0" {tmp_path} {rounds}'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", command, FULL],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    figure("disk store: refusals on a full tmpfs, store back afterwards", done.stdout.strip())
