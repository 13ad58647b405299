"""Many streams at once over real sockets, compared with what the fake engine must answer."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cairn
from cairn.config.config import Config
from cairn.engine.fake import FakeEngine
from cairn.engine.load_engine import load_engine
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.request import SamplingParams
from tests.api.process import KV_GB, Served, alive, served
from tests.api.sockets import events, request_bytes

DEMO = Path(cairn.__file__).parent / "demo"
TOKENS = 64
LONG = 300
Figure = Callable[[str, str], None]


class Truth:
    """The answers that the server must give."""

    def __init__(self) -> None:
        # The fake engine's logits depend on the size of its pool, so it is built as the server builds its own.
        self.spec, engine = load_engine(Config(engine="fake", kv_gb=KV_GB), DEMO)
        assert isinstance(engine, FakeEngine)
        self.engine = engine
        self.tokenizer = Tokenizer.load(DEMO)

    def prompt(self, rng: random.Random) -> list[int]:
        return [rng.randrange(300, self.spec.vocab) for _ in range(rng.randint(3, 40))]

    def text(self, prompt: list[int], tokens: int = TOKENS, **sampling: Any) -> str:
        params = SamplingParams(max_tokens=tokens, **({"temperature": 0.0} | sampling))
        return self.tokenizer.decode(self.engine.oracle(prompt, params, tokens))


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:
    base = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return base | {"stream": True, "stream_options": {"include_usage": True}} | more


async def stream(port: int, body: dict[str, Any]) -> tuple[list[Any], float]:
    """Return the events of one streamed completion, and the seconds until its first byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began = time.monotonic()
        writer.write(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head
        first = time.monotonic() - began
        data = b""
        while size := int(await reader.readline(), 16):
            data += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return events(data), first
    finally:
        writer.close()


def texts(found: list[Any], choices: int = 1, tokens: int = TOKENS) -> list[str]:
    """Return each choice's text; fail unless the stream is well-formed from the first event to the last."""
    assert found[-1] == "[DONE]"
    *chunks, usage, _ = found
    said = [""] * choices
    ended: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in ended
        said[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ended[choice["index"]] = choice["finish_reason"]
    assert ended == dict.fromkeys(range(choices), "length")
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == tokens * choices
    return said


UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
MIXES: list[tuple[str, dict[str, Any], int]] = [
    ("greedy", {}, 1),
    ("seeded, penalised", UNCUT | {"temperature": 0.9, "top_k": 50, "seed": 3, "frequency_penalty": 0.5}, 1),
    ("two choices", UNCUT | {"temperature": 0.9, "seed": 4, "n": 2}, 2),
]


@pytest.mark.parametrize(("name", "more", "choices"), MIXES)
async def test_concurrent_streams_are_complete_in_order_and_once(
    truth: Truth, figure: Figure, prove: bool, name: str, more: dict[str, Any], choices: int
) -> None:
    """Known failures 2, 9, 22: nothing is lost, repeated, mixed up or reordered."""
    count = (1000 if prove else 100) // choices
    rng = random.Random(name)
    prompts = [truth.prompt(rng) for _ in range(count)]
    with served(max_queue=2000, max_running=1024, step_tokens=4096) as server:
        await stream(server.port, body_of(prompts[0]))
        before = server.rss()
        results = await asyncio.gather(*(stream(server.port, body_of(prompt, **more)) for prompt in prompts))
        grown = server.rss() - before
        assert server.family() and server.post("/detokenize", {"tokens": []}) == {"prompt": "", "content": ""}
    firsts = sorted(first for _, first in results)
    figure(
        f"{count * choices} concurrent streams of {TOKENS} tokens ({name})",
        f"all complete, in order, once; first byte p99 {firsts[int(len(firsts) * 0.99)]:.2f} s, "
        f"front's memory +{grown / (1 << 20):.0f} MiB",
    )
    assert grown < 256 << 20
    for index in sorted(range(count), key=lambda _: rng.random())[: count if prove else 40]:
        sampling = {key: value for key, value in more.items() if key != "n"}
        said = texts(results[index][0], choices)
        for choice in range(choices):
            params = SamplingParams(max_tokens=TOKENS, **({"temperature": 0.0} | sampling))
            tokens = truth.engine.oracle(prompts[index], params, TOKENS, choice)
            assert said[choice] == truth.tokenizer.decode(tokens), (name, index, choice)
    for chunks, _ in results:
        texts(chunks, choices)


async def test_stream_and_whole_say_the_same(truth: Truth) -> None:
    """Known failure 22."""
    rng = random.Random(5)
    with served() as server:
        for _ in range(5):
            body = body_of(truth.prompt(rng), temperature=0.8, seed=rng.getrandbits(32), stop=["e ", "xq"])
            chunks, _ = await stream(server.port, body)
            plain = {key: value for key, value in body.items() if not key.startswith("stream")}
            whole = server.post("/v1/completions", plain)
            said = "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])
            assert said == whole["choices"][0]["text"]
            assert chunks[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert "e " not in said and "xq" not in said


async def read_to_the_end(port: int, body: dict[str, Any]) -> list[Any]:
    chunks, _ = await stream(port, body)
    return chunks


async def test_sigterm_under_load_cuts_nothing_within_the_grace(truth: Truth, figure: Figure, prove: bool) -> None:
    """Known failure 3: every running request ends whole, the process exits with 0, and no process is left."""
    rounds = 20 if prove else 2
    rng = random.Random(9)
    whole = 0
    for number in range(rounds):
        prompts = [truth.prompt(rng) for _ in range(10)]
        with served(shutdown_grace=60) as server:
            bodies = [body_of(prompt, max_tokens=LONG) for prompt in prompts]
            running = [asyncio.create_task(read_to_the_end(server.port, body)) for body in bodies]
            while not (await metrics(server))["cairn:num_requests_running"] and not any(
                task.done() for task in running
            ):
                await asyncio.sleep(0.005)
            family = server.family()
            await asyncio.sleep(rng.random() * 0.05)
            if number % 2:
                server.signal_all(signal.SIGINT)
            else:
                server.signal()
            for index, outcome in enumerate(await asyncio.gather(*running, return_exceptions=True)):
                if isinstance(outcome, ConnectionRefusedError | AssertionError):
                    assert "503" in str(outcome) or isinstance(outcome, ConnectionRefusedError), outcome
                    continue
                assert not isinstance(outcome, BaseException), outcome
                assert texts(outcome, tokens=LONG) == [truth.text(prompts[index], LONG)]
                whole += 1
            assert await asyncio.to_thread(server.wait, 60) == 0
            assert not alive(family)
    figure("SIGTERM under load", f"{rounds} of {rounds}: {whole} streams whole, none cut, exit 0, no process left")
    assert whole >= 5 * rounds


async def metrics(server: Served) -> dict[str, float]:
    """Return the metrics' values without labels that vary."""
    import httpx

    async with httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False) as http:
        text = (await http.get("/metrics")).text
    results = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            results[name.partition("{")[0]] = float(value)
    return results


async def test_cancels_leave_nothing_behind(truth: Truth, figure: Figure, prove: bool) -> None:
    """Known failures 12, 42: clients that leave at random points, streaming and not, hold no block and no slot."""
    count = 2000 if prove else 200
    rng = random.Random(11)
    with served(max_queue=2000) as server:
        gate = asyncio.Semaphore(50)

        async def leave() -> None:
            async with gate:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                body = body_of(truth.prompt(rng), max_tokens=1500) | {"stream": rng.random() < 0.5}
                if not body["stream"]:
                    del body["stream_options"]
                data = request_bytes("POST", "/v1/completions", json.dumps(body).encode())
                writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
                with_answer = body["stream"] and rng.random() < 0.5
                if with_answer:
                    await asyncio.wait({asyncio.ensure_future(reader.read(100))}, timeout=rng.random())
                else:
                    await asyncio.sleep(rng.random() * 0.05)
                writer.transport.abort() if rng.random() < 0.5 else writer.close()

        await asyncio.gather(*(leave() for _ in range(count)))
        async with asyncio.timeout(60):
            while True:
                now = await metrics(server)
                if not (now["cairn:num_requests_running"] or now["cairn:num_requests_waiting"]):
                    break
                await asyncio.sleep(0.05)
        prompt = truth.prompt(rng)
        chunks, _ = await stream(server.port, body_of(prompt))
        assert texts(chunks) == [truth.text(prompt)]
        usage = next(value for name, value in (await metrics(server)).items() if "cache_usage" in name)
        assert usage == 0.0
    figure("cancels over HTTP", f"{count}: nothing running, waiting or held at the end")
