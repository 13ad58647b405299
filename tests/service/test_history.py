from __future__ import annotations

from cairn.frontend.request_state import RequestStatus
from cairn.frontend.request_table import KEEP_CHARACTERS, KEEP_REQUESTS, KEEP_SECONDS, History


def ended(id: int, text: str = "") -> RequestStatus:
    return RequestStatus(id=id, state="finished", prompt_tokens=1, completion_tokens=1, text=text)


def test_requests_that_ended_are_forgotten_at_each_bound() -> None:
    history = History()
    for id in range(KEEP_REQUESTS + 1):
        history.add(ended(id), 0.0)
    assert history.get(0) is None and history.get(1) is not None
    history.add(ended(-1), KEEP_SECONDS)
    assert history.get(KEEP_REQUESTS) is None and history.get(-1) is not None
    half = "x" * (KEEP_CHARACTERS // 2)
    for id in (-2, -3, -4):
        history.add(ended(id, half), KEEP_SECONDS)
    assert history.get(-2) is None and history.get(-3) is not None and history.get(-4) is not None
