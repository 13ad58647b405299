"""The front's side of `cairn.text.grammar.compile_process`: keeps one helper, from the first grammar on."""

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
from cairn.text.render.fair_time import SharedTurns
from cairn.types.errors import CairnError, InvalidRequest, Unavailable

START_TIMEOUT = 120.0
"""Seconds for the helper to start and to read a vocabulary, on a machine however busy."""
STALLED = 60.0
"""Seconds without an answer after which the helper is taken for stuck: what a grammar may take is bounded by its own
processor time, so this says something of the machine and nothing of the grammar."""
PATIENCE = 2.0
"""Times a grammar's limit that others of a tenant may use of the helper's time before one of its that waits is
refused."""
OURS = ""
"""Whose turns the server's own are, among those of tenants."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One grammar on its way through the helper."""

    vocab: Vocab
    data: bytes
    """The frame that asks for it."""
    given_up: bool = False
    sent: bool = False


class GrammarHelper:
    """Has one grammar compiled at a time, and whose turn it is goes around among the tenants.

    Every method runs on one event loop.
    """

    def __init__(self, table: Callable[[Vocab], TokenTable]) -> None:
        """`table` reads the tokens of a vocabulary, in a thread."""
        self._table = table
        self._turns = SharedTurns(PATIENCE * SECONDS, what="what compiles grammars")
        self._helper: HelperProcess | None = None
        self._frames: dict[Vocab, bytes] = {}
        """The vocabularies, as they are sent."""
        self._has: set[Vocab] = set()
        """Those that the helper has."""
        self._background: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The helper, if one runs."""
        return None if self._helper is None else self._helper.pid

    async def compile(self, job: Compile, field: str, share: str) -> GrammarVerdict:
        """Return what became of a grammar, which a client calls `field`. `share`: of which tenant's time.

        Raises InvalidRequest for one that is far too long, Overloaded where others of the tenant keep the helper busy,
        Unavailable where it does not answer. What a cancelled caller asked for is given up at once.
        """
        try:
            turn = _Turn(job.vocab, frame(job))
        except ValueError as error:
            raise InvalidRequest(f"{field} is too long: {error}", field=field) from error
        try:
            async with asyncio.timeout(STALLED):
                await self._turns.take(share)
        except TimeoutError:
            raise _stuck() from None
        work = asyncio.ensure_future(self._answered(turn))
        work.add_done_callback(lambda done: self._turns.give(share, _spent(done)))
        self._keep(work)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    async def close(self) -> None:
        """End the helper and wait until it is gone."""
        self._closed = True
        if self._helper is not None:
            self._helper.stop()
        await self._turns.take(OURS, patient=True)
        self._end()
        self._turns.give(OURS, 0.0)
        while self._background:
            await asyncio.wait(self._background)

    async def _answered(self, turn: _Turn) -> GrammarVerdict:
        """Have a grammar compiled, whoever still waits for that."""
        try:
            try:
                return await self._exchanged(turn)
            except (EOFError, ConnectionError):  # the helper is gone, which need not be the grammar's fault
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
        while verdict.ended == "given up" and not turn.given_up:  # once more where one before it was meant
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
        """Return the helper, which has this vocabulary; start it where there is none."""
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
            work.exception()  # who waits for it has it; nobody else wants it


def _spent(work: asyncio.Future[GrammarVerdict]) -> float:
    """Return the processor time of a grammar; what is said of none is taken for the most."""
    return SECONDS if work.cancelled() or work.exception() is not None else work.result().seconds


def _stuck() -> Unavailable:
    return Unavailable("the process that compiles grammars does not answer; try again", retry_after=1)
