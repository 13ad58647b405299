"""`cairn serve`: models over HTTP."""

from __future__ import annotations

import gc
import os

import msgspec
import typer

from cairn.cli.common.options import ALL, configured
from cairn.config.config import Config
from cairn.config.resolve import Resolved
from cairn.config.values import ModelOptions
from cairn.types.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add `cairn serve`."""

    @app.command(rich_help_panel="Run a model")
    @configured(ALL, several=True)
    def serve(resolved: Resolved) -> None:
        """Serve one or several models over HTTP with OpenAI's, Anthropic's, Ollama's and llama-server's APIs.

        Ctrl-C finishes running requests and stops.
        """
        # Collecting garbage would take a tenth of the start and find none; the server enables it once it is ready.
        collecting = gc.isenabled()
        gc.disable()
        try:
            from cairn.api.server import serve as serve_http
            from cairn.cli.models import fetched

            for model in [one.model for one in resolved.config.models] or [resolved.config.model]:
                fetched(model)
            serve_http(_served(resolved), lambda: _served(resolved.again()))
        except ConfigError as error:
            raise _with_listener(error, resolved) from None
        finally:
            if collecting:  # a start that failed has not enabled it
                gc.enable()


def _served(resolved: Resolved) -> Config:
    """Return the server's options: with a KV folder, and with a named MODEL among those of `models_dir`."""
    from cairn.config.paths import with_folder

    config = resolved.config
    if config.models_dir is not None and not config.models and resolved.source("model") != "default":
        # Its name alone does not say whether demo was asked for, as that is the default.
        own = ModelOptions(model=config.model, name=config.served_name, aliases=config.alias)
        config = msgspec.structs.replace(config, models=(own,), served_name=None, alias=())
    return with_folder(config, os.environ)


def _with_listener(error: ConfigError, resolved: Resolved) -> ConfigError:
    """Return the error of a start, or one that names the Cairn server that has the port."""
    if error.field != "port":
        return error
    from cairn.cli.answer_source import state_of
    from cairn.cli.connection.client import address

    config = resolved.config
    if not state_of(address(config), config.tls_cert):
        return error
    return ConfigError(
        f"a Cairn server listens on port {config.port} already: cairn chat talks with it, cairn ps lists its models; "
        "for another one give --port and --agents-dir",
        field="port",
    )
