"""Marks of contexts: what stores were told is sent again to the worker that replaces a dead one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cairn.frontend.sent_marks import Mark, SentMarks
from cairn.frontend.service import Service
from tests.service.tiny import config, until


def mark(tokens: list[int], standing: Any = "waiting", keep: int = 0, salt: bytes = b"") -> Mark:
    return Mark(tokens, salt, standing, keep)


def told(marks: SentMarks) -> list[tuple[int, str, int]]:
    return [(len(one.tokens), one.standing, one.keep) for one in marks]


def test_needed_marks_are_kept_in_order_and_bounded() -> None:
    first, other = [1] * 100, [2] * 100
    marks = SentMarks(most=400)
    marks.add(mark(other, "idle"))
    assert told(marks) == [], "idle is the default"
    marks.add(mark(first))
    marks.add(mark([*first, 7, 8], "idle"))
    marks.add(mark(other, "superseded", 64))
    assert told(marks) == [(100, "waiting", 0), (102, "idle", 0), (100, "superseded", 64)]
    marks.add(mark(first, "superseded", 10))
    assert told(marks)[-1] == (100, "superseded", 10) and len(told(marks)) == 3
    marks.add(mark([3] * 150))
    assert told(marks) == [(100, "superseded", 64), (100, "superseded", 10), (150, "waiting", 0)]


def test_erased_content_is_not_kept() -> None:
    first = [1] * 100
    marks = SentMarks()
    for one in (mark([*first, 5]), mark([*first[:70], 6]), mark([*first, 5], salt=b"b")):
        marks.add(one)
    marks.forget([*first, 9], b"", 100)
    marks.forget([], b"", 0)
    assert len(told(marks)) == 3, "no mark reaches beyond"
    marks.forget(first, b"", 80)
    assert told(marks) == [(71, "waiting", 0), (101, "waiting", 0)]
    marks.forget(first, b"", 0)
    assert [one.salt for one in marks] == [b"b"]


async def test_the_next_worker_gets_the_marks_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await Service.start(config(folder, kv_dir=str(tmp_path / "kv")))
    try:
        await service.mark([1, 2, 3] * 40, b"", "waiting")
        await service.mark([4, 5, 6] * 40, b"", "superseded", keep=64)
        await service.mark([7, 5, 6] * 40, b"", "superseded")
        await service.evict([7, 5, 6] * 40, disk=True)
        asked, ask = list[tuple[str, int]](), service._supervisor.ask

        async def noted(what: Any, **more: Any) -> Any:
            answer = await ask(what, **more)
            asked.append((more["standing"], more["keep"]))
            return answer

        monkeypatch.setattr(service._supervisor, "ask", noted)
        pid = service.stats().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(asked) == 2)
        assert asked == [("waiting", 0), ("superseded", 64)]
    finally:
        await service.close()
