"""Contents of the token log's records, as values and as bytes (format 1).

Fields may be added with a default; no field changes its meaning. A payload that does not match its kind is left out and
logged, as damage is.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from cairn.types.errors import InvalidRequest
from cairn.types.outputs import Timing
from cairn.types.request import Adapters, OutputFormat, SamplingParams
from cairn.types.stats import CacheReport


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent's current state. The newest with its key counts."""

    id: str
    tenant: str
    created: float
    used: float
    root: int
    """Key of its beginning, a turn with number 0."""
    base: int
    """Key of the turn that it was forked at; the root's if it was not forked."""
    head: int
    """Key of the turn that the next one follows, unless the agent has a later turn."""
    under: int = 0
    """Key of the turn before the head, where the agent stands if the head's record is lost; 0 in old records."""
    pinned: bool = False
    ttl: float | None = None
    origin: str = ""
    metadata: dict[str, str] = {}
    left: dict[int, float] = {}
    """When the agent was moved away from a head, in seconds since 1970, by the head's key.

    The abandoned branches are kept for a time from then.
    """
    moved: float = 0.0
    """When the agent was imported, for the branches that it had then; in old records, when its head last moved."""
    model: str = ""
    """Name of the model that it was made for, or that answered last, on a server with several."""


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of a turn: its messages, and everything that its answer depends on.

    The prompt is the first `prefix` ids of the parent's context, then `ids`; `digest` is the SHA-256 of all of it.
    """

    agent: int
    """Key of the agent that made it."""
    number: int
    parent: int = 0
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    """Tools, of a beginning."""
    strict: tuple[str, ...] = ()
    """Names of tools whose calls must fit their schema, in every turn."""
    prefix: int = 0
    ids: bytes = b""
    digest: bytes = b""
    identity: bytes = b""
    """Identity of the model whose tokens these are."""
    base: bytes = b""
    """Identity of the model without its adapters; empty if it has none."""
    adapters: Adapters | None = None
    """Adapters that the answer was computed with; empty for none, None in old records."""
    engine: bytes = b""
    """Identity of what computed them, kernels included; empty in old records."""
    sampling: SamplingParams | None = None
    stop: tuple[str, ...] = ()
    output: OutputFormat = OutputFormat()
    grammar: str = ""
    """`Grammar.text` of the answer's grammar; empty for none."""
    reasoning_budget: int | None = None
    began: float = 0.0
    request: int = 0
    once: str = ""
    """The client's Idempotency-Key: the same turn with the same key is answered once more, and not run again."""


class TokensRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of an answer that is being generated."""

    ids: bytes
    at: int = -1
    """Number of the answer's tokens before it; -1 in old records."""
    text: str = ""
    """Content that these tokens completed."""
    reasoning: str = ""


class Failure(msgspec.Struct, frozen=True):
    """The error that ended an answer."""

    code: str
    message: str
    status: int = 500


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a turn, with the whole answer. The newest with its key counts."""

    state: Literal["finished", "interrupted"]
    ids: bytes
    message: dict[str, Any] | None = None
    keep: int = -1
    """How many of `ids` the next turn's context holds, followed by `more`; -1 if that is unknown."""
    more: bytes = b""
    reason: str = ""
    failure: Failure | None = None
    """Error that ended the answer; None if it was cancelled."""
    reasoning: int = 0
    """How many of the tokens are reasoning, tags included."""
    cache: CacheReport = CacheReport()
    ended: float = 0.0
    detail: str = ""
    """More on the reason, as in `Done`."""
    timing: Timing = Timing()


class ReplayRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ids that were sampled for a client that resends its conversation."""

    tenant: str
    identity: bytes
    """Identity of the model whose tokens these are."""
    before: bytes
    """SHA-256 of the ids before it."""
    visible: bytes
    reasoning: str
    ids: bytes
    at: float
    agent: int = 0
    """Key of the agent in whose name the request was made; 0 for none."""


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed, and what the cache saved, summed over answers. Survives restarts."""

    requests: int = 0
    computed: int = 0
    """Prompt tokens that were computed; `pool`, `ram` and `disk` count those that were found there."""
    pool: int = 0
    ram: int = 0
    disk: int = 0
    shared: int = 0
    """Prompt tokens from the store that all replicas share."""
    generated: int = 0
    """Sampled tokens."""
    guessed: int = 0
    """Those of them that were guessed, and so had no step of their own."""
    prefill_seconds: float = 0.0
    """Seconds spent on prompts."""
    load_seconds: float = 0.0
    """Seconds of these spent on loading KV from RAM and disk."""
    seconds_avoided: float = 0.0
    """Prefill that was saved, at the speed measured for computed tokens, minus the loading."""


class SavingsRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of savings: of an agent, of a tenant, or of a tenant's day; or the bytes of the stores.

    An agent's line has the agent's key; the others have keys of their own.
    """

    savings: Savings
    tenant: str = ""
    read: int = 0
    """Bytes of KV read from the disk, of the whole server."""
    written: int = 0
    day: int = 0
    """Day of a tenant's day, in days since 1970. Then `day_of` is the tenant, and `tenant` is empty."""
    day_of: str = ""


class UnpinRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pins that the stores do not know correctly.

    Their agent was deleted, pinned or unpinned while the stores could not be reached.
    """

    owners: tuple[str, ...] = ()
    """Owners as the stores know them: digests, which reveal nothing of the agent."""


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of a journal. The newest with its key counts."""

    room: str
    """Its reader: `team` or `run`."""
    tenant: str
    id: str
    created: float
    model: str = ""
    """Name of the model that it was made with."""
    body: bytes
    """Contents, in the room's own MessagePack."""


class EntryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of a journal."""

    journal: int
    """Key of the journal's head."""
    number: int
    """Position among the journal's entries."""
    body: bytes


P = TypeVar("P", bound=msgspec.Struct)


def decode(payload: bytes, kind: type[P]) -> P | None:
    """Decode a payload; return None if it is not a `kind`."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def check(value: object, field: str) -> None:
    """Raise InvalidRequest if no record can hold a client's value: JSON has numbers of any size."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError):
        raise InvalidRequest(
            f"{field} holds a whole number beyond 64 bits, or half a surrogate pair, which cannot be kept", field=field
        ) from None


def pack(ids: Iterable[int]) -> bytes:
    """Encode token ids, 4 bytes each, little-endian."""
    return _swapped(array("I", ids)).tobytes()


def unpack(data: bytes) -> array[int]:
    """Decode token ids. Raise ValueError if `data` is not a whole number of them."""
    ids = array("I")
    ids.frombytes(data)
    return _swapped(ids)


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
