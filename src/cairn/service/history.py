"""What is remembered of requests that have ended, within bounds."""

from __future__ import annotations

from collections import OrderedDict

from cairn.service.flight import RequestStatus

KEEP_SECONDS = 600.0
KEEP_REQUESTS = 1000
KEEP_CHARACTERS = 32 << 20


class History:
    """The last requests that ended: by age, by number and by the size of their text, whichever is reached first."""

    def __init__(self) -> None:
        self._ended: OrderedDict[int, tuple[float, RequestStatus]] = OrderedDict()
        self._characters = 0

    def add(self, status: RequestStatus, now: float) -> None:
        """Remember one; the oldest make room."""
        self._ended[status.id] = (now, status)
        self._characters += len(status.text) + len(status.reasoning)
        self.forget(now)

    def get(self, id: int) -> RequestStatus | None:
        """The status at its end, if it is still remembered."""
        ended = self._ended.get(id)
        return ended[1] if ended else None

    def forget(self, now: float) -> None:
        """Drop what is beyond the bounds."""
        while self._ended:
            ended, status = next(iter(self._ended.values()))
            many = len(self._ended) > KEEP_REQUESTS or self._characters > KEEP_CHARACTERS
            if not many and now - ended < KEEP_SECONDS:
                break
            self._ended.popitem(last=False)
            self._characters -= len(status.text) + len(status.reasoning)
