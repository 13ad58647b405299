"""Choice of who answers `cairn chat` and `cairn run`: this machine's server, or a model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cairn.cli.common.options import server
from cairn.cli.common.output import talk
from cairn.cli.common.sampling import AnswerSource, source
from cairn.cli.models import facts
from cairn.config.option import local_options, options
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError, InvalidRequest

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client

_LOOK = 2.0
"""Seconds to wait for a server on this machine to answer a health check; one that does not is ignored."""
LOADING = "loading"
_AGAIN = 0.2
"""Seconds between two checks of a server that is loading its model."""


class Reached(NamedTuple):
    """A source of answers, and what the terminal shows of it."""

    source: AnswerSource
    name: str
    """The server's address, or the model's name."""
    model: str
    """The model in this process; "" if a server answers."""
    asked: str = ""
    """The name to ask for the same model again."""
    context: int | None = None
    """Tokens of its context; None if not known."""
    describe: Callable[[], list[tuple[str, str]]] = list
    """Facts about the model, as names and values."""


@contextmanager
def answers(
    resolved: Resolved,
    host: str | None,
    local: bool,
    fetch: Callable[[str], None] | None = None,
    keepalive: str | None = None,
) -> Iterator[Reached]:
    """Yield the source of answers: a server, or a model in this process.

    It is the server at `host`; else the server at the configured port, if it has the requested model; else a model in
    this process, which `fetch` may download first. With `local`, or a flag that a running server cannot apply, it is
    always a model in this process. `keepalive`: how long a server keeps the model, as Ollama writes it; ConfigError
    if no server answers.
    """
    if local and host is not None:
        raise ConfigError("--local loads a model in this process; --host names a server")
    _check_keepalive(keepalive)
    if host is not None:
        with source(resolved, host) as found:
            client = cast("Client", found)
            _names(client)  # fails now if no server answers, not at the first question
            yield _reached(client, host, keepalive)
        return
    running = None if local or _flags(resolved) else _running(resolved)
    if running is not None:
        with server(resolved, running.url, running.model) as client:
            yield _reached(client, running.url, keepalive)
        return
    if keepalive is not None:
        raise ConfigError("--keepalive is for a server; a model in this process ends with the command")
    model = resolved.config.model
    if fetch is not None:
        fetch(model)
    with ExitStack() as opened:
        with talk().status("loading the model"):
            found = opened.enter_context(source(resolved, None))
        yield Reached(found, model, model, model, context_of(model, resolved.config.context), lambda: facts(model))


def _check_keepalive(keepalive: str | None) -> None:
    """Raise ConfigError for a time that a server cannot read: one of a single model does not look at it."""
    if keepalive is None:
        return
    from cairn.api.chat.model_choice import seconds_of

    try:
        seconds_of(keepalive)
    except InvalidRequest:
        raise ConfigError(
            f"--keepalive is {keepalive!r} but must be a number of seconds, or a duration such as 10m or 1h30m"
        ) from None


def _reached(client: Client, name: str, keepalive: str | None) -> Reached:
    """Return the server as a source, with what it reports of its model."""
    model = client.model()
    if keepalive is not None:
        client.post("/api/generate", {"model": model, "keep_alive": keepalive, "stream": False})
    found: dict[str, Any] = next((one for one in client.get("/v1/models")["data"] if one["id"] == model), {})

    def describe() -> list[tuple[str, str]]:
        known = {"model": model, "server": client.url, "context": f"{found.get('max_model_len')} tokens"}
        return list(known.items())

    context = found.get("max_model_len")
    return Reached(client, name, "", model, int(context) if context else None, describe)


def context_of(model: str, option: int | None) -> int | None:
    """Return the tokens of a local model's context; None if its files cannot be read."""
    from cairn.models.hub import hub
    from cairn.models.spec.config import load_spec

    try:
        made_for = load_spec(hub.locate(model), identify=False).context
    except CairnError:
        return None
    return min(made_for, option or made_for)


class _Server(NamedTuple):
    url: str
    model: str


def _flags(resolved: Resolved) -> list[str]:
    """Return the flags that were set and apply only to a model in this process."""
    return [
        option.flag
        for option in options()
        if option.name in local_options() and option.name != "model" and resolved.source(option.name) == option.flag
    ]


def _running(resolved: Resolved) -> _Server | None:
    """Return the server at the configured port if it has the model, else None; say on stderr which it is."""
    from cairn.cli.connection.client import address

    url = address(resolved.config)
    if not resolved.config.port or not (state := state_of(url, resolved.config.tls_cert)):
        return None
    if state == LOADING:
        with talk().status(f"waiting for the server at {url} to load its model"):
            while state == LOADING:
                time.sleep(_AGAIN)
                state = state_of(url, resolved.config.tls_cert)
    try:
        with server(resolved, url) as client:
            names = _names(client)
    except CairnError as error:
        _say(f"A server runs at {url}, but {error}. Loading a model here.")
        return None
    name = _meant(resolved, names)
    if name is None:
        _say(f"The server at {url} has {', '.join(names)}, not {resolved.config.model}; loading it here.")
        return None
    _say(f"The server at {url} answers, with {name}; --local loads a model here instead.")
    return _Server(url, name)


def state_of(url: str, certificate: str | None = None) -> str:
    """Return "ready", "loading", or "" if no Cairn server answers. `certificate`: the file to trust over https."""
    import httpx

    from cairn.cli.connection.trust import tls_context

    verify = tls_context(url, certificate)
    try:
        found = httpx.get(f"{url}/health/ready", timeout=_LOOK, trust_env=False, verify=verify).json()
        reasons = found["reasons"]
        return LOADING if any("being loaded" in str(one) for one in reasons) else "ready"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, RecursionError):
        return ""


def _names(client: Client) -> list[str]:
    """Return the names of a server's models; the first is the one to talk to."""
    from cairn.cli.connection.client import first_chat

    models = client.get("/v1/models")["data"]
    first = str(first_chat(models)["id"]) if models else ""
    return sorted((str(one["id"]) for one in models), key=lambda name: name != first)


def _meant(resolved: Resolved, names: list[str]) -> str | None:
    """Return the server's name of the requested model, or of its first if none was requested; None if it lacks it."""
    if resolved.source("model") == "default":
        return names[0] if names else None
    from cairn.models.hub import hub

    wanted = [resolved.config.model, resolved.config.served_name]
    with suppress(CairnError):
        wanted.append(hub.model_name(hub.locate(resolved.config.model)))
    return next((name for name in names if name in wanted), None)


def _say(text: str) -> None:
    talk().print(text, style="dim", markup=False, soft_wrap=True)
