"""Loading and unloading LoRA adapters of a running server, in llama-server's and in vLLM's form.

GET  /lora-adapters                              the adapters of the first model, or of ?model=
POST /lora-adapters            [{"id", "scale"}]        scales of requests that name the model alone
POST /v1/load_lora_adapter     {"lora_name", "lora_path", "model"}
POST /v1/unload_lora_adapter   {"lora_name", "model"}
"""

from __future__ import annotations

from typing import Any, ClassVar

from cairn.api.admin.models import check_name, check_owner
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import Body, Several, read_json, read_list
from cairn.api.http.call import HTTPCall, query
from cairn.api.http.routes import Route
from cairn.frontend.adapter_services import ServedAdapter, ServedAdapters
from cairn.frontend.service import Service
from cairn.served_models.served_model import ServedModel
from cairn.types.errors import InvalidRequest


class ScaleBody(Body):
    """The scale of one adapter."""

    id: int
    scale: float


class ScalesBody(Body):
    """POST /lora-adapters, whose body may be the list alone."""

    within: ClassVar = {"adapters": ScaleBody}

    adapters: Several[ScaleBody]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """A PEFT folder or a .gguf file on the server's machine."""
    model: str | None = None
    """The base; by default the first model."""


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    model: str | None = None


class AdapterAdmin:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/lora-adapters", self.list, access="admin"),
            Route("POST", "/lora-adapters", self.scale, ScalesBody, access="admin"),
            Route("POST", "/v1/load_lora_adapter", self.load, LoadAdapterBody, access="admin"),
            Route("POST", "/v1/unload_lora_adapter", self.unload, UnloadAdapterBody, access="admin"),
        ]

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List a loaded model's adapters."""
        model = self._find(next((value for name, value in query(call) if name == "model" and value), None))
        found = () if model.loaded is None else model.loaded.adapters
        await call.json([_shown(model, one) for one in found])

    async def scale(self, call: HTTPCall, service: Service) -> None:
        """Set the scales of requests that name the model and no adapter. Adapters that are not listed get 0."""
        check_owner(self._state.config)
        body = parse(ScalesBody, await read_list(call, self._state.config, "adapters"), self._state.config, call)
        scales = {one.id: one.scale for one in body.adapters}
        if len(scales) < len(body.adapters):
            raise InvalidRequest("an adapter is listed twice", field="id")
        async with self._state.registry.using(model := self._find(None)):
            _adapters(model).set_scales(scales)
        await call.json({"success": True})

    async def load(self, call: HTTPCall, service: Service) -> None:
        """Load an adapter while requests run."""
        check_owner(self._state.config)
        body = parse(LoadAdapterBody, await read_json(call, self._state.config), self._state.config, call)
        check_name(body.lora_path, "lora_path")
        async with self._state.registry.using(model := self._find(body.model)):
            adapter = await _adapters(model).load(body.lora_name, body.lora_path)
        await call.json(_shown(model, adapter) | {"object": "adapter", "success": True})

    async def unload(self, call: HTTPCall, service: Service) -> None:
        """Unload an adapter. Requests with it may go on for a while."""
        check_owner(self._state.config)
        body = parse(UnloadAdapterBody, await read_json(call, self._state.config), self._state.config, call)
        async with self._state.registry.using(model := self._find(body.model)):
            await _adapters(model).unload(body.lora_name)
        await call.json({"name": body.lora_name, "object": "adapter", "success": True})

    def _find(self, name: str | None) -> ServedModel:
        """Return the base that a call names, or the first model."""
        registry = self._state.registry
        if name is None:
            return registry.find(None)
        check_name(name, "model")
        if not registry.has(name):
            raise registry.unknown(name)
        return registry.find(name)


def _adapters(model: ServedModel) -> ServedAdapters:
    assert model.loaded is not None, "the call has a lease"
    return model.loaded.adapters


def _shown(model: ServedModel, adapter: ServedAdapter) -> dict[str, Any]:
    return {
        "id": adapter.id,
        "path": adapter.path,
        "scale": adapter.scale,
        "name": adapter.name,
        "model": f"{model.name}:{adapter.name}",
        "digest": adapter.digest.hex(),
        "rank": adapter.facts.rank,
        "matrices": adapter.facts.matrices,
        "memory_bytes": adapter.facts.memory,
    }
