"""The router's figures, for /metrics."""

from __future__ import annotations

from collections.abc import Callable

from cairn.cluster.router.prefill import PrefillGate
from cairn.cluster.router.replicas import Replica, Replicas


class Counts:
    """What the router counts, for /metrics."""

    def __init__(self) -> None:
        self.requests = self.retries = self.followed = self.lost = self.refused = 0

    def text(self, replicas: Replicas, gate: PrefillGate) -> bytes:
        """Return them in Prometheus' format."""
        lines, index = [], replicas.index
        for name, help, value in (
            ("requests", "Requests taken.", self.requests),
            ("retries", "Times that a request was sent to another replica.", self.retries),
            ("streams_followed", "Streams that another replica went on with.", self.followed),
            ("streams_lost", "Streams whose replica died and that no other could go on with.", self.lost),
            ("refused", "Requests for which no replica was up.", self.refused),
            ("prompts_apart", "Prompts that a prefill replica computed.", gate.apart),
            ("prompts_apart_failed", "Prompts that a prefill replica was asked for in vain.", gate.failed),
            ("kv_hits", "Requests without a name whose prompt some replica held, in part at least.", index.hits),
            ("kv_misses", "Requests without a name whose prompt no replica was known to hold.", index.misses),
            ("kv_stale", "Requests whose replica had less than half of what the index expected.", index.stale),
            ("kv_snapshots", "Times that a replica reported all its blocks.", index.snapshots),
        ):
            full = f"cairn_router_{name}_total"
            lines += [f"# HELP {full} {help}", f"# TYPE {full} counter", f"{full} {value}"]
        gauges: dict[str, tuple[str, Callable[[Replica], int]]] = {
            "up": ("1 where the replica is ready.", lambda one: int(one.up)),
            "running": ("Requests in hand.", lambda one: one.busy),
            "kv_blocks": ("Blocks that the KV index has of it.", lambda one: len(one.held.blocks)),
            "kv_followed": ("1 where its KV events are read.", lambda one: int(one.held.follows)),
        }
        for name, (help, value_of) in gauges.items():
            lines += [f"# HELP cairn_router_replica_{name} {help}", f"# TYPE cairn_router_replica_{name} gauge"]
            for one in replicas.all:
                lines.append(f'cairn_router_replica_{name}{{replica="{one.url}"}} {value_of(one)}')
        name = "cairn_router_kv_texts"
        lines += [f"# HELP {name} Beginnings of texts in the KV index.", f"# TYPE {name} gauge", f"{name} {len(index)}"]
        return ("\n".join(lines) + "\n").encode()
