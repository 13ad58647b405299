"""Options and fixtures of all tests; the table of figures that harness tests report.

The figures are printed after every run, and `make prove` keeps them in docs/reliability.md.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: its kernels then need no GPU

ROOT = Path(__file__).parent.parent
QUICK_SECONDS = 40.0
"""Seconds after which `--quick` begins no more tests; `make quick` takes a minute in all, with the code checks."""
PAGE = ROOT / "docs" / "reliability.md"
MARK = "<!-- figures -->"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="the full figures (make prove), not a fortieth to a tenth")
    parser.addoption("--quick", action="store_true", help="units of folders that differ from main (make quick)")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, which everything that tests start would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time, so that a failure is about a change; `make prove` looks for new ones.
    settings.register_profile("cairn", deadline=None, derandomize=not config.option.prove)
    settings.load_profile("cairn")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # these objects live until the end; searching them in every collection takes half a second


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect most tests marked `sweep`, unless `make prove` runs.

    `sweep("kernels")` marks a test that runs every case on every kernel set; the mark names that parameter, alone or
    before others. Each case runs on the default kernels and on one other, in turn, so every case runs twice, and every
    kernel set keeps several cases.
    """
    if config.option.prove or not any(item.get_closest_marker("sweep") for item in items):
        return
    from tests.tiny_models import KERNELS  # without sweeps no kernels need to be imported

    turns: dict[tuple[str, str], dict[str, int]] = {}

    def taken(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("sweep")
        if mark is None or len(KERNELS) == 1 or not isinstance(item, pytest.Function):
            return True
        (swept,) = mark.args
        kind, *rest = given if isinstance(given := item.callspec.params[swept], tuple) else (given,)
        case = repr([(name, value) for name, value in sorted(item.callspec.params.items()) if name != swept])
        known = turns.setdefault((str(item.path), item.originalname), {})
        turn = known.setdefault(case, len(known))
        others = KERNELS[1:]
        if kind == KERNELS[0]:
            return True
        return kind == others[turn % len(others)] and (not rest or rest[0] == ("f32", "bf16")[turn // len(others) % 2])

    left = {id(item) for item in items if not taken(item)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore, under --quick, folders without changes and files that start servers."""
    if not config.option.quick or collection_path.is_dir():
        return None
    if collection_path.parent in _touched_folders():
        return "tests.api.process" in collection_path.read_text(encoding="utf-8") or None
    return True


@functools.cache
def _touched_folders() -> set[Path]:
    """Return the test folders of all files that differ from main, or on main from the last commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    base = git("merge-base", "HEAD", "main").strip()
    if not base or base == git("rev-parse", "HEAD").strip():
        base = "HEAD~1"
    changed = git("diff", "--name-only", base).split() + git("ls-files", "--others", "--exclude-standard").split()
    parts = [Path(name).parent.parts for name in changed]
    folders = {ROOT.joinpath("tests", *part[2:]) for part in parts if part[:2] == ("src", "cairn")}
    return folders | {ROOT.joinpath(*part) for part in parts if part[:1] == ("tests",)}


BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.quick and time.monotonic() - BEGAN > QUICK_SECONDS:
        pytest.skip(f"{QUICK_SECONDS:.0f} s are over: make test runs it")


@pytest.fixture(scope="session")
def prove(pytestconfig: pytest.Config) -> bool:
    """Return whether to run all cases instead of a fortieth to a tenth of them."""
    return bool(pytestconfig.option.prove)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that adds a figure: `figure("planted bugs caught", "40 of 40")`."""

    def add(name: str, value: str) -> None:
        request.node.user_properties.append((name, value))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # one of several pytest processes, which has seen a part
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    tests = sorted(
        (report for report in reports if getattr(report, "when", "") == "call"),
        key=lambda test_report: test_report.nodeid,
    )
    rows = [row for test in tests for row in test.user_properties]
    if not rows:
        return
    terminalreporter.section("figures")
    for name, value in rows:
        terminalreporter.write_line(f"{name}: {value}")
    some = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf")
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(map(config.getoption, some))
    if config.option.prove and whole and exitstatus == 0:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        table = [f"Measured at {commit.stdout.strip()} on {os.cpu_count()} cores ({platform.machine()}).", ""]
        table += ["| harness | result |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        head = PAGE.read_text().split(MARK)[0]
        PAGE.write_text(head + MARK + "\n" + "\n".join(table) + "\n")
