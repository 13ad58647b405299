"""The narrow waist: above it policy (who runs, what is cached), below it arithmetic.

It carries token ids, block ids, pages and hidden states, and nothing else. An engine keeps no per-request state: a
`Row` says everything about its request, so aborting one means no longer naming its row, and no state can go stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from cairn.types.layer_spec import CacheGroup
from cairn.types.outputs import TokenLogprob
from cairn.types.request import Want
from cairn.types.sampling_params import SamplingParams

T_co = TypeVar("T_co", covariant=True)

NOT_FINITE = "the model gave numbers that are not finite"
"""What is wrong with a row of which a hidden state is wanted."""
NO_BLOCK = -1
"""An entry of a window or state group's table: a block that the window has passed, or where no state is kept."""


NO_TOKEN = "the step before gave no token to go on with"
"""The error of a row whose pending token never came."""


class Pending(Protocol, Generic[T_co]):
    """The result of work that was started and may still run."""

    def wait(self) -> T_co:
        """Block until the work is done, and return its result or raise its exception."""
        ...


class EngineCall(Pending[T_co], Protocol):
    """The result of a call of an engine."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Row(msgspec.Struct, frozen=True):
    """A run of positions of one sequence: compute `tokens[start:end]`, reading and writing KV through `tables`.

    The KV of positions before `start` is already in the tables' blocks. Position p of group g lives in slot
    p % block_tokens of block tables[g][p // block_tokens]; each table covers at least `end` positions.

    A block of a state group holds the state after the last computed position of its own. A row begins with the one at
    tables[g][(start - 1) // block_tokens], or with zeros at 0, and leaves one at tables[g][(end - 1) // block_tokens].
    Wherever else it fills a block, it leaves the state there if the table has one; other entries are ignored.
    """

    tokens: Sequence[int]
    """The prompt, then what was sampled, then `draft` guesses. The caller may append to it once the call is made."""
    start: int
    end: int
    tables: tuple[Sequence[int], ...]
    logits_from: int | None
    """First position whose logits are wanted; None in the middle of a prompt.

    Logits at a position p that is followed by a known token, tokens[p + 1], give that token's log-probability
    (`RowResult.prompt_logprobs`); those at the last known token and at each guess sample the token that follows.
    """
    prompt_len: int
    """Length of the original prompt: where `min_tokens` and the presence and frequency penalties start to count."""
    sampling: SamplingParams
    choice: int
    want: Want = "token"
    """`hidden`: the row gives a state in the place of a token, where it wants logits: that of position end - 1 after
    the model's last norm; of an encoder, whose row is a whole text, its pooled states, or what a head makes of them."""
    second: int = 0
    """Where the second of two texts begins that have types of their own; 0: there is one."""
    mu: float = 0.0
    """Mirostat's state, of a row that samples by it."""
    mask: Pending[bytes] | None = None
    """Which tokens may come next, where a row samples under a grammar: bit t % 8 of byte t // 8 for token t, in whole
    words of 4 bytes. It may be computed beside the step. Empty where the grammar cannot be followed any further."""
    draft: int = 0
    """How many of the last tokens are guesses. The row samples at the last known token and at each guess, each time as
    if the guesses before were right: with their history, by the place of the new token (`RowResult.more`). The KV of
    guesses is written behind that of known tokens, where the next row writes over it. Not for groups with states."""
    pending: int | None = None
    """Number of a row of the step before: the token that it samples is this row's only one, at `start`. So
    end == start + 1, and `tokens` needs to hold no more than `start` tokens."""

    @property
    def samples(self) -> bool:
        """Whether the step samples the token after this row."""
        return self.logits_from is not None and (self.pending is not None or self.end == len(self.tokens))


def check_guesses(row: Row, *, states: bool) -> None:
    """Raise `ValueError` for a draft or a pending token that cannot be computed. `states`: whether a group has them."""
    if row.pending is not None and (row.draft or row.end != row.start + 1 or len(row.tokens) < row.start):
        raise ValueError("a row whose token is pending computes that one, behind all tokens that it knows")
    if not row.draft:
        return
    last = row.end - 1 - row.draft
    sampled = row.end == len(row.tokens) and row.logits_from is not None and row.start <= row.logits_from <= last
    if row.draft < 0 or not sampled:
        raise ValueError(
            f"a row with {row.draft} guesses ends with them and wants logits from the token before them on"
        )
    if states or row.mask is not None or row.want == "hidden":
        raise ValueError("a row with guesses has no recurrent state, no mask and no hidden state")


class RowResult(msgspec.Struct, frozen=True):
    """What a step made of one row. At most one of `token`, `hidden` and `error` is set."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    """That of the sampled token; set if `sampling.logprobs`."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    """This row alone failed, for instance with non-finite logits."""
    hidden: bytes = b""
    """float32, of a row that wants that."""
    mu: float | None = None
    """Mirostat's state after `token`, of a row that samples by it."""
    more: tuple[RowResult, ...] = ()
    """For each guess of a row's draft, in order: the token that follows it if it is right, or why there is none."""


class Ready(Generic[T_co]):
    """An `EngineCall` whose work is already done."""

    __slots__ = ("_value",)

    done = True

    def __init__(self, value: T_co) -> None:
        self._value = value

    def wait(self) -> T_co:
        """Return the value, at once."""
        return self._value


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the layers above need to know of a loaded engine."""

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
    note: str = ""
    """What loading did to the model's numbers, if anything: a sentence for the log."""
    kv_dtype: str = "float32"
    """Type of a page's numbers: float32, bfloat16, float16, or int8 with scales beside them (numpy's names)."""
    overlaps: bool = False
    """Whether a step runs beside its caller, so that the next one may be planned and submitted meanwhile."""
    generates: bool = True
    """False for an encoder: it has no groups, and `embed` is all that it can do."""


class Engine(Protocol):
    """What computes rows. Implementations: `engine.recorded`, `engine.encoder`, `engine.fake`.

    One thread calls. Calls take effect in the order in which they are made, whenever their results come: a step reads
    what a write before it wrote, and a read gives what the steps before it left. Where the engine `overlaps`, one step
    may be submitted while the one before it runs, no more. A step that raises leaves the KV of its own rows undefined
    and everything else as it was, unless it raises `DeviceError`: then nothing of the device can be relied on.
    """

    @property
    def info(self) -> EngineInfo:
        """What was loaded; constant."""
        ...

    def prefill(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute one step over rows of any length, one-token rows included: the weights are streamed once."""
        ...

    def decode(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows of exactly one token each: `prefill` with a static shape."""
        ...

    def embed(self, rows: Sequence[Row]) -> EngineCall[list[RowResult]]:
        """Compute rows that all want hidden states. An encoder's rows are whole texts without tables: what it gives
        for one is the same bit for bit whatever stands beside it."""
        ...

    def read_blocks(self, group: int, ids: Sequence[int]) -> EngineCall[list[memoryview]]:
        """Read pages of a group's blocks, `block_bytes[group]` bytes each: in host memory views, which are valid until
        the next call, elsewhere copies."""
        ...

    def write_blocks(self, group: int, ids: Sequence[int], pages: Sequence[memoryview]) -> EngineCall[None]:
        """Fill blocks with pages that `read_blocks` gave, here or in another process with the same identity."""
        ...

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> EngineCall[None]:
        """Copy a group's block `source` to block `target`, for each pair in order."""
        ...

    def close(self) -> None:
        """Give threads and memory back. No call follows."""
        ...
