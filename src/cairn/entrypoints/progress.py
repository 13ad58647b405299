"""The progress bar of a batch: answers, tokens per second, time left."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock

if TYPE_CHECKING:
    from rich.progress import Progress


class BatchProgress:
    """A progress bar on stderr for `total` answers. `shown`: None shows it on a terminal or in a notebook."""

    def __init__(self, total: int, shown: bool | None, clock: Clock | None = None) -> None:
        self._shown = _is_watched() and total > 1 if shown is None else shown
        self._total = total
        self._clock = clock or SystemClock()
        self._began = self._clock.now()
        self._tokens = 0
        self._bar: Progress | None = None

    def __enter__(self) -> BatchProgress:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
            # Rich's notebook output needs ipywidgets; notebooks show its terminal output as well.
            console = Console(stderr=True, force_jupyter=False, force_terminal=_in_notebook() or None)
            self._bar = Progress(BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn(), console=console)
            self._bar.add_task("", total=self._total, speed=0.0)
            self._bar.start()
        return self

    def tokens(self, count: int) -> None:
        """Count new tokens of any answer."""
        self._tokens += count
        if self._bar is not None:
            seconds = max(self._clock.now() - self._began, 1e-9)
            self._bar.update(self._bar.task_ids[0], speed=self._tokens / seconds)

    def answered(self) -> None:
        """Count a finished answer."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _is_watched() -> bool:
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
