"""`cairn launch`: start a coding agent that uses this machine's server; start the server too if none runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.cli.common.output import talk
from cairn.cli.connection.trust import certificate_file
from cairn.cli.launch_table import AGENTS, AgentProgram
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError, Unavailable

_OPTIONS = ("api_key", "port", "context")
_LOOK = 0.3
"""Seconds between two checks of a server that is starting."""
_LEAVE = 5.0
"""Seconds that an agent has to end after a signal, before the server ends without it."""
_ANSWER = 4
"""An answer may take this fraction of the context: a fourth."""


class ServerAddress(NamedTuple):
    """A server's address, its model, and how to reach it."""

    url: str
    model: str
    key: str
    context: int
    certificate: Path | None = None
    """The file of certificates to trust, over https."""


class Start(NamedTuple):
    """The command, variables and files that start an agent."""

    command: list[str]
    env: dict[str, str]
    """Variables to add to the environment."""
    files: dict[Path, str]


def register(app: typer.Typer) -> None:
    """Add `cairn launch`."""

    @app.command(
        rich_help_panel="Running servers",
        epilog="Arguments after -- go to the agent: cairn launch claude -- -p 'hello'",
    )
    @configured(_OPTIONS, model=False)
    def launch(
        resolved: Resolved,
        agent: Annotated[
            str | None, typer.Argument(metavar="AGENT", help=f"One of {', '.join(AGENTS)}.", show_default=False)
        ] = None,
        arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", show_default=False)] = None,
        model: Annotated[
            str | None, typer.Option("--model", metavar="MODEL", help="The model to serve if no server runs.")
        ] = None,
        show: Annotated[
            bool, typer.Option("--print", help="Only print the environment and the command; start nothing.")
        ] = False,
        anyway: Annotated[
            bool, typer.Option("--anyway", help="Start even if the agent's first prompt does not fit the context.")
        ] = False,
        host: Host = None,
    ) -> None:
        """Start a coding agent that uses this machine's server.

        If no server runs, one is started and ends with the agent. The agent's own configuration is not changed.
        """
        known = AGENTS.get(agent or "")
        if agent is None or known is None:
            wrong = "no agent is named" if agent is None else f"{agent} cannot be launched"
            raise ConfigError(f"{wrong}; choose one of {', '.join(AGENTS)}", field="agent")
        if show:
            _print(start(known, _found(resolved, host), folder(agent), arguments or ()))
            return
        program = shutil.which(known.program)
        if program is None:
            raise CairnError(f"{known.title} is not installed; get it with: {known.install}")
        fits = partial(check_context, known, anyway)
        with _place(resolved, host, model, fits) as (place, started):
            begun = start(known, place, folder(agent), arguments or ())
            _write(begun.files)
            environment = {**os.environ, **begun.env}
            if not started:
                sys.stdout.flush()
                os.execve(program, begun.command, environment)
            code = _run(program, begun.command, environment)
        raise typer.Exit(code)


def check_context(agent: AgentProgram, anyway: bool, model: str, context: int) -> None:
    """Compare an agent's first prompt with the context and warn. ConfigError if it cannot fit, unless `anyway`."""
    least, most = agent.first_prompt
    wanted = most + most // _ANSWER
    if context >= wanted or not most:
        return
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    sizes = f"{agent.title}'s first prompt has about {size} tokens, and the context of {model} is {context:,} tokens"
    if context >= least or anyway:
        result = "it may soon be full" if context >= least else "it will be refused"
        talk().print(f"{sizes}: {result}.", style="dim", markup=False, soft_wrap=True)
        return
    raise ConfigError(
        f"{sizes}: it would be refused. Serve a model with a longer context: cairn serve MODEL --context {wanted}. "
        "--anyway starts the agent regardless",
        field="context",
    )


def start(
    agent: AgentProgram, place: ServerAddress, folder: Path, arguments: list[str] | tuple[str, ...] = ()
) -> Start:
    """Return the command, variables and files that start an agent with a server."""
    answer = max(place.context // _ANSWER, 1)
    values: dict[str, str | int] = {
        "url": place.url,
        "model": place.model,
        "key": place.key or "none",
        "context": place.context,
        "answer": answer,
        "prompt": max(place.context - answer, 1),
        "folder": str(folder),
    }
    env = {name: _text(filled(value, values)) for name, value in agent.env.items()}
    if place.certificate is not None:
        env[agent.authorities] = str(place.certificate)
    command = [agent.program, *(str(filled(argument, values)) for argument in agent.arguments), *arguments]
    files = {folder / name: _text(filled(value, values)) + "\n" for name, value in agent.files.items()}
    return Start(command, env, files)


def filled(value: Any, values: Mapping[str, str | int]) -> Any:
    """Fill in the names in braces of a table's value; a text that is only a number's name becomes the number."""
    if isinstance(value, Mapping):
        return {str(filled(name, values)): filled(item, values) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [filled(item, values) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith("{") and isinstance(number := values.get(value[1:-1]), int):
        return number
    for name, replacement in values.items():
        value = value.replace("{" + name + "}", str(replacement))
    return value


def folder(agent: str, env: Mapping[str, str] | None = None) -> Path:
    """Return Cairn's folder of files for an agent; the agent's own folders are not touched."""
    from cairn.config.paths import users_folder

    return users_folder(os.environ if env is None else env).parent / "launch" / agent


def _text(value: Any) -> str:
    return json.dumps(value, indent=2) if isinstance(value, Mapping) else str(value)


def _write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(path.name + ".new")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text)  # readable by the owner alone: it may contain a key
            fresh.replace(path)
        except OSError as error:
            raise CairnError(f"{path} cannot be written: {error.strerror or error}") from error


def _print(begun: Start) -> None:
    for name, value in begun.env.items():
        print(f"export {name}={shlex.quote(value)}")
    for path, text in begun.files.items():
        print(f"# {path}\n" + "".join(f"#   {line}\n" for line in text.splitlines()), end="")
    print(shlex.join(begun.command))


Fits = Callable[[str, int], None]
"""Called with the model and its context in tokens before the agent starts; raises if they do not fit."""


@contextmanager
def _place(resolved: Resolved, host: str | None, model: str | None, fits: Fits) -> Iterator[tuple[ServerAddress, bool]]:
    """Yield the running server, or start one and end it afterwards; and whether it was started here."""
    from cairn.cli.answer_source import LOADING, state_of
    from cairn.cli.connection.client import address

    try:
        place = _found(resolved, host)
    except Unavailable:
        if host is not None:
            raise
    else:
        fits(place.model, place.context)
        yield place, False
        return
    url = address(resolved.config)
    certificate = resolved.config.tls_cert
    if state_of(url, certificate) == LOADING:
        with talk().status(f"waiting for the server at {url} to load its model"):
            while state_of(url, certificate) == LOADING:
                time.sleep(_LOOK)
        place = _found(resolved, None)
        fits(place.model, place.context)
        yield place, False
        return
    with _served(resolved, model, fits) as place:
        yield place, True


def _found(resolved: Resolved, host: str | None) -> ServerAddress:
    """Return the running server. Unavailable if none runs."""
    from cairn.cli.connection.client import first_chat, own_certificate

    with server(resolved, host) as client:
        first = first_chat(client.get("/v1/models")["data"])
        config = resolved.config
        key = config.api_key[0].reveal() if config.api_key else ""
        trusted = certificate_file(own_certificate(config, host)) if client.url.startswith("https:") else None
        return ServerAddress(client.url, str(first["id"]), key, int(first["max_model_len"]), trusted)


@contextmanager
def _served(resolved: Resolved, model: str | None, fits: Fits) -> Iterator[ServerAddress]:
    """Start a server whose output goes to a file, and end it afterwards. CairnError if it does not start.

    `model` is served in place of the configured model, or of [[models]].
    """
    config = resolved.config
    if not config.port:
        raise ConfigError("port is 0, and the server could not be found there; give --port a number", field="port")
    several = config.models or config.models_dir is not None
    only = model or (None if several else config.model)
    checked = only is not None and _check_files(only, config.context, fits)
    log = folder("server") / "serve.log"
    _write({log: ""})
    with log.open("ab") as output, _signals_as_exit():
        process = _start_server(resolved, model, output)
        try:
            with talk().status(f"starting a server with {only or 'several models'}; it writes to {log}"):
                found = _wait_until_found(resolved, process, log)
            if not checked:
                fits(found.model, found.context)
            yield found
        finally:
            process.terminate()
            process.wait()


def _check_files(model: str, context: int | None, fits: Fits) -> bool:
    """Pull a model if it is missing, and check its context; return whether its files say how long that is."""
    from cairn.cli.answer_source import context_of
    from cairn.cli.models import pull_missing

    pull_missing(model)
    if (tokens := context_of(model, context)) is None:
        return False
    fits(model, tokens)
    return True


def _start_server(resolved: Resolved, model: str | None, output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start `cairn serve` with the same options and, if it is given, `model`."""
    config = resolved.config
    command = [sys.executable, "-m", "cairn", "serve"]
    command += [model] if model is not None else []
    command += ["--config", str(resolved.file)] if resolved.file is not None else []
    command += ["--host", config.host, "--port", str(config.port)]
    command += ["--images", "text"]  # an agent can go on without an image; a 400 would end its session
    if config.context is not None:
        command += ["--context", str(config.context)]
    keys = {"CAIRN_API_KEY": ",".join(key.reveal() for key in config.api_key)} if config.api_key else {}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **keys},
        start_new_session=True,  # Ctrl-C goes to the agent alone
    )


def _wait_until_found(resolved: Resolved, process: subprocess.Popen[bytes], log: Path) -> ServerAddress:
    """Wait until the server answers. CairnError with the end of its log if it ends instead."""
    while process.poll() is None:
        try:
            return _found(resolved, None)
        except Unavailable:
            time.sleep(_LOOK)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise CairnError(f"the server did not start: {lines[-1] if lines else log}")


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Raise SystemExit for SIGTERM and SIGHUP, which would end this process alone and leave its server behind."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # One that is ignored, as below nohup, stays so.
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    for one in taken:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


def _run(program: str, command: list[str], env: Mapping[str, str]) -> int:
    """Run the agent and return its exit code; Ctrl-C is left to the agent."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        agent = subprocess.Popen(command, executable=program, env=dict(env))
        try:
            code = agent.wait()
        except SystemExit:  # the agent cannot go on without the server
            agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_LEAVE)
            raise
        return 128 - code if code < 0 else code
    finally:
        signal.signal(signal.SIGINT, before)
