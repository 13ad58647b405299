"""The front's side of `cairn.text.grammar.compile_process`: starts one helper with the first grammar and keeps it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from cairn.system.frames import frame
from cairn.system.helper_process import HelperProcess
from cairn.text.grammar.compile_wire import SECONDS, Compile, GrammarVerdict, Tokens, Vocab
from cairn.text.grammar.vocabulary import TokenTable
from cairn.text.render.fair_semaphore import FairSemaphore
from cairn.types.errors import CairnError, InvalidRequest, Unavailable

START_TIMEOUT = 120.0
"""Seconds for the helper to start and read a vocabulary, however busy the machine is."""
STALLED = 60.0
"""Seconds without an answer after which the helper counts as stuck. Grammars are bounded by processor time, so a stall
is the machine's fault, not the grammar's."""
PATIENCE = 2.0
"""A waiting grammar is refused once other grammars of its tenant have used this many times a grammar's time limit."""
OURS = ""
"""The share of the server's own jobs."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One grammar that is being compiled."""

    vocab: Vocab
    data: bytes
    """The request frame."""
    given_up: bool = False
    sent: bool = False


class GrammarHelper:
    """Client of the helper: one grammar at a time, in turn among the tenants.

    Every method runs on one event loop.
    """

    def __init__(self, table: Callable[[Vocab], TokenTable]) -> None:
        """Take `table`, which reads the tokens of a vocabulary; it is called in a thread."""
        self._table = table
        self._slots = FairSemaphore(most=PATIENCE * SECONDS, what="the compiler of grammars")
        self._helper: HelperProcess | None = None
        self._frames: dict[Vocab, bytes] = {}
        """Vocabulary -> its frame."""
        self._has: set[Vocab] = set()
        """Vocabularies that the helper has received."""
        self._background: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the helper; None if there is none."""
        return None if self._helper is None else self._helper.pid

    async def compile(self, job: Compile, field: str, share: str) -> GrammarVerdict:
        """Compile a grammar and return the verdict.

        `field` is its name for error messages, `share` the tenant whose time is used. Raises InvalidRequest for one
        that is far too long, Overloaded if the tenant's other grammars keep the helper busy, Unavailable if it does not
        answer. If the caller is cancelled, the helper abandons the grammar at once.
        """
        try:
            turn = _Turn(job.vocab, frame(job))
        except ValueError as error:
            raise InvalidRequest(f"{field} is too long: {error}", field=field) from error
        try:
            async with asyncio.timeout(STALLED):
                await self._slots.take(share)
        except TimeoutError:
            raise _stuck() from None
        work = asyncio.ensure_future(self._answered(turn))
        work.add_done_callback(lambda done: self._slots.give(share, _spent(done)))
        self._keep(work)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    async def close(self) -> None:
        """Stop the helper and wait until it is gone."""
        self._closed = True
        if self._helper is not None:
            self._helper.stop()
        await self._slots.take(OURS, patient=True)
        self._end()
        self._slots.give(OURS, 0.0)
        while self._background:
            await asyncio.wait(self._background)

    async def _answered(self, turn: _Turn) -> GrammarVerdict:
        """Exchange a grammar with the helper, restarting it once; this goes on if the caller is cancelled."""
        try:
            try:
                return await self._exchanged(turn)
            except (EOFError, ConnectionError):  # the helper died, perhaps not because of this grammar
                self._end()
                return await self._exchanged(turn)
        except TimeoutError:
            self._end()
            raise _stuck() from None
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            self._end()
            raise CairnError(f"the process that compiles grammars is gone ({error!r})") from error

    async def _exchanged(self, turn: _Turn) -> GrammarVerdict:
        helper = await self._ready(turn.vocab)
        verdict = GrammarVerdict(ended="given up")
        while verdict.ended == "given up" and not turn.given_up:  # the signal was meant for the grammar before
            turn.sent = True
            async with asyncio.timeout(STALLED):
                verdict = msgspec.msgpack.decode(await helper.exchange(turn.data), type=GrammarVerdict)
        return verdict

    def _give_up(self, turn: _Turn) -> None:
        turn.given_up = True
        if turn.sent and self._helper is not None and self._helper.runs:
            with suppress(ProcessLookupError):
                os.kill(self._helper.pid, signal.SIGUSR1)

    async def _ready(self, vocab: Vocab) -> HelperProcess:
        """Return the helper after sending it this vocabulary; start it if there is none."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        if self._helper is not None and not self._helper.runs:
            self._end()
        async with asyncio.timeout(START_TIMEOUT):
            if self._helper is None:
                self._helper = HelperProcess.launch("cairn.text.grammar.compile_process")
                self._has = set()
                await self._helper.receive()
            helper = self._helper
            if vocab not in self._has:
                if vocab not in self._frames:
                    self._frames[vocab] = await asyncio.to_thread(self._framed, vocab)
                await helper.exchange(self._frames[vocab])
                self._has.add(vocab)
        return helper

    def _framed(self, vocab: Vocab) -> bytes:
        return frame(Tokens(vocab=vocab, table=self._table(vocab)))

    def _end(self) -> None:
        """Kill the helper, if there is one; it is reaped in the background."""
        helper, self._helper = self._helper, None
        if helper is not None:
            self._keep(helper.kill())

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._background.add(work)
        work.add_done_callback(self._forget)

    def _forget(self, work: asyncio.Future[Any]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved so that asyncio does not log it; the caller gets it too


def _spent(work: asyncio.Future[GrammarVerdict]) -> float:
    """Return the processor seconds of a grammar; the limit if it failed without a verdict."""
    return SECONDS if work.cancelled() or work.exception() is not None else work.result().seconds


def _stuck() -> Unavailable:
    return Unavailable("the process that compiles grammars does not answer; try again", retry_after=1)
