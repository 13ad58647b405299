"""Ollama's routes beside generation: the model that is served, and downloads on the server's machine.

Shapes: github.com/ollama/ollama, docs/api.md. One model is served, so one is listed. What changes downloads is for the
server's owner (`auth.ADMIN`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cairn import __version__
from cairn.api.auth import has_keys, is_local
from cairn.api.limits import read_plain
from cairn.api.ollama import LATEST, LINES
from cairn.api.ollama_schemas import CopyBody, NameBody
from cairn.api.parse import parse
from cairn.api.reply import Call, Watch, encode, internal, shown
from cairn.config import Config
from cairn.errors import (
    CairnError,
    Cancelled,
    Conflict,
    Forbidden,
    InvalidRequest,
    ModelError,
    Overloaded,
    UnknownModel,
)
from cairn.models import hub
from cairn.models.addresses import KNOWN
from cairn.models.facts import bytes_by_format
from cairn.models.files import is_gguf
from cairn.models.removal import plan, remove
from cairn.models.weights import parameters
from cairn.service.requests import sampling_defaults
from cairn.service.service import Service

Endpoint = Callable[[Call, Service], Awaitable[None]]

SPEAKS = "0.14.0"
"""The version of Ollama whose API this is. Clients ask for a least one: 0.6.4 (Copilot), 0.13.4 (codex)."""
FOREVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""
PULLS = 2
"""Models that may be downloaded at a time."""
_LOOK = 0.25
"""Seconds between two lines about a download."""


class _Facts(NamedTuple):
    """What does not change of the model that is served."""

    size: int
    modified: str
    details: dict[str, Any]
    parameters: int


class OllamaModels:
    """The routes of models."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._facts: _Facts | None = None
        self._pulling = 0

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Every route, by path and method."""
        return {
            "/api/tags": {"GET": self.tags},
            "/api/ps": {"GET": self.ps},
            "/api/version": {"GET": self.version},
            "/api/show": {"POST": self.show},
            "/api/pull": {"POST": self.pull},
            "/api/delete": {"DELETE": self.delete},
            "/api/copy": {"POST": self.copy},
        }

    async def version(self, call: Call, service: Service) -> None:
        """GET /api/version."""
        await call.json({"version": SPEAKS, "cairn": __version__})

    async def tags(self, call: Call, service: Service) -> None:
        """GET /api/tags: the model that is served."""
        facts = await self._known(service)
        await call.json({"models": [_model(service, facts) | {"modified_at": facts.modified}]})

    async def ps(self, call: Call, service: Service) -> None:
        """GET /api/ps: the same model, which is loaded."""
        facts = await self._known(service)
        loaded = {"expires_at": FOREVER, "size_vram": 0, "context_length": service.info.context}
        await call.json({"models": [_model(service, facts) | loaded]})

    async def show(self, call: Call, service: Service) -> None:
        """POST /api/show. The context length is the served one, since clients fill what they are told of."""
        body = parse(NameBody, await read_plain(call, self._config), self._config, call)
        if not _is_served(body.model, service):
            raise _unknown(body.model, service)
        facts = await self._known(service)
        said = {name: applied for name, applied in sampling_defaults(service.spec).items() if applied.source == "model"}
        await call.json(
            {
                "license": "",
                "modelfile": f"FROM {service.name}\n",
                "parameters": "\n".join(f"{name:<30} {applied.value:g}" for name, applied in said.items()),
                "template": service.chat.template,
                "details": facts.details,
                "model_info": _info(service, facts),
                "capabilities": _capabilities(service),
                "modified_at": facts.modified,
            }
        )

    async def pull(self, call: Call, service: Service) -> None:
        """POST /api/pull: a download for a server to come; this one goes on with its model."""
        body = parse(NameBody, await read_plain(call, self._config), self._config, call)
        self._check_owner()
        model = body.model.removesuffix(LATEST)
        served = _is_served(model, service)
        if not served and model != hub.DEMO and model not in KNOWN:
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
        finally:
            pulling.left.set()
        await lines.say({"status": "verifying sha256 digest"})

    async def delete(self, call: Call, service: Service) -> None:
        """DELETE /api/delete: a download goes, unless it is being served."""
        body = parse(NameBody, await read_plain(call, self._config), self._config, call)
        self._check_owner()
        model = body.model.removesuffix(LATEST)
        if _is_served(model, service):
            raise Conflict(f"{shown(model)} is being served; end this server before its model is removed")
        try:
            await asyncio.to_thread(_remove, model, self._config.model)
        except ModelError as error:
            raise UnknownModel(str(error), field="model") from None
        await call.respond(200, b"", [])

    async def copy(self, call: Call, service: Service) -> None:
        """POST /api/copy: a model has the names that its server was started with, and gets no others."""
        body = parse(CopyBody, await read_plain(call, self._config), self._config, call)
        if not _is_served(body.source, service):
            raise _unknown(body.source, service)
        if not _is_served(body.destination, service):
            raise InvalidRequest(
                f"a model is called by its place: cairn serve --alias {shown(body.destination)} gives it that name too",
                field="destination",
            )
        await call.respond(200, b"", [])

    def _check_owner(self) -> None:
        """Forbidden where anybody from elsewhere could fill or empty the disk."""
        if not has_keys(self._config) and not is_local(self._config.host):
            raise Forbidden("downloads are changed over HTTP only by the admin key, or on this machine alone")

    async def _known(self, service: Service) -> _Facts:
        if self._facts is None:
            self._facts = await asyncio.to_thread(_facts, self._config.model, service)
        return self._facts


class _Lines:
    """Lines of a stream, or their last one alone."""

    def __init__(self, call: Call, *, stream: bool) -> None:
        self.id = call.id
        self._call, self._stream = call, stream

    async def say(self, line: dict[str, Any]) -> None:
        """One more."""
        if not self._stream:
            return
        if not self._call.started:
            await self._call.begin(LINES)
        await self._call.write(encode(line) + b"\n")

    async def fail(self, error: CairnError) -> None:
        """The last one; raises it where nothing has been said."""
        if not self._call.started:
            raise error
        self._call.ended = error.code
        await self._call.write(encode({"error": str(error)}) + b"\n", more=False)

    async def end(self) -> None:
        """The last one."""
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
        self._told: hub.Progress | None = None
        self._shown: hub.Progress | None = None
        self.left = threading.Event()
        """Nobody waits for it any more: it ends, and goes on where it stopped when it is asked for again."""

    def run(self) -> None:
        """Download."""
        hub.pull(self._model, progress=self._note, sleep=self._wait)

    def line(self) -> dict[str, Any] | None:
        """What is new since the last line."""
        told = self._told
        if told is None or told == self._shown:
            return None
        self._shown = told
        return {"status": f"pulling {told.file}", "digest": told.file, "total": told.total, "completed": told.done}

    def _note(self, progress: hub.Progress) -> None:
        self._told = progress
        self._wait(0)

    def _wait(self, seconds: float) -> None:
        if self.left.wait(seconds):
            raise Cancelled(f"{self._model} was not downloaded to its end: its client left")


def _remove(model: str, served: str) -> None:
    """Remove a download. ModelError where there is none, Conflict where the model that is served would go with it."""
    removal = plan(model)
    place = hub.locate(served).absolute()
    gone = [removal.repository] if removal.whole else removal.links
    if any(place.is_relative_to(path.absolute()) for path in gone):
        raise Conflict(f"{removal.name} is being served; end this server before its model is removed")
    remove(removal)


def _is_name(model: str) -> None:
    try:
        hub.repository_of(model)
    except ModelError as error:
        raise InvalidRequest(str(error), field="model") from None


def _is_served(name: str, service: Service) -> bool:
    return name in service.names or name.removesuffix(LATEST) in service.names


def _unknown(name: str, service: Service) -> UnknownModel:
    return UnknownModel(f"model {shown(name)!r} not found; this server has: {service.name}", field="model")


def _facts(model: str, service: Service) -> _Facts:
    place = hub.locate(model)
    sizes = bytes_by_format(place, service.spec)
    count = parameters(service.spec)
    kind = "gguf" if is_gguf(place) else "safetensors"
    family = service.spec.architecture
    details = {
        "parent_model": "",
        "format": kind,
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": sizes.most_common(1)[0][0],
    }
    modified = datetime.fromtimestamp(place.stat().st_mtime, UTC).isoformat().replace("+00:00", "Z")
    return _Facts(sizes.total(), modified, details, count)


def _model(service: Service, facts: _Facts) -> dict[str, Any]:
    """A model as lists have it."""
    digest = service.info.identity.hex() if service.info.identity else ""
    return {
        "name": service.name,
        "model": service.name,
        "size": facts.size,
        "digest": digest,
        "details": facts.details,
    }


def _info(service: Service, facts: _Facts) -> dict[str, Any]:
    """By the names of GGUF's metadata."""
    spec, family = service.spec, service.spec.architecture
    shape = {
        "context_length": service.info.context,
        "embedding_length": spec.hidden,
        "block_count": spec.layers,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "rope.freq_base": spec.rope_theta,
        "vocab_size": spec.vocab,
    }
    general = {"architecture": family, "basename": service.name, "parameter_count": facts.parameters}
    return {f"general.{name}": value for name, value in general.items()} | {
        f"{family}.{name}": value for name, value in shape.items()
    }


def _capabilities(service: Service) -> list[str]:
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
