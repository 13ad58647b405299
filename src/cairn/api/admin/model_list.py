"""GET /v1/models: the models that are served, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

import datetime
import time
from typing import Any

from cairn.api.chat.generation import check_model
from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.frontend.service import Service
from cairn.served_models.served_model import LoadedModel, ServedModel

ANTHROPIC = b"anthropic-version"
"""Header of Anthropic's clients, which expect their own shape."""
MODALITIES = ["text"]
"""Input types of the models here."""


class ModelList:
    """The list of models, and one of them."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{id:*}", self.model),
        ]

    async def models(self, call: HTTPCall, service: Service) -> None:
        """List the models that are served."""
        anthropic = call.header(ANTHROPIC) is not None
        data = [self._shown(model, anthropic) for model in self._state.registry.models]
        for model in self._state.registry.models:
            shown = self._shown(model, anthropic)
            for adapter in sorted(model.adapter_names):
                data.append(_as_adapted(shown, f"{model.name}:{adapter}", anthropic=anthropic))
        if anthropic:
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            await call.json({"data": data, "has_more": False, **ends})
            return
        await call.json({"object": "list", "data": data})

    async def model(self, call: HTTPCall, service: Service) -> None:
        """Return one model. Its id may hold slashes."""
        name = call.path.removeprefix("/v1/models/")
        registry, anthropic = self._state.registry, call.header(ANTHROPIC) is not None
        if (base := registry.adapted(name)) is not None and not registry.has(name):
            own = f"{base.name}:{name.rpartition(':')[2]}"
            await call.json(_as_adapted(self._shown(base, anthropic), own, anthropic=anthropic))
            return
        if not registry.several:
            check_model(name, service, strict=True)
        await call.json(self._shown(registry.find(name), anthropic))

    def _shown(self, model: ServedModel, anthropic: bool) -> dict[str, Any]:
        """Return a model as the list shows it. What is unknown of one that was never loaded is left out, or null."""
        context = context_of(model)
        if anthropic:
            return {
                "type": "model",
                "id": model.name,
                "display_name": model.name,
                "created_at": datetime.datetime.fromtimestamp(self._started, datetime.UTC).isoformat(),
                "lifecycle": "active",
                "max_input_tokens": context,
                "max_tokens": context,
                "input_modalities": MODALITIES,
            }
        longest = model.spec.longest_text if model.spec is not None else None
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "cairn",
            "max_model_len": None if context is None else min(context, longest or context),
            "input_modalities": MODALITIES,
            "kind": model.kind or None,
            "state": model.state,
            "status": {"value": _STATUS[model.state]},
            **({"aliases": list(model.config.alias)} if model.config.alias else {}),
            **({"memory_bytes": model.held} if model.held else {}),
            **({"device": _device(model.loaded)} if model.loaded is not None else {}),
            **({"error": model.failure} if model.state == "failed" else {}),
        }


_STATUS = {
    "loaded": "loaded",
    "loading": "loading",
    "unloading": "loading",
    "on disk": "unloaded",
    "failed": "failed",
}
"""llama-server's names of a model's states."""


def _device(loaded: LoadedModel) -> dict[str, str]:
    """Return the device that computes a model, by name and in words."""
    info = loaded.service.info
    return {"name": info.device, "description": info.device_text}


def context_of(model: ServedModel) -> int | None:
    """Return the longest context that a model serves, or would; None if its files were not read yet."""
    if model.loaded is not None:
        return model.loaded.service.info.context
    return None if model.spec is None else min(model.spec.context, model.config.context or model.spec.context)


def _as_adapted(shown: dict[str, Any], name: str, *, anthropic: bool) -> dict[str, Any]:
    """Return a model's entry as that of the model with an adapter."""
    if anthropic:
        return shown | {"id": name, "display_name": name}
    return {key: value for key, value in shown.items() if key != "aliases"} | {"id": name, "parent": shown["id"]}
