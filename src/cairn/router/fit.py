"""How much memory a model would take, asked of a process of its own: a front stays small, and a broken file harms
nobody. `python -m cairn.router.fit` reads one frame, a `wire.LoadModel`, and writes the answer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from cairn.config.config import Config
from cairn.engine.machine import memory_available
from cairn.frontend.launch import plain
from cairn.system.posix import without_secrets
from cairn.types.errors import CairnError, ModelError, by_code
from cairn.worker import wire

COMMAND = (sys.executable, "-P", "-m", "cairn.router.fit")
SECONDS = 60.0
"""How long it may take to read the headers of a model's files."""


class Fit(msgspec.Struct, frozen=True):
    """Bytes that a model takes: for as long as it is loaded, and at the worst moment of loading."""

    held: int
    most: int
    blocks: tuple[int, ...]
    """What the pool of each group was given."""
    mapped: bool = False
    """Whether its experts stay in a mapped file, and are none of these bytes."""


class FitAnswer(msgspec.Struct, frozen=True):
    """What the process says: how it fits, or why it cannot be served."""

    fit: Fit | None = None
    code: str = ""
    message: str = ""


def fit(config: Config, place: Path, free: int, blocks: tuple[int, ...] = ()) -> Fit:
    """Read the headers of the model at `place`. `blocks`: of its pools, where they are given. Raises ModelError where
    it cannot be served."""
    from cairn.engine.needs import needs

    found = needs(config, place, free, blocks)
    return Fit(found.held, found.most, found.blocks, found.mapped > 0)


async def measure(
    config: Config, place: Path, free: int, *, blocks: tuple[int, ...] = (), in_process: bool = False
) -> Fit:
    """The same in another process; `in_process`: on a thread. Raises ModelError, also where the process ends."""
    if in_process:
        return await asyncio.to_thread(fit, config, place, free, blocks)
    asked = msgspec.msgpack.encode((plain(config), str(place), free, blocks))
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=without_secrets(),
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(asked), SECONDS)
    except TimeoutError:
        raise ModelError(f"{config.model}: its files could not be read in {SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = msgspec.msgpack.decode(said, type=FitAnswer)
    except msgspec.MsgspecError:
        raise ModelError(f"{config.model}: the process that reads its files ended ({process.returncode})") from None
    if answer.fit is None:
        raise by_code(answer.code, answer.message)
    return answer.fit


def free_now() -> int:
    """Bytes of memory that are free."""
    return memory_available()


def main() -> int:
    """The process."""
    asked = tuple[Config, str, int, tuple[int, ...]]
    config, place, free, blocks = msgspec.msgpack.decode(sys.stdin.buffer.read(wire.MAX_FRAME), type=asked)
    try:
        answer = FitAnswer(fit=fit(config, Path(place), free, blocks))
    except CairnError as error:
        answer = FitAnswer(code=error.code, message=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
