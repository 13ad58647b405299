"""The state that the routes of one server share."""

from __future__ import annotations

from pathlib import Path

from cairn.api.chat.attribution import AgentAttribution
from cairn.api.chat.documents import Library
from cairn.api.chat.exchange import Exchanges
from cairn.api.http.auth import Access, salts
from cairn.api.http.event_log import CallTable, EventLogs
from cairn.api.http.quotas import Quotas
from cairn.api.http.rate_limits import RateLimits
from cairn.api.http.reload import Reload
from cairn.config.config import Config, limits_of
from cairn.served_models.loaded_models import Models
from cairn.system.interfaces import Rng
from cairn.system.posix import SystemClock
from cairn.types.errors import Unavailable

STARTING_RETRY = 2.0
"""Seconds after which a client may ask again while the first model loads."""


class ServerState:
    """The options, models, agents and limits of one server.

    `models` is None until the first model is loaded; `draining` refuses new work. Routes that keep `config` at their
    start hold options that only a restart changes.
    """

    def __init__(self, config: Config, rng: Rng, agents_folder: Path) -> None:
        """Make the state of a server without models. `agents_folder`: the folder of the token log."""
        self.config = config
        """The options as they are now."""
        self.rng, self.clock = rng, SystemClock()
        self.models: Models | None = None
        self.draining = False
        self.options = Reload(config)
        self.access = Access(config)
        self.calls = CallTable(self.clock)
        self.logs = EventLogs(config.reconnect_grace, config.max_resumable_mib << 20, self.calls)
        self.exchanges = Exchanges(config, self.calls, self.logs)
        self.attribution = AgentAttribution()
        self.rates = RateLimits(config, self.clock)
        self.quotas = Quotas(self.clock, limits_of(config), self._bytes_of)
        self.agents_folder = agents_folder
        self.library = Library(config, self.attribution, self.quotas, agents_folder, lambda: self.registry)
        self.options.watch(self._configure)

    def open(self, models: Models) -> None:
        """Serve requests from now on, with these models."""
        self.models = models
        models.loader.tell(self.rates.used)

    @property
    def registry(self) -> Models:
        """The models. Raises Unavailable until the first is loaded."""
        if self.models is None:
            raise Unavailable("the model is still being loaded; ask again shortly", retry_after=STARTING_RETRY)
        return self.models

    def _configure(self, config: Config) -> None:
        """Apply the options that can change while the server runs."""
        self.config = config
        self.access.configure(config)
        self.rates.configure(config)
        self.quotas.limits = limits_of(config)
        if (agents := self.attribution.agents) is not None:
            agents.bound(limits_of(config), salts(config))

    async def _bytes_of(self, tenant: str) -> int:
        """Return the bytes that a tenant's agents, collections and files take on the disk."""
        agents = self.attribution.agents
        kept = 0 if agents is None else await agents.bytes_of(tenant)
        return kept + await self.library.bytes_of(tenant)
