"""`cairn serve`: one model over HTTP."""

from __future__ import annotations

import typer

from cairn.cli.options import ALL, configured
from cairn.config import Resolved


def register(app: typer.Typer) -> None:
    """Add `cairn serve`."""

    @app.command(rich_help_panel="Run a model")
    @configured(ALL)
    def serve(resolved: Resolved) -> None:
        """Serve a model over HTTP with OpenAI's API. Ctrl-C finishes what runs and stops."""
        from cairn.api.server import serve as serve_http

        serve_http(resolved.config)
