"""Exact tokens of ordinary chats in a store that several servers share.

    replays/AGENT/CONVERSATION

A client that sends its conversation again may come to another server than the one that answered. That server finds
what was sampled by the digest of the conversation up to the answer, in the folder of the agent in whose name the
request was made, or in that of no agent. The newest answer counts, as on one server. Nothing waits long for the store:
without it an answer is tokenized again from its text, as one that nobody remembers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from cairn.agents.log.records import pack, unpack
from cairn.cluster.chain import unavailable
from cairn.cluster.guard import put, readable
from cairn.cluster.shared import SharedStore
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity
from cairn.types.errors import trace

log = logging.getLogger(__name__)

READ_SECONDS = 1.0
"""How long a prompt waits for what other servers sampled."""
NO_AGENT = ""
"""Stands for no agent, also where a request's account could not be opened."""
MOST_WAITING = 64
"""Records that wait to be written. Beyond it, new ones are left out."""
AT_ONCE = 8
"""Answers that are looked up at once, newest first. If none of them is there, older ones are not looked up."""
MOST_LOOKED_UP = 1 << 16
"""Conversations that are not looked up again: they are here, or nowhere."""


class SharedReplay(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled for one answer."""

    before: bytes
    visible: bytes
    reasoning: str
    ids: bytes


class SharedReplays:
    """The replay records in the shared store. Runs on the event loop."""

    def __init__(self, store: SharedStore) -> None:
        self._blobs, self._keys = store.blobs.soon, store.keys
        self._writing: set[asyncio.Task[None]] = set()
        self._looked_up: OrderedDict[tuple[str, bytes, bytes], None] = OrderedDict()

    async def close(self) -> None:
        """Wait briefly for what is being written, then stop."""
        await self.written(1.0)
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _folder(self, tenant: str, agent: str) -> str:
        return f"replays/{self._keys.name(b'replays', tenant.encode(), agent.encode())}"

    def _name(self, tenant: str, agent: str, identity: bytes, digest: bytes) -> str:
        return f"{self._folder(tenant, agent)}/{self._keys.name(b'replay', tenant.encode(), identity, digest)}"

    def keep(self, tenant: str, agent: str, identity: bytes, sampled: Sampled) -> None:
        """Write what was sampled, in a task. `agent`: id of the agent in whose name it was requested; empty for none.

        Nothing is written for a conversation that is not known, or while too many records wait.
        """
        if not sampled.conversation_digest or len(self._writing) >= MOST_WAITING:
            return
        self._note(tenant, identity, sampled.conversation_digest)
        task = asyncio.create_task(
            self._write(self._name(tenant, agent, identity, sampled.conversation_digest), sampled)
        )
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, name: str, sampled: Sampled) -> None:
        answer = sampled.answer
        record = SharedReplay(
            before=sampled.before, visible=answer.visible, reasoning=answer.reasoning, ids=pack(sampled.ids)
        )
        data = self._keys.seal(name, msgspec.msgpack.encode(record))
        try:
            await put(self._blobs, name, data)
        except OSError:
            return  # `trouble` of the store reports it
        except Exception as error:
            log.error("the tokens of an answer could not be shared: %s", trace(error))

    async def written(self, seconds: float) -> None:
        """Wait until what was kept is in the store, for up to so many seconds."""
        if self._writing:
            await asyncio.wait({*self._writing}, timeout=seconds)

    def _note(self, tenant: str, identity: bytes, digest: bytes) -> None:
        self._looked_up[tenant, identity, digest] = None
        self._looked_up.move_to_end((tenant, identity, digest))
        if len(self._looked_up) > MOST_LOOKED_UP:
            self._looked_up.popitem(last=False)

    async def find(
        self, tenant: str, agents: Sequence[str], identity: bytes, digests: Sequence[bytes]
    ) -> list[Sampled]:
        """Return what other servers sampled in a conversation.

        `agents`: ids of agents in whose name the request may be made; `digests`: of the conversation up to each
        answer, the newest last. What was looked up before is not looked up again.
        """
        new = [one for one in digests if (tenant, identity, one) not in self._looked_up]
        found: list[Sampled] = []
        if not new:
            return found
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(READ_SECONDS):
                for at in range(len(new), 0, -AT_ONCE):
                    some = await self._read(tenant, (*agents, NO_AGENT), identity, new[max(0, at - AT_ONCE) : at])
                    found += some
                    if not some:
                        break
            for one in new:
                self._note(tenant, identity, one)
        return found

    async def _read(
        self, tenant: str, agents: Sequence[str], identity: bytes, digests: Sequence[bytes]
    ) -> list[Sampled]:
        """Return those of these answers that are in the agents' folders, each from the first that has it."""
        found, missing = list[Sampled](), list(digests)
        for agent in agents:
            names = [self._name(tenant, agent, identity, one) for one in missing]
            data = await self._blobs.read_several(names)
            opened = map(self._opened, names, missing, map(readable, data))
            found += [one for one in opened if one is not None]
            there = {one.conversation_digest for one in found}
            missing = [one for one in missing if one not in there]
            if not missing:
                break
        return found

    def _opened(self, name: str, digest: bytes, data: bytes | None) -> Sampled | None:
        """Return the record in an object; None for one that was changed, or that another version wrote."""
        content = None if data is None else self._keys.open(name, data)
        if content is None:
            return None
        try:
            record = msgspec.msgpack.decode(content, type=SharedReplay)
            return Sampled(
                record.before, AnswerIdentity(record.visible, record.reasoning), unpack(record.ids), 0, digest
            )
        except (msgspec.DecodeError, ValueError):
            return None

    async def forget(self, tenant: str, agent: str) -> None:
        """Remove what was sampled in the name of an agent. Raise Unavailable if the store does not answer."""
        try:
            await self._blobs.delete(await self._blobs.list(self._folder(tenant, agent)))
        except OSError as error:
            raise unavailable(error) from error
