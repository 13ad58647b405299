"""GET /metrics: figures in Prometheus' text format."""

from __future__ import annotations

from functools import partial

from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.frontend.service import Service
from cairn.served_models import model_health
from cairn.system.metrics import CONTENT_TYPE, ServerMetrics


class MetricsRoute:
    """The route of the metrics, which needs the admin key."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._config = state, state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/metrics", self.metrics, access="admin"),
        ]

    async def metrics(self, call: HTTPCall, service: Service) -> None:
        """Return figures in Prometheus' text format."""
        every = [loaded.service.metrics for _, loaded in self._state.registry.loaded()]
        text = ServerMetrics(
            self._config.metrics_prefix, lambda: every, partial(model_health.metrics, self._state.registry)
        ).render()
        await call.respond(200, text, [(b"content-type", CONTENT_TYPE.encode())])
