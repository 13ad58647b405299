"""One tiny model folder for all tests of agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.house import talking_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("models") / "tiny")
