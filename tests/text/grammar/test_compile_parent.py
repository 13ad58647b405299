"""The helper process that compiles grammars: its bounds, fairness among tenants, and how long callers wait."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.text.chat.prompt import Chat
from cairn.text.grammar import compile_parent
from cairn.text.grammar.compile_parent import GrammarHelper
from cairn.text.grammar.compile_wire import MOST_BYTES, SECONDS, Compile, GrammarVerdict
from cairn.text.grammar.grammar import Kind, Shape, Structure
from cairn.text.grammar.vocabulary import TokenTable, token_table
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import InvalidRequest, Overloaded, Unavailable
from cairn.types.request import OutputFormat
from tests.text import text_models

SLOW = "|".join(f"(a{{{n},{n + 900}}}b)" for n in range(300))
"""Takes a second or more to compile."""
HEAVY = {"allOf": [{"type": "string", "pattern": f"a{{{n},{n + 900}}}b"} for n in range(60)]}
"""Exceeds the limit of memory or of time."""
MULTIPLES = {"anyOf": [{"type": "integer", "multipleOf": 99_991 - 2 * n} for n in range(10)]}


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit on waiting to minutes: these tests are about processor time, which a busy machine may not
    have.
    """
    monkeypatch.setattr(compile_parent, "STALLED", 300.0)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    folder = tmp_path_factory.mktemp("m") / "m"
    text_models.write_model(folder, text_models.byte_level(), text_models.QWEN_CONFIG)
    tokenizer = Tokenizer.load(folder)
    return token_table(tokenizer, tokenizer.largest_id + 1, sorted(tokenizer.end_ids))


@pytest.fixture
async def helper(table: TokenTable) -> AsyncIterator[GrammarHelper]:
    made = GrammarHelper(lambda _: table)
    yield made
    await made.close()


def made(kind: Kind, text: str, **more: Any) -> Compile:
    return Compile(vocab=(), shape=Shape(structure=Structure(kind=kind, text=text), **more))


def regex(text: str) -> Compile:
    return made("regex", text)


def schema(value: Any, **more: Any) -> Compile:
    return made("json", json.dumps(value), **more)


def children(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def children_seconds(pid: int | None) -> float:
    """Return the processor time of a process's ended children, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


async def test_a_verdict_has_a_grammars_memory_and_its_growth(helper: GrammarHelper) -> None:
    small = await helper.compile(schema({"type": "boolean"}), "x", "a")
    large = await helper.compile(schema({"type": "integer", "multipleOf": 99_991}), "x", "a")
    growing = await helper.compile(regex(r"\p{L}{1,1000}\p{N}"), "x", "a")
    assert not small.ended and small.bytes < 2 << 20 and small.growth < 20_000
    assert 20 << 20 < large.bytes < MOST_BYTES and large.growth < 100_000
    assert growing.growth > 10 * small.growth + 10_000
    again = await helper.compile(Compile(vocab=(), text=growing.text), "x", "a")
    assert again.text == growing.text and not again.ended


async def test_reasoning_before_it_does_not_hide_what_an_answer_costs(helper: GrammarHelper) -> None:
    pattern = {"type": "string", "pattern": r"^\p{L}{1,1000}$"}
    bare, behind = [await helper.compile(schema(pattern, reasoning=how), "x", "a") for how in ("", "open")]
    assert behind.growth > 0.5 * bare.growth > 5_000


@pytest.mark.parametrize(
    ("job", "ended", "said"),
    [
        (schema(HEAVY), ("seconds", "memory"), ""),
        (schema(MULTIPLES), ("seconds", "memory"), ""),
        (schema({"type": "integer", "multipleOf": 10**6}), ("wrong",), "the limit is 100000"),
        (regex("a{1000000}"), ("wrong", "seconds", "memory"), ""),
        (made("lark", "(" * 100_000), ("wrong",), ""),
        (made("gbnf", "root ::= " + "(" * 50_000), ("wrong",), ""),
        (regex("(" * 50_000 + ")" * 50_000), ("wrong",), ""),
        (made("json", '{"a":' * 3000 + "1" + "}" * 3000), ("wrong",), ""),
        (made("json", '{"multipleOf":' + "9" * 5000 + "}"), ("wrong",), ""),
        (schema({"$ref": "#"}), ("wrong",), "no text fits it"),
    ],
)
async def test_a_bomb_costs_itself_alone(
    helper: GrammarHelper, job: Compile, ended: tuple[str, ...], said: str
) -> None:
    assert not (await helper.compile(regex("a"), "x", "a")).ended
    pid = helper.pid
    verdict = await helper.compile(job, "x", "a")
    assert verdict.ended in ended and said in verdict.error, verdict
    assert verdict.seconds < SECONDS + 5 and len(verdict.error) < 500
    assert not (await helper.compile(regex("a"), "x", "a")).ended
    assert helper.pid == pid, "the helper itself never sees any of it"
    status = Path(f"/proc/{pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 200 << 10


async def test_a_cancelled_compilation_stops(helper: GrammarHelper) -> None:
    await helper.compile(regex("a"), "x", "a")
    for moment in (0.0, 0.001, 0.01, 0.1, 0.4):
        task = asyncio.create_task(helper.compile(schema(HEAVY), "x", "a"))
        await asyncio.sleep(moment)
        task.cancel()
        before = children_seconds(helper.pid)
        verdict = await helper.compile(regex("b"), "x", "b")
        assert not verdict.ended and not children(helper.pid), "and nobody else's compilation is cancelled for it"
        assert children_seconds(helper.pid) - before < moment + 1.0 < SECONDS, "processor time, not the clock's"
        assert task.cancelled()


DEAF = """
import signal, threading, time
from cairn.text.grammar import compile_process
from cairn.text.grammar.compile_wire import Compile

def interrupt():
    while not server._child:
        time.sleep(0.01)
    time.sleep(0.1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

compile_process._verdict = lambda *_: time.sleep(600)
server = compile_process.CompileServer()
server.heed_signals()
server._tokenizers[()] = None
threading.Thread(target=interrupt).start()
print(server._compiled(Compile(vocab=(), text="a")).ended, server._given_up)
"""
"""Gives a grammar up by a signal that interrupts no call of the main thread: another thread receives it."""


def test_a_signal_that_interrupts_no_call_stops_a_compilation() -> None:
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", DEAF]
    assert subprocess.run(script, capture_output=True, text=True, timeout=60, check=True).stdout == "memory True\n"


LATE = """
import os, signal
from cairn.text.grammar import compile_process
from cairn.text.grammar.compile_wire import Compile, GrammarVerdict

def waitpid(*given, wait=os.waitpid):
    found = wait(*given)
    os.kill(os.getpid(), signal.SIGUSR1)
    return found

os.waitpid = waitpid
compile_process._verdict = lambda *_: GrammarVerdict()
server = compile_process.CompileServer()
server.heed_signals()
server._tokenizers[()] = None
print(repr(server._compiled(Compile(vocab=(), text="a")).ended), server._given_up)
"""
"""Gives a grammar up just after its process has ended and its pid is free."""


def test_a_signal_after_a_compilation_kills_no_process_that_is_gone() -> None:
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LATE]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("'' True\n", "")


async def test_a_tenants_turn_comes_after_one_grammar_of_each_other(helper: GrammarHelper) -> None:
    await helper.compile(regex("a"), "x", "a")
    order: list[str] = []

    async def ask(share: str, job: Compile) -> None:
        await helper.compile(job, "x", share)
        order.append(share)

    slow = [asyncio.create_task(ask("a", regex(f"({SLOW}){n}"))) for n in range(4)]
    await asyncio.sleep(0.01)
    await asyncio.gather(*(ask("b", regex(str(n))) for n in range(2)))
    assert order.index("b") <= 2 and order.count("a") <= 3, "four waited before it"
    await asyncio.gather(*slow, return_exceptions=True)


async def test_only_the_tenant_that_keeps_it_busy_is_refused(
    table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_parent, "PATIENCE", 0.05)
    helper = GrammarHelper(lambda _: table)
    try:
        await helper.compile(regex("a"), "x", "a")
        asked = [helper.compile(schema({"multipleOf": 99_991 - 2 * n, "type": "integer"}), "x", "a") for n in range(5)]
        *verdicts, other = await asyncio.gather(*asked, helper.compile(regex("b"), "x", "b"), return_exceptions=True)
    finally:
        await helper.close()
    assert any(isinstance(one, Overloaded) and "the compiler of grammars is busy" in str(one) for one in verdicts)
    assert isinstance(other, GrammarVerdict) and not other.ended


async def test_a_helper_that_is_killed_is_replaced_and_one_that_is_stuck_too(
    helper: GrammarHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await helper.compile(regex("a"), "x", "a")
    first = helper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert not (await helper.compile(regex("a"), "x", "a")).ended and helper.pid != first
    second = helper.pid
    assert second is not None
    os.kill(second, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(compile_parent, "STALLED", 0.1)
        with pytest.raises(Unavailable):
            await helper.compile(regex("a"), "x", "a")
    assert not (await helper.compile(regex("a"), "x", "a")).ended and helper.pid != second


async def test_closing_ends_what_is_being_compiled(table: TokenTable) -> None:
    helper = GrammarHelper(lambda _: table)
    await helper.compile(regex("a"), "x", "a")
    pid = helper.pid
    task = asyncio.create_task(helper.compile(schema(HEAVY), "x", "a"))
    await asyncio.sleep(0.2)
    (child,) = children(pid)
    await helper.close()
    with pytest.raises(Unavailable):
        await task
    async with asyncio.timeout(60):  # the helper's own child now has no parent here, so nothing reports its end
        while any(Path(f"/proc/{gone}/exe").exists() for gone in (pid, child)):
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await helper.compile(regex("a"), "x", "a")


async def test_errors_name_the_fault_and_known_verdicts_are_cached(tmp_path: Path) -> None:
    text_models.write_model(tmp_path / "m", text_models.byte_level(), text_models.QWEN_CONFIG)
    chat = await Chat.start(tmp_path / "m", Config())
    heavy = Structure(kind="json", text=json.dumps(HEAVY), field="guided_json")
    large = Structure(kind="json", text='{"multipleOf": 1000000}', field="format")
    try:
        with pytest.raises(InvalidRequest, match=r"guided_json: compiling it took (longer than 2 s|more than 256 MiB)"):
            await chat.grammar(heavy, OutputFormat(), share="a")
        with pytest.raises(InvalidRequest, match="format cannot be followed: multipleOf is 1000000"):
            await chat.grammar(large, OutputFormat(), share="a")
        good = await chat.grammar(Structure(kind="regex", text="a"), OutputFormat(), share="a")
        chat._grammars._helper.compile = None  # type: ignore[assignment, method-assign]
        for structure in (heavy, large):
            with pytest.raises(InvalidRequest):
                await chat.grammar(structure, OutputFormat(), share="a")
        assert good.grammar is not None and good.grammar.bytes > 0
        assert await chat.grammar(Structure(kind="regex", text="a"), OutputFormat(), share="a") == good
        with pytest.raises(TypeError):  # another tenant must not learn what this one asked for
            await chat.grammar(large, OutputFormat(), share="b")
    finally:
        await chat.close()
