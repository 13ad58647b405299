"""Operations on a model's KV beyond requests: pinning, prefetching, evicting and storing, as orders to the worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from cairn.frontend.sent_marks import Mark, SentMarks
from cairn.frontend.supervisor import Supervisor
from cairn.kv.tiers.store import Standing
from cairn.system.metrics import Metrics
from cairn.types.errors import Unavailable
from cairn.types.stats import BlockChanges, ImportedKv, KvStats, Placed, Swept
from cairn.worker import wire

log = logging.getLogger(__name__)


class StoredKv:
    """The part of a `Service` about stored KV. Its methods raise Unavailable while the worker is being replaced."""

    metrics: Metrics

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._logged: dict[str, str] = {}
        """The trouble of each store that was logged last."""
        self._marks = SentMarks()

    async def flush(self) -> None:
        """Wait until all KV computed until now that should be stored is durable.

        Raise Unavailable if some was given up.
        """
        self._answered(await self._supervisor.ask("flush"))

    async def share(self) -> None:
        """Wait until all KV computed until now is in the shared store, and what other servers put there is known.

        Without a shared store there is nothing to wait for, and one that does not answer is waited for two seconds.
        """
        self._answered(await self._supervisor.ask("share"))

    async def pin(self, owner: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Keep the chunks of this context in every store from eviction, also those that are written later.

        They replace what `owner` pinned before. Durable on return.
        """
        self._answered(await self._supervisor.ask("pin", owner=owner, tokens=tuple(tokens), salt=salt))

    async def unpin(self, owner: str) -> None:
        """Release what `owner` pinned."""
        self._answered(await self._supervisor.ask("pin", owner=owner))

    async def mark(self, tokens: Sequence[int], salt: bytes, standing: Standing, *, keep: int = 0) -> None:
        """Set the standing (`kv.tiers.store.Standing`) of this context beyond its first `keep` tokens.

        It shapes how soon the stores evict it. The next worker gets the mark too.
        """
        self._marks.add(Mark(tokens, salt, standing, keep))
        asked = self._supervisor.ask("mark", tokens=tuple(tokens), salt=salt, keep=keep, standing=standing)
        self._answered(await asked)

    async def prefetch(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """Load what the stores have of this context into the pool; return where the context is then."""
        return self._answered(await self._supervisor.ask("prefetch", tokens=tuple(tokens), salt=salt)).placed

    async def evict(self, tokens: Sequence[int], salt: bytes = b"", *, keep: int = 0, disk: bool = False) -> Placed:
        """Evict the KV of this context from the pool and RAM, and with `disk` everywhere; return where it is then.

        Its first `keep` tokens stay, because others need them; so do blocks that a running request holds.
        """
        if disk:
            self._marks.forget(tokens, salt, keep)
        asked = self._supervisor.ask("evict", tokens=tuple(tokens), salt=salt, keep=keep, disk=disk)
        return self._answered(await asked).placed

    async def kv_paths(self, tokens: Sequence[int], salt: bytes = b"") -> list[Path]:
        """Return the files that the disk has of this context: each may be gone by the time it is read."""
        asked = self._supervisor.ask("paths", tokens=tuple(tokens), salt=salt)
        return [Path(path) for path in self._answered(await asked).paths]

    async def import_kv(self, path: Path, tokens: Sequence[int], salt: bytes = b"") -> ImportedKv:
        """Store a file's KV of this context (`kv.disk.portable_kv`), after every check."""
        asked = self._supervisor.ask("import_kv", path=str(path), tokens=tuple(tokens), salt=salt)
        return self._answered(await asked).taken

    async def erase_of_model(
        self,
        model: bytes,
        tokens: Sequence[int],
        salt: bytes = b"",
        *,
        keep: int = 0,
        searched: Sequence[bytes] | None = None,
    ) -> None:
        """Erase KV that another, unloaded model stored of a context beyond its first `keep` tokens.

        With `searched`, the identity `model` may be that of a model with unknown adapters: if no store has its name,
        the tokens are looked for in all stores. Those of the other models in `searched` are left to their workers.
        Raise Unavailable if that is impossible now.
        """
        elsewhere = None if searched is None else tuple(searched)
        asked = self._supervisor.ask(
            "evict", tokens=tuple(tokens), salt=salt, keep=keep, model=model, searched=elsewhere
        )
        self._answered(await asked)

    async def where(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """Return how many leading tokens of this context each tier has."""
        return self._answered(await self._supervisor.ask("where", tokens=tuple(tokens), salt=salt)).placed

    async def block_changes(self, *, whole: bool = False) -> BlockChanges:
        """Return how the blocks that the worker holds changed since the last call; all of them at the first call.

        It notes changes until `unfollow_blocks`. `whole`: return all blocks in any case.
        """
        return self._answered(await self._supervisor.ask("follow", whole=whole)).blocks

    async def unfollow_blocks(self) -> None:
        """Have the worker note no changes of its blocks any more."""
        await self._supervisor.ask("unfollow")

    async def scrub(self) -> Swept:
        """Read and verify every stored chunk, and remove the damaged ones."""
        return self._answered(await self._supervisor.ask("scrub")).swept

    async def prune(self) -> Swept:
        """Remove chunks that nobody has used for longer than the stores' time to live."""
        return self._answered(await self._supervisor.ask("prune")).swept

    def _answered(self, answer: wire.KVAnswer) -> wire.KVAnswer:
        if answer.kv is not None:
            self.metrics.kv = answer.kv
            self._log_troubles(answer.kv)
        if answer.trouble:
            raise Unavailable(answer.trouble, retry_after=self._supervisor.pause)
        return answer

    async def _mark_again(self) -> None:
        """Send the marks that the last worker had to a new one."""
        with contextlib.suppress(Unavailable):  # it is gone again; the next one will get the marks
            for tokens, salt, standing, keep in self._marks:
                await self._supervisor.ask("mark", tokens=tuple(tokens), salt=salt, keep=keep, standing=standing)

    def _log_troubles(self, kv: KvStats) -> None:
        """Log once that a store fails, and once that it works again. A store that is missing changes nothing."""
        for name, tier in (("in memory", kv.ram), ("on the disk", kv.disk), ("that replicas share", kv.shared)):
            if tier is None or tier.trouble == self._logged.get(name, ""):
                continue
            self._logged[name] = tier.trouble
            if tier.trouble:
                log.warning("%s", tier.trouble)
            else:
                log.info("the KV store %s works again", name)
