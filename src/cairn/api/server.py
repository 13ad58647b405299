"""`cairn serve`: a socket, the guards in front of the parser, the application, signals and a clean end."""

from __future__ import annotations

from cairn.config import Config


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then return; the exit code is then 0.

    The port answers at once, with 503 until the model is loaded. The first signal lets running requests finish within
    `config.shutdown_grace`; a second one ends them at once. Raises ConfigError (busy port, an address that needs a
    key) or ModelError; both carry exit code 2.
    """
