"""Items that a request names by their ids instead of sending them.

Some clients send `{"type": "item_reference", "id": ...}`, or the id alone, for items of an earlier response: Vercel's
AI SDK does so in every second step. An item's id contains the id of its response or conversation, so nothing is kept
for it. An item of a response that was not stored, was deleted or is another tenant's gets the same 404, so nobody
learns which it was.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cairn.api.http.call import HTTPCall, shown
from cairn.api.openai.stored_responses import StoredResponses
from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.types.errors import InvalidRequest, NotFound, Unavailable

MAX_SOURCES = 64
"""Most responses, and conversations, whose items are looked through: each may be long."""
_ID = re.compile(r"[a-z]{1,8}_([0-9A-Za-z_]{1,56}?)(_in)?_[0-9]{1,9}")

Listed = Mapping[str, dict[str, Any]]
"""Items by their ids."""


class ItemReferences:
    """Puts items in the place of references to them."""

    def __init__(
        self,
        config: Config,
        stored: StoredResponses,
        of_conversation: Callable[[str, str], Awaitable[list[dict[str, Any]]]],
    ) -> None:
        """Resolve references; `of_conversation(tenant, id)` lists a conversation's items or raises NotFound."""
        self._config, self._stored, self._of_conversation = config, stored, of_conversation

    async def resolved(self, call: HTTPCall, service: Service, given: Any, field: str = "input") -> Any:
        """Return a list of items without references; anything else unchanged.

        Raises NotFound for a reference to no item, with its place in the list.
        """
        if not isinstance(given, list) or not any(map(_is_reference, given)):
            return given
        most = self._config.max_messages
        if len(given) > most:
            raise InvalidRequest(f"{field} holds {len(given)} items; the limit is {most} with references", field=field)
        reader = _ReferenceReader(self._stored, self._of_conversation, call.tenant, service)
        return [
            await reader.item(item, f"{field}[{index}]") if _is_reference(item) else item
            for index, item in enumerate(given)
        ]


class _ReferenceReader:
    """The references of one request: each response and each conversation is read once."""

    def __init__(
        self,
        stored: StoredResponses,
        of_conversation: Callable[[str, str], Awaitable[list[dict[str, Any]]]],
        tenant: str,
        service: Service,
    ) -> None:
        self._stored, self._of_conversation = stored, of_conversation
        self._tenant, self._service = tenant, service
        self._listed: dict[tuple[str, bool], Listed] = {}
        self._sources = 0

    async def item(self, reference: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the item that a reference names."""
        id = reference.get("id")
        if not isinstance(id, str):
            raise InvalidRequest(f"{where}.id must be a text", field=f"{where}.id")
        found = _ID.fullmatch(id)
        if found is not None:
            number, within = found[1], found[2] is not None
            if (number, within) not in self._listed:
                self._listed[number, within] = await self._list(number, within, where)
            if (item := self._listed[number, within].get(id)) is not None:
                return item
        raise NotFound(
            f"{where}: there is no item {shown(id)!r} in a stored response or conversation; send the item itself",
            field=where,
        )

    async def _list(self, number: str, within: bool, where: str) -> Listed:
        """Return the items of a response, of its input if `within`, or of a conversation; empty if neither exists."""
        found: list[dict[str, Any]] = []
        try:
            if within:
                self._count(where)
                found = await self._stored.input_items(self._tenant, "resp_" + number)
            elif (output := await self._stored.output(self._tenant, "resp_" + number, self._service)) is not None:
                found = output
            else:
                self._count(where)
                found = await self._of_conversation(self._tenant, "conv_" + number)
        except (NotFound, Unavailable):
            pass
        return {item["id"]: item for item in found}

    def _count(self, where: str) -> None:
        self._sources += 1
        if self._sources > MAX_SOURCES:
            raise InvalidRequest(
                f"{where}: the input refers to items of more than {MAX_SOURCES} conversations, or of the input of as "
                "many responses, the limit; send the items themselves",
                field=where,
            )


def _is_reference(item: Any) -> bool:
    """Return whether an item only names another: by its type, or by an id without type and role."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)
