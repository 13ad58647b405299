"""OpenAI's files, under /v1/files, kept as they were uploaded.

POST /v1/files (a form with `file` and `purpose`)      GET /v1/files?limit=&order=&after=&purpose=
GET  /v1/files/{id}      GET /v1/files/{id}/content    DELETE /v1/files/{id}

Shapes: platform.openai.com/docs/api-reference/files, as openai-python's `types` state them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cairn.api.chat.paging import page, parameters
from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.frontend.service import Service
from cairn.rag.file_store import MAX_FILES, StoredFile
from cairn.types.errors import InvalidRequest, Unsupported

PATH = "/v1/files"
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
}
"""The schema of an upload."""
PURPOSES = ("assistants", "user_data", "batch", "fine-tune", "vision", "evals")


class FileRoutes:
    """The routes of files."""

    def __init__(self, state: ServerState) -> None:
        self._config, self._library = state.config, state.library

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/files", self.create, keeps=True, form=FORM),
            Route("GET", "/v1/files", self.list, query=("limit", "order", "after", "purpose")),
            Route("GET", "/v1/files/{id}", self.show),
            Route("DELETE", "/v1/files/{id}", self.delete),
            Route("GET", "/v1/files/{id}/content", self.content),
        ]

    async def create(self, call: HTTPCall, service: Service) -> None:
        """Upload a file. The body is a form with a `file` and its `purpose`."""
        stores = await self._library.stores()
        async with self._library.upload(call) as form:
            purpose = form.fields.pop("purpose", "")
            if purpose not in PURPOSES:
                raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", field="purpose")
            for name in form.fields:
                raise Unsupported(f"{name[:40]} is not built: files stay until they are deleted", field=name[:40])
            id = f"file-{call.id}"
            args = (call.tenant, id, form.filename, purpose, form.file, form.size)
            async with self._library.room(call, form.size):
                made = await asyncio.to_thread(stores.files.add, *args)
        await call.json(file_object(made))

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List the files. The newest comes first unless `order` is asc."""
        stores = await self._library.stores()
        asked = parameters(call, ("limit", "order", "after", "purpose"))
        found = await asyncio.to_thread(stores.files.list, call.tenant)
        if "purpose" in asked:
            found = [one for one in found if one.purpose == asked["purpose"]]
        await call.json(listed(asked, [file_object(one) for one in found], MAX_FILES, MAX_FILES))

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return a file's metadata."""
        stores = await self._library.stores()
        await call.json(file_object(await asyncio.to_thread(stores.files.get, call.tenant, call.path_part(PATH))))

    async def content(self, call: HTTPCall, service: Service) -> None:
        """Return the bytes of a file."""
        stores = await self._library.stores()
        found = await asyncio.to_thread(stores.files.get, call.tenant, call.path_part(PATH))
        kind = (b"content-type", b"application/octet-stream")
        await call.start(200, [kind, (b"content-length", b"%d" % found.size)])
        pieces, left = stores.files.pieces(found), 0 if call.scope["method"] == "HEAD" else found.size
        if not left:
            await call.write(b"", more=False)
        while left:
            piece = await asyncio.to_thread(next, pieces)
            left -= len(piece)
            await call.write(piece, more=left > 0)  # who has all that was announced may ask for something else at once

    async def delete(self, call: HTTPCall, service: Service) -> None:
        """Delete a file, also from vector stores. Answered when its bytes are overwritten on the disk."""
        stores, id = await self._library.stores(), call.path_part(PATH)
        await stores.delete_file(call.tenant, id)
        await call.json({"id": id, "object": "file", "deleted": True})


def listed(asked: dict[str, str], oldest_first: list[dict[str, Any]], usual: int, most: int) -> dict[str, Any]:
    """Return the page of a list that the URL asks for, newest first unless `order` is asc."""
    limit, order = asked.get("limit", str(usual)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit must be 1 to {most}", field="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    ascending = order == "asc"
    found = oldest_first if ascending else oldest_first[::-1]
    return page(found, int(limit), asked.get("after"), before=asked.get("before"), ascending=ascending)


def file_object(found: StoredFile) -> dict[str, Any]:
    """Return a file as clients see it."""
    return {
        "id": found.id,
        "object": "file",
        "bytes": found.size,
        "created_at": int(found.created),
        "created": found.created,
        "filename": found.name,
        "purpose": found.purpose,
        "status": "processed",
        "expires_at": None,
        "status_details": None,
    }
