"""What the tests of other makers' clients share: a server whose model plays a part, and quiet."""

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
    """Its model calls `weather` where it is offered tools, then says SAID; without tools it answers in JSON."""
    answers = [calling("weather", {"city": "Oslo"}), [SAID]]
    with stage(tmp_path_factory.mktemp("sdks"), answers, [json.dumps(FACTS)], natural=True) as found:
        yield found


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What libraries warn of is theirs; and none of them is to look for a proxy, or to tell anybody anything."""
    for name, value in (("OPENAI_API_KEY", "none"), ("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("NO_PROXY", "*")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        asyncio.set_event_loop(None)  # one that a library left open is of no use, and no later test's business
        gc.collect()


@pytest.fixture
def node() -> None:
    """The test is skipped where Vercel's AI SDK is not installed."""
    if shutil.which("node") is None or not all((NODE / name).is_dir() for name in ("ai", "@ai-sdk/openai-compatible")):
        pytest.skip("the AI SDK is not installed: make clients")
