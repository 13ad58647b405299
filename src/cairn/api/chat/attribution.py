"""Attribution of ordinary requests to agents: which agent a request belongs to, and what is recorded for it.

Clients name their sessions in many ways, so one rule holds for every dialect: the header `X-Cairn-Agent` names the
agent, else the first known name among `metadata.agent`, `prompt_cache_key`, the headers of SESSIONS, and a session in
`metadata`. If none is known, the first name gets a new agent without turns, which is deleted a week after its last
request. Nothing of this changes an answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec

from cairn.agents.agent_service import is_id
from cairn.agents.agents import Agents
from cairn.agents.turn_tree import Agent
from cairn.api.chat.schemas import Generation
from cairn.api.http.auth import AGENT
from cairn.api.http.call import HTTPCall
from cairn.text.chat.prompt import FindSampled, Sampled
from cairn.types.errors import Conflict, Damaged, InvalidRequest, NotFound, Overloaded, QuotaExceeded, Unavailable
from cairn.types.outputs import Done, Timing
from cairn.types.request import Request
from cairn.types.stats import CacheReport

NAME = "X-Cairn-Agent"
HEADER = AGENT
SESSIONS = (b"x-claude-code-session-id", b"x-session-id", b"session-id")
"""Headers in which clients name their session: Claude Code, opencode, codex."""
ACCOUNT_TTL = 7 * 86_400.0
"""Seconds without use after which an account that a request has opened is deleted."""


MAX_USER_ID = 2000
"""Characters of a user id that are looked at."""

AGENTS = "/v1/agents"
JOURNALS: Mapping[str, str] = {"/v1/teams": "team", "/v1/workflows/runs": "run"}
"""Rooms of the journals that are named below these paths."""


class AgentAttribution:
    """Access to the agents. `agents` is None until they are opened, or, with `why_not`, if they cannot be."""

    def __init__(self) -> None:
        self.agents: Agents | None = None
        self.why_not = "this server keeps no agents"
        self.failing = False
        """Whether agents were asked for and cannot be opened; `why_not` has the reason."""

    def open(self) -> Agents:
        """Return the agents. Raises Unavailable if the server keeps none."""
        if self.agents is None:
            raise Unavailable(self.why_not)
        return self.agents

    def troubles(self) -> list[str]:
        """Return the troubles of the agents that do not stop requests from being served."""
        if self.agents is None:
            return [self.why_not] if self.failing else []
        return self.agents.troubles

    @property
    def refuses(self) -> bool:
        """Whether turns are refused now."""
        return self.failing if self.agents is None else self.agents.refuses

    async def refresh(self, call: HTTPCall) -> None:
        """Update the agent, team or run named in the path from the shared store, if the server has one.

        If the store fails, calls that only read are answered from this server's own copy, where it has one.
        """
        if self.agents is None:
            return
        path = next((one for one in (AGENTS, *JOURNALS) if call.route.startswith(one + "/{id}")), None)
        if path is None:
            return
        agents, id = self.agents, call.path_part(path)
        try:
            if path == AGENTS:
                await agents.refresh(call.tenant, id)
            else:
                await agents.journals.refresh(JOURNALS[path], call.tenant, id)
        except (Unavailable, Damaged):
            if call.scope["method"] in ("POST", "PATCH"):
                raise
            if not _is_here(agents, path, call.tenant, id):
                raise  # a 404 would say that no server has it

    def opened(self, agents: Agents) -> None:
        """Keep agents from now on."""
        self.agents, self.failing = agents, False

    def missing(self, why: str) -> None:
        """Note that agents were asked for and cannot be opened now."""
        self.why_not, self.failing = f"this server keeps no agents: {why}", True

    def find_sampled(self, call: HTTPCall, body: Generation) -> FindSampled | None:
        """Return a function that finds what other servers sampled in a conversation; None without a shared store."""
        replays = None if self.agents is None else self.agents.chats.shared
        if replays is None:
            return None
        header = call.header(HEADER)
        if header is not None:
            names = [header.decode("latin-1")]
        else:
            names = session_names(call, body.metadata or {}, body.prompt_cache_key)
        return partial(replays.find, call.tenant, names, call.identity)

    async def tie(self, call: HTTPCall, body: Generation, *, store: bool) -> Attribution | None:
        """Attach the request to the agent named in its headers; None if nothing is recorded.

        `store`: whether the answer may be kept. Raises InvalidRequest for a header that is no agent's id; other session
        names that are not valid ids are ignored. If no account can be opened now, the request is served without one.
        """
        header = call.header(HEADER)
        named = header.decode("latin-1") if header is not None else None
        if self.agents is None:
            if named is not None:
                raise Unavailable(self.why_not)
            return None
        if named is not None:
            try:
                agent = await self._account(self.agents, call.tenant, [named], new=True)
            except InvalidRequest as error:
                raise error.named(str(error), NAME) from None
        else:
            names = session_names(call, body.metadata or {}, body.prompt_cache_key)
            agent = await self._account(self.agents, call.tenant, names, new=store)
        return Attribution(self.agents, call.tenant, agent, store, call.identity)

    async def _account(self, agents: Agents, tenant: str, names: Sequence[str], *, new: bool) -> Agent | None:
        """Return the agent of the first known name; if none is known, create one if `new`, else return None."""
        for name in names:
            with contextlib.suppress(Unavailable, Damaged):  # an answer does not wait for its account
                await agents.refresh(tenant, name)
            with contextlib.suppress(NotFound):
                return agents.chats.named(tenant, name)
        if names and new:
            with contextlib.suppress(Conflict, Overloaded, QuotaExceeded, Unavailable):  # Conflict: another was first
                await agents.create(tenant, id=names[0], ttl=ACCOUNT_TTL)
            with contextlib.suppress(NotFound):
                return agents.chats.named(tenant, names[0])
        return None


def _is_here(agents: Agents, path: str, tenant: str, id: str) -> bool:
    """Return whether this server has a copy of the agent or journal of this id below `path`."""
    try:
        if path == AGENTS:
            agents.get(tenant, id)
        else:
            agents.journals.find(JOURNALS[path], tenant, id)
    except NotFound:
        return False
    return True


class Attribution:
    """Records one request for its agent: the one that had the name when the request began."""

    def __init__(self, agents: Agents, tenant: str, agent: Agent | None, store: bool, identity: bytes = b"") -> None:
        """Record requests for an agent; `identity` is that of the model that answers."""
        self._chats, self._tenant, self._agent, self._store = agents.chats, tenant, agent, store
        self._identity = identity

    @property
    def named(self) -> bool:
        """Whether the request has an agent, so that its context is likely to be continued."""
        return self._agent is not None

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Mark the agent as in use while its choices are computed."""
        with self._chats.using(self._agent) if self._agent is not None else contextlib.nullcontext():
            yield

    def cut(self, request: Request, tokens: Sequence[int]) -> None:
        """Record a choice that was cut off after these tokens."""
        if self._agent is not None:
            self._chats.cut(self._agent, [*request.prompt, *tokens], self._identity)

    def done(self, request: Request, tokens: list[int], done: Done, sampled: Sampled | None) -> None:
        """Record a choice that has ended. `sampled`: its ids for exact replay; None if they are not certain."""
        if request.choice:  # the prompt is on the first choice's account
            done = msgspec.structs.replace(done, cache=CacheReport(), timing=Timing())
        kept = sampled if self._store else None
        self._chats.remember(self._tenant, self._agent, [*request.prompt, *tokens], done, kept, self._identity)

    async def written(self) -> None:
        """Wait briefly until the records of `done` would survive a kill of the server."""
        await self._chats.written()


def session_names(call: HTTPCall, metadata: Mapping[str, str], prompt_cache_key: str | None) -> list[str]:
    """Return the names a request gives its session, most explicit first, without those that are not valid agent ids."""
    headers = [call.header(name) for name in SESSIONS]
    given = [metadata.get("agent"), prompt_cache_key]
    given += [value.decode("latin-1") for value in headers if value is not None]
    given += [metadata.get("session_id"), _session_in(metadata.get("user_id"))]
    return [name for name in dict.fromkeys(given) if name is not None and is_id(name)]


def _session_in(user_id: str | None) -> str | None:
    """Return the session that Claude Code puts into `user_id`: JSON with a `session_id`, or after `_session_`."""
    if user_id is None or len(user_id) > MAX_USER_ID:
        return None
    if not user_id.startswith("{"):
        return user_id.partition("_session_")[2] or None
    try:
        found = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    session = found.get("session_id") if isinstance(found, dict) else None
    return session if isinstance(session, str) else None
