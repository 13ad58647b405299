"""The interface between policy (who runs, what is cached) and arithmetic: rows of a step, and the engine.

Only token ids, block ids, pages and hidden states cross it. An engine keeps no per-request state: a `Row` says
everything about its request, so a request is aborted by leaving its row out, and no state can go stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from cairn.types.model_spec import CacheGroup
from cairn.types.outputs import TokenLogprob
from cairn.types.request import Adapters, SamplingParams, Want

T_co = TypeVar("T_co", covariant=True)

NOT_FINITE = "the model gave numbers that are not finite"
"""Error of a row that wants a hidden state."""
NO_BLOCK = -1
"""Entry of a window or state group's table without a block: the window has passed it, or no state is kept there."""
NO_TOKEN = "the step before gave no token to go on with"
"""Error of a row whose pending token was never sampled."""


NO_ADAPTER = "an adapter of this request is no longer loaded"
"""Error of a row with an adapter that is not attached."""


class Pending(Protocol, Generic[T_co]):
    """Result of work that may still be running."""

    def wait(self) -> T_co:
        """Block until the work is done, and return its result or raise its exception."""
        ...


class EngineCall(Pending[T_co], Protocol):
    """Result of an engine call."""

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...


class Row(msgspec.Struct, frozen=True):
    """A run of positions of one sequence: compute `tokens[start:end]`, reading and writing KV through `tables`.

    The KV of positions before `start` is already in the tables' blocks. Position p of group g lives in slot
    p % block_tokens of block tables[g][p // block_tokens]; each table covers at least `end` positions.

    A block of a state group holds the state after its last computed position. A row starts from the state at
    tables[g][(start - 1) // block_tokens], or from zeros at position 0, and writes its final state to
    tables[g][(end - 1) // block_tokens]. At each block boundary that it passes, it writes the state to that block, too,
    if the table has one; other entries are ignored.
    """

    tokens: Sequence[int]
    """The prompt, then sampled tokens, then `draft` guesses. The caller may append to it once the call is made."""
    start: int
    end: int
    tables: tuple[Sequence[int], ...]
    logits_from: int | None
    """First position whose logits are wanted; None in the middle of a prompt.

    Logits at a position p that is followed by a known token, tokens[p + 1], give that token's log-probability
    (`RowResult.prompt_logprobs`); those at the last known token and at each guess sample the next token.
    """
    prompt_len: int
    """Length of the original prompt: `min_tokens` and the presence and frequency penalties count from there."""
    sampling: SamplingParams
    choice: int
    want: Want = "token"
    """`hidden`: the result is a hidden state instead of a token: that of position end - 1 after the model's last norm.
    For an encoder, whose row is a whole text, the pooled state or the scores of its head."""
    second: int = 0
    """Index of the first token of a pair's second text, for models with token types; 0: a single text."""
    mu: float = 0.0
    """Mirostat's state, if the row samples by it."""
    mask: Pending[bytes] | None = None
    """Tokens that the grammar allows next: bit t % 8 of byte t // 8 for token t, in whole words of 4 bytes. It may be
    computed in parallel to the step. Empty if the grammar cannot be followed any further."""
    draft: int = 0
    """How many of the last tokens are guesses. The row samples at the last known token and at each guess, each time as
    if the guesses before it were right: with their history, by the position of the new token (`RowResult.more`). The
    KV of guesses is written after that of known tokens, where the next row overwrites it. A recurrent state is left
    as after the last guess: the caller has kept a copy of the state before the row."""
    masks: tuple[Pending[bytes] | None, ...] = ()
    """For a draft under a grammar: after each guess, the mask of the token that follows it."""
    pending: int | None = None
    """Number of a row of the step before: the token that it samples is this row's only one, at `start`. So
    end == start + 1, and `tokens` needs to hold only `start` tokens."""

    adapters: Adapters = ()
    """Attached adapters that change this row's numbers, at most `MAX_APPLIED`. A row with an adapter that is not
    attached fails alone."""
    states_from: int | None = None
    """First position whose hidden state after the model's last norm is wanted beside all else (`RowResult.states`);
    None for none. It changes no number of the row."""
    before: bytes = b""
    """For an MTP head only: the hidden state of the position before each of the row's tokens, float32
    [end - start, hidden]."""

    @property
    def samples(self) -> bool:
        """Whether the step samples the token after this row."""
        return self.logits_from is not None and (self.pending is not None or self.end == len(self.tokens))


def check_guesses(row: Row) -> None:
    """Raise `ValueError` for a draft or pending token that cannot be computed."""
    if row.pending is not None and (row.draft or row.end != row.start + 1 or len(row.tokens) < row.start):
        raise ValueError("a row with a pending token computes that token alone, after all its known tokens")
    if not row.draft:
        return
    last = row.end - 1 - row.draft
    sampled = row.end == len(row.tokens) and row.logits_from is not None and row.start <= row.logits_from <= last
    if row.draft < 0 or not sampled:
        raise ValueError(
            f"a row with {row.draft} guesses must end with them and want logits from the token before them, or earlier"
        )
    if row.want == "hidden":
        raise ValueError("a row with guesses has no hidden state")
    if len(row.masks) != row.draft and (row.masks or row.mask is not None):
        raise ValueError(f"a row has {len(row.masks)} masks for the tokens after its {row.draft} guesses")


class RowResult(msgspec.Struct, frozen=True):
    """Result of a step for one row. At most one of `token`, `hidden` and `error` is set."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    """Log-probability of the sampled token; set if `sampling.logprobs`."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    """Why this row failed (others did not), for instance non-finite logits."""
    hidden: bytes = b""
    """The hidden state as float32, if the row wants it."""
    mu: float | None = None
    """Mirostat's state after `token`, if the row samples by it."""
    more: tuple[RowResult, ...] = ()
    """For each guess of a row's draft, in order: the token that follows it if it is right, or an error."""
    states: bytes = b""
    """The hidden states of positions `states_from` to `end` - 1 as float32, if the row wants them and did not fail."""


class Ready(Generic[T_co]):
    """An `EngineCall` whose work is already done."""

    __slots__ = ("_value",)

    done = True

    def __init__(self, value: T_co) -> None:
        self._value = value

    def wait(self) -> T_co:
        """Return the value at once."""
        return self._value


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a loaded engine for the layers above it."""

    groups: tuple[CacheGroup, ...]
    blocks: tuple[int, ...]
    """Blocks in the pool of each group."""
    block_tokens: int
    block_bytes: tuple[int, ...]
    """Bytes of one block of each group: the size of a page."""
    context: int
    """Longest sequence in tokens: the model's limit or the configured one, whichever is less."""
    vocab: int
    max_rows: int
    """Most rows in one call."""
    max_tokens: int
    """Most tokens in one call, all rows together."""
    identity: bytes
    """Root of every KV key: changes with anything that could change a number (weights, dtype, kernels, layout)."""
    device: str
    """The device's name, as `--device` takes it."""
    device_text: str = ""
    """What it is and what computes on it, for a person."""
    cpu_experts: str = ""
    """The value of the option `cpu_experts` that was settled on; "" where the device is the CPU."""
    note: str = ""
    """How loading changed the model's numbers, if at all: a sentence for the log."""
    kv_dtype: str = "float32"
    """Type of a page's numbers: float32, bfloat16, float16, or int8 with scales beside them (numpy's names)."""
    overlaps: bool = False
    """Whether a step runs asynchronously, so that the caller may plan and submit the next one meanwhile."""
    generates: bool = True
    """False for an encoder: it has no groups, and only `embed` works."""


class AdapterFacts(msgspec.Struct, frozen=True):
    """Description of an adapter for the layers above the engine."""

    digest: bytes
    rank: int
    """Its largest rank."""
    matrices: int
    """How many matrices of the model it changes."""
    memory: int
    """Bytes that it takes."""


class AdapterData(Protocol):
    """An adapter that was read and can be attached; only its engine looks into it."""

    @property
    def digest(self) -> bytes:
        """Digest of everything about it that changes a number."""
        ...


class Engine(Protocol):
    """Computes rows of tokens. Implementations: `engine.recorded`, `engine.encoder`, `engine.fake`.

    Only one thread calls it. Calls take effect in the order in which they are made, whenever their results arrive: a
    step reads what earlier writes wrote, and a read returns what earlier steps left. If the engine `overlaps`, at most
    one step may be submitted while another runs. A step that raises leaves the KV of its own rows undefined and
    everything else as it was; after a `DeviceError` nothing on the device can be relied on.
    """

    @property
    def info(self) -> EngineInfo:
        """The loaded engine's description; constant."""
        ...

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute one step over rows of any length, one-token rows included: the weights are streamed once."""
        ...

    def decode(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows of exactly one token each: `prefill` with a static shape."""
        ...

    def embed(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows that all want hidden states.

        An encoder's rows are whole texts without tables. A row's result does not depend on the other rows, bit for bit.
        """
        ...

    def read_blocks(self, group: int, ids: Sequence[int]) -> EngineCall[list[memoryview]]:
        """Read pages of a group's blocks, `block_bytes[group]` bytes each.

        Views that are valid until the next call if the pool is in host memory, else copies.
        """
        ...

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> EngineCall[None]:
        """Fill blocks with pages from `read_blocks`, of this or another process with the same identity."""
        ...

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        """Copy a group's block `source` to block `target`, for each pair in order."""
        ...

    def read_adapter(self, place: Path) -> AdapterData:
        """Read and check an adapter's files, on any thread. Raise `ModelError` if it cannot be attached."""
        ...

    def attach(self, adapter: AdapterData) -> AdapterFacts:
        """Let rows use an adapter from the next call on; a second time nothing changes."""
        ...

    def detach(self, digest: bytes) -> None:
        """Free an adapter. Rows that still name it fail; an unknown one is ignored."""
        ...

    def close(self) -> None:
        """Free threads and memory. No call may follow."""
        ...
