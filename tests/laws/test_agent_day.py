"""Eviction that knows the standing of agents' contexts, over simulated days."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from cairn.kv.tiers.store import Standing
from tests.laws import agent_day
from tests.laws.agent_day import Disk, Memory


class LeastRecentlyUsed:
    """The plain policy: the least recently used leaf goes first, whatever its standing."""

    def __init__(self, chunks: int) -> None:
        self.most = chunks
        self.used: OrderedDict[bytes, bytes] = OrderedDict()
        self.children: dict[bytes, int] = {}

    def turn(self, keys: Sequence[bytes], now: float) -> int:
        hits = next((at for at, key in enumerate(keys) if key not in self.used), len(keys))
        for key in keys[:hits]:
            self.used.move_to_end(key)
        for at in range(hits, len(keys)):
            while len(self.used) >= self.most:
                victim = next(
                    key for key in self.used if not self.children.get(key) and (not at or key != keys[at - 1])
                )
                parent = self.used.pop(victim)
                self.children[parent] = self.children.get(parent, 1) - 1
            self.used[keys[at]] = parent = keys[at - 1] if at else b""
            self.children[parent] = self.children.get(parent, 0) + 1
        for key in reversed(keys):  # the end of a context goes first
            if key in self.used:
                self.used.move_to_end(key)
        return hits

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        pass


def test_waiting_contexts_outlive_abandoned_ones(prove: bool, figure: Callable[[str, str], None]) -> None:
    """The baseline at equal bytes is plain LRU."""
    seeds = range(100, 200 if prove else 103)
    memory, disk = ([agent_day.figures(seed, kind) for seed in seeds] for kind in (Memory, Disk))
    plain = sum(day.plain for day in memory)
    for name, found in (("memory", memory), ("disk", disk)):
        hinted = sum(day.hinted for day in found)
        assert all(day.hinted <= day.plain for day in found), (name, found)
        assert hinted < 0.95 * plain, (name, hinted, plain)
        figure(f"days of agents, tokens computed again, {name}", f"{hinted / plain:.0%} of what plain LRU has to")


def test_memory_without_hints_is_plain_lru() -> None:
    events = list(agent_day.day(1))[:200]
    chunks = len({key for event in events for key in event.keys}) // 4
    plain = agent_day.computed_again(events, LeastRecentlyUsed(chunks), hints=False)
    assert agent_day.computed_again(events, Memory(chunks), hints=False) == plain > 0
