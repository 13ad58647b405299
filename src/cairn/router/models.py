"""The models of one server, of which some are loaded: calls get the one they want, which is loaded where it is not.

Each loaded model is a `Service` with a worker process of its own. One is loaded or unloaded at a time (`ModelLoader`);
calls go on meanwhile, and those for a model that is not there yet wait until it is. Everything runs on one event loop.

    on disk -> loading -> loaded -> unloading -> on disk
                  └> failed ┘ a later call tries again, after a pause
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from cairn.config.config import Config, ModelOptions, TenantTurns
from cairn.frontend.launch import First
from cairn.frontend.service import SHUTTING_DOWN, Service
from cairn.frontend.worker_connection import Patience
from cairn.router.fit import free_now
from cairn.router.loader import FAILED_SECONDS, ModelLoader
from cairn.router.registry import ModelLeases, ModelRegistry
from cairn.router.served_model import LoadedModel, ServedModel, locate, served_models
from cairn.router.services import Services
from cairn.router.swap import ModelSwap
from cairn.system import deadline
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.system.spans import PRESENT
from cairn.types.errors import CairnError, Conflict, DeadlineExceeded, ModelError, Unavailable, trace

log = logging.getLogger(__name__)

TTL_SECONDS = 1.0
"""How often to look for models that nobody has asked for."""
LOAD_GUESS = 10.0
"""Seconds that a load takes before any was measured."""


class Models(ModelRegistry):
    """All models of a server. Make it, `start` it; end it with `close`."""

    def __init__(
        self,
        config: Config,
        models: list[ServedModel] | None = None,
        *,
        in_process: bool = False,
        clock: Clock | None = None,
        patience: Patience | None = None,
        free: Callable[[], int] = free_now,
        turns: TenantTurns | None = None,
    ) -> None:
        """See `ModelLoader`."""
        super().__init__(config, served_models(config) if models is None else models)
        self.leaving = ""
        """Why no model takes requests any more; empty where they do."""
        self._clock = clock or SystemClock()
        self._leases = ModelLeases()
        self.loader = ModelLoader(
            self,
            self._leases,
            in_process=in_process,
            clock=self._clock,
            patience=patience,
            free=free,
            turns=turns,
        )
        if self.several:
            self.loader.want = self._want
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def draining(self) -> bool:
        """Whether no model takes requests any more."""
        return bool(self.leaving)

    @classmethod
    def of(cls, service: Service, config: Config) -> Models:
        """The models of a server whose only one is loaded."""
        model = ServedModel(config, ModelOptions(model=config.model, name=config.served_name, aliases=config.alias))
        models = cls(config, [model])
        models.loader.loaded(model, service, None)
        return models

    @property
    def services(self) -> Services:
        """Those that are loaded, once the first one is."""
        assert self.loader.services is not None, "no model was loaded yet"
        return self.loader.services

    def with_request(self, id: int) -> Service | None:
        """The service that has, or had, a request."""
        return next((one for one in self.services if one.status(id) is not None), None)

    # ---------------------------------------------------------------------------------------------------- the start

    async def start(self, first: First | None = None) -> Service:
        """Load the first model; `first`: its worker, where that was started before. Of several, one that cannot be
        loaded is `failed`, and the next is loaded in its place. Raises what was wrong with the first where none can."""
        model = self.first
        began = self._clock.now()
        try:
            service = await self.loader.start(model.config, model.part, first=first)
        except CairnError as error:
            if not self.several:
                raise
            self.loader.failed(model, error)
            service = await self._start_another(error)
        else:
            self.loader.loaded(model, service, None)
            model.load_seconds = self._clock.now() - began
        self._later(self._tend())
        if self.several:
            self._later(self._prepare())
        return service

    async def _start_another(self, refused: CairnError) -> Service:
        """Load the first model that can be. Raises `refused` where none can."""
        while (model := self.first).state == "on disk" and not model.delay:
            with contextlib.suppress(CairnError):  # `failure`, or `delay` where there is no room
                await self._load(model, evict=False)
            if model.loaded is not None:
                return model.loaded.service
        raise refused

    async def _prepare(self) -> None:
        """Read what the files of models say, then load those that are to be loaded at the start, as far as there is
        room."""
        for model in self.models:
            if model.spec is None and not model.failure:
                try:
                    await self._describe(model)
                except CairnError as error:
                    self.loader.failed(model, error)
        for model in sorted(self.models, key=lambda one: not one.pinned):
            if not model.at_start or model.failure or model.loaded is not None or self._closed:
                continue
            with contextlib.suppress(CairnError):
                await self._load(model, evict=False)

    async def _describe(self, model: ServedModel) -> None:
        """Read what its files say. Raises ModelError where they cannot be served."""
        await asyncio.to_thread(model.describe)
        assert model.spec is not None
        self.name_own(model, model.spec.name)

    # ---------------------------------------------------------------------------------------------------- to use

    @contextlib.asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[Service]:
        """While a call is answered by this model, which is loaded first where it is not: it stays loaded.

        Raises Unavailable where that takes longer than `load_timeout`, or cannot be done; at once where there is no
        room for it beside what the same call has. A swap that is under way is waited for beside that time, and
        DeadlineExceeded is raised where the call's own time ends first.
        """
        loaded, mine = model.loaded, any(lease.model is model for lease in self._leases.held())
        if loaded is None or (loaded.closing and not mine):
            began = self._clock.now()
            try:
                loaded = await self._wait(model)
            finally:
                if (spans := PRESENT.get()) is not None:
                    spans.add("load", began, self._clock.now(), what="model", model=model.name)
        try:
            with self._leases.lease(model, loaded):
                yield loaded.service
        finally:
            loaded.used = self._clock.now()

    async def _wait(self, model: ServedModel) -> LoadedModel:
        """Until the model is loaded."""
        end, tried = self._clock.now() + self.config.load_timeout, False
        with self._leases.waiting(model) as held:
            while True:
                if self.leaving:
                    raise Unavailable(self.leaving, retry_after=self.config.shutdown_grace)
                if model.swapping is not None:
                    await self._until(model.swapping, model, self.config.request_timeout)
                    end = self._clock.now() + self.config.load_timeout
                    continue
                if model.loaded is not None and not model.loaded.closing:
                    return model.loaded
                pause = model.failed_at + FAILED_SECONDS - self._clock.now()
                if model.failure and pause > 0:
                    raise Unavailable(f"{model.name} cannot be loaded: {model.failure}", retry_after=pause)
                if tried and held and model.delay:
                    beside = ", ".join(dict.fromkeys(lease.model.name for lease in held))
                    raise Unavailable(
                        f"{model.name} is needed beside {beside}, and there is no room for both (max_loaded "
                        f"{self.config.max_loaded}, or memory): {model.delay}",
                        retry_after=FAILED_SECONDS,
                    )
                task, tried = self._loading(model), True
                if not await self._until(task, model, end - self._clock.now()):
                    why = model.delay or f"{model.name} is being loaded; ask again shortly"
                    raise Unavailable(why, retry_after=self._load_left(model))

    async def _until(self, change: asyncio.Future[None], model: ServedModel, most: float) -> bool:
        """Wait for a change of a model, for at most so many seconds; whether it came. DeadlineExceeded where the time
        that the call gives itself ends first."""
        began = self._clock.now()
        done, _ = await asyncio.wait({change}, timeout=deadline.left(began, max(0.0, most)))
        now = self._clock.now()
        if not done and not deadline.left(now, 1.0):
            raise DeadlineExceeded(
                f"the request reached its time limit while it waited for {model.name} to be loaded",
                retry_after=self._load_left(model),
            )
        return bool(done)

    def _load_left(self, model: ServedModel) -> float:
        """Seconds until a model that is being loaded will be there: as its last load took, else as others' did."""
        others = [one.load_seconds for one in self.models if one.load_seconds]
        usual = model.load_seconds or (sum(others) / len(others) if others else LOAD_GUESS)
        return max(1.0, usual - (self._clock.now() - model.asked_at))

    def _want(self, name: str) -> bool:
        """Begin to load a model for work that no call waits for; whether there is one of this name."""
        model = self.get(name)
        if model is not None and not (model.failure and self._clock.now() - model.failed_at < FAILED_SECONDS):
            self._loading(model)
        return model is not None

    def _loading(self, model: ServedModel) -> asyncio.Task[None]:
        if model.loading is None:
            model.asked_at = self._clock.now()
            model.loading = self._later(self._load_quietly(model))
        return model.loading

    async def _load_quietly(self, model: ServedModel) -> None:
        try:
            with contextlib.suppress(CairnError):  # `failure` says it
                await self._load(model)
        finally:
            model.loading = None

    def keep(self, model: ServedModel, seconds: float) -> None:
        """Unload the model once nobody has asked for it for so long; a pinned one stays, and the only one."""
        if model.loaded is not None and self.several:
            model.loaded.ttl = seconds

    def expires_in(self, model: ServedModel) -> float:
        """Seconds until a loaded model is unloaded if nobody asks for it; infinite for never."""
        loaded = model.loaded
        if loaded is None or model.pinned:
            return math.inf
        return max(0.0, loaded.ttl - (self._clock.now() - loaded.used if loaded.idle else 0.0))

    # ---------------------------------------------------------------------------------------------------- to change

    async def load(self, model: ServedModel) -> None:
        """Load a model where it is not, however long that takes. Raises ModelError or Unavailable."""
        await self._load(model)

    async def unload(self, model: ServedModel, grace: float) -> None:
        """Unload a model: it takes no more calls, and ends once those it has are over, or after `grace` seconds.

        A call for it loads it again. Conflict for one that is not loaded.
        """
        async with self.loader.turn:
            if model.loaded is None:
                raise Conflict(f"{model.name} is not loaded ({model.state})", field="model")
            await self.loader.unload(model, grace, surely=True)

    async def swap(self, model: ServedModel, to: str, grace: float) -> None:
        """Load another model in the place of this one: its names move at once, requests that it has go on to their end.

        See `ModelSwap`. On any failure the old one answers as before, also where the caller is cancelled. Raises
        UnknownModel, InvalidRequest, Conflict, ModelError or Unavailable.
        """
        task = self._later(self._swap(model, to, grace))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # who left hears nothing of it
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise

    async def _swap(self, model: ServedModel, to: str, grace: float) -> None:
        async with self.loader.turn:
            swap = ModelSwap(self, self.loader, model, to, grace)
            model.swapping = asyncio.get_running_loop().create_future()
            try:
                await swap.run(self._later)
            finally:
                model.swapping.set_result(None)
                model.swapping = None

    async def _load(self, model: ServedModel, *, evict: bool = True) -> None:
        loader = self.loader
        async with loader.turn:
            if model.loaded is not None or self._closed:
                return
            began = self._clock.now()
            try:
                place = await asyncio.to_thread(locate, model)
                if model.spec is None and self.several:
                    await self._describe(model)
                fit = await loader.make_room(model, model.config, place, evict=evict)
                loader.loaded(model, await loader.start(model.config, model.part, fit=fit, place=place), fit)
            except CairnError as error:
                loader.failed(model, error)
                raise
            except Exception as error:
                loader.failed(model, error)
                log.error("%s could not be loaded: %s", model.name, trace(error))
                raise ModelError(f"{model.name} could not be loaded ({type(error).__name__})") from error
            model.load_seconds = self._clock.now() - began
            log.info("%s is loaded (%.1f s)", model.name, model.load_seconds)

    # ---------------------------------------------------------------------------------------------------- the end

    @property
    def requests(self) -> int:
        """How many requests run and wait."""
        stats = [loaded.service.stats() for _, loaded in self.loaded()]
        return sum(one.running + one.waiting for one in stats)

    async def drain(self, grace: float, why: str = SHUTTING_DOWN) -> None:
        """Take no more requests, wait up to `grace` seconds for those that run, and end the rest, which are told
        `why`."""
        self.leaving = why
        await asyncio.gather(*(loaded.service.drain(grace, why) for _, loaded in self.loaded()))

    async def close(self) -> None:
        """End everything. Nothing is left. May be called again."""
        self._closed = self.loader.closed = True
        self.leaving = self.leaving or SHUTTING_DOWN
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(service.close() for service in self.loader.services or ()))

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TTL_SECONDS)
            try:
                await self._unload_idle()
            except Exception as error:
                log.error("looking for idle models failed: %s", trace(error))

    async def _unload_idle(self) -> None:
        """Unload what nobody has asked for."""
        now = self._clock.now()
        for model, loaded in tuple(self.loaded()):
            over = not model.pinned and loaded.idle and now - loaded.used >= loaded.ttl
            if not over or self.loader.turn.locked():
                continue
            async with self.loader.turn:
                if model.loaded is loaded and loaded.idle:
                    await self.loader.unload(model, 0.0, surely=False)
                    log.info("%s was unloaded: nobody asked for it for %g s", model.name, loaded.ttl)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
