"""Health routes, which answer at any time, also while the model loads.

All but /version need no key, so nothing there names a folder or what anybody asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cairn import __version__
from cairn.api.http.call import JSON, HTTPCall, encode
from cairn.api.http.not_found import no_route
from cairn.api.http.routes import Endpoint, Route
from cairn.frontend.service import SHUTTING_DOWN
from cairn.served_models import model_health
from cairn.served_models.loaded_models import Models

LOADING = "the model is still being loaded"
LOADING_RETRY = 2
"""Seconds after which to ask again while the model loads."""


class ServerHealth:
    """The state of the server at the time of the call."""

    def __init__(
        self,
        models: Models | None,
        draining: bool,
        more: Sequence[str] = (),
        folders: Sequence[str] = (),
        role: str = "both",
        *,
        refuses: bool = False,
    ) -> None:
        """Judge the server.

        `more`: troubles beside the models' own. `folders` are not named to clients; the log names them. `refuses`: some
        requests are refused for those troubles.
        """
        self.models, self.loading = models, models is None
        self.role = role
        reasons = [LOADING] if models is None else model_health.unready(models)
        if draining and SHUTTING_DOWN not in reasons:
            reasons = [*reasons, SHUTTING_DOWN]
        troubles = [*(model_health.troubles(models) if models is not None else ()), *more]
        for folder in folders:
            troubles = [trouble.replace(folder, "its folder") for trouble in troubles]
        self.reasons = reasons
        """Why new requests would not be served well now."""
        self.troubles = troubles
        """Troubles that do not make the server refuse new requests."""
        self.devices = model_health.devices(models) if models is not None else []
        """Names of the devices that compute the loaded models."""
        self.cpu_experts = model_health.cpu_experts(models) if models is not None else []
        """Names of models whose experts the CPU computes beside them."""
        self.stalled = models is not None and model_health.stalled(models)
        """Whether there is work and nothing of it gets further."""
        unwell = models is not None and models.several and bool(model_health.troubles(models))
        self.partly = unwell or refuses
        """Whether requests are served, but not all: one of several models is not well, or the disk refuses turns."""


def routes(*, page: bool) -> list[Route]:
    """Return the table of these routes. `page`: whether / is the page's, which answers clients of Ollama too."""
    paths: dict[str, Endpoint] = {
        **({} if page else {"/": root}),
        "/health": health,
        "/v1/health": health,
        "/health/live": live,
        "/health/ready": ready,
        "/health/startup": startup,
        "/health/role": role,
        "/livez": live,
        "/readyz": ready,
    }
    found = [Route("GET", path, endpoint, access="open", always=True) for path, endpoint in paths.items()]
    return [*found, Route("GET", "/version", version, always=True)]


async def root(call: HTTPCall, state: ServerHealth) -> None:
    """Answer as Ollama does, by which its clients know a server.

    A browser gets a 404, since the page is switched off.
    """
    if b"text/html" in (call.header(b"accept") or b""):
        host = (call.header(b"host") or b"").decode("latin-1")
        raise no_route(call.path, host, lambda path: False)
    await call.respond(200, b"Ollama is running", [(b"content-type", b"text/plain; charset=utf-8")])


async def health(call: HTTPCall, state: ServerHealth) -> None:
    """Return 200 with status ok, or 503 while the model loads or new requests would be served badly.

    `degraded` says that they would be served badly, `stalled` that a worker has work and makes no progress; `reasons`
    say why. If only a part is not served, the status is `degraded` with code 200, and `troubles` say why: one of
    several models is not well, or turns are refused because the disk is full.

    `devices` names those that compute the loaded models: the CPU after another one failed twice. `cpu_experts`, where
    there are any, names the models whose experts the CPU computes beside a device.

    `status`, and `error` beside it, are what clients of llama-server read.
    """
    facts: dict[str, object] = {"troubles": state.troubles, "devices": state.devices}
    if state.cpu_experts:
        facts["cpu_experts"] = state.cpu_experts
    if not state.reasons:
        status = "degraded" if state.partly else "ok"
        await call.json({"status": status, "reasons": []} | facts)
        return
    message = "Loading model" if state.loading else "; ".join(state.reasons)
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    status = "loading model" if state.loading else "stalled" if state.stalled else "degraded"
    await _unavailable(call, {"status": status, "reasons": state.reasons} | facts | {"error": error})


async def live(call: HTTPCall, state: ServerHealth) -> None:
    """Return 200: the process answers."""
    await call.json({"status": "live"})


async def ready(call: HTTPCall, state: ServerHealth) -> None:
    """Return 200, or 503 with the reasons. `troubles` fail no requests."""
    body = {"status": "not ready" if state.reasons else "ready", "reasons": state.reasons, "troubles": state.troubles}
    await (_unavailable(call, body) if state.reasons else call.json(body))


async def role(call: HTTPCall, state: ServerHealth) -> None:
    """Return what this server does in a cluster, how fast it computes prompts and loads their KV, and its queue.

    `shares`: whether it can load KV that other servers stored.
    """
    computes, loads, queue = None, None, 0.0
    if state.models is not None:
        (computes, loads), queue = model_health.speeds(state.models), model_health.queue_seconds(state.models)
    shares = state.models is not None and model_health.shares(state.models)
    facts = {"computes": computes, "loads": loads, "queue_seconds": queue, "shares": shares}
    await call.json({"role": state.role} | facts)


async def startup(call: HTTPCall, state: ServerHealth) -> None:
    """Return 503 until the model is loaded for the first time, 200 ever after."""
    if state.loading:
        await _unavailable(call, {"status": "starting", "reasons": [LOADING]})
    else:
        await call.json({"status": "started"})


async def version(call: HTTPCall, state: ServerHealth) -> None:
    """Return the version of this server."""
    await call.json({"version": __version__})


async def _unavailable(call: HTTPCall, body: Mapping[str, object]) -> None:
    await call.respond(503, encode(body), [JSON, (b"retry-after", b"%d" % LOADING_RETRY)])
