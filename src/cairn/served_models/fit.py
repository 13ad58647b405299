"""Memory needs of a model, measured in a process of its own.

So the front stays small, and a broken model file harms nobody. `python -m cairn.served_models.fit` reads one
MessagePack tuple - configuration, place, free bytes, blocks - and writes a `FitAnswer`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from cairn.config.config import Config
from cairn.frontend.launch import plain
from cairn.system.posix import without_secrets
from cairn.types.errors import CairnError, ModelError, by_code
from cairn.worker import wire

COMMAND = (sys.executable, "-P", "-m", "cairn.served_models.fit")
SECONDS = 60.0
"""Time limit for reading the headers of a model's files."""


class Fit(msgspec.Struct, frozen=True):
    """Bytes of memory that a model takes: `held` while it is loaded, `most` at the peak of loading."""

    held: int
    most: int
    blocks: tuple[int, ...]
    """Blocks in the pool of each KV group."""
    mapped: bool = False
    """Whether its experts stay in a mapped file; they are not counted in these bytes."""


class FitAnswer(msgspec.Struct, frozen=True):
    """Answer of the process: the fit, or the code and message of the error."""

    fit: Fit | None = None
    code: str = ""
    message: str = ""


def fit(config: Config, place: Path, free: int, blocks: tuple[int, ...] = ()) -> Fit:
    """Return what the model at `place` takes, by the headers of its files.

    `blocks`: blocks of its KV pools, where they are fixed already. Raise ModelError if it cannot be served.
    """
    from cairn.engine.needs import needs

    memory = needs(config, place, free, blocks)
    return Fit(memory.held, memory.most, memory.blocks, memory.mapped > 0)


async def measure(
    config: Config, place: Path, free: int, *, blocks: tuple[int, ...] = (), in_process: bool = False
) -> Fit:
    """Return what `fit` does, from another process; with `in_process` from a thread.

    Raise ModelError if the model cannot be served, or if the process ends without an answer.
    """
    if in_process:
        return await asyncio.to_thread(fit, config, place, free, blocks)
    request = msgspec.msgpack.encode((plain(config), str(place), free, blocks))
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=without_secrets(),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(request), SECONDS)
    except TimeoutError:
        raise ModelError(f"{config.model}: its files could not be read in {SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = msgspec.msgpack.decode(output, type=FitAnswer)
    except msgspec.MsgspecError:
        raise ModelError(f"{config.model}: the process that reads its files ended ({process.returncode})") from None
    if answer.fit is None:
        raise by_code(answer.code, answer.message)
    return answer.fit


def main() -> int:
    """Answer one request from standard input; return the exit status."""
    arguments = tuple[Config, str, int, tuple[int, ...]]
    config, place, free, blocks = msgspec.msgpack.decode(sys.stdin.buffer.read(wire.MAX_FRAME), type=arguments)
    try:
        answer = FitAnswer(fit=fit(config, Path(place), free, blocks))
    except CairnError as error:
        answer = FitAnswer(code=error.code, message=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
