"""The router's figures, for /metrics."""

from __future__ import annotations

from cairn.cluster.router.prefill import PrefillGate
from cairn.cluster.router.replicas import Replicas


class Counts:
    """What the router counts, for /metrics."""

    def __init__(self) -> None:
        self.requests = self.retries = self.followed = self.lost = self.refused = 0

    def text(self, replicas: Replicas, gate: PrefillGate) -> bytes:
        """Return them in Prometheus' format."""
        lines = []
        for name, help, value in (
            ("requests", "Requests taken.", self.requests),
            ("retries", "Times that a request was sent to another replica.", self.retries),
            ("streams_followed", "Streams that another replica went on with.", self.followed),
            ("streams_lost", "Streams whose replica died and that no other could go on with.", self.lost),
            ("refused", "Requests for which no replica was up.", self.refused),
            ("prompts_apart", "Prompts that a prefill replica computed.", gate.apart),
            ("prompts_apart_failed", "Prompts that a prefill replica was asked for in vain.", gate.failed),
        ):
            full = f"cairn_router_{name}_total"
            lines += [f"# HELP {full} {help}", f"# TYPE {full} counter", f"{full} {value}"]
        for name, help in (("up", "1 where the replica is ready."), ("running", "Requests in hand.")):
            lines += [f"# HELP cairn_router_replica_{name} {help}", f"# TYPE cairn_router_replica_{name} gauge"]
            for one in replicas.all:
                value = int(one.up) if name == "up" else one.busy
                lines.append(f'cairn_router_replica_{name}{{replica="{one.url}"}} {value}')
        return ("\n".join(lines) + "\n").encode()
