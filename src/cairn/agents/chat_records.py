"""Records of ordinary requests: what was sampled, for exact replay, and what it cost, for a tenant and an agent.

An ordinary request carries its whole conversation and belongs to no turn. It may be made in the name of an agent, which
then owns its KV and its costs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from cairn.agents.agent_service import AgentService
from cairn.agents.log.index import RecordKind
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.shared_replays import SharedReplays
from cairn.agents.turn_tree import Agent
from cairn.served_models.services import Services
from cairn.text.chat.prompt import Sampled
from cairn.types.errors import Unavailable
from cairn.types.outputs import Done, FinishReason

WRITTEN_SECONDS = 0.25
"""How long the end of an answer waits until its sampled tokens are written."""


class ChatRecords:
    """Recorder of ordinary requests. Everywhere `identity` is the answering model's; by default the first model's."""

    def __init__(self, services: Services, agents: AgentService, replays: ReplayRecords, *, log: bool) -> None:
        """Record for these agents; `log`: whether sampled tokens go to the log."""
        self._services, self._agents, self._replays, self._log = services, agents, replays, log
        self._registry, self._writer = agents.registry, agents.writer
        self._pending, self._kv = agents.pending, agents.kv
        self.shared: SharedReplays | None = None
        """What was sampled at all servers that share a store, if this one does."""

    def named(self, tenant: str, id: str) -> Agent:
        """Return the agent in whose name a request is made, which counts as used now.

        It may be deleted before the request is recorded. Raise InvalidRequest or NotFound as `AgentService.find`.
        """
        agent = self._agents.find(tenant, id)
        agent.used = self._pending.now()
        return agent

    @contextlib.contextmanager
    def using(self, agent: Agent) -> Iterator[None]:
        """Suspend the agent's time to live while an ordinary request in its name is computed."""
        agent.open_requests += 1
        try:
            yield
        finally:
            agent.open_requests -= 1
            agent.used = self._pending.now()

    def remember(
        self,
        tenant: str,
        agent: Agent | None,
        ids: Sequence[int],
        done: Done,
        sampled: Sampled | None = None,
        identity: bytes = b"",
    ) -> None:
        """Record a finished request: its sampled tokens, if they are certain, and its cost.

        `ids`: tokens of prompt and answer. Their KV is pinned if the agent is, and evicted if it is deleted.
        """
        if sampled is not None:
            self.keep(tenant, sampled, agent, identity)
        self.account(tenant, agent, ids, done, identity)

    def keep(self, tenant: str, sampled: Sampled, agent: Agent | None = None, identity: bytes = b"") -> None:
        """Record in the log what was sampled for a request, if the options want that."""
        if not self._log or (agent is not None and agent not in self._registry):
            return
        now, key = self._pending.now(), agent.key if agent is not None else 0
        payload = self._replays.payload(tenant, sampled, self._model(identity), now, key)
        record = self._writer.record(RecordKind.REPLAY, payload)
        with contextlib.suppress(Unavailable):  # the log is closed
            self._writer.append(record)
            self._replays.add(record, now, key)
        if self.shared is not None:
            self.shared.keep(tenant, "" if agent is None else agent.id, payload.identity, sampled)

    async def written(self) -> None:
        """Wait until what `keep` recorded would survive this process, and others find it: WRITTEN_SECONDS at most.

        A client that has an answer sends it back with its next request. If its sampled tokens were not known then, the
        text could be tokenized differently, and the next answer could change.
        """
        shared = () if self.shared is None else (self.shared.written(WRITTEN_SECONDS),)
        await asyncio.gather(self._writer.written(WRITTEN_SECONDS), *shared)

    def cut(self, agent: Agent, ids: Sequence[int], identity: bytes = b"") -> None:
        """Record the context of a request in the agent's name: its KV is deleted with the agent."""
        if agent in self._registry:
            self._kv.add_request_context(agent, ids, self._model(identity))
        else:
            self._kv.drop_later(agent, ids, self._model(identity))

    def account(self, tenant: str, agent: Agent | None, ids: Sequence[int], done: Done, identity: bytes = b"") -> None:
        """Count a finished request for its tenant and its agent. `ids` as for `remember`."""
        if done.reason is FinishReason.TOOL_CALLS:
            self._kv.request_ended_in_call(self._registry.salt(tenant), ids, self._model(identity))
        if agent is not None:
            self.cut(agent, ids, identity)
        if agent is None or agent not in self._registry:
            self._registry.savings.count(tenant, done, self._pending.now())
            return
        agent.used = self._pending.now()
        with contextlib.suppress(Unavailable):
            self._writer.append(*self._pending.count(agent, done), self._pending.note(agent))
        if agent.record.pinned:
            self._kv.pin_later(agent, ids, self._model(identity))

    def _model(self, identity: bytes) -> bytes:
        return identity or self._services.first.spec.identity
