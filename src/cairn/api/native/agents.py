"""The routes of agents, under /v1/agents.

    POST /v1/agents                     GET  /v1/agents?limit=&after=
    GET  /v1/agents/{id}                DELETE /v1/agents/{id}        PATCH /v1/agents/{id}
    POST /v1/agents/{id}/turns          GET  /v1/agents/{id}/turns?limit=&after=
    POST /v1/agents/{id}/resume         POST /v1/agents/{id}/fork      POST /v1/agents/{id}/rollback
    POST /v1/agents/{id}/pin            POST /v1/agents/{id}/unpin
    POST /v1/agents/{id}/prefetch       POST /v1/agents/{id}/evict
    GET  /v1/agents/{id}/export         POST /v1/agents/import?id=

Those of turns are in `turns.py`. Where every field is optional, a request needs no body.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any, BinaryIO

import msgspec

from cairn.agents.agents import Agents
from cairn.agents.portable import MEDIA_TYPE, kv_bytes
from cairn.agents.types import AgentInfo
from cairn.api.chat.generation import check_length, check_model, warn_of_tools
from cairn.api.chat.message_schemas import contents, plain_messages, plain_tools
from cairn.api.chat.parse import parse, read
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_json, read_nothing
from cairn.api.http.call import RETRY, HTTPCall, query, shown, spool
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import (
    PATH,
    CreateBody,
    DescribeBody,
    EvictBody,
    ForkBody,
    NoBody,
    RollbackBody,
    beginning,
    check_metadata,
    check_own,
    check_portable,
    kept_for,
    page_of,
)
from cairn.api.native.turns import TurnRoutes
from cairn.frontend.service import Service
from cairn.text.grammar.grammar import ToolChoice, Wanted
from cairn.types.errors import Damaged, InvalidRequest, Overloaded, Unavailable, Unsupported, UnsupportedMedia
from cairn.types.stats import ImportedKv

MAX_IMPORTS = 4
"""How many imports of one tenant may run at once: each has a file on the disk, of at most max_import_mib."""
LISTED = 20
"""Default number of agents on a page."""


class AgentRoutes:
    """The routes of agents."""

    def __init__(self, state: ServerState) -> None:
        self._config, self._quotas = state.config, state.quotas
        self._folder = state.agents_folder
        """The folder of the token log, whose disk takes imports while they arrive."""
        self._attribution = state.attribution
        self._turns = TurnRoutes(state)
        self._importing: Counter[str] = Counter()
        """Imports under way, by tenant."""
        self._reading = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/agents", self.create, CreateBody, model="chat", keeps=True, status=201),
            Route("GET", "/v1/agents", self.list, query=("limit", "after")),
            Route(
                "POST", "/v1/agents/import", self.import_agent, query=("id", "kv"), keeps=True, status=201, upload=True
            ),
            Route("GET", "/v1/agents/{id}", self.show),
            Route("PATCH", "/v1/agents/{id}", self.describe, DescribeBody),
            Route("DELETE", "/v1/agents/{id}", self.delete),
            Route("POST", "/v1/agents/{id}/fork", self.fork, ForkBody, keeps=True, status=201),
            Route("POST", "/v1/agents/{id}/rollback", self.rollback, RollbackBody),
            Route("POST", "/v1/agents/{id}/pin", self.pin, NoBody),
            Route("POST", "/v1/agents/{id}/unpin", self.unpin, NoBody),
            Route("POST", "/v1/agents/{id}/prefetch", self.prefetch, NoBody, model="agent"),
            Route("POST", "/v1/agents/{id}/evict", self.evict, EvictBody),
            Route("GET", "/v1/agents/{id}/export", self.export, query=("kv",)),
            *self._turns.routes(),
        ]

    # ------------------------------------------------------------------------------------------------------- agents

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Create an agent."""
        agents = self._open()
        body = await read(CreateBody, call, self._config, read_nothing)
        check_model(body.model, service)
        messages = beginning(body, self._config)
        for index, tool in enumerate(body.tools or ()):
            if tool.type == "custom":
                raise Unsupported(
                    f"tools[{index}].type can only be 'function': custom tools go with chats",
                    field=f"tools[{index}].type",
                )
        tools = plain_tools(body.tools) or []
        warn_of_tools(call, service, tools)
        strict = tuple(tool.function.name for tool in body.tools or () if tool.function.strict)
        await check_length(call, service, contents(messages, tools), "messages")
        plain = plain_messages(messages)
        if plain or tools:  # refuse now what no turn could use; some templates need a user's message
            asked = any(message["role"] == "user" for message in plain)
            first = plain if asked else [*plain, {"role": "user", "content": "Hello."}]
            wanted = Wanted(choice=ToolChoice(strict=strict))
            await service.chat.prompt(first, tools or None, tenant=call.tenant, share=call.share, wanted=wanted)
        info = await agents.create(
            call.tenant,
            id=body.id,
            messages=plain,
            tools=tools,
            strict=strict,
            metadata=body.metadata,
            ttl=body.ttl,
            pinned=bool(body.pin),
            model=service.name if body.model is not None else "",
        )
        await call.json(agent_object(info, service), 201)

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List the agents, most recently created first.

        `savings` is the sum over all the tenant's requests. Responses and conversations, which are agents underneath,
        are left out.

        `after` is the `next` of the page before, which also holds when agents are deleted meanwhile, or an agent's id.
        """
        limit, after = page_of(call, "an id or a page's next")
        agents = self._open()
        page = agents.page(call.tenant, limit=limit or LISTED, after=after, passed_over=kept_for)
        data = [agent_object(info, service) for info in page.agents]
        savings = msgspec.to_builtins(agents.savings(call.tenant))
        await call.json({"object": "list", "data": data, "has_more": page.more, "next": page.next, "savings": savings})

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return an agent, and where its KV lies. `damage` says what the log lost of its path, and what can be done."""
        agents, id = self._open(), call.path_part(PATH)
        found = agent_object(agents.get(call.tenant, id), service)
        found |= {"messages": None, "tools": None, "kv": None, "damage": None}
        try:
            found["messages"], found["tools"] = await agents.beginning(call.tenant, id)
            found["kv"] = msgspec.to_builtins(await agents.where(call.tenant, id))
        except Damaged as error:
            found["damage"] = str(error)
        except Unavailable:  # the worker is being replaced
            if found["messages"] is None:
                raise
        await call.json(found)

    async def describe(self, call: HTTPCall, service: Service) -> None:
        """Replace the metadata of an agent, such as its title."""
        agents, id = self._open(), call.path_part(PATH)
        body = parse(DescribeBody, await read_json(call, self._config), self._config)
        check_metadata(body.metadata)
        check_own(agents.get(call.tenant, id))
        await call.json(agent_object(await agents.describe(call.tenant, id, body.metadata), service))

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete an agent, with its text and its KV. Answered when its bytes are gone from the disk.

        KV holds token ids. While the worker is being replaced, KV goes once there is one. KV of turns that another
        model answered, or that the log cannot be read for, goes when nobody has used it for kv_ttl (30 days by
        default).
        """
        id = call.path_part(PATH)
        await self._open().delete(call.tenant, id)
        await call.json({"id": id, "object": "agent.deleted", "deleted": True})

    async def pin(self, call: HTTPCall, service: Service) -> None:
        """Protect an agent's KV in the stores from eviction."""
        await self._pin(call, service, True)

    async def unpin(self, call: HTTPCall, service: Service) -> None:
        """Let an agent's KV be evicted again."""
        await self._pin(call, service, False)

    async def _pin(self, call: HTTPCall, service: Service, pinned: bool) -> None:
        agents, id = self._open(), call.path_part(PATH)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        await call.json(agent_object(await agents.pin(call.tenant, id, pinned), service))

    async def prefetch(self, call: HTTPCall, service: Service) -> None:
        """Load an agent's KV before it is needed. Answered when it is loaded."""
        agents, id = self._open(), call.path_part(PATH)
        parse(NoBody, await read_nothing(call, self._config), self._config)
        placed = await agents.prefetch(call.tenant, id)
        await call.json({"id": id, "object": "agent.kv", "kv": msgspec.to_builtins(placed)})

    async def evict(self, call: HTTPCall, service: Service) -> None:
        """Release an agent's KV in the pool and in RAM, with `disk` also on the disk."""
        agents, id = self._open(), call.path_part(PATH)
        body = parse(EvictBody, await read_nothing(call, self._config), self._config)
        placed = await agents.evict(call.tenant, id, disk=bool(body.disk))
        await call.json({"id": id, "object": "agent.kv", "kv": msgspec.to_builtins(placed)})

    async def fork(self, call: HTTPCall, service: Service) -> None:
        """Create an agent that shares the history up to a turn."""
        agents, id = self._open(), call.path_part(PATH)
        body = parse(ForkBody, await read_nothing(call, self._config), self._config)
        check_own(agents.get(call.tenant, id))
        info = await agents.fork(call.tenant, id, turn=body.turn, new_id=body.id)
        await call.json(agent_object(info, service), 201)

    async def rollback(self, call: HTTPCall, service: Service) -> None:
        """Go back to a turn."""
        agents, id = self._open(), call.path_part(PATH)
        body = parse(RollbackBody, await read_json(call, self._config), self._config)
        check_own(agents.get(call.tenant, id))
        await call.json(agent_object(await agents.rollback(call.tenant, id, turn=body.turn), service))

    async def export(self, call: HTTPCall, service: Service) -> None:
        """Return an agent as one portable file. With `kv=true` the KV of its context is in front of it."""
        id, most = call.path_part(PATH), 0
        for name, value in query(call):
            if name != "kv" or value not in ("true", "false"):
                raise InvalidRequest("the only parameter of this route is kv: true or false", field=shown(name))
            most = (self._config.max_import_mib << 20) * 15 // 16 if value == "true" else 0  # the rest is the agent's
        headers = [(b"content-type", MEDIA_TYPE.encode())]
        headers.append((b"content-disposition", f'attachment; filename="{id}.cairn"'.encode()))
        async with contextlib.aclosing(self._open().export(call.tenant, id, kv_bytes=most)) as pieces:
            first = await anext(pieces)  # before anything is promised: the log may be damaged
            await call.start(200, headers)
            if call.scope["method"] != "HEAD":
                await call.write(first)
                async for piece in pieces:
                    await call.write(piece)
        await call.write(b"", more=False)

    async def import_agent(self, call: HTTPCall, service: Service) -> None:
        """Create an agent from an exported file, sent as application/octet-stream.

        Its KV is taken with `kv=true` alone. Take it only from somebody you trust: no check tells what a model would
        have computed.
        """
        agents, id, wanted = self._open(), None, False
        for name, value in query(call):
            if name == "kv" and value in ("true", "false"):
                wanted = value == "true"
            elif name == "id" and value:
                id = value
            else:
                raise InvalidRequest("the parameters of this route are id, and kv: true or false", field=shown(name))
        kind = (call.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind not in (b"application/octet-stream", MEDIA_TYPE.encode()):
            raise UnsupportedMedia("the content-type must be application/octet-stream", field="Content-Type")
        if self._importing[call.tenant] >= MAX_IMPORTS:
            raise Overloaded(f"{MAX_IMPORTS} imports of yours are under way, the limit", retry_after=RETRY)
        self._importing[call.tenant] += 1
        try:
            with await spool(call.pieces(), self._folder) as file:
                async with self._reading:  # a file takes several times its size while it is read
                    size = await asyncio.to_thread(kv_bytes, file)
                    file.seek(size)
                    data = await asyncio.to_thread(file.read)
                    async with self._quotas.room(call.tenant, len(data)):
                        info = await agents.import_agent(
                            call.tenant, data, id, lambda read: check_portable(read, self._config), service
                        )
                    del data
                answer = agent_object(info, service)
                if wanted or size:
                    answer["kv"] = await self._import_kv(agents, call.tenant, info.id, file, size if wanted else 0)
        finally:
            self._importing[call.tenant] -= 1
        await call.json(answer, 201)

    async def _import_kv(self, agents: Agents, tenant: str, id: str, file: BinaryIO, size: int) -> dict[str, Any]:
        """Import the KV of an agent's file and report what was taken. The agent exists whatever comes of it."""
        if not size:
            return {"chunks": 0, "bytes": 0, "why": "no KV was taken: the file has none, or kv=true was not said"}
        try:
            taken, why = await agents.import_kv(tenant, id, file, size, self._folder)
        except Unavailable as error:
            taken, why = ImportedKv(), str(error)
        return {"chunks": taken.chunks, "bytes": taken.bytes, "why": why}

    # -------------------------------------------------------------------------------------------------------- within

    def _open(self) -> Agents:
        return self._attribution.open()


def agent_object(info: AgentInfo, service: Service) -> dict[str, Any]:
    """Return an agent as clients see it."""
    return {"object": "agent", **msgspec.to_builtins(info), "model": info.model or service.name}
