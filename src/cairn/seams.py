"""Time and chance, injectable. The scheduler and the KV cache reach the outside world through these and nothing else.

Each seam has a real implementation here and a simulated one in the tests, so that time, chance and failure can be
replayed from a seed.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since 1970; may jump."""
        ...


class Rng(Protocol):
    """Chance."""

    def bits64(self) -> int:
        """An unpredictable number in [0, 2**63)."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def time_ns(self) -> int:
        """Wall clock."""
        return time.time_ns()


class SystemRng:
    """The operating system's generator."""

    def bits64(self) -> int:
        """From `secrets`."""
        return secrets.randbits(63)
