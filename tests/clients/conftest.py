"""Fixtures for tests of other makers' clients: a server with a scripted model, and silenced libraries."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import warnings
from collections.abc import Iterator

import pytest

from tests.clients.stage import FACTS, NODE, SAID, Prompter, calling, stage


@pytest.fixture(scope="session")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prompter]:
    """Yield a server whose model calls `weather` if it is offered tools, then says SAID; without tools it answers in
    JSON.
    """
    answers = [calling("weather", {"city": "Oslo"}), [SAID]]
    with stage(tmp_path_factory.mktemp("sdks"), answers, [json.dumps(FACTS)], natural=True) as prompter:
        yield prompter


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ignore libraries' own warnings, and keep them from using proxies and sending telemetry."""
    for name, value in (("OPENAI_API_KEY", "none"), ("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("NO_PROXY", "*")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        asyncio.set_event_loop(None)  # an event loop that a library left open must not disturb later tests
        gc.collect()


@pytest.fixture
def node() -> None:
    """Skip the test if Vercel's AI SDK is not installed."""
    if shutil.which("node") is None or not all((NODE / name).is_dir() for name in ("ai", "@ai-sdk/openai-compatible")):
        pytest.skip("the AI SDK is not installed: make clients")
