"""Figures that harness tests report: printed after every run, kept in docs/reliability.md by `make prove`."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Taken away, not only read: for the servers that tests start, an unknown CAIRN_* variable is an error.
PROVE = os.environ.pop("CAIRN_PROVE", "") == "1"
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
MARK = "<!-- figures -->"

# The same examples every time, so that a failure is about a change; `make prove` looks for new ones.
settings.register_profile("cairn", deadline=None, derandomize=not PROVE)
settings.load_profile("cairn")

_figures = pytest.StashKey[list[tuple[str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_figures] = []


@pytest.fixture(scope="session")
def prove() -> bool:
    """Whether to run the full figures (`make prove`) instead of about a tenth (`make test`)."""
    return PROVE


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`figure("planted bugs caught", "40 of 40")` adds a line to the table of measured figures."""

    def add(what: str, value: str) -> None:
        request.config.stash[_figures].append((what, value))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    rows = config.stash[_figures]
    if not rows:
        return
    terminalreporter.section("figures")
    for what, value in rows:
        terminalreporter.write_line(f"{what}: {value}")
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if PROVE and whole and exitstatus == 0:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        table = [f"Measured at {commit.stdout.strip()} on {os.cpu_count()} cores ({platform.machine()}).", ""]
        table += ["| harness | result |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
        head = PAGE.read_text().split(MARK)[0]
        PAGE.write_text(head + MARK + "\n" + "\n".join(table) + "\n")
