"""Loading and unloading of a server's models, and eviction of models to free memory for others.

One model is loaded or unloaded at a time: the task that does it holds `ModelLoader.turn`, and every method that changes
anything needs it held unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.config import Config
from cairn.config.values import TenantTurns
from cairn.engine.machine import memory_available
from cairn.frontend.adapter_services import ServedAdapters
from cairn.frontend.launch import First, launch_first
from cairn.frontend.request_table import Used
from cairn.frontend.service import RequestIds, Service
from cairn.frontend.worker_connection import Patience
from cairn.served_models.fit import Fit, measure
from cairn.served_models.registry import ModelLeases, ModelRegistry
from cairn.served_models.served_model import LoadedModel, ServedModel, locate
from cairn.served_models.services import Services
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.types.errors import CairnError, ModelError, Unavailable

log = logging.getLogger(__name__)

GB = 10**9
FAILED_SECONDS = 10.0
"""Pause after a failed load. Calls in that time get the error, then another load is tried."""
FLUSH_SECONDS = 10.0
"""Time limit for storing KV before a model is unloaded."""
CLOSE_SECONDS = 15.0
LOOK_SECONDS = 0.02
"""Interval of the checks whether a model's requests have ended."""


class ModelLoader:
    """Loader of a registry's models, with the memory that is left for others."""

    def __init__(
        self,
        registry: ModelRegistry,
        leases: ModelLeases,
        *,
        in_process: bool = False,
        clock: Clock | None = None,
        patience: Patience | None = None,
        free: Callable[[], int] = memory_available,
        turns: TenantTurns | None = None,
    ) -> None:
        """Create a loader.

        `free` returns the bytes of free memory; `turns`: settings of tenants that differ from the default.
        """
        self.services: Services | None = None
        """Loaded services; None before the first model is loaded."""
        self.turn = asyncio.Lock()
        """Lock that is held while a model is loaded or unloaded."""
        self.start_loading: Callable[[str], bool] | None = None
        """See `Services.start_loading`."""
        self._registry, self._leases = registry, leases
        self._in_process, self.clock, self._patience = in_process, clock or SystemClock(), patience
        self._free, self._turns = free, turns
        self._ids = RequestIds(self.clock)
        self.closed = False
        """Whether the server is shutting down, so that nothing more is loaded."""
        self._used: Used | None = None
        self._retiring: set[LoadedModel] = set()
        """Replaced models that still finish their last requests."""

    def tell(self, used: Used) -> None:
        """Report to `used` what the requests of all models use, including models that are loaded later."""
        self._used = used
        for _, loaded in self._registry.loaded():
            loaded.service.used = used

    # ---------------------------------------------------------------------------------------------------- to load

    async def start(
        self,
        config: Config,
        part: float,
        *,
        first: First | None = None,
        fit: Fit | None = None,
        place: Path | None = None,
    ) -> Service:
        """Return a service of a model that is not reachable by any name yet.

        `first`: its worker, if that has been started already.
        """
        config = _mapped(config, fit)
        if first is None:
            first = await self._launch(config, part, fit, place, wait=False)
        return await Service.start(config, first, patience=self._patience, clock=self.clock, ids=self._ids)

    async def prepare(self, config: Config, part: float, *, fit: Fit | None, place: Path) -> Service:
        """Return a service whose files are checked and which takes its memory only at `Service.load`."""
        config = _mapped(config, fit)
        first = await self._launch(config, part, fit, place, wait=True)
        return await Service.prepare(config, first, patience=self._patience, clock=self.clock, ids=self._ids)

    async def _launch(self, config: Config, part: float, fit: Fit | None, place: Path | None, *, wait: bool) -> First:
        """Start a worker. If the caller is cancelled meanwhile, the worker is ended once it is there."""
        blocks = fit.blocks if fit is not None else ()
        launching = asyncio.ensure_future(
            asyncio.to_thread(launch_first, config, self._in_process, place, blocks, part, self._turns, wait)
        )
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            launching.add_done_callback(_end_first)
            raise

    def loaded(self, model: ServedModel, service: Service, fit: Fit | None) -> None:
        """Record a successful load of `model` and serve it."""
        model.failure = model.delay = ""
        model.loads += 1
        self.take(model, service, fit)

    def take(self, model: ServedModel, service: Service, fit: Fit | None) -> None:
        """Let `service` answer under the model's names from now on."""
        before = model.loaded.service if model.loaded is not None else None
        if self._used is not None:
            service.used = self._used
        model.loaded = LoadedModel(service, fit, self.clock.now(), model.ttl, ServedAdapters(service))
        model.spec, model.identity = service.spec, service.spec.identity
        model.name = service.name
        if model.swaps:
            model.swapped_names = service.names
        else:
            model.own_names |= service.names
        self._registry.rename()
        adapters = model.loaded.adapters
        if self.services is None:
            self.services = Services(service, adapters)
            self.services.start_loading = self.start_loading
            return
        self.services.add(service, adapters)
        if before is self.services.first:
            self.services.lead(service)

    def failed(self, model: ServedModel, error: Exception) -> None:
        """Record that a model could not be loaded, or that there was no memory for it."""
        if isinstance(error, Unavailable):  # no room now: nothing is wrong with the model
            model.delay = str(error)
            return
        model.note_failure(error, self.clock.now())

    # ---------------------------------------------------------------------------------------------------- to unload

    async def unload(self, model: ServedModel, grace: float, *, force: bool, why: str = "") -> bool:
        """Unload a model; return whether it was unloaded.

        Without `force` it stays if it is still in use after `grace` seconds, or if a call that has it waits for
        another model. `why` is the message for requests that are ended. If the caller is cancelled while requests are
        waited for, the model stays loaded. If it is cancelled later, the model is unloaded first.
        """
        loaded = model.loaded
        assert loaded is not None
        loaded.closing = True
        try:
            if not await self._ended(loaded, grace, None if force else model) and not force:
                return False
            await to_end(self._unload(model, loaded, why or f"{model.name} is being unloaded; ask again shortly"))
            return True
        finally:
            loaded.closing = False

    async def _unload(self, model: ServedModel, loaded: LoadedModel, why: str) -> None:
        try:
            await self._end(loaded.service, why)
        finally:
            model.loaded = None

    async def retire(self, old: LoadedModel, grace: float) -> None:
        """End a model that was replaced, once its requests are over or after `grace` seconds.

        Called without the turn.
        """
        old.closing = True
        self._retiring.add(old)
        try:
            await self._ended(old, grace)
            await self._end(old.service, f"{old.service.name} is another model now; ask again")
        finally:
            self._retiring.discard(old)

    async def _ended(self, loaded: LoadedModel, grace: float, model: ServedModel | None = None) -> bool:
        """Wait until nothing uses the model; return False if that takes longer than `grace` seconds.

        With `model`, also return False as soon as a call that has the model waits for another one.
        """
        end, storing = self.clock.now() + grace, None
        try:
            while not loaded.idle:
                if self.clock.now() >= end or (model is not None and self._leases.waits(model)):
                    return False
                if storing is None:  # while the last requests run, so that little is left to store at the end
                    storing = asyncio.create_task(_flush(loaded.service, max(FLUSH_SECONDS, grace)))
                await asyncio.sleep(LOOK_SECONDS)
            return True
        finally:
            if storing is not None:
                storing.cancel()

    async def _end(self, service: Service, why: str) -> None:
        """End the remaining requests of a service, store its KV and close it."""
        await service.drain(0, why)
        await _flush(service, FLUSH_SECONDS)
        assert self.services is not None
        self.services.remove(service)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.close(), CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------------------- room

    @property
    def budget(self) -> int | None:
        """Bytes of memory for all loaded models; None if only free memory limits them."""
        config = self._registry.config
        return None if config.memory_gb is None else int(config.memory_gb * GB)

    @property
    def bounded(self) -> bool:
        """Whether models are measured before a load; if not, the worker itself checks for memory."""
        return self._registry.several or self.budget is not None

    def left(self) -> int:
        """Return the bytes that another model may take."""
        held = sum(model.held for model, _ in self._registry.loaded())
        held += sum(old.fit.held for old in self._retiring if old.fit is not None)
        if self.budget is not None:
            return self.budget - held
        return self._free() - sum(_unused_bytes(model) for model, _ in self._registry.loaded())

    async def measure(self, config: Config, place: Path, left: int) -> Fit:
        """Return what a model takes if it has `left` bytes."""
        return await measure(config, place, max(0, left), in_process=self._in_process)

    async def make_room(self, model: ServedModel, config: Config, place: Path, *, evict: bool) -> Fit | None:
        """Unload the least recently used models until `model` fits; return what it takes.

        Raise Unavailable if the other models cannot be unloaded, ModelError if the model would not fit even alone.
        """
        if not self.bounded:
            return None
        await self.measure_first()
        end = self.clock.now() + self._registry.config.load_timeout
        while True:
            count, most = sum(1 for _ in self._registry.loaded()), self._registry.config.max_loaded
            left = self.left()
            fit = await self.measure(config, place, left)
            if fit.most <= left and count < most:
                return fit
            victim = self._victim() if evict or model.pinned else None
            if victim is None:
                if not count:
                    raise ModelError(
                        f"{model.name} needs {shown_gb(fit.most)} of memory, and models may take {shown_gb(left)}"
                    )
                raise Unavailable(
                    f"there is no room for {model.name}: it needs {shown_gb(fit.most)}, {shown_gb(left)} are left, "
                    f"{count} of {most} models are loaded, and none of these may be unloaded now",
                    retry_after=FAILED_SECONDS,
                )
            if not await self.unload(victim, max(0.0, end - self.clock.now()), force=False):
                if self._leases.waits(victim) and self.clock.now() < end:
                    continue
                raise Unavailable(
                    f"{victim.name} must be unloaded before {model.name} can be loaded, and is in use; ask again later",
                    retry_after=victim.loaded.service.metrics.mean_seconds if victim.loaded is not None else 1.0,
                )
            log.info("%s was unloaded to make room for %s", victim.name, model.name)

    async def measure_first(self) -> None:
        """Measure the model that was loaded at the start without a measurement."""
        for model, loaded in self._registry.loaded():
            if loaded.fit is None and model.place is None:
                with contextlib.suppress(CairnError):
                    await asyncio.to_thread(locate, model)
            if loaded.fit is None and model.place is not None:
                blocks = loaded.service.info.blocks
                with contextlib.suppress(CairnError):
                    loaded.fit = await measure(
                        model.config, model.place, self._free(), in_process=self._in_process, blocks=blocks
                    )

    def _victim(self) -> ServedModel | None:
        """Return the model to unload next: idle before busy, then least recently used.

        Never a pinned model, nor one that is held by a call which waits for another model.
        """
        candidates = [
            (loaded.idle, -loaded.used, model)
            for model, loaded in self._registry.loaded()
            if not model.pinned and not self._leases.waits(model)
        ]
        return max(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _mapped(config: Config, fit: Fit | None) -> Config:
    """Return the options of a measured model, with `experts` set if they stay in their file."""
    if fit is None or not fit.mapped:
        return config
    # As measured, even if the machine has more memory than models may take.
    return msgspec.structs.replace(config, experts="mapped")


async def _flush(service: Service, seconds: float) -> None:
    """Store the service's KV, as far as that can be done in time."""
    with contextlib.suppress(CairnError, TimeoutError):
        await asyncio.wait_for(service.flush(), seconds)


async def to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even if the caller is cancelled; raise the cancellation afterwards."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def shown_gb(size: int) -> str:
    """Format bytes in GB for a message."""
    return f"{size / GB:.2f} GB"


def _end_first(launching: asyncio.Future[First]) -> None:
    """End a worker that nobody waits for any more."""
    if not launching.cancelled() and launching.exception() is None:
        launching.result().end()


def _unused_bytes(model: ServedModel) -> int:
    """Return the bytes that a loaded model may still take: its KV pool takes memory only when it is used."""
    loaded = model.loaded
    if loaded is None or (pid := loaded.service.stats().worker_pid) is None:
        return 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, model.held - pages * 4096)
