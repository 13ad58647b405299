"""The agents of a log and their turns in memory, built from the log's records."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, EndRecord, SavingsRecord, TokensRecord, TurnRecord, decode
from cairn.agents.log.segment import Record
from cairn.agents.savings import BYTES_KEY, LINES, SavingsTotals
from cairn.agents.turn_tree import NOBODY, Agent, Turn, reach
from cairn.system.metrics import AgentFigures

log = logging.getLogger(__name__)

OWNED = frozenset({RecordKind.TOKENS, RecordKind.END, RecordKind.SAVINGS})
"""Kinds of records that mean nothing without their turn or agent."""
MOST_IDENTITIES = 256
"""Limit on model identities that turns share one copy of: imported files may name any number."""


class AgentRegistry:
    """All agents of a log."""

    def __init__(self, salts: Mapping[str, bytes] | None = None) -> None:
        """Create a registry.

        `salts`: salts of the configured tenants, by name; agents of other tenants cannot be reached.
        """
        self._salts = salts or {}
        self._agents: dict[str, dict[str, Agent]] = {}
        self._keyed: dict[int, Agent] = {}
        self._turns: dict[int, Turn] = {}
        self._identities: dict[bytes, bytes] = {}
        """One copy of each model identity: every record that is read brings its own."""
        self._lost: dict[int, set[int]] = {}
        """Keys of turns in the log that damage made unreachable, with their parents, by their agent's key."""
        self.savings = SavingsTotals()

    def set_salts(self, salts: Mapping[str, bytes]) -> None:
        """Replace the salts of the configured tenants."""
        self._salts = salts
        for agent in self:
            agent.salt = salts.get(agent.tenant, NOBODY)

    def __iter__(self) -> Iterator[Agent]:
        for agents in tuple(self._agents.values()):
            yield from tuple(agents.values())

    def figures(self) -> AgentFigures:
        """Return the counts of agents and turns and the totals of savings. The caller adds the size of the log."""
        saved = self.savings.total
        read, written = self.savings.bytes
        return AgentFigures(
            agents=sum(len(agents) for agents in self._agents.values()),
            turns=Counter(turn.state for turn in self._turns.values() if turn.number),
            requests=saved.requests,
            computed=saved.computed,
            saved=saved.pool + saved.ram + saved.disk + saved.shared,
            seconds_avoided=saved.seconds_avoided,
            read=read,
            written=written,
        )

    def salt(self, tenant: str) -> bytes:
        """Return the tenant's salt, or `NOBODY`."""
        return self._salts.get(tenant, NOBODY)

    def of(self, tenant: str) -> list[Agent]:
        """Return a tenant's agents, most recently created first."""
        agents = self._agents.get(tenant, {}).values()
        return sorted(agents, key=lambda agent: (-agent.record.created, agent.id))

    def count(self, tenant: str) -> int:
        """Return how many agents a tenant has."""
        return len(self._agents.get(tenant, ()))

    def find(self, tenant: str, id: str) -> Agent | None:
        """Return the tenant's agent of that id, or None."""
        return self._agents.get(tenant, {}).get(id)

    def forks(self, agent: Agent) -> list[Agent]:
        """Return the agents that were forked from this one and that stand at a turn of their own."""
        return [
            other
            for other in self._agents.get(agent.tenant, {}).values()
            if other.root is agent.root
            and other.record.origin == agent.id
            and other.own
            and other.own[-1] is other.head
        ]

    def __contains__(self, agent: Agent) -> bool:
        """Return whether this very agent still exists: another may have its id."""
        return self.find(agent.tenant, agent.id) is agent

    def holds(self, turn: Turn) -> bool:
        """Return whether the turn still belongs to an agent."""
        return self._turns.get(turn.key) is turn

    def followed(self, agent: Agent) -> bool:
        """Return whether a turn follows the agent's head, or another agent is based on it or stands there."""
        head = agent.head
        others = any(head in (other.base, other.head) for other in self if other is not agent)
        return others or any(turn.parent is head for turn in self._turns.values())

    def needs(self, key: int) -> bool:
        """Return whether the key is that of an agent or of a turn of one."""
        return key in self._turns or self.by_key(key) is not None

    def by_key(self, key: int) -> Agent | None:
        """Return the agent with this key, or None."""
        agent = self._keyed.get(key)
        return agent if agent is not None and agent in self else None

    def add(self, agent: Agent) -> None:
        """Add a new agent."""
        self._agents.setdefault(agent.tenant, {})[agent.id] = self._keyed[agent.key] = agent
        agent.salt = self.salt(agent.tenant)
        self._turns.setdefault(agent.root.key, agent.root)
        for turn in agent.own:
            self._turns.setdefault(turn.key, turn)
            if len(self._identities) < MOST_IDENTITIES:
                turn.identity = self._identities.setdefault(turn.identity, turn.identity)

    def add_turn(self, agent: Agent, turn: Turn) -> None:
        """Add a turn that begins, and make it the agent's head."""
        self._turns[turn.key] = turn
        agent.own.append(turn)
        agent.head = turn

    def remove_turn(self, agent: Agent, turn: Turn) -> None:
        """Remove a turn whose beginning could not be written."""
        del self._turns[turn.key]
        agent.own.remove(turn)
        assert turn.parent is not None
        agent.head = turn.parent

    def release(self, key: int) -> None:
        """Release the content of the turn with this key: its end is durable."""
        if (turn := self._turns.get(key)) is not None:
            turn.release()

    def remove(self, agent: Agent) -> list[int]:
        """Remove an agent; return its key and those of its turns that no other agent needs."""
        del self._agents[agent.tenant][agent.id], self._keyed[agent.key]
        if not self._agents[agent.tenant]:
            del self._agents[agent.tenant]
        lost = self._lost.pop(agent.key, set())
        return [agent.key, *self._drop(agent.keeps() | lost, agent)]

    def prune(self, agent: Agent, before: float) -> list[int]:
        """Remove the turns that `abandoned` returns; return their keys."""
        return self.cut(agent, self.abandoned(agent, before))

    def cut(self, agent: Agent, turns: Sequence[Turn]) -> list[int]:
        """Remove turns of an agent; return the keys of those that no other agent needs, which are gone then."""
        if not turns:
            return []
        over = {turn.key for turn in turns}
        agent.own = [turn for turn in agent.own if turn.key not in over]
        return self._drop(over, agent)

    def abandoned(self, agent: Agent, before: float) -> list[Turn]:
        """Return the turns of branches that the agent began and abandoned before that time.

        A turn that another agent has stays: it is in the log, and a restart would find it. What was learnt is noted in
        `agent.straight`, and left branches that are old enough are taken out of `agent.record`.
        """
        record = agent.record
        if record.moved >= before:
            return []
        left = {key: when for key, when in record.left.items() if when >= before}
        if len(left) < len(record.left):
            agent.record = msgspec.structs.replace(record, left=left)
        if agent.straight:
            return []
        kept = reach((agent.head, agent.base), set())
        agent.straight = kept.issuperset(turn.key for turn in agent.own)
        reach([*(turn for turn in agent.own if turn.at >= before or turn.key in left)], kept)
        gone = {turn.key for turn in agent.own} - kept
        if gone:
            gone -= self._needed_by_others(agent)
        return [turn for turn in agent.own if turn.key in gone]

    def cut_after(self, agent: Agent, turn: Turn) -> list[int]:
        """Remove the agent's own turns that follow a turn and do not lie on the path to its head or beginning.

        Return the keys of the removed ones. A turn that another agent needs stays, as in `abandoned`.
        """
        after = {turn.key}
        for one in agent.own:  # in order, so parents come first
            if one.parent_key in after:
                after.add(one.key)
        gone = after - {turn.key} - reach((agent.head, agent.base), set())
        gone -= self._needed_by_others(agent) if gone else set()
        return self.cut(agent, [one for one in agent.own if one.key in gone])

    def _drop(self, keys: set[int], agent: Agent) -> list[int]:
        """Remove those of an agent's turns that no other agent needs; return their keys."""
        dropped = sorted(keys - self._needed_by_others(agent))
        for key in dropped:
            self._turns.pop(key, None)
        return dropped

    def _needed_by_others(self, agent: Agent) -> set[int]:
        """Return the keys of all turns that forks of the agent's family need."""
        seen: set[int] = set()
        for other in self._agents.get(agent.tenant, {}).values():
            if other.root is agent.root and other is not agent:  # only forks share turns
                other.keeps(seen)
        return seen

    # ------------------------------------------------------------------------------------------------------- loading

    def load(self, records: Sequence[Record]) -> list[int]:
        """Build the agents from a log's records in order; return the keys of records that belong to no agent."""
        agents: dict[int, tuple[int, AgentRecord]] = {}
        began: dict[int, TurnRecord] = {}
        lines: dict[int, SavingsRecord] = {}
        missing: set[int] = set()
        for record in records:
            match record.kind:
                case RecordKind.AGENT:
                    if (agent := decode(record.payload, AgentRecord)) is not None:
                        agents[record.key] = record.lsn, agent
                case RecordKind.TURN:
                    if (turn := decode(record.payload, TurnRecord)) is not None:
                        began[record.key] = turn
                case RecordKind.TOKENS | RecordKind.END:
                    self._apply_answer(record, began, missing)
                case RecordKind.SAVINGS:
                    self._load_savings(record, lines)
        missing.clear()
        for key in began:
            self._build_turn(key, began, missing)
        self._place_agents(agents, began, lines)
        owned = {record.key for record in records if record.kind in (RecordKind.AGENT, RecordKind.TURN)}
        stray = {record.key for record in records if record.kind in OWNED and record.key < LINES} - owned
        needed = self._drop_unneeded()
        for one in self._turns.values():
            if one.parent is not None and one.parent.state == "interrupted":
                one.parent.state = "finished"  # a turn is only followed after its end: damage has lost that
        for one in self._turns.values():
            one.release()
        return sorted((began.keys() - needed - self._note_unreachable(began, needed, agents.keys())) | stray)

    def _load_savings(self, record: Record, lines: dict[int, SavingsRecord]) -> None:
        """Load a savings record: an agent's line, a tenant's total, a tenant's day, or the bytes of the stores."""
        if (line := decode(record.payload, SavingsRecord)) is None:
            return
        lines[record.key] = line
        if line.tenant:
            self.savings.load(line.tenant, line.savings)
        elif line.day_of:
            self.savings.load_day(line.day_of, line.day, line.savings)
        elif record.key == BYTES_KEY:
            self.savings.load_bytes(line.read, line.written)

    def _drop_unneeded(self) -> set[int]:
        """Remove the turns that no agent needs; return the keys of those that are needed."""
        needed: set[int] = set()
        for agent in self:
            agent.keeps(needed)
        for key in self._turns.keys() - needed:
            del self._turns[key]
        return needed

    def _note_unreachable(self, began: dict[int, TurnRecord], needed: Set[int], agents: Set[int]) -> set[int]:
        """Return the keys of turns that are unreachable through damage: they stay in the log."""
        nameless = {one.agent for one in began.values() if one.number} - agents
        # Turns that all come from a file and have no agent are of an import that was cut off.
        torn = nameless - {one.agent for one in began.values() if one.sampling is not None}
        lost = {k: one for k, one in began.items() if one.number and k not in needed and one.agent not in torn}
        if lost:
            log.error("%d turns cannot be reached: damage to the log has lost their agents or earlier turns", len(lost))
        for key, one in lost.items():
            self._lost.setdefault(one.agent, set()).update({key, one.parent} & began.keys())
        return set().union(*self._lost.values())

    def _apply_answer(self, record: Record, began: dict[int, TurnRecord], missing: set[int]) -> None:
        """Apply a record of an answer to its turn. A record without a turn is ignored."""
        if record.key not in began:
            return
        turn = self._build_turn(record.key, began, missing)
        if turn is None:
            return
        try:
            if record.kind == RecordKind.END:
                if (end := decode(record.payload, EndRecord)) is not None:
                    turn.end(end)
            elif (piece := decode(record.payload, TokensRecord)) is not None:
                turn.piece(piece)
        except ValueError:
            # Damage may have lost a piece before it. Its tokens are sampled again when the turn is resumed.
            log.warning("a record of turn %d does not continue its answer, or is damaged; it is ignored", turn.number)

    def _build_turn(self, key: int, began: dict[int, TurnRecord], missing: set[int]) -> Turn | None:
        """Create the turn of a key with all its ancestors; return None if an ancestor is missing.

        `missing`: keys that are known to lack an ancestor; extended here.
        """
        chain: dict[int, None] = {}
        while key not in self._turns:
            record = began.get(key)
            if record is None or key in chain or key in missing:
                missing.update(chain)
                return None
            chain[key] = None
            if not record.number:
                break
            key = record.parent
        for one in reversed(chain):
            self._turns[one] = Turn(one, began[one], self._turns.get(began[one].parent))
        return self._turns.get(next(iter(chain), key))

    def _place_agents(
        self, agents: dict[int, tuple[int, AgentRecord]], began: dict[int, TurnRecord], lines: dict[int, SavingsRecord]
    ) -> None:
        """Create the agents. The head is the agent's latest turn after its record, else what the record says."""
        made: dict[int, list[Turn]] = {}
        for one in sorted(began):
            if one in self._turns and began[one].number:
                made.setdefault(began[one].agent, []).append(self._turns[one])
        for key, (lsn, record) in agents.items():
            root, base = self._turns.get(record.root), self._turns.get(record.base)
            if root is None or base is None:
                log.error("agent %s cannot be read: damage to the log has lost its beginning", record.id)
                continue
            agent = Agent(key, record, root, base)
            agent.own = made.get(key, [])
            later = [turn for turn in agent.own if turn.key > lsn]
            head = later[-1] if later else self._turns.get(record.head)
            if head is None:
                head = self._turns.get(record.under, base)
                head = head if root in head.path() else base  # never in another family's tree
                # The agent did not abandon the turns beyond, so none of them may be erased.
                agent.straight = True
                log.error(
                    "agent %s was set back to turn %d: damage to the log has lost its head", record.id, head.number
                )
            agent.head = head
            agent.used = max([record.used, *(turn.held.last for turn in agent.own)])
            if key in lines:
                agent.savings = lines[key].savings
            self.add(agent)
