"""Ollama's other routes: the models that are served, and downloads on the server's machine.

Shapes: github.com/ollama/ollama, docs/api.md. Routes that change downloads are for the server's owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from cairn import __version__
from cairn.api.admin.model_list import MODALITIES
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.auth import has_keys, is_local
from cairn.api.http.body import read_plain
from cairn.api.http.call import HTTPCall, Watch, encode, internal, shown
from cairn.api.http.routes import Route
from cairn.api.ollama.chat import LATEST, LINES
from cairn.api.ollama.schemas import CopyBody, NameBody
from cairn.frontend.sampling_defaults import sampling_defaults
from cairn.frontend.service import Service
from cairn.models.files import is_gguf
from cairn.models.hub import hub
from cairn.models.hub.addresses import known
from cairn.models.hub.removal import plan, remove
from cairn.models.hub.snapshots import Progress
from cairn.served_models.served_model import ServedModel
from cairn.types.errors import (
    CairnError,
    Cancelled,
    Conflict,
    Forbidden,
    InvalidRequest,
    ModelError,
    Overloaded,
    UnknownModel,
)
from cairn.types.model_spec import ModelSpec

log = logging.getLogger("cairn.api")


SPEAKS = "0.14.0"
"""The version of Ollama whose API this is. Clients require at least 0.6.4 (Copilot), 0.13.4 (codex)."""
DECADE = 10 * 365 * 86_400.0
"""Seconds; clients read dates of the next centuries badly."""
FOREVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""
PULLS = 2
"""Models that may be downloaded at a time."""
_LOOK = 0.25
"""Seconds between two lines about a download."""


class _Facts(NamedTuple):
    """The constant facts of a served model."""

    size: int
    modified: str
    details: dict[str, Any]
    parameters: int


class OllamaModels:
    """The routes of models."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._config = state, state.config
        self._facts: dict[str, _Facts] = {}
        """By the place of a model's files."""
        self._pulling = 0

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/api/tags", self.tags),
            Route("GET", "/api/ps", self.ps),
            Route("GET", "/api/version", self.version),
            Route("POST", "/api/show", self.show, NameBody),
            Route("POST", "/api/pull", self.pull, NameBody, access="admin"),
            Route("DELETE", "/api/delete", self.delete, NameBody, access="admin"),
            Route("POST", "/api/copy", self.copy, CopyBody),
        ]

    async def version(self, call: HTTPCall, service: Service) -> None:
        """Return the version of Ollama whose API this is."""
        await call.json({"version": SPEAKS, "cairn": __version__})

    async def tags(self, call: HTTPCall, service: Service) -> None:
        """List all models that can be asked for."""
        shown = []
        for model in self._state.registry.models:
            if (facts := await self._known(model)) is not None:
                shown.append(_model(model, facts) | {"modified_at": facts.modified})
                for adapter in sorted(model.adapter_names):
                    name = f"{model.name}:{adapter}"
                    shown.append(shown[-1] | {"name": name, "model": name})
        await call.json({"models": shown})

    async def ps(self, call: HTTPCall, service: Service) -> None:
        """List the loaded models, and when they are unloaded if nobody asks for them."""
        shown = []
        for model, loaded in self._state.registry.loaded():
            if (facts := await self._known(model)) is not None:
                expires = self._state.registry.expires_in(model)
                at = (
                    FOREVER
                    if expires == math.inf
                    else _iso(datetime.now(UTC) + timedelta(seconds=min(expires, DECADE)))
                )
                more = {"expires_at": at, "size_vram": 0, "context_length": loaded.service.info.context}
                shown.append(_model(model, facts) | more)
        await call.json({"models": shown})

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a model. Its context length is the served one: clients fill all of it."""
        body = parse(NameBody, await read_plain(call, self._config), self._config, call)
        name = self._state.registry.canonical(body.model)
        if not self._is_served(name) and (self._state.registry.several or service.strict):
            raise self._unknown(body.model)
        model = self._state.registry.find(name)
        facts = await self._known(model)
        if model.loaded is None or facts is None:
            await call.json(_show_of_files(model, facts))
            return
        service = model.loaded.service
        defaults = sampling_defaults(service.spec, thinking=service.chat.thinks)
        said = {name: applied for name, applied in defaults.items() if applied.source != "default"}
        await call.json(
            {
                "license": "",
                "modelfile": f"FROM {service.name}\n",
                "parameters": "\n".join(f"{name:<30} {applied.value:g}" for name, applied in said.items()),
                "template": service.chat.template,
                "details": facts.details,
                "model_info": _info(service.spec, service.name, service.info.context, facts),
                "capabilities": _capabilities(model),
                "input_modalities": MODALITIES,
                "modified_at": facts.modified,
            }
        )

    async def pull(self, call: HTTPCall, service: Service) -> None:
        """Download a model for a later start of a server. This server keeps its model."""
        body = parse(NameBody, await read_plain(call, self._config), self._config, call)
        self._check_owner()
        model = body.model.removesuffix(LATEST)
        served = self._is_served(model)
        if not served and model != hub.DEMO and known(model) is None:
            _is_name(model)
        lines = _Lines(call, stream=body.stream is not False)
        if not served:
            if self._pulling >= PULLS:
                raise Overloaded(f"{PULLS} models are being downloaded already; wait for them", retry_after=60.0)
            self._pulling += 1
            try:
                async with Watch(call) as watch:
                    await self._pull(model, lines)
                    watch.stop()
            finally:
                self._pulling -= 1
            if watch.left:
                call.ended = "client_left"
                return
        await lines.end()

    async def _pull(self, model: str, lines: _Lines) -> None:
        await lines.say({"status": "pulling manifest"})
        pulling = _Pull(model)
        task = asyncio.ensure_future(asyncio.to_thread(pulling.run))
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK))[0]:
                if (line := pulling.line()) is not None:
                    await lines.say(line)
            task.result()
        except CairnError as error:
            await lines.fail(error)
        except Exception:
            await lines.fail(internal(lines.id))
            raise
        else:
            await lines.say({"status": "verifying sha256 digest"})
        finally:
            pulling.left.set()

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a download that is not served."""
        body = parse(NameBody, await read_plain(call, self._config), self._config, call)
        self._check_owner()
        model = body.model.removesuffix(LATEST)
        if self._is_served(model):
            raise Conflict(f"{shown(model)} is being served; end this server before its model is removed")
        try:
            await asyncio.to_thread(_remove, model, [one.config.model for one in self._state.registry.models])
        except ModelError as error:
            raise UnknownModel(str(error), field="model") from None
        await call.respond(200, b"", [])

    async def copy(self, call: HTTPCall, service: Service) -> None:
        """Give a model another name. Only names that it has since the server's start are accepted."""
        body = parse(CopyBody, await read_plain(call, self._config), self._config, call)
        if not self._is_served(body.source):
            raise self._unknown(body.source)
        if not self._is_served(body.destination):
            raise InvalidRequest(
                f"a model is called by its place: cairn serve --alias {shown(body.destination)} gives it that name too",
                field="destination",
            )
        await call.respond(200, b"", [])

    def _check_owner(self) -> None:
        """Raise Forbidden if anybody from elsewhere could fill or empty the disk."""
        config = self._state.registry.config  # as it holds now
        if not has_keys(config) and not is_local(config.host):
            raise Forbidden("downloads are changed over HTTP only by the admin key, or on this machine alone")

    def _is_served(self, name: str) -> bool:
        registry = self._state.registry
        return registry.has(registry.canonical(name)) or registry.adapted(name) is not None

    def _unknown(self, name: str) -> UnknownModel:
        error = self._state.registry.unknown(name)
        return UnknownModel(
            str(error).replace("there is no model", "model").replace("; this", " not found; this", 1), field="model"
        )

    async def _known(self, model: ServedModel) -> _Facts | None:
        """Return what a model's files say; None if they cannot be read."""
        if model.spec is None:
            return None
        place = str(model.place or model.config.model)
        if place not in self._facts:
            try:
                self._facts[place] = await asyncio.to_thread(_facts, place, model.spec)
            except ModelError as error:  # it is listed all the same
                log.warning("%s: its files cannot be read: %s", model.name, error)
                self._facts[place] = _Facts(0, _iso(datetime.now(UTC)), {}, 0)
        return self._facts[place]


class _Lines:
    """Lines of a stream, or their last one alone."""

    def __init__(self, call: HTTPCall, *, stream: bool) -> None:
        self.id = call.id
        self._call, self._stream = call, stream

    async def say(self, line: dict[str, Any]) -> None:
        """Send one more line."""
        if not self._stream:
            return
        if not self._call.started:
            await self._call.begin(LINES)
        await self._call.write(encode(line) + b"\n")

    async def fail(self, error: CairnError) -> None:
        """Send the error as the final line, or raise it if nothing was sent yet."""
        if not self._call.started:
            raise error
        self._call.ended = error.code
        await self._call.write(encode({"error": str(error)}) + b"\n", more=False)

    async def end(self) -> None:
        """Send the final line."""
        if self._call.ended:
            return
        await self.say({"status": "success"})
        if self._stream:
            await self._call.write(b"", more=False)
        else:
            await self._call.json({"status": "success"})


class _Pull:
    """One download, in a thread of its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._told: Progress | None = None
        self._shown: Progress | None = None
        self.left = threading.Event()
        """Set when nobody waits any more: the download ends, and the next request for it continues where it stopped."""

    def run(self) -> None:
        """Download."""
        hub.pull(self._model, progress=self._note, sleep=self._wait)

    def line(self) -> dict[str, Any] | None:
        """Return the progress since the last line; None if there is none."""
        told = self._told
        if told is None or told == self._shown:
            return None
        self._shown = told
        return {"status": f"pulling {told.file}", "digest": told.file, "total": told.total, "completed": told.done}

    def _note(self, progress: Progress) -> None:
        self._told = progress
        self._wait(0)

    def _wait(self, seconds: float) -> None:
        if self.left.wait(seconds):
            raise Cancelled(f"{self._model} was not downloaded to its end: its client left")


def _remove(model: str, served: Sequence[str]) -> None:
    """Remove a download.

    Raises ModelError if there is none, Conflict if a served model would be removed with it.
    """
    removal = plan(model)
    gone = [removal.repository] if removal.whole else removal.links
    for name in served:
        with contextlib.suppress(ModelError):  # a served model whose files are gone already cannot be removed with it
            place = hub.locate(name).absolute()
            if any(place.is_relative_to(path.absolute()) for path in gone):
                raise Conflict(f"{removal.name} is being served; end this server before its model is removed")
    remove(removal)


def _is_name(model: str) -> None:
    try:
        hub.repository_of(model)
    except ModelError as error:
        raise InvalidRequest(str(error), field="model") from None


def _facts(model: str, spec: ModelSpec) -> _Facts:
    # These import numpy, which a server's front can do without until then.
    from cairn.models.safetensors.weights import parameters
    from cairn.models.spec.config import bytes_by_format

    place = hub.locate(model)
    sizes = bytes_by_format(place, spec)
    count = parameters(spec)
    kind = "gguf" if is_gguf(place) else "safetensors"
    family = spec.architecture
    details = {
        "parent_model": "",
        "format": kind,
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": sizes.most_common(1)[0][0],
    }
    modified = _iso(datetime.fromtimestamp(place.stat().st_mtime, UTC))
    return _Facts(sizes.total(), modified, details, count)


def _iso(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _model(model: ServedModel, facts: _Facts) -> dict[str, Any]:
    """Return a model as lists show it."""
    identity = model.loaded.service.info.identity if model.loaded is not None else model.identity
    return {
        "name": model.name,
        "model": model.name,
        "size": facts.size,
        "digest": identity.hex(),
        "details": facts.details,
        "capabilities": _capabilities(model),
        "input_modalities": MODALITIES,
    }


def _show_of_files(model: ServedModel, facts: _Facts | None) -> dict[str, Any]:
    """Return what is known of a model that is not loaded."""
    spec = model.spec
    context = min(spec.context, model.config.context or spec.context) if spec is not None else 0
    return {
        "license": "",
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": "",
        "details": facts.details if facts is not None else {},
        "model_info": _info(spec, model.name, context, facts) if spec is not None and facts is not None else {},
        "capabilities": _capabilities(model),
        "input_modalities": MODALITIES,
        "modified_at": facts.modified if facts is not None else "",
    }


def _info(spec: ModelSpec, name: str, context: int, facts: _Facts) -> dict[str, Any]:
    """Return the model's shape by the names of GGUF's metadata."""
    family = spec.architecture
    shape = {
        "context_length": context,
        "embedding_length": spec.hidden,
        "block_count": spec.layers,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "rope.freq_base": spec.rope_theta,
        "vocab_size": spec.vocab,
    }
    general = {"architecture": family, "basename": name, "parameter_count": facts.parameters}
    return {f"general.{name}": value for name, value in general.items()} | {
        f"{family}.{name}": value for name, value in shape.items()
    }


def _capabilities(model: ServedModel) -> list[str]:
    """Return a model's capabilities, as far as known before it is loaded."""
    if model.loaded is None:
        return {"chat": ["completion"], "embed": ["embedding"]}.get(model.kind, [])
    service = model.loaded.service
    chat = service.chat
    if service.spec.encoder is not None:
        return ["embedding"] if service.spec.kind == "embed" else []
    has = {
        "completion": True,
        "tools": chat.calls_tools,
        "insert": service.tokenizer.middle is not None,
        "thinking": chat.thinks,
        "embedding": service.spec.kind == "embed",
    }
    return [name for name, there in has.items() if there]
