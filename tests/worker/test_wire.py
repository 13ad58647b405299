"""Frames: messages arrive as they were sent, however they are cut; anything else ends the connection."""

from __future__ import annotations

import random
import socket
import threading
import time

import msgspec
import pytest

from cairn.config.config import Config
from cairn.config.values import Secret
from cairn.types.errors import CairnError, GenerationFailed, ModelFileError, Overloaded, by_code
from cairn.types.outputs import FinishReason, Output, Timing, TokenLogprob
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport
from cairn.worker import wire

REQUEST = Request(
    id=(1 << 63) - 1,
    prompt=tuple(range(1000)),
    sampling=SamplingParams(max_tokens=5, logit_bias=((3, -1.5),), stop_token_ids=(2,)),
    generated=(7, 8),
    stop=("\n\n",),
    salt=b"\x00tenant",
    timeout=1.5,
)
OUTPUT = Output(
    id=4,
    tokens=(1, 2),
    logprobs=(TokenLogprob(1, -0.5, ((1, -0.5), (9, -2.0))),),
    finish=FinishReason.LENGTH,
    cache=CacheReport(computed=3, pool=16),
    timing=Timing(queue=0.1, prefill=0.2, decode=0.3),
)
TO_WORKER = [wire.LoadModel(Config(), "/models/x"), wire.Add(REQUEST), wire.Drop(5, FinishReason.STOP)]
TO_FRONT = [
    wire.LoadFailed("model_file_error", "no config.json"),
    wire.StepOutputs(stats=wire.Stats(running=3), ids=(1, 2), tokens=(10, 20), outputs=(OUTPUT,), started=(1,)),
    wire.Refused(9, "overloaded", "full"),
    wire.Beat(cpu=0.5),
]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100, 1 << 20])
def test_frames_arrive_whole_and_in_order_however_they_are_cut(piece: int) -> None:
    for reader, messages in ((wire.worker_frames(), TO_WORKER), (wire.front_frames(), TO_FRONT)):
        data = b"".join(wire.encode(message) for message in messages)
        arrived = [m for at in range(0, len(data), piece) for m in reader.feed(data[at : at + piece])]
        assert arrived == messages


def test_a_large_frame_in_many_pieces_is_not_copied_again_and_again() -> None:
    message = wire.LoadFailed("model_error", "x" * (8 << 20))
    data, reader = wire.encode(message), wire.front_frames()
    arrived = [m for at in range(0, len(data), 4096) for m in reader.feed(data[at : at + 4096])]
    assert arrived == [message]


def test_frames_longer_than_the_cap_are_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    message = wire.LoadFailed("model_error", "x" * 1000)
    size = len(wire.encode(message)) - 4
    monkeypatch.setattr(wire, "MAX_FRAME", size)
    data = wire.encode(message)
    assert wire.front_frames().feed(data) == [message]
    monkeypatch.setattr(wire, "MAX_FRAME", size - 1)
    with pytest.raises(wire.WireError, match="limit"):
        wire.front_frames().feed(data[:4])
    with pytest.raises(wire.WireError):
        wire.encode(message)


def test_nonsense_ends_the_connection_and_nothing_else() -> None:
    """Whatever the bytes, the reader raises `WireError` or returns messages of known types."""
    random_bytes = random.Random(5)
    good = wire.encode(wire.Add(REQUEST))
    broken = 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(random_bytes.randint(1, 4)):
            data[random_bytes.randrange(4, len(data))] = random_bytes.randrange(256)
        try:
            for message in wire.worker_frames().feed(bytes(data)):
                assert isinstance(message, wire.Add)
        except wire.WireError:
            broken += 1
    assert broken > 500
    for body in (b"", b"\xc1", b"\x91\xa4boom", b"\x90", b"\x91" * 5000, msgspec.msgpack.encode(["add", {"id": 1}])):
        with pytest.raises(wire.WireError):
            wire.worker_frames().feed(len(body).to_bytes(4, "big") + body)


def test_no_secret_can_be_sent() -> None:
    with pytest.raises(TypeError):
        wire.encode(wire.LoadModel(Config(api_key=(Secret("k"),)), ""))


@pytest.mark.parametrize("kind", [CairnError, GenerationFailed, ModelFileError, Overloaded])
def test_errors_keep_their_type(kind: type[CairnError]) -> None:
    error = by_code(kind.code, "why")
    assert type(error) is kind
    assert str(error) == "why"


def test_an_unknown_error_code_is_our_own_fault() -> None:
    assert type(by_code("from the future", "x")) is CairnError


def test_a_channel_blocks_while_the_front_does_not_read() -> None:
    """A slow front delays the worker, whose memory does not grow. Known failure 43."""
    front, worker = socket.socketpair()
    with front, worker:
        channel = wire.Channel(worker)
        sent = 0

        def flood() -> None:
            nonlocal sent
            for _ in range(10_000):
                channel.send(TO_FRONT[1])  # type: ignore[arg-type]
                sent += 1

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        stuck = sent
        assert 0 < stuck < 10_000
        reader, arrived = wire.front_frames(), 0
        while arrived < 10_000:
            arrived += len(reader.feed(front.recv(1 << 20)))
        thread.join()
        assert sent == 10_000
        channel.close()


def test_receive_waits_no_longer_than_asked_and_tells_when_the_front_is_gone() -> None:
    front, worker = socket.socketpair()
    channel = wire.Channel(worker)
    assert channel.receive(0) == []
    front.sendall(wire.encode(TO_WORKER[2])[:3])
    assert channel.receive(0.01) == []
    front.sendall(wire.encode(TO_WORKER[2])[3:])
    assert channel.receive(None) == [TO_WORKER[2]]
    front.close()
    with pytest.raises(EOFError):
        channel.receive(None)
    with pytest.raises(OSError):
        channel.send(TO_FRONT[0])  # type: ignore[arg-type]
    channel.close()


def test_a_channel_can_be_woken_up() -> None:
    """Known failure 5: the loop hears at once of a store that has something for it, also before anybody listens."""
    front, worker = socket.socketpair()
    channel = wire.Channel(worker)
    with front:
        for _ in range(3):
            channel.wake()
        assert channel.receive(None) == []
        assert channel.receive(0) == []
        threading.Timer(0.05, channel.wake).start()
        began = time.monotonic()
        assert channel.receive(10) == []
        assert time.monotonic() - began < 5
        channel.wake()
        front.sendall(wire.encode(TO_WORKER[1]))
        assert channel.receive(None) == [TO_WORKER[1]]
    channel.close()
    channel.wake()
