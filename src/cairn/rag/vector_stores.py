"""OpenAI's vector stores over collections: uploaded files are read and embedded in background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from cairn.rag.attachments import Attachment, Attachments, WantedFile
from cairn.rag.collections import Collections, Embedder, Room, endless
from cairn.rag.definition import Attribute, Collection, NewDocument, kind_of
from cairn.rag.file_store import FileStore, StoredFile
from cairn.system.deadline import DEADLINE
from cairn.system.spans import PRESENT
from cairn.text.render.fair_semaphore import FairSemaphore
from cairn.types.errors import CairnError, NotFound, Unavailable, trace

log = logging.getLogger("cairn.api")

AT_ONCE = 2
"""Files read and embedded at once; at most one of each tenant."""
RETRY_SECONDS = 5.0
"""Seconds between attempts to record the end of a file that the disk refuses."""
FIELD = "file"

Embedders = Callable[[], AbstractAsyncContextManager[Embedder]]
"""Opens the embedding model for a caller; it stays loaded while entered."""


class VectorStores:
    """Files attached to collections. Every method runs on the event loop."""

    def __init__(
        self, collections: Collections, files: FileStore, attachments: Attachments, room: Room = endless
    ) -> None:
        self._collections, self._store, self._room = collections, collections.store, room
        self.files, self.attachments = files, attachments
        self._tasks: dict[tuple[int, str], asyncio.Task[None]] = {}
        """Running tasks, by collection key and file id."""
        self._slots = FairSemaphore(AT_ONCE, each=1, what="the reader of documents")

    async def attach(
        self, tenant: str, id: str, wanted: Sequence[WantedFile], embedders: Embedders, batch: str = ""
    ) -> list[Attachment]:
        """Start adding files to a collection and return their states. Raise NotFound for an unknown file."""
        collection = await asyncio.to_thread(self._store.collection, tenant, id)
        files = {one.file: await asyncio.to_thread(self.files.get, tenant, one.file) for one in wanted}
        for one in await asyncio.to_thread(self.attachments.begin, collection, wanted, batch):
            key = collection.key, one.file
            task = asyncio.create_task(self._put(tenant, collection, files[one.file], one, embedders))
            self._tasks[key] = task
            task.add_done_callback(lambda done, key=key: self._forget(key, done))  # type: ignore[misc]
        return [await asyncio.to_thread(self.attachments.get, collection, one.file) for one in wanted]

    def _forget(self, key: tuple[int, str], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _put(
        self, tenant: str, collection: Collection, file: StoredFile, one: Attachment, embedders: Embedders
    ) -> None:
        """Read and embed a file and record how it ended; after a cancellation the canceller records it."""
        DEADLINE.set(None)  # the request that started it is answered long before
        PRESENT.set(None)
        code = why = ""
        try:
            async with self._slots.slot(tenant):
                with tempfile.TemporaryFile(dir=self.files.folder) as copy:
                    await asyncio.to_thread(self.files.copy, file, copy)
                    copy.seek(0)
                    sizes = (one.chunk, one.overlap) if one.chunk else None
                    new = NewDocument(
                        id=file.id,
                        name=file.name,
                        kind=kind_of(file.name),
                        content=copy,
                        size=file.size,
                        metadata=one.attributes,
                        field=FIELD,
                        sizes=sizes,
                        attached=True,
                    )
                    async with embedders() as embedder:
                        await self._collections.add(tenant, collection.id, embedder, new, self._room)
        except CairnError as error:
            code, why = "invalid_file" if error.status < 429 else "server_error", str(error)
        except OSError as error:
            code, why = "server_error", f"the file cannot be read: {error.strerror or error}"
        except Exception as error:
            log.error("file %s: %s", file.id, trace(error))
            code, why = "server_error", "an internal error; the server's log names the file"
        while True:  # until the disk takes it: a file that is in progress is awaited, and not begun anew
            with contextlib.suppress(Unavailable):
                await asyncio.to_thread(
                    self.attachments.end, collection, file.id, "failed" if code else "completed", code, why
                )
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def cancel(self, tenant: str, id: str, batch: str) -> None:
        """Cancel the files of a batch that are still in progress."""
        collection = await asyncio.to_thread(self._store.collection, tenant, id)
        for one in await asyncio.to_thread(self.attachments.all, collection, batch):
            if one.state == "in_progress":
                await self._end(collection, one.file)
                await asyncio.to_thread(self.attachments.end, collection, one.file, "cancelled")

    async def _end(self, collection: Collection, file: str) -> None:
        task = self._tasks.get((collection.key, file))
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def listed(self, tenant: str, id: str, batch: str = "") -> tuple[Collection, list[Attachment]]:
        """Return a collection and its files in any state, the oldest first.

        Without `batch`, documents that were added without an uploaded file are included as completed.
        """
        collection = await asyncio.to_thread(self._store.collection, tenant, id)
        found = await asyncio.to_thread(self.attachments.all, collection, batch)
        if not batch:
            known = {one.file for one in found}
            documents = await asyncio.to_thread(self._store.documents, collection)
            found += [
                Attachment(
                    file=one.id,
                    batch="",
                    created=one.created,
                    state="completed",
                    code="",
                    why="",
                    attributes=one.metadata,
                    chunk=0,
                    overlap=0,
                )
                for one in documents
                if one.id not in known
            ]
            found.sort(key=lambda one: one.created)
        return collection, found

    async def one(self, tenant: str, id: str, file: str) -> tuple[Collection, Attachment]:
        """Return a collection and one of its files. Raise NotFound if it has no such file."""
        collection, found = await self.listed(tenant, id)
        for one in found:
            if one.file == file:
                return collection, one
        raise NotFound(f"{id[:64]} has no file {file[:64]}", field="file_id")

    async def note(self, tenant: str, id: str, file: str, attributes: Mapping[str, Attribute]) -> None:
        """Replace the attributes of a file in a collection."""
        collection, _ = await self.one(tenant, id, file)
        await asyncio.to_thread(self.attachments.note, collection, file, attributes)
        with contextlib.suppress(NotFound):  # no document yet, or reading it failed
            await asyncio.to_thread(self._store.note, collection, file, attributes)

    async def detach(self, tenant: str, id: str, file: str) -> None:
        """Remove a file from a collection; the uploaded file stays."""
        collection, _ = await self.one(tenant, id, file)
        await self._end(collection, file)
        await asyncio.to_thread(self.attachments.remove, collection, file)
        with contextlib.suppress(NotFound):
            await self._collections.remove(tenant, id, file)

    async def delete(self, tenant: str, id: str) -> None:
        """Erase a collection, and stop reading files into it."""
        collection = await asyncio.to_thread(self._store.collection, tenant, id)
        await self._collections.delete(tenant, id)
        for key, file in [*self._tasks]:
            if key == collection.key:
                await self._end(collection, file)

    async def delete_file(self, tenant: str, file: str) -> None:
        """Erase a file and its documents in all collections."""
        await asyncio.to_thread(self.files.get, tenant, file)
        for id in await asyncio.to_thread(self.attachments.of_file, tenant, file):
            with contextlib.suppress(NotFound):
                await self.detach(tenant, id, file)
        await asyncio.to_thread(self.files.delete, tenant, file)
