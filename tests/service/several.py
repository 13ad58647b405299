"""Folders of several models, each with weights of its own, and a server of them on the fake engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cairn.config.config import Config
from cairn.config.values import ModelOptions
from cairn.served_models.loaded_models import Models
from tests.service.tiny import make_model


def make_models(folder: Path, names: str) -> list[Path]:
    """Make a model folder for each name, below this one."""
    made = []
    for number, name in enumerate(names.split()):
        place = make_model(folder / name)
        save_file({"model.norm.weight": np.full(16, 1.0 + number, dtype=np.float32)}, place / "model.safetensors")
        made.append(place)
    return made


@contextlib.asynccontextmanager
async def several(folder: Path, names: str, **options: Any) -> AsyncIterator[Models]:
    """Yield the models of these names in one server;

    `load` names those that are loaded at the start, else the first.
    """
    starting = options.pop("load", names.split()[0]).split()
    pinned = options.pop("pin", "").split()
    free = options.pop("free", lambda: 8 << 30)
    listed = tuple(
        ModelOptions(model=str(place), load=place.name in starting, pin=place.name in pinned)
        for place in make_models(folder, names)
    )
    config = Config(**{"models": listed, "engine": "fake", "kv_gb": 0.01, "kv_disk": False, **options})
    models = Models(config, in_process=True, free=free)
    try:
        await models.start()
        yield models
    finally:
        await models.close()
