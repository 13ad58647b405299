"""Agents, a server of them and a client of it, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from cairn.api.app import App
from cairn.api.http.auth import salts
from cairn.config.config import Config
from cairn.config.values import ModelOptions
from cairn.frontend.service import Service
from cairn.served_models.loaded_models import Models
from cairn.served_models.served_model import ServedModel
from tests.agents.house import House, house
from tests.api.sockets import Site, events, site
from tests.service import tiny

NAMES = ("any", "m")
"""Model names where the name does not matter."""


@contextlib.asynccontextmanager
async def open_house(folder: Path, **options: Any) -> AsyncIterator[tuple[House, Site, httpx.AsyncClient]]:
    """Yield agents, their server and a client of it."""
    config = Config(**options)
    async with house(folder, salts(config)) as at, site(at.service, config) as web, web.http() as http:
        web.app.state.attribution.agents = at.agents
        yield at, web, http


@contextlib.asynccontextmanager
async def home(
    folder: Path, embedder: Path | None = None, **options: Any
) -> AsyncIterator[tuple[House, httpx.AsyncClient]]:
    """Yield agents and a client of their server; `embedder` adds a model for embeddings, which collections need."""
    async with open_house(folder, **options) as (at, web, http):
        at.web = web  # type: ignore[attr-defined]
        async with contextlib.nullcontext() if embedder is None else embedding(web.app, at.service, embedder):
            yield at, http


@contextlib.asynccontextmanager
async def embedding(app: App, service: Service, folder: Path) -> AsyncIterator[None]:
    """Add a model for embeddings to an application; every model name still means the other model."""
    made = await Service.start(tiny.config(folder), in_process=True)
    try:
        listed = (ModelOptions(model="chats"), ModelOptions(model="embeds", name="embeds"))
        models = Models(app.state.config, [ServedModel(app.state.config, one) for one in listed])
        for model, each in zip(models.models, (service, made), strict=True):
            models.loader.loaded(model, each, None)
        models.models[0].own_names |= frozenset(NAMES)
        models.rename()
        app.state.open(models)
        yield
    finally:
        await made.close()


def plain(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream without comments and without the ids of resumable streams."""
    lines = [line for line in text.split("\n") if not line.startswith("id: ")]
    chunks = events("\n".join(lines))
    assert chunks.pop() == "[DONE]"
    return chunks
