"""Prefill apart from decode: whether a prompt is computed by another replica than the one that answers, and how.

    client's request -> prefill replica, for one token -> both share -> decode replica, which loads the KV and answers

It pays where bringing the KV over takes less time than computing it, and either that is the shorter way for the client,
or the decode replica has other answers in hand that computing would hold up. Both times are measured. Whatever goes
wrong costs time alone: the decode replica computes what it does not find.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.cluster.router.calls import read_whole
from cairn.cluster.router.replicas import Replica, Replicas
from cairn.cluster.router.routing_options import Apart
from cairn.cluster.router.upstream import UpstreamLost, request_bytes

log = logging.getLogger(__name__)

PROMPTS = frozenset(("/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions", "/v1/messages"))
"""Paths whose prompt another replica may compute first: those that keep nothing that a client asks for later."""
TOKEN_BYTES = 4
"""Bytes of a body that count as a token; the router has no tokenizer."""
LEAST_TOKENS = 256
"""Prompts below this are computed where they are answered: a chunk of KV has 64 tokens."""
GRACE_SECONDS = 10.0
"""Longest time beyond the expected one that a prefill replica may take."""
MOST_SEEN = 10_000
MOST_COLONS = 1 << 17
"""Colons in a body that is sent to another replica: so many fields can be taken apart in some 20 ms."""
_DROPPED = ("stream_options", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs")


class PrefillGate:
    """Decides for each prompt, from what was measured, and has prompts computed."""

    def __init__(self, replicas: Replicas, apart: Apart = "auto") -> None:
        self._replicas, self._apart = replicas, apart
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        """Bytes of the last body of each conversation: the replica that answered it has their KV."""
        self._sharing = 0.05
        """Average seconds of two replicas' share calls, KV transfer aside."""
        self.apart = self.failed = 0
        """Prompts that another replica computed, and those where that failed."""

    def worth(self, tokens: int, prefill: Replica, decode: Replica) -> bool:
        """Return whether to compute so many tokens elsewhere. Speeds that are not measured yet count as fast."""
        if tokens < LEAST_TOKENS:
            return False
        if self._apart == "always":
            return True
        direct = tokens / decode.computes if decode.computes else 0.0
        transfer = self._sharing + (tokens / decode.loads if decode.loads else 0.0)
        there = tokens / prefill.computes if prefill.computes else 0.0
        return transfer < direct and (there + transfer < direct or decode.busy > 1)

    async def before(
        self, decode: Replica, key: bytes, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> Replica | None:
        """Have the prompt of a request computed by a prefill replica, if that pays.

        Return the prefill replica if it was lost while it may have had the prompt.
        """
        if self._apart == "never" or path not in PROMPTS or decode.role == "prefill":
            return None
        known = self._seen.get(key, 0) if key else 0
        self._note(key, len(body))
        tokens = max(0, len(body) - known) // TOKEN_BYTES
        others = [one for one in self._replicas.all if one.role == "prefill" and one.up and not one.draining]
        if not others:
            return None
        prefill = min(others, key=lambda one: one.busy)
        if not self.worth(tokens, prefill, decode) or (asked := _for_one_token(body)) is None:
            return None
        lost = None
        limit = GRACE_SECONDS + (2 * tokens / prefill.computes if prefill.computes else 0.0)
        try:
            async with asyncio.timeout(limit):
                done = await self._exchange(prefill, path, headers, asked)
                began = time.monotonic()
                for one in (prefill, decode) if done else ():
                    done = await self._exchange(one, "/v1/cache/share", headers, b"") and done
            self._sharing += 0.3 * (time.monotonic() - began - self._sharing) if done else 0.0
        except UpstreamLost as error:
            self._replicas.lost_connection(prefill, error)
            lost = prefill if error.sent else None
            done = False
        except TimeoutError:
            done = False
        self.apart += done
        self.failed += not done
        return lost

    def _note(self, key: bytes, size: int) -> None:
        if key:
            self._seen[key] = size
            self._seen.move_to_end(key)
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)

    async def _exchange(self, replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a request and read its answer away; return whether it succeeded. Raise UpstreamLost."""
        connection = None
        replica.busy += 1
        try:
            connection = await replica.pool.exchange(request_bytes("POST", path.encode(), replica.host, headers, body))
            await read_whole(connection)
            return connection.status == 200
        except UpstreamLost:
            if replica.role != "prefill":  # the answer itself will find out
                return False
            raise
        finally:
            replica.busy -= 1
            if connection is not None:
                replica.pool.give(connection)


def _for_one_token(body: bytes) -> bytes | None:
    """Return a request for the same prompt and one token.

    None for a body that is no object, wants nothing kept or has more than MOST_COLONS fields.
    """
    if body.count(b":") > MOST_COLONS:
        return None
    try:
        # Values stay as they are written: to make objects of a long body would hold up everybody.
        found: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    if bytes(found.get("store", b"")) == b"false":  # whose KV goes into no store
        return None
    for name in _DROPPED:
        found.pop(name, None)
    most = "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"
    return msgspec.json.encode(found | {most: 1, "stream": False})
