"""OpenAI's conversations, under /v1/conversations: a name for the last response, and messages added to it.

    POST /v1/conversations                         GET, POST, DELETE /v1/conversations/{id}
    GET, POST /v1/conversations/{id}/items         GET, DELETE /v1/conversations/{id}/items/{item}

A conversation is an agent without turns whose metadata names the last response and holds the messages that follow it.
A response moves it on, durably, before any of the answer is sent; one that is not finished, or that the client deletes,
is passed over. Like a response it goes 30 days after its last use, which is a use of the response that it names too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypedDict

import msgspec

from cairn.agents.agents import Agents
from cairn.agents.types import AgentInfo
from cairn.api.chat.message_schemas import plain_messages
from cairn.api.chat.paging import page, page_of_items
from cairn.api.chat.parse import parse, read
from cairn.api.chat.schemas import ChatBody
from cairn.api.chat.state import ServerState
from cairn.api.http.body import Body, Several, read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import MAX_OWN_METADATA, check_metadata
from cairn.api.openai.item_references import ItemReferences
from cairn.api.openai.responses_items import items_of, messages_of
from cairn.api.openai.stored_responses import TTL, StoredResponses, find_kept
from cairn.frontend.service import Service
from cairn.types.errors import ConversationLocked, InvalidRequest, NotFound

PATH = "/v1/conversations"
PREFIX = "conv_"
KIND = "conversation"


class ConversationBody(Body):
    """POST /v1/conversations, and /v1/conversations/{id} without items."""

    lenient: ClassVar[bool] = True
    attached = "items"

    items: Several[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ItemsBody(Body):
    """POST /v1/conversations/{id}/items."""

    lenient: ClassVar[bool] = True
    attached = "items"

    items: Several[dict[str, Any]]


class ConversationState(NamedTuple):
    """The state of a conversation."""

    head: str
    """The last response; empty before the first."""
    more: list[dict[str, Any]]
    """Messages that follow it."""
    numbers: Sequence[int] = ()
    """Numbers of the first items, in whose ids they are: items after them count on from `next`."""
    next: int = 0


class _Message(TypedDict):
    """The required fields of a message in a conversation."""

    role: str


class _State(msgspec.Struct):
    """A `ConversationState` as metadata have to have it."""

    head: str
    more: list[_Message]
    numbers: list[int] = []
    next: int = 0


class Conversations:
    """The routes of conversations."""

    def __init__(self, state: ServerState, stored: StoredResponses) -> None:
        self._config = state.config
        self._attribution = state.attribution
        self._stored = stored
        self.references = ItemReferences(state.config, stored, self._items)
        """Resolves references to items of these, and of responses."""
        self._locked: set[tuple[str, str]] = set()

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/conversations", self.create, ConversationBody, keeps=True),
            Route("GET", "/v1/conversations/{id:conv_}", self.show),
            Route("POST", "/v1/conversations/{id:conv_}", self.update, ConversationBody, keeps=True),
            Route("DELETE", "/v1/conversations/{id:conv_}", self.delete),
            Route("GET", "/v1/conversations/{id:conv_}/items", self.items, query=("limit", "order", "after", "before")),
            Route("POST", "/v1/conversations/{id:conv_}/items", self.add, ItemsBody, keeps=True),
            Route("GET", "/v1/conversations/{id:conv_}/items/{item}", self.item),
            Route("DELETE", "/v1/conversations/{id:conv_}/items/{item}", self.remove),
        ]

    # ------------------------------------------------------------------------------------------------- of responses

    @contextlib.contextmanager
    def locked(self, tenant: str, id: str) -> Iterator[None]:
        """Lock a conversation while one of its responses begins. Raises ConversationLocked if another does."""
        if (tenant, id) in self._locked:
            raise ConversationLocked(f"conversation {id} is being continued by another response", field=KIND)
        self._locked.add((tenant, id))
        try:
            yield
        finally:
            self._locked.discard((tenant, id))

    async def state(self, tenant: str, id: str) -> ConversationState:
        """Return the state of a conversation.

        Raises NotFound, and ConversationLocked while its last response runs.
        """
        agents = self._attribution.open()
        info = self._find(agents, tenant, id)
        now = _unpacked(info.metadata["state"])
        if now.head:
            last = self._stored.state(tenant, now.head)
            if last == "running":
                raise ConversationLocked(f"response {now.head} of conversation {id} still runs", field=KIND)
            if last != "idle":
                return _unpacked(info.metadata["before"])
        return now

    async def move(self, tenant: str, id: str, before: ConversationState, head: str) -> None:
        """Advance the conversation from state `before` to the response `head`."""
        agents = self._attribution.open()
        info = self._find(agents, tenant, id)
        await self._write(agents, tenant, info, before._replace(head=head, more=[]), before)

    # ------------------------------------------------------------------------------------------------------- routes

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Create a conversation."""
        agents = self._attribution.open()
        body = await read(ConversationBody, call, self._config, read_nothing)
        check_metadata(body.metadata)
        state = ConversationState("", await self._messages(body.items or [], call, service))
        metadata = {"object": KIND, "state": _packed(state), "before": _packed(state)}
        metadata["metadata"] = json.dumps(body.metadata or {})
        info = await agents.create(call.tenant, id=PREFIX + call.id, metadata=metadata, ttl=TTL)
        await call.json(_object(info))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a conversation."""
        await call.json(_object(self._find(self._attribution.open(), call.tenant, call.path_part(PATH))))

    async def update(self, call: HTTPCall, service: Service) -> None:
        """Replace the metadata of a conversation."""
        agents, id = self._attribution.open(), call.path_part(PATH)
        body = await read(ConversationBody, call, self._config)
        if body.items is not None:
            raise InvalidRequest("items are added at /v1/conversations/{id}/items", field="items")
        check_metadata(body.metadata)
        info = self._find(agents, call.tenant, id)
        await call.json(
            _object(await self._change(agents, call.tenant, info, metadata=json.dumps(body.metadata or {})))
        )

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a conversation. Its responses stay."""
        agents, id = self._attribution.open(), call.path_part(PATH)
        self._find(agents, call.tenant, id)
        await agents.delete(call.tenant, id)
        await call.json({"id": id, "object": "conversation.deleted", "deleted": True})

    async def items(self, call: HTTPCall, service: Service) -> None:
        """List the items of a conversation. The last comes first unless `order` is asc."""
        await call.json(page_of_items(call, await self._items(call.tenant, call.path_part(PATH))))

    async def add(self, call: HTTPCall, service: Service) -> None:
        """Add items to a conversation."""
        body = await read(ItemsBody, call, self._config)
        agents, id = self._attribution.open(), call.path_part(PATH)
        with self.locked(call.tenant, id):
            state = await self.state(call.tenant, id)
            before = len(await self._listed(call.tenant, id, state))
            more = await self._messages(body.items, call, service)
            after = state._replace(more=[*state.more, *more])
            await self._write(agents, call.tenant, self._find(agents, call.tenant, id), after, after)
        added = (await self._items(call.tenant, id))[before:]
        await call.json(page(added, len(added), None))

    async def item(self, call: HTTPCall, service: Service) -> None:
        """Return one item of a conversation."""
        items = await self._items(call.tenant, call.path_part(PATH))
        await call.json(items[_place(items, _item_of(call))])

    async def remove(self, call: HTTPCall, service: Service) -> None:
        """Remove an item. The conversation no longer refers to responses then."""
        agents, id = self._attribution.open(), call.path_part(PATH)
        with self.locked(call.tenant, id):
            state = await self.state(call.tenant, id)
            items = await self._items(call.tenant, id)
            place = _place(items, _item_of(call))
            next = max(state.next, 1 + _number(items[-1]))  # no id is given out twice
            del items[place]
            more = messages_of(items, call)
            same = len(items_of(more, {}, "")) == len(items)
            after = ConversationState("", more, [_number(item) for item in items] if same else [], next)
            info = await self._write(agents, call.tenant, self._find(agents, call.tenant, id), after, after)
        await call.json(_object(info))

    # -------------------------------------------------------------------------------------------------------- within

    async def _messages(self, items: list[dict[str, Any]], call: HTTPCall, service: Service) -> list[dict[str, Any]]:
        """Return items as messages that a chat may hold."""
        found = messages_of(await self.references.resolved(call, service, items, "items"), call)
        return plain_messages(parse(ChatBody, {"messages": found}, self._config).messages) if found else []

    async def _items(self, tenant: str, id: str) -> list[dict[str, Any]]:
        info = self._find(self._attribution.open(), tenant, id)
        now = _unpacked(info.metadata["state"])
        if now.head and self._stored.state(tenant, now.head) == "gone":
            now = _unpacked(info.metadata["before"])
        return await self._listed(tenant, id, now)

    async def _listed(self, tenant: str, id: str, state: ConversationState) -> list[dict[str, Any]]:
        found, called = [], {}
        if state.head:
            found = await self._stored.history(tenant, state.head, running=True)
            called = self._stored.called(tenant, state.head)

        def number(place: int) -> int:
            known = len(state.numbers)
            return state.numbers[place] if place < known else state.next + place - known

        return items_of([*found, *state.more], called, id.removeprefix(PREFIX), number)

    def _find(self, agents: Agents, tenant: str, id: str) -> AgentInfo:
        return find_kept(agents, tenant, id, PREFIX, KIND, _is_conversation)

    async def _write(
        self, agents: Agents, tenant: str, info: AgentInfo, state: ConversationState, before: ConversationState
    ) -> AgentInfo:
        return await self._change(agents, tenant, info, state=_packed(state), before=_packed(before))

    async def _change(self, agents: Agents, tenant: str, info: AgentInfo, **changed: str) -> AgentInfo:
        """Change some of a conversation's metadata: a use of it, and of the responses that hold its history."""
        named = info.metadata | changed
        for head in {_unpacked(named[name]).head for name in ("state", "before")}:
            agents.touch(tenant, head)
        return await agents.describe_by(tenant, info.id, lambda metadata: metadata | changed)


def conversation_of(given: Any) -> str | None:
    """Return the id in a request's `conversation`, which is a text or an object."""
    id = given.get("id") if isinstance(given, dict) else given
    if id is not None and not isinstance(id, str):
        raise InvalidRequest("conversation must be an id, or an object with one", field=KIND)
    return id


def _packed(state: ConversationState) -> str:
    text = json.dumps(state._asdict(), ensure_ascii=False)
    if len(text) > MAX_OWN_METADATA:  # it is held in memory, and written anew with each item
        raise InvalidRequest(
            f"the items that no response has read have more than {MAX_OWN_METADATA} characters, the limit",
            field="items",
        )
    return text


def _unpacked(text: str) -> ConversationState:
    now = json.loads(text)
    return ConversationState(now["head"], now["more"], now.get("numbers", ()), now.get("next", 0))


def _is_conversation(metadata: Mapping[str, str]) -> bool:
    for name in ("state", "before"):
        msgspec.convert(json.loads(metadata[name]), _State)
    return isinstance(json.loads(metadata["metadata"]), dict)


def _object(info: AgentInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": KIND,
        "created_at": int(info.created),
        "metadata": json.loads(info.metadata["metadata"]),
    }


def _number(item: Mapping[str, Any]) -> int:
    return int(item["id"].rpartition("_")[2])


def _item_of(call: HTTPCall) -> str:
    return call.path.rpartition("/")[2]


def _place(items: list[dict[str, Any]], id: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == id:
            return place
    raise NotFound(f"there is no item {id[:100]!r} in this conversation", field="item_id")
