"""One tiny model folder for all tests of several models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.tiny import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")
