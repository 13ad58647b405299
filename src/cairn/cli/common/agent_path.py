"""The route of an agent on a server."""

from __future__ import annotations

from urllib.parse import quote

from cairn.types.errors import ConfigError, InvalidRequest


def agent_path(id: str, more: str = "") -> str:
    """Return an agent's route. ConfigError for an invalid id: `.` or "" in a URL would name another route."""
    from cairn.agents.agent_service import check_id

    try:
        check_id(id)
    except InvalidRequest as error:
        raise ConfigError(f"{id!r} is not an agent's id: {error}") from None
    return f"/v1/agents/{quote(id, safe='')}" + (f"/{more}" if more else "")
