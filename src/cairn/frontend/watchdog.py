"""Whether a worker gets on: judged by what it says it has done, and by the CPU that it uses, never by time alone.

A worker sends a sign of life every second (`Beat`, with its CPU time) and a frame each step (`StepOutputs`, with a
count of what got further). So there are four ways not to get on, and each has a patience of its own:

- silence: no sign of life, although it has work. The process hangs, or is stopped.
- a step that stands still: signs of life, no step, and no CPU used. It waits for something that does not come.
- a step that has no end: it computes, but for longer than any step can take.
- steps without progress: the loop turns, requests wait, and nothing of any gets further. It is a bug of ours.

A long step that computes is none of them, nor is a loop that waits for a disk and says what has come. `stalled` says
what the health route tells after `Patience.notice` seconds, `overdue` what the worker is killed for.
"""

from __future__ import annotations

from dataclasses import dataclass

from cairn.system.interfaces import Clock
from cairn.worker import wire

_COMPUTING = 0.1
"""CPU seconds that show that a step computes; the pulse alone uses far less."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may stay silent, in seconds, and how soon another takes its place."""

    load: float = 60.0
    """Without a sign of life while it loads (one is sent every second)."""
    silence: float = 6.0
    """Without a sign of life while it has work: a request, or a question to answer."""
    notice: float = 15.0
    """Without progress, after which the server says of itself that it is stalled."""
    stall: float = 120.0
    """How long one step may take without using the CPU: a step may take long, but not by waiting. While an answer
    waits for a disk the worker steps, and says so every second. Also how long steps may bring nothing further."""
    step: float = 1800.0
    """How long one step may take at all."""
    restarts: int = 8
    """Deaths in a row without progress before the requests in flight end. Another worker is tried all the same."""
    backoff: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
    """Pause before each restart in such a row; the last holds for all further ones, for ever."""


class Watchdog:
    """What was last heard of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.heard_at = self.stepped_at = self._computed_at = self._progressed_at = clock.now()
        """When anything came, and when a step did."""
        self._cpu = 0.0
        self._progress = -1
        self._left = 0
        """Requests that it had at its last step."""

    def rest(self) -> None:
        """Forget how long it has been silent: it had nothing to do, or nobody could have heard it."""
        self.heard_at = self.stepped_at = self._computed_at = self._progressed_at = self._clock.now()

    def heard(self) -> None:
        """Something came."""
        self.heard_at = self._clock.now()

    def beat(self, cpu: float) -> None:
        """A sign of life came, with the CPU seconds that were used so far."""
        if cpu - self._cpu > _COMPUTING:
            self._cpu, self._computed_at = cpu, self.heard_at

    def stepped(self, stats: wire.Stats | None = None) -> None:
        """A message other than a sign of life came; `stats`: those of a step."""
        self.stepped_at = self.heard_at
        if stats is None or stats.progress != self._progress or not stats.running + stats.waiting:
            self._progressed_at = self.heard_at
        if stats is not None:
            self._progress, self._left = stats.progress, stats.running + stats.waiting

    @property
    def _still(self) -> float:
        """Seconds since a step ended or computed."""
        return self._clock.now() - max(self.stepped_at, self._computed_at)

    @property
    def _fruitless(self) -> float:
        """Seconds of steps that brought nothing further."""
        return self.stepped_at - self._progressed_at

    @property
    def seconds(self) -> float:
        """How long it has made no progress; a step that computes makes some."""
        return max(self._still, self._fruitless)

    def loading(self, patience: Patience) -> str:
        """Why a worker that loads has to be taken for dead; empty if it is well."""
        silent = self._clock.now() - self.heard_at > patience.load
        return f"no sign of life for {patience.load:g} s while loading" if silent else ""

    def overdue(self, patience: Patience) -> str:
        """The same of one that has loaded and has work."""
        now = self._clock.now()
        if now - self.heard_at > patience.silence:
            return f"no sign of life for {patience.silence:g} s"
        if self._still > patience.stall:
            return f"a step stood still for {patience.stall:g} s"
        if self._fruitless > patience.stall:
            return f"steps brought none of {self._left} requests further for {patience.stall:g} s"
        if now - self.stepped_at > patience.step:
            return f"a step took more than {patience.step:g} s"
        return ""

    def stalled(self, patience: Patience) -> str:
        """What is to be told of a worker that has work and does not get on; empty where it does."""
        if self._still > patience.notice:
            return f"a step of the worker has stood still for {self._still:.0f} s"
        if self._fruitless > patience.notice:
            return f"the worker has brought none of {self._left} requests further for {self._fruitless:.0f} s"
        return ""
