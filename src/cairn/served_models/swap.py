"""Replacement of a served model by another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.config import Config
from cairn.config.values import ModelOptions
from cairn.frontend.service import Service
from cairn.served_models.fit import Fit
from cairn.served_models.loader import ModelLoader, shown_gb, to_end
from cairn.served_models.registry import ModelRegistry
from cairn.served_models.served_model import LoadedModel, ServedModel, ends_of, locate
from cairn.types.errors import (
    CairnError,
    ConfigError,
    Conflict,
    InvalidRequest,
    ModelError,
    ModelFileError,
    NoWorker,
    UnknownModel,
)

log = logging.getLogger(__name__)


class ModelSwap:
    """One swap. `to` is a path, a hub id, or the name of another model of the server that is not loaded."""

    def __init__(self, registry: ModelRegistry, loader: ModelLoader, model: ServedModel, to: str, grace: float) -> None:
        """Check the swap. Called with the loader's turn held.

        Raise Conflict or InvalidRequest if `to` cannot take the model's place.
        """
        self._registry, self._loader = registry, loader
        self._model, self._to, self._grace = model, to, grace
        self._seconds = 0.0
        """Seconds that the new model's load has taken so far."""
        self._config = self._new_config()

    async def run(self, later: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Load the new model beside the old one if both fit in memory, else after it.

        On any failure the old one answers as before. `later` runs work that is not waited for.
        """
        model, config = self._model, self._config
        place = await self._locate()
        old = model.loaded
        if old is not None and place == model.place and _alike(config, model.config):
            raise InvalidRequest(f"{self._to} is what {model.name} is already", field="to")
        fit = None if old is None else await self._fit_beside(place)
        if old is not None and fit is None:
            await self._swap_after(old, place)
            return
        if old is None and self._loader.bounded:
            fit = await self._loader.make_room(model, config, place, evict=False)
        service = await self._prepare(place, fit)
        await self._load(service, place, fit)
        if old is not None:
            later(self._loader.retire(old, self._grace))

    def _new_config(self) -> Config:
        """Return the new model's configuration: its own options if the server has some, else the old model's.

        The names are the old model's.
        """
        model, to = self._model, self._to
        named = {"served_name": model.name, "alias": model.config.alias, "models": ()}
        other = self._registry.get(to)
        if other is model and not model.swaps:
            raise InvalidRequest(f"{to} is what {model.name} is already", field="to")
        if other is not None and other is not model:  # after a swap, its own reference is another model again
            if to == other.own_config.model != other.config.model:  # those files, and not what was swapped in for them
                return msgspec.structs.replace(other.own_config, **named)
            if other.loaded is not None:
                raise Conflict(f"{to} is loaded already, under its own name; unload it first", field="to")
            return msgspec.structs.replace(other.config, **named)
        if to in {model.name, *model.config.alias, *ends_of(model.own_config.model)}:  # swapped back
            return msgspec.structs.replace(model.own_config, **named)
        return msgspec.structs.replace(model.config, model=to, tokenizer=None, adapters=(), **named)

    async def _fit_beside(self, place: Path) -> Fit | None:
        """Return what the new model takes if there is memory for both, else None.

        Two models of the same files need one KV folder, so they cannot be loaded together. A server with one model has
        not measured it, so nothing is known of the room beside it.
        """
        registry, loader = self._registry, self._loader
        if not registry.several or place == self._model.place:
            return None
        if sum(1 for _ in registry.loaded()) >= registry.config.max_loaded:
            return None
        await loader.measure_first()
        left = loader.left()
        with _bad_files_as_invalid_request():
            fit = await loader.measure(self._config, place, left)
        return fit if fit.most <= left else None

    async def _locate(self) -> Path:
        """Return the place of the new model's files. Raise UnknownModel if there are none."""
        try:
            model = ServedModel(self._config, ModelOptions(model=self._config.model))
            return await asyncio.to_thread(locate, model)
        except ModelError as error:
            raise UnknownModel(f"to: {error}", field="to") from None

    async def _swap_after(self, old: LoadedModel, place: Path) -> None:
        """Unload the old model, then load the new one.

        The new model's process is started first and checks its files: a model that cannot be served, or would not fit
        even alone, is refused while the old one still answers.
        """
        model, loader = self._model, self._loader
        room = loader.left() + (old.fit.held if old.fit is not None else 0)
        with _bad_files_as_invalid_request():
            fit = await loader.measure(self._config, place, room) if loader.bounded else None
        if fit is not None and fit.most > room:
            raise InvalidRequest(
                f"to: {self._to} needs {shown_gb(fit.most)} of memory, and {shown_gb(room)} are available without "
                f"{model.name}",
                field="to",
            )
        service = await self._prepare(place, fit)
        try:
            await loader.unload(
                model, self._grace, force=True, why=f"{model.name} is being swapped for another model; ask again"
            )
            await self._load(service, place, fit)
        except BaseException:
            await to_end(self._roll_back(service, old))
            raise

    async def _roll_back(self, service: Service, old: LoadedModel) -> None:
        """Close the new service, and load the old model again if it is gone."""
        model, loader, fit = self._model, self._loader, old.fit
        await service.close()
        if model.loaded is old or loader.closed:
            return
        try:
            place = await asyncio.to_thread(locate, model)
            loader.take(model, await loader.start(model.config, model.part, fit=fit, place=place), fit)
        except Exception as error:
            loader.failed(model, error)

    async def _prepare(self, place: Path, fit: Fit | None) -> Service:
        """Return a service of the new model under the old one's name, with checked files that are not loaded yet.

        Raise InvalidRequest for files that cannot be served.
        """
        began = self._loader.clock.now()
        with _unexpected_as_model_error(self._to), _bad_files_as_invalid_request():
            service = await self._loader.prepare(self._config, self._model.part, fit=fit, place=place)
        self._seconds = self._loader.clock.now() - began
        return service

    async def _load(self, service: Service, place: Path, fit: Fit | None) -> None:
        """Load the new model and let it answer."""
        model, began = self._model, self._loader.clock.now()
        with _unexpected_as_model_error(self._to), _bad_files_as_invalid_request(in_load=True):
            await service.load()
        model.config, model.reference, model.place = self._config, self._to, place
        model.load_seconds = self._seconds + self._loader.clock.now() - began
        model.swaps += 1
        self._loader.loaded(model, service, fit)
        log.info("%s is now %s (%.1f s)", model.name, self._to, model.load_seconds)


@contextlib.contextmanager
def _unexpected_as_model_error(to: str) -> Iterator[None]:
    """Raise unexpected errors as ModelError."""
    try:
        yield
    except CairnError:
        raise
    except Exception as error:
        raise ModelError(f"{to} could not be loaded ({type(error).__name__})") from error


@contextlib.contextmanager
def _bad_files_as_invalid_request(*, in_load: bool = False) -> Iterator[None]:
    """Raise errors of model files as InvalidRequest: the caller named those files.

    In a load only ModelFileError means the files; other failures are the machine's.
    """
    try:
        yield
    except NoWorker:
        raise
    except (ModelError, ConfigError) as error:
        if in_load and not isinstance(error, ModelFileError):
            raise
        raise InvalidRequest(f"to: {error}", field="to") from error


def _alike(one: Config, other: Config) -> bool:
    """Return whether two configurations load a model in the same way, wherever its files are and whatever its name."""
    same: dict[str, Any] = {"model": "", "served_name": None, "alias": (), "models": ()}
    return msgspec.structs.replace(one, **same) == msgspec.structs.replace(other, **same)
