"""The agents' day: all servers get the same day, and its figures are those that the servers report."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.frontend.service import Service
from tests.api.sockets import site

AGENTS, TURNS = 3, 4
TINY = (AGENTS, TURNS, 600, 50, 200)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("agents_day")


class InThread:
    """The fake engine behind a real socket, in a thread; it stores nothing when it is killed."""

    def __init__(self, home: Path) -> None:
        self.config = Config(engine="fake", kv_gb=0.01)
        self.starts = self.kills = 0
        self.start()

    def start(self) -> None:
        assert self.kills == self.starts, "it was killed before it is started again"
        self.start_seconds = 1.0
        self.starts += 1
        ready: Future[str] = Future()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self.thread.start()
        self.base = ready.result(60)

    async def _serve(self, ready: Future[str]) -> None:
        self.loop, self.told = asyncio.get_running_loop(), asyncio.Event()
        try:
            service = await Service.start(self.config, in_process=True)
        except BaseException as error:
            ready.set_exception(error)
            return
        try:
            async with site(service, self.config) as at:
                ready.set_result(at.url)
                await self.told.wait()
        finally:
            await service.close()

    def kill(self) -> None:
        if self.thread.is_alive():
            self.kills += 1
            self.loop.call_soon_threadsafe(self.told.set)
            self.thread.join()


def test_a_tiny_day_is_played_to_its_end(script: Any, tmp_path: Path) -> None:
    """Before the kill only new tokens are computed; after it, also those that the server had not stored."""
    servers: list[InThread] = []

    def start(home: Path) -> InThread:
        servers.append(InThread(home))
        return servers[-1]

    day = script.drawn(1, *TINY)
    result = script.play({"cairn": start}, day, script.MODES, 1, 5)
    assert [(server.starts, server.kills) for server in servers] == [(2, 2)] * 2
    assert not any(server.thread.is_alive() for server in servers)
    half = AGENTS * TURNS // 2
    for one in result["days"]:
        before, after = one["halves"]
        assert (before["turns"], after["turns"]) == (half, half)
        assert before["completion"] == after["completion"] == half * 5
        assert 0 < before["new"] < before["prompt"] and 0 < one["instruction"] < before["prompt"] / half
        # Incomplete blocks are not kept, and what precedes the instruction counts as new.
        assert abs(before["computed"] - before["new"]) < 16 * half
        assert after["new"] < after["computed"] - one["instruction"]
    assert result["answers"] == {"cairn": {"equal": 12, "of": 12, "days": 2}}
    assert len({one["answers"] for one in result["days"]}) == 1

    about = {"machine": {"cpu": "C", "threads": 2, "load": 0.1}, "model": "m", "rounds": 1, "load_after": 0.2}
    about |= {"agents": AGENTS, "turns": TURNS, "instruction": 600, "output": [50, 200], "answer": 5}
    script.write_json(tmp_path / "agents-day.json", about | result)
    page = importlib.import_module("report").page(tmp_path, "by hand")
    computed, new = (result["days"][0]["halves"][0][key] for key in ("computed", "new"))
    assert f"| {computed:,} / {new:,} |" in page and "| 12 of 12 |" in page


def test_the_chart_is_drawn(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    half = {"seconds": 3.0, "computed": 20, "new": 18, "first": 0.5}
    days = [
        {"server": name, "mode": mode, "killed": True, "first_p50": 0.1, "halves": [half, half | {"computed": told}]}
        for mode in script.MODES
        for name, told in (("cairn", 22), ("other", None))
    ]
    script.draw_day({"days": days, "answers": {"cairn": {}, "other": {}}}, tmp_path / "day.png")
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")


def test_sides_change_over_within_a_day_and_between_days(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    def play(side: Any) -> None:
        played.append(side.name)
        said = f"{side.mode if side.name == 'b' else ''}{len(side.halves)}"
        side.agents[0].answers.append(said)
        side.halves.append((0.0, 1.0, [turn(script, 0, 10, 0)]))

    monkeypatch.setattr(script.Side, "play", play)
    running = {name: lambda home: script.Running("http://x") for name in "ab"}
    result = script.play(running, script.Day("", (("x", "y"),), (0, 0)), script.MODES, 2, 5)
    assert "".join(played) == "abbabaababbabaab"
    assert [day["server"] for day in result["days"]] == list("baabbaab")
    assert (result["answers"]["a"]["equal"], result["answers"]["b"]["equal"], result["answers"]["b"]["days"]) == (
        2,
        0,
        4,
    )


def test_a_day_follows_from_its_seed_and_has_its_sizes(script: Any) -> None:
    day = script.drawn(7, 8, 10, 5000, 300, 1800)
    assert (
        day == script.drawn(7, 8, 10, 5000, 300, 1800) and day.digest == script.drawn(7, 8, 10, 5000, 300, 1800).digest
    )
    assert day.digest != script.drawn(8, 8, 10, 5000, 300, 1800).digest
    assert sorted(day.order) == sorted(list(range(8)) * 10) and list(day.order) != sorted(day.order)
    assert sum(day.halves, ()) == day.order and len(day.halves[0]) == 40
    assert len(day.instruction.partition("\n\n")[2]) == 5000
    sizes = [len(text.partition("\n\n")[2]) for outputs in day.outputs for text in outputs]
    assert len(sizes) == 80 and min(sizes) >= 300 and max(sizes) <= 1800 and len(set(sizes)) > 40


def turn(script: Any, agent: int, prompt: int, before: int, cached: int | None = 0, first: float = 1.0) -> Any:
    return script.Turn(agent, first, 2 * first, prompt, 5, cached, before)


def test_new_tokens_count_the_instruction_once_and_no_answer_twice(script: Any) -> None:
    day = script.Day("text", (("a", "b"), ("c", "d")), (1, 0, 1, 0))
    side = script.Side("s", script.Running("http://x/v1"), day, "one at a time", 5, [], instruction=100)
    first = [turn(script, 1, 120, 0, 0, 9.0), turn(script, 0, 130, 0, 96, 3.0)]
    second = [turn(script, 1, 150, 124, 112, 2.0), turn(script, 0, 160, 134, 128, 4.0)]
    side.halves = [(0.0, 5.0, first), (0.0, 6.0, second)]
    before, after = side.found["halves"]
    assert (before["new"], before["computed"]) == (120 + 30, 120 + 34)
    assert (after["new"], after["computed"]) == (26 + 26, 38 + 32)
    assert (before["first"], after["first"], side.found["killed"]) == (9.0, 2.0, False)
    side.mode = "all at once"
    side.halves[1] = (0.0, 6.0, second[::-1])
    assert side.found["halves"][1]["first"] == 3.0, "the median of all agents that were asked at once"
    side.halves[1] = (0.0, 6.0, [turn(script, 1, 150, 124, None), second[1]])
    assert side.found["halves"][1]["computed"] is None, "an unreported figure is not zero"


def test_servers_are_those_of_the_options(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--llama-server",
        "/l",
        "--server",
        "other=run --all {model}",
        "--url",
        "far=http://h:1/v1",
        "--agents",
        "4",
    ]
    result = script.servers(script.parsed(words), Path("m.gguf"))
    assert list(result) == ["cairn", "llama-server", "other", "far"]
    assert result["far"](Path()).base == "http://h:1"
    assert list(script.servers(script.parsed(["--without-cairn"]), Path("m.gguf"))) == []
    with pytest.raises(SystemExit):
        script.parsed(["--url", "http://h:1"])
    assert "is not NAME=VALUE" in capsys.readouterr().err


def test_a_command_gets_the_model_and_the_name(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.setattr(script, "Server", lambda *given: started.append(given))
    words = ["--llama-server", "/l", "--server", "other=run --all {model}", "--ready", "/up", "--agents", "4"]
    for start in script.servers(script.parsed([*words, "--serve=--kv-gb=1"]), Path("m.gguf")).values():
        start(tmp_path)
    (_, ours, *_), (_, llama, *_), (name, other, ready, *_) = started
    assert ours[:2] == [sys.executable, "-c"] and "m.gguf" in ours and ours[-1] == "--kv-gb=1"
    assert " ".join(llama).endswith("-np 4 -c 32768")
    assert (name, other, ready) == ("other", ["run", "--all", "m.gguf"], "/up")


def test_without_the_wheel_another_file_must_be_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="make models"):
        script.smollm2()
