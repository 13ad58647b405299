"""Log records for exact replay: what was sampled for clients that resend their conversation, kept for a week."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import ReplayRecord, decode, pack, unpack
from cairn.agents.log.segment import Record
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity

log = logging.getLogger(__name__)

KEEP_SECONDS = 7 * 86_400.0
KEEP_BYTES = 1_000_000_000
KEEP_COUNT = 1 << 18
"""Limit on records: each takes some 230 bytes of memory, however short the answer."""
WAITING_IDS = 1 << 22
"""Token ids kept in memory for each model that is not loaded; the newest stay."""
ERASE_SECONDS = 3600.0
"""Interval of erasures: each rewrites the segments that hold expired records."""


class _Kept(NamedTuple):
    at: float
    size: int
    agent: int


class ReplayRecords:
    """Index of the log's replay records, oldest first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._of: dict[int, set[int]] = {}
        """Keys of records made in the name of an agent, by the agent's key."""
        self._bytes = 0
        self._erased_at = 0.0

    def load(self, records: Iterable[Record]) -> dict[bytes, list[tuple[str, Sampled]]]:
        """Index the log's replay records.

        Return their contents for the replay tables, as (tenant, sampled) by the model's identity.
        """
        by_model: dict[bytes, list[tuple[str, Sampled]]] = {}
        for record in records:
            if record.kind != RecordKind.REPLAY:
                continue
            kept = decode(record.payload, ReplayRecord)
            if kept is None:
                continue
            self.add(record, kept.at, kept.agent)
            try:
                ids = unpack(kept.ids)
            except ValueError:
                log.warning("a record of exact replay does not hold a whole number of tokens; it is ignored")
                continue
            sampled = Sampled(kept.before, AnswerIdentity(kept.visible, kept.reasoning), ids, 0)
            by_model.setdefault(kept.identity, []).append((kept.tenant, sampled))
        return by_model

    def payload(self, tenant: str, sampled: Sampled, identity: bytes, now: float, agent: int = 0) -> ReplayRecord:
        """Return the record of an answer.

        `identity`: of the model that sampled it. `agent`: key of the agent in whose name it was requested.
        """
        return ReplayRecord(
            tenant=tenant,
            identity=identity,
            before=sampled.before,
            visible=sampled.answer.visible,
            reasoning=sampled.answer.reasoning,
            ids=pack(sampled.ids),
            at=now,
            agent=agent,
        )

    def add(self, record: Record, at: float, agent: int = 0) -> None:
        """Index a record that is in the log."""
        self._kept[record.key] = _Kept(at, record.size, agent)
        self._bytes += record.size
        if agent:
            self._of.setdefault(agent, set()).add(record.key)

    def take(self, agent: int) -> list[int]:
        """Remove and return the keys of records made in the name of a deleted agent."""
        gone = sorted(self._of.get(agent, ()))
        for key in gone:
            self._forget(key)
        return gone

    def _forget(self, key: int) -> None:
        kept = self._kept.pop(key)
        self._bytes -= kept.size
        if kept.agent:
            self._of[kept.agent].discard(key)
            if not self._of[kept.agent]:
                del self._of[kept.agent]

    def retime(self, change: Callable[[float], float]) -> None:
        """Change all times: the wall clock was set, or had been wrong."""
        for key, kept in self._kept.items():
            self._kept[key] = kept._replace(at=change(kept.at))
        self._erased_at = change(self._erased_at)

    def expired(self, now: float) -> list[int]:
        """Remove and return the keys of records that are too old or beyond the limits.

        Usually empty: see `ERASE_SECONDS`.
        """
        full = max(self._bytes / KEEP_BYTES, len(self._kept) / KEEP_COUNT)
        if now - self._erased_at < ERASE_SECONDS and full < 1.1:
            return []
        gone = []
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            within = self._bytes <= KEEP_BYTES and len(self._kept) <= KEEP_COUNT
            if within and now - kept.at <= KEEP_SECONDS:
                break
            self._forget(key)
            gone.append(key)
        self._erased_at = now
        return gone


def newest(sampled: list[tuple[str, Sampled]]) -> list[tuple[str, Sampled]]:
    """Return the newest of these answers that have at most `WAITING_IDS` ids together, oldest first."""
    size = 0
    for at in range(len(sampled) - 1, -1, -1):
        size += len(sampled[at][1].ids)
        if size > WAITING_IDS:
            return sampled[at + 1 :]
    return sampled
