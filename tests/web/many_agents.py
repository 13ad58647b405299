"""A token log with many agents, written directly: through the routes each would cost a sync."""

from __future__ import annotations

import time
from pathlib import Path

from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, EndRecord, Savings, SavingsRecord, TurnRecord, pack
from cairn.agents.log.segment import Record
from cairn.agents.log.token_log import TokenLog
from cairn.system.posix import SystemFiles, SystemRng

import msgspec  # isort: skip

BATCH = 20_000
"""Records per write."""


def write_agents(folder: Path, agents: int, turns: int) -> None:
    """Write agents with finished turns; a tenth of them are forks of the one before."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = TokenLog.open(SystemFiles(), folder, SystemRng())
    assert log is not None
    now, waiting = time.time(), []

    def write(kind: RecordKind, value: msgspec.Struct, key: int = 0) -> int:
        lsn = log.next_lsn()
        waiting.append(Record(lsn, kind, key or lsn, msgspec.msgpack.encode(value)))
        return key or lsn

    for number in range(agents):
        root = write(RecordKind.TURN, TurnRecord(agent=0, number=0))
        key, head = log.next_lsn(), root
        for turn in range(1, turns + 1):
            message = {"role": "user", "content": f"Question {turn} of agent {number}"}
            began = TurnRecord(
                agent=key, number=turn, parent=head, messages=(message,), ids=pack(range(8)), began=now - number
            )
            head = write(RecordKind.TURN, began)
            answer = {"role": "assistant", "content": f"Answer {turn}"}
            write(RecordKind.END, EndRecord(state="finished", ids=pack(range(8)), message=answer, reason="stop"), head)
        record = AgentRecord(
            id=f"agent-{number:05}",
            tenant="default",
            created=now - number,
            used=now - number,
            root=root,
            base=root,
            head=head,
            origin=f"agent-{number - 1:05}" if number % 10 == 9 else "",
            metadata={"title": f"Agent number {number}"},
        )
        write(RecordKind.AGENT, record, key)
        write(RecordKind.SAVINGS, SavingsRecord(savings=Savings(requests=turns, computed=160, pool=1440)), key)
        if len(waiting) >= BATCH:
            log.write(waiting, sync=False)
            waiting.clear()
    log.write(waiting, sync=True)
    log.close()
