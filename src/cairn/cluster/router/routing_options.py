"""How a router shares out requests: the values of its options."""

from __future__ import annotations

from typing import Literal, get_args

Routing = Literal["kv", "names", "round-robin", "least-load"]
"""By what requests name, and else by who holds their KV; by names or the conversation's beginning; in turn; or to
whoever has the fewest in hand."""
ROUTING: tuple[str, ...] = get_args(Routing)
Apart = Literal["auto", "always", "never"]
"""When prefill replicas compute prompts; auto: where it pays."""
APART: tuple[str, ...] = get_args(Apart)
