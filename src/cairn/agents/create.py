"""How an agent comes to be: with first messages, or from the file of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cairn.agents import portable
from cairn.agents.agent_service import AgentService
from cairn.agents.index import Kind
from cairn.agents.records import AgentRecord, SavingsRecord, TurnRecord, check
from cairn.agents.segment import Record
from cairn.agents.turn_tree import Agent, Turn
from cairn.agents.writer import Writer
from cairn.types import ModelSpec


async def create_agent(
    agents: AgentService,
    tenant: str,
    id: str | None,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    metadata: Mapping[str, str],
    ttl: float | None,
    pinned: bool,
) -> Agent:
    """A new agent whose context begins with `messages`. Raises as `AgentService.new_id` and `AgentService.add` do, and
    InvalidRequest for what no record can hold."""
    check(messages, "messages")
    check(tools, "tools")
    check(metadata, "metadata")
    await agents.free_id(tenant, id)
    id = agents.new_id(tenant, id)
    now = agents.pending.now()
    root = agents.writer.record(Kind.TURN, TurnRecord(agent=0, number=0, messages=tuple(messages), tools=tuple(tools)))
    beginning = Turn(root.key, msgspec.msgpack.decode(root.payload, type=TurnRecord), None)
    record = AgentRecord(
        id=id,
        tenant=tenant,
        created=now,
        used=now,
        root=root.key,
        base=root.key,
        head=root.key,
        pinned=pinned,
        ttl=ttl,
        metadata=dict(metadata),
    )
    return await agents.add(Agent(agents.writer.key(), record, beginning, beginning), root)


async def import_agent(
    agents: AgentService,
    spec: ModelSpec,
    tenant: str,
    data: bytes,
    id: str | None,
    accept: Callable[[portable.Portable], None] | None,
) -> Agent:
    """An agent that a file holds, under its own id or another. `accept` raises for what may not come in.

    Raises as `portable.read`, `AgentService.new_id` and `AgentService.add` do.
    """
    read = await asyncio.to_thread(portable.read, data, spec.vocab, spec.identity)
    if accept is not None:
        await asyncio.to_thread(accept, read)
    id = read.agent.id if id is None else id
    await agents.free_id(tenant, id)
    id = agents.new_id(tenant, id)
    agent, records = await asyncio.to_thread(_plant, agents.writer, read, tenant, id, agents.pending.now())
    agents.new_id(tenant, id)  # another may have taken it meanwhile
    return await agents.add(agent, *records)


def _plant(writer: Writer, read: portable.Portable, tenant: str, id: str, now: float) -> tuple[Agent, list[Record]]:
    """An agent of what a file holds, and the records that it needs. Any thread may call."""
    agent = portable.plant(read, writer.key, tenant, id, now)
    records = [writer.record(Kind.TURN, agent.root.held.began, agent.root.key)]
    for turn in agent.own:
        content = turn.held
        records.append(writer.record(Kind.TURN, content.began, turn.key))
        if content.ended is not None:
            records.append(writer.record(Kind.END, content.ended, turn.key))
    records.append(writer.record(Kind.SAVINGS, SavingsRecord(savings=agent.savings), agent.key))
    return agent, records
