"""Agents, the server that has them, and a client of it, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from cairn.api.http.auth import salts
from cairn.config.config import Config
from tests.agents.house import House, house
from tests.api.sockets import events, site


@contextlib.asynccontextmanager
async def home(folder: Path, **options: Any) -> AsyncIterator[tuple[House, httpx.AsyncClient]]:
    config = Config(**options)
    async with house(folder, salts(config)) as at, site(at.service, config) as web, web.http() as http:
        web.app.attribution.agents = at.agents
        at.web = web  # type: ignore[attr-defined]
        yield at, http


def plain(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the ids of resumable ones are passed over."""
    lines = [line for line in text.split("\n") if not line.startswith("id: ")]
    found = events("\n".join(lines))
    assert found.pop() == "[DONE]"
    return found
