"""The models of one server, of which some are loaded: calls get the one they name, which is loaded if needed.

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

from cairn.config.config import Config
from cairn.config.values import ModelOptions, TenantTurns
from cairn.engine.machine import memory_available, memory_pressed
from cairn.frontend.launch import First
from cairn.frontend.service import SHUTTING_DOWN, Service
from cairn.frontend.worker_connection import Patience
from cairn.served_models.loader import FAILED_SECONDS, ModelLoader
from cairn.served_models.registry import ModelLeases, ModelRegistry
from cairn.served_models.served_model import LoadedModel, ServedModel, locate, served_models
from cairn.served_models.services import Services
from cairn.served_models.swap import ModelSwap
from cairn.system import deadline
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.system.spans import PRESENT
from cairn.types.errors import CairnError, Conflict, DeadlineExceeded, ModelError, Unavailable, trace

log = logging.getLogger(__name__)

TTL_SECONDS = 1.0
"""Interval of the checks for models whose time to live is over."""
LOAD_GUESS = 10.0
"""Assumed seconds of a load before any was measured."""


class Models(ModelRegistry):
    """All models of a server. Make it, `start` it, and end it with `close`."""

    def __init__(
        self,
        config: Config,
        models: list[ServedModel] | None = None,
        *,
        in_process: bool = False,
        clock: Clock | None = None,
        patience: Patience | None = None,
        free: Callable[[], int] = memory_available,
        pressed: Callable[[], bool] = memory_pressed,
        turns: TenantTurns | None = None,
    ) -> None:
        """See `ModelLoader`. `pressed`: whether the machine's memory is critically short."""
        super().__init__(config, served_models(config) if models is None else models)
        self.leaving = ""
        """Reason why no model takes requests any more; empty while they do."""
        self._clock, self._pressed = clock or SystemClock(), pressed
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
            self.loader.start_loading = self._start_loading
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def draining(self) -> bool:
        """Whether no model takes requests any more."""
        return bool(self.leaving)

    @classmethod
    def of(cls, service: Service, config: Config) -> Models:
        """Return the models of a server whose only model is loaded already."""
        model = ServedModel(config, ModelOptions(model=config.model, name=config.served_name, aliases=config.alias))
        models = cls(config, [model])
        models.loader.loaded(model, service, None)
        return models

    @property
    def services(self) -> Services:
        """Loaded services. There must have been one."""
        assert self.loader.services is not None, "no model was loaded yet"
        return self.loader.services

    def with_request(self, id: int) -> Service | None:
        """Return the service that has, or had, the request of that id; None if there is none."""
        return next((one for one in self.services if one.status(id) is not None), None)

    # ---------------------------------------------------------------------------------------------------- the start

    async def start(self, first: First | None = None) -> Service:
        """Load the first model and return its service.

        `first`: its worker, if that has been started already. On a server with several models a model that cannot be
        loaded becomes `failed` and the next one is loaded. Raise the error of the first one if none can be loaded.
        """
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
        self._spawn(self._tend())
        if self.several:
            self._spawn(self._prepare())
        return service

    async def _start_another(self, refused: CairnError) -> Service:
        """Load the first model that can be loaded. Raise `refused` if there is none."""
        while (model := self.first).state == "on disk" and not model.delay:
            with contextlib.suppress(CairnError):  # recorded in `failure`, or in `delay` if memory is short
                await self._load(model, evict=False)
            if model.loaded is not None:
                return model.loaded.service
        raise refused

    async def _prepare(self) -> None:
        """Read the files of all models, then load those that belong to the start, as far as memory allows."""
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
        """Read the model's files. Raise ModelError if they cannot be served."""
        await asyncio.to_thread(model.describe)
        assert model.spec is not None
        self.name_own(model, model.spec.name)

    # ---------------------------------------------------------------------------------------------------- to use

    @contextlib.asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[Service]:
        """Keep `model` loaded while a call uses it, loading it first if needed; yield its service.

        Raise Unavailable if it cannot be loaded, or not within `load_timeout`; at once if it does not fit in memory
        beside the models that the same call has. Time that a swap takes is not counted. Raise DeadlineExceeded if the
        deadline of the call comes first.
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
        """Wait until the model is loaded."""
        end, tried = self._clock.now() + self.config.load_timeout, False
        with self._leases.waiting(model) as held:
            while True:
                if self.leaving:
                    raise Unavailable(self.leaving, retry_after=self.config.shutdown_grace)
                if model.swapping is not None:
                    await self._wait_for(model.swapping, model, self.config.request_timeout)
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
                if not await self._wait_for(task, model, end - self._clock.now()):
                    why = model.delay or f"{model.name} is being loaded; ask again shortly"
                    raise Unavailable(why, retry_after=self._load_left(model))

    async def _wait_for(self, change: asyncio.Future[None], model: ServedModel, most: float) -> bool:
        """Wait for a change of a model for up to `most` seconds; return whether it came.

        Raise DeadlineExceeded if the deadline of the call comes first.
        """
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
        """Estimate the seconds until a loading model is ready, by its last load, else by the loads of other models."""
        others = [one.load_seconds for one in self.models if one.load_seconds]
        usual = model.load_seconds or (sum(others) / len(others) if others else LOAD_GUESS)
        return max(1.0, usual - (self._clock.now() - model.asked_at))

    def _start_loading(self, name: str) -> bool:
        """Start loading a model that no call waits for; return whether there is a model of this name."""
        model = self.get(name)
        if model is not None and not (model.failure and self._clock.now() - model.failed_at < FAILED_SECONDS):
            self._loading(model)
        return model is not None

    def _loading(self, model: ServedModel) -> asyncio.Task[None]:
        if model.loading is None:
            model.asked_at = self._clock.now()
            model.loading = self._spawn(self._load_quietly(model))
        return model.loading

    async def _load_quietly(self, model: ServedModel) -> None:
        try:
            with contextlib.suppress(CairnError):  # recorded in `failure`
                await self._load(model)
        finally:
            model.loading = None

    def keep(self, model: ServedModel, seconds: float) -> None:
        """Set the seconds without calls after which the model is unloaded.

        Pinned models stay loaded, and so does the only model of a server.
        """
        if model.loaded is not None and self.several:
            model.loaded.ttl = seconds

    def expires_in(self, model: ServedModel) -> float:
        """Return the seconds until a loaded model is unloaded if no call comes; infinity for never."""
        loaded = model.loaded
        if loaded is None or model.pinned:
            return math.inf
        return max(0.0, loaded.ttl - (self._clock.now() - loaded.used if loaded.idle else 0.0))

    # ---------------------------------------------------------------------------------------------------- to change

    async def load(self, model: ServedModel) -> None:
        """Load a model if it is not loaded, without a time limit. Raise ModelError or Unavailable."""
        await self._load(model)

    async def unload(self, model: ServedModel, grace: float) -> None:
        """Unload a model: it takes no more calls, and ends once its calls are over, or after `grace` seconds.

        A later call loads it again. Raise Conflict if it is not loaded.
        """
        async with self.loader.turn:
            if model.loaded is None:
                raise Conflict(f"{model.name} is not loaded ({model.state})", field="model")
            await self.loader.unload(model, grace, force=True)

    async def swap(self, model: ServedModel, to: str, grace: float) -> None:
        """Replace a model: its names move to the new one at once, and its running requests are finished.

        See `ModelSwap`. On any failure the old model answers as before, also if the caller is cancelled. Raise
        UnknownModel, InvalidRequest, Conflict, ModelError or Unavailable.
        """
        task = self._spawn(self._swap(model, to, grace))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # read it: the caller may have left
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
                await swap.run(self._spawn)
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
        """Number of requests that run or wait."""
        stats = [loaded.service.stats() for _, loaded in self.loaded()]
        return sum(one.running + one.waiting for one in stats)

    async def drain(self, grace: float, why: str = SHUTTING_DOWN) -> None:
        """Take no more requests, wait up to `grace` seconds for the running ones, and end the rest.

        `why` is the message for refused and ended requests.
        """
        self.leaving = why
        await asyncio.gather(*(loaded.service.drain(grace, why) for _, loaded in self.loaded()))

    async def close(self) -> None:
        """End all models and tasks. May be called again."""
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
                if self.several and self._pressed():
                    await self._relieve()
            except Exception as error:
                log.error("looking for idle models failed: %s", trace(error))

    async def _unload_idle(self) -> None:
        """Unload the models whose time to live is over."""
        now = self._clock.now()
        for model, loaded in tuple(self.loaded()):
            over = not model.pinned and loaded.idle and now - loaded.used >= loaded.ttl
            if not over or self.loader.turn.locked():
                continue
            async with self.loader.turn:
                if model.loaded is loaded and loaded.idle:
                    await self.loader.unload(model, 0.0, force=False)
                    log.info("%s was unloaded: nobody asked for it for %g s", model.name, loaded.ttl)

    async def _relieve(self) -> None:
        """Unload the idle model that was used longest ago; the next check may unload another one."""
        idle = [(one.used, model) for model, one in self.loaded() if one.idle and not model.pinned]
        if not idle or self.loader.turn.locked():
            return
        model = min(idle, key=lambda one: one[0])[1]
        async with self.loader.turn:
            if await self.loader.unload(model, 0.0, force=False):
                log.warning("%s was unloaded: the system's memory is critically short", model.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
