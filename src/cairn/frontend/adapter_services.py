"""The adapters of one model: loading them, and the services that answer with them.

An adapted model is a `Service` of its own to everything above: it has its own name, its own identity and its own KV. It
shares the worker, the tokenizer and the queue with its base.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.resolve import ADAPTER_NAME, ADAPTER_RULE, MOST_ADAPTERS
from cairn.frontend.service import Service
from cairn.kv.tiers.store import Standing
from cairn.types.errors import Conflict, InvalidRequest, NotFound, Unavailable
from cairn.types.model_spec import ModelSpec
from cairn.types.model_variant import adapted_identity, known_variant, variant
from cairn.types.request import MAX_APPLIED, MAX_SCALE, Adapters, Request
from cairn.types.stats import ImportedKv, Placed
from cairn.types.step import AdapterFacts
from cairn.worker import wire

MOST_VIEWS = 1024
"""Most combinations of adapters and scales that are remembered, those that were used last."""
UNLOAD_SECONDS = 30.0
"""Seconds that requests with an adapter may go on while it is unloaded; then they end."""
_SCALE = re.compile(r"-?[0-9]{1,3}(\.[0-9]{1,9})?")


class ServedAdapter:
    """An adapter that clients can name."""

    __slots__ = ("facts", "id", "leaving", "name", "path", "scale")

    def __init__(self, id: int, name: str, path: str, facts: AdapterFacts) -> None:
        self.id, self.name, self.path, self.facts = id, name, path, facts
        self.scale = 0.0
        """Its scale in requests that name the base alone."""
        self.leaving = False
        """Whether it is being unloaded and takes no new requests."""

    @property
    def digest(self) -> bytes:
        """The digest of its numbers."""
        return self.facts.digest


class ServedAdapters:
    """The adapters of one loaded model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._by_name: dict[str, ServedAdapter] = {}
        self._views: dict[bytes, AdaptedService] = {}
        self._changing = asyncio.Lock()
        self._next = 0
        self.on_view: Callable[[Service], None] = lambda view: None
        """Called with every new adapted service."""
        for name, path, facts in service.attached:
            self._add(name, path, facts)

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(tuple(self._by_name.values()))

    @property
    def known(self) -> frozenset[str]:
        """Names of all adapters."""
        return frozenset(self._by_name)

    @property
    def views(self) -> tuple[AdaptedService, ...]:
        """The adapted services that were used last, those of unloaded adapters among them."""
        return tuple(self._views.values())

    def names(self) -> list[str]:
        """Return the names of the adapted models, `base:adapter`."""
        return [f"{self._service.name}:{one.name}" for one in self]

    def of(self, identity: bytes) -> AdaptedService | None:
        """Return the adapted service with this identity, or None."""
        view = self._views.get(identity)
        if view is None and (adapters := self._recorded(identity)) and self.is_loaded(adapters):
            self.adapted(adapters)
        return self._views.get(identity)

    def storing(self, identity: bytes) -> AdaptedService | None:
        """Return a service for the KV that was computed as the model with this identity, or None.

        Its adapters need not be loaded any more: then it answers no requests.
        """
        if (view := self.of(identity)) is None and (adapters := self._recorded(identity)):
            return AdaptedService(self._service, adapters, self._name_of(adapters), self.is_loaded)
        return view

    def _recorded(self, identity: bytes) -> Adapters:
        """Return the adapters of this model's variant with this identity; none if there is no such variant."""
        found = known_variant(identity)
        return found.adapters if found is not None and found.base == self._service.spec.identity else ()

    def named(self, name: str) -> Service | None:
        """Return the service that a client's name means, or None.

        It is an adapter's own name, or `base:adapter`. Several are joined as in `base:first+second@0.5`, each with its
        scale if that is not 1. Raise InvalidRequest for more than `MAX_APPLIED`.
        """
        base, colon, last = name.removesuffix(":latest").rpartition(":")
        parts = [one.partition("@") for one in last.split("+", MAX_APPLIED)]
        found = [self._by_name.get(part) for part, _, _ in parts]
        if found[0] is None or (colon and base not in self._service.names):
            return None
        scales: dict[int, float] = {}
        for adapter, (part, at, scale) in zip(found, parts, strict=True):
            if adapter is None or (at and not _SCALE.fullmatch(scale)) or adapter.id in scales:
                raise InvalidRequest(
                    f"{part[:128]} is no adapter of {self._service.name}, or its scale is no number; a model's name "
                    f"ends in ADAPTER or ADAPTER@SCALE, at most {MAX_APPLIED} of them joined by +",
                    field="model",
                )
            scales[adapter.id] = float(scale) if at else 1.0
        return self.scaled(scales, "model")

    def usual(self) -> Service:
        """Return the service for requests that name only the base: with the scales of `set_scales`."""
        return self.adapted(tuple((one.digest, one.scale) for one in self if one.scale and not one.leaving))

    def scaled(self, scales: dict[int, float], field: str) -> Service:
        """Return the service with these scales by id; other adapters do not count. Raise InvalidRequest."""
        known = {one.id: one for one in self}
        _check_scales(scales, known, field)
        return self.adapted(tuple((known[id].digest, scale) for id, scale in sorted(scales.items()) if scale))

    def set_scales(self, scales: dict[int, float]) -> None:
        """Set the scales of requests that name the base alone; adapters that are not named get 0."""
        known = {one.id: one for one in self}
        _check_scales(scales, known, "scale")
        for one in self:
            one.scale = scales.get(one.id, 0.0)

    def adapted(self, adapters: Adapters) -> Service:
        """Return the service of these adapters; the base itself for none."""
        if not adapters:
            return self._service
        view = AdaptedService(self._service, adapters, self._name_of(adapters), self.is_loaded)
        identity = view.spec.identity
        known = self._views.pop(identity, view)
        self._views[identity] = known
        while len(self._views) > MOST_VIEWS:  # scales are any numbers, so clients may name combinations without end
            del self._views[next(iter(self._views))]
        if known is view:
            self.on_view(view)
        return known

    def is_loaded(self, adapters: Adapters) -> bool:
        """Return whether all of these adapters take requests."""
        there = {one.digest for one in self if not one.leaving}
        return all(digest in there for digest, _ in adapters)

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Load an adapter while requests run. The same one a second time changes nothing.

        Raise InvalidRequest for a name or file that cannot be used, Conflict for a name that another adapter has.
        """
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequest(f"an adapter's name has {ADAPTER_RULE}", field="lora_name")
        if name in self._service.names:
            raise InvalidRequest(f"{name} is the model's own name", field="lora_name")
        async with self._changing:
            known = self._by_name.get(name)
            if known is None and len(self._by_name) >= MOST_ADAPTERS:
                raise Conflict(f"{MOST_ADAPTERS} adapters are loaded, the limit; unload one", field="lora_name")
            facts = await self._service.attach(Path(path))
            if known is None:
                return self._add(name, path, facts)
            if facts.digest != known.digest:
                if all(one.digest != facts.digest for one in self):
                    await self._service.detach(facts.digest)
                raise Conflict(f"{name} is another adapter; unload it first", field="lora_name")
            return known

    async def unload(self, name: str, grace: float = UNLOAD_SECONDS) -> None:
        """Unload an adapter: it takes no new requests, and those that run may go on for `grace` seconds.

        If another name has the same adapter, only the name is forgotten: all requests with the adapter go on.
        Raise NotFound for an unknown name.
        """
        async with self._changing:
            adapter = self._by_name.get(name)
            if adapter is None:
                known = ", ".join(one.name for one in self) or "none"
                raise NotFound(f"there is no adapter {name[:128]!r}; loaded are: {known}", field="lora_name")
            if any(one.digest == adapter.digest and one is not adapter for one in self):
                del self._by_name[name]
                self._forget_views(adapter.digest)
                return
            adapter.leaving = True
            try:
                await self._service.drain_adapter(adapter.digest, grace, f"the adapter {name} is unloaded")
            except BaseException:
                adapter.leaving = False
                raise
            del self._by_name[name]
            await self._service.detach(adapter.digest)

    def _forget_views(self, digest: bytes) -> None:
        """Forget the services with this adapter, which lost the name that they may have; new ones have another."""
        for identity, view in [*self._views.items()]:
            if any(one == digest for one, _ in view.applied):
                del self._views[identity]

    def _add(self, name: str, path: str, facts: AdapterFacts) -> ServedAdapter:
        found = self._by_name[name] = ServedAdapter(self._next, name, path, facts)
        self._next += 1
        self.adapted(((facts.digest, 1.0),))  # so that an agent of an earlier run finds it by its identity
        return found

    def _name_of(self, adapters: Adapters) -> str:
        names = {one.digest: one.name for one in self}
        named = [(names.get(digest, digest.hex()[:8]), scale) for digest, scale in adapters]
        parts = [name + ("" if scale == 1 else f"@{scale:g}") for name, scale in named]
        return f"{self._service.name}:{'+'.join(parts)}"


def _check_scales(scales: dict[int, float], known: dict[int, ServedAdapter], field: str) -> None:
    for id, scale in scales.items():
        if id not in known:
            ids = ", ".join(map(str, known)) or "none"
            raise InvalidRequest(f"{field}: there is no adapter with the id {id}; loaded are: {ids}", field=field)
        if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
            raise InvalidRequest(f"{field}: a scale is from -{MAX_SCALE:g} to {MAX_SCALE:g}", field=field)
    if sum(1 for scale in scales.values() if scale) > MAX_APPLIED:
        raise InvalidRequest(f"{field}: a request goes through at most {MAX_APPLIED} adapters", field=field)


class AdaptedService(Service):
    """A model with adapters. Everything but names, identity, requests and KV is the base's."""

    base: Service
    applied: Adapters
    is_loaded: Callable[[Adapters], bool]
    """`ServedAdapters.is_loaded`."""

    def __init__(self, base: Service, adapters: Adapters, name: str, is_loaded: Callable[[Adapters], bool]) -> None:
        # Service.__init__ is not called: every attribute that is not set here is read from the base.
        last = name.removeprefix(f"{base.name}:")
        names = base.names | {name, last, *(f"{one}:{last}" for one in base.names)}
        own = {"base": base, "applied": adapters, "is_loaded": is_loaded, "name": name, "names": names}
        vars(self).update(own, variant=variant(base.spec.identity, adapters))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["base"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.base, name, value)

    @property
    def spec(self) -> ModelSpec:  # type: ignore[override]
        """The base's spec with an identity of its own."""
        return msgspec.structs.replace(self.base.spec, identity=self.variant.identity)

    @property
    def info(self) -> wire.Info:  # type: ignore[override]
        """The base's description with an identity of its own."""
        base = self.base.info
        return msgspec.structs.replace(base, identity=adapted_identity(base.identity, self.applied))

    def salt(self, salt: bytes) -> bytes:
        """Return the salt of a tenant's KV with these adapters."""
        return self.variant.salt(salt)

    def make_requests(self, *given: Any, **options: Any) -> tuple[Request, ...]:
        """Make requests as the base does, with the adapters. Raise Unavailable if one of them was unloaded."""
        if not self.is_loaded(self.applied):
            raise Unavailable(f"an adapter of {self.name} was unloaded; load it again", retry_after=5.0)
        made = self.base.make_requests(*given, **options)
        return tuple(msgspec.structs.replace(one, adapters=self.applied) for one in made)

    async def pin(self, owner: str, tokens: Sequence[int], salt: bytes = b"") -> None:
        """See `Service.pin`."""
        await self.base.pin(owner, tokens, self.salt(salt))

    async def mark(self, tokens: Sequence[int], salt: bytes, standing: Standing, *, keep: int = 0) -> None:
        """See `Service.mark`."""
        await self.base.mark(tokens, self.salt(salt), standing, keep=keep)

    async def prefetch(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """See `Service.prefetch`."""
        return await self.base.prefetch(tokens, self.salt(salt))

    async def evict(self, tokens: Sequence[int], salt: bytes = b"", *, keep: int = 0, disk: bool = False) -> Placed:
        """See `Service.evict`."""
        return await self.base.evict(tokens, self.salt(salt), keep=keep, disk=disk)

    async def kv_paths(self, tokens: Sequence[int], salt: bytes = b"") -> list[Path]:
        """See `Service.kv_paths`."""
        return await self.base.kv_paths(tokens, self.salt(salt))

    async def import_kv(self, path: Path, tokens: Sequence[int], salt: bytes = b"") -> ImportedKv:
        """See `Service.import_kv`."""
        return await self.base.import_kv(path, tokens, self.salt(salt))

    async def where(self, tokens: Sequence[int], salt: bytes = b"") -> Placed:
        """See `Service.where`."""
        return await self.base.where(tokens, self.salt(salt))
