from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cairn.system.frames import MAX_FRAME, frame
from cairn.system.helper_process import HelperProcess
from cairn.text.render.parent import Renderer, launch
from cairn.text.render.render_wire import Job, Setup
from cairn.types.errors import CairnError, InvalidRequest, ModelFileError, Unavailable

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NOON = 1_000_000_000.0 + 12 * 3600
"""Noon of 9 September 2001."""


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit on waiting to minutes: these tests are about processor time, which a busy machine may not
    have.
    """
    monkeypatch.setattr("cairn.text.render.parent.STALLED", 300.0)


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    """Return a renderer of templates by name; `content` renders its variable."""
    templates = {
        "content": "{{ messages[0].content }}",
        "endless": ENDLESS,
        "slow": "{% for a in range(1500) %}{% for b in range(1500) %}{% endfor %}{% endfor %}slow",
        "raise": "{{ raise_exception('no ' ~ messages[0].content) }}",
        "undefined": "{{ messages[0].nothing.at_all }}",
        "given": "{{ jinja }}",
    }
    made = Renderer(Setup(templates=templates, variables={"bos_token": "<s>"}, timeout=1.0))
    await made.start()
    yield made
    await made.close()


def job(template: str, content: str = "x", **fields: str) -> Job:
    variables = {"tools": None, "documents": None}
    payload = {"messages": [[{"role": "user", "content": content}]], "variables": variables}
    return Job(template=template, payload=msgspec.json.encode(payload), now=NOON, **{"marks": "", **fields})


async def one(template: str, timeout: float = 1.0, content: str = "x") -> str:
    """Render a template in a process of its own, and end that process."""
    made = Renderer(Setup(templates={"default": template}, variables={}, timeout=timeout))
    try:
        await made.start()
        return (await made.render(job("default", content)))[0]
    finally:
        await made.close()


def gone(pid: int, seconds: float) -> bool:
    """Return whether a process ends within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


async def test_renders_again_and_again_in_one_process(renderer: Renderer) -> None:
    pid = renderer.pid
    for content in ("a", "ü\n", "b" * 300_000):
        assert await renderer.render(job("content", content)) == [content]
    assert renderer.pid == pid


async def test_a_long_chat_has_the_room_it_needs(renderer: Renderer) -> None:
    content = "long " * 2_500_000 + "å"
    assert await renderer.render(job("content", content)) == [content]


async def test_overrunning_is_an_error_and_the_process_is_replaced(renderer: Renderer) -> None:
    before = renderer.pid
    assert before is not None
    with pytest.raises(InvalidRequest, match="took longer than 1 s of processor time") as caught:
        await renderer.render(job("endless"))
    assert caught.value.field == "messages"
    assert gone(before, 60)
    assert await renderer.render(job("content", "again")) == ["again"]
    assert renderer.pid != before


async def test_an_error_in_a_template_is_a_4xx(renderer: Renderer) -> None:
    pid = renderer.pid
    with pytest.raises(InvalidRequest, match="refuses these messages: no way"):
        await renderer.render(job("raise", "way"))
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        await renderer.render(job("undefined"))
    assert await renderer.render(job("content", "fine")) == ["fine"]
    assert renderer.pid == pid


async def test_a_cancelled_caller_leaves_no_answer_behind_for_the_next(renderer: Renderer) -> None:
    """Known failure 9."""
    task = asyncio.create_task(renderer.render(job("slow")))
    await asyncio.sleep(0.01)  # a fast machine is done in 80 ms
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await renderer.render(job("content", "mine")) == ["mine"]


async def test_a_process_killed_from_outside_is_replaced(renderer: Renderer) -> None:
    assert renderer.pid is not None
    os.kill(renderer.pid, signal.SIGKILL)
    await asyncio.to_thread(gone, renderer.pid, 5)
    assert await renderer.render(job("content", "a")) == ["a"]
    task = asyncio.create_task(renderer.render(job("endless")))
    await asyncio.sleep(0.1)
    assert renderer.pid is not None
    os.kill(renderer.pid, signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="took longer than 1 s"):
        await task  # it was tried again
    assert await renderer.render(job("content", "b")) == ["b"]


async def test_a_process_killed_while_it_renders_is_not_the_messages_fault(renderer: Renderer) -> None:
    task = asyncio.create_task(renderer.render(job("slow")))
    await asyncio.sleep(0)
    first = renderer.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    await asyncio.sleep(0.02)
    os.kill(first, signal.SIGKILL)
    assert await task == ["slow"]
    assert renderer.pid != first


async def test_a_busy_machine_is_not_the_messages_fault() -> None:
    """The limit is on the process's own CPU time; it may wait for a processor as long as it takes."""
    made = Renderer(Setup(templates={"default": "{{ messages[0].content }}"}, variables={}, timeout=0.1))
    await made.start()
    assert made.pid is not None
    try:
        os.kill(made.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(made.render(job("default", str(n)))) for n in range(5)]
        await asyncio.sleep(0.3)
        os.kill(made.pid, signal.SIGCONT)
        assert await asyncio.gather(*tasks) == [[str(n)] for n in range(5)]
    finally:
        await made.close()


def ticks(pid: int) -> int:
    """Return a process's CPU time in clock ticks, hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


async def test_time_without_a_processor_does_not_count(renderer: Renderer) -> None:
    """The process is stopped in the middle of a job for longer than the job's limit."""
    pid = renderer.pid
    assert pid is not None
    before = ticks(pid)
    rendering = asyncio.create_task(renderer.render(job("slow")))
    while ticks(pid) < before + 2 and not rendering.done():
        await asyncio.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)
    os.kill(pid, signal.SIGCONT)
    assert await rendering == ["slow"] and renderer.pid == pid


async def test_a_process_that_is_stuck_is_a_503_and_is_replaced(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = renderer.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr("cairn.text.render.parent.STALLED", 0.1)
        errors = await asyncio.gather(*(renderer.render(job("content")) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, Unavailable) and error.status == 503 and error.retry_after for error in errors)
    assert await renderer.render(job("content", "well")) == ["well"]
    assert renderer.pid != first and gone(first, 60)


async def test_signals_to_the_server_do_not_reach_the_process(renderer: Renderer) -> None:
    assert renderer.pid is not None
    assert os.getpgid(renderer.pid) != os.getpgid(0)
    os.kill(renderer.pid, signal.SIGINT)
    os.kill(renderer.pid, signal.SIGTERM)
    assert await renderer.render(job("content", "still here")) == ["still here"]


async def test_closing_ends_the_process() -> None:
    """Known failure 3."""
    made = Renderer(Setup(templates={"default": "x"}, variables={}, timeout=1.0))
    await made.start()
    pid = made.pid
    assert pid is not None
    await made.close()
    assert gone(pid, 1)
    with pytest.raises(Unavailable):
        await made.render(job("default"))


BOMBS = [
    ENDLESS,
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 1000) * 10**7 }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ '%010000000000d' % 3 }}",
    "{{ '{:>9999999999}'.format('x') }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ range(99999999) | list }}",
    "{{ 10 ** (10**10) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ lipsum(n=100000) }}",
    "{{ messages[0].content * 50000 }}",
    "{{ ('a' * 60 ~ '!') | wordwrap(1) * 10**9 }}",
]


@pytest.mark.parametrize("bomb", BOMBS)
async def test_bombs_cost_their_own_request_and_little_memory(bomb: str) -> None:
    made = Renderer(Setup(templates={"default": bomb, "fine": "{{ 1 + 1 }}"}, variables={}, timeout=0.7))
    await made.start()
    pid = made.pid
    peaks: list[int] = []

    def look() -> bool:
        """Record the process's peak memory in KiB; return False once it has ended."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return False
        results = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        peaks.extend(results)
        return bool(results)

    def watch() -> None:
        while look():
            time.sleep(0.002)

    assert look()

    thread = threading.Thread(target=watch)
    try:
        thread.start()
        with pytest.raises(InvalidRequest):
            await made.render(job("default", "word " * 10_000))
        assert await made.render(job("fine")) == ["2"]
    finally:
        await made.close()
    await asyncio.to_thread(thread.join)
    assert max(peaks) - peaks[0] <= 64 * 1024


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__' .* is unsafe"),
        ("{{ cycler.__init__.__globals__.os.getpid() }}", "'__init__' .* is unsafe"),
        ("{{ messages.append(1) }}", "'append' .* is unsafe"),
        ("{% set _ = messages[0].update({'a': 1}) %}", "'update' .* is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
    ],
)
async def test_a_template_that_reaches_beyond_its_variables_is_refused(template: str, why: str) -> None:
    """The error names that reason: a template that is too slow is refused, too."""
    with pytest.raises(InvalidRequest, match=why):
        await one(template, timeout=20.0)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ lipsum.__globals__ }}", ""),
        ("{{ '{0.__class__}'.format(messages) }}", ""),
        ("{{ messages[0].content.__class__ }}x{{ raise_exception.__globals__ }}", "x"),
    ],
)
async def test_a_template_reads_nothing_but_its_variables(template: str, text: str) -> None:
    assert await one(template, timeout=20.0) == text


async def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(ModelFileError, match="line 1"):
        await one("{% endfor %}")


@pytest.mark.parametrize(
    "template", ["{% autoescape 'x' * 10**10 %}{% endautoescape %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"]
)
async def test_a_bomb_that_goes_off_while_compiling_is_the_models_fault(template: str) -> None:
    with pytest.raises((ModelFileError, InvalidRequest)):
        await one(template)


async def test_features_that_hub_templates_rely_on_work() -> None:
    assert await one("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}") == "13"
    assert await one("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert await one("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"
    assert await one("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert await one("{{ {'a': '<&\\'>', 'b': 'å'} | tojson }}") == '{"a": "<&\'>", "b": "å"}'
    assert await one("{{ {'a': [1]} | tojson(indent=2) }}") == '{\n  "a": [\n    1\n  ]\n}'
    assert await one("{{ strftime_now('%b %Y') }}") == "Sep 2001"
    assert await one("{% for f in functions %}{{ f.name }}{% endfor %}{{ functions }}") == ""
    assert await one("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == "TrueTrueTrue"
    assert await one("{{ messages[0]['content'] | trim }}{{ '<b>' }}", content=" <i> ") == "<i><b>"


PARENT = """
import asyncio, os, sys
from cairn.text.render.render_wire import Job, Setup
from cairn.text.render.parent import Renderer

async def main():
    renderer = Renderer(Setup(templates={"default": sys.argv[1]}, variables={}, timeout=0.5))
    await renderer.start()
    print(renderer.pid, flush=True)
    if "for" in sys.argv[1]:
        job = Job(template="default", payload=sys.argv[2].encode(), marks="", now=0.0)
        task = asyncio.create_task(renderer.render(job))
        await asyncio.sleep(0.1)
        print("rendering", flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.parametrize("template", ["idle", ENDLESS])
def test_the_process_ends_when_its_parent_is_killed(template: str) -> None:
    """Known failure 3."""
    payload = job("default").payload.decode()
    done = subprocess.run(
        [sys.executable, "-c", PARENT, template, payload], stdout=subprocess.PIPE, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout.split()[0]), 60)


def test_frames_have_a_longest_length() -> None:
    with pytest.raises(ValueError, match="longer than"):
        frame(Job(template="x", payload=bytes(MAX_FRAME + 1), marks="", now=0.0))


async def test_the_rendering_process_has_no_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates come with a model: whatever one may reach in its process, there is no API key."""
    monkeypatch.setenv("CAIRN_API_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    made = Renderer(Setup(templates={"content": "x"}, variables={}, timeout=1.0))
    await made.start()
    try:
        assert b"hush" not in Path(f"/proc/{made.pid}/environ").read_bytes()
    finally:
        await made.close()


async def test_a_process_that_cannot_be_started_is_not_the_messages_fault(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("cairn.text.render.parent.launch", none)
    renderer._end()
    with pytest.raises(CairnError, match="did not start") as caught:
        await renderer.render(job("content"))
    assert not isinstance(caught.value, InvalidRequest)
    monkeypatch.undo()
    assert await renderer.render(job("content")) == ["x"]


def test_a_process_that_cannot_be_started_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sockets(monkeypatch)

    def none(*_args: object, **_options: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", none)
    with pytest.raises(OSError, match="unavailable"):
        launch()
    assert [sock.fileno() for sock in made] == [-1, -1]


async def test_a_start_that_is_cancelled_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sockets(monkeypatch)
    entered = asyncio.Event()

    async def never(self: HelperProcess) -> None:
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(HelperProcess, "receive", never)
    start = asyncio.ensure_future(Renderer(Setup(templates={}, variables={}, timeout=1.0)).start())
    await entered.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [sock.fileno() for sock in made] == [-1, -1]


def sockets(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Collect every socket of the pairs that are created from here on."""
    made: list[socket.socket] = []
    real = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        both = real()
        made.extend(both)
        return both

    monkeypatch.setattr(socket, "socketpair", pair)
    return made
