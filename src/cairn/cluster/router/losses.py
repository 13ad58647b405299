"""Servers that were lost with a request in hand: a request that ends servers must not be sent to one after another.

A request is recognised by its digest, so a client that sends it again does not begin anew. One that lost `MOST_LOST`
servers is refused for a while, which doubles with each further loss and ends as soon as the request is answered.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cairn.cluster.router.replicas import Replica
from cairn.cluster.text_prefixes import KEY_HEADERS

MOST_LOST = 2
"""Servers that one request may lose before it is an error."""
REFUSED_SECONDS = 30.0
MEMORY_SECONDS = 3600.0
"""Longest time for which a request is refused, and for which its losses are remembered."""
MOST_REQUESTS = 1000
"""Requests whose losses are remembered, the newest."""


def request_digest(method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Return what recognises a request that is sent again: 16 bytes."""
    given = dict(headers)
    digest = hashlib.blake2b(digest_size=16)
    for part in (method.encode(), target, *(given.get(name, b"") for name in KEY_HEADERS)):
        digest.update(len(part).to_bytes(8, "big") + part)
    digest.update(body)
    return digest.digest()


@dataclass(slots=True)
class _Losses:
    """The losses of one request."""

    lives: set[tuple[Replica, int]] = field(default_factory=set)
    """The servers that were lost, and which of their starts it was."""
    noted: float = 0.0
    """When the last one was lost."""
    refused: float = 0.0
    """Until when it is refused."""


class RequestLosses:
    """The servers that were lost with each request in hand. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Losses] = OrderedDict()
        self._compares = 0.0

    def compares(self, now: float) -> bool:
        """Return whether some request was refused lately, so that requests must be compared with it."""
        return now < self._compares

    def note(self, digest: bytes, replica: Replica, sent: float, now: float) -> int:
        """Note that a server was lost with a request that was `sent` to it then; return how many it has lost.

        Equal requests in hand at the same time count once: when the power fails, all servers are lost with them.
        """
        losses = self._known.get(digest)
        if losses is None or now - losses.noted > MEMORY_SECONDS:
            losses = self._known[digest] = _Losses()
        self._known.move_to_end(digest)
        life = (replica, replica.starts)
        if life not in losses.lives and (sent >= losses.noted or not losses.lives):
            losses.lives.add(life)
            losses.noted = now
            if (further := len(losses.lives) - MOST_LOST) >= 0:
                losses.refused = now + min(REFUSED_SECONDS * 2 ** min(further, 16), MEMORY_SECONDS)
                self._compares = now + MEMORY_SECONDS
        if len(self._known) > MOST_REQUESTS:
            self._known.popitem(last=False)
        return len(losses.lives)

    def seconds_left(self, digest: bytes, now: float) -> float:
        """Return for how long a request is refused; 0 for one that is not."""
        losses = self._known.get(digest)
        return 0.0 if losses is None else max(0.0, losses.refused - now)

    def forget(self, digest: bytes) -> None:
        """Forget the losses of a request that was answered."""
        self._known.pop(digest, None)
