"""Progress reports while a model is loaded."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.models.hub import digests
from cairn.models.hub.digests import tell, watched
from cairn.models.packing import packed_file
from cairn.worker import loading
from cairn.worker.loading import LoadProgress
from tests.tiny_models import KERNELS, MODELS, load, write_model


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def time_ns(self) -> int:
        return 0


def test_a_terminal_shows_a_line_that_changes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cairn")
    clock, screen = Hand(), Screen()
    shown = LoadProgress("m", screen, clock)
    shown("checking the files", 1, 4)
    assert screen.getvalue() == "", "a short load says nothing"
    for at, done in ((102.0, 1), (102.1, 2), (102.5, 3)):
        clock.at = at
        shown("checking the files", done, 4)
    shown.end()
    lines = screen.getvalue().split("\r\x1b[K")
    assert [" ".join(line.replace("━", "").split()) for line in lines] == [
        "",
        "Loading: checking the files 25% 2 s",
        "Loading: checking the files 75% 2 s",
        "",
    ]
    assert "\x1b[?25l" not in screen.getvalue() and not caplog.messages


def test_without_a_terminal_there_is_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock, out = Hand(), io.StringIO()
    for level in (logging.INFO, logging.WARNING):
        caplog.set_level(level, "cairn")
        clock.at = 100.0
        shown = LoadProgress("org/m", out, clock)
        for _ in range(12):
            clock.at += 1
            shown("packing the weights", 30, 40)
        shown.end()
    assert caplog.messages == [
        "loading org/m for 5 s: packing the weights, 75 %",
        "loading org/m for 10 s: packing the weights, 75 %",
    ]
    assert out.getvalue() == ""


def test_a_screen_that_is_gone_or_knows_no_such_sign_ends_no_load(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cairn")

    class Gone(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Hand()
    shown = LoadProgress("m", Gone(), clock)
    for _ in range(5):
        clock.at += 10
        shown("x", 1, 2)
    shown.end()


@pytest.mark.skipif(KERNELS == ["reference"], reason="only the native kernels pack")
def test_a_load_reports_its_phase_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "KEPT_FROM", 0)
    monkeypatch.setattr(digests, "REMEMBER_FROM", 0)
    model = write_model(tmp_path / "model", **MODELS["llama with biases, tied"])
    for doing in ("packing the weights", "reading the packed weights"):
        results: dict[str, list[tuple[int, int]]] = {}
        with watched(lambda what, done, total, told=results: told.setdefault(what, []).append((done, total))):
            load(model).close()
        assert doing in results
        for steps in results.values():
            assert all(0 <= done <= total for done, total in steps)
        dones = [done for done, _ in results[doing]]
        assert dones == sorted(dones) and dones[-1] > 0
        digests._hashed.clear()
        (tmp_path / "cache" / "cairn" / "digests.json").unlink()
    assert "checking the files" in results
    tell("nobody", 1, 2)  # no listener is left


def test_a_servers_worker_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Seen:
        def __init__(self, model: str, out: Any, clock: Any) -> None:
            seen.append(model)

        def __call__(self, *step: Any) -> None:
            seen.append(step)

        def end(self) -> None:
            seen.append("end")

    def failing(channel: Any, load: Any) -> None:
        tell("packing the weights", 1, 2)
        raise MemoryError

    monkeypatch.setattr(loading, "LoadProgress", Seen)
    monkeypatch.setattr(loading, "load", failing)
    with pytest.raises(MemoryError):
        loading.load_visibly(None, SimpleNamespace(config=SimpleNamespace(model="org/m")))  # type: ignore[arg-type]
    assert seen == ["org/m", ("packing the weights", 1, 2), "end"]
