"""Loads and unloads the models of a server, and makes room in memory for one at the cost of others.

One is loaded or unloaded at a time: whoever does either holds `turn`, and all that changes anything here wants it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.config import Config, TenantTurns
from cairn.frontend.launch import First, launch_first
from cairn.frontend.request_table import Used
from cairn.frontend.service import RequestIds, Service
from cairn.frontend.worker_connection import Patience
from cairn.router.fit import Fit, free_now, measure
from cairn.router.registry import ModelLeases, ModelRegistry
from cairn.router.served_model import LoadedModel, ServedModel, locate
from cairn.router.services import Services
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.types.errors import CairnError, ModelError, Unavailable
from cairn.worker.stores import GB

log = logging.getLogger(__name__)

FAILED_SECONDS = 10.0
"""After a model could not be loaded, how long a call for it is told why, before another attempt."""
FLUSH_SECONDS = 10.0
"""How long KV may be stored before a model is unloaded."""
CLOSE_SECONDS = 15.0
LOOK_SECONDS = 0.02
"""How often to look whether a model's requests are over."""


class ModelLoader:
    """What is loaded of a registry's models, and the memory that is left for others."""

    def __init__(
        self,
        registry: ModelRegistry,
        leases: ModelLeases,
        *,
        in_process: bool = False,
        clock: Clock | None = None,
        patience: Patience | None = None,
        free: Callable[[], int] = free_now,
        turns: TenantTurns | None = None,
    ) -> None:
        """`free` tells the bytes of memory that are free; `turns`: of tenants that are not like all others."""
        self.services: Services | None = None
        """Those that are loaded; None before the first one is."""
        self.turn = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        self.want: Callable[[str], bool] | None = None
        """See `Services.want`."""
        self._registry, self._leases = registry, leases
        self._in_process, self.clock, self._patience = in_process, clock or SystemClock(), patience
        self._free, self._turns = free, turns
        self._ids = RequestIds(self.clock)
        self.closed = False
        """Nothing more is to be loaded: the server ends."""
        self._used: Used | None = None
        self._retiring: set[LoadedModel] = set()
        """Models whose names are another's now, while their last requests go on."""

    def tell(self, used: Used) -> None:
        """Let somebody know what the requests of all models use, also of those that are loaded later."""
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
        """A service of a model that answers in no name yet; `first`: its worker, where that was started before."""
        config = _mapped(config, fit)
        if first is None:
            first = await self._launch(config, part, fit, place, wait=False)
        return await Service.start(config, first, patience=self._patience, clock=self.clock, ids=self._ids)

    async def prepare(self, config: Config, part: float, *, fit: Fit | None, place: Path) -> Service:
        """The same of a model whose files are checked, and which takes its memory only at `Service.load`."""
        config = _mapped(config, fit)
        first = await self._launch(config, part, fit, place, wait=True)
        return await Service.prepare(config, first, patience=self._patience, clock=self.clock, ids=self._ids)

    async def _launch(self, config: Config, part: float, fit: Fit | None, place: Path | None, *, wait: bool) -> First:
        """A worker. One that is there when nobody waits for it any more is ended."""
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
        """A model was loaded."""
        model.failure = model.delay = ""
        model.loads += 1
        self.take(model, service, fit)

    def take(self, model: ServedModel, service: Service, fit: Fit | None) -> None:
        """From now on this service answers in the model's names."""
        before = model.loaded.service if model.loaded is not None else None
        if self._used is not None:
            service.used = self._used
        model.loaded = LoadedModel(service, fit, self.clock.now(), model.ttl)
        model.spec, model.identity = service.spec, service.spec.identity
        model.name = service.name
        model.names |= service.names
        self._registry.name(model, (model.name, *sorted(service.names)))
        if self.services is None:
            self.services = Services(service)
            self.services.want = self.want
            return
        self.services.add(service)
        if before is self.services.first:
            self.services.lead(service)

    def failed(self, model: ServedModel, error: Exception) -> None:
        """A model could not be loaded, or had no room."""
        if isinstance(error, Unavailable):  # no room now: nothing is wrong with the model
            model.delay = str(error)
            return
        model.note_failure(error, self.clock.now())

    # ---------------------------------------------------------------------------------------------------- to unload

    async def unload(self, model: ServedModel, grace: float, *, surely: bool, why: str = "") -> bool:
        """Unload it; whether it was. Without `surely` one stays that is still used after `grace`, or that is of a call
        which waits for another model. Requests that are ended with it are told `why`.

        Who is cancelled while requests are waited for leaves the model loaded; later it is unloaded first.
        """
        loaded = model.loaded
        assert loaded is not None
        loaded.closing = True
        try:
            if not await self._ended(loaded, grace, None if surely else model) and not surely:
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
        """A model whose names are another's now: it ends once what it has is over, or after `grace` seconds. Without
        the turn."""
        old.closing = True
        self._retiring.add(old)
        try:
            await self._ended(old, grace)
            await self._end(old.service, f"{old.service.name} is another model now; ask again")
        finally:
            self._retiring.discard(old)

    async def _ended(self, loaded: LoadedModel, grace: float, model: ServedModel | None = None) -> bool:
        """Wait until nobody has it any more, but not longer, nor for a call that has `model` and waits itself."""
        end, storing = self.clock.now() + grace, None
        try:
            while not loaded.idle:
                if self.clock.now() >= end or (model is not None and self._leases.waits(model)):
                    return False
                if storing is None:  # beside the last requests, so that little is left for the end
                    storing = asyncio.create_task(_flush(loaded.service, max(FLUSH_SECONDS, grace)))
                await asyncio.sleep(LOOK_SECONDS)
            return True
        finally:
            if storing is not None:
                storing.cancel()

    async def _end(self, service: Service, why: str) -> None:
        """End the requests that it still has, store its KV and close it."""
        await service.drain(0, why)
        await _flush(service, FLUSH_SECONDS)
        assert self.services is not None
        self.services.remove(service)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.close(), CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------------------- room

    @property
    def budget(self) -> int | None:
        """Bytes for all loaded models; None: what is free."""
        config = self._registry.config
        return None if config.memory_gb is None else int(config.memory_gb * GB)

    @property
    def bounded(self) -> bool:
        """Whether models are measured before they are loaded; else the worker itself looks before it loads."""
        return self._registry.several or self.budget is not None

    def left(self) -> int:
        """Bytes that another model may take."""
        held = sum(model.held for model, _ in self._registry.loaded())
        held += sum(old.fit.held for old in self._retiring if old.fit is not None)
        if self.budget is not None:
            return self.budget - held
        return self._free() - sum(_untouched(model) for model, _ in self._registry.loaded())

    async def measure(self, config: Config, place: Path, left: int) -> Fit:
        """What a model takes of `left` bytes."""
        return await measure(config, place, max(0, left), in_process=self._in_process)

    async def make_room(self, model: ServedModel, config: Config, place: Path, *, evict: bool) -> Fit | None:
        """Unload what was not used for longest until there is room; what the model takes.

        Unavailable where the others do not give way, ModelError where all room would be too little.
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
                        f"{model.name} needs {shown_gb(fit.most)} of memory, and {shown_gb(left)} are there for models"
                    )
                raise Unavailable(
                    f"there is no room for {model.name} ({shown_gb(fit.most)}; {shown_gb(left)} are left, and {count} "
                    f"of {most} models are loaded) and no other that may be unloaded",
                    retry_after=FAILED_SECONDS,
                )
            if not await self.unload(victim, max(0.0, end - self.clock.now()), surely=False):
                if self._leases.waits(victim) and self.clock.now() < end:
                    continue
                raise Unavailable(
                    f"{victim.name} would have to make room for {model.name}, and is in use",
                    retry_after=victim.loaded.service.metrics.mean_seconds if victim.loaded is not None else 1.0,
                )
            log.info("%s was unloaded to make room for %s", victim.name, model.name)

    async def measure_first(self) -> None:
        """Measure the model that was loaded before anybody asked what it takes."""
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
        """The loaded model that makes room for another: an idle one before others, then the one that was not used for
        longest; never a pinned one, nor one of a call that waits for another model."""
        found = [
            (loaded.idle, -loaded.used, model)
            for model, loaded in self._registry.loaded()
            if not model.pinned and not self._leases.waits(model)
        ]
        return max(found, key=lambda one: one[:2])[2] if found else None


def _mapped(config: Config, fit: Fit | None) -> Config:
    """The options of a model that is measured: whether its experts stay in their file is known then."""
    if fit is None or not fit.mapped:
        return config
    return msgspec.structs.replace(config, experts="mapped")  # whatever memory there is beyond what models may take


async def _flush(service: Service, seconds: float) -> None:
    """Store its KV, as far as that can be done in time."""
    with contextlib.suppress(CairnError, TimeoutError):
        await asyncio.wait_for(service.flush(), seconds)


async def to_end(work: Coroutine[Any, Any, None]) -> None:
    """Do the work to its end, even where the caller is cancelled meanwhile; that is raised afterwards."""
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
    """Bytes as a person reads them."""
    return f"{size / GB:.2f} GB"


def _end_first(launching: asyncio.Future[First]) -> None:
    """A worker that nobody waits for any more."""
    if not launching.cancelled() and launching.exception() is None:
        launching.result().end()


def _untouched(model: ServedModel) -> int:
    """Bytes that a loaded model may take still: its pool holds no memory before it is used."""
    loaded = model.loaded
    if loaded is None or (pid := loaded.service.stats().worker_pid) is None:
        return 0
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, model.held - pages * 4096)
