"""What the records of the token log hold, as values and as bytes (format 1).

Fields may be added with a default; none changes its meaning. A payload that is not what its kind says is a record of
nothing: it is left out and logged, as damage is.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from cairn.types.errors import InvalidRequest
from cairn.types.request import OutputFormat
from cairn.types.sampling_params import SamplingParams
from cairn.types.stats import CacheReport


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent as it is now. The newest with its key counts."""

    id: str
    tenant: str
    created: float
    used: float
    root: int
    """Key of the record of its beginning, a turn with number 0."""
    base: int
    """Key of the turn where it was forked off; of one that was not, the root's."""
    head: int
    """Key of the turn that the next one follows, unless a later turn of its own says otherwise."""
    under: int = 0
    """Key of the turn before that one, where the agent stands if the head's record is lost; 0 in old records."""
    pinned: bool = False
    ttl: float | None = None
    origin: str = ""
    metadata: dict[str, str] = {}
    left: dict[int, float] = {}
    """Keys of the heads that it was moved away from, and when, in seconds since 1970: these branches are kept for a
    time from then."""
    moved: float = 0.0
    """When it was taken in, for the branches that it had then; in old records, when its head was last moved."""
    model: str = ""
    """The name of the model that it was made for, or that answered last, on a server with several."""


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn as it begins: what came in, and everything that its answer depends on.

    The prompt is the first `prefix` ids of the parent's context and then `ids`; `digest` is SHA-256 over all of it.
    """

    agent: int
    """Key of the agent that made it."""
    number: int
    parent: int = 0
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    """The tools of a beginning."""
    strict: tuple[str, ...] = ()
    """Those of them whose calls must fit their schema, in every turn."""
    prefix: int = 0
    ids: bytes = b""
    digest: bytes = b""
    identity: bytes = b""
    """The identity of the model whose tokens these are."""
    engine: bytes = b""
    """Identity of what computed them, kernels included; empty in old records."""
    sampling: SamplingParams | None = None
    stop: tuple[str, ...] = ()
    output: OutputFormat = OutputFormat()
    grammar: str = ""
    """`Grammar.text` of what the answer is held to; empty for anything."""
    reasoning_budget: int | None = None
    began: float = 0.0
    request: int = 0


class TokensRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of an answer that is being generated."""

    ids: bytes
    at: int = -1
    """How many tokens of the answer come before it; -1 in old records."""
    text: str = ""
    """Content that these tokens completed."""
    reasoning: str = ""


class Failure(msgspec.Struct, frozen=True):
    """What an answer failed of: the code and the sentence of an error."""

    code: str
    message: str
    status: int = 500


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn's end: the whole answer. The newest with its key counts."""

    state: Literal["finished", "interrupted"]
    ids: bytes
    message: dict[str, Any] | None = None
    keep: int = -1
    """How many of `ids` the next turn's context holds, followed by `more`; -1 where that cannot be told."""
    more: bytes = b""
    reason: str = ""
    failure: Failure | None = None
    """Of an answer that was cut by an error, and by nobody's will."""
    reasoning: int = 0
    """How many of the tokens are of reasoning, its tags among them."""
    cache: CacheReport = CacheReport()
    ended: float = 0.0


class ReplayRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ids sampled for an answer to a client that resends its conversation."""

    tenant: str
    identity: bytes
    """The identity of the model whose tokens these are."""
    before: bytes
    """SHA-256 of the ids before it."""
    visible: bytes
    reasoning: str
    ids: bytes
    at: float
    agent: int = 0
    """Key of the agent in whose name the request was made; 0 for none."""


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed and what was not computed again, summed over answers. Survives restarts."""

    requests: int = 0
    computed: int = 0
    """Prompt tokens that were computed; `pool`, `ram` and `disk` are those that were found there."""
    pool: int = 0
    ram: int = 0
    disk: int = 0
    generated: int = 0
    """How many tokens were sampled."""
    prefill_seconds: float = 0.0
    """Seconds that were spent on prompts."""
    load_seconds: float = 0.0
    """Seconds of these that went into bringing KV up from RAM and disk."""
    seconds_avoided: float = 0.0
    """Prefill that was not needed, at the speed measured for the tokens that were computed, less the loading."""


class SavingsRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of savings: an agent's under its key, a tenant's total and each of its days under keys of their own, and
    one for the bytes of all of them."""

    savings: Savings
    tenant: str = ""
    read: int = 0
    """Bytes of KV that came from the disk, of the whole server."""
    written: int = 0
    day: int = 0
    """The day of a line that is a day's, in days since 1970; then `day_of` is its tenant, and `tenant` is empty."""
    day_of: str = ""


class UnpinRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pins of an agent that was deleted while they could not be given up, or of one that was pinned or unpinned while
    the stores could not be told."""

    owners: tuple[str, ...] = ()
    """The owners as the stores know them: digests, which tell nothing of the agent."""


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A journal's head: what it is about. The newest with its key counts."""

    room: str
    """Who reads it: `team` or `run`."""
    tenant: str
    id: str
    created: float
    model: str = ""
    """The name of the model that it was made with."""
    body: bytes
    """What that room keeps of it, in MessagePack."""


class EntryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of a journal."""

    journal: int
    """The key of its head."""
    number: int
    """Its place among the journal's entries."""
    body: bytes


P = TypeVar("P", bound=msgspec.Struct)


def decode(payload: bytes, kind: type[P]) -> P | None:
    """The value of a payload, or None if it is not one."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def check(value: object, field: str) -> None:
    """InvalidRequest where no record can hold what a client said: JSON has numbers of any size."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeError):
        raise InvalidRequest(
            f"{field} holds a whole number beyond 64 bits, or half a surrogate pair, which cannot be kept", field=field
        ) from None


def pack(ids: Iterable[int]) -> bytes:
    """Token ids, 4 bytes each, little-endian."""
    return _swapped(array("I", ids)).tobytes()


def unpack(data: bytes) -> array[int]:
    """The ids of `pack`. Raises ValueError if it is not a whole number of them."""
    ids = array("I")
    ids.frombytes(data)
    return _swapped(ids)


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
