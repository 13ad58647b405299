"""A server from its first connection to its last: it loads, serves, and on a signal comes to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cairn.agents.agents import Agents
from cairn.api.app import AdminSide, App, build_app
from cairn.api.data_folders import agents_folder
from cairn.api.http.auth import has_keys, is_local, salts
from cairn.api.http.listener import Listener
from cairn.config.config import Config, turns_of
from cairn.frontend.launch import ENDING, KILL_SECONDS, First
from cairn.frontend.sampling_defaults import described
from cairn.frontend.service import Service
from cairn.frontend.supervisor import STORE_SECONDS
from cairn.models.hub.hub import DEMO
from cairn.served_models.loaded_models import Models
from cairn.served_models.served_model import ServedModel
from cairn.system.interfaces import Network
from cairn.system.posix import FACTS, SystemClock, SystemFiles, SystemNetwork, SystemRng
from cairn.system.stages import Stages, process_age
from cairn.types.errors import CairnError, ConfigError
from cairn.types.model_spec import Kind

log = logging.getLogger("cairn.api")

FLUSH_SECONDS = 2.0
"""How long clients may take to read the end of their answers once everything has ended."""
HASTY_FLUSH_SECONDS = 0.2
"""How long it may take after a second signal."""
LOG_SECONDS = 5.0
"""How long the token log's disk may hold up the end."""
CLOSE_SECONDS = STORE_SECONDS + KILL_SECONDS + 3.0
"""Longest close of a service: time to store KV and to be killed, and some spare."""
AGENTS_SECONDS = 10.0
"""Between two attempts to open the usual folder of agents."""


def run(
    config: Config,
    sock: socket.socket,
    every: list[ServedModel],
    first: First,
    admin: socket.socket | None = None,
    again: Callable[[], Config] | None = None,
) -> None:
    """Serve on a bound socket, with the first model's worker on its way, until a signal ends it.

    `admin`: the socket of a listener for admin routes. `again` reads the options once more."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, sock, every, first, admin, again))


async def _serve(
    config: Config,
    sock: socket.socket,
    every: list[ServedModel],
    first: First,
    admin: socket.socket | None = None,
    again: Callable[[], Config] | None = None,
) -> None:
    stages = Stages(SystemClock(), process_age())
    stages.end("imports")
    models = Models(config, every, turns=turns_of(config))
    app = build_app(None, config)
    app.state.options.again = again
    stop = Signals(lambda: _reload(app))
    listener = Listener(app, config, app.router.upload)
    await listener.start(sock)
    app.state.options.watch(listener.renew)
    beside = None
    if admin is not None:
        beside = Listener(AdminSide(app), config, app.router.upload)
        await beside.start(admin)
        app.state.options.watch(beside.renew)
    stages.end("routes")
    url = address(config.host, sock, tls=config.tls_cert is not None)
    _say(config, f"Cairn listens on [bold]{url}[/bold] and loads {escape(models.first.reference)} ...")
    opening: asyncio.Task[None] | None = None
    try:
        service = await _until(models.start(first), stop.first)
        if service is None:
            return
        stages.end("tokenizer and worker")
        opening = await _until(_open_agents(app, models, config), stop.first)  # its disk may hang
        if stop.first.is_set():
            return
        app.state.open(models)
        stages.end("agents")
        if config.verbose:
            log.info("start of the server, in seconds (of the processor): %s", stages.sentence())
        gc.enable()  # a command may have started without
        gc.collect()
        gc.freeze()  # modules and tables stay; a collection that looks through them all holds every stream up for 30 ms
        others = elsewhere(config, sock.getsockname()[1], SystemNetwork())
        _announce(url, others, service, config)
        if models.several:
            _say(config, "Models: " + ", ".join(escape(f"{one.name} ({one.state})") for one in models.models))
        await stop.first.wait()
        await _drain(app, models, config, stop)
    finally:
        await listener.close(HASTY_FLUSH_SECONDS if stop.second.is_set() else FLUSH_SECONDS)
        if beside is not None:
            await beside.close(0)
        if opening is not None:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        for one, seconds in ((app.state.attribution.agents, LOG_SECONDS), (models, CLOSE_SECONDS)):
            if one is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(one.close(), seconds)
        if app.tracing is not None:
            app.tracing.close()
        stop.close()


async def _open_agents(app: App, models: Models, config: Config) -> asyncio.Task[None] | None:
    """Open the agents of the application.

    If their folder is only the usual one and cannot be had, the server goes on without and reports it in its readiness;
    the returned task tries again. Raises ConfigError for a folder that was asked for.
    """

    async def attempt() -> None:
        folder = agents_folder(config, os.environ)
        services, clock, draw = models.services, SystemClock(), SystemRng()
        opened = await Agents.open(services.first, SystemFiles(), folder, clock, draw, config, salts(config), services)
        opened.exchange_usage(app.state.rates)
        app.state.attribution.opened(opened)

    async def insist() -> None:
        while app.state.attribution.agents is None:
            await asyncio.sleep(AGENTS_SECONDS)
            with contextlib.suppress(ConfigError):
                await attempt()

    try:
        await attempt()
    except ConfigError as error:
        if config.agents_dir:
            raise
        log.warning("no agents are kept: %s", error)
        app.state.attribution.missing(str(error))
        return asyncio.create_task(insist())
    return None


async def _drain(app: App, models: Models, config: Config, stop: Signals) -> None:
    app.state.draining = True
    running, grace = models.requests, app.state.config.shutdown_grace
    if running:
        _say(
            config,
            f"Finishing {running} requests, at most {grace:g} s; a second signal ends them now.",
        )
    await _until(models.drain(grace), stop.second)
    if stop.second.is_set():
        await models.drain(0)  # streams end with an error event, also now


def _reload(app: App) -> None:
    """Reload the options, as SIGHUP asks."""
    try:
        app.state.options(app.state.models)
    except CairnError as error:
        log.error("%s", error)


class Signals:
    """The first and the second SIGTERM or SIGINT, as events.

    SIGHUP calls `hang_up`; of a server in a terminal it means that the terminal closes, and ends the server.
    """

    def __init__(self, hang_up: Callable[[], None] = lambda: None) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in ENDING:
            self._loop.add_signal_handler(number, self._seen)
        self._hangs_up = not sys.stderr.isatty()
        if self._hangs_up:
            self._loop.add_signal_handler(signal.SIGHUP, hang_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # also one that came while the server was imported

    def _seen(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        """Give the signals back."""
        for number in (*ENDING, *((signal.SIGHUP,) if self._hangs_up else ())):
            self._loop.remove_signal_handler(number)


async def _until(work: Coroutine[Any, Any, Any], event: asyncio.Event) -> Any:
    """Return the result of `work`, or None if the event came first; then the work is cancelled."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None


def address(host: str, sock: socket.socket, *, tls: bool = False) -> str:
    """Return the URL that clients on this machine use."""
    port = sock.getsockname()[1]
    name = host.strip("[]")
    if name in ("0.0.0.0", "::"):
        name = "127.0.0.1"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def elsewhere(config: Config, port: int, network: Network) -> list[str]:
    """Return the URLs that clients on other machines use, if the server listens on every interface."""
    name = config.host.strip("[]")
    if name not in ("0.0.0.0", "::"):
        return []
    found = [one for one in network.addresses() if name == "::" or ":" not in one]
    scheme = "https" if config.tls_cert is not None else "http"
    return [f"{scheme}://[{one}]:{port}" if ":" in one else f"{scheme}://{one}:{port}" for one in found]


_CHAT = '"messages": [{"role": "user", "content": "%s"}], "stream": true, "repetition_stop": true'
_TRY: Mapping[Kind, tuple[str, str]] = {
    "chat": ("chat/completions", _CHAT % "Why is the sky blue?"),
    "embed": ("embeddings", '"input": "What is Cairn?"'),
    "rerank": ("rerank", '"query": "What is Cairn?", "documents": ["A heap of stones.", "A kind of bread."]'),
}
"""The route to try first, by kind of model, with a body for it."""


_QUIET = ("warning", "error")
"""Log levels at which a server does not say how to use it."""
_OPEN = "Everyone who can reach this address can use it: no API key is set."


def _announce(url: str, others: Sequence[str], service: Service, config: Config) -> None:
    everyone = not has_keys(config) and not is_local(config.host)
    if config.log_format == "json":  # for programs: facts, and nothing to try
        facts = {"model": service.name, "url": url, "other_urls": list(others), "device": service.info.device}
        log.info("serves %s at %s", service.name, url, extra={FACTS: facts})
        if everyone:
            log.warning(_OPEN)
        return
    if config.log_level in _QUIET:
        if everyone:
            _say(config, f"[bold red]{_OPEN}[/bold red]")
        return
    key = ' -H "Authorization: Bearer $CAIRN_API_KEY"' if has_keys(config) else ""
    trust = f" --cacert {shlex.quote(config.tls_cert)}" if config.tls_cert is not None else ""
    route, given = _TRY[service.spec.kind]
    if service.name == DEMO:  # which knows Cairn, and little else
        given = given.replace("Why is the sky blue?", "What is Cairn?")
    body = f'{{"model": "{service.name}", {given}}}'
    _say(config, f"Cairn serves [bold]{escape(service.name)}[/bold] at [bold]{url}/v1[/bold]. Ctrl-C ends it.")
    if others:
        _say(config, f"From other machines: {', '.join(f'{other}/v1' for other in others)}")
    if config.page:
        _say(config, f"In a browser, to chat and to see what is kept: [bold]{url}/[/bold]")
    if service.spec.kind == "chat":
        _say(config, f"Sampling where a request says nothing: {described(service.spec)}. Try:")
    else:
        _say(config, "It answers no chats. Try:")
    _say(
        config,
        f"  curl -N{escape(trust)} {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{escape(body)}'",
    )
    if everyone:
        _say(config, f"[bold red]{_OPEN}[/bold red]")


class _Talk(Console):
    def on_broken_pipe(self) -> None:
        """Ignore that nobody reads any more; rich would end the server."""


def _say(config: Config, text: str) -> None:
    if config.log_format == "json":
        log.info("%s", Text.from_markup(text).plain)
        return
    # No word here is an emoji, and their table would be loaded to know that.
    with contextlib.suppress(OSError):  # a log on a full disk
        _Talk(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(text)
