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

from cairn.config.config import Config, TenantTurns
from cairn.kv.tiers.store import Standing
from cairn.types.errors import CairnError
from cairn.types.model_spec import ModelSpec
from cairn.types.outputs import FinishReason, Output
from cairn.types.request import Request
from cairn.types.stats import KvStats, Placed, Swept, TakenIn

MAX_FRAME = 64 << 20
"""Bytes in the longest frame, both ways: a prompt of 8 million tokens still fits."""
_PREFIX = 4
_RECEIVE = 1 << 16  # more would be a fresh mapping from the kernel for each call

T = TypeVar("T")


class WireError(CairnError):
    """The other side sent something that is not a frame, or a frame would be too long."""

    code = "wire_error"


# ---------------------------------------------------------------------------------------------- front -> worker


class LoadModel(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first frame: what to load. Secrets are not sent."""

    config: Config
    folder: str
    blocks: tuple[int, ...] = ()
    """Blocks in the pool of each group, as the worker before had them; none: as many as the configuration gives."""
    kv_part: float = 0.0
    """Where several models share the folder of stored KV: this one's part of its bytes, in a folder of its own."""
    turns: TenantTurns = TenantTurns()
    """Of tenants, by the share that their requests take."""
    wait: bool = False
    """Check the files, say so with `FilesChecked`, and take memory for the model only after `StartLoading`."""


class StartLoading(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """There is room now: load the model whose files were checked."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Take this request. The answer is its outputs in `StepOutputs` frames, or `Refused`."""

    request: Request


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """The front has no more use for this request; unknown ids are ignored."""

    id: int
    reason: FinishReason


What = Literal["flush", "pin", "mark", "prefetch", "evict", "where", "paths", "take_in", "scrub", "prune"]
"""What can be asked; the methods of `Service` with these names say what each means."""


class KVQuery(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """About the KV beyond this step. The `KVAnswer` carries the same number and comes when it is done."""

    id: int
    what: What
    tokens: tuple[int, ...] = ()
    """The context that is meant, with `salt`."""
    salt: bytes = b""
    owner: str = ""
    """The owner that pins."""
    keep: int = 0
    """Leading tokens that others need: not to be evicted."""
    disk: bool = False
    """Whether to evict from the disk, too."""
    standing: Standing = "idle"
    """How the context stands beyond `keep`."""
    path: str = ""
    """The file to take KV from."""
    model: bytes = b""
    """Identity of the model that the context is of, where that is another than this worker's: it is erased from the
    stores beside ours."""


ToWorker = LoadModel | StartLoading | Add | Drop | KVQuery


# ---------------------------------------------------------------------------------------------- worker -> front


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of the loaded engine."""

    context: int
    """Longest sequence in tokens: the model's limit or the configured one, whichever is less."""
    pool_tokens: int
    """Longest sequence that fits when it has the whole KV pool to itself."""
    vocab: int
    max_rows: int
    """Most rows in one step."""
    blocks: tuple[int, ...] = ()
    """How many blocks the pool of each group has."""
    identity: bytes = b""
    """Changes with everything that could change a number: weights, tokenizer, kernels, how KV is stored."""
    note: str = ""
    """What loading did to the model's numbers, if anything: a sentence for the log."""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The worker after a step. Counters are totals of this worker's life."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the pool's blocks that requests hold, 0 to 1; what could be evicted does not count."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    kv: KvStats | None = None
    """Set when it has changed."""
    token_seconds: float = 0.0
    """How long a token of a prompt takes, as measured; 0 before any was."""
    progress: int = 0
    """Grows whenever something gets further: a token is computed, a request ends, KV arrives, a grammar is there."""


class ModelReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""

    spec: ModelSpec
    info: Info
    trouble: str = ""
    """What does not work although requests are served: a sentence."""


class FilesChecked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """The files of a model that is to `wait` can be served, as far as their headers tell. No memory is taken yet."""


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model cannot be served; `code` is that of an error in `cairn.types.errors`."""

    code: str
    message: str


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One step of all requests in one frame. An output that is just one token travels as (id, token) in columns."""

    stats: Stats
    ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    outputs: tuple[Output, ...] = ()
    """Every output that says more than one token; a request is in `ids` or here, never in both."""
    started: tuple[int, ...] = ()
    """Requests that were computed for the first time in this step."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The worker did not take this request; `code` is that of an error in `cairn.types.errors`."""

    id: int
    code: str
    message: str
    field: str | None = None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Sent every second while the worker loads or has work: the process is alive."""

    cpu: float
    """CPU seconds used so far: a long step that computes is not a stalled one."""


class KVAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What a `KVQuery` asked for."""

    id: int
    placed: Placed = Placed()
    swept: Swept = Swept()
    trouble: str = ""
    """Why it could not be done, as a sentence."""
    kv: KvStats | None = None
    """The stores after it, where it is about all that they hold."""
    paths: tuple[str, ...] = ()
    taken: TakenIn = TakenIn()


class DeviceFailed(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """The device failed in a step: this worker ends, and no request is to blame."""

    message: str


ToFront = DeviceFailed | FilesChecked | ModelReady | LoadFailed | StepOutputs | Refused | Beat | KVAnswer

_encoder = msgspec.msgpack.Encoder()


def worker_frames() -> Frames[ToWorker]:
    """A reader of what the front sends."""
    return Frames(msgspec.msgpack.Decoder(ToWorker))


def front_frames() -> Frames[ToFront]:
    """A reader of what a worker sends."""
    return Frames(msgspec.msgpack.Decoder(ToFront))


def encode(message: ToWorker | ToFront) -> bytes:
    """The message as one frame. Raises `WireError` if it is longer than `MAX_FRAME`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body):,} bytes is more than the {MAX_FRAME:,} that a worker takes")
    return len(body).to_bytes(_PREFIX, "big") + body


class Frames(Generic[T]):
    """Cuts a stream of bytes into messages. Holds at most one unfinished frame."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._rest = bytearray()
        self._wanted = 0  # bytes until there is any use in looking at `_rest` again

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes, in order. Raises `WireError`; nothing may be fed after that."""
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
                    raise WireError(f"a frame claims {size:,} bytes; the limit is {MAX_FRAME:,}")
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

    `send` blocks while the front does not read, so a slow front holds the worker up instead of filling its memory.
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
        """Messages that are there, waiting up to `timeout` seconds (None: for ever) for the first, or for `wake`.

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
        """Let `receive` return, now or when it is called next. Any thread may call."""
        with contextlib.suppress(OSError):  # it rings already, or the channel is closed
            self._ringer.send(b"!")

    def hung_up(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the front to close its end; what it has sent stays unread."""
        return bool(self._hangup.poll(timeout * 1000))

    def hang_up(self) -> None:
        """Let both sides see the end of the stream; a thread that sends or waits for it goes on at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket: the front sees the end of the stream."""
        self._sock.close()
        self._bell.close()
        self._ringer.close()
