"""A worker that fails in a chosen way: `faulty_worker.py MODE FD`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cairn.config.config import Config
from cairn.engine import load_engine, memory
from cairn.engine.fake import FakeEngine
from cairn.scheduler.scheduler import Scheduler
from cairn.types.errors import DeviceError, DeviceMemoryError, ModelError, NoDevice
from cairn.types.step import Row
from cairn.worker import worker

PREFILL = FakeEngine.prefill
KILLER = 13


def dies(rows: Sequence[Row]) -> None:
    """Kill the process in every step with a request whose prompt begins with `KILLER`."""
    if any(row.tokens[0] == KILLER for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)


def stops(rows: Sequence[Row]) -> None:
    """Make a step with such a request wait for ever, without computing."""
    if any(row.tokens[0] == KILLER for row in rows):
        time.sleep(3600)


def takes_long(rows: Sequence[Row]) -> None:
    """Make a step with such a request wait for 2.5 seconds."""
    if any(row.tokens[0] == KILLER for row in rows):
        time.sleep(2.5)


def computes_long(rows: Sequence[Row]) -> None:
    """Make a step with such a request compute for 2.5 seconds."""
    end = time.monotonic() + 2.5
    while any(row.tokens[0] == KILLER for row in rows) and time.monotonic() < end:
        pass


def raises(rows: Sequence[Row]) -> None:
    """Raise in a step with such a request."""
    if any(row.tokens[0] == KILLER for row in rows):
        raise RuntimeError("the engine broke")


def paced(rows: Sequence[Row]) -> None:
    """Make every step take 5 ms."""
    time.sleep(0.005)


def slow_prompts(rows: Sequence[Row]) -> None:
    """Make every prompt token take 0.2 ms."""
    time.sleep(0.0002 * sum(max(0, min(row.end, row.prompt_len) - row.start) for row in rows))


def held(rows: Sequence[Row]) -> None:
    """Make a step wait at the 100th token of an answer while the file named by `HOLD` exists."""
    while any(len(row.tokens) >= row.prompt_len + 100 for row in rows) and os.path.exists(os.environ["HOLD"]):
        time.sleep(0.005)


def warns(rows: Sequence[Row]) -> None:
    """Make every step report a warning of a store."""
    logging.getLogger("cairn.kv.tiers.tiers").warning("a slow disk")


def short(rows: Sequence[Row]) -> None:
    """Pretend that no memory was free when the model was loaded."""


def tight(rows: Sequence[Row]) -> None:
    """Pretend that there is no memory for a pool of the former size."""


def small(rows: Sequence[Row]) -> None:
    """Pretend the same, with memory for a pool of 640 tokens."""


def wedges(rows: Sequence[Row]) -> None:
    """Make every step take 5 ms; once such a request is in one, the scheduler finds no more work."""
    paced(rows)


def device_fails(rows: Sequence[Row]) -> None:
    """Make every step take 5 ms, and the device fail at a token greater than `FAIL_AT`, except on the CPU.

    `FAULTS` may name a folder that gets one file for each failure; `FAULTS_MOST` limits their number.
    """
    paced(rows)
    if DEVICE and any(len(row.tokens) >= row.prompt_len + int(os.environ["FAIL_AT"]) for row in rows):
        if "FAULTS" in os.environ:
            faults = Path(os.environ["FAULTS"])
            if len(list(faults.iterdir())) >= int(os.environ["FAULTS_MOST"]):
                return
            (faults / str(os.getpid())).touch()
        raise DeviceError("the device failed: an illegal address")


def device_short(rows: Sequence[Row]) -> None:
    """Make every step take 5 ms, and one with such a request need more memory than the device has."""
    paced(rows)
    if any(row.tokens[0] == KILLER for row in rows):
        raise DeviceMemoryError("the device has no memory left: 9.00 GiB were wanted")


DEVICE: list[str] = []
"""The device that the worker was told to use, unless it is the CPU."""

MODES: dict[str, Callable[[Sequence[Row]], None]] = {
    mode.__name__: mode
    for mode in (
        dies,
        stops,
        takes_long,
        computes_long,
        raises,
        paced,
        slow_prompts,
        held,
        warns,
        short,
        tight,
        small,
        wedges,
        device_fails,
        device_short,
    )
}


def main() -> int:
    mode = sys.argv.pop(1)
    if mode == "nonsense":
        os.write(int(sys.argv[1]), b"\x00\x00\x00\x03abc")
        time.sleep(60)

    if mode in ("tight", "small"):
        load = load_engine.load_engine

        def fewer(config: Config, folder: Path, expected: int, blocks: tuple[int, ...], *more: Any) -> Any:
            if blocks:
                raise ModelError("it needs 2 GB of memory, 1 GB are free")
            return load(config, folder, expected, (40,) if mode == "small" else (), *more)

        load_engine.load_engine = fewer

    if mode == "device_fails":
        loads = load_engine.load_engine

        def noted(config: Config, folder: Path, expected: int, blocks: tuple[int, ...], *more: Any) -> Any:
            DEVICE.extend([config.device] if config.device != "cpu" else [])
            if DEVICE and os.path.exists(os.environ.get("GONE", "/nowhere")):
                raise NoDevice("device cuda:0 cannot be used: torch finds no GPU")
            return loads(config, folder, expected, blocks, *more)

        load_engine.load_engine = noted

    if mode == "wedges":
        plan = Scheduler.plan

        def stuck(self: Scheduler) -> Any:
            return None if any(sequence.tokens[0] == KILLER for sequence in self._sequences.values()) else plan(self)

        Scheduler.plan = stuck  # type: ignore[method-assign]
        worker.BEAT_SECONDS = 0.25  # how often it reports that nothing has arrived

    if mode == "short":
        memory.memory_available = lambda *_: 0  # type: ignore[attr-defined]

    def prefill(self: FakeEngine, rows: Sequence[Row]) -> Any:
        MODES[mode](rows)
        return PREFILL(self, rows)

    FakeEngine.prefill = prefill  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
