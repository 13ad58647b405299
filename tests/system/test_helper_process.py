"""Isolation of every helper process that reads untrusted data: environment, descriptors, and limits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.rag import extract_parent
from cairn.system.helper_limits import OPEN_FILES
from cairn.system.helper_process import KEPT_VARIABLES
from cairn.text.chat.prompt import Chat
from cairn.text.grammar.grammar import Structure
from cairn.text.tokens import tokenizer_checks
from cairn.types.request import OutputFormat
from tests.text import text_models

Running = Callable[[Path], Any]


@asynccontextmanager
async def renderer(folder: Path) -> AsyncIterator[int]:
    text_models.write_model(folder, text_models.byte_level(), text_models.QWEN_CONFIG, "{{ messages }}")
    chat = await Chat.start(folder, Config())
    try:
        assert chat._renderer is not None and chat._renderer.pid is not None
        yield chat._renderer.pid
    finally:
        await chat.close()


@asynccontextmanager
async def grammars(folder: Path) -> AsyncIterator[int]:
    text_models.write_model(folder, text_models.byte_level(), text_models.QWEN_CONFIG)
    chat = await Chat.start(folder, Config())
    try:
        await chat.grammar(Structure(kind="regex", text="a"), OutputFormat())
        assert chat._grammars._helper.pid is not None
        yield chat._grammars._helper.pid
    finally:
        await chat.close()


@asynccontextmanager
async def grammar_trial(folder: Path) -> AsyncIterator[int]:
    """Yield the process for one grammar, stopped in the middle of it."""
    text_models.write_model(folder, text_models.byte_level(), text_models.QWEN_CONFIG)
    chat = await Chat.start(folder, Config())
    await chat.grammar(Structure(kind="regex", text="a"), OutputFormat())
    parent, child = chat._grammars._helper.pid, ""
    slow = Structure(kind="regex", text="|".join(f"(a{{{n},{n + 900}}}b)" for n in range(300)))
    task = asyncio.ensure_future(chat.grammar(slow, OutputFormat()))
    try:
        while not child and not task.done():
            await asyncio.sleep(0.001)
            child = Path(f"/proc/{parent}/task/{parent}/children").read_text().strip()
        assert child
        while limit(int(child), "Max address space") == "unlimited" and not task.done():
            await asyncio.sleep(0.001)
        os.kill(int(child), signal.SIGSTOP)
        yield int(child)
        os.kill(int(child), signal.SIGKILL)
    finally:
        await asyncio.gather(task, return_exceptions=True)
        await chat.close()


@asynccontextmanager
async def extraction(folder: Path) -> AsyncIterator[int]:
    """Yield the process that reads a document, which waits for the end of a pipe."""
    pipe, other = os.pipe()
    with os.fdopen(pipe, "rb") as file:
        process = await extract_parent._started("txt", file)
        try:
            await settled(process.pid)
            yield process.pid
        finally:
            os.close(other)
            process.kill()
            await process.wait()
            assert process.stdout is not None
            await process.stdout.read()


@asynccontextmanager
async def tokenizer_check(folder: Path) -> AsyncIterator[int]:
    """Yield the process that tries a tokenizer, which waits for its input."""
    made: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen.communicate

    def waits(self: subprocess.Popen[bytes], *args: Any, **more: Any) -> Any:
        made.append(self)
        raise subprocess.TimeoutExpired("", 0)

    kill = subprocess.Popen.kill
    patched = pytest.MonkeyPatch()
    patched.setattr(subprocess.Popen, "communicate", waits)
    patched.setattr(subprocess.Popen, "kill", lambda self: None)
    patched.setattr(subprocess.Popen, "__exit__", lambda self, *_: None)
    tokenizer_checks._probed("[null, null]", ["a"])
    patched.undo()
    (process,) = made
    try:
        await settled(process.pid)
        yield process.pid
    finally:
        kill(process)
        real(process)


async def settled(pid: int) -> None:
    """Wait until the process has set its limits."""
    for _ in range(2000):
        if limit(pid, "Max cpu time") != "unlimited":
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it sets no limits")


def limit(pid: int, name: str) -> str:
    """Return the soft limit of a process."""
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()[0]


@contextmanager
def inheritable() -> Iterator[int]:
    """Yield a descriptor that a careless parent passes on."""
    with tempfile.TemporaryFile() as file:
        handle = os.dup2(file.fileno(), 77, inheritable=True)
        try:
            yield handle
        finally:
            os.close(handle)


HELPERS: dict[str, Running] = {
    "renderer": renderer,
    "grammars": grammars,
    "one grammar": grammar_trial,
    "extraction": extraction,
    "tokenizer": tokenizer_check,
}


@pytest.mark.parametrize("name", HELPERS)
async def test_a_helper_gets_nothing_and_is_bounded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_API_KEY", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with inheritable():
        async with HELPERS[name](tmp_path / "m") as pid:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = {line.partition(b"=")[0].decode() for line in environment if line}
            assert variables <= {*KEPT_VARIABLES} and "TZ" in variables
            handles = sorted(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
            assert 77 not in handles and len(handles) <= 5, handles
            assert limit(pid, "Max core file size") == "0" == limit(pid, "Max file size")
            assert limit(pid, "Max open files") == str(OPEN_FILES)
            if name in ("renderer", "one grammar", "extraction", "tokenizer"):
                assert int(limit(pid, "Max address space")) < 3 << 30
            if name in ("one grammar", "extraction", "tokenizer"):
                assert int(limit(pid, "Max cpu time")) <= 120


def test_a_process_over_its_processor_limit_is_ended_by_the_system() -> None:
    """The parent tells its caller which limit it was."""
    loop = "from cairn.system.helper_limits import restrict\nrestrict(seconds=1)\nwhile True: pass\n"
    run = subprocess.run([sys.executable, "-c", loop], check=False, timeout=120)
    assert run.returncode == -signal.SIGXCPU


def test_a_helper_writes_no_file(tmp_path: Path) -> None:
    code = "from cairn.system.helper_limits import restrict\nfrom pathlib import Path\nrestrict()\n"
    code += f"Path({str(tmp_path / 'x')!r}).write_text('x')"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=120)
    assert run.returncode != 0 and not (tmp_path / "x").read_bytes()
