"""The measures by which a long run is judged: memory, descriptors and threads over time, and latencies."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

WARM = 0.25
"""The share of a run that warms up: tables fill and pools are touched for the first time."""
MOST_SLOPE = 5.0
"""Highest allowed growth of memory, in per cent an hour."""
NOISE = 4 << 20
"""Bytes by which memory may vary at any time; a short run cannot tell less than that."""
JUDGED = 600.0
"""Least seconds of a run whose slopes are judged: a shorter one mostly fills tables and pools."""
FILLING = 32 << 20
"""Bytes that the front's tables may take in a shorter run."""
SETTLED = 20.0
"""Seconds that a worker takes to fill its pool."""
FEW = 4
"""Descriptors and threads that may be added by the end, for connections and pool threads made on demand."""
ENOUGH = 90
"""Least number of latencies for a trend: with fewer, chance decides."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Use(NamedTuple):
    """Resources of a process."""

    rss: int
    fds: int
    threads: int


class Sample(NamedTuple):
    """The state of a server at one time."""

    at: float
    front: Use
    workers: dict[int, Use]

    @property
    def rss(self) -> int:
        """Resident bytes of all processes."""
        return self.front.rss + sum(worker.rss for worker in self.workers.values())


class Row(NamedTuple):
    """A row of the table; `fault` says what is wrong with it, if anything."""

    what: str
    value: str
    fault: str = ""


def use_of(pid: int) -> Use:
    """Return what a process uses now. Raise OSError if it has ended."""
    place = Path(f"/proc/{pid}")
    rss = int((place / "statm").read_text().split()[1]) * PAGE
    return Use(rss, len(os.listdir(place / "fd")), len(os.listdir(place / "task")))


def sampled(at: float, front: int, workers: Sequence[int]) -> Sample:
    """Sample the server now; workers that end meanwhile are left out."""
    uses = {}
    for pid in workers:
        with contextlib.suppress(OSError):
            uses[pid] = use_of(pid)
    return Sample(at, use_of(front), uses)


def percentiles(seconds: Sequence[float]) -> str:
    """Return p50, p95 and p99 in milliseconds."""
    if not seconds:
        return "none"
    values = np.percentile(np.array(seconds), (50, 95, 99)) * 1000
    return " / ".join(f"{one:.0f}" for one in values) + f" ms of {len(seconds):,}"


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope per second of the best-fitting line through medians of pieces (robust against single values)."""
    if len(times) < 8:
        return 0.0
    pieces = np.array_split(np.arange(len(times)), min(12, len(times) // 2))
    at = [statistics.median(times[i] for i in piece) for piece in pieces]
    of = [statistics.median(values[i] for i in piece) for piece in pieces]
    return float(np.polyfit(at, of, 1)[0])


def memory_row(name: str, times: Sequence[float], values: Sequence[float], noise: float) -> Row:
    """Return how memory grew; a fault if faster than `MOST_SLOPE` and by more than `noise`."""
    if not values:
        return Row(name, "no samples", "nothing was measured")
    middle, each = statistics.median(values), slope(times, values)
    hourly, grown = 100 * each * 3600 / middle, each * (times[-1] - times[0])
    fault = f"grows by {hourly:.1f} % an hour" if hourly > MOST_SLOPE and grown > noise else ""
    return Row(name, f"{middle / 2**20:.0f} MiB, {hourly:+.1f} % an hour ({grown / 2**20:+.1f} MiB in all)", fault)


def count_row(name: str, times: Sequence[float], values: Sequence[int]) -> Row:
    """Return the counts of the first and the last third, and the growth per hour."""
    third = max(1, len(values) // 3)
    first, last = (statistics.median(part) for part in (values[:third], values[-third:])) if values else (0.0, 0.0)
    fault = f"grew from {first:g} to {last:g}" if last > first + FEW else ""
    return Row(name, f"{first:g} to {last:g}, {3600 * slope(times, values):+.1f} an hour", fault)


def _born(samples: Sequence[Sample]) -> dict[int, float]:
    """Return when each worker was first seen."""
    born: dict[int, float] = {}
    for sample in samples:
        for pid in sample.workers:
            born.setdefault(pid, sample.at)
    return born


def _settled(samples: Sequence[Sample]) -> list[Sample]:
    """Return comparable samples: with the usual number of workers, and none so young that its pool is still filling."""
    born = _born(samples)
    old = [sample for sample in samples if all(sample.at - born[pid] >= SETTLED for pid in sample.workers)]
    usual = statistics.mode([len(one.workers) for one in old]) if old else 0
    return [one for one in old if len(one.workers) == usual]


def use_rows(samples: Sequence[Sample]) -> list[Row]:
    """Return rows on memory, descriptors and threads after the warm-up."""
    end = samples[-1].at if samples else 0.0
    warm = [sample for sample in samples if sample.at >= WARM * end]
    times = [one.at for one in warm]
    front = [float(one.front.rss) for one in warm]
    rows = [memory_row("memory of the front", times, front, NOISE if end >= JUDGED else FILLING)]
    settled = _settled(warm)
    total = [float(one.rss) for one in settled]
    # In a short run the filling pools would be all that shows.
    noise = 0.03 * statistics.median(total) if total and end >= JUDGED else float("inf")
    usual = len(settled[0].workers) if settled else 0
    if total or end >= JUDGED:
        rows.append(memory_row(f"memory of all, with {usual} workers", [one.at for one in settled], total, noise))
    rows.append(count_row("descriptors of the front", times, [one.front.fds for one in warm]))
    rows.append(count_row("threads of the front", times, [one.front.threads for one in warm]))
    born = _born(samples)
    for kind in ("fds", "threads"):
        worst = 0
        for pid in {pid for one in warm for pid in one.workers}:
            old = [one for one in warm if pid in one.workers and one.at - born[pid] >= SETTLED]
            life = [getattr(one.workers[pid], kind) for one in old]
            third = len(life) // 3
            if third > 3:
                worst = max(worst, round(statistics.median(life[-third:]) - statistics.median(life[:third])))
        name = "descriptors" if kind == "fds" else "threads"
        rows.append(Row(f"{name} of a worker, most growth", f"{worst:+d}", "grew" if worst > FEW else ""))
    return rows


def pace_row(name: str, done: Sequence[tuple[float, float]]) -> Row:
    """Return latency percentiles of (start, seconds) pairs, with a fault if they rose towards the end."""
    if not done:
        return Row(name, "none", "none was done")
    end = max(at for at, _ in done)
    warm = [pair for pair in done if pair[0] >= WARM * end]
    third = max(1, len(warm) // 3)
    first, last = (statistics.median(one for _, one in part) for part in (warm[:third], warm[-third:]))
    slower = len(warm) >= ENOUGH and end >= JUDGED and last > 2 * first + 0.25
    fault = f"the median rose from {first * 1000:.0f} to {last * 1000:.0f} ms" if slower else ""
    return Row(name, f"{percentiles([one for _, one in warm])}; median {first * 1000:.0f} to {last * 1000:.0f}", fault)
