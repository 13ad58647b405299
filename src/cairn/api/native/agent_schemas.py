"""Paths and bodies of the agents' routes, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cairn.agents.portable import Portable
from cairn.agents.types import AgentInfo
from cairn.api.chat.generation import check_generation, check_messages
from cairn.api.chat.message_schemas import ChatMessage, Tool
from cairn.api.chat.parse import parse
from cairn.api.chat.schemas import ChatGeneration
from cairn.api.http.body import Body, Count, Number, Several
from cairn.api.http.call import HTTPCall, query, shown
from cairn.config.config import Config
from cairn.types.errors import Conflict, InvalidRequest

PATH = "/v1/agents"
MOST_LISTED = 100
MAX_METADATA_VALUE = 512
MAX_OWN_METADATA = 1 << 22
"""Characters of metadata that the server itself keeps for a response or a conversation."""
LEAST_TTL = 1.0
MOST_TTL = 10 * 365 * 86_400.0


class CreateBody(Body):
    """POST /v1/agents."""

    within: ClassVar[dict[str, type[Body]]] = {"messages": ChatMessage, "tools": Tool}
    attached = "messages"

    id: str | None = None
    model: str | None = None
    system: str | None = None
    """Short for a system message before all others."""
    messages: Several[ChatMessage] | None = None
    tools: Several[Tool] | None = None
    metadata: dict[str, str] | None = None
    pin: bool | None = None
    """Keep its KV in the stores from eviction."""
    ttl: Number = None
    """Seconds without use after which the agent is deleted."""


class TurnBody(ChatGeneration):
    """POST /v1/agents/{id}/turns: the new messages alone."""

    fork_on_conflict: bool | None = None


class ResumeBody(Body):
    """POST /v1/agents/{id}/resume."""

    stream: bool | None = None


class NoBody(Body):
    """A route that takes nothing: `{}`."""


class EvictBody(Body):
    """POST /v1/agents/{id}/evict."""

    disk: bool | None = None


class ForkBody(Body):
    """POST /v1/agents/{id}/fork."""

    turn: Count = None
    id: str | None = None


class DescribeBody(Body):
    """PATCH /v1/agents/{id}."""

    metadata: dict[str, str]


class RollbackBody(Body):
    """POST /v1/agents/{id}/rollback."""

    turn: int


def check_portable(read: Portable, config: Config) -> None:
    """Check an imported agent against the limits of the other routes."""
    agent = read.agent
    parse(CreateBody, {"metadata": agent.metadata, "ttl": agent.ttl}, config)
    ours = agent.metadata.get("object") in ("response", "conversation")
    check_metadata(agent.metadata, MAX_OWN_METADATA if ours else MAX_METADATA_VALUE)
    check_ttl(agent.ttl)
    for _, began, _ in read.turns:
        beginning(parse(CreateBody, {"messages": list(began.messages), "tools": list(began.tools)}, config), config)


def beginning(body: CreateBody, config: Config) -> list[ChatMessage]:
    """Return the messages that an agent begins with, checked."""
    messages = list(body.messages or ())
    check_messages(messages, config)
    if body.system is not None:
        if messages and messages[0].role in ("system", "developer"):
            raise InvalidRequest("give either system or a system message, not both", field="system")
        messages.insert(0, ChatMessage(role="system", content=body.system))
        if len(messages) > config.max_messages:  # else an exported agent could not be imported
            raise InvalidRequest(
                f"messages holds {len(messages)} messages with system; the limit is {config.max_messages}",
                field="messages",
            )
    check_ttl(body.ttl)
    check_metadata(body.metadata)
    return messages


def check_ttl(ttl: float | None) -> None:
    """Raise InvalidRequest for a time to live out of range."""
    if ttl is not None and not LEAST_TTL <= ttl <= MOST_TTL:
        raise InvalidRequest(f"ttl must be {LEAST_TTL:.0f} to {MOST_TTL:.0f} seconds, got {ttl:g}", field="ttl")


def check_metadata(given: Mapping[str, str] | None, most: int = MAX_METADATA_VALUE) -> None:
    """Raise InvalidRequest if names or values of metadata are too long."""
    for name, value in (given or {}).items():
        if len(name) > MAX_METADATA_VALUE or len(value) > most:
            field = f"metadata.{shown(name)}"
            raise InvalidRequest(f"{field} is longer than {most} characters, the limit", field=field)


def kept_for(id: str, metadata: Mapping[str, str]) -> str:
    """Return the kind of an agent that belongs to another API, `response` or `conversation`; "" for all others."""
    kind = metadata.get("object", "")
    prefix, part = {"response": ("resp_", "head"), "conversation": ("conv_", "state")}.get(kind, ("", ""))
    return kind if prefix and id.startswith(prefix) and part in metadata else ""


def check_own(info: AgentInfo) -> None:
    """Raise Conflict for an agent that belongs to another API, and would break if continued here."""
    if kind := kept_for(info.id, info.metadata):
        raise Conflict(f"{info.id} is a {kind}: continue it at /v1/responses, not as an agent")


def check_turn(body: TurnBody, config: Config) -> None:
    """Check the limits of a turn, and combinations of fields that mean nothing."""
    check_generation(body, config)
    for index, message in enumerate(body.messages):
        if message.role == "assistant":
            raise InvalidRequest(
                f"messages[{index}].role is assistant; a turn takes new messages only, the agent has the others",
                field=f"messages[{index}].role",
            )
    if body.store is False:
        raise InvalidRequest("store cannot be false: the turns of an agent are kept", field="store")
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1: a turn has one answer; fork the agent for another", field="n")


def check_account(body: TurnBody, header: str | None, id: str) -> None:
    """Raise InvalidRequest if a turn names another agent than the one in its path."""
    names = {
        "X-Cairn-Agent": header,
        "metadata.agent": (body.metadata or {}).get("agent"),
        "prompt_cache_key": body.prompt_cache_key,
    }
    for field, name in names.items():
        if name not in (None, id):
            raise InvalidRequest(
                f"{field} must be {id} or absent: a turn is on the account of the agent in its address", field=field
            )


def page_of(call: HTTPCall, place: str) -> tuple[int | None, str]:
    """Return `limit` and `after` from the URL of a list; None and "" if absent. `place` says what `after` is."""
    limit, after = None, ""
    for name, value in query(call):
        number = value.isascii() and value.isdigit() and len(value) <= 3
        if name == "limit" and number and 1 <= int(value) <= MOST_LISTED:
            limit = int(value)
        elif name == "after" and value:
            after = value
        else:
            raise InvalidRequest(
                f"the parameters of this route are limit, 1 to {MOST_LISTED}, and after, {place}", field=shown(name)
            )
    return limit, after
