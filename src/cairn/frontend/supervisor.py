"""Supervision of a model's worker: start it, watch it, replace it, and resume the requests in flight in the next one.

A worker that ends, falls silent while it has work, or makes no progress is replaced. Requests in flight are sent again
with the tokens already received, so they continue with the same tokens. A request that was in flight at two deaths in a
row without a new token is a suspect. Suspects are tried one at a time; one that is alone when the worker dies again
fails alone. After `Patience.restarts` deaths in a row without any progress all requests in flight end, and new ones are
refused. But another worker is tried for ever, after a pause that grows up to a minute, since the cause may pass: a
machine that is out of memory has some again. If others kill a worker that has nothing to do, that does not count: the
next one starts at once. The supervisor gives up only if no worker could be of use any more, because the code or the
model was changed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from cairn.frontend import launch as launching
from cairn.frontend.device_fallback import DeviceFallback
from cairn.frontend.launch import CODE_CHANGED, First, launch
from cairn.frontend.request_state import RequestState
from cairn.frontend.worker_connection import Patience, WorkerConnection
from cairn.system.interfaces import Clock
from cairn.types.errors import CairnError, GenerationFailed, ModelError, NoDevice, NoWorker, Unavailable, by_code, trace
from cairn.types.outputs import FinishReason
from cairn.types.request import Request
from cairn.worker import wire

log = logging.getLogger(__name__)

CHANGED = "the model's files were changed since this server started; restart it"
LESS_MEMORY = "the worker was replaced by one with less memory for KV, which has no room for this answer"
CLOSE_SECONDS = 2.0
"""Seconds that a worker whose socket was closed may take to end before it is killed."""
STORE_SECONDS = 5.0
"""Seconds that it may take at the end of the server, while it stores the KV that still waits."""


class Questions:
    """The front's questions to the worker: each `KVQuery` is one, and its `KVAnswer` may never come."""

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[wire.KVAnswer]] = {}
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._asked)

    async def ask(self, link: WorkerConnection, what: wire.What, **fields: Any) -> wire.KVAnswer:
        """Return the worker's answer. Raise the error of `fail` if that comes first."""
        number = next(self._numbers)
        answer: asyncio.Future[wire.KVAnswer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            link.send(wire.KVQuery(number, what, **fields))
            return await answer
        finally:
            del self._asked[number]

    def take(self, answer: wire.KVAnswer) -> None:
        """Pass an answer to its asker, if one still waits."""
        if (asked := self._asked.get(answer.id)) is not None and not asked.done():
            asked.set_result(answer)

    def fail(self, error: CairnError) -> None:
        """Raise an error to all askers: none of them will be answered."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)


class Supervisor:
    """One model's worker, always the same to the service however often it is replaced.

    `flights` are the requests that have not ended. The callbacks run on the event loop's thread: `on_ready` for every
    worker that has loaded, `on_end` for every one that has ended, `on_lost` for a request that its workers did not
    survive.
    """

    def __init__(
        self,
        *,
        patience: Patience,
        clock: Clock,
        on_ready: Callable[[wire.ModelReady], None],
        on_end: Callable[[], None],
        on_step: Callable[[wire.StepOutputs], None],
        on_refused: Callable[[wire.Refused], None],
        on_lost: Callable[[RequestState, CairnError], None],
    ) -> None:
        self._patience = patience
        self._clock = clock
        self._on_ready = on_ready
        self._on_end = on_end
        self._on_step = on_step
        self._on_refused = on_refused
        self._on_lost = on_lost
        self.flights: dict[int, RequestState] = {}
        self._sent: set[int] = set()
        """The flights that the present worker has."""
        self._questions = Questions()
        self._suspects: deque[int] = deque()
        """Suspects to try; the first is in the worker now, beside those that were cleared before it."""
        self._link: WorkerConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._checked: asyncio.Future[None] | None = None
        self._model = b""
        """The identity of the model that the first worker loaded."""
        self._blocks: tuple[int, ...] = ()
        """Sizes of its pools. Later workers get the same, if there is memory: requests were admitted by them."""
        self._cpu_experts = ""
        """The value of the option of that name that its first worker settled on."""
        self._longest = 0
        """Tokens of the longest sequence that the last worker can compute."""
        self._failures = 0
        self._why = ""
        """Why the last worker ended."""
        self._looked = clock.now()
        self._fallback = DeviceFallback(clock)
        self._blameless = False
        """Whether the present worker ends because its device failed, which no request is to blame for."""
        self.adapters: dict[bytes, wire.AdapterPlace] = {}
        """Attached adapters by their digests; the next worker gets them too."""
        self.restarts = 0
        self.gave_up = ""
        """Why there is no worker and will be none."""

    def start(self, first: First) -> None:
        """Take over the first worker and keep one alive from now on."""
        self._loaded = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(_seen)
        self._checked = asyncio.get_running_loop().create_future()
        self._link = WorkerConnection(first.worker, self._clock, self._receive)
        self._keeper = asyncio.create_task(self._keep(self._link, first))

    async def loaded(self) -> None:
        """Wait until the first worker has loaded. Raises its typed error if that failed."""
        assert self._loaded is not None
        await asyncio.shield(self._loaded)

    async def checked(self) -> None:
        """Wait until a worker that is to `wait` has checked the model's files. Raises as `loaded` does."""
        assert self._loaded is not None and self._checked is not None
        await asyncio.wait({self._checked, self._loaded}, return_when=asyncio.FIRST_COMPLETED)
        if self._loaded.done():
            await self.loaded()

    def start_loading(self) -> None:
        """Let a worker that has waited for it load."""
        if self._link is not None:
            self._link.send(wire.StartLoading())

    @property
    def up(self) -> bool:
        """Whether there is a worker that has loaded."""
        return self._link is not None and self._link.ready and not self._link.ended.done()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None in-process or without a worker."""
        return self._link.pid if self._link else None

    @property
    def failing(self) -> bool:
        """Whether workers die one after the other: a new request should not wait for the next."""
        return self._failures > 1

    @property
    def failures(self) -> int:
        """Consecutive workers that ended without being of use; 0 if one is up."""
        return 0 if self.up else self._failures

    @property
    def trouble(self) -> str:
        """Why there is no worker, unless one is just being replaced; empty if all is well."""
        if self.gave_up or self.up or not self.failing:
            return self.gave_up
        return (
            f"the worker died {self._failures} times in a row ({self._why}); another is tried, at the latest in "
            f"{self._backoff():g} s"
        )

    @property
    def stalled(self) -> str:
        """Why the worker that is up makes no progress; empty if it does, or has nothing to do."""
        if self._link is None or not self.up or not (self._sent or self._questions):
            return ""
        return self._link.watchdog.stalled(self._patience)

    @property
    def still(self) -> float:
        """Seconds for which it has made no progress although it has work."""
        if self._link is None or not self.up or not self._sent:
            return 0.0
        return self._link.watchdog.seconds

    @property
    def pause(self) -> float:
        """Seconds after which a client may retry while workers are failing."""
        return max(1.0, self._backoff())

    def add(self, flight: RequestState) -> None:
        """Send a request to the worker, or to the next one. Raises `WireError` if it is too long to be sent."""
        if self.up and not self._suspects:
            self._send(flight.request)
        flight.limit = min(flight.limit, self._longest)
        self.flights[flight.request.id] = flight

    def remove(self, id: int, reason: FinishReason | None) -> RequestState | None:
        """Forget a request, and (unless `reason` is None) tell the worker to drop it."""
        flight = self.flights.pop(id, None)
        if id in self._sent:
            self._sent.discard(id)
            if reason is not None and self._link is not None:
                self._link.send(wire.Drop(id, reason))
        if id in self._suspects:
            self._next_trial()
        return flight

    def look(self) -> None:
        """Check the worker; call it a few times a second."""
        now = self._clock.now()
        late, self._looked = now - self._looked, now
        if self._link is None:
            return
        if late > self._patience.silence / 2:
            self._link.rest()  # this process itself stood still and has not read what the worker sent
        elif why := self._link.overdue(self._patience, bool(self._sent or self._questions)):
            self._link.kill(why)

    async def ask(self, what: wire.What, **fields: Any) -> wire.KVAnswer:
        """Return the worker's answer to a `KVQuery`. Raise `Unavailable` without a worker, or if it ends first."""
        if self._link is None or not self.up:
            raise Unavailable("the worker is being replaced", retry_after=self.pause)
        return await self._questions.ask(self._link, what, **fields)

    async def close(self) -> None:
        """End the worker and wait until it is gone. If this is cancelled, the worker is killed at once."""
        try:
            if self._keeper is not None and not self._keeper.done():
                self._keeper.cancel()
                await asyncio.wait({self._keeper})
            if self._link is not None:
                self._link.end("closed")
                await self._link.reap(STORE_SECONDS)
        finally:
            if self._link is not None:
                self._link.kill("closed")
                self._link = None
            self._leave_unanswered()

    # --------------------------------------------------------------------------------------------- one life

    async def _keep(self, link: WorkerConnection, first: First) -> None:
        """Keep a worker alive until cancelled or given up."""
        try:
            await self._replace(link, first)
        except Exception as error:  # nobody awaits this task, so without this requests would wait for ever
            log.error("the worker cannot be replaced: %s", trace(error))
            why = f"the worker cannot be replaced ({type(error).__name__})"
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_exception(ModelError(why))
            self._give_up(why)

    async def _replace(self, link: WorkerConnection, first: First) -> None:
        why = await self._live(link)
        while self._carry_on(why):
            await asyncio.sleep(self._backoff())
            try:
                if first.code and await asyncio.to_thread(launching.code_digest) != first.code:
                    self._give_up(CODE_CHANGED)
                    return
                adapters = tuple(self.adapters.values())
                load = msgspec.structs.replace(first.load, blocks=self._blocks, wait=False, adapters=adapters)
                if self._cpu_experts:  # by the free memory of now others might be chosen, and answers would change
                    config = msgspec.structs.replace(load.config, cpu_experts=self._cpu_experts)
                    load = msgspec.structs.replace(load, config=config)
                load = self._fallback.load(load)
                worker = launch(load, first.worker.process is None)
                self.restarts += 1
                link = self._link = WorkerConnection(worker, self._clock, self._receive)
            except OSError as error:
                self._failures += 1
                why = f"it could not be started: {error}"
            else:
                why = await self._live(link)

    async def _live(self, link: WorkerConnection) -> str:
        """Wait for a worker's end; return why it ended."""
        why = await asyncio.shield(link.ended)
        idle = link.ready and not (self._sent or self._questions)
        self._leave_unanswered()
        self._on_end()
        how = await link.reap(CLOSE_SECONDS, surely=True)  # two models may not fit in memory
        if link.progressed:
            self._failures = 0
        elif not (idle and link.killed):  # else others killed it while idle: the next one starts at once
            self._failures += 1
        return f"{why}; {how}"

    def _leave_unanswered(self) -> None:
        self._questions.fail(Unavailable("the worker ended before it answered", retry_after=self.pause))

    def _backoff(self) -> float:
        steps = self._patience.backoff
        return steps[min(self._failures, len(steps) - 1)]

    def _receive(self, message: wire.ToFront) -> None:
        link = self._link
        assert link is not None
        if isinstance(message, wire.StepOutputs):
            if message.ids or message.outputs:
                link.progressed = True
            self._on_step(message)
            if self._suspects:
                self._next_trial()
        elif isinstance(message, wire.KVAnswer):
            link.progressed |= not message.routine
            self._questions.take(message)
        elif isinstance(message, wire.Refused):
            self._sent.discard(message.id)
            self._on_refused(message)
        elif isinstance(message, wire.FilesChecked):
            if self._checked is not None and not self._checked.done():
                self._checked.set_result(None)
        elif isinstance(message, wire.ModelReady):
            self._welcome(link, message)
        elif isinstance(message, wire.DeviceFailed):
            self._blameless = True
            self._device_failed(message.message)
        elif isinstance(message, wire.LoadFailed):
            self._load_failed(link, message)

    def _device_failed(self, why: str) -> None:
        """Take a failure of the device; answers that have begun and go on elsewhere say so at their end."""
        moved = self._fallback.failed(why)
        for flight in self.flights.values():
            if moved and flight.tokens:
                flight.moved = moved

    def _load_failed(self, link: WorkerConnection, message: wire.LoadFailed) -> None:
        """End a worker that could not load the model, and report the error to `loaded`."""
        if message.code == NoDevice.code and self._model:
            self._device_failed(message.message)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(by_code(message.code, message.message))
        self._blocks = ()  # memory may not suffice for as many, and fewer are better than no worker
        self._cpu_experts = ""
        link.end(message.message)

    def _welcome(self, link: WorkerConnection, ready: wire.ModelReady) -> None:
        """Send a worker that has loaded the requests in flight, unless it loaded another model than the first one."""
        self._model = self._model or ready.spec.identity
        if ready.spec.identity != self._model:
            link.end("it loaded another model")
            self._give_up(CHANGED)
            return
        self._cpu_experts = ready.info.cpu_experts
        self._blocks, self._longest = ready.info.blocks, min(ready.info.context, ready.info.pool_tokens)
        for flight in tuple(self.flights.values()):
            if flight.limit > self._longest <= flight.length:
                self._on_lost(flight, GenerationFailed(LESS_MEMORY))
        link.welcome()
        self._on_ready(self._fallback.explain(ready))
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
        self._next_trial()

    # ------------------------------------------------------------------------------------- after a worker's death

    def _send(self, request: Request) -> None:
        assert self._link is not None
        self._link.send(wire.Add(request))
        self._sent.add(request.id)

    def _next_trial(self) -> None:
        """Clear suspects that ended or progressed; try the next one, or send everything if there is none."""
        while self._suspects:
            suspect = self.flights.get(self._suspects[0])
            if suspect is not None and len(suspect.tokens) == suspect.survived:
                break
            self._suspects.popleft()
        for id in (self._suspects[0],) if self._suspects else tuple(self.flights):
            if id not in self._sent and self.up:
                self._send(self.flights[id].resume(self._clock.now()))

    def _carry_on(self, why: str) -> bool:
        """Record a death; return whether to start another worker."""
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(NoWorker(f"the worker ended while loading the model: {why}"))
        if self.gave_up or (self._loaded is not None and self._loaded.exception() is not None):
            return False
        self._why = why
        if self._blameless:
            self._blameless, self._sent = False, set()
        else:
            self._blame()
        if self._failures > 1:
            log.error("%s", self.trouble)
        else:
            log.error("the worker is replaced: %s", why)
        if self._failures > self._patience.restarts:
            self._lose(f"the worker died {self._failures} times in a row: {why}")
        return True

    def _give_up(self, why: str) -> None:
        """Start no other worker and end all requests."""
        self.gave_up = why
        log.error(why)
        self._lose(why)

    def _lose(self, why: str) -> None:
        """End all requests in flight."""
        for flight in list(self.flights.values()):
            self._on_lost(flight, GenerationFailed(why))

    def _blame(self) -> None:
        """Find the requests that may have killed the worker, and end the one that must have."""
        sent, self._sent = self._sent, set()
        stuck: list[int] = []
        for flight in [self.flights[id] for id in sent]:
            if len(flight.tokens) > flight.survived:
                flight.survived, flight.deaths = len(flight.tokens), 0
            flight.deaths += 1
            if flight.deaths > 1:
                stuck.append(flight.request.id)
        guilty = self._suspects[0] if self._suspects and self._suspects[0] in stuck else None
        if guilty is None and len(sent) == 1 and stuck:
            guilty = stuck[0]
        if not self._suspects:
            self._suspects.extend(sorted(stuck))
        if guilty is not None:
            self._failures = min(self._failures, 1)
            lost = GenerationFailed("the worker died each time it computed this request")
            self._on_lost(self.flights[guilty], lost)


def _seen(loaded: asyncio.Future[None]) -> None:
    """Mark an error as retrieved: if the tokenizer fails first, or the start is cancelled, nobody awaits the worker."""
    if not loaded.cancelled():
        loaded.exception()
