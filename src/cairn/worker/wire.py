"""Frames between the front and a worker: typed, length-prefixed, length-capped; nothing in them is ever executed.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: one of the structs below as an array whose
first element names it. A frame that is too long, broken or of an unknown kind ends the connection (`WireError`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Generic, Literal, TypeVar

import msgspec

from cairn.config.config import Config
from cairn.config.values import TenantTurns
from cairn.kv.pool.prefix import Layout
from cairn.kv.tiers.store import Standing
from cairn.types.errors import CairnError
from cairn.types.model_spec import ModelSpec
from cairn.types.outputs import FinishReason, Output
from cairn.types.request import Request
from cairn.types.stats import BlockChanges, ImportedKv, KvStats, Placed, Swept
from cairn.types.step import AdapterFacts

MAX_FRAME = 64 << 20
"""Bytes in the longest frame, both ways: a prompt of 8 million tokens still fits."""
_PREFIX = 4
_RECEIVE = 1 << 16  # more would be a fresh mapping from the kernel for each call

T = TypeVar("T")


class WireError(CairnError):
    """A malformed or unexpected frame, or a frame that is too long."""

    code = "wire_error"


# ---------------------------------------------------------------------------------------------- front -> worker


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an adapter is."""

    name: str
    path: str
    digest: bytes = b""
    """Digest that it had in the worker before; empty at the start, where one that cannot be attached is an error."""


class LoadModel(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first frame: what to load. Secrets are not sent."""

    config: Config
    folder: str
    blocks: tuple[int, ...] = ()
    """Blocks in each group's pool, as the previous worker had them; (): as the configuration says."""
    kv_part: float = 0.0
    """This model's part of the KV folder's bytes if several models share it; 0: all."""
    turns: TenantTurns = TenantTurns()
    """Weights and classes of tenants, by `Request.share`."""
    adapters: tuple[AdapterPlace, ...] = ()
    """Adapters to attach."""
    draft: str = ""
    """Place of the draft model; empty without one."""
    wait: bool = False
    """Check the files, send `FilesChecked`, and allocate memory for the model only after `StartLoading`."""


class StartLoading(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Load the model whose files were checked: there is memory now."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Run this request. It is answered by outputs in `StepOutputs` frames, or by `Refused`."""

    request: Request


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Cancel this request; unknown ids are ignored."""

    id: int
    reason: FinishReason


What = Literal[
    "flush",
    "share",
    "pin",
    "mark",
    "prefetch",
    "evict",
    "where",
    "paths",
    "import_kv",
    "scrub",
    "prune",
    "attach",
    "detach",
    "follow",
    "unfollow",
]
"""Operations on stored KV and on adapters; the methods of `Service` with these names define them."""


class KVQuery(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A query or operation on KV. The `KVAnswer` carries the same id and is sent when it is done."""

    id: int
    what: What
    tokens: tuple[int, ...] = ()
    """The context's tokens; `salt` belongs to it."""
    salt: bytes = b""
    owner: str = ""
    """Owner of the pin."""
    keep: int = 0
    """Leading tokens that must stay because others need them."""
    disk: bool = False
    """Whether to evict from the disk, too."""
    standing: Standing = "idle"
    """Reuse hint for the context beyond `keep`."""
    path: str = ""
    """File to import KV from."""
    model: bytes = b""
    """Identity of the context's model if it is not this worker's: its KV is erased from that model's store."""
    searched: tuple[bytes, ...] | None = None
    """If no store is named after `model`, the context is looked for in all stores but those of these models, by its
    tokens. None: it is not looked for."""
    adapter: bytes = b""
    """Digest of the adapter to detach."""
    whole: bool = False
    """Whether to answer with all blocks that are held, not with what changed."""


ToWorker = LoadModel | StartLoading | Add | Drop | KVQuery


# ---------------------------------------------------------------------------------------------- worker -> front


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the loaded engine for the front."""

    context: int
    """Longest sequence in tokens: the model's limit or the configured one, whichever is less."""
    pool_tokens: int
    """Longest sequence that fits when it has the whole KV pool to itself."""
    vocab: int
    max_rows: int
    """Most rows in one step."""
    blocks: tuple[int, ...] = ()
    """Blocks in the pool of each group."""
    identity: bytes = b""
    """Changes with everything that could change a number: weights, tokenizer, kernels, how KV is stored."""
    note: str = ""
    """How loading changed the model's numbers, if at all: a sentence for the log."""
    device: str = ""
    """Name of the device that computes."""
    device_text: str = ""
    """What it is and what computes on it, for a person."""
    cpu_experts: str = ""
    """See `EngineInfo`."""
    layout: Layout = Layout(0, ())
    """How tokens become blocks."""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The worker's statistics after a step. Counters are totals of this worker's life."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the pool's blocks that requests hold, 0 to 1; cached blocks that could be evicted do not count."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    kv: KvStats | None = None
    """Set if it has changed."""
    token_seconds: float = 0.0
    """Measured seconds for each prompt token; 0 before the first measurement."""
    accepted: int = 0
    """Guesses of the next tokens that were right and are in an answer."""
    rejected: int = 0
    """All other guesses."""
    progress: int = 0
    """Grows with any progress: a token computed, a request ended, KV loaded, a grammar compiled."""


class ModelReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""

    spec: ModelSpec
    info: Info
    trouble: str = ""
    """A sentence on what does not work, such as the disk store, although requests are served."""
    adapters: tuple[AdapterFacts | None, ...] = ()
    """Those of `LoadModel.adapters`; None for one that could not be attached again."""


class FilesChecked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """Sent if `LoadModel.wait`: the files can be served, judging by their headers. No memory is allocated yet."""


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served; `code` is that of an error class in `cairn.types.errors`."""

    code: str
    message: str


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The outputs of a step in one frame. An output that is only one token is sent in the columns `ids`, `tokens`."""

    stats: Stats
    ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    outputs: tuple[Output, ...] = ()
    """All other outputs; a request is in `ids` or here, never in both."""
    started: tuple[int, ...] = ()
    """Requests that ran for the first time in this step."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The worker rejects this request; `code` is that of an error class in `cairn.types.errors`."""

    id: int
    code: str
    message: str
    field: str | None = None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sent every second while the worker loads or has work: the process is alive."""

    cpu: float
    """CPU seconds used so far: they tell a long step from a stalled one."""


class KVAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to a `KVQuery`."""

    id: int
    placed: Placed = Placed()
    swept: Swept = Swept()
    trouble: str = ""
    """Why the operation failed, as a sentence; empty if it did not."""
    kv: KvStats | None = None
    """The stores' statistics after an operation that concerns all of them."""
    paths: tuple[str, ...] = ()
    taken: ImportedKv = ImportedKv()
    adapter: AdapterFacts | None = None
    """The adapter that was attached."""
    blocks: BlockChanges = BlockChanges()
    routine: bool = False
    """Whether the question is polled, so that its answer does not count as progress."""
    refused: str = ""
    """Why an adapter cannot be attached, as a sentence: the caller's mistake."""


class DeviceFailed(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """The device failed in a step: this worker exits, and no request is to blame."""

    message: str


ToFront = DeviceFailed | FilesChecked | ModelReady | LoadFailed | StepOutputs | Refused | Beat | KVAnswer

_encoder = msgspec.msgpack.Encoder()


def worker_frames() -> Frames[ToWorker]:
    """Return a parser for the front's messages."""
    return Frames(msgspec.msgpack.Decoder(ToWorker))


def front_frames() -> Frames[ToFront]:
    """Return a parser for a worker's messages."""
    return Frames(msgspec.msgpack.Decoder(ToFront))


def encode(message: ToWorker | ToFront) -> bytes:
    """Return the message as one frame. Raises `WireError` if it is longer than `MAX_FRAME`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a message has {len(body):,} bytes; the limit of a frame is {MAX_FRAME:,}")
    return len(body).to_bytes(_PREFIX, "big") + body


class Frames(Generic[T]):
    """Splits a stream of bytes into messages. Buffers at most one unfinished frame."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._rest = bytearray()
        self._wanted = 0  # parse again once `_rest` has so many bytes

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that `data` completes, in order. Raises `WireError`; feed nothing after that."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
        messages, used = self._parse(memoryview(data))
        self._rest = bytearray(data[used:])
        return messages

    def _parse(self, view: memoryview) -> tuple[list[T], int]:
        messages: list[T] = []
        at = 0
        self._wanted = _PREFIX
        try:
            while len(view) - at >= _PREFIX:
                size = int.from_bytes(view[at : at + _PREFIX], "big")
                if size > MAX_FRAME:
                    raise WireError(f"a frame announces {size:,} bytes; the limit is {MAX_FRAME:,}")
                if len(view) - at < _PREFIX + size:
                    self._wanted = _PREFIX + size
                    break
                at += _PREFIX + size
                messages.append(self._decoder.decode(view[at - size : at]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"a frame is broken: {error}") from error
        return messages, at


class Channel:
    """The worker's end of the socket. `send` may be called by several threads.

    `send` blocks while the front does not read: back-pressure instead of a growing buffer.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames = worker_frames()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._poll.register(self._bell, select.POLLIN)
        self._hangup = select.poll()
        self._hangup.register(sock, 0)  # a hang-up is always reported

    def send(self, message: ToFront) -> None:
        """Send one frame. Raises `OSError` when the front is gone."""
        data = encode(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self, timeout: float | None) -> list[ToWorker]:
        """Return the messages received, waiting up to `timeout` seconds (None: forever) for the first or for `wake`.

        Raises `EOFError` when the front is gone and `WireError` on a bad frame.
        """
        messages: list[ToWorker] = []
        wait = None if timeout is None else timeout * 1000
        while not messages and (ready := self._poll.poll(wait)):
            handles = {handle for handle, _ in ready}
            if self._bell.fileno() in handles:
                self._bell.recv(_RECEIVE)
                wait = 0
            if handles == {self._bell.fileno()}:
                continue
            data = self._sock.recv(_RECEIVE)
            if not data:
                raise EOFError("the front closed the connection")
            messages.extend(self._frames.feed(data))
        return messages

    def wake(self) -> None:
        """Make the current or next `receive` return. Thread-safe."""
        with contextlib.suppress(OSError):  # a wake-up is pending already, or the channel is closed
            self._ringer.send(b"!")

    def hung_up(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the front to close its end, without reading; tell whether it did."""
        return bool(self._hangup.poll(timeout * 1000))

    def hang_up(self) -> None:
        """Shut the connection down in both directions, which unblocks threads that send or wait for its end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the wake-up pipe."""
        self._sock.close()
        self._bell.close()
        self._ringer.close()
