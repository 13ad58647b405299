"""The process that renders chat templates; run as `python -m cairn.text.render.render_process`.

A template is a program from a model file. It runs here in jinja2's immutable sandbox, with bounds on memory and
processor time, so a bomb costs only its own request and this process. Processor time does not depend on how busy the
machine is; the kernel ends the process by SIGPROF when it is used up. The parent talks over file descriptor 0, a
socket; the process ends when that closes. It imports little, because it starts with every server and after every kill.
"""

from __future__ import annotations

import datetime
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cairn.system.frames import frame, receive_frame
from cairn.system.helper_limits import bound_memory, cpu_seconds, memory_in_use, restrict
from cairn.text.render.render_wire import Job, Rendered, Setup

MEMORY = 48 << 20
"""Bytes of address space that rendering may add, beside `MEMORY_FACTOR` times the size of the job."""
MEMORY_FACTOR = 16
COMPILE_SECONDS = 5.0
"""Most seconds of processor time to compile a model's templates; after that the process ends."""


class TemplateRaised(jinja2.TemplateError):
    """An error raised by the template through `raise_exception`."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks assistant text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _unchanged(_: jinja2.runtime.Context, value: object) -> object:
    """Return a value unchanged before jinja2 prints it."""
    # It takes the context, and optimizing is off, so compiling evaluates no constant expression: no bomb can go off
    # before a job's bounds are set.
    return value


class _Functions(list[Any]):
    """The variable `functions`: some templates print it and expect JSON, others iterate over it."""

    def __str__(self) -> str:
        return json.dumps(list(self), ensure_ascii=False, indent=4)


def environment(marks: Callable[[], str] = str, now: Callable[[], float] = time.time) -> ImmutableSandboxedEnvironment:
    """Return the jinja2 environment that Hugging Face chat templates expect (transformers, "Writing a chat template").

    `marks` returns the characters that JSON escapes must not hide, `now` the seconds since 1970.
    """

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        for mark in marks() if ensure_ascii else "":
            text = re.sub(rf"(?<!\\)((?:\\\\)*)\\u{ord(mark):04x}", rf"\1{mark}", text)
        return text

    def raise_exception(message: str) -> NoReturn:
        raise TemplateRaised(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_unchanged,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda pattern: datetime.datetime.fromtimestamp(now()).strftime(pattern)
    return made


def _failure(error: BaseException) -> str:
    """Return why a template failed, in one line, without prompt text beyond the template's own message."""
    if isinstance(error, TemplateRaised):
        return f"the chat template refuses these messages: {error.message}"
    if isinstance(error, MemoryError):
        return "the chat template needs too much memory for these messages"
    if isinstance(error, RecursionError):
        return "the chat template nests too deeply for these messages"
    line = " ".join(str(error).split())[:300]
    return f"the chat template cannot render these messages: {line or type(error).__name__}"


class _RenderLoop:
    """The compiled templates of one `Setup`, and the jobs rendered with them."""

    def __init__(self, setup: Setup) -> None:
        self._marks = ""
        self._now = 0.0
        self._timeout = setup.timeout
        self._environment = environment(lambda: self._marks, lambda: self._now)
        self._variables = setup.variables
        self._base = memory_in_use()
        self._bound(MEMORY)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
        self._templates = {name: self._environment.from_string(text) for name, text in setup.templates.items()}
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._base = memory_in_use()

    def render(self, job: Job, size: int) -> Rendered:
        """Render a job; `size` is the length of its frame in bytes. Raises MemoryError beyond the bound."""
        began = cpu_seconds()
        self._marks = job.marks
        self._now = job.now
        self._bound(MEMORY + MEMORY_FACTOR * size)
        signal.setitimer(signal.ITIMER_PROF, self._timeout)
        try:
            template = self._templates[job.template]
            payload = json.loads(job.payload)
            variables = {**self._variables, **payload["variables"]}
            if "functions" in variables:
                variables["functions"] = _Functions(variables["functions"])
            texts = [
                template.render({**variables, "messages": messages, "add_generation_prompt": True})
                for messages in payload["messages"]
            ]
            return Rendered(texts=texts, seconds=cpu_seconds() - began)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _bound(self, extra: int) -> None:
        if self._base is not None:
            bound_memory(self._base + extra)


def main() -> None:
    """Serve the parent until it closes the socket or a job exceeds its bounds."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides: it closes the socket or kills
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    restrict()
    channel = socket.socket(fileno=0)
    channel.sendall(frame(Rendered()))
    data = receive_frame(channel)
    if data is None:
        return
    try:
        loop = _RenderLoop(msgspec.msgpack.decode(data, type=Setup))
    except jinja2.TemplateSyntaxError as error:
        channel.sendall(frame(Rendered(error=f"line {error.lineno}: {error.message}")))
        return
    except (MemoryError, RecursionError):
        channel.sendall(frame(Rendered(error="it takes too much to compile")))
        return
    channel.sendall(frame(Rendered()))
    while (data := receive_frame(channel)) is not None:
        size = len(data)
        job = msgspec.msgpack.decode(data, type=Job)
        del data
        spent = False
        try:
            answer = frame(loop.render(job, size))
        except Exception as error:
            spent = isinstance(error, MemoryError)
            answer = b"" if spent else frame(Rendered(error=_failure(error)))
        if spent:
            # Free the memory before the answer is built; the parent starts a new process.
            del job
            channel.sendall(frame(Rendered(error=_failure(MemoryError()), last=True)))
            return
        channel.sendall(answer)


if __name__ == "__main__":
    main()
    sys.exit(0)
