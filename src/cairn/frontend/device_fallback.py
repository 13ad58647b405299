"""The device of the next worker after a device failed: the same again, after a second failure the CPU."""

from __future__ import annotations

import logging
import math

import msgspec

from cairn.system.interfaces import Clock
from cairn.worker import wire

log = logging.getLogger(__name__)

CPU = "cpu"
TOGETHER = 3600.0
"""Seconds within which a second failure of a device moves the model to the CPU."""


class DeviceFallback:
    """Counts the failures of one model's device."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed_at = -math.inf
        self._device = ""
        self.sentence = ""
        """Why the CPU computes instead of the device that was asked for; empty while it does not."""

    def failed(self, why: str) -> str:
        """Record that a step on the device failed, or that a new worker did not find the device.

        Returns a sentence for the answers that have begun if the CPU computes the rest of them from now on.
        """
        if self._device in (CPU, "auto"):  # of several ranks one died, and there is nothing to go on with but ranks
            return ""
        now, moved = self._clock.now(), ""
        if now - self._failed_at < TOGETHER and not self.sentence:
            self.sentence = (
                f"the device {self._device} failed twice ({why}); the CPU computes until the server is restarted: "
                "answers that had begun go on with its numbers"
            )
            log.error("%s", self.sentence)
            moved = f"the device {self._device} failed twice; the CPU computed the rest of this answer"
        self._failed_at = now
        return moved

    def load(self, load: wire.LoadModel) -> wire.LoadModel:
        """Return the load for the next worker: the same, or on the CPU with a pool sized for its memory."""
        self._device = load.config.device
        if not self.sentence:
            return load
        config = msgspec.structs.replace(load.config, device=CPU, tp=1, cpu_experts="auto")  # it computes them all
        return msgspec.structs.replace(load, config=config, blocks=())

    def explain(self, ready: wire.ModelReady) -> wire.ModelReady:
        """Return the message of a worker that has loaded, with the sentence among its troubles."""
        if not self.sentence:
            return ready
        both = f"{self.sentence}; {ready.trouble}" if ready.trouble else self.sentence
        return msgspec.structs.replace(ready, trouble=both)
