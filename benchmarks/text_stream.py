"""The cost of turning tokens into text: microseconds per token, and milliseconds to render and encode a chat.

    .venv/bin/python benchmarks/text_stream.py

Tokens come one per call, as in a stream; figures are medians of five runs, beside the incremental decoder of the
tokenizers library. Every run's text is compared with decoding all tokens at once.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream

import cairn
from cairn.config.config import Config
from cairn.text.chat.prompt import Chat
from cairn.text.output.stream import TextStream
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.outputs import FinishReason
from cairn.types.request import OutputFormat, Request, SamplingParams

DEMO = Path(cairn.__file__).parent / "demo"
TOKENS = 20_000
RUNS = 5


def library_stream(library: Library, ids: list[int]) -> tuple[float, str]:
    """Return the seconds of the library's incremental decoder, and its text."""
    stream = DecodeStream(skip_special_tokens=True)
    start = time.perf_counter()
    pieces = [stream.step(library, token) or "" for token in ids]
    return time.perf_counter() - start, "".join(pieces)


def text_stream(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], output: OutputFormat) -> tuple[float, str]:
    """Return the seconds of `TextStream`, and the content."""
    request = Request(id=1, prompt=(1,), sampling=SamplingParams(max_tokens=TOKENS), stop=stop, output=output)
    stream = TextStream(tokenizer, request)
    start = time.perf_counter()
    deltas = [delta for token in ids for delta in stream.push((token,))]
    deltas += stream.finish(FinishReason.STOP)[0]
    return time.perf_counter() - start, "".join(delta.text for delta in deltas)


async def chats(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Return milliseconds to render and encode chats of some lengths."""
    chat = await Chat.start(DEMO, Config())
    rows = []
    for turns in (1, 10, 100):
        messages = [
            {"role": role, "content": f"{n} tell me about the weather in this city, please"}
            for n in range(turns)
            for role in ("user", "assistant")
        ][:-1]
        times = []
        for _ in range(50):
            start = time.perf_counter()
            prompt = await chat.prompt(messages)
            times.append(time.perf_counter() - start)
        rows.append((f"{len(messages)} messages, {len(prompt.tokens)} tokens", statistics.median(times) * 1e3))
    await chat.close()
    return rows


def main() -> None:
    """Print both tables."""
    tokenizer = Tokenizer.load(DEMO)
    library = Library.from_file(str(DEMO / "tokenizer.json"))
    chance = random.Random(1)
    ordinary = [i for i in range(library.get_vocab_size()) if i not in tokenizer.control_ids]
    words = [i for i in ordinary if (text := tokenizer.token_bytes(i)).isascii() and b"<" not in text]
    ids = [chance.choice(words) for _ in range(TOKENS)]
    whole = library.decode(ids)
    kinds = {
        "plain": ((), OutputFormat()),
        "stop strings": (("\n\nHuman:", "@@@"), OutputFormat()),
        "reasoning and tools": ((), OutputFormat(reasoning=True, tools=True)),
        "all of it": (("\n\nHuman:", "@@@"), OutputFormat(reasoning=True, tools=True)),
    }
    print(f"{'microseconds a token':<28}{'us':>8}{'tokens/s':>14}")
    for name, (stop, output) in kinds.items():
        runs = [text_stream(tokenizer, ids, stop, output) for _ in range(RUNS)]
        if any(text != whole for _, text in runs):
            raise SystemExit(f"{name}: the text is not the decoded whole")
        seconds = statistics.median(seconds for seconds, _ in runs) / TOKENS
        print(f"{name:<28}{seconds * 1e6:>8.2f}{1 / seconds:>14,.0f}")
    runs = [library_stream(library, ids) for _ in range(RUNS)]
    seconds = statistics.median(seconds for seconds, _ in runs) / TOKENS
    print(f"{'tokenizers DecodeStream':<28}{seconds * 1e6:>8.2f}{1 / seconds:>14,.0f}")
    print(f"\n{'milliseconds a chat':<40}{'ms':>8}")
    for row, milliseconds in asyncio.run(chats(tokenizer)):
        print(f"{row:<40}{milliseconds:>8.2f}")


if __name__ == "__main__":
    main()
