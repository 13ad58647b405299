"""The helper that compiles grammars; run as `python -m cairn.text.grammar.compile_process`.

It reads the model's tokens once and forks a process for each grammar, with bounds on memory and processor time: a bomb
costs only that process, and the next grammar need not wait for a restart. The parent talks over file descriptor 0, a
socket; the helper ends when that closes.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

import msgspec

from cairn.system.frames import frame, receive_frame
from cairn.system.helper_limits import bound_memory, held_memory, memory_in_use, restrict
from cairn.text.grammar.compile_wire import MEMORY, SECONDS, Compile, GrammarVerdict, Tokens, Vocab
from cairn.text.grammar.grammar import GrammarError
from cairn.text.grammar.trial import trial
from cairn.text.grammar.vocabulary import grammar_tokenizer

NICER = 5
"""Niceness of the helper; the worker's steps run on the same cores."""
_ENDED = {signal.SIGPROF: "seconds", signal.SIGXCPU: "seconds", signal.SIGABRT: "memory", signal.SIGKILL: "memory"}
"""Signal that ended a compiling process -> the limit that it exceeded; llguidance aborts when memory runs out."""


class CompileServer:
    """Server of the parent's requests, one grammar at a time."""

    def __init__(self) -> None:
        self._tokenizers: dict[Vocab, Any] = {}
        self._child = 0
        self._given_up = False
        self._signals = -1
        """Descriptor that becomes readable with each signal."""

    def heed_signals(self) -> None:
        """Abandon the current grammar at each SIGUSR1; call it in the main thread."""
        self._signals, writing = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, self._give_up)

    def _give_up(self, *_: object) -> None:
        self._given_up = True
        if self._child:
            os.kill(self._child, signal.SIGKILL)

    def answer(self, data: bytes) -> GrammarVerdict:
        """Return the answer to a frame."""
        message = msgspec.msgpack.decode(data, type=Tokens | Compile)
        if isinstance(message, Compile):
            found = GrammarVerdict(ended="given up") if self._given_up else self._compiled(message)
            found = GrammarVerdict(ended="given up", seconds=found.seconds) if self._given_up else found
            self._given_up = False
            return found
        self._tokenizers[message.vocab] = grammar_tokenizer(message.table)
        del message
        gc.collect()
        gc.freeze()  # a forked process then never writes to these objects' pages, so they are not copied
        held_memory()
        return GrammarVerdict()

    def _compiled(self, job: Compile) -> GrammarVerdict:
        reading, writing = os.pipe()
        used = _children()
        child = os.fork()
        if not child:
            os.close(reading)
            _try(self._tokenizers[job.vocab], job, writing)
        self._child = child
        os.close(writing)
        if self._given_up:  # the signal came after the fork, before `_child` was set
            os.kill(child, signal.SIGKILL)
        data = self._read_whole(reading)
        os.close(reading)
        # Until `_child` is cleared a signal would kill a process that is gone, or another that has got its pid.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        _, status = os.waitpid(child, 0)
        self._child = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        seconds = _children() - used
        if os.WIFSIGNALED(status):
            ended: Any = _ENDED.get(signal.Signals(os.WTERMSIG(status)), "wrong")
            return GrammarVerdict(ended=ended, error="the grammar compiler crashed on it", seconds=seconds)
        try:
            return msgspec.structs.replace(msgspec.msgpack.decode(data, type=GrammarVerdict), seconds=seconds)
        except msgspec.MsgspecError:
            return GrammarVerdict(ended="memory", seconds=seconds)

    def _read_whole(self, reading: int) -> bytes:
        """Read a pipe to its end while signals are heeded.

        A signal that comes just before a call blocks does not interrupt it, so the call waits for signals too.
        """
        data = bytearray()
        while True:
            ready, _, _ = select.select([reading, self._signals], [], [])
            if self._signals in ready:
                os.read(self._signals, 1 << 10)
            if reading in ready:
                if not (piece := os.read(reading, 1 << 20)):
                    return bytes(data)
                data += piece


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _try(tokenizer: Any, job: Compile, writing: int) -> None:
    """Try a grammar, write the verdict and exit: the body of the forked process."""
    code = 1
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.close(0)  # only the helper may talk to the parent
        restrict(seconds=int(SECONDS) + 1)
        if (base := memory_in_use()) is not None:
            bound_memory(base + MEMORY)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        data = msgspec.msgpack.encode(_verdict(tokenizer, job))
        signal.setitimer(signal.ITIMER_PROF, 0)
        while data:
            data = data[os.write(writing, data) :]
        code = 0
    finally:
        os._exit(code)


def _verdict(tokenizer: Any, job: Compile) -> GrammarVerdict:
    try:
        return trial(tokenizer, job)
    except GrammarError as error:
        return GrammarVerdict(ended="wrong", error=str(error))
    except MemoryError:
        return GrammarVerdict(ended="memory")
    except RecursionError:
        return GrammarVerdict(ended="wrong", error="it is nested too deeply")
    except Exception as error:
        return GrammarVerdict(ended="wrong", error=f"it cannot be read: {' '.join(str(error).split())[:200]}")
    except BaseException as panic:  # a panic of llguidance is not an Exception
        return GrammarVerdict(ended="wrong", error=f"llguidance failed: {' '.join(str(panic).split())[:200]}")


def main() -> None:
    """Serve the parent until it closes the socket."""
    server = CompileServer()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides: it closes the socket or kills
    server.heed_signals()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    restrict()
    os.nice(NICER)
    import llguidance  # noqa: F401  imported before any fork

    channel = socket.socket(fileno=0)
    channel.sendall(frame(GrammarVerdict()))
    while (data := receive_frame(channel)) is not None:
        channel.sendall(frame(server.answer(data)))


if __name__ == "__main__":
    main()
    sys.exit(0)
